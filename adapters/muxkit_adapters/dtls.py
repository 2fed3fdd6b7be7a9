"""How do packets cross a network that others can touch? DTLS 1.2, verified by default."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import trio

from muxkit import Limits
from muxkit.runtime import bare_nursery, close_at_once, protect_package, protected_manager

from ._addresses import join_host_port, parse_host_port
from ._errors import HandshakeFailed
from .packets._old_wire import Wire
from .packets.certificates import Context, check_context, client_context, server_context, verifies
from .packets.dtls_links import DtlsLink
from .packets.options import (
    IDLE,
    LARGEST,
    RECEIVE_BUFFER,
    REFUSALS,
    SEND_BUFFER,
    Address,
    PacketTooLarge,
    Refusals,
    ServerCounters,
    check_largest,
)
from .packets.peers import Peers
from .packets.sockets import PacketSocket, open_socket
from .udp import bind_all, first_address

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

__all__ = [
    "Context",
    "DtlsLink",
    "HandshakeFailed",
    "PacketTooLarge",
    "ServerCounters",
    "client_context",
    "connect",
    "serve",
    "server_context",
    "transport",
]

HANDSHAKE_TIMEOUT = 10.0  # s, on the connecting side; a listener has Limits.handshake
RETRANSMIT = 1.0  # s until a lost packet of the handshake is sent again, at first
LEAST = 256  # bytes that a packet must hold, so that a handshake fits into some
INBOX = 256  # packets that wait for the handler of one peer


@protected_manager
async def connect(
    host: str,
    port: int,
    *,
    ssl_context: Context | None = None,
    server_hostname: str | None = None,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    retransmit: float = RETRANSMIT,
    largest: int = LARGEST,
    receive_buffer: int = RECEIVE_BUFFER,
    send_buffer: int = SEND_BUFFER,
    refusals: int | None = REFUSALS,
    insecure: bool = False,
) -> AsyncIterator[DtlsLink]:
    """An encrypted link to a peer whose certificate is valid for `server_hostname`, by default the host.

    `client_context` makes contexts. A verify callback of `ssl_context` is not called. Raises `HandshakeFailed` with
    the reason when the peer cannot be trusted, ConnectionRefusedError when the network says that nobody is there.
    `insecure=True` admits a context that does not verify, and then no name is checked either.
    """
    check_largest(largest, least=LEAST)
    context = ssl_context or client_context()
    check_context(context)
    is_verified = verifies(context)
    if not (is_verified or insecure):
        raise ValueError(
            "ssl_context does not verify the server (VERIFY_PEER is not set): "
            "use dtls.client_context(), or pass insecure=True"
        )
    family, address = await first_address(host, port)
    link: DtlsLink | None = None

    def refused(_: Address | None, error: OSError) -> None:
        if link is not None:
            link.refused(error)

    packets = PacketSocket(
        open_socket(family, connect=address),
        receive_buffer=receive_buffer,
        send_buffer=send_buffer,
        refused=refused,
        is_connected=True,
    )
    wire = Wire(packets, address, lambda _: link)
    with trio.DTLSEndpoint(wire, incoming_packets_buffer=INBOX) as endpoint:
        link = DtlsLink(
            endpoint.connect(cast("tuple[str, int]", address), context),  # as given by recvfrom, also for IPv6
            wire,
            packets,
            f"dtls {join_host_port(host, port)}{'' if is_verified else ' (not verified, insecure)'}",
            hostname=(server_hostname or host) if is_verified else None,
            largest=largest,
            refusals=Refusals(refusals),
        )
        await link.shake_hands(context, within=handshake_timeout, retransmit=retransmit)
        try:
            yield link
        finally:
            await close_at_once(link)


async def serve(
    handler: Callable[[DtlsLink], Awaitable[None]],
    port: int = 0,
    *,
    ssl_context: Context,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    largest: int = LARGEST,
    idle: float = IDLE,
    retransmit: float = RETRANSMIT,
    receive_buffer: int = RECEIVE_BUFFER,
    send_buffer: int = SEND_BUFFER,
    refusals: int | None = REFUSALS,
    counters: ServerCounters | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(link)` after each handshake, until cancelled; tells `task_status` the addresses.

    `server_context` makes contexts. An address proves itself with a cookie before anything is kept for it. At most
    `Limits.half_open` handshakes go on at a time, each for `Limits.handshake` seconds; a peer that is silent for
    `idle` seconds is forgotten.
    """
    check_largest(largest, least=LEAST)
    check_context(ssl_context)
    limits, counters = limits or Limits(), counters or ServerCounters()
    bound = await bind_all(host, port)
    listeners = [
        _Listener(
            sock,
            handler,
            ssl_context,
            limits=limits,
            counters=counters,
            largest=largest,
            idle=idle,
            retransmit=retransmit,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refusals=refusals,
        )
        for sock in bound
    ]
    try:
        async with bare_nursery() as nursery:
            peers = Peers(nursery, limits, counters)
            nursery.start_soon(peers.expire)
            for listener in listeners:
                await nursery.start(listener.run, peers)
            task_status.started([join_host_port(*sock.getsockname()[:2]) for sock in bound])
    finally:
        for listener in listeners:
            listener.packets.close()


class _Listener:
    """One bound socket and the peers behind it."""

    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[DtlsLink], Awaitable[None]],
        context: Context,
        *,
        limits: Limits,
        counters: ServerCounters,
        largest: int,
        idle: float,
        retransmit: float,
        receive_buffer: int,
        send_buffer: int,
        refusals: int | None,
    ) -> None:
        self.packets = PacketSocket(
            sock,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refused=self._refused,
            is_connected=False,
        )
        self._handler = handler
        self._context = context
        self._limits = limits
        self._counters = counters
        self._largest = largest
        self._idle = idle
        self._retransmit = retransmit
        self._most_refusals = refusals
        self._links: dict[Address, DtlsLink] = {}
        self._wire = Wire(self.packets, None, self._links.get)
        self._peers: Peers

    async def run(self, peers: Peers, *, task_status: trio.TaskStatus[None]) -> None:
        self._peers = peers
        with trio.DTLSEndpoint(self._wire, incoming_packets_buffer=INBOX) as endpoint:
            await endpoint.serve(self._context, self._peer, task_status=task_status)

    async def _peer(self, channel: trio.DTLSChannel) -> None:
        """The life of one peer, from its cookie on; Trio closes the channel after it."""
        address: Address = channel.peer_address
        link = DtlsLink(
            channel,
            self._wire,
            self.packets,
            f"dtls {join_host_port(*address[:2])}",
            largest=self._largest,
            refusals=Refusals(self._most_refusals),
            idle=self._idle,
        )
        scope = self._peers.admit(link)
        if scope is None:
            return
        self._links[address] = link
        try:
            await self._peers.run(link, scope, partial(self._converse, link))
        finally:
            self._counters.dropped += link.stats().dropped
            if self._links.get(address) is link:
                del self._links[address]

    async def _converse(self, link: DtlsLink) -> None:
        await link.shake_hands(self._context, within=self._limits.handshake, retransmit=self._retransmit)
        self._peers.establish(link)
        try:
            await self._handler(link)
        finally:
            await close_at_once(link)

    def _refused(self, address: Address | None, error: OSError) -> None:
        link = None if address is None else self._links.get(address)
        if link is not None and link.refused(error):
            self._counters.refused += 1
            self._peers.remove(link)


class _Transport:
    """`dtls://host:port`."""

    link = "packets"

    def connect(
        self,
        address: str,
        *,
        ssl_context: Context | None = None,
        server_hostname: str | None = None,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        retransmit: float = RETRANSMIT,
        largest: int = LARGEST,
        receive_buffer: int = RECEIVE_BUFFER,
        send_buffer: int = SEND_BUFFER,
        refusals: int | None = REFUSALS,
        insecure: bool = False,
    ) -> AbstractAsyncContextManager[DtlsLink]:
        return connect(
            *parse_host_port(address),
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            handshake_timeout=handshake_timeout,
            retransmit=retransmit,
            largest=largest,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refusals=refusals,
            insecure=insecure,
        )

    async def serve(
        self,
        handler: Callable[[DtlsLink], Awaitable[None]],
        address: str,
        *,
        limits: Limits,
        task_status: trio.TaskStatus[list[str]],
        ssl_context: Context | None = None,
        largest: int = LARGEST,
        idle: float = IDLE,
        retransmit: float = RETRANSMIT,
        receive_buffer: int = RECEIVE_BUFFER,
        send_buffer: int = SEND_BUFFER,
        refusals: int | None = REFUSALS,
        counters: ServerCounters | None = None,
    ) -> None:
        if ssl_context is None:
            raise ValueError(f"dtls://{address}: a server needs ssl_context=, made by dtls.server_context()")
        host, port = parse_host_port(address)
        await serve(
            handler,
            port,
            ssl_context=ssl_context,
            host=host,
            limits=limits,
            largest=largest,
            idle=idle,
            retransmit=retransmit,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refusals=refusals,
            counters=counters,
            task_status=task_status,
        )


transport = _Transport()


protect_package("muxkit_adapters")
