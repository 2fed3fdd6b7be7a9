"""What do recorded bytes of bpmux say? Chunks, part by part, as the recording end calls their channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from muxkit.pipeline.capture.decoder import BOTH, Cutting, Half
from muxkit.protocols.bpmux import Chunk, Partial, Type, parse_chunk

if TYPE_CHECKING:
    from muxkit._observer import Direction
    from muxkit.core import Cursor
    from muxkit.pipeline.capture.decoder import Found

# What we call what the peer speaks of: its sink is our stream.
OURS: Final = {
    Type.OUT_REQUEST: Type.IN_REQUEST.label,
    Type.IN_REQUEST: Type.OUT_REQUEST.label,
    Type.OUT_SINK: Type.IN_STREAM.label,
    Type.IN_SINK: Type.OUT_STREAM.label,
    Type.OUT_STREAM: Type.IN_SINK.label,
    Type.IN_STREAM: Type.OUT_SINK.label,
    Type.DUPLEX: Type.IN_SINK.label,
}
TOP: Final = {
    ("in", Type.IN_SINK): f"top-level {Type.IN_STREAM.label}",
    ("in", Type.IN_STREAM): f"top-level {Type.IN_SINK.label}",
    ("out", Type.IN_SINK): f"top-level {Type.IN_SINK.label}",
    ("out", Type.IN_STREAM): f"top-level {Type.IN_STREAM.label}",
}


@attrs.define
class BpmuxDecoder(Cutting):
    """Both directions of one connection; only what no chunk may be is found to be wrong."""

    halves: dict[str, Half] = attrs.field(factory=lambda: {direction: Half() for direction in BOTH})
    segment: int = 0

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        found: list[Found] = []
        if self.begin(direction, data, segment, offset, found):
            half = self.halves[direction]

            def parse(cursor: Cursor) -> None:
                chunk = parse_chunk(cursor)
                if isinstance(chunk, Partial):
                    half.announced = chunk.total_size
                else:
                    tell(chunk, direction, half.announced > 0, found)
                    half.announced = 0

            self.cut(direction, data, parse, found)
        return found

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self)


def name_of(direction: Direction, type: Type, id: int) -> str:
    """What the recording end calls the channel of a chunk."""
    if id == 0 and type in (Type.IN_SINK, Type.IN_STREAM):
        return TOP[direction, type]
    return f"{OURS[type] if direction == 'in' else type.label} {id}"


def tell(chunk: Chunk, direction: Direction, in_parts: bool, found: list[Found]) -> None:
    """A row for each part of a chunk."""
    channel = name_of(direction, chunk.type, chunk.id)

    def say(kind: str, size: int) -> None:
        found.append(("frame", direction, channel, kind, size, None, None, None, None))

    if in_parts:
        say("partial", 0)
    if chunk.payload is not None:
        say("payload", len(chunk.payload))
    if chunk.credit is not None:
        say("credit", 0)
        if chunk.credit:
            found.append(("credit", direction, channel, None, None, chunk.credit, None, None, None))
    if chunk.ping:
        say("ping", 0)
    if chunk.end is not None:
        say("end", len(chunk.end))
    if chunk.ack_end:
        say("ack-end", 0)
    elif chunk.payload is None and chunk.credit is None and not chunk.ping and chunk.end is None:
        say("pong", 0)
