"""Runs a seeded simulation with many seeds: in this process, in several processes, or on Spark. Each seed is a row.

A simulation is a function of a seed, which an installed package declares as an entry point. Every outcome has a command
that runs its seed again.
"""

from __future__ import annotations

import importlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

import attrs

from muxkit.pipeline.errors import PipelineError, first_error

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


GROUP: Final = "muxkit.simulations"  # the entry-point group that names simulations
Simulation = Callable[[int], str]
"""A function of the seed. It returns a line that describes the run, equal for equal seeds, or raises."""
OUTCOMES_DDL: Final = (
    "simulation string, seed bigint, ok boolean, seconds double, summary string, error string, trace string, "
    "replay string"
)
ARROW_TYPES: Final = {"bigint": "int64"}  # types whose name differs in Arrow
PARTITIONS: Final = 8  # per core, so that seeds that take long are balanced
SEED_TIMEOUT: Final = 600.0  # s that one seed may take on Spark
CHUNK: Final = 16  # seeds that a process takes at a time


class UnknownSimulation(PipelineError, ValueError):
    """Raised when no simulation has this name."""


@attrs.frozen
class Outcome:
    """The result of one seed."""

    simulation: str
    seed: int
    ok: bool
    seconds: float
    """Real time in seconds."""
    summary: str | None
    """The line that the simulation returned, which is equal for equal seeds. None if it raised."""
    error: str | None
    trace: str | None

    @property
    def replay(self) -> str:
        """The command that runs this seed again."""
        return f"muxkit fleet replay {self.simulation} {self.seed}"


def named_simulations() -> dict[str, str]:
    """Return the simulations that installed packages declare, by name, as `package.module:function`."""
    return {entry.name: entry.value for entry in sorted(entry_points(group=GROUP))}


def find(simulation: str) -> Simulation:
    """Import a simulation, by the name that an installed package declares, or as `package.module:function`.

    Raises:
        UnknownSimulation: if there is no such simulation, or if it can't be imported.
    """
    known = named_simulations()
    where, separator, name = known.get(simulation, simulation).partition(":")
    if not separator:
        names = ", ".join(known)
        raise UnknownSimulation(f"no simulation {simulation!r}: there are {names}, or package.module:function")
    try:
        found: Simulation = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise UnknownSimulation(f"simulation {simulation!r}: {error}") from error
    return found


class SeedTimeout(PipelineError):
    """Raised when a seed takes too long."""


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise `SeedTimeout` in the block after this time. No limit applies outside the main thread or without signals."""
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SeedTimeout(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def simulate(simulation: str, seed: int, *, timeout: float | None = None) -> Outcome:
    """Run one seed in this process.

    An exception of the simulation, or a timeout, becomes part of the outcome.

    Args:
        simulation: a name, or `package.module:function`.
        seed: the seed.
        timeout: the seconds that it may take. This has no effect outside the main thread or without signals.

    Raises:
        UnknownSimulation: if there is no such simulation.
    """
    function = find(simulation)
    began = time.perf_counter()
    try:
        with _at_most(timeout):
            summary = str(function(seed))
    except Exception as error:
        took = time.perf_counter() - began
        first = first_error(error)
        text = f"{type(first).__name__}: {first}"
        return Outcome(simulation, seed, False, took, None, text, "".join(traceback.format_exception(error)))
    return Outcome(simulation, seed, True, time.perf_counter() - began, summary, None, None)


def simulate_all(simulation: str, seeds: Sequence[int], *, processes: int = 1) -> Iterator[Outcome]:
    """Run all seeds in up to `processes` processes of this machine, and yield the outcomes in the order of the seeds.

    Raises:
        UnknownSimulation: if there is no such simulation.
    """
    find(simulation)  # before any process starts
    if processes == 1:
        yield from (simulate(simulation, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(simulate, [simulation] * len(seeds), seeds, chunksize=CHUNK)


# --- Spark


def run_fleet(
    spark: SparkSession,
    simulation: str,
    seeds: range,
    *,
    partitions: int | None = None,
    seed_timeout: float = SEED_TIMEOUT,
) -> DataFrame:
    """Run all seeds on Spark, with a row for each. The columns are those of `Outcome`, and `replay` with the command.

    Spark's workers import the simulation, so muxkit or your package must be installed there.

    Args:
        spark: the Spark session.
        simulation: a name, or `package.module:function`.
        seeds: the seeds.
        partitions: the number of partitions. By default 8 per core.
        seed_timeout: the seconds after which a seed counts as failed. Without signals there is no limit.

    Raises:
        UnknownSimulation: if there is no such simulation here.
    """
    find(simulation)
    context = getattr(spark, "sparkContext", None)  # Spark Connect doesn't have one
    count = partitions or (None if context is None else context.defaultParallelism * PARTITIONS)
    most = None if count is None else min(count, max(1, len(seeds)))
    rows = spark.range(seeds.start, seeds.stop, seeds.step, most)
    return rows.mapInArrow(partial(_simulate_rows, simulation, seed_timeout), OUTCOMES_DDL)


def _simulate_rows(simulation: str, seed_timeout: float, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn seeds into rows of outcomes. Runs in a worker."""
    import pyarrow as pa

    columns = (column.split() for column in OUTCOMES_DDL.split(", "))
    schema = pa.schema([(name, ARROW_TYPES.get(kind, kind)) for name, kind in columns])
    for batch in batches:
        outcomes = [simulate(simulation, seed, timeout=seed_timeout) for seed in batch.column(0).to_pylist()]
        rows = [{**attrs.asdict(one), "replay": one.replay} for one in outcomes]
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


# --- seeds as text


def parse_seeds(text: str) -> range:
    """Parse `7`, or a range such as `0-999`, which includes both ends. Raises ValueError."""
    first, dash, last = text.partition("-")
    if not all(part.isascii() and part.isdigit() for part in (first, last if dash else first)):
        raise ValueError(f"{text!r}: a seed, or FIRST-LAST")
    seeds = range(int(first), int(last if dash else first) + 1)
    if not seeds:
        raise ValueError(f"{text!r}: the last seed is below the first")
    return seeds
