"""Packets over a byte stream: chunks of up to 255 bytes, each behind its length, and a 0 behind the last.

A 0 outside a packet is a keepalive and ignored.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs

from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Buffer, Clock
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.engine import Engine
from muxkit.protocols.e3x.events import Event

CHUNK_MOST: Final = 256  # bytes, with the length
PACKET_CHUNKS: Final = 8  # chunks that a complete packet counts as
PACKET_MOST: Final = 2 + 65_535 + 65_535  # bytes of the largest possible packet


def encode_chunks(packet: bytes, size: int = CHUNK_MOST) -> bytes:
    """Encode a packet as chunks of at most `size` bytes and the 0 that ends it."""
    if not 2 <= size <= CHUNK_MOST:
        raise ValueError(f"chunks of {size} bytes; from 2 to {CHUNK_MOST} are possible")
    out = bytearray()
    for start in range(0, len(packet), size - 1):
        piece = packet[start : start + size - 1]
        out.append(len(piece))
        out += piece
    out.append(0)
    return bytes(out)


class Dechunker:
    """Decodes packets from a byte stream; one larger than `most` bytes is skipped and counted."""

    def __init__(self, most: int = PACKET_MOST) -> None:
        self.most = most
        self.oversized: int = 0
        self._rest = b""  # bytes not parsed yet, from `_at` on
        self._at = 0
        self._packet = bytearray()
        self._size = 0  # bytes of the incomplete packet, with those not kept
        self._left = 0  # bytes missing of the incomplete chunk

    @property
    def unparsed(self) -> int:
        """Bytes that were fed and not parsed yet."""
        return len(self._rest) - self._at

    @property
    def is_mid_packet(self) -> bool:
        """True while a packet is incomplete."""
        return self._size > 0

    def feed(self, data: bytes, most_chunks: int = sys.maxsize) -> list[bytes]:
        """Parse up to `most_chunks` chunks and return the packets that are complete; the rest waits for the next call.

        A packet takes much longer than a chunk, so a complete one counts as `PACKET_CHUNKS`.
        """
        packets: list[bytes] = []
        position = chunks = 0
        if self._rest:
            if data:
                data = self._rest[self._at :] + data
            else:  # keep the position, because each step of a turn would copy the rest
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

    def _finish(self, packets: list[bytes]) -> None:
        if self._size > self.most:
            self.oversized += 1
        else:
            packets.append(bytes(self._packet))
        self._packet.clear()
        self._size = 0


class ChunkedEngine(Engine):
    """An `Engine` over TCP, TLS or a WebSocket: a `StreamEngine`.

    It has a clock, which gives the time when packets are pulled. The stream limits the rate itself, so the engine does
    without its congestion control. Packets larger than `most` bytes are skipped.
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
        self.frames_at_once: int = sys.maxsize
        """`BoundedParsing`: the most chunks that one call parses; a chunk of 1 byte costs as much as one of 255."""
        self.ended: bool = False
        """True once the peer closed its direction of the stream."""
        self.ended_cleanly: bool = False
        """True if it did so between two packets."""
        self._dechunker = Dechunker(most)
        self._ready: deque[Buffer] = deque()

    @property
    def oversized(self) -> int:
        """Number of packets that were too large."""
        return self._dechunker.oversized

    @property
    def unparsed(self) -> int:
        """`BoundedParsing`: bytes that were received and not parsed yet."""
        return self._dechunker.unparsed

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse and apply received bytes; never raises."""
        if self.state.observer is not None and data:
            self.state.observer.transport("in", data)
        for packet in self._dechunker.feed(data, self.frames_at_once):
            self.take_in(packet, now)
        return self.take_events()

    def receive_eof(self, now: float) -> Sequence[Event]:
        """Note that the peer closed its direction of the stream; the session decides what follows."""
        self.ended = True
        self.ended_cleanly = not self._dechunker.is_mid_packet
        return ()

    def has_output(self) -> bool:
        if not self._ready:
            self.state.update_time()
            self._ready.extend(encode_chunks(packet) for packet in self.datagrams_to_send(self.state.now))
        return bool(self._ready)

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        out: list[Buffer] = []
        size = 0
        while size < limit and self.has_output():
            buffer = self._ready.popleft()
            size += len(buffer)
            out.append(buffer)
        return out
