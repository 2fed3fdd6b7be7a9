"""Typed channels, topics and spans from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import assert_type

import msgspec
import pytest
from opentelemetry.trace import SpanKind

import muxkit
import muxkit.asyncio
import muxkit.topics
from muxkit.asyncio import rpc
from tests._spans import is_child, recorded_spans
from tests.on_asyncio.loops import LOOPS, run
from tests.rpc.orders import Orders, OrdersService

pytestmark = pytest.mark.parametrize("loop", LOOPS)

Loop = Callable[[], asyncio.AbstractEventLoop]
ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])


class Price(msgspec.Struct):
    name: str
    cents: int


JSON = muxkit.Json(Price)


@muxkit.asyncio.handler(Price)
async def double(channel: muxkit.asyncio.TypedChannel[Price]) -> None:
    async for price in channel:
        await channel.send(Price(price.name, 2 * price.cents))


def url_of(protocol: str) -> str:
    return f"{protocol}+udp://127.0.0.1:0" if protocol == "e3x" else f"{protocol}+tcp://127.0.0.1:0"


@ALL
def test_a_typed_channel_carries_values_in_both_directions(loop: Loop, protocol: str) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(double, url_of(protocol)) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                async with session.open("prices", codec=JSON) as prices:
                    assert prices.headers["codec"] == "json"
                    await prices.send(Price("tea", 3))
                    price = await prices.receive()
                    assert_type(price, Price)
                    assert price == Price("tea", 6)
                    await prices.send_many([Price("a", 1), Price("b", 2)])
                    await prices.finish()
                    assert [each.cents async for each in prices] == [2, 4]
                prices = await session.open("prices", codec=muxkit.MessagePack(Price))
                await prices.send(Price("pot", 4))
                assert await prices.receive_many() == [Price("pot", 8)]
                await prices.aclose()

    run(loop, main)


def test_a_message_that_does_not_fit_costs_the_channel_and_not_the_session(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(double, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                async with session.open("prices", codec=muxkit.Json(int)) as prices:
                    await prices.send(7)
                    with pytest.raises(muxkit.ChannelCancelled) as caught:
                        await prices.receive()
                    assert caught.value.code == 422
                async with session.open("prices", codec=muxkit.Json(int)) as raw:
                    await raw.raw.send(b'{"name":"tea","cents":1}')
                    with pytest.raises(muxkit.InvalidMessage):
                        await raw.receive()
                async with session.open("prices", codec=JSON) as again:
                    await again.send(Price("tea", 1))
                    assert (await again.receive()).cents == 2

    run(loop, main)


def test_an_unknown_codec_is_refused(loop: Loop) -> None:
    async def main() -> None:
        async with muxkit.asyncio.open_server(double, "bpmux+tcp://127.0.0.1:0") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                async with session.open("prices", headers={"codec": "nonsense"}) as channel:
                    with pytest.raises(muxkit.ChannelCancelled, match="unknown codec 'nonsense'") as caught:
                        await channel.receive()
                    assert caught.value.code == 415

    run(loop, main)


@ALL
def test_a_topic_reaches_its_subscribers_and_tells_who_is_here(loop: Loop, protocol: str) -> None:
    async def main() -> None:
        topic = muxkit.asyncio.Topic(Price)
        handlers = muxkit.asyncio.by_name({"prices": topic, "prices/presence": topic.presence})
        async with muxkit.asyncio.open_server(handlers, url_of(protocol)) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                presence = muxkit.Json(muxkit.topics.Presence)
                async with session.subscribe("prices/presence", codec=presence) as people:
                    async with session.subscribe("prices", codec=JSON, member="ann") as prices:
                        here = await people.__anext__()
                        assert (here.member.name, here.is_here) == ("ann", True)
                        assert (topic.subscribers, [each.name for each in topic.members]) == (1, ["ann"])
                        assert await topic.publish(Price("tea", 1)) == 1
                        assert topic.publish_nowait(Price("tea", 2)) == topic.head == 2
                        price = await prices.__anext__()
                        assert_type(price, Price)
                        assert [price.cents, (await prices.__anext__()).cents] == [1, 2]
                        position = prices.position
                    assert not (await people.__anext__()).is_here
                await topic.publish(Price("tea", 3))
                async with session.subscribe("prices", codec=JSON, since=position) as prices:
                    topic.close()
                    assert [price.cents async for price in prices] == [3]

    run(loop, main)


def test_a_subscriber_that_is_too_slow_ends_with_lagged(loop: Loop) -> None:
    async def main() -> None:
        topic = muxkit.asyncio.Topic(int, keep=4)
        async with muxkit.asyncio.open_server(
            muxkit.asyncio.by_name({"n": topic}), "bpmux+tcp://127.0.0.1:0"
        ) as server:
            for number in range(10):
                topic.publish_nowait(number)
            async with muxkit.asyncio.connect(server.url) as session:
                async with session.subscribe("n", codec=muxkit.Json(int), since=1) as numbers:
                    with pytest.raises(muxkit.topics.Lagged) as caught:
                        await numbers.__anext__()
                    assert caught.value.lost == numbers.lost == 5

    run(loop, main)


def test_a_topic_with_a_journal_goes_on_after_a_restart(loop: Loop, tmp_path: Path) -> None:
    async def publish_and_read(number: int) -> list[int]:
        async with muxkit.asyncio.Topic(int, journal=f"sqlite:{tmp_path / 'topics.db'}", name="n") as topic:
            handlers = muxkit.asyncio.by_name({"n": topic})
            async with muxkit.asyncio.open_server(handlers, "bpmux+tcp://127.0.0.1:0") as server:
                await topic.publish(number)
                async with muxkit.asyncio.connect(server.url) as session:
                    async with session.subscribe("n", codec=muxkit.Json(int), since=0) as numbers:
                        topic.close()
                        return [each async for each in numbers]

    async def main() -> None:
        assert await publish_and_read(7) == [7]
        assert await publish_and_read(8) == [7, 8]

    run(loop, main)


def test_spans_join_across_both_event_loops(loop: Loop) -> None:
    async def main() -> None:
        with recorded_spans() as spans:
            async with muxkit.asyncio.open_server(rpc.serve(OrdersService()), "bpmux+tcp://127.0.0.1:0") as server:
                async with muxkit.asyncio.connect(server.url) as session:
                    with spans.tracer.start_as_current_span("outer"):
                        await rpc.client(Orders, session).get(7)
                        async with session.open("plain"):
                            pass
        [outer] = spans.of(SpanKind.INTERNAL)
        clients = spans.of(SpanKind.CLIENT)
        assert sorted(span.name for span in clients) == ["Orders/get", "channel plain"]
        assert all(is_child(span, outer) for span in clients)

    run(loop, main)
