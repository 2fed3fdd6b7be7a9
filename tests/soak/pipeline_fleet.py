"""A thousand seeds of each simulation end well on Spark, and are timed beside a pool of processes.

    python -m tests.soak.pipeline_fleet [--seeds 1000] [--simulation bpmux]

The pool runs first, while there is no JVM. Ends with 1 if any seed failed, or told something else than here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from muxkit.pipeline import spark_session
from muxkit_bench.fleet import Outcome, named_simulations, run_fleet, simulate_all

PROCESSES = 2


def cpu_seconds() -> float:
    """What this process and all below it have used of the cores, on Linux: others on the machine hardly change it."""
    own = {os.getpid()}
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            rows[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    while new := {process for process, (parent, _) in rows.items() if parent in own} - own:
        own |= new
    return sum(rows[process][1] for process in own if process in rows) / os.sysconf("SC_CLK_TCK")


def rate(seeds: int, took: float, used: float) -> str:
    return f"{seeds / took:>7,.0f}/s ({seeds / max(used, 0.01):,.0f} a CPU s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--simulation", choices=named_simulations(), action="append", help="by default all")
    options = parser.parse_args()
    names = options.simulation or [*named_simulations()]
    seeds = range(options.seeds)
    told: dict[str, list[Outcome]] = {}
    rates: dict[str, list[str]] = {}
    failed = 0
    for name in names:
        rates[name] = []
        for processes in (1, PROCESSES):
            began, used = time.perf_counter(), cpu_seconds()
            told[name] = [*simulate_all(name, seeds, processes=processes)]
            cost = rate(len(seeds), time.perf_counter() - began, cpu_seconds() - used)
            rates[name].append(f"{cost} in {'one process' if processes == 1 else 'a pool of 2'}")
        bad = [one for one in told[name] if not one.ok]
        failed += len(bad)
        for one in bad[:10]:
            print(f"{one.error}\n  {one.replay}", flush=True)
    spark = spark_session(cores=PROCESSES)
    for name in names:
        began = time.perf_counter()
        run_fleet(spark, name, range(16)).collect()  # workers are warm from here on
        cold = time.perf_counter() - began
        began, used = time.perf_counter(), cpu_seconds()
        rows = {row["seed"]: row for row in run_fleet(spark, name, seeds).collect()}
        cost = rate(len(seeds), time.perf_counter() - began, cpu_seconds() - used)
        other = [one for one in told[name] if rows[one.seed]["summary"] != one.summary]
        failed += len(other)
        for one in other[:10]:
            print(f"not the same on Spark: {one.replay}: {rows[one.seed]['summary']} against {one.summary}", flush=True)
        rates[name].append(f"{cost} on Spark (its first 16 took {cold:.1f} s)")
        print(f"{name:16}{'   '.join(rates[name])}", flush=True)
    spark.stop()
    print(f"{len(names)} × {len(seeds):,} seeds on {os.cpu_count()} cores: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
