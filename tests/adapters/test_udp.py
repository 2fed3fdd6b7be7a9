"""Packets over UDP keep what a packet link promises, and a client learns of network errors."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LocalProtocolError
from muxkit.runtime import Described, NowaitPackets
from muxkit.testing import cancel_sweep, check_packet_link
from muxkit_adapters import udp
from muxkit_adapters.packets.sockets import open_socket
from muxkit_adapters.udp import PacketTooLarge, PeerLink, PlaintextWarning, ServerCounters, UdpLink

from ._links import IPV6, NEVER, comes_down_to, descriptors_and_tasks, port_of, serving
from ._packets import LINUX, Link, echo, lose, paired, refuse_runs, refusing_port, socket_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Operation = Callable[[], Awaitable[object]]

LIMITS = Limits()


def pair(**options: object) -> AbstractAsyncContextManager[tuple[UdpLink, PeerLink]]:
    return paired(udp.serve, udp.transport.connect, **options)


def pair_on_ipv6() -> AbstractAsyncContextManager[tuple[UdpLink, PeerLink]]:
    return pair(host="::1")


# A link


@pytest.mark.requirement("R-33", "R-34")
@pytest.mark.parametrize("make_pair", [pair, pytest.param(pair_on_ipv6, marks=IPV6)])
async def test_udp_is_a_packet_link(make_pair: object) -> None:
    await check_packet_link(make_pair, goodbye=False)  # type: ignore[arg-type]


async def test_by_url_it_is_a_transport_for_packets() -> None:
    assert udp.transport.link == "packets"
    async with serving(udp.transport.serve, echo, "127.0.0.1:0", limits=LIMITS) as (address,):
        async with udp.transport.connect(address) as link:
            assert isinstance(link, NowaitPackets)
            assert isinstance(link, Described)
            await link.send(b"hello")
            assert await link.receive() == b"hello"


async def test_a_link_names_its_peer_and_counts() -> None:
    async with pair() as (here, there):
        assert here.peer.startswith("udp 127.0.0.1:")
        assert there.peer == f"udp 127.0.0.1:{socket_of(here).getsockname()[1]}"
        await here.send(bytes(100))
        await there.receive()
        assert (here.stats().sent, here.stats().sent_bytes) == (3, len(b"hello" + b"so it is me") + 100)
        assert (there.stats().received, there.stats().received_bytes) == (3, here.stats().sent_bytes)
        assert repr(here) == f"<UdpLink {here.peer}>"
        await here.aclose()
        assert repr(here) == f"<UdpLink {here.peer}, closed>"


async def test_what_the_kernel_was_asked_to_hold_and_what_it_granted_are_visible() -> None:
    async with pair(receive_buffer=50_000, send_buffer=2**30) as (_, there):
        buffers = there.buffers
        assert (buffers.receive_asked, buffers.send_asked) == (50_000, 2**30)
        assert buffers.receive == 50_000
        assert 0 < buffers.send < 2**30


async def test_a_buffer_smaller_than_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with udp.connect("127.0.0.1", 9, receive_buffer=2**30) as link:
        assert f"asked for {2**30} and {2**20} bytes" in caplog.text
        assert f"got {link.buffers.receive} and" in caplog.text


async def test_many_peers_share_a_socket_and_each_has_its_own_link() -> None:
    links: list[PeerLink] = []

    async def answer(link: PeerLink) -> None:
        links.append(link)
        async for packet in link:
            await link.send(packet + b" back")

    counters = ServerCounters()
    limits = Limits(half_open=300, handshake=NEVER)
    async with serving(udp.serve, answer, limits=limits, idle=NEVER, counters=counters) as (address,):
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(udp.transport.connect(address)) for _ in range(200)]
            for turn in range(2):
                for number, peer in enumerate(peers):
                    await peer.send(b"%d of turn %d" % (number, turn))
                for number, peer in enumerate(peers):
                    assert await peer.receive() == b"%d of turn %d back" % (number, turn)
            assert len(links) == counters.admitted == counters.peers == 200


async def test_a_listener_on_every_address_of_a_host_serves_each() -> None:
    async with serving(udp.serve, echo, host="localhost") as addresses:
        assert {address.rpartition(":")[0] for address in addresses} <= {"127.0.0.1", "[::1]"}
        for address in addresses:
            async with udp.transport.connect(address) as link:
                await link.send(b"hello")
                assert await link.receive() == b"hello"


async def test_a_port_that_is_taken_is_an_error_with_the_address() -> None:
    async with serving(udp.serve, echo) as (address,):
        with pytest.raises(OSError, match=f"udp {address}: address already in use"):
            await udp.serve(echo, port_of(address))


@pytest.mark.requirement("R-43")
async def test_many_links_leave_no_descriptor_and_no_task_behind() -> None:
    async with serving(udp.serve, echo) as (address,):

        async def visit(times: int) -> None:
            for _ in range(times):
                async with udp.transport.connect(address) as link:
                    await link.send(b"x")
                    await link.receive()

        await visit(3)
        descriptors, tasks = await descriptors_and_tasks()
        await visit(100)
        # A peer's handler lives until it has been silent for too long; a descriptor would be a leak.
        await comes_down_to((descriptors, tasks + 100))
    await comes_down_to((descriptors - 1, tasks))


# Sizes


@pytest.mark.requirement("R-45")
async def test_a_packet_that_is_too_large_is_refused_with_both_numbers() -> None:
    async with pair() as (here, there):
        for link in (here, there):
            with pytest.raises(PacketTooLarge, match=r"a packet of 1,233 bytes is above packet_limit=1,232") as caught:
                await link.send(bytes(1233))
            assert isinstance(caught.value, LocalProtocolError)
            assert (caught.value.size, caught.value.limit) == (1233, 1232)
            assert link.stats().lost == 0


@IPV6
@pytest.mark.requirement("R-45")
async def test_unless_told_otherwise_a_packet_fits_the_smallest_path_that_ipv6_allows() -> None:
    async with pair_on_ipv6() as (here, _):
        assert here.packet_limit == 1280 - 40 - 8


@pytest.mark.requirement("R-45")
async def test_larger_packets_go_as_far_as_the_path_allows() -> None:
    async with pair(largest=65_507) as (_, there), pair_of_large() as (here, _):
        assert here.packet_limit == there.packet_limit == 65_507
        await here.send(bytes(65_507))
        assert here.path_mtu is None or here.path_mtu >= 65_507 + 28
    for nonsense in (0, 65_508):
        with pytest.raises(ValueError, match=f"largest={nonsense}"):
            async with udp.connect("127.0.0.1", 9, largest=nonsense):
                pass


def pair_of_large() -> AbstractAsyncContextManager[tuple[UdpLink, PeerLink]]:
    return paired(udp.serve, partial(udp.transport.connect, largest=65_507))


async def test_runs_of_packets_arrive_as_they_were_sent_with_and_without_the_kernels_help() -> None:
    async with pair() as (here, there):
        # Longer than the kernel cuts at once, and no more than it keeps wherever it was told nothing else.
        runs = [[bytes([n]) * 1200 for n in range(80)], [bytes([n]) * (n + 1) for n in range(130)], [b"", b"a", b""]]
        for helped in (True, False):
            for link, other in ((here, there), (there, here)):
                if not helped and sys.platform == "linux":
                    refuse_runs(link)
                for run in runs:
                    left = run
                    while left:
                        left = left[link.send_nowait(left) :]
                    assert [await other.receive() for _ in run] == run


@LINUX
async def test_a_kernel_that_cuts_no_runs_gets_packets_one_by_one() -> None:
    async with pair() as (here, there):
        refuse_runs(here)
        packets = [bytes([n]) * 100 for n in range(10)]
        assert here.send_nowait(packets) == 10
        assert [await there.receive() for _ in packets] == packets


# What the network says


@LINUX
async def test_nobody_there_is_an_error_for_the_first_packet() -> None:
    with refusing_port() as port:
        async with udp.connect("127.0.0.1", port) as link:
            await link.send(b"anybody?")
            with pytest.raises(trio.BrokenResourceError, match=f"udp 127.0.0.1:{port}: Connection refused") as caught:
                await link.receive()
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
            with pytest.raises(trio.BrokenResourceError):
                await link.send(b"anybody?")
            assert link.stats().refused == 1


@LINUX
async def test_a_peer_that_was_heard_is_given_up_after_so_many_refusals_in_a_row() -> None:
    async with udp_and_plain(refusals=3) as (link, there):
        there.close()
        with pytest.raises(trio.BrokenResourceError, match="Connection refused"):
            await send_on(link)
        assert link.stats().refused == 3


async def send_on(link: Link) -> None:
    while True:
        await link.send(b"hello?")


@LINUX
async def test_a_refusal_in_between_is_counted_and_nothing_else() -> None:
    async with udp_and_plain(refusals=3) as (link, there):
        port = there.getsockname()[1]
        for turn in range(1, 5):
            there.close()
            await link.send(b"lost")
            await until(lambda turn=turn: link.receive_nowait(1) == [] and link.stats().refused == turn)  # type: ignore[misc]
            there = open_socket(socket.AF_INET, bind=("127.0.0.1", port))
            there.sendto(b"back again", socket_of(link).getsockname())
            assert await link.receive() == b"back again"
        there.close()


@LINUX
async def test_refusals_can_be_ignored_altogether() -> None:
    async with udp_and_plain(refusals=None) as (link, there):
        there.close()
        while link.stats().refused <= 10:
            await link.send(b"hello?")
        await link.send(b"hello?")


@asynccontextmanager
async def udp_and_plain(*, refusals: int | None) -> AsyncIterator[tuple[UdpLink, socket.socket]]:
    """A link, and the plain socket that it has heard something from."""
    with open_socket(socket.AF_INET, bind=("127.0.0.1", 0)) as there:
        async with udp.connect("127.0.0.1", there.getsockname()[1], refusals=refusals) as link:
            there.sendto(b"hello", socket_of(link).getsockname())
            assert await link.receive() == b"hello"
            yield link, there


@LINUX
async def test_what_found_the_buffer_of_a_client_full_is_counted() -> None:
    async with paired(udp.serve, partial(udp.transport.connect, receive_buffer=5000)) as (here, there):
        for _ in range(100):
            await there.send(bytes(1000))
        await here.receive()
        here.receive_nowait(100)
        await there.send(b"one more")
        while await here.receive() != b"one more":
            pass
        assert here.stats().received + here.stats().dropped == 1 + 100 + 1


@LINUX
@pytest.mark.requirement("R-48")
async def test_on_a_lossy_kernel_what_arrives_is_whole_in_order_and_counted_right() -> None:
    async with pair() as (here, there):
        lose(socket_of(there), 0.2)
        for number in range(1000):
            await here.send(b"%d" % number)
        lose(socket_of(there), 0.0)
        await here.send(b"that is all")
        got: list[int] = []
        while (packet := await there.receive()) != b"that is all":
            got.append(int(packet))
        assert 730 < len(got) < 870  # 800, and more than five standard deviations around it
        assert got == sorted(set(got))
        assert there.stats().received == 2 + len(got) + 1


# Plaintext


@pytest.mark.requirement("R-62")
async def test_beyond_loopback_it_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"udp 192.0.2.1:7 is plaintext .* use dtls, or pass insecure=True"):
        async with udp.connect("192.0.2.1", 7):
            pass
    with pytest.raises(ValueError, match="is plaintext"):
        await udp.transport.serve(echo, "0.0.0.0:0", limits=LIMITS, task_status=trio.TASK_STATUS_IGNORED)


@pytest.mark.requirement("R-62")
async def test_asked_for_it_warns_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxkit_adapters._addresses._warned", set())  # it warns once a process
    with pytest.warns(PlaintextWarning) as warned:
        async with udp.connect("192.0.2.1", 7, insecure=True) as link:
            assert repr(link) == "<UdpLink udp 192.0.2.1:7 (plaintext, insecure)>"
    assert len(warned) == 1


# Cancellation


@pytest.mark.requirement("R-31", "R-32")
async def test_a_link_survives_a_cancellation_at_any_step() -> None:
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
            await until(lambda: there.stats().received == 3)
            yield partial(there.receive)
            await here.send(b"two")
            while await there.receive() != b"two":
                pass

    assert await cancel_sweep(sending) >= 1
    assert await cancel_sweep(receiving) >= 1


@pytest.mark.requirement("R-31", "R-43")
async def test_connecting_and_serving_can_be_cancelled_at_any_step() -> None:
    async def visit() -> None:
        async with serving(udp.serve, echo, host="localhost") as (address, *_):
            async with udp.transport.connect(address) as link:
                await link.send(b"hello")
                assert await link.receive() == b"hello"

    @asynccontextmanager
    async def visiting() -> AsyncIterator[Operation]:
        before = await descriptors_and_tasks()
        yield partial(visit)
        await comes_down_to(before)  # a name may still be looked up by a thread that no task waits for

    assert await cancel_sweep(visiting) > 5
