"""The job idle: how much memory does an open channel take on each side, when nothing happens on it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .orders import Usage, Way, Wrong
from .server import memory_now
from .tasks import Measured, Task

if TYPE_CHECKING:
    from .conversations import Connection
    from .meter import Meter

PATIENCE = 50.0  # s, to open them and until the server has heard of all: twice that is less than we are waited for
AGAIN = 0.01  # s, until the server is asked again
BEFORE = 64  # channels that are open before the first look: the first ones make room for others


async def idle(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Open them all, and look at both processes before and after."""
    kept: list[object] = []
    count = task["channels"]

    async def grow(to: int) -> Usage:
        held = 0
        with trio.move_on_after(PATIENCE):
            while len(kept) < to:
                kept.append(await connection.open_to_keep())
            while (held := (await meter.usage()).held) < to:  # noqa: ASYNC110 - what changes it is another process
                await trio.sleep(AGAIN)
            return await meter.usage(Way.REPORT_COLLECTED)
        raise Wrong(f"after {PATIENCE:g} s {len(kept)} of {to} channels are open, and the server has heard of {held}")

    await meter.usage()  # the first channel that the server hears of is not kept
    server_before, client_before = await grow(BEFORE), memory_now()
    await meter.begin()
    server_after = await grow(BEFORE + count)
    cost = await meter.cost()
    client_after = memory_now()
    return Measured(
        count=1,
        units=count,
        seconds=cost.wall,
        client_cpu=cost.client_cpu,
        server_cpu=cost.server_cpu,
        also={
            "client_bytes": (client_after - client_before) / count,
            "server_bytes": (server_after.memory - server_before.memory) / count,
        },
    )
