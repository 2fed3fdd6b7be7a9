"""Monitoring of queries on restream streams: a log line per batch, metrics in Spark's progress, and a table of lag.

Spark's Python API doesn't let a source describe itself or report metrics. This module offers what a program can do
instead: name a query, observe metrics of its rows, and add a listener.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from muxkit.metrics.collecting import Family, Labels, Metric
from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.offsets import Offset, offset_of
from muxkit.pipeline.stopping import StopFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )
    from pyspark.sql.streaming.query import StreamingQuery

METRICS: Final = "muxkit"
"""The name of the metrics of `observed` in `observedMetrics`."""
LAG_DDL: Final = (
    "query string, id string, batch bigint, stream string, read bigint, head bigint, lag bigint, time timestamp"
)
QUERY_ROWS: Final = Metric("muxkit_query_rows", "counter", "", "Messages that queries have read.")
QUERY_BATCHES: Final = Metric("muxkit_query_batches", "counter", "", "Batches of queries.")
QUERY_SECONDS: Final = Metric("muxkit_query_batch_seconds", "counter", "seconds", "Time that batches took.")
QUERY_BEHIND: Final = Metric("muxkit_query_behind", "gauge", "", "Messages on servers that are in no batch yet.")
QUERY_FAILURES: Final = Metric("muxkit_query_failures", "counter", "", "Queries that ended with an error.")
QUERY_METRICS: Final = (QUERY_ROWS, QUERY_BATCHES, QUERY_SECONDS, QUERY_BEHIND, QUERY_FAILURES)
STOP_INTERVAL: Final = 0.05  # s
NAMED: Final = 3  # streams that a name or a log line lists by UUID

_log = logging.getLogger("muxkit")


def query_name(options: Mapping[str, str]) -> str:
    """Return a name for `.queryName(...)` that lists the streams, because Spark's UI shows a query only by its name.

    Raises:
        OptionError: if the options of the source are invalid.
    """
    parsed = SourceOptions.parse(options)
    named = [each.uuid for each in parsed.streams]
    if parsed.directory is not None:
        named.append(f"those of directory {parsed.directory.uuid}")
    if parsed.streams_file is not None:
        named.append(f"those of {parsed.streams_file}")
    if parsed.pattern is not None:
        named.append(f"those that match {parsed.pattern.pattern}")
    reader = f" as {parsed.reader}" if parsed.reader else ""
    return f"muxkit{reader}: {_some(named)}"


def stop_query(query: StreamingQuery, stop_file: str | Path, *, within: float = 60.0) -> bool:
    """Stop a query between two batches.

    `query.stop()` alone kills the tasks of a running batch, and Spark logs a stack trace for each of them. This
    function creates the file that the option `stopFile` of the source names, waits until the source begins no more
    batches, stops the query, and deletes the file. Either way, no row is lost or repeated. Call it on the driver.

    Args:
        query: the query.
        stop_file: the path in the option `stopFile`.
        within: the seconds to wait for the end of the running batch.

    Returns:
        False if the batch wasn't complete in time and was killed.
    """
    file = StopFile(stop_file)
    file.request()
    try:
        ends = time.monotonic() + within
        while query.isActive and not file.is_confirmed and time.monotonic() < ends:
            time.sleep(STOP_INTERVAL)  # Spark has no event for this
        is_between = file.is_confirmed or not query.isActive
        query.stop()
    finally:
        file.remove()
    name = query.name or query.id
    if is_between:
        # log: A program has stopped a query by `stop_query`.
        _log.info("stopped query %s between two batches", name)
    else:
        # log: A batch of a query took longer than `stop_query` waited, so Spark killed its tasks. It is repeated when
        # the query is started again.
        _log.warning("stopped query %s during a batch, which took more than %g s", name, within)
    return is_between


def observed(frame: DataFrame) -> DataFrame:
    """Add metrics of the rows that a query reads in each batch: rows, bytes, streams, and the newest message's time.

    They appear in `observedMetrics["muxkit"]` of each progress, for listeners, event logs and metric sinks.
    """
    from pyspark.sql import functions as f

    return frame.observe(
        METRICS,
        f.count(f.lit(1)).alias("rows"),
        f.coalesce(f.sum(f.length("value")), f.lit(0)).alias("bytes"),
        f.approx_count_distinct("stream").alias("streams"),
        f.max("time").alias("newest"),
    )


def lag_table(spark: SparkSession) -> DataFrame:
    """Return a table of the progress of all running queries, with a row for each of their streams.

    `head` is the last message when the server was last asked, `read` the last one in a batch, and `time` the start of
    the batch. The table is a snapshot. Call this function again for newer rows.
    """
    rows: list[tuple[Any, ...]] = []
    for query in spark.streams.active:
        progress = query.lastProgress
        if progress is not None:
            rows += _rows(progress)
    frame = spark.createDataFrame(rows, LAG_DDL.replace("time timestamp", "time string"))
    return frame.withColumn("time", frame["time"].cast("timestamp"))


def _rows(progress: StreamingQueryProgress) -> list[tuple[Any, ...]]:
    told = json.loads(progress.json)
    found = []
    for head, end in _offsets(told):
        for uuid, position in sorted(head.streams.items()):
            read = end.streams[uuid].id if uuid in end.streams else None
            behind = max(0, position.id - (read or 0))
            found.append(
                (told["name"], told["id"], told["batchId"], uuid, read, position.id, behind, told["timestamp"])
            )
    return found


def _offsets(told: Mapping[str, Any]) -> list[tuple[Offset, Offset]]:
    """Return the heads and the end of each source that reads restream streams."""
    pairs = [(offset_of(each.get("latestOffset")), offset_of(each.get("endOffset"))) for each in told["sources"]]
    return [(head, end) for head, end in pairs if head.streams or end.streams]


class QueryLog(StreamingQueryListener):
    """Logs the batches of queries on streams: `spark.streams.addListener(QueryLog())`. Other queries are ignored.

    The line of a batch has its number of rows, the number of messages that haven't been read, and the stream with the
    most of them.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._log = logger or _log
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        told = json.loads(event.progress.json)
        line = line_of(told)
        if line is not None:
            self._log.info("%s", line)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        self._log.debug("query %s has nothing to read", self._names.get(str(event.id), event.id))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        name = self._names.pop(str(event.id), str(event.id))
        if event.exception is None:
            self._log.info("query %s has ended", name)
        else:
            self._log.warning("query %s has failed: %s", name, event.exception.splitlines()[-1])


class QueryMetrics(StreamingQueryListener):
    """Counts the batches of queries on streams: `spark.streams.addListener(queries)` and `metrics.include(queries)`.

    The endpoint of the `muxkit.metrics.Metrics` then exports the counters to Prometheus, with the name of the query as
    a label. Other queries are ignored. Spark 4.0 and 4.1 don't report how far a query is behind, so there
    `muxkit_query_behind` is always 0.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._numbers: dict[Metric, dict[Labels, float]] = {metric: {} for metric in QUERY_METRICS}

    def collect(self) -> list[Family]:
        """Return the current values of the metrics."""
        return [Family(metric, ("query",), {**numbers}) for metric, numbers in self._numbers.items()]

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        told = json.loads(event.progress.json)
        if not _offsets(told):
            return
        query = (self._names.setdefault(told["id"], told["name"] or told["id"]),)
        self._add(QUERY_BATCHES, query, 1)
        self._add(QUERY_ROWS, query, told["numInputRows"])
        self._add(QUERY_SECONDS, query, told["batchDuration"] / 1000)
        self._numbers[QUERY_BEHIND][query] = sum(_behind(told).values())

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        query = (self._names.pop(str(event.id), str(event.id)),)
        is_known = self._numbers[QUERY_BEHIND].pop(query, None) is not None
        if event.exception is not None and is_known:
            self._add(QUERY_FAILURES, query, 1)

    def _add(self, metric: Metric, query: Labels, number: float) -> None:
        numbers = self._numbers[metric]
        numbers[query] = numbers.get(query, 0) + number


def _behind(told: Mapping[str, Any]) -> dict[str, int]:
    """Return how many messages of each stream aren't in a batch yet."""
    return {
        uuid: max(0, position.id - (end.streams[uuid].id if uuid in end.streams else 0))
        for head, end in _offsets(told)
        for uuid, position in head.streams.items()
    }


def line_of(told: Mapping[str, Any]) -> str | None:
    """Describe a batch, given its progress as JSON. Return None if the query doesn't read restream streams."""
    pairs = _offsets(told)
    if not pairs:
        return None
    streams = sorted({uuid for head, end in pairs for uuid in (*head.streams, *end.streams)})
    name, rows = told["name"] or told["id"], told["numInputRows"]
    line = f"query {name}: batch {told['batchId']}, {rows:,} rows of {_some(streams)}"
    behind = {uuid: count for uuid, count in _behind(told).items() if count}
    if not behind:
        return f"{line}; nothing behind"
    most = max(sorted(behind), key=behind.__getitem__)
    return f"{line}; {sum(behind.values()):,} messages behind, most in {most}: {behind[most]:,}"


def _some(names: Sequence[str]) -> str:
    """List up to `NAMED` names, and the number of the others."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"
