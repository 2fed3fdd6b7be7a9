"""The state of an engine: its channels, their timers, the queues of what to send, and the counters."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import NO_QUEUE, ChannelTable, Ids, Ranges, TokenBucket
from muxkit.protocols.e3x.engine.channel import (
    Assembly,
    EngineChannel,
    Incoming,
    Outgoing,
    Piece,
    Reassembly,
    Tombstone,
)
from muxkit.protocols.e3x.engine.congestion import Congestion
from muxkit.protocols.e3x.engine.events import Broken, Cause, Closed, Event, Fault, Faulted
from muxkit.protocols.e3x.packets import ID_MOST

if TYPE_CHECKING:
    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.e3x.config import Config

LINGER = 10.0  # s, at least, that a tombstone is kept, to answer what the peer sends again
ERR_REPEATS = 2  # times that an err is sent again, a second apart; not in the document
ERR_PAUSE = 1.0  # s
OVERHEAD = 256  # bytes that a waiting packet counts beside its body
USED_RANGES = 1024  # gaps in the peer's used ids that are remembered


class State:
    """The state that several parts of the engine change."""

    def __init__(self, odd: bool, config: Config, limits: Limits, observer: Observer | None) -> None:
        self.odd = odd
        self.config = config
        self.limits = limits
        self.observer = observer
        self.now = 0.0
        self.packet = config.packet
        self.linger = max(LINGER, config.timeout)  # the peer sends again for as long
        first = 1 if odd else 2
        self.table: ChannelTable[EngineChannel] = ChannelTable(limits, Ids(first, ID_MOST, step=2))
        self.tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self.used = UsedIds()
        self.unopened: OrderedDict[int, EngineChannel] = OrderedDict()  # the first packet was not received yet
        self.congestion = Congestion(config.packet, is_on=config.congestion)
        self.reassembly = Reassembly(limits)
        self.refusals = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.events: list[Event] = []
        self.faults: Counter[Fault] = Counter()
        self.counters: Counter[str] = Counter()
        self._reported: set[Fault] = set()
        # Queues of what to send
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
        """Packets of one channel that may wait for the application."""
        return max(1, min(self.config.window, self.limits.channel_bytes // self.packet))

    @property
    def room(self) -> int:
        """Bytes of memory for one more packet that waits."""
        return self.limits.connection_bytes - self.held - OVERHEAD * self.waiting

    @property
    def room_next(self) -> int:
        """Bytes of memory for the packet that is next in order on its channel: there is always some."""
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
        """Remove a channel if both sides have ended it and all packets are acked."""
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
        """Break a channel; with `tell` the peer is sent an err."""
        if tell:
            self.break_silently(channel, text)
        else:
            self._remove(channel, Tombstone(self.now + self.linger))
        if channel.announced or channel.ours:
            self.events.append(Broken(channel, cause, text))

    def break_silently(self, channel: EngineChannel, err: str) -> None:
        """Break a channel and send the peer an err, without an event."""
        self._remove(channel, Tombstone(self.now + self.linger, err=err, repeats=ERR_REPEATS))
        self.errs[channel.id] = err
        self._push_timer(self.now + ERR_PAUSE, channel.id)

    def drop_unopened(self, channel: EngineChannel) -> None:
        """Remove a channel whose first packet was not received; without a tombstone, because that may still arrive."""
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
            self._add_tombstone(channel.id, tombstone)
        if self.observer is not None:
            self.observer.state(f"channel {channel.id}", "gone")

    def _add_tombstone(self, id: int, tombstone: Tombstone) -> None:
        if not self.is_ours(id):
            self.used.add(id)
        self.tombstones[id] = tombstone
        self.tombstones.move_to_end(id)
        while len(self.tombstones) > self.limits.tombstones or next(iter(self.tombstones.values())).until <= self.now:
            forgotten, _ = self.tombstones.popitem(last=False)
            self.errs.pop(forgotten, None)  # they may be unsent, if the link takes nothing
            self.answers.pop(forgotten, None)

    def tombstone(self, id: int) -> Tombstone | None:
        """Return the tombstone of a channel, unless it has expired."""
        tombstone = self.tombstones.get(id)
        if tombstone is None or self.now < tombstone.until:
            return tombstone
        del self.tombstones[id]
        return None

    # --- time

    def arm(self, channel: EngineChannel) -> None:
        """Set the timer of a channel to when something is due on it. A timer that fires early costs one check."""
        due = channel.due(self.config.timeout)
        if due is not None and due < channel.timer_at:
            channel.timer_at = due
            self._push_timer(due, channel.id)

    def _push_timer(self, when: float, id: int) -> None:
        heapq.heappush(self._timers, (when, id))

    def next_timer(self) -> float | None:
        """Return when the next timer fires."""
        return self._timers[0][0] if self._timers else None

    def due_channels(self, now: float) -> list[EngineChannel]:
        """Return the channels whose timer has fired, which must be armed again; also repeat errs that are due."""
        due = []
        while self._timers and self._timers[0][0] <= now:
            when, id = heapq.heappop(self._timers)
            channel = self.table.get(id)
            if channel is None:
                self._repeat_err(id)
            elif channel.timer_at == when:
                channel.timer_at = float("inf")
                due.append(channel)
        return due

    def _repeat_err(self, id: int) -> None:
        tombstone = self.tombstone(id)
        if tombstone is not None and tombstone.err is not None and tombstone.repeats > 0:
            tombstone.repeats -= 1
            self.errs[id] = tombstone.err
            self._push_timer(self.now + ERR_PAUSE, id)

    # --- queues of what to send

    def queue_up(self, channel: EngineChannel) -> None:
        """Put a channel in the line of those with something to send."""
        if not channel.in_line and not channel.gone:
            channel.in_line = True
            self.line.append(channel)

    def owe_ack(self, channel: EngineChannel) -> None:
        """Queue an ack of a channel, if it is due now."""
        if channel.incoming is not None and channel.incoming.ack_now:
            self.acking[channel.id] = channel

    # --- events

    def fault(self, fault: Fault, text: str) -> None:
        """Count a fault; report the first of its kind until the events are taken."""
        self.faults[fault] += 1
        if fault is not Fault.DUPLICATE and fault not in self._reported:
            self._reported.add(fault)
            self.events.append(Faulted(fault, text))

    def take_events(self) -> list[Event]:
        """Take the events since the last call."""
        events, self.events = self.events, []
        self._reported.clear()
        return events


class UsedIds:
    """The ids that the peer has used; it may open each once, and openings may overtake each other."""

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
            # There are too many gaps: the ids in the lowest gap count as used from now on.
            _, self._floor = next(iter(self._ranges))
            self._ranges.discard_below(self._floor + 1)
            self.add(id)
