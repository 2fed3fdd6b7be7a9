"""What we send on one entity: its queue, and the rules by which messages may enter it and leave it.

A message may be queued if the peer's credit covers it, or if the queue is empty and there is some credit. In the second
case the rest of the message waits here and leaves in parts, as credit arrives. The scheduler calls `Outgoing.write`
when it is this entity's turn:

    the opening     with the first grant; its payload uses the credit of the top level
    messages        whole, while credit and the turn last; larger ones in parts
    the end         behind all messages, and on the top level behind all openings
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

BYTES = tuple(bytes((number,)) for number in range(248))  # the VarU64 of small numbers
OVERHEAD = 16  # bytes that a queued message counts in the outbox beside its payload


class Outgoing:
    """The queue of one entity: its opening, its messages and its end, encoded when the scheduler calls `write`.

    A payload larger than a piece, or than the available credit, is written in parts. The state hears of each turn that
    wrote of an opening or behind an end, and of each turn while a `Writable` event is wanted (`State.written`).
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
        self._begun = 0  # bytes of the first item that were written in parts
        self.end: bytes | None = None
        self.accepts: bool = not entity.receives and entity.kind is not Kind.REQUEST_IN  # any number of messages
        self.has_sent: bool = False  # a message was queued on it, ever
        self.queued: int = 0  # payload bytes that use the entity's own credit
        self.claimed: int = 0  # on the top level: bytes of queued openings, which use its credit as well
        self.openings_before_end: int = 0  # on the top level: openings with a payload that isn't written completely
        self.counted: int = 0  # bytes that it counts in the connection's outbox
        self.watched: bool = False  # a `Writable` event was asked for
        self.wanted: int = 1  # bytes of credit that it needs, 0 for an empty message
        self.deficit: int = 0
        self.scheduled: bool = False

    @property
    def closing(self) -> bool:
        """Whether the end, or the response, is queued."""
        return self.end is not None or (self.entity.kind is Kind.REQUEST_IN and bool(self.queue))

    @property
    def opening_left(self) -> int:
        """Bytes of the opening payload that will use top-level credit."""
        return 0 if self._opening is None else len(self._opening[1]) - self._begun

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not (self.queue or self.closing or self._opening or self._begun)

    @property
    def is_mid_message(self) -> bool:
        """Whether a part of a message was written, and not the rest."""
        return self._begun > 0

    @property
    def is_untold(self) -> bool:
        """Whether no part of the opening was written."""
        return self._opening is not None and not self._begun

    @property
    def is_idle(self) -> bool:
        """Whether it can be replaced by a new queue without losing anything."""
        return self.is_empty and not (self.has_sent or self.watched)

    def watch(self, size: int) -> None:
        """Report `Writable` when a message of this size fits; an empty one needs no credit."""
        self.watched = True
        self.wanted = min(size, 1)

    def open(self, type: Type, payload: bytes) -> None:
        """Queue the opening."""
        self._opening = (type, payload)

    def push(self, message: bytes) -> None:
        """Queue a message; only the part that credit covers counts in the outbox."""
        size = len(message)
        covered = self.entity.credit.available - self.queued
        self.ready_queue().append(message)
        self.queued += size
        self.count(self.counted + OVERHEAD + (size if size <= covered else max(covered, 0)))

    def push_covered(self, messages: list[bytes], size: int) -> None:
        """Queue messages of `size` bytes in all, which credit covers."""
        self.ready_queue().extend(messages)
        self.queued += size
        self.count(self.counted + OVERHEAD * len(messages) + size)

    def ready_queue(self) -> deque[bytes]:
        """Return the queue to append a message to."""
        self.has_sent = True
        self.queue = queue_of(self.queue)
        return self.queue

    def count(self, counted: int) -> None:
        """Count so many bytes in the outbox from now on."""
        self._outbox.used += counted - self.counted
        self.counted = counted

    def close(self, payload: bytes) -> None:
        """Queue the end; no message may follow."""
        self.accepts = False
        self.end = payload
        self.queued += len(payload)

    def waits_for_transport(self) -> int:
        """Bytes to count in the outbox now: at most what was counted before, and only what credit covers."""
        if not self.queue or (self.queue[0] and not self.entity.credit.available):
            return 0
        return min(self.counted, min(self.queued, self.entity.credit.available) + OVERHEAD * len(self.queue))

    def drop_unbegun(self) -> None:
        """Drop the messages of which nothing was written; the end behind them is no longer queued then."""
        keep = 1 if self.queue and self._begun and self._opening is None else 0
        if len(self.queue) > keep and self.end is not None:
            self.queued -= len(self.end)
            self.end = None
        while len(self.queue) > keep:
            self.queued -= len(self.queue.pop())

    def admits(self, size: int) -> bool:
        """Whether a message of this size may be queued: credit covers it, or it is alone and there is some credit."""
        available = self.entity.credit.available
        waiting = self.queued + self.claimed
        return available - waiting >= size or (waiting == 0 and available > 0)

    def is_ready(self) -> bool:
        """Whether `write` would write anything."""
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
        """Append about `budget` bytes of chunks to `out`, no payload above `piece`; return their size."""
        entity, written = self.entity, 0
        if entity.life is GONE:
            return 0
        is_opening = self._opening is not None
        if self._opening is not None:
            written = self._write_opening(self._opening[0], self._opening[1], budget, piece, out)
        if entity.life is not UNANNOUNCED:
            credit, queue, start, append = entity.credit, self.queue, self._head, out.append
            before = available = credit.available
            while queue and not self._begun and written < budget:  # messages that need no parts: usually all
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
        """Write messages that must be split, then the end, as far as budget and credit allow."""
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
            # A response ends its request in this direction.
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
        """Write what is left of a payload, in parts where it must be split, as far as budget and credit allow."""
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
        """Write the chunk that opens the entity, with the first grant; its payload uses top-level credit."""
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
    """An entity that we send messages on: a sink of ours, a stream of the peer's, or a request to answer."""

    __slots__ = ()

    # `Entity` has the same property, but mypyc takes what a trait declares with a wider type from this class alone.
    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def queued(self) -> int:
        return 0 if self.outgoing is None else self.outgoing.queued

    @property
    def has_sent(self) -> bool:
        """True if this side has opened it or sent on it, so that leaving waits for the peer's confirmation."""
        outgoing = self.outgoing
        return (outgoing is not None and outgoing.has_sent) or (
            not self.is_top and (outgoing is not None or self.ending or self.is_ours)
        )

    @property
    def is_answered(self) -> bool:
        """True if it is a request of the peer, and its response was queued."""
        return self.kind is Kind.REQUEST_IN and self.has_sent_messages

    @property
    def has_sent_messages(self) -> bool:
        """True if a message was ever queued on it."""
        return self.outgoing is not None and self.outgoing.has_sent

    def check_size(self, size: int) -> None:
        allowed = self.state.limits.message
        if size > allowed:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={allowed})")

    def has_room(self, size: int) -> bool:
        return self.admits(size)

    def notify_when_room(self, size: int) -> None:
        """Report `Writable` when a message of this size may fit; an empty one needs no credit."""
        self.state.outgoing(self).watch(size)

    def send(self, message: bytes, *, end: bytes | None = None) -> None:
        """Queue a message, and with `end` also the end of the entity; both or nothing."""
        state = self.state
        self.check_open("send on")
        answers = self.kind is Kind.REQUEST_IN
        if answers and end is not None:
            raise LocalProtocolError(f"{self.label}: an answer is the end of its request, and has no other")
        size = len(message)
        if size > state.limits.message:
            state.check_size(size, self.label)
        if not self.admits(size):
            raise LocalProtocolError(f"{self.label}: {size} bytes to send against {self.credit_out} of credit")
        outgoing = state.outgoing(self)
        if end:
            state.check_size(len(end), self.label)
            if outgoing.queued + outgoing.claimed + size + len(end) > self.credit_out:
                raise LocalProtocolError(
                    f"{self.label}: {size} + {len(end)} bytes to send against {self.credit_out} of credit"
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
        """Queue a message that credit covers as a whole; otherwise do nothing and return None.

        Returns True if the entity was not in line for writing before.
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
        queue = outgoing.queue  # `Outgoing.push_covered` inlined: this runs for each message
        if not queue:
            outgoing.has_sent = True
            if queue is NO_QUEUE:
                queue = outgoing.queue = deque()
        queue.append(message)
        outgoing.queued += size
        outgoing.counted += size + OVERHEAD
        state.outbox.used += size + OVERHEAD
        state.messages_sent += 1
        if outgoing.scheduled or not (self.life is not UNANNOUNCED or outgoing.is_ready()):
            return False
        state.scheduler.add(outgoing)
        return True

    def try_send_all(self, messages: list[bytes]) -> bool:
        """Queue messages that credit covers as a whole; otherwise do nothing and return False."""
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
