"""The short form of tests/soak/flakes.py: a part of the suite in two random orders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PART = ("tests/core/test_halves.py", "tests/core/test_tokens.py", "tests/runtime/test_mailbox.py")


def shuffled(seed: int, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.soak._shuffled",
        "-p",
        "no:cacheprovider",
        *arguments,
        *PART,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MUXKIT_SHUFFLE": str(seed)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.requirement("R-72")
def test_a_part_of_the_suite_passes_in_any_order() -> None:
    shuffled(1, "-q")


@pytest.mark.requirement("R-72")
def test_the_order_is_random_and_follows_from_the_seed() -> None:
    one, again, other = (shuffled(seed, "--collect-only", "-q") for seed in (1, 1, 2))
    tests = [[line for line in text.splitlines() if "::" in line] for text in (one, again, other)]
    assert tests[0] == tests[1] != tests[2]
    assert sorted(tests[0]) == sorted(tests[2])
