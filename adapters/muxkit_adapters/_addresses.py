"""Addresses: parsing `host:port`, finding transports by a URL, and checking whether plaintext leaves this machine.

Every transport module has a `Transport`, through which `muxkit.connect` and `muxkit.serve` call it. `exposed`
guarantees that no transport sends plaintext beyond loopback unless the caller passes `insecure=True`.
"""

from __future__ import annotations

import ipaddress
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from inspect import signature
from itertools import zip_longest
from typing import Any, Generic, Literal, TypeVar

import attrs
import trio

from muxkit import Limits
from muxkit.runtime import LinkKind, check_options

from ._errors import PlaintextWarning, failed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LinkT = TypeVar("LinkT")
AddressT = TypeVar("AddressT")

_warned: set[str] = set()  # transports that have already warned in this process

NOT_OPTIONS = {"limits", "task_status", "host", "path"}  # these are passed separately or are part of the address
CERTIFICATE_NEEDED = "a server needs its certificate and key: tls=muxkit.TLS(cert='cert.pem', key='key.pem')"
CERTIFICATE_REQUIRED = (
    "the peer refused the connection: certificate required; give it one: tls=muxkit.TLS(cert=…, key=…)"
)
FORM = "expected host:port, such as 127.0.0.1:7000, [::1]:7000 or localhost:7000"


@attrs.frozen
class Transport(Generic[LinkT]):
    """The entry that `muxkit.connect` and `muxkit.serve` find by a URL, for one of the modules here.

    `client` and `server` parse the address of a URL, and return keywords for the module's `connect` and `serve`. Other
    keywords are passed on unchanged.
    """

    scheme: str
    _connect: Callable[..., AbstractAsyncContextManager[LinkT]]
    _serve: Callable[..., Awaitable[None]]
    client: Callable[[str], dict[str, object]]
    server: Callable[[str], dict[str, object]]
    link: LinkKind = "stream"
    keywords: tuple[type, ...] = ()
    """Typed dictionaries of the keywords that are passed on. `connect` accepts the first, and `serve` all of them."""
    needed: tuple[str, ...] = ()
    """The keywords that can carry a server's certificate. A server needs one of them."""
    places: Callable[[str], Sequence[tuple[str, int]]] | None = None
    """Parses a client's address into hosts and ports, if the transport is plaintext."""
    secure: str = ""
    """The encrypted transport to use instead beyond loopback."""

    def options(self, side: Literal["client", "server"]) -> frozenset[str]:
        """Return the names of the options that one side accepts."""
        function, passed_on = (self._connect, self.keywords[:1]) if side == "client" else (self._serve, self.keywords)
        return _options(function, passed_on)

    async def check_client(self, address: str, *, insecure: bool = False) -> None:
        """Raise ValueError if `connect` would refuse this address because plaintext would leave this machine.

        A host that has to be looked up passes. `connect` looks it up once, and checks the addresses to which it then
        connects.
        """
        if self.places is None or insecure:
            return
        for host, port in self.places(address):
            if is_numeric(host):
                await exposed(self.scheme, host, port, insecure=False, secure=self.secure)

    def connect(self, address: str, **options: Any) -> AbstractAsyncContextManager[LinkT]:
        """Return a context manager that connects to an address. Raises ValueError for an invalid address or option."""
        check_options(self.scheme, options.keys() - NOT_OPTIONS, self.options("client"))
        return self._connect(**self.client(address), **options)

    async def serve(
        self,
        handler: Callable[[LinkT], Awaitable[None]],
        address: str,
        *,
        limits: Limits,
        task_status: trio.TaskStatus[list[str]],
        **options: Any,
    ) -> None:
        """Serve an address until cancelled. Raises ValueError for an invalid address or option."""
        check_options(self.scheme, options, self.options("server"))
        if self.needed and all(options.get(name) is None for name in self.needed):
            raise ValueError(f"{self.scheme}://{address}: {CERTIFICATE_NEEDED}")
        await self._serve(handler, limits=limits, task_status=task_status, **self.server(address), **options)


@cache  # every connection is checked against them
def _options(function: Callable[..., object], passed_on: tuple[type, ...]) -> frozenset[str]:
    named = signature(function).parameters.values()
    names = {one.name for one in named if one.kind is one.KEYWORD_ONLY}
    return frozenset(names.union(*(kind.__annotations__ for kind in passed_on)) - NOT_OPTIONS)


def one_of(**options: object) -> None:
    """Raise ValueError if more than one of these keywords was given."""
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say the same thing: give one of them")


def one_place(address: str) -> dict[str, object]:
    """Parse `host:port` into keywords."""
    host, port = parse_host_port(address)
    return {"host": host, "port": port}


def several_places(address: str) -> dict[str, object]:
    """Parse one or more `host:port`, separated by commas, into keywords. They are tried in this order."""
    return {"host": hosts_and_ports(address)}


def hosts_and_ports(address: str) -> list[tuple[str, int]]:
    """Parse one or more `host:port`, separated by commas."""
    return [parse_host_port(part.strip()) for part in address.split(",")]


def parse_host_port(address: str, *, default_port: int | None = None, form: str = FORM) -> tuple[str, int]:
    """Split `host:port`. An IPv6 host needs brackets.

    Args:
        address: the text.
        default_port: the port to use if the text has none. Without it, a port is required.
        form: the description of valid addresses for error texts.

    Raises:
        ValueError: if the text is invalid. The error says what was expected.
    """
    if "@" in address:  # the part before it may be a password, so the error must not quote the address
        raise ValueError(f"an address has no user and no password, and there is an '@' in it; {form}")
    host, bracket, rest = address.partition("]")
    if bracket:
        host, colon, digits = host.removeprefix("["), rest[:1], rest[1:]
        if not address.startswith("[") or ":" not in host or colon not in ("", ":"):
            raise ValueError(f"address {address!r}: {form}")
    else:
        host, colon, digits = address.rpartition(":") if ":" in address else (address, "", "")
        if ":" in host:
            raise ValueError(f"address {address!r}: an IPv6 host needs brackets; {form}")
    if "/" in address:
        raise ValueError(f"address {address!r}: expected no path, which only ws and wss have; {form}")
    if not host or set(host) & set("?#@[] "):
        raise ValueError(f"address {address!r}: {form}")
    if not colon and default_port is not None:
        return host, default_port
    if not digits:
        raise ValueError(f"address {address!r}: the port is missing; {form}")
    if not (digits.isascii() and digits.isdigit() and int(digits) <= 65_535):
        raise ValueError(f"address {address!r}: the port must be a number up to 65535; {form}")
    return host, int(digits)


def join_host_port(host: str, port: int) -> str:
    """Format `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def exposed(
    kind: str, host: str, port: int, *, insecure: bool, secure: str, stays_here: bool | None = None
) -> bool:
    """Return True if plaintext to `host`, or from a server on `host`, leaves this machine.

    The first such use of each transport issues a `PlaintextWarning`.

    Args:
        kind: the transport, for error texts.
        host: the host. An empty host is the wildcard address, which leaves this machine.
        port: the port.
        insecure: whether the caller allows plaintext beyond this machine.
        secure: the encrypted transport that the error text recommends.
        stays_here: the answer, if the caller knows it. Otherwise the addresses of the host decide.

    Raises:
        ValueError: if plaintext would leave this machine and `insecure` isn't set.
        OSError: if the host can't be resolved.
    """
    if stays_here if stays_here is not None else await _all_loopback(kind, host, port):
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
    """Return True if a numeric address is a loopback address. An IPv4 address mapped into IPv6 counts as IPv4."""
    parsed = _numeric(address.partition("%")[0])
    return parsed is not None and _stays_here(parsed)


def is_numeric(host: str) -> bool:
    """Return True for an IP address, and False for a name."""
    return _numeric(host) is not None


def _numeric(host: str) -> Address | None:
    """Return the IP address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _stays_here(parsed: Address) -> bool:
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


async def _all_loopback(kind: str, host: str, port: int) -> bool:
    if not host:  # the wildcard address
        return False
    try:
        return all(map(is_loopback, await look_up(host, port)))
    except OSError as error:
        raise failed(f"{kind} {join_host_port(host, port)}", error) from error


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host for TCP, in the order in which to try them. Raises OSError if there are none."""
    if is_numeric(host):
        return [host]
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    return alternating([(family, str(address[0])) for family, _, _, _, address in found])


def alternating(found: Sequence[tuple[int, AddressT]]) -> list[AddressT]:
    """Order the addresses of a host so that their families alternate, as RFC 8305, section 4, says.

    The first one stays first. If one family doesn't work on this network, every second attempt uses the other.
    """
    first = [address for family, address in found if family == found[0][0]]
    others = [address for family, address in found if family != found[0][0]]
    pairs = zip_longest(first, others)
    return [*dict.fromkeys(address for pair in pairs for address in pair if address is not None)]
