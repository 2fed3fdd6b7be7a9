"""Hours of channels that come and go leave nothing behind in two processes that talk over TLS.

A server and a client process keep 200 channels busy: each lives for a random number of messages of random sizes and
ends in one of four ways. Both processes report their resident memory and their open files. After a warm-up of a tenth
of the time a line is fitted through the memory of each: its slope is what leaks.

    python -m tests.soak.churn [--minutes 30] [--protocol bpmux] [--channels 200] [--seed 1]

Ends with 1 if memory grows by more than 1 MiB an hour, if files are left open, if anything was lost or wrong, or if a
process wrote a warning.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import ssl
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import trio
import trustme

import muxkit

SLOPE = 1024 * 1024.0  # bytes an hour
SPAN = 10.0  # s between two samples
LEAST = 20  # samples that a slope can be fitted through
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (0, 1, 64, 1000, 20_000, 100_000)
ENDS = ("close", "close", "abort", "finish")


def resident() -> int:
    """Bytes of this process in memory, without what its allocator keeps free."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def files() -> int:
    """Files and sockets that this process has open."""
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------------- the two processes


async def serve(protocol: str, certificate: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with trio.open_nursery() as nursery:
        start = partial(muxkit.serve, muxkit.each_channel(echo), f"{protocol}+tls://127.0.0.1:0", ssl_context=context)
        served = await nursery.start(start)
        print(served.url, flush=True)
        nursery.start_soon(report)
        async for _ in trio.lowlevel.FdStream(os.dup(0)):
            pass  # the parent hangs up when it is done
        nursery.cancel_scope.cancel()


async def churn(url: str, ca: str, channels: int, seed: int) -> None:
    context = ssl.create_default_context(cafile=ca)
    wrong = 0

    async def busy(session: muxkit.Session, dice: random.Random) -> None:
        nonlocal wrong
        while True:
            async with session.open() as channel:
                for _ in range(dice.randrange(6)):
                    message = dice.randbytes(dice.choice(SIZES))
                    await channel.send(message)
                    wrong += await channel.receive() != message
                    await trio.sleep(dice.random())
                match dice.choice(ENDS):
                    case "abort":
                        channel.abort()
                    case "finish":
                        with suppress(trio.BrokenResourceError):
                            await channel.finish()
                    case _:
                        pass
            await trio.sleep(dice.random())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(report)
        async with muxkit.connect(url, ssl_context=context) as session:
            async with trio.open_nursery() as tasks:
                for number in range(channels):
                    tasks.start_soon(busy, session, random.Random(seed * 1000 + number))
                async for _ in trio.lowlevel.FdStream(os.dup(0)):
                    pass
                tasks.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    print(f"wrong {wrong}", flush=True)


async def report() -> None:
    while True:
        print(resident(), files(), flush=True)
        await trio.sleep(SPAN if len(sys.argv) < 7 else float(sys.argv[6]))


# ---------------------------------------------------------------------------- the parent


@attrs.define
class Samples:
    """What one process reported."""

    memory: list[int] = attrs.field(factory=list)
    files: list[int] = attrs.field(factory=list)
    words: list[str] = attrs.field(factory=list)

    def hear(self, line: str) -> None:
        numbers = line.split()
        if len(numbers) == 2 and numbers[0].isdigit():
            self.memory.append(int(numbers[0]))
            self.files.append(int(numbers[1]))
        elif line:
            self.words.append(line)

    def slope(self, span: float) -> float:
        """Bytes an hour, by least squares, without the warm-up."""
        ys = self.memory[len(self.memory) // 10 :]
        xs = [index * span / 3600 for index in range(len(ys))]
        middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - middle_x) ** 2 for x in xs)
        return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread


async def run(protocol: str, seconds: float, channels: int, seed: int, span: float = SPAN) -> dict[str, Samples]:
    """Both processes for so long; what each reported."""
    samples = {"server": Samples(), "client": Samples()}
    with tempfile.TemporaryDirectory() as folder:
        ca = trustme.CA()
        ca.cert_pem.write_to_path(f"{folder}/ca.pem")
        ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(f"{folder}/server.pem")
        python = [sys.executable, "-W", "error::ResourceWarning", "-m", "tests.soak.churn"]
        async with trio.open_nursery() as nursery:
            server = await _start([*python, "serve", protocol, f"{folder}/server.pem", "0", "0", str(span)])
            url = await _line(server)
            client = await _start([*python, "churn", url, f"{folder}/ca.pem", str(channels), str(seed), str(span)])
            for name, process in (("server", server), ("client", client)):
                nursery.start_soon(_listen, process, samples[name])
            await trio.sleep(seconds)
            for process in (client, server):
                assert process.stdin is not None
                await process.stdin.aclose()
                with trio.move_on_after(30):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    samples["client"].words.append("a process did not end")
    return samples


async def _start(command: list[str]) -> trio.Process:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process: trio.Process = await trio.lowlevel.open_process(command, **pipes)  # type: ignore[call-overload]  # pipes
    return process


async def _line(process: trio.Process) -> str:
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        line += await process.stdout.receive_some(1)
    return line.decode().strip()


async def _listen(process: trio.Process, samples: Samples) -> None:
    assert process.stdout is not None
    held = ""
    async for data in process.stdout:
        *lines, held = (held + data.decode(errors="replace")).split("\n")
        for line in lines:
            samples.hear(line)


def complaints(samples: dict[str, Samples], span: float = SPAN) -> list[str]:
    """What is not as it should be."""
    found = []
    for name, one in samples.items():
        if len(one.memory) >= LEAST and (slope := one.slope(span)) > SLOPE:
            found.append(f"{name}: memory grows by {slope / 1024 / 1024:.2f} MiB an hour")
        middle = len(one.files) // 2  # by then the connection is there
        if one.files and one.files[-1] > one.files[middle]:
            found.append(f"{name}: {one.files[middle]} files were open half way, {one.files[-1]} at the end")
        found += [f"{name}: {word}" for word in one.words if word != "wrong 0"]
    if samples["client"].words[-1:] != ["wrong 0"]:
        found.append("client: it did not come to its end")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for leaks in two processes that talk for a long time.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--protocol", default="bpmux")
    parser.add_argument("--channels", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    samples = trio.run(run, asked.protocol, 60 * asked.minutes, asked.channels, asked.seed)
    for name, one in samples.items():
        slope = (
            f"{one.slope(SPAN) / 1024 / 1024:+.2f} MiB an hour" if len(one.memory) >= LEAST else "too short for a slope"
        )
        print(
            f"{name}: {len(one.memory)} samples, {one.memory[-1] / 1024 / 1024:.1f} MiB, {slope}, {one.files[-1]} files"
        )
        tenths = one.memory[:: max(1, len(one.memory) // 10)]
        print(f"{name}: MiB over time {' '.join(f'{memory / 1024 / 1024:.1f}' for memory in tenths)}")
    found = complaints(samples)
    print("\n".join(found) or "nothing is left behind")
    return bool(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        trio.run(serve, sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["churn"]:
        trio.run(churn, sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
