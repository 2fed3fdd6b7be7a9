"""A relay between real sockets that delays, throttles, cuts, stalls and refuses connections, as a seed decides.

    async with chaos_relay("127.0.0.1:7000", ChaosPlan(cut_after=(0, 10_000), reset=0.5), seed=17) as relay:
        ... connect to relay.address instead ...

An address is `host:port` or the path of a Unix socket, with an optional `tcp://` or `unix://` prefix.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import trio

from muxkit._limits import KIB
from muxkit.runtime import background
from muxkit.testing._chaos import Chaos, ChaosPlan, OnCut, make_abrupt

BACKLOG = 128
BUFFER_LEAST = 128 * KIB  # two segments on loopback; with a smaller buffer, the sender waits for a timer
BUFFER_SECONDS = 0.001  # s; the receive buffer holds this much of the rate, and Linux doubles it
AGAIN = 0.05  # s until the relay tries again to listen or to accept
FORM = "expected host:port or the path of a Unix socket, such as 127.0.0.1:7000, [::1]:7000 or /run/app.sock"
# On these systems, a second socket can reserve the address while no socket listens on it.
CAN_KEEP_A_PORT = hasattr(socket, "SO_REUSEPORT")

Place = tuple[str, int] | str
"""A host and a port, or the path of a Unix socket."""


class ChaosRelay(Chaos):
    """A relay made by `chaos_relay`. While the target is unreachable, the relay resets new connections."""

    def __init__(self, listen: Place, target: Place, plan: ChaosPlan, seed: int, on_cut: OnCut | None) -> None:
        super().__init__(plan, seed, on_cut)
        self._target = target
        self._door = _Door(listen)
        self._turn = trio.CancelScope()

    @property
    def address(self) -> str:
        """The address to connect to: `host:port`, or the path of a Unix socket."""
        return self._door.address

    @property
    def port(self) -> int:
        """The port number of a TCP relay."""
        return int(self.address.rpartition(":")[2])

    def refuse(self, seconds: float = math.inf) -> None:
        """Refuse new connections for this many seconds, or until `admit`. Meanwhile nothing listens at the address."""
        super().refuse(seconds)
        self._turn.cancel()
        self._door.shut()

    def admit(self) -> None:
        """Accept connections again."""
        super().admit()
        self._turn.cancel()
        with suppress(OSError):  # the task that accepts tries again
            self._door.open()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Relay connections until cancelled."""
        await self._door.resolve()
        self._door.open()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    with trio.CancelScope() as self._turn:
                        await self._keep_the_door(nursery)
        finally:
            self._door.close()

    async def _keep_the_door(self, nursery: trio.Nursery) -> None:
        """Accept connections until an error, `refuse` or `admit`. While refusing, wait until the time is up."""
        if self.is_refusing:
            self._door.shut()
            await trio.sleep_until(self._refusing_until)
            return
        try:
            self._door.open()
            while True:
                client = await self._door.accept()
                nursery.start_soon(self._connection, client)
        except OSError:
            # We ran out of descriptors, another program took the address, or the socket was closed during `accept`.
            await trio.sleep(AGAIN)

    async def _connection(self, client: trio.SocketStream) -> None:
        fate = self._next_fate()
        try:
            at = self._target
            target = await trio.open_unix_socket(at) if isinstance(at, str) else await trio.open_tcp_stream(*at)
        except OSError:
            self._stats.unreachable += 1
            make_abrupt(client)
            await trio.aclose_forcefully(client)
            return
        except BaseException:
            await trio.aclose_forcefully(client)
            raise
        if self.plan.rate is not None:
            for stream in (client, target):
                _bound_buffer(stream, self.plan.rate)
        await self._pass(client, target, fate, was_dialled=True)


def _bound_buffer(stream: trio.SocketStream, rate: float) -> None:
    """Shrink the kernel's receive buffer on a rate-limited connection, which otherwise queues megabytes."""
    with suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(BUFFER_LEAST, int(rate * BUFFER_SECONDS)))


@asynccontextmanager
async def chaos_relay(
    target: str, plan: ChaosPlan, seed: int = 0, *, listen: str = "127.0.0.1:0", on_cut: OnCut | None = None
) -> AsyncGenerator[ChaosRelay, None]:
    """Relay connections to `target`, with the faults of `plan`, while the block runs.

    At the end of the block all connections are reset. The fate of the n-th connection, down to the byte at which it is
    cut, depends only on the seed.

    Args:
        target: the address of the server.
        plan: the faults.
        seed: decides everything that the plan leaves to chance.
        listen: the address to listen on. By default a free port on loopback.
        on_cut: called with a report of each cut.

    Yields:
        The relay. Connect to its `address`.

    Raises:
        ValueError: if an address is invalid.
        OSError: if the relay can't listen on `listen`.
    """
    relay = ChaosRelay(parse_place(listen), parse_place(target), plan, seed, on_cut)
    async with background() as nursery:
        await nursery.start(relay.run)
        yield relay


def parse_place(address: str) -> Place:
    """Parse `host:port` or the path of a Unix socket.

    Raises:
        ValueError: if the address is invalid. The text says what was expected.
    """
    scheme, separator, rest = address.partition("://")
    if separator and scheme not in ("tcp", "unix"):
        raise ValueError(f"address {address!r}: tcp:// or unix:// is what can stand there; {FORM}")
    place = rest if separator else address
    if scheme == "unix" if separator else "/" in place:
        if not place:
            raise ValueError(f"address {address!r}: {FORM}")
        return place
    host, colon, digits = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {address!r}: an IPv6 host needs brackets; {FORM}")
    if not (host and colon and digits.isascii() and digits.isdigit() and int(digits) <= 65_535):
        raise ValueError(f"address {address!r}: {FORM}")
    return host, int(digits)


class _Door:
    """A listening socket that can be closed, so that the kernel refuses connections, and reopened at its address."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._family: int = 0 if not isinstance(place, str) else socket.AF_UNIX
        self._socket: trio.socket.SocketType | None = None
        self._is_open = False
        self.address = place if isinstance(place, str) else ""

    async def resolve(self) -> None:
        if not isinstance(self._place, str):
            found = await trio.socket.getaddrinfo(*self._place, type=socket.SOCK_STREAM)
            self._family, _, _, _, (host, port, *_) = found[0]
            self._place = (str(host), int(port))

    def open(self) -> None:
        if self._is_open:
            return
        if self._socket is None:
            self._socket = trio.socket.from_stdlib_socket(self._bound())
        self._socket.listen(BACKLOG)
        self._is_open = True

    def shut(self) -> None:
        if not self._is_open or self._socket is None:
            return
        self._is_open = False
        spare = None
        if CAN_KEEP_A_PORT and not isinstance(self._place, str):
            with suppress(OSError):  # then `open` binds a new socket
                spare = trio.socket.from_stdlib_socket(self._bound())
        self._socket.close()
        self._socket = spare

    def close(self) -> None:
        self._is_open = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if isinstance(self._place, str):
                with suppress(OSError):
                    os.unlink(self._place)

    async def accept(self) -> trio.SocketStream:
        if self._socket is None:
            raise OSError(errno.EBADF, "the relay is not listening")
        accepted, _ = await self._socket.accept()
        return trio.SocketStream(accepted)

    def _bound(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            if isinstance(self._place, str):
                self._bind_path(sock, self._place)
            else:
                if sys.platform != "win32":  # there the option lets another socket steal the port
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if CAN_KEEP_A_PORT:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(self._place)
                host, port = sock.getsockname()[:2]
                self._place = (host, port)
                self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        except BaseException:
            sock.close()
            raise
        return sock

    def _bind_path(self, sock: socket.socket, path: str) -> None:
        if self._was_bound and os.path.exists(path):
            os.unlink(path)
        sock.bind(path)
        self._was_bound = True
        os.chmod(path, 0o600)

    _was_bound = False  # we don't remove a file that was at the path before we bound it
