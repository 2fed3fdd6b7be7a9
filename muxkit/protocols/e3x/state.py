"""The channels of one engine, what is kept about each, and how they live: the theory of operation of e3x.

**A channel** is one `EngineChannel` in the table, with a sender and a receiver of one of two kinds: reliable ones
number their packets and repair losses (`ReliableSender`, `ReliableReceiver`), unreliable ones just send. Both sides use
the same ids, of which the connector opens the odd ones and the listener the even ones. An id is used only once.

    unopened   a later packet came before the first: a miss asks for that one. It ends after `Limits.handshake`,
               without a tombstone, because the first packet may still come             -> open, gone
    open       the peer's channel waits in the backlog until it is `taken`; both directions carry messages
                                                                                        -> closing, gone
    closing    the application receives no more: what comes is discarded (see below)    -> gone
    gone       not in the table any more. A tombstone answers what the peer sends again, for at least 10 s

**How a channel ends.** It is over in order (`Closed`) when both sides have sent their end and all packets are acked; an
unreliable one when both ends were sent, or when ours was sent and nothing came for `linger` seconds. It is broken
(`Broken`) by an err of the peer, by silence while packets wait for an ack, by pieces of a message that don't fit
together, or when every seq was used. This side breaks it with `err`, which reports no event, because the caller knows.

**A channel that the application has closed** goes on until its end. The document has no way to say "stop sending", only
`err`, which drops everything in both directions. So, and this is not in the document:

- An err is sent only after all packets of this side are confirmed: before, it could cost the peer what it has not
  processed yet.
- Then an end by the peer closes the channel in order, and any other unread packet is answered with an err.
- A peer that sends nothing has `linger` seconds for its end.
- A peer that goes on sending and processes nothing for `CLOSE_TIMEOUT` would wait for this side as this side waits for
  it; the channel breaks.

**What holds at all times.** Each packet is checked completely before it changes anything, and it ends at most its own
channel: an address can be forged, so a bad packet is dropped and counted (`Fault`). `held`, `waiting` and `unsent` are
the sums over all live channels. A channel is in `line` at most once. Queued errs, answers and acks are one for each
channel, so what is owed to a peer doesn't grow with what it asks.

**Time** comes with each packet and each deadline. A command may follow a long silence, so commands read the clock that
the session gives to the engine (`update_time`). Timers of channels are in one heap: a channel without one costs
nothing while time passes.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from typing import Final

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import ChannelTable, Clock, Ids, Ranges, Reason, ReceiveBudget, StartPace, TokenBucket
from muxkit.core.events import Silent
from muxkit.core.halves import Receiver, Sender
from muxkit.protocols.e3x.assembly import Reassembly
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.congestion import Congestion
from muxkit.protocols.e3x.events import Broken, Cause, Closed, Event, Fault, Faulted
from muxkit.protocols.e3x.packets import ID_MOST, RESERVED, TYPE_MOST, Packet, join_packet, quoted
from muxkit.protocols.e3x.silence import Silence

NEVER: Final = float("inf")
LINGER: Final = 10.0  # s, at least, that a tombstone is kept, to answer what the peer sends again
ERR_REPEATS: Final = 2  # times that an err is sent again, a second apart; not in the document
ERR_PAUSE: Final = 1.0  # s
ERRS_PER_SECOND: Final = 4000  # on packet links: more could overflow the peer's socket buffer, and no ack would tell
ERRS_AT_ONCE: Final = 64
ERR_MOST: Final = 512  # bytes of an err that is sent
ERR_HEAD: Final = len(b'{"c":4294967295,"err":}') + 2  # bytes of its packet beside the text
OVERHEAD: Final = 256  # bytes that a waiting packet counts beside its body
CLOSE_TIMEOUT: Final = 5.0  # s
CLOSED: Final = "closed"  # the err of a closed channel
NO_REASON: Final = "given up"  # the err of a channel that is given up without a reason: an empty one may be overlooked
USED_RANGES: Final = 1024  # gaps in the peer's used ids that are remembered


@attrs.define(eq=False)
class Piece:
    """A packet that this side sends, from `send` until it is acked."""

    seq: int
    body: bytes
    type: str | None
    end: bool
    frag: int
    times: int = 0  # times that it was sent
    sent_at: float = 0.0  # when it was sent last
    asks: bool = False  # it asked for an ack
    is_named: bool = False  # a miss listed it
    is_queued: bool = False  # it waits to be sent again


class EngineChannel:
    """A channel of an engine: its two halves, and what they have in common. For others it is read-only."""

    sender: EngineSender
    receiver: EngineReceiver

    def __init__(self, id: int, type: str, *, ours: bool, is_reliable: bool, now: float) -> None:
        self.id: int = id
        self.type: str = type
        self.ours: bool = ours
        """True if this side opened it."""
        self.is_reliable: bool = is_reliable
        self.is_reserved: bool = type in RESERVED
        """True if it is a channel of the session's own, such as a ping: see `liveness`."""
        self.announced: bool = False
        """True once the application knows the peer's channel, or the peer knows this side's channel."""
        self.taken: bool = ours
        """True once the application has accepted it."""
        self.closing: bool = False
        """True once the application receives nothing more on it."""
        self.gone: bool = False
        self.in_line: bool = False
        """True while it is in the line of channels with something to send."""
        self.heard_at: float = now
        """When a packet was last received on it."""
        self.dies_at: float = NEVER
        """When it is removed in any case: it waits for its opening, or for an end that may be lost."""
        self.timer_at: float = NEVER
        """When its timer fires."""

    def due(self, timeout: float) -> float:
        """Return when the engine must act on it next."""
        return min(self.dies_at, self.receiver.ack_at, self.sender.due(timeout))

    def remains(self) -> EngineChannel:
        """Return what the halves of a channel that is gone still ask of it: the same facts, and no halves.

        The halves get it in the place of the channel, or all three would wait for a garbage collection.
        """
        left = EngineChannel(self.id, self.type, ours=self.ours, is_reliable=self.is_reliable, now=self.heard_at)
        left.announced, left.taken, left.closing, left.gone = self.announced, self.taken, self.closing, True
        return left


class EngineHalf:
    """What each half of a channel has: its channel, and what it needs of the state."""

    def __init__(self, state: State, channel: EngineChannel) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.channel: EngineChannel = channel
        self.ended: bool = False
        """True once nothing more follows in this direction."""

    @property
    def label(self) -> str:
        return f"channel {self.channel.id}"


class EngineSender(EngineHalf, Sender):
    """What both kinds of sending halves do in the same way."""

    def send(self, message: bytes) -> None:
        """Queue a message."""
        self._check_open()
        if not self.has_room(len(message)):
            limits = self.state.limits
            raise LocalProtocolError(
                f"channel {self.channel.id}: {len(message)} bytes beside those queued, "
                f"against Limits(channel_first={limits.channel_first}, outbox={limits.outbox})"
            )
        self.queue(message, end=False, is_message=True)
        self.state.messages_sent += 1

    def finish(self, payload: bytes = b"") -> None:
        """End this side behind what is queued; `payload` is a last message. Harmless when the channel is gone."""
        if self.channel.gone:
            return
        self._check_open()
        self.state.update_time()
        self.queue(payload, end=True, is_message=bool(payload))
        self.state.messages_sent += bool(payload)

    def cancel(self, reason: Reason) -> None:
        """Break the channel: an err drops both directions."""
        self.state.give_up(self.channel, reason)

    @property
    @abstractmethod
    def quota(self) -> int:
        """Bytes that the next packet can carry: on an unreliable channel, the largest message."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """True if a new packet may be sent now."""

    @property
    @abstractmethod
    def is_written(self) -> bool:
        """True if everything that was queued was sent at least once."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if nothing of what was queued is left to send, or to be acked."""

    @property
    def awaits_ack(self) -> bool:
        """True while packets of a channel that lives are not acked."""
        return False

    @abstractmethod
    def due(self, timeout: float) -> float:
        """Return when the engine must act on this half next."""

    def report_if_writable(self) -> None:
        """Report `Writable` if a watched message has room now, or let it wait for the outbox."""

    @abstractmethod
    def write(self, now: float) -> bytes:
        """Return the next new packet, which leaves now, after `is_ready` was True."""

    @abstractmethod
    def dropped(self) -> None:
        """The channel is gone: nothing of what is queued will be sent."""

    @abstractmethod
    def queue(self, body: bytes, *, end: bool, is_message: bool) -> None:
        """Queue a body, with `end` the last one. An empty body that is no message only opens or ends the channel."""

    def _check_open(self) -> None:
        """Raise `LocalProtocolError` if nothing can be sent on the channel any more."""
        if self.channel.gone:
            raise LocalProtocolError(f"channel {self.channel.id} is gone")
        if self.ended:
            raise LocalProtocolError(f"channel {self.channel.id} was ended")


class EngineReceiver(EngineHalf, Receiver[bytes]):
    """What both kinds of receiving halves do in the same way."""

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        self.processed: int = 0
        """The last seq that was processed, which an ack tells; 0 on an unreliable channel."""
        self.ack_at: float = NEVER
        """When an ack is due."""

    @property
    def owes_news(self) -> bool:
        """True if an ack would tell the peer something new."""
        return False

    @property
    def last_ack(self) -> int | None:
        """The ack with which a channel that is over answers packets that come again, if it has any."""
        return None

    @abstractmethod
    def receive(self, packet: Packet) -> None:
        """Apply a packet of the channel, if all of it is legal."""

    @abstractmethod
    def done(self) -> None:
        """Count what the application has as processed, and a channel of the peer as accepted."""

    @abstractmethod
    def dropped(self) -> None:
        """The channel is gone: what was not processed never will be."""

    def continue_closing(self, *, has_advanced: bool = False) -> None:
        """Act on a closed channel after a packet or an ack has arrived."""

    def encode_ack(self, room: int, *, wants_miss: bool, now: float) -> bytes:
        """Encode what acks this direction in at most `room` bytes; empty if there is nothing, or it does not fit."""
        return b""

    def write_ack(self, now: float) -> bytes:
        """Return a packet that holds nothing but the ack."""
        raise AssertionError("an unreliable channel acks nothing")

    def accept(self) -> None:
        """Count a channel of the peer as accepted, without its first message as processed."""
        channel = self.channel
        if not channel.gone and not channel.taken:
            channel.taken = True
            self.state.table.accept(channel.id)


@attrs.define(eq=False)
class Tombstone:
    """What is kept of a channel that is gone, to answer late packets."""

    until: float
    ack: int | None = None
    """The last seq that was processed, if the channel ended in order: the peer is told it again."""
    processed: int = 0
    """The last seq that was processed, in any case."""
    err: str | None = None
    """The err that this side broke it with."""
    repeats: int = 0
    """How often the err will be sent again: it may be lost, and is not acked."""
    is_ordered: bool = False
    """True if the application broke the channel: its err is not dropped for the sake of newer ones."""


class State:
    """The channels to one peer, and what is kept about them."""

    def __init__(
        self, *, odd: bool, config: Config, limits: Limits, observer: Observer | None, clock: Clock | None
    ) -> None:
        self.odd: Final = odd
        self.config: Final = config
        self.limits: Final = limits
        self.observer: Final = observer
        self.clock: Final = clock
        self.now: float = 0.0
        self.packet: int = config.packet
        """The largest packet to send, in bytes."""
        self.linger: float = max(LINGER, config.timeout)  # the peer sends again for as long
        self.table: ChannelTable[EngineChannel] = ChannelTable(limits, Ids(1 if odd else 2, ID_MOST, step=2))
        self.tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self.used: UsedIds = UsedIds()
        self.unopened: OrderedDict[int, EngineChannel] = OrderedDict()  # the first packet was not received yet
        self.congestion: Congestion = Congestion(config.packet, is_on=config.congestion)
        self.reassembly: Reassembly = Reassembly(limits)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.err_pace: Final = TokenBucket(ERRS_PER_SECOND, ERRS_AT_ONCE)
        self.refusals: Final = TokenBucket(limits.resets_per_second, limits.resets_burst)
        # What happened
        self.silence: Silence = Silence(config, odd=odd)
        self.happened: list[Event] = []
        self.own: list[Event] = []
        """What happened on the channels of the session's own, which `liveness` handles."""
        self.faults: Counter[Fault] = Counter()
        self.reported: set[Fault] = set()  # since `Engine.events` was called
        self.messages_sent: int = 0
        self.resent: int = 0
        self.lost: int = 0
        self.evicted: int = 0
        # What is kept
        self.held: int = 0  # bytes received and not processed
        self.waiting: int = 0  # packets received and not processed
        self.unsent: int = 0  # bytes queued, on all channels
        self.unread: int = 0  # bytes of unreliable messages that the application has not taken
        self.flying: int = 0  # bytes sent and not acked, on all channels
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, limits.channel_floor, limits.short_window)
        """Of the windows that follow the path; what may be kept in memory is bounded by `room`."""
        # Queues of what to send
        self.errs: dict[int, str] = {}
        self.answers: dict[int, None] = {}  # ids of tombstones to answer from
        self.acking: dict[int, EngineReceiver] = {}
        self.resends: deque[tuple[EngineSender, Piece]] = deque()
        self.line: deque[EngineChannel] = deque()
        # Who waits for room
        self.drained: dict[int, EngineSender] = {}  # watched ones that sent something since they were looked at
        self.crowded: dict[int, EngineSender] = {}  # watched ones with room of their own, and none in the outbox
        self.resting: set[int] = set()  # ids of channels whose peer has everything, and that are probed rarely
        self._timers: list[tuple[float, int]] = []

    def update_time(self) -> None:
        """Read the clock, before a command that may follow a long silence."""
        if self.clock is not None:
            self.now = max(self.now, self.clock.current_time())

    # --- memory

    @property
    def window(self) -> int:
        """Packets of one channel that may wait for the application, before the path has shown that it holds more."""
        return max(1, min(self.config.window, self.most_window))

    @property
    def most_window(self) -> int:
        """Packets of one channel that may wait for the application at most."""
        return self.limits.channel_bytes // self.packet

    @property
    def room(self) -> int:
        """Bytes of memory for one more packet that waits."""
        return self.limits.connection_bytes - self.held - OVERHEAD * self.waiting

    @property
    def room_next(self) -> int:
        """Bytes of memory for the packet that is next in order on its channel: there is always some."""
        return max(self.room, self.limits.channel_floor, self.config.packet)

    # --- channels that begin

    def is_ours(self, id: int) -> bool:
        return (id % 2 == 1) == self.odd

    def refusal_of(self, type: str) -> str | None:
        """Return why a reliable channel of this type is not taken, or None if it is."""
        if len(type) > TYPE_MOST:
            return too_long(type)
        if not self.config.reliable:
            return "only unreliable channels are taken"
        return f"{type[:64]} is unreliable" if type in self.config.unreliable_types else None

    # --- events

    def report(self, channel: EngineChannel, event: Event) -> None:
        """Report what the peer did on a channel: it lives. Of the session's own channels `liveness` hears."""
        self.silence.heard(self.now)
        if channel.is_reserved:
            self.own.append(event)
        else:
            self.happened.append(event)

    def suspect(self) -> None:
        """Report `Silent` if the peer was silent for too long."""
        if self.silence.is_over(self.now):
            self.silence.stop()
            self.happened.append(Silent(self.silence.seconds(self.now)))

    def fault(self, fault: Fault, text: str, *, limit: str | None = None) -> None:
        """Count a fault; report the first of its kind until the events are taken."""
        self.faults[fault] += 1
        if fault is not Fault.DUPLICATE and fault not in self.reported:
            self.reported.add(fault)
            self.happened.append(Faulted(fault, text, limit))

    # --- how channels end

    def close_if_over(self, channel: EngineChannel) -> None:
        """Remove a channel if both sides have ended it and nothing of ours is left to send or to be acked."""
        sender, receiver = channel.sender, channel.receiver
        if channel.gone or not (sender.ended and receiver.ended and sender.is_done):
            return
        owes_ack = receiver.owes_news
        self._remove(channel, Tombstone(self.now + self.linger, ack=receiver.last_ack))
        if owes_ack:
            self.answers[channel.id] = None
        self.happened.append(Closed(channel))

    def break_channel(self, channel: EngineChannel, cause: Cause, text: str, *, tell: bool) -> None:
        """Break a channel; with `tell` the peer is sent an err."""
        if cause is Cause.TIMEOUT:  # not for a closed channel whose peer goes on sending: such a peer lives
            self.suspect()  # first: if the peer is silent, all channels get the same error
        if tell:
            self.break_silently(channel, text)
        else:
            self._remove(channel, Tombstone(self.now + self.linger))
        self.report_broken(channel, cause, text)

    def report_broken(self, channel: EngineChannel, cause: Cause, text: str) -> None:
        """Report that a channel was broken, unless nobody here has heard of it."""
        if channel.announced or channel.ours:
            event = Broken(channel, cause, text)
            self.happened.append(event)
            if channel.is_reserved:
                self.own.append(event)
            if cause is Cause.PEER:
                self.silence.heard(self.now)

    def err(self, channel: EngineChannel, text: str) -> None:
        """Break a channel and tell the peer why; what is queued is dropped. Harmless when it is gone."""
        if not channel.gone:
            self.break_silently(channel, self._short(text) or "err", is_ordered=True)

    def give_up(self, channel: EngineChannel, reason: Reason) -> None:
        """Break a channel and tell the peer the reason."""
        self.update_time()
        self.err(channel, reason.encode().decode() or NO_REASON)

    def _short(self, text: str) -> str:
        """Return as much of the text of an err as fits into a packet, and not more than `ERR_MOST` bytes."""
        short = text.encode(errors="replace")[:ERR_MOST].decode(errors="ignore")
        while (over := len(quoted(short)) + ERR_HEAD - self.packet) > 0:
            short = short[: -max(1, over // 6)]  # a character may take six bytes
        return short

    def break_silently(self, channel: EngineChannel, err: str, *, is_ordered: bool = False) -> None:
        """Break a channel and send the peer an err, without an event."""
        self.errs[channel.id] = err
        tombstone = Tombstone(self.now + self.linger, err=err, repeats=ERR_REPEATS, is_ordered=is_ordered)
        self._remove(channel, tombstone)
        heapq.heappush(self._timers, (self.now + ERR_PAUSE, channel.id))

    def end_closed(self, channel: EngineChannel) -> None:
        """End a closed channel whose packets are all confirmed."""
        self.break_silently(channel, CLOSED)
        self.happened.append(Closed(channel))

    def close_timed_out(self, channel: EngineChannel) -> None:
        """End a closed channel that has waited for too long."""
        if not channel.is_reliable or channel.sender.is_done:
            self.end_closed(channel)
        else:
            text = f"the peer went on sending, and processed nothing of ours for {CLOSE_TIMEOUT} s"
            self.break_silently(channel, CLOSED)
            self.report_broken(channel, Cause.TIMEOUT, text)

    def drop_unopened(self, channel: EngineChannel) -> None:
        """Remove a channel whose first packet was not received; without a tombstone, because that may still arrive."""
        self._remove(channel, None)

    def _remove(self, channel: EngineChannel, tombstone: Tombstone | None) -> None:
        id = channel.id
        self.table.remove(id)
        self.unopened.pop(id, None)
        self.acking.pop(id, None)
        self.drained.pop(id, None)
        self.crowded.pop(id, None)
        self.resting.discard(id)
        channel.gone = True
        channel.sender.dropped()
        channel.receiver.dropped()
        channel.sender.channel = channel.receiver.channel = channel.remains()
        if tombstone is not None:
            tombstone.processed = channel.receiver.processed
            self._add_tombstone(id, tombstone)
        if self.observer is not None:
            self.observer.state(f"channel {id}", "gone")

    # --- tombstones

    def _add_tombstone(self, id: int, tombstone: Tombstone) -> None:
        if not self.is_ours(id):
            self.used.add(id)
        self.tombstones[id] = tombstone
        self.tombstones.move_to_end(id)
        while self._has_to_forget():
            forgotten, _ = self.tombstones.popitem(last=False)
            self.errs.pop(forgotten, None)  # they may be unsent, if the link takes nothing
            self.answers.pop(forgotten, None)

    def _has_to_forget(self) -> bool:
        """Return True if the oldest tombstone has expired, or there are too many."""
        id, oldest = next(iter(self.tombstones.items()))
        if oldest.until <= self.now:
            return True
        # When many channels are aborted at once, their errs wait: those tombstones are kept beside the limit.
        beside = self.limits.channels if oldest.is_ordered and id in self.errs else 0
        return len(self.tombstones) > self.limits.tombstones + beside

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
        if due < channel.timer_at:
            channel.timer_at = due
            heapq.heappush(self._timers, (due, channel.id))

    @property
    def next_timer(self) -> float | None:
        """When the next timer fires; None if none runs."""
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
                channel.timer_at = NEVER
                due.append(channel)
        return due

    def _repeat_err(self, id: int) -> None:
        tombstone = self.tombstone(id)
        if tombstone is not None and tombstone.err is not None and tombstone.repeats > 0:
            tombstone.repeats -= 1
            self.errs[id] = tombstone.err
            heapq.heappush(self._timers, (self.now + ERR_PAUSE, id))

    # --- what to send

    def queue_up(self, channel: EngineChannel) -> None:
        """Put a channel in the line of those with something to send."""
        if not channel.in_line and not channel.gone:
            channel.in_line = True
            self.line.append(channel)

    def packet_of(self, id: int, head: bytes, name: str, body: bytes = b"") -> bytes:
        """Encode a packet of a channel that leaves now, and show it to the observer by its name."""
        if self.observer is not None:
            self.observer.frame("out", f"channel {id}", name, len(body))
        return join_packet(b"{%b}" % head, body)


def too_long(type: str) -> str:
    return f"a type of {len(type)} characters, {TYPE_MOST} are allowed"


class UsedIds:
    """The ids that the peer has used; it may open each once, and openings may overtake each other."""

    def __init__(self) -> None:
        self._ranges = Ranges(USED_RANGES)
        self._floor = 0

    def __contains__(self, id: int) -> bool:
        index = (id + 1) // 2  # 1, 3, 5 … and 2, 4, 6 … both become 1, 2, 3 …
        return index <= self._floor or index in self._ranges

    @property
    def gaps(self) -> int:
        """How many separate ranges of ids are remembered."""
        return len(self._ranges)

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
