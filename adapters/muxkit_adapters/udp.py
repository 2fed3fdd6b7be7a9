"""How do packets travel without any promise? UDP; it is plaintext, so beyond loopback only when asked for."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, cast

import trio

from muxkit import Limits
from muxkit.runtime import bare_nursery, protect_package, protected_manager

from ._addresses import join_host_port, parse_host_port
from ._errors import PlaintextWarning
from ._plaintext import exposed
from .packets._old_link import ClientLink, UdpLink
from .packets.options import (
    IDLE,
    LARGEST,
    RECEIVE_BUFFER,
    REFUSALS,
    SEND_BUFFER,
    Address,
    Buffers,
    PacketStats,
    PacketTooLarge,
    Refusals,
    ServerCounters,
    check_largest,
)
from .packets.peers import Peers
from .packets.sockets import PacketSocket, open_socket
from .packets.udp_links import Listener, PeerLink, Validation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

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


@protected_manager
async def connect(
    host: str,
    port: int,
    *,
    largest: int = LARGEST,
    receive_buffer: int = RECEIVE_BUFFER,
    send_buffer: int = SEND_BUFFER,
    refusals: int | None = REFUSALS,
    insecure: bool = False,
) -> AsyncIterator[UdpLink]:
    """Packets to and from one address; nothing is sent by that, so nobody need be there.

    That nobody is there shows when the first packet is refused: `send` and `receive` raise BrokenResourceError.
    Once the peer has been heard, it takes `refusals` in a row. Raises ValueError for a host off loopback without
    `insecure=True`.
    """
    check_largest(largest)
    unprotected = await exposed("udp", host, port, insecure=insecure, secure="dtls")
    family, address = await first_address(host, port)
    link: ClientLink
    wire = PacketSocket(
        open_socket(family, connect=address),
        receive_buffer=receive_buffer,
        send_buffer=send_buffer,
        refused=lambda _, error: link.refused(error),
        is_connected=True,
    )
    try:
        peer = f"udp {join_host_port(*address[:2])}{PLAINTEXT if unprotected else ''}"
        link = ClientLink(wire, peer, largest=largest, refusals=Refusals(refusals))
        yield link
    finally:
        wire.close()


async def serve(
    handler: Callable[[PeerLink], Awaitable[None]],
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    largest: int = LARGEST,
    idle: float = IDLE,
    validation: Validation = "answer",
    receive_buffer: int = RECEIVE_BUFFER,
    send_buffer: int = SEND_BUFFER,
    refusals: int | None = REFUSALS,
    counters: ServerCounters | None = None,
    insecure: bool = False,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `handler(link)` for each address that sends, until cancelled; tells `task_status` the addresses.

    A peer that is silent for `idle` seconds is forgotten. Until an address has proved itself, as `validation` says,
    it gets at most three times the bytes that came from it; `Limits.half_open` of such peers are kept.
    """
    check_largest(largest)
    unprotected = await exposed("udp", host, port, insecure=insecure, secure="dtls")
    limits, counters = limits or Limits(), counters or ServerCounters()
    bound = await bind_all(host, port)
    listeners = [
        Listener(
            sock,
            handler,
            limits=limits,
            counters=counters,
            largest=largest,
            idle=idle,
            refusals=refusals,
            validation=validation,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            suffix=PLAINTEXT if unprotected else "",
        )
        for sock in bound
    ]
    try:
        async with bare_nursery() as nursery:
            peers = Peers(nursery, limits, counters)
            nursery.start_soon(peers.expire)
            for listener in listeners:
                nursery.start_soon(listener.run, peers)
            task_status.started([join_host_port(*sock.getsockname()[:2]) for sock in bound])
    finally:
        for listener in listeners:
            listener.wire.close()


class _Transport:
    """`udp://host:port`."""

    link = "packets"

    def connect(
        self,
        address: str,
        *,
        largest: int = LARGEST,
        receive_buffer: int = RECEIVE_BUFFER,
        send_buffer: int = SEND_BUFFER,
        refusals: int | None = REFUSALS,
        insecure: bool = False,
    ) -> AbstractAsyncContextManager[UdpLink]:
        return connect(
            *parse_host_port(address),
            largest=largest,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refusals=refusals,
            insecure=insecure,
        )

    async def serve(
        self,
        handler: Callable[[PeerLink], Awaitable[None]],
        address: str,
        *,
        limits: Limits,
        task_status: trio.TaskStatus[list[str]],
        largest: int = LARGEST,
        idle: float = IDLE,
        validation: Validation = "answer",
        receive_buffer: int = RECEIVE_BUFFER,
        send_buffer: int = SEND_BUFFER,
        refusals: int | None = REFUSALS,
        counters: ServerCounters | None = None,
        insecure: bool = False,
    ) -> None:
        host, port = parse_host_port(address)
        await serve(
            handler,
            port,
            host=host,
            limits=limits,
            largest=largest,
            idle=idle,
            validation=validation,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
            refusals=refusals,
            counters=counters,
            insecure=insecure,
            task_status=task_status,
        )


transport = _Transport()


# What DTLS shares

PLAINTEXT = " (plaintext, insecure)"
NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # `localhost` may name an IPv6 address that is switched off


async def first_address(host: str, port: int) -> tuple[int, Address]:
    """The address family and the address to send to; of several, the system's first choice."""
    return (await _resolve(host, port, 0))[0]


async def bind_all(host: str, port: int) -> list[socket.socket]:
    """A bound socket for each address of `host` that this machine has."""
    bound: list[socket.socket] = []
    reasons: list[OSError] = []
    try:
        for family, address in await _resolve(host, port, socket.AI_PASSIVE):
            try:
                bound.append(open_socket(family, bind=address))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise OSError(error.errno, f"udp {join_host_port(*address[:2])}: {error.strerror}") from error
                reasons.append(error)
        if not bound:
            raise reasons[0]
    except BaseException:
        for sock in bound:
            sock.close()
        raise
    return bound


async def _resolve(host: str, port: int, flags: int) -> list[tuple[int, Address]]:
    try:
        found = await trio.socket.getaddrinfo(host or None, port, type=socket.SOCK_DGRAM, flags=flags)
    except OSError as error:
        raise OSError(error.errno, f"{host}: {error.strerror or error}") from error
    # The third form that the types allow belongs to Python without IPv6.
    return [(family, cast("Address", address)) for family, _, _, _, address in found]


protect_package("muxkit_adapters")
