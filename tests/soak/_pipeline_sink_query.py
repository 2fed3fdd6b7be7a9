"""A streaming query that writes through the sink, and that can be told to fail or to wait at a moment of its work.

`FOLDER URL PARTITIONS` runs it until it is killed. `FOLDER/order.json` says what shall happen at the next such moment,
and once only: `{"id": 3, "at": "prepared", "do": "hang"}`. `FOLDER/happened-3` appears when it does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from muxkit.pipeline import spark_session
from muxkit.pipeline.sink import stream_writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

MOMENTS: Final = ("writing", "prepared", "committing", "committed")
APP: Final = "soak"
STREAM: Final = "numbers"
ROWS: Final = 1000  # of a batch
FAILED: Final = 3  # the exit code when the query has failed
LONGEST: Final = 120.0  # s that anything hangs
LOOK: Final = 0.02  # s


class Injected(Exception):
    """A failure that was ordered."""


class MarkedSource(DataSource):
    """`format("muxkit-marked")`: the sink, with its moments made visible."""

    @classmethod
    def name(cls) -> str:
        return "muxkit-marked"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        options = {name: self.options[name] for name in self.options if name.lower() != "folder"}
        return _Marked(stream_writer(options, schema, overwrite), Path(self.options["folder"]))


class _Marked(DataSourceStreamArrowWriter):
    def __init__(self, inner: DataSourceStreamWriter, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        message = self._inner.write(self._watched(iterator))
        self._reach("prepared")
        return message

    def _watched(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in iterator:
            yield batch
            self._reach("writing")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._reach("committing")
        self._inner.commit([*messages], batchId)
        self._reach("committed")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        (self._folder / "aborts").open("a").write(f"{batchId} {len(messages)}\n")
        self._inner.abort([*messages], batchId)

    def _reach(self, moment: str) -> None:
        order = _order(self._folder)
        if order.get("at") != moment:
            return
        id = order["id"]
        try:
            (self._folder / f"happened-{id}").open("x").close()
        except FileExistsError:
            return
        if order["do"] == "fail":
            raise Injected(f"number {id}, {moment}")
        until, parent = time.monotonic() + LONGEST, os.getppid()
        while not (self._folder / f"release-{id}").exists() and time.monotonic() < until:
            if os.getppid() != parent:  # its Spark was killed
                os._exit(1)
            time.sleep(LOOK)


def _order(folder: Path) -> Mapping[str, object]:
    try:
        found: Mapping[str, object] = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def give_order(folder: Path, id: int, at: str, do: str) -> None:
    """Replace the order atomically, so that a reader sees it whole."""
    fresh = folder / "order.new"
    fresh.write_text(json.dumps({"id": id, "at": at, "do": do}), encoding="utf-8")
    fresh.replace(folder / "order.json")


def main(folder: str, url: str, partitions: str) -> None:
    session = spark_session(name="sink soak", attempts=2)
    session.dataSource.register(MarkedSource)
    numbers = (
        session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 1).load()
    )
    query = (
        numbers.repartition(int(partitions))
        .selectExpr("cast(value as string) value")
        .writeStream.format("muxkit-marked")
        .option("folder", folder)
        .option("url", url)
        .option("stream", STREAM)
        .option("txnAppId", APP)
        .option("patience", "60s")
        .option("windowBytes", "4k")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )
    try:
        query.awaitTermination()
    except Exception as error:
        if Injected.__name__ not in str(error):
            raise
        print(f"the query failed: {str(error)[:100]}", file=sys.stderr)
        # Not in order: nothing more may be said to the server than the query has said itself.
        os._exit(FAILED)


if __name__ == "__main__":
    main(*sys.argv[1:])
