"""The short form of tests/soak/flakes.py: a part of the suite in a random order."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import attrs
import pytest

from tests.soak import _shuffled

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
PART = ("tests/core/test_halves.py", "tests/core/test_tokens.py", "tests/runtime/test_mailbox.py")


@attrs.frozen
class Item:
    """As much of a test as decides about its place."""

    path: str
    number: int


ITEMS = [Item(f"test_{file}.py", number) for file in range(5) for number in range(8)]


@pytest.mark.requirement("R-72")
def test_a_part_of_the_suite_passes_in_any_order() -> None:
    plugins = ("-p", "tests.soak._shuffled", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *PART]
    environment = os.environ | {"MUXKIT_SHUFFLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def ordered(seed: str, monkeypatch: pytest.MonkeyPatch) -> Sequence[Item]:
    monkeypatch.setattr(_shuffled, "SEED", seed)
    items = [*ITEMS]
    _shuffled.pytest_collection_modifyitems(cast("list[pytest.Item]", items))
    return items


@pytest.mark.requirement("R-72")
def test_the_order_is_random_and_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again, other = (ordered(seed, monkeypatch) for seed in ("1", "1", "2"))
    assert one == again != other
    assert set(one) == set(other) == set(ITEMS)


@pytest.mark.requirement("R-72")
def test_the_tests_of_a_file_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [item.path for item in ordered("1", monkeypatch)]
    changes = sum(one != other for one, other in pairwise(files))
    assert changes == len(set(files)) - 1
