"""Hostile callers, in one process and with small amounts; `tests/soak/hostile_calls.py` has the large ones."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from tests.rpc.attacks import ATTACKS, CODECS, Attack, Hostile, served_meanwhile
from tests.rpc.sweeps import PROTOCOLS

if TYPE_CHECKING:
    from trio.testing import MockClock

AMOUNTS = {
    "abandoned_calls": 400,
    "malformed_messages": 60,
    "malformed_calls": 60,
    "compression_bombs": 3,
    "silent_subscribers": 12,
    "headers_at_their_bounds": 12,
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_attack_leaves_nothing_and_the_neighbours_are_served(
    protocol: str, attack: Attack, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = Hostile()
    done = trio.Event()
    async with trio.open_nursery() as nursery:
        async with muxkit.open_server(hostile.handle, f"{protocol}+mem://hostile") as server:
            nursery.start_soon(hostile.publish_all_the_time)
            async with muxkit.connect(server.url) as neighbour:
                async with muxkit.connect(server.url) as session:

                    async def attack_until_done() -> None:
                        try:
                            await attack(session, AMOUNTS[attack.__name__], 7)
                        finally:
                            done.set()

                    nursery.start_soon(attack_until_done)
                    took = await served_meanwhile(neighbour, done)
                    assert max(took) < 5
                with trio.fail_after(3600):  # of virtual time: a peer that cancels a lot has its handlers start slowly
                    while hostile.service.running or any(each.channels() for each in server.sessions()):  # noqa: ASYNC110
                        await trio.sleep(1)
                async with neighbour.open("orders", codec=CODECS["json"]) as orders:
                    await orders.send(hostile_order := CODECS["json"].decode(b'{"id":7}'))
                    assert await orders.receive() == hostile_order
        nursery.cancel_scope.cancel()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_topic_keeps_no_more_for_subscribers_that_never_read(autojump_clock: MockClock) -> None:
    topic = muxkit.Topic(bytes, keep=16)
    async with muxkit.open_server(muxkit.by_name({"t": topic}), "bpmux+mem://silent") as server:
        async with muxkit.connect(server.url) as session:
            subscriptions = [
                await session.subscribe("t", codec=muxkit.Json(bytes), on_lag="drop", since=0) for _ in range(10)
            ]
            tracemalloc.start()
            before = 0
            try:
                for number in range(2000):
                    await topic.publish(bytes(3000))
                    if number == 1000:
                        before = tracemalloc.get_traced_memory()[0]
                assert tracemalloc.get_traced_memory()[0] - before < 200_000
            finally:
                tracemalloc.stop()
            for subscription in subscriptions:
                subscription.abort()


@pytest.mark.requirement("R-71")
async def test_what_a_bomb_expanded_to_is_freed_without_the_garbage_collector(autojump_clock: MockClock) -> None:
    """The error of a handler and its frames held each other, so each bomb kept its megabytes until a collection."""
    bomb = muxkit.Zstd(muxkit.Json(str)).encode("x" * 8_000_000)
    arguments = muxkit.Zstd(muxkit.Json(dict)).encode({})
    gc.collect()
    gc.disable()
    try:
        async with muxkit.open_server(Hostile().handle, "bpmux+mem://bombs") as server:
            async with muxkit.connect(server.url) as session:
                for number in range(6):
                    if number == 2:
                        tracemalloc.start()
                    async with session.open("orders", headers={"codec": "json+zstd"}) as channel:
                        await channel.send(bomb)
                        with pytest.raises(muxkit.ChannelCancelled):
                            await channel.receive()
                    name, headers = "rpc:Orders.upload", {"codec": "json+zstd"}
                    async with session.open(name, payload=arguments, headers=headers) as channel:
                        await channel.send(b"\0" + bomb)
                        assert (await channel.receive())[:1] == b"\1"
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
        gc.enable()
