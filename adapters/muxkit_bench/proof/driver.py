"""The Spark driver of the proof: a query into Parquet that can be held at marked moments, and killed there.

A moment is held while a file of its name is in the folder `hold`; each process that is held there has a file in `held`
for that time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource

from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source import spark as source
from muxkit.pipeline.spark import spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from muxkit.pipeline.source.readers import StreamReader as Reader
else:
    Reader = source.reader_class()

MOMENTS: Final = ("start", "planned", "before-read", "mid-read", "after-sink", "before-ack", "after-ack")
"""Spark has started; an end is planned; it is written to the log; some rows are read; the sink has the batch, and Spark
has not noted it; an acknowledgement is due; it is done."""
LOOK: Final = 0.02  # s between two looks at the folder `hold`


def pass_by(folder: Path, moment: str) -> None:
    """Wait here while this moment is held."""
    wanted = folder / "hold" / moment
    if wanted.exists():
        held = folder / "held" / f"{moment}.{os.getpid()}"
        held.touch()
        while wanted.exists():
            time.sleep(LOOK)
        held.unlink(missing_ok=True)


class HeldReader(Reader):
    """The reader of the source, with the moments."""

    def __init__(self, options: SourceOptions, schema: StructType, folder: Path) -> None:
        super().__init__(options, schema)
        self._folder = folder
        self._last: object = None

    def latestOffset(self, *told: Any) -> dict[str, object]:
        end = super().latestOffset(*told)
        if end != self._last:
            pass_by(self._folder, "planned")
        self._last = end
        return end

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[InputPartition]:
        pass_by(self._folder, "before-read")
        return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = super().read(partition)
        for batch in rows:
            yield batch
            pass_by(self._folder, "mid-read")

    def commit(self, end: dict[str, object]) -> None:
        pass_by(self._folder, "before-ack")
        super().commit(end)
        pass_by(self._folder, "after-ack")


class HeldSource(DataSource):
    """The data source of the proof, registered by name."""

    @classmethod
    def name(cls) -> str:
        return "muxkit-held"

    def schema(self) -> str:
        return source.schema(self._given())

    def streamReader(self, schema: StructType) -> HeldReader:
        return HeldReader(SourceOptions.parse(self._given()), schema, Path(self.options["folder"]))

    def _given(self) -> dict[str, str]:
        return {name: value for name, value in self.options.items() if name.lower() != "folder"}


def run(folder: Path, sink: str, options: dict[str, str]) -> None:
    """Run the query until standard input is closed; print its events on standard output."""
    spark = spark_session(name="muxkit proof", config={"spark.local.dir": str(folder / "local")})
    spark.dataSource.register(HeldSource)
    pass_by(folder, "start")
    frame = spark.readStream.format("muxkit-held").options(folder=str(folder), **options).load()
    out = folder / "out"

    def store(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(out / f"batch={number}"))
        pass_by(folder, "after-sink")

    writer = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    to_files = sink == "file"
    writer = writer.format("parquet").option("path", str(out)) if to_files else writer.foreachBatch(store)
    query = writer.trigger(processingTime="0 seconds").start()
    print(json.dumps({"event": "started"}), flush=True)
    sys.stdin.read()
    error = query.exception()
    if error is not None:
        print(json.dumps({"event": "failed", "why": str(error)}), flush=True)
        sys.exit(1)
    query.stop()
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sink", choices=["file", "batches"], required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    options = parser.parse_args()
    run(options.folder, options.sink, options.options)


if __name__ == "__main__":
    # As a module of its name: what Spark pickles out of `__main__` other processes could not import.
    from muxkit_bench.proof import driver

    driver.main()
