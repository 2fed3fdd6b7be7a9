"""Figures from passes: medians over rounds, and ratios to the baseline of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from muxkit_bench.report.results import Entry, Pass, Report, Shape

MICRO = 1e6


@attrs.frozen
class Spread:
    """Median, least and most over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@attrs.frozen(kw_only=True)
class Line:
    """The figures of one contestant in one cell, over all rounds."""

    shape: Shape
    entry: Entry
    rounds: int
    units: float
    """In the last round."""
    value: Spread
    ratio: Spread | None
    """Ratio to the baseline of the same round; None for the baseline itself, or without one."""
    ratio_by_cpu: Spread | None
    """The same by CPU time."""
    client_cpu: Spread | None
    """µs per unit."""
    server_cpu: Spread | None
    also: dict[str, Spread]


Figure = Callable[["Shape", "Pass"], float]


class Figures:
    """The figures of a report."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.shapes = {shape.key: shape for shape in report.cells}
        self._passes: dict[tuple[str, str], dict[int, Pass]] = {}
        for one in report.passes:
            self._passes.setdefault((one.cell, one.peer), {})[one.round] = one

    def lines(self, shape: Shape) -> list[Line]:
        """The rows of a cell, in the order of the entries."""
        found = [self.line(shape, entry) for entry in self.report.entries]
        return [line for line in found if line is not None]

    def line(self, shape: Shape, entry: Entry) -> Line | None:
        passes = self.of(shape.key, entry.name)
        value = Spread.of([value_of(shape, one) for one in passes.values()])
        if value is None:
            return None
        counts = bool(shape.counted)
        return Line(
            shape=shape,
            entry=entry,
            rounds=len(passes),
            units=[one.units for one in passes.values()][-1],
            value=value,
            ratio=Spread.of(self.ratios(shape, entry)),
            ratio_by_cpu=Spread.of(self.ratios(shape, entry, value_by_cpu)) if counts else None,
            client_cpu=Spread.of([one.client_cpu / one.units * MICRO for one in passes.values()]) if counts else None,
            server_cpu=Spread.of([one.server_cpu / one.units * MICRO for one in passes.values()]) if counts else None,
            also=_also(passes.values()),
        )

    def ratios(self, shape: Shape, entry: Entry, figure: Figure | None = None) -> list[float]:
        """Return the ratios to the baseline, one for each round in which both were measured."""
        baseline = baseline_of(shape, entry)
        if baseline == entry.name:
            return []
        return self.ratios_between((shape, entry.name), (shape, baseline), figure)

    def ratios_between(
        self, one: tuple[Shape, str], other: tuple[Shape, str], figure: Figure | None = None
    ) -> list[float]:
        """The first's figure divided by the second's, in each round in which both were measured."""
        figure = figure or value_of
        mine, theirs = self.of(one[0].key, one[1]), self.of(other[0].key, other[1])
        return [
            figure(one[0], mine[number]) / figure(other[0], theirs[number])
            for number in sorted(mine.keys() & theirs.keys())
        ]

    def of(self, cell: str, peer: str) -> dict[int, Pass]:
        """Return the passes by round."""
        return self._passes.get((cell, peer), {})


def value_of(shape: Shape, one: Pass) -> float:
    """The figure of a pass, in the unit of its cell."""
    match shape.job:
        case "rtt" | "neighbour":
            return one.also["p50"] * MICRO
        case "idle":
            return max(one.also["client_bytes"], one.also["server_bytes"])
        case _:
            return one.units / one.seconds


def value_by_cpu(shape: Shape, one: Pass) -> float:
    """Return the figure by CPU time, which other work on the machine changes less.

    The busier end bounds a rate; a round trip is made of both.
    """
    if shape.higher_is_better:
        return one.units / max(one.client_cpu, one.server_cpu)
    return (one.client_cpu + one.server_cpu) / one.units * MICRO


def baseline_of(shape: Shape, entry: Entry) -> str:
    """Return the entry that this one is compared with in this cell."""
    return f"{entry.baseline}, coalesced" if shape.baseline == "coalesced" else entry.baseline


def _also(passes: Iterable[Pass]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for one in passes:
        for name, value in one.also.items():
            values.setdefault(name, []).append(value)
    return {name: Spread(statistics.median(found), min(found), max(found)) for name, found in values.items()}
