"""What becomes of one message to several channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LocalProtocolError
from muxkit.protocols.relink import Config
from tests.protocols.relink._session_world import TRANSACTIONS, Packets, at_rest, both

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.clause("relink-C07", "relink-X03")
async def test_a_multicast_is_one_packet_and_a_message_in_each_channel(autojump_clock: MockClock) -> None:
    packets = Packets()
    async with both(observer=packets) as pair:
        senders = [pair.one.sender(number) for number in (1, 2, 7)]
        await senders[1].send(b"before")
        await at_rest()
        packets.data["out"] = b""
        receipts = await pair.one.multicast(senders, b"to all", b"of you")
        await at_rest()
        assert packets.data["out"].count(b"to all") == 1
        assert [receipt.number for receipt in receipts] == [0, 1, 0]
        for sender in senders:
            sender.close()
        for number, expected in ((1, 1), (2, 2), (7, 1)):
            async with pair.other.receiver(number) as receiver:
                messages = [message async for message in receiver]
                assert len(messages) == expected
                assert messages[-1].parts == (b"to all", b"of you")
        for receipt in receipts:
            await receipt.consumed()


async def test_a_multicast_waits_until_every_channel_has_room(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, window=1)
    async with both(config) as pair, pair.one.sender(1) as one, pair.one.sender(2) as two:
        await two.send(b"full")
        sent: list[int] = []

        async def multicast() -> None:
            sent.extend(receipt.number for receipt in await pair.one.multicast([one, two], b"x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(multicast)
            await trio.sleep(1)
            assert sent == []
            async with pair.other.receiver(2) as receiver:
                (await receiver.receive()).consume()
        assert sent == [0, 1]
        for number in (1, 2):
            async with pair.other.receiver(number) as receiver:
                (await receiver.receive()).consume()


@pytest.mark.clause("relink-C05")
async def test_a_sender_that_stands_there_twice_sends_twice_in_one_packet(autojump_clock: MockClock) -> None:
    packets = Packets()
    async with both(observer=packets) as pair:
        async with pair.one.sender(1) as one, pair.one.sender(2) as two:
            receipts = await pair.one.multicast([one, two, one], b"again")
            assert [(receipt.number) for receipt in receipts] == [0, 0, 1]
            await at_rest()
            assert packets.data["out"].count(b"again") == 1
            for number, expected in ((1, 2), (2, 1)):
                async with pair.other.receiver(number) as receiver:
                    for _ in range(expected):
                        with await receiver.receive() as message:
                            assert message.data == b"again"
            for receipt in receipts:
                await receipt.consumed()


@pytest.mark.clause("relink-C05")
async def test_without_channel_ids_it_can_stand_there_several_times_as_well(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, connector_id_size=0, listener_id_size=0)
    async with both(config) as pair, pair.one.sender(0) as sender, pair.other.receiver(0) as receiver:
        await pair.one.multicast([sender] * 3, b"x")
        for number in range(3):
            message = await receiver.receive()
            assert message.number == number
            message.consume()


async def test_twice_waits_until_there_is_room_for_both(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, window=2)
    async with both(config) as pair, pair.one.sender(1) as one, pair.other.receiver(1) as receiver:
        await one.send(b"before")
        sent: list[int] = []

        async def multicast() -> None:
            sent.extend(receipt.number for receipt in await pair.one.multicast([one, one], b"x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(multicast)
            await trio.sleep(1)
            assert sent == []
            (await receiver.receive()).consume()
        assert sent == [1, 2]
        for _ in range(2):
            (await receiver.receive()).consume()


@pytest.mark.requirement("R-08")
async def test_it_waits_for_the_budget_of_the_link_too(autojump_clock: MockClock) -> None:
    """Each channel has room for it, but not all three together as long as another one is full."""
    limits = Limits(connection_bytes=5000, channel_bytes=10_000, channel_floor=100, message=4000, reassembly=4000)
    async with both(limits=limits) as pair:
        senders = [pair.one.sender(number) for number in range(4)]
        await senders[3].send(bytes(3000))
        sent: list[int] = []

        async def multicast() -> None:
            sent.extend(receipt.number for receipt in await pair.one.multicast(senders[:3], bytes(2000)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(multicast)
            await trio.sleep(1)
            assert sent == []
            async with pair.other.receiver(3) as receiver:
                (await receiver.receive()).consume()
        assert sent == [0, 0, 0]
        for number in range(3):
            async with pair.other.receiver(number) as receiver:
                (await receiver.receive()).consume()


async def test_one_commit_for_each_channel_answers_it_everywhere(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as one, pair.one.sender(2) as two:
        receipts = await pair.one.multicast([one, two], b"x")
        one.commit()
        two.rollback()
        await two.send(b"y")
        two.commit()
        for number, expected in ((1, b"x"), (2, b"y")):
            async with pair.other.receiver(number) as receiver:
                with await receiver.receive() as message:
                    assert message.data == expected
        await receipts[0].committed()


@pytest.mark.parametrize("names", [[], [1, 2, 3], [1, 1, 1]], ids=["nobody", "too many", "too often"])
async def test_what_can_never_be_sent_is_refused(names: list[int], autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, targets=2 if len(set(names)) != 1 else 8, window=2)
    async with both(config) as pair:
        senders = {number: pair.one.sender(number) for number in (1, 2, 3)}
        with pytest.raises(LocalProtocolError):
            await pair.one.multicast([senders[name] for name in names], b"x")
        assert pair.one.unanswered == 0
