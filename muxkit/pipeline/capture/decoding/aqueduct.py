"""Decoding of Aqueduct over a byte stream: the frames of the carrier, and the frames of channels in its streams.

A capture of QUIC has the bytes of all streams in sequence, but not the streams that they belong to, so it can't be
decoded. The `frames` of such a capture have the information.
"""

from __future__ import annotations

from typing import Final

import attrs

from muxkit import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore
from muxkit.pipeline.capture.decoding.decoder import LARGEST, Decoder
from muxkit.pipeline.capture.files import Found, row
from muxkit.protocols.aqueduct import carrier, frames

BOUNDS: Final = frames.Bounds(message=LARGEST)
CONNECTION: Final = "connection"


@attrs.define
class Stream:
    """One stream of one direction."""

    held: bytes = b""
    """The beginning of an incomplete frame."""
    wanted: int = 0
    """Parsing waits until this many bytes are held."""
    channel: int | None = None
    """The channel to which the stream was routed."""


@attrs.define
class CarrierHalf:
    """The state of one direction of the carrier."""

    began: bool = False
    """The eight bytes at the start have arrived."""
    left: int = 0
    """Missing bytes of the current chunk."""
    index: int = 0
    """The stream of that chunk."""
    is_last: bool = False
    """The stream ends with that chunk."""
    streams: dict[int, Stream] = attrs.field(factory=dict)


def _both_carriers() -> dict[str, CarrierHalf]:
    return {"in": CarrierHalf(), "out": CarrierHalf()}


@attrs.define
class AqueductDecoder(Decoder):
    """Decodes both directions of one connection over a byte stream. It only finds frames that can't be parsed.

    After a gap, decoding doesn't continue, because the bytes of a message may look like a frame of the carrier.
    """

    carriers: dict[str, CarrierHalf] = attrs.field(factory=_both_carriers)

    def restart(self) -> None:
        super().restart()
        self.carriers = _both_carriers()

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        """Parse one frame of the carrier, or the available part of a chunk."""
        half = self.carriers[direction]
        if not half.began:
            self._begin(direction, found, cursor)
        elif half.left:
            data = bytes(cursor.exact(min(half.left, cursor.remaining)))
            half.left -= len(data)
            self._receive(direction, half, data, found)
        else:
            self._parse_frame(direction, half, found, cursor)

    def _begin(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        hello = cursor.data[cursor.position : cursor.position + len(carrier.HELLO)]
        if carrier.HELLO.startswith(hello):
            cursor.exact(len(carrier.HELLO))
            self.carriers[direction].began = True
            return
        # This isn't the peer's fault. The recording may be of QUIC, or it may not start with the connection.
        text = f"the recording begins with {bytes(hello)!r}; only what Aqueduct sends over a byte stream can be decoded"
        found.append(row("unverified", direction, id=0, text=text))
        self.halves[direction].lost = True
        cursor.position += cursor.remaining

    def _parse_frame(self, direction: Direction, half: CarrierHalf, found: list[Found], cursor: Cursor) -> None:
        tag = cursor.byte()
        if tag in (carrier.DATA, carrier.LAST, carrier.EARLY_DATA, carrier.EARLY_LAST):
            index, size = cursor.varint(), cursor.varint()
            half.index, half.left, half.is_last = index, size, tag in (carrier.LAST, carrier.EARLY_LAST)
            if not size:
                self._receive(direction, half, b"", found)
        elif tag == carrier.DATAGRAM:
            self._parse_stream(direction, Stream(), bytes(cursor.exact(cursor.varint())), True, found)
        elif tag == carrier.GOODBYE:
            size = cursor.varint()
            cursor.exact(size)
            found.append(row("frame", direction, CONNECTION, "GOODBYE", size))
        elif tag in (carrier.STREAMS, carrier.EARLY):
            name = "STREAMS" if tag == carrier.STREAMS else "EARLY"
            found.append(row("frame", direction, CONNECTION, name, 0, id=cursor.varint()))
        elif tag == carrier.CREDIT:
            channel, amount = f"stream {cursor.varint()}", cursor.varint()
            found.append(row("credit", direction, channel, credit=amount))
        elif tag in (carrier.RESET, carrier.STOP):
            index = cursor.varint()
            name = "RESET" if tag == carrier.RESET else "STOP"
            if tag == carrier.RESET:
                half.streams.pop(index, None)
            found.append(row("frame", direction, f"stream {index}", name, 0))
        else:
            raise RemoteProtocolError(f"no frame of the carrier begins with {tag:#04x}")

    def _receive(self, direction: Direction, half: CarrierHalf, data: bytes, found: list[Found]) -> None:
        """Parse the next bytes of the current stream."""
        stream = half.streams.setdefault(half.index, Stream())
        ends = half.is_last and not half.left
        if ends:
            del half.streams[half.index]
        data = stream.held + data
        if len(data) < stream.wanted and not ends:
            stream.held = data
        else:
            self._parse_stream(direction, stream, data, ends, found)

    def _parse_stream(self, direction: Direction, stream: Stream, data: bytes, ends: bool, found: list[Found]) -> None:
        cursor, start = Cursor(data), 0
        try:
            while cursor.remaining:
                start = cursor.position
                frame = frames.parse_frame(cursor, BOUNDS)
                if isinstance(frame, frames.RouteTo):
                    stream.channel = frame.channel
                else:
                    found.append(_row_of(direction, stream, frame))
        except NeedMore as need:
            stream.held = data[start:]
            stream.wanted = len(stream.held) + need.missing
            if ends:
                text = f"a stream or datagram ends {len(stream.held)} bytes into a frame"
                raise RemoteProtocolError(text, rule="aqueduct-F09") from None
        else:
            stream.held, stream.wanted = b"", 0


def _row_of(direction: Direction, stream: Stream, frame: frames.Frame) -> Found:
    channel = CONNECTION if stream.channel is None else frames.label(stream.channel)
    if isinstance(frame, frames.MessageFrame):
        return row("frame", direction, channel, frames.name_of(frame), len(frame.payload), id=frame.number)
    return row("frame", direction, channel, frames.name_of(frame), 0)
