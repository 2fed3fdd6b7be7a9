"""The entities of a connection, each with its credit, its window and its queue of what waits to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from muxkit.core import NO_QUEUE, Buffer, Credit, Outbox, Pieces, ReceiveWindow, encode_varu64, queue_of
from muxkit.protocols.bpmux.frames import CREDIT, END, PAYLOAD, Type, encode_partial, head, label


class Kind(IntEnum):
    """The six maps of the document; the number is the type of the chunks that this side sends about such an entity."""

    REQUEST_OUT = 0
    REQUEST_IN = 1
    SINK_OUT = 2
    SINK_IN = 3
    STREAM_OUT = 4
    STREAM_IN = 5


# The table under "Receiving Chunks": the map that a received chunk type addresses.
ADDRESSED = (
    Kind.REQUEST_IN,  # Out-Request
    Kind.REQUEST_OUT,  # In-Request
    Kind.STREAM_IN,  # Out-Sink
    Kind.STREAM_OUT,  # In-Sink
    Kind.SINK_IN,  # Out-Stream
    Kind.SINK_OUT,  # In-Stream
    Kind.SINK_IN,  # Duplex: this map and STREAM_IN
)

RECEIVERS = frozenset({Kind.REQUEST_OUT, Kind.STREAM_OUT, Kind.STREAM_IN})  # the peer sends the payload
OURS = frozenset({Kind.REQUEST_OUT, Kind.SINK_OUT, Kind.STREAM_OUT})  # opened by this side
TOP = frozenset({Kind.SINK_OUT, Kind.STREAM_OUT})  # the maps whose id 0 is the top level
OF_OTHERS = tuple(Type(kind) for kind in Kind)
OF_TOP = tuple(Type(kind + 1) if kind in TOP else Type(kind) for kind in Kind)

# Shared by all entities that need no credit, or no window, against their direction; these two never change.
NO_CREDIT = Credit()
NO_WINDOW = ReceiveWindow()


class Parts:
    """A message that arrives in parts."""

    __slots__ = ("is_end", "left", "pieces", "pinged")

    def __init__(self, total: int, *, is_wanted: bool) -> None:
        self.left: int = total
        self.pieces: Pieces | None = Pieces() if is_wanted else None  # None: the parts are discarded
        self.is_end: bool | None = None  # whether these are parts of an end payload; None before the first part
        self.pinged: list[Entity] = []  # pings to report when the opening is complete


class Entity:
    """One half of a channel, or a request: payload in one direction, credit and ends in both."""

    __slots__ = (
        "announced",
        "credit",
        "direct",
        "end_due",
        "end_in",
        "end_out",
        "gone",
        "grant",
        "half",
        "id",
        "is_rest_of_reset",
        "is_wanted",
        "kind",
        "late",
        "opening",
        "orderly",
        "outgoing",
        "parts",
        "pings",
        "pongs",
        "twin",
        "window",
    )

    def __init__(self, kind: Kind, id: int, window: ReceiveWindow | None) -> None:
        self.kind: Kind = kind
        self.id: int = id
        # The state that the document names: credit_out, credit_in and the end flags.
        self.credit: Credit = NO_CREDIT if kind in RECEIVERS else Credit()
        self.window: ReceiveWindow = window or NO_WINDOW
        self.end_out: bool = False
        self.end_in: bool = False
        # Receiving.
        self.is_wanted: bool = True  # the application receives what arrives; otherwise it is discarded
        self.direct: bool = True  # payloads need no check beside credit: wanted, and nothing in parts on its window
        self.opening: bool = False  # its opening payload arrives in parts and is incomplete
        self.parts: Parts | None = None
        # Sending.
        self.announced: bool = True  # its opening has been written completely
        self.outgoing: Outgoing | None = None
        # Control chunks to write, merged: a grant in bytes, numbers of pings and pongs, and the end.
        self.grant: int = 0
        self.pings: int = 0
        self.pongs: int = 0
        self.end_due: bool = False  # an end without payload, which nothing on its queue comes before
        # Life.
        self.half: object = None  # the session's object for it; the engine does not use it
        self.gone: bool = False
        self.orderly: bool = False  # the peer ended the other half of this duplex without an error
        self.is_rest_of_reset: bool = False  # the peer cancelled the other half of this duplex
        self.late: bool = False  # the peer opened it after it had closed its top level
        self.twin: Entity | None = None  # the other half of a duplex, while both are alive

    def own_credit(self) -> Credit:
        """Return credit that may be changed; a receiving entity uses some only for an end payload."""
        if self.credit is NO_CREDIT:
            self.credit = Credit()
        return self.credit

    def own_window(self) -> ReceiveWindow:
        """Return a window that may be changed; a sending entity uses one only for the peer's end payload."""
        if self.window is NO_WINDOW:
            self.window = ReceiveWindow()
        return self.window

    @property
    def receiver(self) -> Entity | None:
        """The half of its channel that the peer sends payload on."""
        return self if self.receives else self.twin

    @property
    def type(self) -> Type:
        """The type of chunks about it. Both sides have the top level as an out-entity and address it as the peer's."""
        return OF_TOP[self.kind] if self.id == 0 else OF_OTHERS[self.kind]

    @property
    def receives(self) -> bool:
        """Whether the peer sends its payload."""
        return self.kind in RECEIVERS

    @property
    def credit_out(self) -> int:
        return self.credit.available

    @property
    def credit_in(self) -> int:
        return self.window.credit

    @property
    def partial(self) -> int:
        """Bytes missing of a message in parts."""
        return 0 if self.parts is None else self.parts.left

    @property
    def ending(self) -> bool:
        """Whether this side has ended it: the end was written or is queued."""
        return self.end_out or self.end_due or (self.outgoing is not None and self.outgoing.closing)

    @property
    def is_top(self) -> bool:
        return self.id == 0 and self.kind in TOP

    @property
    def label(self) -> str:
        """Its name in logs and errors, as this side addresses it: `out-sink 7`."""
        return label(self.type, self.id)

    def __repr__(self) -> str:
        return f"<{self.label} credit_out={self.credit_out} credit_in={self.credit_in}>"


BYTES = tuple(bytes((number,)) for number in range(248))  # the VarU64 of small numbers
OVERHEAD = 16  # bytes that a queued message counts in the outbox beside its payload


class Outgoing:
    """The queue of one entity: its opening, its messages and its end, encoded when the scheduler calls `write`.

    A payload larger than a piece, or than the available credit, is written in parts. `on_written` is called after each
    turn that wrote of an opening or behind an end, and after each turn while a `Writable` event is wanted.
    """

    __slots__ = (
        "_begun",
        "_head",
        "_on_written",
        "_opening",
        "_outbox",
        "_top",
        "accepts",
        "claimed",
        "counted",
        "deficit",
        "end",
        "entity",
        "has_sent",
        "openings",
        "queue",
        "queued",
        "scheduled",
        "wanted",
        "watched",
    )

    def __init__(self, entity: Entity, top: Credit, outbox: Outbox, on_written: Callable[[Outgoing], None]) -> None:
        self.entity: Entity = entity
        self._top = top  # the credit that openings use
        self._outbox = outbox
        self._on_written = on_written
        self._head = head(entity.type, entity.id, PAYLOAD)
        self._opening: tuple[Type, bytes] | None = None
        self.queue: deque[bytes] = NO_QUEUE
        self._begun = 0  # bytes of the first item that were written in parts
        self.end: bytes | None = None
        self.accepts: bool = not entity.receives and entity.kind is not Kind.REQUEST_IN  # any number of messages
        self.has_sent: bool = False  # a message was queued on it, ever
        self.queued: int = 0  # payload bytes that use the entity's own credit
        self.claimed: int = 0  # on the top level: bytes of queued openings, which use its credit as well
        self.openings: int = 0  # on the top level: openings not written completely; its end is written after them
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
        self.entity.announced = False
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
        """Append about `budget` bytes of chunks to `out`, no payload above `piece`; return their size."""
        entity, written = self.entity, 0
        if entity.gone:
            return 0
        is_opening = self._opening is not None
        if self._opening is not None:
            written = self._write_opening(self._opening[0], self._opening[1], budget, piece, out)
        if entity.announced:
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
        if self.watched or is_opening or entity.end_out:
            self._on_written(self)
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
            entity.end_out = entity.end_out or (entity.kind is Kind.REQUEST_IN and self.has_sent)
        elif not self.openings:
            start = head(entity.type, entity.id, END)
            written += self._write_payload(start, self.end, entity.credit, budget - written, piece, out)
            if self._begun == len(self.end):
                self.end, self._begun = None, 0
                entity.end_out = True
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
            receiver, grant = entity.receiver, 0
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
            entity.announced = True
        return written
