"""The PROXY protocol, versions 1 and 2, with which a load balancer reports the address of each client.

A TCP load balancer opens its own connection to the server, so the server sees the balancer's address instead of the
client's. HAProxy, nginx, Envoy and the load balancers of cloud providers can send a header with the client's address
before everything else. The `balancers=` option of the `tcp`, `tls`, `ws` and `wss` servers lists the addresses from
which we accept such headers:

- A connection from one of them must begin with a header. Otherwise we close it. The specification forbids guessing,
  because a client could send its own header wherever a header is optional.
- In a connection from any other address, a header isn't special. Its bytes are read as the first bytes of the protocol
  and are invalid there, so a client can't pretend to have another address.

The specification is https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Collection
from typing import Final, TypeVar

import attrs

from muxkit.runtime import may_log, protected_manager, source_of

from ._addresses import join_host_port
from ._errors import HandshakeFailed
from ._listen import Handshake, log
from ._sockets import SocketStream

__all__ = ["Balancers", "Header", "parse_block", "parse_line"]

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"  # version 2 begins with these 12 bytes
LINE_BEGIN: Final = b"PROXY "
LINE_MAX: Final = 107  # bytes of a version 1 header, including its end of line
BLOCK_MAX: Final = 4096  # bytes of a version 2 header; extensions such as certificate names need a few hundred
LOCAL, PROXIED = 0, 1
FAMILIES: Final = {0x11: 4, 0x12: 4, 0x21: 16, 0x22: 16}  # TCP and UDP over IPv4 and IPv6: bytes per address

LinkT = TypeVar("LinkT")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HeaderError(ValueError):
    """Raised when the received bytes aren't a valid header of the PROXY protocol."""


@attrs.frozen
class Header:
    """The client's address in a header. `host` is empty for the balancer's own connections, such as health checks."""

    host: str = ""
    port: int = 0


def parse_line(line: bytes) -> Header:
    """Parse a version 1 header, including its end of line. Raises `HeaderError` if it is invalid."""
    text = line.decode("ascii", "replace")
    words = text.removesuffix("\r\n").split(" ")
    if not text.endswith("\r\n") or words[0] != "PROXY" or len(words) < 2:
        raise HeaderError(f"expected PROXY TCP4 or TCP6 with addresses and ports, got {text[:LINE_MAX]!r}")
    if words[1] == "UNKNOWN":
        return Header()
    if words[1] not in ("TCP4", "TCP6") or len(words) != 6:
        raise HeaderError(f"expected PROXY TCP4 or TCP6 with addresses and ports, got {text[:LINE_MAX]!r}")
    version = 4 if words[1] == "TCP4" else 6
    try:
        addresses = [ipaddress.ip_address(word) for word in words[2:4]]
    except ValueError as error:
        raise HeaderError(f"invalid address in {text!r}") from error
    if any(address.version != version for address in addresses):
        raise HeaderError(f"addresses of another family in {text!r}")
    if not all(word.isascii() and word.isdigit() and int(word) < 65_536 for word in words[4:]):
        raise HeaderError(f"invalid port in {text!r}")
    return Header(str(addresses[0]), int(words[4]))


def parse_block(begin: bytes, rest: bytes) -> Header:
    """Parse a version 2 header: its first 16 bytes, and the rest, whose length they contain.

    Raises:
        HeaderError: if the header is invalid.
    """
    version, command, family = begin[12] >> 4, begin[12] & 0x0F, begin[13]
    if version != 2 or command not in (LOCAL, PROXIED):
        raise HeaderError(f"expected version 2 with the command LOCAL or PROXY, got {version} with {command}")
    size = FAMILIES.get(family)
    if command == LOCAL or size is None:  # no address, or one without meaning here, such as that of a Unix socket
        return Header()
    if len(rest) < 2 * size + 4:
        raise HeaderError(f"expected {2 * size + 4} bytes of addresses, got {len(rest)}")
    return Header(str(ipaddress.ip_address(rest[:size])), int.from_bytes(rest[2 * size : 2 * size + 2]))


class Balancers:
    """The addresses and networks from which headers are accepted. Empty by default."""

    def __init__(self, balancers: Collection[str]) -> None:
        if isinstance(balancers, str):
            raise ValueError(f"balancers={balancers!r}: expected a list of addresses or networks")
        try:
            self._networks: list[Network] = [ipaddress.ip_network(each, strict=False) for each in balancers]
        except ValueError as error:
            expected = "expected addresses or networks, such as ['10.0.0.5', '10.1.0.0/16']"
            raise ValueError(f"balancers={[*balancers]!r}: {expected}") from error

    def __bool__(self) -> bool:
        return bool(self._networks)

    def has(self, host: str) -> bool:
        """Return True if this is the address of a load balancer."""
        if not self._networks:
            return False
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def before(self, handshake: Handshake[SocketStream, LinkT]) -> Handshake[SocketStream, LinkT]:
        """Return a handshake that first reads the header, if the connection comes from a load balancer."""
        if not self._networks:
            return handshake

        @protected_manager
        async def introduced(wire: SocketStream) -> AsyncIterator[LinkT]:
            await self.introduce(wire)
            async with handshake(wire) as link:
                yield link

        return introduced

    async def introduce(self, wire: SocketStream) -> None:
        """Give a connection from a load balancer the name of its real peer.

        Raises:
            HandshakeFailed: if the balancer sent no valid header.
        """
        try:
            host, *_ = wire.socket.getpeername()
        except OSError:
            return  # already disconnected; the next read will raise an error
        if not self.has(host):
            return
        try:
            header = await _read_header(wire)
        except HeaderError as error:
            if may_log("balancers without a PROXY header"):
                # log: An address in `balancers=` opened a connection without a PROXY protocol header. Enable it in the
                # balancer (`send-proxy-v2`, `proxy_protocol on`), or remove the address from the list.
                log.warning("dropped a connection from the balancer %s: no PROXY header: %s", host, error)
            raise HandshakeFailed(f"{wire.peer}: the balancer sent no PROXY header: {error}") from error
        if header.host:
            kind, _, rest = wire.peer.partition(" ")
            _, space, remark = rest.partition(" ")
            wire.peer = f"{kind} {join_host_port(header.host, header.port)}{space}{remark}"
            wire.source = source_of(header.host)


async def _read_header(wire: SocketStream) -> Header:
    begin = await _take(wire, len(SIGNATURE))
    if begin == SIGNATURE:
        begin += await _take(wire, 4)
        size = int.from_bytes(begin[14:16])
        if size > BLOCK_MAX:
            raise HeaderError(f"a header of {size} bytes exceeds the limit of {BLOCK_MAX}")
        return parse_block(begin, await _take(wire, size))
    if not begin.startswith(LINE_BEGIN):
        raise HeaderError(f"the connection begins with {begin!r}")
    while not begin.endswith(b"\n"):
        if len(begin) >= LINE_MAX:
            raise HeaderError(f"a line of more than {LINE_MAX} bytes: {begin!r}")
        seen = await _peek(wire, LINE_MAX - len(begin))
        begin += await _take(wire, seen.find(b"\n") + 1 or len(seen))
    return parse_line(begin)


async def _take(wire: SocketStream, size: int) -> bytes:
    """Receive exactly this many bytes, because the bytes after them belong to the next handshake."""
    taken = b""
    while len(taken) < size:
        data = wire.receive_nowait(size - len(taken))
        if data == b"":
            raise HeaderError(f"the connection ended after {len(taken)} of {size} bytes")
        if data is None:
            await wire.wait_readable()
        else:
            taken += data
    return taken


async def _peek(wire: SocketStream, size: int) -> bytes:
    while True:
        await wire.wait_readable()
        try:
            data = wire.socket.recv(size, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            continue
        if not data:
            raise HeaderError("the connection ended inside of the header")
        return data
