"""A receiver that reads for a link gets each message once, also when it is cancelled or its connection is cut."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit.runtime import Reading
from muxkit.testing import replay

from ._session_world import QUIET, TRANSACTIONS, both

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.relink import Config, Link

    from ._session_world import World

OVER = (trio.EndOfChannel, muxkit.ChannelCancelled, muxkit.ChannelStopped)
NEVER = 1e9


async def echo(channel: muxkit.Channel, dice: random.Random) -> None:
    with suppress(*OVER):
        async with channel:
            async for message in channel:
                if dice.random() < 0.4:
                    await trio.sleep(dice.choice([0, 0.0001, 0.002]))
                await channel.send(message)


async def serve(link: Link, nursery: trio.Nursery, dice: random.Random) -> None:
    async for channel in link:
        nursery.start_soon(echo, channel, dice)


async def talk(link: Link, dice: random.Random, scopes: list[trio.CancelScope]) -> None:
    """Send messages that are echoed, sometimes several at once."""
    async with link.open() as channel:
        sent = heard = 0
        for _ in range(dice.randint(1, 30)):
            for _ in range(dice.choice([1, 1, 1, 5])):
                await channel.send(b"%d" % sent)
                sent += 1
            while heard < sent:
                shield = dice.random() < 0.2
                soon = trio.current_time() + dice.choice([0, 0.0001, 0.001])
                with (
                    trio.CancelScope() as scope,
                    trio.CancelScope(deadline=soon if shield or dice.random() < 0.3 else NEVER, shield=shield),
                ):
                    scopes.append(scope)
                    try:
                        got = await channel.receive_many() if dice.random() < 0.2 else [await channel.receive()]
                    finally:
                        scopes.remove(scope)
                    assert got == [b"%d" % number for number in range(heard, heard + len(got))]
                    heard += len(got)


async def trouble(world: World, dice: random.Random, scopes: list[trio.CancelScope]) -> None:
    cuts = dice.choice([0.01, 0.1, 0.3])
    while True:
        for scope in [*scopes]:
            if dice.random() < 0.3:
                scope.cancel()
        if dice.random() < cuts:
            await world.cut()
        if dice.random() < 0.5:
            await trio.sleep(dice.choice([0.0001, 0.001, 0.01]))
        else:
            await trio.lowlevel.checkpoint()


@pytest.mark.requirement("R-33", "R-51")
@pytest.mark.parametrize("config", [QUIET, TRANSACTIONS], ids=["plain", "transactions"])
@pytest.mark.seeds(15, soak=1500)
async def test_guests_that_are_cut_off_and_cancelled_get_every_message_once(
    seed: int, config: Config, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)
    scopes: list[trio.CancelScope] = []
    with replay(seed):
        async with both(config) as pair, trio.open_nursery() as beside:
            pair.world.capacity = dice.choice([100, 1000, 65_536])
            for link in (pair.one, pair.other):
                beside.start_soon(serve, link, beside, dice)
            beside.start_soon(trouble, pair.world, dice, scopes)
            async with trio.open_nursery() as nursery:
                for link in (pair.one, pair.other):
                    for _ in range(dice.randint(1, 6)):
                        nursery.start_soon(talk, link, dice, scopes)
            beside.cancel_scope.cancel()


async def test_a_guest_whose_connection_is_cut_has_his_message_from_the_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_on: list[Reading] = []
    read_for = Reading.read_for

    async def noted(self: Reading, borrower: object) -> None:
        read_on.append(self)
        await read_for(self, borrower)  # type: ignore[arg-type]

    monkeypatch.setattr(Reading, "read_for", noted)
    async with both() as pair, trio.open_nursery() as nursery:
        dice = random.Random(0)
        nursery.start_soon(serve, pair.other, nursery, dice)
        async with pair.one.open() as channel:
            while not read_on:
                await channel.send(b"x")
                await channel.receive()
            await channel.send(b"y")
            await pair.world.cut()  # with the message, or its answer, under way
            assert await channel.receive() == b"y"
            seats = len(read_on)
            for _ in range(200):
                await channel.send(b"z")
                assert await channel.receive() == b"z"
            assert {*read_on[seats:]}.isdisjoint(read_on[:seats])  # and who is seated now sits elsewhere
            assert len(read_on) > seats
        nursery.cancel_scope.cancel()
