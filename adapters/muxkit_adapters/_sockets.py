"""Streams and listeners on kernel sockets.

They call the socket directly and use Trio only to wait until it is ready, so that data that is already there costs no
extra checkpoint. `SocketStream` offers the optional methods that muxkit's pumps look for, such as `receive_nowait`,
`send_nowait` and `send_buffers`.
"""

from __future__ import annotations

import errno
import operator
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence

import trio

from muxkit import Identity
from muxkit.runtime import OneAtATime as OneAtATime
from muxkit.runtime import turns

from ._addresses import join_host_port
from ._identity import of_socket

RECEIVE_SIZE = 65_536  # bytes that one receive asks for
BATCH_SIZE = 262_144  # bytes to encrypt or frame before the socket is called
JOIN_BELOW = 4096  # average bytes per buffer below which joining and `send` is cheaper than `sendmsg`
SENDMSG = hasattr(socket.socket, "sendmsg")  # Windows doesn't have it
IOV_MAX = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in getattr(os, "sysconf_names", {}) else 16
IOV_MAX = min(IOV_MAX, 1024) if IOV_MAX > 0 else 16
ACCEPT_LIVE = 4  # live connections to accept in one pass of the loop
INTERNET = {socket.AF_INET, socket.AF_INET6}
CLOSED_HERE = {errno.EBADF, errno.ENOTSOCK}

Buffers = Sequence[bytes | memoryview]
Prepare = Callable[[socket.socket], "SocketStream"]


class SocketStream(trio.abc.HalfCloseableStream):
    """A connected stream socket. The stream owns `sock`, and never blocks on it."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        local: str | None = None,
        hint_if_silent: str | None = None,
        source: str = "",
        is_exposed: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.socket = sock
        """The underlying socket, for its options and addresses."""
        self.peer = peer
        """The name of the other end, such as `tcp 127.0.0.1:7000`."""
        self.source = source
        """The peer's address as `Limits.half_open_per_address` counts it."""
        self.is_exposed = is_exposed
        """True if plaintext on this connection leaves this machine."""
        self._local = local
        self.hint_if_silent = hint_if_silent
        """The advice for error texts if the connection ends before any byte arrived."""
        self._sending = OneAtATime("sending on this socket")
        self._receiving = OneAtATime("receiving from this socket")
        self._finished = False
        self._more = False  # the last receive filled its buffer, so there is probably more

    @property
    def local(self) -> str:
        """The name of this end, in the form of `peer`. Empty if the socket has no name or is closed."""
        if self._local is None:
            self._local = local_name(self.peer, self.socket)
        return self._local

    @property
    def identity(self) -> Identity | None:
        """The process at the other end of a Unix socket. None for other sockets."""
        return of_socket(self.socket)

    def __repr__(self) -> str:
        return f"<SocketStream {self.peer}{', closed' if self.socket.fileno() == -1 else ''}>"

    # Receiving

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = RECEIVE_SIZE if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError(f"max_bytes={size}: must be at least 1")
        self._receiving.begin()
        try:
            if self._more:
                await trio.lowlevel.checkpoint()
            else:
                await self.wait_readable()
            while (data := self.receive_nowait(size)) is None:
                await self.wait_readable()
        finally:
            self._receiving.is_busy = False
        self._more = not data or len(data) == size  # the end of file can be read again, so it counts as more
        return data

    async def wait_readable(self) -> None:
        """Sleep until there is something to receive, or an error. May return early."""
        if self.socket.fileno() == -1:
            await trio.lowlevel.checkpoint()
            return
        try:
            await trio.lowlevel.wait_readable(self.socket)
        except trio.ClosedResourceError:  # caused by `stop_waiting`, or by a close that `receive_nowait` reports
            return
        except OSError as error:
            raise self._translated(error) from error

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Return data that has arrived, b"" at the end of the stream, or None if there is none yet."""
        try:
            return self.socket.recv(max_bytes)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise self._translated(error) from error

    def stop_waiting(self) -> None:
        """Make `wait_readable` return now."""
        if self.socket.fileno() != -1:
            # This wakes all tasks that wait for this socket. Those in the other direction wait again.
            trio.lowlevel.notify_closing(self.socket)

    # Sending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending, memoryview(data).cast("B") as view:
            await self._write([view] if len(view) else [])

    async def send_buffers(self, buffers: Buffers) -> None:
        """Send several buffers, as `send_all` does. Small buffers are joined, and large ones aren't copied."""
        with self._sending:
            await self._write(economical(buffers))

    def send_nowait(self, buffers: Buffers) -> int:
        """Send as much as the kernel accepts now, in order. Return the number of bytes, which may be 0."""
        if self._sending.is_busy:
            self._sending.check()
        if self._finished:
            self._check_sendable()
        if len(buffers) == 1:
            return self._write_one(buffers[0])
        if 1 < len(buffers) <= IOV_MAX and _are_large(buffers):
            return self._write_batch(buffers)
        self._check_sendable()
        return self._write_some(economical(buffers))

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            if self.socket.fileno() == -1:
                await trio.lowlevel.checkpoint()
                raise trio.ClosedResourceError("this socket was closed on our side")
            await self.wait_writable()

    async def send_eof(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._finished:
                return
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise self._translated(error) from error
            self._finished = True

    async def aclose(self) -> None:
        self.close_nowait()
        await trio.lowlevel.checkpoint()

    def close_nowait(self) -> None:
        """Close the socket without a checkpoint."""
        if self.socket.fileno() != -1:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    # Helpers

    async def _write(self, pending: list[bytes | memoryview]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        try:
            self._check_sendable()
            while True:
                # No other code runs between a wait and the write. So if a wait is cancelled, the bytes sent are a
                # prefix of the data.
                written = self._write_some(pending)
                pending = rest_of(pending, written)
                if not pending:
                    return
                await self.wait_writable()
                waited = True
        finally:
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_writable(self) -> None:
        """Sleep until there is room to send. Only one task may wait."""
        while True:
            try:
                await trio.lowlevel.wait_writable(self.socket)
            except trio.ClosedResourceError:
                if self.socket.fileno() == -1:
                    raise
            else:
                return

    def _write_some(self, pending: Buffers) -> int:
        if len(pending) == 1:
            return self._write_one(pending[0])
        total = 0
        for start in range(0, len(pending), IOV_MAX):
            batch = pending[start : start + IOV_MAX]
            written = self._write_batch(batch)
            total += written
            if written < sum(map(len, batch)):
                break
        return total

    def _write_batch(self, buffers: Buffers) -> int:
        try:
            return self.socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._translated(error) from error

    def _write_one(self, buffer: bytes | memoryview) -> int:
        try:
            return self.socket.send(buffer)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._translated(error) from error

    def _check_sendable(self) -> None:
        if self.socket.fileno() == -1:
            raise trio.ClosedResourceError("this socket was closed on our side")
        if self._finished:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")

    def _translated(self, error: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
        if error.errno in CLOSED_HERE:
            return trio.ClosedResourceError("this socket was closed on our side")
        return trio.BrokenResourceError(f"{self.peer}: {error.strerror or error}")


class SocketListener(trio.abc.Listener[SocketStream]):
    """Accepts connections on a Trio listener and wraps their sockets.

    One pass of Trio's loop accepts up to `ACCEPT_LIVE` live connections. Connections that were reset before they were
    accepted don't count, because peers that connect and reset can fill the kernel's backlog. Such connections are
    closed immediately, for at most one turn's time per pass.
    """

    def __init__(self, listener: trio.SocketListener, prepare: Prepare) -> None:
        self._listener = listener
        self._prepare = prepare
        self._alias = socket.socket(fileno=listener.socket.fileno())  # accepts without a checkpoint for each connection
        self._kind = self._alias.family, self._alias.type, self._alias.proto  # cached; the conversion to enums is slow
        self._turns = turns()
        self._left = 0  # live connections that may still be accepted in this pass
        self._until = 0.0  # when this pass ends

    async def accept(self) -> SocketStream:
        while True:
            sock = self._accept_now() if self._left and self._turns.now() < self._until else None
            if sock is None:
                sock = take_socket(await self._listener.accept())
                self._left = ACCEPT_LIVE
                self._until = self._turns.now() + self._turns.allowance
            if self._was_reset(sock):
                sock.close()
            else:
                self._left -= 1
                self._turns.connection_came()
                return self._prepare(sock)

    def _accept_now(self) -> socket.socket | None:
        """Return the next connection, or None. Trio's listener will raise the error, if there was one."""
        try:
            # `accept` also queries the kind, which we know and which takes as long again. typeshed lacks `_accept`.
            number, _ = self._alias._accept()  # type: ignore[attr-defined]
        except OSError:
            return None
        return socket.socket(*self._kind, fileno=number)

    def _was_reset(self, sock: socket.socket) -> bool:
        """Return True if a connection was closed in both directions before it was accepted, with nothing to read."""
        if self._kind[0] not in INTERNET:
            return _is_gone(sock)
        try:
            sock.getpeername()
        except OSError:
            return True
        return False

    async def aclose(self) -> None:
        self._alias.detach()
        await self._listener.aclose()


def _is_gone(sock: socket.socket) -> bool:
    """Return True if the other end of a Unix socket was closed with nothing left to read."""
    poll = select.poll()
    poll.register(sock, 0)
    if not any(event & select.POLLHUP for _, event in poll.poll(0)):
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return True


def adopted(sock: socket.socket) -> trio.SocketListener:
    """Make a listener of a stream socket that was bound elsewhere. Raises ValueError for another kind of socket."""
    if sock.type != socket.SOCK_STREAM:
        raise ValueError(f"listeners=…: {sock!r} is no stream socket")
    sock.setblocking(False)
    sock.listen(socket.SOMAXCONN)  # harmless if it listens already
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def local_name(peer: str, sock: socket.socket) -> str:
    """Return the name of this end of an internet connection, such as `tcp 127.0.0.1:7000`, or an empty string.

    The kind at the front comes from the name of the peer.
    """
    try:
        name = sock.getsockname()
    except OSError:
        return ""
    return f"{peer.partition(' ')[0]} {join_host_port(*name[:2])}" if isinstance(name, tuple) else ""


def take_socket(stream: trio.SocketStream) -> socket.socket:
    """Take the socket out of a Trio stream. The stream must not be used afterwards."""
    return socket.socket(fileno=stream.socket.detach())


def _are_large(buffers: Buffers) -> bool:
    """Return True if sending the buffers unjoined is cheaper than joining them first."""
    return SENDMSG and sum(map(len, buffers)) >= JOIN_BELOW * len(buffers)


def economical(buffers: Buffers) -> list[bytes | memoryview]:
    """Join the buffers if they are small. Otherwise remove empty ones."""
    if len(buffers) > 1 and not _are_large(buffers):
        return [b"".join(buffers)]
    return [buffer for buffer in buffers if len(buffer)]


def rest_of(pending: list[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    """Return what remains of the buffers after `written` bytes."""
    for index, buffer in enumerate(pending):
        size = len(buffer)
        if written < size:
            return [memoryview(buffer)[written:], *pending[index + 1 :]]
        written -= size
    return []


def in_batches(buffers: Buffers) -> Iterator[Buffers]:
    """Cut buffers into batches of `BATCH_SIZE`, for streams that keep an encoded copy until the socket accepted it."""
    batch: list[bytes | memoryview] = []
    size = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), BATCH_SIZE):
            piece = buffer if len(buffer) <= BATCH_SIZE else memoryview(buffer)[begin : begin + BATCH_SIZE]
            batch.append(piece)
            size += len(piece)
            if size >= BATCH_SIZE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
