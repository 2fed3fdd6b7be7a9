"""Names for tests: hosts with addresses of our choice, and a DNS server on loopback with records of our choice."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import trio

from muxkit.runtime import background


class Hosts(trio.abc.HostnameResolver):
    """Resolves names to the addresses in a table, and every other name as usual."""

    def __init__(self, table: Mapping[str, Sequence[str]]) -> None:
        self._table = table

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        name = (host or b"").decode()
        found: list[Any] = []
        for address in self._table.get(name, [name]):
            found += socket.getaddrinfo(address, port, family, type, proto, flags)
        return found

    async def getnameinfo(self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        return socket.getnameinfo(sockaddr, flags)


@contextmanager
def hosts(table: Mapping[str, Sequence[str]]) -> Generator[None]:
    """Give names these addresses, in this order, while the block runs."""
    before = trio.socket.set_custom_hostname_resolver(Hosts(table))
    try:
        yield
    finally:
        trio.socket.set_custom_hostname_resolver(before)


@asynccontextmanager
async def dns_server(
    records: Mapping[str, Sequence[str]], *, answers: bool = True
) -> AsyncGenerator[dns.asyncresolver.Resolver]:
    """Serve SRV records ("priority weight port target") over UDP, and give a resolver that asks this server.

    With `answers=False` it takes queries and says nothing.
    """
    sock = trio.socket.socket(type=socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = sock.getsockname()[1]

    async def answer() -> None:
        while True:
            data, client = await sock.recvfrom(4096)
            if not answers:
                continue
            query = dns.message.from_wire(data)
            reply = dns.message.make_response(query)
            name = query.question[0].name.to_text(omit_final_dot=True)
            if name not in records:
                reply.set_rcode(dns.rcode.NXDOMAIN)
            elif query.question[0].rdtype == dns.rdatatype.SRV:
                reply.answer.append(dns.rrset.from_text_list(query.question[0].name, 60, "IN", "SRV", records[name]))
            await sock.sendto(reply.to_wire(), client)

    with sock:
        async with background() as nursery:
            nursery.start_soon(answer)
            yield resolver
