"""Transactions are committed once, in order and answered once; what was rolled back is never committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import LocalProtocolError
from muxkit.protocols.relink import Config, NotCommitted, Outcome, RolledBackError
from tests.protocols.relink._session_world import TRANSACTIONS, both

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from muxkit.protocols.relink import Message


@pytest.mark.clause("relink-T01", "relink-T02")
async def test_the_receiver_sees_what_was_committed_and_its_answer_comes_back(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        await sender.send(b"one")
        first = await sender.send(b"two")
        with trio.move_on_after(60) as held:
            await receiver.receive()
        assert held.cancelled_caught
        last = sender.commit()
        assert last is first
        (await receiver.receive()).committed()
        (await receiver.receive()).uncommitted()
        with pytest.raises(NotCommitted) as caught:
            await last.committed()
        assert (caught.value.channel, caught.value.number) == (1, 1)
        assert last.outcome is Outcome.UNCOMMITTED


@pytest.mark.clause("relink-T03", "relink-T04")
async def test_what_was_rolled_back_is_never_seen(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = [await sender.send(b"%d" % number) for number in range(6)]
        sender.commit(through=receipts[1])
        sender.rollback(through=3)
        sender.commit(through=5)
        seen = [await receiver.receive() for _ in range(4)]
        assert [message.data for message in seen] == [b"0", b"1", b"4", b"5"]
        for message in seen:
            message.committed()
        for number in (0, 1, 4, 5):
            await receipts[number].committed()
        with pytest.raises(RolledBackError):
            await receipts[2].committed()
        await receipts[3].consumed()


@pytest.mark.clause("relink-T05")
@pytest.mark.parametrize("cut_before", [0, 1, 2, 3, 4])
async def test_a_rollback_is_not_forgotten_when_its_connection_is_cut(
    cut_before: int, autojump_clock: MockClock
) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipts = [await sender.send(b"%d" % number) for number in range(4)]
        steps: tuple[Callable[[], object], ...] = (
            lambda: sender.commit(through=0),
            lambda: sender.rollback(through=2),
            lambda: sender.commit(through=3),
        )
        for number, step in enumerate(steps):
            if cut_before == number:
                await pair.world.cut()
            step()
        if cut_before == 3:
            await pair.world.cut()
        seen = [await receiver.receive(), await receiver.receive()]
        if cut_before == 4:
            await pair.world.cut()
        for message in seen:
            message.committed()
        assert [message.data for message in seen] == [b"0", b"3"]
        for number in (0, 3):
            await receipts[number].committed()


async def test_a_message_as_a_block_is_answered_by_how_it_is_left(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender:
        receipts = [await sender.send(b"x") for _ in range(3)]
        sender.commit()
        async with pair.other.receiver(1) as receiver:
            with await receiver.receive():
                pass
            bad = await receiver.receive()
            with pytest.raises(ValueError, match="bad"), bad:
                raise ValueError("bad")
            last = await receiver.receive()
            with trio.CancelScope() as scope, last:
                scope.cancel()
                await trio.lowlevel.checkpoint()
        await receipts[0].committed()
        with pytest.raises(NotCommitted):
            await receipts[1].committed()
        assert receipts[2].outcome is None
        async with pair.other.receiver(1) as receiver:
            again = await receiver.receive()
            assert again.number == 2
            again.consume()
        await receipts[2].committed()


async def test_process_answers_with_what_the_handler_raised(autojump_clock: MockClock) -> None:
    async def handle(message: Message) -> None:
        await trio.sleep(1)
        if message.data == b"bad":
            raise ValueError("it is bad")

    async with both(TRANSACTIONS) as pair:
        async with pair.one.sender(1) as sender:
            receipts = [await sender.send(data) for data in (b"good", b"bad", b"good")]
            sender.commit()
        async with pair.other.receiver(1) as receiver:
            await receiver.process(handle)
        await sender.finish()
        assert [receipt.outcome for receipt in receipts] == [Outcome.COMMITTED, Outcome.UNCOMMITTED, Outcome.COMMITTED]


async def test_an_iterator_commits_what_it_got_through_with(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender:
        receipts = [await sender.send(b"x") for _ in range(3)]
        sender.commit()
        async with pair.other.receiver(1) as receiver:
            async for message in receiver:
                if message.number == 2:
                    break
        await receipts[1].committed()
        assert receipts[2].outcome is None
        async with pair.other.receiver(1) as receiver:
            (await receiver.receive()).committed()


async def test_leaving_a_sender_rolls_back_what_is_not_decided(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair:
        async with pair.one.sender(1) as sender:
            kept = await sender.send(b"kept")
            sender.commit()
            dropped = await sender.send(b"dropped")
        async with pair.other.receiver(1) as receiver:
            assert [message.data async for message in receiver] == [b"kept"]
        await sender.finish()
        assert (kept.outcome, dropped.outcome) == (Outcome.COMMITTED, Outcome.ROLLED_BACK)


async def test_a_window_of_undecided_messages_is_freed_by_a_decision(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, window=2, connector_transactions=True)
    async with both(config) as pair, pair.one.sender(1) as sender:
        for _ in range(2):
            await sender.send(b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, b"next")
            with trio.move_on_after(60):
                await trio.sleep_forever()
            assert pair.one.unanswered == 2
            sender.rollback()
        sender.rollback()
        assert pair.one.unanswered <= 2


@pytest.mark.clause("relink-T06")
async def test_a_channel_without_transactions_has_no_decisions(autojump_clock: MockClock) -> None:
    async with both() as pair, pair.one.sender(1) as sender, pair.other.receiver(1) as receiver:
        receipt = await sender.send(b"x")
        with pytest.raises(LocalProtocolError):
            sender.commit()
        with pytest.raises(LocalProtocolError):
            sender.rollback()
        with pytest.raises(LocalProtocolError):
            await receipt.committed()
        message = await receiver.receive()
        with pytest.raises(LocalProtocolError):
            message.uncommitted()
        message.consume()


async def test_nothing_can_be_decided_twice_or_before_it_was_sent(autojump_clock: MockClock) -> None:
    async with both(TRANSACTIONS) as pair, pair.one.sender(1) as sender:
        with pytest.raises(LocalProtocolError, match="no message was sent"):
            sender.commit()
        receipt = await sender.send(b"x")
        sender.rollback()
        with pytest.raises(LocalProtocolError):
            sender.commit(through=receipt)
        with pytest.raises(LocalProtocolError):
            sender.commit(through=1)
        with pytest.raises(RolledBackError):
            await receipt.committed()


async def test_only_one_side_may_have_transactions(autojump_clock: MockClock) -> None:
    config = Config(keepalive=None, listener_transactions=True)
    async with both(config) as pair:
        async with pair.one.sender(1) as sender, pair.other.sender(1) as answers:
            await sender.send(b"plain")
            receipt = await answers.send(b"decided")
            answers.commit()
            async with pair.other.receiver(1) as receiver, pair.one.receiver(1) as other:
                (await receiver.receive()).consume()
                (await other.receive()).committed()
            await receipt.committed()
