"""Rows a second on a standalone Spark cluster with one worker and with two, in turn, in one run.

    python -m tests.soak.pipeline_cluster [--rounds 3] [--passes 3] [--streams 4] [--hashes 50]

A master and workers of one core each are processes, and so are the server that is read and the one that is written.
Each round submits a job to one worker, starts the second, submits the job again and kills the second. A job reads all
rows into nothing, reads them with work in Python on each row, and carries them to the sink. Ends with 1 if a pass had
not all rows, did not use each worker, or the sink has not each of its rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from muxkit.pipeline import open_staging
from muxkit_bench.proof.data import stream_names
from tests.bench.spark_source import server
from tests.pipeline._cluster import Cluster, cluster
from tests.pipeline._staging_process import staging_process

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS: Final = {64: 400_000, 4096: 60_000}  # by the bytes of a message's data
NAMES: Final = {"read": "read", "worked": "read, with work on each row", "carried": "read and carried to the sink"}


async def head(store: str) -> int:
    async with open_staging(store) as staging:
        return await staging.head("rates")


class Rates:
    """What one size of messages gives, with one worker and with two."""

    def __init__(self, machines: Cluster, options: argparse.Namespace, size: int) -> None:
        self._machines = machines
        self._options = options
        self._size = size
        self._whole = ROWS[size] // options.streams * options.streams
        self._passes: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in NAMES}

    def measure(self, folder: Path) -> None:
        """Run all rounds, and check what the sink has."""
        options, store = self._options, f"sqlite:{folder / f'staged-{self._size}.db'}"
        with (
            server(options.streams, self._whole // options.streams, self._size) as url,
            staging_process(store) as staging,
        ):
            staging.start()
            for number in range(options.rounds):
                self._job(f"round {number}", 1, url, staging.url)
                self._machines.start_worker()
                self._job(f"round {number}, again", 2, url, staging.url)
                self._machines.kill_worker(self._machines.workers[-1].pid)
        found, wanted = trio.run(head, store), 2 * options.rounds * options.passes * self._whole
        assert found == wanted, f"{found:,} rows in the sink of {wanted:,}"

    def _job(self, name: str, workers: int, url: str, sink: str) -> None:
        task = {
            "do": "rates",
            "name": name,
            "source": {
                "servers": url,
                "streams": " ".join(stream_names(self._options.streams)),
                "maxMessagesPerPartition": str(self._whole),
            },
            "sink": {"url": sink, "stream": "rates"},
            "passes": self._options.passes,
            "hashes": self._options.hashes,
        }
        config = {
            "spark.cores.max": str(workers),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # no pass begins before each worker has its executor
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "10m",
        }
        with self._machines.submitted(task, **config) as job:
            found = job.result()
        assert found["rows"] == self._whole, f"{found['rows']:,} rows of {self._whole:,}"
        assert found["executors"] == workers, f"{found['executors']} executors on {workers} workers"
        for kind, seconds in found["seconds"].items():
            self._passes[kind][workers] += [self._whole / each for each in seconds]

    def tell(self) -> None:
        print(f"{self._whole:,} rows of {self._size:,} B in {self._options.streams} streams; rows a second:")
        for kind, name in NAMES.items():
            one, two = self._passes[kind][1], self._passes[kind][2]
            more = statistics.median(two) / statistics.median(one)
            print(f"    {name:30} one worker {spread(one)}, two workers {spread(two)}, {more:.2f} times", flush=True)


def spread(rates: Sequence[float]) -> str:
    """Return the median, with the least and the most."""
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3, help="of each kind in a round")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--hashes", type=int, default=50, help="the work on each row: SHA-256, so many times")
    options = parser.parse_args()
    if sys.platform != "linux":
        print("left out: the cluster needs Linux")
        return
    with tempfile.TemporaryDirectory(prefix="muxkit-") as folder, cluster(Path(folder), workers=1) as machines:
        for size in ROWS:
            rates = Rates(machines, options, size)
            rates.measure(Path(folder))
            rates.tell()


if __name__ == "__main__":
    main()
