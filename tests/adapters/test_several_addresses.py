"""A name with several addresses: the first address that answers is used, over every transport."""

from __future__ import annotations

import socket

import pytest
import trustme

import muxkit
from muxkit_adapters.packets.candidates import alternating
from tests.adapters._names import hosts

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
