"""The state of an e3x engine: its channels, how each channel begins and ends, and what the channels share.

e3x carries channels over a link that may lose, duplicate and reorder packets, such as UDP. The engine implements the
protocol without I/O. Its parts all work on one object of the class `State`: `Engine` itself, the modules `openings` and
`liveness`, and the halves of channels in `send` and `receive`. Therefore this module explains how they work together.

Terms
=====

A channel has two directions, and each side has two *halves* for it: a sending half and a receiving half. Together they
are the `EngineChannel` of that side.

A channel is reliable or unreliable. On an unreliable channel, each message is one packet, which is sent once. On a
reliable channel, packets are numbered, acknowledged, and sent again if they are lost. The specification, which is the
E3X wire protocol of telehash v3, defines these fields of a packet:

- *seq*: the number of the packet in its direction of the channel. A channel ends when the largest seq, `2**32 - 1`, has
  been used.
- *ack*: the peer's application has processed all packets up to this seq.
- *miss*: a list of packets that the peer lacks, although it has later ones, and the highest seq that we may send now.
- *end*: this packet is the last one of its direction.
- *err*: the channel has failed. Both sides drop all packets of the channel, in both directions.

Either side opens channels. The side that made the connection uses odd ids and the other side even ids. No id is used
twice.

When a channel has ended, we keep a small record of it for `State.linger` seconds, the *tombstone*. The peer may not
know that the channel has ended, because our last packet was lost. It then sends its packets again, and the tombstone
has what we need to answer them. A peer resends for `Config.timeout` seconds at most, so `linger` is at least that long.

The states of a channel
=======================

    unopened   -> open, gone
    open       -> closing, gone
    closing    -> gone
    gone       (final)

- unopened: Packets can overtake each other, so a packet of a channel can arrive before the packet that opens the
  channel. We keep it and send an ack with a miss, which makes the peer send the opening packet again. If that doesn't
  arrive within `Limits.handshake`, we remove the channel. We keep no tombstone of it, because a tombstone would reject
  the opening packet if it arrives later.
- open: Both directions carry messages. If the peer has opened the channel, it waits in the backlog until the
  application accepts it (`EngineChannel.taken`).
- closing: The application has closed the channel, so we discard the messages that still arrive.
- gone: We have removed the channel from the table.

How a channel ends
==================

A reliable channel ends in order when both sides have sent their end and all packets have been acked. On an unreliable
channel the peer's end can be lost, so we wait for it for `linger` seconds only. The event for a channel that has ended
in order is `Closed`.

The event for a channel that has failed is `Broken`. There are four causes:

- The peer has sent an err.
- The peer is silent while packets wait for an ack.
- The parts of a message don't fit together.
- Every seq has been used.

The application can break a channel too, which sends an err to the peer (`State.err`). No event reports that, because
the caller knows it.

The application may close a channel while the peer is still sending. The specification has no packet that asks the peer
to stop, except for an err. But a peer that gets an err drops everything that it has received and not processed,
including messages that we sent before. So we follow rules of our own:

- While the peer hasn't acked all our packets, we wait for its acks.
- Once it has, we wait for its end, for `linger` seconds. If any other packet arrives, we answer with an err.
- The peer may go on sending and ack nothing. Its application may itself be waiting until we process its messages, which
  we never will. So after `CLOSE_TIMEOUT` without an ack, we break the channel.

Invariants
==========

- We check a packet completely before we change any state. A packet that breaks a rule may come from somebody else with
  a forged address, so we drop it and count it (`Fault`). A packet can only end the channel whose id it has.
- `State.held`, `State.waiting` and `State.unsent` are sums over all channels in the table. They count the received
  bytes and packets that the application hasn't processed, and the bytes that haven't been sent.
- A channel is at most once in `State.line`, the queue of channels that may have packets to send.
- For each channel, at most one err, one ack, and one answer of its tombstone are queued. So a peer can't make these
  queues grow by sending more packets.

Time
====

Each packet and each timer comes with the present time, which `State.now` stores. When the application opens a channel,
sends or closes, `now` may be old, because nothing may have arrived for a long time. These methods therefore read the
clock of the session first (`update_time`).

The timers of all channels are in one heap. A channel without a timer costs nothing as time passes.
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
from muxkit.protocols.e3x.packets import ID_MOST, RESERVED, TYPE_MOST, Packet, quoted
from muxkit.protocols.e3x.silence import Silence

NEVER: Final = float("inf")
# Lower bound of `State.linger`, the lifetime of a tombstone in seconds. It is the default of `Config.timeout`. A peer
# with that setting may go on to resend for as long, even if our own timeout is shorter.
LINGER: Final = 10.0
# The peer doesn't ack an err, so an err may get lost without anybody noticing. Therefore we send each err two more
# times, a second apart. This isn't in the specification.
ERR_REPEATS: Final = 2
ERR_PAUSE: Final = 1.0  # seconds
# Maximum rate of errs on packet links. Errs aren't acked, so if we sent more and the peer's socket buffer overflowed,
# neither side would notice the lost errs.
ERRS_PER_SECOND: Final = 4000
ERRS_AT_ONCE: Final = 64  # number of errs that may be sent without a pause
# Maximum rate of errs that refuse pings because every channel is in use. A ping must be answered, or its sender treats
# us as lost. So the rate of refusals of other channels doesn't apply. A peer has one ping under way, and sends it again
# about once per second.
PINGS_REFUSED_PER_SECOND: Final = 10
PINGS_REFUSED_AT_ONCE: Final = 10
ERR_MOST: Final = 512  # maximum size of an err's text in bytes; longer texts are truncated
ERR_HEAD: Final = len(b'{"c":4294967295,"err":}') + 2  # size of an err's packet without the text
OVERHEAD: Final = 256  # bytes of memory that we charge for each waiting packet in addition to its body
# Seconds after which we break a closed channel whose peer goes on sending but acks nothing. See the module docstring.
CLOSE_TIMEOUT: Final = 5.0
CLOSED: Final = "closed"  # the text of the err that ends a closed channel
# The text of an err for a channel that is given up without a reason. It isn't empty, because a peer may treat an empty
# err like an absent one.
NO_REASON: Final = "given up"
USED_RANGES: Final = 1024  # maximum number of separate ranges of used ids that we remember (`UsedIds`)


@attrs.define(eq=False)
class Piece:
    """A packet of a reliable channel that this side sends. The sender keeps it from `send` until the peer acks it."""

    seq: int
    body: bytes
    type: str | None  # the type of the channel, in the packet that opens it
    end: bool  # True for the last packet of this direction
    frag: int  # how many further packets contain the rest of the message
    times: int = 0  # how many times this side has sent the packet
    sent_at: float = 0.0  # when this side last sent the packet
    asks: bool = False  # True if the packet asked the peer for an ack
    is_named: bool = False  # True once a miss has listed the packet
    is_queued: bool = False  # True while the packet is in the queue of packets to send again


class EngineChannel:
    """A channel of an engine: its two halves and the state that they share.

    Only the engine changes the attributes. The session reads them.
    """

    sender: EngineSender
    receiver: EngineReceiver

    def __init__(self, id: int, type: str, *, ours: bool, is_reliable: bool, now: float) -> None:
        self.id: int = id
        self.type: str = type
        self.ours: bool = ours
        """True if this side opened it."""
        self.is_reliable: bool = is_reliable
        self.is_reserved: bool = type in RESERVED
        """True if the session itself uses the channel, for example for a ping. See `liveness`."""
        self.announced: bool = False
        """For the peer's channel: True once the application knows it. For our channel: True once the peer knows it."""
        self.taken: bool = ours
        """True once the application has accepted the channel."""
        self.closing: bool = False
        """True once the application has closed its receiving half. Further messages are discarded."""
        self.gone: bool = False
        """True once the channel has been removed from the table. A tombstone may remain."""
        self.in_line: bool = False
        """True while the channel is in `State.line`, the queue of channels that may have packets to send."""
        self.heard_at: float = now
        """When the last valid packet of the channel arrived."""
        self.dies_at: float = NEVER
        """When the engine removes the channel even if nothing arrives.

        It is set while the channel waits for its first packet, or for an end of the peer that may have been lost.
        """
        self.timer_at: float = NEVER
        """When the channel's timer fires. Never later than `due`."""

    def due(self, timeout: float) -> float:
        """Return when the engine must next act on this channel."""
        return min(self.dies_at, self.receiver.ack_at, self.sender.due(timeout))

    def remains(self) -> EngineChannel:
        """Return a copy of this channel without its halves, for the halves of a channel that has been removed.

        The halves still read attributes such as `id` and `gone`. If they kept the channel itself, the channel and its
        halves would form reference cycles, and only a garbage collection could free them.
        """
        left = EngineChannel(self.id, self.type, ours=self.ours, is_reliable=self.is_reliable, now=self.heard_at)
        left.announced, left.taken, left.closing, left.gone = self.announced, self.taken, self.closing, True
        return left


class EngineHalf:
    """Base class of all sending and receiving halves in the engine."""

    def __init__(self, state: State, channel: EngineChannel) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.channel: EngineChannel = channel
        self.ended: bool = False
        """True once the last packet of this direction has been queued (sender) or processed (receiver)."""

    @property
    def label(self) -> str:
        return f"channel {self.channel.id}"


class EngineSender(EngineHalf, Sender):
    """Base class of the sending halves of reliable and unreliable channels."""

    probe_at: float = NEVER
    """When the sender acts if no ack arrives before. It is `NEVER` on an unreliable channel."""

    def send(self, message: bytes) -> None:
        """Queue a message. Raises `LocalProtocolError` if the channel has ended or the queue has no room."""
        self._check_open()
        if not self.has_room(len(message)):
            limits = self.state.limits
            raise LocalProtocolError(
                f"channel {self.channel.id}: no room in the queue for {len(message)} bytes: "
                f"Limits(channel_first={limits.channel_first}, outbox={limits.outbox})"
            )
        self.queue(message, end=False, is_message=True)
        self.state.messages_sent += 1

    def finish(self, payload: bytes = b"") -> None:
        """Queue the end of this direction, after all queued messages, with `payload` as an optional last message.

        Does nothing if the channel has been removed.
        """
        if self.channel.gone:
            return
        self._check_open()
        self.state.update_time()
        self.queue(payload, end=True, is_message=bool(payload))
        self.state.messages_sent += bool(payload)

    def cancel(self, reason: Reason) -> None:
        """Break the channel with an err. e3x can't cancel one direction only, so this drops both."""
        self.state.give_up(self.channel, reason)

    @property
    @abstractmethod
    def quota(self) -> int:
        """Maximum size of the next packet's body in bytes. An unreliable channel can't send larger messages."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """True if this half has a new packet to send and the window allows it."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """True if `is_ready` would be True after the packet that `write` has just encoded."""

    @property
    @abstractmethod
    def is_written(self) -> bool:
        """True if every queued packet has been sent at least once."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if every queued packet has been sent and, on a reliable channel, acked."""

    @property
    def acked(self) -> int:
        """The highest seq that the peer has acked. Always 0 on an unreliable channel."""
        return 0

    @property
    def sent(self) -> int:
        """The highest seq that this side has sent. Always 0 on an unreliable channel."""
        return 0

    @property
    def awaits_ack(self) -> bool:
        """True while a live channel has packets that the peer hasn't acked."""
        return False

    @abstractmethod
    def due(self, timeout: float) -> float:
        """Return when the engine must next act on this half."""

    def report_if_writable(self) -> None:
        """Report `Writable` if the message that a caller waits to send has room now.

        If only the session's outbox is full, put this sender into `State.crowded`, the queue for room in the outbox.
        """

    @abstractmethod
    def write(self, now: float) -> bytes:
        """Remove the next new packet from the queue and encode it. Call this only after `is_ready` was True."""

    @abstractmethod
    def dropped(self) -> None:
        """Discard all queued packets, because the channel has been removed."""

    @abstractmethod
    def queue(self, body: bytes, *, end: bool, is_message: bool) -> None:
        """Queue a body, as the last one if `end` is set.

        `is_message` is False if the empty body isn't a message but only opens or ends the channel.
        """

    def _check_open(self) -> None:
        """Raise `LocalProtocolError` if the channel has been removed or this direction has ended."""
        if self.channel.gone:
            raise LocalProtocolError(f"channel {self.channel.id} has ended")
        if self.ended:
            raise LocalProtocolError(f"channel {self.channel.id}: this side has finished sending")


class EngineReceiver(EngineHalf, Receiver[bytes]):
    """Base class of the receiving halves of reliable and unreliable channels."""

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        self.processed: int = 0
        """The seq of the last packet that the application has processed. An ack contains it. 0 if unreliable."""
        self.ack_at: float = NEVER
        """When an ack is due."""

    @property
    def owes_news(self) -> bool:
        """True if an ack would give the peer new information."""
        return False

    @property
    def last_ack(self) -> int | None:
        """The ack with which the tombstone of this channel answers resent packets. None for an unreliable channel."""
        return None

    @abstractmethod
    def receive(self, packet: Packet) -> None:
        """Apply a packet of the channel. An illegal packet is reported as a fault and changes nothing."""

    @abstractmethod
    def done(self) -> None:
        """Mark the messages that the application has as processed, and accept the channel if the peer opened it."""

    @abstractmethod
    def dropped(self) -> None:
        """Discard packets that the application hasn't processed, because the channel has been removed."""

    def continue_closing(self, *, has_advanced: bool = False) -> None:
        """Check whether a channel that the application has closed can end, after a packet or an ack has arrived."""

    def encode_ack(self, room: int, *, wants_miss: bool, now: float) -> bytes:
        """Encode `ack` and `miss` of this direction in at most `room` bytes, or return `b""` if they don't fit.

        Unreliable channels have no acks, so they always return `b""`.
        """
        return b""

    def write_ack(self, now: float) -> bytes:
        """Return a packet that contains only an ack."""
        raise AssertionError("an unreliable channel acks nothing")

    def accept(self) -> None:
        """Accept a channel that the peer opened, without acknowledging its first message."""
        channel = self.channel
        if not channel.gone and not channel.taken:
            channel.taken = True
            self.state.table.accept(channel.id)


@attrs.define(eq=False)
class Tombstone:
    """The remains of a removed channel, from which the engine answers packets that arrive late."""

    until: float
    """When the tombstone expires."""
    ack: int | None = None
    """The ack with which we answer resent packets, because our last ack may have been lost.

    None if the channel didn't end in order.
    """
    processed: int = 0
    """The seq of the last packet that the application processed. When the session ends, it tells the peer these."""
    acked: int = 0
    """The highest seq that the peer has acked."""
    sent: int = 0
    """The highest seq that this side has sent. An ack of a packet after `acked` is a sign of life of the peer."""
    err: str | None = None
    """The text of the err with which this side broke the channel."""
    repeats: int = 0
    """How many more times the engine will send the err. An err isn't acked, so it may get lost (`ERR_REPEATS`)."""
    repeat_at: float = NEVER
    """When to send the err again. It is set when the err is sent, because an err may wait in its queue for long."""
    is_ordered: bool = False
    """True if the application broke the channel.

    While its err is queued, this tombstone isn't removed to make room for newer tombstones.
    """


class State:
    """All state of an engine: its channels, counters, buffers, and the queues of packets to send."""

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
        self.unit: Final = config.packet
        """The bytes that a window has for each of its packets. A larger packet uses up the bytes of several packets."""
        # How long the engine keeps tombstones and waits for ends. A peer resends packets for up to `timeout` seconds.
        self.linger: float = max(LINGER, config.timeout)
        self.table: ChannelTable[EngineChannel] = ChannelTable(limits, Ids(1 if odd else 2, ID_MOST, step=2))
        self.tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self.used: UsedIds = UsedIds()
        self.unopened: OrderedDict[int, EngineChannel] = OrderedDict()  # channels whose first packet hasn't arrived
        self.congestion: Congestion = Congestion(config.packet, is_on=config.congestion)
        self.reassembly: Reassembly = Reassembly(limits)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self.err_pace: Final = TokenBucket(ERRS_PER_SECOND, ERRS_AT_ONCE)
        self.refusals: Final = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self.ping_refusals: Final = TokenBucket(PINGS_REFUSED_PER_SECOND, PINGS_REFUSED_AT_ONCE)
        # Events and counters
        self.silence: Silence = Silence(config, odd=odd)
        self.happened: list[Event] = []
        self.own: list[Event] = []
        """Events of reserved channels, such as pings. `liveness` handles them, and the session never sees them."""
        self.faults: Counter[Fault] = Counter()
        self.reported: set[Fault] = set()  # faults that were reported since the last call of `Engine.events`
        self.messages_sent: int = 0
        self.resent: int = 0
        self.lost: int = 0
        self.evicted: int = 0
        # Buffered data, summed over all channels
        self.held: int = 0  # bytes that were received on reliable channels and not processed
        self.waiting: int = 0  # packets that were received on reliable channels and not processed
        self.unsent: int = 0  # bytes that were queued and not sent
        self.unread: int = 0  # bytes of unreliable messages that the application has not taken
        self.flying: int = 0  # bytes that were sent and not acked
        self.budget: ReceiveBudget = ReceiveBudget(limits.connection_bytes, limits.channel_floor, limits.short_window)
        """The budget from which receive windows grow. It doesn't bound memory. `room` does."""
        # Queues of packets to send
        self.errs: dict[int, str] = {}
        self.answers: dict[int, None] = {}  # ids of removed channels whose tombstone's ack is to be sent
        self.acking: dict[int, EngineReceiver] = {}
        self.resends: deque[tuple[EngineSender, Piece]] = deque()
        self.line: deque[EngineChannel] = deque()
        # Senders on which a caller waits for room (`notify_when_room`)
        self.drained: dict[int, EngineSender] = {}  # those that must be checked, because they have sent a packet since
        self.crowded: dict[int, EngineSender] = {}  # those whose own queue has room, but the session's outbox is full
        # Ids of channels whose peer has received every packet but hasn't acked them all. They are probed rarely.
        self.resting: set[int] = set()
        # When the timers of channels fire, and the ids of the channels, as a heap
        self.timers: list[tuple[float, int]] = []

    def update_time(self) -> None:
        """Read the clock. Commands call this, because no packet may have updated `now` for a long time."""
        if self.clock is not None:
            self.now = max(self.now, self.clock.current_time())

    # --- memory

    @property
    def window(self) -> int:
        """Initial receive window of a channel in packets. The window grows if the path can use more."""
        return max(1, min(self.config.window, self.most_window))

    @property
    def most_window(self) -> int:
        """Maximum receive window of a channel in packets."""
        return self.limits.channel_bytes // self.unit

    @property
    def room(self) -> int:
        """Maximum size of the next packet to buffer, in bytes, for a packet that arrives out of order."""
        return self.limits.connection_bytes - self.held - OVERHEAD * self.waiting

    @property
    def room_next(self) -> int:
        """Maximum size of the next packet to buffer, in bytes, for a packet that is next in order on its channel.

        This is never 0, or a channel could wait for memory forever.
        """
        return max(self.room, self.limits.channel_floor, self.packet)

    # --- opening channels

    def is_ours(self, id: int) -> bool:
        return (id % 2 == 1) == self.odd

    def refusal_of(self, type: str) -> str | None:
        """Return the reason for refusing a reliable channel of this type, or None to admit it."""
        if len(type) > TYPE_MOST:
            return too_long(type)
        if not self.config.reliable:
            return "only unreliable channels are taken"
        return f"{type[:64]} is unreliable" if type in self.config.unreliable_types else None

    # --- events

    def report(self, channel: EngineChannel, event: Event) -> None:
        """Report an event. Events of reserved channels go to `liveness` instead of the session."""
        if channel.is_reserved:
            self.own.append(event)
        else:
            self.happened.append(event)

    def suspect(self) -> None:
        """Report `Silent` if the peer has been silent for longer than the timeout."""
        if self.silence.is_over(self.now):
            self.silence.stop()
            self.happened.append(Silent(self.silence.seconds(self.now)))

    def fault(self, fault: Fault, text: str, *, limit: str | None = None) -> None:
        """Count a fault, and report it if it is the first of its kind since the last call of `Engine.events`."""
        self.faults[fault] += 1
        if fault is not Fault.DUPLICATE and fault not in self.reported:
            self.reported.add(fault)
            self.happened.append(Faulted(fault, text, limit))

    # --- ending channels

    def close_if_over(self, channel: EngineChannel) -> None:
        """Remove a channel if both sides have ended it and all packets of this side are sent and acked."""
        sender, receiver = channel.sender, channel.receiver
        if channel.gone or not (sender.ended and receiver.ended and sender.is_done):
            return
        owes_ack = receiver.owes_news
        self._remove(channel, Tombstone(self.now + self.linger, ack=receiver.last_ack))
        if owes_ack:
            self.answers[channel.id] = None
        self.happened.append(Closed(channel))

    def break_channel(self, channel: EngineChannel, cause: Cause, text: str, *, tell: bool) -> None:
        """Break a channel and report `Broken`. If `tell` is set, send an err to the peer."""
        # Check first whether the peer is silent as a whole. If it is, the session is lost, and every channel gets the
        # same error instead of some getting a timeout. (`close_timed_out` skips this check, because its peer sends.)
        if cause is Cause.TIMEOUT:
            self.suspect()
        if tell:
            self.break_silently(channel, text)
        else:
            self._remove(channel, Tombstone(self.now + self.linger))
        self.report_broken(channel, cause, text)

    def report_broken(self, channel: EngineChannel, cause: Cause, text: str) -> None:
        """Report `Broken`, unless the peer opened the channel and the application doesn't know it yet."""
        if channel.announced or channel.ours:
            event = Broken(channel, cause, text)
            self.happened.append(event)
            if channel.is_reserved:
                self.own.append(event)
            if cause is Cause.PEER:
                self.silence.heard(self.now)

    def err(self, channel: EngineChannel, text: str) -> None:
        """Break a channel, drop its queued packets, and tell the peer why. Does nothing if the channel is removed."""
        if channel.gone:
            return
        if channel.ours and channel.is_reliable and channel.sender.sent == 0:
            # The packet that opens the channel hasn't been sent, so the peer doesn't know the channel.
            self._remove(channel, None)
        else:
            self.break_silently(channel, self._short(text) or "err", is_ordered=True)

    def give_up(self, channel: EngineChannel, reason: Reason) -> None:
        """Break a channel and tell the peer the reason."""
        self.update_time()
        self.err(channel, reason.encode().decode() or NO_REASON)

    def _short(self, text: str) -> str:
        """Truncate the text of an err so that it fits into a packet and has at most `ERR_MOST` bytes."""
        short = text.encode(errors="replace")[:ERR_MOST].decode(errors="ignore")
        while (over := len(quoted(short)) + ERR_HEAD - self.packet) > 0:
            short = short[: -max(1, over // 6)]  # JSON may encode a character with six bytes
        return short

    def break_silently(self, channel: EngineChannel, err: str, *, is_ordered: bool = False) -> None:
        """Break a channel and queue an err for the peer, without reporting an event."""
        self.errs[channel.id] = err
        tombstone = Tombstone(self.now + self.linger, err=err, repeats=ERR_REPEATS, is_ordered=is_ordered)
        self._remove(channel, tombstone)

    def end_closed(self, channel: EngineChannel) -> None:
        """End a channel that the application has closed, after the peer has acked all our packets."""
        self.break_silently(channel, CLOSED)
        self.happened.append(Closed(channel))

    def close_timed_out(self, channel: EngineChannel) -> None:
        """End a channel that the application has closed, after the peer hasn't ended it in time."""
        if not channel.is_reliable or channel.sender.is_done:
            self.end_closed(channel)
        else:
            text = f"the peer went on sending, and processed nothing of ours for {CLOSE_TIMEOUT} s"
            self.break_silently(channel, CLOSED)
            self.report_broken(channel, Cause.TIMEOUT, text)

    def drop_unopened(self, channel: EngineChannel) -> None:
        """Remove a channel whose first packet hasn't arrived.

        A tombstone would reject the first packet, which may still arrive, so this leaves none.
        """
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
            tombstone.acked, tombstone.sent = channel.sender.acked, channel.sender.sent
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
            # The err or the ack may still be queued if the link has been blocked.
            self.errs.pop(forgotten, None)
            self.answers.pop(forgotten, None)

    def _has_to_forget(self) -> bool:
        """Return True if the oldest tombstone has expired, or if there are more tombstones than the limit."""
        id, oldest = next(iter(self.tombstones.items()))
        if oldest.is_ordered and (id in self.errs or oldest.repeats > 0):
            # If the application aborts many channels simultaneously, their errs wait in a queue. A tombstone whose err
            # has to be sent or repeated doesn't count towards the limit. Otherwise the peer might never get the err,
            # and a handler that only waits would keep the channel open forever.
            return len(self.tombstones) > self.limits.tombstones + self.limits.channels
        return oldest.until <= self.now or len(self.tombstones) > self.limits.tombstones

    def tombstone(self, id: int) -> Tombstone | None:
        """Return the tombstone of a channel, or None if there is none or it has expired."""
        tombstone = self.tombstones.get(id)
        if tombstone is None or self.now < tombstone.until:
            return tombstone
        del self.tombstones[id]
        return None

    # --- time

    def arm(self, channel: EngineChannel) -> None:
        """Set the timer of a channel to the channel's next deadline.

        If the deadline has moved to a later time, the old timer stays and fires early, which costs one check.
        """
        # This check is quick, because it runs for each packet. It leaves out `silent_at`, which never comes before the
        # probe that is sent first.
        timer_at = channel.timer_at
        if channel.sender.probe_at < timer_at or channel.receiver.ack_at < timer_at or channel.dies_at < timer_at:
            channel.timer_at = due = channel.due(self.config.timeout)
            heapq.heappush(self.timers, (due, channel.id))

    def due_channels(self, now: float) -> list[EngineChannel]:
        """Return the channels whose timers have fired, and queue the errs that must be repeated now.

        The caller must call `arm` for each returned channel that is still in the table.
        """
        due = []
        while self.timers and self.timers[0][0] <= now:
            when, id = heapq.heappop(self.timers)
            channel = self.table.get(id)
            if channel is None:
                self._repeat_err(id)
            elif channel.timer_at == when:
                channel.timer_at = NEVER
                due.append(channel)
        return due

    def _repeat_err(self, id: int) -> None:
        tombstone = self.tombstone(id)
        if tombstone is not None and tombstone.err is not None and tombstone.repeat_at <= self.now:
            tombstone.repeats -= 1
            tombstone.repeat_at = NEVER
            self.errs[id] = tombstone.err

    def err_sent(self, id: int) -> None:
        """Set the timer that repeats an err, which is sent now, and let the lifetime of its tombstone begin again.

        Does nothing if the timer is set, because this err answers a packet that the peer has sent again.
        """
        tombstone = self.tombstones.get(id)
        if tombstone is not None and tombstone.repeats > 0 and tombstone.repeat_at == NEVER:
            tombstone.until = self.now + self.linger
            tombstone.repeat_at = self.now + ERR_PAUSE
            heapq.heappush(self.timers, (tombstone.repeat_at, id))

    # --- sending

    def queue_up(self, channel: EngineChannel) -> None:
        """Add a channel to `line`, the round-robin queue of channels that may have packets to send."""
        if not channel.in_line and not channel.gone:
            channel.in_line = True
            self.line.append(channel)

    def packet_of(self, id: int, head: bytes, name: str, body: bytes = b"") -> bytes:
        """Encode a packet that is sent now, and notify the observer. `name` is the kind of packet for the observer."""
        if self.observer is not None:
            self.observer.frame("out", f"channel {id}", name, len(body))
        size = len(head) + 2
        return b"%c%c{%b}%b" % (size >> 8, size & 0xFF, head, body)


def too_long(type: str) -> str:
    return f"type too long: expected at most {TYPE_MOST} characters, got {len(type)}"


class UsedIds:
    """The set of channel ids that the peer has used.

    The peer may use each id once. Openings may arrive out of order, so the highest id isn't enough. The set remembers
    ranges of ids. If there are too many ranges, it treats the ids in the lowest gap as used.
    """

    def __init__(self) -> None:
        self._ranges = Ranges(USED_RANGES)
        self._floor = 0

    def __contains__(self, id: int) -> bool:
        index = (id + 1) // 2  # maps the odd ids 1, 3, 5 … and the even ids 2, 4, 6 … to 1, 2, 3 …
        return index <= self._floor or index in self._ranges

    @property
    def gaps(self) -> int:
        """Number of separate ranges of ids in the set."""
        return len(self._ranges)

    def add(self, id: int) -> None:
        index = (id + 1) // 2
        if index <= self._floor:
            return
        try:
            self._ranges.add(index)
        except RemoteProtocolError:
            # There are too many ranges, so treat the ids in the lowest gap as used from now on.
            _, self._floor = next(iter(self._ranges))
            self._ranges.discard_below(self._floor + 1)
            self.add(id)
