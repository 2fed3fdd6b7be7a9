"""Sending on one entity: the queue of messages, and the commands of the session.

`Sender` is an entity on which we send messages, such as a sink that we have opened. Its queue is an `Outgoing`, which
contains, in this order:

1. the opening, if we open the entity with a payload. The payload uses the credit of the top level.
2. the messages
3. the end. The end of the top-level sink also waits for all openings that are queued in other entities.

A message may be queued if the peer's credit covers it in addition to the messages in the queue. It may also be queued
if the queue is empty and there is any credit at all. The message is then written in parts, as credit arrives. Otherwise
a message larger than the peer's window could never be sent.

The scheduler gives each entity with something to write a turn, and calls `Outgoing.write`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.core import NO_QUEUE, Buffer, Credit, Reason, encode_varu64, queue_of
from muxkit.core import halves as core
from muxkit.protocols.bpmux.entities import ENDED, GONE, OPEN, UNANNOUNCED, Entity, Kind
from muxkit.protocols.bpmux.frames import CREDIT, END, PAYLOAD, Type, encode_partial, head

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.state import State

BYTES = tuple(bytes((number,)) for number in range(248))  # the encodings (VarU64) of small numbers
OVERHEAD = 16  # bytes that a queued message counts in the outbox in addition to its payload


class Outgoing:
    """The queue of one entity: its opening, its messages and its end. They are encoded when they are written.

    `State.written` is called after each `write` that has written a part of an opening or the end, and after each
    `write` while the session waits for a `Writable` event.
    """

    __slots__ = (
        "_begun",
        "_head",
        "_opening",
        "_outbox",
        "_state",
        "_top",
        "accepts",
        "claimed",
        "counted",
        "deficit",
        "end",
        "entity",
        "has_sent",
        "openings_before_end",
        "queue",
        "queued",
        "scheduled",
        "wanted",
        "watched",
    )

    def __init__(self, entity: Entity, state: State) -> None:
        self.entity: Entity = entity
        self._state = state
        self._top: Credit = state.top_sink.credit  # the credit that openings use
        self._outbox = state.outbox
        self._head = head(entity.type, entity.id, PAYLOAD)
        self._opening: tuple[Type, bytes] | None = None
        self.queue: deque[bytes] = NO_QUEUE
        self._begun = 0  # how many bytes of the first item (opening, message or end) were written, if it isn't complete
        self.end: bytes | None = None  # the payload of the queued end
        # True if any number of messages may follow. False for a request, which has one response.
        self.accepts: bool = not entity.receives and entity.kind is not Kind.REQUEST_IN
        self.has_sent: bool = False  # True once a message was queued
        self.queued: int = 0  # number of queued bytes that use the entity's own credit
        self.claimed: int = 0  # only for the top-level sink: bytes of queued openings, which use its credit as well
        self.openings_before_end: int = 0  # only for the top-level sink: number of these openings
        self.counted: int = 0  # number of bytes that this queue counts in the connection's outbox
        self.watched: bool = False  # True if the session wants a `Writable` event
        self.wanted: int = 1  # the credit that must be free for the event: 0 for an empty message, otherwise 1
        self.deficit: int = 0  # for the scheduler
        self.scheduled: bool = False  # True while the scheduler knows this queue

    @property
    def closing(self) -> bool:
        """True if the end is queued, or the response to a request, which is its end."""
        return self.end is not None or (self.entity.kind is Kind.REQUEST_IN and bool(self.queue))

    @property
    def opening_left(self) -> int:
        """The number of bytes of the opening's payload that aren't written."""
        return 0 if self._opening is None else len(self._opening[1]) - self._begun

    @property
    def is_empty(self) -> bool:
        """True if nothing is queued."""
        return not (self.queue or self.closing or self._opening or self._begun)

    @property
    def is_mid_message(self) -> bool:
        """True if only a part of a message was written."""
        return self._begun > 0

    @property
    def is_opening_unwritten(self) -> bool:
        """True if there is a queued opening of which nothing was written."""
        return self._opening is not None and not self._begun

    @property
    def is_idle(self) -> bool:
        """True if this object can be replaced by a new one without losing anything."""
        return self.is_empty and not (self.has_sent or self.watched)

    def watch(self, size: int) -> None:
        """Report `Writable` when a message of this size may be queued."""
        self.watched = True
        self.wanted = min(size, 1)  # any credit is enough for the first part of a message

    def open(self, type: Type, payload: bytes) -> None:
        """Queue the opening, which has a payload."""
        self._opening = (type, payload)

    def push(self, message: bytes) -> None:
        """Queue a message. Only the part that credit covers counts in the outbox."""
        size = len(message)
        covered = self.entity.credit.available - self.queued
        self.ready_queue().append(message)
        self.queued += size
        self.count(self.counted + OVERHEAD + (size if size <= covered else max(covered, 0)))

    def push_covered(self, messages: list[bytes], size: int) -> None:
        """Queue messages of `size` bytes in total. The caller has checked that credit covers all of them."""
        self.ready_queue().extend(messages)
        self.queued += size
        self.count(self.counted + OVERHEAD * len(messages) + size)

    def ready_queue(self) -> deque[bytes]:
        """Return the queue to append a message to."""
        self.has_sent = True
        self.queue = queue_of(self.queue)
        return self.queue

    def count(self, counted: int) -> None:
        """Change the number of bytes that this queue counts in the outbox."""
        self._outbox.used += counted - self.counted
        self.counted = counted

    def close(self, payload: bytes) -> None:
        """Queue the end. No message may be queued afterwards."""
        self.accepts = False
        self.end = payload
        self.queued += len(payload)

    def waits_for_transport(self) -> int:
        """Return how many bytes to count in the outbox now: those that credit covers, but not more than before."""
        if not self.queue or (self.queue[0] and not self.entity.credit.available):
            return 0
        return min(self.counted, min(self.queued, self.entity.credit.available) + OVERHEAD * len(self.queue))

    def drop_unbegun(self) -> None:
        """Drop the messages of which nothing was written. If there are any, also drop the end after them."""
        keep = 1 if self.queue and self._begun and self._opening is None else 0
        if len(self.queue) > keep and self.end is not None:
            self.queued -= len(self.end)
            self.end = None
        while len(self.queue) > keep:
            self.queued -= len(self.queue.pop())

    def admits(self, size: int) -> bool:
        """Return True if a message of this size may be queued, by the rule at the top of this module."""
        available = self.entity.credit.available
        waiting = self.queued + self.claimed
        return available - waiting >= size or (waiting == 0 and available > 0)

    def is_ready(self) -> bool:
        """Return True if `write` would write anything."""
        if self.entity.life is GONE:
            return False
        if self._opening is not None:
            return self.opening_left == 0 or self._top.available > 0
        if self.entity.life is UNANNOUNCED:
            return False
        if self.queue:
            return self.entity.credit.available > 0 or not self.queue[0]
        return (
            self.end is not None and not self.openings_before_end and (self.entity.credit.available > 0 or not self.end)
        )

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Write what is due, as far as credit allows.

        Args:
            budget: About how many bytes to write.
            piece: The size of the largest payload in a chunk. Larger messages are written in parts.
            out: The encoded chunks are appended to this list.

        Returns:
            The number of bytes written.
        """
        entity, written = self.entity, 0
        if entity.life is GONE:
            return 0
        is_opening = self._opening is not None
        if self._opening is not None:
            written = self._write_opening(self._opening[0], self._opening[1], budget, piece, out)
        if entity.life is not UNANNOUNCED:
            credit, queue, start, append = entity.credit, self.queue, self._head, out.append
            before = available = credit.available
            while queue and not self._begun and written < budget:  # fast path for messages that aren't split
                message = queue[0]
                size = len(message)
                if size > piece or size > available:
                    break
                queue.popleft()
                append(start + (BYTES[size] if size < 248 else encode_varu64(size)))
                if size:
                    append(message)
                available -= size
                written += len(start) + 1 + size
            credit.available = available
            if queue or not self.accepts:
                written += self._write_rest(budget - written, piece, out)
            self.queued -= before - credit.available
            if queue:
                self.count(self.waits_for_transport())
            else:
                self.queue = NO_QUEUE
                self._outbox.used -= self.counted
                self.counted = 0
        if self.watched or is_opening or entity.life is ENDED:
            self._state.written(self)
        return written

    def _write_rest(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Write messages that must be split, and then the end, as far as the budget and credit allow."""
        queue, entity, written = self.queue, self.entity, 0
        while queue and written < budget:
            written += self._write_payload(self._head, queue[0], entity.credit, budget - written, piece, out)
            if self._begun < len(queue[0]):
                return written
            queue.popleft()
            self._begun = 0
        if queue:
            return written
        if self.end is None:
            # The response is the end of a request, so no other end is written.
            if entity.kind is Kind.REQUEST_IN and self.has_sent and entity.life is not ENDED:
                entity.step(ENDED)
        elif not self.openings_before_end:
            start = head(entity.type, entity.id, END)
            written += self._write_payload(start, self.end, entity.credit, budget - written, piece, out)
            if self._begun == len(self.end):
                self.end, self._begun = None, 0
                entity.step(ENDED)
        return written

    def _write_payload(
        self, start: bytes, payload: bytes, credit: Credit, budget: int, piece: int, out: list[Buffer]
    ) -> int:
        """Write the rest of a payload as far as the budget and credit allow. Split it into parts if necessary."""
        total, written = len(payload), 0
        while not written or (self._begun < total and written < budget):
            size = min(piece, credit.available, total - self._begun)
            if not size and total:
                break
            if size < total and not self._begun:
                out.append(encode_partial(total))
            out.append(start + encode_varu64(size))
            if size:
                out.append(payload if size == total else memoryview(payload)[self._begun : self._begun + size])
            self._begun += size
            credit.available -= size
            written += len(start) + 1 + size
        return written

    def _write_opening(self, type: Type, payload: bytes, budget: int, piece: int, out: list[Buffer]) -> int:
        """Write the opening, or the next parts of it, as far as the budget and top-level credit allow.

        The first chunk also has the first grant of the channel's receiving half.
        """
        entity, top, total = self.entity, self._top, len(payload)
        start, written = head(type, entity.id, PAYLOAD), 0
        if not self._begun:
            size = min(total, piece, top.available)
            if size < total:
                if not size:
                    return 0
                out.append(encode_partial(total))
            receiver, grant = entity.receiving, 0
            if receiver is not None:
                grant, receiver.grant = receiver.grant, 0
            first = head(type, entity.id, PAYLOAD | CREDIT) if grant else start
            out.append(first + encode_varu64(size) + payload[:size] + (encode_varu64(grant) if grant else b""))
            self._begun = size
            top.available -= size
            written = len(start) + 1 + size
        if self._begun < total and written < budget:
            written += self._write_payload(start, payload, top, budget - written, piece, out)
        if self._begun == total:
            self._opening, self._begun = None, 0
            entity.step(OPEN)
        return written


class Sender(Entity, core.Sender):
    """An entity on which we send: a sink that we opened, a stream that the peer opened, or a request of the peer.

    It implements the interface for sending halves that the runtime uses with all protocols.
    """

    __slots__ = ()

    # `Entity` has the same property. mypyc, which compiles this module, doesn't find it there, because `core.Sender` (a
    # trait) declares it with a wider type.
    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def queued(self) -> int:
        return 0 if self.outgoing is None else self.outgoing.queued

    @property
    def has_sent(self) -> bool:
        """True if this side has opened the entity, sent on it or ended it.

        The end of a session waits until the peer has confirmed the ends of these entities.
        """
        outgoing = self.outgoing
        return (outgoing is not None and outgoing.has_sent) or (
            not self.is_top and (outgoing is not None or self.ending or self.is_ours)
        )

    @property
    def is_answered(self) -> bool:
        """True if the entity is a request of the peer and the response was queued."""
        return self.kind is Kind.REQUEST_IN and self.has_sent_messages

    @property
    def has_sent_messages(self) -> bool:
        """True if a message was queued on the entity."""
        return self.outgoing is not None and self.outgoing.has_sent

    def check_size(self, size: int) -> None:
        allowed = self.state.limits.message
        if size > allowed:
            raise LocalProtocolError(f"message too large: {size} bytes against Limits(message={allowed})")

    def has_room(self, size: int) -> bool:
        return self.admits(size)

    def notify_when_room(self, size: int) -> None:
        """Report `Writable` once a message of this size may be queued. An empty message needs no credit."""
        self.state.outgoing(self).watch(size)

    def send(self, message: bytes, *, end: bytes | None = None) -> None:
        """Queue a message, and if `end` is given, also the end of the entity with that payload.

        Raises:
            LocalProtocolError: If the entity has ended, or if the message and the end aren't covered by credit or are
                too large. Nothing is queued then.
        """
        state = self.state
        self.check_open("send on")
        answers = self.kind is Kind.REQUEST_IN
        if answers and end is not None:
            raise LocalProtocolError(f"{self.label}: a response can't have an end, because it ends the request itself")
        size = len(message)
        if size > state.limits.message:
            state.check_size(size, self.label)
        if not self.admits(size):
            raise LocalProtocolError(
                f"{self.label}: not enough credit: {size} bytes to send, {self.credit_out} granted"
            )
        outgoing = state.outgoing(self)
        if end:
            state.check_size(len(end), self.label)
            if outgoing.queued + outgoing.claimed + size + len(end) > self.credit_out:
                raise LocalProtocolError(
                    f"{self.label}: not enough credit: {size} + {len(end)} bytes to send, {self.credit_out} granted"
                )
        outgoing.push(message)
        state.messages_sent += 1
        if end is not None:
            outgoing.close(end)
        if answers or end is not None:
            state.end_queued(self)
        else:
            state.schedule(self)

    def try_send(self, message: bytes) -> bool | None:
        """Queue a message if credit covers all of it. This is the fast path of `send`.

        Returns:
            None if the message wasn't queued. Otherwise, True if the session has to request a write now, and False if
            it has requested one before. (Before the opening is written, it has only requested a write *soon*.)
        """
        outgoing, size = self.outgoing, len(message)
        state = self.state
        if outgoing is None:
            if self.life is GONE or size > self.credit.available:
                return None
            outgoing = state.outgoing(self)
        if not outgoing.accepts or size > state.largest or state.over:
            return None
        if size > self.credit.available - outgoing.queued - outgoing.claimed:
            return None
        queue = outgoing.queue  # `Outgoing.push_covered` is inlined here, because this runs for each message
        if not queue:
            outgoing.has_sent = True
            if queue is NO_QUEUE:
                queue = outgoing.queue = deque()
        queue.append(message)
        outgoing.queued += size
        outgoing.counted += size + OVERHEAD
        state.outbox.used += size + OVERHEAD
        state.messages_sent += 1
        if self.life is UNANNOUNCED:
            state.schedule(self)
            return True
        if outgoing.scheduled:
            return False
        state.scheduler.add(outgoing)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        """Queue messages if credit covers all of them. Otherwise, queue none and return False."""
        outgoing, state = self.outgoing, self.state
        if outgoing is None or not outgoing.accepts or state.over:
            return False
        sizes = [*map(len, messages)]
        size = sum(sizes)
        if size > self.credit.available - outgoing.queued - outgoing.claimed or max(sizes) > state.largest:
            return False
        outgoing.push_covered(messages, size)
        state.messages_sent += len(messages)
        state.schedule(self)
        return True

    def finish(self, payload: bytes = b"") -> None:
        if not self.is_answered:  # a response is the end of its request
            self.end(payload)

    def cancel(self, reason: Reason) -> None:
        self.abort(reason)
