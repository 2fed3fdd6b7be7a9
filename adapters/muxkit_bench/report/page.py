"""The results as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from muxkit.pipeline.capture.page import Bar, Group, bars, cell, document, table
from muxkit_bench.report.figures import Figures, Line
from muxkit_bench.report.targets import Row, judge
from muxkit_bench.report.words import MICRO, beside, cpu, extent, latency, median, short
from muxkit_bench.run.cells import EXPLAINED
from muxkit_bench.run.machine import describe, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit_bench.report.results import Entry, Report, Shape

HOW = (
    "Bars are medians over the rounds, the thin lines reach from the least round to the most. Each group of bars has a "
    "scale of its own, which begins at 0: compare lengths within a group only. A ratio (×) is the median of the ratios "
    "to the baseline of the same round. CPU is what the two processes used of their cores, in µs for each unit: the "
    "client's first, the server's paler after it. A ratio by CPU counts this time only; other work on the machine "
    "changes it less. A ring is the 99th percentile of round trips."
)


def page(reports: Sequence[Report]) -> str:
    """Make the page of one run or several."""
    several = len(reports) > 1
    pieces = [_targets(judge(reports), len(reports)), f"<p>{HOW}</p>"]
    for number, report in enumerate(reports, start=1):
        pieces.append(_run(report, f"Run {number} of {len(reports)}" if several else "The run"))
    return document("muxkit bench", "".join(pieces))


# --- the targets


def _targets(rows: Sequence[Row], runs: int) -> str:
    if not rows:
        return ""
    heads = ["target", "bound"]
    for number in range(1, runs + 1):
        heads += ["measured" if runs == 1 else f"run {number}", "least – most", "by CPU"]
    body = []
    for row in rows:
        cells = [cell(row.target.title), cell(row.target.bound_in_words)]
        for verdict in row.verdicts:
            kind = "" if verdict is None else "good" if verdict.is_met else "bad"
            cells.append(cell(row.measured(verdict) if verdict else "-", f"number {kind}"))
            cells.append(cell(extent(verdict.spread) if verdict else "", "number"))
            cells.append(cell(median(verdict.by_cpu) if verdict else "", "number"))
        met, of = row.met
        cells.append(cell(("yes" if met else "no") if of == 1 else f"{met} of {of}", "good" if met == of else "bad"))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<h2>Targets for bpmux over TCP</h2>{table([*heads, 'met'], body)}"


# --- a run


def _run(report: Report, title: str) -> str:
    figures = Figures(report)
    colours = {entry.name: number for number, entry in enumerate(_in_order(report.entries))}
    pieces = [f"<h2>{escape(title)}</h2>", _facts(report)]
    for job in dict.fromkeys(shape.job for shape in report.cells):
        shapes = [shape for shape in report.cells if shape.job == job]
        # A later version may have jobs that this one does not know.
        explained = next((text for name, text in EXPLAINED.items() if name == job), "")
        pieces.append(f"<h3>{escape(job)}</h3><p>{escape(explained.replace('`', ''))}</p>")
        pieces.append(_plot_of(job, figures, shapes, colours))
    pieces.append("<h3>All figures</h3>" + _all_figures(figures, report.cells))
    return "".join(pieces)


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Choose colours: the first for muxkit, greys for baselines."""
    is_raw = [entry for entry in entries if entry.name.startswith("raw ")]
    others = [entry for entry in entries if not entry.name.startswith("raw ")]
    return [*others[:1], *is_raw[:2], *others[1:], *is_raw[2:]]


def _facts(report: Report) -> str:
    machine = report.machine
    facts = {
        "began": f"{report.began}, took {report.seconds:.0f} s",
        "rounds": f"{report.rounds}, passes of {report.pass_seconds:g} s, seed {report.seed}",
        "machine": describe(machine),
        "cores": where(machine),
        "software": ", ".join([machine.python, *(f"{name} {version}" for name, version in machine.packages.items())]),
        "load": f"{_load(machine.load_before)} before, {_load(machine.load_after)} after",
        **{f"peer {entry.name}": entry.title for entry in report.entries},
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    left_out = "".join(f"<p>left out: {escape(sentence)}</p>" for sentence in report.left_out)
    failures = "".join(
        f'<p class="bad">failed in round {failure.round}, {escape(failure.cell)}: {escape(failure.sentence)}</p>'
        for failure in report.failures
    )
    return f"<dl>{rows}</dl>{left_out}{failures}"


def _load(averages: Sequence[float]) -> str:
    return " ".join(f"{average:.2f}" for average in averages) or "unknown"


def _plot_of(job: str, figures: Figures, shapes: Sequence[Shape], colours: dict[str, int]) -> str:
    values, costs = [], []
    for shape in shapes:
        lines = figures.lines(shape)
        where = f"{shape.title}, {_channels(shape)}"
        better = "more is better" if shape.higher_is_better else "less is better"
        values.append(Group(f"{where}: {shape.unit}, {better}", [_value_bar(line, colours) for line in lines]))
        priced = [bar for line in lines if (bar := _cpu_bar(line, colours)) is not None]
        costs.append(Group(f"{where}: CPU µs for each {shape.counted}, client and server", priced))
    scale = "each group has its own scale"
    drawn = bars(f"{job}: figures; {scale}", values)
    return drawn + (bars(f"{job}: CPU time; {scale}", costs) if any(group.bars for group in costs) else "")


def _channels(shape: Shape) -> str:
    if shape.job == "openclose":
        return f"{shape.channels} at a time"
    if shape.job == "among":
        return f"{shape.channels:,} others open"
    return "1 channel" if shape.channels == 1 else f"{shape.channels:,} channels"


def _value_bar(line: Line, colours: dict[str, int]) -> Bar:
    """Make a bar to the median; of round trips, with a point at the 99th percentile."""
    value, note = line.value, short(line.value.median)
    marks = []
    if line.shape.job in ("rtt", "neighbour"):
        p99 = line.also["p99"].median * MICRO
        marks, note = [p99], f"p50 {note}, p99 {short(p99)}"
    return Bar(
        name=line.entry.name,
        parts=[value.median],
        least=value.least,
        most=value.most,
        marks=marks,
        colour=colours[line.entry.name],
        note=_note(line, note),
    )


def _note(line: Line, value: str) -> str:
    ratio = f"{median(line.ratio)} ×" if line.ratio else ""
    return " · ".join(part for part in (value, ratio, beside(line)) if part)


def _cpu_bar(line: Line, colours: dict[str, int]) -> Bar | None:
    if line.client_cpu is None or line.server_cpu is None:
        return None
    return Bar(
        name=line.entry.name,
        parts=[line.client_cpu.median, line.server_cpu.median],
        colour=colours[line.entry.name],
        note=cpu(line),
    )


def _all_figures(figures: Figures, shapes: Iterable[Shape]) -> str:
    heads = ["job", "channels", "peer", "unit", "median", "least – most", "× baseline", "least – most", "× by CPU"]
    body = []
    for shape in shapes:
        for line in figures.lines(shape):
            words = [shape.title, f"{shape.channels:,}", line.entry.name, shape.unit]
            numbers = [median(line.value), extent(line.value), median(line.ratio), extent(line.ratio)]
            cells = [cell(word) for word in words] + [cell(number, "number") for number in numbers]
            cells += [cell(number, "number") for number in (median(line.ratio_by_cpu), cpu(line), latency(line))]
            cells.append(cell(beside(line)))
            body.append(f"<tr>{''.join(cells)}</tr>")
    return table([*heads, "CPU µs c / s", "p50 / p99 µs", "beside"], body)
