"""What the tests of `muxkit.asyncio` share: the loops that they run on, and a server that answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

import muxkit.asyncio
from muxkit.asyncio import guest

T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, T]]], T]

PATIENCE = 300.0  # s; reached only when something hangs


def _loops() -> list[tuple[str, Callable[[], asyncio.AbstractEventLoop]]]:
    found: list[tuple[str, Callable[[], asyncio.AbstractEventLoop]]] = [("asyncio", asyncio.new_event_loop)]
    if sys.platform != "win32":  # where there is no uvloop
        import uvloop

        found.append(("uvloop", uvloop.new_event_loop))
    return found


LOOPS = [pytest.param(make, id=name) for name, make in _loops()]


def run_of_this_thread() -> object:
    """Return Trio's run on the asyncio loop of this thread; None when there isn't any."""
    return guest._LOCAL.guest


def run(make: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a new loop in debug mode; nothing of Trio may be left afterwards."""

    async def within() -> T:
        async with asyncio.timeout(PATIENCE):
            return await main()

    with asyncio.Runner(loop_factory=make, debug=True) as runner:
        result = runner.run(within())
    assert run_of_this_thread() is None
    return result


async def echo(channel: muxkit.asyncio.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def cancel_after(task: asyncio.Task[Any], passes: int) -> bool:
    """Cancel a task after so many passes of the loop; False if it had ended before."""
    for _ in range(passes):
        if task.done():
            break
        await asyncio.sleep(0)
    was_cancelled = task.cancel()
    await asyncio.wait([task])
    return was_cancelled
