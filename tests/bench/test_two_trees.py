"""The comparison of two versions measures the version that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bench.two_trees import HERE, compare, measure, run

if TYPE_CHECKING:
    from pathlib import Path


def test_a_job_is_measured_with_this_checkout() -> None:
    assert 1 < run(HERE, "bpmux", "small") < 1000


def test_a_folder_without_muxkit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="expected muxkit of"):
        run(tmp_path, "bpmux", "small")


def test_an_unknown_job_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown job 'smal': expected one of small, many"):
        measure("bpmux", "smal")


def test_the_least_and_the_median_are_compared() -> None:
    least, median = compare([2.0, 4.0, 8.0], [3.0, 4.0, 4.0])
    assert (round(least), round(median)) == (50, 0)
