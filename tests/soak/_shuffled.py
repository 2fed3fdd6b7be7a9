"""A pytest plugin: tests in random order, and random turns of Trio's scheduler, both from MUXKIT_SHUFFLE.

Files are shuffled, and the tests within each of them: a fixture of a module is set up once, as always.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

SEED = os.environ.get("MUXKIT_SHUFFLE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    dice = random.Random(SEED)
    files: dict[object, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = [*files.values()]
    dice.shuffle(order)
    for tests in order:
        dice.shuffle(tests)
    items[:] = [item for tests in order for item in tests]


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Private, and the only way: Trio puts the tasks of a turn in an order that has no public setting.
    trio._core._run._r.seed(f"{SEED} {item.nodeid}")


def pytest_report_header() -> Iterable[str]:
    yield f"shuffled by MUXKIT_SHUFFLE={SEED}"
