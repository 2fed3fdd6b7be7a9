"""A byte stream between two programs without a network: one starts the other, and they use its stdin and stdout."""

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from subprocess import PIPE

import trio

from muxkit import Limits
from muxkit.runtime import background

Handler = Callable[[trio.abc.Stream], Awaitable[None]]
Started = trio.TaskStatus[list[str]]

PATIENCE = 5.0  # s, for the program to end by itself once its input has ended


class PipeStream(trio.abc.HalfCloseableStream):
    """Two pipes as one stream."""

    def __init__(self, outgoing: trio.abc.SendStream, incoming: trio.abc.ReceiveStream, peer: str) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self.peer = peer  # stands in errors and in `session.info`

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._outgoing.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._outgoing.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._outgoing.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._incoming.receive_some(max_bytes))

    async def aclose(self) -> None:
        async with self._incoming:
            await self._outgoing.aclose()


class _Transport:
    """`exec://program argument …` to connect, `exec://-` for the program that is started."""

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[PipeStream]:
        """Start a program and talk to it; what it writes to its standard error is shown as it is."""
        command = shlex.split(address)
        async with background() as nursery:  # when it is left, the program is asked to end, then killed
            process = await nursery.start(partial(trio.run_process, command, stdin=PIPE, stdout=PIPE, check=False))
            async with PipeStream(process.stdin, process.stdout, f"exec {command[0]}") as stream:
                yield stream
            with trio.move_on_after(PATIENCE):
                await process.wait()

    async def serve(self, handler: Handler, address: str, *, limits: Limits, task_status: Started) -> None:
        """The one connection that this process was born with; returns when it is over."""
        if address != "-":
            raise ValueError(f"exec://{address}: a server has only its own stdin and stdout, exec://-")
        outgoing, incoming = _take_stdio()
        task_status.started([address])
        async with PipeStream(trio.lowlevel.FdStream(outgoing), trio.lowlevel.FdStream(incoming), "exec -") as stream:
            await handler(stream)


transport = _Transport()


def _take_stdio() -> tuple[int, int]:
    """Descriptors of our own; what the program prints or reads by itself must not end up among the frames."""
    outgoing, incoming = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return outgoing, incoming
