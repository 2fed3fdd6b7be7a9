"""Encoding of e3x packets for a byte stream, and the engine for sessions over TCP, TLS or a WebSocket.

A packet is sent as chunks of up to 255 bytes. Each chunk starts with a byte that contains its length, and a 0 byte
follows the last chunk. A 0 byte between two packets is a keepalive, and is ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import attrs

from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Clock
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.engine import Engine
from muxkit.protocols.e3x.events import Event

CHUNK_MOST: Final = 256  # maximum size of a chunk in bytes, including its length
FULL: Final = b"\xff"  # the length of a chunk of the maximum size
RUN_MOST: Final = 256  # maximum number of full chunks that `Dechunker` joins in one step
# `Dechunker.feed` limits its work by a number of chunks. It counts a complete packet as this many chunks, because
# handling a packet takes much longer than parsing a chunk.
PACKET_CHUNKS: Final = 8
PACKET_MOST: Final = 2 + 65_535 + 65_535  # size of the largest possible packet in bytes


def encode_chunks(packet: bytes, size: int = CHUNK_MOST) -> bytes:
    """Encode a packet as chunks of at most `size` bytes, followed by the 0 byte that ends the packet."""
    if not 2 <= size <= CHUNK_MOST:
        raise ValueError(f"invalid chunk size {size}: expected 2 to {CHUNK_MOST} bytes")
    most = size - 1
    if 0 < len(packet) <= most:
        return b"%c%b\0" % (len(packet), packet)
    full = b"%c" % most
    pieces = [packet[start : start + most] for start in range(0, len(packet) - most + 1, most)]
    rest = packet[len(pieces) * most :]
    last = b"%c%b\0" % (len(rest), rest) if rest else b"\0"
    return full + full.join(pieces) + last if pieces else last


class Dechunker:
    """Decodes packets from a byte stream. A packet larger than `most` bytes is skipped and counted."""

    def __init__(self, most: int = PACKET_MOST) -> None:
        self.most = most
        self.oversized: int = 0
        self._rest = b""  # input whose bytes from `_at` on haven't been parsed
        self._at = 0
        self._packet = bytearray()
        self._size = 0  # size of the incomplete packet so far, including bytes that were skipped
        self._left = 0  # number of bytes that are missing from the incomplete chunk

    @property
    def unparsed(self) -> int:
        """Number of bytes that were fed and not parsed yet."""
        return len(self._rest) - self._at

    @property
    def is_mid_packet(self) -> bool:
        """True while a packet is incomplete."""
        return self._size > 0

    def feed(self, data: bytes, most_chunks: int = sys.maxsize) -> list[bytes]:
        """Parse up to `most_chunks` chunks, and return the packets that are complete now.

        Input beyond that number of chunks is kept for the next call. A complete packet counts as `PACKET_CHUNKS`.
        """
        packets: list[bytes] = []
        position = chunks = 0
        if self._rest:
            if data:
                data = self._rest[self._at :] + data
            else:  # keep the position instead of slicing, because every call for the same input would copy the rest
                data, position = self._rest, self._at
            self._rest, self._at = b"", 0
        while position < len(data):
            if self._left:
                piece = data[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                if self._size <= self.most:
                    self._packet += piece
                continue
            if chunks >= most_chunks:
                self._rest, self._at = data, position
                break
            if data[position] == CHUNK_MOST - 1 and (run := self._join_full(data, position, most_chunks - chunks)):
                position += run * CHUNK_MOST
                chunks += run
                continue
            chunks += 1
            self._left = data[position]
            position += 1
            self._size += self._left
            if self._left == 0 and self._size:
                self._finish(packets)
                chunks += PACKET_CHUNKS
            elif self._size > self.most:
                self._packet.clear()
        return packets

    def _join_full(self, data: bytes, position: int, most: int) -> int:
        """Join the full chunks from `position` on, up to `most`, and return their number.

        Nearly all chunks of a large packet are full. Joining them in one step is about ten times as fast as parsing
        them one by one. The last chunk of `data` may be cut off, and isn't joined.
        """
        whole = min((len(data) - position) // CHUNK_MOST, most, RUN_MOST)
        lengths = data[position : position + whole * CHUNK_MOST : CHUNK_MOST]
        count = whole - len(lengths.lstrip(FULL))
        self._size += count * (CHUNK_MOST - 1)
        if self._size > self.most:
            self._packet.clear()
        else:
            end = position + count * CHUNK_MOST
            self._packet += b"".join([data[at + 1 : at + CHUNK_MOST] for at in range(position, end, CHUNK_MOST)])
        return count

    def _finish(self, packets: list[bytes]) -> None:
        if self._size > self.most:
            self.oversized += 1
        else:
            packets.append(bytes(self._packet))
        self._packet.clear()
        self._size = 0


class ChunkedEngine(Engine):
    """An `Engine` for a byte stream such as TCP, TLS or a WebSocket. It implements `StreamEngine`.

    A pump that pulls bytes from a stream engine doesn't pass the time, so this engine reads it from `clock`. The stream
    has its own congestion control, so the congestion control of the engine is off. Packets larger than `most` bytes are
    skipped.
    """

    def __init__(
        self,
        odd: bool,
        config: Config | None = None,
        *,
        limits: Limits | None = None,
        observer: Observer | None = None,
        clock: Clock,
        most: int = PACKET_MOST,
    ) -> None:
        config = attrs.evolve(config or Config(), congestion=False)
        super().__init__(odd, config, limits=limits, observer=observer, clock=clock)
        self.packet_size = config.stream_packet
        self.frames_at_once: int = sys.maxsize
        """Maximum number of chunks that one call parses. Part of `BoundedParsing`.

        The limit is a number of chunks and not of bytes, because a chunk of 1 byte costs as much as a chunk of 255.
        """
        self.ended: bool = False
        """True once the peer has closed its direction of the stream."""
        self.ended_cleanly: bool = False
        """True if the peer closed its direction of the stream between two packets."""
        self._dechunker = Dechunker(most)

    @property
    def oversized(self) -> int:
        """Number of packets that were skipped because they were too large."""
        return self._dechunker.oversized

    @property
    def unparsed(self) -> int:
        """Number of bytes that were received and not parsed yet. Part of `BoundedParsing`."""
        return self._dechunker.unparsed

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse and apply received bytes, and return the events. Never raises."""
        if self.state.observer is not None and data:
            self.state.observer.transport("in", data)
        for packet in self._dechunker.feed(data, self.frames_at_once):
            self.take_in(packet, now)
        return self.take_events()

    def receive_eof(self, now: float) -> Sequence[Event]:
        """Record that the peer has closed its direction of the stream. The session decides whether to hang up."""
        self.ended = True
        self.ended_cleanly = not self._dechunker.is_mid_packet
        return ()

    def has_output(self) -> bool:
        # This runs for each message, so it encodes nothing. Then one write can take the packets of several messages.
        state, line = self.state, self.state.line
        while line and (line[0].gone or not line[0].sender.is_ready):
            self.leave_line()
        return bool(line or state.acking or state.resends or state.errs or state.answers)

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        out: list[Buffer] = []
        size = 0
        self.state.update_time()
        while size < limit and (packets := self.datagrams_to_send(self.state.now)):
            out += [encode_chunks(packet) for packet in packets]
            size += sum(map(len, packets))
        return out
