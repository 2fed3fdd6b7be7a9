"""Read the handshake of each new connection, within limits, and give back what was read behind it."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import attrs
import trio

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import turned_away
from muxkit.core import Reason
from muxkit.runtime._errors import LinkLost, Side
from muxkit.runtime._links import Explaining, NowaitLink, Parting, WaitableLink, peer_of
from muxkit.runtime.admission import Admission, Place, current_place

LearntT = TypeVar("LearntT")
LearntT_co = TypeVar("LearntT_co", covariant=True)

READ_BYTES = 4096  # to ask for at once
LARGEST_HANDSHAKE = 16 * 1024  # bytes


class HandshakeReader(Protocol[LearntT_co]):
    """A small engine for the handshake of one connection: its first bytes."""

    def receive_bytes(self, data: bytes, /) -> LearntT_co | None:
        """Take bytes; return what was learnt once they are enough, None before.

        Raises `RemoteProtocolError` for bytes that are no handshake.
        """

    def bytes_to_send(self) -> bytes:
        """Return what must be sent before the peer goes on, b"" if nothing.

        Asked at the start and after each `receive_bytes`.
        """

    def leftover(self) -> bytes:
        """Return what came behind the handshake, once that is complete."""


class HandshakeQueue:
    """Reads handshakes: each within `Limits.handshake` seconds and `most` bytes.

    On a connection whose listener has places, the connection counts as half-open during its handshake, and gives way as
    `muxkit.runtime.admission` says. For servers without places the queue has places of its own: with more than
    `Limits.half_open` handshakes under way the next one waits until another is finished, or gives way.
    """

    def __init__(self, limits: Limits | None = None, *, most: int = LARGEST_HANDSHAKE) -> None:
        self._limits = limits or Limits()
        self._most = most
        self._own = Admission(self._limits)
        self._under_way = 0

    def __len__(self) -> int:
        """Return how many handshakes are under way, without those that wait for a place."""
        return self._under_way

    async def read_handshake(
        self, stream: trio.abc.Stream, reader: HandshakeReader[LearntT]
    ) -> tuple[LearntT, trio.abc.Stream]:
        """Return what the handshake says, and the stream, which first gives what was read after it.

        Raises `RemoteProtocolError` if the peer sent something wrong, too much, or not enough in time; `LinkLost` if
        it hung up, or had to give way to a newer connection. The caller has to close the stream, and may still answer
        on it after a `RemoteProtocolError`.
        """
        handshake = _Handshake(stream, reader, self._most)
        within = self._limits.handshake
        with trio.CancelScope(deadline=trio.current_time() + within):
            if (place := current_place()) is not None:
                with self._counted(), place.handshake():
                    return await handshake.read(place)
            await self._own.wait_for_place()
            place = self._own.admit()
            assert place is not None  # only an address has a bound of its own
            with self._counted(), place.held():
                return await handshake.read(place)
            if place.gave_way:
                raise handshake.lost(
                    f"it gave way to newer connections: Limits(half_open={self._limits.half_open})", by="local"
                )
        turned_away("handshake")
        raise RemoteProtocolError(
            f"no complete handshake within {within:g} s: {handshake.received} bytes came", limit="handshake"
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


@attrs.define(eq=False)
class _Handshake(Generic[LearntT]):
    """The handshake of one connection."""

    _stream: trio.abc.Stream
    _reader: HandshakeReader[LearntT]
    _most: int
    _began: float = attrs.field(factory=trio.current_time, init=False)
    received: int = attrs.field(default=0, init=False)

    async def read(self, place: Place) -> tuple[LearntT, trio.abc.Stream]:
        try:
            await self._send_owed()
            while True:
                if self.received >= self._most:
                    raise RemoteProtocolError(f"{self.received} bytes came and the handshake is not complete")
                data = await self._stream.receive_some(min(READ_BYTES, self._most - self.received))
                if not data:
                    raise self.lost(f"the peer hung up after {self.received} bytes of its handshake", by="peer")
                self.received += len(data)
                learnt = self._reader.receive_bytes(bytes(data))
                if await self._send_owed():
                    place.progressed()
                if learnt is not None:
                    return learnt, prefixed(self._stream, self._reader.leftover())
        except LinkLost:
            raise
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self.lost("the connection broke during its handshake", by="network") from error

    async def _send_owed(self) -> bool:
        """Send the answers that the handshake needs; return True if there were any."""
        data = self._reader.bytes_to_send()
        if data:
            await self._stream.send_all(data)
        return bool(data)

    def lost(self, reason: str, *, by: Side) -> LinkLost:
        return LinkLost(reason, by=by, peer=peer_of(self._stream), after=trio.current_time() - self._began)


def prefixed(stream: trio.abc.Stream, data: bytes) -> trio.abc.Stream:
    """Return the stream with `data` before what it has yet to receive; half-closeable, nowait and waitable if it is."""
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
    close_with: Callable[[Reason], Awaitable[None]]
    part: Callable[[], Awaitable[None]]

    def __init__(self, stream: trio.abc.Stream, data: bytes) -> None:
        self._stream = stream
        self._rest = data
        self.peer = peer_of(stream)
        self.local: str = getattr(stream, "local", "")
        self.identity: object = getattr(stream, "identity", None)
        self.request: object = getattr(stream, "request", None)
        if isinstance(stream, Explaining):
            self.close_with = stream.close_with
        if isinstance(stream, Parting):
            self.part = stream.part
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

    @property
    def peer_reason(self) -> Reason | None:
        return getattr(self._stream, "peer_reason", None)

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
