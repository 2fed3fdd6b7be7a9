"""How does a process that works for a command behave? It tells how it went, and ends when nobody wants it any more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from muxkit.cli.demo.events import Failed, Totals, tell
from muxkit.cli.outcome import Exit, failure_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def play(part: Callable[[], Awaitable[Totals | None]]) -> Exit:
    """Run it and tell what it found; None means that it was let go before it had found anything."""
    try:
        totals = trio.run(part)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        tell(Failed(failure.sentence, failure.exit))
        return failure.exit
    if totals is None:
        return Exit.INTERRUPTED
    tell(totals)
    return Exit.OK


async def until_let_go() -> None:
    """Wait for the end of standard input: whoever started us wants us no more, or is gone."""
    # Not `sys.stdin.read`: an abandoned thread would hold its lock when the interpreter ends.
    while await trio.to_thread.run_sync(os.read, 0, 1024, abandon_on_cancel=True):
        pass
