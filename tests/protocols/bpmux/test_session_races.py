"""Two ends act on the same channel at once: all pairs of actions, in all orders of arrival."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import replay, weather_pair

from ._pairs import TINY, Pair, at_rest, canary, echo_each, next_duplex, next_request, sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    Action = Callable[[bpmux.Duplex], Awaitable[object]]

pytestmark = pytest.mark.requirement("R-44")

OVER = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)


async def send(channel: bpmux.Duplex) -> None:
    await channel.send(b"x" * 700)


async def send_large(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(1):
        await channel.send(b"x" * 5000)


async def finish(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(1):
        await channel.finish()


async def finish_with_a_payload(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(1):
        await channel.finish(b"why")


async def aclose(channel: bpmux.Duplex) -> None:
    await channel.aclose()


async def abort(channel: bpmux.Duplex) -> None:
    channel.abort()


async def stop_receiving(channel: bpmux.Duplex) -> None:
    await channel.source.aclose()


async def receive(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(1):
        await channel.receive()


async def ping(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(1):
        await channel.ping()


async def give_credit(channel: bpmux.Duplex) -> None:
    channel.source.give_credit(10)


async def cancelled_receive(channel: bpmux.Duplex) -> None:
    with trio.move_on_after(0):
        await channel.receive()


ACTIONS: list[Action] = [
    send,
    send_large,
    finish,
    finish_with_a_payload,
    aclose,
    abort,
    stop_receiving,
    receive,
    ping,
    give_credit,
    cancelled_receive,
]


async def try_to(action: Action, channel: bpmux.Duplex) -> None:
    with suppress(*OVER):
        await action(channel)


async def check_agreement(pair: Pair) -> None:
    """Check that both ends know the same channels and that new channels work."""
    await trio.sleep(2)
    await at_rest()
    assert pair.one.stats().channels == pair.other.stats().channels
    assert not connection_of(pair.one).pump.is_lost
    await canary(pair)
    await trio.sleep(2)
    assert pair.one.stats().channels == pair.other.stats().channels


@pytest.mark.parametrize("first", ACTIONS)
async def test_any_two_actions_at_once_on_one_channel(first: Action, autojump_clock: MockClock) -> None:
    for second in ACTIONS:
        for latency in (0.0, 0.1):
            for head_start in (0.0, 0.15):
                async with sessions(weather_pair(1, latency=latency), limits=TINY, linger=60) as pair:
                    async with pair.one.open() as here:
                        there = await next_duplex(pair.other)
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(try_to, first, here)
                            await trio.sleep(head_start)
                            nursery.start_soon(try_to, second, there)
                        await check_agreement(pair)
                        await there.aclose()
                    await check_agreement(pair)
                    assert pair.one.stats().channels == 0


@pytest.mark.parametrize("pair_of", list(combinations_with_replacement(ACTIONS, 2)), ids=lambda both: both[0].__name__)
async def test_any_two_actions_on_a_channel_that_the_peer_has_not_heard_of(
    pair_of: tuple[Action, Action], autojump_clock: MockClock
) -> None:
    async with sessions(weather_pair(1, latency=0.1), linger=60) as pair:
        async with pair.one.open() as here:
            for action in pair_of:
                await try_to(action, here)
            there = await next_duplex(pair.other)
            await there.aclose()
        await check_agreement(pair)
        assert pair.one.stats().channels == 0


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("end", ["respond", "decline", "abort"])
async def test_an_answer_and_a_cancellation_may_cross(end: str, gap: float, autojump_clock: MockClock) -> None:
    async with sessions(weather_pair(1, latency=0.1)) as pair:
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                asked = await next_request(pair.other)
                with suppress(*OVER):
                    if end == "respond":
                        await asked.respond(b"y")
                    elif end == "decline":
                        await asked.decline(b"n")
                    else:
                        asked.abort()

            nursery.start_soon(answer)
            with trio.move_on_after(gap), suppress(*OVER):
                await pair.one.request(b"")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()  # one that was cancelled before it was written never arrives
        assert pair.one.stats().channels == pair.other.stats().channels == 0
        await canary(pair)


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.1, 0.15, 0.3])
async def test_openings_and_a_goodbye_may_cross(gap: float, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        here, there = weather_pair(1, latency=0.1)

        async def leave_soon() -> None:
            async with bpmux.session(there):
                await trio.sleep(gap)

        nursery.start_soon(leave_soon)
        async with bpmux.session(here) as session:
            opened = refused = 0
            for _ in range(10):
                try:
                    async with session.open() as channel:
                        await channel.send(b"x")
                        opened += 1
                        await trio.sleep(0.03)
                except (trio.BrokenResourceError, LinkLost):
                    refused += 1
        assert opened + refused == 10


async def test_both_sides_open_channels_with_the_same_numbers(autojump_clock: MockClock) -> None:
    async with sessions(weather_pair(1, latency=0.1)) as pair, trio.open_nursery() as nursery:
        for session in (pair.one, pair.other):
            nursery.start_soon(echo_each, session)
        async with trio.open_nursery() as talkers:

            async def talk(session: bpmux.Session, message: bytes) -> None:
                async with session.open() as channel:
                    await channel.send(message)
                    assert await channel.receive() == message

            for number in range(50):
                talkers.start_soon(talk, pair.one, b"one %d" % number)
                talkers.start_soon(talk, pair.other, b"other %d" % number)
        for session in (pair.one, pair.other):
            await session.shutdown(grace=1)


@pytest.mark.seeds(10, soak=3000)
async def test_random_actions_on_many_channels_end_in_agreement(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    limits = Limits(channel_bytes=2000, channel_floor=100, outbox=5000, resets_burst=100_000)
    links = weather_pair(seed, latency=dice.choice((0.0, 0.05)), jitter=dice.choice((0.0, 0.1)))

    async def use(channel: bpmux.Duplex) -> None:
        for _ in range(dice.randrange(6)):
            await try_to(dice.choice(ACTIONS), channel)
            await trio.sleep(dice.choice((0.0, 0.03)))
        await channel.aclose()

    async def open_some(session: bpmux.Session) -> None:
        for _ in range(20):
            with trio.move_on_after(dice.choice((0.0, 0.1, 10.0))):
                async with session.open() as channel:
                    await use(channel)

    async def accept(session: bpmux.Session) -> None:
        async for channel in session.incoming():
            nursery.start_soon(use, channel)

    with replay(seed):
        async with sessions(links, limits=limits, linger=60) as pair, trio.open_nursery() as nursery:
            for session in (pair.one, pair.other):
                nursery.start_soon(accept, session)
            async with trio.open_nursery() as openers:
                for session in (pair.one, pair.other):
                    openers.start_soon(open_some, session)
            await trio.sleep(30)
            assert pair.one.stats().channels == pair.other.stats().channels == 0
            await canary(pair)
            nursery.cancel_scope.cancel()
