"""Streams between tasks of one process: two bounded buffers, and listeners that are found by name.

This is the transport `mem`. It needs neither sockets nor threads, so tests with it run on a virtual clock. A sender
waits while its buffer is full, as with a socket.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import trio

from muxkit import Limits
from muxkit.runtime import protect_package, protected_manager

from ._addresses import Transport
from ._listen import serve_connections
from ._named import NamedListener, Names
from ._sockets import OneAtATime

__all__ = ["MemoryStream", "connect", "pair", "serve", "transport"]

CAPACITY = 65_536  # bytes sent but not received, in each direction
CONNECT_TIMEOUT = 30.0  # s while the backlog of the listener is full


class _Pipe:
    """One direction: the bytes that were sent but not received, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.data: bytearray = bytearray()
        self.capacity = capacity
        self.ended = False  # the sender has sent its end of file or was closed
        self.unwanted = False  # the receiver was closed
        self.changed: Final = trio.lowlevel.ParkingLot()

    def put(self, view: memoryview) -> int:
        size = min(self.capacity - len(self.data), view.nbytes)
        if size:
            self.data += view[:size]
            self.changed.unpark_all()
        return size

    def take(self, size: int) -> bytes:
        taken = bytes(memoryview(self.data)[:size])
        del self.data[:size]
        self.changed.unpark_all()
        return taken


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a pair of streams."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe, peer: str) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self.peer = peer
        """The name of the other end, such as `mem orders`."""
        self._closed = False
        self._sending = OneAtATime("sending on this memory stream")
        self._receiving = OneAtATime("receiving from this memory stream")

    @property
    def local(self) -> str:
        """The name of this end, which is the same as that of the peer."""
        return self.peer

    def __repr__(self) -> str:
        return f"<MemoryStream {self.peer}{', closed' if self._closed else ''}>"

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = self._incoming.capacity if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        with self._receiving:
            await trio.lowlevel.checkpoint()
            while (data := self.receive_nowait(size)) is None:
                await self._incoming.changed.park()
            return data

    async def wait_readable(self) -> None:
        """Sleep until there is something to receive or the stream is closed. May return early."""
        pipe = self._incoming
        if self._closed or pipe.data or pipe.ended:
            await trio.lowlevel.checkpoint()
        else:
            await pipe.changed.park()

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return data that has arrived, b"" at the end of the stream, or None if there is none yet."""
        self._check_open()
        if not (self._incoming.data or self._incoming.ended):
            return None
        return self._incoming.take(max_bytes)

    def stop_waiting(self) -> None:
        """Make `wait_readable` return now."""
        self._incoming.changed.unpark_all()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.send_buffers([memoryview(data)])

    async def send_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send several buffers, as `send_all` does."""
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while view := view[self._outgoing.put(view) :]:
                    await self._wait_for_room()
                    self._check_sendable()

    def send_nowait(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send as much as there is room for, in order. Return the number of bytes, which may be 0."""
        with self._sending:
            self._check_sendable()
            total = 0
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                taken = self._outgoing.put(view)
                total += taken
                if taken < view.nbytes:
                    break
            return total

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            if not self._closed:
                await self._wait_for_room()
            self._check_open()

    async def send_eof(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_open()
            self._outgoing.ended = True
            self._outgoing.changed.unpark_all()

    async def aclose(self) -> None:
        self._closed = True
        self._outgoing.ended = True
        self._incoming.unwanted = True
        self._incoming.data.clear()
        self._outgoing.changed.unpark_all()
        self._incoming.changed.unpark_all()
        await trio.lowlevel.checkpoint()

    async def _wait_for_room(self) -> None:
        pipe = self._outgoing
        while len(pipe.data) >= pipe.capacity and not (pipe.unwanted or self._closed):
            await pipe.changed.park()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this memory stream was closed on our side")

    def _check_sendable(self) -> None:
        self._check_open()
        if self._outgoing.ended:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")
        if self._outgoing.unwanted:
            raise trio.BrokenResourceError(f"{self.peer}: the other end was closed")


def pair(*, capacity: int = CAPACITY, name: str = "pair") -> tuple[MemoryStream, MemoryStream]:
    """Return two connected streams.

    Args:
        capacity: bytes that may be sent but not received in each direction. When the buffer is full, the sender waits.
        name: the name of both ends in error texts.

    Raises:
        ValueError: if the capacity is below 1.
    """
    if capacity < 1:
        raise ValueError(f"pair(capacity={capacity}): must be at least 1")
    there, back = _Pipe(capacity), _Pipe(capacity)
    return MemoryStream(there, back, f"mem {name}"), MemoryStream(back, there, f"mem {name}")


_names: Final[Names[NamedListener[MemoryStream]]] = Names("mem")


@protected_manager
async def connect(
    name: str, *, capacity: int = CAPACITY, connect_timeout: float = CONNECT_TIMEOUT
) -> AsyncIterator[MemoryStream]:
    """Open a stream to the listener `name` of this process.

    Args:
        name: the name that `serve` was given.
        capacity: bytes that may be sent but not received in each direction.
        connect_timeout: seconds to wait while the backlog of the listener is full.

    Raises:
        ConnectionRefusedError: if no listener of this Trio run has this name.
        TimeoutError: if the backlog stays full.
    """
    ours, theirs = pair(capacity=capacity, name=name)
    try:
        listener = _names.find(name)
        with trio.fail_after(connect_timeout):
            if listener is None:
                raise trio.BrokenResourceError
            await listener.arrivals.send(theirs)
    except trio.TooSlowError:
        raise TimeoutError(f"mem {name}: no answer within {connect_timeout:g} s (connect_timeout=)") from None
    except trio.BrokenResourceError:
        text = f"mem {name}: connection refused (no listener of this process has this name)"
        refused = ConnectionRefusedError(text)
        refused.errno = errno.ECONNREFUSED
        raise refused from None
    async with ours:
        yield ours


async def serve(
    handler: Callable[[MemoryStream], Awaitable[None]],
    name: str,
    *,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each connection to `name`, until cancelled.

    Args:
        handler: gets each stream, which is closed afterwards.
        name: the name that clients connect to.
        limits: how many connections are allowed.
        task_status: gets a list with the name once the server accepts connections.

    Raises:
        OSError: if the name is taken.
    """
    listener: NamedListener[MemoryStream] = NamedListener()
    with _names.taken(name, listener):
        await serve_connections([listener], handler, limits=limits, started=lambda: task_status.started([name]))


transport: Final = Transport("mem", connect, serve, _names.read, _names.read)


protect_package("muxkit_adapters")
