"""Channels of e3x: receipts for processed messages, closing one side, and messages of any size."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Channel, ChannelCancelled, ChannelStopped, Limits, LinkLost, LocalProtocolError
from muxkit.protocols import e3x
from muxkit.runtime import background
from muxkit.testing import PacketWeather, SessionPair
from tests.protocols.e3x._sessions import BENT, at_rest, channels, on_packets, on_streams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

# --- receipts


@pytest.mark.clause("e3x-A01", "e3x-A02", "e3x-A03", "e3x-A11")
async def test_a_receipt_tells_when_the_other_application_is_done_and_not_before(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there), background() as nursery:
        first, second = [await here.post(message) for message in (b"1", b"2")]
        delivered = trio.Event()

        async def wait() -> None:
            await first.delivered()
            delivered.set()

        nursery.start_soon(wait)
        assert await there.receive() == b"1"
        await trio.sleep(30)  # the application is slow, and the peer asks again and again
        assert not delivered.is_set()
        assert not first.is_delivered
        assert await there.receive() == b"2"
        await delivered.wait()
        assert not second.is_delivered
        there.done()
        await second.delivered()
        assert "delivered" in repr(second)


@pytest.mark.clause("e3x-A02")
async def test_what_was_received_together_is_confirmed_together(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        receipts = [await here.post(b"%d" % number) for number in range(10)]
        await trio.sleep(1)
        assert await there.receive_many(limit=4) == [b"0", b"1", b"2", b"3"]
        await trio.sleep(1)
        assert not any(receipt.is_delivered for receipt in receipts)
        assert await there.receive_many() == [b"4", b"5", b"6", b"7", b"8", b"9"]
        await trio.sleep(2)
        assert [receipt.is_delivered for receipt in receipts] == [True] * 4 + [False] * 6
        there.done()
        await here.delivered()


async def test_leaving_the_loop_by_closing_the_channel_confirms_what_was_taken(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send(b"1")
        await here.finish()
        async for message in there:
            assert message == b"1"
            break
        await there.aclose()
        await here.delivered()


async def test_a_receipt_of_a_channel_that_the_peer_broke_off_says_so(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        receipt = await here.post(b"1")
        assert await there.receive() == b"1"
        there.abort()
        with pytest.raises(ChannelStopped):
            await receipt.delivered()
        with pytest.raises(ChannelStopped):
            await here.delivered()


@pytest.mark.requirement("R-39")
async def test_a_receipt_says_when_it_will_never_be_known(autojump_clock: MockClock) -> None:
    errors: list[LinkLost] = []

    async def wait(receipt: e3x.Receipt) -> None:
        with pytest.raises(LinkLost) as caught:
            await receipt.delivered()
        errors.append(caught.value)

    async def use(pair: SessionPair) -> None:
        async with channels(pair) as (here, _), trio.open_nursery() as nursery:
            nursery.start_soon(wait, await here.post(b"1"))
            await at_rest()
            pair.cut()

    with pytest.raises(LinkLost, match="the test cut it"):  # again: the session cannot know it either
        async with on_packets() as pair:
            await use(pair)
    assert errors[0].reason == "the test cut it"


async def test_after_an_abort_nothing_is_known(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, _):
        receipt = await here.post(b"1")
        here.abort()
        with pytest.raises(trio.ClosedResourceError):
            await receipt.delivered()


async def test_many_wait_for_their_own_receipts(autojump_clock: MockClock) -> None:
    order: list[int] = []
    async with on_packets(BENT) as pair, channels(pair) as (here, there):
        receipts = [await here.post(b"%d" % number) for number in range(50)]

        async def wait(number: int) -> None:
            await receipts[number].delivered()
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in reversed(range(50)):
                nursery.start_soon(wait, number)
            for _ in range(50):
                await there.receive()
            there.done()
    assert sorted(order) == list(range(50))


async def test_a_receipt_may_be_asked_for_when_it_is_known_already(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there), trio.open_nursery() as nursery:
        receipt = await here.post(bytearray(b"1"))  # type: ignore[arg-type]  # which is bytes to some
        nursery.start_soon(receipt.delivered)
        nursery.start_soon(receipt.delivered)
        assert await there.receive() == b"1"
        there.done()
        there.done()  # a second call is harmless
        await trio.sleep(1)
        assert receipt.is_delivered
        await receipt.delivered()


async def test_nothing_can_be_posted_after_the_end(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, _):
        await here.finish()
        with pytest.raises(trio.ClosedResourceError):
            await here.post(b"1")


async def test_post_yields_now_and_then(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there), trio.open_nursery() as nursery:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while turns < 1000:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(count)
        for _ in range(200):
            await here.post(b"1")
        assert turns >= 2
        for _ in range(200):
            await there.receive()


# --- finishing


@pytest.mark.requirement("R-41")
async def test_finish_returns_when_it_has_left_and_delivered_when_it_is_done_with(autojump_clock: MockClock) -> None:
    async with on_packets(PacketWeather(delay=0.5)) as pair, channels(pair) as (here, there):
        began = trio.current_time()
        await here.send(b"1")
        await here.finish()
        assert trio.current_time() == began
        assert [message async for message in there] == [b"1"]
        await here.delivered()
        await here.finish()  # a second call is harmless


async def test_finish_waits_behind_a_closed_window(autojump_clock: MockClock) -> None:
    config = e3x.Config(window=10)
    async with on_packets(config=config) as pair, channels(pair) as (here, there), trio.open_nursery() as nursery:
        for number in range(150):
            await here.send(b"%d" % number)
        finished = trio.Event()

        async def finish() -> None:
            await here.finish()
            finished.set()

        nursery.start_soon(finish)
        await trio.sleep(5)
        assert not finished.is_set()
        assert len([message async for message in there]) == 150
        await finished.wait()


async def test_a_finish_that_can_no_longer_be_heard_says_so(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        there.abort()
        await trio.sleep(1)
        with pytest.raises(ChannelStopped):
            await here.finish()


# --- closing one side


async def test_what_was_sent_before_a_close_arrives(autojump_clock: MockClock) -> None:
    async with on_packets(BENT) as pair:
        async with channels(pair) as (here, there):
            for number in range(100):
                await here.send(b"%d" % number)
        assert [message async for message in there] == [b"%d" % number for number in range(100)]
        await there.aclose()
        await trio.sleep(5)
        assert pair.one.stats().channels == pair.other.stats().channels == 0


@pytest.mark.requirement("R-41")
async def test_who_sends_to_a_closed_channel_is_told_once_he_has_processed_everything(
    autojump_clock: MockClock,
) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send(b"question")
        await here.aclose()
        await there.send(b"an answer that nobody wants")
        await trio.sleep(1)
        assert await there.receive() == b"question"  # the channel still exists
        with pytest.raises(trio.EndOfChannel):
            await there.receive()
        await trio.sleep(1)
        with pytest.raises(ChannelStopped) as caught:
            await there.send(b"another")
        assert caught.value.payload == b"closed"


async def test_two_that_only_send_do_not_wait_for_each_other_for_ever(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send(b"unread")
        await there.send(b"unread")
        await trio.sleep(1)
        await here.aclose()

        async def send_on() -> None:
            while True:
                await there.send(b"more")
                await trio.sleep(0.1)

        with trio.fail_after(10), pytest.raises(ChannelStopped):
            await send_on()


async def test_a_peer_that_never_ends_its_side_does_not_keep_a_closed_channel(autojump_clock: MockClock) -> None:
    async with on_packets() as pair:
        async with channels(pair) as (here, there):
            await here.send(b"1")
            assert await there.receive() == b"1"
        with pytest.raises(trio.EndOfChannel):
            await there.receive()
        await trio.sleep(5)
        assert pair.one.stats().channels == 1
        await trio.sleep(10)
        assert pair.one.stats().channels == pair.other.stats().channels == 0


async def test_what_is_waited_for_ends_with_the_channel(autojump_clock: MockClock) -> None:
    errors: list[Exception] = []

    async def expect(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except Exception as error:
            errors.append(error)

    async with on_packets() as pair, channels(pair) as (here, _), trio.open_nursery() as nursery:
        nursery.start_soon(expect, here.receive)
        nursery.start_soon(expect, here.receive_many)
        await at_rest()
        await here.aclose()
        await here.aclose()
        await at_rest()
    assert [type(error) for error in errors] == [trio.ClosedResourceError] * 2


async def test_a_limit_below_one_message_is_refused(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (_, there):
        with pytest.raises(ValueError, match="at least 1"):
            await there.receive_many(limit=0)


async def test_a_channel_says_what_it_is(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair, name="chat") as (here, there):
        await here.send(b"1")
        await trio.sleep(1)
        assert repr(there) == "<e3x.Channel 1 'chat', reliable, open, 1 unread>"


async def test_an_abort_is_heard_on_both_directions(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        here.abort()
        await trio.sleep(1)
        with pytest.raises(ChannelCancelled) as caught:
            await there.receive()
        assert caught.value.payload == b"given up"
        with pytest.raises(ChannelStopped):
            await there.send(b"1")
        here.abort()


async def test_a_message_that_was_there_is_given_before_the_bad_news(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send(b"1")
        await trio.sleep(1)
        here.abort()
        await trio.sleep(1)
        assert await there.receive() == b"1"
        with pytest.raises(ChannelCancelled):
            await there.receive()


# --- sizes


@pytest.mark.requirement("R-48")
@pytest.mark.parametrize("size", [0, 1, 1391, 1392, 65_536, 5_000_000])
async def test_a_message_of_any_size_arrives_as_one(size: int, autojump_clock: MockClock) -> None:
    async with on_packets(BENT, linger=60.0) as pair, channels(pair) as (here, there), trio.open_nursery() as nursery:
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        nursery.start_soon(here.send, message)
        assert await there.receive() == message


async def test_a_message_above_the_limit_is_refused_and_nothing_has_changed(autojump_clock: MockClock) -> None:
    limits = Limits(message=10_000)
    async with on_packets(limits=limits) as pair, channels(pair) as (here, there):
        with pytest.raises(LocalProtocolError, match="message=10000"):
            await here.send(bytes(10_001))
        await here.send(b"1")
        assert await there.receive() == b"1"


# --- waiting


@pytest.mark.requirement("R-07", "R-31")
async def test_a_sender_waits_for_the_window_and_not_beyond(autojump_clock: MockClock) -> None:
    async with on_packets(config=e3x.Config(window=50)) as pair, channels(pair) as (here, there):
        sent = 0
        with trio.move_on_after(10):
            while True:
                await here.send(bytes(1000))
                sent += 1
        assert sent < 50 + 100 + 66  # the window, what was sent before it was told, and a queue of 64 KiB
        for _ in range(sent):
            await there.receive()
        await here.send(b"the end")
        assert await there.receive() == b"the end"


async def test_several_may_receive_and_each_message_goes_to_one(autojump_clock: MockClock) -> None:
    got: list[bytes] = []
    async with on_streams() as pair, channels(pair) as (here, there):
        async with trio.open_nursery() as nursery:

            async def take() -> None:
                got.extend([message async for message in there])

            for _ in range(5):
                nursery.start_soon(take)
            for number in range(100):
                await here.send(b"%d" % number)
            await here.finish()
    assert sorted(got, key=int) == [b"%d" % number for number in range(100)]


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-41")
async def test_many_channels_that_wait_for_the_same_room_send_one_after_the_other(autojump_clock: MockClock) -> None:
    """All are told that the outbox has room, and those that come too late wait again."""
    count, each, size = 40, 10, 4096
    got, has_all = 0, trio.Event()
    async with on_packets(limits=Limits(outbox=16 * 1024)) as pair, background() as nursery:

        async def take(channel: Channel) -> None:
            nonlocal got
            async for _ in channel:
                got += 1
                if got == count * each:
                    has_all.set()

        async def accept() -> None:
            async for channel in pair.other:
                nursery.start_soon(take, channel)

        async def send(channel: Channel) -> None:
            for _ in range(each):
                await channel.send(bytes(size))

        nursery.start_soon(accept)
        async with AsyncExitStack() as stack, trio.open_nursery() as senders:
            for _ in range(count):
                senders.start_soon(send, await stack.enter_async_context(pair.one.open()))
        await has_all.wait()
