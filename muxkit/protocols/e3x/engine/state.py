"""What do the parts of an engine share? The channels, their timers, the queues to the network, and the counters."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import NO_QUEUE, ChannelTable, Ids, Ranges, TokenBucket
from muxkit.protocols.e3x.engine._channel_old import EngineChannel, Tombstone
from muxkit.protocols.e3x.engine.channel import Outgoing, Piece
from muxkit.protocols.e3x.engine.congestion import Congestion
from muxkit.protocols.e3x.engine.events import Broken, Cause, Closed, Event, Fault, Faulted
from muxkit.protocols.e3x.engine.receiving import Incoming
from muxkit.protocols.e3x.fragments import Assembly, Reassembly
from muxkit.protocols.e3x.packets import ID_MOST

if TYPE_CHECKING:
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.e3x.config import Config

LINGER = 10.0  # s, at least, that a channel which is gone is remembered, to answer what the peer sends again
ERR_REPEATS = 2  # times that an err is said again, a second apart; ours
ERR_PAUSE = 1.0  # s
OVERHEAD = 256  # bytes that a waiting packet costs beside its body
USED_RANGES = 1024  # holes in the peer's used ids that are remembered


class State:
    """Everything that more than one part of the engine changes."""

    def __init__(self, odd: bool, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.odd = odd
        self.config = config
        self.limits = limits
        self.observer = observer
        self.now = 0.0
        self.packet = config.packet
        self.linger = max(LINGER, config.timeout)  # the peer asks for as long as it does not give up
        first = 1 if odd else 2
        self.table: ChannelTable[EngineChannel] = ChannelTable(limits, Ids(first, ID_MOST, step=2))
        self.tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self.used = UsedIds()
        self.unopened: OrderedDict[int, EngineChannel] = (
            OrderedDict()
        )  # of the peer, whose first packet is not there yet
        self.congestion = Congestion(config.packet, is_on=config.congestion)
        self.reassembly = Reassembly(limits)
        self.refusals = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.events: list[Event] = []
        self.faults: Counter[Fault] = Counter()
        self.counters: Counter[str] = Counter()
        self._told: set[Fault] = set()
        # To the network
        self.errs: dict[int, str] = {}
        self.answers: dict[int, None] = {}  # ids of tombstones to answer from
        self.acking: dict[int, EngineChannel] = {}
        self.resends: deque[tuple[EngineChannel, Piece]] = deque()
        self.line: deque[EngineChannel] = deque()
        self.watching: dict[int, EngineChannel] = {}
        self.held = 0  # bytes received and not processed
        self.waiting = 0  # packets received and not processed
        self.unsent = 0  # bytes queued, on all channels
        self._timers: list[tuple[float, int]] = []

    # --- channels

    @property
    def window(self) -> int:
        """Packets that one channel may keep waiting."""
        return max(1, min(self.config.window, self.limits.channel_bytes // self.packet))

    @property
    def room(self) -> int:
        """Bytes of one more packet that may wait."""
        return self.limits.connection_bytes - self.held - OVERHEAD * self.waiting

    @property
    def room_next(self) -> int:
        """The same for the packet that is next in order on its channel: there is always some."""
        return max(self.room, self.limits.channel_floor, self.config.packet)

    def new_channel(self, id: int, type: str, *, ours: bool, reliable: bool) -> EngineChannel:
        channel = EngineChannel(id, type, ours)
        if reliable:
            most_flying = self.limits.channel_bytes
            channel.outgoing = Outgoing(self.config.first_window, self.config.most_window, most_flying)
            channel.incoming = Incoming(self.window)
            channel.assembly = Assembly(self.reassembly)
        channel.heard_at = self.now
        return channel

    def is_ours(self, id: int) -> bool:
        return (id % 2 == 1) == self.odd

    def close_if_over(self, channel: EngineChannel) -> None:
        """Nothing is left to be said on it in either direction."""
        if channel.gone or not (channel.ended and channel.peer_ended):
            return
        incoming, outgoing = channel.incoming, channel.outgoing
        if incoming is None or outgoing is None:
            if not channel.datagrams:
                self._remove(channel, Tombstone(self.now + self.linger))
                self.events.append(Closed(channel))
        elif outgoing.acked == outgoing.next_seq - 1:
            owes_ack = incoming.owes_news
            self._remove(channel, Tombstone(self.now + self.linger, ack=incoming.processed))
            if owes_ack:
                self.answers[channel.id] = None
            self.events.append(Closed(channel))

    def break_channel(self, channel: EngineChannel, cause: Cause, text: str, *, tell: bool) -> None:
        """It is over before its end; with `tell` the peer hears of it."""
        if tell:
            self.forget(channel, text)
        else:
            self._remove(channel, Tombstone(self.now + self.linger))
        if channel.announced or channel.ours:
            self.events.append(Broken(channel, cause, text))

    def forget(self, channel: EngineChannel, err: str) -> None:
        """Break it and tell the peer, without a word to the application."""
        self._remove(channel, Tombstone(self.now + self.linger, err=err, repeats=ERR_REPEATS))
        self.errs[channel.id] = err
        self._push_timer(self.now + ERR_PAUSE, channel.id)

    def drop_unopened(self, channel: EngineChannel) -> None:
        """Its first packet never came, so it may still come: no tombstone."""
        self._remove(channel, None)

    def _remove(self, channel: EngineChannel, tombstone: Tombstone | None) -> None:
        self.table.remove(channel.id)
        self.unopened.pop(channel.id, None)
        self.acking.pop(channel.id, None)
        self.watching.pop(channel.id, None)
        channel.gone = True
        if channel.incoming is not None:
            self.held -= channel.incoming.bytes
            self.waiting -= channel.incoming.waiting
        if channel.outgoing is not None:
            self.unsent -= channel.outgoing.unsent
        self.unsent -= channel.queued
        channel.queued = 0
        channel.datagrams = NO_QUEUE
        if channel.assembly is not None:
            channel.assembly.drop()
        if tombstone is not None:
            tombstone.processed = 0 if channel.incoming is None else channel.incoming.processed
            self._bury(channel.id, tombstone)
        if self.observer is not None:
            self.observer.state(f"channel {channel.id}", "gone")

    def _bury(self, id: int, tombstone: Tombstone) -> None:
        if not self.is_ours(id):
            self.used.add(id)
        self.tombstones[id] = tombstone
        self.tombstones.move_to_end(id)
        while len(self.tombstones) > self.limits.tombstones or next(iter(self.tombstones.values())).until <= self.now:
            forgotten, _ = self.tombstones.popitem(last=False)
            self.errs.pop(forgotten, None)  # the network may take nothing for a while
            self.answers.pop(forgotten, None)

    def buried(self, id: int) -> Tombstone | None:
        tombstone = self.tombstones.get(id)
        if tombstone is None or self.now < tombstone.until:
            return tombstone
        del self.tombstones[id]
        return None

    # --- time

    def arm(self, channel: EngineChannel) -> None:
        """Look at the channel when something is due on it. A timer that turns out early costs one look."""
        due = channel.due(self.config.timeout)
        if due is not None and due < channel.timer_at:
            channel.timer_at = due
            self._push_timer(due, channel.id)

    def _push_timer(self, when: float, id: int) -> None:
        heapq.heappush(self._timers, (when, id))

    def next_timer(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def due_channels(self, now: float) -> list[EngineChannel]:
        """The channels whose timer has come; they must be armed again. Says errs again on the way."""
        due = []
        while self._timers and self._timers[0][0] <= now:
            when, id = heapq.heappop(self._timers)
            channel = self.table.get(id)
            if channel is None:
                self._say_again(id)
            elif channel.timer_at == when:
                channel.timer_at = float("inf")
                due.append(channel)
        return due

    def _say_again(self, id: int) -> None:
        tombstone = self.buried(id)
        if tombstone is not None and tombstone.err is not None and tombstone.repeats > 0:
            tombstone.repeats -= 1
            self.errs[id] = tombstone.err
            self._push_timer(self.now + ERR_PAUSE, id)

    # --- queues to the network

    def queue_up(self, channel: EngineChannel) -> None:
        """It may have something to send."""
        if not channel.in_line and not channel.gone:
            channel.in_line = True
            self.line.append(channel)

    def owe_ack(self, channel: EngineChannel) -> None:
        if channel.incoming is not None and channel.incoming.ack_now:
            self.acking[channel.id] = channel

    # --- what went wrong

    def fault(self, fault: Fault, text: str) -> None:
        """Count it, and tell the first of its kind until the events are taken."""
        self.faults[fault] += 1
        if fault is not Fault.DUPLICATE and fault not in self._told:
            self._told.add(fault)
            self.events.append(Faulted(fault, text))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        self._told.clear()
        return events


class UsedIds:
    """Ids that the peer has used: it may open each one once, though openings may overtake each other."""

    __slots__ = ("_floor", "_ranges")

    def __init__(self) -> None:
        self._ranges = Ranges(USED_RANGES)
        self._floor = 0

    def __contains__(self, id: int) -> bool:
        index = (id + 1) // 2  # 1, 3, 5 … and 2, 4, 6 … both become 1, 2, 3 …
        return index <= self._floor or index in self._ranges

    def add(self, id: int) -> None:
        index = (id + 1) // 2
        if index <= self._floor:
            return
        try:
            self._ranges.add(index)
        except RemoteProtocolError:
            # Ids must rise: of one that leaves too many out, the lowest count as used from here on.
            _, self._floor = next(iter(self._ranges))
            self._ranges.discard_below(self._floor + 1)
            self.add(id)
