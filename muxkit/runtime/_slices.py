"""How much of a stream is fed at once? Little, so that frames are counted often enough, except where none can end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit.runtime._links import StreamData

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muxkit.core import MissingBytes
    from muxkit.runtime._links import Arrival

SLICE: Final = 4 * 1024  # bytes


def slices(arrival: Arrival, engine: MissingBytes | None) -> Iterator[Arrival]:
    """The pieces of it, each cut when the one before was fed."""
    if not isinstance(arrival, StreamData) or len(arrival.data) <= SLICE:
        yield arrival
        return
    stream, data, start, end = arrival.stream, arrival.data, 0, len(arrival.data)
    while start < end:
        stop = start + max(SLICE, engine.missing(stream) if engine is not None else 0)
        yield StreamData(stream, data[start:stop], arrival.is_last and stop >= end)
        start = stop
