"""How is a run made into a report? Beside the passes it holds where and how they were measured."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import trio

import muxkit
from muxkit.cli._bench._display import progress
from muxkit.cli._bench._machine import load, this_machine
from muxkit.cli._bench._results import Entry, Report, Shape
from muxkit.cli._bench._rounds import Plan, Rounds

if TYPE_CHECKING:
    from rich.console import Console

    from muxkit.cli._bench._cells import Cell


def measure(plan: Plan, left_out: list[str], out: Console) -> Report:
    began, machine = time.monotonic(), this_machine(list(plan.cores), awake=bool(plan.awake))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with progress(out, plan.rounds) as say:
        rounds = Rounds(plan, say)
        trio.run(rounds.run)
    return Report(
        began=started,
        seconds=round(time.monotonic() - began, 1),
        rounds=plan.rounds,
        seed=plan.seed,
        pass_seconds=plan.seconds,
        muxkit=muxkit.__version__,
        machine=msgspec.structs.replace(machine, load_after=load()),
        entries=[Entry(name=one.name, title=one.title, baseline=one.baseline) for one in plan.contestants],
        left_out=left_out,
        cells=[_shape(cell) for cell in plan.cells],
        passes=rounds.passes,
        failures=rounds.failures,
    )


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
