"""Reads the handshake of a new connection with limits for its time and its size.

Some connections begin with a few bytes that must be read before any session exists. In Relink, a client names the
session that it starts or resumes. With `authorize`, a client sends a token before any protocol begins. Until such a
handshake is complete, no session limits what the peer sends. `HandshakeQueue` does that instead:

- `Limits.handshake` limits the time, and the queue's `most` the number of bytes.
- A server limits how many connections have an unfinished handshake. Such a connection is *half-open*. In the listener's
  `Admission`, each connection has a `Place`, which records whether the connection is half-open and when it last made
  progress. When too many are half-open, `Admission` closes one that has made no progress for some time, which the
  module `muxkit.runtime.admission` calls giving way.
- The caller parses the bytes, with an object that has the methods of `HandshakeReader`.

The last read of a handshake may also return the first bytes after it. `prefixed` returns a stream that delivers these
bytes first, so that the session can read the connection from there.
"""

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

READ_BYTES = 4096  # size of a read; the last one returns at most that much data of the session
LARGEST_HANDSHAKE = 16 * 1024  # default limit for the size of a handshake in bytes


class HandshakeReader(Protocol[LearntT_co]):
    """The parser for the handshake of one connection. It does no I/O."""

    def receive_bytes(self, data: bytes, /) -> LearntT_co | None:
        """Parse the next bytes from the peer.

        Returns:
            The result of the handshake once it is complete, and None while bytes are missing.

        Raises:
            RemoteProtocolError: If the bytes aren't a valid handshake.
        """

    def bytes_to_send(self) -> bytes:
        """Return the bytes to send to the peer now, or b"". Called first, and again after each `receive_bytes`."""

    def leftover(self) -> bytes:
        """Return the bytes that followed the complete handshake in the last call of `receive_bytes`."""


class HandshakeQueue:
    """Reads the handshakes of all connections of one server or client.

    A task that serves a connection of one of muxkit's listeners uses the `Place` that the connection has there. For all
    other connections, such as those of a program's own listener, the queue has an `Admission` itself: while
    `Limits.half_open` handshakes are unfinished, the next one waits until one of them finishes or gives way.

    Args:
        limits: `handshake` and `half_open` are used.
        most: How many bytes a handshake may have.
    """

    def __init__(self, limits: Limits | None = None, *, most: int = LARGEST_HANDSHAKE) -> None:
        self._limits = limits or Limits()
        self._most = most
        self._own = Admission(self._limits)
        self._under_way = 0

    def __len__(self) -> int:
        """Return the number of handshakes that are being read. Those that wait for another to finish don't count."""
        return self._under_way

    async def read_handshake(
        self, stream: trio.abc.Stream, reader: HandshakeReader[LearntT]
    ) -> tuple[LearntT, trio.abc.Stream]:
        """Read the handshake of a connection, and send the answers that `reader` makes.

        This never closes the stream. After a `RemoteProtocolError`, the caller can still send the peer a reason.

        Returns:
            The result of `reader`, and a stream on which the session can read everything after the handshake.

        Raises:
            RemoteProtocolError: If the handshake is invalid or too large, or if it takes too long.
            LinkLost: If the peer hung up, the connection broke, or it had to give way to a newer connection.
        """
        handshake = _Handshake(stream, reader, self._most)
        within = self._limits.handshake
        with trio.CancelScope(deadline=trio.current_time() + within):
            if (place := current_place()) is not None:
                with self._counted(), place.handshake():
                    return await handshake.read(place)
            await self._own.wait_for_place()
            place = self._own.admit()
            assert place is not None  # `admit` refuses only known addresses with too many connections; we pass none
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
    """Reads the handshake of one connection, without a time limit."""

    _stream: trio.abc.Stream
    _reader: HandshakeReader[LearntT]
    _most: int
    _began: float = attrs.field(factory=trio.current_time, init=False)
    received: int = attrs.field(default=0, init=False)

    async def read(self, place: Place) -> tuple[LearntT, trio.abc.Stream]:
        """Read the handshake. Bytes that let us send an answer count as progress, which protects from giving way."""
        try:
            await self._send_answers()
            while True:
                if self.received >= self._most:
                    raise RemoteProtocolError(f"{self.received} bytes came and the handshake is not complete")
                data = await self._stream.receive_some(min(READ_BYTES, self._most - self.received))
                if not data:
                    raise self.lost(f"the peer hung up after {self.received} bytes of its handshake", by="peer")
                self.received += len(data)
                learnt = self._reader.receive_bytes(bytes(data))
                if await self._send_answers():
                    place.progressed()
                if learnt is not None:
                    return learnt, prefixed(self._stream, self._reader.leftover())
        except LinkLost:
            raise
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self.lost("the connection broke during its handshake", by="network") from error

    async def _send_answers(self) -> bool:
        """Send the answers that the reader has made. Return True if there were any."""
        data = self._reader.bytes_to_send()
        if data:
            await self._stream.send_all(data)
        return bool(data)

    def lost(self, reason: str, *, by: Side) -> LinkLost:
        """Return the error for a connection that ended during its handshake."""
        return LinkLost(reason, by=by, peer=peer_of(self._stream), after=trio.current_time() - self._began)


def prefixed(stream: trio.abc.Stream, data: bytes) -> trio.abc.Stream:
    """Return a stream that first delivers `data`, and then the bytes of `stream`.

    The result has those optional abilities of `muxkit.runtime._links` that `stream` has, and `send_eof` if `stream`
    has it. Closing the result closes `stream`. If `data` is empty, `stream` itself is returned.
    """
    if not data:
        return stream
    return _HalfCloseable(stream, data) if isinstance(stream, trio.abc.HalfCloseableStream) else _Prefixed(stream, data)


class _Prefixed(trio.abc.Stream):
    """A stream that delivers bytes which were read before, and then those of another stream."""

    # An instance has these attributes only if the other stream has them, because a pump looks for them with
    # `isinstance`.
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
        if not self._rest:  # the stream was closed, or another task has taken the bytes, during the checkpoint
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
