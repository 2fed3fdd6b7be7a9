"""Everything arrives once, in order and answered once, however often the connections are cut."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit import Limits
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, Link
from muxkit.runtime import Backoff, background
from muxkit.testing import ChaosPlan, chaos_dial
from tests.protocols.relink._session_world import world
from tests.soak.relink_cuts import CONFIG, Figures, Theirs, survive, talk

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.clause("relink-R02", "relink-R03", "relink-T05", "relink-S03")
@pytest.mark.requirement("R-47", "R-51")
async def test_a_hundred_cuts_at_random_bytes_lose_repeat_and_invent_nothing() -> None:
    figures = await survive(100, seed=1)
    assert figures.are_right, figures
    assert figures.cuts >= 100
    assert 10 <= figures.resets < figures.cuts
    assert figures.messages > 1000
    assert figures.rolled_back > 500
    assert figures.uncommitted > 100


@pytest.mark.clause("relink-R03", "relink-T05")
@pytest.mark.requirement("R-47", "R-50", "R-51")
@pytest.mark.seeds(8, soak=2000)
async def test_in_any_weather_every_message_comes_once(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    plan = ChaosPlan(
        delay=dice.choice((0.0, 0.05)),
        jitter=dice.choice((0.0, 0.1)),
        cut_after=(0, dice.choice((300, 3_000, 20_000))),
        reset=0.3,
        stall=0.2,
        refuse=0.2,
        refuse_for=dice.choice((1.0, 12.0)),
    )
    config = attrs.evolve(
        CONFIG,
        keepalive=dice.choice((5.0, 60.0)),
        window=dice.choice((5, 65_536)),
        connector_id_size=dice.choice((2, 3, 8)),
        first_sequence=dice.choice((0, 2**32 - 20)),
    )
    # In this weather a side may be away for long, and what it said last may be stalled.
    patient = Limits(handshake=100.0, stall=100.0)
    theirs = Theirs()

    async def handle(link: Link) -> None:
        theirs.keep(link.id, await talk(link, random.Random(seed), count=40, pause=0.5))

    keep = relink.Keep(age=1e6)
    served = {"": Endpoint(handle, config)}
    async with world(config, endpoints=served, limits=patient, keep=keep, linger=3600) as made:
        async with chaos_dial(made.dial, plan, seed) as chaos:
            backoff = Backoff(first=0.5, random=random.Random(seed))
            async with relink.link(chaos.dial, config=config, limits=patient, backoff=backoff, linger=3600) as link:
                ours = await talk(link, random.Random(-seed), count=40, pause=0.5)
                link_id = link.id
            figures = Figures()
            figures.compare_both(ours, await theirs.of(link_id))
            assert figures.are_right, figures
            assert chaos.cuts > 0 or plan.cut_after == (0, 20_000)


@pytest.mark.requirement("R-47", "R-51")
@pytest.mark.seeds(10, soak=500)
async def test_common_channels_survive_the_same(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    # Above what a resume of six channels takes in one direction, or no connection could get anything done.
    plan = ChaosPlan(cut_after=(0, dice.choice((400, 2_000))), reset=0.5, delay=dice.choice((0.0, 0.02)))
    config = Config(keepalive=30.0, connector_transactions=seed % 2 == 1, listener_transactions=seed % 3 == 1)

    async def echo(link: Link) -> None:
        async def one(channel: relink.Channel) -> None:
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

        async with trio.open_nursery() as nursery:
            async for channel in link.incoming():
                assert isinstance(channel, relink.Channel)
                nursery.start_soon(one, channel)

    async def talk_with(link: Link, number: int) -> None:
        messages = [b"%d %d " % (number, turn) + dice.randbytes(dice.choice((0, 10, 300))) for turn in range(30)]
        async with link.open() as channel:
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for message in messages:
                        await channel.send(message)
                        if dice.random() < 0.2:
                            await trio.sleep(0.05)
                    await channel.finish()

                nursery.start_soon(send)
                assert [message async for message in channel] == messages

    served = {"": Endpoint(echo, config)}
    async with world(config, endpoints=served, linger=3600) as made, chaos_dial(made.dial, plan, seed) as chaos:
        async with relink.link(chaos.dial, config=config, backoff=Backoff(first=0.01, most=0.1), linger=3600) as link:
            async with background() as nursery, trio.open_nursery() as work:
                del nursery
                for number in range(6):
                    work.start_soon(talk_with, link, number)
        assert chaos.cuts > 0
