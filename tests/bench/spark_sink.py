"""Rows per second of the sink and the time of a commit, beside Spark's own sink that keeps nothing.

    python tests/bench/spark_sink.py [--no-spark] [--servers] [--rows 400000]

The server is a process of its own, with its store in a file. Each figure is the median of the rounds, with the least
and the most. Of rows of 4 KiB there are so many fewer that the bytes are about the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from muxkit.pipeline import Encoding, Key, StagingClient, make_block, spark_session  # noqa: E402 - found by now
from tests.pipeline._staging_process import staging_process  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from muxkit.pipeline.staging.records import Block

ROUNDS: Final = 5
COMMITS: Final = 200
SIZES: Final = (64, 4096)
FEWER: Final = 50  # times, of the larger ones
BLOCK: Final = 128 << 10


class Prepared:
    """The same block again and again, each time as the rows that follow."""

    def __init__(self, rows: int, size: int) -> None:
        self._left = rows
        self._first = 0
        self._at_once = max(1, BLOCK // size)
        self._block = make_block(0, [b"x" * size] * self._at_once)

    def __aiter__(self) -> Prepared:
        return self

    async def __anext__(self) -> Block:
        if self._left < self._at_once:
            raise StopAsyncIteration
        self._left -= self._at_once
        block = self._block._replace(first=self._first)
        self._first += self._at_once
        return block


def told(name: str, seconds: list[float], rows: int, size: int) -> None:
    rates = sorted(rows / each for each in seconds)
    middle = statistics.median(rates)
    print(
        f"{name:<44} {middle:>11,.0f} rows/s ({rates[0]:,.0f} to {rates[-1]:,.0f})  {middle * size / 1e6:7.1f} MB/s",
        flush=True,
    )


def alone(url: str, rows: int) -> None:
    """Clients without Spark, in this one process."""

    async def write(size: int, writers: int, batch: int, count: int, parts: dict[str, int]) -> None:
        client, txn = StagingClient(url), f"{size} {writers} {batch} {len(parts)}"
        parts[txn] = 0
        written = await client.write(
            txn, Key("alone", f"{size} {writers}"), batch, Prepared(count // writers, size), encoding=Encoding.BINARY
        )
        parts[txn] = written.rows

    async def main() -> None:
        for size in SIZES:
            count = rows if size == SIZES[0] else rows // FEWER
            for writers in (1, 4):
                seconds = []
                for batch in range(ROUNDS):
                    parts: dict[str, int] = {}
                    began = time.perf_counter()
                    async with trio.open_nursery() as nursery:
                        for _ in range(writers):
                            nursery.start_soon(write, size, writers, batch, count, parts)
                            await trio.lowlevel.checkpoint()
                    await StagingClient(url).commit(Key("alone", f"{size} {writers}"), batch, parts)
                    seconds.append((time.perf_counter() - began) * count / sum(parts.values()))
                told(f"no Spark, {size} B, {writers} writers", seconds, count, size)
        await commits()

    async def commits() -> None:
        key = Key("alone", "commits")
        client, took = StagingClient(url), []
        for batch in range(COMMITS):
            parts = {}
            for part in range(4):
                txn = f"{batch} {part}"
                parts[txn] = (await client.write(txn, key, batch, Prepared(2048, 64), encoding=Encoding.BINARY)).rows
            began = time.perf_counter()
            await client.commit(key, batch, parts)
            took.append(1000 * (time.perf_counter() - began))
        took.sort()
        print(
            f"commit of 4 partitions, with its connection: p50 {took[len(took) // 2]:.1f} ms, "
            f"p99 {took[int(0.99 * len(took))]:.1f} ms, n={COMMITS}",
            flush=True,
        )

    trio.run(main)


def with_spark(session: SparkSession, url: str, rows: int) -> None:
    for size in SIZES:
        count = rows if size == SIZES[0] else rows // FEWER
        frame = session.range(0, count, 1, 4).selectExpr(f"rpad(cast(id as string), {size}, 'x') value").cache()
        frame.count()
        for name, write in sinks(frame, url).items():
            write()  # warm
            seconds = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                write()
                seconds.append(time.perf_counter() - began)
            told(f"Spark, {size} B, 4 partitions, {name}", seconds, count, size)
        frame.unpersist()
    for name in ("noop", "muxkit"):
        triggers(session, name, url)


def sinks(frame: DataFrame, url: str) -> dict[str, Callable[[], None]]:
    return {
        "noop": lambda: frame.write.format("noop").mode("append").save(),
        "muxkit": lambda: frame.write.format("muxkit").mode("append").option("url", url).save(),
        "muxkit, encoding json": (
            lambda: frame.write.format("muxkit").mode("append").option("url", url).option("encoding", "json").save()
        ),
    }


def over_servers(session: SparkSession, rows: int) -> None:
    """The partitions of a frame over one, two and four servers, each with a store of its own."""
    for size in SIZES:
        count = rows if size == SIZES[0] else rows // FEWER
        frame = session.range(0, count, 1, 4).selectExpr(f"rpad(cast(id as string), {size}, 'x') value").cache()
        frame.count()
        for number in (1, 2, 4):
            with tempfile.TemporaryDirectory(prefix="muxkit-") as folder, ExitStack() as stack:
                servers = [
                    stack.enter_context(staging_process(f"sqlite:{folder}/{each}.db", "bpmux+tcp://127.0.0.1:0"))
                    for each in range(number)
                ]
                for each in servers:
                    each.start()
                writer = frame.write.format("muxkit").mode("append")
                writer = writer.options(urls=" ".join(each.url for each in servers), spread="partitions")
                writer.save()  # warm
                seconds = []
                for _ in range(ROUNDS):
                    began = time.perf_counter()
                    writer.save()
                    seconds.append(time.perf_counter() - began)
                told(f"Spark, {size} B, 4 partitions, {number} servers", seconds, count, size)
        frame.unpersist()


def triggers(session: SparkSession, name: str, url: str) -> None:
    """How long a small batch of a streaming query takes."""
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
        numbers = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000)
        writer = numbers.option("numPartitions", 2).load().selectExpr("cast(value as string) value").writeStream
        writer = writer.format(name).option("checkpointLocation", f"{folder}/checkpoint")
        query = (writer.option("url", url) if name == "muxkit" else writer).start()
        while query.lastProgress is None or query.lastProgress["batchId"] < 40:
            assert query.isActive, query.exception()
            time.sleep(0.1)
        recent = [each["durationMs"] for each in query.recentProgress if each["batchId"] >= 10]
        query.stop()
    for part in ("triggerExecution", "addBatch"):
        took = sorted(each[part] for each in recent)
        print(
            f"streaming, 1,000 rows a batch, {name}, {part}: p50 {took[len(took) // 2]} ms, most {took[-1]} ms, "
            f"n={len(took)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--servers", action="store_true", help="only: the sink with one, two and four servers")
    options = parser.parse_args()
    if options.servers:
        over_servers(spark_session(name="sink"), options.rows)
        return
    for protocol in ("bpmux", "relink"):
        with tempfile.TemporaryDirectory(prefix="muxkit-") as folder:
            with staging_process(f"sqlite:{folder}/staged.db", f"{protocol}+tcp://127.0.0.1:0") as server:
                server.start()
                print(f"{protocol}, store in {folder}")
                alone(server.url, options.rows)
                if not options.no_spark and protocol == "bpmux":
                    with_spark(spark_session(name="sink"), server.url, options.rows)


if __name__ == "__main__":
    main()
