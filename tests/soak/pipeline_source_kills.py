"""Every row is there once, however often driver, JVM and servers are killed, at every marked moment.

    python tests/soak/pipeline_source_kills.py [--kills 30] [--seed 1] [--folder PATH]

Half of the kills are made with Spark's file sink, half with a sink of our own that writes batch by batch. A kill is
made while the query is held at its moment: the driver and its JVM by process group, servers by process id. Each one
asserts that the driver was alive, and notes the newest batch in the logs of offsets and of commits. At the end every
stream must have all its messages, each once, each with its CRC.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from muxkit_bench.proof.driver import MOMENTS
from muxkit_bench.proof.run import Plan, Proof

COUNT = 30_000  # messages of each stream, more than what is read between two kills
NEEDS_OUR_SINK = "after-sink"


def storm(proof: Proof, kills: int, dice: random.Random) -> None:
    """Kill so often; half of the time a server goes while the driver is held, before that is killed as well."""
    moments = [moment for moment in MOMENTS if proof.plan.sink == "batches" or moment != NEEDS_OUR_SINK]
    order: list[str] = []
    while len(proof.kills) < kills:
        if not order:
            order = dice.sample(moments, len(moments))
        moment = order.pop()
        proof.start_driver()
        proof.hold(moment)
        proof.wait_held(moment)
        if dice.random() < 0.5:
            proof.kill_server(dice.randrange(proof.plan.servers), moment)
        if dice.random() < 0.3:
            # the driver lives on with a new server, and is killed at its next moment
            proof.release(moment)
            moment = dice.choice([each for each in moments if each != "start"])
        proof.kill_driver(moment)


def run(folder: Path, sink: str, kills: int, seed: int) -> bool:
    plan = Plan(folder=folder / sink, sink=sink, count=COUNT, streams=4, servers=2, batch=6_000, pause=0.1)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {sink}: {line}", flush=True)

    with Proof(plan, say) as proof:
        storm(proof, kills, random.Random(seed))
        before = proof.acknowledged()
        verdict = proof.finish()
        hit = Counter(kill.moment for kill in proof.kills)
        told = ", ".join(f"{count} at {moment}" for moment, count in sorted(hit.items()))
        print(f"{sink}: {len(proof.kills)} kills ({told}), {len({kill.planned for kill in proof.kills})} batches hit")
        print(f"{sink}: {before:,} messages were acknowledged at the last kill, {proof.acknowledged():,} at the end")
        print(f"{sink}: {verdict} in {proof.batches()[1] + 1} batches", flush=True)
    return verdict.is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="muxkit-", ignore_cleanup_errors=True) as scratch:
        folder = options.folder or Path(scratch)
        right = [run(folder, sink, options.kills // 2, options.seed) for sink in ("batches", "file")]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
