"""Keeping cores awake: with `--awake` none falls asleep while a run lasts.

Between the halves of a round trip both cores are idle. How deeply they sleep then and how long they take to wake
depends on the length of the pause and, in a virtual machine, on the host and its other guests: the same program took
115 µs in one minute and 200 in the next. So each core gets work that gives way to all other work.

`python -m muxkit_bench.run.awake PARENT` is that work, until its parent has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

LOOPS = 1_000_000  # between two checks for the parent


def can_keep_awake() -> bool:
    """Return True if the system has a scheduling class that gives way to all others."""
    return sys.platform == "linux"


@asynccontextmanager
async def awake(cores: Sequence[int]) -> AsyncGenerator[list[int], None]:
    """Keep these cores busy; yield the ids of the processes that do it."""
    processes: list[trio.Process] = []
    try:
        for core in cores:
            command = [sys.executable, "-m", "muxkit_bench.run.awake", str(os.getpid())]
            process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, process_group=0)
            processes.append(process)
            _give_way(process.pid, core)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        with trio.CancelScope(shield=True):  # they are gone in a moment
            for process in processes:
                await process.wait()


def _give_way(process: int, core: int) -> None:
    if sys.platform == "linux":
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(process, {core})


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        for _ in range(LOOPS):
            pass


if __name__ == "__main__":
    _spin(int(sys.argv[1]))
