"""How near the Spark source comes to what any source in Python can reach, and the same of its two ends alone.

    python tests/bench/spark_bound.py [lines] [reader] [rows]

`lines`: lines per second from a server to a bare socket, with 100,000 and with 900,000 messages kept. `reader`: rows
per second of what a task does, without Spark. `rows`: rows per second into Spark's `noop` sink, in turn with a source
that yields ready record batches, which is the upper bound; the last column is the ratio to it with as many tasks.
Servers are processes of their own. The processor time of a row is steadier than its rate where other work disturbs.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muxkit.pipeline import spark_session
from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Span
from muxkit.pipeline.source.rows import COLUMNS, SCHEMA, Rows, read
from muxkit_bench.proof.data import stream_names
from tests.bench.spark_source import server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROUNDS: Final = 4  # and one before them that is not counted
KEPT: Final = (100_000, 900_000)
ROWS: Final = {64: 400_000, 4096: 60_000}  # by the bytes of a message's data
READY: Final = 8 << 20  # bytes of a ready batch at most


def measured(count: int, act: Callable[[], object]) -> str:
    """Run several times; return the rates and the processor time of this process."""
    rates, costs = [], []
    for _ in range(ROUNDS):
        began, used = time.perf_counter(), time.process_time()
        act()
        rates.append(count / (time.perf_counter() - began))
        costs.append((time.process_time() - used) / count * 1e6)
    return f"{statistics.median(rates):>9,.0f} a second, best {max(rates):>9,.0f}; {min(costs):.2f} µs of this process"


def lines() -> None:
    for kept in KEPT:
        with server(1, kept) as url:
            host, _, port = url.rpartition("/")[2].rpartition(":")
            asked = {"uuid": stream_names(1)[0], "state": 0, "reader": "", "until": kept}

            def read_all(place: tuple[str, int], request: bytes) -> None:
                with socket.create_connection(place) as stream:
                    stream.sendall(request)
                    while stream.recv(1 << 18):
                        pass

            request = json.dumps(asked).encode() + b"\n"
            print(f"lines, {kept:,} kept: {measured(kept, lambda: read_all((host, int(port)), request))}", flush=True)  # noqa: B023


def reader() -> None:
    for size, count in ROWS.items():
        with server(1, count, size) as url:
            client = Client(SourceOptions.parse({"servers": url, "streams": stream_names(1)[0]}))
            rows, span = Rows(schema_of_all()), Span(stream_names(1)[0], url, 0, count)

            def read_all(client: Client, rows: Rows, span: Span) -> None:
                for _ in read(client, rows, [span], 10_000):
                    pass

            print(f"reader, {size} B: {measured(count, lambda: read_all(client, rows, span))}", flush=True)  # noqa: B023


def schema_of_all() -> pa.Schema:
    nullable = {column.split()[0]: not column.endswith("not null") for column in SCHEMA.split(", ")}
    return pa.schema([pa.field(name, kind, nullable[name]) for name, kind in COLUMNS.items()])


class Ready(DataSource):
    """The upper bound: a source whose tasks yield one ready batch again and again."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return _ReadyReader(*(int(self.options[name]) for name in ("size", "count", "tasks")))


class _ReadyReader(DataSourceReader):
    def __init__(self, size: int, count: int, tasks: int) -> None:
        self._size, self._count, self._tasks = size, count, tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count, left = min(10_000, max(100, READY // self._size)), self._count
        columns: dict[str, Any] = {
            "stream": pa.repeat(pa.scalar("x" * 36), count),
            "id": pa.array(range(count), pa.int64()),
            "time": pa.nulls(count, COLUMNS["time"]),
            "value": pa.array([b"x" * self._size] * count, pa.binary()),
        }
        batch = pa.RecordBatch.from_arrays([*columns.values()], schema=schema_of_all())
        while left > 0:
            yield batch.slice(0, min(count, left))
            left -= count


def rows(spark: SparkSession) -> None:
    spark.dataSource.register(Ready)
    for size, count in ROWS.items():
        with ExitStack() as stack:
            urls = [stack.enter_context(server(1, count, size)) for _ in range(2)]

            def ready(tasks: int, size: int = size, count: int = count) -> DataFrame:
                return spark.read.format("ready").options(size=size, count=count, tasks=tasks).load()

            def ours(servers: int, ranges: int = 1, urls: list[str] = urls, count: int = count) -> DataFrame:
                # The streams of two servers have one uuid, so each frame reads one server.
                options: dict[str, Any] = {
                    "streams": stream_names(1)[0],
                    "maxMessagesPerPartition": -(-count // ranges),
                }
                frames = [spark.read.format("muxkit").options(servers=url, **options).load() for url in urls[:servers]]
                return frames[0] if servers == 1 else frames[0].union(frames[1])

            ways: dict[str, tuple[Callable[[], DataFrame], int, str]] = {
                "ready batches, 1 task": (lambda: ready(1), 1, ""),
                "ready batches, 2 tasks": (lambda: ready(2), 2, ""),
                "one stream": (lambda: ours(1), 1, "ready batches, 1 task"),
                "one stream, two ranges": (lambda: ours(1, 2), 1, "ready batches, 2 tasks"),
                "two servers": (lambda: ours(2), 2, "ready batches, 2 tasks"),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(ROUNDS + 1):
                for name, (frame, times, _) in ways.items():
                    began = time.perf_counter()
                    frame().write.format("noop").mode("overwrite").save()
                    if number:
                        rates[name].append(times * count / (time.perf_counter() - began))
        for name, (_, _, bound) in ways.items():
            found = statistics.median(rates[name])
            ratio = f"  {found / statistics.median(rates[bound]):.2f} of the bound" if bound else ""
            print(f"rows, {size} B, {name}: {found:,.0f} a second, best {max(rates[name]):,.0f}{ratio}", flush=True)


def main() -> None:
    chosen = sys.argv[1:] or ["lines", "reader", "rows"]
    if "lines" in chosen:
        lines()
    if "reader" in chosen:
        reader()
    if "rows" in chosen:
        spark = spark_session(name="muxkit bench")
        rows(spark)
        spark.stop()


if __name__ == "__main__":
    main()
