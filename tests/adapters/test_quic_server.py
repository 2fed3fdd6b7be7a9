"""A QUIC server survives whatever comes to its port, and bounds the peers whose address is not validated."""

from __future__ import annotations

import logging
import random
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # it is documented there
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType, pull_quic_header
from aioquic.tls import Epoch

from muxkit import Limits
from muxkit.testing import cancel_sweep
from muxkit_adapters import quic
from muxkit_adapters.quic import ConnectionEnded, HandshakeFailed, QuicLink
from tests._tasks import living_tasks

from ._links import comes_down_to, descriptors_and_tasks
from ._quic import FILES, Collected, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator


async def echo(link: QuicLink) -> None:
    """Each stream of the peer comes back on one of ours."""
    got = Collected(link)
    while not got.is_over:
        await got.once()
        for stream in [*got.ended]:
            got.ended.discard(stream)
            link.write(link.open(), bytes(got.streams.pop(stream, b"")), True)


async def works(host: str, port: int, **options: object) -> bool:
    """Does a good client get what it wants?"""
    async with quic.connect(host, port, ca=FILES.ca, **options) as link:  # type: ignore[arg-type]
        link.write(link.open(), b"hello", True)
        got = Collected(link)
        await got.until(lambda: got.ended)
        return got.streams == {3: b"hello"}


@pytest.fixture
def wire() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        yield sock


async def test_after_a_retry_a_client_sends_the_same_hello_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may refuse another one (RFC 9000, 17.2.5.3)."""
    hellos: list[bytes] = []
    push = QuicConnection._push_crypto_data

    def spy(self: QuicConnection) -> None:
        if self._is_client and (data := self._crypto_buffers[Epoch.INITIAL].data):
            hellos.append(data)
        push(self)

    monkeypatch.setattr(QuicConnection, "_push_crypto_data", spy)
    async with serving(echo) as (host, port):
        assert await works(host, port)
    assert len(hellos) == 2
    assert hellos[0] == hellos[1]


def first_packet(*, token: bytes = b"") -> bytes:
    """The first packet of a new client; each call is another client."""
    configuration = QuicConfiguration(
        is_client=True, server_name="server.test", token=token, alpn_protocols=["muxkit-aqueduct"]
    )
    connection = QuicConnection(configuration=configuration)
    connection.connect(("127.0.0.1", 1), now=0.0)
    return connection.datagrams_to_send(now=0.0)[0][0]


async def answers(wire: socket.socket, count: int) -> list[bytes]:
    """So many packets that came back."""
    got: list[bytes] = []
    while len(got) < count:
        await trio.lowlevel.wait_readable(wire)
        got.append(wire.recv(65_536))
    return got


@pytest.mark.requirement("R-21")
@pytest.mark.seeds(3, soak=300)
async def test_garbage_harms_nobody(seed: int, wire: socket.socket) -> None:
    dice = random.Random(seed)
    good = first_packet()
    async with serving(echo) as (host, port):
        for number in range(300):
            match number % 4:
                case 0:
                    data = dice.randbytes(dice.choice((0, 1, 20, 1200, 1500, 9000)))
                case 1:
                    data = good[: dice.randrange(len(good))]
                case 2:
                    at = dice.randrange(60)
                    data = good[:at] + dice.randbytes(1) + good[at + 1 :]
                case _:
                    data = bytes([0xC0 | dice.randrange(64)]) + dice.randbytes(1300)
            wire.sendto(data, (host, port))
        assert await works(host, port)


@pytest.mark.requirement("R-13", "R-30")
async def test_strangers_are_asked_for_a_token_and_nothing_is_kept_of_them(wire: socket.socket) -> None:
    async with serving(echo, limits=Limits(half_open=1)) as (host, port):
        before = living_tasks()
        packets = [first_packet() for _ in range(30)]
        for packet in packets:
            wire.sendto(packet, (host, port))
        came = await answers(wire, len(packets))
        assert living_tasks() == before
        headers = [pull_quic_header(Buffer(data=data), host_cid_length=8) for data in came]
        assert {header.packet_type for header in headers} == {QuicPacketType.RETRY}
        assert sum(map(len, came)) < sum(map(len, packets)) / 3
        assert await works(host, port)


@pytest.mark.requirement("R-13")
async def test_a_token_that_is_not_ours_lets_nobody_in(wire: socket.socket) -> None:
    async with serving(echo) as (host, port):
        before = living_tasks()
        for token in (b"x", b"x" * 61):
            wire.sendto(first_packet(token=token), (host, port))
        wire.sendto(first_packet(), (host, port))
        (retry,) = await answers(wire, 1)
        assert pull_quic_header(Buffer(data=retry), host_cid_length=8).packet_type is QuicPacketType.RETRY
        assert living_tasks() == before


@pytest.mark.requirement("R-13")
async def test_a_token_of_somebody_else_lets_nobody_in(wire: socket.socket) -> None:
    async with serving(echo) as (host, port):
        wire.sendto(first_packet(), (host, port))
        (retry,) = await answers(wire, 1)
        token = pull_quic_header(Buffer(data=retry), host_cid_length=8).token
        assert token
        before = living_tasks()
        wire.sendto(first_packet(token=token), (host, port))  # its id is another
        wire.sendto(first_packet(), (host, port))
        await answers(wire, 1)
        assert living_tasks() == before


@pytest.mark.requirement("R-13")
async def test_half_open_connections_keep_their_places_for_a_while_and_then_give_way(wire: socket.socket) -> None:
    async with serving(echo, retry=False, limits=Limits(half_open=5, handshake=2.0)) as (host, port):
        before = living_tasks()
        for _ in range(25):
            wire.sendto(first_packet(), (host, port))
        await answers(wire, 5)
        await trio.testing.wait_all_tasks_blocked()
        assert 0 < living_tasks() - before <= 5 * 2
        assert await works(host, port)  # it sends its first packet until there is a place


@pytest.mark.requirement("R-13")
async def test_an_unfinished_handshake_is_dropped_in_time(wire: socket.socket) -> None:
    async with serving(echo, retry=False, limits=Limits(handshake=0.05)) as (host, port):
        before = living_tasks()
        wire.sendto(first_packet(), (host, port))
        await answers(wire, 1)
        while living_tasks() > before:  # noqa: ASYNC110 - Trio has no event for it
            await trio.sleep(0.01)


@pytest.mark.requirement("R-30")
async def test_little_is_sent_to_an_address_that_has_shown_nothing(wire: socket.socket) -> None:
    async with serving(echo, retry=False, limits=Limits(handshake=0.5)) as (host, port):
        packet = first_packet()
        wire.sendto(packet, (host, port))
        size = len((await answers(wire, 1))[0])
        with trio.move_on_after(0.4):
            while True:
                await trio.lowlevel.wait_readable(wire)
                size += len(wire.recv(65_536))
        assert len(packet) / 2 < size <= 3 * len(packet)


@pytest.mark.requirement("R-01")
async def test_beyond_the_limit_of_connections_newcomers_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muxkit.adapters")
    async with serving(echo, limits=Limits(connections=1)) as (host, port):
        async with quic.connect(host, port, ca=FILES.ca):
            with pytest.raises(HandshakeFailed):
                await works(host, port, handshake_timeout=0.3)
        assert await works(host, port)
    assert "Limits(connections=1)" in caplog.text


async def test_an_unknown_version_is_answered_with_the_known_ones(wire: socket.socket) -> None:
    async with serving(echo) as (host, port):
        strange = b"\xc0" + bytes.fromhex("1a2a3a4a") + b"\x08" + bytes(8) + b"\x08" + bytes(8)
        wire.sendto(strange, (host, port))  # too small to be answered
        wire.sendto(strange.ljust(1200, b"\0"), (host, port))
        (answer,) = await answers(wire, 1)
        header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
        assert header.packet_type is QuicPacketType.VERSION_NEGOTIATION
        assert 1 in header.supported_versions


async def test_the_answer_about_versions_is_not_answered(wire: socket.socket) -> None:
    async with serving(echo) as (host, port):
        offer = b"\xc0" + bytes(4) + b"\x08" + bytes(8) + b"\x08" + bytes(8)
        wire.sendto(offer.ljust(1200, b"\1"), (host, port))
        wire.sendto(first_packet(), (host, port))
        (answer,) = await answers(wire, 1)
        assert pull_quic_header(Buffer(data=answer), host_cid_length=8).packet_type is QuicPacketType.RETRY


# --- handlers


async def test_a_handler_that_fails_ends_its_own_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(link: QuicLink) -> None:
        got = Collected(link)
        await got.until(lambda: got.ended)
        if got.streams[2] == b"fail":
            raise ValueError("the canary is in here")
        link.write(link.open(), b"fine", True)
        await link.receive()

    async with serving(handle) as (host, port), quic.connect(host, port, ca=FILES.ca) as good:
        async with quic.connect(host, port, ca=FILES.ca) as bad:
            bad.write(bad.open(), b"fail", True)
            with pytest.raises(ConnectionEnded, match="code 1: hung up"):
                await bad.receive()
        good.write(good.open(), b"work", True)
        got = Collected(good)
        await got.until(lambda: got.ended)
        assert got.streams == {3: b"fine"}
    assert "failed with ValueError" in caplog.text
    assert "canary" not in caplog.text


async def test_a_handler_that_returns_says_goodbye() -> None:
    async def handle(link: QuicLink) -> None:
        link.write(link.open(), b"that is all", True)
        await link.wait_delivered()

    async with serving(handle) as (host, port), quic.connect(host, port, ca=FILES.ca) as link:
        got = Collected(link)
        await got.until(lambda: got.is_over)
        assert got.streams == {3: b"that is all"}


async def test_a_handler_gets_what_came_even_if_the_peer_has_left() -> None:
    got: list[Collected] = []
    has_ended = trio.Event()

    async def handle(link: QuicLink) -> None:
        got.append(Collected(link))
        await got[0].until(lambda: got[0].is_over)
        has_ended.set()

    async with serving(handle) as (host, port):
        async with quic.connect(host, port, ca=FILES.ca) as link:
            link.write(link.open(), b"quick", True)
            await link.wait_delivered()
        await has_ended.wait()
    assert got[0].streams == {2: b"quick"}


async def test_clients_hear_that_the_server_was_stopped() -> None:
    served, stop, is_told = trio.Event(), trio.Event(), trio.Event()

    async def handle(link: QuicLink) -> None:
        served.set()
        await trio.sleep_forever()

    async def visit(host: str, port: int) -> None:
        async with quic.connect(host, port, ca=FILES.ca) as link:
            await served.wait()
            stop.set()
            with pytest.raises(ConnectionEnded, match="code 1: the server was stopped"):
                await link.receive()
            is_told.set()

    async with trio.open_nursery() as nursery:
        async with serving(handle) as (host, port):
            nursery.start_soon(visit, host, port)
            await stop.wait()
        await is_told.wait()


@pytest.mark.requirement("R-43")
async def test_connections_leave_nothing_behind() -> None:
    async with serving(echo) as (host, port):
        before = await descriptors_and_tasks()
        for _ in range(20):
            assert await works(host, port)
        await comes_down_to(before)  # those who are over repeat their goodbye for a moment


@pytest.mark.requirement("R-31", "R-43")
async def test_a_connect_that_is_cancelled_leaves_nothing_behind() -> None:
    async with serving(echo, limits=Limits(half_open=1)) as (host, port):
        before = await descriptors_and_tasks()

        @asynccontextmanager
        async def scenario() -> AsyncIterator[Callable[[], Awaitable[object]]]:
            yield partial(works, host, port)

        assert await cancel_sweep(scenario) > 5
        assert await works(host, port)  # for whom the last one who never came back gives way
        await comes_down_to(before)


async def test_many_clients_at_once() -> None:
    async with serving(echo) as (host, port), trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(works, host, port)
