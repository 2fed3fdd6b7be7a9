"""The job that test_cluster.py submits: what to do is in `task.json`, what came of it in `result.json`.

It runs with the packed environment, so it imports nothing of the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def source(spark: SparkSession, task: dict[str, Any], *, stream: bool = False) -> DataFrame:
    reader: Any = spark.readStream if stream else spark.read
    frame: DataFrame = reader.format("muxkit").options(**task["source"]).load()
    return frame


def look(batches: Iterator[pa.RecordBatch], *, driver: str) -> Iterator[pa.RecordBatch]:
    """Tell for each task where it ran, and whether it sees the driver's files."""
    import pyarrow as pa

    import muxkit

    rows = sum(batch.num_rows for batch in batches)
    told = {
        "cwd": os.getcwd(),
        "python": sys.executable,
        "muxkit": str(Path(muxkit.__file__)),
        "sees": Path(driver, "job.py").exists(),
        "rows": rows,
    }
    yield pa.RecordBatch.from_pylist([{"told": json.dumps(told)}])


def hold(batches: Iterator[pa.RecordBatch], *, gate: str) -> Iterator[pa.RecordBatch]:
    """Pass rows on, but wait in the middle of a task until the file `open` has a number above that of the batch."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    number = int(context.getLocalProperty("streaming.sql.batchId") or -1)
    place = Path(gate)
    for batch in batches:
        held = place / f"held-{number}-{os.getpid()}"
        held.touch()
        while int((place / "open").read_text(encoding="utf-8")) <= number:
            time.sleep(0.02)
        held.unlink(missing_ok=True)
        yield batch


def everything(spark: SparkSession, task: dict[str, Any]) -> dict[str, Any]:
    """Source, sink, captures and fleet, each on the executors."""
    from muxkit import pipeline

    frame = source(spark, task)
    tasks = frame.mapInArrow(partial(look, driver=os.getcwd()), "told string").collect()
    rows = frame.count()
    query = (
        source(spark, task, stream=True)
        .select("value")
        .writeStream.format("muxkit")
        .options(**task["sink"])
        .option("checkpointLocation", task["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.range(1000).selectExpr("string(id) as value").repartition(4).write.format("muxkit").mode("append").options(
        **task["sink"] | {"stream": "batch", "txnId": "one"}
    ).save()
    frames = pipeline.decode(spark.read.parquet(f"{task['captures']}/raw"), "bpmux")
    from muxkit_bench.fleet import run_fleet

    seeds = run_fleet(spark, task["simulation"], range(20), partitions=4)
    return {
        "tasks": [json.loads(row["told"]) for row in tasks],
        "rows": rows,
        "frames": frames.count(),
        "seeds": [bool(row["ok"]) for row in seeds.collect()],
    }


def carry(spark: SparkSession, task: dict[str, Any]) -> dict[str, Any]:
    """From source to sink in many batches, held at a gate in each task."""
    query = (
        source(spark, task, stream=True)
        .select("value")
        .mapInArrow(partial(hold, gate=task["gate"]), "value binary")
        .writeStream.format("muxkit")
        .options(**task["sink"])
        .option("checkpointLocation", task["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return {"batches": query.lastProgress["batchId"] + 1 if query.lastProgress else 0}


def work(batches: Iterator[pa.RecordBatch], *, hashes: int) -> Iterator[pa.RecordBatch]:
    """Hash each value so many times: what a program does with its rows in Python."""
    import pyarrow as pa

    for batch in batches:
        done = []
        for value in batch.column("value").to_pylist():
            for _ in range(hashes):
                value = hashlib.sha256(value).digest()
            done.append(value)
        yield pa.RecordBatch.from_arrays([pa.array(done, pa.binary())], names=["value"])


def rates(spark: SparkSession, task: dict[str, Any]) -> dict[str, Any]:
    """Time passes over the source, warm: read into nothing, with work on each row, and carried to a sink.

    The rows of one pass and the executors that read it are counted first, which also starts the Python of the workers.
    """
    tasks = source(spark, task).mapInArrow(partial(look, driver=os.getcwd()), "told string").collect()
    told = [json.loads(row["told"]) for row in tasks]

    def nothing(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def to_sink(number: int) -> None:
        options = task["sink"] | {"txnId": f"{task['name']} {number}"}
        source(spark, task).select("value").write.format("muxkit").mode("append").options(**options).save()

    seconds: dict[str, list[float]] = {"read": [], "worked": [], "carried": []}
    for number in range(task["passes"]):
        worked = source(spark, task).mapInArrow(partial(work, hashes=task["hashes"]), "value binary")
        for name, act in (
            ("read", partial(nothing, source(spark, task))),
            ("worked", partial(nothing, worked)),
            ("carried", partial(to_sink, number)),
        ):
            began = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - began)
    return {
        "rows": sum(each["rows"] for each in told),
        "executors": len({each["cwd"] for each in told}),
        "seconds": seconds,
    }


def main() -> None:
    from pyspark.sql import SparkSession

    task = json.loads(Path("task.json").read_text(encoding="utf-8"))
    spark = SparkSession.builder.appName("muxkit cluster").getOrCreate()
    try:
        result = {"everything": everything, "carry": carry, "rates": rates}[task["do"]](spark, task)
    finally:
        spark.stop()
    Path("result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
