"""Decoding of e3x. A datagram is a packet. Over a byte stream, packets consist of chunks.

The first bytes show which of them was recorded. A packet starts with the size of its head in two bytes, followed by the
head's first brace. A chunk has its own size in front of that.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from muxkit import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.core import Cursor, NeedMore
from muxkit.pipeline.capture.decoding.decoder import OTHER, SEARCHED, Decoder
from muxkit.pipeline.capture.files import Found, row
from muxkit.protocols.e3x.packets import name_of, parse_packet

TELLING: Final = 64  # bytes without a brace in the expected place, after which the recording can't consist of chunks
# After the empty chunk that ends a packet, or at the start: the sizes of a chunk and of a head, and the first brace.
FIRST_CHUNK: Final = re.compile(rb"(?:\A|\x00)(?=[\x01-\xff]..\{)", re.DOTALL)
LONGEST_BEGINNING: Final = 5  # bytes that the expression looks at


@attrs.define
class E3xDecoder(Decoder):
    """Decodes both directions of one connection. The only violations that it finds are malformed packets.

    A missing datagram is just a gap. After a gap in a byte stream, decoding continues with the next complete packet.
    """

    in_chunks: bool | None = None
    """Whether packets consist of chunks, or None while that isn't known."""

    def feed(self, direction: Direction, data: bytes, *, segment: int = 0, offset: int | None = None) -> list[Found]:
        found: list[Found] = []
        is_whole = self.begin(direction, data, segment, offset, found)
        half = self.halves[direction]
        if self.in_chunks is None:
            half.held.append(data)
            half.size += len(data)
            self.in_chunks = _comes_in_chunks(half.held)
            if self.in_chunks is not None:
                for each in OTHER:
                    self._begin_again(each, found)
        elif not self.in_chunks:
            half.lost, half.gap_end = False, None
            self._packet(direction, data, half.offset - len(data), found)
        elif is_whole:
            self.cut(direction, data, found)
        elif half.gap_end is not None:
            self.search(direction, data, found, what="packets", find=_find_packet)
        return found

    def restart(self) -> None:
        super().restart()
        self.in_chunks = None

    def parse(self, direction: Direction, found: list[Found], cursor: Cursor) -> None:
        """Parse one packet that consists of chunks."""
        offset = self.halves[direction].offset - cursor.remaining
        packet = bytearray()
        while size := cursor.byte():
            packet += cursor.exact(size)
        if packet:
            self._packet(direction, bytes(packet), offset, found)

    def _begin_again(self, direction: Direction, found: list[Found]) -> None:
        """Parse the bytes that were held until the format was known."""
        half = self.halves[direction]
        held, half.held, half.size = half.held, [], 0
        if self.in_chunks and half.lost:
            self.search(direction, b"".join(held), found, what="packets", find=_find_packet)
        elif self.in_chunks:
            if held:
                self.cut(direction, b"".join(held), found)
        else:
            half.lost, half.gap_end = False, None
            offset = half.offset - sum(map(len, held))
            for packet in held:
                self._packet(direction, packet, offset, found)
                offset += len(packet)

    def _packet(self, direction: Direction, data: bytes, offset: int, found: list[Found]) -> None:
        if not data:  # marks the end of a gap
            return
        try:
            packet = parse_packet(data)
        except RemoteProtocolError as error:  # the peer drops such a packet and continues
            kind = type(error).__name__
            found.append(row("error", direction, None, kind, id=offset, rule=error.rule, text=str(error)))
            return
        name, channel = name_of(packet), f"channel {packet.channel}"
        number = packet.ack if name == "ack" else packet.seq
        found.append(row("frame", direction, channel, name, len(packet.body), id=number))


def _comes_in_chunks(pieces: list[bytes]) -> bool | None:
    """Return whether these first pieces are parts of a byte stream or packets. Return None if that isn't clear yet."""
    beginning = b"".join(pieces)
    if beginning[3:4] == b"{":
        return True
    is_packet = len(beginning) > 3 and any(piece[2:3] == b"{" for piece in pieces)
    return False if is_packet or len(beginning) >= TELLING else None


def _find_packet(data: bytes) -> tuple[int, bool]:
    """Find a complete packet.

    Return its position and True, or the position where one may start once there are more bytes, and False.
    """
    for match in FIRST_CHUNK.finditer(data):
        start = match.end()
        cursor, packet = Cursor(data, start), bytearray()
        try:
            while size := cursor.byte():
                packet += cursor.exact(size)
            parse_packet(bytes(packet))
        except NeedMore:
            if len(data) - start <= SEARCHED:
                return start, False
        except RemoteProtocolError:
            pass
        else:
            return start, True
    # The beginning of a packet may be cut off at the end.
    return max(0, len(data) - LONGEST_BEGINNING), False
