"""Runs a program under many plans of faults, and shrinks the first plan that makes it fail.

    def test_no_update_is_lost() -> None:
        explore(program, seeds=range(200)).check()

`program(network)` is an async function that raises if it finds an error. Each run has its own network, virtual clock
and Trio run, and the same plan always gives the same run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio
import trio.testing

from muxkit.runtime import background, leaves_of
from muxkit.testing._plan import (
    CALM,
    FAULT_KINDS,
    EnoughTried,
    FaultKind,
    Plan,
    PlanRun,
    counts,
    determined,
    number,
    smaller,
)
from muxkit.testing._sim import SimEvent, SimNetwork, SimWeather

WITHIN: Final = 600.0  # s of virtual time after which a program counts as stuck
SHRINK_RUNS: Final = 400  # runs to spend on shrinking a plan
LONGEST_TAIL: Final = 12  # log lines that a report shows

Program = Callable[[SimNetwork], Awaitable[object]]


class Stuck(AssertionError):
    """Raised when a program doesn't end within its virtual time."""


@attrs.frozen(kw_only=True)
class Run:
    """The result of running a program under a plan."""

    plan: Plan
    error: BaseException | None
    """The exception that the program raised, or None. Expected exceptions count as None."""
    log: tuple[SimEvent, ...]
    """The events on the network."""
    routes: frozenset[tuple[str, str]]
    passes: int
    """How often more than one task was ready, so that Trio had to choose an order."""
    length: float
    """The duration in seconds of virtual time."""
    moments: tuple[float, ...]
    """The times at which data was sent, in seconds of virtual time."""
    fingerprint: str
    """A hash of all events and data sizes on the network. Equal runs have equal fingerprints."""

    def check(self) -> None:
        """Raise the program's exception, if there is one, with the plan as a note."""
        if self.error is not None:
            _annotate(self.error, f"under the plan\n{self.plan}")
            raise self.error


@attrs.frozen(kw_only=True)
class Exploration:
    """The result of `explore`. `str()` of it is a report."""

    runs: int
    """The number of runs, including those that shrank the plan."""
    tried: int
    """The number of seeds that were tried."""
    seconds: float
    """Seconds of real time."""
    seed: int | None
    """The first seed that failed, or None if none did. It is 0 if the program fails without any fault."""
    drawn: Plan | None
    """The plan that was drawn from that seed."""
    plan: Plan | None
    """The smallest plan found that fails in the same way."""
    failure: Run | None
    """The run under the smallest plan."""
    is_exact: bool
    """True if the smallest plan gave the same run twice."""

    def check(self) -> None:
        """Raise AssertionError with the report, caused by the program's exception, if a plan failed."""
        if self.failure is not None:
            raise AssertionError(str(self)) from self.failure.error

    def __str__(self) -> str:
        took = f"{self.runs} runs in {self.seconds:.1f} s"
        if self.failure is None or self.plan is None or self.drawn is None:
            return f"no failure under {self.tried} seeds ({took})"
        error = self.failure.error
        lines = [
            f"failed with seed {self.seed}, the {_nth(self.tried)} that was tried ({took})",
            f"{type(error).__name__}: {error}",
            f"{len(self.drawn.events)} events ({counts(self.drawn)}) were made {len(self.plan.events)}:",
            *(f"  {index}. {step}" for index, step in enumerate(steps(self.plan), 1)),
            "run it again with run_plan(program, TEXT), where TEXT is",
            *(f"  {line}" for line in str(self.plan).splitlines()),
        ]
        if self.failure.log:
            lines += ["what happened on the network:", *map(str, self.failure.log[-LONGEST_TAIL:])]
        if not self.is_exact:
            lines.append("the program did not run twice in the same way: something other than the plan decides, too")
        return "\n".join(lines)


def explore(
    program: Program,
    seeds: Iterable[int] = range(100),
    *,
    weather: SimWeather = CALM,
    kinds: Collection[FaultKind] = FAULT_KINDS,
    most: int = 6,
    within: float = WITHIN,
    expected: type[Exception] | tuple[type[Exception], ...] = (),
    shrink: int = SHRINK_RUNS,
) -> Exploration:
    """Run `program` under a plan drawn from each seed until one fails, and shrink that plan.

    A first run without faults shows which hosts talk to each other and for how long. The plans are drawn to fit that
    run. If the first run fails, it is the result. Call this function outside of Trio.

    Args:
        program: an async function that takes the network, and raises if it finds an error.
        seeds: the seeds to try.
        weather: the network conditions of every run, apart from the faults.
        kinds: the kinds of faults to draw.
        most: the largest number of faults in a plan. Reordered passes of Trio's loop don't count.
        within: the seconds of virtual time after which a run counts as failed.
        expected: the exceptions that don't count as a failure.
        shrink: the number of runs to spend on shrinking.

    Returns:
        What was found. Its `check` method raises if a plan failed.
    """
    began, runs, tried = time.perf_counter(), 0, 0
    calm = Plan(seed=0, weather=weather)

    def attempt(plan: Plan) -> Run:
        nonlocal runs
        runs += 1
        return run_plan(program, plan, within=within, expected=expected)

    reference = attempt(calm)
    found: Run | None = reference if reference.error is not None else None
    seed: int | None = None if found is None else 0
    for seed in seeds if found is None else ():
        tried += 1
        plan = Plan.draw(
            seed,
            routes=reference.routes,
            length=reference.length,
            weather=weather,
            kinds=kinds,
            most=most,
            passes=reference.passes,
            moments=reference.moments,
        )
        run = attempt(plan)
        if run.error is not None:
            found = run
            break
    if found is None:
        took = time.perf_counter() - began
        return Exploration(
            runs=runs, tried=tried, seconds=took, seed=None, drawn=None, plan=None, failure=None, is_exact=True
        )
    wanted, budget = _signature(found.error), runs + shrink

    def fails(plan: Plan) -> bool:
        if runs >= budget:
            raise EnoughTried
        return _signature(attempt(plan).error) == wanted

    least = smaller(found.plan, fails)
    once, again = attempt(least), attempt(least)
    return Exploration(
        runs=runs,
        tried=max(1, tried),
        seconds=time.perf_counter() - began,
        seed=seed,
        drawn=found.plan,
        plan=least,
        failure=once if once.error is not None else found,
        is_exact=once.fingerprint == again.fingerprint and _signature(again.error) == wanted,
    )


def run_plan(
    program: Program,
    plan: Plan | str,
    *,
    within: float = WITHIN,
    expected: type[Exception] | tuple[type[Exception], ...] = (),
) -> Run:
    """Run `program` once under a plan, which may be given as text. Call this function outside of Trio.

    Args:
        program: an async function that takes the network, and raises if it finds an error.
        plan: the plan, or the text of one, as a report of `explore` shows it.
        within: the seconds of virtual time after which the run counts as failed.
        expected: the exceptions that don't count as a failure.

    Returns:
        What happened. Its `check` method raises if the run failed.

    Raises:
        ValueError: if the text isn't a valid plan.
    """
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    network = SimNetwork(plan.seed, weather=plan.weather)
    error: BaseException | None = None
    length = 0.0

    async def main() -> None:
        nonlocal error, length
        with network:
            try:
                async with background() as nursery:
                    nursery.start_soon(PlanRun(network, plan).run)
                    with trio.move_on_after(within) as scope:
                        await program(network)
                if scope.cancelled_caught:
                    error = Stuck(f"the program was not done after {number(within)} s of virtual time")
            except Exception as raised:
                error = raised
            length = network.now()

    clock = trio.testing.MockClock(autojump_threshold=0)
    with _silence(), determined(plan.seed, {wake.number: wake.by for wake in plan.wakes}) as order:
        trio.run(main, clock=clock)
    is_expected = error is not None and all(isinstance(leaf, expected) for leaf in leaves_of(error))
    if is_expected and not isinstance(error, Stuck):
        error = None
    return Run(
        plan=plan,
        error=error,
        log=tuple(network.log),
        routes=frozenset(network.routes),
        passes=order.passes,
        length=length,
        moments=tuple(network.moments()),
        fingerprint=network.fingerprint(),
    )


def steps(plan: Plan) -> Iterator[str]:
    """Describe each event of a plan in a line."""
    for fault in plan.faults:
        between = f"between {fault.source} and {fault.target}"
        where = between if fault.both_ways else f"from {fault.source} to {fault.target}"
        at = f"at {number(fault.at)} s"
        lasts = f"for {number(fault.seconds)} s"
        match fault.what:
            case "delay":
                yield f"{at}, {lasts}: what is sent {where} comes {number(fault.amount)} s later"
            case "throttle":
                yield f"{at}, {lasts}: each connection carries {number(fault.amount)} bytes a second {where}"
            case "partition":
                yield f"{at}, {lasts}: nothing gets through {where}"
            case "cut":
                yield f"{at}: the connections {between} are cut ({fault.how.value})"
    for wake in plan.wakes:
        yield f"pass {wake.number} of Trio's loop: the tasks that are ready run in another order (draw {wake.by})"
    if not plan.events:
        yield "nothing: it fails without any fault"


def _signature(error: BaseException | None) -> tuple[tuple[str, str, int], ...] | None:
    """Return the types of the errors and the lines that raised them. Two failures with equal results are the same."""
    if error is None:
        return None
    found = set()
    for leaf in leaves_of(error):
        traceback = leaf.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        file = "" if traceback is None else traceback.tb_frame.f_code.co_filename
        found.add((type(leaf).__name__, file, 0 if traceback is None else traceback.tb_lineno))
    return tuple(sorted(found))


def _annotate(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _nth(count: int) -> str:
    ending = "th" if 10 <= count % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the log lines of hundreds of runs with faults out of the log of the tests."""
    logger = logging.getLogger("muxkit")
    before, logger.propagate = logger.propagate, False
    nothing = logging.NullHandler()
    logger.addHandler(nothing)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(nothing)
