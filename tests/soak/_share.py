"""A pytest plugin: one of several processes that share the tests between them, as MUXKIT_SHARE=1/2 says.

Files are dealt out with the largest first, so that the shares have about the same number of tests.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, of = map(int, os.environ.get("MUXKIT_SHARE", "1/1").split("/"))
    sizes = Counter(item.path for item in items)
    files = sorted(sizes, key=lambda file: (-sizes[file], str(file)))
    shares: list[list[object]] = [[] for _ in range(of)]
    counts = [0] * of
    for file in files:
        least = counts.index(min(counts))
        shares[least].append(file)
        counts[least] += sizes[file]
    kept = {*shares[share - 1]}
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    items[:] = [item for item in items if item.path in kept]
