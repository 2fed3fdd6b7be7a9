"""Unknown peers evict each other from a listener's table only so fast that a flood leaves time for known peers."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, cast

import pytest
import trio

from muxkit import Limits
from muxkit_adapters.packets.listeners import EVICTIONS, EVICTIONS_BURST, Peers
from muxkit_adapters.udp import ServerCounters

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit_adapters.packets.links import PacketLink


class Stranger:
    """What a table uses of the link of a peer that never proves itself."""

    expires = math.inf

    def forget(self, reason: str) -> None: ...


@pytest.mark.requirement("R-10", "R-13")
async def test_a_flood_of_strangers_makes_only_so_many_a_second_give_way(mock_clock: MockClock) -> None:
    counters = ServerCounters()
    async with trio.open_nursery() as nursery:
        peers = Peers(nursery, Limits(half_open=300), counters)

        def flood() -> int:
            return sum(peers.admit(cast("PacketLink", Stranger())) is not None for _ in range(1000))

        assert flood() == 300, "nobody gives way before the time"
        assert counters.turned_away == 1000 - 300
        mock_clock.jump(1.0)
        assert flood() == EVICTIONS_BURST
        mock_clock.jump(1.0)
        assert flood() == EVICTIONS
        mock_clock.jump(60.0)
        assert flood() == EVICTIONS_BURST
        assert counters.half_open == 300


async def test_a_flood_of_strangers_does_not_fill_the_log(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counters = ServerCounters()
    async with trio.open_nursery() as nursery:
        peers = Peers(nursery, Limits(half_open=5), counters)
        for _ in range(100):
            for _ in range(100):
                peers.admit(cast("PacketLink", Stranger()))
            mock_clock.jump(1.0)
    assert counters.evicted > 400
    assert 0 < len(caplog.records) < 300  # two lines per second after the first fifty


@pytest.mark.requirement("R-13")
async def test_while_there_are_places_strangers_get_one_without_waiting(mock_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        peers = Peers(nursery, Limits(half_open=1000), ServerCounters())
        assert all(peers.admit(cast("PacketLink", Stranger())) is not None for _ in range(1000))
        assert not peers.make_room()
        mock_clock.jump(1.0)
        assert peers.make_room(), "the oldest gives way"
