"""Credit in sessions: windows, grants by hand, messages in parts, and senders and openers in line."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LocalProtocolError
from muxkit.protocols.bpmux import Config
from tests.protocols.bpmux._helpers import receiver_of, sender_of

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
    from trio.testing import MockClock

    from muxkit.protocols.bpmux import Duplex


async def test_hundreds_of_channels_at_rest_leave_a_busy_one_its_window() -> None:
    limits = Limits(connection_bytes=4 * MIB)
    async with rough_sessions(limits=limits) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(pair.one.open()) for _ in range(600)]
            for channel in channels:
                await channel.send(b"x")
                assert await channel.receive() == b"x"
            busy = channels[-1]
            for _ in range(200):
                await busy.send(bytes(50_000))
                assert await busy.receive() == bytes(50_000)
            assert sender_of(busy).credit_out > limits.short_window // 2
            nursery.cancel_scope.cancel()


async def test_credit_by_hand() -> None:
    async with rough_sessions() as pair, pair.one.open_source(credit=2) as source:
        sink = await next_sink(pair.other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.send_many, [b"12", b"345", b"6"])
            assert await source.receive() == b"12"
            await at_rest()
            assert (sender_of(sink).credit_out, source.unread) == (0, 0)
            source.give_credit(3)
            assert await source.receive() == b"345"
            await at_rest()
            assert (sender_of(sink).credit_out, source.unread) == (0, 0)
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
        """Cancels the opening in the turn in which the grant arrives."""

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


async def test_an_empty_message_behind_a_large_one_needs_no_credit(autojump_clock: MockClock) -> None:
    async with rough_sessions() as pair, pair.one.open_source(credit=5) as source:
        sink = await next_sink(pair.other)
        with trio.fail_after(5):
            await sink.send_many([b"12345678", b""])
        assert await source.receive() == b"12345678"
        assert await source.receive() == b""


async def test_the_engine_hears_of_what_was_taken_by_parts_of_the_window_or_when_nothing_is_left() -> None:
    limits = Limits(channel_first=1600, channel_bytes=1600, channel_floor=1600)
    async with rough_sessions(limits=limits) as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        window = receiver_of(there).window
        await here.send_many([bytes(10)] * 20)
        await at_rest()
        for taken in range(1, 21):
            await there.receive()
            assert there.stats().unread == 200 - 10 * taken
            assert window.held == 200 - (taken - taken % 10) * 10
        await here.send(b"x")
        assert await there.receive() == b"x"
        assert window.held == there.stats().unread == 0
