"""DTLS 1.2: encrypted packets across any network. Certificates are verified by default.

Like UDP packets, DTLS packets may be lost or reordered. Python's `ssl` module doesn't support DTLS, so this transport
uses pyOpenSSL and Trio's DTLS endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Unpack, cast

import trio

from muxkit import TLS, Limits
from muxkit.runtime import close_at_once, protect_package, protected_manager

from ._addresses import CERTIFICATE_NEEDED, join_host_port, one_of, one_place
from ._errors import HandshakeFailed
from .packets.candidates import PacketTransport
from .packets.certificates import Context, Renewed, check_context, client_context, context_of, server_context, verifies
from .packets.dtls_links import DtlsLink, DtlsListener, EndpointSocket, endpoint_on
from .packets.listeners import serve_listeners
from .packets.options import (
    Address,
    ListenerKeywords,
    ListenerOptions,
    PacketKeywords,
    PacketOptions,
    PacketTooLarge,
    ServerCounters,
)
from .packets.sockets import PacketSocket, bind_all, open_socket, resolve

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

HANDSHAKE_TIMEOUT = 30.0  # s for clients; a server has Limits.handshake
RETRANSMIT = 1.0  # s until a lost packet of the handshake is retransmitted for the first time
LEAST = 256  # bytes; the smallest value of `largest` with which a handshake works


@protected_manager
async def connect(
    host: str,
    port: int,
    *,
    tls: TLS | None = None,
    ssl_context: Context | None = None,
    server_hostname: str | None = None,
    connect_timeout: float | None = None,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    retransmit: float = RETRANSMIT,
    insecure: bool = False,
    **options: Unpack[PacketKeywords],
) -> AsyncIterator[DtlsLink]:
    """Open an encrypted link to a peer whose certificate is valid for `server_hostname`.

    Args:
        host: the host. Its first address is used. `muxkit.connect` races all addresses.
        port: the port.
        tls: the certificates to trust and to present.
        ssl_context: a context made by `client_context`, instead of `tls`. Its verify callback isn't called.
        server_hostname: the name that the certificate must have. By default the host.
        connect_timeout: another name for `handshake_timeout`, which it overrides.
        handshake_timeout: seconds for the handshake.
        retransmit: seconds until a lost packet of the handshake is retransmitted for the first time.
        insecure: allow a context that doesn't verify. Then no name is checked either.
        options: the other keywords, which `PacketOptions` describes.

    Raises:
        HandshakeFailed: if one side rejects the other, or if the handshake takes too long. The error has the reason.
        ConnectionRefusedError: if the network reports that nothing listens at the address. Other reports raise
            another OSError.
        ValueError: if the context doesn't verify the server and `insecure` isn't set.
    """
    packet_options = PacketOptions(**options)
    packet_options.check(least=LEAST)
    one_of(tls=tls, ssl_context=ssl_context)
    one_of(tls=tls, insecure=insecure or None)
    context = context_of(tls, is_client=True) if tls is not None else ssl_context or client_context()
    check_context(context)
    is_verified = verifies(context)
    if not (is_verified or insecure or tls is not None):
        raise ValueError(
            "ssl_context does not verify the server (VERIFY_PEER is not set): "
            "use dtls.client_context(), or pass insecure=True"
        )
    family, address = (await resolve("dtls", host, port))[0]
    link: DtlsLink | None = None

    def refused(_: Address, error: OSError) -> None:
        if link is not None:
            link.refused(error)

    sock = open_socket(family, connect=address)
    packets = PacketSocket(sock, packet_options, refused=refused, peer=address)
    wire = EndpointSocket(packets, lambda _: link)
    with endpoint_on(wire) as endpoint:
        link = DtlsLink(
            endpoint.connect(cast("tuple[str, int]", address), context),  # in recvfrom's form: 4 items for IPv6
            packets,
            f"dtls {join_host_port(host, port)}{'' if is_verified else ' (not verified, insecure)'}",
            packet_options,
            hostname=(server_hostname or host) if is_verified else None,
        )
        within = handshake_timeout if connect_timeout is None else connect_timeout
        shows_nothing = ssl_context is None if tls is None else tls.cert is None
        await link.shake_hands(within=within, retransmit=retransmit, heeds_alerts=True, shows_nothing=shows_nothing)
        try:
            yield link
        finally:
            await close_at_once(link)


async def serve(
    handler: Callable[[DtlsLink], Awaitable[None]],
    port: int = 0,
    *,
    tls: TLS | None = None,
    ssl_context: Context | None = None,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    retransmit: float = RETRANSMIT,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenerKeywords],
) -> None:
    """Do the handshake with each peer and run `handler(link)`, until cancelled.

    An address proves itself with a cookie before the server keeps anything for it. At most `Limits.half_open`
    handshakes run simultaneously, each for at most `Limits.handshake` seconds. A peer that is silent for `idle` seconds
    is forgotten.

    Args:
        handler: gets a link for each peer.
        port: the port. 0 chooses a free one.
        tls: the server's certificate and key. After a reload, new connections use the new ones.
        ssl_context: a context made by `server_context`, instead of `tls`.
        host: the address to bind, or a host with several addresses.
        limits: how many peers and handshakes are allowed.
        retransmit: seconds until a lost packet of the handshake is retransmitted for the first time.
        task_status: gets a list of the bound addresses.
        options: the other keywords, which `ListenerOptions` describes.

    Raises:
        ValueError: if there is no certificate.
        OSError: if an address can't be bound.
    """
    listener_options = ListenerOptions(limits=limits or Limits(), **options)
    listener_options.check(least=LEAST)
    one_of(tls=tls, ssl_context=ssl_context)
    context: Callable[[], Context]
    if tls is not None:
        context = Renewed(tls)
    elif ssl_context is not None:
        check_context(ssl_context)
        given = ssl_context
        context = lambda: given  # noqa: E731
    else:
        raise ValueError(CERTIFICATE_NEEDED)
    listeners = [
        DtlsListener(sock, handler, context, listener_options, retransmit=retransmit)
        for sock in await bind_all("dtls", host, port)
    ]
    await serve_listeners(listeners, listener_options, task_status.started)


transport: Final = PacketTransport(
    "dtls", connect, serve, one_place, one_place, "packets", (PacketKeywords, ListenerKeywords), ("tls", "ssl_context")
)

protect_package("muxkit_adapters")
