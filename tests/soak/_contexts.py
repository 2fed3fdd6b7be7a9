"""A pytest plugin that records which test runs which line, and how long each test takes.

`tests.soak.mutants` runs pytest with it under `coverage run`. Each test becomes a coverage context of its own, named by
its node id. A line of JSON for each test goes to the file that MUXKIT_TIMES names: node id, seconds, whether it passed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_failed: set[str] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    measured = coverage.Coverage.current()
    assert measured is not None, "run pytest with `coverage run -m pytest`"
    measured.switch_context(item.nodeid)
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        record = {"test": item.nodeid, "seconds": time.perf_counter() - began, "passed": item.nodeid not in _failed}
        with Path(os.environ["MUXKIT_TIMES"]).open("a") as times:
            times.write(json.dumps(record) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _failed.add(report.nodeid)
