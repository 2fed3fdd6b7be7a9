"""Exception groups out of handlers: nurseries wrap what is raised in them, and it means what it meant before."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
import muxkit.asyncio
from muxkit.protocols import relink
from muxkit.runtime import LinkLost, meaning_of

if TYPE_CHECKING:
    from trio.testing import MockClock

PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]


async def refuse() -> None:
    raise muxkit.Refused("too slow", code=429)


async def say_hello(url: str) -> None:
    async with muxkit.connect(url) as session:
        channel = await session.open()
        await channel.send(b"x")
        await channel.receive()


async def fail_in_a_session(url: str, begin: trio.Event) -> None:
    async with muxkit.connect(url):
        await begin.wait()
        raise ZeroDivisionError


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_refusal_in_a_nursery_of_a_channel_handler_is_a_refusal(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F02: the peer read code 500, and twelve lines at ERROR stood in the log."""

    async def handler(channel: muxkit.Channel) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(refuse)

    async with muxkit.open_server(handler, f"{protocol}+mem://groups") as server:
        async with muxkit.connect(server.url) as session:
            channel = await session.open()
            await channel.send(b"x")
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                await channel.receive()
    assert (caught.value.reason, caught.value.code) == ("too slow", 429)
    assert failures(caplog) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_refusal_in_a_nursery_of_a_session_handler_is_a_refusal(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(session: muxkit.Session) -> None:
        await anext(session.incoming())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)

    async with muxkit.open_server(handler, f"{protocol}+mem://groups") as server:
        with pytest.raises(muxkit.LinkLost) as caught:
            await say_hello(server.url)
    assert (caught.value.peer_reason, caught.value.code) == ("too slow", 429)
    assert failures(caplog) == []


async def test_a_refusal_in_a_nursery_of_a_request_handler_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: muxkit.IncomingRequest) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)

    async with muxkit.open_server(muxkit.each_request(handler), "bpmux+mem://groups") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(muxkit.ChannelStopped) as caught:
                await session.request(b"x")
    assert (caught.value.reason, caught.value.code) == ("too slow", 429)
    assert failures(caplog) == []


async def test_a_refusal_in_a_nursery_of_authorize_is_a_refusal() -> None:
    async def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
        raise AssertionError("the nursery raises")

    async def handler(channel: muxkit.Channel) -> None:
        pass

    async with muxkit.open_server(handler, "bpmux+mem://groups", authorize=authorize) as server:
        with pytest.raises(muxkit.Refused, match="too slow"):
            async with muxkit.connect(server.url, token="a-token"):
                pass


async def test_a_refusal_in_a_nursery_of_a_block_is_told_to_the_peer() -> None:
    async def handler(session: muxkit.Session) -> None:
        try:
            await (await session.open()).receive()
        except muxkit.LinkLost as error:
            told.append(error.peer_reason)
            raise

    told: list[str | None] = []
    async with muxkit.open_server(handler, "bpmux+mem://groups") as server:
        with pytest.RaisesGroup(muxkit.Refused):
            async with muxkit.connect(server.url) as session:
                await anext(session.incoming())
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(refuse)
        await trio.testing.wait_all_tasks_blocked()
    assert told == ["too slow"]


async def test_a_listener_of_relink_reads_groups_as_well(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(link: relink.Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)

    async with trio.open_nursery() as nursery:
        listening = await nursery.start(relink.listen, handler, "relink+mem://groups")
        with pytest.raises(muxkit.LinkLost, match="too slow"):
            async with muxkit.connect(listening.url) as session:
                await (await session.open("a")).receive()
        nursery.cancel_scope.cancel()
    assert failures(caplog) == []


async def test_both_tasks_of_a_session_handler_may_notice_that_the_connection_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(session: muxkit.Session) -> None:
        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                channel = await session.open(name)
                nursery.start_soon(channel.receive)
            began.set()

    began = trio.Event()
    async with muxkit.open_server(handler, "bpmux+mem://groups") as server:
        with pytest.raises(ZeroDivisionError):
            await fail_in_a_session(server.url, began)
        await trio.testing.wait_all_tasks_blocked()
    assert failures(caplog) == []


async def test_a_handler_that_refuses_while_it_is_cancelled_does_not_take_the_server_down() -> None:
    """The group held a cancellation as well, so the refusal came out of the server's block."""
    began = trio.Event()

    async def handler(channel: muxkit.Channel) -> None:
        async def refuse_in_the_end() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise muxkit.Refused("closing")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse_in_the_end)
            nursery.start_soon(trio.sleep_forever)
            began.set()

    with trio.CancelScope() as scope:
        async with muxkit.open_server(handler, "bpmux+mem://groups") as server:
            async with muxkit.connect(server.url) as session:
                await session.open()
                await began.wait()
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught


def test_a_refusal_in_a_task_group_of_asyncio_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(channel: muxkit.asyncio.Channel) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())
            group.create_task(asyncio.sleep(3600))

    async def main() -> tuple[str, int]:
        async with muxkit.asyncio.open_server(handler, "bpmux+mem://groups") as server:
            async with muxkit.asyncio.connect(server.url) as session:
                channel = await session.open()
                with pytest.raises(muxkit.ChannelCancelled) as caught:
                    await channel.receive()
                return caught.value.reason, caught.value.code

    assert asyncio.run(main()) == ("too slow", 429)
    assert failures(caplog) == []


async def test_other_errors_in_a_group_stay_failures(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError

    async def handler(channel: muxkit.Channel) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)
        except* ValueError as group:
            raise ExceptionGroup("both", [muxkit.Refused("no"), group]) from None

    async with muxkit.open_server(handler, "bpmux+mem://groups") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                await (await session.open()).receive()
    assert caught.value.code == 500
    assert len(failures(caplog)) == 1


async def test_a_loop_over_sessions_goes_on_after_both_tasks_of_its_body_have_lost_one(
    autojump_clock: MockClock,
) -> None:
    """F08: two tasks raise a group of two losses, and `except muxkit.LinkLost` let it end the loop."""
    served = 0

    async def handler(session: muxkit.Session) -> None:
        nonlocal served
        served += 1
        if served == 1:
            await session.ping()
            raise ValueError("the server fails once")
        async for channel in session:
            await channel.send(b"done")
            return

    async with muxkit.open_server(handler, "bpmux+mem://groups") as server:
        async with muxkit.reconnecting(server.url) as sessions:
            async for session in sessions:
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(session.ping)
                        channel = await session.open("work")
                        assert await channel.receive() == b"done"
                except* muxkit.LinkLost:
                    pass
                else:
                    break
    assert served == 2


LOST = LinkLost("gone", by="peer")
STOPPED = muxkit.ChannelStopped("enough")
REFUSED = muxkit.Refused("no")
FAILED = ValueError()


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        (ExceptionGroup("", [REFUSED]), REFUSED),
        (ExceptionGroup("", [ExceptionGroup("", [REFUSED])]), REFUSED),
        (ExceptionGroup("", [STOPPED, REFUSED, LOST]), REFUSED),
        (ExceptionGroup("", [STOPPED]), STOPPED),
        (ExceptionGroup("", [STOPPED, LOST]), LOST),
        (ExceptionGroup("", [trio.EndOfChannel(), LOST]), LOST),
        (LOST, LOST),
    ],
)
def test_a_group_of_one_kind_means_one_error(group: Exception, meant: Exception) -> None:
    assert meaning_of(group) is meant


def test_a_group_of_several_kinds_and_an_interrupt_stay_what_they_are() -> None:
    mixed = ExceptionGroup("", [LOST, FAILED])
    assert isinstance(meaning_of(mixed), ExceptionGroup)
    interrupted = BaseExceptionGroup("", [REFUSED, KeyboardInterrupt()])
    assert meaning_of(interrupted) is interrupted
