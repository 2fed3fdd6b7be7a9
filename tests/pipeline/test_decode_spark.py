"""Decoding on Spark gives the rows of decoding here, in a stream too."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from muxkit.pipeline import decode, decode_batches, decode_stream
from muxkit.pipeline.capture.decoding import read_raw
from muxkit.pipeline.capture.files import RAW, to_batch
from tests.pipeline._captures import record_sessions

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from muxkit.pipeline.capture.files import RawRow

pytestmark = pytest.mark.spark
COLUMNS = ("connection", "number", "event", "direction", "channel", "kind", "size", "credit", "rule")


def told_here(folder: Path, *, engine: bool = False) -> list[tuple[object, ...]]:
    rows = [row for batch in decode_batches(read_raw(folder), "bpmux", engine=engine) for row in batch.to_pylist()]
    return sorted(tuple(row[name] for name in COLUMNS) for row in rows)


def told_there(frames: DataFrame) -> list[tuple[object, ...]]:
    return sorted(tuple(row[name] for name in COLUMNS) for row in frames.collect())


@pytest.mark.parametrize("engine", [False, True], ids=["cut", "engine"])
async def test_spark_decodes_as_one_process_does(tmp_path: Path, spark: SparkSession, engine: bool) -> None:
    await record_sessions(tmp_path, channels=3, messages=5)
    raw = spark.read.parquet(str(tmp_path / "raw"))
    found = told_there(decode(raw, "bpmux", engine=engine, partitions=2))
    assert len(found) > 100
    assert found == told_here(tmp_path, engine=engine)


async def test_frames_that_are_cut_by_a_micro_batch_are_joined(tmp_path: Path, spark: SparkSession) -> None:
    await record_sessions(tmp_path / "whole", channels=2, messages=3)
    dice = random.Random(1)
    rows: list[RawRow] = []
    for batch in read_raw(tmp_path / "whole"):
        for row in batch.to_pylist():
            moment, data, offset = row["time"].timestamp(), row["data"], row["offset"]
            cut = dice.randint(0, len(data))
            for start, piece in ((0, data[:cut]), (cut, data[cut:])):
                place = (moment, "test", row["connection"], len(rows))
                rows.append((*place, row["direction"], 0, offset + start, piece))
    folder = tmp_path / "pieces"
    folder.mkdir()
    third = len(rows) // 3 + 1
    schema = spark.read.parquet(str(tmp_path / "whole" / "raw")).schema
    frames = decode_stream(spark.readStream.schema(schema).parquet(str(folder)), "bpmux")
    checkpoint = str(tmp_path / "checkpoint")
    for part in range(3):
        with pq.ParquetWriter(folder / f"{part}.parquet", RAW) as writer:
            writer.write_batch(to_batch("raw", rows[part * third : (part + 1) * third]))
        query = (
            frames.writeStream.format("parquet")
            .option("path", str(tmp_path / "frames"))
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None
    expected = [row[:8] for row in told_here(tmp_path / "whole")]
    assert [row[:8] for row in told_there(spark.read.parquet(str(tmp_path / "frames")))] == expected
