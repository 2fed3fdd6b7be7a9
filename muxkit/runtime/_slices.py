"""How much of a stream is fed at once? Little, so that frames are counted often enough, except where none can end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from muxkit.runtime._links import StreamData

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muxkit.core import StreamId
    from muxkit.runtime._links import Arrival

SLICE: Final = 4 * 1024  # bytes


@runtime_checkable
class Foreseeing(Protocol):
    """An engine that knows how much of a stream it would only collect: no frame ends before that."""

    def missing(self, stream: StreamId) -> int: ...


def slices(arrival: Arrival, engine: Foreseeing | None) -> Iterator[Arrival]:
    """The pieces of it, each cut when the one before was fed."""
    if not isinstance(arrival, StreamData) or len(arrival.data) <= SLICE:
        yield arrival
        return
    stream, data, start, end = arrival.stream, arrival.data, 0, len(arrival.data)
    while start < end:
        stop = start + max(SLICE, engine.missing(stream) if engine is not None else 0)
        yield StreamData(stream, data[start:stop], arrival.is_last and stop >= end)
        start = stop
