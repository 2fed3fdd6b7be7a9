"""The sockets of forwarded connections: streams that read and write immediately, and wait only if the kernel makes
them.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

import trio

READ = 64 * 1024  # bytes taken from a socket at once, and the largest message
CLOSED_HERE = frozenset({errno.EBADF, errno.ENOTSOCK})
END_FOLLOWS = getattr(socket, "MSG_MORE", 0)  # for `send_nowait`: the end goes out in the same packet
_NO_LINGER = struct.pack("ii", 1, 0)


class CarriedStream(trio.abc.HalfCloseableStream):
    """A connected stream socket, which it owns. One task reads and one task writes.

    Trio's own stream needs several calls and a checkpoint for each step, which would be a third of the work of a short
    connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != getattr(socket, "AF_UNIX", None):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket: socket.socket = sock

    # Receiving

    def receive_nowait(self, max_bytes: int = READ) -> bytes | None:
        """Return received bytes, b"" at the end, or None if nothing has arrived."""
        try:
            return self.socket.recv(max_bytes)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise _translated(error) from error

    async def wait_readable(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self.socket)
        except OSError as error:
            raise _translated(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while (data := self.receive_nowait(max_bytes or READ)) is None:
            await self.wait_readable()
        return data

    # Sending

    def send_nowait(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Write what the kernel accepts now, and return the number of bytes."""
        try:
            return self.socket.send(data, flags)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise _translated(error) from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        await self.send_rest(memoryview(data))

    async def send_rest(self, data: bytes | memoryview) -> None:
        """`send_all` without a checkpoint if the kernel accepts everything."""
        rest = memoryview(data)
        while len(rest):
            written = self.send_nowait(rest)
            if written < len(rest):
                await self.wait_send_all_might_not_block()
            rest = rest[written:]

    async def wait_send_all_might_not_block(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self.socket)
        except OSError as error:
            raise _translated(error) from error

    # The end

    def end(self) -> None:
        """Announce that nothing more is sent."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise _translated(error) from error

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        self.end()

    def close(self) -> None:
        """Close cleanly, so that sent bytes still arrive."""
        if self.socket.fileno() != -1:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    def reset(self) -> None:
        """Close so that the peer sees a broken connection instead of an end. A closed socket is left unchanged."""
        if self.socket.fileno() != -1:
            with suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


def _translated(error: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
    if error.errno in CLOSED_HERE:
        return trio.ClosedResourceError("this socket was closed locally")
    return trio.BrokenResourceError(error.strerror or str(error))
