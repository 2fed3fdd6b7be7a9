"""A run from its plan to its report: its display, and a tidy end at a signal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import trio
from rich.live import Live
from rich.text import Text

import muxkit
from muxkit.cli.commands import build
from muxkit.cli.terminal import is_live, printable
from muxkit_bench.report.results import Entry, Report, Shape
from muxkit_bench.run.machine import describe, load, this_machine
from muxkit_bench.run.rounds import Plan, Rounds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Iterator
    from types import FrameType

    from rich.console import Console

    from muxkit_bench.run.cells import Cell


def measure(plan: Plan, left_out: list[str], out: Console) -> tuple[Report | None, signal.Signals | None]:
    """Run a plan; return its report, if a round is complete, and the signal that ended it early."""
    began, machine = time.monotonic(), this_machine(list(plan.cores), awake=bool(plan.awake))
    out.print(Text(printable(describe(machine))), soft_wrap=True)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with progress(out, plan.rounds) as say:
        rounds = Rounds(plan, say)
        stopped = trio.run(until_stopped, rounds.run)
    if rounds.complete < plan.rounds:
        left_out = [*left_out, f"the rounds from {rounds.complete + 1} to {plan.rounds}: the run was cut short"]
    if rounds.complete == 0:
        return None, stopped
    report = Report(
        began=started,
        seconds=round(time.monotonic() - began, 1),
        rounds=rounds.complete,
        seed=plan.seed,
        pass_seconds=plan.seconds,
        quick=plan.quick,
        muxkit=muxkit.__version__,
        is_compiled=build() == "compiled",
        machine=msgspec.structs.replace(machine, load_after=load()),
        entries=[Entry(name=one.name, title=one.title, baseline=one.baseline) for one in plan.contestants],
        left_out=left_out,
        cells=[_shape(cell) for cell in plan.cells],
        passes=[one for one in rounds.passes if one.round <= rounds.complete],
        failures=rounds.failures,
    )
    return report, stopped


def _shape(cell: Cell) -> Shape:
    return Shape(
        key=cell.key,
        job=cell.job,
        title=cell.title,
        channels=cell.channels,
        unit=cell.unit,
        higher_is_better=cell.higher_is_better,
        counted=cell.counted,
        baseline=cell.baseline,
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell shows for it


async def until_stopped(run: Callable[[], Awaitable[object]]) -> signal.Signals | None:
    """Run to the end, or until a signal; return the signal."""
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
    """Exit by an exception on SIGTERM outside of Trio too, so that open things are closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Say = Callable[[int, str, str], None]  # which round, which cell, which peer


@contextmanager
def progress(out: Console, rounds: int) -> Iterator[Say]:
    """Show each pass before it begins."""
    if not is_live(out):
        yield _Lines(out, rounds)
        return
    # Drawn between passes, never by a thread, which would be measured as well.
    with Live(console=out, auto_refresh=False, transient=True) as live:
        yield lambda number, cell, peer: live.update(
            Text(printable(f"round {number} of {rounds}: {cell}, {peer}")), refresh=True
        )


class _Lines:
    def __init__(self, out: Console, rounds: int) -> None:
        self._out = out
        self._rounds = rounds
        self._last = 0

    def __call__(self, number: int, cell: str, peer: str) -> None:
        if number != self._last:
            self._last = number
            self._out.print(f"round {number} of {self._rounds}")
