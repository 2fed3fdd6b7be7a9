"""The processes of a contestant: each gets tasks and gives answers, in lines of JSON."""

from __future__ import annotations

import math
import os
import subprocess
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from muxkit.cli.terminal import CommandFailed, Exit
from muxkit_bench.bench_work.tasks import Measured
from muxkit_bench.children import Child

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from muxkit_bench.bench_work.tasks import Task
    from muxkit_bench.contestants.contestant import Contestant

PASS_TIMEOUT = 120.0  # s


class _Answer(msgspec.Struct):
    """A line of a process: the address for a client, or the reason of a failure."""

    ready: str | None = None
    failed: str | None = None


class _Failed(CommandFailed):
    """A failure that a process reported itself."""


class Worker(Child):
    """One end of a contestant."""

    async def address(self) -> str:
        """Read the address for a client."""
        answer = msgspec.json.decode(await self._line(), type=_Answer)
        return answer.ready or ""

    async def measure(self, task: Task) -> Measured:
        with suppress(trio.BrokenResourceError):  # it has ended, and its last line says why
            await self._stdin.send_all(msgspec.json.encode(task) + b"\n")
        return msgspec.json.decode(await self._line(), type=Measured)

    def kill(self) -> None:
        self._process.kill()

    async def last_words(self) -> str | None:
        """Return the failure that it reported; None if there was none."""
        await self.release()
        with suppress(CommandFailed):
            while True:
                try:
                    await self._line()
                except _Failed as failure:
                    return failure.sentence
        return None

    async def _line(self) -> bytes:
        with trio.move_on_after(PASS_TIMEOUT):
            line = await self.next_line()
            if line is None:
                raise CommandFailed(f"{self.name} ended without an answer")
            failed = msgspec.json.decode(line, type=_Answer).failed
            if failed is not None:
                raise _Failed(f"{self.name}: {failed}")
            return line
        raise CommandFailed(f"{self.name} gave no answer within {PASS_TIMEOUT:g} s", Exit.TIMED_OUT)


@asynccontextmanager
async def worker(name: str, command: Sequence[str], extra: Mapping[str, str]) -> AsyncGenerator[Worker, None]:
    """Run a process; it ends with the block. `extra` is added to the environment."""
    options: dict[str, Any] = (
        {"process_group": 0} if os.name == "posix" else {}
    )  # Ctrl-C goes to the command, which ends it
    process = await trio.lowlevel.open_process(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **extra}, **options
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
        """Measure a task; raises `CommandFailed` with the first failure."""
        try:
            return await self.client.measure(task)
        except CommandFailed as failure:
            said = None if self.server is self.client else await self.server.last_words()
            raise CommandFailed(said or failure.sentence, failure.exit) from failure

    async def release(self) -> None:
        """Let both end."""
        await self.client.release()
        await self.server.release()


@asynccontextmanager
async def both_ends(contestant: Contestant, cores: Sequence[int], *, hold: bool) -> AsyncGenerator[Ends, None]:
    """Start a server, and a client of it."""
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
    """Kill both processes if the run is cancelled, so that neither reports the end of the other."""
    try:
        yield
    finally:
        if trio.current_effective_deadline() == -math.inf:
            for one in workers:
                one.kill()
