"""Unknown and silent peers can do only bounded harm to a UDP listener, and to others by means of it."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.runtime.pumps.turns import Turns, share_turns
from muxkit_adapters import udp
from muxkit_adapters.packets import listeners
from muxkit_adapters.packets.options import STEP_PACKETS, TURN, PacketOptions
from muxkit_adapters.packets.sockets import PacketSocket, open_socket
from muxkit_adapters.udp import PeerLink, ServerCounters, UdpLink

from ._links import NEVER, PATIENCE, port_of, serving
from ._packets import LINUX, Link, Plain, echo, paired, refusing_port, until

if TYPE_CHECKING:
    from trio.testing import MockClock

Operation = Callable[[], Awaitable[object]]

LIMITS = Limits()


def pair(**options: object) -> AbstractAsyncContextManager[tuple[UdpLink, PeerLink]]:
    return paired(udp.serve, udp.transport.connect, **options)


async def park(link: Link) -> None:
    await trio.sleep_forever()


# Addresses that have not proved themselves


async def pour(link: PeerLink, *, size: int = 100) -> None:
    """As much as may be sent."""
    await link.receive()
    while True:
        await link.send(bytes(size))


@pytest.mark.requirement("R-30")
@pytest.mark.parametrize("validation", ["answer", "told"])
async def test_an_address_without_proof_gets_at_most_three_times_what_came_from_it(validation: udp.Validation) -> None:
    many = partial(pour, size=350)
    async with serving(udp.serve, many, validation=validation) as (address,), Plain(address) as victim:
        await victim.send(bytes(350))
        assert [len(await victim.receive()) for _ in range(3)] == [350, 350, 350]
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert victim.waiting() == []


@pytest.mark.requirement("R-30")
async def test_tiny_packets_are_no_way_around_since_headers_count() -> None:
    async with serving(udp.serve, partial(pour, size=1)) as (address,), Plain(address) as victim:
        await victim.send(bytes(1000))
        for _ in range(3 * (1000 + 28) // (1 + 28)):
            assert len(await victim.receive()) == 1
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert victim.waiting() == []


@pytest.mark.requirement("R-30")
async def test_empty_packets_cost_the_budget_too() -> None:
    async with serving(udp.serve, partial(pour, size=0)) as (address,), Plain(address) as victim:
        await victim.send(b"x")
        assert [await victim.receive() for _ in range(3)] == [b"", b"", b""]
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert victim.waiting() == []


@pytest.mark.requirement("R-30")
async def test_an_answer_proves_an_address_and_what_waited_goes_out() -> None:
    async def send_much(link: PeerLink) -> None:
        await link.receive()
        assert not link.is_validated
        for _ in range(50):
            await link.send(bytes(100))
        assert link.is_validated
        await trio.sleep_forever()

    async with serving(udp.serve, send_much) as (address,), Plain(address) as peer:
        await peer.send(b"x" * 50)
        assert len(await peer.receive()) == 100
        await peer.send(b"I have it")
        got = [await peer.receive() for _ in range(49)]
        assert sum(map(len, got)) == 4900


@pytest.mark.requirement("R-30")
async def test_if_proof_must_be_told_no_number_of_packets_is_one() -> None:
    links: list[PeerLink] = []

    async def remember(link: PeerLink) -> None:
        links.append(link)
        await link.receive()
        for _ in range(50):
            await link.send(bytes(100))
        await trio.sleep_forever()

    async with serving(udp.serve, remember, validation="told") as (address,), Plain(address) as peer:
        for count in range(1, 6):
            await peer.send(bytes(100))
            await until(lambda count=count: links and links[0].stats().sent_bytes >= 300 * count)  # type: ignore[misc]
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert links[0].stats().sent_bytes == 300 * count
        links[0].validate()
        await until(lambda: links[0].stats().sent_bytes == 5000)


@pytest.mark.requirement("R-30")
async def test_an_empty_packet_from_a_stranger_starts_nothing() -> None:
    counters = ServerCounters()
    async with serving(udp.serve, park, counters=counters) as (address,), Plain(address) as stranger:
        for _ in range(10):
            await stranger.send(b"")
        await until(lambda: counters.empty == 10)
        assert counters.admitted == 0


def reason_of(link: PeerLink) -> str:
    """Why a link is lost."""
    with pytest.raises(trio.BrokenResourceError) as caught:
        link.send_nowait([b"x"])
    return str(caught.value)


@pytest.mark.requirement("R-13")
async def test_addresses_without_proof_give_way_to_newer_ones_after_a_while(mock_clock: MockClock) -> None:
    counters = ServerCounters()
    links: list[PeerLink] = []
    reasons: list[str] = []

    async def remember(link: PeerLink) -> None:
        links.append(link)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if len(reasons) < 15:  # the others end with the listener
                reasons.append(reason_of(link))
            raise

    limits = Limits(half_open=5)
    async with serving(udp.serve, remember, limits=limits, counters=counters) as (address,), AsyncExitStack() as stack:
        for number in range(1, 21):
            peer = await stack.enter_async_context(udp.transport.connect(address))
            if number == 6:  # nobody gives way before the time, so the packet has to come again
                await peer.send(b"x")
                await until(lambda: counters.turned_away == 1)
            if number > 5:
                mock_clock.jump(1.0)
            await peer.send(b"x")
            await until(lambda number=number: len(links) == number)  # type: ignore[misc]
        await until(lambda: counters.finished == 15)
        assert (counters.evicted, counters.half_open) == (15, 5)
        assert reasons == [f"{link.peer}: gave way to newer peers before it had proved itself" for link in links[:15]]


@pytest.mark.requirement("R-13")
async def test_a_flood_of_forged_addresses_does_not_take_a_peer_with_proof_away() -> None:
    counters = ServerCounters()
    limits = Limits(half_open=10, connections=50)
    async with serving(udp.serve, echo, limits=limits, counters=counters) as (address,), AsyncExitStack() as stack:
        good = await stack.enter_async_context(udp.transport.connect(address))
        for _ in range(2):
            await good.send(b"hello")
            await good.receive()
        for _ in range(300):
            forged = await stack.enter_async_context(Plain(address))
            await forged.send(b"x")
        await until(lambda: counters.admitted + counters.turned_away == 301)
        assert counters.peers == 1
        assert counters.half_open <= 10
        assert counters.admitted - counters.finished <= 50 + 10
        await good.send(b"still here?")
        assert await good.receive() == b"still here?"


@pytest.mark.requirement("R-01", "R-10")
async def test_handlers_that_do_not_end_count_although_their_peers_have_given_way(mock_clock: MockClock) -> None:
    may_end = trio.Event()

    async def linger(link: PeerLink) -> None:
        with trio.CancelScope(shield=True):
            await may_end.wait()

    counters, count = ServerCounters(), 0
    limits = Limits(half_open=2, connections=5)
    async with serving(udp.serve, linger, limits=limits, counters=counters) as (address,), AsyncExitStack() as stack:
        for _ in range(20):
            stranger = await stack.enter_async_context(Plain(address))
            mock_clock.jump(1.0)
            await stranger.send(b"x")
            count += 1
            await until(lambda: counters.admitted + counters.turned_away == count)  # noqa: B023
        assert (counters.admitted, counters.finished) == (2 + 5, 0)
        may_end.set()


@pytest.mark.requirement("R-01")
async def test_peers_above_the_limit_of_connections_are_turned_away() -> None:
    counters = ServerCounters()
    async with serving(udp.serve, echo, limits=Limits(connections=2), counters=counters) as (address,):
        async with AsyncExitStack() as stack:
            for number in range(3):
                peer = await stack.enter_async_context(udp.transport.connect(address))
                for _ in range(2):
                    await peer.send(b"x")
                    if number < 2:
                        await peer.receive()
            await until(lambda: counters.turned_away == 2)
            assert counters.peers == 2


@pytest.mark.requirement("R-13")
async def test_what_an_address_without_proof_can_leave_in_memory_is_little() -> None:
    counters = ServerCounters()
    async with serving(udp.serve, park, counters=counters) as (address,), Plain(address) as peer:
        for _ in range(100):
            await peer.send(bytes(1000))
        await until(lambda: counters.dropped == 100 - 16_384 // 1000)


@pytest.mark.requirement("R-31")
async def test_an_answer_that_waits_for_proof_can_be_cancelled_and_was_not_sent() -> None:
    was_cancelled = trio.Event()

    async def send_too_much(link: PeerLink) -> None:
        await link.receive()
        await link.send(b"123")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.send, b"4567")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        was_cancelled.set()
        await link.send(b"")  # there is no room for that either
        await trio.sleep_forever()

    async with serving(udp.serve, send_too_much) as (address,), Plain(address) as peer:
        await peer.send(b"1")
        assert await peer.receive() == b"123"
        await was_cancelled.wait()
        await peer.send(b"now you know")
        assert await peer.receive() == b""


# What one peer can do to the others


@pytest.mark.requirement("R-03")
async def test_an_inbox_that_nobody_empties_is_bounded_and_what_is_too_much_is_counted() -> None:
    async with pair(limits=Limits(channel_bytes=100_000)) as (here, there):
        before = there.stats().received
        for count in range(1, 201):
            await here.send(bytes(1000))
            if count % 20 == 0:  # what waits in the kernel is not what is bounded here
                await until(lambda count=count: there.stats().received == before + count)  # type: ignore[misc]
        assert there.stats().dropped == 100
        for _ in range(100):
            await there.receive()
        await here.send(b"there is room again")
        assert await there.receive() == b"there is room again"


@LINUX
async def test_reports_about_other_peers_do_not_take_the_place_of_a_packet() -> None:
    """Up to three reports follow one another, each raised by the kernel instead of sending."""
    reports: list[object] = []
    with refusing_port() as port, open_socket(socket.AF_INET, bind=("127.0.0.1", 0)) as bound:

        def refused(address: object, _: OSError) -> None:
            reports.append(address)
            if len(reports) < 3:  # the next report comes while this one is read
                bound.sendto(b"nobody takes this", ("127.0.0.1", port))

        wire = PacketSocket(bound, PacketOptions(), refused=refused)
        with open_socket(socket.AF_INET, bind=("127.0.0.1", 0)) as peer:
            bound.sendto(b"nobody takes this", ("127.0.0.1", port))
            assert wire.send([b"for the peer"], peer.getsockname()) == 1
            assert (wire.lost, reports) == (0, [("127.0.0.1", port)] * 3)
            assert peer.recv(100) == b"for the peer"


@pytest.mark.requirement("R-27")
async def test_one_turn_takes_a_bounded_number_of_packets() -> None:
    with open_socket(socket.AF_INET, bind=("127.0.0.1", 0)) as bound:
        wire = PacketSocket(bound, PacketOptions(), refused=lambda *_: None)
        with open_socket(socket.AF_INET, connect=bound.getsockname()) as sender:
            # More than a turn's worth each time, and no more than the kernel keeps wherever it was told nothing else.
            for size, most, count in ((0, 128, 200), (10, 128, 200), (1000, 66, 80)):
                for _ in range(count):
                    sender.send(bytes(size))
                got: list[int] = []
                with trio.fail_after(PATIENCE):
                    while wire.has_more or sum(got) < count:
                        if not wire.has_more:
                            await wire.wait_readable()
                        turn = sum(len(packets) for _, packets in wire.receive())
                        assert turn <= most
                        got.append(turn)
                assert sum(got) == count


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_a_listener_works_on_packets_until_its_time_is_used_up() -> None:
    """A turn is over each time that the clock is asked."""
    seconds = itertools.count(step=2 * TURN)
    share_turns(Turns(lambda: next(seconds)))
    links: list[PeerLink] = []
    most = count = 0

    async def remember(link: PeerLink) -> None:
        links.append(link)
        await trio.sleep_forever()

    async with serving(udp.serve, remember) as (address,), trio.open_nursery() as nursery:
        host, _, port = address.rpartition(":")
        with open_socket(socket.AF_INET, connect=(host, int(port))) as sender:
            sender.send(b"first")
            await until(lambda: bool(links))

            async def look() -> None:
                nonlocal most, count
                while True:
                    most = max(most, links[0].stats().received - count)
                    count = links[0].stats().received
                    await trio.lowlevel.checkpoint()

            for _ in range(120):
                sender.send(bytes(10))
            nursery.start_soon(look)
            with trio.fail_after(PATIENCE):
                while count < 121:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert most <= 2 * STEP_PACKETS  # Trio shuffles a pass, so two turns may fall between two looks


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("size", [0, 1000])
async def test_a_peer_that_floods_does_not_keep_another_waiting(size: int) -> None:
    async with serving(udp.serve, echo) as (address,), Plain(address) as flooder:
        async with udp.transport.connect(address) as good, trio.open_nursery() as nursery:

            async def flood() -> None:
                await flooder.send(b"first")
                while True:
                    await flooder.send(bytes(size))

            nursery.start_soon(flood)
            for _ in range(50):
                await good.send(b"hello")
                with trio.fail_after(PATIENCE):
                    assert await good.receive() == b"hello"
            nursery.cancel_scope.cancel()


async def test_a_handler_that_crashes_takes_nothing_with_it_and_quotes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def crash(link: PeerLink) -> None:
        packet = await link.receive()
        if packet == b"canary-secret":
            raise ZeroDivisionError(packet.decode())
        await link.send(packet)
        await link.receive()

    caplog.set_level(logging.INFO)
    counters = ServerCounters()
    async with serving(udp.serve, crash, counters=counters) as (address,):
        async with udp.transport.connect(address) as bad, udp.transport.connect(address) as good:
            await bad.send(b"canary-secret")
            await until(lambda: counters.finished == 1)
            await good.send(b"hello")
            assert await good.receive() == b"hello"
    assert "ZeroDivisionError" in caplog.text
    assert "canary-secret" not in caplog.text


# How it ends


async def test_a_peer_that_is_silent_for_too_long_is_forgotten_and_may_come_again(mock_clock: MockClock) -> None:
    reasons: list[str] = []

    async def receive_on(link: PeerLink) -> None:
        try:
            await echo(link)
        except trio.BrokenResourceError as error:
            reasons.append(str(error))

    counters = ServerCounters()
    async with serving(udp.serve, receive_on, idle=5, counters=counters) as (address,):
        async with udp.transport.connect(address) as peer:
            for turn in (1, 2):
                for _ in range(2):
                    await peer.send(b"hello")
                    await peer.receive()
                mock_clock.jump(4.9)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert counters.finished == turn - 1
                mock_clock.jump(5.1)
                await until(lambda turn=turn: counters.idle == counters.finished == turn)  # type: ignore[misc]
    assert [reason.partition(": ")[2] for reason in reasons] == ["silent for too long"] * 2


@LINUX
@pytest.mark.filterwarnings("ignore::muxkit_adapters.udp.PlaintextWarning")
async def test_a_listener_on_every_address_answers_from_the_one_that_was_asked() -> None:
    async with serving(udp.serve, echo, host="0.0.0.0", insecure=True) as (address,):
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            async with udp.connect(host, port_of(address)) as link:
                await link.send(b"hello")
                with trio.fail_after(PATIENCE):
                    assert await link.receive() == b"hello"


async def test_late_packets_of_an_ended_conversation_start_no_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(link: PeerLink) -> None:
        await link.send(await link.receive())

    counters = ServerCounters()
    monkeypatch.setattr(listeners, "LATE", NEVER)
    async with serving(udp.serve, hang_up, counters=counters) as (address,):
        async with udp.transport.connect(address) as peer:
            await peer.send(b"one")
            await peer.receive()
            await until(lambda: counters.finished == 1)
            await peer.send(b"two")
            await until(lambda: counters.late == 1)
            assert counters.admitted == 1
        monkeypatch.setattr(listeners, "LATE", 0.0)
        async with udp.transport.connect(address) as peer:
            for count in (2, 3):
                await peer.send(b"one")
                await peer.receive()
                await until(lambda count=count: counters.finished == count)  # type: ignore[misc]


async def test_a_listener_that_is_cancelled_ends_its_handlers_and_frees_its_port() -> None:
    async with serving(udp.serve, echo) as (address,):
        async with udp.transport.connect(address) as link:
            await link.send(b"hello")
            await link.receive()
    async with serving(udp.serve, echo, port_of(address)) as again:
        assert again == [address]


@LINUX
async def test_a_refused_packet_ends_one_peer_and_not_the_server() -> None:
    counters = ServerCounters()

    async def answer_late(link: PeerLink) -> None:
        async for packet in link:
            await gone.wait()
            await link.send(packet)

    gone = trio.Event()
    async with serving(udp.serve, answer_late, counters=counters) as (address,):
        async with udp.transport.connect(address) as good:
            async with Plain(address) as bad:
                await bad.send(b"forged, perhaps")
                await until(lambda: counters.admitted == 1)
            gone.set()
            # The socket at that address did not ask for anything, and refuses the answer.
            await until(lambda: counters.refused == counters.finished == 1)
            await good.send(b"hello")
            assert await good.receive() == b"hello"
