"""May this connection go without encryption? On loopback yes; elsewhere only when the caller insists."""

from __future__ import annotations

import ipaddress
import warnings

import trio

from ._errors import PlaintextWarning

_warned: set[str] = set()


async def exposed(kind: str, host: str, port: int, *, insecure: bool, secure: str) -> bool:
    """Whether plaintext to or on `host` leaves this machine.

    Raises ValueError when it would and `insecure` is not set; `secure` names the transport to use instead.
    """
    if await _all_loopback(host, port):
        return False
    if not insecure:
        raise ValueError(
            f"{kind} {host}:{port} is plaintext and {host!r} is not a loopback address: "
            f"use {secure}, or pass insecure=True to send everything readable and unprotected"
        )
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"{kind} without encryption beyond loopback, because insecure=True was passed",
            PlaintextWarning,
            stacklevel=3,
        )
    return True


def is_loopback(address: str) -> bool:
    """Whether a numeric address stays on this machine; an IPv4 address inside IPv6 counts as itself."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


async def _all_loopback(host: str, port: int) -> bool:
    if not host:  # the wildcard
        return False
    try:
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"{host}: {error.strerror or error}") from error
    return all(is_loopback(str(address[0])) for *_, address in found)
