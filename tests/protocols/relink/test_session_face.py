"""A link is a session as muxkit defines it, on one connection and over many, common channels included."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped, Limits, LinkLost, LocalProtocolError, Unsupported
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Link
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import SessionPair, check_session, weather_pair
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, TRANSACTIONS, at_rest, both, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    Pair = tuple[trio.abc.Stream, trio.abc.Stream]

SMALL = Limits(channel_bytes=1000, channel_floor=100, outbox=5000)


@asynccontextmanager
async def on_streams(
    pair: Callable[[], Pair] = memory.pair, config: Config = QUIET, limits: Limits | None = None
) -> AsyncIterator[SessionPair]:
    """Run two sessions on one connection."""
    here, there = pair()
    over = trio.Event()

    async def listen(task_status: trio.TaskStatus[Link]) -> None:
        async with relink.session(there, role="listener", linger=1, config=config, limits=limits) as other:
            task_status.started(other)
            await over.wait()

    async def start() -> None:
        others.append(await nursery.start(listen))
        ready.set()

    def cut() -> None:
        for link in (one, *others):
            pump = connection_of(link).carrier
            assert pump is not None
            pump.lose("the test cut it", by="network")

    others: list[Link] = []
    ready = trio.Event()
    async with background() as nursery:
        nursery.start_soon(start)
        async with relink.session(here, role="connector", linger=1, config=config, limits=limits) as one:
            await ready.wait()
            yield SessionPair(one, others[0], cut)
            over.set()


def over_memory() -> AbstractAsyncContextManager[SessionPair]:
    return on_streams()


def with_transactions() -> AbstractAsyncContextManager[SessionPair]:
    return on_streams(config=TRANSACTIONS)


def with_small_windows() -> AbstractAsyncContextManager[SessionPair]:
    return on_streams(lambda: memory.pair(capacity=500), limits=SMALL)


def in_weather() -> AbstractAsyncContextManager[SessionPair]:
    return on_streams(lambda: weather_pair(4, latency=0.01, jitter=0.01, bandwidth=1e8))


@asynccontextmanager
async def over_many_connections() -> AsyncIterator[SessionPair]:
    """Run two sessions over many connections.

    A cut alone harms neither side; so no connection is let in any more either, and both sides time out."""
    keep = relink.Keep(age=0.5)
    async with world(keep=keep, linger=1) as made, made.link(patience=0.5, linger=1) as one:

        def cut() -> None:
            made.is_reachable = False
            made.nursery.start_soon(made.cut)

        yield SessionPair(one, await made.other(), cut)
        made.let_go()


@pytest.mark.requirement("R-07", "R-33", "R-36", "R-39", "R-41", "R-42")
@pytest.mark.parametrize(
    "make_pair", [over_memory, with_transactions, with_small_windows, in_weather, over_many_connections]
)
async def test_a_link_keeps_the_promises_of_a_session(
    make_pair: Callable[[], AbstractAsyncContextManager[SessionPair]], autojump_clock: MockClock
) -> None:
    await check_session(make_pair)


async def test_a_channel_goes_on_over_another_connection(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.open() as here:
        await here.send(b"before")
        there = await anext(aiter(pair.other))
        await pair.world.cut()
        await here.send(b"between")
        await there.send(b"back")
        assert [await there.receive(), await there.receive(), await here.receive()] == [b"before", b"between", b"back"]
        assert pair.one.connections == 2


@pytest.mark.requirement("R-44")
async def test_ids_are_used_again_once_both_sides_are_done(autojump_clock: MockClock) -> None:
    tiny = Config(keepalive=None, connector_id_size=1, listener_id_size=1)
    async with both(tiny) as pair:

        async def echo() -> None:
            async for channel in pair.other.incoming():
                await channel.send(await channel.receive())
                await channel.aclose()

        async with background() as nursery:
            nursery.start_soon(echo)
            for number in range(300):  # of which 128 are ours
                async with pair.one.open() as channel:
                    await channel.send(b"%d" % number)
                    assert await channel.receive() == b"%d" % number
            await trio.sleep(1)
            assert pair.one.stats().channels == pair.other.stats().channels == 0


async def test_opening_waits_while_all_ids_are_in_use(autojump_clock: MockClock) -> None:
    tiny = Config(keepalive=None, connector_id_size=1, listener_id_size=1)
    async with both(tiny) as pair, background() as nursery:
        channels = [pair.one.open() for _ in range(128)]
        opened = [await channel.__aenter__() for channel in channels]
        late = trio.Event()

        async def open_one_more() -> None:
            async with pair.one.open():
                late.set()

        nursery.start_soon(open_one_more)
        await at_rest()
        assert not late.is_set()
        await opened[17].aclose()
        await late.wait()
        for channel in opened:
            await channel.aclose()


async def test_a_channel_that_was_never_used_is_never_heard_of(autojump_clock: MockClock) -> None:
    async with both() as pair:
        before = pair.one.stats().bytes_sent
        async with pair.one.open():
            pass
        with pytest.raises(KeyError):
            async with pair.one.open():
                raise KeyError
        await at_rest()
        assert pair.one.stats().bytes_sent == before
        assert pair.one.stats().channels == 0


async def test_a_receiver_that_closes_stops_its_sender(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.open() as here:
        await here.send(b"x")
        there = await anext(aiter(pair.other))
        await there.aclose()
        await at_rest()
        with pytest.raises(ChannelStopped):
            await here.send(b"y")
        with pytest.raises(trio.EndOfChannel):
            await here.receive()


async def test_an_abort_is_heard_in_front_of_what_nobody_reads(autojump_clock: MockClock) -> None:
    async with both(limits=SMALL) as pair, pair.one.open() as here:
        await here.send(b"x")
        there = await anext(aiter(pair.other))
        with trio.move_on_after(1) as full:
            while True:
                await here.send(bytes(50))
        assert full.cancelled_caught
        here.abort()
        await at_rest()
        with pytest.raises(ChannelStopped):
            await there.send(b"y")
        assert await there.receive() == b"x"
        with suppress(ChannelCancelled):
            while True:
                assert await there.receive() == bytes(50)


async def test_common_channels_and_receivers_do_not_share_a_link(autojump_clock: MockClock) -> None:
    async with both() as pair:
        pair.one.incoming()
        with pytest.raises(LocalProtocolError, match="channels in both directions"):
            pair.one.receivers()
        pair.other.receivers()
        with pytest.raises(LocalProtocolError, match="receivers"):
            pair.other.incoming()
        async with pair.one.open() as channel:
            with pytest.raises(LocalProtocolError, match="common one"):
                pair.one.receiver(channel.id)


async def test_one_channel_is_too_few_for_common_ones(autojump_clock: MockClock) -> None:
    single = Config(keepalive=None, connector_id_size=0, listener_id_size=0)
    async with both(single) as pair:
        with pytest.raises(Unsupported, match="0 bytes"):
            async with pair.one.open():
                pass


@pytest.mark.parametrize("bound", ["channels", "channel_memory"])
async def test_limits_that_leave_room_for_no_channel_are_named_instead_of_waiting(
    bound: str, autojump_clock: MockClock
) -> None:
    """Half of the channels are for the peer, so with one channel `open` waited for ever."""
    with trio.fail_after(3600):
        async with both(limits=Limits(**{bound: 1})) as pair:
            with pytest.raises(Unsupported, match=rf"Limits\({bound}="):
                await pair.one.open()


async def test_a_channel_is_a_byte_stream_too(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.open() as here:
        ours = here.as_stream()
        data = bytes(range(256)) * 2000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, data)
            there = await anext(aiter(pair.other))
            assert isinstance(there, relink.Channel)
            theirs = there.as_stream()
            got = b""
            while len(got) < len(data):
                got += await theirs.receive_some(10_000)
        assert got == data
        await ours.aclose()
        assert await theirs.receive_some() == b""


async def test_a_lost_session_says_why(autojump_clock: MockClock) -> None:
    async def use(pair: SessionPair) -> None:
        async with pair.one.open() as channel:
            await channel.send(b"x")
            pair.cut()
            with pytest.raises(LinkLost, match="the test cut it"):
                await channel.receive()

    with pytest.raises(LinkLost, match="the test cut it"):  # again, since neither side knows what became of the message
        async with on_streams() as pair:
            await use(pair)


@pytest.mark.requirement("R-41", "R-42")
async def test_leaving_does_not_wait_for_a_reader_who_can_read_on_afterwards(autojump_clock: MockClock) -> None:
    read: list[bytes] = []
    has_left = trio.Event()

    async def read_late(link: Link) -> None:
        async for channel in link.incoming():
            await has_left.wait()
            read.extend([message async for message in channel])

    async with world(handler=read_late) as made:
        async with made.link() as one, one.open() as channel:
            for number in range(10):
                await channel.send(b"%d" % number)
        assert trio.current_time() < 1
        has_left.set()
        await at_rest()
        assert read == [b"%d" % number for number in range(10)]
