"""What senders, receivers and receipts promise, and what goes over the wire for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LocalProtocolError
from muxkit.protocols.relink import Config, Message
from muxkit.runtime import background
from tests.protocols.relink._session_world import QUIET, Packets, at_rest, both

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.relink import Receiver

SMALL = Limits(channel_bytes=1000, channel_floor=100)


async def all_of(receiver: Receiver) -> list[bytes]:
    return [message.data async for message in receiver]


async def test_every_shape_of_message_is_the_same_on_the_other_side(autojump_clock: MockClock) -> None:
    shapes = [(b"one",), (b"a", b"", b"ccc"), (), (bytes(70_000), b"b"), tuple([b"x"] * 300), (b"",)]
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        for parts in shapes:
            await sender.send(*parts)
        for number, parts in enumerate(shapes):
            message = await receiver.receive()
            assert (message.number, message.parts, message.data) == (number, parts, b"".join(parts))
            message.consume()


async def test_parts_may_be_any_kind_of_bytes_and_nothing_else(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        await sender.send(bytearray(b"a"), memoryview(b"b"))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not str"):
            await sender.send("c")  # type: ignore[arg-type]
        message = await receiver.receive()
        assert message.parts == (b"a", b"b")
        message.consume()


@pytest.mark.clause("relink-F01", "relink-F02")
async def test_a_receipt_tells_what_the_peer_has_and_what_he_has_consumed(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipt = await sender.send(b"x")
        await receipt.received()
        with trio.move_on_after(60) as waiting:
            await receipt.consumed()
        assert waiting.cancelled_caught
        (await receiver.receive()).consume()
        await receipt.consumed()
        await receipt.received()


async def test_many_waiters_each_wake_at_their_own_number(autojump_clock: MockClock) -> None:
    woken: list[int] = []
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = [await sender.send(b"%d" % number) for number in range(20)]

        async def wait(number: int) -> None:
            await receipts[number].consumed()
            woken.append(number)

        async with background() as nursery:
            for number in reversed(range(20)):
                nursery.start_soon(wait, number)
            messages = [await receiver.receive() for _ in range(20)]
            receiver.consume(through=messages[9])
            await trio.sleep(1)
            assert sorted(woken) == [*range(10)]
            receiver.consume(through=19)
            await trio.sleep(1)
        assert sorted(woken) == [*range(20)]


@pytest.mark.clause("relink-F03", "relink-F04")
@pytest.mark.requirement("R-08")
async def test_a_full_window_holds_its_sender_until_something_is_consumed(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, window=4)
    async with both(config) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        for number in range(4):
            await sender.send(b"%d" % number)
        with trio.move_on_after(60) as waiting:
            await sender.send(b"too many")
        assert waiting.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, b"4")
            await at_rest()
            (await receiver.receive()).consume()
        async with pair.one.sender(2) as neighbour:
            await neighbour.send(b"not held up")
        rest = [await receiver.receive() for _ in range(4)]
        assert [message.data for message in rest] == [b"1", b"2", b"3", b"4"]
        rest[-1].consume()
        async with pair.other.receiver(2) as other:
            (await other.receive()).consume()


@pytest.mark.requirement("R-07", "R-08")
async def test_a_window_has_bytes_too(autojump_clock: MockClock) -> None:
    async with both(limits=SMALL) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        sent = 0
        with trio.move_on_after(60):
            while True:
                await sender.send(b"a" * 30, b"b" * 30)
                sent += 1
        assert 2 <= sent * 60 <= 1000
        for _ in range(sent):
            (await receiver.receive()).consume()


@pytest.mark.clause("relink-F06")
async def test_consumption_is_told_in_batches_by_time(autojump_clock: MockClock) -> None:
    packets = Packets()
    async with both(observer=packets) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = [await sender.send(b"x") for _ in range(100)]
        await receipts[-1].received()
        await trio.sleep(10)  # so that the engine's last word is long ago
        packets.seen.clear()
        began = trio.current_time()
        for _ in range(99):
            (await receiver.receive()).consume()
            await trio.sleep(0.0005)
        await receipts[0].consumed()
        assert trio.current_time() - began == pytest.approx(0.1, abs=0.02)
        await receipts[98].consumed()
        assert packets.seen == [("in", "out 1", "consumed")]
        (await receiver.receive()).consume()


@pytest.mark.clause("relink-F06")
async def test_consumption_is_told_in_batches_by_count(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, window=8, ack_delay=3600)
    async with both(config) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = [await sender.send(b"x") for _ in range(8)]
        await receipts[-1].received()
        began = trio.current_time()
        for _ in range(2):
            (await receiver.receive()).consume()
        await receipts[1].consumed()
        assert trio.current_time() - began < 1
        for _ in range(6):
            (await receiver.receive()).consume()


async def test_what_a_closed_receiver_did_not_consume_comes_again(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender:
        for number in range(5):
            await sender.send(b"%d" % number)
        async with pair.other.receiver(1) as first:
            messages = [await first.receive() for _ in range(4)]
            messages[1].consume()
        with pytest.raises(trio.ClosedResourceError):
            messages[2].consume()
        await sender.aclose()
        async with pair.other.receiver(1) as second:
            assert await all_of(second) == [b"2", b"3", b"4"]


async def test_a_loop_that_fails_leaves_its_message_for_the_next(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender:
        for number in range(3):
            await sender.send(b"%d" % number)
        sender.close()

        async def fail_at_the_second() -> None:
            async with pair.other.receiver(1) as receiver:
                async for message in receiver:
                    assert 1 / (1 - message.number)

        with pytest.raises(ZeroDivisionError):
            await fail_at_the_second()
        async with pair.other.receiver(1) as receiver:
            assert await all_of(receiver) == [b"1", b"2"]


@pytest.mark.clause("relink-K01", "relink-K02", "relink-K03", "relink-K05")
async def test_a_channel_can_be_opened_again_once_its_end_is_confirmed(autojump_clock: MockClock) -> None:
    async with both() as pair:
        lives: list[list[bytes]] = []

        async def receive() -> None:
            for _ in range(3):
                async with pair.other.receiver(1) as receiver:
                    lives.append(await all_of(receiver))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for life in range(3):
                async with pair.one.sender(1) as sender:
                    receipt = await sender.send(b"life %d" % life)
                    assert receipt.number == 0
                    await sender.send(b"end %d" % life)
        assert lives == [[b"life %d" % life, b"end %d" % life] for life in range(3)]


@pytest.mark.clause("relink-K04")
async def test_a_new_life_waits_for_the_end_of_the_old_one(autojump_clock: MockClock) -> None:
    async with both() as pair:
        async with pair.one.sender(1) as old:
            await old.send(b"old")
        new = pair.one.sender(1)
        with pytest.raises(LocalProtocolError, match="has a sender"):
            pair.one.sender(1)
        with trio.move_on_after(60) as waiting:
            await new.send(b"new")
        assert waiting.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(new.send, b"new"))
            async with pair.other.receiver(1) as receiver:
                assert await all_of(receiver) == [b"old"]
        new.close()
        async with pair.other.receiver(1) as receiver:
            assert await all_of(receiver) == [b"new"]


async def test_finish_waits_until_everything_was_consumed(autojump_clock: MockClock) -> None:
    async with both() as pair:
        sender = pair.one.sender(1)
        await sender.send(b"x")
        with trio.move_on_after(60) as waiting:
            await sender.finish()
        assert waiting.cancelled_caught
        with pytest.raises(trio.ClosedResourceError):
            await sender.send(b"y")
        async with pair.other.receiver(1) as receiver:
            assert await all_of(receiver) == [b"x"]
        await sender.finish()
        unused = pair.one.sender(2)
        await unused.finish()


@pytest.mark.clause("relink-X01")
async def test_without_channel_ids_there_is_one_channel(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, connector_id_size=0, listener_id_size=0)
    async with both(config) as pair:
        async with pair.one.sender() as sender:
            await sender.send(b"x")
        async with pair.other.receiver() as receiver:
            assert await all_of(receiver) == [b"x"]
        with pytest.raises(LocalProtocolError, match="fits into 0 bytes"):
            pair.one.sender(1)


async def test_receivers_gives_each_channel_that_the_peer_opens(autojump_clock: MockClock) -> None:
    async with both() as pair:
        for number in (5, 3):
            async with pair.one.sender(number) as sender:
                await sender.send(b"%d" % number)
        await at_rest()
        receivers = pair.other.receivers()
        for number in (5, 3):
            async with await anext(receivers) as receiver:
                assert receiver.channel == number
                assert await all_of(receiver) == [b"%d" % number]


async def test_a_channel_has_one_receiver_at_a_time(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.other.receiver(1):
        with pytest.raises(LocalProtocolError, match="has a receiver"):
            pair.other.receiver(1)


async def test_nothing_can_be_consumed_that_was_not_received(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        for _ in range(3):
            await sender.send(b"x")
        message = await receiver.receive()
        with pytest.raises(LocalProtocolError, match="0 is the last"):
            receiver.consume(through=1)
        message.consume()
        message.consume()
        for _ in range(2):
            (await receiver.receive()).consume()


async def test_process_without_transactions_lets_the_error_out(autojump_clock: MockClock) -> None:
    async def handle(message: Message) -> None:
        if message.data == b"bad":
            raise ValueError("it is bad")

    async with both() as pair:
        async with pair.one.sender(1) as sender:
            for data in (b"good", b"bad", b"good"):
                await sender.send(data)
        async with pair.other.receiver(1) as receiver:
            with pytest.raises(ValueError, match="it is bad"):
                await receiver.process(handle)
        async with pair.other.receiver(1) as receiver:
            assert await all_of(receiver) == [b"bad", b"good"]


async def test_sequence_numbers_wrap_without_notice(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, first_sequence=2**32 - 3)
    async with both(config) as pair:
        async with pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
            for number in range(3):
                await sender.send(b"%d" % number)
            await pair.world.cut()
            last = [await sender.send(b"%d" % number) for number in range(3, 8)][-1]
            for number in range(8):
                message = await receiver.receive()
                assert message.data == b"%d" % number
                message.consume()
            await last.consumed()


async def test_a_link_counts_and_describes_itself(autojump_clock: MockClock) -> None:
    async with both(QUIET) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        await sender.send(b"12345")
        (await receiver.receive()).consume()
        one, other = pair.one.stats(), pair.other.stats()
        assert (one.messages_sent, other.messages_received) == (1, 1)
        assert (one.channels, other.channels) == (1, 1)
        assert one.bytes_sent >= 5
        assert pair.one.info.protocol == "relink"
        assert "connected" in repr(pair.one)
        assert await pair.one.ping() >= 0
        assert pair.one.stats().round_trip is not None
