"""Random commands, cuts at random bytes, virtual time: two engines against a plain model of a link."""

from __future__ import annotations

import random

import pytest

from muxkit._limits import Limits
from tests.protocols.relink._helpers import quiet
from tests.protocols.relink._world import World

KIB = 1024


def world_of(dice: random.Random) -> World:
    config = quiet(
        connector_id_size=dice.choice((0, 1, 2, 3, 4, 8)),
        listener_id_size=dice.choice((1, 2, 5, 8)),
        connector_transactions=dice.random() < 0.6,
        listener_transactions=dice.random() < 0.6,
        window=dice.choice((1, 4, 16, 1000)),
        first_sequence=dice.choice((0, 0, 5, 2**32 - 3, 2**32 - 1)),
        targets=8,
    )
    small = dice.random() < 0.3
    limits = Limits(channel_bytes=4 * KIB, channel_floor=KIB, connection_bytes=6 * KIB) if small else None
    return World(config, limits)


def play(world: World, dice: random.Random, steps: int, *, channels: int = 3, cutting: float = 0.03) -> None:
    """Make random steps, as many as `steps` says."""
    for _ in range(steps):
        side, channel = dice.randrange(2), dice.randrange(channels)
        step = dice.random()
        if step < cutting:
            world.cut()
        elif step < 0.30:
            world.send(side, channel, world.content(dice))
        elif step < 0.36:
            targets = [dice.randrange(channels) for _ in range(dice.randint(1, 4))]
            world.multicast(side, targets, world.content(dice))
        elif step < 0.44:
            if world.transactions[side]:
                world.decide(side, channel, dice.choice(("commit", "commit", "rollback")), dice.randint(1, 3))
        elif step < 0.47:
            world.close(side, channel)
        elif step < 0.57:
            world.pull(side, dice.choice((1, 40, 400, 1 << 20)))
        elif step < 0.77:
            world.deliver(side, dice.choice((1, 5, 8, 30, 200, 1 << 20)))
        elif step < 0.85:
            world.receive(side, channel, dice.choice((1, 2, None)))
        elif step < 0.87:
            world.rewind(side, channel)
        elif step < 0.94:
            if world.transactions[1 - side] and dice.random() < 0.8:
                world.reply(side, channel, dice.choice(("committed", "uncommitted")), dice.randint(1, 3))
            else:
                world.consume(side, channel, dice.randint(1, 3))
        elif step < 0.98:
            world.wait(dice.choice((0.01, 0.1, 1.0)))
        elif not world.engines[side].over:
            world.engines[side].ping()
        world.check_windows()


@pytest.mark.clause("relink-R03", "relink-T05", "relink-F01", "relink-F02", "relink-K03", "relink-A02", "relink-C05")
@pytest.mark.seeds(200, soak=2000)
def test_a_link_that_is_cut_again_and_again_keeps_what_it_promises(seed: int) -> None:
    dice = random.Random(seed)
    world = world_of(dice)
    channels = 1 if world.config.connector_id_size == 0 else 3
    play(world, dice, 250, channels=channels, cutting=dice.choice((0.0, 0.02, 0.1)))
    world.check_the_end()
