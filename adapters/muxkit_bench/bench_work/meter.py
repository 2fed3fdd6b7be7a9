"""The cost of work: the client's time until the last answer, and the CPU time of both processes."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, NamedTuple

import trio

from .orders import Order, Usage, Way, pack_order, unpack_usage
from .tasks import Measured

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .conversations import Conversation
    from .tasks import Task

PART = 0.2  # of a pass: the least length of a trial that decides how much work fills a pass
WARM = 4  # the verified warm-up is this part of a pass, once its size is known
STEP = 16  # times as much work at most is tried next when a trial was too short


class Cost(NamedTuple):
    """Seconds of wall time and CPU time."""

    wall: float
    client_cpu: float
    server_cpu: float

    def of(self, count: int, units: float, also: dict[str, float] | None = None) -> Measured:
        """Make the result of a pass: units on each channel, and in all."""
        return Measured(
            count=count,
            units=units,
            seconds=self.wall,
            client_cpu=self.client_cpu,
            server_cpu=self.server_cpu,
            also=also or {},
        )


class Meter:
    """Measures costs; it asks the server on a channel apart from the job."""

    def __init__(self, control: Conversation) -> None:
        self._control = control
        self._began = Cost(0.0, 0.0, 0.0)

    async def usage(self, way: Way = Way.REPORT) -> Usage:
        await self._control.send(pack_order(Order(way)))
        return unpack_usage(await self._control.receive())

    async def begin(self) -> None:
        gc.collect()
        server_cpu = (await self.usage()).cpu / 1e9
        self._began = Cost(time.perf_counter(), time.process_time(), server_cpu)

    async def cost(self) -> Cost:
        """Return the cost since `begin`."""
        wall, client_cpu = time.perf_counter(), time.process_time()
        server_cpu = (await self.usage()).cpu / 1e9
        began = self._began
        return Cost(wall - began.wall, client_cpu - began.client_cpu, server_cpu - began.server_cpu)

    async def together(self, parts: Sequence[Callable[[], Awaitable[object]]]) -> Cost:
        """Run all parts at once and return the cost; the time begins when every part is ready."""
        begin = trio.Event()

        async def one(part: Callable[[], Awaitable[object]], *, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            await begin.wait()
            await part()

        async with trio.open_nursery() as nursery:
            for part in parts:
                await nursery.start(one, part)
            await self.begin()
            begin.set()
        return await self.cost()


async def fit(task: Task, first: int, run: Callable[[int, bool], Awaitable[Cost]]) -> int:
    """Warm up, verifying all payload, and return how many units on each channel fill a pass."""
    if task["count"]:
        await run(max(1, task["count"] // WARM), True)
        return task["count"]
    count = first
    await run(count, True)
    while True:
        wall = max((await run(count, False)).wall, 1e-6)
        full = count * task["seconds"] / wall
        if wall >= PART * task["seconds"]:
            return max(1, task["least"], round(full))
        count = min(count * STEP, max(count + 1, round(full)))
