"""Addresses to listen on or to connect to: `host:port`, `[::1]:80`, a port, or the path of a Unix socket."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from pathlib import PurePosixPath

import attrs

LOOPBACK = "127.0.0.1"  # of a port alone
HOST_MOST = 255  # characters, as in DNS
PATH_MOST = 103  # bytes; the kernels differ, and this fits all of them
PORT_MOST = 65_535
FORM = "expected host:port, [IPv6]:port, a port, or the path of a Unix socket"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_ZONE = re.compile(r"[A-Za-z0-9._-]{1,15}")  # as the kernels name their interfaces
# Labels have at most 63 characters, as in DNS; Python raises UnicodeError when it looks up a name with a longer one.
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@attrs.frozen
class Address:
    """A host with its port, or a path, and never both."""

    host: str = ""
    """A name in lower case and ASCII, or an IP address without brackets."""
    port: int = 0
    path: str = ""

    @property
    def ip(self) -> IPAddress | None:
        """The host, if it is an IP address."""
        return ip_of(self.host)

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(1024)
def ip_of(host: str) -> IPAddress | None:
    """Return the host as an IP address, or None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(1024)
def parse_address(text: str, *, any_port: bool = False) -> Address:
    """Parse an address. Raises ValueError that says what was expected.

    A port alone means that port of 127.0.0.1. `any_port` allows port 0, for which a listener gets a free port.
    """
    shown = ascii(text[:80])
    if "/" in text:
        return Address(path=checked_path(text))
    host, colon, digits = text.rpartition(":")
    if not colon:
        host = LOOPBACK
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"address {shown}: brackets are for IPv6; {FORM}")
    elif ":" in host:
        raise ValueError(f"address {shown}: an IPv6 host needs brackets; {FORM}")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5):
        raise ValueError(f"address {shown}: {FORM}")
    port = int(digits)
    if not (0 if any_port else 1) <= port <= PORT_MOST:
        raise ValueError(f"address {shown}: expected a port from {0 if any_port else 1} to {PORT_MOST}")
    return Address(checked_host(host), port)


def checked_host(host: str) -> str:
    """Return a host in the form in which it is compared and looked up: lower case, ASCII, without a trailing dot."""
    found = ip_of(host)
    if found is not None:
        zone = found.scope_id if isinstance(found, ipaddress.IPv6Address) else None
        if zone is not None and not _ZONE.fullmatch(zone):  # Python takes any text for one
            raise ValueError(f"{host[:80]!a} has no interface name after its %")
        return str(found)
    name = host.rstrip(".").lower() if host.count(".") != len(host) else ""
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii").lower()
        except UnicodeError:
            name = ""
    if len(name) > HOST_MOST or not _NAME.fullmatch(name):
        raise ValueError(f"{host[:80]!a} isn't a host name; {FORM}")
    return name


def checked_path(path: str) -> str:
    """Return the valid path of a Unix socket. `..` is rejected, because it could leave the folder that a rule names."""
    if not path.isprintable() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path {path[:80]!a}: expected no .. and no control characters")
    if len(path.encode()) > PATH_MOST:
        raise ValueError(f"path {path[:80]!a}: it has {len(path.encode())} bytes: expected at most {PATH_MOST}")
    return str(PurePosixPath(path))


def without_udp(text: str) -> tuple[str, bool]:
    """Return a forward without the `/udp` after its last port, and whether that was present."""
    found = re.fullmatch(r"(.*[:=]\d+)/udp", text)
    return (text, False) if found is None else (found[1], True)


def parse_forward(text: str) -> tuple[Address, Address]:
    """Parse `BIND:TARGET` or `BIND=TARGET`, as in `ssh -L`: the address to listen on, and the address that the other
    side connects to.

    Examples: `8080:db:5432`, `[::1]:8080:db:5432`, `8080:/run/app.sock`, `/run/db.sock=db:5432`, `8080:3000`.
    """
    bind, equals, target = text.partition("=")
    if not equals:
        parts = re.findall(r"(?:\[[^\]]*\]|[^:\[\]])+", text)
        if ":".join(parts) != text or not 2 <= len(parts) <= 4:
            raise ValueError(f"forward {text[:80]!a}: expected BIND:TARGET, such as 8080:db:5432")
        own = 1 if "/" in parts[0] or parts[0].isdigit() else 2  # parts of BIND
        bind, target = ":".join(parts[:own]), ":".join(parts[own:])
    return parse_address(bind, any_port=True), parse_address(target)
