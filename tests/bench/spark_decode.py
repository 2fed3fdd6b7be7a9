"""Frames decoded from raw captures per second: in one process, and on Spark in 1, 2 and 4 partitions.

    python tests/bench/spark_decode.py [--connections 8] [--messages 12500] [--rounds 3]

Both ends of bpmux connections are recorded as bytes, with messages of 20 to 400 bytes. They are cut by the protocol's
parser, and once more with real engines behind it that look for violations. Everything is warm and the best round
counts. The table is printed; it decides nothing by itself, since it depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muxkit import Limits
from muxkit.core.events import Halves, Opened, Received
from muxkit.pipeline import Capture, decode, decode_batches, spark_session
from muxkit.pipeline.capture.decoding import read_raw
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Sender
from muxkit.testing import EnginePair

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

WIDE = Limits(channel_bytes=2**20, channel_first=2**20)
CHANNELS = 8


class Tapped(bpmux.Engine):
    """An engine that tells its observer also what it writes, as a pump would."""

    def __init__(self, capture: Capture, name: str) -> None:
        self._told = capture.connection(name)
        super().__init__(bpmux.Config(keepalive=None), limits=WIDE, observer=self._told)

    def buffers_to_send(self, limit: int = 256 * 1024) -> list[bytes | memoryview]:
        buffers = super().buffers_to_send(limit)
        if buffers:
            self._told.transport("out", b"".join(buffers))
        return buffers


def record(folder: Path, connections: int, messages: int) -> None:
    """Connections, each with so many messages each way on eight channels."""
    with Capture(folder, raw=True, frames=False, name="bench", waiting=10_000) as capture:
        for number in range(connections):
            talk(capture, number, messages)


def talk(capture: Capture, number: int, messages: int) -> None:
    dice = random.Random(number)
    engines = Tapped(capture, f"{number} here"), Tapped(capture, f"{number} there")
    sinks: tuple[list[Sender], list[Sender]] = ([], [])

    def hear(side: int, event: bpmux.Event) -> None:
        match event:
            case Opened(Halves(Sender() as sink)):
                sinks[side].append(sink)
            case Received(receiver, payloads):
                receiver.consumed((), sum(map(len, payloads)))
            case _:
                pass

    pair: EnginePair[bpmux.Engine, bpmux.Event] = EnginePair(*engines, listener=hear)
    pair.run_until_quiet()
    sinks[0].extend(engines[0].open_duplex()[0] for _ in range(CHANNELS))
    pair.run_until_quiet()
    for turn in range(messages):
        for side in (0, 1):
            sinks[side][turn % CHANNELS].send(bytes(dice.randint(20, 400)))
        if turn % 50 == 0:
            pair.run_until_quiet()
    pair.run_until_quiet()


def best(rounds: int, work: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds of the quickest round, CPU seconds of the cheapest, and the frames of each."""
    work()
    times, costs = [], []
    frames = 0
    for _ in range(rounds):
        began, used = time.perf_counter(), cpu_seconds()
        frames = work()
        times.append(time.perf_counter() - began)
        costs.append(cpu_seconds() - used)
    return min(times), min(costs), frames


def cpu_seconds() -> float:
    """What this process and all below it have used of the cores, on Linux: others on the machine hardly change it."""
    own = {os.getpid()}
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            rows[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    while new := {process for process, (parent, _) in rows.items() if parent in own} - own:
        own |= new
    return sum(rows[process][1] for process in own if process in rows) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--messages", type=int, default=12_500, help="each way, of each connection")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, options.connections, options.messages)
        size = sum(path.stat().st_size for path in (folder / "raw").iterdir())
        print(f"{2 * options.connections} recorded ends, {size / 2**20:.1f} MiB of Parquet, {os.cpu_count()} cores")
        for engine in (False, True):
            measure(folder, options.rounds, engine=engine)


def measure(folder: Path, rounds: int, *, engine: bool) -> None:
    def here() -> int:
        return sum(batch.num_rows for batch in decode_batches(read_raw(folder), "bpmux", engine=engine))

    what = "real engines" if engine else "parser only "
    alone, used, frames = best(rounds, here)
    print(
        f"{what}  one process          {alone:6.2f} s {frames / alone:>11,.0f} rows/s {frames / used:>11,.0f} a CPU s"
    )
    spark = spark_session()
    raw = spark.read.parquet(str(folder / "raw"))
    for partitions in (1, 2, 4):
        told = decode(raw, "bpmux", engine=engine, partitions=partitions)

        def there(told: DataFrame = told) -> int:
            # Every column is asked for, or Spark would count what it need not bring over.
            return int(told.selectExpr("count(*)", "sum(hash(*))").collect()[0][0])

        took, used, count = best(rounds, there)
        if count != frames:
            raise AssertionError(f"{count} rows on Spark, {frames} here")
        print(
            f"{what}  Spark, {partitions} partition{'s' if partitions > 1 else ' '}   {took:6.2f} s "
            f"{count / took:>11,.0f} rows/s {count / used:>11,.0f} a CPU s   {alone / took:4.2f} × one process",
            flush=True,
        )
    spark.stop()


if __name__ == "__main__":
    main()
