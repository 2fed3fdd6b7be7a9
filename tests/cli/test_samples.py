"""Percentiles over a bounded number of samples."""

from __future__ import annotations

import pytest

from muxkit_bench.demo.command import percentile
from muxkit_bench.demo.processes import SAMPLES_MOST, Samples


@pytest.mark.parametrize(("percent", "value"), [(1, 1.0), (50, 50.0), (99, 99.0), (99.1, 100.0), (100, 100.0)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], percent) == value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_many_samples_are_kept_as_a_few_that_are_like_them() -> None:
    samples = Samples()
    for number in range(10 * SAMPLES_MOST):
        samples.add(float(number))
    assert len(samples.kept) == SAMPLES_MOST
    assert percentile(samples.kept, 50) == pytest.approx(5 * SAMPLES_MOST, rel=0.05)
