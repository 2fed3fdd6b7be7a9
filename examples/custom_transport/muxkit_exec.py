"""A byte stream between two programs without a network: one starts the other, and they use its stdin and stdout.

After `pip install ./examples/custom_transport`, `python -m muxkit_exec` starts itself as a child and talks to it. The
transport has an option of its own, `folder`, which `connect` declares for editors and type checkers.
"""

import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from subprocess import PIPE
from typing import Unpack

import trio

import muxkit
from muxkit.runtime import background

Pipes = trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]
Handler = Callable[[Pipes], Awaitable[None]]
Started = trio.TaskStatus[list[str]]

PATIENCE = 5.0  # s, for the program to end by itself once its input has ended


class _Transport:
    """`exec://program argument …` to connect, `exec://-` for the program that is started."""

    @asynccontextmanager
    async def connect(self, address: str, *, folder: str | None = None) -> AsyncIterator[Pipes]:
        """Start a program in a folder and talk to it. Its standard error is shown unchanged."""
        command = shlex.split(address)
        start = partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False, cwd=folder)
        async with background() as nursery:  # when it is left, the program is asked to end, then killed
            process = await nursery.start(start)
            async with named(process.stdio, f"exec {command[0]}") as stream:
                yield stream
            with trio.move_on_after(PATIENCE):
                await process.wait()

    async def serve(self, handler: Handler, address: str, *, limits: muxkit.Limits, task_status: Started) -> None:
        """Serve the one connection that this process was born with; return when it is over."""
        if address != "-":
            raise ValueError(f"exec://{address}: a server has only its own stdin and stdout, exec://-")
        async with named(take_stdio(), "exec -") as stream:
            task_status.started([address])
            await handler(stream)


transport = _Transport()


class ConnectOptions(muxkit.ConnectOptions, total=False):
    """The options of `connect`: those of `muxkit.connect`, and the one of this transport."""

    folder: str | None
    """The folder in which the program runs."""


def connect(url: str, **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[muxkit.Session]:
    """Connect as `muxkit.connect` does, with the options of this transport."""
    known: muxkit.ConnectOptions = options  # `muxkit.connect` passes `folder` on, too
    return muxkit.connect(url, **known)


def named(stream: Pipes, peer: str) -> Pipes:
    vars(stream)["peer"] = peer  # stands in errors and in `session.info`
    return stream


def take_stdio() -> Pipes:
    """Move the pipes to descriptors of our own: what the program prints or reads must not end up among the frames."""
    outgoing, incoming = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return Pipes(trio.lowlevel.FdStream(outgoing), trio.lowlevel.FdStream(incoming))


async def shout(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message.upper())


async def main() -> None:
    child = shlex.join([sys.executable, __file__, "-"])
    async with connect(f"bpmux+exec://{child}", folder="/") as session, session.open() as channel:
        await channel.send(b"hello, child")
        print((await channel.receive()).decode())


if __name__ == "__main__":
    trio.run(muxkit.serve, shout, "bpmux+exec://-") if sys.argv[1:] else trio.run(main)
