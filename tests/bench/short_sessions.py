"""Sessions one after the other: connect, open a channel, echo one message, leave. Client and server in two processes.

python tests/bench/short_sessions.py [SECONDS] [PACKAGES ...]

For each number of packages, that many empty ones are put on the path, since a program is seldom alone in its
environment. Prints sessions per second of muxkit and of raw Trio, measured in turn, and the processor time that a
session takes at the client and at the server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import trio

import muxkit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

URL = "bpmux+tcp://127.0.0.1:0"
TURNS = 3


async def serve_muxkit() -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with muxkit.open_server(echo, URL) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()


async def serve_trio() -> None:
    async def echo(stream: trio.SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send_all(data)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listener.socket.getsockname()[1], flush=True)
    await trio.serve_listeners(echo, [listener])


async def ask_muxkit(where: str) -> None:
    async with muxkit.connect(where) as session, session.open() as channel:
        await channel.send(b"tea")
        await channel.receive()


async def ask_trio(where: str) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", int(where)) as stream:
        await stream.send_all(b"tea")
        await stream.receive_some()


async def rate(ask: Callable[[str], Awaitable[None]], where: str, seconds: float) -> tuple[float, float]:
    """Return the sessions per second, and the processor time that each takes here, in seconds."""
    await ask(where)
    began, before, done = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - began) < seconds:
        await ask(where)
        done += 1
    return done / passed, (time.process_time() - before) / done


def report_time() -> None:
    """Answer each line of standard input with this process's processor time."""
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


def measured(kind: str, seconds: str, path: Path) -> tuple[float, float, float]:
    """Return the sessions per second, and the processor time of a session at the client and at the server."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    program = [sys.executable, __file__]
    serving = [*program, f"serve-{kind}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(serving, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        where = server.stdout.readline().strip()
        spent, figures = [], ""
        for duration in ("0.3", seconds):  # first to warm up
            asking = [*program, f"ask-{kind}", where, duration]
            figures = subprocess.run(asking, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            server.stdin.write("\n")
            server.stdin.flush()
            spent.append(float(server.stdout.readline()))
        server.kill()
    per_second, client = map(float, figures.split())
    return per_second, client, (spent[1] - spent[0]) / (per_second * float(seconds))


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["serve-muxkit" | "serve-trio" as kind]:
            threading.Thread(target=report_time, daemon=True).start()
            trio.run(serve_muxkit if kind == "serve-muxkit" else serve_trio)
        case ["ask-muxkit" | "ask-trio" as kind, where, seconds]:
            print(*trio.run(rate, ask_muxkit if kind == "ask-muxkit" else ask_trio, where, float(seconds)))
        case _:
            seconds, *counts = arguments or ["2", "0", "400"]
            for count in counts:
                with tempfile.TemporaryDirectory() as folder:
                    for number in range(int(count)):
                        info = Path(folder) / f"empty_{number}-1.0.dist-info"
                        info.mkdir()
                        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: empty-{number}\nVersion: 1.0\n")
                        (info / "entry_points.txt").write_text(f"[console_scripts]\nempty{number} = empty:main\n")
                    for _ in range(TURNS):
                        for whom in ("muxkit", "trio"):
                            per_second, client, server = measured(whom, seconds, Path(folder))
                            print(
                                f"{count} more packages: {whom:6} {per_second:6,.0f} sessions per second,"
                                f" client {1e3 * client:.2f} ms, server {1e3 * server:.2f} ms"
                            )


if __name__ == "__main__":
    main(sys.argv[1:])
