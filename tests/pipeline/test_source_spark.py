"""The source in Spark: what only a JVM can show."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
import trio
from pyspark.errors import AnalysisException, StreamingQueryException

from muxkit.pipeline import forward, lag, open_staging, stop_query
from muxkit.pipeline.spark import ADMISSION_SPARK, PUSHDOWN_SPARK, version_numbers
from muxkit.testing import ChaosPlan, Way
from tests.pipeline._source_servers import DIRECTORY, ONE, THREE, TWO, Hall, hall, relay_to
from tests.pipeline._staging_process import staging_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PATIENCE = 300.0  # s; nothing is decided by it
HAS_ADMISSION = version_numbers(pyspark.__version__) >= ADMISSION_SPARK


@pytest.fixture
def there() -> Iterator[Hall]:
    with hall() as opened:
        yield opened


def stream(spark: SparkSession, there: Hall, streams: str | None = ONE, **options: object) -> DataFrame:
    reader = spark.readStream.format("muxkit")
    given = {"servers": there.url, "streams": streams, "reader": "table"} | options
    for name, value in given.items():
        if value is not None:
            reader = reader.option(name, str(value))
    return reader.load()


def to_table(frame: DataFrame, folder: Path, *, available_now: bool = True) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    writer = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
    return writer.start()


def run(frame: DataFrame, folder: Path) -> list[Any]:
    """Write everything that is available now; return the progress of each batch.

    On a Spark without admission control for sources in Python, a limit ends such a query after one batch. So the query
    is started again there until a run finds nothing.
    """
    progress: list[Any] = []
    while True:
        query = to_table(frame, folder)
        assert query.awaitTermination(int(PATIENCE))
        new = [each for each in query.recentProgress if each.numInputRows]
        progress += new
        if HAS_ADMISSION or not new:
            return progress


def rows(spark: SparkSession, folder: Path) -> list[tuple[str, int]]:
    return sorted((row.stream, row.id) for row in spark.read.parquet(str(folder / "out")).collect())


def until(holds: Callable[[], bool], query: StreamingQuery) -> None:
    """Spark has no events for this: status again and again, while the query lives."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert query.isActive, query.exception()
        assert time.monotonic() < ends
        time.sleep(0.05)


def offsets(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint" / "offsets").iterdir() if path.name.isdigit())


def test_streams_come_into_a_table_batch_by_batch_and_the_server_forgets_them(
    spark: SparkSession, there: Hall, tmp_path: Path
) -> None:
    for uuid in (ONE, TWO):
        there.feed(uuid, [{"n": n} for n in range(5000)], time=1_700_000_000.5)
    frame = stream(spark, there, f"{ONE} {TWO}", maxMessagesPerTrigger=7000)
    progress = run(frame, tmp_path)
    assert [each.numInputRows for each in progress] == [7000, 3000]
    if HAS_ADMISSION:
        assert [lag(each) for each in progress] == [{ONE: 1500, TWO: 1500}, {ONE: 0, TWO: 0}]
    assert rows(spark, tmp_path) == [(uuid, id) for uuid in (ONE, TWO) for id in range(1, 5001)]
    assert (there.acknowledged(ONE), there.acknowledged(TWO)) == (5000, 5000)
    first = spark.read.parquet(str(tmp_path / "out")).where(f"stream = '{ONE}' and id = 7").collect()[0]
    assert (bytes(first.value), first.time.timestamp()) == (b'{"n":6}', 1_700_000_000.5)


def test_a_query_that_is_started_again_makes_no_empty_batch_and_reads_only_what_is_new(
    spark: SparkSession, there: Hall, tmp_path: Path
) -> None:
    for uuid in (TWO, ONE):
        there.feed(uuid, [1, 2, 3])
    frame = stream(spark, there, f"{TWO} {ONE}")
    run(frame, tmp_path)
    before = offsets(tmp_path)
    run(frame, tmp_path)
    assert offsets(tmp_path) == before
    there.feed(ONE, [4])
    assert [each.numInputRows for each in run(frame, tmp_path)] == [1]
    assert len(rows(spark, tmp_path)) == 7


def test_a_live_query_takes_new_sessions_in_and_acknowledges_when_it_is_idle(
    spark: SparkSession, there: Hall, tmp_path: Path
) -> None:
    there.feed(DIRECTORY, [ONE])
    there.feed(ONE, [1, 2, 3])
    query = to_table(stream(spark, there, streams=None, directory=DIRECTORY), tmp_path, available_now=False)
    try:
        until(lambda: there.acknowledged(ONE) == 3, query)
        there.feed(TWO, ["a", "b"])
        there.feed(DIRECTORY, [TWO])
        until(lambda: there.acknowledged(TWO) == 2, query)
    finally:
        query.stop()
    assert rows(spark, tmp_path) == [(ONE, 1), (ONE, 2), (ONE, 3), (TWO, 1), (TWO, 2)]


def test_streams_of_a_pattern_join_and_leave_a_query_and_each_row_comes_once_over_restarts(
    spark: SparkSession, there: Hall, tmp_path: Path
) -> None:
    frame = stream(spark, there, streams=None, subscribePattern="orders-.*")
    there.feed(ONE, [1, 2, 3], name="orders-eu")
    there.feed(DIRECTORY, [1], name="other")
    query = to_table(frame, tmp_path, available_now=False)
    try:
        until(lambda: there.acknowledged(ONE) == 3, query)
        there.feed(TWO, ["a", "b"], name="orders-us")
        until(lambda: there.acknowledged(TWO) == 2, query)
        there.remove(ONE)
        there.feed(TWO, ["c"])
        until(lambda: there.acknowledged(TWO) == 3, query)
    finally:
        query.stop()
    there.feed(TWO, ["d"])
    there.feed(THREE, [1], name="orders-asia")
    run(frame, tmp_path)
    expected = [*((ONE, id) for id in (1, 2, 3)), *((TWO, id) for id in (1, 2, 3, 4)), (THREE, 1)]
    assert rows(spark, tmp_path) == expected


def test_a_network_that_cuts_changes_nothing(spark: SparkSession, there: Hall, tmp_path: Path) -> None:
    there.feed(ONE, [{"n": n} for n in range(4000)])
    plan = ChaosPlan(cut_after=(1_000, 20_000), cut_ways=(Way.BACK,), reset=0.3)
    with relay_to(there, plan, seed=3) as relay:
        run(stream(spark, there, servers=relay.url, maxMessagesPerTrigger=3000), tmp_path)
        assert relay.cuts() > 3
    assert rows(spark, tmp_path) == [(ONE, id) for id in range(1, 4001)]


def test_a_task_that_fails_is_tried_again_and_no_row_comes_twice(
    spark: SparkSession, there: Hall, tmp_path: Path
) -> None:
    there.feed(ONE, [{"n": n} for n in range(3000)])
    marker = str(tmp_path / "failed")

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pathlib import Path

        for batch in batches:
            yield batch
            if not Path(marker).exists():
                Path(marker).touch()
                raise RuntimeError("once")

    frame = stream(spark, there, batchRows=1000)
    run(frame.mapInArrow(fail_once, frame.schema), tmp_path)
    assert (tmp_path / "failed").exists()
    assert rows(spark, tmp_path) == [(ONE, id) for id in range(1, 3001)]


def test_plain_servers_are_read_by_prefetch(spark: SparkSession, tmp_path: Path) -> None:
    with hall(status=False) as plain:
        plain.feed(ONE, [{"n": n} for n in range(1000)])
        run(stream(spark, plain, prefetchWait="300ms", maxMessagesPerTrigger=600), tmp_path)
        assert rows(spark, tmp_path) == [(ONE, id) for id in range(1, 1001)]


def test_a_loss_ends_the_query_with_the_stream_and_the_ids(spark: SparkSession, there: Hall, tmp_path: Path) -> None:
    there.feed(ONE, [{"n": n} for n in range(10)])
    frame = stream(spark, there, maxMessagesPerTrigger=4, ackMode="never")
    run(frame, tmp_path)
    there.feed(ONE, [1] * 10)
    there.do(there.store.ack, ONE, 15)
    with pytest.raises(StreamingQueryException, match=rf"stream {ONE}: message 11 is next, .* 15 was acknowledged"):
        run(frame, tmp_path)
    run(stream(spark, there, failOnDataLoss=False), tmp_path)
    assert [id for _, id in rows(spark, tmp_path)] == [*range(1, 11), *range(16, 21)]


def test_an_option_that_is_wrong_is_told_before_anything_runs(spark: SparkSession, there: Hall) -> None:
    with pytest.raises(AnalysisException, match="option maxmessagepertrigger: there is no such option"):
        stream(spark, there, maxMessagePerTrigger=5)


# ---------------------------------------------------------------------------- batch queries


def table(spark: SparkSession, there: Hall, streams: str, **options: object) -> DataFrame:
    reader = spark.read.format("muxkit").option("servers", there.url).option("streams", streams)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def test_a_batch_query_reads_what_is_kept_and_acknowledges_nothing(spark: SparkSession, there: Hall) -> None:
    there.feed(ONE, list(range(100)))
    there.feed(TWO, list(range(100)))
    there.do(there.store.ack, TWO, 40)
    frame = table(spark, there, f"{ONE},{TWO}", endingOffsets=json.dumps({ONE: 10}), maxPartitions=1)
    assert frame.groupBy("stream").count().orderBy("stream").collect() == [(ONE, 10), (TWO, 60)]
    assert there.acknowledged(ONE) == 0


@pytest.mark.skipif(version_numbers(pyspark.__version__) < PUSHDOWN_SPARK, reason="Spark passes no filters")
def test_filters_on_stream_and_id_reach_the_server(spark: SparkSession, there: Hall) -> None:
    for uuid in (ONE, TWO):
        there.feed(uuid, list(range(100)))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = table(spark, there, f"{ONE},{TWO}", filterPushdown=True, maxMessagesPerPartition=50)
        narrowed = frame.where(f"stream = '{TWO}' and id > 90")
        assert (frame.rdd.getNumPartitions(), narrowed.rdd.getNumPartitions()) == (4, 1)
        assert [(row.stream, row.id) for row in narrowed.collect()] == [(TWO, id) for id in range(91, 101)]
        assert frame.where("id between 3 and 4 and value > X'00'").count() == 4
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_busy_query_that_is_stopped_between_two_batches_leaves_one_line_and_no_stack_trace(
    spark: SparkSession,
    there: Hall,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "muxkit")
    there.feed(ONE, [1])
    frame = stream(spark, there, stopFile=tmp_path / "stop", maxMessagesPerTrigger=20_000)
    query = to_table(frame, tmp_path, available_now=False)
    until(lambda: there.acknowledged(ONE) == 1, query)
    there.feed(ONE, list(range(200_000)))
    until(lambda: len(offsets(tmp_path)) > 2, query)
    capfd.readouterr()
    caplog.clear()
    assert stop_query(query, tmp_path / "stop", within=PATIENCE)
    assert capfd.readouterr().err == ""
    assert caplog.messages == [f"stopped query {query.id} between two batches"]
    assert not (tmp_path / "stop").exists()
    read = rows(spark, tmp_path)
    assert read == [(ONE, id) for id in range(1, len(read) + 1)]


def test_rows_that_spark_writes_come_back_as_they_were(spark: SparkSession, there: Hall, tmp_path: Path) -> None:
    given = [
        (b"\x00\xff\n", b"k1", [("trace", b"\x01"), ("trace", None)]),
        (b'{"n":1}', None, None),
        (None, b"deleted", None),
        (b"", b"", None),
    ]
    ddl = "value binary, key binary, headers array<struct<key: string, value: binary>>"
    frame = spark.createDataFrame(given, ddl).repartition(1)
    with staging_process(f"sqlite:{tmp_path / 'staging.db'}") as server:
        server.start()
        frame.write.format("muxkit").mode("append").option("url", server.url).save()
        server.stop()
    there.do(forward_all, there, f"sqlite:{tmp_path / 'staging.db'}", ONE, len(given))
    found = table(spark, there, ONE)
    assert found.count() == found.where("time is not null").count() == len(given)
    assert found.select("value", "key", "headers").exceptAll(frame).count() == 0


async def forward_all(there: Hall, path: str, uuid: str, count: int) -> None:
    """Forward what Spark has committed to a session, until it is all there."""
    async with open_staging(path) as staging, trio.open_nursery() as nursery:
        nursery.start_soon(forward, staging, "main", there.store, uuid)
        while uuid not in await there.store.statuses([uuid]):
            await trio.lowlevel.checkpoint()
        await there.store.wait(uuid, count - 1)
        nursery.cancel_scope.cancel()


def test_a_hot_stream_is_read_by_several_tasks_in_the_order_of_its_ids(spark: SparkSession, there: Hall) -> None:
    there.feed(ONE, list(range(1000)))
    frame = table(spark, there, ONE, maxMessagesPerPartition=300).selectExpr("id", "spark_partition_id() AS task")
    found = [(row.task, row.id) for row in frame.collect()]
    assert found == [(id // 250, id + 1) for id in range(1000)]


def test_a_reader_that_has_enough_is_closed_in_time(spark: SparkSession, there: Hall) -> None:
    there.feed(ONE, list(range(50_000)))
    assert len(table(spark, there, ONE, batchRows=100).limit(5).collect()) == 5


def test_nothing_of_a_test_is_left_running(spark: SparkSession) -> None:
    assert spark.streams.active == []
    assert [each.name for each in threading.enumerate() if each.name == "muxkit reader"] == []
    logging.getLogger("py4j").setLevel(logging.ERROR)
