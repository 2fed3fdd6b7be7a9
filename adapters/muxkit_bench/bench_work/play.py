"""A process of the benchmark: it prints lines of JSON, and ends when its standard input is closed.

`PROGRAM server [--core N] [--hold] ADDRESS` prints what to connect to. `PROGRAM client [--core N] ADDRESS` measures one
task after another, each a line on its standard input. `PROGRAM alone ADDRESS` is both ends in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING

import trio

from .echoing import neighbour, open_and_close, round_trip, storm
from .idling import idle
from .meter import Meter
from .orders import Wrong
from .server import Server
from .streaming import among, flat, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from .peers import Connection, Peer
    from .tasks import Measured, Task

JOBS: dict[str, Callable[[Connection, Meter, Task], Awaitable[Measured]]] = {
    "bulk": stream,
    "small": stream,
    "flat": flat,
    "among": among,
    "rtt": round_trip,
    "storm": storm,
    "openclose": open_and_close,
    "neighbour": neighbour,
    "idle": idle,
}


def play(peer: Peer, arguments: Sequence[str] | None = None) -> int:
    """Run one end; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("server", "client", "alone"))
    parser.add_argument("address")
    parser.add_argument("--core", type=int)
    parser.add_argument("--hold", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.core is not None and sys.platform == "linux":
        os.sched_setaffinity(0, {asked.core})
    _allow_many_files()
    try:
        if asked.role == "client":
            trio.run(_measure_all, peer, asked.address)
        else:
            serve = _serve if asked.role == "server" else _serve_and_measure
            trio.run(serve, peer, Server(holding=asked.hold), asked.address)
    except Exception as error:
        wrong = next((leaf for leaf in _leaves(error) if isinstance(leaf, Wrong)), None)
        if wrong is None:
            traceback.print_exc()
        leaf = next(_leaves(error))
        _tell({"failed": str(wrong) if wrong else f"{type(leaf).__name__}: {leaf}"})
        return 1
    return 0


async def _serve(peer: Peer, server: Server, address: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.serve, server, address, lambda address: _tell({"ready": address}))
        nursery.start_soon(server.until_wrong)
        async for _ in _lines():
            pass
        nursery.cancel_scope.cancel()


async def _serve_and_measure(peer: Peer, server: Server, address: str) -> None:
    async def measure(address: str) -> None:
        await _measure_all(peer, address)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.serve, server, address, lambda address: nursery.start_soon(measure, address))
        nursery.start_soon(server.until_wrong)


async def _measure_all(peer: Peer, address: str) -> None:
    """Measure each task over a new connection."""
    _tell({"ready": address})
    async for line in _lines():
        # Only after the connection is closed: its last work must not fall into another pass.
        _tell(dict(await _measure(peer, address, json.loads(line))))


async def _measure(peer: Peer, address: str, task: Task) -> Measured:
    measured: Measured | None = None
    with trio.CancelScope() as scope:
        async with peer.connect(address) as connection:
            control = await connection.open()
            measured = await JOBS[task["job"]](connection, Meter(control), task)
            if task["job"] == "idle":
                scope.cancel()  # thousands of channels need no orderly close
                await trio.lowlevel.checkpoint()
            await connection.close(control)
    assert measured is not None
    return measured


async def _lines() -> AsyncIterator[bytes]:
    """Yield the lines that the parent writes, until it closes the pipe or ends."""
    rest = b""
    # Not `sys.stdin`: its thread, once abandoned, would hold a lock when the interpreter ends.
    while data := await trio.to_thread.run_sync(partial(os.read, 0, 65_536), abandon_on_cancel=True):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _tell(what: dict[str, object]) -> None:
    try:
        print(json.dumps(what), flush=True)
    except BrokenPipeError:
        sys.exit(1)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _allow_many_files() -> None:
    """A connection for each of a thousand channels needs as many open files, at both ends."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
