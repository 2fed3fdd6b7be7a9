"""Sockets of forwards: listeners, connections, and name resolution under an allow list."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress

import attrs
import trio

from muxkit.forward.addresses import Address, IPAddress, ip_of
from muxkit.forward.allow import AllowList
from muxkit.forward.relay import Tally
from muxkit.forward.streams import CarriedStream
from muxkit.forward.wire import Code, ForwardRefused
from muxkit.runtime import leaves_of, protected_manager

BACKLOG = 512
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ACCEPT_MOST = 16  # connections in a row; then other tasks run
BACKLOG_PAUSE = 0.01  # s; the kernel does not say when a full backlog has room again
EXHAUSTED_PAUSE = 0.1  # s; the kernel does not say when there are descriptors again
MOST = 65_535  # bytes of a datagram
LEAST_ATTEMPT = 2.0  # s for one address of several
LOOKUP_SHARES = 4  # clients that may have all of their lookups under way at once

_UNDER_WAY = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK})
# What `accept` says of a connection that is gone before it was accepted, as the manual of Linux has it; the listener
# is well. Not every system has all of them.
_GONE_NAMES = (
    *("ECONNABORTED", "ECONNRESET", "EPERM", "EPROTO", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
    *("ENONET", "ENOPROTOOPT", "EOPNOTSUPP", "ENOSR", "ETIMEDOUT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"),
)
_GONE = frozenset(getattr(errno, name) for name in _GONE_NAMES if hasattr(errno, name))
_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOENT})


class Listeners:
    """The listening sockets of one address."""

    def __init__(self, listeners: Sequence[socket.socket], path: str = "") -> None:
        self._listeners = listeners
        self._path = path
        self.addresses: tuple[str, ...] = tuple(path or _address_of(each) for each in listeners)
        """What was bound, as text."""

    def close(self) -> None:
        """Stop listening."""
        for each in self._listeners:
            if each.fileno() != -1:
                trio.lowlevel.notify_closing(each)
                each.close()

    async def accept_for_ever(
        self, tally: Tally, handle: Callable[[CarriedStream], Awaitable[object]], nursery: trio.Nursery
    ) -> None:
        """Run `handle` in the nursery for each connection, while the tally has slots. `handle` returns its slot."""
        async with trio.open_nursery() as accepting:
            for each in self._listeners:
                accepting.start_soon(_accept_from, each, tally, handle, nursery)


async def _accept_from(
    listener: socket.socket, tally: Tally, handle: Callable[[CarriedStream], Awaitable[object]], nursery: trio.Nursery
) -> None:
    while True:
        await tally.wait_for_slot()
        await trio.lowlevel.wait_readable(listener)
        for _ in range(ACCEPT_MOST):
            if tally.is_full:
                break
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in EXHAUSTED:
                    await trio.sleep(EXHAUSTED_PAUSE)
                elif error.errno not in _GONE:
                    raise
                break
            tally.enter()
            nursery.start_soon(handle, CarriedStream(sock))


@protected_manager
async def listening(bind: Address) -> AsyncGenerator[Listeners, None]:
    """Listen at an address while the block runs. Raises OSError with the address in its text."""
    try:
        opened = [_listen_at_path(bind.path)] if bind.path else await _listen_at_host(bind)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {bind}: {error.strerror or error}") from error
    ours = _inode(bind.path) if bind.path else None
    listeners = Listeners(opened, bind.path)
    try:
        yield listeners
    finally:
        listeners.close()
        if ours is not None and _inode(bind.path) == ours:  # a later listener may have replaced it
            with suppress(OSError):
                os.unlink(bind.path)


async def _listen_at_host(bind: Address) -> list[socket.socket]:
    host = "127.0.0.1" if bind.host == "localhost" else bind.host
    opened = await trio.open_tcp_listeners(bind.port, host=host, backlog=BACKLOG)
    return [socket.socket(fileno=each.socket.detach()) for each in opened]


def _listen_at_path(path: str) -> socket.socket:
    """Listen at a path to which only this user may connect. A dead socket is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_over(path):
                raise
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)  # before `listen`, so that no connection came in
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_left_over(path: str) -> bool:
    """Return True for a socket on which no process listens."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex(path) == errno.ECONNREFUSED
    return False


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return str(Address(host, port))


def local_of(stream: CarriedStream) -> str:
    """Return the address of this end of a connection; empty for a Unix socket and for a lost connection."""
    with suppress(OSError):
        name = stream.socket.getsockname()
        if isinstance(name, tuple):
            return str(Address(name[0], name[1]))
    return ""


def peer_of(stream: CarriedStream) -> str:
    """Return the address of the other end of a connection; empty for a Unix socket and for a lost connection."""
    with suppress(OSError):
        name = stream.socket.getpeername()
        if isinstance(name, tuple):
            return str(Address(name[0], name[1]))
    return ""


# ---------------------------------------------------------------------------- connecting


class Lookups:
    """Resolves names for the clients of a server, with a limit for each client and for all of them.

    A lookup runs in a thread, which continues even if its client has given up. It counts until it ends. Otherwise a
    client that requests names which no name server answers would use up all threads of this process.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all = trio.CapacityLimiter(LOOKUP_SHARES * most)
        self._limiters: dict[object, trio.CapacityLimiter] = {}

    async def look_up(self, target: Address, client: object) -> list[str]:
        """Return the addresses of a name. Raises `ForwardRefused`."""
        lookup = object()
        limiter = self._limiters.setdefault(client, trio.CapacityLimiter(self._most))
        await limiter.acquire_on_behalf_of(lookup)
        try:
            await self._all.acquire_on_behalf_of(lookup)
        except BaseException:
            self._release(client, limiter, lookup)
            raise
        found: list[str] = []
        failures: list[Exception] = []
        is_over = trio.Event()

        async def run() -> None:
            try:
                found.extend(await _looked_up(target))
            except Exception as error:  # raised where it is waited for: this task belongs to the whole run
                failures.append(error)
            finally:
                self._all.release_on_behalf_of(lookup)
                self._release(client, limiter, lookup)
                is_over.set()

        trio.lowlevel.spawn_system_task(run, name=f"lookup of {target.host}")
        await is_over.wait()
        if failures:
            raise failures[0]
        return found

    def _release(self, client: object, limiter: trio.CapacityLimiter, lookup: object) -> None:
        limiter.release_on_behalf_of(lookup)
        if not limiter.borrowed_tokens:  # with tasks that wait the place would have passed on
            del self._limiters[client]


@attrs.frozen
class Reach:
    """What a client of a server may reach, and how its names are resolved."""

    allow: AllowList
    lookups: Lookups
    client: object
    """Its user, or its session if it has none."""


async def dial(target: Address, reach: Reach | None, *, seconds: float) -> CarriedStream:
    """Connect to a target within `seconds`. Raises `ForwardRefused`.

    For a client of a server, a name is resolved once and each address is checked. The connection goes to the address
    that was checked, so a different answer from the name server can't change it. Without `reach` everything is allowed.
    """
    with trio.move_on_after(seconds):
        if target.path:
            return await _dial_path(target.path, None if reach is None else reach.allow)
        if reach is None:
            return await _connect([(target.host, target.port)], target)
        return await _connect(await _resolved(target, reach), target)
    raise ForwardRefused(f"{target} did not answer within {seconds:g} s", Code.TIMED_OUT)


async def _dial_path(path: str, allow: AllowList | None) -> CarriedStream:
    if allow is not None and not allow.allows_path(path):
        raise ForwardRefused(f"{path} is not allowed here", Code.NOT_ALLOWED)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
        except BlockingIOError:  # the backlog is full
            sock.close()
            await trio.sleep(BACKLOG_PAUSE)
        except OSError as error:
            sock.close()
            raise _failed(path, error) from error
        else:
            return CarriedStream(sock)


async def dial_udp(target: Address, reach: Reach, *, seconds: float) -> trio.socket.SocketType:
    """Return a UDP socket that sends to a target and receives only from there. Raises `ForwardRefused`."""
    if target.path:
        raise ForwardRefused(f"{target} is not for UDP", Code.MALFORMED)
    with trio.move_on_after(seconds):
        host, port = (await _resolved(target, reach, udp=True))[0]
        address = ip_of(host)
        family = socket.AF_INET6 if address is not None and address.version == 6 else socket.AF_INET
        sock = trio.socket.socket(family, socket.SOCK_DGRAM)
        try:
            await sock.connect((host, port))
        except OSError as error:
            sock.close()
            raise _failed(str(target), error) from error
        except BaseException:
            sock.close()
            raise
        return sock
    raise ForwardRefused(f"{target}: the name was not resolved within {seconds:g} s", Code.TIMED_OUT)


async def _resolved(target: Address, reach: Reach, *, udp: bool = False) -> list[tuple[str, int]]:
    """Return the allowed addresses of a target."""
    allow = reach.allow
    name = None if target.ip is not None else target.host
    if name is not None and not allow.may_resolve(name, target.port, udp=udp):
        raise ForwardRefused(f"{target} is not allowed here", Code.NOT_ALLOWED)
    addresses = [target.host] if name is None else await reach.lookups.look_up(target, reach.client)
    allowed = [each for each in dict.fromkeys(addresses) if _is_allowed(allow, name, ip_of(each), target.port, udp)]
    if not allowed:
        # The address itself is not told: it may be one that a client must not learn.
        what = f"{target} resolves to an address that is not allowed here" if name else f"{target} is not allowed here"
        raise ForwardRefused(what, Code.NOT_ALLOWED)
    return [(each, target.port) for each in allowed]


async def _looked_up(target: Address) -> list[str]:
    try:
        found = await trio.socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ForwardRefused(f"{target.host}: the name was not found", Code.NOT_FOUND) from error
    return [str(place[0]) for _, _, _, _, place in found]


def _is_allowed(allow: AllowList, name: str | None, address: IPAddress | None, port: int, udp: bool) -> bool:
    return address is not None and allow.allows(name, address, port, udp=udp)


async def _connect(places: Sequence[tuple[str, int]], target: Address) -> CarriedStream:
    """Connect to the first address that answers."""
    if len(places) == 1:
        try:
            return await _connect_to(*places[0])
        except OSError as error:
            raise _failed(str(target), error) from error
    failure: OSError | None = None
    left = trio.current_effective_deadline() - trio.current_time()
    for number, (host, port) in enumerate(places):
        is_last = number == len(places) - 1
        with trio.move_on_after(left if is_last else max(LEAST_ATTEMPT, left / len(places))):
            try:
                return await _connect_to(host, port)
            except OSError as error:
                failure = error
    if failure is None:
        raise ForwardRefused(f"{target} did not answer", Code.TIMED_OUT)
    raise _failed(str(target), failure) from failure


async def _connect_to(host: str, port: int) -> CarriedStream:
    address = ip_of(host)
    if address is None:
        stream = await trio.open_tcp_stream(host, port)
        return CarriedStream(socket.socket(fileno=stream.socket.detach()))
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        found = sock.connect_ex((host, port))
        if found in _UNDER_WAY and not _is_connected(sock):
            await trio.lowlevel.wait_writable(sock)
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if found and found not in _UNDER_WAY:
            raise OSError(found, os.strerror(found))
    except BaseException:
        sock.close()
        raise
    return CarriedStream(sock)


def _is_connected(sock: socket.socket) -> bool:
    """Return True for a connection that was established immediately, as over loopback."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _failed(target: str, error: OSError) -> ForwardRefused:
    # Trio's own says only that all attempts failed.
    cause = next((leaf for leaf in leaves_of(error.__cause__ or error) if isinstance(leaf, OSError)), error)
    if isinstance(cause, socket.gaierror):
        return ForwardRefused(f"{target}: the name was not found", Code.NOT_FOUND)
    text = f"{target}: {os.strerror(cause.errno).lower() if cause.errno else cause}"
    return ForwardRefused(text, Code.REFUSED if cause.errno in _REFUSED else Code.UNREACHABLE)
