"""The sweep cancels at every step, and says where something broke."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.testing import cancel_sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Operation = Callable[[], Awaitable[object]]


async def test_each_step_is_cancelled_once_and_then_none() -> None:
    reached: list[int] = []

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        steps = 0

        async def operation() -> None:
            nonlocal steps
            for _ in range(4):
                await trio.lowlevel.checkpoint()
                steps += 1

        yield operation
        reached.append(steps)

    assert await cancel_sweep(scenario) == 5
    assert sorted(set(reached)) == [0, 1, 2, 3, 4]


async def test_an_operation_without_a_checkpoint_is_one_step() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async def operation() -> None: ...

        yield operation

    assert await cancel_sweep(scenario) == 1


async def test_an_operation_that_waits_is_cancelled_in_its_sleep_too() -> None:
    notes: list[str] = []

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        event, waker_has_run = trio.Event(), False

        async def operation() -> None:
            try:
                await event.wait()
            except trio.Cancelled:
                notes.append("in its sleep" if waker_has_run else "before")
                raise

        async def wake() -> None:
            nonlocal waker_has_run
            waker_has_run = True
            await trio.testing.wait_all_tasks_blocked(0.01)
            event.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wake)
            yield operation

    await cancel_sweep(scenario)
    assert notes[-1] == "in its sleep"


async def test_a_scenario_that_breaks_says_at_which_step() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        held = False

        async def careless() -> None:
            nonlocal held
            held = True
            await trio.lowlevel.checkpoint()
            held = False

        yield careless
        assert not held, "still held"

    with pytest.raises(AssertionError, match="still held") as caught:
        await cancel_sweep(scenario)
    assert "cancel_sweep: the operation was cancelled at step 1" in caught.value.__notes__


async def test_an_endless_operation_is_given_up() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async def operation() -> None:
            while True:
                await trio.lowlevel.checkpoint()

        yield operation

    with pytest.raises(AssertionError, match="not over after 20 steps"):
        await cancel_sweep(scenario, most=20)
