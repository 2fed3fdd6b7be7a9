"""How does the bench work with its processes? It tells each what to do and hears what came of it, in lines of JSON."""

from __future__ import annotations

import math
import os
import subprocess
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from muxkit.cli.children import Child
from muxkit.cli.outcome import CommandFailed, Exit
from muxkit_bench.bench_work.tasks import Measured

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from muxkit_bench.bench_work.tasks import Task
    from muxkit_bench.contestants.contestant import Contestant

PATIENCE = 120.0  # s, for one pass


class _Answer(msgspec.Struct):
    """A line of a process: what a client connects to, or why it could not do its work."""

    ready: str | None = None
    failed: str | None = None


class _Failed(CommandFailed):
    """A process said so itself."""


class Worker(Child):
    """One end of a peer."""

    async def address(self) -> str:
        """What a client connects to."""
        answer = msgspec.json.decode(await self._line(), type=_Answer)
        return answer.ready or ""

    async def measure(self, task: Task) -> Measured:
        with suppress(trio.BrokenResourceError):  # it has ended, and has told why
            await self._stdin.send_all(msgspec.json.encode(task) + b"\n")
        return msgspec.json.decode(await self._line(), type=Measured)

    def kill(self) -> None:
        self._process.kill()

    async def last_words(self) -> str | None:
        """Why it could not go on; None if nothing was wrong with it."""
        await self.release()
        with suppress(CommandFailed):
            while True:
                try:
                    await self._line()
                except _Failed as failure:
                    return failure.sentence
        return None

    async def _line(self) -> bytes:
        with trio.move_on_after(PATIENCE):
            line = await self.next_line()
            if line is None:
                raise CommandFailed(f"{self.name} ended without an answer")
            failed = msgspec.json.decode(line, type=_Answer).failed
            if failed is not None:
                raise _Failed(f"{self.name}: {failed}")
            return line
        raise CommandFailed(f"{self.name} gave no answer within {PATIENCE:g} s", Exit.TIMED_OUT)


@asynccontextmanager
async def worker(name: str, command: Sequence[str], extra: Mapping[str, str]) -> AsyncGenerator[Worker, None]:
    """Run a process; it ends with the block at the latest. `extra` is added to our environment."""
    options: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}  # Ctrl-C is for us, and we end it
    process = await trio.lowlevel.open_process(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **extra},
        **options,
    )
    one = Worker(name, process)
    try:
        yield one
    finally:
        await one.end()


@attrs.frozen
class Ends:
    """A client, and the server that it is connected to, which may be the same process."""

    client: Worker
    server: Worker

    async def measure(self, task: Task) -> Measured:
        """Raises `CommandFailed` with what went wrong first."""
        try:
            return await self.client.measure(task)
        except CommandFailed as failure:
            said = None if self.server is self.client else await self.server.last_words()
            raise CommandFailed(said or failure.sentence, failure.exit) from failure

    async def release(self) -> None:
        """Both may end, which takes them a moment."""
        await self.client.release()
        await self.server.release()


@asynccontextmanager
async def both_ends(contestant: Contestant, cores: Sequence[int], *, hold: bool) -> AsyncGenerator[Ends, None]:
    """Start a server, and a client that knows where it is."""
    name, command, extra = contestant.name, contestant.command, contestant.extra
    of_server, of_client = ([f"--core={core}"] for core in cores) if cores else ([], [])
    holding = ["--hold"] if hold else []
    address = contestant.address.replace("{}", "held" if hold else "work")
    if contestant.is_alone:
        async with worker(name, [*command, "alone", *of_client, *holding, address], extra) as alone:
            with _ended_together(alone):
                await alone.address()
                yield Ends(alone, alone)
        return
    serving = [*command, "server", *of_server, *holding, address]
    async with worker(f"{name}, server", serving, extra) as server:
        reached = await server.address()
        async with worker(f"{name}, client", [*command, "client", *of_client, reached], extra) as client:
            with _ended_together(client, server):
                await client.address()
                yield Ends(client, server)


@contextmanager
def _ended_together(*workers: Worker) -> Generator[None, None, None]:
    """When the run is cut short both go at once: neither has the time to complain that the other is gone."""
    try:
        yield
    finally:
        if trio.current_effective_deadline() == -math.inf:
            for one in workers:
                one.kill()
