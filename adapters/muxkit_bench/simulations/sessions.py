"""The simulation of whole sessions: Trio on virtual time, with a scheduler that follows the seed as well."""

from __future__ import annotations

import random
from contextlib import suppress

import trio
import trio.testing

from muxkit import Channel, LinkLost, Session
from muxkit.protocols import bpmux
from muxkit.testing import replay, weather_pair
from muxkit_bench.simulations.engines import contents, demand

MOST_TIME = 3600.0  # virtual s


def sessions(seed: int) -> str:
    """bpmux sessions that echo over a slow, bad link, which breaks one time in three."""
    with replay(seed):
        return trio.run(_run, seed, clock=trio.testing.MockClock(autojump_threshold=0))


async def _run(seed: int) -> str:
    dice = random.Random(seed)
    breaks = dice.randint(1, 200_000) if dice.random() < 1 / 3 else None
    here, there = weather_pair(
        seed,
        latency=dice.choice((0.0, 0.01, 0.2)),
        jitter=dice.choice((0.0, 0.05)),
        bandwidth=dice.choice((None, 100_000.0)),
        reset_at_byte=breaks,
    )
    talks = [contents(f"{seed}/{number}", 12) for number in range(dice.randint(1, 6))]
    expected = sum(map(len, talks))
    echoed = [0]
    with trio.move_on_after(MOST_TIME) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, there)
            with suppress(LinkLost):
                async with bpmux.session(here) as session, trio.open_nursery() as talking:
                    for messages in talks:
                        talking.start_soon(_converse, session, messages, echoed)
    demand(not scope.cancelled_caught, f"not over after {MOST_TIME:g} s")
    demand(breaks is not None or echoed[0] == expected, f"{echoed[0]} of {expected} echoes came")
    return f"{echoed[0]} echoes in {trio.current_time():.6f} s{'' if breaks is None else f', breaks at {breaks}'}"


async def _serve(stream: trio.abc.Stream) -> None:
    async def echo(channel: Channel) -> None:
        with suppress(trio.BrokenResourceError, LinkLost):
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

    with suppress(LinkLost):
        async with bpmux.session(stream) as session, trio.open_nursery() as nursery:
            with suppress(LinkLost):
                async for channel in session.incoming():
                    nursery.start_soon(echo, channel)


async def _converse(session: Session, messages: list[bytes], echoed: list[int]) -> None:
    with suppress(LinkLost):
        async with session.open() as channel:
            for message in messages:
                await channel.send(message)
                demand(await channel.receive() == message, "an echo came back different")
                echoed[0] += 1
