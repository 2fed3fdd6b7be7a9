"""UDP packets between two machines, without encryption. Beyond loopback, this needs `insecure=True`.

Packets may be lost, duplicated and reordered. `dtls` encrypts packets, and `quic` adds streams and congestion control.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Unpack

import trio

from muxkit import Limits
from muxkit.runtime import protect_package, protected_manager

from ._addresses import exposed, hosts_and_ports, join_host_port, one_place
from ._errors import PlaintextWarning
from .packets.candidates import PacketTransport
from .packets.links import ClientLink, UdpLink
from .packets.listeners import PeerLink, UdpListener, Validation, serve_listeners
from .packets.options import (
    Buffers,
    ListenerKeywords,
    ListenerOptions,
    PacketKeywords,
    PacketOptions,
    PacketStats,
    PacketTooLarge,
    ServerCounters,
)
from .packets.sockets import PacketSocket, bind_all, open_socket, resolve

__all__ = [
    "Buffers",
    "PacketStats",
    "PacketTooLarge",
    "PeerLink",
    "PlaintextWarning",
    "ServerCounters",
    "UdpLink",
    "Validation",
    "connect",
    "serve",
    "transport",
]

CONNECT_TIMEOUT = 30.0  # s to resolve the host
PLAINTEXT = " (plaintext, insecure)"


@protected_manager
async def connect(
    host: str,
    port: int,
    *,
    connect_timeout: float = CONNECT_TIMEOUT,
    insecure: bool = False,
    **options: Unpack[PacketKeywords],
) -> AsyncIterator[UdpLink]:
    """Open a link to one address. This sends nothing, so it succeeds even if there is no peer.

    If the peer doesn't exist, the network may report that after the first packet, and `send` and `receive` raise
    BrokenResourceError. Once a packet of the peer was received, it takes `refusals` such reports in a row, because they
    can be forged.

    Args:
        host: the host. Its first address is used. `muxkit.connect` races all addresses.
        port: the port.
        connect_timeout: seconds to resolve the host.
        insecure: allow plaintext beyond loopback.
        options: the other keywords, which `PacketOptions` describes.

    Raises:
        ValueError: for a host beyond loopback without `insecure=True`.
        TimeoutError: if the host isn't resolved in time.
        OSError: if the host can't be resolved.
    """
    packet_options = PacketOptions(**options)
    packet_options.check()
    try:
        with trio.fail_after(connect_timeout):
            unprotected = await exposed("udp", host, port, insecure=insecure, secure="dtls")
            family, address = (await resolve("udp", host, port))[0]
    except trio.TooSlowError:
        where = f"udp {join_host_port(host, port)}"
        raise TimeoutError(f"{where}: no address within {connect_timeout:g} s (connect_timeout=)") from None
    link: ClientLink
    packets = PacketSocket(
        open_socket(family, connect=address), packet_options, refused=lambda _, error: link.refused(error), peer=address
    )
    try:
        peer = f"udp {join_host_port(*address[:2])}{PLAINTEXT if unprotected else ''}"
        link = ClientLink(packets, peer, address, packet_options)
        yield link
    finally:
        packets.close()


async def serve(
    handler: Callable[[PeerLink], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    validation: Validation = "answer",
    insecure: bool = False,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenerKeywords],
) -> None:
    """Run `handler(link)` for each address that sends packets, until cancelled.

    Until an address has proved itself, it gets at most three times the bytes that came from it, and at most
    `Limits.half_open` such peers are kept. A peer that is silent for `idle` seconds is forgotten.

    Args:
        handler: gets a link for each peer.
        port: the port. 0 chooses a free one.
        host: the address to bind, or a host with several addresses.
        limits: how many peers are allowed.
        validation: what proves an address: `answer` means a packet that arrives after one was sent there, and `told`
            only a call of `PeerLink.validate`.
        insecure: allow plaintext beyond loopback.
        task_status: gets a list of the bound addresses.
        options: the other keywords, which `ListenerOptions` describes.

    Raises:
        ValueError: for a host beyond loopback without `insecure=True`.
        OSError: if an address can't be bound.
    """
    listener_options = ListenerOptions(limits=limits or Limits(), **options)
    listener_options.check()
    unprotected = await exposed("udp", host, port, insecure=insecure, secure="dtls")
    suffix = PLAINTEXT if unprotected else ""
    listeners = [
        UdpListener(sock, handler, listener_options, validation=validation, suffix=suffix)
        for sock in await bind_all("udp", host, port)
    ]
    await serve_listeners(listeners, listener_options, task_status.started)


transport: Final = PacketTransport(
    "udp",
    connect,
    serve,
    one_place,
    one_place,
    "packets",
    (PacketKeywords, ListenerKeywords),
    places=hosts_and_ports,
    secure="dtls",
)

protect_package("muxkit_adapters")
