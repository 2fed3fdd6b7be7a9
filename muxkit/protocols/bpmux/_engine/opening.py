"""May I open that, and under which id? Our new entities, from the check to the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError
from muxkit.core import U64_MAX
from muxkit.protocols.bpmux._engine.entities import Entity, Kind
from muxkit.protocols.bpmux._frames import Type

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.state import State


class Openings:
    """Makes entities, and queues the chunks that announce them; all of it or, with an error, nothing."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._next_id = state.config.first_id
        maps = state.maps
        self._sinks = (maps[Kind.SINK_OUT],)
        self._streams = (maps[Kind.STREAM_OUT],)
        self._requests = (maps[Kind.REQUEST_OUT],)
        self._duplexes = (maps[Kind.SINK_OUT], maps[Kind.STREAM_OUT])

    def sink(self, payload: bytes, id: int | None) -> Entity:
        self._check(payload, None)
        return self._announce(self._state.add(Kind.SINK_OUT, self._take(id, self._sinks)), Type.OUT_SINK, payload)

    def stream(self, payload: bytes, id: int | None, credit: int | None) -> Entity:
        self._check(payload, credit)
        entity = self._receiving(Kind.STREAM_OUT, self._take(id, self._streams), credit)
        return self._announce(entity, Type.OUT_STREAM, payload)

    def duplex(self, payload: bytes, id: int | None, credit: int | None) -> tuple[Entity, Entity]:
        self._check(payload, credit)
        id = self._take(id, self._duplexes)
        sink = self._state.add(Kind.SINK_OUT, id)
        stream = self._receiving(Kind.STREAM_OUT, id, credit)
        sink.twin, stream.twin = stream, sink
        self._announce(sink, Type.DUPLEX, payload)
        return sink, stream

    def request(self, payload: bytes, id: int | None, credit: int | None) -> Entity:
        self._check(payload, credit)
        entity = self._receiving(Kind.REQUEST_OUT, self._take(id, self._requests, lowest=0), credit)
        return self._announce(entity, Type.OUT_REQUEST, payload)

    def _check(self, payload: bytes, credit: int | None) -> None:
        state = self._state
        if state.top_sink.gone or state.top_sink.ending:
            raise LocalProtocolError("nothing can be opened after the top level was closed")
        if state.ours >= state.limits.channels:
            raise LocalProtocolError(
                f"{state.ours} channels are open; raise Limits({state.limits.bound_of_channels}=…) on both sides"
            )
        if payload:
            self._check_payload(len(payload))
        if credit is not None and not 0 <= credit <= U64_MAX:
            raise LocalProtocolError(f"credit of {credit} is outside 0..2^64-1")

    def _check_payload(self, size: int) -> None:
        state = self._state
        if state.config.letter:
            raise LocalProtocolError(f"an opening payload of {size} bytes; with letter=True it must be empty")
        if size > state.limits.message:
            raise LocalProtocolError(f"an opening payload: {size} bytes against Limits(message={state.limits.message})")
        if not state.outgoing(state.top_sink).admits(size):
            raise LocalProtocolError(
                f"an opening payload of {size} bytes against {state.top_sink.credit_out} of top-level credit"
            )

    def _take(self, id: int | None, maps: tuple[dict[int, Entity], ...], *, lowest: int = 1) -> int:
        if id is None:
            return self._allocate(maps)
        if not lowest <= id <= U64_MAX or any(id in ids for ids in maps):
            raise LocalProtocolError(f"id {id} is in use, reserved, or not in {lowest}..2^64-1")
        return id

    def _allocate(self, maps: tuple[dict[int, Entity], ...]) -> int:
        id = self._next_id
        while id in maps[0] or id in maps[-1]:
            id = id + 1 if id < U64_MAX else 1
        self._next_id = id + 1 if id < U64_MAX else 1
        return id

    def _receiving(self, kind: Kind, id: int, credit: int | None) -> Entity:
        entity = self._state.add(kind, id, window=None if credit is None else 0)
        if credit is None:
            credit = entity.window.start(self._state.now)
        else:
            entity.window.grant(credit)
        entity.announced = False  # so the credit waits, to travel with the opening
        self._state.renew(entity, credit)
        return entity

    def _announce(self, entity: Entity, type: Type, payload: bytes) -> Entity:
        self._state.outgoing(entity).open(type, payload)
        self._state.count_channel(entity)
        self._state.claim(entity)
        return entity
