"""What both processes of the demo do: report the result, end with standard input, measure their memory."""

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


def run_part(part: Callable[[], Awaitable[Totals | None]]) -> Exit:
    """Run `part` and report its result; None means that the parent ended it before."""
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


async def until_released() -> None:
    """Wait for the end of standard input: the parent has closed it, or has ended."""
    # Not `sys.stdin.read`: its thread, once abandoned, would hold a lock when the interpreter ends.
    while await trio.to_thread.run_sync(os.read, 0, 1024, abandon_on_cancel=True):
        pass


STATUS = Path("/proc/self/status")


def peak_memory() -> int | None:
    """Return the highest resident memory in bytes; None where the system does not report it."""
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
