"""Nothing is left of ended channels and sessions: no tasks, entities, descriptors or memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelStopped, Limits
from muxkit.protocols import bpmux
from muxkit_adapters import tcp

from ._pairs import Pair, answer_each, at_rest, echo_each, next_duplex, next_source, sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KIB = 1024

pytestmark = pytest.mark.requirement("R-43")


def tasks() -> int:
    """Count the live tasks of this run."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    todo, count = [root], 0
    while todo:
        task = todo.pop()
        count += 1
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return count


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def duplex_cycle(pair: Pair) -> None:
    async with pair.one.open() as here:
        await here.send(b"x")
        there = await next_duplex(pair.other)
        assert await there.receive() == b"x"
        await there.aclose()


async def abort_cycle(pair: Pair) -> None:
    async with pair.one.open() as here:
        there = await next_duplex(pair.other)
        here.abort()
        await there.aclose()


async def cancelled_cycle(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with pair.one.open() as here:
            there = await next_duplex(pair.other)
            scope.cancel()
            await here.receive()
    await there.aclose()


async def ping_cycle(pair: Pair) -> None:
    async with pair.one.open_sink() as sink:
        await sink.ping()
        await (await next_source(pair.other)).aclose()


async def request_cycle(pair: Pair) -> None:
    assert await pair.one.request(b"x") == b"xx"


CYCLES = [duplex_cycle, abort_cycle, cancelled_cycle, ping_cycle, request_cycle]


async def check_cycles(cycle: Callable[[Pair], Awaitable[None]], count: int) -> None:
    # Every cycle cancels channels, more than the limit on resets allows.
    limits = Limits(resets_burst=1_000_000)
    async with sessions(limits=limits) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(answer_each, pair.other)
        await at_rest()
        gc.collect()  # earlier tests may have left objects
        before = tasks(), descriptors()
        for number in range(count):
            if number == count // 2:
                await at_rest()
                gc.collect()
                tracemalloc.start()
            await cycle(pair)
        await at_rest()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown <= 64 * KIB
        assert (tasks(), descriptors()) == before
        for session in (pair.one, pair.other):
            connection = session.connection
            assert session.stats().channels == 0
            assert session._halves() == [session.top, session.messages]
            assert not connection.pings
            assert connection.engine.outbox == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("cycle", CYCLES)
async def test_channels_that_are_over_leave_nothing_behind(cycle: Callable[[Pair], Awaitable[None]]) -> None:
    await check_cycles(cycle, 1000)


@pytest.mark.soak
@pytest.mark.parametrize("cycle", CYCLES)
async def test_ten_thousand_channels_leave_nothing_behind(cycle: Callable[[Pair], Awaitable[None]]) -> None:
    await check_cycles(cycle, 10_000)


async def check_sessions(count: int) -> None:
    ended = 0
    changed = trio.lowlevel.ParkingLot()

    async def handle(link: trio.abc.Stream) -> None:
        nonlocal ended
        async with bpmux.session(link) as session:
            await echo_each(session)
        ended += 1
        changed.unpark_all()

    async def both_have_left(number: int) -> None:
        while ended < number:
            await changed.park()
        await at_rest()

    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(lambda task_status: tcp.serve(handle, 0, task_status=task_status))
        port = int(address.rpartition(":")[2])
        before = tasks(), descriptors()
        for number in range(count):
            if number == count // 2:
                await both_have_left(number)
                gc.collect()
                before = tasks(), descriptors()
                tracemalloc.start()
            async with tcp.connect("127.0.0.1", port) as link, bpmux.session(link) as session:
                async with session.open() as channel:
                    await channel.send(b"x")
                    assert await channel.receive() == b"x"
        await both_have_left(count)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown <= 64 * KIB
        assert (tasks(), descriptors()) == before
        nursery.cancel_scope.cancel()


async def test_sessions_that_are_over_leave_nothing_behind() -> None:
    await check_sessions(100)


@pytest.mark.soak
async def test_a_thousand_sessions_leave_nothing_behind() -> None:
    await check_sessions(1000)


async def test_a_refused_channel_leaves_nothing_behind() -> None:
    limits = Limits(backlog=1, resets_burst=10_000)
    async with sessions(limits=limits) as pair, pair.one.open_sink():
        await at_rest()  # the only place in the backlog is taken
        for _ in range(100):
            with pytest.raises(ChannelStopped):
                await pair.one.request(b"x")
        await at_rest()
        assert pair.one.stats().channels == pair.other.stats().channels == 1
        await next_source(pair.other)
