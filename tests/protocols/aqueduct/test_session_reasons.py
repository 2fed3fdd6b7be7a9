"""What one side says when it opens, aborts or ends reaches the other one; and cancelling many channels ends nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LinkLost, RemoteProtocolError
from muxkit.protocols import aqueduct
from muxkit.runtime import ChannelCancelled, ChannelStopped
from muxkit.runtime.mux_session import connection_of
from tests.protocols.aqueduct._session_pairs import (
    LINKS,
    at_rest,
    carried_receiver,
    connected,
    over_memory,
    over_quic,
    over_tcp,
    payloads,
    rough,
    send_on,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.protocols.aqueduct._session_pairs import MakeLinks

BOTH = pytest.mark.parametrize("links", [over_tcp, over_quic], ids=["tcp", "quic"])


@pytest.mark.parametrize("name", LINKS)
async def test_a_channel_has_the_name_and_the_payload_that_it_was_opened_with(name: str) -> None:
    async with connected(LINKS[name]) as pair:
        async with pair.client.open("chat", payload=b"tea") as here:
            there = await anext(pair.server.incoming())
            for channel, session in ((here, pair.client), (there, pair.server)):
                assert (channel.name, channel.opening) == ("chat", b"tea")
                assert channel.session is session
                assert session.channels() == [channel]
            back = await pair.server.open("news")  # the server opens, too
            assert (await anext(pair.client.incoming())).name == "news"
            await back.aclose()
        async with pair.client.open() as nameless:
            assert (nameless.name, nameless.opening) == ("", b"")
            there_too = await anext(pair.server.incoming())
            assert (there_too.name, there_too.opening) == ("", b"")


async def test_channels_that_are_over_are_not_listed(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        async with pair.client.open() as here:
            assert pair.server.channels() == []  # it was not taken yet
            there = await anext(pair.server.incoming())
            assert pair.server.channels() == [there]
            await there.aclose()
        await at_rest(1.0)
        assert pair.client.channels() == pair.server.channels() == []
        assert here.sending.channel is None
        assert there.receiving.channel is None


async def test_a_channel_that_its_peer_cancels_before_it_is_taken_is_not_given_away(autojump_clock: MockClock) -> None:
    """Was: the session forgot the channel of the half before it looked for it, so a handler was started for nothing."""
    async with connected() as pair:
        incoming = pair.server.incoming()
        cancelled = await pair.client.open("cancelled")
        await at_rest(1.0)
        cancelled.abort("changed my mind")
        await at_rest(1.0)
        async with pair.client.open("kept"):
            assert (await anext(incoming)).name == "kept"


async def test_a_channel_as_a_stream_of_bytes(autojump_clock: MockClock) -> None:
    async with connected() as pair, pair.client.open() as here:
        there = (await anext(pair.server.incoming())).as_stream()
        stream = here.as_stream()
        await stream.send_all(b"hello")
        await stream.send_eof()
        assert await there.receive_some() == b"hello"
        assert await there.receive_some() == b""
        await there.aclose()


async def test_what_waits_on_a_channel_is_counted(autojump_clock: MockClock) -> None:
    async with rough() as pair, pair.client.open() as here:
        await here.send(b"12345")
        there = await anext(pair.server.incoming())
        await at_rest()
        assert there.stats().unread == 5
        assert (here.stats().queued, here.stats().waiting_since) == (0, None)


@BOTH
@pytest.mark.parametrize("by", ["client", "server"])
async def test_the_reason_and_the_code_of_an_abort_reach_both_halves_at_the_other_side(
    links: MakeLinks, by: str
) -> None:
    async with connected(links) as pair:
        here = await pair.client.open()
        there = await anext(pair.server.incoming())
        aborting, other = (here, there) if by == "client" else (there, here)
        await aborting.send(b"before")
        assert await other.receive() == b"before"
        aborting.abort("disk full", code=7)
        with pytest.raises(ChannelCancelled, match="disk full") as cancelled:
            await other.receive()
        assert (cancelled.value.reason, cancelled.value.code) == ("disk full", 7)
        with pytest.raises(ChannelStopped) as stopped:
            await send_on(other.sender, b"x")
        assert (stopped.value.reason, stopped.value.code) == ("disk full", 7)


async def test_a_sender_that_was_attached_says_why_it_gives_up(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        await sender.send(b"x")
        sender.cancel("no more", code=3)
        with pytest.raises(aqueduct.Cancelled) as cancelled:
            await payloads(receiver)
        assert (cancelled.value.reason, cancelled.value.code) == ("no more", 3)


async def test_a_oneshot_channel_has_no_room_for_a_reason(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair, oneshot=True)
        sender.cancel("no more", code=3)
        with pytest.raises(aqueduct.Cancelled) as cancelled:
            await receiver.receive()
        assert (cancelled.value.reason, cancelled.value.code) == ("", 0)


async def test_a_reason_reaches_a_peer_that_does_not_read(autojump_clock: MockClock) -> None:
    limits = Limits(channel_bytes=1000, channel_floor=100, channel_first=1000)
    async with rough(limits=limits) as pair:
        here = await pair.client.open()
        there = await anext(pair.server.incoming())
        with trio.move_on_after(1):
            await send_on(here.sender, bytes(100))
        here.abort("full")
        with pytest.raises(ChannelCancelled) as cancelled:
            await payloads(there.receiver)
        assert cancelled.value.reason == "full"


@BOTH
async def test_an_error_in_the_block_is_the_reason_at_the_other_side(links: MakeLinks) -> None:
    async with links() as (here, there):
        async with trio.open_nursery() as nursery:

            async def fail() -> None:
                with suppress(KeyError):
                    async with aqueduct.connection(here):
                        raise KeyError

            async def hear() -> None:
                async with aqueduct.connection(there, role="server") as server:
                    nursery.start_soon(fail)
                    await server.entrypoint.receive()

            with pytest.raises(LinkLost) as caught:
                await hear()
    assert caught.value.peer_reason == "the other side left the connection by an error"
    assert caught.value.code == 500


@BOTH
async def test_a_peer_that_broke_a_rule_reads_which(links: MakeLinks) -> None:
    async with links() as (here, there):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with suppress(LinkLost):
                    async with aqueduct.connection(there, role="server") as server:
                        await server.peer_headers()
                        connection_of(server).engine.fail(RemoteProtocolError("too much of it"))
                        connection_of(server).request_write()
                        await server.entrypoint.receive()

            nursery.start_soon(serve)

            async def hear() -> None:
                async with aqueduct.connection(here) as client:
                    await anext(client.incoming())

            with pytest.raises(LinkLost) as caught:
                await hear()
    assert caught.value.peer_reason is not None
    assert "too much of it" in caught.value.peer_reason
    assert caught.value.code == 400


@pytest.mark.requirement("R-10")
@pytest.mark.parametrize("links", [over_memory, over_quic], ids=["memory", "quic"])
async def test_2000_cancelled_channels_end_no_connection(links: MakeLinks) -> None:
    async with connected(links) as pair:
        opened = 0

        async def serve() -> None:
            nonlocal opened
            async for channel in pair.server.incoming():
                opened += 1
                nursery.start_soon(answer, channel)

        async def answer(channel: aqueduct.Channel) -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                if channel.name == "echo":
                    await channel.send(await channel.receive())
                else:
                    await channel.receive()
            await channel.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for _ in range(2):
                channels = [await pair.client.open() for _ in range(1000)]
                for channel in channels:
                    await channel.send(b"a request")
                for channel in channels:
                    channel.abort("timed out", code=408)
            async with pair.client.open("echo") as channel:
                await channel.send(b"alive")
                assert await channel.receive() == b"alive"
            nursery.cancel_scope.cancel()
        assert opened >= 1
