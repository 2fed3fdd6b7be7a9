"""Unix socket streams between processes of one machine. Only the owner of the socket may connect.

The permissions of the file protect the socket, so there is neither encryption nor a certificate. The peer's process,
user and group are in `SocketStream.identity`, on systems that report them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from muxkit import Limits
from muxkit.runtime import protect_package, protected_manager

from ._addresses import Transport
from ._errors import failed
from ._listen import serve_connections
from ._sockets import SocketListener, SocketStream, adopted, take_socket

__all__ = ["SocketStream", "connect", "serve", "transport"]

CONNECT_TIMEOUT = 30.0  # s while the listener's backlog is full
BACKLOG = 128
BACKLOG_PAUSE = 0.01  # s; the kernel doesn't notify us when a full backlog has room again
PATH_MOST = 103  # bytes; sun_path has 108 on Linux and 104 on the BSDs, including a trailing NUL
LOCK_TRIES = 100
LOCK_PAUSE = 0.02  # s; another server holds the lock only for a few system calls

NOT_THERE = {errno.ENOENT: "no server has made it", errno.ECONNREFUSED: "the server that made it is gone"}
NO_PLACE = {errno.ENOENT: "its directory does not exist", errno.EACCES: "its directory cannot be written"}

Inode = tuple[int, int]


@protected_manager
async def connect(
    path: str | os.PathLike[str], *, connect_timeout: float = CONNECT_TIMEOUT
) -> AsyncIterator[SocketStream]:
    """Open a connection to the process that listens at `path`.

    Args:
        path: the path of the socket.
        connect_timeout: seconds to wait while the backlog of the listener is full.

    Raises:
        OSError: if no process listens there, or if this user may not connect.
        TimeoutError: if the backlog stays full.
        ValueError: if the path is empty or too long for a socket.
    """
    name = _checked(path)
    try:
        with trio.fail_after(connect_timeout):
            sock = await _dial(name)
    except trio.TooSlowError:
        raise TimeoutError(f"unix {name}: no answer within {connect_timeout:g} s (connect_timeout=)") from None
    except OSError as error:
        raise failed(f"unix {name}", error, what_to_do=NOT_THERE) from error
    async with SocketStream(sock, f"unix {name}") as stream:
        yield stream


async def serve(
    handler: Callable[[SocketStream], Awaitable[None]],
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each connection to `path`, until cancelled.

    The socket is created with mode 0600. A socket on which no process listens is replaced. A socket in use, a symlink
    and any other kind of file are left alone.

    Args:
        handler: gets each stream, which is closed afterwards.
        path: the path of the socket. Its directory must exist and be writable.
        limits: how many connections are allowed.
        listeners: sockets that were bound elsewhere, used instead of a new one. Their files aren't removed.
        task_status: gets a list with the path once the server accepts connections.

    Raises:
        OSError: if the path is in use, or if the socket can't be created.
        ValueError: if the path is empty or too long for a socket.
    """
    name = _checked(path)

    def accepted(sock: socket.socket) -> SocketStream:
        return SocketStream(sock, f"unix {name}", local=f"unix {name}")

    if listeners:
        open_to = [SocketListener(adopted(each), accepted) for each in listeners]
        await serve_connections(open_to, handler, limits=limits, started=lambda: task_status.started([name]))
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        ours = await _publish(sock, Path(name))
    except OSError as error:
        sock.close()
        raise failed(f"unix {name}", error, what_to_do=NO_PLACE) from error
    except BaseException:
        sock.close()
        raise
    bound = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    listener = SocketListener(bound, accepted)
    try:
        await serve_connections([listener], handler, limits=limits, started=lambda: task_status.started([name]))
    finally:
        # A later server may have replaced our socket with its own, which we must not remove.
        if _inode(name) == ours:
            os.unlink(name)


async def _dial(name: str) -> socket.socket:
    """Return a connected socket, once the backlog has room.

    If the backlog is full, Trio returns a socket that isn't connected yet. We then try again.
    """
    while True:
        sock = take_socket(await trio.open_unix_socket(name))
        try:
            sock.getpeername()
        except OSError:
            sock.close()
            await trio.sleep(BACKLOG_PAUSE)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


async def _publish(sock: socket.socket, path: Path) -> Inode:
    """Bind under a random name, then rename the socket into place.

    We set the mode between `bind` and `listen`, when no process can connect yet. A umask would affect the whole
    process. `rename` replaces the directory entry itself, so it follows no symlink, and there is no moment without a
    socket. The lock on the directory serializes servers that start simultaneously. Without it, each would find the old
    socket dead, and one would replace the new socket of the other.
    """
    private = path.with_name(f".{secrets.token_hex(4)}")
    async with _only_server(path.parent):
        _check_replaceable(path)
        sock.bind(str(private))
        try:
            os.chmod(private, 0o600)
            sock.listen(BACKLOG)
            os.rename(private, path)
        except BaseException:
            os.unlink(private)
            raise
        inode = _inode(path)
        assert inode is not None
        return inode


def _check_replaceable(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        kind = "a symlink" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "not a socket"
        raise FileExistsError(errno.EEXIST, f"this is {kind}, and stays as it is", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:  # the backlog is full, so a process listens
            pass
    raise OSError(errno.EADDRINUSE, "a process listens on this socket", str(path))


@protected_manager
async def _only_server(directory: Path) -> AsyncIterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await trio.sleep(LOCK_PAUSE)
        else:
            raise OSError(errno.EBUSY, "another process holds the lock of this directory", str(directory))
        yield
    finally:
        os.close(handle)  # this releases the lock as well


def _inode(path: str | Path) -> Inode | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _checked(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    size = len(os.fsencode(name))
    if not name or "\0" in name or size > PATH_MOST:
        raise ValueError(f"address {name!r}: expected the path of a socket, at most {PATH_MOST} bytes, not {size}")
    return name


def _absolute(address: str) -> dict[str, object]:
    if not address.startswith("/"):
        raise ValueError(f"address {address!r}: expected an absolute path, such as unix:///run/app.sock")
    return {"path": _checked(address)}


transport: Final = Transport("unix", connect, serve, _absolute, _absolute)


protect_package("muxkit_adapters")
