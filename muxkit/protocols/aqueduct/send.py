"""The sending half of a channel: its queues of messages, and the frames that it writes.

A message is *queued* until the link is ready to send it. When it is *written*, it gets its number. Then it is
*unanswered* until the peer has acked it, or has reported that its datagram got lost. `has_room` limits the queued bytes
and the number of unanswered messages.

All ordered messages of a half share its main stream. Each unordered message has a stream of its own, and each
unreliable message is sent in a datagram (`Mode`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Reason, Sending, Step, advance, encode_varint
from muxkit.core.events import Writable
from muxkit.core.halves import Sender
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.frames import Pairs
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.numbers import Flight, acked_ranges
from muxkit.protocols.aqueduct.streams import OutStream
from muxkit.protocols.aqueduct.transit import Transit

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.state import State

OPEN: Final = Sending.OPEN  # a global is faster than an attribute of an enum, and `try_send` reads it for each message
EMPTY_FIELD: Final = frames.encode_headers(())  # no headers, or no attachments
PLAIN_HEADERS_SIZE: Final = len(EMPTY_FIELD)  # size of the headers of a message that has none
PLAIN_SIZE: Final = 2 * len(EMPTY_FIELD)  # size of the empty headers and the empty attachments of a message
ATTACHMENT_SIZE: Final = 10  # size of the longest id of a channel
# Maximum number of unsent messages, records and runs of numbers of one channel. Each takes a few hundred bytes in
# addition to its payload.
KEPT_MOST: Final = 1024
# A payload of up to this many bytes is copied behind the head of its message. Otherwise it stays a buffer of its own.
JOIN_MOST: Final = 1024


class Mode(Enum):
    """How a message is sent."""

    ORDERED = "ordered"
    """In the same stream as the other ordered messages of the channel, so that they arrive in order."""
    UNORDERED = "unordered"
    """In a stream of its own, so that it doesn't have to wait for other messages."""
    UNRELIABLE = "unreliable"
    """In a datagram, if it fits into one. It may get lost. If the link is slow, the oldest queued ones are dropped."""


@attrs.define(eq=False)
class Ticket:
    """The half of a channel that this side has created and will attach to a message."""

    half: EngineHalf
    headers: bytes

    @property
    def spent(self) -> bool:
        """True once the half was attached to a message, or its channel was closed before that."""
        return self.half.is_spent


class Promise:
    """The result of one message, for the session's receipt."""

    __slots__ = ("arrived", "owner", "sender")

    def __init__(self, sender: EngineSender) -> None:
        self.sender: EngineSender = sender
        self.arrived: bool | None = None
        """True if the message has arrived, False if it hasn't, None while that isn't known."""
        self.owner: object = None
        """The session's receipt."""


@attrs.define(eq=False)
class Outgoing:
    """A message that is queued or unanswered."""

    payload: bytes  # freed when the message was written, like the two encoded fields
    headers: bytes  # encoded
    attachments: bytes  # encoded
    size: int  # the sum of the sizes of these three
    nodes: tuple[Transit, ...] = ()  # the attached channels
    receipt: Promise | None = None
    stream: OutStream | None = None  # the stream of an unordered message


class EngineSender(EngineHalf, Sender):
    """The sending half of a channel."""

    __slots__ = (
        "_watched",
        "_writing",
        "counted",
        "datagram_bytes",
        "datagrams",
        "finish_written",
        "messages_sent",
        "ordered",
        "outcome_told",
        "phase",
        "queued",
        "reliable",
        "reported",
        "sent_reliable",
        "sent_unreliable",
        "unordered",
        "unreliable",
    )

    def __init__(self, state: State, id: int | None, transit: Transit, *, oneshot: bool) -> None:
        super().__init__(state, id, transit, oneshot=oneshot)
        self.phase: Sending = Sending.OPEN
        self.outcome_told: Outcome | None = None
        """The outcome that was reported to the application before the peer confirmed the end."""
        self.messages_sent: int = 0
        """Messages that the application has given to this half."""
        self.queued: int = 0
        self.sent_reliable: int = 0  # messages that were numbered in streams, and with that the next number
        self.sent_unreliable: int = 0  # the same for datagrams
        self.counted: int = 0  # datagrams that SENT_UNRELIABLE has announced
        self.reported: int = 0  # datagrams that the peer has acked or nacked
        self.reliable: Flight[Outgoing] = Flight()
        self.unreliable: Flight[Outgoing] = Flight()  # only those with a receipt or an attachment
        self.ordered: deque[Outgoing | bytes] = NO_QUEUE
        """Ordered messages. A message with nothing but a payload is represented by the payload, to save the object."""
        self.unordered: dict[OutStream, Outgoing] = {}  # those without a number
        self.datagrams: deque[Outgoing] = NO_QUEUE
        self.datagram_bytes: int = 0
        self.finish_written: bool = False
        """FINISH_SENDER was written, so no CANCEL_SENDER may follow."""
        self._watched: int | None = None  # report `Writable` once there is room for a message of this size
        self._writing = 0  # bytes of the message that the main stream has begun to write

    # --- what others ask

    @property
    def has_sent(self) -> bool:
        return self.messages_sent > 0

    @property
    def unanswered(self) -> int:
        """Messages that wait to be sent, acked or nacked; unreliable ones count only with a receipt or attachment."""
        return self.reliable.count + self.unreliable.count + len(self.ordered) + len(self.unordered)

    def check_size(self, size: int) -> None:
        self.state.check_size(size)

    def has_room(self, size: int) -> bool:
        return not self.state.over and self.admits(size + PLAIN_HEADERS_SIZE)

    def notify_when_room(self, size: int) -> None:
        self._check_open()
        self._watched = size + PLAIN_HEADERS_SIZE
        self.wake()

    def admits(self, size: int) -> bool:
        """Return True if there is room for a reliable message of this size, headers included.

        An empty queue takes a message of any size.
        """
        state, reliable, unreliable = self.state, self.reliable, self.unreliable
        waiting, alone = len(self.ordered), len(self.unordered)
        if reliable.count + unreliable.count + waiting + alone >= state.config.in_flight:
            return False
        if reliable.kept + unreliable.kept + waiting >= KEPT_MOST or alone >= state.config.unopened:
            return False
        queued = self.queued
        return not queued or (queued + size <= state.short_window and state.outbox + size <= state.limits.outbox)

    def size_of(self, payload: bytes, headers: Pairs, attachments: Sequence[Ticket]) -> int:
        """Return what a message counts for `has_room`; raises `LocalProtocolError` for one that can never be sent."""
        return self._size_of(payload, self.state.encode(headers), attachments) - PLAIN_HEADERS_SIZE

    def _size_of(self, payload: bytes, encoded: bytes, attachments: Sequence[Ticket]) -> int:
        size = len(payload) + len(encoded)
        if attachments:
            size += sum(ATTACHMENT_SIZE + len(ticket.headers) for ticket in attachments)
        self.check_size(size)
        return size

    # --- commands

    def send(self, message: bytes) -> None:
        self.state.check_alive()
        self._check_open()
        self.check_size(len(message) + PLAIN_HEADERS_SIZE)
        self._push_plain(message)

    def try_send(self, message: bytes) -> bool | None:
        state = self.state
        size = len(message) + PLAIN_HEADERS_SIZE
        if self.phase is not OPEN or self.id is None or self.outcome is not None or state.over:
            return None
        if self.oneshot or size > state.limits.message or not self.admits(size):
            return None
        return self._push_plain(message)

    def transmit(
        self,
        payload: bytes,
        *,
        headers: Pairs = (),
        attachments: Sequence[Ticket] = (),
        mode: Mode = Mode.ORDERED,
        receipt: bool = False,
    ) -> Promise | None:
        """Queue a message. There must be room for it, unless it is unreliable. With `receipt` return a promise.

        Either does all of its work, or raises `LocalProtocolError` and changes nothing. A oneshot channel finishes
        with its only message.
        """
        state = self.state
        state.check_alive()
        self._check_open()
        encoded = state.encode(headers) if headers else EMPTY_FIELD
        if attachments:
            state.check_tickets(attachments)
        size = self._size_of(payload, encoded, attachments)
        if mode is not Mode.UNRELIABLE and not self.admits(size):
            raise LocalProtocolError(
                f"no room on {self.label} for {size} bytes: {self.queued} bytes are queued and {self.unanswered} "
                "messages unanswered"
            )
        field = EMPTY_FIELD
        nodes: tuple[Transit, ...] = ()
        if attachments:
            ids = state.hand_over(attachments)
            field = frames.encode_varbytes(b"".join(encode_varint(id) + channel_headers for id, channel_headers in ids))
            nodes = tuple(ticket.half.transit for ticket in attachments)
        promise = Promise(self) if receipt else None
        size = len(payload) + len(encoded) + len(field)
        self._push(Outgoing(payload, encoded, field, size, nodes, promise), mode)
        return promise

    def _push(self, outgoing: Outgoing, mode: Mode) -> None:
        """Queue a message for which there is room."""
        if mode is Mode.ORDERED:
            self._push_ordered(outgoing, outgoing.size)
            return
        state = self.state
        if mode is Mode.UNORDERED:
            self.count_queued(outgoing.size)
            self.send_alone(outgoing)
        else:
            state.queue_datagram(self, outgoing)
        self.messages_sent += 1
        state.messages_sent += 1
        if self.oneshot:
            self.finish()

    def _push_plain(self, message: bytes) -> bool:
        """Queue an ordered message without headers and attachments. Return False if the stream was queued before."""
        return self._push_ordered(message, len(message) + PLAIN_SIZE)

    def _push_ordered(self, message: Outgoing | bytes, size: int) -> bool:
        state, queue = self.state, self.ordered
        if queue is NO_QUEUE:
            queue = self.ordered = deque()
        queue.append(message)
        self.queued += size  # as `count_queued` does
        state.outbox += size
        self.messages_sent += 1
        state.messages_sent += 1
        if self.oneshot:
            self.finish()
        return state.streams.add(self.main or self.stream())

    def finish(self, payload: bytes = b"") -> None:
        if payload:
            raise LocalProtocolError("the end of an Aqueduct channel carries no payload; send it as a message before")
        if self.id is None:
            self.is_spent: bool = True
            return
        if self.has_news:  # the half has ended, and the session is about to learn that
            return
        self.state.check_alive()
        self._check_open()
        self.phase = advance(self.phase, Step.FINISH)
        self.state.streams.add(self.stream())

    def cancel(self, reason: Reason) -> None:
        """Give up the messages that are on their way. This does nothing once the end was written.

        The reason goes in front of it as an empty message with a header, except on a oneshot channel.
        """
        if self.id is None:
            self.is_spent = True
        elif self.is_cancellable:
            self.state.update_time()
            self.state.cancel(self, reason=reason.encode())

    @property
    def is_cancellable(self) -> bool:
        """True while the half is alive and the peer wasn't told of its end."""
        return self.is_live and self.phase is not Sending.CLOSED and not self.finish_written

    @property
    def cancelling(self) -> bool:
        """True once CANCEL_SENDER was queued; the half stays until the peer has closed the receiver."""
        return self.phase is Sending.CLOSED

    # --- for the state

    def send_alone(self, outgoing: Outgoing) -> None:
        """Send a message in a stream of its own; its bytes are counted already."""
        outgoing.stream = OutStream([self.route()], source=SingleMessage(self, outgoing))
        self.unordered[outgoing.stream] = outgoing
        self.state.streams.add(outgoing.stream)

    def write_cancellation(self, reason: bytes = b"") -> None:
        """Write CANCEL_SENDER instead of the rest; the half stays until the peer has closed the receiver.

        CANCEL_SENDER has no room for a reason. It goes in the headers of a last message, where one more may be sent.
        """
        self.phase = Sending.CLOSED
        self.drop_streams()
        routed: list[Buffer] = [self.route()]
        if reason and not self.oneshot:
            headers = frames.encode_headers([(frames.REASON_HEADER, reason)])
            routed.append(frames.message_head(self.sent_reliable, headers, EMPTY_FIELD, 0))
            self.state.frame_written("MESSAGE", self.id)
            self.reliable.add(self.sent_reliable, None)
            self.sent_reliable += 1
        routed.append(frames.encode_frame(frames.CancelSender()))
        self.state.streams.add(OutStream(routed, urgent=True))
        self.state.frame_written("CANCEL_SENDER", self.id)

    def message_numbered(self) -> None:
        """Schedule FINISH_SENDER if no other message waits for its number."""
        if self.phase is Sending.FINISHING:
            self.state.streams.add(self.stream())

    def drop_streams(self) -> None:
        """Give up all streams that may still bring messages."""
        streams = self.state.streams
        if self.main is not None:
            streams.drop(self.main)
        for stream in self.unordered:
            streams.drop(stream)
        for outgoing in self.reliable.records():
            if outgoing.stream is not None:
                streams.reset(outgoing.stream)
        self.count_queued(-self.queued)
        self._writing = 0

    def take_unsent(self) -> list[Outgoing]:
        """Remove the messages that were not written, and return those that may have a receipt or an attachment."""
        ordered = [message for message in self.ordered if isinstance(message, Outgoing)]
        unsent = [*ordered, *self.unordered.values(), *self.datagrams]
        self.ordered = NO_QUEUE
        self.unordered.clear()
        self.datagrams = NO_QUEUE
        self.datagram_bytes = 0
        return unsent

    @property
    def has_datagram(self) -> bool:
        """True if a datagram can be sent; one with a receipt or attachment waits while too many are unanswered."""
        if not self.datagrams:
            return False
        outgoing = self.datagrams[0]
        is_tracked = outgoing.nodes or outgoing.receipt
        return not is_tracked or self.unreliable.count < min(self.state.config.in_flight, KEPT_MOST)

    def take_datagram(self) -> Outgoing:
        """Remove the oldest unreliable message."""
        outgoing = self.datagrams.popleft()
        self.datagram_bytes -= outgoing.size
        return outgoing

    # --- answers of the peer

    def take_acked(self, varints: list[int]) -> list[Outgoing]:
        """Apply an ACK_RELIABLE; return the acked messages with a receipt or an attachment."""
        end = sum(varints)
        if end > self.sent_reliable:
            raise RemoteProtocolError(
                f"message {end - 1} acked, {self.sent_reliable} were sent reliably", rule="aqueduct-A04"
            )
        acked: list[Outgoing] = []
        for first, last in acked_ranges(varints):
            acked += self.reliable.take(first, last)
        return acked

    def take_reported(self, varints: list[int]) -> tuple[list[Outgoing], list[Outgoing]]:
        """Apply an ACK_NACK_UNRELIABLE; return the acked and the nacked messages with a receipt or an attachment."""
        end = self.reported + sum(varints)
        if end > self.sent_unreliable:
            raise RemoteProtocolError(
                f"datagram message {end - 1} reported, {self.sent_unreliable} were sent", rule="aqueduct-A11"
            )
        answers: tuple[list[Outgoing], list[Outgoing]] = ([], [])
        for index, length in enumerate(varints):
            if length:
                answers[index % 2].extend(self.unreliable.take(self.reported, self.reported + length - 1))
                self.reported += length
        return answers

    def outcome_of_close(self) -> Outcome:
        """Return how this half ends if the peer closes the receiver now."""
        if self.cancelling:
            return Outcome.CANCELLED
        return Outcome.FINISHED if self.finish_written and self.reliable.count == 0 else Outcome.NO_RECEIVER

    # --- streams

    def stream(self) -> OutStream:
        """Return the stream of ordered messages, counts and FINISH_SENDER."""
        if self.main is None:
            main = OutStream([self.route()], source=self)
            self.main: OutStream | None = main
            return main
        return self.main

    @property
    def _owes_count(self) -> bool:
        return self.sent_unreliable > self.counted

    @property
    def _can_finish(self) -> bool:
        return self.phase is Sending.FINISHING and not (
            self.finish_written or self.ordered or self.unordered or self.datagrams
        )

    def has_frames(self) -> bool:
        return bool(self.ordered) or (self.flush and self._owes_count) or self._can_finish

    def fill(self, stream: OutStream, room: int) -> None:
        self._message_written()
        if self._owes_count and (self.flush or self._can_finish):
            stream.pending.append(frames.encode_frame(frames.SentUnreliable(self.sent_unreliable - self.counted)))
            self.counted = self.sent_unreliable
            self.flush: bool = False
            self.state.frame_written("SENT_UNRELIABLE", self.id)
        elif self.ordered:
            self._fill_with_messages(stream, room)
        elif self._can_finish:
            stream.pending.append(frames.encode_frame(frames.FinishSender(self.sent_reliable)))
            stream.fin = self.finish_written = True
            self.state.frame_written("FINISH_SENDER", self.id)

    def pulled(self, stream: OutStream) -> None:
        if not stream.pending:
            self._message_written()
            if self._watched is not None:
                self.wake()

    def _message_written(self) -> None:
        """The message that the main stream had begun was pulled to its end."""
        if self._writing:
            self.count_queued(-self._writing)
            self._writing = 0

    def _fill_with_messages(self, stream: OutStream, room: int) -> None:
        """Append the next message, or as many messages without headers and attachments as begin within `room` bytes."""
        queue, append = self.ordered, stream.pending.append
        if isinstance(message := queue[0], Outgoing):
            queue.popleft()
            self._writing = message.size
            self.write(message, stream)
            return
        first = number = self.sent_reliable
        counted = 0  # what these messages count in `queued`
        while queue and room > 0 and type(payload := queue[0]) is bytes:
            queue.popleft()
            size = len(payload)
            head = frames.plain_start(number) + encode_varint(size)
            if size <= JOIN_MOST:
                append(head + payload)
            else:
                append(head)
                append(payload)
            self._writing = size + PLAIN_SIZE
            counted += self._writing
            room -= len(head) + size
            number += 1
            if self.state.observer is not None:
                self.state.frame_written("MESSAGE", self.id, size)
        self.count_queued(self._writing - counted)  # only a part of the last message may be pulled now
        self.reliable.add_run(first, number - 1)
        self._numbered(number - first)

    def _numbered(self, count: int) -> None:
        self.sent_reliable += count
        if self.state.flushing:
            self.state.flush_early()

    def write(self, outgoing: Outgoing, stream: OutStream) -> None:
        """Number a message and append it to a stream."""
        head = frames.message_head(self.sent_reliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        stream.pending.append(head)
        if outgoing.payload:
            stream.pending.append(outgoing.payload)
        self.state.frame_written("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        is_tracked = outgoing.nodes or outgoing.receipt or outgoing.stream
        self.reliable.add(self.sent_reliable, outgoing if is_tracked else None)
        self._numbered(1)

    def encode_datagram(self, outgoing: Outgoing) -> bytes:
        """Encode a message with the next number; `datagram_sent` takes that number."""
        head = frames.message_head(self.sent_unreliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        return self.route() + head + outgoing.payload

    def datagram_sent(self, outgoing: Outgoing) -> None:
        """Count a datagram that the link has taken."""
        self.state.frame_written("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        if outgoing.nodes or outgoing.receipt:
            self.unreliable.add(self.sent_unreliable, outgoing)
        self.sent_unreliable += 1

    # --- room

    def wake(self) -> None:
        """Report the half as writable, if that was asked for and there is room."""
        if self._watched is not None and self.admits(self._watched):
            self._watched = None
            self.state.events.append(Writable(self))

    def count_queued(self, size: int) -> None:
        """Add to the bytes that wait for the link; `size` is negative for bytes that were written or dropped."""
        self.queued += size
        self.state.outbox += size

    def _check_open(self) -> None:
        """Raise `LocalProtocolError` unless more may be sent."""
        if self.phase is not Sending.OPEN or self.id is None or self.outcome is not None:
            self.check_handed_over()
            why = self.outcome.value if self.outcome else "cancelled" if self.cancelling else self.phase.value
            raise LocalProtocolError(f"nothing can be sent on {self.label}: the sender is {why}")


@attrs.define(eq=False)
class SingleMessage:
    """The source of a stream that carries one message."""

    sender: EngineSender
    _outgoing: Outgoing

    def has_frames(self) -> bool:
        return True

    def fill(self, stream: OutStream, room: int) -> None:
        self.sender.unordered.pop(stream)
        self.sender.write(self._outgoing, stream)
        stream.fin = True
        self.sender.message_numbered()
        self.sender.wake()

    def pulled(self, stream: OutStream) -> None:
        if stream.fin and not stream.pending:
            self.sender.count_queued(-self._outgoing.size)
            self.sender.wake()
