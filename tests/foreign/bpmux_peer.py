"""A plain bpmux/rel peer, written from the document; imports nothing of muxkit.

Both roles are the same on the wire. A violation ends the connection at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tests.foreign.wire import Cutting, LineCut, Refusal, Violation, Wire

OUT_REQUEST, IN_REQUEST, OUT_SINK, IN_SINK, OUT_STREAM, IN_STREAM, DUPLEX, PARTIAL = range(8)
PAYLOAD, CREDIT, PING, END, ACK_END = 16, 8, 4, 2, 1
MOST = 2**64 - 1
# The map in which a received type is looked up, by the type under which this side speaks of the same entity.
ANSWERS = {
    OUT_REQUEST: IN_REQUEST, IN_REQUEST: OUT_REQUEST, OUT_SINK: IN_STREAM, IN_STREAM: OUT_SINK,
    IN_SINK: OUT_STREAM, OUT_STREAM: IN_SINK,
}  # fmt: skip
TOP = {IN_SINK: IN_STREAM, IN_STREAM: IN_SINK}


def answer_of(kind: int, number: int) -> int:
    return TOP[kind] if number == 0 and kind in TOP else ANSWERS[kind]


def varu64(value: int) -> bytes:
    if value < 248:
        return bytes([value])
    size = (value.bit_length() + 7) // 8
    return bytes([247 + size]) + value.to_bytes(size, "big")


def chunk(kind: int, number: int, payload: bytes | None = None, credit: int | None = None, *,
          ping: bool = False, end: bytes | None = None, ack: bool = False) -> bytes:  # fmt: skip
    flags = (
        (payload is not None) * PAYLOAD | (credit is not None) * CREDIT | ping * PING | (end is not None) * END | ack
    )
    data = bytes([kind << 5 | flags]) + varu64(number)
    if payload is not None:
        data += varu64(len(payload)) + payload
    if credit is not None:
        data += varu64(credit)
    return data if end is None else data + varu64(len(end)) + end


def partial(total: int) -> bytes:
    size = (total.bit_length() + 7) // 8
    return bytes([PARTIAL << 5 | size - 1]) + total.to_bytes(size, "big")


@dataclass
class Entity:
    """An entity, under the type with which this side speaks of it."""

    kind: int
    number: int
    credit_out: int = 0
    credit_in: int = 0
    end_out: bool = False
    partial: int = 0
    partial_end: bool | None = None
    opening: bool = False  # its opening payload is not complete, and is paid from the top level
    buffer: bytes = b""
    pongs: int = 0
    pings: int = 0
    got: list[bytes] = field(default_factory=list)
    ended: bytes | None = None
    confirmed: bool = False

    @property
    def over(self) -> bool:
        return self.ended is not None or self.confirmed


class Peer:
    """One end of a connection, strict about what comes; `script` is called with each event."""

    def __init__(self, stream: trio.SocketStream, cutting: Cutting | None = None) -> None:
        self.wire = Wire(stream, cutting or Cutting())
        self.refusals: list[Refusal] = []
        self.entities: dict[tuple[int, int], Entity] = {}
        self.opened: list[Entity] = []  # by the other side
        self.chunks = 0
        self.pending = 0  # the total that a Partial has announced for the next chunk
        self.top_in = self._new(IN_STREAM, 0)  # what comes here; we grant and cancel with In-Stream 0
        self.top_out = self._new(IN_SINK, 0)
        self.data = b""
        self.outbox = bytearray()
        self.changed = trio.Event()
        self.ended = False  # in order
        self.progress = trio.Event()

    def _new(self, kind: int, number: int) -> Entity:
        entity = self.entities[kind, number] = Entity(kind, number)
        return entity

    # Commands

    def put(self, data: bytes) -> None:
        self.outbox += data
        self.changed.set()

    def grant(self, entity: Entity, credit: int) -> None:
        entity.credit_in += credit
        self.put(chunk(entity.kind, entity.number, None, credit))

    def open(self, kind: int, number: int, payload: bytes = b"", credit: int | None = None) -> Entity:
        """Open an entity; of a duplex this gives the half that sends, the other is (OUT_STREAM, number)."""
        assert self.top_out.credit_out >= len(payload)
        self.top_out.credit_out -= len(payload)
        entity = self._new(OUT_SINK if kind == DUPLEX else kind, number)
        taking = self._new(OUT_STREAM, number) if kind == DUPLEX else entity
        taking.credit_in += credit or 0
        # The credit of a Duplex chunk belongs to the receiver's sink, which is the stream of this side.
        self.put(chunk(kind, number, payload, credit))
        return entity

    def send(self, entity: Entity, payload: bytes) -> None:
        assert entity.credit_out >= len(payload)
        entity.credit_out -= len(payload)
        if entity.kind == IN_REQUEST:
            entity.end_out = True
        self.put(chunk(entity.kind, entity.number, payload))

    def send_split(self, entity: Entity, payload: bytes, size: int) -> None:
        assert entity.credit_out >= len(payload)
        entity.credit_out -= len(payload)
        self.put(partial(len(payload)))
        for start in range(0, len(payload), size):
            self.put(chunk(entity.kind, entity.number, payload[start : start + size]))

    def ping(self, entity: Entity) -> None:
        entity.pings += 1
        self.put(chunk(entity.kind, entity.number, ping=True))

    def end(self, entity: Entity, payload: bytes = b"") -> None:
        if entity.over or entity.end_out:
            return
        entity.end_out = True
        self.put(chunk(entity.kind, entity.number, end=payload))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.progress.wait()

    # The connection

    async def run(self) -> None:
        """Read and write until the connection ends; notes a violation and hangs up."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                while data := await self.wire.take():
                    self.data += data
                    while (size := self._next()) is not None:
                        self.data = self.data[size:]
                    self.progress.set()
                    self.progress = trio.Event()
                if self.data or self.pending:
                    raise Violation("bpmux-G13", f"the stream ended inside of a chunk: {self.data.hex()}")
                self.ended = True
                nursery.cancel_scope.cancel()
        except* LineCut:
            pass
        except* Violation as group:
            for violation in group.exceptions:
                assert isinstance(violation, Violation)
                self.refusals.append(violation.refusal)
        finally:
            await self.wire.cut()

    async def _write(self) -> None:
        while True:
            await self.changed.wait()
            self.changed = trio.Event()
            data, self.outbox = bytes(self.outbox), bytearray()
            await self.wire.send(data)

    # What comes

    def _number(self, at: int) -> tuple[int, int]:
        first = self.data[at]
        if first < 248:
            return first, at + 1
        size = first - 247
        if len(self.data) < at + 1 + size:
            raise IndexError
        value = int.from_bytes(self.data[at + 1 : at + 1 + size], "big")
        if varu64(value)[0] != first:
            raise Violation("bpmux-G12", f"{value} in {size} bytes")
        return value, at + 1 + size

    def _bytes(self, at: int) -> tuple[bytes, int]:
        size, at = self._number(at)
        if len(self.data) < at + size:
            raise IndexError
        return self.data[at : at + size], at + size

    def _next(self) -> int | None:
        """Process one chunk, and give its size; None if it is not complete."""
        try:
            tag = self.data[0]
            if tag >> 5 == PARTIAL:
                size = (tag & 7) + 1
                if len(self.data) < 1 + size:
                    return None
                total = int.from_bytes(self.data[1 : 1 + size], "big")
                if not total or (total.bit_length() + 7) // 8 != size:
                    raise Violation("bpmux-P05" if total else "bpmux-P04", f"total {total} in {size} bytes")
                if self.pending:
                    raise Violation("bpmux-P07", "a Partial behind a Partial")
                self.pending = total
                return 1 + size
            number, at = self._number(1)
            payload = credit = end = None
            if tag & PAYLOAD:
                payload, at = self._bytes(at)
            if tag & CREDIT:
                credit, at = self._number(at)
            if tag & END:
                end, at = self._bytes(at)
        except IndexError:
            return None
        self.chunks += 1
        self._chunk(tag >> 5, number, tag, payload, credit, end)
        return at

    def _chunk(
        self, kind: int, number: int, tag: int, payload: bytes | None, credit: int | None, end: bytes | None
    ) -> None:
        what = f"chunk {tag:02x} for {number}"
        if number == 0 and kind in (OUT_SINK, OUT_STREAM, DUPLEX):
            raise Violation("bpmux-S05", what)
        key = (answer_of(IN_SINK if kind == DUPLEX else kind, number) if kind != DUPLEX else IN_STREAM, number)
        entity = self.entities.get(key)
        new = entity is None
        if entity is None:
            entity = self._create(kind, number, tag, what)
        elif kind == DUPLEX and not entity.opening:
            raise Violation("bpmux-R21", what)
        total, self.pending = self.pending, 0
        if total:
            if entity.partial or (payload is None) == (end is None):
                raise Violation("bpmux-P08", f"{what} behind a Partial of {total}")
            entity.partial, entity.partial_end, entity.opening = total, end is not None, new
        if payload is not None:
            self._payload(kind, entity, payload, new, what)
        if credit is not None:
            target = self.entities[IN_SINK, number] if kind == DUPLEX else entity
            target.credit_out += credit
            if target.credit_out > MOST:
                raise Violation("bpmux-R25", f"credit {credit} more than fits")
        if tag & PING and not entity.end_out and end is None:
            self.put(chunk(IN_SINK if kind == DUPLEX else entity.kind, number))
        if end is not None:
            self._end(kind, entity, end, payload, what)
        if tag & ACK_END:
            if tag & 30:
                raise Violation("bpmux-R32", what)
            if not entity.end_out:
                raise Violation("bpmux-R33", f"{what}, which was not ended")
            entity.confirmed = True
            self._forget(entity)
        if not tag & 31:
            entity.pongs += 1

    def _create(self, kind: int, number: int, tag: int, what: str) -> Entity:
        if number == 0 and kind in (IN_SINK, IN_STREAM):
            raise Violation("bpmux-R09", what)
        if kind in (IN_REQUEST, IN_SINK, IN_STREAM):
            raise Violation("bpmux-R10", f"{what}, which is not open")
        if not tag & PAYLOAD:
            raise Violation("bpmux-R14", what)
        if tag & ACK_END:
            raise Violation("bpmux-R20", what)
        entity = self._new(IN_STREAM if kind == DUPLEX else ANSWERS[kind], number)
        if kind == DUPLEX:
            if (IN_SINK, number) in self.entities:
                raise Violation("bpmux-R12", what)
            self._new(IN_SINK, number)
        self.opened.append(entity)
        return entity

    def _payload(self, kind: int, entity: Entity, payload: bytes, new: bool, what: str) -> None:
        opening = new or entity.opening
        if not opening and kind not in (IN_REQUEST, IN_SINK, OUT_SINK):
            raise Violation("bpmux-R22", what)
        payer = self.top_in if opening else entity
        if len(payload) > payer.credit_in:
            raise Violation(
                "bpmux-R15" if opening else "bpmux-R23", f"{what}: {len(payload)} bytes of {payer.credit_in}"
            )
        payer.credit_in -= len(payload)
        if entity.partial:
            payload = self._piece(entity, payload, False)
            if entity.partial:
                return
            entity.opening = False
        entity.got.append(payload)
        if kind == IN_REQUEST:
            entity.ended = b""
            if not entity.end_out:
                self.put(chunk(OUT_REQUEST, entity.number, ack=True))
            self._forget(entity)

    def _piece(self, entity: Entity, payload: bytes, end: bool) -> bytes:
        if entity.partial_end != end:
            raise Violation("bpmux-P14", f"both kinds of payload for {entity.number}")
        if len(payload) > entity.partial:
            raise Violation("bpmux-P11", f"{len(payload)} bytes, {entity.partial} are left")
        entity.partial -= len(payload)
        entity.buffer += payload
        whole = entity.buffer
        if not entity.partial:
            entity.buffer, entity.partial_end = b"", None
        return whole

    def _end(self, kind: int, entity: Entity, end: bytes, payload: bytes | None, what: str) -> None:
        if kind == IN_REQUEST and payload is not None:
            raise Violation("bpmux-R27", what)
        if entity.ended is not None:
            raise Violation("bpmux-R28", what)
        if len(end) > entity.credit_in:
            raise Violation("bpmux-R29", f"{what}: {len(end)} bytes of {entity.credit_in}")
        entity.credit_in -= len(end)
        if entity.partial:
            end = self._piece(entity, end, True)
            if entity.partial:
                return
        entity.ended = end
        if not entity.end_out:
            self.put(chunk(entity.kind, entity.number, ack=True))
        self._forget(entity)

    def _forget(self, entity: Entity) -> None:
        self.entities.pop((entity.kind, entity.number), None)
