"""What a busy channel does to its neighbours: echo rates and pings beside a bulk sender, over real TCP.

Two processes on loopback. Each echo channel sends 64 bytes at a set pace; its rate alone is what it reaches
without the bulk channel. The figures are printed beside their targets; they decide nothing by themselves, since
they depend on the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial

import trio

import muxkit

ECHOES = 99
PACE = 20.0  # messages a second on each echo channel
MESSAGE = bytes(64)
PIECE = bytes(64 * 1024)
MIB = 1024 * 1024


async def serve() -> None:
    """The first message of a channel says what to do with the others."""

    async def handle(channel: muxkit.Channel) -> None:
        match await channel.receive():
            case b"echo":
                async for message in channel:
                    await channel.send(message)
            case b"sink":
                while True:
                    await channel.receive_many()
            case b"stall":
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(handle), "bpmux+tcp://127.0.0.1:0")
        print(served.url, flush=True)


async def ping_pong(session: muxkit.Session, times: list[float], until: float) -> None:
    async with session.open() as channel:
        await channel.send(b"echo")
        while trio.current_time() < until:
            began = trio.current_time()
            await channel.send(MESSAGE)
            await channel.receive()
            times.append(trio.current_time() - began)


async def echo(session: muxkit.Session, counts: list[int], pace: float | None, phase: float, until: float) -> None:
    done = 0
    async with session.open() as channel:
        await channel.send(b"echo")
        turn = trio.current_time() + phase / PACE
        if pace is not None:
            await trio.sleep_until(turn)
        while trio.current_time() < until:
            await channel.send(MESSAGE)
            await channel.receive()
            done += 1
            if pace is not None:
                turn += 1 / pace
                await trio.sleep_until(turn)
    counts.append(done)


async def bulk(session: muxkit.Session, sent: list[int], until: float) -> None:
    async with session.open() as channel:
        await channel.send(b"sink")
        total = 0
        while trio.current_time() < until:
            await channel.send(PIECE)
            total += len(PIECE)
        sent.append(total)


async def push_unread(session: muxkit.Session, until: float) -> None:
    async with session.open() as channel:
        await channel.send(b"stall")
        with trio.move_on_at(until):
            while True:
                await channel.send(PIECE)
        channel.abort()


class Run:
    """What one mixture of channels gave."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.sent: list[int] = []

    def percentile(self, share: float) -> float:
        ordered = sorted(self.times)
        return ordered[int(len(ordered) * share)] * 1e6


async def mixture(
    url: str,
    seconds: float,
    *,
    ping: bool = True,
    pace: float | None = PACE,
    echoes: int = 0,
    bulks: int = 0,
    stalled: int = 0,
) -> Run:
    run = Run()
    async with muxkit.connect(url) as session, trio.open_nursery() as nursery:
        until = trio.current_time() + seconds
        for _ in range(stalled):
            nursery.start_soon(push_unread, session, until)
        for number in range(echoes):  # spread over the pace, or all would come at the same moment
            nursery.start_soon(echo, session, run.counts, pace, number / echoes, until)
        for _ in range(bulks):
            nursery.start_soon(bulk, session, run.sent, until)
        if ping:
            nursery.start_soon(ping_pong, session, run.times, until)
    return run


def worst_share(alone: Run, beside: Run) -> float:
    return min(beside.counts) / (sum(alone.counts) / len(alone.counts))


async def client(url: str, seconds: float) -> None:
    run = partial(mixture, url, seconds)
    await run()  # warm-up
    idle = await run()
    alone = await run(ping=False, echoes=ECHOES)
    loaded = await run(ping=False, echoes=ECHOES, bulks=1)
    pinged = await run(bulks=1)
    everything = await run(echoes=ECHOES, bulks=1)
    stalled = await run(ping=False, echoes=ECHOES, stalled=1)
    free_alone = await run(ping=False, pace=None, echoes=ECHOES)
    free_stalled = await run(ping=False, pace=None, echoes=ECHOES, stalled=1)
    print(f"ping alone                     p50 {idle.percentile(0.5):7.0f} µs   p99 {idle.percentile(0.99):7.0f} µs")
    for name, one in (("bulk", pinged), (f"bulk and {ECHOES} echoes", everything)):
        rate = sum(one.sent) / seconds / MIB
        print(
            f"ping beside {name:<19}p50 {one.percentile(0.5):7.0f} µs   p99 {one.percentile(0.99):7.0f} µs   "
            f"{one.percentile(0.99) / idle.percentile(0.99):4.1f} × idle p99   bulk {rate:6.0f} MiB/s"
        )
    print(f"{ECHOES} echo channels at {PACE:.0f}/s alone: {sum(alone.counts)} rounds in {seconds} s")
    print(
        f"  beside bulk ({sum(loaded.sent) / seconds / MIB:.0f} MiB/s): "
        f"{sum(loaded.counts)}, the slowest keeps {worst_share(alone, loaded):.1%} (target 90 %)"
    )
    print(
        f"  beside a stalled reader: {sum(stalled.counts)}, "
        f"the slowest keeps {worst_share(alone, stalled):.1%} (target 90 %)"
    )
    print(
        f"unpaced: alone {sum(free_alone.counts) / seconds:.0f} rounds/s, beside a stalled reader "
        f"{sum(free_stalled.counts) / seconds:.0f} rounds/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each mixture runs")
    arguments = parser.parse_args()
    if arguments.serve:
        trio.run(serve)
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        trio.run(client, server.stdout.readline().strip(), arguments.seconds)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
