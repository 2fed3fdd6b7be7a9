"""Queries that share streams in Spark: one that only looks, and one that goes on while a server is away.

    python -m tests.soak.pipeline_watching [--batches 1000] [--away 60]

First one of two servers is stopped for a minute: the rows of the other go on, and those of the first come when it is
back. Then two readers with a name of their own have one stream in batches of five messages, the second of them slowly:
each must have every message once, in order, though the first one acknowledges them. Ends with 1 if a row was missing,
repeated or out of order.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muxkit import pipeline
from tests.pipeline._source_servers import ONE, TWO, Hall, hall

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OF_A_BATCH: Final = 5  # messages
PATIENCE: Final = 300.0  # s


class Rows:
    """The ids that one query has seen, by stream, with the moments of its batches."""

    def __init__(self, pause: float = 0.0) -> None:
        self.ids: dict[str, list[int]] = {ONE: [], TWO: []}
        self.batches = 0
        self._pause = pause  # s, after each batch

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.batches += 1
        for row in sorted(frame.select("stream", "id").collect()):
            self.ids[row["stream"]].append(row["id"])
        time.sleep(self._pause)

    def wait(self, stream: str, count: int) -> None:
        """Wait until so many rows of a stream have come."""
        until = time.monotonic() + PATIENCE
        while len(self.ids[stream]) < count:
            assert time.monotonic() < until, f"{len(self.ids[stream])} of {count} rows of {stream}"
            time.sleep(0.05)

    def check(self, stream: str, count: int) -> None:
        """Fail unless each row of a stream came once and in order."""
        first = self.ids[stream][0]
        assert self.ids[stream] == [*range(first, first + count)], f"{stream}: missing, repeated or out of order"


def start(spark: SparkSession, rows: Rows, checkpoint: Path, **options: str) -> StreamingQuery:
    frame = spark.readStream.format("muxkit").options(**options).load()
    return frame.writeStream.foreachBatch(rows).option("checkpointLocation", str(checkpoint)).start()


def two_queries(spark: SparkSession, folder: Path, batches: int) -> None:
    """One does the work, one only looks, and is slower."""
    count = batches * OF_A_BATCH
    with hall() as there:
        there.feed(ONE, [{"n": n} for n in range(count)])
        for name in ("billing", "dashboard"):  # from here on each has a position, and nothing goes before both have it
            there.do(there.store.advance, ONE, name)
        options = {"servers": there.url, "streams": ONE, "maxMessagesPerTrigger": str(OF_A_BATCH)}
        billing, dashboard = Rows(), Rows(pause=0.1)
        began = time.monotonic()
        looks = start(spark, dashboard, folder / "dashboard", **options, reader="dashboard")
        works = start(spark, billing, folder / "billing", **options, reader="billing")
        try:
            for rows in (billing, dashboard):
                while len(rows.ids[ONE]) < count:
                    rows.wait(ONE, len(rows.ids[ONE]) + 1)
        finally:
            looks.stop()
            works.stop()
        for rows in (billing, dashboard):
            rows.check(ONE, count)
        kept = there.do(there.store.status, ONE)
        print(
            f"two queries on one stream: {billing.batches:,} and {dashboard.batches:,} batches in "
            f"{time.monotonic() - began:.0f} s, {count:,} rows in each, once and in order; "
            f"read by {kept.readers}, {kept.acknowledged:,} deleted",
            flush=True,
        )


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_away(spark: SparkSession, folder: Path, seconds: float) -> None:
    """Stop one of two servers, and start it again with its store."""
    address, place = f"restream+tcp://127.0.0.1:{unused_port()}", f"sqlite:{folder / 'sessions.db'}"
    fed = {ONE: 0, TWO: 0}

    def feed(there: Hall, uuid: str, count: int) -> None:
        there.feed(uuid, [{"n": n} for n in range(count)])
        fed[uuid] += count

    rows = Rows()
    with hall() as steady, ExitStack() as first:
        away = first.enter_context(hall(address, store=place))
        feed(steady, ONE, 100)
        feed(away, TWO, 100)
        options = {"servers": f"{steady.url} {address}", "streams": f"{ONE} {TWO}", "statusTimeout": "2s"}
        query = start(spark, rows, folder / "away", **options)
        try:
            rows.wait(ONE, 100)
            rows.wait(TWO, 100)
            first.close()
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                feed(steady, ONE, 10)
                rows.wait(ONE, fed[ONE])
                time.sleep(0.5)
            meanwhile = fed[ONE] - 100
            assert query.isActive
            with hall(address, store=place) as back:
                feed(back, TWO, 100)
                again = time.monotonic()
                rows.wait(TWO, 200)
                took = time.monotonic() - again
        finally:
            query.stop()
    for stream in (ONE, TWO):
        rows.check(stream, fed[stream])
    print(
        f"a server away for {seconds:g} s: {meanwhile:,} rows of the other came meanwhile, those of the first "
        f"{took:.1f} s after it was back; {sum(fed.values()):,} rows, each once and in order",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--away", type=float, default=60.0)
    options = parser.parse_args()
    spark = pipeline.spark_session()
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        server_away(spark, Path(folder), options.away)
        two_queries(spark, Path(folder), options.batches)
    spark.stop()


if __name__ == "__main__":
    main()
