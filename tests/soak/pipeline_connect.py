"""Source, sink, captures and fleet through Spark Connect.

    pip install 'pyspark[connect]==4.3.*'
    python -m tests.soak.pipeline_connect [--rows 20000] [--server cluster process inside sc://HOST:PORT]

`process` starts Spark's own `start-connect-server.sh`, a process that knows nothing of this one; `cluster` starts it on
a standalone cluster, with an environment at one path for server and executors; `inside` has pyspark start a server
in a JVM below this process; a URL is that of a server that runs on this machine. Each line tells what was
tried, with its figures. What fails does not stop the rest; ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from muxkit import pipeline
from muxkit.pipeline.spark import environment
from muxkit_bench.fleet import run_fleet
from tests.pipeline._captures import assert_same, record_sessions
from tests.pipeline._cluster import SMALL, cluster, until
from tests.pipeline._source_servers import ONE, TWO, hall
from tests.pipeline._staging_thread import staging_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession


class Tried:
    """What was tried, and how often it failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, name: str, act: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            said = act()
        except Exception as error:  # whatever fails, the rest is tried
            self.failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error).strip()[:600]}"
        print(f"{name:28}{time.perf_counter() - began:7.1f} s  {said}", flush=True)


@contextmanager
def connected(server: str, folder: Path) -> Iterator[SparkSession]:
    """Connect to a server, which is started unless this is its URL; both are stopped with the block."""
    from pyspark.sql import SparkSession

    with ExitStack() as stack:
        url = server
        if server == "inside":
            os.environ.update(environment())
            url = "local[2]"
        elif server == "process":
            url = stack.enter_context(server_process(folder, "local[2]", os.environ | environment()))
        elif server == "cluster":
            url = stack.enter_context(server_on_cluster(folder))
        spark: SparkSession = SparkSession.builder.remote(url).getOrCreate()
        stack.callback(spark.stop)
        spark.conf.set("spark.sql.shuffle.partitions", "2")
        yield spark


@contextmanager
def server_on_cluster(folder: Path) -> Iterator[str]:
    """Start a master, two workers and a Connect server, with one environment at one path; gives the server's URL.

    A relative path would not do: the tasks of a Connect session run in a folder of its own, without Spark's archives.
    """
    with cluster(folder) as machines:
        env, place = folder / "env", machines.driver / "connect"  # the workers see the latter empty
        shutil.unpack_archive(machines.archive, env, filter="fully_trusted")
        place.mkdir()
        variables = machines.environment(PYSPARK_PYTHON=str(env / "bin" / "python"), SPARK_DAEMON_MEMORY="1g")
        with server_process(place, machines.url, variables, **SMALL) as url:
            yield url


@contextmanager
def server_process(folder: Path, master: str, variables: Mapping[str, str], **config: str) -> Iterator[str]:
    """Start Spark's Connect server by its own script; gives its URL."""
    import pyspark

    home, log = Path(pyspark.__file__).parent, folder / "server.log"
    command = [str(home / "sbin" / "start-connect-server.sh"), "--wait", "--master", master]
    config |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": "0"}
    for name, value in config.items():
        command += ["--conf", f"{name}={value}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", *command],
            env={**variables, "SPARK_HOME": str(home), "SPARK_LOG_DIR": str(folder), "SPARK_PID_DIR": str(folder)},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        started = re.compile(r"Spark Connect server started at: \S+?:(\d+)")
        until(lambda: started.search(log.read_text()) or process.poll() is not None, f"a Connect server ({log})")
        found = started.search(log.read_text())
        assert found is not None, f"the Connect server ended: {log.read_text()[-3000:]}"
        yield f"sc://127.0.0.1:{found[1]}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def equal(found: object, wanted: object) -> None:
    """Fail with both if they differ."""
    if found != wanted:
        raise AssertionError(f"{found} in place of {wanted}")


def run(spark: SparkSession, folder: Path, rows: int) -> int:
    """Try everything; returns how much of it failed."""
    tried = Tried()
    trio.run(record_sessions, folder / "captures")
    with hall() as there, staging_thread() as staging:
        for uuid in (ONE, TWO):
            there.feed(uuid, [{"n": n} for n in range(rows)])
        options = {"servers": there.url, "streams": f"{ONE} {TWO}"}
        sink = {"url": staging.url, "stream": "orders"}

        def batch() -> str:
            frame = spark.read.format("muxkit").options(**options).load()
            equal(frame.count(), 2 * rows)
            return f"{2 * rows:,} rows"

        def stream_to_files() -> str:
            frame = spark.readStream.format("muxkit").options(**options, maxMessagesPerTrigger=str(rows // 5)).load()
            place = str(folder / "rows")
            query = finished(frame, "parquet", folder / "one", {"path": place})
            written = spark.read.parquet(place)
            equal(written.count(), 2 * rows)
            equal(written.select("stream", "id").distinct().count(), 2 * rows)
            return f"{2 * rows:,} rows, each once, in {query} batches"

        def stream_to_sink() -> str:
            frame = spark.readStream.format("muxkit").options(**options).load().select("value")
            finished(frame, "muxkit", folder / "two", sink)
            equal(staging.ask(partial(pipeline.Staging.head, stream="orders")), 2 * rows)
            return f"{2 * rows:,} rows from source to sink"

        def batch_to_sink() -> str:
            frame = spark.range(rows).selectExpr("string(id) as value").repartition(4)
            for _ in range(2):  # the second is the same transaction again
                frame.write.format("muxkit").mode("append").options(**sink | {"stream": "b", "txnId": "one"}).save()
            equal(staging.ask(partial(pipeline.Staging.head, stream="b")), rows)
            return f"{rows:,} rows, written twice with one txnId, there once"

        def lag() -> str:
            frame = spark.readStream.format("muxkit").options(**options).load()
            query = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "three")).start()
            try:
                query.processAllAvailable()
                equal(pipeline.lag(query.lastProgress), {ONE: 0, TWO: 0})
            finally:
                query.stop()
            return "nothing behind"

        def lag_table() -> str:
            frame = spark.readStream.format("muxkit").options(**options).load()
            query = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "four")).start()
            try:
                query.processAllAvailable()
                told = pipeline.lag_table(spark).collect()
            finally:
                query.stop()
            equal(len(told), 2)
            return f"{len(told)} streams"

        def observed() -> str:
            frame = pipeline.observed(spark.readStream.format("muxkit").options(**options).load())
            finished(frame, "noop", folder / "five", {})
            return "the query ends"

        def decoded() -> str:
            raw = pipeline.read_captures(spark, folder / "captures", "raw")
            return f"{pipeline.decode(raw, 'bpmux').count():,} frames"

        def analysed() -> str:
            here = pipeline.analyse(folder / "captures")
            assert_same(here, pipeline.analyse(folder / "captures", spark=spark))
            return "the same answers as DuckDB here"

        def fleet() -> str:
            equal([row["ok"] for row in run_fleet(spark, "relink", range(100)).collect()], [True] * 100)
            return "100 seeds"

        for act in (
            batch, stream_to_files, stream_to_sink, batch_to_sink, lag, lag_table, observed, decoded, analysed, fleet,
        ):  # fmt: skip
            tried(act.__name__, act)
    return tried.failed


def finished(frame: DataFrame, sink: str, checkpoint: Path, options: dict[str, str]) -> int:
    """Run a query over what there is; returns how many batches it had."""
    query = (
        frame.writeStream.format(sink)
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return len(query.recentProgress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--server", nargs="+", default=["cluster", "process", "inside"])
    options = parser.parse_args()
    if find_spec("grpc") is None:  # no extra of muxkit installs it
        print("left out: pyspark[connect] is not installed")
        return
    failed = 0
    for server in options.server:
        with tempfile.TemporaryDirectory(prefix="muxkit-") as place:
            folder = Path(place)
            with connected(server, folder) as spark:
                print(f"{server}: Spark {spark.version} by {type(spark).__module__}", flush=True)
                failed += run(spark, folder, options.rows)
    print(f"{failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
