"""TCP streams between two machines, without encryption. Beyond loopback, this needs `insecure=True`.

The module also has the dialing and listening that `tls` and `websocket` build on.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Final

import attrs
import trio

from muxkit import Limits
from muxkit.runtime import first_of, protect_package, protected_manager, source_of

from ._addresses import (
    Transport,
    exposed,
    hosts_and_ports,
    is_loopback,
    is_numeric,
    join_host_port,
    look_up,
    one_place,
    several_places,
)
from ._errors import PlaintextWarning, failed
from ._listen import Handshake, serve_handshakes
from ._sockets import SocketListener, SocketStream, adopted, take_socket
from .balancers import Balancers
from .proxy import Proxy, is_local, proxy_for

__all__ = ["PlaintextWarning", "SocketStream", "connect", "serve", "transport"]

CONNECT_TIMEOUT = 30.0  # s, for each host
TLS_PORT = "Is this a TLS port? Then the URL begins with …+tls://. Or the server speaks another protocol"
UNSENT = 128 * 1024  # bytes of unsent data that the kernel may hold
NO_BALANCERS: Final = Balancers(())
NOTSENT_LOWAT: int | None = getattr(trio.socket, "TCP_NOTSENT_LOWAT", None)

Hosts = str | Sequence[tuple[str, int]]


@protected_manager
async def connect(
    host: Hosts,
    port: int | None = None,
    *,
    connect_timeout: float = CONNECT_TIMEOUT,
    unsent: int = UNSENT,
    proxy: str | None = None,
    insecure: bool = False,
) -> AsyncIterator[SocketStream]:
    """Open a TCP connection to a host, or to the first of several hosts that answers.

    Several hosts are tried in order. The addresses of one host are raced as in RFC 8305.

    Args:
        host: a host, or a list of `(host, port)` to try in order.
        port: the port of a single host.
        connect_timeout: seconds to connect, for each host.
        unsent: bytes of unsent data that the kernel may hold. A small value lets urgent data overtake bulk data that
            hasn't reached the kernel.
        proxy: the URL of a proxy to connect through, or "environment".
        insecure: allow plaintext beyond loopback.

    Raises:
        OSError: if no host answers. The text has the reason for each host.
        HandshakeFailed: if the proxy refuses.
        ValueError: for a host beyond loopback without `insecure=True`.
    """
    places = each_host(host, port)
    plaintext = Plaintext(insecure=insecure, secure="tls")
    stream, _ = await dial(
        "tcp", places, connect_timeout=connect_timeout, unsent=unsent, plaintext=plaintext, proxy=proxy
    )
    stream.hint_if_silent = TLS_PORT
    async with stream:
        yield stream


async def serve(
    handler: Callable[[SocketStream], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    unsent: int = UNSENT,
    insecure: bool = False,
    balancers: Collection[str] = (),
    listeners: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(stream)` for each connection, until cancelled.

    Args:
        handler: gets each stream, which is closed afterwards.
        port: the port. 0 chooses a free one.
        host: the address to bind, or a host with several addresses. An empty host binds all addresses.
        limits: how many connections are allowed.
        unsent: bytes of unsent data that the kernel may hold for each connection. A small value lets urgent data
            overtake bulk data that hasn't reached the kernel.
        insecure: allow plaintext beyond loopback.
        balancers: addresses or networks of load balancers. A connection from one of them must begin with a header of
            the PROXY protocol, which names the real peer.
        listeners: sockets that were bound elsewhere, used instead of `host` and `port`.
        task_status: gets a list of the bound addresses.

    Raises:
        ValueError: for a host beyond loopback without `insecure=True`.
        OSError: if an address can't be bound.
    """
    trusted = Balancers(balancers)
    unprotected = await exposed("tcp", host, port, insecure=insecure, secure="tls")
    open_to, addresses = await listen(
        "tcp", host, port, unsent=unsent, exposed=unprotected, balancers=trusted, listeners=listeners
    )
    accept: Handshake[SocketStream, SocketStream] = trusted.before(nullcontext)
    await serve_handshakes(open_to, accept, handler, limits=limits, started=lambda: task_status.started(addresses))


transport: Final = Transport("tcp", connect, serve, several_places, one_place, places=hosts_and_ports, secure="tls")


# Shared by the transports that run over TCP


def each_host(host: Hosts, port: int | None) -> list[tuple[str, int]]:
    """Return the places to try, in order."""
    if isinstance(host, str):
        if port is None:
            raise ValueError(f"connect({host!r}): a port is needed beside a single host")
        return [(host, port)]
    if port is not None or not host:
        raise ValueError("connect: several hosts are given as one or more (host, port), without another port")
    return list(host)


@attrs.frozen
class Plaintext:
    """The rule that plaintext leaves this machine only if the caller allows it.

    The addresses that a client checks are those to which it connects. If it looked a name up again to connect, the
    answer could lead elsewhere (DNS rebinding).
    """

    insecure: bool
    secure: str
    """The encrypted transport that the error text recommends."""

    async def check(self, kind: str, host: str, port: int, *, stays_here: bool) -> bool:
        """Return True if plaintext leaves this machine, as `exposed` does."""
        return await exposed(kind, host, port, insecure=self.insecure, secure=self.secure, stays_here=stays_here)

    async def check_known(self, kind: str, host: str, port: int, through: Proxy | None) -> bool:
        """Check a host that doesn't have to be looked up here: an address, or any host that a proxy connects to."""
        if through is not None:
            return await self.check(kind, host, port, stays_here=through.is_local and is_local(host))
        return is_numeric(host) and await self.check(kind, host, port, stays_here=is_loopback(host))


async def dial(
    kind: str,
    places: Sequence[tuple[str, int]],
    *,
    connect_timeout: float,
    unsent: int,
    plaintext: Plaintext | None = None,
    proxy: str | None = None,
) -> tuple[SocketStream, tuple[str, int]]:
    """Connect to the first place that answers; return the stream and the place.

    With `plaintext`, the addresses of each place are checked before the client connects to them.
    """
    reasons: list[OSError] = []
    proxies = [proxy_for(proxy, *place) for place in places]
    if plaintext is not None:
        for place, through in zip(places, proxies, strict=True):
            await plaintext.check_known(kind, *place, through)  # a mistake in the last place shows before any attempt
    for (host, port), through in zip(places, proxies, strict=True):
        where = join_host_port(host, port)
        is_exposed = False
        try:
            with trio.fail_after(connect_timeout):
                if through is not None:
                    is_exposed = plaintext is not None and await plaintext.check_known(kind, host, port, through)
                    stream = await _tunnelled(through, f"{kind} {where}", host, port)
                elif plaintext is None:
                    stream = await trio.open_tcp_stream(host, port)
                else:
                    addresses = await look_up(host, port)
                    is_exposed = await plaintext.check(kind, host, port, stays_here=all(map(is_loopback, addresses)))
                    stream = await _first_of(addresses, port)
        except trio.TooSlowError:
            by = "" if through is None else f" through {through}"
            text = f"{kind} {where}{by}: no answer within {connect_timeout:g} s (connect_timeout=)"
            reasons.append(TimeoutError(text))
        except OSError as error:
            if through is None:
                reasons += [failed(f"{kind} {where}", reason) for reason in _leaves(error)]
            else:
                reasons.append(error)
        else:
            peer = None if through is None else f"{where} through {through}"
            return prepare(take_socket(stream), kind=kind, unsent=unsent, exposed=is_exposed, peer=peer), (host, port)
    if len(reasons) == 1:
        raise reasons[0]
    kinds = {(type(reason), reason.errno) for reason in reasons}
    failure, number = kinds.pop() if len(kinds) == 1 else (OSError, None)
    lost = failure("; ".join(dict.fromkeys(map(str, reasons))))
    lost.errno = number
    raise lost


@attrs.frozen
class _Address:
    """One address of a host in the race for a connection."""

    host: str
    port: int

    @property
    def name(self) -> str:
        return join_host_port(self.host, self.port)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[trio.SocketStream]:
        stream = await self.connect()
        try:
            yield stream
        except BaseException:  # another address has won
            await trio.aclose_forcefully(stream)
            raise

    async def connect(self) -> trio.SocketStream:
        # `trio.open_tcp_stream` would open a nursery for a race of addresses.
        sock = trio.socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            await sock.connect((self.host, self.port))
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)


async def _first_of(addresses: Sequence[str], port: int) -> trio.SocketStream:
    """Race the addresses of a host, as `trio.open_tcp_stream` does after its own lookup."""
    if len(addresses) == 1:
        return await _Address(addresses[0], port).connect()
    async with first_of([[_Address(address, port) for address in addresses]]) as won:
        return won.value


async def _tunnelled(through: Proxy, where: str, host: str, port: int) -> trio.SocketStream:
    """Connect to a proxy, and through it to a host."""
    try:
        stream = await trio.open_tcp_stream(through.host, through.port)
    except OSError as error:
        raise failed(f"{where}: the proxy {through}", next(_leaves(error))) from error
    try:
        await through.open_tunnel(stream, where, host, port)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def listen(
    kind: str,
    host: str,
    port: int,
    *,
    unsent: int = UNSENT,
    exposed: bool = False,
    balancers: Balancers = NO_BALANCERS,
    listeners: Sequence[socket.socket] = (),
) -> tuple[list[SocketListener], list[str]]:
    """Listen on every address of `host`, or on the given sockets. Return the listeners and their addresses."""
    try:
        bound = [adopted(each) for each in listeners] or await trio.open_tcp_listeners(port, host=host or None)
    except OSError as error:
        raise failed(f"{kind} {join_host_port(host, port)}", error) from error
    names = [listener.socket.getsockname() for listener in bound]
    accept = partial(prepare, kind=kind, unsent=unsent, exposed=exposed, balancers=balancers)
    return [SocketListener(one, accept) for one in bound], [join_host_port(name[0], name[1]) for name in names]


def prepare(
    sock: socket.socket,
    *,
    kind: str,
    unsent: int,
    exposed: bool,
    peer: str | None = None,
    balancers: Balancers = NO_BALANCERS,
) -> SocketStream:
    """Wrap a connected socket, and set its options.

    Small writes are sent immediately (TCP_NODELAY). The kernel's backlog of unsent data is limited to `unsent` bytes,
    so that priorities take effect. `peer` is the name of the other end, if it isn't the address of the socket.

    A connection from a load balancer doesn't count against the limit per address, because all clients share its
    address.
    """
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Protocols without their own pings notice a lost peer through TCP keep-alive.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if NOTSENT_LOWAT is not None:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, unsent)
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # already disconnected; the first read will raise an error
        name, source = "(gone)", ""
    else:
        name, source = peer or join_host_port(host, port), "" if balancers.has(host) else source_of(host)
    marked = f"{kind} {name}{' (plaintext, insecure)' if exposed else ''}"
    return SocketStream(sock, marked, source=source, is_exposed=exposed)


def _leaves(error: OSError) -> Iterator[OSError]:
    """Yield the error of each address, from the group that is the cause of Trio's error, or of a race's."""
    group = error.__cause__
    if isinstance(group, BaseExceptionGroup):
        for leaf in group.exceptions:
            if isinstance(leaf, OSError):
                yield from _leaves(leaf)
    else:
        yield error


protect_package("muxkit_adapters")
