"""What the end of channels costs: a lost session wakes its tasks in groups, and nothing waits for a full collection."""

from __future__ import annotations

import gc
import math
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit.runtime.pumps.turns import WAKES, Turns, share_turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    Wait = Callable[[muxkit.Channel], Awaitable[None]]

CHANNELS = 5 * WAKES
PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]
PATIENCE = 300.0  # s; reached only when something hangs


class Passes:
    """Counts what happens in each pass of Trio's loop."""

    def __init__(self) -> None:
        self.number = 0
        self.work: Counter[int] = Counter()

    async def run(self) -> None:
        while True:
            self.number += 1
            await trio.lowlevel.checkpoint()


async def fill(channel: muxkit.Channel) -> None:
    while True:
        await channel.send(bytes(16 * 1024))


async def hear(channel: muxkit.Channel) -> None:
    while True:
        await channel.receive()


async def never(channel: muxkit.Channel) -> None:
    await trio.sleep_forever()


class LeftError(Exception):
    """Ends the session in which it is raised."""


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
@pytest.mark.parametrize(
    ("protocol", "wait"),
    [*((protocol, hear) for protocol in PROTOCOLS), *((protocol, fill) for protocol in PROTOCOLS[:3])],
)
async def test_the_tasks_of_a_lost_session_wake_in_groups(protocol: str, wait: Wait) -> None:
    """Was: The end of a session with 6,000 channels woke all their tasks in one pass of the loop, which took 110 ms."""
    share_turns(Turns(lambda: 0.0))
    passes, lost = Passes(), 0
    limits = muxkit.Limits(outbox=16 * 1024, backlog=2 * CHANNELS)

    async def work(channel: muxkit.Channel) -> None:
        nonlocal lost
        try:
            await wait(channel)
        except muxkit.LinkLost:
            lost += 1
            passes.work[passes.number] += 1

    async def leave(url: str, nursery: trio.Nursery) -> None:
        async with muxkit.connect(url, limits=limits) as session:
            for _ in range(CHANNELS):
                openings.append(session.open())  # not left: it would be for the block to wake them
                nursery.start_soon(work, await openings[-1].__aenter__())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(passes.run)
            await trio.lowlevel.checkpoint()
            raise LeftError

    openings: list[AbstractAsyncContextManager[muxkit.Channel]] = []
    async with trio.open_nursery() as nursery:
        url = f"{protocol}+mem://{protocol}-{wait is fill}"
        await nursery.start(partial(muxkit.serve, muxkit.each_channel(never), url, limits=limits))
        with trio.fail_after(PATIENCE):
            with pytest.raises(LeftError):
                await leave(url, nursery)
            while lost < CHANNELS:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert lost == CHANNELS
    assert max(passes.work.values()) <= 2 * WAKES  # Trio shuffles a pass, so two groups may fall between two counts


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
async def test_a_channel_that_is_over_is_freed_without_a_garbage_collection(protocol: str) -> None:
    """A full collection stops all sessions, for as long as all objects of the process take."""

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def use(session: muxkit.Session, count: int) -> None:
        for _ in range(count):
            async with session.open() as channel:
                await channel.send(b"x")
                await channel.receive()
        await trio.testing.wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery:
        url = f"{protocol}+mem://{protocol}-freed"
        await nursery.start(partial(muxkit.serve, muxkit.each_channel(echo), url))
        async with muxkit.connect(url) as session:
            await use(session, 10)
            gc.collect()
            gc.disable()
            try:
                await use(session, CHANNELS)
                found = gc.collect()
            finally:
                gc.enable()
        nursery.cancel_scope.cancel()
    assert found < CHANNELS  # a channel had some ten objects


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
async def test_a_process_that_was_held_up_reads_what_has_come_before_it_gives_a_peer_up(
    protocol: str, mock_clock: trio.testing.MockClock
) -> None:
    """A clock and a reader that are woken in the same turn run in any order: hence many sessions and moments."""
    async with muxkit.open_server(echo, f"{protocol}+mem://held-up") as server, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(muxkit.connect(server.url)) for _ in range(12)]
        for turns in range(8):
            mock_clock.autojump_threshold = 0
            for session in sessions:
                assert await answer(session) == b"x"
            mock_clock.autojump_threshold = math.inf
            mock_clock.jump(21.0)  # each side asks the other whether it is there
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            mock_clock.jump(60.0)  # the answer is somewhere on its way
            await trio.testing.wait_all_tasks_blocked()
        mock_clock.autojump_threshold = 0
        for session in sessions:
            assert await answer(session) == b"x"


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def answer(session: muxkit.Session) -> bytes:
    async with session.open("call") as channel:
        await channel.send(b"x")
        return await channel.receive()
