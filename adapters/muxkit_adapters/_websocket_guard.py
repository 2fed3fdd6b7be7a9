"""What may a WebSocket peer make the library below us hold? This stands between it and the wire, and counts.

The library puts whole messages together before it hands them on. It bounds their payload, but keeps a Python
object for every fragment and every piece of a frame that came alone, and an HTTP refusal of any length: a few
bytes from the peer could cost a hundred here, without end. This looks at the headers of the frames only.
"""

from __future__ import annotations

import trio

from muxkit.runtime import turns

HEAD_MOST = 16_384  # bytes of the upgrade's header block, and of the body that explains a refusal
FRAGMENTS_MOST = 1024  # frames a message
TOGETHER = 4096  # bytes of one frame that are handed on at once, unless it ends before
SLICE = 128  # bytes that are handed on at once, unless a frame is known to be longer: no more than 64 frames
SPARE = b"\r\n\r\n"

CONTINUATION, TEXT, BINARY, CONTROL = 0, 1, 2, 8


class Violation(Exception):
    """The peer sent what this transport does not take."""


class FrameCount:
    """Follows the stream of one direction: first an HTTP head, then frames."""

    def __init__(self, *, message_most: int) -> None:
        self._message_most = message_most
        self._http: bytearray | None = bytearray()
        self._header = b""  # of a frame, not whole yet
        self._payload_left = 0
        self._size = 0
        self._fragments = 0

    @property
    def missing(self) -> int:
        """Bytes of the payload that is coming."""
        return self._payload_left

    def feed(self, data: bytes | bytearray) -> bool:
        """Whether a frame ended in `data`, so that it must be handed on now; raises `Violation`."""
        if self._http is not None:
            return self._feed_http(data)
        whole, at, ended = self._header + data, 0, False
        self._header = b""
        while at < len(whole):
            if not self._payload_left:
                start = self._begin_frame(whole, at)
                if start is None:
                    self._header = bytes(whole[at:])
                    break
                at = start
            taken = min(self._payload_left, len(whole) - at)
            self._payload_left -= taken
            at += taken
            ended = ended or not self._payload_left
        return ended

    def _feed_http(self, data: bytes | bytearray) -> bool:
        assert self._http is not None
        self._http += data
        end = self._http.find(SPARE)
        if (len(self._http) if end < 0 else end) > HEAD_MOST:
            raise Violation(f"an HTTP head of more than {HEAD_MOST} bytes")
        if end < 0:
            return True
        is_refusal = self._http.startswith(b"HTTP/") and self._http[8:12] != b" 101"
        if is_refusal:
            if len(self._http) > end + HEAD_MOST:
                raise Violation(f"an HTTP refusal of more than {HEAD_MOST} bytes")
            return True
        frames, self._http = bytes(self._http[end + len(SPARE) :]), None
        self.feed(frames)
        return True

    def _begin_frame(self, data: bytes | bytearray, at: int) -> int | None:
        """Read the header at `at`; gives where the payload begins, None when more bytes are needed."""
        if len(data) - at < 2:
            return None
        first, second = data[at], data[at + 1]
        size, start = second & 0x7F, at + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            if len(data) < start + width:
                return None
            size, start = int.from_bytes(data[start : start + width], "big"), start + width
        if second & 0x80:
            start += 4
        if len(data) < start:
            return None
        self._count(first & 0x0F, bool(first & 0x80), size)
        self._payload_left = size
        return start

    def _count(self, opcode: int, final: bool, size: int) -> None:
        if opcode == TEXT:
            raise Violation("a text frame came; only binary messages carry this byte stream")
        if opcode >= CONTROL:
            if size > 125:
                raise Violation(f"a control frame of {size} bytes, where 125 are allowed")
            return
        self._size += size
        self._fragments += 1
        if self._size > self._message_most:
            raise Violation(f"a message of {self._size} bytes or more, against message_most={self._message_most}")
        if self._fragments > FRAGMENTS_MOST:
            raise Violation(f"a message in more than {FRAGMENTS_MOST} fragments")
        if final:
            self._size = self._fragments = 0


class GuardedStream(trio.abc.Stream):
    """The wire as the WebSocket library sees it; remembers what the library forgets."""

    def __init__(self, wire: trio.abc.Stream, *, message_most: int) -> None:
        self._wire = wire
        self._count = FrameCount(message_most=message_most)
        self._held = bytearray()
        self._turns = turns()
        self._rest = memoryview(b"")  # what came and was not handed on yet
        self._began = 0.0  # when what came began to be handed on
        self.torn = False
        """A write was cut short, so that nothing that follows could be understood."""
        self.failure: Exception | None = None
        """Why reading ended, if not by the end of the stream."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        while True:
            try:
                data = await self._next(max_bytes)
                complete = self._count.feed(data)
            except Violation as violation:
                self.failure = violation
                raise trio.BrokenResourceError(str(violation)) from violation
            except trio.BrokenResourceError as error:
                self.failure = error
                raise
            if not self._held and (complete or len(data) >= TOGETHER or not data):
                return data
            self._held += data
            if complete or len(self._held) >= TOGETHER or not data:
                together, self._held = self._held, bytearray()
                return together

    async def _next(self, max_bytes: int | None) -> bytes | bytearray:
        """What came, a little at a time, since the library below takes all frames of it before it asks again."""
        if not self._rest:
            data = await self._wire.receive_some(max_bytes)
            if len(data) <= SLICE:
                return data
            self._rest = memoryview(data)
            self._began = self._turns.now()
        elif self._turns.now() - self._began > self._turns.allowance:
            await self._turns.wait()
            self._began = self._turns.now()
        size = max(SLICE, self._count.missing)
        taken, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return taken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._wire.send_all(data)
        except BaseException:
            self.torn = True
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self._wire.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._wire.aclose()
