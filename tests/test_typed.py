"""`bpmux.connect` and its siblings: the face of one protocol, with its own sessions and channels for type checkers."""

from __future__ import annotations

from typing import assert_type

import pytest
import trio

import muxkit
from muxkit.core import with_name
from muxkit.protocols import aqueduct, bpmux, e3x, relink

PATIENCE = 60.0  # s


async def test_bpmux_gives_sessions_that_have_requests() -> None:
    async def answer(session: bpmux.Session) -> None:
        async for request in session.requests():
            async with request:
                await request.respond(request.payload[::-1])

    with trio.fail_after(PATIENCE):
        async with bpmux.open_server(answer, "tcp://127.0.0.1:0") as server:
            assert server.url.startswith("bpmux+tcp://127.0.0.1:")
            async with bpmux.connect(server.url) as session:
                assert_type(session, bpmux.Session)
                assert await session.request(b"tea") == b"aet"
            async with bpmux.reconnecting(server.url.partition("+")[2]) as sessions:
                async for again in sessions:
                    assert_type(again, bpmux.Session)
                    assert await again.request(b"ab") == b"ba"
                    break


async def test_a_handler_may_take_the_channels_of_the_protocol() -> None:
    async def tell(channel: bpmux.Duplex) -> None:
        await channel.send(channel.sent_with_opening)

    with trio.fail_after(PATIENCE):
        async with bpmux.open_server(tell, "mem://typed") as server, bpmux.connect(server.url) as session:
            channel = await session.open("chat", payload=b"tea")
            assert_type(channel, bpmux.Duplex)
            assert await channel.receive() == with_name("chat", b"tea")
            await channel.aclose()


async def test_relink_aqueduct_and_e3x_have_the_same_face() -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    with trio.fail_after(PATIENCE):
        async with relink.open_server(echo, "mem://r") as server, relink.connect(server.url) as link:
            assert_type(link, relink.Link)
            await echoes(link)
        async with aqueduct.open_server(echo, "mem://a") as server, aqueduct.connect(server.url) as connection:
            assert_type(connection, aqueduct.Session)
            await echoes(connection)
        async with e3x.open_server(echo, "mem://e") as server, e3x.connect(server.url) as session:
            assert_type(session, e3x.Session)
            await echoes(session)


async def echoes(session: muxkit.Session) -> None:
    async with session.open() as channel:
        await channel.send(b"x")
        assert await channel.receive() == b"x"


async def test_a_url_of_another_protocol_is_told() -> None:
    with pytest.raises(ValueError, match="names relink; bpmux has URLs such as"):
        bpmux.connect("relink+tcp://127.0.0.1:7000")
