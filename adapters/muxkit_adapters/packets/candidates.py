"""The addresses of a host, for packet transports whose sessions `muxkit.connect` races.

Opening a UDP link doesn't show whether a peer exists at the address. Therefore `muxkit.connect` opens a session on each
address, and keeps the first one on which the peer answers. `tcp`, `tls`, `ws` and `wss` don't need this, because they
race the addresses of a host when they connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from muxkit.runtime import Candidate

from .._addresses import LinkT, Transport, alternating, hosts_and_ports, is_numeric, join_host_port
from .options import Address
from .sockets import resolve

LOOKUP_TIMEOUT: Final = 30.0  # s to resolve a host


@attrs.frozen
class PacketTransport(Transport[LinkT]):
    """A transport over UDP."""

    async def candidates(
        self, address: str, *, protocol: str, options: Mapping[str, Any]
    ) -> Sequence[Sequence[Candidate]]:
        """Resolve the hosts. An address without a name, or with a single result, is returned unchanged.

        Raises:
            OSError: if no host can be resolved.
        """
        places = hosts_and_ports(address)
        if all(is_numeric(host) for host, _ in places):
            return [[Candidate(join_host_port(*place)) for place in places]]
        found: list[Candidate] = []
        failures: list[OSError] = []
        for host, port in places:
            try:
                addresses = await self._look_up(host, port, options.get("connect_timeout") or LOOKUP_TIMEOUT)
            except OSError as error:
                failures.append(error)
            else:
                named = {"server_hostname": host} if "server_hostname" in self.options("client") else {}
                several = [Candidate(_shown(each), named) for each in addresses]
                found += several if len(several) > 1 else [Candidate(join_host_port(host, port))]
        if not found:
            raise failures[0]
        return [found]

    async def _look_up(self, host: str, port: int, within: float) -> list[Address]:
        try:
            with trio.fail_after(within):
                return alternating(await resolve(self.scheme, host, port))
        except trio.TooSlowError:
            where = f"{self.scheme} {join_host_port(host, port)}"
            raise TimeoutError(f"{where}: no address within {within:g} s (connect_timeout=)") from None


def _shown(address: Address) -> str:
    """Return an address as `host:port`, with the interface of a link-local one."""
    host, port = address[:2]
    zone = address[3] if len(address) > 3 else 0
    return join_host_port(f"{host}%{zone}" if zone and "%" not in host else host, port)
