"""What may we send on a channel, and what became of it? The sender's state machine: queues, numbers, its streams."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Sending, Step, advance, queue_of
from muxkit.protocols.aqueduct._events import Outcome, Writable
from muxkit.protocols.aqueduct._frames import (
    CancelSender,
    FinishSender,
    RouteTo,
    SentUnreliable,
    encode_frame,
    message_head,
)
from muxkit.protocols.aqueduct._line import OutStream
from muxkit.protocols.aqueduct._numbers import Flight, acked_ranges

if TYPE_CHECKING:
    from collections import deque

    from muxkit.protocols.aqueduct._channels import Channels
    from muxkit.protocols.aqueduct._transit import Transit


class Mode(Enum):
    """How a message travels."""

    ORDERED = "ordered"
    """In one stream with the others of the channel, in the order they were sent."""
    UNORDERED = "unordered"
    """In a stream of its own."""
    UNRELIABLE = "unreliable"
    """In a datagram, if it fits; the oldest ones give way when the link is slow."""


@attrs.define(eq=False)
class Promise:
    """Who wants to hear what became of a message; `arrived` is None until it is known."""

    sender: SenderMachine
    arrived: bool | None = None
    owner: object = None  # what the application has of it


@attrs.define(eq=False)
class Outgoing:
    """A message on its way; `headers` and `attachments` are encoded fields."""

    payload: bytes
    headers: bytes
    attachments: bytes
    nodes: tuple[Transit, ...] = ()
    receipt: Promise | None = None
    stream: OutStream | None = None  # its own, if it has one

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.headers) + len(self.attachments)


class SenderMachine:
    """The half that sends. `id` is None until the other half was handed over."""

    def __init__(self, channels: Channels, *, oneshot: bool, id: int | None, transit: Transit) -> None:
        self.id = id
        self.oneshot = oneshot
        self.transit = transit
        self.state = Sending.OPEN
        self.outcome: Outcome | None = None
        self.outcome_told: Outcome | None = None  # the application heard of the end before the peer did
        self.attached = False  # the application has it
        self.cancelling = False  # told the peer, who has not closed the receiver yet
        self.finish_written = False
        self.flush = False  # the count of datagrams may go
        self.queued = 0  # bytes that wait for the link
        self.watched: int | None = None  # somebody waits until so much is admitted
        self.sent_reliable = 0
        self.sent_unreliable = 0
        self.counted = 0  # of these the peer has been told with SENT_UNRELIABLE
        self.reported = 0  # and these it has acked or nacked
        self.reliable: Flight[Outgoing] = Flight()
        self.unreliable: Flight[Outgoing] = Flight()  # only those that somebody waits for
        self.ordered: deque[Outgoing] = NO_QUEUE
        self.unordered: dict[OutStream, Outgoing] = {}  # those without a number
        self.datagrams: deque[Outgoing] = NO_QUEUE
        self.datagram_bytes = 0
        self.main: OutStream | None = None
        self._writing = 0  # bytes of the message that the main stream is in the midst of
        self.channels = channels
        self.owner: object = None  # what the application has of it
        self.is_told = False  # there was an event about its end

    @property
    def gone(self) -> bool:
        return self.outcome is not None

    # --- commands

    @property
    def unanswered(self) -> int:
        """Messages that wait to be sent, acked or nacked, apart from plain unreliable ones."""
        return len(self.reliable) + len(self.unreliable) + len(self.ordered) + len(self.unordered)

    def admits(self, size: int) -> bool:
        """Is there room for one more reliable message? An empty queue takes one of any size."""
        channels = self.channels
        if self.unanswered >= channels.config.in_flight or len(self.unordered) >= channels.config.unopened:
            return False
        limits = channels.limits
        return self.queued == 0 or (
            self.queued + size <= limits.channel_bytes and channels.outbox + size <= limits.outbox
        )

    def enqueue(self, outgoing: Outgoing, mode: Mode) -> None:
        if mode is Mode.ORDERED:
            self._count(outgoing.size)
            self.ordered = queue_of(self.ordered)
            self.ordered.append(outgoing)
            self.channels.line.add(self.stream())
        elif mode is Mode.UNORDERED:
            self._count(outgoing.size)
            self.send_alone(outgoing)
        else:
            self.channels.queue_datagram(self, outgoing)
        if self.oneshot:
            self.finish()

    def send_alone(self, outgoing: Outgoing) -> None:
        """In a stream of its own; its bytes are counted already."""
        outgoing.stream = OutStream(self.route(), source=Alone(self, outgoing))
        self.unordered[outgoing.stream] = outgoing
        self.channels.line.add(outgoing.stream)

    def finish(self) -> None:
        self.state = advance(self.state, Step.FINISH)
        self.channels.line.add(self.stream())

    def cancel(self) -> None:
        """Tell the peer to give up, too; the machine stays until it has heard."""
        self.state = Sending.CLOSED
        self.cancelling = True
        self.drop_streams()
        frames = self.route(), encode_frame(CancelSender())
        self.channels.line.add(OutStream(*frames, urgent=True))
        self.channels.wrote("CANCEL_SENDER", self.id)

    def resume(self) -> None:
        """One message less waits for its number: the end may be next."""
        if self.state is Sending.FINISHING:
            self.channels.line.add(self.stream())

    def give_up(self) -> None:
        """The peer stopped a stream that cannot be done without: to the application the receiver is gone."""
        if self.gone or self.cancelling:
            return
        if self.finish_written:  # no CANCEL_SENDER may follow
            self.channels.end(self, Outcome.NO_RECEIVER)
        else:
            self.channels.cancel(self, Outcome.NO_RECEIVER)

    def drop_streams(self) -> None:
        """Give up all streams that may still bring messages."""
        line = self.channels.line
        if self.main is not None:
            line.drop(self.main)
        for stream in self.unordered:
            line.drop(stream)
        for outgoing in self.reliable.records():
            if outgoing.stream is not None:
                line.reset(outgoing.stream)
        self._uncount(self.queued)
        self._writing = 0

    def take_unsent(self) -> list[Outgoing]:
        """The messages that never left."""
        unsent = [*self.ordered, *self.unordered.values(), *self.datagrams]
        self.ordered = NO_QUEUE
        self.unordered.clear()
        self.datagrams = NO_QUEUE
        self.datagram_bytes = 0
        return unsent

    @property
    def has_datagram(self) -> bool:
        """Is there an unreliable message to send? One that somebody waits for may have to wait for a report."""
        if not self.datagrams:
            return False
        outgoing = self.datagrams[0]
        is_waited_for = outgoing.nodes or outgoing.receipt
        return not is_waited_for or len(self.unreliable) < self.channels.config.in_flight

    def take_datagram(self) -> Outgoing:
        """The oldest unreliable message."""
        outgoing = self.datagrams.popleft()
        self.datagram_bytes -= outgoing.size
        return outgoing

    # --- what the peer says

    def acked(self, varints: list[int]) -> list[Outgoing]:
        """An ACK_RELIABLE; gives those messages that somebody waits for."""
        end = sum(varints)
        if end > self.sent_reliable:
            raise RemoteProtocolError(
                f"message {end - 1} acked, {self.sent_reliable} were sent reliably", rule="aqueduct-A04"
            )
        settled: list[Outgoing] = []
        for first, last in acked_ranges(varints):
            settled += self.reliable.settle(first, last)
        return settled

    def reported_on(self, varints: list[int]) -> tuple[list[Outgoing], list[Outgoing]]:
        """An ACK_NACK_UNRELIABLE; gives those acked and those nacked that somebody waits for."""
        end = self.reported + sum(varints)
        if end > self.sent_unreliable:
            raise RemoteProtocolError(
                f"datagram message {end - 1} reported, {self.sent_unreliable} were sent", rule="aqueduct-A11"
            )
        answers: tuple[list[Outgoing], list[Outgoing]] = ([], [])
        for index, length in enumerate(varints):
            if length:
                answers[index % 2].extend(self.unreliable.settle(self.reported, self.reported + length - 1))
                self.reported += length
        return answers

    def outcome_of_close(self) -> Outcome:
        """What it means that the receiver was closed."""
        if self.cancelling:
            return Outcome.CANCELLED
        return Outcome.FINISHED if self.finish_written and len(self.reliable) == 0 else Outcome.NO_RECEIVER

    # --- streams

    def route(self) -> bytes:
        assert self.id is not None  # nothing is sent before the hand-over
        return encode_frame(RouteTo(self.id))

    def stream(self) -> OutStream:
        """The one of ordered messages, counts and the end."""
        if self.main is None:
            self.main = OutStream(self.route(), source=self)
        return self.main

    @property
    def _owes_count(self) -> bool:
        return self.sent_unreliable > self.counted

    @property
    def _can_finish(self) -> bool:
        return self.state is Sending.FINISHING and not (
            self.finish_written or self.ordered or self.unordered or self.datagrams
        )

    def has_frames(self) -> bool:
        return bool(self.ordered) or (self.flush and self._owes_count) or self._can_finish

    def fill(self, stream: OutStream) -> None:
        self._wrote_whole()
        if self._owes_count and (self.flush or self._can_finish):
            stream.pending.append(encode_frame(SentUnreliable(self.sent_unreliable - self.counted)))
            self.counted = self.sent_unreliable
            self.flush = False
            self.channels.wrote("SENT_UNRELIABLE", self.id)
        elif self.ordered:
            outgoing = self.ordered.popleft()
            self._writing = outgoing.size
            self.write(outgoing, stream)
        elif self._can_finish:
            stream.pending.append(encode_frame(FinishSender(self.sent_reliable)))
            stream.fin = self.finish_written = True
            self.channels.wrote("FINISH_SENDER", self.id)

    def pulled(self, stream: OutStream) -> None:
        if not stream.pending:
            self._wrote_whole()
            self.wake()

    def _wrote_whole(self) -> None:
        """The message that the main stream was in the midst of has left."""
        self._uncount(self._writing)
        self._writing = 0

    def write(self, outgoing: Outgoing, stream: OutStream) -> None:
        """A message gets its number and goes."""
        head = message_head(self.sent_reliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        stream.pending.append(head)
        if outgoing.payload:
            stream.pending.append(outgoing.payload)
        self.channels.wrote("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        is_waited_for = outgoing.nodes or outgoing.receipt or outgoing.stream
        self.reliable.add(self.sent_reliable, outgoing if is_waited_for else None)
        self.sent_reliable += 1

    def number_datagram(self, outgoing: Outgoing) -> bytes:
        """The MESSAGE with the number that it would get now; `datagram_sent` if it is sent."""
        head = message_head(self.sent_unreliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        return self.route() + head + outgoing.payload

    def datagram_sent(self, outgoing: Outgoing) -> None:
        self.channels.wrote("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        if outgoing.nodes or outgoing.receipt:
            self.unreliable.add(self.sent_unreliable, outgoing)
        self.sent_unreliable += 1

    # --- room

    def wake(self) -> None:
        """Tell who watches, if there is room by now."""
        if self.watched is not None and self.admits(self.watched):
            self.watched = None
            self.channels.tell(Writable(self))

    def count_alone(self, outgoing: Outgoing) -> None:
        """An unreliable message that goes in a stream counts from here on."""
        self._count(outgoing.size)

    def _count(self, size: int) -> None:
        self.queued += size
        self.channels.outbox += size

    def _uncount(self, size: int) -> None:
        self.queued -= size
        self.channels.outbox -= size

    def written_alone(self, size: int) -> None:
        self._uncount(size)
        self.wake()

    def check_open(self) -> None:
        """May it still send?"""
        self._check(self.state is Sending.OPEN)

    @property
    def is_cancellable(self) -> bool:
        """Is it alive, and has the peer not been told of an end yet?"""
        return not self.gone and self.state is not Sending.CLOSED and not self.finish_written

    def check_cancellable(self) -> None:
        self._check(self.is_cancellable)

    def _check(self, is_fine: bool) -> None:
        if self.id is None:
            raise LocalProtocolError("the other half has not been sent yet")
        if self.gone or not is_fine:
            why = self.outcome.value if self.outcome else "cancelled" if self.cancelling else self.state.value
            raise LocalProtocolError(f"channel {self.id}: the sender is {why}")


class Alone:
    """One message in a stream of its own."""

    __slots__ = ("_outgoing", "_sender", "_size")

    def __init__(self, sender: SenderMachine, outgoing: Outgoing) -> None:
        self._sender = sender
        self._outgoing = outgoing
        self._size = outgoing.size

    def give_up(self) -> None:
        self._sender.give_up()

    def has_frames(self) -> bool:
        return True

    def fill(self, stream: OutStream) -> None:
        self._sender.unordered.pop(stream)
        self._sender.write(self._outgoing, stream)
        stream.fin = True
        self._sender.resume()
        self._sender.wake()

    def pulled(self, stream: OutStream) -> None:
        if stream.fin and not stream.pending:
            self._sender.written_alone(self._size)
