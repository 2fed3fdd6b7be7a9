"""What if bytes were read too far? A stream that gives them first, and then is the stream it was."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import trio

from muxkit.runtime._links import Described, NowaitLink, WaitableLink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


def prefixed(stream: trio.abc.Stream, data: bytes) -> trio.abc.Stream:
    """The stream, with `data` before what it has yet to receive; half-closeable, nowait and waitable if it is."""
    if not data:
        return stream
    return _HalfCloseable(stream, data) if isinstance(stream, trio.abc.HalfCloseableStream) else _Prefixed(stream, data)


class _Prefixed(trio.abc.Stream):
    # Only there when the stream below has them: that is how a pump finds out.
    send_nowait: Callable[[Sequence[bytes | memoryview]], int]
    send_buffers: Callable[[Sequence[bytes | memoryview]], Awaitable[None]]
    wait_readable: Callable[[], Awaitable[None]]
    receive_nowait: Callable[[int], bytes | None]
    stop_waiting: Callable[[], None]

    def __init__(self, stream: trio.abc.Stream, data: bytes) -> None:
        self._stream = stream
        self._rest = data
        self.peer = stream.peer if isinstance(stream, Described) else ""
        if isinstance(stream, NowaitLink):
            self.send_nowait = stream.send_nowait
            self.send_buffers = stream.send_buffers
        if isinstance(stream, WaitableLink):
            link: WaitableLink = stream

            async def wait_readable() -> None:
                if self._rest:
                    await trio.lowlevel.checkpoint()
                else:
                    await link.wait_readable()

            self.wait_readable = wait_readable
            self.receive_nowait = lambda size: self._take(size) if self._rest else link.receive_nowait(size)
            self.stop_waiting = link.stop_waiting

    def __repr__(self) -> str:
        return f"<{len(self._rest)} bytes, then {self._stream!r}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._rest:
            return await self._stream.receive_some(max_bytes)
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 1")
        await trio.lowlevel.checkpoint()
        if not self._rest:  # closed, or taken by another task
            return await self._stream.receive_some(max_bytes)
        return self._take(len(self._rest) if max_bytes is None else max_bytes)

    def _take(self, size: int) -> bytes:
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self._rest = b""
        await self._stream.aclose()


class _HalfCloseable(_Prefixed, trio.abc.HalfCloseableStream):
    _stream: trio.abc.HalfCloseableStream

    async def send_eof(self) -> None:
        await self._stream.send_eof()
