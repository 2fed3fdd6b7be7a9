"""Typed channels: values instead of bytes in every protocol, and what a wrong message costs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

import muxkit
from muxkit.protocols import bpmux, e3x

if TYPE_CHECKING:
    from trio.testing import MockClock

ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])


class Price(msgspec.Struct):
    name: str
    cents: int


TEA = Price("tea", 3)


@muxkit.handler(Price)
async def double(channel: muxkit.TypedChannel[Price]) -> None:
    async for price in channel:
        await channel.send(Price(price.name, 2 * price.cents))


@ALL
@pytest.mark.parametrize(
    "codec",
    [muxkit.Json(Price), muxkit.MessagePack(Price), muxkit.Zstd(muxkit.Json(Price))],
    ids=lambda codec: codec.name,
)
async def test_both_ends_send_and_receive_values_with_the_codec_of_the_opener(
    protocol: str, codec: muxkit.Codec[Price]
) -> None:
    async with muxkit.open_server(double, f"{protocol}+mem://typed") as server, muxkit.connect(server.url) as session:
        async with session.open("prices", codec=codec, headers={"user": "tea"}) as prices:
            assert prices.headers == {"user": "tea", "codec": codec.name}
            await prices.send(TEA)
            assert await prices.receive() == Price("tea", 6)
            await prices.send_many([TEA, TEA])
            await prices.finish()
            assert [price.cents async for price in prices] == [6, 6]


@ALL
async def test_a_message_that_does_not_fit_costs_the_peer_the_channel_and_not_the_session(
    protocol: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with muxkit.open_server(double, f"{protocol}+mem://wrong") as server, muxkit.connect(server.url) as session:
        async with session.open("prices", codec=muxkit.Json(Price)) as neighbour:
            channel = await session.open("prices")
            await channel.send(b'{"name":"tea","cents":"secret"}')
            with pytest.raises((muxkit.ChannelCancelled, muxkit.ChannelStopped)) as caught, trio.fail_after(60):
                await channel.receive()
            assert caught.value.code == 422
            assert caught.value.reason == "invalid message at $.cents: Expected `int`, got `str`"
            await neighbour.send(TEA)
            assert await neighbour.receive() == Price("tea", 6)
    assert "aborted a channel for an invalid message ($.cents)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_side_that_receives_an_invalid_message_gets_an_error_and_may_go_on() -> None:
    async def wrong(channel: muxkit.Channel) -> None:
        await channel.send(b"[]")

    async with muxkit.open_server(wrong, "bpmux+mem://client") as server, muxkit.connect(server.url) as session:
        async with session.open(codec=muxkit.Json(Price)) as prices:
            with pytest.raises(muxkit.InvalidMessage, match="Expected `object`, got `array`"):
                await prices.receive()
            with pytest.raises(trio.ClosedResourceError):
                await prices.receive()
        assert await session.ping() >= 0


@ALL
@pytest.mark.parametrize(
    ("name", "reason"),
    [("yaml", "unknown codec 'yaml': expected one of"), ("protobuf", "the codec 'protobuf' can't be used here")],
)
async def test_a_channel_with_a_codec_that_is_not_available_is_refused(
    protocol: str, name: str, reason: str, autojump_clock: MockClock
) -> None:
    async with muxkit.open_server(double, f"{protocol}+mem://unknown") as server, muxkit.connect(server.url) as session:
        channel = await session.open(headers={"codec": name})
        with pytest.raises((muxkit.ChannelCancelled, muxkit.ChannelStopped)) as caught, trio.fail_after(60):
            await channel.receive()
        assert caught.value.code == 415
        assert caught.value.reason.startswith(reason)


async def test_a_handler_with_a_codec_takes_no_other_codec() -> None:
    @muxkit.handler(muxkit.MessagePack(Price))
    async def echo(channel: muxkit.TypedChannel[Price]) -> None:
        async for price in channel:
            await channel.send(price)

    async with muxkit.open_server(echo, "bpmux+mem://fixed") as server, muxkit.connect(server.url) as session:
        async with session.open(codec=muxkit.MessagePack(Price)) as prices:
            await prices.send(TEA)
            assert await prices.receive() == TEA
        channel = await session.open(codec=muxkit.Json(Price))
        with pytest.raises(muxkit.ChannelCancelled, match="unknown codec 'json': expected 'msgpack'"):
            await channel.receive()


async def test_a_value_that_cannot_be_encoded_is_not_sent_and_the_channel_stays_usable() -> None:
    async with muxkit.open_server(double, "bpmux+mem://encode") as server, muxkit.connect(server.url) as session:
        async with session.open(codec=muxkit.Json(Price)) as prices:
            with pytest.raises(NotImplementedError, match="got 'object'"):
                await prices.send(object())  # type: ignore[arg-type]
            await prices.send(TEA)
            assert await prices.receive() == Price("tea", 6)


def test_a_handler_that_is_not_async_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="async"):
        muxkit.handler(Price)(lambda channel: None)  # type: ignore[arg-type, return-value]


async def test_the_sessions_of_each_protocol_keep_their_own_kinds_of_channels() -> None:
    async with bpmux.open_server(double, "bpmux+mem://own") as server, bpmux.connect(server.url) as session:
        async with session.open() as duplex:
            assert duplex.sink is not None
        async with session.open(codec=muxkit.Json(Price)) as typed:
            assert isinstance(typed.raw, bpmux.Duplex)
    async with e3x.open_server(double, "e3x+mem://own") as server, e3x.connect(server.url) as e3x_session:
        async with e3x_session.open(codec=muxkit.Json(Price), reliable=False) as unreliable:
            await unreliable.send(TEA)
            assert await unreliable.receive() == Price("tea", 6)
