"""Can a program do with a session everything that bpmux offers?"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped, Limits, LocalProtocolError
from muxkit.protocols.bpmux import Config

from ._pairs import (
    MIB,
    TINY,
    answer_each,
    at_rest,
    canary,
    echo_each,
    next_duplex,
    next_request,
    next_sink,
    next_source,
    rough_sessions,
    sessions,
)

if TYPE_CHECKING:
    from muxkit.protocols.bpmux import Duplex


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
            async with pair.one.open() as here:
                await here.send(b"x")
                await at_rest()
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await leave_by_an_error()
        there = await next_duplex(pair.other)
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
        with pytest.raises(LocalProtocolError, match="answered before"):
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
            nursery.start_soon(pair.one.top.finish)
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


# --- credit


async def test_credit_by_hand() -> None:
    async with rough_sessions() as pair, pair.one.open_source(credit=2) as source:
        sink = await next_sink(pair.other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.send_many, [b"12", b"345", b"6"])
            assert await source.receive() == b"12"
            await at_rest()
            assert (sink.entity.credit_out, source.unread) == (0, 0)
            source.give_credit(3)
            assert await source.receive() == b"345"
            await at_rest()
            assert (sink.entity.credit_out, source.unread) == (0, 0)
            source.give_credit(1)
            assert await source.receive() == b"6"


async def test_no_credit_no_grant_without_a_hand() -> None:
    async with rough_sessions(config=Config(grants=False)) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.send, b"waits")
            await at_rest()
            assert there.source.unread == 0
            there.source.give_credit(5)
            assert await there.receive() == b"waits"


async def test_credit_for_a_channel_that_is_over_is_harmless() -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await there.aclose()
        await at_rest()
        here.source.give_credit(5)
        here.sink.give_credit(5)


async def test_an_answer_may_be_as_long_as_it_was_allowed() -> None:
    async with sessions() as pair, pair.one.open_request(credit=4) as request:
        asked = await next_request(pair.other)
        await asked.respond(b"four")
        assert await request.response() == b"four"


@pytest.mark.requirement("R-07")
@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_message_far_larger_than_the_window_travels_in_parts(way: str) -> None:
    message = random.Random(1).randbytes(3 * MIB)
    async with sessions(limits=TINY) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        sender, receiver = (here, there) if way == "there" else (there, here)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, message)
            assert await receiver.receive() == message
        await canary(pair)


async def test_two_messages_larger_than_the_window_cross() -> None:
    message = random.Random(2).randbytes(MIB)
    async with sessions(limits=TINY) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)

        async def send_and_finish(channel: Duplex) -> None:
            await channel.send(message)
            await channel.finish()

        async with trio.open_nursery() as nursery:
            for channel in (here, there):
                nursery.start_soon(send_and_finish, channel)
            assert await here.receive() == message
            assert await there.receive() == message


async def test_a_large_opening_payload_and_a_large_answer_travel_in_parts() -> None:
    async with sessions(limits=TINY) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(answer_each, pair.other)
        assert await pair.one.request(bytes(100_000)) == bytes(200_000)
        nursery.cancel_scope.cancel()


async def test_openings_with_payloads_stand_in_line_with_top_level_messages() -> None:
    async with sessions(limits=TINY) as pair, trio.open_nursery() as nursery:

        async def open_sink() -> None:
            async with pair.one.open_sink(bytes(300)):
                await trio.sleep_forever()

        async def take_messages() -> None:
            for _ in range(10):
                await pair.other.receive()

        async with trio.open_nursery() as takers:
            for _ in range(10):
                nursery.start_soon(pair.one.send, bytes(300))
                nursery.start_soon(open_sink)
            await at_rest()
            takers.start_soon(take_messages)
            for _ in range(10):
                await next_source(pair.other)
        nursery.cancel_scope.cancel()


async def test_an_opening_does_not_take_what_a_woken_sender_was_promised() -> None:
    class Watcher:
        """Lets the opening go in the very turn in which the grant arrives."""

        granted = trio.Event()

        def credit(self, direction: str, channel: str, amount: int) -> None:
            if direction == "in":
                self.granted.set()

        def __getattr__(self, name: str) -> object:
            return lambda *details: None

    watcher = Watcher()
    async with sessions(limits=TINY, observer=watcher) as pair:  # type: ignore[arg-type]  # the rest is made on demand
        await at_rest()
        for _ in range(20):

            async def open_when_granted() -> None:
                await watcher.granted.wait()
                async with pair.one.open_sink(bytes(900)):
                    pass

            await pair.one.send(bytes(900))
            watcher.granted = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.one.send, bytes(900))
                nursery.start_soon(open_when_granted)
                await at_rest()
                assert await pair.other.receive() == bytes(900)
                assert await pair.other.receive() == bytes(900)
                await next_source(pair.other)


async def test_a_refused_opening_holds_nobody_up() -> None:
    async with sessions(limits=TINY) as pair:
        with pytest.raises(LocalProtocolError):
            async with pair.one.open_source(b"x", credit=-1):
                pass
        with pytest.raises(LocalProtocolError):
            async with pair.one.open_sink(bytes(TINY.message + 1)):
                pass
        await canary(pair)
        await pair.one.send(b"x")
        assert await pair.other.receive() == b"x"


async def test_an_opening_payload_is_refused_at_once_when_the_letter_is_kept() -> None:
    async with sessions(config=Config(letter=True)) as pair:
        with pytest.raises(LocalProtocolError, match="letter=True"):
            async with pair.one.open_sink(b"x"):
                pass
        async with pair.one.open_sink() as sink:
            await sink.send(b"fine")


async def test_opening_waits_for_room_under_the_limit() -> None:
    limits = Limits(channels=3)
    async with sessions(limits=limits) as pair, trio.open_nursery() as nursery:
        opened = 0

        async def use() -> None:
            nonlocal opened
            async with pair.one.open_sink() as sink:
                opened += 1
                await sink.finish()

        for _ in range(20):
            nursery.start_soon(use)
    assert opened == 20


async def test_an_empty_message_behind_a_large_one_needs_no_credit() -> None:
    async with rough_sessions() as pair, pair.one.open_source(credit=5) as source:
        sink = await next_sink(pair.other)
        with trio.fail_after(5):
            await sink.send_many([b"12345678", b""])
        assert await source.receive() == b"12345678"
        assert await source.receive() == b""
