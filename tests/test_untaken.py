"""What a peer opens and nobody takes is declined with a reason, and one handler serves channels and requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
import muxkit.asyncio
from muxkit.protocols import aqueduct, bpmux
from muxkit.runtime import Unclaimed

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

URL = "bpmux+mem://untaken"
PATIENCE = 3600.0  # s, of virtual time


async def shout(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message.upper())


async def answer(request: muxkit.IncomingRequest) -> None:
    await request.respond(request.payload.upper())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- servers whose handler takes one kind


@pytest.mark.parametrize(
    "handler",
    [shout, muxkit.each_channel(shout), muxkit.by_name({"": shout})],
    ids=["a function", "each_channel", "by_name"],
)
async def test_a_server_of_channels_declines_requests(
    handler: muxkit.SessionHandler, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F01: a request to such a server waited for ever, and no log had a line about it."""
    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        with trio.fail_after(Unclaimed.GRACE_SECONDS / 2):
            for _ in range(3):
                with pytest.raises(muxkit.ChannelStopped) as caught:
                    await session.request(b"tea")
                assert caught.value.reason == "this server takes no requests, only channels"
                assert caught.value.code == 405
            async with session.open() as channel:
                await channel.send(b"tea")
                assert await channel.receive() == b"TEA"
    assert warnings(caplog) == ["declined requests of mem untaken: only channels are taken by this server's handler"]


async def test_a_server_of_requests_declines_channels(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F01: `open` and `receive` at such a server waited for ever."""
    async with muxkit.open_server(muxkit.each_request(answer), URL) as server, muxkit.connect(server.url) as session:
        with trio.fail_after(Unclaimed.GRACE_SECONDS / 2):
            channel = await session.open("chat", payload=b"hello")
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                await channel.receive()
            assert caught.value.reason == "this server takes no channels, only requests"
            with pytest.raises(muxkit.ChannelStopped):
                await channel.send(b"x")
            assert await session.request(b"tea") == b"TEA"
    assert warnings(caplog) == ["declined channels of mem untaken: only requests are taken by this server's handler"]


async def test_a_server_of_channels_declines_one_way_channels(autojump_clock: MockClock) -> None:
    async with bpmux.open_server(shout, "mem://untaken") as server, bpmux.connect(server.url) as session:
        with trio.fail_after(Unclaimed.GRACE_SECONDS / 2):
            source = await session.open_source(b"ticks")
            with pytest.raises(muxkit.ChannelCancelled) as caught:
                await source.receive()
            assert caught.value.reason == "this server takes no sources, only channels"
            sink = await session.open_sink(b"log")
            await session.ping()
            with pytest.raises(muxkit.ChannelStopped):
                await sink.send(b"x")


async def test_what_came_before_the_handler_is_declined_as_well(autojump_clock: MockClock) -> None:
    """The server learns what its handler takes after the session has begun, and after the first bytes have come."""
    async with muxkit.open_server(shout, URL) as server, muxkit.connect(server.url) as session:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(declined, session)


async def declined(session: muxkit.Session) -> None:
    with trio.fail_after(PATIENCE), pytest.raises(muxkit.ChannelStopped, match="this server takes no requests"):
        await session.request(b"tea")


async def test_declined_channels_take_no_place(autojump_clock: MockClock) -> None:
    limits = muxkit.Limits(channels=8, backlog=8)
    async with (
        muxkit.open_server(muxkit.each_request(answer), URL, limits=limits) as server,
        muxkit.connect(server.url, limits=limits) as session,
    ):
        for _ in range(50):
            channel = await session.open("chat")
            with pytest.raises(muxkit.ChannelCancelled):
                await channel.receive()
            await channel.aclose()
        await session.ping()
        assert server.sessions()[0].stats().channels == 0


async def test_a_client_that_comes_again_and_again_does_not_fill_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its sessions logs the line once, so the lines of all sessions together need a bound as well."""
    async with muxkit.open_server(shout, URL) as server:
        for _ in range(200):
            async with muxkit.connect(server.url) as session:
                with pytest.raises(muxkit.ChannelStopped):
                    await session.request(b"tea")
    assert 0 < len(warnings(caplog)) <= 60


# --- one handler for both


@pytest.mark.parametrize(
    "make",
    [lambda: muxkit.each_channel(shout, requests=answer), lambda: muxkit.by_name({"": shout}, requests=answer)],
    ids=["each_channel", "by_name"],
)
async def test_one_handler_serves_channels_and_requests(make: Callable[[], muxkit.SessionHandler]) -> None:
    async with muxkit.open_server(make(), URL) as server, muxkit.connect(server.url) as session:
        assert await session.request(b"tea") == b"TEA"
        async with session.open() as channel:
            await channel.send(b"milk")
            assert await channel.receive() == b"MILK"


async def test_a_request_has_its_session() -> None:
    async def who(request: muxkit.IncomingRequest) -> None:
        await request.respond(str(request.session.info.user).encode())

    authorize = muxkit.tokens({"alice": "a-long-random-token"})
    async with muxkit.open_server(muxkit.each_request(who), URL, authorize=authorize) as server:
        async with muxkit.connect(server.url, token="a-long-random-token") as session:
            assert await session.request(b"who am I") == b"alice"


def test_servers_of_asyncio_serve_both_and_decline_as_well() -> None:
    import asyncio

    async def on_channel(channel: muxkit.asyncio.Channel) -> None:
        await channel.send(b"channel")

    async def on_request(request: muxkit.asyncio.Request) -> None:
        await request.respond(f"request over {request.session.info.transport}".encode())

    async def main() -> None:
        both = muxkit.asyncio.by_name({"": on_channel}, requests=on_request)
        async with muxkit.asyncio.open_server(both, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                assert await session.request(b"") == b"request over mem"
                assert await (await session.open()).receive() == b"channel"
        async with muxkit.asyncio.open_server(on_channel, URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                with pytest.raises(muxkit.ChannelStopped, match="this server takes no requests"):
                    await session.request(b"")
        async with muxkit.asyncio.open_server(muxkit.asyncio.each_request(on_request), URL) as server:
            async with muxkit.asyncio.connect(server.url) as session:
                with pytest.raises(muxkit.ChannelCancelled, match="this server takes no channels"):
                    await (await session.open()).receive()

    asyncio.run(main())


@pytest.mark.parametrize("protocol", ["relink", "aqueduct", "e3x"])
async def test_other_protocols_say_that_they_have_no_requests(protocol: str) -> None:
    """F09: `request` was not on `muxkit.Session`, and type checkers refused it."""
    async with muxkit.open_server(shout, f"{protocol}+mem://untaken") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(muxkit.Unsupported, match=f"{protocol} has no requests; bpmux has"):
                await session.request(b"tea")
            with pytest.raises(muxkit.Unsupported, match=f"{protocol} has no requests; bpmux has"):
                session.requests()


# --- session handlers and clients, which may ask later


async def test_a_session_handler_that_takes_channels_only_declines_requests_after_a_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(session: muxkit.Session) -> None:
        async for channel in session.incoming():
            await shout(channel)

    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        began = trio.current_time()
        with pytest.raises(muxkit.ChannelStopped) as caught:
            await session.request(b"tea")
        assert caught.value.reason == "the other side takes no requests"
        assert trio.current_time() - began == pytest.approx(Unclaimed.GRACE_SECONDS)
        with trio.fail_after(1), pytest.raises(muxkit.ChannelStopped):
            await session.request(b"tea")
    assert warnings(caplog) == ["declined requests of mem untaken: no task of this side takes them"]


async def test_a_session_handler_may_take_requests_in_a_second_task(autojump_clock: MockClock) -> None:
    async def handler(session: muxkit.Session) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_channel(shout), session)
            await trio.sleep(Unclaimed.GRACE_SECONDS / 2)
            nursery.start_soon(muxkit.each_request(answer), session)

    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        assert await session.request(b"tea") == b"TEA"
        await trio.sleep(PATIENCE)
        assert await session.request(b"tea") == b"TEA"


async def test_a_kind_that_was_declined_is_accepted_once_it_is_asked_for(autojump_clock: MockClock) -> None:
    async def handler(session: muxkit.Session) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_channel(shout), session)
            await asks.wait()
            nursery.start_soon(muxkit.each_request(answer), session)

    asks = trio.Event()
    async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
        with pytest.raises(muxkit.ChannelStopped):
            await session.request(b"tea")
        asks.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await session.request(b"tea") == b"TEA"


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_a_client_that_takes_no_channels_declines_those_of_its_server(
    protocol: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that opened a channel to such a client waited for ever."""
    caught: list[trio.BrokenResourceError] = []

    async def handler(session: muxkit.Session) -> None:
        await anext(session.incoming())
        for _ in range(2):
            channel = await session.open("news")
            try:
                await channel.send(b"hello")
                await channel.receive()
            except trio.BrokenResourceError as error:
                caught.append(error)
            times.append(trio.current_time())
        over.set()

    times: list[float] = []
    over = trio.Event()
    async with muxkit.open_server(handler, f"{protocol}+mem://untaken") as server:
        async with muxkit.connect(server.url) as session:
            began = trio.current_time()
            channel = await session.open()
            await channel.send(b"x")
            with trio.fail_after(PATIENCE):
                await over.wait()
    assert [getattr(error, "reason", None) for error in caught] == ["the other side takes no channels"] * 2
    assert times[0] - began == pytest.approx(Unclaimed.UNDECIDED_SECONDS, abs=1)
    assert times[1] - times[0] < 1
    (line,) = warnings(caplog)
    assert line.startswith("declined channels of mem untaken")


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_a_client_may_take_its_time_before_it_asks_for_channels(protocol: str, autojump_clock: MockClock) -> None:
    async def handler(session: muxkit.Session) -> None:
        await anext(session.incoming())
        channel = await session.open("news")
        await channel.send(b"hello")
        await over.wait()

    over = trio.Event()
    async with muxkit.open_server(handler, f"{protocol}+mem://untaken") as server:
        async with muxkit.connect(server.url) as session:
            channel = await session.open()
            await channel.send(b"x")
            await trio.sleep(Unclaimed.UNDECIDED_SECONDS / 2)
            assert await (await anext(session.incoming())).receive() == b"hello"
            over.set()


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
async def test_a_session_handler_that_takes_nothing_declines_the_channels_of_its_client(
    protocol: str, autojump_clock: MockClock
) -> None:
    async def handler(session: muxkit.Session) -> None:
        await trio.sleep_forever()

    async with muxkit.open_server(handler, f"{protocol}+mem://untaken", linger=0.1) as server:
        async with muxkit.connect(server.url, linger=0.1) as session:
            with trio.fail_after(PATIENCE):
                for _ in range(2):
                    channel = await session.open()
                    with pytest.raises(trio.BrokenResourceError, match="the other side takes no channels"):
                        await channel.receive()


async def test_a_native_application_of_aqueduct_may_take_its_time(autojump_clock: MockClock) -> None:
    async def handler(session: aqueduct.Session) -> None:
        assert isinstance(session, aqueduct.Server)
        await trio.sleep(PATIENCE)
        async with await session.entrypoint.receive() as message:
            got.append(message.payload)
        over.set()

    got: list[bytes] = []
    over = trio.Event()
    async with aqueduct.open_server(handler, "mem://untaken") as server, aqueduct.connect(server.url) as client:
        assert isinstance(client, aqueduct.Client)
        await client.entrypoint.send(b"tea")
        await over.wait()
    assert got == [b"tea"]
