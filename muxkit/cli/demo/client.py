"""The client process of the demo: many echo channels and one bulk channel on one connection, and pings.

`python -m muxkit.cli.demo.client URL PLAN` prints its progress and its result as lines of JSON.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

import muxkit
from muxkit.cli.demo.events import (
    Order,
    Plan,
    Progress,
    Totals,
    peak_memory,
    read_receipt,
    run_part,
    tell,
    until_released,
)
from muxkit.cli.demo.payloads import BULK_SIZES, ECHO_SIZES, Checked, Payloads
from muxkit.cli.demo.samples import Samples
from muxkit.cli.outcome import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

BATCH = 16  # bulk messages that are sent together
ECHO_PAUSE = 0.01  # s, between two echoes of a channel
PING_PAUSE = 0.005  # s, between two pings
PROGRESS_PAUSE = 0.1  # s, between two lines


class Client:
    """One run of the demo."""

    def __init__(self, session: muxkit.Session, plan: Plan) -> None:
        self._session = session
        self._plan = plan
        self._begin = trio.Event()
        self._is_over = False
        self._opened_at = trio.current_time()
        self._began_at = 0.0
        self._idle_pings = Samples()
        self._load_pings = Samples()
        self._echoes = Samples()
        self._last_ping: float | None = None
        self.checked = Checked()
        self.messages_sent = 0
        self.bytes_sent = 0

    async def run(self) -> Totals:
        """Open all channels, wait while they are idle, then let all of them work at once."""
        async with trio.open_nursery() as beside:
            beside.start_soon(self._ping)
            beside.start_soon(self._tell_progress)
            async with trio.open_nursery() as channels:
                await channels.start(self._bulk, Order("bulk", 0, self._plan.seed))
                for number in range(1, self._plan.channels + 1):
                    await channels.start(self._echo, Order("echo", number, self._plan.seed + number))
                await trio.sleep(self._plan.idle_seconds)
                self._began_at = trio.current_time()
                self._begin.set()
                await trio.sleep(self._plan.seconds)
                self._is_over = True
            seconds = trio.current_time() - self._began_at
            beside.cancel_scope.cancel()
        return Totals(
            messages_sent=self.messages_sent,
            bytes_sent=self.bytes_sent,
            messages_verified=self.checked.messages,
            bytes_verified=self.checked.bytes,
            problems=self.checked.problems,
            memory=peak_memory(),
            seconds=seconds,
            idle_pings=self._idle_pings.kept,
            load_pings=self._load_pings.kept,
            echoes=self._echoes.kept,
        )

    # --- the channels

    async def _echo(self, order: Order, task_status: trio.TaskStatus[None]) -> None:
        payloads, checked, where = Payloads(order.seed, ECHO_SIZES), self.checked, f"echo channel {order.channel}"
        number = size = 0
        async with self._session.open() as channel:
            await self._announce(channel, order, task_status)
            await trio.sleep(ECHO_PAUSE * order.channel / self._plan.channels)  # spreads the echoes over time
            while not (self._is_over and number):
                message = payloads.message(number)
                sent_at = trio.current_time()
                await channel.send(message)
                answer = await channel.receive()
                self._echoes.add(trio.current_time() - sent_at)
                checked.check(where, number, answer, message)
                number += 1
                size += len(message)
                self.messages_sent += 1
                self.bytes_sent += len(message)
                await trio.sleep(ECHO_PAUSE)
            await self._confirm(channel, where, number, size)

    async def _bulk(self, order: Order, task_status: trio.TaskStatus[None]) -> None:
        payloads = Payloads(order.seed, BULK_SIZES)
        number = size = 0
        async with self._session.open() as channel:
            await self._announce(channel, order, task_status)
            while not self._is_over:
                batch = [payloads.message(number + place) for place in range(BATCH)]
                await channel.send_many(batch)
                batch_size = sum(map(len, batch))
                number += BATCH
                size += batch_size
                self.messages_sent += BATCH
                self.bytes_sent += batch_size
            await self._confirm(channel, "bulk channel", number, size)

    async def _announce(self, channel: muxkit.Channel, order: Order, task_status: trio.TaskStatus[None]) -> None:
        await channel.send(msgspec.json.encode(order))
        task_status.started()
        await self._begin.wait()

    async def _confirm(self, channel: muxkit.Channel, where: str, number: int, size: int) -> None:
        """Finish the channel, and compare with the server's receipt, which must be its last message."""
        await channel.finish()
        receipt = read_receipt(await channel.receive())
        if (receipt.messages, receipt.bytes) != (number, size):
            self.checked.note(
                f"{where}: {number} messages of {size} bytes were sent, "
                f"{receipt.messages} of {receipt.bytes} bytes were received"
            )
        async for message in channel:
            self.checked.note(f"{where}: {len(message)} bytes came after the receipt")

    # --- pings and progress

    async def _ping(self) -> None:
        while True:
            self._last_ping = took = await self._session.ping()
            (self._load_pings if self._begin.is_set() else self._idle_pings).add(took)
            await trio.sleep(PING_PAUSE)

    async def _tell_progress(self) -> None:
        while True:
            began = self._began_at or self._opened_at
            tell(
                Progress(
                    phase="load" if self._began_at else "idle",
                    elapsed=trio.current_time() - began,
                    messages=self.messages_sent + self.checked.messages,
                    bytes=self.bytes_sent + self.checked.bytes,
                    ping=self._last_ping,
                )
            )
            await trio.sleep(PROGRESS_PAUSE)


async def measure(url: str, plan: Plan) -> Totals:
    """Connect and run, within the time of the plan."""
    limit = plan.idle_seconds + plan.seconds + plan.patience
    with trio.move_on_after(limit):
        async with connected(url) as session:
            return await Client(session, plan).run()
    raise trio.TooSlowError(f"the run was not over after {limit:g} s")


async def measure_while_wanted(url: str, plan: Plan) -> Totals | None:
    """Measure until the parent process closes standard input; then the result is None."""
    totals: Totals | None = None
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            await until_released()
            nursery.cancel_scope.cancel()

        nursery.start_soon(leave)
        totals = await measure(url, plan)
        nursery.cancel_scope.cancel()
    return totals


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[muxkit.Session, None]:
    """Connect; only a failure to connect has the exit code for that."""
    async with AsyncExitStack() as stack:
        try:
            session = await stack.enter_async_context(muxkit.connect(url))
        except OSError as error:
            raise CommandFailed(f"could not connect to {url}: {error}", Exit.NOT_CONNECTED) from error
        yield session


if __name__ == "__main__":
    sys.exit(run_part(partial(measure_while_wanted, sys.argv[1], msgspec.json.decode(sys.argv[2], type=Plan))))
