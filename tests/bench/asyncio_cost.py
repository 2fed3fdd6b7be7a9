"""What muxkit costs on asyncio beside Trio: the same client on three loops, processor time and the clock.

The server is a process of its own and runs on Trio. Each job runs `--rounds` times on each loop, in turn, and the
medians are printed. `python tests/bench/asyncio_cost.py` needs uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio
import uvloop

import muxkit
import muxkit.asyncio

SMALL = bytes(32)
ROUND_TRIPS = 2000
MESSAGES = 50_000


class AnyChannel(Protocol):
    """A channel of either kind."""

    async def send(self, message: bytes, /) -> None: ...
    async def receive(self) -> bytes: ...
    async def finish(self) -> None: ...


async def round_trips(channel: AnyChannel) -> int:
    """Send a message and wait for its answer, again and again."""
    for _ in range(ROUND_TRIPS):
        await channel.send(SMALL)
        await channel.receive()
    return ROUND_TRIPS


async def sends(channel: AnyChannel) -> int:
    """Send many small messages, one by one, then wait until the peer has taken the last."""
    for _ in range(MESSAGES):
        await channel.send(SMALL)
    await channel.finish()
    await channel.receive()
    return MESSAGES


async def receives(channel: AnyChannel) -> int:
    """Receive many small messages one by one."""
    await channel.send(b"go")
    for _ in range(MESSAGES):
        await channel.receive()
    return MESSAGES


JOBS: dict[str, Callable[[AnyChannel], Awaitable[int]]] = {"echo": round_trips, "drain": sends, "source": receives}
TITLES = {"echo": "round trip", "drain": "small message sent", "source": "small message received"}


async def serve() -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def drain(channel: muxkit.Channel) -> None:
        async for _ in channel:
            pass
        await channel.send(b"done")

    async def source(channel: muxkit.Channel) -> None:
        await channel.receive()
        for _ in range(MESSAGES):
            await channel.send(SMALL)

    handlers = muxkit.by_name({"echo": echo, "drain": drain, "source": source})
    async with muxkit.open_server(handlers, "bpmux+tcp://127.0.0.1:0") as server:
        print(server.url, flush=True)
        await trio.sleep_forever()


async def timed(job: str, channel: AnyChannel) -> tuple[float, float]:
    """Return microseconds of processor time and by the clock for one item."""
    processor, clock = time.process_time(), time.perf_counter()
    count = await JOBS[job](channel)
    return (time.process_time() - processor) / count * 1e6, (time.perf_counter() - clock) / count * 1e6


async def on_trio(url: str, job: str) -> tuple[float, float]:
    async with muxkit.connect(url) as session, session.open(job) as channel:
        return await timed(job, channel)


async def on_asyncio(url: str, job: str) -> tuple[float, float]:
    async with muxkit.asyncio.connect(url) as session, session.open(job) as channel:
        return await timed(job, channel)


LOOPS: dict[str, Callable[[str, str], tuple[float, float]]] = {
    "Trio": lambda url, job: trio.run(on_trio, url, job),
    "asyncio": lambda url, job: asyncio.run(on_asyncio(url, job)),
    "uvloop": lambda url, job: uvloop.run(on_asyncio(url, job)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        trio.run(serve)
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        for _ in range(options.rounds):
            for job in JOBS:
                for loop, run in LOOPS.items():
                    found.setdefault((job, loop), []).append(run(url, job))
    finally:
        server.kill()
        server.wait()
    print("| one | loop | processor, µs | clock, µs |\n|---|---|---|---|")
    for (job, loop), rounds in found.items():
        processor, clock = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"| {TITLES[job]} | {loop} | {processor:.1f} | {clock:.1f} |")


if __name__ == "__main__":
    main()
