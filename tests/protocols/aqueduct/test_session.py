"""Aqueduct connections for applications: messages in three modes, and channels attached to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped, LocalProtocolError, MuxError
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Finished, LostInTransit, Mode, NoReceiver
from muxkit.protocols.aqueduct.half import Outcome
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.aqueduct._session_pairs import (
    at_rest,
    canary,
    carried_receiver,
    carried_sender,
    connected,
    over_a_plain_link,
    payloads,
    rough,
    send_on,
    take,
)

if TYPE_CHECKING:
    from trio.testing import MockClock


# --- messages


async def test_a_message_on_the_entrypoint_arrives_with_its_headers(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        await pair.client.entrypoint.send(b"hello", headers=[(b"k", b"v"), (b"k", b"w")])
        message = await pair.server.entrypoint.receive()
        assert (message.payload, message.headers) == (b"hello", ((b"k", b"v"), (b"k", b"w")))
        assert (message.number, message.is_unreliable, message.attachments) == (0, False, ())


@pytest.mark.parametrize("mode", Mode)
async def test_each_mode_brings_what_was_sent(mode: Mode, autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        for number in range(10):
            await sender.send(b"%d" % number, mode=mode)
        got = sorted([message.payload for message in await take(receiver, 10)])
        assert got == [b"%d" % number for number in range(10)]
        await sender.finish()


async def test_only_unreliable_messages_come_in_datagrams_unless_they_are_too_large(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        for mode in Mode:
            await sender.send(mode.value.encode(), mode=mode)
        await sender.send(bytes(100_000), mode=Mode.UNRELIABLE)
        got = {message.payload[:12]: message.is_unreliable for message in await take(receiver, 4)}
        assert got == {b"ordered": False, b"unordered": False, b"unreliable": True, bytes(12): False}
        await sender.finish()


async def test_buffers_of_other_types_are_sent_as_bytes_and_nothing_else_is(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        entrypoint = pair.client.entrypoint
        for message in (bytearray(b"a"), memoryview(b"b")):
            await entrypoint.send(message)  # type: ignore[arg-type]  # it is kind to those
        assert [message.payload for message in await take(pair.server.entrypoint, 2)] == [b"a", b"b"]
        with pytest.raises(TypeError, match="a message is bytes, not str"):
            await entrypoint.send("c")  # type: ignore[arg-type]


async def test_many_messages_are_sent_and_received_with_one_call(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        await pair.client.entrypoint.send_many([b"%d" % number for number in range(200)])
        got: list[bytes] = []
        while len(got) < 200:
            many = await pair.server.entrypoint.receive_many(limit=70)
            assert 1 <= len(many) <= 70
            got += [message.payload for message in many]
        assert got == [b"%d" % number for number in range(200)]
        with pytest.raises(ValueError, match="limit=0"):
            await pair.server.entrypoint.receive_many(limit=0)


async def test_a_receipt_says_that_a_message_arrived(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        receipts = [await pair.client.entrypoint.send_tracked(b"x", mode=mode) for mode in Mode]
        assert [receipt.known for receipt in receipts] == [None, None, None]
        assert [await receipt.arrived() for receipt in receipts] == [True, True, True]
        assert repr(receipts[0]) == "<aqueduct.Receipt: arrived>"
        await pair.server.entrypoint.receive_many()


async def test_one_datagram_on_a_quiet_connection_is_answered_soon(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        await pair.client.peer_headers()
        await at_rest(20)
        receipt = await pair.client.entrypoint.send_tracked(b"x", mode=Mode.UNRELIABLE)
        with trio.fail_after(0.2):
            assert await receipt.arrived()
        await pair.server.entrypoint.receive()


async def test_a_receipt_says_that_a_message_was_lost(autojump_clock: MockClock) -> None:
    async with connected(over_a_plain_link, config=aqueduct.Config(unreliable_queue=1)) as pair:
        await at_rest()
        receipts = [await pair.client.entrypoint.send_tracked(b"x", mode=Mode.UNRELIABLE) for _ in range(3)]
        assert [receipt.known for receipt in receipts] == [False, False, None]  # two were dropped for the last
        assert [await receipt.arrived() for receipt in receipts] == [False, False, True]
        assert repr(receipts[1]) == "<aqueduct.Receipt: lost>"


async def test_the_receipt_of_a_message_that_will_never_be_answered_is_resolved(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        await sender.send_many([bytes(1000)] * 300)  # more than the credit of an unread stream
        receipt = await sender.send_tracked(b"never left")
        await at_rest()
        receiver.close()
        assert await receipt.arrived() is False


async def test_iterating_ends_with_the_sender(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        async with back:
            for number in range(3):
                await back.send(b"%d" % number)
        assert await payloads(forth) == [b"0", b"1", b"2"]
        with pytest.raises(Finished):
            await forth.receive()


async def test_finish_waits_until_everything_has_arrived_and_may_be_said_again(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        await back.send(b"last", mode=Mode.UNORDERED)
        await back.finish()
        assert forth.unread == 1
        assert back.half.machine.outcome is Outcome.FINISHED
        await back.finish()
        assert await payloads(forth) == [b"last"]
        with pytest.raises(trio.ClosedResourceError):
            await back.send(b"more")


async def test_several_tasks_receive_in_the_order_in_which_they_came(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        got: list[tuple[int, bytes]] = []

        async def receive(number: int) -> None:
            got.append((number, (await pair.server.entrypoint.receive()).payload))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(receive, number)
                await at_rest()
            await pair.client.entrypoint.send_many([b"0", b"1", b"2"])
        assert sorted(got) == [(0, b"0"), (1, b"1"), (2, b"2")]


# --- the ends of a channel


async def test_a_cancelled_sender_is_no_clean_end(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        await back.send(b"before")
        await at_rest()
        back.cancel()
        assert (await forth.receive()).payload == b"before"
        with pytest.raises(aqueduct.Cancelled) as caught:
            await forth.receive()
        assert isinstance(caught.value, ChannelCancelled)
        with pytest.raises(trio.ClosedResourceError):
            await back.send(b"after")
        with pytest.raises(trio.ClosedResourceError):
            await back.finish()


async def test_a_sender_that_finished_can_still_give_up_until_the_end_is_written(autojump_clock: MockClock) -> None:
    async with rough() as pair:
        back, forth = await carried_sender(pair)
        await back.send(bytes(1_000_000))  # it is not read, so the end is not sent
        back.close()
        assert not back.half.machine.finish_written
        back.cancel()
        with pytest.raises(aqueduct.Cancelled):
            await payloads(forth)


async def test_giving_up_too_late_changes_nothing(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        await back.send(b"all")
        await back.finish()
        back.cancel()
        assert await payloads(forth) == [b"all"]


async def test_a_closed_receiver_stops_its_sender_where_it_waits(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)

        async def push() -> None:
            with pytest.raises(NoReceiver) as caught:
                await send_on(sender)
            assert isinstance(caught.value, ChannelStopped)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            await at_rest()
            await receiver.aclose()
        with pytest.raises(NoReceiver):
            await sender.finish()
        with pytest.raises(trio.ClosedResourceError):
            await receiver.receive()
        await canary(pair)


async def test_closing_wakes_the_tasks_that_receive(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        _, receiver = await carried_receiver(pair)

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await receiver.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await at_rest()
            receiver.close()


@pytest.mark.clause("aqueduct-X01")
async def test_a_channel_whose_message_did_not_arrive_is_lost_in_transit_at_both_halves(
    autojump_clock: MockClock,
) -> None:
    async with connected(over_a_plain_link, config=aqueduct.Config(unreliable_queue=1)) as pair:
        await at_rest()
        receiver, for_sender = pair.client.channel()
        sender, for_receiver = pair.client.channel("sender")
        await pair.client.entrypoint.send(b"", attachments=[for_sender, for_receiver], mode=Mode.UNRELIABLE)
        await pair.client.entrypoint.send(b"last", mode=Mode.UNRELIABLE)  # the one before is dropped for it
        with pytest.raises(LostInTransit):
            await receiver.receive()
        with pytest.raises(LostInTransit) as caught:
            await sender.send(b"x")
        assert isinstance(caught.value, MuxError | trio.BrokenResourceError)
        with pytest.raises(LostInTransit):
            await sender.finish()
        assert await take(pair.server.entrypoint, 1)
        await canary(pair)


async def test_a_channel_that_its_maker_discards_is_lost_for_the_other_side(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        connection_of(pair.client).engine.forget(forth.half.machine)
        connection_of(pair.client).request_write()
        with pytest.raises(LostInTransit, match="has discarded it"):
            await forth.receive()
        await at_rest()
        with pytest.raises(LostInTransit, match="discarded it"):
            await back.send(b"x")


# --- the connection


async def test_both_sides_learn_the_headers_of_the_other(autojump_clock: MockClock) -> None:
    async with connected(headers=((b"user", b"ann"),), answer=((b"host", b"b"),)) as pair:
        assert await pair.client.peer_headers() == ((b"host", b"b"),)
        assert await pair.server.peer_headers() == ((b"user", b"ann"),)


async def test_connection_headers_are_bounded(autojump_clock: MockClock) -> None:
    here, _ = memory.pair()
    with pytest.raises(LocalProtocolError, match="headers"):
        async with aqueduct.connection(here, headers=[(b"k", bytes(20_000))]):
            pass


async def test_a_connection_knows_itself(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        await pair.client.entrypoint.send(b"12345")
        await pair.server.entrypoint.receive()
        assert pair.client.info.protocol == "aqueduct"
        assert pair.client.info.peer == "mem pair"
        assert (pair.client.stats().messages_sent, pair.server.stats().messages_received) == (1, 1)
        assert pair.server.stats().bytes_received > 5
        assert repr(pair.client) == "<aqueduct.Client mem pair: 0 halves>"
        assert repr(pair.server.entrypoint) == "<aqueduct.Receiver entrypoint: open, 0 unread>"
        with pytest.raises(LocalProtocolError, match="got 1025"):
            await pair.client.entrypoint.send(b"", headers=[(b"", b"")] * 1025)
        with pytest.raises(LocalProtocolError, match="expected at most 16777216 bytes"):
            await pair.client.entrypoint.send(bytes(16 * 1024 * 1024))


async def test_more_attachments_than_there_may_be_channels_are_refused_here(autojump_clock: MockClock) -> None:
    async with connected(config=aqueduct.Config(attachments=2)) as pair:
        made = [pair.client.channel()[1] for _ in range(3)]
        with pytest.raises(LocalProtocolError, match="expected at most 2 more, got 3 attachments"):
            await pair.client.entrypoint.send(b"", attachments=made)
        await pair.client.entrypoint.send(b"", attachments=made[:2])
        (await pair.server.entrypoint.receive()).close()
