"""Forwarded connections through a line that is cut again and again, and listeners of a server that is killed.

`muxkit forward` runs as two processes, a server and a client, over Relink and through a relay that cuts. Connections go
through a listener at the client and one at the server, both directions of each are busy during all cuts, and each
compares the SHA-256 of what it has sent with that of what came back. Then the server is killed and started anew, and
its listener has to come back.

    python -m tests.soak.forward_cuts [--cuts 200] [--connections 32] [--kills 20] [--seed 1]

Ends with 1 if a byte was lost, repeated or wrong, a connection was broken, or a listener did not come back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import trio

from muxkit.testing import ChaosPlan, ChaosRelay, Cut, chaos_relay
from tests.soak.forward_peers import ROOT, free_port, target

MUXKIT = [sys.executable, "-P", "-m", "muxkit"]
PIECE_MOST = 40_000  # bytes of one call of send
BETWEEN = 200_000  # bytes that come back between two cuts
REFUSED = 0.05  # s without a new connection after each fifth cut
PATIENCE = 300.0  # s; reached only when something hangs
MEMORY = 256 * 1024 * 1024  # bytes of a process of muxkit, at most


@attrs.define
class Figures:
    """What happened."""

    cuts: int = 0
    kills: int = 0
    whole: int = 0
    """Connections whose checksum was right, in both directions."""
    broken: int = 0
    """Connections that ended early, or with another checksum."""
    size: int = 0
    """Bytes that came back."""
    sessions: int = 0
    """Sessions of the client until the first kill: more than one, and connections were lost with it."""
    back: list[float] = attrs.field(factory=list)
    """Seconds from each start of a killed server to its listener's first answer."""
    seconds: float = 0.0
    memory: int = 0
    """Bytes, the most that one process had resident."""

    @property
    def are_right(self) -> bool:
        return not self.broken and self.sessions == 1 and len(self.back) == self.kills and self.memory <= MEMORY

    def __str__(self) -> str:
        back = f"{max(self.back):.1f} s at most" if self.back else "not tried"
        return (
            f"{self.cuts:,} cuts in {self.seconds:.1f} s: {self.whole:,} connections whole and {self.broken:,} broken, "
            f"{self.size:,} bytes there and back, {self.sessions} session; {self.kills} kills of the server: "
            f"the listener came back {len(self.back)} times, {back}; {self.memory / 2**20:.0f} MiB of memory"
        )


class Command:
    """`muxkit forward` at work, and the events that it prints."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []
        self._changed = trio.lowlevel.ParkingLot()

    async def read(self) -> None:
        assert self._process.stdout is not None
        held = b""
        async for data in self._process.stdout:
            *lines, held = (held + data).split(b"\n")
            self.events += map(json.loads, lines)
            self._changed.unpark_all()
        self._changed.unpark_all()

    async def event(self, name: str, number: int = 1) -> dict[str, Any]:
        """Wait for the so many-th event of a name."""
        while len(found := [each for each in self.events if each["event"] == name]) < number:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended without {name}: {self.events}")
            await self._changed.park()
        return found[number - 1]

    def count(self, name: str) -> int:
        return sum(each["event"] == name for each in self.events)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def resident(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[Command]:
    """Run `muxkit forward`; kill it with the block."""
    process = await trio.lowlevel.open_process(
        [*MUXKIT, "forward", *arguments, "--json"], cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ}
    )
    running = Command(process)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.read)
        try:
            yield running
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


class Calls:
    """Connections that are busy until they are told that the cuts are over."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.are_over = trio.Event()
        self._came = trio.lowlevel.ParkingLot()

    async def until(self, size: int) -> None:
        """Wait until so many bytes have come back, or every connection has ended."""
        while self.figures.size < size and not self.figures.broken:
            await self._came.park()

    async def call(self, port: int, seed: int) -> None:
        """Send random bytes, and compare what the target sends back with them."""
        dice = random.Random(seed)
        sent, heard = hashlib.sha256(), hashlib.sha256()
        sizes = [0, 0]
        try:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:

                async def listen() -> None:
                    async for data in stream:
                        heard.update(data)
                        sizes[1] += len(data)
                        self.figures.size += len(data)
                        self._came.unpark_all()

                nursery.start_soon(listen)
                await stream.send_all(b"e")  # the target sends back what follows
                while not self.are_over.is_set():
                    data = dice.randbytes(dice.randint(1, PIECE_MOST))
                    sent.update(data)
                    sizes[0] += len(data)
                    await stream.send_all(data)
                await stream.send_eof()
        except* trio.BrokenResourceError as error:
            print(f"a connection broke: {error.exceptions[0]}", flush=True)
        if sizes[0] == sizes[1] and sent.digest() == heard.digest():
            self.figures.whole += 1
        else:
            self.figures.broken += 1
            print(f"{sizes[0]:,} bytes sent, {sizes[1]:,} came back", flush=True)
        self._came.unpark_all()


async def cut(client: Command, ports: list[int], relay: ChaosRelay, sizes: Sizes, figures: Figures) -> None:
    """Cut the line under load, so often; wait for the end of all connections."""
    calls = Calls(figures)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(sizes.connections):
            nursery.start_soon(calls.call, ports[number % 2], sizes.seed * 1000 + number)
        for number in count():
            if relay.cuts >= sizes.cuts:
                break
            await calls.until(figures.size + BETWEEN)
            if number % 5 == 4:
                relay.refuse(REFUSED)
            relay.cut_all(Cut.END if number % 3 == 2 else Cut.RESET)
        calls.are_over.set()
    figures.cuts = relay.cuts
    figures.seconds = trio.current_time() - began
    figures.sessions = client.count("listening_there")


async def kill(client: Command, server: Command, serving: list[str], sizes: Sizes, figures: Figures) -> None:
    """Kill the server and start it anew, so often; its listener has to answer each time."""
    port = int((await client.event("listening_there"))["address"].rpartition(":")[2])
    for number in range(sizes.kills):
        server.kill()
        async with command(*serving) as again:
            figures.kills += 1
            await again.event("listening")
            began = trio.current_time()
            await client.event("listening_there", number + 2)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"etea")
                await stream.send_eof()
                if b"".join([data async for data in stream]) == b"tea":
                    figures.back.append(trio.current_time() - began)
            server = again


@attrs.frozen(kw_only=True)
class Sizes:
    """How much is done."""

    cuts: int = 200
    connections: int = 32
    kills: int = 20
    seed: int = 1


async def survive(sizes: Sizes) -> Figures:
    figures = Figures()
    with trio.fail_after(PATIENCE + 5 * sizes.cuts + 60 * sizes.kills), target() as port:
        place = f"127.0.0.1:{free_port()}"
        serving = [f"relink+tcp://{place}/f", "--serve", "--allow", str(port), "--allow-listen", "*"]
        async with command(*serving) as server:
            await server.event("listening")
            async with chaos_relay(place, ChaosPlan(), sizes.seed) as relay:
                url = f"relink+tcp://{relay.address}/f"
                async with command(url, "-L", f"0:{port}", "-R", f"{free_port()}:{port}") as client:
                    addresses = [(await client.event(each))["address"] for each in ("listening", "listening_there")]
                    ports = [int(each.rpartition(":")[2]) for each in addresses]
                    await cut(client, ports, relay, sizes, figures)
                    figures.memory = max(client.resident(), server.resident())
                    await kill(client, server, serving, sizes, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = Sizes()
    for name in ("cuts", "connections", "kills", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plain, name))
    figures = trio.run(survive, Sizes(**vars(parser.parse_args())))
    print(figures)
    sys.exit(0 if figures.are_right else 1)


if __name__ == "__main__":
    main()
