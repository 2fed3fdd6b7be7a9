"""Allow lists: the targets that a server connects to for its clients, and the addresses it listens on for them.

A rule is `HOST:PORTS`, a port, or the path of a Unix socket:

    db.internal@10.0.0.0/8:5432      that name, if it resolves into that network
    *.example.com:80,443             these names, if they resolve to public addresses
    10.1.0.0/16:8000-8100            these addresses, whatever name was requested
    [fd00::/8]:*                     the same, every port
    *:443                            every public name and address
    5432                             a port of this machine: loopback:5432
    /run/postgresql/*                Unix sockets in a folder
    db.internal@10.0.0.0/8:53/udp    UDP, which other rules don't allow
    !10.1.0.1:*                      never this address, by TCP or UDP, whatever the other rules allow

In place of an address or a network, a rule can name `loopback`, `private`, `link-local` or `any`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import attrs

from muxkit.forward.addresses import PORT_MOST, Address, IPAddress, checked_host, checked_path, ip_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

UDP = "/udp"
FORM = "expected HOST:PORTS, such as *.example.com:443 or 10.0.0.0/8:8000-8100, a port, or the path of a Unix socket"

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_WORDS = {
    "loopback": _LOOPBACK,
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
    "link-local": ("169.254.0.0/16", "fe80::/10"),
    "any": ("0.0.0.0/0", "::/0"),
}
NETWORKS = {word: tuple(map(ipaddress.ip_network, each)) for word, each in _WORDS.items()}

# IPv6 addresses that stand for an IPv4 one, which is the one that is reached.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


def plain(address: IPAddress) -> IPAddress:
    """Return the address that packets reach: an IPv4 address written as IPv6 counts as IPv4."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return ipaddress.IPv6Address(int(address))  # without its scope


def is_public(address: IPAddress) -> bool:
    """Return True for an address of the Internet: not of this machine, not of a private network, and not multicast."""
    real = plain(address)
    if isinstance(real, ipaddress.IPv6Address) and real not in _GLOBAL_UNICAST:
        return False  # Python counts site-local addresses as global
    return real.is_global and not (real.is_multicast or real.is_reserved or real.is_unspecified)


def _judged(address: IPAddress) -> IPAddress:
    """Return the address that a rule has to allow, which is the one that is reached.

    NAT64 and 6to4 translate to public IPv4 addresses only (RFC 6052 section 3.1, RFC 3056 section 2). An address that
    contains another one doesn't reach this machine or a private network, but something beyond the translator.
    """
    real = plain(address)
    is_same = isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None
    return real if is_same or is_public(real) else ipaddress.IPv6Address(int(address))


@attrs.frozen
class Rule:
    """One entry of an allow list, parsed by `parse_rule`."""

    text: str
    denies: bool
    names: str | None = None
    """A pattern of names, or None if the rule is about addresses or paths."""
    networks: tuple[Network, ...] | None = None
    """The networks that the address must be in. None means every public address."""
    ports: tuple[range, ...] = ()
    path: str | None = None
    udp: bool = False
    """True for a rule about UDP only. Other rules allow TCP, and deny both."""

    def is_about(self, *, udp: bool) -> bool:
        return self.udp == udp or (self.denies and not self.udp)

    def has_port(self, port: int) -> bool:
        return any(port in each for each in self.ports)

    def matches(self, name: str | None, address: IPAddress, port: int) -> bool:
        """Return True if this rule applies to an address. `name` is the requested name, or None."""
        if self.path is not None or not self.has_port(port):
            return False
        if self.names is not None and self.names != "*" and (name is None or not fnmatchcase(name, self.names)):
            return False
        if self.networks is None:
            return self.denies or is_public(address)
        return any(address.version == each.version and address in each for each in self.networks)

    def is_for(self, name: str | None, address: IPAddress, port: int) -> bool:
        """Return True if this rule applies to what an address reaches. A denial also applies to its written form."""
        if not self.denies:
            return self.matches(name, _judged(address), port)
        return self.matches(name, address, port) or self.matches(name, plain(address), port)

    def matches_path(self, path: str) -> bool:
        """Compare component by component: `*` matches one name, and never folders below it."""
        if self.path is None:
            return False
        parts, patterns = PurePosixPath(path).parts, PurePosixPath(self.path).parts
        return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


class AllowList:
    """A list of rules. It allows what at least one rule allows and no rule with `!` denies."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self.rules: tuple[Rule, ...] = tuple(rule for text in rules for rule in parse_rule(text))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __repr__(self) -> str:
        return f"AllowList({[rule.text for rule in self.rules]})"

    def allows(self, name: str | None, address: IPAddress, port: int, *, udp: bool = False) -> bool:
        """Return True if this address may be reached. `name` is the requested name, or None for an address."""
        return self._decide([rule for rule in self._about(udp=udp) if rule.is_for(name, address, port)])

    def allows_path(self, path: str) -> bool:
        return self._decide([rule for rule in self.rules if rule.matches_path(path)])

    def may_resolve(self, name: str, port: int, *, udp: bool = False) -> bool:
        """Return True if a name could resolve to an allowed address. Otherwise its name server isn't asked."""
        about = [rule for rule in self._about(udp=udp) if rule.path is None and rule.has_port(port)]
        named = [rule for rule in about if rule.names is None or fnmatchcase(name, rule.names)]
        refused = any(rule.denies and rule.names is not None and rule.networks is None for rule in named)
        return not refused and any(not rule.denies for rule in named)

    def admits(self, target: Address) -> bool:
        """Return True if a client may request this. What a name resolves to is checked after it was resolved."""
        if target.path:
            return self.allows_path(target.path)
        if target.ip is None:
            return self.may_resolve(target.host, target.port)
        public_or_not = [
            rule
            for rule in self._about(udp=False)
            if rule.is_for(None, target.ip, target.port)
            or (rule.names == "*" and rule.networks is None and rule.has_port(target.port))
        ]
        return self._decide(public_or_not)

    def _about(self, *, udp: bool) -> list[Rule]:
        return [rule for rule in self.rules if rule.is_about(udp=udp)]

    def _decide(self, matching: list[Rule]) -> bool:
        return bool(matching) and not any(rule.denies for rule in matching)


def parse_rule(text: str) -> list[Rule]:
    """Parse a rule. A rule that names this machine becomes two. Raises ValueError that says what was expected."""
    denies = text.startswith("!")
    rest = text.removeprefix("!").strip()
    if rest.startswith("/"):
        return [Rule(text, denies, path=checked_path(rest))]
    udp = rest.endswith(UDP)
    host, colon, ports = rest.removesuffix(UDP).rpartition(":")
    try:
        spans = tuple(map(_span, ports.split(",")))
        if not colon:
            return [Rule(text, denies, networks=NETWORKS["loopback"], ports=spans, udp=udp)]
        name, at, within = host.partition("@")
        if at:
            return [Rule(text, denies, names=_pattern(name), networks=_networks(within), ports=spans, udp=udp)]
        if _is_network(host):
            return [Rule(text, denies, networks=_networks(host), ports=spans, udp=udp)]
        # `localhost` is this machine by its standard, so nothing else need say so.
        within_loopback = NETWORKS["loopback"] if host.lower() == "localhost" else None
        return [Rule(text, denies, names=_pattern(host), networks=within_loopback, ports=spans, udp=udp)]
    except ValueError as error:
        raise ValueError(f"rule {text[:80]!a}: {error}; {FORM}") from None


def _span(text: str) -> range:
    if text == "*":
        return range(PORT_MOST + 1)
    first, dash, last = text.partition("-")
    if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in (first, last if dash else first)):
        raise ValueError(f"{text!a} isn't a port or a range of ports")
    span = range(int(first), int(last if dash else first) + 1)
    if not span or span[-1] > PORT_MOST:
        raise ValueError(f"{text!a} isn't a range of ports from 0 to {PORT_MOST}")
    return span


def _is_network(host: str) -> bool:
    return host in NETWORKS or "/" in host or host.startswith("[") or ip_of(host) is not None


def _networks(text: str) -> tuple[Network, ...]:
    found = NETWORKS.get(text)
    return found or (ipaddress.ip_network(text.removeprefix("[").removesuffix("]")),)


def _pattern(name: str) -> str:
    """Validate a pattern like a name, with `*` and `?` as wildcards."""
    plain_name = name.replace("*", "x").replace("?", "x")
    checked_host(plain_name)
    if not name.isascii():
        return checked_host(name)
    return name.lower().rstrip(".")
