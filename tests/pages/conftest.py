"""Which of these tests are run: all in the suite's own environment, else those for which an environment was made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENVIRONMENTS = (
    "",
    "cli",
    "cli,otel,prometheus",
    "anyio",
    "spark",
    "duckdb",
    "cli,duckdb",
)  # those that .ci/users.py makes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`MUXKIT_PAGES_EXTRAS=cli` leaves the tests of what needs the extra `cli`; empty: of what needs no extra.

    `elsewhere` leaves out all that an environment is made for, since it is run there.
    """
    folder = str(Path(__file__).parent)
    here = [item for item in items if str(item.path).startswith(folder)]
    unknown = [item.nodeid for item in here if extras(item) not in (None, *ENVIRONMENTS)]
    if unknown:
        raise pytest.UsageError(f"no environment is made for these, see .ci/users.py: {unknown}")
    wanted = os.environ.get("MUXKIT_PAGES_EXTRAS")
    if wanted is None:
        return
    kept = None if wanted == "elsewhere" else wanted
    others = {item.nodeid for item in here if extras(item) != kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]


def extras(item: pytest.Item) -> str | None:
    """What is to be installed with muxkit for this; None for a test that runs nothing of the pages."""
    mark = item.get_closest_marker("extras")
    return None if mark is None else ",".join(sorted(mark.args))
