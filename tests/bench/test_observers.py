"""The program that measures what observers cost runs, and its table has every figure."""

from __future__ import annotations

import pytest

from muxkit_bench.observers import JOBS, KINDS, measure, table


@pytest.mark.parametrize("protocol", ["bpmux", "e3x"])
def test_every_job_is_measured_with_every_observer(protocol: str) -> None:
    found = measure(protocol, rounds=1, share=0.0005)
    assert set(found) == {job.name for job in JOBS}
    for costs in found.values():
        assert set(costs) == {kind.name for kind in KINDS}
        assert all(cost >= 0 for cost in costs.values())


def test_the_table_compares_with_no_observer() -> None:
    found = {job.name: {kind.name: 2e-6 for kind in KINDS} for job in JOBS}
    found[JOBS[0].name] = {kind.name: 4e-6 for kind in KINDS} | {"none": 2e-6}
    text = table(found)
    assert "none | BaseObserver | Trace" in text
    assert "2.0 µs (1.00) | 4.0 µs (2.00)" in text
    assert len(text.splitlines()) == len(JOBS) + 2
