"""The jobs rtt, storm, openclose and neighbour: the time of an answer, alone and beside other traffic."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from .meter import Cost, Meter, fit
from .orders import MESSAGE, Order, Way, Wrong, pack_order
from .payloads import payloads
from .streaming import MIB, check

if TYPE_CHECKING:
    from .conversations import Conversation
    from .peers import Connection
    from .tasks import Measured, Task

FIRST = 200  # echoes of the first trial, on all channels together
IDLE_PART = 0.25  # of the seconds: pings before there is load beside them
BULK = 65_536  # bytes, a message of the neighbour
AHEAD = 64  # messages that are ordered together
RISE = 0.05  # s until the neighbour sends at full speed


async def round_trip(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Measure echoes, one at a time on one channel."""
    conversation = await connection.open()
    times: list[float] = []

    async def run(count: int, verify: bool) -> Cost:
        times.clear()
        return await meter.together([partial(_ping, conversation, count, times)])

    count = await fit(task, FIRST, run)
    cost = await run(count, False)
    await connection.close(conversation)
    return cost.of(count, count, {"p50": percentile(times, 50), "p99": percentile(times, 99)})


async def storm(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Measure echoes on all channels at once, one at a time on each."""
    opened = [await connection.open() for _ in range(task["channels"])]

    async def run(count: int, verify: bool) -> Cost:
        return await meter.together([partial(_echo, conversation, count) for conversation in opened])

    count = await fit(task, max(2, FIRST // len(opened)), run)
    cost = await run(count, False)
    for conversation in reversed(opened):
        await connection.close(conversation)
    return cost.of(count, count * len(opened))


async def open_and_close(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Measure channels that are opened, echo once, and are closed in order, by so many tasks at once."""
    messages = payloads(MESSAGE)

    async def work(count: int) -> None:
        for number in range(count):
            _compare(await connection.echo_once(messages[number % len(messages)]), messages[number % len(messages)])

    async def run(count: int, verify: bool) -> Cost:
        return await meter.together([partial(work, count)] * task["channels"])

    count = await fit(task, max(1, FIRST // task["channels"]), run)
    cost = await run(count, False)
    return cost.of(count, count * task["channels"])


async def neighbour(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Measure round trips on one channel, first alone, then beside a channel with bulk traffic."""
    conversation = await connection.open()
    beside = await connection.open()
    idle: list[float] = []
    loaded: list[float] = []
    await _ping_for(conversation, task["seconds"] * IDLE_PART, [])
    await _ping_for(conversation, task["seconds"] * IDLE_PART, idle)
    load = _Load(beside)
    async with trio.open_nursery() as nursery:
        await load.verify()
        nursery.start_soon(load.send)
        nursery.start_soon(load.check)
        await _ping_for(conversation, RISE, [])
        await meter.begin()
        sent = load.sent
        await _ping_for(conversation, task["seconds"], loaded)
        sent = load.sent - sent
        cost = await meter.cost()
        load.is_over = True
    await connection.close(beside)
    await connection.close(conversation)
    also = {
        "idle_p50": percentile(idle, 50),
        "p50": percentile(loaded, 50),
        "p99": percentile(loaded, 99),
        "bulk": sent * BULK / MIB / cost.wall,
    }
    return cost.of(len(loaded), len(loaded), also)


class _Load:
    """The bulk channel: it sends orders with their messages, and checks receipts meanwhile."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._order = Order(Way.BULK, AHEAD, BULK)
        self._owed = 0
        self._has_sent = trio.Event()
        self.sent = 0
        self.is_over = False

    async def verify(self) -> None:
        order = self._order._replace(verify=True)
        messages = payloads(BULK)
        await self._conversation.send(pack_order(order))
        for number in range(AHEAD):
            await self._conversation.send(messages[number % len(messages)])
        check(await self._conversation.receive(), order)

    async def send(self) -> None:
        send, message = self._conversation.send, payloads(BULK)[0]
        order = pack_order(self._order)
        while not self.is_over:
            self._owed += 1
            self._has_sent.set()
            await send(order)
            for _ in range(AHEAD):
                await send(message)
                self.sent += 1
        self._has_sent.set()

    async def check(self) -> None:
        while True:
            await self._has_sent.wait()
            if self._owed == 0:
                if self.is_over:
                    return
                self._has_sent = trio.Event()
                continue
            check(await self._conversation.receive(), self._order)
            self._owed -= 1


async def _echo(conversation: Conversation, count: int) -> None:
    messages, send, receive = payloads(MESSAGE), conversation.send, conversation.receive
    many = len(messages)
    for number in range(count):
        message = messages[number % many]
        await send(message)
        if await receive() != message:
            raise Wrong(f"echo {number} is not what was sent")


async def _ping(conversation: Conversation, count: int, times: list[float]) -> None:
    messages, send, receive, now = payloads(MESSAGE), conversation.send, conversation.receive, time.perf_counter
    many = len(messages)
    for number in range(count):
        message = messages[number % many]
        began = now()
        await send(message)
        answer = await receive()
        times.append(now() - began)
        _compare(answer, message)


async def _ping_for(conversation: Conversation, seconds: float, times: list[float]) -> None:
    """Ping for some time, and at least once, since percentiles need a value."""
    end = time.perf_counter() + seconds
    await _ping(conversation, 1, times)
    while time.perf_counter() < end:
        await _ping(conversation, 1, times)


def _compare(came: bytes, sent: bytes) -> None:
    if came != sent:
        raise Wrong(f"an echo of {len(came)} bytes is not what was sent, {len(sent)} bytes")


def percentile(times: list[float], percent: float) -> float:
    """Return the smallest time that so many percent of all do not exceed.

    The demonstration of muxkit has the same function; this package must run where there is no muxkit.
    """
    return sorted(times)[max(0, math.ceil(len(times) * percent / 100) - 1)]
