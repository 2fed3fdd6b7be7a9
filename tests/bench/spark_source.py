"""The speed of the Spark source: rows per second, the time to a row, and a thousand sessions.

    python tests/bench/spark_source.py [rows] [hot] [latency] [sessions] [planning]

The server is a process of its own with its sessions in memory. `rows`: the same streams are read by a plain reader in
Python (`restream.stream`, one task for each stream, in one process), and by Spark on two cores into nothing, warm.
`latency`: from the moment at which a message is appended until `foreachBatch` has it. `sessions`: what planning costs.
`planning`: how long a trigger plans, and how long each of its other parts takes, as Spark tells it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from muxkit import Limits
from muxkit.pipeline import spark_session
from muxkit.protocols import restream
from muxkit_bench.proof.data import stream_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

KEEP = 24 * 3600.0
ROUNDS = 3
ROWS = {64: 400_000, 4096: 60_000}  # by the bytes of a message's data
SAMPLES = 60  # batches that are timed
IDLE, LOADED = (1, 1.0), (100, 0.02)  # messages at once, s until the next
SESSIONS = 1000
PLANNED = 18  # batches whose parts are timed, the first two of them cold


# ---------------------------------------------------------------------------- the server


async def serve(streams: int, count: int, size: int, at_once: int, pause: float) -> None:
    """`count` messages of `size` bytes in each stream; then, with a pause, more of them, that say when they came."""
    data = "x" * (size - 2)
    limits = Limits(connections=4096, half_open=4096)
    async with restream.open_store("memory:", keep=KEEP) as store, trio.open_nursery() as nursery:
        names = stream_names(streams)
        for name in names:
            await store.register(name, {}, params={}, attached=False)
            for first in range(0, count, 1000):
                await store.append_many(name, [data] * min(1000, count - first))
        served: restream.Served = await nursery.start(
            partial(
                restream.serve,
                "restream+tcp://127.0.0.1:0",
                store,
                application=restream.Fed(),
                config=restream.ServerConfig(status=True),
                limits=limits,
            )
        )
        print(served.url, flush=True)
        while pause:
            await trio.sleep(pause)
            for name in names:
                await store.append_many(name, [{"at": time.time()}] * at_once)


@contextmanager
def server(streams: int, count: int, size: int = 64, at_once: int = 0, pause: float = 0.0) -> Iterator[str]:
    arguments = [streams, count, size, at_once, pause]
    command = [sys.executable, __file__, "--serve", json.dumps(arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


# ---------------------------------------------------------------------------- rows


def plain_reader(url: str, streams: int, count: int) -> float:
    """Seconds that a program without Spark takes to have every message."""
    policy = restream.ClientPolicy(ahead=1024)

    async def one(name: str) -> None:
        config = restream.ClientConfig(ack_every=None)
        async with restream.stream(url, uuid=name, config=config, policy=policy) as messages:
            for _ in range(count):
                await messages.receive()

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for name in stream_names(streams):
                nursery.start_soon(one, name)

    began = time.perf_counter()
    trio.run(all_of_them)
    return time.perf_counter() - began


def spark_reader(spark: SparkSession, url: str, streams: int, **options: int) -> float:
    names = " ".join(stream_names(streams))
    frame = spark.read.format("muxkit").options(servers=url, streams=names, **options).load()
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def rows(spark: SparkSession) -> None:
    print(
        f"{'data':>6} {'streams':>8} {'rows':>8} {'Python rows/s':>22} {'Spark rows/s':>22} {'Spark MB/s':>11}  ratio"
    )
    for size, whole in ROWS.items():
        for streams in (1, 4, 16):
            count = whole // streams
            with server(streams, count, size) as url:
                spark_reader(spark, url, streams)  # warm
                ours = sorted(whole / spark_reader(spark, url, streams) for _ in range(ROUNDS))
                plain = sorted(whole / plain_reader(url, streams, count) for _ in range(ROUNDS))
            best, other = statistics.median(ours), statistics.median(plain)
            print(
                f"{size:>6} {streams:>8} {whole:>8,} {_spread(plain):>22} {_spread(ours):>22} "
                f"{best * size / 1e6:>11.1f}  {best / other:.2f}",
                flush=True,
            )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({values[0]:,.0f}–{values[-1]:,.0f})"


def hot(spark: SparkSession) -> None:
    print("one stream in so many ranges: rows a second, median (least to most)")
    for size, whole in ROWS.items():
        with server(1, whole, size) as url:
            for ranges in (1, 2, 4):
                options = {"minPartitions": ranges, "maxMessagesPerPartition": whole}
                spark_reader(spark, url, 1, **options)  # warm
                rates = sorted(whole / spark_reader(spark, url, 1, **options) for _ in range(ROUNDS))
                print(f"{size:>6} B {whole:>8,} rows {ranges} ranges {_spread(rates):>30}", flush=True)


# ---------------------------------------------------------------------------- latency


def latency(spark: SparkSession) -> None:
    print("append to foreachBatch, and whole triggers, in ms: p50 / p99")
    for name, (at_once, pause) in {"idle": IDLE, "loaded": LOADED}.items():
        with server(1, 0, at_once=at_once, pause=pause) as url, tempfile.TemporaryDirectory() as folder:
            told = one_query(spark, url, folder)
        newest, oldest, triggers, count = told
        print(
            f"{name:>7} ({at_once / pause:,.0f} messages/s, {count:,} in {len(newest)} batches): the newest row "
            f"{_percentiles(newest)}, the oldest {_percentiles(oldest)}, trigger {_percentiles(triggers)}",
            flush=True,
        )


def one_query(spark: SparkSession, url: str, folder: str) -> tuple[list[float], list[float], list[float], int]:
    newest: list[float] = []
    oldest: list[float] = []
    counts: list[int] = []

    def take(batch: DataFrame, number: int) -> None:
        values = [json.loads(row.value) for row in batch.select("value").collect()]
        now = time.time()
        if number >= 5 and values:  # the first ones are cold
            ages = [now - value["at"] for value in values]
            newest.append(min(ages))
            oldest.append(max(ages))
            counts.append(len(ages))

    frame = spark.readStream.format("muxkit").options(servers=url, streams=stream_names(1)[0]).load()
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", folder).start()
    triggers: dict[int, float] = {}
    while len(newest) < SAMPLES and query.isActive:
        time.sleep(0.2)
        triggers.update(
            (each.batchId, each.durationMs["triggerExecution"] / 1000)
            for each in query.recentProgress
            if each.numInputRows and each.batchId >= 5
        )
    query.stop()
    return newest, oldest, [*triggers.values()], sum(counts)


def _percentiles(values: Sequence[float]) -> str:
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49] * 1000:.0f} / {cuts[98] * 1000:.0f}"


# ---------------------------------------------------------------------------- many sessions


def sessions(spark: SparkSession) -> None:
    with server(SESSIONS, 3, at_once=1, pause=2.0) as url:
        for most in (None, 8):
            with tempfile.TemporaryDirectory() as folder:
                _sessions(spark, url, folder, most)


def _sessions(spark: SparkSession, url: str, folder: str, most: int | None) -> None:
    options: dict[str, Any] = {"servers": url, "streams": " ".join(stream_names(SESSIONS)), "ackMode": "never"}
    if most is not None:
        options["maxPartitions"] = most
    frame = spark.readStream.format("muxkit").options(**options).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
    progress: dict[int, Any] = {}
    while len(progress) < (3 if most is None else 8) and query.isActive:
        time.sleep(0.2)
        progress.update((each.batchId, each) for each in query.recentProgress if each.numInputRows)
    query.stop()
    warm = [progress[number] for number in sorted(progress)[1:]]
    planning = sorted(each.durationMs["latestOffset"] for each in warm)
    added = sorted(each.durationMs["addBatch"] for each in warm)
    size = len((Path(folder) / "offsets" / str(max(progress))).read_text(encoding="utf-8"))
    print(
        f"{SESSIONS} sessions in {most or SESSIONS} partitions: planning {planning[0]}–{planning[-1]} ms, "
        f"a batch of {warm[0].numInputRows} rows {added[0]}–{added[-1]} ms, an offset {size:,} bytes",
        flush=True,
    )


# ---------------------------------------------------------------------------- planning beside the rest of a trigger


def planning(spark: SparkSession) -> None:
    print(f"{SESSIONS} sessions in 8 partitions: median ms of each part of a trigger, with its share of the sum")
    for name, count, options in (
        ("one new message in each session every 2 s", 3, {}),
        ("behind, 10,000 messages in each batch", 200, {"maxMessagesPerTrigger": 10_000}),
        ("behind, 50,000 messages in each batch", 1000, {"maxMessagesPerTrigger": 50_000}),
    ):
        pause = 0.0 if options else 2.0
        with server(SESSIONS, count, at_once=1, pause=pause) as url, tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {_parts_of_a_trigger(spark, url, folder, options)}", flush=True)


def _parts_of_a_trigger(spark: SparkSession, url: str, folder: str, options: dict[str, int]) -> str:
    names = " ".join(stream_names(SESSIONS))
    given: dict[str, Any] = {"servers": url, "streams": names, "reader": "bench", "maxPartitions": 8, **options}
    frame = spark.readStream.format("muxkit").options(**given).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
    progress: dict[int, dict[str, int]] = {}
    while len(progress) < PLANNED and query.isActive:
        time.sleep(0.2)
        progress.update((each.batchId, each.durationMs) for each in query.recentProgress if each.numInputRows)
    query.stop()
    warm = [progress[number] for number in sorted(progress)[2:]]
    whole = sum(each["triggerExecution"] for each in warm)
    parts = sorted({part for each in warm for part in each})
    return f"{len(warm)} triggers, " + ", ".join(
        f"{part} {statistics.median(each.get(part, 0) for each in warm):g} "
        f"({sum(each.get(part, 0) for each in warm) / whole:.1%})"
        for part in parts
    )


def main() -> None:
    if "--serve" in sys.argv:
        trio.run(serve, *json.loads(sys.argv[-1]))
        return
    chosen = sys.argv[1:] or ["rows", "hot", "latency", "sessions", "planning"]
    spark = spark_session(name="muxkit bench")
    for each in chosen:
        {"rows": rows, "hot": hot, "latency": latency, "sessions": sessions, "planning": planning}[each](spark)
    spark.stop()


if __name__ == "__main__":
    main()
