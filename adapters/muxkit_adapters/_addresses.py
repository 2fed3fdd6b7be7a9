"""Addresses: `host:port` as text, transports found by a URL, and whether plaintext to one leaves this machine."""

from __future__ import annotations

import ipaddress
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache
from inspect import signature
from typing import Any, Generic, Literal, TypeVar

import attrs
import trio

from muxkit import Limits
from muxkit.runtime import LinkKind, check_options

from ._errors import PlaintextWarning, failed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LinkT = TypeVar("LinkT")

_warned: set[str] = set()  # kinds of transports that have warned in this process

NOT_OPTIONS = {"limits", "task_status", "host", "path"}  # they come by another way, or in the address
CERTIFICATE_NEEDED = "a server needs its certificate and key: tls=muxkit.TLS(cert='cert.pem', key='key.pem')"
CERTIFICATE_REQUIRED = (
    "the peer refused the connection: certificate required; give it one: tls=muxkit.TLS(cert=…, key=…)"
)
FORM = "expected host:port, such as 127.0.0.1:7000, [::1]:7000 or localhost:7000"


@attrs.frozen
class Transport(Generic[LinkT]):
    """What `muxkit.connect` and `muxkit.serve` find by a URL: `connect` and `serve` of one of the modules here.

    `client` and `server` read the address and return keywords for them; the other keywords are passed on as they are.
    """

    scheme: str
    _connect: Callable[..., AbstractAsyncContextManager[LinkT]]
    _serve: Callable[..., Awaitable[None]]
    client: Callable[[str], dict[str, object]]
    server: Callable[[str], dict[str, object]]
    link: LinkKind = "stream"
    keywords: tuple[type, ...] = ()
    """Typed dictionaries of the keywords that are passed on: the first by `connect`, all by `serve`."""
    needed: tuple[str, ...] = ()
    """Keywords with the certificate of a server, which needs one of them."""
    places: Callable[[str], Sequence[tuple[str, int]]] | None = None
    """Reads a client's address as hosts and ports, if the transport is plaintext."""
    secure: str = ""
    """The transport to use in its place beyond loopback."""

    def options(self, side: Literal["client", "server"]) -> frozenset[str]:
        """Return the names of the options that one side takes."""
        function, passed_on = (self._connect, self.keywords[:1]) if side == "client" else (self._serve, self.keywords)
        return _options(function, passed_on)

    async def check_client(self, address: str, *, insecure: bool = False) -> None:
        """Raise ValueError for an address that `connect` would refuse because plaintext would leave this machine.

        A host that cannot be looked up at the moment passes: `connect` looks again.
        """
        if self.places is None or insecure:
            return
        for host, port in self.places(address):
            with suppress(OSError):
                await exposed(self.scheme, host, port, insecure=False, secure=self.secure)

    def connect(self, address: str, **options: Any) -> AbstractAsyncContextManager[LinkT]:
        check_options(self.scheme, options, self.options("client") | NOT_OPTIONS)
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
        check_options(self.scheme, options, self.options("server"))
        if self.needed and all(options.get(name) is None for name in self.needed):
            raise ValueError(f"{self.scheme}://{address}: {CERTIFICATE_NEEDED}")
        await self._serve(handler, limits=limits, task_status=task_status, **self.server(address), **options)


@cache  # each connection is checked against them
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
    """Read `host:port`."""
    host, port = parse_host_port(address)
    return {"host": host, "port": port}


def several_places(address: str) -> dict[str, object]:
    """Read one or more `host:port`, separated by commas, to be tried in that order."""
    return {"host": hosts_and_ports(address)}


def hosts_and_ports(address: str) -> list[tuple[str, int]]:
    """Read one or more `host:port`, separated by commas."""
    return [parse_host_port(part.strip()) for part in address.split(",")]


def parse_host_port(address: str, *, default_port: int | None = None, form: str = FORM) -> tuple[str, int]:
    """Split `host:port`; raises ValueError that says what was expected."""
    if "@" in address:  # what stands before it may be a password
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
    """Write `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def exposed(
    kind: str, host: str, port: int, *, insecure: bool, secure: str, stays_here: bool | None = None
) -> bool:
    """Return True if plaintext to or on `host` leaves this machine.

    Raises ValueError when it would and `insecure` is not set; `secure` names the transport to use instead. Without
    `stays_here` the addresses of the host decide.
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
    """Return True if a numeric address stays on this machine; an IPv4 address inside IPv6 counts as IPv4."""
    parsed = _numeric(address.partition("%")[0])
    return parsed is not None and _stays_here(parsed)


def is_numeric(host: str) -> bool:
    """Return True for an IP address, False for a name."""
    return _numeric(host) is not None


def _numeric(host: str) -> Address | None:
    """Return the address that `host` is, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _stays_here(parsed: Address) -> bool:
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


async def _all_loopback(kind: str, host: str, port: int) -> bool:
    if not host:  # the wildcard
        return False
    if (numeric := _numeric(host)) is not None:
        return _stays_here(numeric)
    try:
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise failed(f"{kind} {join_host_port(host, port)}", error) from error
    return all(is_loopback(str(address[0])) for *_, address in found)
