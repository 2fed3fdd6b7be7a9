"""The two halves of a channel as state machines: their message numbers, and how an attached one gets to the peer.

Streams and datagrams number their messages separately. No cost depends on the size of a number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Generic, TypeVar

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import NO_QUEUE, Buffer, Ranges, Sending, Step, StreamId, advance, queue_of
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine.streams import OutStream, StreamScheduler

DATAGRAM_COST = 256  # bytes that a message from a datagram counts beside its own
EMPTY_FIELD = frames.encode_headers(())  # no headers, or no attachments


class Mode(Enum):
    """How a message travels."""

    ORDERED = "ordered"
    """In one stream with the others of the channel, in the order they were sent."""
    UNORDERED = "unordered"
    """In a stream of its own."""
    UNRELIABLE = "unreliable"
    """In a datagram, if it fits; the oldest are dropped when the link is slow."""


class Outcome(Enum):
    """How a half ended."""

    FINISHED = "finished"
    """Everything was sent and came."""
    CANCELLED = "cancelled"
    """The sender gave up."""
    NO_RECEIVER = "no receiver"
    """The receiver was closed before everything had come. Reported at the sender's side only."""
    LOST_IN_TRANSIT = "lost in transit"
    """The message that carried the channel did not arrive; the channel never reached the other side."""
    FORGOTTEN = "forgotten"
    """The side that made the channel has discarded it; most often because it was lost in transit."""


# --- message numbers

RecordT = TypeVar("RecordT")


def acked_ranges(varints: list[int]) -> Iterator[tuple[int, int]]:
    """Give what an ACK_RELIABLE acks as (first, last): gaps and lengths alternate, the first gap from 0 (A02)."""
    at = 0
    for gap, length in zip(varints[::2], varints[1::2], strict=True):
        at += gap
        yield at, at + length - 1
        at += length


def ack_varints(ranges: Ranges) -> list[int]:
    """Encode ranges as the varints of an ACK_RELIABLE."""
    varints, at = [], 0
    for first, last in ranges:
        varints += [first - at, last - first + 1]
        at = last + 1
    return varints


@attrs.define(eq=False)
class Flight(Generic[RecordT]):
    """Numbers that were sent and not answered, with a record for each that a receipt or an attachment depends on."""

    _numbers: list[int] = attrs.Factory(list)
    _records: dict[int, RecordT] = attrs.Factory(dict)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, record: RecordT | None) -> None:
        """Add a number above all earlier ones."""
        self._numbers.append(number)
        if record is not None:
            self._records[number] = record

    def take(self, first: int, last: int) -> list[RecordT]:
        """Remove the numbers from `first` to `last` and give their records; costs what is found, not what is asked."""
        begin = bisect_left(self._numbers, first)
        end = bisect_right(self._numbers, last)
        taken = self._numbers[begin:end]
        del self._numbers[begin:end]
        return [self._records.pop(number) for number in taken if number in self._records]

    def records(self) -> list[RecordT]:
        """The records of all unanswered numbers."""
        return list(self._records.values())

    def clear(self) -> list[RecordT]:
        """Remove all numbers and give their records."""
        records = self.records()
        self._numbers.clear()
        self._records.clear()
        return records


class ReliableNumbers:
    """The numbers of messages received in streams, and the acks owed for them."""

    __slots__ = ("got", "owed", "total")

    def __init__(self, gaps: int) -> None:
        self.got: Ranges = Ranges(gaps)
        # An owed range ends at a number that was acked before or is missing, so there are at most twice as many.
        self.owed: Ranges = Ranges(2 * gaps + 2)
        self.total: int | None = None  # how many there are, once the sender has finished

    def check(self, number: int) -> None:
        if self.total is not None and number >= self.total:
            raise RemoteProtocolError(
                f"message {number} on a channel that finished with {self.total}", rule="aqueduct-S08"
            )
        if number in self.got:
            raise RemoteProtocolError(f"message {number} came a second time", rule="aqueduct-S08")

    def arrived(self, number: int) -> None:
        """Record a number that `check` has passed; an ack is owed for it."""
        self.got.add(number)
        self.owed.add(number)

    @property
    def is_complete(self) -> bool:
        """Whether the sender has finished and every stream message has come."""
        if self.total is None:
            return False
        return self.total == 0 or (len(self.got) == 1 and next(iter(self.got)) == (0, self.total - 1))

    def take_acks(self) -> list[int]:
        """Give the varints of the ACK_RELIABLE that is owed; nothing is owed after it."""
        varints = ack_varints(self.owed)
        self.owed.discard_below((self.owed.highest or 0) + 1)
        return varints


class UnreliableNumbers:
    """The numbers of messages received in datagrams: reported ≤ due ≤ known."""

    __slots__ = ("_got", "due", "known", "reported")

    def __init__(self, gaps: int) -> None:
        self._got = Ranges(gaps)
        self.reported: int = 0  # all below were acked or nacked
        self.due: int = 0  # all below may be reported now
        self.known: int = 0  # all below have been sent

    @property
    def any(self) -> bool:
        return self.known > 0 or len(self._got) > 0

    def is_new(self, number: int) -> bool:
        """Return True for a number that has neither come nor been nacked."""
        return number >= self.reported and number not in self._got

    def arrived(self, number: int) -> bool:
        """Record a number; False if it is known, nacked, or would open one gap too many."""
        if not self.is_new(number):
            return False
        try:
            self._got.add(number)
        except RemoteProtocolError:
            return False
        return True

    def take_report(self) -> list[int]:
        """Give the varints of the ACK_NACK_UNRELIABLE that is due: acked and nacked lengths alternate (A09)."""
        varints, at = [], self.reported
        for first, last in self._got.missing(self.reported, self.due - 1):
            varints += [first - at, last - first + 1]
            at = last + 1
        if at < self.due:
            varints.append(self.due - at)
        self.reported = self.due
        self._got.discard_below(self.reported)
        return varints


# --- attached channels


class Fate(Enum):
    PENDING = "pending"
    ACCESSIBLE = "accessible"
    LOST = "lost"


@attrs.define(eq=False)
class Transit:
    """The way of one attached channel to the peer, as a node of a tree.

    A channel becomes accessible when its message is acked on an accessible channel, and is lost when that message is
    nacked or its carrying channel is lost. Section 3.6 of the document is empty; docs/conformance.md has this reading.

    A channel whose message was acked on a pending channel is a child of that channel's node. The node of a channel that
    has ended stays only while it joins two or more others, so the tree is no larger than the number of live channels.
    """

    channel: int | None
    ours: bool
    fate: Fate = Fate.PENDING
    alive: bool = True
    parent: Transit | None = None
    children: dict[Transit, None] = attrs.Factory(dict)

    def carried_by(self, carrier: Transit) -> list[Transit]:
        """Record that the message with this attachment arrived on `carrier`; give nodes of ours that are lost."""
        if self.fate is not Fate.PENDING or self.parent is not None or self is carrier:
            return []
        if carrier.fate is Fate.ACCESSIBLE:
            self._arrive()
        elif carrier.fate is Fate.LOST:
            return lose([self])
        else:
            self.parent = carrier
            carrier.children[self] = None
            self._prune()
        return []

    def ended(self) -> None:
        """Record that the channel has ended."""
        self.alive = False
        self._prune()

    def _arrive(self) -> None:
        pending = [self]
        while pending:
            node = pending.pop()
            node.fate, node.parent = Fate.ACCESSIBLE, None
            pending += node.children
            node.children.clear()

    def _prune(self) -> None:
        node = self
        while not node.alive and (parent := node.parent) is not None and len(node.children) <= 1:
            del parent.children[node]
            node.parent = None
            if node.children:
                (child,) = node.children
                node.children.clear()
                child.parent = parent
                parent.children[child] = None
                return
            node = parent


def lose(nodes: Iterable[Transit]) -> list[Transit]:
    """Mark channels as lost, with all that was sent on them; give the nodes of ours among these.

    A child that the peer made is left to the peer, which forgets it by itself.
    """
    lost, doomed = [], [*nodes]
    for node in doomed:  # grows while it is read
        if node.fate is not Fate.PENDING:
            continue
        if node.parent is not None:
            node.parent.children.pop(node, None)
            node.parent = None
        children = [*node.children]
        for child in children:
            child.parent = None
        node.children.clear()
        node.fate = Fate.LOST
        if node.ours:
            lost.append(node)
        doomed += [child for child in children if child.ours]
    return lost


# --- what all halves share


class Promise:
    """What became of one message."""

    __slots__ = ("arrived", "owner", "sender")

    def __init__(self, sender: SenderMachine) -> None:
        self.sender: SenderMachine = sender
        self.arrived: bool | None = None
        """None until it is known."""
        self.owner: object = None
        """The session's receipt."""


@attrs.define(eq=False)
class Outgoing:
    """A message that was not answered yet; `headers` and `attachments` are encoded fields."""

    payload: bytes
    headers: bytes
    attachments: bytes
    nodes: tuple[Transit, ...] = ()  # of the attached channels
    receipt: Promise | None = None
    stream: OutStream | None = None  # its own, if it has one

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.headers) + len(self.attachments)


@attrs.define(eq=False)
class ConnectionState:
    """What all halves of one connection share: settings, the time, byte totals and the streams to write."""

    config: Config
    limits: Limits
    observer: Observer | None
    streams: StreamScheduler
    on_writable: Callable[[SenderMachine], None]
    now: float = 0.0
    rtt: float | None = None
    in_order: bool = False  # on this link no datagram is overtaken by what was written after it
    outbox: int = 0  # bytes of messages that wait for the link
    unread_datagrams: int = 0  # cost of those that were not consumed

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

    def frame_written(self, name: str, id: int | None, size: int = 0) -> None:
        if self.observer is not None:
            self.observer.frame("out", "connection" if id is None else frames.label(id), name, size)


@attrs.define(eq=False, repr=False)
class _Machine:
    """What both halves of a channel have. `id` is None until the other half was handed over."""

    connection: ConnectionState
    id: int | None
    oneshot: bool
    transit: Transit
    outcome: Outcome | None = None
    attached: bool = False  # the message that brings it to the other side has come, or was sent
    is_told: bool = False  # an event has reported its end
    flush: bool = False  # acks or counts of datagrams may be written
    main: OutStream | None = None  # the stream of all but unordered messages
    # The session's sender or receiver, as long as anything can happen to it. mypyc cannot read a plain `object` here.
    owner: object | None = None
    taken: bool = False  # the application has that

    @property
    def gone(self) -> bool:
        return self.outcome is not None

    def route(self) -> bytes:
        assert self.id is not None  # nothing is written before the hand-over
        return frames.encode_frame(frames.RouteTo(self.id))


# --- sending


@attrs.define(eq=False, repr=False)
class SenderMachine(_Machine):
    """The half that sends."""

    state: Sending = Sending.OPEN
    outcome_told: Outcome | None = None  # reported to the application before the peer confirmed it
    is_report_unread: bool = False  # the session has not read the event that reports it
    cancelling: bool = False  # CANCEL_SENDER was sent and the receiver is not closed yet
    finish_written: bool = False
    queued: int = 0  # bytes that wait for the link
    watched: int | None = None  # `on_writable` is due once a message of this size is admitted
    sent_reliable: int = 0
    sent_unreliable: int = 0
    counted: int = 0  # datagrams that were announced with SENT_UNRELIABLE
    reported: int = 0  # datagrams that the peer has acked or nacked
    reliable: Flight[Outgoing] = attrs.Factory(Flight)
    unreliable: Flight[Outgoing] = attrs.Factory(Flight)  # only those with a receipt or an attachment
    ordered: deque[Outgoing] = NO_QUEUE
    unordered: dict[OutStream, Outgoing] = attrs.Factory(dict)  # those without a number
    datagrams: deque[Outgoing] = NO_QUEUE
    datagram_bytes: int = 0
    _writing: int = 0  # bytes of the message that the main stream has begun to write

    # --- commands

    @property
    def unanswered(self) -> int:
        """Messages that wait to be sent, acked or nacked; unreliable ones count only with a receipt or attachment."""
        return len(self.reliable) + len(self.unreliable) + len(self.ordered) + len(self.unordered)

    def admits(self, size: int) -> bool:
        """Whether there is room for one more reliable message. An empty queue takes one of any size."""
        connection = self.connection
        if self.unanswered >= connection.config.in_flight or len(self.unordered) >= connection.config.unopened:
            return False
        limits = connection.limits
        return self.queued == 0 or (
            self.queued + size <= limits.short_window and connection.outbox + size <= limits.outbox
        )

    def enqueue(self, outgoing: Outgoing, mode: Mode) -> None:
        """Queue a message for a stream; there is room for it."""
        self.count_queued(outgoing.size)
        if mode is Mode.ORDERED:
            self.ordered = queue_of(self.ordered)
            self.ordered.append(outgoing)
            self.connection.streams.add(self.main or self.stream())
        else:
            self.send_alone(outgoing)

    def send_alone(self, outgoing: Outgoing) -> None:
        """Send a message in a stream of its own; its bytes are counted already."""
        outgoing.stream = OutStream([self.route()], source=SingleMessage(self, outgoing, outgoing.size))
        self.unordered[outgoing.stream] = outgoing
        self.connection.streams.add(outgoing.stream)

    def finish(self) -> None:
        self.state = advance(self.state, Step.FINISH)
        self.connection.streams.add(self.stream())

    def cancel(self, reason: bytes = b"") -> None:
        """Write CANCEL_SENDER instead of the rest; the machine stays until the peer has closed the receiver.

        CANCEL_SENDER has no room for a reason: it goes in the headers of a last message, where one more may be sent.
        """
        self.state = Sending.CLOSED
        self.cancelling = True
        self.drop_streams()
        routed: list[Buffer] = [self.route()]
        if reason and not self.oneshot:
            headers = frames.encode_headers([(frames.REASON_HEADER, reason)])
            routed.append(frames.message_head(self.sent_reliable, headers, EMPTY_FIELD, 0))
            self.connection.frame_written("MESSAGE", self.id)
            self.reliable.add(self.sent_reliable, None)
            self.sent_reliable += 1
        routed.append(frames.encode_frame(frames.CancelSender()))
        self.connection.streams.add(OutStream(routed, urgent=True))
        self.connection.frame_written("CANCEL_SENDER", self.id)

    def message_numbered(self) -> None:
        """Schedule FINISH_SENDER if no other message waits for its number."""
        if self.state is Sending.FINISHING:
            self.connection.streams.add(self.stream())

    def drop_streams(self) -> None:
        """Give up all streams that may still bring messages."""
        streams = self.connection.streams
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
        """Remove the messages that were not written, and give them."""
        unsent = [*self.ordered, *self.unordered.values(), *self.datagrams]
        self.ordered = NO_QUEUE
        self.unordered.clear()
        self.datagrams = NO_QUEUE
        self.datagram_bytes = 0
        return unsent

    @property
    def has_datagram(self) -> bool:
        """Whether a datagram can be sent; one with a receipt or attachment waits while too many are unanswered."""
        if not self.datagrams:
            return False
        outgoing = self.datagrams[0]
        is_tracked = outgoing.nodes or outgoing.receipt
        return not is_tracked or len(self.unreliable) < self.connection.config.in_flight

    def take_datagram(self) -> Outgoing:
        """Remove the oldest unreliable message."""
        outgoing = self.datagrams.popleft()
        self.datagram_bytes -= outgoing.size
        return outgoing

    # --- answers of the peer

    def take_acked(self, varints: list[int]) -> list[Outgoing]:
        """Apply an ACK_RELIABLE; give the acked messages with a receipt or an attachment."""
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
        """Apply an ACK_NACK_UNRELIABLE; give the acked and the nacked messages with a receipt or an attachment."""
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
        """How this half ends if the peer closes the receiver now."""
        if self.cancelling:
            return Outcome.CANCELLED
        return Outcome.FINISHED if self.finish_written and len(self.reliable) == 0 else Outcome.NO_RECEIVER

    # --- streams

    def stream(self) -> OutStream:
        """The stream of ordered messages, counts and FINISH_SENDER."""
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
        return self.state is Sending.FINISHING and not (
            self.finish_written or self.ordered or self.unordered or self.datagrams
        )

    def has_frames(self) -> bool:
        return bool(self.ordered) or (self.flush and self._owes_count) or self._can_finish

    def fill(self, stream: OutStream) -> None:
        self._message_written()
        if self._owes_count and (self.flush or self._can_finish):
            stream.pending.append(frames.encode_frame(frames.SentUnreliable(self.sent_unreliable - self.counted)))
            self.counted = self.sent_unreliable
            self.flush = False
            self.connection.frame_written("SENT_UNRELIABLE", self.id)
        elif self.ordered:
            outgoing = self.ordered.popleft()
            self._writing = outgoing.size
            self.write(outgoing, stream)
        elif self._can_finish:
            stream.pending.append(frames.encode_frame(frames.FinishSender(self.sent_reliable)))
            stream.fin = self.finish_written = True
            self.connection.frame_written("FINISH_SENDER", self.id)

    def pulled(self, stream: OutStream) -> None:
        if not stream.pending:
            self._message_written()
            self.wake()

    def _message_written(self) -> None:
        """The message that the main stream had begun was pulled to its end."""
        self.count_queued(-self._writing)
        self._writing = 0

    def write(self, outgoing: Outgoing, stream: OutStream) -> None:
        """Number a message and append it to a stream."""
        head = frames.message_head(self.sent_reliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        stream.pending.append(head)
        if outgoing.payload:
            stream.pending.append(outgoing.payload)
        self.connection.frame_written("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        is_tracked = outgoing.nodes or outgoing.receipt or outgoing.stream
        self.reliable.add(self.sent_reliable, outgoing if is_tracked else None)
        self.sent_reliable += 1

    def encode_datagram(self, outgoing: Outgoing) -> bytes:
        """Encode a message with the next number; `datagram_sent` takes that number."""
        head = frames.message_head(self.sent_unreliable, outgoing.headers, outgoing.attachments, len(outgoing.payload))
        return self.route() + head + outgoing.payload

    def datagram_sent(self, outgoing: Outgoing) -> None:
        self.connection.frame_written("MESSAGE", self.id, len(outgoing.payload))
        outgoing.payload = outgoing.headers = outgoing.attachments = b""
        if outgoing.nodes or outgoing.receipt:
            self.unreliable.add(self.sent_unreliable, outgoing)
        self.sent_unreliable += 1

    # --- room

    def wake(self) -> None:
        """Report the sender as writable, if that was asked for and there is room."""
        if self.watched is not None and self.admits(self.watched):
            self.watched = None
            self.connection.on_writable(self)

    def count_queued(self, size: int) -> None:
        """Add to the bytes that wait for the link; `size` is negative for bytes that were written or dropped."""
        self.queued += size
        self.connection.outbox += size

    def check_open(self) -> None:
        """Raise `LocalProtocolError` unless more may be sent."""
        if self.state is not Sending.OPEN or self.id is None or self.gone:
            self._refuse()

    @property
    def is_cancellable(self) -> bool:
        """Whether the half is alive and the peer was not told of its end."""
        return not self.gone and self.state is not Sending.CLOSED and not self.finish_written

    def check_cancellable(self) -> None:
        if self.id is None or not self.is_cancellable:
            self._refuse()

    def _refuse(self) -> None:
        if self.id is None:
            raise LocalProtocolError("the other half has not been sent yet")
        why = self.outcome.value if self.outcome else "cancelled" if self.cancelling else self.state.value
        raise LocalProtocolError(f"channel {self.id}: the sender is {why}")


@attrs.define(eq=False)
class SingleMessage:
    """The source of a stream that carries one message."""

    sender: SenderMachine
    _outgoing: Outgoing
    _size: int  # of the message, whose bytes are dropped when they are written

    def has_frames(self) -> bool:
        return True

    def fill(self, stream: OutStream) -> None:
        self.sender.unordered.pop(stream)
        self.sender.write(self._outgoing, stream)
        stream.fin = True
        self.sender.message_numbered()
        self.sender.wake()

    def pulled(self, stream: OutStream) -> None:
        if stream.fin and not stream.pending:
            self.sender.count_queued(-self._size)
            self.sender.wake()


# --- receiving


@attrs.define(eq=False, repr=False)
class ReceiverMachine(_Machine):
    """The half that receives."""

    reliable: ReliableNumbers = attrs.Factory(
        lambda self: ReliableNumbers(self.connection.config.gaps), takes_self=True
    )
    unreliable: UnreliableNumbers = attrs.Factory(
        lambda self: UnreliableNumbers(self.connection.config.gaps), takes_self=True
    )
    unread: int = 0  # cost of messages from datagrams that were not consumed
    unread_messages: int = 0  # messages from streams that were not consumed
    _counts_on: StreamId | None = None  # the stream that brings SENT_UNRELIABLE
    _reports: deque[tuple[float, float, int]] = NO_QUEUE  # (begun, due, numbers below)

    # --- messages

    def check_message(self, number: int, *, unreliable: bool) -> None:
        """Raise `RemoteProtocolError` if no message of this number may come; changes nothing."""
        if self.oneshot:
            another = self.reliable.got.highest is not None if unreliable else self.unreliable.any
            if number or another:
                raise RemoteProtocolError(
                    f"message {number} on a oneshot channel, which carries one", rule="aqueduct-E26"
                )
        if not unreliable:
            self.reliable.check(number)

    def has_room(self, cost: int) -> bool:
        """Whether a datagram fits into the mailbox; datagrams have no credit, so others count as not received."""
        limits = self.connection.limits
        return (
            self.unread + cost <= limits.short_window
            and self.connection.unread_datagrams + cost <= limits.connection_bytes
        )

    # --- counts, reports and the end

    def check_counts(self, count: int, stream: StreamId) -> None:
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"SENT_UNRELIABLE on stream {stream} after stream {self._counts_on}", rule="aqueduct-A12"
            )
        known = self.unreliable.known + count
        if self.oneshot and known + (self.reliable.got.highest is not None) > 1:
            raise RemoteProtocolError(f"{known} datagrams sent on a oneshot channel", rule="aqueduct-E26")

    def count_sent(self, count: int, stream: StreamId) -> float | None:
        """Record that the peer has sent so many more datagrams; give the time of the first report, if it is new."""
        self._counts_on = stream
        if not count:
            return None
        known = self.unreliable.known = self.unreliable.known + count
        now = self.connection.now
        due = now + self.connection.report_delay
        was_idle = not self._reports
        if self._reports and now - self._reports[-1][0] < self.connection.config.flush_delay:
            # Counts that come shortly after one another are reported together, when the last of them are due.
            begun, _, _ = self._reports.pop()
            self._reports.append((begun, due, known))
        else:
            self._reports = queue_of(self._reports)
            self._reports.append((now, due, known))
        return due if was_idle else None

    def check_finish(self, total: int, stream: StreamId) -> None:
        if self.reliable.total is not None:
            raise RemoteProtocolError("FINISH_SENDER a second time", rule="aqueduct-S12")
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"FINISH_SENDER on stream {stream}, SENT_UNRELIABLE on stream {self._counts_on}", rule="aqueduct-S11"
            )
        if self.oneshot and total > 1:
            raise RemoteProtocolError(f"finished with {total} messages on a oneshot channel", rule="aqueduct-E26")
        highest = self.reliable.got.highest
        if highest is not None and highest >= total:
            raise RemoteProtocolError(
                f"finished with {total} messages, but message {highest} came", rule="aqueduct-S08"
            )

    def report_due(self, now: float) -> bool:
        """Whether there is something to report by now."""
        while self._reports and self._reports[0][1] <= now:
            self.unreliable.due = self._reports.popleft()[2]
        return self._owes_report

    @property
    def next_report(self) -> float | None:
        return self._reports[0][1] if self._reports else None

    @property
    def is_complete(self) -> bool:
        """Whether the sender has finished, and every message has come or may be reported now."""
        return self.reliable.is_complete and self.unreliable.due == self.unreliable.known

    # --- the stream

    @property
    def _owes_report(self) -> bool:
        return self.unreliable.due > self.unreliable.reported

    def stream(self) -> OutStream:
        """The stream of acks, reports and CLOSE_RECEIVER."""
        if self.main is None:
            main = OutStream([self.route()], source=self, urgent=True)
            self.main: OutStream | None = main
            return main
        return self.main

    def has_frames(self) -> bool:
        return (self.flush and len(self.reliable.owed) > 0) or self._owes_report

    def fill(self, stream: OutStream) -> None:
        if len(self.reliable.owed):
            self.flush = False
            stream.pending.append(frames.encode_frame(frames.AckReliable(self.reliable.take_acks())))
            self.connection.frame_written("ACK_RELIABLE", self.id)
        elif self._owes_report:
            field = self.id if self.connection.config.channel_field else None
            stream.pending.append(frames.encode_frame(frames.AckNackUnreliable(self.unreliable.take_report(), field)))
            self.connection.frame_written("ACK_NACK_UNRELIABLE", self.id)

    def pulled(self, stream: OutStream) -> None: ...

    def close(self) -> OutStream | None:
        """Append what is owed and CLOSE_RECEIVER to the stream of the acks, which outlives this half."""
        stream = self.stream()
        if stream.ended:  # the peer stopped it
            return None
        while len(self.reliable.owed) or self._owes_report:
            self.fill(stream)
        stream.pending.append(frames.encode_frame(frames.CloseReceiver()))
        stream.source, stream.fin = None, True
        self.connection.frame_written("CLOSE_RECEIVER", self.id)
        return stream


Half = SenderMachine | ReceiverMachine


@attrs.define(eq=False)
class Ticket:
    """The other half of a channel that we made: to be sent with one message."""

    half: Half
    headers: bytes
    spent: bool = False
