"""`chaos_url`: programs that take a URL meet bad weather, on a virtual clock."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit.testing import ChaosPlan, chaos_url


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


@pytest.mark.parametrize("url", ["bpmux+mem://near", "relink+mem://near/jobs", "aqueduct+mem://near"])
async def test_a_message_takes_as_long_as_the_weather_says(url: str, autojump_clock: MockClock) -> None:
    async with muxkit.open_server(echo, url) as server, chaos_url(server.url, ChaosPlan(delay=1.0)) as network:
        assert network.url.startswith(url.partition("mem")[0] + "mem://chaos-")
        async with muxkit.connect(network.url) as session, session.open() as channel:
            began = trio.current_time()
            await channel.send(b"tea")
            assert await channel.receive() == b"tea"
            assert trio.current_time() - began >= 2.0
    assert network.connections == 1


async def test_a_real_server_may_stand_behind_it() -> None:
    async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
        async with chaos_url(server.url, ChaosPlan()) as network:
            async with muxkit.connect(network.url) as session, session.open() as channel:
                await channel.send(b"tea")
                assert await channel.receive() == b"tea"
