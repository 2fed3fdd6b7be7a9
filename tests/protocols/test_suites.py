"""The suites of `muxkit.testing` for sessions, run over each protocol that has sessions of its own."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit import Limits
from muxkit.protocols import aqueduct, bpmux, e3x, relink, yamux
from muxkit.runtime import background
from muxkit.testing import (
    SessionPair,
    check_cancellation,
    check_leaving,
    check_openings,
    check_pressure,
    check_reading,
    weather_pair,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from trio.testing import MockClock

    from muxkit import Session

    MakeSession = Callable[..., AbstractAsyncContextManager[Session]]
    MakePair = Callable[[], AbstractAsyncContextManager[SessionPair]]

SEED = 4
SMALL = Limits(channel_bytes=1000, channel_floor=100, outbox=2000)  # windows that are soon full


@asynccontextmanager
async def joined(one_of: MakeSession, other_of: MakeSession) -> AsyncIterator[SessionPair]:
    """Two sessions over one byte stream; each is opened in a task of its own, since either may wait for the other."""
    here, there = weather_pair(SEED, latency=0.01, jitter=0.01, bandwidth=1e8)
    over = trio.Event()

    async def listen(task_status: trio.TaskStatus[Session]) -> None:
        async with other_of(there, linger=1) as other:
            task_status.started(other)
            await over.wait()

    others: list[Session] = []
    ready = trio.Event()

    async def start() -> None:
        others.append(await nursery.start(listen))
        ready.set()

    async with background() as nursery:
        nursery.start_soon(start)
        async with one_of(here, linger=1) as one:
            await ready.wait()
            yield SessionPair(one, others[0], here.reset)
            over.set()


def with_roles(session: Callable[..., Any], one: str, other: str) -> MakePair:
    return partial(joined, partial(session, role=one), partial(session, role=other))


small_bpmux = partial(bpmux.session, limits=SMALL)

PAIRS: dict[str, MakePair] = {
    "bpmux": partial(joined, bpmux.session, bpmux.session),
    "bpmux with small windows": partial(joined, small_bpmux, small_bpmux),
    "relink": with_roles(relink.session, "connector", "listener"),
    "aqueduct": with_roles(aqueduct.connection, "client", "server"),
    "e3x": with_roles(e3x.session, "connector", "listener"),
    "yamux": with_roles(yamux.session, "client", "server"),
    "yamux with small windows": with_roles(partial(yamux.session, limits=SMALL), "client", "server"),
}


@pytest.fixture(params=sorted(PAIRS))
def make_pair(request: pytest.FixtureRequest) -> MakePair:
    return PAIRS[request.param]


@pytest.mark.requirement("R-31", "R-32", "R-33", "R-34")
async def test_each_call_may_be_cancelled_at_each_step(make_pair: MakePair, autojump_clock: MockClock) -> None:
    await check_cancellation(make_pair)


@pytest.mark.requirement("R-32", "R-33")
async def test_each_message_comes_once_under_random_cancellation(
    make_pair: MakePair, autojump_clock: MockClock
) -> None:
    await check_reading(make_pair)


@pytest.mark.soak
@pytest.mark.requirement("R-32", "R-33")
async def test_each_of_very_many_messages_comes_once_under_random_cancellation(
    make_pair: MakePair, autojump_clock: MockClock
) -> None:
    await check_reading(make_pair, messages=35_000)


@pytest.mark.requirement("R-07")
async def test_a_channel_that_is_not_read_stops_only_its_own_sender(
    make_pair: MakePair, autojump_clock: MockClock
) -> None:
    await check_pressure(make_pair)


@pytest.mark.requirement("R-39", "R-44")
async def test_openings_and_ends_in_any_order_leave_no_channels(make_pair: MakePair, autojump_clock: MockClock) -> None:
    await check_openings(make_pair)


@pytest.mark.requirement("R-35", "R-36", "R-38", "R-43")
async def test_sessions_are_left_in_time_and_leave_nothing_behind(
    make_pair: MakePair, autojump_clock: MockClock
) -> None:
    await check_leaving(make_pair)
