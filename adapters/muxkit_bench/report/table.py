"""The results for a terminal: a table of all cells, and one of the targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from muxkit.cli.terminal import printable
from muxkit_bench.report.figures import Figures, Line
from muxkit_bench.report.words import beside, cpu, extent, latency, median
from muxkit_bench.run.machine import describe, where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from muxkit_bench.report.results import Report
    from muxkit_bench.report.targets import Row

BUSY = 1.0  # load before the run that means that other work needs a core
WIDE = 150  # columns of a terminal that has room for everything


def print_report(out: Console, report: Report) -> None:
    """Print every cell of a run, and its failures."""
    out.print(_cells(report, with_spreads=out.width >= WIDE))
    out.print(Text(_about(report)))
    if any(average > BUSY for average in report.machine.load_before[:1]):
        out.print(
            Text(
                "other work was running on this machine: trust CPU time more than ratios, and ratios more than rates",
                "red",
            )
        )
    for sentence in report.left_out:
        out.print(Text(printable(f"left out: {sentence}"), style="yellow"))
    for failure in report.failures:
        where = f", {failure.cell}" if failure.cell else ""
        out.print(Text(printable(f"FAILED in round {failure.round}{where}: {failure.sentence}"), style="bold red"))


def _cells(report: Report, *, with_spreads: bool) -> Table:
    figures = Figures(report)
    table = Table(title=f"median of {report.rounds} rounds, passes of {report.pass_seconds:g} s, began {report.began}")
    table.add_column("job", no_wrap=True)
    table.add_column("channels", justify="right")
    table.add_column("peer", no_wrap=True)
    for title, is_number, is_wide in COLUMNS:
        if with_spreads or not is_wide:
            table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number)
    for shape in report.cells:
        table.add_section()
        for number, line in enumerate(figures.lines(shape)):
            # Each line names its cell, so that a search in the text finds whole lines.
            style = "" if number == 0 else "dim"
            name = Text(printable(line.entry.name), style="" if line.entry.name.startswith("raw ") else "bold")
            cells = [
                Text(cell) for cell, column in zip(_row(line), COLUMNS, strict=True) if with_spreads or not column[2]
            ]
            table.add_row(Text(shape.title, style=style), Text(f"{shape.channels:,}", style=style), name, *cells)
    return table


COLUMNS = (  # title, is it a number, does it need a wide terminal
    ("unit", False, False),
    ("median", True, False),
    ("least – most", True, True),
    ("× baseline", True, False),
    ("least – most", True, True),
    ("× by CPU", True, False),
    ("CPU µs c / s", True, False),
    ("p50 / p99 µs", True, False),
    ("beside", False, True),
)


def _row(line: Line) -> tuple[str, ...]:
    return (
        line.shape.unit,
        median(line.value),
        extent(line.value),
        median(line.ratio),
        extent(line.ratio),
        median(line.ratio_by_cpu),
        cpu(line),
        latency(line),
        beside(line),
    )


def _about(report: Report) -> str:
    machine = report.machine
    load = " ".join(f"{average:.2f}" for average in machine.load_before[:1] + machine.load_after[:1])
    return (
        f"{report.seconds:.0f} s on {printable(describe(machine))}; {where(machine)}, "
        f"{machine.python}, trio {machine.packages.get('trio', '?')}; load before and after: {load or '?'}"
    )


def print_targets(out: Console, rows: Sequence[Row], runs: int) -> None:
    """Print each target with what each run measured, if any run says something about one."""
    if not rows:
        return
    table = Table(title="targets for bpmux over TCP: median of the rounds, and least – most")
    table.add_column("target")
    table.add_column("bound", no_wrap=True)
    for number in range(1, runs + 1):
        table.add_column("measured" if runs == 1 else f"run {number}", justify="right", no_wrap=True)
        table.add_column("least – most", justify="right", no_wrap=True)
        table.add_column("by CPU", justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    for row in rows:
        cells = []
        for verdict in row.verdicts:
            cells += (
                [row.measured(verdict), extent(verdict.spread), median(verdict.by_cpu)] if verdict else ["-", "", ""]
            )
        met, of = row.met
        words = ("yes" if met else "NO") if of == 1 else f"{met} of {of}"
        table.add_row(
            row.target.title, row.target.bound_in_words, *cells, Text(words, style="green" if met == of else "bold red")
        )
    out.print(table)
