"""Check the sums that an engine keeps, and the credit and payload in transit between two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Cursor, Pieces
from muxkit.protocols.bpmux import Chunk, Engine, Entity, Kind, Life, Partial, Receiver, Type, parse_chunk
from tests.protocols.bpmux._helpers import begun_of, line_of, opening_of, sums_of

if TYPE_CHECKING:
    from muxkit.protocols.bpmux.state import State

OPENINGS = frozenset({Type.OUT_REQUEST, Type.OUT_STREAM, Type.DUPLEX})


class Wire:
    """The chunks of one direction, and which of them the other engine has parsed."""

    def __init__(self) -> None:
        self._rest = Pieces()
        self._seen = 0  # bytes looked at
        self._parsed = 0  # offset behind the last chunk
        self._begun: dict[tuple[Type, int], int] = {}  # openings in parts: the bytes missing
        self._known: set[int] = set()  # ids of sinks that were opened; no id is used twice in these tests
        self._total = 0
        self.chunks: list[tuple[int, tuple[Kind, int], int, int, int]] = []  # end, entity, paid, top paid, credit

    def look(self, sent: bytearray) -> None:
        self._rest.append(bytes(sent[self._seen :]))
        self._seen = len(sent)
        data = self._rest.join()
        cursor = Cursor(data)
        while cursor.remaining:  # whole chunks only: a part of one raises
            start = cursor.position
            chunk = parse_chunk(cursor)
            self._parsed += cursor.position - start
            self._note(chunk)

    def _note(self, chunk: Chunk | Partial) -> None:
        if isinstance(chunk, Partial):
            self._total = chunk.total_size
            return
        size = len(chunk.payload or b"")
        key = (chunk.type, chunk.id)
        is_opening = (
            key in self._begun
            or chunk.type in OPENINGS
            or (chunk.type is Type.OUT_SINK and chunk.payload is not None and chunk.id not in self._known)
        )
        is_opening = is_opening and chunk.payload is not None
        if is_opening:
            left = self._begun.get(key, self._total or size) - size
            if left:
                self._begun[key] = left
            else:
                self._begun.pop(key, None)
                if chunk.type in (Type.OUT_SINK, Type.DUPLEX):
                    self._known.add(chunk.id)
        self._total = 0
        # The type names the sender's entity, except for In-* of the top level.
        kind = Kind.STREAM_OUT if chunk.type is Type.DUPLEX else Kind(chunk.type)
        if chunk.id == 0 and chunk.type in (Type.IN_SINK, Type.IN_STREAM):
            kind = Kind(chunk.type - 1)
        paid = 0 if is_opening else size + len(chunk.end or b"")
        self.chunks.append((self._parsed, (kind, chunk.id), paid, size if is_opening else 0, chunk.credit or 0))

    def forget(self, taken: int) -> None:
        while self.chunks and self.chunks[0][0] <= taken:
            self.chunks.pop(0)


def check_books(engine: Engine, inbox: dict[Receiver, list[int]]) -> None:
    """Check the sums that an engine keeps against its entities; `inbox` holds what its application did not consume."""
    entities = [entity for kind in Kind for entity in engine.entities(kind).values()]
    _check_queues(engine, entities)
    _check_windows(engine, entities, [entity for entity in inbox if entity.gone and inbox[entity]])
    _check_parts(sums_of(engine), entities)
    channels = [
        one for one in entities if not one.is_top and (one.twin is None or one.kind in (Kind.SINK_OUT, Kind.SINK_IN))
    ]
    assert engine.channels == len(channels)
    assert sums_of(engine).control.pongs_queued == sum(entity.pongs for entity in entities)


def _check_queues(engine: Engine, entities: list[Entity]) -> None:
    queues = [entity.outgoing for entity in entities if entity.outgoing is not None]
    assert engine.outbox == sum(queue.counted for queue in queues)
    for queue in queues:
        begun = begun_of(queue) if opening_of(queue) is None else 0
        assert min(queue.counted, queue.queued, queue.claimed) >= 0
        assert queue.queued == sum(map(len, queue.queue)) + len(queue.end or b"") - begun
    if not engine.top_sink.gone and engine.top_sink.outgoing is not None:
        top = engine.top_sink.outgoing
        assert top.claimed == sum(queue.opening_left for queue in queues)
        assert top.openings_before_end == sum(opening_of(queue) is not None for queue in queues)
    asleep = [queue.entity for queue in queues if queue.is_ready() and not queue.scheduled]
    assert not asleep, f"ready and not in line: {asleep}"


def _check_windows(engine: Engine, entities: list[Entity], gone: list[Entity]) -> None:
    state = sums_of(engine)
    windows = [entity.window for entity in [*entities, *gone]]
    if not engine.top_stream.gone:  # otherwise openings that were not consumed count there
        floor = state.budget.floor
        assert state.budget.used == sum(max(0, window.own - floor) for window in windows if window.budget is not None)
    for window in windows:
        assert min(window.credit, window.held, window.lent, window.by_hand, window.own) >= 0
        assert window.own + window.lent + window.by_hand == window.credit + window.held
    assert state.reassembly.left >= 0
    assert state.reassembly.total - state.reassembly.left >= sum(entity.window.lent for entity in entities)


def _check_parts(state: State, entities: list[Entity]) -> None:
    in_parts = [entity for entity in entities if entity.parts is not None and entity.parts.pieces is not None]
    for waiting in line_of(state):
        assert not waiting.gone
        assert waiting.window.shortfall() > 0, f"{waiting.label} waits in line and needs nothing"
    if state.reassembly.waiting:
        assert line_of(state)[0].window.shortfall() > state.reassembly.left
    assert state.unfinished == len(in_parts)
    for entity in entities:
        assert entity.window.unfinished == sum(one.partial for one in in_parts if state.payer(one) is entity)
        if entity.direct:
            assert entity.is_wanted
            assert not entity.partial
            assert entity.life is not Life.HALF_OPENED
        elif entity.is_wanted and entity.life is not Life.HALF_OPENED:
            assert entity.partial or entity.window.unfinished
