"""Handlers of channels: by name, with bounds, and what becomes of what they raise."""

from __future__ import annotations

import logging
import subprocess
import sys

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
    assert "run python -X dev, or set the logger 'muxkit' to DEBUG to see it" in record.getMessage()
    assert SECRET not in record.getMessage()


FAILING = """
import logging, sys, trio, muxkit
logging.basicConfig(stream=sys.stdout)
async def handle(session: muxkit.Session) -> None:
    {body}
async def main():
    url = "{protocol}+mem://failing"
    async with muxkit.open_server(handle, url):
        try:
            async with muxkit.connect(url) as session, session.open() as channel:
                await channel.send(b"?")  # Relink announces a channel with its first message
                await channel.receive()
        except muxkit.LinkLost:
            pass
trio.run(main)
"""


def logged_by(protocol: str, body: str, *options: str) -> str:
    """What the server logs when its handler of sessions fails so."""
    program = FAILING.format(protocol=protocol, body=body)
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
def test_the_text_of_a_failure_is_logged_in_development_mode_only(protocol: str) -> None:
    """F11: it was withheld always, and was the first thing that everybody had to find out."""
    body = "raise ValueError('tea ' + 'is hot')"
    assert "ValueError (tea is hot)" in logged_by(protocol, body, "-X", "dev")
    usual = logged_by(protocol, body)
    assert "ValueError (its text is left out" in usual
    assert "tea is hot" not in usual


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
def test_the_text_of_an_error_about_a_wrong_call_of_muxkit_is_always_logged(protocol: str) -> None:
    said = logged_by(protocol, "async for each in session: await each.send('tea ' + 'is hot')")
    assert "TypeError (a message is bytes, not str)" in said
    assert "tea is hot" not in said


@pytest.mark.parametrize("body", ["raise TypeError('tea ' + 'is hot')", "(lambda: 1)('tea')"])
def test_the_text_of_an_error_of_the_program_is_withheld_whatever_its_type(body: str) -> None:
    said = logged_by("bpmux", body)
    assert "TypeError (its text is left out" in said


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
