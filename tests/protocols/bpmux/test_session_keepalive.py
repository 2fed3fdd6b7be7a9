"""Keepalive: a silent peer is detected at the exact time, and no ping is sent without need; virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Config
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import WeatherStream, weather_pair
from tests.protocols.bpmux._pairs import at_rest, echo_each, next_duplex, sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.protocols.bpmux._pairs import Pair

INTERVAL = 20.0  # s, the defaults
TIMEOUT = 20.0
LATENCY = 0.05


class Pings:
    """An observer that records when pings were written and which timers fired."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.timers: list[tuple[float, str]] = []

    def frame(self, direction: str, channel: str, name: str, size: int) -> None:
        if direction == "out" and "ping" in name:
            self.sent.append(trio.current_time())

    def credit(self, direction: str, channel: str, amount: int) -> None: ...

    def state(self, channel: str, state: str) -> None: ...

    def timer(self, name: str) -> None:
        self.timers.append((trio.current_time(), name))

    def error(self, error: BaseException) -> None: ...

    def transport(self, direction: str, data: bytes | memoryview) -> None: ...


@asynccontextmanager
async def over_weather(
    pings: Pings | None = None, *, config: Config | None = None
) -> AsyncIterator[tuple[Pair, WeatherStream]]:
    here, there = weather_pair(1, latency=LATENCY)
    async with sessions((here, there), observer=pings, config=config) as pair:
        yield pair, here


# --- silent peers


@pytest.mark.requirement("R-46")
@pytest.mark.parametrize(("interval", "patience"), [(20.0, 20.0), (5.0, 20.0), (20.0, 5.0), (0.5, 0.25)])
async def test_a_half_open_link_is_noticed_after_both_intervals(
    interval: float, patience: float, autojump_clock: MockClock
) -> None:
    here, _there = weather_pair(1, half_open_after=0)
    began = trio.current_time()
    with pytest.raises(LinkLost, match="no data from the peer") as caught:
        async with bpmux.session(here, config=Config(keepalive=interval, keepalive_timeout=patience)) as session:
            await session.receive()
    assert trio.current_time() - began == pytest.approx(interval + patience)
    assert caught.value.by == "network"
    assert caught.value.after == pytest.approx(interval + patience)


@pytest.mark.requirement("R-46")
async def test_both_ends_of_a_link_that_vanishes_notice_it(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, latency=LATENCY)
    noticed: list[float] = []

    async def wait(stream: WeatherStream) -> None:
        with pytest.raises(LinkLost):
            async with bpmux.session(stream) as session:
                await session.receive()
        noticed.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, here)
        nursery.start_soon(wait, there)
        await trio.sleep(7)
        here.vanish()
    last_heard = began + LATENCY
    assert noticed == pytest.approx([last_heard + INTERVAL + TIMEOUT] * 2)


@pytest.mark.requirement("R-46")
async def test_sending_into_the_void_does_not_put_it_off(autojump_clock: MockClock) -> None:
    here, _there = weather_pair(1, half_open_after=0)
    began = trio.current_time()

    async with bpmux.session(here) as session, trio.open_nursery() as nursery:

        async def chatter() -> None:
            while True:
                await trio.sleep(1)
                if connection_of(session).loss is None:
                    connection_of(session).engine.top_stream.give_credit(1)
                    connection_of(session).request_write()

        nursery.start_soon(chatter)
        with pytest.raises(LinkLost):
            await session.receive()
        nursery.cancel_scope.cancel()
    assert here.bytes_sent > INTERVAL
    assert trio.current_time() - began == pytest.approx(INTERVAL + TIMEOUT)


@pytest.mark.requirement("R-46")
async def test_without_a_keepalive_nobody_asks(autojump_clock: MockClock) -> None:
    pings = Pings()
    async with over_weather(pings, config=Config(keepalive=None)) as (_pair, _):
        await trio.sleep(10_000)
        assert pings.sent == []


@pytest.mark.requirement("R-46")
async def test_a_link_that_is_slow_for_less_than_the_timeout_is_kept(autojump_clock: MockClock) -> None:
    async with over_weather() as (pair, here):
        await at_rest()
        await trio.sleep(1)
        here.clog()
        await trio.sleep(INTERVAL + TIMEOUT - 2)
        here.unclog()
        await trio.sleep(1)
        assert await pair.one.ping() == pytest.approx(2 * LATENCY)


# --- pings only when idle


@pytest.mark.requirement("R-46")
async def test_an_idle_link_is_pinged_once_an_interval(autojump_clock: MockClock) -> None:
    pings = Pings()
    # Only one side has a keepalive: otherwise each side's pings would count as traffic for the other.
    here, there = weather_pair(1, latency=LATENCY)
    quiet = Config(keepalive=None)
    async with bpmux.session(here, observer=pings) as _one, bpmux.session(there, config=quiet) as _other:
        began = trio.current_time()
        await trio.sleep(10 * (INTERVAL + 2 * LATENCY) + LATENCY)
        turn = INTERVAL + 2 * LATENCY  # the pong arrives, and the silence begins again
        assert pings.sent == pytest.approx([began + LATENCY + INTERVAL + turn * number for number in range(10)])


@pytest.mark.requirement("R-46")
async def test_of_two_idle_sides_one_ping_serves_both(autojump_clock: MockClock) -> None:
    pings = Pings()
    async with over_weather(pings) as _:
        await trio.sleep(10 * INTERVAL + INTERVAL / 2)
        assert len(pings.sent) <= 10


@pytest.mark.requirement("R-46")
async def test_a_busy_link_is_not_pinged(autojump_clock: MockClock) -> None:
    pings = Pings()
    async with over_weather(pings) as (pair, _), trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        async with pair.one.open() as channel:
            for _ in range(20):
                await channel.send(b"x")
                await channel.receive()
                await trio.sleep(INTERVAL - 1)
        assert pings.sent == []
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-46")
async def test_who_only_listens_is_not_pinged_by_who_only_talks(autojump_clock: MockClock) -> None:
    pings = Pings()
    here, there = weather_pair(1, latency=LATENCY)
    quiet = Config(keepalive=None)
    async with (
        bpmux.session(here, observer=pings) as one,
        bpmux.session(there, config=quiet) as other,
        other.open_sink() as sink,
    ):
        source, _ = await anext(one.sources())
        for _ in range(20):
            await sink.send(b"x")
            await source.receive()
            await trio.sleep(INTERVAL - 1)
        assert pings.sent == []


# --- the round trip


@pytest.mark.requirement("R-46")
async def test_the_round_trip_of_a_ping_of_its_own_is_in_the_stats(autojump_clock: MockClock) -> None:
    async with over_weather() as (pair, _):
        assert pair.one.stats().round_trip is None
        await trio.sleep(INTERVAL + 1)
        trips = [session.stats().round_trip for session in (pair.one, pair.other)]
        measured = [trip for trip in trips if trip is not None]
        assert measured
        assert measured == pytest.approx([2 * LATENCY] * len(measured))


@pytest.mark.requirement("R-46")
async def test_the_round_trip_in_the_stats_follows_the_link_slowly(autojump_clock: MockClock) -> None:
    async with over_weather() as (pair, here):
        assert await pair.one.ping() == pytest.approx(2 * LATENCY)
        assert pair.one.stats().round_trip == pytest.approx(2 * LATENCY)
        await at_rest()
        here.clog()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.one.ping)
            await trio.sleep(1)
            here.unclog()
        smoothed = pair.one.stats().round_trip
        assert smoothed is not None
        assert 2 * LATENCY < smoothed < 0.5


# --- clocks that jump


@pytest.mark.requirement("R-52")
async def test_after_an_hour_of_sleep_one_ping_goes_out_and_the_link_is_kept(mock_clock: MockClock) -> None:
    pings = Pings()
    here, there = weather_pair(1)
    async with sessions((here, there), observer=pings) as pair:
        await at_rest()
        before = len(pings.timers)
        mock_clock.jump(3600)
        await at_rest()
        assert len(pings.timers) - before <= 1
        assert len(pings.sent) <= 1
        assert await pair.one.ping() == 0
        async with pair.one.open() as channel:
            await channel.send(b"still there")
            assert await (await next_duplex(pair.other)).receive() == b"still there"


@pytest.mark.requirement("R-52")
async def test_after_an_hour_of_sleep_a_peer_that_is_gone_gets_one_more_chance(mock_clock: MockClock) -> None:
    pings = Pings()
    here, _there = weather_pair(1, half_open_after=0)
    async with bpmux.session(here, observer=pings) as session:
        for jump in (0, 3600, TIMEOUT - 0.001):
            mock_clock.jump(jump)
            await at_rest()
        assert len(pings.sent) == 1
        assert not connection_of(session).pump.is_lost
        mock_clock.jump(0.001)
        with pytest.raises(LinkLost, match="no data from the peer"):
            await session.receive()
    assert [name for _, name in pings.timers] == ["keepalive", "answer"]
