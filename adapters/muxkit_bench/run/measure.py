"""How is a run made into a report? Beside the passes it holds where and how they were measured."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import trio

import muxkit
from muxkit_bench.report.results import Entry, Report, Shape
from muxkit_bench.run.display import progress
from muxkit_bench.run.machine import load, this_machine
from muxkit_bench.run.rounds import Plan, Rounds
from muxkit_bench.run.stopping import until_stopped

if TYPE_CHECKING:
    import signal

    from rich.console import Console

    from muxkit_bench.run.cells import Cell


def measure(plan: Plan, left_out: list[str], out: Console) -> tuple[Report | None, signal.Signals | None]:
    """What came out, and what cut it short; a report has whole rounds only, and there is none without one."""
    began, machine = time.monotonic(), this_machine(list(plan.cores), awake=bool(plan.awake))
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
