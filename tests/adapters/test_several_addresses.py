"""A name with several addresses: the first address that answers is used, over every transport."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio
import trustme

import muxkit
from muxkit_adapters._addresses import alternating
from tests.adapters._names import Hosts, hosts

SILENT = "127.0.0.2"  # an address of this machine at which nothing listens


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


SCHEMES = ["bpmux+tcp", "bpmux+tls", "bpmux+ws", "bpmux+wss", "e3x+udp", "e3x+dtls", "aqueduct+quic"]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_second_address_is_used_when_the_first_does_not_answer(scheme: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("two.example.org")
    encrypts = scheme.rpartition("+")[2] in ("tls", "wss", "dtls", "quic")
    with (
        certificate.private_key_and_cert_chain_pem.tempfile() as cert,
        authority.cert_pem.tempfile() as ca,
        hosts({"two.example.org": [SILENT, "127.0.0.1"]}),
    ):
        server_tls = muxkit.TLS(cert=cert) if encrypts else None
        async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=server_tls) as server:
            url = server.url.replace("127.0.0.1", "two.example.org")
            async with muxkit.connect(url, tls=muxkit.TLS(ca=ca) if encrypts else None) as session:
                await session.ping()


async def test_a_silent_address_costs_a_quarter_of_a_second() -> None:
    """A UDP port that takes packets and never answers, as behind a firewall that drops them."""
    with socket.socket(type=socket.SOCK_DGRAM) as black_hole, hosts({"two.example.org": [SILENT, "127.0.0.1"]}):
        async with muxkit.open_server(echo, "e3x+udp://127.0.0.1:0") as server:
            port = int(server.url.rpartition(":")[2])
            black_hole.bind((SILENT, port))
            async with muxkit.connect(f"e3x+udp://two.example.org:{port}") as session:
                assert "127.0.0.1" in session.info.peer


async def test_an_error_names_each_address() -> None:
    with hosts({"two.example.org": [SILENT, "127.0.0.1"]}):
        with pytest.raises(muxkit.AllAttemptsFailed, match=r"127\.0\.0\.2:9: .*127\.0\.0\.1:9: "):
            async with muxkit.connect("e3x+udp://two.example.org:9"):
                pass


def test_the_families_of_addresses_alternate() -> None:
    six, four = socket.AF_INET6, socket.AF_INET
    found = [(six, ("::1", 1)), (six, ("::2", 1)), (four, ("127.0.0.1", 1)), (four, ("127.0.0.1", 1))]
    assert alternating(found) == [("::1", 1), ("127.0.0.1", 1), ("::2", 1)]


class CountingHosts(Hosts):
    """Counts how often each name is looked up."""

    def __init__(self, table: Mapping[str, Sequence[str]]) -> None:
        super().__init__(table)
        self.asked: Counter[str] = Counter()

    async def getaddrinfo(self, host: bytes | None, *rest: Any, **more: Any) -> list[Any]:
        self.asked[(host or b"").decode()] += 1
        return await super().getaddrinfo(host, *rest, **more)


PLAINTEXT = ["bpmux+tcp", "bpmux+ws"]


@pytest.mark.parametrize("scheme", PLAINTEXT)
async def test_a_plaintext_host_is_looked_up_once(scheme: str) -> None:
    """The addresses that were found to be loopback addresses are those to which the client connects.

    With a second lookup, a name could lead elsewhere after the check (DNS rebinding).
    """
    hosts = CountingHosts({"one.example.org": [SILENT, "127.0.0.1"]})
    trio.socket.set_custom_hostname_resolver(hosts)
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0") as server:
        async with muxkit.connect(server.url.replace("127.0.0.1", "one.example.org")) as session:
            await session.ping()
    assert hosts.asked["one.example.org"] == 1


async def test_a_race_of_urls_looks_each_plaintext_host_up_once() -> None:
    hosts = CountingHosts({"one.example.org": ["127.0.0.1"], "two.example.org": ["127.0.0.1"]})
    trio.socket.set_custom_hostname_resolver(hosts)
    async with muxkit.open_server(echo, "bpmux+ws://127.0.0.1:0") as server:
        url = server.url.replace("127.0.0.1", "two.example.org")
        async with muxkit.connect(["bpmux+tcp://one.example.org:9", url]) as session:
            await session.ping()
    assert hosts.asked == {"one.example.org": 1, "two.example.org": 1}


async def test_a_race_does_not_wait_for_the_name_of_a_later_url() -> None:
    class NeverAnswering(Hosts):
        async def getaddrinfo(self, host: bytes | None, *rest: Any, **more: Any) -> list[Any]:
            await trio.sleep_forever()
            raise AssertionError

    trio.socket.set_custom_hostname_resolver(NeverAnswering({}))
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
        async with muxkit.connect([server.url, "bpmux+tcp://later.example.org:9"]) as session:
            await session.ping()


async def test_a_host_that_is_not_found_does_not_keep_the_next_one_from_being_tried() -> None:
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
        url = server.url.replace("bpmux+tcp://", "bpmux+tcp://gone.invalid:9,")
        async with muxkit.connect(url) as session:
            await session.ping()


@pytest.mark.parametrize("scheme", PLAINTEXT)
async def test_a_name_that_leads_beyond_loopback_is_refused_in_plaintext(scheme: str) -> None:
    with hosts({"far.example.org": ["127.0.0.1", "192.0.2.1"]}):
        with pytest.raises(ValueError, match=r"'far\.example\.org' is not a loopback address"):
            async with muxkit.connect(f"{scheme}://far.example.org:9"):
                pass
