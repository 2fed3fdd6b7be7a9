"""DTLS is a packet link, and is refused whenever it should be."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from OpenSSL import SSL

from muxkit import Limits
from muxkit.runtime import NowaitPackets
from muxkit.testing import cancel_sweep, check_packet_link
from muxkit_adapters import dtls
from muxkit_adapters.dtls import DtlsLink, HandshakeFailed, PacketTooLarge

from ._links import IPV6, at_most, comes_down_to, descriptors_and_tasks, serving
from ._packets import Authority, Link, echo, paired, wiretap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

Operation = Callable[[], Awaitable[object]]

LIMITS = Limits()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"))


@pytest.fixture
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def pair(good: Authority) -> Callable[..., AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]]:
    def make(**options: object) -> AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]:
        connect = partial(dtls.transport.connect, ssl_context=good.client())
        return paired(dtls.serve, connect, ssl_context=good.server(), **options)

    return make


MakePair = Callable[..., AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]]


# A link


@pytest.mark.requirement("R-33", "R-34")
async def test_dtls_is_a_packet_link(pair: MakePair) -> None:
    await check_packet_link(pair, goodbye=True)


@IPV6
async def test_it_works_over_ipv6_and_by_url(good: Authority) -> None:
    assert dtls.transport.link == "packets"
    serve = partial(dtls.transport.serve, limits=LIMITS, ssl_context=good.server())
    async with serving(serve, echo, "[::1]:0") as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            assert isinstance(link, NowaitPackets)
            await link.send(b"secret")
            assert await link.receive() == b"secret"


async def test_it_is_dtls_1_2_and_the_peer_is_named(pair: MakePair) -> None:
    async with pair() as (here, there):
        assert repr(here) == f"<DtlsLink {here.peer} DTLSv1.2>"
        assert here.peer.startswith("dtls 127.0.0.1:")
        assert there.peer.startswith("dtls 127.0.0.1:")


async def test_a_link_counts_and_shows_its_buffers(pair: MakePair) -> None:
    async with pair(receive_buffer=50_000) as (here, there):
        await here.send(bytes(100))
        await there.receive()
        assert (here.stats().sent, here.stats().sent_bytes) == (3, len(b"hello" + b"so it is me") + 100)
        assert (there.stats().received, there.stats().received_bytes) == (3, here.stats().sent_bytes)
        assert there.buffers.receive == 50_000


async def test_what_goes_over_the_wire_is_not_what_was_sent(pair: MakePair) -> None:
    async with pair() as (here, _), wiretap(here) as wire:
        await here.send(b"canary-secret" * 50)
        assert not any(b"canary" in packet for packet in wire)


# Sizes


@pytest.mark.requirement("R-45")
async def test_a_packet_that_is_too_large_is_refused_with_both_numbers(pair: MakePair) -> None:
    async with pair() as (here, there):
        limit = here.packet_limit
        assert 1150 < limit < 1232
        for size in (limit + 1, 16_000, 17_000, 70_000):
            expected = rf"a packet of {size:,} bytes is above packet_limit={limit:,}"
            with pytest.raises(PacketTooLarge, match=expected) as caught:
                await here.send(bytes(size))
            assert (caught.value.size, caught.value.limit) == (size, limit)
        async with wiretap(here) as wire:
            await here.send(bytes(limit))
            assert len(wire[0]) <= 1232
        assert len(await there.receive()) == limit


@pytest.mark.requirement("R-45")
async def test_the_handshake_keeps_to_the_size_as_well(good: Authority) -> None:
    context = good.server(*(f"a-long-name-to-fill-a-certificate-{number}.example" for number in range(40)), "127.0.0.1")
    async with serving(dtls.serve, echo, ssl_context=context, largest=300) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client(), largest=300) as link:
            assert link.packet_limit < 300
            assert link.identity is not None
            assert len(link.identity.certificate or b"") > 1500


# Trust


async def refused(server: dtls.Context, client: dtls.Context | None, **options: object) -> str:
    async def never(link: Link) -> None:
        raise AssertionError("this peer should not have come so far")

    async with serving(dtls.serve, never, ssl_context=server) as (address,):
        with pytest.raises(HandshakeFailed) as caught:
            async with dtls.transport.connect(address, ssl_context=client, **options):
                pass
        assert f"dtls {address}: " in str(caught.value)
        return str(caught.value)


@pytest.mark.requirement("R-62")
async def test_a_certificate_for_another_name_is_refused(good: Authority) -> None:
    assert "not valid for '127.0.0.1'" in await refused(good.server("example.org"), good.client())
    assert "not valid for '127.0.0.1'" in await refused(good.server("127.0.0.2"), good.client())
    assert "'example.net'" in await refused(good.server(), good.client(), server_hostname="example.net")


@pytest.mark.requirement("R-62")
async def test_the_name_that_is_asked_for_counts_and_not_the_address(good: Authority) -> None:
    async with serving(dtls.serve, echo, ssl_context=good.server("*.example.org")) as (address,):
        connect = partial(dtls.transport.connect, address, ssl_context=good.client())
        async with connect(server_hostname="telemetry.example.org") as link:
            await link.send(b"hello")
            assert await link.receive() == b"hello"


@pytest.mark.requirement("R-62")
async def test_a_certificate_that_nobody_vouches_for_is_refused(good: Authority, stranger: Authority) -> None:
    assert "unable to get local issuer certificate" in await refused(stranger.server(), good.client())
    assert "unable to get local issuer certificate" in await refused(stranger.server(), None)


@pytest.mark.requirement("R-62")
async def test_an_expired_certificate_is_refused(good: Authority) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    assert "certificate has expired" in await refused(good.server("127.0.0.1", not_after=past), good.client())


@pytest.mark.requirement("R-62")
async def test_a_server_that_speaks_only_dtls_1_0_is_refused(good: Authority) -> None:
    old = good.server()
    client = good.client()
    for context in (old, client):
        context.set_min_proto_version(0xFEFF)
        context.set_cipher_list(b"ALL:@SECLEVEL=0")
    old.set_max_proto_version(0xFEFF)
    assert "speaks DTLSv1, and DTLS 1.2 is the least" in await refused(old, client)


@pytest.mark.requirement("R-62")
async def test_a_context_that_does_not_verify_must_be_asked_for_and_shows(good: Authority) -> None:
    context = dtls.Context()
    with pytest.raises(ValueError, match="does not verify the server"):
        async with dtls.connect("127.0.0.1", 9, ssl_context=context):
            pass
    async with serving(dtls.serve, echo, ssl_context=good.server("example.org")) as (address,):
        async with dtls.transport.connect(address, ssl_context=context, insecure=True) as link:
            assert "(not verified, insecure)" in repr(link)
            assert link.identity is None


@pytest.mark.requirement("R-62")
async def test_a_client_without_the_certificate_that_is_asked_for_does_not_come_in(
    good: Authority, stranger: Authority, mock_clock: MockClock
) -> None:
    server = dtls.server_context(good.issue("127.0.0.1"), client_ca=good.ca)
    wrong = dtls.client_context(ca=good.ca, certificate=stranger.issue("somebody"))
    reasons: dict[str, str] = {}

    async def ask(name: str, client: dtls.Context) -> None:
        reasons[name] = await refused(server, client, handshake_timeout=8.0)

    with at_most(4.0, mock_clock):  # was: after all of the 8 seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "none", good.client())
            nursery.start_soon(ask, "a stranger's", wrong)
    assert reasons["none"].endswith("the peer refused the connection: handshake failure")
    assert reasons["a stranger's"].endswith("the peer refused the connection: unknown authority")


async def test_each_side_knows_who_the_other_is_if_it_was_verified(good: Authority) -> None:
    certificate = good.issue("sensor-7")
    met: list[tuple[str, ...]] = []

    async def meet(link: DtlsLink) -> None:
        met.append(names_in(link))
        await echo(link)

    server = dtls.server_context(good.issue("127.0.0.1"), client_ca=good.ca)
    client = dtls.client_context(ca=good.ca, certificate=certificate)
    async with serving(dtls.serve, meet, ssl_context=server) as (address,):
        async with dtls.transport.connect(address, ssl_context=client) as link:
            assert names_in(link) == ("127.0.0.1",)
    assert met == [("sensor-7",)]


def names_in(link: DtlsLink) -> tuple[str, ...]:
    assert link.identity is not None
    return link.identity.names


async def test_one_context_serves_many_connections_and_a_plain_one_is_refused(good: Authority) -> None:
    server, client = good.server(), good.client()
    for _ in range(2):
        async with serving(dtls.serve, echo, ssl_context=server) as (address,):
            for _ in range(2):
                async with dtls.transport.connect(address, ssl_context=client) as link:
                    await link.send(b"hello")
                    assert await link.receive() == b"hello"
    with pytest.raises(TypeError, match=r"ssl_context is a OpenSSL.SSL.Context: a dtls.Context is needed"):
        async with dtls.connect("127.0.0.1", 9, ssl_context=SSL.Context(SSL.DTLS_METHOD)):  # type: ignore[arg-type]
            pass


async def test_a_server_without_a_certificate_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="a server needs its certificate and key: tls="):
        await dtls.transport.serve(echo, "127.0.0.1:0", limits=LIMITS, task_status=trio.TASK_STATUS_IGNORED)


# Cancellation


@pytest.mark.requirement("R-31", "R-32")
async def test_a_link_survives_a_cancellation_at_any_step(pair: MakePair) -> None:
    @asynccontextmanager
    async def sending() -> AsyncIterator[Operation]:
        async with pair() as (here, there):
            yield partial(here.send, b"perhaps")
            await here.send(b"certainly")
            while await there.receive() != b"certainly":
                pass

    @asynccontextmanager
    async def receiving() -> AsyncIterator[Operation]:
        async with pair() as (here, there):
            await here.send(b"one")
            yield partial(there.receive)
            await here.send(b"two")
            while await there.receive() != b"two":
                pass

    assert await cancel_sweep(sending) >= 1
    assert await cancel_sweep(receiving) >= 1


@pytest.mark.requirement("R-31", "R-43")
async def test_connecting_can_be_cancelled_at_any_step(good: Authority) -> None:
    async with serving(dtls.serve, echo, ssl_context=good.server()) as (address,):

        async def visit() -> None:
            async with dtls.transport.connect(address, ssl_context=good.client()) as link:
                await link.send(b"hello")
                assert await link.receive() == b"hello"

        descriptors, _ = await descriptors_and_tasks()

        @asynccontextmanager
        async def visiting() -> AsyncIterator[Operation]:
            yield visit
            await comes_down_to((descriptors, 1000))  # the server waits a while for those who never came back

        assert await cancel_sweep(visiting) > 5


async def test_what_trio_keeps_to_itself_is_still_there(good: Authority) -> None:
    """Without `_ssl` and `_q` there is no certificate, no goodbye and no burst; a new Trio may have other names."""
    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock, trio.DTLSEndpoint(sock) as endpoint:
        channel = endpoint.connect(("127.0.0.1", 9), good.client())
        assert isinstance(channel._ssl, SSL.Connection)
        with pytest.raises(trio.WouldBlock):
            channel._q.r.receive_nowait()
