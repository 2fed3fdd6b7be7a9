"""Attack a server of calls, typed channels and topics over real sockets, and measure what its neighbours get.

For each protocol, a server runs in a process of its own. Each attack of `tests/rpc/attacks.py` runs in another process
with a large amount: 100,000 abandoned calls, 10,000 malformed messages, 200 compression bombs. Meanwhile a neighbour in
this process makes calls and reads a topic. Afterwards the program waits until the server has no handler and no
channel of the attacker left. It prints how many calls the neighbour made, their times, and the peak of the server's
memory. It ends with status 1 if a call of the neighbour took longer than a second, if memory grew beyond the bound,
or if something was left.

    hostile_calls.py
    hostile_calls.py --only bpmux --attack abandoned_calls --scale 0.1
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import trio

import muxkit
from muxkit import rpc
from tests.rpc.attacks import ATTACKS, Attack, Hostile, served_meanwhile
from tests.rpc.sweeps import PROTOCOLS

AMOUNTS: Final = {
    "abandoned_calls": 100_000,
    "malformed_messages": 10_000,
    "malformed_calls": 10_000,
    "compression_bombs": 200,
    "silent_subscribers": 500,
    "headers_at_their_bounds": 4_000,
}
MAX_WAIT: Final = 1.0  # s that a call of the neighbour may take, on a machine that is busy with the attack
MAX_GROWTH: Final = 256  # MiB by which the peak of the server's memory may grow in an attack
PATIENCE: Final = 900.0  # s for an attack, and for the server to forget it
ME: Final = (sys.executable, "-m", "tests.soak.hostile_calls")
URLS: Final = {"e3x": "e3x+udp://127.0.0.1:0"}


class Watch(rpc.Service):
    """What the server says of itself."""

    async def left(self) -> tuple[int, int]:
        """Return the number of handlers that run, and of channels that are open, at the attacked server."""
        ...


class _Watch(Watch):
    def __init__(self, hostile: Hostile) -> None:
        self.hostile = hostile
        self.server: muxkit.Server | None = None

    async def left(self) -> tuple[int, int]:
        assert self.server is not None  # it is set before anybody connects
        channels = sum(len(each.channels()) for each in self.server.sessions())
        return self.hostile.service.running, channels


async def serve(url: str) -> None:
    """Serve in this process, and print the URLs for the attacked service and for the watch."""
    hostile = Hostile()
    watch = _Watch(hostile)
    limits = muxkit.Limits()
    async with trio.open_nursery() as nursery:
        async with (
            muxkit.open_server(hostile.handle, url, limits=limits) as server,
            muxkit.open_server(rpc.serve(watch), "bpmux+tcp://127.0.0.1:0") as watched,
        ):
            watch.server = server
            nursery.start_soon(hostile.publish_all_the_time)
            print(server.url, watched.url, flush=True)
            await trio.sleep_forever()


def memory_of(pid: int) -> int:
    """Return the peak of a process's memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) // 1024


async def attack_one(url: str, watch: Watch, attack: Attack, amount: int) -> list[float]:
    """Run an attack, and return the times of the neighbour's calls once the server has forgotten it."""
    done, took = trio.Event(), []

    async def attacking() -> None:
        try:
            await trio.run_process([*ME, "--attack", attack.__name__, "--amount", str(amount), "--url", url])
        finally:
            done.set()

    async with muxkit.connect(url) as neighbour:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attacking)
                took = await served_meanwhile(neighbour, done)
    with trio.fail_after(PATIENCE):
        while await watch.left() != (0, 0):  # noqa: ASYNC110 - it is in another process
            await trio.sleep(0.2)
    return took


async def attack_only(url: str, attack: Attack, amount: int) -> None:
    """Run an attack in this process."""
    async with muxkit.connect(url) as session:
        await attack(session, amount, 7)


async def attack_all(url: str, watch_url: str, pid: int, attacks: list[Attack], scale: float) -> bool:
    """Run all attacks on a server. Return True if it held."""
    held = True
    async with muxkit.connect(watch_url) as session:
        watch = rpc.client(Watch, session)
        for attack in attacks:
            amount = max(1, round(scale * AMOUNTS[attack.__name__]))
            before, began = memory_of(pid), time.monotonic()
            took = sorted(await attack_one(url, watch, attack, amount))
            seconds, grown = time.monotonic() - began, memory_of(pid) - before
            is_fine = took[-1] <= MAX_WAIT and grown <= MAX_GROWTH
            held = held and is_fine
            print(
                f"{url.partition('+')[0]:9} {attack.__name__:24} {amount:7,} in {seconds:5.0f} s; "
                f"neighbour: {len(took):6,} calls, p50 {1000 * took[len(took) // 2]:5.1f} ms, "
                f"p99 {1000 * took[len(took) * 99 // 100]:6.1f} ms, longest {1000 * took[-1]:6.0f} ms; "
                f"peak of memory {grown:+} MiB{'' if is_fine else '  TOO MUCH'}",
                flush=True,
            )
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROTOCOLS, action="append", help="a protocol; all by default")
    names = {attack.__name__: attack for attack in ATTACKS}
    parser.add_argument("--attack", choices=names, action="append", help="an attack; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="a factor for all amounts")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of the server that this process attacks
    parser.add_argument("--amount", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("muxkit").setLevel(logging.CRITICAL)
    if options.serve:
        trio.run(serve, options.serve)
        return
    if options.url:
        trio.run(attack_only, options.url, names[options.attack[0]], options.amount)
        return
    held = True
    for protocol in options.only or PROTOCOLS:
        url = URLS.get(protocol, f"{protocol}+tcp://127.0.0.1:0")
        with subprocess.Popen([*ME, "--serve", url], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None  # because it is a pipe
                served, watched = server.stdout.readline().split()
                attacks = [names[name] for name in options.attack or names]
                held &= trio.run(partial(attack_all, served, watched, server.pid, attacks, options.scale))
            finally:
                server.terminate()
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
