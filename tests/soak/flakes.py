"""The suite passes fifty times in a row, in random order and with random turns of Trio's scheduler.

    python -m tests.soak.flakes [--runs 50] [--seed 1] [-- arguments for pytest]

Ends with 1 if any run failed. A run is repeated by `MUXKIT_SHUFFLE=SEED python -m pytest -p tests.soak._shuffled`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time


def run(seed: int, arguments: list[str]) -> list[str]:
    """One run of the suite; what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.soak._shuffled", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=os.environ | {"MUXKIT_SHUFFLE": str(seed)}, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    return failed or ([done.stdout[-2000:] + done.stderr[-2000:]] if done.returncode else [])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the suite many times, shuffled.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    flakes = 0
    for seed in range(asked.seed, asked.seed + asked.runs):
        began = time.monotonic()
        failed = run(seed, asked.arguments)
        flakes += bool(failed)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s, {len(failed)} failed", *failed, sep="\n  ", flush=True)
    print(f"{asked.runs} runs, {flakes} with failures")
    return bool(flakes)


if __name__ == "__main__":
    sys.exit(main())
