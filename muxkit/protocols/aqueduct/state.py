"""The state of one side of an Aqueduct connection: the halves of its channels, and how they begin and end.

All parts of the engine work on one `State`: `reader` and `rules` apply the frames that the peer has sent, and the
halves (`send` and `receive`) write our frames.

Theory of operation
===================

An Aqueduct channel has one direction. One side has its *sender*, the other side its *receiver*, and we call both
*halves*. Either side may create a channel, and chooses which half it keeps. It sends the other half to the peer as an
*attachment* of a message on an existing channel. One channel, the *entrypoint*, exists from the beginning. The client
has its sender.

Messages travel in streams or in datagrams, as in QUIC. The receiver *acks* the messages that have arrived, and *nacks*
the datagrams that got lost.

The half that sends (`EngineSender`) has these states, which are in its attribute `phase`:

    OPEN        the application sends                                          -> FINISHING, CANCELLING, ended
    FINISHING   `finish` was called; FINISH_SENDER follows the last message    -> CANCELLING, ended
    CANCELLING  CANCEL_SENDER was queued, unnumbered messages were dropped     -> ended

The half that receives (`EngineReceiver`) has these states:

    OPEN        messages may arrive                                            -> complete, ended
    complete    FINISH_SENDER has arrived, and all messages have arrived or were reported as missing
                                                                               -> ended, immediately

Only the receiver's side can end a channel, with CLOSE_RECEIVER. It writes this frame when the receiver is complete,
when CANCEL_SENDER has arrived, or when the application doesn't want more messages, and the receiver has then ended. The
sender ends when the frame arrives. The `outcome` of a half is how it has ended:

- FINISHED: CLOSE_RECEIVER, after FINISH_SENDER was written and all messages were acked
- CANCELLED: at the sender, CLOSE_RECEIVER after CANCEL_SENDER; at the receiver, CANCEL_SENDER
- NO_RECEIVER: CLOSE_RECEIVER before that, or the peer stopped a stream of the sender
- LOST_IN_TRANSIT: the channel has never reached the other side (see the module `transit`)
- FORGOTTEN: FORGET_CHANNEL has arrived, because the side that created the channel has discarded it

The side that has created a channel may discard it at any time with FORGET_CHANNEL. It does so if the channel was lost
in transit, and if a frame arrives for a channel of its own that it doesn't know any more.

Streams and datagrams overtake each other, so frames may arrive in any order:

- The first frame of a channel may arrive before the message that contains the channel. We then create the half, but
  without `attached`. Its messages are reported, and the session keeps them until the attachment arrives. If the half
  ends before that, we keep it in `_ended`, so that the application can find out how it ended. `Limits.tombstones`
  limits how many of these we keep.
- Frames may arrive after the end of a channel. We keep its id for `Config.tombstone` seconds (a *tombstone*), and drop
  frames for channels with a tombstone.
- A datagram may even arrive after the tombstone has expired. It looks like the first frame of a new channel, which no
  frame would ever end. So we drop a receiver again if only datagrams have mentioned it (`_strays`) and no stream does
  so within `receipt_deadline`.

Invariants:

- A half is in `table` exactly while it has an id but no outcome.
- A half with an outcome writes nothing more, with one exception: the stream of a closed receiver stays open until
  CLOSE_RECEIVER was written (`closing`).
- The end of a half is reported once, unless the application itself has closed the receiver.
- Everything that a peer can make us keep is limited by `Limits` or `Config`. `check_room` also counts the channels
  whose CLOSE_RECEIVER isn't written yet, because a peer that doesn't read could make us accumulate them.
- No operation takes time in proportion to the number of channels, or to a number that the peer chooses.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, ChannelTable, Clock, Deadlines, Ids, StartPace, StreamId, TokenBucket, queue_of
from muxkit.core.events import Cancelled, Confirmed, Failed, Finished, Stopped
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.events import Acked, Event, Lost, Nacked, Unclaimed
from muxkit.protocols.aqueduct.frames import Pairs
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EMPTY_FIELD, EngineSender, Outgoing, Ticket
from muxkit.protocols.aqueduct.streams import OutStream, StreamScheduler
from muxkit.protocols.aqueduct.transit import Fate, Transit, lose
from muxkit.protocols.aqueduct.unread import UnreadLimit

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.reader import IncomingStream


class Timer(Enum):
    """The timers of a connection."""

    FLUSH = "flush"
    """When to announce datagrams sent, and to ack what came in streams."""
    REPORT = "report"
    """When to ack or nack datagrams."""
    STRAY = "stray"
    """When to drop a receiver that only datagrams have mentioned."""
    HANDSHAKE = "handshake"
    """When the connection headers of the peer must have come."""
    STALL = "stall"
    """When more of an unfinished frame must have come."""


# `Enum.__hash__` is a Python function, and every message looks up timers in a dictionary. The default hash is faster.
Timer.__hash__ = object.__hash__  # type: ignore[method-assign]

# An ack that is owed goes with the next message that is written, if the last acks were written at least this fraction
# of `Config.flush_delay` ago. A session that answers each message now and then thus needs no timer for its acks, which
# costs more than they do. A session that answers thousands of messages per second still sends few acks, and its timer
# hardly ever expires.
EARLY_FLUSH: Final = 1 / 2

# The link hears of bytes that the application has consumed when there are this many, or half of the smallest window if
# that is less. It grants credit only after half of a window was consumed, so it has nothing to do for fewer.
WORTH_A_GRANT: Final = 1024


class State:
    """Everything that the halves of one connection share."""

    def __init__(
        self, role: frames.Role, config: Config, limits: Limits, observer: Observer | None, clock: Clock | None
    ) -> None:
        self.role: frames.Role = role
        self.config: Config = config
        self.limits: Limits = limits
        self.short_window: int = limits.short_window  # which computes it, and each message asks for it
        # A frame of up to half of the smallest window needs no loan.
        self.largest_unlent: int = min(limits.channel_floor, limits.channel_first) // 2
        self.worth_a_grant: int = min(WORTH_A_GRANT, max(1, self.largest_unlent))
        """So many consumed bytes make the link look whether it has credit to renew."""
        self.observer: Observer | None = observer
        self.clock: Clock | None = clock
        self.now: float = 0.0
        self.over: bool = False
        self.events: list[Event] = []
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.has_new_deadline: bool = False
        """True if a deadline was set that the pump may not have seen yet."""
        # The link
        self.rtt: float | None = None
        self.in_order: bool = False
        """On this link no datagram is overtaken by bytes that were written after it."""
        self.streams: StreamScheduler = StreamScheduler(2 + role, frames.VERSION)
        self.incoming: dict[StreamId, IncomingStream] = {}
        """The peer's streams that are open, or whose messages were not all consumed."""
        # Counters
        self.outbox: int = 0  # bytes of messages that wait for the link
        self.messages_sent: int = 0
        self.unread_datagrams: int = 0  # what datagrams that weren't consumed cost
        self.dropped_datagrams: int = 0  # they were repeated, too early, or without room
        self.unread_limit: UnreadLimit = UnreadLimit(limits)
        self.starts: StartPace = StartPace(limits.resets_per_second, limits.resets_burst)
        self._misses = TokenBucket(limits.resets_per_second, limits.resets_burst)
        self._empty_streams = TokenBucket(limits.resets_per_second, limits.resets_burst)
        # Channels
        self.table: ChannelTable[EngineHalf] = ChannelTable(limits, Ids(0, 0))
        self.closing: dict[int, OutStream] = {}  # receivers that are gone, whose CLOSE_RECEIVER is not written
        self.forgets: dict[int, OutStream] = {}  # FORGET_CHANNEL to be written
        self._counters = frames.id_counters(role)
        self._ended: OrderedDict[int, EngineHalf] = OrderedDict()  # made by the peer, gone before they were attached
        self._strays: OrderedDict[EngineReceiver, float] = OrderedDict()
        # What is due
        self.datagram_senders: OrderedDict[EngineSender, None] = OrderedDict()  # in turn
        self.flushing: dict[EngineHalf, None] = {}
        self._flush_early_from = 0.0  # from this time on, acks go with the next message that is written
        self._reports: list[tuple[float, int, EngineReceiver]] = []
        self._report_order = count()
        self.entrypoint: EngineHalf = self._make_entrypoint()

    # --- time

    def update_time(self) -> None:
        """Read the clock, before a command that may follow a long silence."""
        if self.clock is not None:
            self.now = max(self.now, self.clock.current_time())

    @property
    def receipt_deadline(self) -> float:
        """How long to wait for a datagram that has been sent, in seconds."""
        if self.config.receipt_deadline is not None:
            return self.config.receipt_deadline
        return 1.0 if self.rtt is None else max(2 * self.rtt, self.config.flush_delay)

    @property
    def report_delay(self) -> float:
        """How long after its count a datagram may still come, in seconds."""
        return self.config.flush_delay if self.in_order else self.receipt_deadline

    # --- the end of the connection

    def check_alive(self) -> None:
        """Raise `LocalProtocolError` once the connection is over."""
        if self.over:
            raise LocalProtocolError("the connection is over; open another one")

    def fail_at(self, where: str, error: RemoteProtocolError) -> None:
        """End the connection, because the peer broke a rule at this place."""
        error.message = f"{where}: {error.message}"
        self.fail(error)

    def fail(self, error: RemoteProtocolError) -> None:
        """End the connection, because the peer broke a rule of Aqueduct or of the link."""
        if not self.over:
            if self.observer is not None:
                self.observer.error(error)
            self.stop(Failed(error))

    def stop(self, last: Event) -> None:
        """End the connection with a last event."""
        self.over = True
        self.events.append(last)
        self.streams.clear()
        self.datagram_senders.clear()
        self.incoming.clear()

    # --- making channels

    def _make_entrypoint(self) -> EngineHalf:
        ours = self.role is frames.Role.CLIENT
        transit = Transit(frames.ENTRYPOINT, ours=ours, fate=Fate.ACCESSIBLE)
        entrypoint = self._make(frames.ENTRYPOINT, transit, sends=ours, oneshot=False)
        entrypoint.attached = entrypoint.is_spent = True
        if ours:
            self.table.add_ours(frames.ENTRYPOINT, entrypoint)
        else:
            self.table.add_theirs(frames.ENTRYPOINT, entrypoint)
            self.table.accept(frames.ENTRYPOINT)
        return entrypoint

    def _make(self, id: int | None, transit: Transit, *, sends: bool, oneshot: bool) -> EngineHalf:
        return (EngineSender if sends else EngineReceiver)(self, id, transit, oneshot=oneshot)

    def encode(self, headers: Pairs) -> bytes:
        """Encode the headers of a message or a channel."""
        if not headers:
            return EMPTY_FIELD
        encoded = frames.encode_headers(headers)
        self.check_headers(encoded, headers, self.config.headers)
        return encoded

    def check_headers(self, encoded: bytes, headers: Pairs, most: int) -> None:
        """Raise `LocalProtocolError` if header data is larger than this side would accept itself."""
        pairs = self.config.header_pairs
        if len(encoded) > most or len(headers) > pairs:
            raise LocalProtocolError(
                f"too many headers: expected at most {pairs} in {most} bytes, got {len(headers)} in {len(encoded)}"
            )

    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` if a message of this size can never be sent."""
        most = self.limits.message
        if size > most:
            raise LocalProtocolError(
                f"message too large: expected at most {most} bytes, got {size}; raise Limits(message=…) on both sides"
            )

    def make_ticket(self, *, sends: bool, oneshot: bool, headers: bytes) -> Ticket:
        """Make a channel; the ticket stands for the half that doesn't stay here."""
        half = self._make(None, Transit(None, ours=True), sends=sends, oneshot=oneshot)
        half.taken = True
        return Ticket(half, headers)

    def check_tickets(self, tickets: Sequence[Ticket]) -> None:
        """Raise `LocalProtocolError` if these tickets can't be sent together."""
        if any(ticket.half.state is not self for ticket in tickets):
            raise LocalProtocolError("a channel can be sent on the connection that it was made for")
        if any(ticket.spent for ticket in tickets) or len(set(map(id, tickets))) != len(tickets):
            raise LocalProtocolError("a channel can be sent once")
        most = min(self.limits.channels - self.table.census.ours, self.config.attachments)
        if len(tickets) > most:
            raise LocalProtocolError(f"too many channels: expected at most {most} more, got {len(tickets)} attachments")

    def hand_over(self, tickets: Iterable[Ticket]) -> list[tuple[int, bytes]]:
        """Open the channels whose other halves go with a message; return their ids and encoded headers."""
        attached: list[tuple[int, bytes]] = []
        for ticket in tickets:
            half = ticket.half
            half.is_spent = True
            sender = self.role if type(half) is EngineSender else self.role.peer
            id = self._counters[half.oneshot << 2 | sender << 1 | self.role].allocate(())
            half.id = half.transit.channel = id
            half.attached = True
            self.table.add_ours(id, half)
            self._state_changed(id, "open")
            attached.append((id, ticket.headers))
        return attached

    def check_room(self, new: int) -> None:
        """Raise `RemoteProtocolError` if the peer may not make that many more channels."""
        census, limits = self.table.census, self.limits
        if census.theirs + len(self.closing) + new > limits.channels:
            raise RemoteProtocolError(
                f"{new} channels made beside {census.theirs} live and {len(self.closing)} closing, "
                f"{limits.channels} are allowed",
                limit=limits.bound_of_channels,
            )
        if census.waiting + new > limits.backlog:
            raise RemoteProtocolError(
                f"{new} channels made beside {census.waiting} that wait, {limits.backlog} are allowed", limit="backlog"
            )

    def make_theirs(self, id: int) -> EngineHalf:
        """Make our half of a channel that the peer made; it is not in the table yet."""
        sends = frames.sender_of(id) == self.role
        return self._make(id, Transit(id, ours=False), sends=sends, oneshot=frames.is_oneshot(id))

    def add_theirs(self, id: int, half: EngineHalf) -> None:
        """Add a half for which there is room."""
        self.table.add_theirs(id, half)
        self._state_changed(id, "open")

    def adopt(self, half: EngineHalf) -> None:
        """Put a half of which a frame was accepted into the table, unless it is there."""
        if half.id is not None and half.id not in self.table:
            self.add_theirs(half.id, half)

    def was_attached(self, id: int) -> bool:
        """Return True if a message has brought this channel, and it is still alive."""
        half = self.table.get(id)
        return half is not None and half.attached

    def attach(self, id: int, carrier: Transit) -> EngineHalf | None:
        """Return the half that a message on `carrier` brings; None if it has ended since an earlier message."""
        half = self.table.get(id) or self._ended.get(id)
        if half is None and not self.is_buried(id):
            half = self.make_theirs(id)
            self.add_theirs(id, half)
        if half is None or half.attached:
            return None
        half.attached = True
        if type(half) is EngineReceiver:
            self._strays.pop(half, None)
        self.forget_lost(half.transit.carried_by(carrier))
        return half

    def accept(self, half: EngineHalf) -> None:
        """Note that the application has taken a half that came."""
        half.taken = True
        if half.id is not None:
            self.table.accept(half.id)

    def is_new(self, id: int) -> bool:
        """Return True for a channel that is neither live nor kept until its attachment comes."""
        return id not in self.table and id not in self._ended

    def is_buried(self, id: int) -> bool:
        """Return True for a channel that ended a short time ago."""
        return self.table.is_buried(id, self.now)

    @property
    def ended_unattached(self) -> int:
        """How many channels of the peer ended before the messages that attach them have come."""
        return len(self._ended)

    # --- ending channels

    def end(self, half: EngineHalf, outcome: Outcome, *, bury: bool = True) -> None:
        """End a half, and lose the channels that were on their way over it."""
        self.forget_lost(self._end(half, outcome, bury=bury))

    def _end(self, half: EngineHalf, outcome: Outcome, *, bury: bool) -> list[Transit]:
        """End a half; return the channels that are lost because of it."""
        assert half.id is not None  # only what was handed over is known to the connection
        half.outcome = outcome
        lost: list[Transit] = []
        if type(half) is EngineSender:
            half.drop_streams()
            self.datagram_senders.pop(half, None)
            unanswered = [*half.reliable.clear(), *half.unreliable.clear(), *half.take_unsent()]
            lost += self._nacked(unanswered)
        elif type(half) is EngineReceiver:
            if outcome in (Outcome.LOST_IN_TRANSIT, Outcome.FORGOTTEN) and half.main is not None:
                self.streams.drop(half.main)
            self.unread_limit.drop(half)
        self._stop_timers(half)
        if outcome is Outcome.FORGOTTEN and bury:
            lost += lose([half.transit])
        half.transit.ended()
        self.table.remove(half.id)
        if bury:
            self._bury(half.id)
            if frames.creator_of(half.id) != self.role and not half.attached:
                self._remember_ended(half.id, half)
        self._state_changed(half.id, outcome.value)
        self._report_end(half, outcome)
        return lost

    def _report_end(self, half: EngineHalf, outcome: Outcome) -> None:
        """Report the end of a half, unless the application knows it; then the session's half may be freed."""
        if type(half) is EngineReceiver:
            is_news = outcome is not Outcome.NO_RECEIVER  # the application closed that one itself
        else:
            is_news = half.attached and not (type(half) is EngineSender and half.outcome_told is not None)
        if is_news:
            half.has_news = True
            self.events.append(end_event(half, outcome))
        elif half.taken and not half.has_news:
            half.owner = None

    def _bury(self, id: int) -> None:
        self.table.bury(id, self.now, self.config.tombstone)

    def _remember_ended(self, id: int, half: EngineHalf) -> None:
        """Keep a half whose attachment may still come, so that the application can see how it ended."""
        self._ended[id] = half
        if len(self._ended) > self.limits.tombstones:
            _, oldest = self._ended.popitem(last=False)
            if type(oldest) is EngineReceiver and (oldest.unread_messages or oldest.unread):
                self.events.append(Unclaimed(oldest))

    def cancel(self, sender: EngineSender, outcome: Outcome | None = None, *, reason: bytes = b"") -> None:
        """Cancel a sender; with an outcome the application is told before the peer has confirmed."""
        sender.outcome_told = outcome
        sender.write_cancellation(reason)
        self.datagram_senders.pop(sender, None)
        self._stop_timers(sender)
        # What was written may have arrived: only the peer can say. What was not written is lost.
        self.nack(sender.take_unsent())
        if outcome is Outcome.NO_RECEIVER:
            sender.has_news = True
            self.events.append(Stopped(sender))

    def sender_stopped(self, sender: EngineSender) -> None:
        """End a sender of which the peer stopped a stream: to the application its receiver is gone."""
        if sender.gone or sender.cancelling:
            return
        if sender.finish_written:  # no CANCEL_SENDER may follow
            self.end(sender, Outcome.NO_RECEIVER)
        else:
            self.cancel(sender, Outcome.NO_RECEIVER)

    def close(self, receiver: EngineReceiver, outcome: Outcome) -> None:
        """Write CLOSE_RECEIVER and end the receiver."""
        assert receiver.id is not None  # only what was handed over can be closed
        stream = receiver.write_close()
        if stream is not None:
            stream.list_in(self.closing, receiver.id)
            self.streams.add(stream)
        self.end(receiver, outcome)

    def forget(self, half: EngineHalf) -> None:
        """Discard a channel that we made, both halves of it, whatever is on its way."""
        half.check_handed_over()
        assert half.id is not None
        self.check_alive()
        if half.gone:
            raise LocalProtocolError(f"{half.label} has ended already: {half.outcome}")
        if frames.creator_of(half.id) != self.role:
            raise LocalProtocolError(f"only the side that made a channel can discard it: {half.label}")
        self.update_time()
        self.send_forget(half.id)
        self.end(half, Outcome.FORGOTTEN)

    def forgotten(self, id: int) -> None:
        """End a channel that the peer, which made it, has forgotten."""
        stream = self.closing.pop(id, None)
        if stream is not None:
            self.streams.drop(stream)
        half = self.table.get(id)
        if half is not None:
            self.end(half, Outcome.FORGOTTEN)
            return
        self._bury(id)
        if id not in self._ended:
            # If the attachment comes after this, the application gets a half that has ended.
            half = self.make_theirs(id)
            half.outcome = Outcome.FORGOTTEN
            self._remember_ended(id, half)

    # --- answers, and channels lost in transit

    def messages_acked(self, outgoings: Iterable[Outgoing], carrier: Transit) -> None:
        """Report messages as acked; the channels attached to them have arrived on `carrier`."""
        lost: list[Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = True
                self.events.append(Acked(outgoing.receipt))
            for node in outgoing.nodes:
                lost += node.carried_by(carrier)
        self.forget_lost(lost)

    def nack(self, outgoings: Iterable[Outgoing]) -> None:
        """Report messages as nacked; the channels attached to them are lost."""
        self.forget_lost(self._nacked(outgoings))

    def _nacked(self, outgoings: Iterable[Outgoing]) -> list[Transit]:
        lost: list[Transit] = []
        for outgoing in outgoings:
            if outgoing.receipt is not None:
                outgoing.receipt.arrived = False
                self.events.append(Nacked(outgoing.receipt))
            lost += lose(outgoing.nodes)
        return lost

    def forget_lost(self, lost: list[Transit]) -> None:
        """End channels of ours that did not arrive, tell the peer, and go on with the channels sent on them."""
        for node in lost:  # grows while it is read
            id = node.channel
            assert id is not None  # it was attached, so it has one
            half = self.table.get(id)
            if half is not None and half.transit is node:
                lost += self._end(half, Outcome.LOST_IN_TRANSIT, bury=True)
            self.send_forget(id)

    def forget_unknown(self, id: int) -> None:
        """Answer a frame for a channel of ours that has no state."""
        if id in self.forgets:
            return
        # Frames that cross the end of a channel may come when its tombstone has given way to others.
        if not self._counters[id & 7].was_allocated(id):
            self._charge(self._misses, f"a channel was routed to that there is not ({frames.label(id)})")
            if len(self.forgets) >= self.limits.tombstones:
                raise RemoteProtocolError(f"{len(self.forgets)} channels to forget are owed", limit="tombstones")
        elif len(self.forgets) >= self.limits.tombstones:
            return  # the peer hears of its end from the frame that ended it
        self.send_forget(id)
        self._bury(id)

    def send_forget(self, id: int) -> None:
        """Queue FORGET_CHANNEL for a channel, in place of a CLOSE_RECEIVER that wasn't written yet."""
        if id in self.forgets:
            return
        routed: list[Buffer] = [frames.encode_frame(frames.RouteTo(id)), frames.encode_frame(frames.ForgetChannel())]
        stream = OutStream(routed, urgent=True)
        stream.list_in(self.forgets, id)
        closing = self.closing.pop(id, None)
        if closing is not None:
            self.streams.drop(closing)
        self.streams.add(stream)
        self.frame_written("FORGET_CHANNEL", id)

    def count_reset(self) -> None:
        """Count a channel or a stream that the peer broke off."""
        self.starts.broken_off(self.now)

    def check_empty_stream(self) -> None:
        """Charge the peer for a stream that it ended with nothing in it; raise above the limit."""
        self._charge(self._empty_streams, "a stream was opened for nothing")

    def _charge(self, bucket: TokenBucket, what: str) -> None:
        if not bucket.take(self.now):
            raise RemoteProtocolError(
                f"{what}, more often than {self.limits.resets_per_second} times a second", limit="resets_per_second"
            )

    # --- datagrams to send

    def queue_datagram(self, sender: EngineSender, outgoing: Outgoing) -> None:
        """Queue an unreliable message; in a full queue the oldest, which has no number yet, is nacked."""
        queue = sender.datagrams = queue_of(sender.datagrams)
        sender.datagram_bytes += outgoing.size
        while queue and (len(queue) >= self.config.unreliable_queue or sender.datagram_bytes > self.short_window):
            oldest = sender.take_datagram()
            self.nack([oldest])
        queue.append(outgoing)
        self.schedule_datagrams(sender)

    def schedule_datagrams(self, sender: EngineSender) -> None:
        """Give the sender a turn if it has a datagram to send, and none otherwise."""
        if sender.has_datagram:
            self.datagram_senders.setdefault(sender)
        else:
            self.datagram_senders.pop(sender, None)

    def next_datagram(self, limit: int) -> bytes | None:
        """Return the next datagram of at most `limit` bytes; a larger message goes in a stream, or is nacked."""
        while self.datagram_senders:
            sender, _ = self.datagram_senders.popitem(last=False)
            outgoing = sender.take_datagram()
            data = self.streams.prefix + sender.encode_datagram(outgoing)
            fits = len(data) <= limit
            if fits:
                sender.datagram_sent(outgoing)
                self.flush_soon(sender)
            elif sender.admits(outgoing.size):
                sender.count_queued(outgoing.size)
                sender.send_alone(outgoing)
            else:
                self.nack([outgoing])
            self.schedule_datagrams(sender)
            sender.message_numbered()
            if fits:
                return data
        return None

    # --- timers

    def _stop_timers(self, half: EngineHalf) -> None:
        self.flushing.pop(half, None)
        self.confirm(half)

    def flush_soon(self, half: EngineHalf) -> None:
        """Write acks or counts of this half after `Config.flush_delay`, or earlier, with a message."""
        if not self.flushing:
            self.deadlines.set(Timer.FLUSH, self.now + self.config.flush_delay)
            self.has_new_deadline = True
        self.flushing[half] = None

    def flush(self) -> None:
        """Let all halves that owe acks or counts write them."""
        flushing, self.flushing = self.flushing, {}
        self._flush_early_from = self.now + EARLY_FLUSH * self.config.flush_delay
        for half in flushing:
            half.flush = True
            self.streams.add(half.stream())

    def flush_early(self) -> None:
        """Let the halves write what they owe now, because a message is being written, unless they did so just before.

        The timer would otherwise have to wake the session for acks alone.
        """
        if self.now >= self._flush_early_from:
            self.flush()
            self.deadlines.stop(Timer.FLUSH)
            self.has_new_deadline = False

    def report_at(self, due: float, receiver: EngineReceiver) -> None:
        """Report on the datagrams of a receiver without an earlier report; `report` schedules the later ones."""
        heapq.heappush(self._reports, (due, next(self._report_order), receiver))
        self.deadlines.set(Timer.REPORT, self._reports[0][0])
        self.has_new_deadline = True

    def report(self, now: float) -> None:
        """Report on datagrams that should have come by now."""
        while self._reports and self._reports[0][0] <= now:
            _, _, receiver = heapq.heappop(self._reports)
            if receiver.gone:
                continue
            is_due = receiver.report_due(now)
            if receiver.next_report is not None:
                heapq.heappush(self._reports, (receiver.next_report, next(self._report_order), receiver))
            if not is_due:
                continue
            if receiver.is_complete:
                self.close(receiver, Outcome.FINISHED)
            else:
                self.streams.add(receiver.stream())
        if self._reports:
            self.deadlines.set(Timer.REPORT, self._reports[0][0])

    def add_stray(self, receiver: EngineReceiver) -> None:
        """Drop the receiver unless a stream mentions it within `receipt_deadline`."""
        self._strays[receiver] = self.now + self.receipt_deadline
        if Timer.STRAY not in self.deadlines:
            self.deadlines.set(Timer.STRAY, self._strays[receiver])

    def confirm(self, half: EngineHalf) -> None:
        """Keep a half that a stream has mentioned."""
        if self._strays and type(half) is EngineReceiver:
            self._strays.pop(half, None)

    def drop_strays(self, now: float) -> None:
        """Drop the receivers that no stream has mentioned in time."""
        while self._strays:
            receiver, due = next(iter(self._strays.items()))
            if due > now:
                self.deadlines.set(Timer.STRAY, due)
                return
            del self._strays[receiver]
            # Not buried: if the channel is alive after all, its streams must find a new half.
            self.end(receiver, Outcome.FORGOTTEN, bury=False)

    # --- observation

    def frame_written(self, name: str, id: int | None, size: int = 0) -> None:
        """Tell the observer of a frame of a channel."""
        if self.observer is not None:
            self.observer.frame("out", "connection" if id is None else frames.label(id), name, size)

    def _state_changed(self, id: int, state: str) -> None:
        if self.observer is not None:
            self.observer.state(frames.label(id), state)


def end_event(half: EngineHalf, outcome: Outcome) -> Event:
    """Return the event that reports the end of a half."""
    if outcome in (Outcome.LOST_IN_TRANSIT, Outcome.FORGOTTEN):
        return Lost(half)
    if type(half) is EngineReceiver:
        return Finished(half) if outcome is Outcome.FINISHED else Cancelled(half, breaks_off=True)
    assert isinstance(half, EngineSender)  # as there are two kinds
    return Stopped(half) if outcome is Outcome.NO_RECEIVER else Confirmed(half)
