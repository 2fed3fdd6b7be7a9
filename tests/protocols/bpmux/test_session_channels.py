"""Every feature of bpmux as a program uses it on a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped, LocalProtocolError
from muxkit.protocols.bpmux import Config
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory

from ._pairs import TINY, answer_each, at_rest, echo_each, next_duplex, next_request, rough_sessions, sessions

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- duplexes


async def test_an_echo() -> None:
    async with sessions() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        async with pair.one.open() as duplex:
            for message in (b"", b"hello", bytes(100_000)):
                await duplex.send(message)
                assert await duplex.receive() == message
            await duplex.finish()
            with pytest.raises(trio.EndOfChannel):
                await duplex.receive()
        await pair.one.shutdown(grace=1)
        nursery.cancel_scope.cancel()


async def test_the_peer_hears_of_a_channel_at_once() -> None:
    async with sessions() as pair, pair.one.open_duplex(b"name"):
        duplex = await next_duplex(pair.other)
        assert duplex.opening == b"name"


async def test_messages_that_are_tried_one_behind_the_other_are_sent_once_each() -> None:
    async with sessions() as pair, pair.one.open() as channel:
        peer = await next_duplex(pair.other)
        await channel.send(b"first")
        assert [channel._try_send(b"%d" % number) for number in range(20)] == [True] * 20
        assert await peer.receive() == b"first"
        assert [await peer.receive() for _ in range(20)] == [b"%d" % number for number in range(20)]


async def test_both_ends_of_a_channel_leave_with_one_write() -> None:
    writes: list[bytes] = []

    class Counted(memory.MemoryStream):
        def send_nowait(self, buffers: Sequence[bytes | memoryview]) -> int:
            writes.append(b"".join(buffers))
            return super().send_nowait(buffers)

    here, there = memory.pair()
    here.__class__ = Counted
    async with sessions((here, there)) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        channel = await pair.one.open()
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        await at_rest()
        writes.clear()
        await channel.aclose()
        await at_rest()
        assert writes[0].hex(" ") == "42 01 00 82 01 00"
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-41")
async def test_after_finish_the_other_direction_goes_on() -> None:
    async with sessions() as pair, pair.one.open() as here:
        await here.send(b"question")
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.finish)
            assert [message async for message in there] == [b"question"]
        await there.send(b"answer")
        assert await here.receive() == b"answer"
        await there.finish()
        with pytest.raises(trio.EndOfChannel):
            await here.receive()


async def test_leaving_the_block_normally_finishes_and_by_an_error_gives_up() -> None:
    async with sessions() as pair:
        async with pair.one.open() as here:
            await here.send(b"x")
        there = await next_duplex(pair.other)
        assert [message async for message in there] == [b"x"]

        async def leave_by_an_error() -> None:
            nonlocal there
            async with pair.one.open() as here:
                await here.send(b"x")
                there = await next_duplex(pair.other)
                await at_rest()  # giving up drops what was not written yet
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await leave_by_an_error()
        assert await there.receive() == b"x"
        with pytest.raises(ChannelCancelled):
            await there.receive()
        with pytest.raises(ChannelStopped):
            await there.sink.finish()


async def test_an_end_payload_explains_itself() -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await at_rest()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.finish, b"no paper")
            with pytest.raises(ChannelCancelled) as caught:
                await there.receive()
        assert caught.value.payload == b"no paper"


async def test_send_many_and_receive_many_keep_the_order() -> None:
    messages = [b"%d" % number for number in range(5000)]
    async with sessions(limits=TINY) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await here.send_many(messages)
                await here.finish()

            nursery.start_soon(send)
            got: list[bytes] = []
            while len(got) < 5000:
                got += await there.receive_many(limit=77)
        assert got == messages
        with pytest.raises(trio.EndOfChannel):
            await there.receive_many()


# --- sinks, sources, requests, the top level


async def test_a_sink_is_a_source_for_the_peer() -> None:
    async with sessions() as pair, pair.one.open_sink(b"log") as sink:
        await sink.send(b"line")
        source, opening = await anext(pair.other.sources())
        assert opening == b"log"
        assert await source.receive() == b"line"
        await source.aclose()
        await at_rest()
        with pytest.raises(ChannelStopped):
            await sink.send(b"nobody listens")


async def test_a_source_is_a_sink_for_the_peer() -> None:
    async with sessions() as pair, pair.one.open_source(b"news") as source:
        sink, opening = await anext(pair.other.sinks())
        assert opening == b"news"
        await sink.send(b"item")
        assert await source.receive() == b"item"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.finish)
            with pytest.raises(trio.EndOfChannel):
                await source.receive()


async def test_a_question_is_answered() -> None:
    async with sessions() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(answer_each, pair.other)
        assert await pair.one.request(b"ab") == b"abab"
        assert await pair.one.request(b"") == b""
        async with pair.one.open_request(b"x") as request:
            assert await request.response() == b"xx"
            assert await request.response() == b"xx"
        nursery.cancel_scope.cancel()


async def test_a_question_may_be_declined_with_a_reason() -> None:
    async with sessions() as pair, pair.one.open_request(b"x") as request:
        asked = await next_request(pair.other)
        await at_rest()
        await asked.decline(b"closed on Sundays")
        with pytest.raises(ChannelStopped) as caught:
            await request.response()
        assert caught.value.payload == b"closed on Sundays"
        with pytest.raises(trio.ClosedResourceError):
            await asked.respond(b"too late")


async def test_leaving_the_block_of_a_question_unanswered_declines_it() -> None:
    async with sessions() as pair, pair.one.open_request(b"x") as request:
        async with await next_request(pair.other):
            pass
        with pytest.raises(ChannelStopped):
            await request.response()


async def test_a_question_is_answered_once() -> None:
    async with sessions() as pair, pair.one.open_request() as request:
        asked = await next_request(pair.other)
        await asked.respond(b"yes")
        with pytest.raises(LocalProtocolError, match="already has a response"):
            await asked.respond(b"no")
        assert await request.response() == b"yes"


async def test_a_cancelled_question_reaches_the_one_who_works_on_it() -> None:
    async with sessions() as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.one.request, b"x")
            asked = await next_request(pair.other)
            nursery.cancel_scope.cancel()
        await asked.cancelled()
        with pytest.raises(ChannelStopped):
            await asked.respond(b"for nobody")


async def test_waiting_for_a_cancellation_ends_when_the_answer_is_there() -> None:
    async with sessions() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(pair.one.request, b"x")
        asked = await next_request(pair.other)
        nursery.start_soon(asked.cancelled)
        await at_rest()
        await asked.respond(b"y")


async def test_after_abort_a_question_has_no_answer() -> None:
    async with sessions() as pair, pair.one.open_request() as request:
        request.abort()
        with pytest.raises(trio.ClosedResourceError):
            await request.response()
        await request.aclose()
        await at_rest()
        with pytest.raises(trio.ClosedResourceError):
            await request.response()


async def test_top_level_messages_go_both_ways() -> None:
    async with sessions() as pair:
        await pair.one.send(b"to other")
        await pair.other.send(b"to one")
        assert await pair.other.receive() == b"to other"
        assert await pair.one.receive() == b"to one"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection_of(pair.one).top.finish)
            with pytest.raises(trio.EndOfChannel):
                await pair.other.receive()


async def test_every_kind_of_channel_can_be_pinged() -> None:
    async with sessions() as pair, pair.one.open() as duplex, pair.one.open_request() as request:
        asked = await next_request(pair.other)
        for half in (pair.one, pair.other, duplex, duplex.source, request, asked):
            assert await half.ping() >= 0
        assert pair.one.stats().round_trip is not None
        await duplex.finish()
        assert await duplex.ping() >= 0
        with pytest.raises(trio.ClosedResourceError):
            await duplex.sink.ping()


async def test_a_ping_ends_with_its_channel() -> None:
    async with rough_sessions(config=Config(pongs=False)) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:

            async def ping() -> None:
                with pytest.raises(ChannelStopped, match="before the answer"):
                    await here.ping()

            nursery.start_soon(ping)
            await at_rest()
            await there.source.aclose()
