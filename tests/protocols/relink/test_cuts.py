"""The connection breaks at every byte of one busy transcript."""

from __future__ import annotations

import pytest

from tests.protocols.relink._helpers import transactional
from tests.protocols.relink._world import World


def transcript(world: World) -> None:
    """Send commits, rollbacks, multicasts and closes in both directions under transactions."""
    for side in (0, 1):
        for n in range(3):
            world.send(side, 1, (b"%d-%d" % (side, n), b""))
        world.decide(side, 1, "rollback", 1)
        world.decide(side, 1, "commit", 1)
        world.multicast(side, [1, 2], (b"both",))
        world.decide(side, 2, "commit", 1)
        world.close(side, 2)


def react(world: World) -> None:
    for side in (0, 1):
        for channel in (1, 2):
            if world.receive(side, channel, 2):
                world.reply(side, channel, "uncommitted" if channel == 2 else "committed", 1)


def run_until(world: World, cut_at: tuple[int, int] | None) -> list[int]:
    """Play the transcript until one side has received its bytes; return the bytes received by each side."""
    got = [0, 0]
    transcript(world)
    for _ in range(12):
        for side in (0, 1):
            world.pull(side, 60)
        for side in (0, 1):
            room = 1 << 20 if cut_at is None or cut_at[0] != side else cut_at[1] - got[side]
            got[side] += world.deliver(side, room)
            if cut_at == (side, got[side]):
                return got
        react(world)
        if world.life(0, 2) is None:
            world.send(0, 2, (b"again",))
        world.wait(0.05)
    return got


@pytest.mark.clause("relink-R02", "relink-R03", "relink-T05", "relink-K03")
@pytest.mark.requirement("R-51", "R-44")
@pytest.mark.parametrize("side", [0, 1])
def test_the_connection_may_break_at_every_byte_of_a_transcript(side: int) -> None:
    whole = World(transactional(first_sequence=2**32 - 2))
    sizes = run_until(whole, None)
    whole.check_the_end()
    assert min(sizes) > 150
    for at in range(1, sizes[side]):
        world = World(transactional(first_sequence=2**32 - 2))
        run_until(world, (side, at))
        world.cut()
        transcript(world)
        world.check_the_end()
        assert world.cuts == 1
