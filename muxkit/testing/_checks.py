"""Runs the checks of the conformance suites, and cancels operations step by step.

Each check runs with a fresh pair of links or sessions and within a time limit. Its failure becomes an AssertionError
that names the check, so that the suites work under any test runner. `cancel_sweep` is public and also useful on its
own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from inspect import isawaitable
from typing import TypeVar

import trio
import trio.testing

from muxkit.runtime import LinkLost, background, leaves_of
from muxkit.testing._pair import require

EndT = TypeVar("EndT")
PairT = TypeVar("PairT")
Operation = Callable[[], Awaitable[object]]
Scenario = Callable[[], AbstractAsyncContextManager[Operation]]
MakeEnds = Callable[[], AbstractAsyncContextManager[tuple[EndT, EndT]]]

MOST = 1000  # steps; an operation that needs more than this probably never ends
CHECK_TIMEOUT = 30.0  # s for a single check; only a link or session that hangs or loses data takes this long


async def run_check(
    name: str, check: Callable[[PairT], Awaitable[None]], make_pair: Callable[[], AbstractAsyncContextManager[PairT]]
) -> None:
    """Run one check with a fresh pair.

    Raises:
        AssertionError: if the check or the pair fails, or takes longer than `CHECK_TIMEOUT`. The text names the check
            and the promise that was broken.
    """
    name = name.strip("_").replace("_", " ")
    failure: Exception | None = None
    with trio.move_on_after(CHECK_TIMEOUT) as scope:
        try:
            async with make_pair() as pair:
                try:
                    await check(pair)
                except Exception as error:
                    failure = error
        except Exception as error:
            # A check may leave sessions with unread messages, so both ends of a pair may report `LinkLost`. Any other
            # error of the pair matters only if the check itself succeeded.
            if not all(isinstance(each, LinkLost) for each in leaves_of(error)):
                failure = failure or error
    require(not scope.cancelled_caught, f"{name}: not over within {CHECK_TIMEOUT:g} s, it hangs or lost something")
    if failure is not None:
        first = next(leaves_of(failure))
        raise AssertionError(f"{name}: {str(first) or type(first).__name__}") from first


async def run_both_ways(check: Callable[[EndT, EndT], Awaitable[None]], make_pair: MakeEnds[EndT]) -> None:
    """Run a check of two ends in both directions, each time with a fresh pair."""
    name = getattr(check, "__name__", "check")
    await run_check(name, lambda ends: check(ends[0], ends[1]), make_pair)
    await run_check(name, lambda ends: check(ends[1], ends[0]), make_pair)


async def must_raise(kind: type[Exception], what: str, call: Callable[..., object], *arguments: object) -> None:
    """Call a function or a coroutine function, named `what`. Raises AssertionError if it doesn't raise `kind`."""
    try:
        result = call(*arguments)
        if isawaitable(result):
            await result
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}, not {kind.__name__}") from error
    raise AssertionError(f"{what} does not raise {kind.__name__}")


async def cancel_sweep(scenario: Scenario, *, most: int = MOST) -> int:
    """Cancel an operation at its first step, then at its second, and so on until it ends before it is cancelled.

        @asynccontextmanager
        async def scenario():
            async with my_pair() as (one, other):       # fresh for each run
                yield partial(one.send, b"message")     # the operation to cancel
                await canary(one, other)                # checks that must pass afterwards

        steps = await cancel_sweep(scenario)

    A step is the code that a task runs between two checkpoints. In a last run the operation is cancelled once all tasks
    are blocked, unless it has ended by then. The operation has to end when it isn't cancelled.

    Args:
        scenario: returns a context manager that sets up, yields the operation, and checks the result.
        most: the number of steps after which the operation counts as endless.

    Returns:
        The number of steps of the operation.

    Raises:
        AssertionError: if the operation takes more than `most` steps.
        Exception: the error that the operation or the scenario raised, with a note that names the step.
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
    """Run the operation and cancel it at its `step`-th step. Return True if it reached that step."""
    counter = _Counter(trio.lowlevel.current_task(), step)
    with counter.scope:
        # The first step is already running, so the instrument won't see it start. We count it ourselves.
        trio.lowlevel.add_instrument(counter)
        try:
            counter.count()
            await operation()
        finally:
            trio.lowlevel.remove_instrument(counter)
    return counter.left <= 0


class _Counter(trio.abc.Instrument):
    def __init__(self, task: trio.lowlevel.Task, step: int) -> None:
        self._task = task
        self.left = step
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
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
