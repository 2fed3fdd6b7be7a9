"""What do I still have to write on this entity? Its opening, its messages, its end, encoded when their turn comes."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from muxkit.core import Buffer, Credit, encode_varu64
from muxkit.protocols.bpmux._engine.entities import Entity, Kind
from muxkit.protocols.bpmux._frames import CREDIT, END, PAYLOAD, Type, encode_partial, head


class Owner(Protocol):
    """What a queue tells the engine that owns it."""

    def wrote(self, outgoing: Outgoing) -> None:
        """A turn of writing is over."""

    def first_grant(self, entity: Entity) -> int:
        """Take the credit that goes into the opening chunk."""

    def paid(self, amount: int) -> None:
        """An opening used top-level credit that it had claimed."""

    def announced(self, entity: Entity) -> None:
        """The opening is complete: control for the entity may follow."""


BYTES = tuple(bytes((number,)) for number in range(248))  # the VarU64 of small numbers
NO_QUEUE: deque[bytes] = deque()  # nothing is ever put here: a deque takes 760 bytes also when it is empty
OVERHEAD = 16  # bytes that a queued message costs the outbox beside its payload


class Outgoing:
    """The queue of one entity; a source for the scheduler.

    A message that is larger than a piece or than the credit travels in parts. `written` is told after each
    turn, so that the owner can count and wake.
    """

    __slots__ = (
        "_begun",
        "_head",
        "_opening",
        "_overhead",
        "_owner",
        "_top",
        "accepts",
        "claimed",
        "counted",
        "deficit",
        "end",
        "entity",
        "openings",
        "queue",
        "queued",
        "scheduled",
        "spoken",
        "wanted",
        "watched",
    )

    def __init__(self, entity: Entity, top: Credit, owner: Owner) -> None:
        self.entity = entity
        self._top = top
        self._owner = owner
        self._head = head(entity.type, entity.id, PAYLOAD)
        self._overhead = len(self._head) + 1  # bytes of a chunk beside its payload, near enough
        self._opening: tuple[Type, bytes] | None = None
        self.queue = NO_QUEUE
        self._begun = 0  # bytes of the first item that went out in parts
        self.end: bytes | None = None
        self.accepts = not entity.receives and entity.kind is not Kind.REQUEST_IN  # messages, as many as credit allows
        self.spoken = False  # something was sent on it
        self.queued = 0  # payload bytes that the entity's own credit must cover
        self.claimed = 0  # bytes of openings, which the top level's credit must cover beside its own messages
        self.openings = 0  # openings that are not out yet; the end of the top level comes after them
        self.counted = 0  # what of it counts for the connection's outbox
        self.watched = False  # somebody waits for room
        self.wanted = 1  # and needs some credit, or 0 for an empty message
        self.deficit = 0
        self.scheduled = False

    @property
    def closing(self) -> bool:
        """Is the end, or the response, among what waits?"""
        return self.end is not None or (self.entity.kind is Kind.REQUEST_IN and bool(self.queue))

    @property
    def opening_left(self) -> int:
        """Bytes of the opening payload that the top-level credit must still cover."""
        return 0 if self._opening is None else len(self._opening[1]) - self._begun

    @property
    def is_untold(self) -> bool:
        """Has the peer heard nothing of the entity yet?"""
        return self._opening is not None and not self._begun

    @property
    def is_idle(self) -> bool:
        """Is there nothing about it that a new one would not know?"""
        return not (self.queue or self.spoken or self.watched or self.closing or self._opening or self._begun)

    @property
    def is_begun(self) -> bool:
        """Has a part of a message, or of the end, gone out and the rest not?"""
        return self._begun > 0 and self._opening is None

    def watch(self, size: int) -> None:
        """Somebody waits to send a message of this size; an empty one needs no credit."""
        self.watched = True
        self.wanted = min(size, 1)

    def open(self, type: Type, payload: bytes) -> None:
        self.entity.announced = False
        self._opening = (type, payload)

    def push(self, message: bytes) -> None:
        size = len(message)
        covered = self.entity.credit.available - self.queued
        self.counted += OVERHEAD + (size if size <= covered else max(covered, 0))
        self.queued += size
        self.ready_queue().append(message)

    def ready_queue(self) -> deque[bytes]:
        """The queue, to put something into."""
        self.spoken = True
        if self.queue is NO_QUEUE:
            self.queue = deque()
        return self.queue

    def close(self, payload: bytes) -> None:
        self.accepts = False
        self.end = payload
        self.queued += len(payload)

    def reopen(self) -> None:
        """Take back an end of which nothing went out."""
        if self.end is not None:
            self.queued -= len(self.end)
            self.end = None

    def waits_for_transport(self) -> int:
        """What counts for the outbox by now: never more than before, and not what the credit does not cover."""
        if not self.queue or (self.queue[0] and not self.entity.credit.available):
            return 0
        return min(self.counted, min(self.queued, self.entity.credit.available) + OVERHEAD * len(self.queue))

    def drop_unbegun(self) -> int:
        """Forget what the peer has seen nothing of; gives the number of messages."""
        keep = 1 if self.is_begun and self.queue else 0
        dropped = len(self.queue) - keep
        while len(self.queue) > keep:
            self.queued -= len(self.queue.pop())
        return dropped

    def admits(self, size: int) -> bool:
        """May a message of this size be queued? If the credit covers it, or if it would be alone."""
        available = self.entity.credit.available
        waiting = self.queued + self.claimed
        return available - waiting >= size or (waiting == 0 and available > 0)

    def is_ready(self) -> bool:
        if self.entity.gone:
            return False
        if self._opening is not None:
            return self.opening_left == 0 or self._top.available > 0
        if not self.entity.announced:
            return False
        if self.queue:
            return self.entity.credit.available > 0 or not self.queue[0]
        return self.end is not None and not self.openings and (self.entity.credit.available > 0 or not self.end)

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        if not self.is_ready():
            return 0
        written = 0
        if self.accepts and not self._begun and self._opening is None:
            written = self._write_whole(budget, piece, out)  # nothing but messages, and most of them go as they are
        if self.queue or self._opening is not None or self.end is not None:
            written += self._write_all(budget - written, piece, out)
        if not self.queue:
            self.queue = NO_QUEUE
        self._owner.wrote(self)
        return written

    def _write_all(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """The opening, the messages, the end, as far as they may go."""
        written = 0
        if self._opening is not None:
            written = self._write_opening(self._opening[0], self._opening[1], budget, piece, out)
        if self._opening is None:
            written += self._write_messages(budget - written, piece, out)
            if self.end is not None and not self.queue and not self.openings:
                written += self._write_end(self.end, budget - written, piece, out)
        return written

    def _write_messages(self, budget: int, piece: int, out: list[Buffer]) -> int:
        queue, credit = self.queue, self.entity.credit
        written = 0
        while queue and written < budget:
            if not self._begun:
                written += self._write_whole(budget - written, piece, out)
                if not queue or written >= budget:
                    break
            before = self._begun
            written += self._write_part(queue[0], self._head, credit, piece, out)
            self.queued -= self._begun - before
            if self._begun == before:
                break
            if self._begun == len(queue[0]):
                queue.popleft()
                self._begun = 0
        if self.entity.kind is Kind.REQUEST_IN and not queue and written:
            self.entity.end_out = True  # a response is the end of its request in our direction
        return written

    def _write_whole(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Messages that need no splitting, as many as the budget has room for."""
        queue, start, small, append = self.queue, self._head, BYTES, out.append
        available = credit = self.entity.credit.available
        written = 0
        while queue and written < budget:
            message = queue[0]
            size = len(message)
            if size > piece or size > available:
                break
            queue.popleft()
            append(start + (small[size] if size < 248 else encode_varu64(size)))
            if size:
                append(message)
            available -= size
            written += size + self._overhead
        self.entity.credit.available = available
        self.queued -= credit - available
        return written

    def _write_part(self, payload: bytes, start: bytes, credit: Credit, piece: int, out: list[Buffer]) -> int:
        """The next part of a payload, as much as the credit and the largest piece allow."""
        size = min(piece, credit.available, len(payload) - self._begun)
        if size <= 0:
            return 0
        if not self._begun:
            out.append(encode_partial(len(payload)))
        out.append(start + encode_varu64(size))
        out.append(memoryview(payload)[self._begun : self._begun + size])
        self._begun += size
        credit.available -= size
        return size + self._overhead

    def _write_end(self, payload: bytes, budget: int, piece: int, out: list[Buffer]) -> int:
        start = head(self.entity.type, self.entity.id, END)
        credit = self.entity.credit
        written = 0
        if not self._begun and len(payload) <= min(piece, credit.available):
            out.append(start + encode_varu64(len(payload)) + payload)
            credit.available -= len(payload)
            self.queued -= len(payload)
            self._begun = len(payload)
            written = len(payload) + self._overhead
        while self._begun < len(payload) and written < budget:
            before = self._begun
            written += self._write_part(payload, start, credit, piece, out)
            self.queued -= self._begun - before
            if self._begun == before:
                return written
        if self._begun == len(payload):
            self.end, self._begun = None, 0
            self.entity.end_out = True
        return written

    def _write_opening(self, type: Type, payload: bytes, budget: int, piece: int, out: list[Buffer]) -> int:
        """The chunk that makes the entity, with the first grant; its payload is paid from the top level."""
        top, written = self._top, 0
        if not self._begun:
            size = min(len(payload), piece, top.available)
            if size < len(payload):
                out.append(encode_partial(len(payload)))
            grant = self._owner.first_grant(self.entity)
            flags = PAYLOAD | CREDIT if grant else PAYLOAD
            out.append(head(type, self.entity.id, flags) + encode_varu64(size))
            if size:
                out.append(payload if size == len(payload) else memoryview(payload)[:size])
            if grant:
                out.append(encode_varu64(grant))
            top.available -= size
            self._owner.paid(size)
            self._begun = size
            written = size + self._overhead
        start = head(type, self.entity.id, PAYLOAD)
        while self._begun < len(payload) and written < budget:
            before = self._begun
            written += self._write_part(payload, start, top, piece, out)
            if self._begun == before:
                break
            self._owner.paid(self._begun - before)
        if self._begun == len(payload):
            self._opening, self._begun = None, 0
            self._owner.announced(self.entity)
        return written
