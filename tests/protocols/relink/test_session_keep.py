"""A listener bounds what it keeps for connectors, how long a handshake may take, and which peer may come back."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LinkLost
from muxkit.protocols import relink
from muxkit.protocols.relink import Keep, Link
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, SOON, at_rest, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.protocols.relink._session_world import World


@asynccontextmanager
async def absent(made: World, count: int) -> AsyncIterator[list[Link]]:
    """Return the listener's side of links whose connectors went away without a shutdown."""
    first = len(made.links)
    for _ in range(count):
        with trio.CancelScope() as scope:
            async with made.link() as one:
                await one.connected()
                scope.cancel()
                await trio.lowlevel.checkpoint()
    await at_rest()
    yield made.links[first:]


# --- bounds


@pytest.mark.requirement("R-01", "R-39")
async def test_absent_links_are_bounded_in_number(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(links=3)) as made, absent(made, 5) as links:
        assert made.listener.absent == 3
        for gone in links[:2]:
            with pytest.raises(LinkLost, match="more sessions were absent"):
                await gone.receiver(1).receive()
        assert [connection_of(link).error for link in links[2:]] == [None] * 3


@pytest.mark.requirement("R-01")
async def test_absent_links_are_bounded_in_age(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(age=100)) as made, absent(made, 1) as [link]:
        began = trio.current_time()
        with pytest.raises(LinkLost, match="absent for longer"):
            await link.receiver(1).receive()
        assert trio.current_time() - began == pytest.approx(100, abs=1)
        assert made.listener.links == 0


@pytest.mark.requirement("R-01", "R-03")
async def test_absent_links_are_bounded_in_bytes_also_while_they_are_absent(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(bytes=200_000)) as made, absent(made, 2) as [light, heavy]:
        sent = 0

        async def push() -> None:
            nonlocal sent
            sender = heavy.sender(1)
            while True:
                await sender.send(bytes(10_000))
                sent += 1

        with pytest.raises(LinkLost, match="held more bytes"):
            await push()
        assert 10 <= sent <= 20
        assert connection_of(light).error is not None  # it had been absent for longer, and went first
        assert made.listener.absent_bytes == 0


@pytest.mark.requirement("R-01", "R-03")
async def test_channels_of_absent_links_count_though_nothing_is_in_them(autojump_clock: MockClock) -> None:
    async def read(link: Link) -> None:
        async with trio.open_nursery() as nursery:
            async for receiver in link.receivers():
                nursery.start_soon(receiver.process, consume)

    async def consume(message: relink.Message) -> None:
        await trio.lowlevel.checkpoint()

    async with world(handler=read, keep=Keep(bytes=1_000_000)) as made:
        for channels, is_kept in ((100, True), (400, False)):
            with trio.CancelScope() as scope:
                async with made.link() as one:
                    receipts = [await one.sender(channel).send(b"") for channel in range(channels)]
                    for receipt in receipts:
                        await receipt.consumed()
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
            await at_rest()
            assert made.listener.links == is_kept
            assert made.listener.absent_bytes == is_kept * (16 * 1024 + 100 * 3 * 1024)
            await trio.sleep(1000)


@pytest.mark.requirement("R-01")
async def test_a_link_whose_connector_never_heard_of_it_counts_as_absent(autojump_clock: MockClock) -> None:
    """The listener cannot know whether its answer arrived: the link may be asked for again, until it is too old."""
    async with world(keep=Keep(age=10)) as made:
        async with made.dial() as stream:
            await stream.send_all(relink.handshake.encode_version(0))
            await stream.receive_some()
            await stream.send_all(relink.handshake.encode_request(QUIET))
            await at_rest()
        orphan = await made.other()
        await at_rest()
        assert (made.listener.links, made.listener.absent) == (1, 1)
        async with made.link() as one:
            await one.connected()
            assert one.id != orphan.id
            with pytest.raises(LinkLost, match="absent for longer"):
                await orphan.receiver(1).receive()
            assert (made.listener.links, made.listener.absent) == (1, 0)
            made.let_go()


async def test_a_link_that_came_back_does_not_count(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(links=1, age=10)) as made, made.link() as one:
        await made.other()
        for _ in range(3):
            await made.cut()
            await trio.sleep(1)
            assert one.is_connected
            assert made.listener.absent == 0
        await trio.sleep(100)
        assert one.connections == 4
        made.let_go()


# --- handshakes


@pytest.mark.clause("relink-H04")
@pytest.mark.requirement("R-13", "R-29")
async def test_a_handshake_that_dribbles_is_dropped_in_time(autojump_clock: MockClock) -> None:
    async def dribble(stream: trio.abc.Stream) -> None:
        for byte in relink.handshake.encode_version(0) + relink.handshake.encode_request(QUIET):
            await stream.send_all(bytes((byte,)))
            await trio.sleep(1)

    async with world() as made, made.dial() as stream:
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await dribble(stream)
        assert trio.current_time() - began == pytest.approx(10, abs=1.1)
        assert made.listener.links == 0


@pytest.mark.requirement("R-13")
async def test_a_handshake_that_never_ends_is_dropped_at_a_kibibyte(autojump_clock: MockClock) -> None:
    sent = 9

    async def push(stream: trio.abc.Stream) -> None:
        nonlocal sent
        while True:
            await stream.send_all(b"x" * 100)
            sent += 100
            await at_rest()

    async with world() as made, made.dial() as stream:
        await stream.send_all(relink.handshake.encode_version(0) + bytes((255,)))
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
            await push(stream)
        assert sent < 1500


@pytest.mark.requirement("R-13")
async def test_silent_connections_keep_nobody_out(autojump_clock: MockClock) -> None:
    async with world(limits=Limits(half_open=3)) as made:
        async with made.dial(), made.dial(), made.dial(), made.dial() as last:
            await at_rest()
            async with made.link() as one:
                with trio.fail_after(3):
                    await one.connected()
                await last.send_all(relink.handshake.encode_version(0))
                assert await last.receive_some() == relink.handshake.encode_version(0)
            made.let_go()


@pytest.mark.requirement("R-21")
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(8) + b"\x02\xff\xfe" + bytes(40), b""])
async def test_garbage_instead_of_a_handshake_is_hung_up_on(garbage: bytes, autojump_clock: MockClock) -> None:
    async with world() as made, made.dial() as stream:
        await stream.send_all(garbage)
        with trio.fail_after(20):
            while await stream.receive_some():
                pass
        assert made.listener.links == 0


@pytest.mark.requirement("R-21", "R-36")
async def test_a_packet_that_breaks_the_rules_ends_the_link_on_both_sides(autojump_clock: MockClock) -> None:
    async with world() as made, made.link() as one:
        other = await made.other()
        receiver = other.receiver(1)
        pump = connection_of(one).carrier
        assert pump is not None
        await pump._stream.send_all(bytes.fromhex("A0 00 00 00 00 00 00 00"))
        with pytest.raises(LinkLost, match="relink-G06") as caught:
            await receiver.receive()
        assert caught.value.by == "peer"
        assert caught.value.peer_reason is None
        with pytest.raises(LinkLost, match="relink-G06") as caught:  # which no document has a place for
            await one.receiver(1).receive()
        assert (caught.value.by, caught.value.code) == ("peer", 400)
        assert str(caught.value.peer_reason).startswith("general packet type 5")


@pytest.mark.requirement("R-50")
@pytest.mark.parametrize("reads", [0, 8, 16])
async def test_a_listener_that_says_nothing_in_the_handshake_is_dialled_again(
    reads: int, autojump_clock: MockClock
) -> None:
    async with world() as made:
        silent = True

        @asynccontextmanager
        async def dial() -> AsyncIterator[trio.abc.Stream]:
            nonlocal silent
            if not silent:
                async with made.dial() as stream:
                    yield stream
                return
            silent = False
            here, there = memory.pair()
            await there.send_all(relink.handshake.encode_version(0)[:reads])
            async with here:
                yield here

        async with relink.link(dial, config=QUIET, backoff=SOON) as one:
            with trio.fail_after(12):
                await one.connected()
            made.let_go()
