"""Two engines on bad links: each message arrives once, both sides agree when idle, and nothing leaks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from muxkit.core import Reason
from muxkit.protocols.aqueduct import Engine, Mode, Role
from muxkit.protocols.aqueduct.events import Arrived
from muxkit.protocols.aqueduct.half import EngineHalf
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender
from tests.protocols.aqueduct._helpers import summary_of, taken
from tests.protocols.aqueduct._simulation import CarrierLink, SimLink, World, payload_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from muxkit.protocols.aqueduct.events import Event


def stormy(one: Engine, other: Engine, hear: Callable[[int, Event | Arrived], None], dice: random.Random) -> SimLink:
    return SimLink(one, other, hear, weather=dice)


def carried(
    one: Engine, other: Engine, hear: Callable[[int, Event | Arrived], None], dice: random.Random
) -> CarrierLink:
    return CarrierLink(one, other, hear, weather=dice)


@pytest.mark.clause("aqueduct-X01", "aqueduct-L09", "aqueduct-L10", "aqueduct-F11", "aqueduct-S06")
@pytest.mark.requirement("R-17", "R-21")
@pytest.mark.parametrize("make_link", [stormy, carried])
@pytest.mark.seeds(16, soak=2000)
def test_both_sides_agree_when_it_is_quiet_and_every_channel_ends(
    seed: int, make_link: Callable[..., SimLink | CarrierLink]
) -> None:
    world = World(seed, make_link)
    for _ in range(200):
        world.act()
    world.run_until_idle()
    world.check_agreement()
    world.end()


@pytest.mark.requirement("R-17")
def test_the_random_life_meets_every_kind_of_end() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        world = World(seed, stormy)
        for _ in range(200):
            world.act()
        world.run_until_idle()
        seen.update(world.done)
    for name in ("Arrived", "Finished", "Cancelled", "NoReceiver", "LostInTransit", "Forgotten", "Acked", "Nacked"):
        assert seen[name] > 5, (name, seen)


@pytest.mark.seeds(8, soak=500)
def test_one_sequence_of_commands_gives_the_same_events_over_both_links(seed: int) -> None:
    assert story(seed, SimLink) == story(seed, CarrierLink)


def story(seed: int, kind: type[SimLink | CarrierLink]) -> list[tuple[object, ...]]:
    """Run commands that do not depend on the link; give all events by channel."""
    import random

    dice = random.Random(seed)
    engines = tuple(Engine(role) for role in Role)
    heard: list[tuple[object, ...]] = []
    halves: tuple[list[EngineHalf], ...] = tuple([engine.entrypoint] for engine in engines)

    def hear(side: int, event: Event | Arrived) -> None:
        heard.append((side, *summary_of(event)))
        if isinstance(event, Arrived):
            halves[side].extend(attachment.half for attachment in event.attachments)
            taken(event)

    link = kind(engines[0], engines[1], hear)
    link.run_for(1.0)
    for serial in range(60):
        side = dice.randrange(2)
        half = dice.choice([half for half in halves[side] if not half.gone and half.id is not None] or [None])
        if half is None:
            continue
        engine, mode, choice = engines[side], dice.choice(list(Mode)), dice.random()
        if isinstance(half, EngineReceiver):
            if choice < 0.1 and half.id != 0:
                half.stop(Reason())
            link.run_for(2.0)
            continue
        assert isinstance(half, EngineSender)
        if choice < 0.8:
            kept, ticket = engine.channel(sends=True) if choice < 0.4 else engine.channel(sends=False)
            size = dice.choice((5, 100, 1000, 100_000))
            half.transmit(payload_of(serial, size), mode=mode, receipt=choice < 0.2, attachments=[ticket])
            halves[side].append(kept)
        elif half.id != 0:
            half.finish() if choice < 0.9 else half.cancel(Reason())
        link.run_for(2.0)
    # The rules of the link decide the order within a channel; between channels it is free.
    return sorted(heard, key=lambda event: (event[0], str(event[2])))
