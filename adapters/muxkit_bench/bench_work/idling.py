"""The job idle: the memory that an idle open channel takes on each side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .orders import Usage, Way, Wrong
from .server import memory_now

if TYPE_CHECKING:
    from .meter import Meter
    from .peers import Connection
    from .tasks import Measured, Task

OPEN_TIMEOUT = 50.0  # s until all are open and known to the server; twice this is less than the time of a pass
AGAIN = 0.01  # s between two questions to the server
BEFORE = 64  # channels that are open before the first measurement, since the first ones allocate room for others


async def idle(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Open all channels, and measure both processes before and after."""
    kept: list[object] = []
    count = task["channels"]

    async def grow(to: int) -> Usage:
        held = 0
        with trio.move_on_after(OPEN_TIMEOUT):
            while len(kept) < to:
                kept.append(await connection.open_to_keep())
            while (held := (await meter.usage()).held) < to:  # noqa: ASYNC110 - what changes it is another process
                await trio.sleep(AGAIN)
            return await meter.usage(Way.REPORT_COLLECTED)
        raise Wrong(f"after {OPEN_TIMEOUT:g} s {len(kept)} of {to} channels are open, and the server knows {held}")

    await meter.usage()  # the first channel that the server hears of is not kept
    server_before, client_before = await grow(BEFORE), memory_now()
    await meter.begin()
    server_after = await grow(BEFORE + count)
    cost = await meter.cost()
    client_after = memory_now()
    also = {
        "client_bytes": (client_after - client_before) / count,
        "server_bytes": (server_after.memory - server_before.memory) / count,
    }
    return cost.of(1, count, also)
