"""What is seen of a query: its name, a line for each batch, its metrics, and the table of lag."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from muxkit.metrics import Metrics
from muxkit.metrics.prometheus import render
from muxkit.pipeline import QueryLog, QueryMetrics, lag_table, observed, query_name
from muxkit.pipeline.monitor import line_of
from tests.pipeline._source_servers import ONE, THREE, TWO, hall

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

SERVER = "restream+tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"streams": ONE, "reader": "billing"}, f"muxkit as billing: {ONE}"),
        ({"streams": f"{ONE} {TWO}"}, f"muxkit: {ONE}, {TWO}"),
        ({"directory": ONE, "streamsFile": "names.txt"}, f"muxkit: those of directory {ONE}, those of names.txt"),
        (
            {"streams": " ".join(f"{n:08x}-0000-4000-8000-000000000000" for n in range(9))},
            "muxkit: 00000000-0000-4000-8000-000000000000, 00000001-0000-4000-8000-000000000000, "
            "00000002-0000-4000-8000-000000000000 and 6 more",
        ),
    ],
)
def test_a_query_is_named_after_its_streams(options: dict[str, str], name: str) -> None:
    assert query_name({"servers": SERVER, **options}) == name


def progress(latest: dict[str, int], end: dict[str, int], rows: int = 7) -> dict[str, Any]:
    def offset(streams: dict[str, int]) -> dict[str, object]:
        return {"version": 2, "begins": {}, "streams": streams}

    source = {"latestOffset": offset(latest), "endOffset": offset(end)}
    return {"name": "q", "id": "1", "batchId": 3, "numInputRows": rows, "sources": [source]}


def test_a_line_says_how_much_was_read_and_where_it_is_behind_most() -> None:
    assert line_of(progress({ONE: 9, TWO: 30}, {ONE: 8, TWO: 10}, 1200)) == (
        f"query q: batch 3, 1,200 rows of {ONE}, {TWO}; 21 messages behind, most in {TWO}: 20"
    )
    assert line_of(progress({ONE: 9}, {ONE: 9})) == f"query q: batch 3, 7 rows of {ONE}; nothing behind"
    assert line_of(progress({THREE: 5}, {})) == (
        f"query q: batch 3, 7 rows of {THREE}; 5 messages behind, most in {THREE}: 5"
    )


def test_a_query_on_other_sources_has_no_line() -> None:
    told = progress({}, {})
    told["sources"] = [{"latestOffset": "17", "endOffset": {"logOffset": 3}}]
    assert line_of(told) is None


def batch_done(told: dict[str, Any], id: str) -> QueryProgressEvent:
    """The event as Spark makes it from the JSON of a progress."""
    whole: dict[str, Any] = {
        "runId": id,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchDuration": 1500,
        "durationMs": {},
        "eventTime": {},
        "stateOperators": [],
        "sink": {"description": "", "numOutputRows": 0},
        "observedMetrics": {},
        **told,
        "id": id,
    }
    for source in whole["sources"]:
        source |= {"description": "muxkit", "startOffset": None, "numInputRows": 7}
        source |= {"inputRowsPerSecond": 1.0, "processedRowsPerSecond": 1.0}
    return QueryProgressEvent(StreamingQueryProgress.fromJson(whole))


def shown(metrics: Metrics) -> list[str]:
    text, _ = render(metrics)
    return sorted(line for line in text.decode().splitlines() if line.startswith("muxkit_query"))


def test_the_endpoint_of_metrics_shows_what_queries_do() -> None:
    metrics, queries = Metrics(), QueryMetrics()
    metrics.include(queries)
    id = "10000000-0000-4000-8000-000000000000"
    queries.onQueryStarted(QueryStartedEvent(UUID(id), UUID(id), "table", "", set()))
    queries.onQueryProgress(batch_done(progress({ONE: 9, TWO: 30}, {ONE: 8, TWO: 10}), id))
    queries.onQueryProgress(batch_done(progress({ONE: 9, TWO: 30}, {ONE: 9, TWO: 25}), id))
    assert [line for line in shown(metrics) if "created" not in line] == [
        'muxkit_query_batch_seconds_total{query="table"} 3.0',
        'muxkit_query_batches_total{query="table"} 2.0',
        'muxkit_query_behind{query="table"} 5.0',
        'muxkit_query_rows_total{query="table"} 14.0',
    ]
    queries.onQueryTerminated(QueryTerminatedEvent(UUID(id), UUID(id), "it failed", None))
    assert 'muxkit_query_failures_total{query="table"} 1.0' in shown(metrics)
    assert not any("behind" in line for line in shown(metrics))


def test_the_metrics_of_queries_pass_over_queries_on_other_sources() -> None:
    metrics, queries = Metrics(), QueryMetrics()
    metrics.include(queries)
    told = progress({}, {})
    told["sources"] = [{"latestOffset": "17", "endOffset": {"logOffset": 3}}]
    id = "10000000-0000-4000-8000-000000000000"
    queries.onQueryProgress(batch_done(told, id))
    queries.onQueryTerminated(QueryTerminatedEvent(UUID(id), UUID(id), "it failed", None))
    assert shown(metrics) == []


@pytest.mark.spark
def test_a_running_query_is_seen_in_its_name_its_metrics_its_lines_and_the_table_of_lag(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.pipeline.test_source_spark import HAS_ADMISSION, until

    caplog.set_level(logging.INFO, "muxkit")
    listener, queries, counted = QueryLog(), QueryMetrics(), Metrics()
    counted.include(queries)
    spark.streams.addListener(listener)
    spark.streams.addListener(queries)
    try:
        with hall() as there:
            there.feed(ONE, list(range(100)), time=1_700_000_000.5)
            options = {"servers": there.url, "streams": ONE, "maxMessagesPerTrigger": "60"}
            frame = observed(spark.readStream.format("muxkit").options(**options).load())
            writer = frame.writeStream.format("noop").queryName(query_name(options))
            query = writer.option("checkpointLocation", str(tmp_path)).start()
            try:
                until(lambda: (query.lastProgress or {"batchId": -1})["batchId"] >= 1, query)
                found = [(row.query, row.stream, row.read, row.head, row.lag) for row in lag_table(spark).collect()]
                metrics = query.recentProgress[0].observedMetrics["muxkit"]
                until(lambda: "40 rows" in caplog.text, query)
                until(lambda: any("rows_total" in line and line.endswith(" 100.0") for line in shown(counted)), query)
            finally:
                query.stop()
    finally:
        spark.streams.removeListener(listener)
        spark.streams.removeListener(queries)
    assert f'muxkit_query_rows_total{{query="muxkit: {ONE}"}} 100.0' in shown(counted)
    assert found == [(f"muxkit: {ONE}", ONE, 100, 100, 0)]
    assert (metrics.rows, metrics.streams) == (60, 1)
    assert "2023-11-14" in str(metrics.newest)
    assert metrics.bytes == sum(len(str(n)) for n in range(60))
    behind = "40 messages behind" if HAS_ADMISSION else "nothing behind"  # older ones do not ask the source
    assert f"query muxkit: {ONE}: batch 0, 60 rows of {ONE}; {behind}" in caplog.text
