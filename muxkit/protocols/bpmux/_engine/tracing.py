"""What does an observer see of the frames? Their parts by name, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Cursor
from muxkit.protocols.bpmux._frames import Chunk, Partial, label, parse_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muxkit._observer import Direction, Observer
    from muxkit.core import Buffer


def observe_chunk(observer: Observer, direction: Direction, channel: str, chunk: Chunk, *, in_parts: bool) -> None:
    """One chunk; `in_parts` says that a Partial chunk stood before it."""
    if in_parts:
        observer.frame(direction, channel, "partial", 0)
    for name, size in _parts(chunk):
        observer.frame(direction, channel, name, size)


def observe_written(observer: Observer, buffers: Sequence[Buffer]) -> None:
    """Chunks that are about to be written; parsed again, so that writing them costs nothing without an observer."""
    cursor = Cursor(b"".join(buffers))
    in_parts = False
    while cursor.remaining:
        chunk = parse_chunk(cursor)
        if isinstance(chunk, Partial):
            in_parts = True
            continue
        observe_chunk(observer, "out", label(chunk.type, chunk.id), chunk, in_parts=in_parts)
        in_parts = False


def _parts(chunk: Chunk) -> Iterator[tuple[str, int]]:
    if chunk.payload is not None:
        yield "payload", len(chunk.payload)
    if chunk.credit is not None:
        yield "credit", 0
    if chunk.ping:
        yield "ping", 0
    if chunk.end is not None:
        yield "end", len(chunk.end)
    if chunk.ack_end:
        yield "ack-end", 0
    elif chunk.payload is None and chunk.credit is None and not chunk.ping and chunk.end is None:
        yield "pong", 0
