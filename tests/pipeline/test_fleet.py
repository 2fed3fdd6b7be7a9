"""A fleet runs each seed, reports each failure, and runs it again by the command in its row."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from itertools import count
from typing import TYPE_CHECKING

import pytest

from muxkit.runtime.pumps import turns
from muxkit_bench.fleet import UnknownSimulation, named_simulations, parse_seeds, run_fleet, simulate, simulate_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BREAKS = "math:isqrt"  # a function of a number that raises for some: those below 0


@pytest.mark.requirement("R-48", "R-50")
@pytest.mark.parametrize("name", named_simulations())
@pytest.mark.seeds(8, soak=1000)
def test_a_simulation_ends_well(seed: int, name: str) -> None:
    outcome = simulate(name, seed)
    assert outcome.ok, outcome.trace


@pytest.mark.parametrize("name", named_simulations())
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    told = [simulate(name, seed).summary for seed in (3, 3, 4)]
    assert told[0] == told[1] != told[2]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("name", named_simulations())
def test_a_run_does_not_depend_on_how_fast_the_machine_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: A simulation under a seed ended otherwise on a slow machine, since turns are measured in processor time."""
    usual = simulate(name, 3).summary
    ticks = count()
    monkeypatch.setattr(turns, "perf_counter", lambda: next(ticks) % 7 * 1e-3)  # each look finds another pace
    assert simulate(name, 3).summary == usual


def test_what_a_seed_raises_becomes_its_row() -> None:
    good, bad = simulate(BREAKS, 9), simulate(BREAKS, -9)
    assert (good.ok, good.summary, good.error) == (True, "3", None)
    assert (bad.ok, bad.summary) == (False, None)
    assert str(bad.error).startswith("ValueError: isqrt()")
    assert "Traceback" in str(bad.trace)


def test_all_seeds_come_in_order_also_from_several_processes() -> None:
    outcomes = [*simulate_all(BREAKS, range(-3, 40), processes=2)]
    assert [one.seed for one in outcomes] == [*range(-3, 40)]
    assert [one.seed for one in outcomes if not one.ok] == [-3, -2, -1]


@pytest.mark.parametrize("name", ["unheard-of", "math:unheard_of", "unheard_of:f"])
def test_a_simulation_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownSimulation, match="unheard"):
        simulate(name, 1)


@pytest.mark.parametrize(("text", "seeds"), [("7", range(7, 8)), ("0-999", range(1000)), ("5-5", range(5, 6))])
def test_seeds_are_one_or_a_range_with_both_ends(text: str, seeds: range) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "5-4", "1-2-3"])
def test_what_is_no_range_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"seed|last"):
        parse_seeds(text)


# ---------------------------------------------------------------------------- Spark


@pytest.mark.spark
def test_a_seed_that_fails_on_spark_is_a_row_whose_command_fails_here(spark: SparkSession) -> None:
    rows = {row["seed"]: row for row in run_fleet(spark, "builtins:chr", range(1_114_100, 1_114_120)).collect()}
    assert sorted(rows) == [*range(1_114_100, 1_114_120)]
    failed = [seed for seed, row in rows.items() if not row["ok"]]
    assert sorted(failed) == [*range(1_114_112, 1_114_120)]
    row = rows[1_114_112]
    assert row["error"].startswith("ValueError: chr()")
    command = shlex.split(row["replay"])
    assert command[0] == "muxkit"
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert row["error"] in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.spark
def test_simulations_run_on_spark_as_they_do_here(spark: SparkSession) -> None:
    rows = run_fleet(spark, "relink", range(20), partitions=4).collect()
    assert {row["seed"]: row["summary"] for row in rows} == {
        seed: simulate("relink", seed).summary for seed in range(20)
    }


def hang(seed: int) -> str:
    """A simulation whose odd seeds never end."""
    while seed % 2:
        time.sleep(0.01)
    return "done"


@pytest.mark.requirement("R-71")
def test_a_seed_that_hangs_is_a_failure_and_the_others_go_on() -> None:
    """Was: A seed of the fleet that hung, hung the job."""
    outcomes = [simulate(f"{__name__}:hang", seed, timeout=0.3) for seed in (0, 1, 2)]
    assert [each.ok for each in outcomes] == [True, False, True]
    assert outcomes[1].error == "SeedTimeout: not done within 0.3 s"


@pytest.mark.requirement("R-71")
def test_a_session_without_a_context_as_on_spark_connect_is_enough() -> None:
    """Was: `run_fleet` without `partitions` failed on Spark Connect."""
    asked: list[tuple[object, ...]] = []

    class Connected:
        def range(self, *arguments: object) -> Connected:
            asked.append(arguments)
            return self

        def mapInArrow(self, function: object, schema: str) -> Connected:
            return self

    run_fleet(Connected(), "relink", range(5))  # type: ignore[arg-type] # it has what is used
    run_fleet(Connected(), "relink", range(5), partitions=3)  # type: ignore[arg-type]
    assert asked == [(0, 5, 1, None), (0, 5, 1, 3)]
