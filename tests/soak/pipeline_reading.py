"""What reading a message costs: lines and blocks, JSON and records, in processor time of the server and of a task.

    python -m tests.soak.pipeline_reading [--rows 300000]

The server is a process of its own. This process reads as a task of the Spark source does, but without Spark. Each
figure is the median of five reads in microseconds per message. 4 KiB messages are a tenth as many.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import trio

from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Span
from muxkit.pipeline.source.rows import COLUMNS, Rows, read
from muxkit.protocols import restream
from muxkit.protocols.restream.engine import BlockEngine

UUID = "10000000-0000-4000-8000-000000000001"
SCHEMA = pa.schema([(name, COLUMNS[name]) for name in ("stream", "id", "time", "value")])
TIMES = 5
AT_ONCE = 1000


def data(kind: str, size: int) -> object:
    """A message whose value has this size."""
    return restream.Record(os.urandom(size)) if kind == "record" else "x" * (size - 2)


async def serve(kind: str, size: int, count: int) -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        await store.register(UUID, None, attached=False, keep=1e9)
        for _ in range(0, count, AT_ONCE):
            await store.append_many(UUID, [data(kind, size) for _ in range(AT_ONCE)])
        config = restream.ServerConfig(status=True)
        start = partial(restream.serve, "restream+tcp://127.0.0.1:0", store, application=restream.Fed(), config=config)
        served = await nursery.start(start)
        print(served.url, flush=True)
        await trio.sleep_forever()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, size: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.soak.pipeline_reading", "--serve", kind, str(size), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        options = SourceOptions.parse({"servers": url, "streams": UUID})
        try:
            for blocks in (False, True):
                BlockEngine.wants_blocks = blocks
                ours, theirs, rates = [], [], []
                for _ in range(TIMES):
                    before, own, began = cpu_seconds(server.pid), time.process_time(), time.perf_counter()
                    batches = read(Client(options), Rows(SCHEMA), [Span(UUID, url, 0, count)], 10_000)
                    assert sum(batch.num_rows for batch in batches) == count
                    rates.append(count / (time.perf_counter() - began))
                    ours.append((time.process_time() - own) / count * 1e6)
                    theirs.append((cpu_seconds(server.pid) - before) / count * 1e6)
                print(
                    f"{kind} of {size} bytes as {'blocks' if blocks else 'lines'}: server "
                    f"{statistics.median(theirs):.2f} µs, task {statistics.median(ours):.2f} µs, "
                    f"{statistics.median(rates):,.0f} messages per second"
                )
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--serve", nargs=3)
    given = parser.parse_args()
    if given.serve:
        kind, size, count = given.serve
        trio.run(serve, kind, int(size), int(count))
        return
    for kind in ("json", "record"):
        for size, count in ((64, given.rows), (4096, given.rows // 10)):
            measure(kind, size, count)


if __name__ == "__main__":
    main()
