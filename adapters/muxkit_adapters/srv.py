"""SRV records: a URL such as `bpmux+tls+srv://example.org` names a domain, and the DNS names its servers.

The suffix `+srv` belongs to the transport, because it replaces `host:port` by a domain and leaves everything else as it
is. (An option would leave a URL that only works together with it.) For `bpmux+tls+srv://example.org`, the client looks
up `_bpmux._tcp.example.org`; transports over UDP look up `_udp`. A domain that begins with an underscore is looked up
as it is.

RFC 2782 orders the records. Servers with a lower priority number come first, and the others are tried only after all of
these have failed. The order of the servers of one priority is random, and their weights are the probabilities.
`muxkit.connect` races them, each with a head start of 250 ms.

The certificate of the server has to be valid for the domain in the URL, and not for the host in the record. DNS isn't
authenticated, so an attacker who can forge its answers could otherwise name another host.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

import attrs

from muxkit.runtime import Candidate, Choosing, ExtraNeeded, LinkKind, Transport, protect_package

from ._addresses import join_host_port

try:
    import dns.asyncbackend
    import dns.asyncresolver
    import dns.exception
    import dns.rdatatype
    import dns.resolver
    from dns.rdtypes.IN.SRV import SRV
except ImportError as _missing:
    raise ExtraNeeded("srv", "dns") from _missing

__all__ = ["SrvTransport", "by_weight"]

FORM: Final = "expected a domain without a port, such as bpmux+tls+srv://example.org"
NO_SERVICE: Final = "."  # the target with which a domain declares that it doesn't have the service


@attrs.frozen
class Record:
    """The address of one server, and its place in the order of attempts."""

    priority: int
    weight: int
    host: str
    port: int


_ONLY_CLIENTS = "+srv is for clients: serve at an address such as bpmux+tls://0.0.0.0:7000, and publish it in the DNS"


class SrvTransport:
    """Wraps another transport and looks its servers up in the DNS."""

    def __init__(self, inner: Transport, link: LinkKind) -> None:
        self.link: LinkKind = link
        self._inner = inner

    def options(self, side: Literal["client", "server"]) -> frozenset[str]:
        """Return the names of the options that one side accepts: those of the transport, and `resolver`."""
        declared: Callable[[str], frozenset[str]] | None = getattr(self._inner, "options", None)
        return frozenset({"resolver"}).union(declared(side) if declared is not None else ())

    def connect(
        self, address: str, *, resolver: dns.asyncresolver.Resolver | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Any]:
        return self._inner.connect(address, **options)

    async def serve(self, handler: Callable[[Any], Awaitable[None]], address: str, **options: Any) -> None:
        raise ValueError(_ONLY_CLIENTS)

    async def candidates(
        self, address: str, *, protocol: str, options: Mapping[str, Any]
    ) -> Sequence[Sequence[Candidate]]:
        """Look up the servers of a domain. Return them by priority, in the order in which to try them.

        `options["resolver"]` is a `dns.asyncresolver.Resolver` to use instead of the system's settings.

        Raises:
            ValueError: if the address isn't a domain.
            OSError: if the domain has no SRV records for the protocol.
        """
        domain, slash, path = address.partition("/")
        if not domain or set(domain) & set(":@?#[], "):
            raise ValueError(f"address {address!r}: {FORM}")
        service = f"_{protocol}._{'tcp' if self.link == 'stream' else 'udp'}."
        asked = domain if domain.startswith("_") else f"{service}{domain}"
        named: dict[str, str] = {}
        if "server_hostname" in self.options("client"):
            named["server_hostname"] = ".".join(part for part in domain.split(".") if not part.startswith("_"))
        groups: list[Sequence[Candidate]] = []
        for group in in_order(await look_up(asked, options.get("resolver"))):
            candidates: list[Candidate] = []
            for record in group:
                where = f"{join_host_port(record.host, record.port)}{slash}{path}"
                candidates += await self._each_address(Candidate(where, named), protocol, options)
            groups.append(candidates)
        return groups

    async def _each_address(
        self, candidate: Candidate, protocol: str, options: Mapping[str, Any]
    ) -> Sequence[Candidate]:
        """Return the candidate, or the addresses of its host if the transport can't race these on its own."""
        if not isinstance(self._inner, Choosing):
            return [candidate]
        try:
            found = await self._inner.candidates(candidate.address, protocol=protocol, options=options)
        except OSError:
            return [candidate]  # the attempt will fail with the same error, and the others continue
        return [attrs.evolve(each, options={**each.options, **candidate.options}) for group in found for each in group]


async def look_up(name: str, resolver: dns.asyncresolver.Resolver | None = None) -> list[Record]:
    """Return the SRV records of a name. Raises OSError if there are none, or TimeoutError."""
    asking = resolver or dns.asyncresolver.Resolver()
    try:
        answer = await asking.resolve(name, dns.rdatatype.SRV, backend=dns.asyncbackend.get_backend("trio"))
    except dns.exception.Timeout as error:
        raise TimeoutError(f"SRV {name}: the DNS didn't answer within {asking.lifetime:g} s") from error
    except dns.exception.DNSException as error:
        absent = isinstance(error, (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer))
        what = "the DNS has no such record" if absent else str(error) or type(error).__name__
        advice = ". Check the name, or give host:port without +srv" if absent else ""
        raise OSError(f"SRV {name}: {what}{advice}") from error
    records = [
        Record(each.priority, each.weight, each.target.to_text(omit_final_dot=True), each.port)
        for each in answer
        if isinstance(each, SRV) and each.target.to_text() != NO_SERVICE
    ]
    if not records:
        raise OSError(f"SRV {name}: the domain says that it doesn't have this service")
    return records


def in_order(records: Iterable[Record], dice: random.Random | None = None) -> list[list[Record]]:
    """Group records by priority, starting with the lowest number, and order each group with `by_weight`."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.priority, []).append(record)
    return [by_weight(group, dice) for _, group in sorted(groups.items())]


def by_weight(records: Iterable[Record], dice: random.Random | None = None) -> list[Record]:
    """Order the records of one priority randomly, as in RFC 2782.

    The probability that a record comes first is proportional to its weight. Records of weight 0 are considered first in
    each draw, which gives them a very small probability.
    """
    left = sorted(records, key=lambda record: record.weight)
    ordered: list[Record] = []
    while left:
        drawn = (dice or random).randint(0, sum(record.weight for record in left))
        reached = 0
        for index, record in enumerate(left):
            reached += record.weight
            if reached >= drawn:
                ordered.append(left.pop(index))
                break
    return ordered


protect_package(__name__)
