"""Handlers of channels: by name, with bounds, and what becomes of what they raise."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

import muxkit

URL = "bpmux+mem://handlers"
SECRET = "tea for two"


async def shout(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message.upper())


async def chat(channel: muxkit.Channel) -> None:
    await channel.send(channel.name.encode() + b"/" + channel.opening)


async def test_each_name_has_its_handler() -> None:
    async with (
        muxkit.open_server(muxkit.by_name({"shout": shout, "chat": chat}), URL) as server,
        muxkit.connect(server.url) as session,
    ):
        async with session.open("shout") as channel:
            await channel.send(b"tea")
            assert await channel.receive() == b"TEA"
        async with session.open("chat", payload=b"tea") as channel:
            assert await channel.receive() == b"chat/tea"


async def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    async with (
        muxkit.open_server(muxkit.by_name({"shout": shout, "chat": chat}), URL) as server,
        muxkit.connect(server.url) as session,
    ):
        channel = await session.open("shuot")
        with pytest.raises(muxkit.ChannelCancelled) as caught:
            await channel.receive()
        assert caught.value.reason == ("no channel is named 'shuot' here; did you mean 'shout'? There are: chat, shout")
        assert caught.value.code == 404


async def test_a_handler_that_fails_tells_its_peer_so_and_nothing_of_its_text() -> None:
    """Was: "the peer gave up on this channel before it was done", and nothing else."""

    async def fail(channel: muxkit.Channel) -> None:
        raise ValueError("the password is tea")

    async with muxkit.open_server(fail, URL) as server, muxkit.connect(server.url) as session:
        channel = await session.open()
        with pytest.raises(muxkit.ChannelCancelled) as caught:
            await channel.receive()
        assert (caught.value.reason, caught.value.code) == ("the handler of this channel failed", 500)
        assert "tea" not in str(caught.value)


async def test_a_failure_is_logged_with_the_way_to_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """Was: "its text is left out, it may hold payload", without a word on how to see it."""

    async def fail(channel: muxkit.Channel) -> None:
        raise ValueError(SECRET)

    async with muxkit.open_server(fail, URL) as server, muxkit.connect(server.url) as session:
        with pytest.raises(muxkit.ChannelCancelled):
            await (await session.open()).receive()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "ValueError" in record.getMessage()
    assert "set the logger 'muxkit' to DEBUG to see it" in record.getMessage()
    assert SECRET not in record.getMessage()


async def test_a_peer_that_leaves_a_handler_with_a_nursery_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Was: about 15 lines of traceback at ERROR for each person that left a chat."""
    over = trio.Event()

    async def both_ways(channel: muxkit.Channel) -> None:
        async def write() -> None:
            while True:
                await channel.send(b"tick")
                await trio.sleep(0.001)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                async for _ in channel:
                    pass
        finally:
            over.set()

    async with muxkit.open_server(both_ways, URL) as server:
        async with muxkit.connect(server.url) as session:
            channel = await session.open()
            await channel.receive()
            channel.abort()
            await over.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
