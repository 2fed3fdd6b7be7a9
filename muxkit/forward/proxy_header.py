"""Headers of the PROXY protocol, which a forward sends to its targets so that they know who has connected.

A target sees the connection of the forward, and so the forward's address. With `proxy_header=`, the first bytes of each
connection are a header with the address of the client that connected to the listener. haproxy, nginx, Postfix and
muxkit's own servers (`balancers=`) read it. A target without support for it would take the header for data.

For a listener on this machine, the client of muxkit puts the header in front of the connection's bytes. For a listener
at the server, it does so with the address that the server reports. The server needs no support for either.

The specification is https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Literal, TypeAlias

from muxkit.forward.addresses import IPAddress, parse_address

ProxyHeader: TypeAlias = Literal[1, 2]
"""The version of the PROXY protocol: 1 is a line of text, and 2 is binary."""

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"  # version 2 begins with these 12 bytes
LOCAL, PROXY = 0x20, 0x21  # version 2, and whether a client is named
TCP4, TCP6 = 0x11, 0x21


def check_version(version: ProxyHeader | None) -> None:
    """Raise ValueError for a version that doesn't exist."""
    if version not in (None, 1, 2):
        raise ValueError(f"proxy_header={version!r}: expected 1 or 2, the version of the PROXY protocol")


def encode_header(version: ProxyHeader, source: str, destination: str) -> bytes:
    """Return the header for a connection from `source` to `destination`, both as `host:port`.

    If one of them is unknown or a Unix socket, the header says that there is no address.
    """
    ends = _ends(source, destination)
    if ends is None:
        return b"PROXY UNKNOWN\r\n" if version == 1 else SIGNATURE + bytes((LOCAL, 0, 0, 0))
    (from_ip, from_port), (to_ip, to_port) = ends
    if version == 1:
        return f"PROXY TCP{from_ip.version} {from_ip} {to_ip} {from_port} {to_port}\r\n".encode()
    ports = from_port.to_bytes(2, "big") + to_port.to_bytes(2, "big")
    addresses = from_ip.packed + to_ip.packed + ports
    family = TCP4 if from_ip.version == 4 else TCP6
    return SIGNATURE + bytes((PROXY, family)) + len(addresses).to_bytes(2, "big") + addresses


def _ends(source: str, destination: str) -> tuple[tuple[IPAddress, int], tuple[IPAddress, int]] | None:
    """Return both addresses in one family, since a header has only one; None if one of them is no IP address."""
    try:
        ends = [parse_address(each, any_port=True) for each in (source, destination)]
    except ValueError:
        return None
    first, second = (_unmapped(each.ip) for each in ends)
    if first is None or second is None:
        return None
    if first.version != second.version:
        first, second = _mapped(first), _mapped(second)
    return (first, ends[0].port), (second, ends[1].port)


def _unmapped(address: IPAddress | None) -> IPAddress | None:
    """Return the IPv4 address in an IPv6 address of a socket for both families."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _mapped(address: IPAddress) -> IPAddress:
    """Return an IPv4 address as an IPv6 address."""
    return ipaddress.ip_address(f"::ffff:{address}") if address.version == 4 else address
