"""How do packets travel over a byte stream? In chunks of up to 255 bytes, each after its length, with a 0 at the end.

A 0 where no packet was begun is a sign of life, and ignored.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.core import Buffer
    from muxkit.protocols.e3x._engine import Engine
    from muxkit.protocols.e3x._events import Event

CHUNK_MOST: Final = 256  # bytes, the length included
PACKET_CHUNKS: Final = 8
PACKET_MOST: Final = 2 + 65_535 + 65_535  # bytes that a packet may come to


def encode_chunks(packet: bytes, size: int = CHUNK_MOST) -> bytes:
    """A packet as chunks of at most `size` bytes, and the 0 that ends it."""
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
    """Packets out of a byte stream; one that is larger than `most` bytes is skipped and counted."""

    __slots__ = ("_at", "_left", "_packet", "_rest", "_size", "most", "oversized")

    def __init__(self, most: int = PACKET_MOST) -> None:
        self.most = most
        self.oversized = 0
        self._rest = b""  # what was fed and not looked at yet, from `_at` on
        self._at = 0
        self._packet = bytearray()
        self._size = 0  # of the packet that was begun, what was not kept of it included
        self._left = 0  # bytes of the chunk that was begun

    @property
    def unparsed(self) -> int:
        """Bytes that were fed and not looked at yet."""
        return len(self._rest) - self._at

    @property
    def is_mid_packet(self) -> bool:
        return self._size > 0

    def feed(self, data: bytes, most_chunks: int = sys.maxsize) -> list[bytes]:
        """The packets that are complete now; what is left after so many chunks waits for the next call.

        A packet takes much longer than a chunk, so one that is complete counts for `PACKET_CHUNKS`.
        """
        packets: list[bytes] = []
        position = chunks = 0
        if self._rest:
            if data:
                data = self._rest[self._at :] + data
            else:  # a position is kept, or each step of a turn would copy what is left
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


class ChunkedEngine:
    """An `Engine` over TCP, TLS or a WebSocket: a `StreamEngine`.

    A pump does not say the time when it pulls, so `clock` does. Give the engine `Config(congestion=False)`: the
    stream knows itself how fast it may go.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        *,
        most: int = PACKET_MOST,
        observer: Observer | None = None,
    ) -> None:
        self.engine = engine
        self._observer = observer
        self._clock = clock
        self._dechunker = Dechunker(most)
        self._ready: deque[Buffer] = deque()
        self.frames_at_once = sys.maxsize
        """`BoundedParsing`: a read is taken in turns of so many chunks; one of 1 byte costs as much as one of 255."""
        self.ended = False
        """The peer's side of the stream has ended."""
        self.ended_cleanly = False
        """It ended between two packets."""

    @property
    def frames(self) -> int:
        return self.engine.frames

    @property
    def oversized(self) -> int:
        """Packets that were too large to be taken."""
        return self._dechunker.oversized

    def receive_bytes(self, data: bytes, now: float) -> None:
        """Take in what the stream brought; never raises."""
        if self._observer is not None and data:
            self._observer.transport("in", data)
        for packet in self._dechunker.feed(data, self.frames_at_once):
            self.engine.receive_datagram(packet, now)

    @property
    def unparsed(self) -> int:
        """`BoundedParsing`: bytes that came and were not looked at yet."""
        return self._dechunker.unparsed

    def receive_eof(self, now: float) -> None:
        """The peer will send nothing more; what to make of that is for the session to say."""
        self.ended = True
        self.ended_cleanly = not self._dechunker.is_mid_packet

    def events(self) -> Sequence[Event]:
        return self.engine.events()

    def has_output(self) -> bool:
        if not self._ready:
            self._ready.extend(encode_chunks(packet) for packet in self.engine.datagrams_to_send(self._clock()))
        return bool(self._ready)

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        out: list[Buffer] = []
        size = 0
        while size < limit and self.has_output():
            buffer = self._ready.popleft()
            size += len(buffer)
            out.append(buffer)
        return out

    def next_deadline(self) -> float | None:
        return self.engine.next_deadline()

    def next_timer(self) -> float | None:
        """`SeparateTimers`: the same without what waits to be sent."""
        return self.engine.next_timer()

    def handle_deadline(self, now: float) -> None:
        self.engine.handle_deadline(now)
