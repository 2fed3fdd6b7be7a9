"""Aqueduct runs over QUIC by its URL, with everything real: engine, pump, adapter and sockets."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import Channel, Session

from ._quic import FILES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

URL = "aqueduct+quic://127.0.0.1:0"
MIB = 1024 * 1024


async def serve(
    handler: Callable[[Session], Awaitable[object]], *, task_status: trio.TaskStatus[muxkit.Server]
) -> None:
    await muxkit.serve(handler, URL, certificate=FILES.certificate, key=FILES.key, task_status=task_status)


@muxkit.each_channel
async def echo(channel: Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def test_messages_of_all_sizes_come_back() -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(serve, echo)
        async with muxkit.connect(served.url, ca=FILES.ca) as session, session.open() as channel:
            for message in (b"", b"x", bytes(1000), bytes(300_000)):
                await channel.send(message)
                assert await channel.receive() == message
        nursery.cancel_scope.cancel()


async def test_many_channels_at_once() -> None:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(serve, echo)
        async with muxkit.connect(served.url, ca=FILES.ca) as session, trio.open_nursery() as channels:

            async def talk(number: int) -> None:
                async with session.open() as channel:
                    for turn in range(10):
                        await channel.send(b"%d %d" % (number, turn))
                        assert await channel.receive() == b"%d %d" % (number, turn)

            for number in range(50):
                channels.start_soon(talk, number)
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-08", "R-03")
async def test_64_mib_into_a_stalled_peer_cost_next_to_nothing() -> None:
    async def stall(session: Session) -> None:
        async for channel in session.incoming():
            await channel.receive()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        served = await nursery.start(serve, stall)
        async with muxkit.connect(served.url, ca=FILES.ca) as session:
            channel = await session.open().__aenter__()
            await channel.send(b"first")
            block = bytes(MIB // 16)
            tracemalloc.start()
            try:
                with trio.move_on_after(2) as scope:
                    for _ in range(64 * 16):
                        await channel.send(block)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert scope.cancelled_caught
            assert peak < 4 * MIB
            channel.abort()
        nursery.cancel_scope.cancel()
