"""How does a run end before its time? By a signal, tidily: no process and no folder stays behind."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell shows for it


async def until_stopped(run: Callable[[], Awaitable[object]]) -> signal.Signals | None:
    """Run this to its end, or until a signal; gives the signal."""
    stopped: signal.Signals | None = None
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal stopped
                stopped = signal.Signals(await anext(signals))
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await run()
            nursery.cancel_scope.cancel()
    return stopped


@contextmanager
def tidy_when_terminated() -> Generator[None, None, None]:
    """Outside of Trio, too, what is open is closed when we are told to go."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
