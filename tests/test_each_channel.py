"""`muxkit.each_channel`: how many handlers run, and what becomes of what they raise."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

import muxkit

URL = "bpmux+mem://each-channel"


@pytest.mark.requirement("R-10")
async def test_no_more_handlers_run_than_were_asked_for_even_when_their_channels_are_gone() -> None:
    running = most = 0
    go_on = trio.Event()

    async def slow(channel: muxkit.Channel) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    async with trio.open_nursery() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(slow, max_concurrent=3), URL)
        async with muxkit.connect(served.url) as session:
            for _ in range(20):
                async with session.open() as channel:
                    await channel.send(b"work")
            await session.ping()
            await trio.testing.wait_all_tasks_blocked()
            assert running == 3
            go_on.set()
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert most == 3


@pytest.mark.requirement("R-36")
async def test_a_handler_that_fails_aborts_its_own_channel_and_the_others_go_on() -> None:
    async def fail_on_bad(channel: muxkit.Channel) -> None:
        async for message in channel:
            if message == b"bad":
                raise ValueError(message)
            await channel.send(message)

    async with trio.open_nursery() as nursery:
        served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(fail_on_bad), URL)
        async with muxkit.connect(served.url) as session, session.open() as victim, session.open() as bystander:
            await victim.send(b"bad")
            with pytest.raises(muxkit.ChannelCancelled):
                await victim.receive()
            await bystander.send(b"good")
            assert await bystander.receive() == b"good"
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-66")
async def test_the_log_says_where_a_handler_failed_but_not_what_it_was_about(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(channel: muxkit.Channel) -> None:
        raise ValueError(await channel.receive())

    with caplog.at_level(logging.INFO):
        async with trio.open_nursery() as nursery:
            served: muxkit.Server = await nursery.start(muxkit.serve, muxkit.each_channel(fail), URL)
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await channel.send(b"canary")
                with pytest.raises(muxkit.ChannelCancelled):
                    await channel.receive()
            nursery.cancel_scope.cancel()
    assert "ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert "canary" not in caplog.text
