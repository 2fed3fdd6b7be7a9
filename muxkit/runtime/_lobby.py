"""Who is this? A bounded place, where a listener reads the first bytes of each connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.runtime._errors import LinkLost
from muxkit.runtime._links import Described
from muxkit.runtime._prefixed import prefixed

if TYPE_CHECKING:
    from muxkit.runtime._errors import Side

LearntT = TypeVar("LearntT")
LearntT_co = TypeVar("LearntT_co", covariant=True)

READ = 4096  # bytes to ask for at once
MOST = 16 * 1024  # bytes of a greeting


class HandshakeReader(Protocol[LearntT_co]):
    """A small engine for the first bytes of a connection; a new one for each."""

    def receive_bytes(self, data: bytes, /) -> LearntT_co | None:
        """Take bytes; give what was learnt once they are enough, None before.

        Raises `RemoteProtocolError` for bytes that are no greeting.
        """

    def bytes_to_send(self) -> bytes:
        """What the peer must be told now, before he goes on; b"" if nothing. Asked at the start and after each
        `receive_bytes`."""

    def leftover(self) -> bytes:
        """What came behind the greeting, once it is complete."""


class HandshakeQueue:
    """Reads greetings: each within `Limits.handshake` seconds and `most` bytes, `Limits.half_open` of them at once.

    When one more comes the oldest has to go, so peers who say nothing, or a byte now and then, keep nobody out.
    """

    def __init__(self, limits: Limits | None = None, *, most: int = MOST) -> None:
        self._limits = limits or Limits()
        self._most = most
        self._waiting: dict[trio.CancelScope, None] = {}  # oldest first
        self.dropped = 0
        """How many had to go for a newer one."""

    def __len__(self) -> int:
        """How many are in their greeting now."""
        return len(self._waiting)

    async def read_handshake(
        self, stream: trio.abc.Stream, reader: HandshakeReader[LearntT]
    ) -> tuple[LearntT, trio.abc.Stream]:
        """What the greeting says, and the stream, which gives first what was left over.

        Raises `RemoteProtocolError` if the peer said something wrong, too much, or not enough in time; `LinkLost` if
        he hung up, or had to go for a newer one. The stream stays the caller's to close, and after a
        `RemoteProtocolError` he may still answer on it.
        """
        handshake = _Handshake(stream, reader, self._most)
        within = self._limits.handshake
        scope = trio.CancelScope(deadline=trio.current_time() + within)
        self._waiting[scope] = None
        self._make_room()
        try:
            with scope:
                return await handshake.read()
            was_dropped = scope not in self._waiting
        finally:
            self._waiting.pop(scope, None)
        if was_dropped:
            most = self._limits.half_open
            raise handshake.lost(f"more than Limits(half_open={most}) connections were in their greeting", by="local")
        raise RemoteProtocolError(
            f"no complete greeting within {within:g} s: {handshake.received} bytes came", limit="handshake"
        )

    def _make_room(self) -> None:
        while len(self._waiting) > self._limits.half_open:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel()
            self.dropped += 1


class _Handshake(Generic[LearntT]):
    """One connection in its greeting."""

    def __init__(self, stream: trio.abc.Stream, reader: HandshakeReader[LearntT], most: int) -> None:
        self._stream = stream
        self._reader = reader
        self._most = most
        self._began = trio.current_time()
        self.received = 0

    async def read(self) -> tuple[LearntT, trio.abc.Stream]:
        try:
            await self._send_owed()
            while True:
                if self.received >= self._most:
                    raise RemoteProtocolError(f"{self.received} bytes came and the greeting is not complete")
                data = await self._stream.receive_some(min(READ, self._most - self.received))
                if not data:
                    raise self.lost(f"the peer hung up after {self.received} bytes of its greeting", by="peer")
                self.received += len(data)
                learnt = self._reader.receive_bytes(bytes(data))
                await self._send_owed()
                if learnt is not None:
                    return learnt, prefixed(self._stream, self._reader.leftover())
        except LinkLost:
            raise
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self.lost("the connection broke during its greeting", by="network") from error

    async def _send_owed(self) -> None:
        data = self._reader.bytes_to_send()
        if data:
            await self._stream.send_all(data)

    def lost(self, reason: str, *, by: Side) -> LinkLost:
        peer = self._stream.peer if isinstance(self._stream, Described) else ""
        return LinkLost(reason, by=by, peer=peer, after=trio.current_time() - self._began)
