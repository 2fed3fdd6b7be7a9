"""Connections as common sessions over every link, and their common channels."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelStopped, Limits, LinkLost, LocalProtocolError, Unsupported
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config, Mode
from muxkit.runtime import background
from muxkit.testing import check_session, weather_pair
from muxkit_adapters import memory
from tests.protocols.aqueduct._session_pairs import TINY, at_rest, connected, leftovers, rough, session_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    from muxkit.testing import SessionPair
    from tests.protocols.aqueduct._session_pairs import Pair


@asynccontextmanager
async def narrow() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
    yield memory.pair(capacity=500)


@asynccontextmanager
async def weather() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
    yield weather_pair(4, latency=0.01, jitter=0.01, bandwidth=1e8)


@pytest.mark.requirement("R-07", "R-33", "R-36", "R-39", "R-41", "R-42")
@pytest.mark.parametrize(
    "make_pair",
    [
        session_pair,
        partial(session_pair, narrow, limits=TINY),
        partial(session_pair, config=Config(channel_field=False, in_flight=2, unopened=1)),
        partial(session_pair, weather),
    ],
    ids=["memory", "small windows", "few in flight", "weather"],
)
async def test_a_connection_keeps_the_promises_of_a_session(
    make_pair: Callable[[], AbstractAsyncContextManager[SessionPair]], autojump_clock: MockClock
) -> None:
    await check_session(make_pair)


async def test_asking_for_channels_is_enough_for_the_server_to_open_some(autojump_clock: MockClock) -> None:
    async with rough() as pair:
        await pair.client.peer_headers()
        await at_rest(1)
        incoming = pair.client.incoming()
        with trio.fail_after(0.2):
            async with pair.server.open() as there:
                await there.send(b"x")
                assert await (await anext(incoming)).receive() == b"x"


async def test_the_server_opens_channels_once_the_client_asks_for_them(autojump_clock: MockClock) -> None:
    async with connected() as pair, trio.open_nursery() as nursery:

        async def answer() -> None:
            async for channel in pair.client.incoming():
                await channel.send(await channel.receive() + b" back")
                await channel.aclose()

        opened = trio.Event()

        async def ask() -> None:
            async with pair.server.open() as channel:
                opened.set()
                await channel.send(b"there and")
                assert await channel.receive() == b"there and back"
            nursery.cancel_scope.cancel()

        nursery.start_soon(ask)
        await at_rest()
        assert not opened.is_set()
        nursery.start_soon(answer)


async def test_a_connection_carries_common_channels_or_its_entrypoint_is_the_applications(
    autojump_clock: MockClock,
) -> None:
    async with rough() as pair:
        async with pair.client.open() as here:
            await here.send(b"x")
            there = await anext(pair.server.incoming())
            assert await there.receive() == b"x"
            for side in (pair.client, pair.server):
                with pytest.raises(LocalProtocolError, match="carries two-way channels"):
                    _ = side.entrypoint
    async with rough() as pair:
        await pair.client.entrypoint.send(b"mine")
        await pair.server.entrypoint.receive()
        for side in (pair.client, pair.server):
            with pytest.raises(LocalProtocolError, match="the entrypoint is in use"):
                side.incoming()


async def test_messages_that_open_nothing_are_dropped(autojump_clock: MockClock) -> None:
    async with rough() as pair:
        entrypoint = pair.client.entrypoint
        first, for_first = pair.client.channel()
        second, for_second = pair.client.channel()
        third, for_third = pair.client.channel("sender")
        await entrypoint.send(b"strange")
        await entrypoint.send(b"the way back", attachments=[for_first])
        await entrypoint.send(b"a second one", attachments=[for_second])
        await entrypoint.send(b"one half", attachments=[for_third])
        incoming = pair.server.incoming()
        await at_rest()
        with pytest.raises(aqueduct.Finished):
            await second.receive()
        with pytest.raises(aqueduct.NoReceiver):
            await third.finish()
        async with pair.server.open():
            opening = await first.receive()
            assert [type(half).__name__ for half in opening.attachments] == ["Receiver", "Sender"]
        entrypoint.close()
        assert [channel async for channel in incoming] == []


async def test_attachments_in_a_common_channel_are_closed(autojump_clock: MockClock) -> None:
    async with rough() as pair, pair.client.open() as here:
        kept, ticket = pair.client.channel()
        await here.sender.send(b"with more than a payload", attachments=[ticket])
        there = await anext(pair.server.incoming())
        assert await there.receive() == b"with more than a payload"
        with pytest.raises(aqueduct.Finished):
            await kept.receive()


async def test_an_opening_is_entered_once_and_closes_or_aborts(autojump_clock: MockClock) -> None:
    async with rough() as pair:
        opening = pair.client.open()
        async with opening as here:
            await here.send(b"x")
        with pytest.raises(RuntimeError, match="opened before"):
            await opening.__aenter__()
        incoming = pair.server.incoming()
        there = await anext(incoming)
        assert [message async for message in there] == [b"x"]
        with suppress(KeyError):
            async with pair.client.open():
                there = await anext(incoming)  # else it is dropped when it is cancelled
                raise KeyError
        with pytest.raises(aqueduct.Cancelled):
            await there.receive()


async def test_opening_waits_while_as_many_channels_live_as_are_allowed(autojump_clock: MockClock) -> None:
    async with rough(limits=Limits(channels=16)) as pair, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(pair.client.open()) for _ in range(6)]
        late = trio.Event()

        async def open_one_more() -> None:
            async with pair.client.open():
                late.set()

        async with background() as nursery:
            nursery.start_soon(open_one_more)
            await at_rest(0.001)
            assert not late.is_set()
            await channels[3].aclose()
            async for channel in pair.server.incoming():
                await channel.aclose()
                if late.is_set():
                    break


async def test_channels_that_are_not_taken_block_their_opener_and_no_other_task(autojump_clock: MockClock) -> None:
    async with rough(limits=TINY) as pair, background() as nursery:
        opened = 0

        async def open_many() -> None:
            nonlocal opened
            async with AsyncExitStack() as stack:
                while True:
                    await stack.enter_async_context(pair.client.open())
                    opened += 1

        async with pair.client.open() as busy:
            far = await anext(pair.server.incoming())
            nursery.start_soon(open_many)
            await at_rest(0.001)
            before = opened
            assert 10 < before < 2000
            await busy.send(b"x")
            assert await far.receive() == b"x"
            for _ in range(before):
                await anext(pair.server.incoming())
            await at_rest(0.001)
            assert opened > before


async def test_when_the_client_leaves_the_server_has_no_more_incoming_and_can_open_nothing(
    autojump_clock: MockClock,
) -> None:
    here, there = memory.pair()
    async with aqueduct.connection(there, role="server") as server:
        async with aqueduct.connection(here) as client:
            async with client.open() as channel:
                await channel.send(b"x")
                far = await anext(server.incoming())
                assert await far.receive() == b"x"
            await far.aclose()
        assert [channel async for channel in server.incoming()] == []
        with pytest.raises((ChannelStopped, LinkLost)):
            async with server.open():
                pass


async def test_shutdown_refuses_what_comes_late_and_lets_the_rest_end(autojump_clock: MockClock) -> None:
    async with rough() as pair, pair.client.open() as here:
        await here.send(b"early")
        incoming = pair.server.incoming()
        there = await anext(incoming)
        async with pair.client.open() as waiting:
            await waiting.send(b"in the backlog")
            await at_rest()
            async with background() as nursery:
                nursery.start_soon(partial(pair.server.shutdown, grace=100))
                await at_rest()
                with pytest.raises(ChannelStopped):
                    await pair.client.open().__aenter__()
                taken = await anext(incoming)
                assert await taken.receive() == b"in the backlog"
                assert await there.receive() == b"early"
                with pytest.raises(StopAsyncIteration):
                    await anext(incoming)


async def test_a_channel_that_crosses_a_shutdown_reads_that_the_peer_is_closing(autojump_clock: MockClock) -> None:
    async with rough(weather) as pair, pair.client.open() as early:
        await early.send(b"x")
        await anext(pair.server.incoming())
        async with background() as nursery:
            nursery.start_soon(partial(pair.server.shutdown, grace=100))
            async with pair.client.open() as late:  # before the word can be here
                with pytest.raises(ChannelStopped, match="the peer is closing the connection"):
                    await late.receive()
                with pytest.raises(ChannelStopped, match="the peer is closing the connection"):
                    await late.send(b"unread")


async def test_a_channel_that_a_message_carried_is_lost_in_transit_whether_the_peer_is_closing_or_not(
    autojump_clock: MockClock,
) -> None:
    async with rough() as pair, pair.client.open() as here:
        await here.send(b"x")
        there = await anext(pair.server.incoming())
        async with background() as nursery:
            nursery.start_soon(partial(pair.server.shutdown, grace=100))
            await at_rest()
            kept, ticket = pair.client.channel()
            there.receiver.close()
            await here.sender.send(b"not taken", attachments=[ticket])
            with pytest.raises(aqueduct.LostInTransit):
                await kept.receive()


async def test_shutdown_of_a_rich_connection_takes_no_more_messages_and_gives_up_what_is_left(
    autojump_clock: MockClock,
) -> None:
    async with connected() as pair:
        kept, ticket = pair.client.channel()
        await pair.client.entrypoint.send(b"came before", attachments=[ticket])
        await at_rest()
        began = trio.current_time()
        await pair.server.shutdown(grace=3)
        assert trio.current_time() == began + 3
        message = await pair.server.entrypoint.receive()
        assert message.payload == b"came before"
        with pytest.raises(aqueduct.Finished):
            await pair.server.entrypoint.receive()
        with pytest.raises(aqueduct.NoReceiver):
            await pair.client.entrypoint.send(b"comes late")
        with pytest.raises(aqueduct.Cancelled):
            await kept.receive()


async def test_there_is_no_ping_on_a_link_that_measures_nothing(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        with pytest.raises(Unsupported, match="has no ping"):
            await pair.client.ping()


@pytest.mark.requirement("R-11")
async def test_a_peer_that_makes_our_handlers_fail_is_served_no_faster_than_its_allowance(
    autojump_clock: MockClock,
) -> None:
    limits = Limits(resets_burst=20, resets_per_second=1)
    async with rough(limits=limits) as pair, background() as nursery:

        async def open_each() -> None:
            while True:
                with suppress(aqueduct.Cancelled):
                    async with pair.client.open() as channel:
                        await channel.receive()

        nursery.start_soon(_until_lost, open_each)
        failed: list[float] = []

        async def fail_each() -> None:
            async for channel in pair.server.incoming():
                channel.abort()
                failed.append(trio.current_time())

        nursery.start_soon(_until_lost, fail_each)
        await trio.sleep(10.5)
        # The handler's failure and the peer's own end of the channel may each take a token.
        assert 10 <= len(failed) <= 20 + 11
        assert failed[-1] - failed[0] > 9
        nursery.cancel_scope.cancel()


async def _until_lost(call: Callable[[], Awaitable[object]]) -> None:
    with suppress(trio.BrokenResourceError):
        await call()


@pytest.mark.requirement("R-44")
@pytest.mark.seeds(10, soak=300)
async def test_opening_closing_and_aborting_at_random_from_both_sides_leaves_nothing(
    seed: int, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)

    async def live(pair: Pair, side: int) -> None:
        session = (pair.client, pair.server)[side]
        for _ in range(30):
            try:
                async with session.open() as channel:
                    await channel.send(b"x" * dice.choice((0, 10, 5000)))
                    if dice.random() < 0.3:
                        channel.abort()
                    elif dice.random() < 0.5:
                        await channel.receive()
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel):
                pass
            if dice.random() < 0.3:
                await trio.sleep(dice.random())

    async def answer(pair: Pair, side: int) -> None:
        async with trio.open_nursery() as nursery:
            async for channel in (pair.client, pair.server)[side].incoming():
                nursery.start_soon(use, channel)

    async def use(channel: aqueduct.Channel) -> None:
        try:
            if dice.random() < 0.2:
                channel.abort()
            else:
                await channel.send(await channel.receive())
                await channel.aclose()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel):
            channel.abort()

    async with connected() as pair:
        async with background() as answers:
            for side in (0, 1):
                answers.start_soon(answer, pair, side)
            async with trio.open_nursery() as lives:
                for side in (0, 1):
                    lives.start_soon(live, pair, side)
            await trio.sleep(3)
            assert leftovers(pair) == []


async def test_the_modes_can_be_used_on_a_common_channel_as_well(autojump_clock: MockClock) -> None:
    async with rough() as pair, pair.client.open() as here:
        await here.sender.send(b"tick", mode=Mode.UNRELIABLE)
        there = await anext(pair.server.incoming())
        assert await there.receive() == b"tick"


def test_the_plugin_says_what_it_speaks_over() -> None:
    protocol = aqueduct.protocol
    assert protocol.options == {"config", "headers"}
    assert protocol.links == {"stream", "multistream"}
