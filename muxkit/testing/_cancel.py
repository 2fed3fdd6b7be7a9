"""Run an operation again and again, cancelled one step later each time.

@asynccontextmanager
async def scenario():
    async with my_pair() as (one, other):       # fresh for each run
        yield partial(one.send, b"message")     # what is cancelled
        await canary(one, other)                # what must hold afterwards

steps = await cancel_sweep(scenario)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from muxkit.runtime import background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    Operation = Callable[[], Awaitable[object]]
    Scenario = Callable[[], AbstractAsyncContextManager[Operation]]

MOST = 1000  # steps; an operation that needs more than this probably never ends


async def cancel_sweep(scenario: Scenario, *, most: int = MOST) -> int:
    """Cancel the operation at its first step, at its second, and so on until it ends by itself; give that number.

    A step is what a task does between two checkpoints. The operation must end when it is not cancelled. Then it is
    cancelled once more when all tasks have come to rest, if it is not over by then. An error of the operation or of
    the scenario gets a note that says at which step.
    """
    for step in range(1, most + 1):
        try:
            async with scenario() as operation:
                was_cancelled = await _cancelled_at(operation, step)
        except Exception as error:
            error.add_note(f"cancel_sweep: the operation was cancelled at step {step}")
            raise
        if not was_cancelled:
            break
    else:
        raise AssertionError(f"cancel_sweep: the operation was not over after {most} steps")
    try:
        async with scenario() as operation:
            await _cancelled_at_rest(operation)
    except Exception as error:
        error.add_note("cancel_sweep: the operation was cancelled when all tasks were at rest")
        raise
    return step - 1


async def _cancelled_at(operation: Operation, step: int) -> bool:
    """Run it, cancelled from its `step`-th step on; was that before its end?"""
    counter = _Counter(trio.lowlevel.current_task(), step)
    with counter.scope:
        # The first step is the one that is being done now, so nothing has been counted before it.
        trio.lowlevel.add_instrument(counter)
        try:
            counter.count()
            await operation()
        finally:
            trio.lowlevel.remove_instrument(counter)
    return counter.is_over


class _Counter(trio.abc.Instrument):
    def __init__(self, task: trio.lowlevel.Task, step: int) -> None:
        self._task = task
        self._left = step
        self.scope = trio.CancelScope()

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.count()

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.scope.cancel()


async def _cancelled_at_rest(operation: Operation) -> None:
    scope = trio.CancelScope()

    async def cancel() -> None:
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()

    async with background() as nursery:
        nursery.start_soon(cancel)
        with scope:
            await operation()
