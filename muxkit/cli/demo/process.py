"""How does a process that works for a command behave? It tells how it went, and ends when nobody wants it any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
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


STATUS = Path("/proc/self/status")


def peak_memory() -> int | None:
    """Bytes of resident memory, at their highest; None where the system does not say."""
    if STATUS.exists():
        # Not `ru_maxrss`: on Linux a new process inherits that from the one that started it.
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
