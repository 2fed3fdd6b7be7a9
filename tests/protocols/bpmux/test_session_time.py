"""A session detects a silent peer at the exact time, and not before; virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Config
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import weather_pair

from ._pairs import SilentStream, next_source, rough_sessions, sessions

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.requirement("R-46")
async def test_a_half_open_link_is_noticed_after_the_interval_and_the_timeout(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, latency=0.1)
    async with rough_sessions((here, there)) as pair:
        await trio.sleep(5)
        assert await pair.one.ping() == pytest.approx(0.2)
        here.vanish()
        start = trio.current_time()
        with pytest.raises(LinkLost, match=r"no data from the peer for 40 s") as caught:
            await pair.one.receive()
        assert trio.current_time() - start == pytest.approx(40)
        assert caught.value.by == "network"


@pytest.mark.requirement("R-46")
@pytest.mark.parametrize(("keepalive", "patience"), [(1.0, 2.0), (7.0, 0.5)])
async def test_the_times_can_be_chosen(keepalive: float, patience: float, autojump_clock: MockClock) -> None:
    async def use() -> None:
        async with bpmux.session(
            SilentStream(), config=Config(keepalive=keepalive, keepalive_timeout=patience)
        ) as session:
            await session.receive()

    start = trio.current_time()
    with pytest.raises(LinkLost):
        await use()
    assert trio.current_time() - start == pytest.approx(keepalive + patience)


@pytest.mark.requirement("R-46")
async def test_without_keepalive_a_silent_peer_is_borne_for_ever(autojump_clock: MockClock) -> None:
    async with rough_sessions(weather_pair(1), config=Config(keepalive=None)) as pair:
        with trio.move_on_after(1_000_000) as scope:
            await pair.one.receive()
        assert scope.cancelled_caught
        assert pair.one.stats().round_trip is None


@pytest.mark.requirement("R-46")
async def test_a_session_pings_only_when_it_is_idle(autojump_clock: MockClock) -> None:
    async with rough_sessions(weather_pair(1)) as pair, pair.one.open_sink() as sink:
        source = await next_source(pair.other)
        for _ in range(100):
            await sink.send(b"x")
            await source.receive()
            await pair.other.send(b"x")
            await pair.one.receive()
            await trio.sleep(15)
        assert pair.one.stats().round_trip is None
        assert pair.other.stats().round_trip is None
        await trio.sleep(25)
        assert pair.one.stats().round_trip == pytest.approx(0, abs=0.001)


@pytest.mark.requirement("R-46")
async def test_a_living_peer_is_never_given_up(autojump_clock: MockClock) -> None:
    async with sessions(weather_pair(1, latency=9.0, jitter=0.5), linger=60) as pair:
        await trio.sleep(80_000)
        assert pair.one.stats().round_trip == pytest.approx(18, abs=2)
        assert await pair.one.ping() == pytest.approx(18.5, abs=1)


@pytest.mark.requirement("R-52")
async def test_a_clock_that_jumps_an_hour_ends_nothing_and_fires_each_timer_once(mock_clock: MockClock) -> None:
    timers: list[str] = []

    class Watcher:
        def timer(self, name: str) -> None:
            timers.append(name)

        def __getattr__(self, name: str) -> object:
            return lambda *details: None

    async with sessions(observer=Watcher()) as pair:  # type: ignore[arg-type]  # the rest is made on demand
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(3600)
        await trio.testing.wait_all_tasks_blocked()
        assert timers == ["keepalive"]
        assert await pair.one.ping() >= 0
        mock_clock.jump(20)
        await trio.testing.wait_all_tasks_blocked()
        assert len(timers) <= 3
        assert not connection_of(pair.one).pump.is_lost


async def test_a_round_trip_is_measured_and_smoothed(autojump_clock: MockClock) -> None:
    async with sessions(weather_pair(1, latency=0.25)) as pair:
        assert pair.one.stats().round_trip is None
        assert await pair.one.ping() == pytest.approx(0.5)
        assert pair.one.stats().round_trip == pytest.approx(0.5)


async def test_a_cancelled_ping_does_not_take_the_answer_of_the_next(autojump_clock: MockClock) -> None:
    async with sessions(weather_pair(1, latency=1.0)) as pair:
        with trio.move_on_after(0.5):
            await pair.one.ping()
        assert await pair.one.ping() == pytest.approx(2.0)
