"""Processor time and memory of two versions of muxkit, measured in turn.

    python tests/bench/two_trees.py OTHER [--this HERE] [--rounds 7] [--only bpmux] [--jobs small,bulk] [--json FILE]

OTHER is a checkout, or a Python interpreter in which muxkit is installed, for example with compiled modules. `--this`
is the version to compare it with, by default the checkout of this file. For each protocol the program measures:

| job | what it does | unit |
|---|---|---|
| small | messages of 64 bytes in one direction, one call each | µs per message |
| many | messages of 64 bytes in one direction, 100 in a call | µs per message |
| bulk | messages of 64 KiB in one direction | ms per MiB |
| trip | a message of 64 bytes there and back | µs per round trip |
| open | a channel that is opened, answers once, and is closed | µs per channel |
| session | memory of an idle session | bytes |
| channel | memory of an idle channel with a handler | bytes |

and for restream the messages of one stream, and the memory of an idle stream.

Client and server run in one process over loopback sockets, so each figure is the cost of both ends. A process measures
one job once, in several short passes, and ends. A round runs every job with this version, the other one and this one
again, in an order that changes from round to round. Memory is counted exactly, so two rounds measure it.

Processor time includes the kernel's work for the process. Other programs on the machine disturb it less than they
disturb the time on the clock, but they do disturb it. The column "noise" shows by how much this version differs from
itself, in the least or the median, whichever is larger: what isn't larger than that means nothing. On a machine with
nothing else to do a few rounds are enough.

Ends with 1 if OTHER needs more than `--limit` per cent (3), and the noise, more than this version in least and median.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

import muxkit
from muxkit.protocols import restream

HERE: Final = Path(__file__).resolve().parents[2]
URLS: Final = {
    "bpmux": "bpmux+tcp://127.0.0.1:0",
    "relink": "relink+tcp://127.0.0.1:0",
    "aqueduct": "aqueduct+tcp://127.0.0.1:0",
    "e3x": "e3x+udp://127.0.0.1:0",
}
SMALL: Final = bytes(64)
LARGE: Final = bytes(64 * 1024)
UNITS: Final = {
    "small": "µs/message",
    "many": "µs/message",
    "bulk": "ms/MiB",
    "trip": "µs/trip",
    "open": "µs/channel",
    "session": "bytes",
    "channel": "bytes",
    "stream": "µs/message",
    "idle": "bytes",
}
STREAM_JOBS: Final = ("stream", "idle")
MEMORY_JOBS: Final = ("session", "channel", "idle")
MEMORY_ROUNDS: Final = 2
PASSES: Final = 8
PATIENCE: Final = 300.0  # s, after which a job hangs

# ---------------------------------------------------------------------------- one job, in a process of its own


async def answer(channel: muxkit.Channel) -> None:
    """Return each message of a channel named `echo`; count those of any other and return the number at its end."""
    if channel.name == "echo":
        async for message in channel:
            await channel.send(message)
        return
    count = 0
    try:
        while True:
            count += len(await channel.receive_many()) if channel.name == "many" else len([await channel.receive()])
    except trio.EndOfChannel:
        await channel.send(b"%d" % count)


@asynccontextmanager
async def session(protocol: str) -> AsyncIterator[muxkit.Session]:
    async with muxkit.open_server(answer, URLS[protocol]) as server, muxkit.connect(server.url) as client:
        yield client


async def spent(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """Return the processor seconds of each of `count` repetitions, in the quickest of several short passes.

    A short pass is more likely to be left alone by other programs than a long one.
    """
    await work(count // PASSES)  # to warm up
    passes: list[float] = []
    for _ in range(PASSES):
        gc.collect()
        began = time.process_time()
        await work(count // PASSES)
        passes.append(time.process_time() - began)
    return min(passes) / (count // PASSES)


async def one_way(client: muxkit.Session, count: int, *, message: bytes, name: str) -> None:
    async with client.open(name) as channel:
        if name == "many":
            for _ in range(count // 100):
                await channel.send_many([message] * 100)
        else:
            for _ in range(count):
                await channel.send(message)
        await channel.finish()
        told = int(await channel.receive())
        assert told == (count // 100 * 100 if name == "many" else count), f"{told} of {count} messages arrived"


async def there_and_back(client: muxkit.Session, count: int) -> None:
    async with client.open("echo") as channel:
        for _ in range(count):
            await channel.send(SMALL)
            await channel.receive()


async def open_and_close(client: muxkit.Session, count: int) -> None:
    for _ in range(count):
        async with client.open("echo") as channel:
            await channel.send(SMALL)
            await channel.receive()


async def processor_time(protocol: str, job: str) -> float:
    async with session(protocol) as client:
        match job:
            case "small":
                return 1e6 * await spent(partial(one_way, client, message=SMALL, name="small"), 20_000)
            case "many":
                return 1e6 * await spent(partial(one_way, client, message=SMALL, name="many"), 40_000)
            case "bulk":
                return (
                    1e3
                    * 16
                    * await spent(
                        partial(one_way, client, message=LARGE, name="bulk"), 200 if protocol == "e3x" else 1000
                    )
                )
            case "trip":
                return 1e6 * await spent(partial(there_and_back, client), 4000)
            case "open":
                return 1e6 * await spent(partial(open_and_close, client), 1000)
            case _:
                raise ValueError(f"unknown job {job!r}: expected one of {', '.join(UNITS)}")


async def memory_of(protocol: str, job: str) -> float:
    """Return the bytes of one idle session or channel, both ends together, as Python allocates them."""
    count = 100 if job == "session" else 500
    async with muxkit.open_server(answer, URLS[protocol]) as server, AsyncExitStack() as stack:

        async def add(client: muxkit.Session | None) -> None:
            if client is None:
                client = await stack.enter_async_context(muxkit.connect(server.url))
                async with client.open("echo") as channel:
                    await channel.send(SMALL)
                    await channel.receive()
            else:
                channel = await stack.enter_async_context(client.open("echo"))
                await channel.send(SMALL)
                await channel.receive()

        client = await stack.enter_async_context(muxkit.connect(server.url))
        into = None if job == "session" else client
        for _ in range(count // 10):
            await add(into)
        return await grown(partial(add, into), count)


async def grown(add: Callable[[], Awaitable[object]], count: int) -> float:
    gc.collect()
    tracemalloc.start()
    for _ in range(count):
        await add()
    await trio.sleep(0.3)  # until the last acknowledgements have come
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / count


async def restream_job(job: str) -> float:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(restream.serve, "restream+tcp://127.0.0.1:0", store)
        async with AsyncExitStack() as stack:
            if job == "stream":
                figure = 1e6 * await spent(partial(read_numbers, served.url), 10_000)
            else:

                async def add() -> None:
                    # The store holds no more than a window of this stream, whose reader waits.
                    numbers = await stack.enter_async_context(restream.numbers(served.url, count=10_000))
                    await numbers.receive()

                await add()
                figure = await grown(add, 20)
        nursery.cancel_scope.cancel()
    return figure


async def read_numbers(url: str, count: int) -> None:
    async with restream.numbers(url, count=count) as numbers:
        assert len([number async for number in numbers]) == count


def measure(protocol: str, job: str) -> float:
    if protocol == "restream":
        return trio.run(restream_job, job)
    return trio.run(memory_of if job in MEMORY_JOBS else processor_time, protocol, job)


# ---------------------------------------------------------------------------- both versions, in turn


def run(version: Path, protocol: str, job: str) -> float:
    """Measure one job in a fresh process with this version of muxkit.

    A checkout's own copy of this program is used if it has one, since names may differ between the versions.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    python, program = sys.executable, Path(__file__)
    if version.is_dir():
        environment["PYTHONPATH"] = os.pathsep.join([str(version), str(version / "adapters")])
        own = version / "tests" / "bench" / Path(__file__).name
        program = own if own.exists() else program
    else:
        python = str(version)
    command = [python, "-P", str(program), "--measure", protocol, job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{version}, {protocol} {job}: {done.stderr[-2000:]}")
    where, figure = done.stdout.split()
    if version.is_dir() and not Path(where).is_relative_to(version):
        raise RuntimeError(f"expected muxkit of {version}, got {where}")
    return float(figure)


def compare(this: list[float], other: list[float]) -> tuple[float, float]:
    """Return by how many per cent the other needs more: in the least figures, and in the median ones."""
    least = 100 * (min(other) / min(this) - 1)
    return least, 100 * (statistics.median(other) / statistics.median(this) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two versions of muxkit by processor time and memory.")
    parser.add_argument("other", type=Path, help="a checkout, or an interpreter that has muxkit")
    parser.add_argument("--this", type=Path, default=HERE, help="the version to compare with; default: this checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", choices=[*URLS, "restream"], help="only this protocol")
    parser.add_argument("--jobs", default="", help=f"only these, separated by commas: {', '.join(UNITS)}")
    parser.add_argument("--limit", type=float, default=3.0, help="per cent that OTHER may need more")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    asked = parser.parse_args()
    # An interpreter is a link in its virtual environment, so only folders may be resolved.
    this, other = (path.resolve() if path.is_dir() else path.absolute() for path in (asked.this, asked.other))
    jobs = asked.jobs.split(",") if asked.jobs else [*UNITS]
    cells = [
        (protocol, job)
        for protocol in asked.only or [*URLS, "restream"]
        for job in jobs
        if (job in STREAM_JOBS) == (protocol == "restream")
    ]
    figures: dict[tuple[str, str], tuple[list[float], ...]] = {cell: ([], [], []) for cell in cells}
    for number in range(asked.rounds):
        print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
        for cell in cells:
            if cell[1] in MEMORY_JOBS and number >= MEMORY_ROUNDS:
                continue
            sides = [(this, 0), (other, 1), (this, 2)]
            for version, side in sides[number % 3 :] + sides[: number % 3]:
                figures[cell][side].append(run(version, *cell))
    print(f"this:  {this}\nother: {other}\n")
    print(f"{'':17} {'':12} {'least':>10} {'other':>10} {'':>8} {'median':>10} {'other':>10} {'':>8} {'noise':>7}")
    worse = 0
    for (protocol, job), (mine, theirs, again) in figures.items():
        least, median = compare(mine, theirs)
        noise = max(map(abs, compare(mine, again)))
        is_worse = min(least, median) > asked.limit + noise
        worse += is_worse
        print(
            f"{protocol + ' ' + job:17} {UNITS[job]:12} {min(mine):10.2f} {min(theirs):10.2f} {least:+7.1f}%"
            f" {statistics.median(mine):10.2f} {statistics.median(theirs):10.2f} {median:+7.1f}% {noise:6.1f}%"
            f"{'  worse' if is_worse else ''}"
        )
    if asked.json:
        told = {f"{protocol} {job}": series for (protocol, job), series in figures.items()}
        asked.json.write_text(json.dumps({"this": str(this), "other": str(other), "figures": told}, indent=1))
    return bool(worse)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(muxkit.__file__, measure(*sys.argv[2:4]))
    else:
        sys.exit(main())
