"""Spark writes each row once: batch and streaming, with failing tasks, and batches that are repeated."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.pipeline import Key, StagingClient, open_staging
from tests.pipeline._staging_process import StagingProcess, staging_process
from tests.pipeline._staging_world import everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pandas import DataFrame as Frame
    from pyspark.sql import DataFrame, SparkSession

    from muxkit.pipeline.staging.records import BatchProgress

pytest_plugins = ["tests.pipeline._staging_fixtures"]
pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(sys.platform == "win32", reason="the server is ended with a signal"),
]


@pytest.fixture
def server(staging_path: Path) -> Iterator[StagingProcess]:
    with staging_process(f"sqlite:{staging_path}") as process:
        process.start()
        yield process


def standing(server: StagingProcess, app: str, stream: str = "main") -> BatchProgress:
    return trio.run(StagingClient(server.url).standing, Key(stream, app))


def rows_in(server: StagingProcess, path: Path, stream: str = "main") -> list[bytes]:
    """All rows of a stream; the server ends."""

    async def read() -> list[bytes]:
        async with open_staging(f"sqlite:{path}") as store:
            return await everything(store, stream)

    server.stop()
    return trio.run(read)


def numbers(spark: SparkSession, end: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, end, 1, partitions).selectExpr("cast(id as string) value")


def texts(end: int) -> list[bytes]:
    return [b"%d" % number for number in range(end)]


def save(frame: DataFrame, server: StagingProcess, **options: str) -> None:
    frame.write.format("muxkit").mode("append").option("url", server.url).options(**options).save()


# ---------------------------------------------------------------------------- batch


def test_a_batch_write_with_a_name_is_done_once_however_often_it_is_run(
    spark: SparkSession, server: StagingProcess, staging_path: Path
) -> None:
    save(numbers(spark, 1000), server, txnId="load 1")
    save(numbers(spark, 1000, partitions=5), server, txnId="load 1")
    assert (standing(server, "load 1").rows, standing(server, "load 1").head) == (1000, 1000)
    assert rows_in(server, staging_path) == texts(1000)


def test_partitions_go_to_several_servers_and_each_row_is_there_once(
    spark: SparkSession, server: StagingProcess, staging_path: Path
) -> None:
    with staging_process(f"sqlite:{staging_path}.other") as other:
        other.start()
        writer = numbers(spark, 1000, partitions=4).write.format("muxkit").mode("append").option("txnId", "load")
        writer.options(urls=f"{server.url} {other.url}", spread="partitions").save()
        halves = rows_in(server, staging_path), rows_in(other, staging_path.with_name(f"{staging_path.name}.other"))
    assert [len(half) for half in halves] == [500, 500]
    assert sorted(halves[0] + halves[1]) == sorted(texts(1000))


def test_a_batch_write_without_a_name_appends_again(
    spark: SparkSession, server: StagingProcess, staging_path: Path
) -> None:
    for _ in range(2):
        save(spark.createDataFrame([(1, "ü")], "id int, text string"), server, stream="rows", channels="2")
    found = rows_in(server, staging_path, "rows")
    assert [json.loads(row) for row in found] == [{"id": 1, "text": "ü"}] * 2


def failing(path: Path, times: int) -> Callable[[Iterator[Frame]], Iterator[Frame]]:
    """Passes rows on, and fails at the end of a partition so many times."""

    def act(frames: Iterator[Frame]) -> Iterator[Frame]:
        yield from frames
        with path.open("a") as file:
            file.write("x")
            file.flush()
            mine = file.tell()  # two partitions may come here at once
        if mine <= times:
            raise ArithmeticError("injected")

    return act


def test_a_task_that_fails_once_is_tried_again_and_its_rows_are_there_once(
    spark: SparkSession, server: StagingProcess, staging_path: Path, tmp_path: Path
) -> None:
    frame = numbers(spark, 100, partitions=2).mapInPandas(failing(tmp_path / "times", 1), "value string")
    save(frame, server, txnId="load")
    assert standing(server, "load").transactions == 0
    assert rows_in(server, staging_path) == texts(100)


def test_a_task_that_fails_for_good_leaves_nothing_committed(
    spark: SparkSession, server: StagingProcess, tmp_path: Path
) -> None:
    frame = numbers(spark, 100, partitions=2).mapInPandas(failing(tmp_path / "times", 10), "value string")
    with pytest.raises(Exception, match="injected"):
        save(frame, server, txnId="load")
    assert standing(server, "load").head == 0
    save(numbers(spark, 100), server, txnId="load")  # and disturbs no other batch
    assert (standing(server, "load").head, standing(server, "load").transactions) == (100, 0)


@pytest.mark.parametrize(
    ("mode", "options", "told"),
    [
        ("overwrite", {}, "option mode: only append"),
        ("append", {"windowByte": "1"}, "option windowbyte: there is no such option"),
        ("append", {"encoding": "value"}, "option encoding: value needs one column"),
        ("append", {"txnAppId": "x"}, "option txnAppId: it is for streaming queries"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(
    spark: SparkSession, mode: str, options: dict[str, str], told: str
) -> None:
    frame = spark.range(3).write.format("muxkit").mode(mode).option("url", "bpmux+tcp://127.0.0.1:1").options(**options)
    with pytest.raises(Exception, match=told):
        frame.save()


def test_a_server_that_is_not_there_fails_the_write_with_a_sentence(spark: SparkSession) -> None:
    frame = numbers(spark, 3).write.format("muxkit").mode("append").option("url", "bpmux+tcp://127.0.0.1:1")
    with pytest.raises(Exception, match=r"application 'nightly', batch 0.* could not be used .* option patience"):
        frame.options(patience="100ms", txnId="nightly").save()


# ---------------------------------------------------------------------------- streaming


def put_file(folder: Path, number: int, end: int) -> None:
    folder.mkdir(exist_ok=True)
    fresh = folder / f"_{number}"  # Spark passes over names like this
    fresh.write_text("".join(f"{number}-{row}\n" for row in range(end)), encoding="utf-8")
    fresh.rename(folder / f"{number}.txt")


def run(spark: SparkSession, server: StagingProcess, folder: Path, partitions: int = 2, **options: str) -> str:
    """All that there is, in batches of one file; the id of the query."""
    query = (
        spark.readStream.option("maxFilesPerTrigger", "1")
        .text(str(folder / "input"))
        .repartition(partitions)
        .writeStream.format("muxkit")
        .option("url", server.url)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .options(**options)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    return query.id


def expected(files: int, end: int) -> list[bytes]:
    return sorted(b"%d-%d" % (number, row) for number in range(files) for row in range(end))


def test_a_query_commits_each_batch_once_over_restarts_and_replays(
    spark: SparkSession, server: StagingProcess, staging_path: Path, tmp_path: Path
) -> None:
    for number in range(2):
        put_file(tmp_path / "input", number, 50)
    app = run(spark, server, tmp_path)
    assert (standing(server, app).batch, standing(server, app).head) == (1, 100)
    # As if the driver had died between the sink's commit and the remark that Spark makes about it.
    (tmp_path / "checkpoint" / "commits" / "1").unlink()
    (tmp_path / "checkpoint" / "commits" / ".1.crc").unlink()
    put_file(tmp_path / "input", 2, 50)
    assert run(spark, server, tmp_path, partitions=3) == app
    assert (standing(server, app).batch, standing(server, app).head) == (2, 150)
    assert sorted(rows_in(server, staging_path)) == expected(3, 50)


def test_another_checkpoint_with_the_same_name_does_not_repeat_batches(
    spark: SparkSession, server: StagingProcess, staging_path: Path, tmp_path: Path
) -> None:
    put_file(tmp_path / "input", 0, 50)
    run(spark, server, tmp_path, txnAppId="nightly", stream="orders")
    (tmp_path / "checkpoint").rename(tmp_path / "lost")
    run(spark, server, tmp_path, txnAppId="nightly", stream="orders")
    assert sorted(rows_in(server, staging_path, "orders")) == expected(1, 50)


def test_a_query_that_would_take_rows_back_is_refused(
    spark: SparkSession, server: StagingProcess, tmp_path: Path
) -> None:
    put_file(tmp_path / "input", 0, 5)
    counted = spark.readStream.text(str(tmp_path / "input")).groupBy("value").count()
    query = (
        counted.writeStream.format("muxkit")
        .outputMode("complete")
        .option("url", server.url)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    with pytest.raises(Exception, match="option outputMode: only append"):
        query.start().awaitTermination(300)
