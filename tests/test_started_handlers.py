"""A peer that breaks off what it opens starts no more handlers than its allowance, however it spreads them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit.protocols import aqueduct
from muxkit.runtime import StartPace
from muxkit.runtime.halves.opening import YIELD_ITEMS
from muxkit.runtime.mux_session import connection_of

if TYPE_CHECKING:
    from trio.testing import MockClock

BURST, RATE = 50, 10
SECONDS = 20.0  # of virtual time


@pytest.mark.parametrize("at_once", [1, 20])
@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_an_attacker_starts_a_burst_of_handlers_and_then_a_rate_of_them(
    protocol: str, at_once: int, autojump_clock: MockClock
) -> None:
    """Was: while there was one token, all that had been opened was handed out, 20 handlers for each token."""
    limits = muxkit.Limits(resets_burst=BURST, resets_per_second=RATE, channels=2 * at_once + 8)
    started = 0
    news = trio.Event()

    async def wait(channel: muxkit.Channel) -> None:
        nonlocal started, news
        started += 1
        news.set()
        news = trio.Event()
        with suppress(muxkit.ChannelCancelled):
            async for _ in channel:
                pass
        await trio.sleep(0.001)  # or it may have ended by itself before it is broken off

    async with (
        muxkit.open_server(wait, f"{protocol}+mem://started", limits=limits, linger=0.1) as server,
        muxkit.connect(server.url, limits=limits, linger=60) as session,
    ):
        began = trio.current_time()
        with trio.move_on_after(SECONDS):
            for _ in range(100_000):  # more than the allowance of the time can start
                before = started
                channels = []
                for _ in range(at_once):
                    channel = await session.open("call")
                    await channel.send(b"x")
                    channels.append(channel)
                while started == before:
                    await news.wait()
                for channel in channels:
                    channel.abort()
        seconds = trio.current_time() - began
        # Those that were open when the allowance ended had started before, and so had those that were taken at once.
        assert BURST <= started <= BURST + limits.channels + YIELD_ITEMS + RATE * seconds


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_calls_that_end_before_their_handlers_begin_do_not_delay_the_next(
    protocol: str, autojump_clock: MockClock
) -> None:
    """Was: Aqueduct counted those whose end came before the message that brought them, and bpmux began those later that
    were given up before credit came, as the two ends of these come in the other order.
    """
    limits = muxkit.Limits(resets_burst=BURST, resets_per_second=RATE, channels=256)
    started = 0

    async def echo(channel: muxkit.Channel) -> None:
        nonlocal started
        started += 1
        with suppress(muxkit.ChannelCancelled):
            async for message in channel:
                await channel.send(message)

    async with (
        muxkit.open_server(echo, f"{protocol}+mem://ended-early", limits=limits, linger=0.1) as server,
        muxkit.connect(server.url, limits=limits, linger=60) as session,
    ):
        for _ in range(10):
            for _ in range(BURST):
                channel = await session.open("call")
                channel.abort()
            await trio.sleep(0.001)  # the server hears of the ends
        before = started
        began = trio.current_time()
        async with session.open("call") as channel:
            await channel.send(b"x")
            assert await channel.receive() == b"x"
        assert before < 10 * BURST / 2  # most of them were not begun
        assert trio.current_time() - began < 1 / RATE


async def test_aqueduct_gives_nothing_back_for_a_channel_that_is_forgotten_before_it_comes(
    autojump_clock: MockClock,
) -> None:
    """To forget what never came is not counted, so a peer could have paid with it for what it breaks off."""
    limits = muxkit.Limits(resets_per_second=1)  # so that little comes back by itself
    sessions: list[aqueduct.Server] = []

    async def hold(session: muxkit.Session) -> None:
        assert isinstance(session, aqueduct.Server)
        session.incoming()  # its common channels are in use, and nothing takes them
        sessions.append(session)
        await trio.sleep_forever()

    async def settle() -> None:
        await trio.testing.wait_all_tasks_blocked(0.01)

    async with (
        muxkit.open_server(hold, "aqueduct+mem://forgotten-early", limits=limits, linger=0.1) as server,
        muxkit.connect(server.url, linger=0.1) as session,
    ):
        first = await session.open("first")
        second = await session.open("second")
        await settle()
        engine = connection_of(sessions[0]).engine
        engine.charge_failure()
        assert isinstance(first, aqueduct.Channel)
        assert isinstance(second, aqueduct.Channel)
        ids = [one.sending.machine.id or 0 for one in (first, second)]
        engine.state.forgotten(2 * ids[1] - ids[0])
        await session.open("third")
        await settle()
        assert not engine.starts.is_full()


def test_the_allowance_is_full_until_something_is_broken_off_and_again_when_it_is_refilled() -> None:
    pace = StartPace(10, 20)
    assert pace.is_full()
    pace.broken_off(0.0)
    assert not pace.is_full()
    pace.started(0.05)
    assert not pace.is_full()
    pace.started(0.1)
    assert pace.is_full()


def test_one_start_at_a_time_while_the_allowance_is_used_up() -> None:
    pace = StartPace(10, 3)
    for _ in range(2):
        pace.broken_off(0.0)
    assert pace.pause(0.0) == 0
    pace.broken_off(0.0)
    assert pace.pause(0.0) == pytest.approx(0.1)
    assert pace.pause(0.1) == 0
    pace.started(0.1)
    pace.broken_off(0.1)
    assert pace.pause(0.1) == pytest.approx(0.1)


def test_a_debt_makes_the_slow_time_longer_and_is_bounded_by_the_burst() -> None:
    pace = StartPace(10, 20)
    for _ in range(1000):
        pace.broken_off(0.0)
    pace.started(2.0)
    assert pace.pause(2.0) == pytest.approx(0.1)
    pace.started(2.2)  # 20 of debt, and 1 to start with: 2.1 s
    assert pace.pause(2.2) == 0


def test_what_is_broken_off_before_it_started_takes_nothing() -> None:
    """A server that is behind would otherwise be kept behind by the calls that time out before it gets to them."""
    pace = StartPace(10, 3)
    for _ in range(1000):
        pace.broken_off(0.0)
        pace.spared()
    assert pace.pause(0.0) == 0


def test_what_is_broken_off_before_it_started_pays_no_debt_back_either() -> None:
    """Was: below the largest debt nothing was taken for it, and one given back all the same."""
    pace = StartPace(10, 3)
    for _ in range(1000):
        pace.broken_off(0.0)
    for _ in range(1000):
        pace.broken_off(0.0)
        pace.spared()
    assert pace.pause(0.05) > 0
    assert pace.pause(0.05 + 2 * 3 / 10) == 0  # the largest debt is paid back


def test_what_is_broken_off_all_the_time_does_not_keep_the_next_from_starting() -> None:
    pace = StartPace(10, 1)
    starts = 0
    for tick in range(1000):
        now = tick / 100
        pace.broken_off(now)
        if not pace.pause(now):
            pace.started(now)
            starts += 1
    assert 95 <= starts <= 101
