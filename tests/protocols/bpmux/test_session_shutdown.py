"""A shutdown lets live channels finish, refuses new ones visibly, and loses nothing that was accepted."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

import muxkit
from muxkit import ChannelCancelled, ChannelStopped, LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Chunk, Type, encode_chunk
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import replay, weather_pair
from muxkit_adapters import memory
from tests.protocols.bpmux._pairs import at_rest, echo_each, next_duplex, next_request, next_source, sessions
from tests.protocols.bpmux._sessions import round_trip

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.bpmux import IncomingRequest, Session

pytestmark = pytest.mark.requirement("R-42")

GRACE = 60.0  # s of virtual time, more than these tests need
UNKNOWN = encode_chunk(Chunk(Type.IN_REQUEST, 77, payload=b""))  # a response to a request that does not exist


# --- live channels


async def test_live_channels_go_on_until_they_end(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open() as here, trio.open_nursery() as nursery:
        there = await next_duplex(pair.other)
        began = trio.current_time()
        nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
        await trio.sleep(5)
        await round_trip(here, there)
        await here.aclose()
        await there.aclose()
    assert trio.current_time() - began == 5


async def test_what_came_before_is_still_given_out_then_incoming_ends() -> None:
    async with sessions() as pair:
        async with pair.one.open_duplex(b"1"), pair.one.open_duplex(b"2"):
            await at_rest()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
                await at_rest()
                openings = []
                async for channel in pair.other.incoming():
                    openings.append(channel.opening)
                    await channel.aclose()
        assert openings == [b"1", b"2"]


async def test_every_kind_of_line_ends() -> None:
    async with sessions() as pair:
        await pair.other.shutdown(grace=0)
        for line in (pair.other.incoming(), pair.other.sources(), pair.other.sinks(), pair.other.requests()):
            with pytest.raises(StopAsyncIteration):
                await anext(line)


async def test_a_question_that_was_taken_is_answered() -> None:
    async with sessions() as pair, pair.one.open_request(b"?") as request, trio.open_nursery() as nursery:
        asked = await next_request(pair.other)
        nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
        await at_rest()
        await asked.respond(b"!")
        assert await request.response() == b"!"


async def test_without_channels_it_is_over_at_once(autojump_clock: MockClock) -> None:
    async with sessions() as pair:
        began = trio.current_time()
        await pair.one.shutdown(grace=GRACE)
        assert trio.current_time() == began


async def test_what_does_not_end_is_cut_when_the_grace_is_over(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await there.send(b"before")
        began = trio.current_time()
        await pair.other.shutdown(grace=3)
        assert trio.current_time() - began == 3
        assert await here.receive() == b"before"
        with pytest.raises(ChannelCancelled):
            await here.receive()
        with pytest.raises(trio.ClosedResourceError):
            await there.send(b"after")


async def test_a_second_one_with_less_patience_cuts_the_first_short(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open():
        await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
            await trio.sleep(1)
            await pair.other.shutdown(grace=1)
        assert trio.current_time() - began == 2


async def test_both_sides_at_once(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open() as here, pair.other.open() as back:
        there, forth = await next_duplex(pair.other), await next_duplex(pair.one)
        async with trio.open_nursery() as nursery:
            for session in (pair.one, pair.other):
                nursery.start_soon(partial(session.shutdown, grace=GRACE))
            await at_rest()
            await round_trip(here, there)
            await round_trip(back, forth)
            for channel in (here, there, back, forth):
                await channel.aclose()


async def test_a_peer_that_goes_away_meanwhile_ends_it(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1)
    with suppress(LinkLost):
        async with sessions((here, there)) as pair, pair.one.open(), trio.open_nursery() as nursery:
            await next_duplex(pair.other)
            began = trio.current_time()
            nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
            await at_rest()
            here.reset()
            await at_rest()
    assert trio.current_time() - began < GRACE


# --- new channels


async def test_a_peer_that_has_heard_of_it_cannot_open_any_more() -> None:
    async with sessions() as pair:
        await pair.other.shutdown(grace=0)
        await at_rest()
        for make in (pair.one.open, pair.one.open_sink, pair.one.open_source, pair.one.open_request):
            with pytest.raises(ChannelStopped, match="the peer is closing"):
                async with make():
                    pass


async def test_who_waits_for_room_to_open_is_told() -> None:
    async with sessions(limits=muxkit.Limits(channels=1)) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:

            async def open_one_more() -> None:
                with pytest.raises(ChannelStopped, match="the peer is closing"):
                    async with pair.one.open():
                        pass

            nursery.start_soon(open_one_more)
            await at_rest()
            nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
            await at_rest()
            await here.aclose()
            await there.aclose()


async def test_what_crosses_the_news_is_refused_so_that_the_peer_knows(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, latency=1)
    async with sessions((here, there)) as pair:
        await trio.sleep(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(pair.other.shutdown, grace=GRACE))
            async with pair.one.open() as duplex, pair.one.open_sink() as sink, pair.one.open_source() as source:
                async with pair.one.open_request(b"?") as request:
                    with pytest.raises(ChannelStopped):
                        await request.response()
                with pytest.raises(ChannelStopped):
                    await duplex.finish()
                with pytest.raises(ChannelCancelled, match="the other side is closing the session"):
                    await duplex.receive()
                with pytest.raises(ChannelStopped):
                    await sink.finish()
                with pytest.raises(ChannelCancelled, match="the other side is closing the session"):
                    await source.receive()


async def test_what_crosses_the_news_is_not_counted_against_the_peer(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, latency=1)
    limits = muxkit.Limits(resets_burst=1, resets_per_second=1)
    async with sessions((here, there), limits=limits) as pair:
        await pair.other.shutdown(grace=0)
        for _ in range(20):
            async with pair.one.open_sink():
                pass
        await trio.sleep(10)
        assert not connection_of(pair.one).pump.is_lost


async def test_a_peer_that_breaks_a_rule_meanwhile_loses_the_link_and_nothing_else() -> None:
    async def shut_down() -> None:
        here, there = memory.pair()
        async with bpmux.session(here) as session:
            await session.shutdown(grace=0)
            # Openings to refuse, and in the same bytes a violation.
            await there.send_all(encode_chunk(Chunk(Type.OUT_SINK, 1, payload=b"")) + UNKNOWN)
            with pytest.raises(LinkLost, match="a response without a request"):
                await session.ping()

    with pytest.raises(LinkLost, match="a response without a request"):
        await shut_down()


# --- under load


@attrs.define
class Count:
    """The outcomes of requests."""

    taken: set[bytes] = attrs.Factory(set)
    answered: set[bytes] = attrs.Factory(set)
    refused: set[bytes] = attrs.Factory(set)


async def ask_until_refused(session: Session | muxkit.Session, dice: random.Random, name: bytes, count: Count) -> None:
    """Send questions, a few at a time, each on its own channel, until no more can be opened."""

    async def ask(question: bytes) -> None:
        try:
            async with session.open() as channel:
                await channel.send(question)
                await channel.finish()
                answer = b"".join([part async for part in channel])
        except ChannelStopped:
            count.refused.add(question)
            return
        except ChannelCancelled as error:
            if error.code != 503:
                raise
            count.refused.add(question)
            return
        assert answer == question * 2
        count.answered.add(question)

    async with trio.open_nursery() as nursery:
        number = 0
        while not count.refused:
            nursery.start_soon(ask, b"%s.%d" % (name, number))
            number += 1
            await trio.sleep(dice.random() * 0.02)


async def answer_one(channel: muxkit.Channel, dice: random.Random, count: Count) -> None:
    async for question in channel:
        count.taken.add(question)
        await trio.sleep(dice.random() * 0.5)
        await channel.send(question)
        await channel.send(question)
    await channel.aclose()


@pytest.mark.seeds(20, soak=1000)
async def test_no_question_that_was_taken_is_lost(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    here, there = weather_pair(seed, latency=0.02, jitter=0.02)
    count = Count()

    async def serve() -> None:
        async with bpmux.session(there) as session, trio.open_nursery() as nursery:
            nursery.start_soon(shut_down_later, session)
            async for channel in session.incoming():
                nursery.start_soon(answer_one, channel, dice, count)

    async def shut_down_later(session: Session) -> None:
        await trio.sleep(dice.random() * 0.3)
        await session.shutdown(grace=GRACE)

    with replay(seed):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with bpmux.session(here) as session:
                await ask_until_refused(session, dice, b"q", count)
    assert count.taken == count.answered
    assert not count.taken & count.refused


@pytest.mark.seeds(8, soak=1000)
async def test_no_question_to_a_server_is_lost_when_it_shuts_down(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    count = Count()

    async def ask(number: int) -> None:
        async with muxkit.connect(served.url) as session:
            await ask_until_refused(session, dice, b"%d" % number, count)

    with replay(seed):
        async with trio.open_nursery() as nursery:
            handler = muxkit.each_channel(partial(answer_one, dice=dice, count=count))
            served = await nursery.start(muxkit.serve, handler, "bpmux+mem://load")
            async with trio.open_nursery() as clients:
                for number in range(3):
                    clients.start_soon(ask, number)
                await trio.sleep(0.1 + dice.random() * 0.2)
                await served.shutdown(grace=GRACE)
    assert count.taken
    assert count.taken == count.answered


# --- a server


async def echoed(channel: muxkit.Channel) -> None:
    await channel.send(b"x")
    assert await channel.receive() == b"x"


async def test_a_server_waits_for_its_sessions_then_returns(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, echo_each, "bpmux+mem://shutdown")
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await echoed(channel)
            nursery.start_soon(partial(served.shutdown, grace=GRACE))
            await trio.sleep(5)
            assert len(served.sessions()) == 1
            await echoed(channel)
        began = trio.current_time()
    assert len(served.sessions()) == 0
    assert trio.current_time() == began


async def test_a_server_gives_up_on_sessions_that_do_not_end(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, echo_each, "bpmux+mem://shutdown")
        with suppress(LinkLost):  # the peer confirms nothing any more
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await echoed(channel)
                began = trio.current_time()
                await served.shutdown(grace=3)
                assert trio.current_time() - began == 3
                with pytest.raises(trio.BrokenResourceError):
                    await channel.receive()


async def test_a_server_that_shuts_down_takes_nobody_in(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, echo_each, "bpmux+mem://shutdown")
        async with muxkit.connect(served.url) as old, old.open() as channel:
            await echoed(channel)
            nursery.start_soon(partial(served.shutdown, grace=GRACE))
            await at_rest()
            async with muxkit.connect(served.url) as late:
                await at_rest()
                with pytest.raises(trio.BrokenResourceError):
                    await late.open().__aenter__()
            await echoed(channel)


async def test_a_server_waits_for_a_handler_that_works_on_without_channels(autojump_clock: MockClock) -> None:
    done = False

    async def handler(session: muxkit.Session) -> None:
        nonlocal done
        async for _ in session.incoming():
            pass
        await trio.sleep(7)
        done = True

    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, handler, "bpmux+mem://shutdown")
        async with muxkit.connect(served.url):
            await at_rest()
            await served.shutdown(grace=GRACE)
            assert done


async def test_a_source_that_the_peer_never_closes_is_cut_for_it_too(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open_sink() as sink:
        source = await next_source(pair.other)
        await pair.other.shutdown(grace=1)
        with pytest.raises(ChannelStopped):
            await sink.finish()
        with pytest.raises(trio.ClosedResourceError):
            await source.receive()


async def test_whoever_works_on_a_question_hears_of_the_cut(autojump_clock: MockClock) -> None:
    async def work(asked: IncomingRequest) -> None:
        await asked.cancelled()

    async with sessions() as pair, pair.one.open_request(b"?") as request, trio.open_nursery() as nursery:
        nursery.start_soon(work, await next_request(pair.other))
        await pair.other.shutdown(grace=1)
        with pytest.raises(ChannelStopped):
            await request.response()
