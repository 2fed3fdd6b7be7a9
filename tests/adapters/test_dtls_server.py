"""A DTLS listener stays up and bounded, whatever arrives unasked and whichever peer vanishes."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from OpenSSL import SSL

from muxkit import Limits
from muxkit_adapters import dtls
from muxkit_adapters.dtls import DtlsLink, HandshakeFailed, ServerCounters
from muxkit_adapters.packets.dtls_links import EndpointSocket
from muxkit_adapters.packets.sockets import open_socket

from ._links import NEVER, PATIENCE, comes_down_to, descriptors_and_tasks, port_of, serving
from ._packets import (
    LINUX,
    Authority,
    Plain,
    channel_of,
    echo,
    lose,
    packets_of,
    paired,
    refusing_port,
    socket_of,
    until,
    wiretap,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

Operation = Callable[[], Awaitable[object]]

LIMITS = Limits()
NEW_SESSION_TICKET = 4


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"))


@pytest.fixture
def pair(good: Authority) -> Callable[..., AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]]:
    def make(**options: object) -> AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]:
        connect = partial(dtls.transport.connect, ssl_context=good.client())
        return paired(dtls.serve, connect, ssl_context=good.server(), **options)

    return make


MakePair = Callable[..., AbstractAsyncContextManager[tuple[DtlsLink, DtlsLink]]]


# The handshake


async def test_a_server_that_never_answers_is_given_up() -> None:
    with open_socket(socket.AF_INET, bind=("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(HandshakeFailed, match=rf"dtls 127.0.0.1:{port}: .* not over within 0\.05 s"):
            async with dtls.connect("127.0.0.1", port, handshake_timeout=0.05):
                pass


@LINUX
async def test_nobody_there_is_known_at_once() -> None:
    with refusing_port() as port:
        with pytest.raises(ConnectionRefusedError, match=rf"dtls 127.0.0.1:{port}: connection refused"):
            async with dtls.connect("127.0.0.1", port):
                pass


@LINUX
@pytest.mark.seeds(3, soak=100)
async def test_a_handshake_survives_loss(good: Authority, seed: int) -> None:
    links: list[DtlsLink] = []

    async def remember(link: DtlsLink) -> None:
        links.append(link)
        await echo(link)

    server = partial(dtls.serve, ssl_context=good.server(), retransmit=0.02)
    async with serving(server, remember) as (address,), lossy_relay(address, 0.1) as port:
        async with dtls.connect("127.0.0.1", port, ssl_context=good.client(), retransmit=0.02) as link:
            assert link.packet_limit


@asynccontextmanager
async def lossy_relay(address: str, chance: float) -> AsyncIterator[int]:
    """A way to `address` on which the kernel drops packets in both directions; gives its port."""
    front = open_socket(socket.AF_INET, bind=("127.0.0.1", 0))
    back = open_socket(socket.AF_INET, connect=("127.0.0.1", port_of(address)))
    client: list[tuple[str, int]] = []

    async def forth() -> None:
        while True:
            await trio.lowlevel.wait_readable(front)
            packet, came_from = front.recvfrom(65_535)
            client[:] = [came_from]
            back.send(packet)

    async def back_again() -> None:
        while True:
            await trio.lowlevel.wait_readable(back)
            front.sendto(back.recv(65_535), client[0])

    with front, back:
        for sock in (front, back):
            lose(sock, chance)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forth)
            nursery.start_soon(back_again)
            yield front.getsockname()[1]
            nursery.cancel_scope.cancel()


class Shy:
    """Shows that its address is its own, and then finishes no handshake."""

    def __init__(self, address: str) -> None:
        self.plain = Plain(address)
        self._connection = SSL.Connection(SSL.Context(SSL.DTLS_METHOD))
        self._connection.set_connect_state()
        self._connection.set_ciphertext_mtu(1200)

    async def hello(self) -> bytes:
        with pytest.raises(SSL.WantReadError):
            self._connection.do_handshake()
        return self._connection.bio_read(65_535)

    async def begin(self) -> None:
        first = await self.hello()
        await self.plain.send(first)
        challenge = await self.plain.receive()
        assert len(challenge) < len(first), "an unproved address gets more than came from it"
        self._connection.bio_write(challenge)
        await self.plain.send(await self.hello())


@pytest.mark.requirement("R-13", "R-30")
async def test_handshakes_that_are_never_finished_give_way_and_a_good_client_gets_in(
    good: Authority, mock_clock: MockClock
) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), limits=Limits(half_open=5), counters=counters)
    async with serving(serve, echo) as (address,), AsyncExitStack() as stack:
        for number in range(1, 21):
            shy = Shy(address)
            await stack.enter_async_context(shy.plain)
            mock_clock.jump(1.0)
            await shy.begin()
            await until(lambda number=number: counters.admitted == number)  # type: ignore[misc]
        assert counters.half_open <= 5
        mock_clock.jump(1.0)
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            await link.send(b"hello")
            assert await link.receive() == b"hello"
            assert counters.peers == 1
        assert counters.evicted >= 15


@pytest.mark.requirement("R-13")
async def test_a_handshake_that_stalls_is_dropped_at_the_limit(good: Authority) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), limits=Limits(handshake=0.1), counters=counters)
    async with serving(serve, echo) as (address,):
        shy = Shy(address)
        async with shy.plain:
            await shy.begin()
            await until(lambda: counters.finished == 1)
    assert counters.half_open == 0


@pytest.mark.requirement("R-13", "R-30")
async def test_a_hello_without_the_cookie_costs_the_server_nothing(good: Authority) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), counters=counters)
    async with serving(serve, echo) as (address,):
        for _ in range(20):
            shy = Shy(address)
            async with shy.plain:
                await shy.plain.send(await shy.hello())
                await shy.plain.receive()
    assert counters.admitted == 0


@pytest.mark.requirement("R-01")
async def test_peers_above_the_limit_of_connections_are_not_served(good: Authority, mock_clock: MockClock) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), limits=Limits(connections=1), counters=counters)
    async with serving(serve, echo) as (address,):
        connect = partial(dtls.transport.connect, address, ssl_context=good.client())

        async def ask() -> None:
            with pytest.raises(HandshakeFailed, match="not over within"):
                async with connect(handshake_timeout=0.1):
                    pass

        async with connect() as link:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await until(lambda: counters.waiting)
                mock_clock.jump(0.1)
            await link.send(b"hello")
            assert await link.receive() == b"hello"
    assert counters.admitted == 1


@pytest.mark.requirement("R-13")
async def test_who_finds_a_full_listener_waits_and_need_not_send_the_hello_again(
    good: Authority, autojump_clock: MockClock
) -> None:
    """Clients repeat it after 1, 3, 7 and 15 seconds, all at the same moments, so most of them found no place again."""
    counters, served = ServerCounters(), 0
    serve = partial(dtls.serve, ssl_context=good.server(), limits=Limits(half_open=1), counters=counters)

    async def come(address: str) -> None:
        nonlocal served
        connect = partial(dtls.transport.connect, address, ssl_context=good.client())
        async with connect(retransmit=NEVER, handshake_timeout=60.0) as link:
            await link.send(b"hello")
            assert await link.receive() == b"hello"
            served += 1

    async with serving(serve, echo) as (address,):
        shy = Shy(address)
        async with shy.plain, trio.open_nursery() as nursery:
            await shy.begin()
            await until(lambda: counters.half_open)
            for _ in range(5):
                nursery.start_soon(come, address)
    assert (served, counters.waiting) == (5, 0)


@pytest.mark.requirement("R-13")
async def test_who_waits_for_a_place_and_is_silent_for_long_no_longer_waits(
    good: Authority, autojump_clock: MockClock
) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), limits=Limits(connections=1), counters=counters)
    async with serving(serve, echo) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            await link.send(b"hello")
            assert await link.receive() == b"hello"
            shy = Shy(address)
            async with shy.plain:
                await shy.begin()
                await until(lambda: counters.waiting)
                await trio.sleep(30.0)
                assert (counters.waiting, counters.peers) == (0, 1)


@pytest.mark.requirement("R-13")
async def test_a_handshake_ends_although_the_program_is_busy_for_longer_than_a_retransmission_takes(
    good: Authority, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio's timer for the flight before cancelled the sending of the last flight, which then was not sent at all."""
    step = DtlsLink._step

    def step_slowly(self: DtlsLink) -> None:
        step(self)
        if self.place is not None:  # the last step of the server; those before it want to read
            autojump_clock.jump(2.0)

    async def come(address: str) -> None:
        connect = partial(dtls.transport.connect, address, ssl_context=good.client())
        async with connect(retransmit=NEVER, handshake_timeout=60.0) as link:
            await link.send(b"hello")
            assert await link.receive() == b"hello"

    monkeypatch.setattr(DtlsLink, "_step", step_slowly)
    async with serving(partial(dtls.serve, ssl_context=good.server()), echo) as (address,):
        async with trio.open_nursery() as nursery:
            for _ in range(5):  # which sent one after the other, each in a turn of its own
                nursery.start_soon(come, address)


@LINUX
async def test_a_client_that_vanishes_in_its_handshake_does_not_stop_the_server(good: Authority) -> None:
    counters = ServerCounters()
    serve = partial(dtls.serve, ssl_context=good.server(), counters=counters, retransmit=0.01)
    async with serving(serve, echo) as (address,):
        for _ in range(5):
            shy = Shy(address)
            async with shy.plain:
                await shy.begin()
        await until(lambda: counters.finished == counters.refused == 5)
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            await until_answered(link)


async def test_data_that_came_while_the_last_packet_of_the_handshake_was_repeated_is_received(
    good: Authority, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock_clock.rate = 1.0
    send = EndpointSocket.sendto

    async def send_as_time_runs_out(wire: EndpointSocket, *arguments: Any) -> int:
        if arguments[0][13] == NEW_SESSION_TICKET:  # the first message of the server's last packet
            mock_clock.jump(1.5)
        return await send(wire, *arguments)

    monkeypatch.setattr(EndpointSocket, "sendto", send_as_time_runs_out)
    async with serving(partial(dtls.serve, ssl_context=good.server()), echo) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            await link.send(b"hello")
            with trio.fail_after(PATIENCE):
                assert await link.receive() == b"hello"


async def until_answered(link: DtlsLink) -> None:
    """Ask an echo server until it answers, since any packet may be lost."""
    with trio.fail_after(PATIENCE):
        for attempt in count():
            await link.send(b"%d" % attempt)
            with trio.move_on_after(0.5):
                assert (await link.receive()).isdigit()
                return


# What comes unasked


@pytest.mark.requirement("R-21", "R-49")
@pytest.mark.seeds(3, soak=200)
async def test_a_server_survives_garbage(good: Authority, seed: int) -> None:
    chance = random.Random(seed)
    async with serving(dtls.serve, echo, ssl_context=good.server()) as (address,), Plain(address) as hostile:
        hello = await Shy(address).hello()
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            async with wiretap(link) as seen:
                await link.send(b"seen by somebody")
                assert await link.receive() == b"seen by somebody"
                sealed = seen[0]
            for turn in range(300):
                packet = bytearray(chance.choice((hello, sealed, chance.randbytes(chance.randrange(100)))))
                for _ in range(chance.randrange(4)):
                    if packet:
                        packet[chance.randrange(len(packet))] = chance.randrange(256)
                packet = packet[: chance.choice((len(packet), chance.randrange(len(packet) + 1)))]
                # From a stranger, and as if from the client itself.
                await hostile.send(bytes(packet))
                socket_of(link).send(packet)
                if turn % 50 == 0:
                    await link.send(b"%d" % turn)
                    assert await link.receive() == b"%d" % turn


@pytest.mark.requirement("R-49")
@pytest.mark.parametrize("at_once", [False, True])
async def test_forged_doubled_and_changed_packets_are_dropped(pair: MakePair, at_once: bool) -> None:
    async with pair() as (here, there):
        async with wiretap(here) as seen:
            await here.send(b"once")
            assert await there.receive() == b"once"
            sealed = seen[0]
        alert = bytes.fromhex("15fefd00000000000000ff0002") + b"\x02\x28"
        forged = [sealed, sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:20], b"\x17", alert, bytes(1200)]
        for packet in (b"", *forged):
            socket_of(here).send(packet)
        await here.send(b"twice")
        if at_once:
            # Trio itself sorts out the two that look like parts of a handshake.
            await until(lambda: channel_of(there)._q.r.statistics().current_buffer_used == len(forged) - 2 + 1)
            assert there.receive_nowait(10) == [b"twice"]
        else:
            assert await there.receive() == b"twice"
        assert there.receive_nowait(10) == []


async def test_a_new_handshake_from_the_same_address_ends_the_old_link(good: Authority) -> None:
    reasons: list[str] = []

    async def remember(link: DtlsLink) -> None:
        try:
            await echo(link)
        except trio.BrokenResourceError as error:
            reasons.append(str(error))

    async with serving(dtls.serve, remember, ssl_context=good.server()) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            again = channel_of(link).endpoint.connect(("127.0.0.1", port_of(address)), good.client())
            await again.do_handshake()
            await until(lambda: reasons)
    assert "peer tore down this connection to start a new one" in reasons[0]


# How it ends


async def test_a_peer_that_is_silent_for_too_long_is_forgotten(good: Authority, mock_clock: MockClock) -> None:
    reasons: list[str] = []

    async def remember(link: DtlsLink) -> None:
        try:
            await echo(link)
        except trio.BrokenResourceError as error:
            reasons.append(str(error))

    counters = ServerCounters()
    async with serving(dtls.serve, remember, ssl_context=good.server(), idle=5, counters=counters) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()):
            await until(lambda: counters.peers)
            mock_clock.jump(4.9)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not reasons
            mock_clock.jump(0.2)
            await until(lambda: reasons)
    assert "silent for too long" in reasons[0]
    assert counters.idle == 1


@LINUX
async def test_a_peer_that_is_gone_without_goodbye_is_given_up_after_so_many_refusals(good: Authority) -> None:
    reasons: list[str] = []

    async def send_on(link: DtlsLink) -> None:
        try:
            while True:
                await link.send(b"still there?")
                await trio.testing.wait_all_tasks_blocked(0.001)
        except trio.BrokenResourceError as error:
            reasons.append(str(error))

    counters = ServerCounters()
    async with serving(dtls.serve, send_on, ssl_context=good.server(), counters=counters) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            packets_of(link).close()
            await until(lambda: reasons)
    assert reasons[0].endswith("Connection refused")
    assert counters.refused == 1


@pytest.mark.requirement("R-43")
async def test_many_links_leave_no_descriptor_and_no_task_behind(good: Authority) -> None:
    async with serving(dtls.serve, echo, ssl_context=good.server()) as (address,):

        async def visit(times: int) -> None:
            for _ in range(times):
                async with dtls.transport.connect(address, ssl_context=good.client()) as link:
                    await link.send(b"x")
                    await link.receive()

        await visit(3)
        before = await descriptors_and_tasks()
        await visit(30)
        await comes_down_to(before)


@pytest.mark.requirement("R-13")
async def test_a_handshake_ends_although_the_program_is_busy_for_longer_than_the_timer_of_openssl(
    good: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL's own timer repeated the flight before, and Trio dropped the new one together with that.

    Whoever asks for that timer before a step learns nothing, since it can run out in the middle of the step.
    """
    monkeypatch.setattr(SSL.Connection, "DTLSv1_get_timeout", lambda _: 1)
    send, is_held_up = EndpointSocket.sendto, False

    async def hold_up_once(self: EndpointSocket, *arguments: Any) -> int:
        nonlocal is_held_up
        size = await send(self, *arguments)
        if arguments[0][:1] == b"\x16" and arguments[0][13:14] == b"\x02" and not is_held_up:  # a ServerHello
            is_held_up = True
            time.sleep(1.1)  # noqa: ASYNC251 - OpenSSL looks at the clock of the machine
        return size

    monkeypatch.setattr(EndpointSocket, "sendto", hold_up_once)
    async with serving(partial(dtls.serve, ssl_context=good.server()), echo) as (address,):
        async with dtls.transport.connect(address, ssl_context=good.client()) as link:
            await link.send(b"hello")
            with trio.fail_after(PATIENCE):
                assert await link.receive() == b"hello"
    assert is_held_up
