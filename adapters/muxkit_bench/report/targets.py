"""The targets for bpmux over TCP, pure and compiled, as data, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from muxkit_bench.report.figures import Figure, Figures, Spread, value_by_cpu, value_of
from muxkit_bench.report.words import agreeing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit_bench.report.results import Report

Values: TypeAlias = Callable[[Figures, Figure, str], list[float]]
OURS = "bpmux+tcp"
COMPILED = f"{OURS}, compiled"  # the other build, which `--compiled` measures beside the installed one
RAW = "raw tcp"


@attrs.frozen(kw_only=True)
class Target:
    """A bound on the median over the rounds."""

    title: str
    bound: float
    at_least: bool
    values: Values
    """Values by round of a peer; empty if the run says nothing about it."""
    unit: str = "×"
    compiled: float | None = None
    """The bound of the compiled build, if another one."""
    peer: str = OURS

    def is_met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def bound_in_words(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:,g} {self.unit}"


@attrs.frozen
class Verdict:
    """What a run says about a target."""

    spread: Spread
    by_cpu: Spread | None
    """The same by CPU time, if that says something; there is no target for it."""
    is_met: bool


@attrs.frozen
class Row:
    """A target, and what each run says about it."""

    target: Target
    verdicts: list[Verdict | None]

    def measured(self, verdict: Verdict) -> str:
        """The median, rounded, but never to the other side of the bound."""
        return agreeing(verdict.spread.median, lambda shown: self.target.is_met_by(shown) is verdict.is_met)

    @property
    def met(self) -> tuple[int, int]:
        """In how many runs it is met, of how many that say something about it."""
        said = [verdict for verdict in self.verdicts if verdict is not None]
        return sum(verdict.is_met for verdict in said), len(said)


def judge(reports: Sequence[Report]) -> list[Row]:
    """Judge the targets that any run says something about; a quick run says nothing.

    The compiled build has bounds of its own: where it stands beside the installed one, and where it is that one.
    """
    runs = [Figures(report) for report in reports]
    compiled = [_of_compiled(target) for target in TARGETS]
    rows = [Row(target, [_verdict(target, run, of_compiled=False) for run in runs]) for target in TARGETS]
    rows += [Row(target, [_verdict(target, run, of_compiled=True) for run in runs]) for target in compiled]
    return [row for row in rows if any(row.verdicts)]


def _of_compiled(target: Target) -> Target:
    bound = target.bound if target.compiled is None else target.compiled
    return attrs.evolve(target, title=f"compiled: {target.title}", bound=bound, peer=COMPILED)


def _verdict(target: Target, figures: Figures, *, of_compiled: bool) -> Verdict | None:
    is_installed_compiled = figures.report.is_compiled
    if is_installed_compiled and not of_compiled:
        return None
    peer = OURS if is_installed_compiled else target.peer
    spread = None if figures.report.quick else Spread.of(target.values(figures, value_of, peer))
    if spread is None:
        return None
    by_cpu = Spread.of(target.values(figures, value_by_cpu, peer))
    return Verdict(spread, by_cpu, target.is_met_by(spread.median))


def _against_raw(cell: str) -> Values:
    def values(figures: Figures, figure: Figure, peer: str) -> list[float]:
        shape = figures.shapes.get(cell)
        return [] if shape is None else figures.ratios_between((shape, peer), (shape, RAW), figure)

    return values


def _cost_among_many(job: str) -> Values:
    """Divide the cost of a message at 10,000 channels by that at 100."""

    def values(figures: Figures, figure: Figure, peer: str) -> list[float]:
        few, many = figures.shapes.get(f"{job}/100"), figures.shapes.get(f"{job}/10000")
        return [] if few is None or many is None else figures.ratios_between((few, peer), (many, peer), figure)

    return values


def _also(cell: str, name: str, per: str | None = None) -> Values:
    def values(figures: Figures, figure: Figure, peer: str) -> list[float]:
        if figure is not value_of:
            return []
        passes = figures.of(cell, peer).values()
        return [one.also[name] / (one.also[per] if per else 1.0) for one in passes]

    return values


def _beside_bulk(figures: Figures, figure: Figure, peer: str) -> list[float]:
    """Divide the round trip beside bulk by that of an idle raw connection in the same round."""
    if figure is not value_of:
        return []
    ours, raw = figures.of("neighbour/2", peer), figures.of("neighbour/2", RAW)
    return [ours[number].also["p50"] / raw[number].also["idle_p50"] for number in ours if number in raw]


TARGETS = (
    Target(
        title="small, 1 channel, to raw send_all each",
        bound=6,
        compiled=8,
        at_least=True,
        values=_against_raw("small/1"),
    ),
    Target(
        title="small, 100 channels, to raw send_all each",
        bound=4.5,
        compiled=9,
        at_least=True,
        values=_against_raw("small/100"),
    ),
    Target(
        title="bulk 64 KiB, 1 channel, to raw",
        bound=1.0,
        compiled=1.15,
        at_least=True,
        values=_against_raw("bulk 64 KiB/1"),
    ),
    Target(
        title="bulk 64 KiB, 100 channels, to 100 raw connections",
        bound=1.0,
        compiled=1.2,
        at_least=True,
        values=_against_raw("bulk 64 KiB/100"),
    ),
    Target(title="rtt, to raw", bound=0.9, compiled=0.8, at_least=False, values=_against_raw("rtt/1")),
    Target(
        title="storm, 100 channels, to 100 raw connections",
        bound=2.2,
        compiled=2.8,
        at_least=True,
        values=_against_raw("storm/100"),
    ),
    Target(
        title="openclose, 64 at a time, to raw connect and close",
        bound=2.1,
        compiled=3.0,
        at_least=True,
        values=_against_raw("openclose/64"),
    ),
    Target(
        title="openclose, one at a time, to raw connect and close",
        bound=0.8,
        compiled=1.0,
        at_least=True,
        values=_against_raw("openclose/1"),
    ),
    Target(
        title="idle channel, client",
        bound=800,
        compiled=700,
        at_least=False,
        values=_also("idle/10000", "client_bytes"),
        unit="bytes",
    ),
    Target(
        title="idle channel, server",
        bound=1000,
        at_least=False,
        values=_also("idle/10000", "server_bytes"),
        unit="bytes",
    ),
    Target(
        title="neighbour, p50 to the p50 of an idle raw connection",
        bound=3.0,
        compiled=2.5,
        at_least=False,
        values=_beside_bulk,
    ),
    Target(
        title="neighbour, p99 to the idle p50",
        bound=4,
        at_least=False,
        values=_also("neighbour/2", "p99", per="idle_p50"),
    ),
    Target(
        title="neighbour, bulk beside it", bound=600, at_least=True, values=_also("neighbour/2", "bulk"), unit="MiB/s"
    ),
    Target(
        title="flat: a message with 10,000 channels open, to one with 100",
        bound=1.5,
        at_least=False,
        values=_cost_among_many("flat"),
    ),
    Target(
        title="small: a message with 10,000 senders at once, to one with 100",
        bound=2,
        at_least=False,
        values=_cost_among_many("small"),
    ),
    Target(
        title="small on one channel among 10,000 open ones, cost to that among 100",
        bound=1.5,
        at_least=False,
        values=_cost_among_many("among 64 B"),
    ),
    Target(
        title="bulk on one channel among 10,000 open ones, cost to that among 100",
        bound=1.5,
        at_least=False,
        values=_cost_among_many("among 64 KiB"),
    ),
)
