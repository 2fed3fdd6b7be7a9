"""Packets fare as the weather says, and the same again for the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.testing import PacketWeather

if TYPE_CHECKING:
    from trio.testing import MockClock


async def arrivals(weather: PacketWeather, seed: int = 1, count: int = 1000) -> list[int]:
    one, other = weather.pair(seed)
    got: list[int] = []

    async def receive() -> None:
        got.extend([int(packet) async for packet in other])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for number in range(count):
            await one.send(b"%d" % number)
            await trio.sleep(0.001)
        await one.aclose()
    return got


async def test_in_fair_weather_everything_arrives_in_order(autojump_clock: MockClock) -> None:
    assert await arrivals(PacketWeather()) == list(range(1000))


async def test_the_same_seed_gives_the_same_weather(autojump_clock: MockClock) -> None:
    weather = PacketWeather(loss=0.1, duplication=0.1, reordering=0.1, delay=0.01, jitter=0.005)
    assert await arrivals(weather, seed=3) == await arrivals(weather, seed=3)
    assert await arrivals(weather, seed=3) != await arrivals(weather, seed=4)


async def test_packets_are_lost_at_about_the_chance_that_was_asked(autojump_clock: MockClock) -> None:
    got = await arrivals(PacketWeather(loss=0.2))
    assert 700 < len(got) < 900
    assert got == sorted(set(got))


async def test_packets_are_doubled(autojump_clock: MockClock) -> None:
    got = await arrivals(PacketWeather(duplication=0.2))
    assert 1100 < len(got) < 1300
    assert set(got) == set(range(1000))


async def test_packets_overtake_each_other(autojump_clock: MockClock) -> None:
    got = await arrivals(PacketWeather(reordering=0.2))
    assert got != sorted(got)
    assert sorted(got) == list(range(1000))


async def test_delay_takes_its_time(autojump_clock: MockClock) -> None:
    one, other = PacketWeather(delay=3.0).pair(1)
    start = trio.current_time()
    await one.send(b"x")
    assert await other.receive() == b"x"
    assert trio.current_time() - start == pytest.approx(3.0)


async def test_a_full_queue_drops_and_never_waits(autojump_clock: MockClock) -> None:
    one, other = PacketWeather(queue=10).pair(1)
    for number in range(20):
        await one.send(b"%d" % number)
    await one.aclose()
    assert [int(packet) async for packet in other] == list(range(10))


async def test_a_closed_end_is_noticed_at_the_other(autojump_clock: MockClock) -> None:
    one, other = PacketWeather().pair(1)
    await one.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await one.send(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await one.receive()
    with pytest.raises(trio.BrokenResourceError):
        await other.send(b"x")
    with pytest.raises(trio.EndOfChannel):
        await other.receive()
