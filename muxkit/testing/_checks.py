"""How the suites for links and sessions run their checks: one at a time, each with a pair of its own."""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING, TypeVar

import trio

from muxkit.runtime import LinkLost, leaves_of
from muxkit.testing._pair import require

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    EndT = TypeVar("EndT")
    MakeEnds = Callable[[], AbstractAsyncContextManager[tuple[EndT, EndT]]]

PairT = TypeVar("PairT")

CHECK_TIMEOUT = 30.0  # s, for a single check; reached only by a link or a session that hangs or loses


async def run_check(
    name: str, check: Callable[[PairT], Awaitable[None]], make_pair: Callable[[], AbstractAsyncContextManager[PairT]]
) -> None:
    """Run one check with a pair of its own; raises AssertionError with the name of the check and what was broken."""
    name = name.strip("_").replace("_", " ")
    failure: Exception | None = None
    with trio.move_on_after(CHECK_TIMEOUT) as scope:
        try:
            async with make_pair() as pair:
                try:
                    await check(pair)
                except Exception as error:
                    failure = error
        except LinkLost:
            pass  # a check may leave a session with unread messages
        except Exception as error:
            # A pair that minds how it was left matters only when the check itself went well.
            failure = failure or error
    require(not scope.cancelled_caught, f"{name}: not over within {CHECK_TIMEOUT:g} s, it hangs or lost something")
    if failure is not None:
        first = next(leaves_of(failure))
        raise AssertionError(f"{name}: {str(first) or type(first).__name__}") from first


async def run_both_ways(check: Callable[[EndT, EndT], Awaitable[None]], make_pair: MakeEnds[EndT]) -> None:
    """Run a check of two ends from the one to the other, and the other way round."""
    name = getattr(check, "__name__", "check")
    await run_check(name, lambda ends: check(ends[0], ends[1]), make_pair)
    await run_check(name, lambda ends: check(ends[1], ends[0]), make_pair)


async def must_raise(kind: type[Exception], what: str, call: Callable[..., object], *arguments: object) -> None:
    """Call a function or a coroutine function, which `what` names; AssertionError if it does not raise `kind`."""
    try:
        result = call(*arguments)
        if isawaitable(result):
            await result
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}, not {kind.__name__}") from error
    raise AssertionError(f"{what} does not raise {kind.__name__}")
