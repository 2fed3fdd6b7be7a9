"""A pump whose messages go to several receivers, and who reads for whom."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from muxkit_adapters import memory

from ._halves import PlainReceive, at_rest
from ._pumps import Lines, Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.runtime import Reading

TRIES = 200  # whether the reader or the receiver comes first is up to Trio's dice


class Witnessed(memory.MemoryStream):
    """Knows who read last."""

    last_reader: trio.lowlevel.Task | None = None

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        data = super().receive_nowait(max_bytes)
        if data is not None:
            self.last_reader = trio.lowlevel.current_task()
        return data


class Receiver(PlainReceive):
    def __init__(self, run: Running) -> None:
        super().__init__()
        self._run = run

    def _reading(self) -> Reading:
        return self._run.pump.reading


class Table:
    """A pump whose messages go to receivers by their first letter."""

    def __init__(self, run: Running, here: Witnessed, there: memory.MemoryStream) -> None:
        self.run = run
        self.here = here
        self.there = there
        self.receivers = {letter: Receiver(run) for letter in b"ab"}
        self.a, self.b = self.receivers.values()
        run.on_event = self.deliver

    def deliver(self, event: bytes) -> None:
        if event[0] in self.receivers:
            self.receivers[event[0]].deliver(event)

    def lose(self) -> None:
        for receiver in self.receivers.values():
            receiver.ended(self.run.pump.loss)

    async def seat(self, nursery: trio.Nursery, then: Callable[[], Awaitable[object]]) -> None:
        """Run `then` in a task that reads for all as soon as it waits for a message."""
        is_seated = False

        async def receive() -> None:
            nonlocal is_seated
            for _ in range(TRIES):
                await self.a.receive()
                is_seated = self.here.last_reader is trio.lowlevel.current_task()
                if is_seated:
                    break
            await then()  # the place is still free: nobody else had a turn since

        nursery.start_soon(receive)
        for _ in range(TRIES):
            await at_rest()
            if is_seated:
                return
            await self.there.send_all(b"a")
        raise AssertionError("the reader never gave its place up")


@asynccontextmanager
async def table(engine: Lines | None = None) -> AsyncIterator[Table]:
    here, there = memory.pair()
    here.__class__ = Witnessed
    assert isinstance(here, Witnessed)
    run = Running(here, engine or Lines())
    laid = Table(run, here, there)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.pump.run)
        yield laid
        nursery.cancel_scope.cancel()
