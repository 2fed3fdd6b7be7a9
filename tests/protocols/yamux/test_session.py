"""yamux sessions: streams of bytes beside channels of messages."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import muxkit
from muxkit.protocols import yamux
from muxkit.runtime import background
from tests.protocols.yamux._helpers import SYN, data, update

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

PATIENCE = 60.0  # s


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[yamux.Session, yamux.Session]]:
    """Join a client and a server by a stream in memory; the client leaves first."""
    here, there = trio.testing.memory_stream_pair()
    over = trio.Event()

    async def serve(task_status: trio.TaskStatus[yamux.Session]) -> None:
        with suppress(muxkit.LinkLost):  # some tests leave streams open at this side
            async with yamux.session(there, role="server", **options) as server:
                task_status.started(server)
                await over.wait()

    async with background() as nursery:
        server = await nursery.start(serve)
        async with yamux.session(here, role="client", **options) as client:
            yield client, server
        over.set()


async def stream_pair(client: yamux.Session, server: yamux.Session) -> tuple[yamux.YamuxStream, yamux.YamuxStream]:
    here = await client.open_stream()
    return here, await anext(server.streams())


@pytest.mark.requirement("R-41")
async def test_a_stream_passes_trios_own_checks(autojump_clock: MockClock) -> None:
    passed = False
    with suppress(muxkit.LinkLost, ExceptionGroup):  # the checks leave streams that are clogged for ever
        async with pair(linger=0.1) as (client, server):

            async def make_clogged() -> tuple[yamux.YamuxStream, yamux.YamuxStream]:
                here, there = await stream_pair(client, server)
                for stream in (here, there):
                    with trio.move_on_after(1):
                        while True:
                            await stream.send_all(bytes(65_536))
                return here, there

            await trio.testing.check_half_closeable_stream(partial(stream_pair, client, server), make_clogged)
            passed = True
    assert passed


async def test_streams_and_channels_live_side_by_side(autojump_clock: MockClock) -> None:
    async with pair() as (client, server):
        streams, channels = server.streams(), server.incoming()
        async with client.open_stream() as stream, client.open("chat", payload=b"tea") as channel:
            await stream.send_all(b"bytes")
            await channel.send(b"a message")
            async with await anext(streams) as other, await anext(channels) as there:
                assert await other.receive_some() == b"bytes"
                assert (there.name, there.opening) == ("chat", b"tea")
                assert await there.receive() == b"a message"
                assert (stream.id, other.id) == (1, 1)


async def test_a_stream_of_a_silent_peer_is_given_to_a_task_that_takes_streams(autojump_clock: MockClock) -> None:
    """A peer that waits for the other side to speak first sends nothing but the opening."""
    async with pair() as (client, server), client.open_stream() as stream:
        began = trio.current_time()
        async with await anext(server.streams()) as other:
            await other.send_all(b"220 welcome")
            assert await stream.receive_some() == b"220 welcome"
        assert trio.current_time() == began


async def test_a_program_that_knows_the_format_of_channels_can_open_one(autojump_clock: MockClock) -> None:
    """Go's library opens a stream by a window update, so the record comes in a later frame."""
    here, there = trio.testing.memory_stream_pair()
    received: list[bytes] = []
    async with trio.open_nursery() as nursery:

        async def open_like_go() -> None:
            await here.send_all(update(1, 0, SYN))
            await trio.sleep(1)
            await here.send_all(data(1, b"\x80\x00\x00\x08muxkit/1\x00\x00\x00\x05hello"))

        nursery.start_soon(open_like_go)
        with suppress(muxkit.LinkLost):  # the other end reads nothing
            async with yamux.session(there, role="server", linger=0.1) as server:
                channel = await anext(server.incoming())
                received.append(await channel.receive())
        await here.aclose()
    assert received == [b"hello"]


async def test_a_stream_for_a_server_of_channels_is_declined(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with muxkit.open_server(echo, "yamux+mem://declined") as server, yamux.connect(server.url) as session:
        stream = await session.open_stream()
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        await stream.aclose()
        async with session.open("still served") as channel:
            await channel.send(b"x")
            assert await channel.receive() == b"x"
    assert "declined streams" in caplog.text


async def test_an_aborted_stream_is_reset_at_the_other_side(autojump_clock: MockClock) -> None:
    async with pair() as (client, server):
        here, there = await stream_pair(client, server)
        here.abort()
        with pytest.raises(trio.BrokenResourceError):
            await there.receive_some()
        await there.aclose()


async def test_a_block_that_is_left_by_an_error_resets_its_stream(autojump_clock: MockClock) -> None:
    async with pair() as (client, server):
        with pytest.raises(ValueError, match="mine"):  # noqa: PT012 - the block is what is tested
            async with client.open_stream() as stream:
                await stream.send_all(b"x")
                await client.ping()  # the server knows the stream by now
                raise ValueError("mine")
        await client.ping()
        with trio.move_on_after(1) as scope:
            await anext(server.streams())  # it was reset before a task took it, so none needs to
        assert scope.cancelled_caught


async def test_shutdown_lets_streams_end_and_takes_no_new_ones(autojump_clock: MockClock) -> None:
    async with pair() as (client, server):
        here, there = await stream_pair(client, server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(server.shutdown, grace=60))
            await trio.sleep(1)
            with pytest.raises(muxkit.ChannelStopped):
                await client.open_stream()
            await here.send_all(b"last words")
            await here.aclose()
            assert await there.receive_some() == b"last words"
            assert await there.receive_some() == b""
            await there.aclose()
        assert trio.current_time() < 60


async def test_openings_wait_for_the_acknowledgement_of_earlier_ones(autojump_clock: MockClock) -> None:
    async with pair(config=yamux.Config(unacknowledged=2)) as (client, server):
        streams = [await client.open_stream() for _ in range(2)]
        with trio.move_on_after(1) as scope:
            await client.open_stream()
        assert scope.cancelled_caught
        taken = [await anext(server.streams())]
        async with trio.open_nursery() as nursery:

            async def open_one() -> None:
                streams.append(await client.open_stream())

            nursery.start_soon(open_one)
        for stream in (*streams, *taken):
            await stream.aclose()


async def test_the_other_side_learns_why_a_session_ended() -> None:
    async def refuse(session: muxkit.Session) -> None:
        raise muxkit.Refused("come back on Monday", code=409)

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(refuse, "yamux+tcp://127.0.0.1:0") as server:
            with pytest.raises(muxkit.LinkLost) as caught:  # noqa: PT012 - any of these may be the first to know
                async with yamux.connect(server.url) as session:
                    await session.ping()
                    await trio.sleep(1)
                    await session.ping()
    assert (caught.value.peer_reason, caught.value.code) == ("come back on Monday", 409)


async def test_a_channel_that_nobody_has_taken_is_none_of_the_application() -> None:
    """Was: it was listed as soon as it had come."""
    async with pair() as (here, there):
        channel = await here.open()
        await channel.send(b"here")
        await trio.testing.wait_all_tasks_blocked()
        assert there.channels() == []
        taken = await anext(there.incoming())
        assert there.channels() == [taken]
        await taken.aclose()
        await channel.aclose()
