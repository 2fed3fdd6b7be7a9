"""Filters of Spark that the source applies itself."""

from __future__ import annotations

from typing import Any

import pytest

datasource = pytest.importorskip("pyspark.sql.datasource")
if not hasattr(datasource, "EqualTo"):
    pytest.skip("Spark 4.0 passes no filters to sources", allow_module_level=True)

from muxkit.pipeline.source.filters import narrow  # noqa: E402 - after the version is known
from muxkit.pipeline.source.offsets import EVERYTHING, Wanted  # noqa: E402

STREAM, ID, TIME = ("stream",), ("id",), ("time",)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([], EVERYTHING),
        ([datasource.IsNotNull(STREAM), datasource.EqualTo(STREAM, "a")], Wanted(frozenset("a"))),
        ([datasource.In(STREAM, ("a", "b")), datasource.In(STREAM, ("b", "c"))], Wanted(frozenset("b"))),
        ([datasource.EqualTo(ID, 7)], Wanted(None, 6, 7)),
        ([datasource.GreaterThan(ID, 7), datasource.LessThan(ID, 10)], Wanted(None, 7, 9)),
        ([datasource.GreaterThanOrEqual(ID, 7), datasource.LessThanOrEqual(ID, 10)], Wanted(None, 6, 10)),
        ([datasource.GreaterThan(ID, -5), datasource.LessThan(ID, 1 << 40)], EVERYTHING),
    ],
)
def test_filters_on_stream_and_id_are_applied(filters: list[Any], wanted: Wanted) -> None:
    assert narrow(filters) == (wanted, [])


@pytest.mark.parametrize(
    "each",
    [
        datasource.EqualTo(TIME, 7),
        datasource.StringStartsWith(STREAM, "a"),
        datasource.Not(datasource.EqualTo(STREAM, "a")),
        datasource.In(ID, (1, 2)),
        datasource.EqualNullSafe(ID, 1),
    ],
)
def test_a_filter_that_is_not_understood_is_left_to_spark(each: object) -> None:
    filters: list[Any] = [datasource.EqualTo(ID, 7), each]
    assert narrow(filters) == (Wanted(None, 6, 7), [each])
