"""SRV records, asked of a DNS server on loopback, and real servers where they point."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
import trustme

import muxkit
from muxkit_adapters.srv import Record, by_weight, in_order
from tests.adapters._names import dns_server, hosts


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def port_of(server: muxkit.Server) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


async def test_the_server_of_a_domain_is_found() -> None:
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
        records = {"_bpmux._tcp.example.org": [f"10 0 {port_of(server)} one.example.org."]}
        async with dns_server(records) as resolver:
            with hosts({"one.example.org": ["127.0.0.1"]}):
                async with muxkit.connect("bpmux+tcp+srv://example.org", resolver=resolver) as session:
                    await session.ping()


@pytest.mark.parametrize(
    ("served", "record", "url"),
    [
        ("bpmux+tcp", "_chat._tcp.example.org", "bpmux+tcp+srv://_chat._tcp.example.org"),
        ("e3x+udp", "_e3x._udp.example.org", "e3x+udp+srv://example.org"),
    ],
    ids=["a name with underscores as it is", "packets as udp"],
)
async def test_the_name_that_is_looked_up_follows_from_the_url(served: str, record: str, url: str) -> None:
    async with muxkit.open_server(echo, f"{served}://127.0.0.1:0") as server:
        async with dns_server({record: [f"10 0 {port_of(server)} localhost."]}) as resolver:
            async with muxkit.connect(url, resolver=resolver) as session:
                await session.ping()


async def test_a_later_priority_is_used_when_the_first_is_down() -> None:
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
        records = {"_bpmux._tcp.example.org": [f"20 0 {port_of(server)} localhost.", "10 0 1 localhost."]}
        async with dns_server(records) as resolver:
            async with muxkit.connect("bpmux+tcp+srv://example.org", resolver=resolver) as session:
                assert session.info.peer.endswith(f":{port_of(server)}")


async def test_an_error_names_each_server_of_the_domain() -> None:
    async with dns_server({"_bpmux._tcp.example.org": ["10 0 1 localhost.", "20 0 2 localhost."]}) as resolver:
        with pytest.raises(muxkit.AllAttemptsFailed, match=r"localhost:1: .*localhost:2: "):
            async with muxkit.connect("bpmux+tcp+srv://example.org", resolver=resolver):
                pass


async def test_relink_looks_up_its_servers_too() -> None:
    async with muxkit.open_server(echo, "relink+tcp://127.0.0.1:0") as server:
        records = {"_relink._tcp.example.org": ["10 0 1 localhost.", f"20 0 {port_of(server)} localhost."]}
        async with dns_server(records) as resolver:
            async with muxkit.connect("relink+tcp+srv://example.org", resolver=resolver) as session:
                await session.ping()


@pytest.mark.parametrize("transport", ["tls", "wss"])
async def test_the_certificate_is_of_the_domain(transport: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("example.org")
    with certificate.private_key_and_cert_chain_pem.tempfile() as cert, authority.cert_pem.tempfile() as ca:
        tls = muxkit.TLS(cert=cert)
        async with muxkit.open_server(echo, f"bpmux+{transport}://127.0.0.1:0", tls=tls) as server:
            records = {"_bpmux._tcp.example.org": [f"10 0 {port_of(server)} localhost."]}
            async with dns_server(records) as resolver:
                async with muxkit.connect(
                    f"bpmux+{transport}+srv://example.org", tls=muxkit.TLS(ca=ca), resolver=resolver
                ) as session:
                    await session.ping()


async def test_a_certificate_of_the_host_in_the_record_is_refused() -> None:
    """DNS answers can be forged, so a certificate of the host that they name proves nothing."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    with certificate.private_key_and_cert_chain_pem.tempfile() as cert, authority.cert_pem.tempfile() as ca:
        async with muxkit.open_server(echo, "bpmux+tls://127.0.0.1:0", tls=muxkit.TLS(cert=cert)) as server:
            records = {"_bpmux._tcp.example.org": [f"10 0 {port_of(server)} localhost."]}
            async with dns_server(records) as resolver:
                with pytest.raises(muxkit.HandshakeFailed, match=r"example\.org"):
                    async with muxkit.connect("bpmux+tls+srv://example.org", tls=muxkit.TLS(ca=ca), resolver=resolver):
                        pass


async def test_a_domain_without_records_is_an_error_that_says_what_to_do() -> None:
    async with dns_server({}) as resolver:
        with pytest.raises(OSError, match=r"_bpmux\._tcp\.example\.org: the DNS has no such record\. Check"):
            async with muxkit.connect("bpmux+tcp+srv://example.org", resolver=resolver):
                pass


async def test_a_domain_that_declines_the_service_is_an_error() -> None:
    async with dns_server({"_bpmux._tcp.example.org": ["0 0 0 ."]}) as resolver:
        with pytest.raises(OSError, match="says that it doesn't have this service"):
            async with muxkit.connect("bpmux+tcp+srv://example.org", resolver=resolver):
                pass


async def test_a_port_in_the_url_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="expected a domain without a port"):
        async with muxkit.connect("bpmux+tls+srv://example.org:7000"):
            pass


async def test_a_server_cannot_serve_at_a_domain() -> None:
    with pytest.raises(ValueError, match=r"\+srv is for clients"):
        async with muxkit.open_server(echo, "bpmux+tcp+srv://example.org"):
            pass


async def test_the_suffix_alone_is_no_transport() -> None:
    with pytest.raises(muxkit.PluginError, match="there is no transport 'srv'"):
        async with muxkit.connect("bpmux+srv://example.org"):
            pass


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "muxkit_adapters.srv")
    monkeypatch.setitem(sys.modules, "dns.asyncresolver", None)
    with pytest.raises(muxkit.PluginError, match=r"pip install 'muxkit\[dns\]'"):
        async with muxkit.connect("bpmux+tls+srv://example.org"):
            pass


def test_priorities_come_in_their_order() -> None:
    one, two, three = Record(5, 0, "a", 1), Record(1, 0, "b", 1), Record(5, 9, "c", 1)
    groups = in_order([one, two, three])
    assert groups[0] == [two]
    assert sorted(record.host for record in groups[1]) == ["a", "c"]


def test_weights_decide_how_often_a_server_comes_first() -> None:
    records = [Record(1, 10, "small", 1), Record(1, 30, "large", 1), Record(1, 0, "spare", 1)]
    dice = random.Random(17)
    firsts = Counter(by_weight(records, dice)[0].host for _ in range(4000))
    assert firsts["large"] == pytest.approx(3000, rel=0.05)
    assert firsts["small"] == pytest.approx(950, rel=0.15)
    assert 0 < firsts["spare"] < 250


def test_each_server_comes_once() -> None:
    records = [Record(1, weight, str(weight), 1) for weight in (0, 0, 5, 7)]
    assert sorted(by_weight(records), key=lambda record: record.weight) == records
