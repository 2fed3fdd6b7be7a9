"""Channels that are not read: the others go on, and memory stays within its limits."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from muxkit import Limits, LinkLost
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config, Mode
from muxkit.runtime import StreamPump, background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import weather_pair
from muxkit_adapters import memory
from tests.protocols.aqueduct._helpers import incoming_of
from tests.protocols.aqueduct._session_pairs import (
    LINKS,
    TINY,
    at_rest,
    canary,
    carried_receiver,
    carried_sender,
    connected,
    leftovers,
    over_a_narrow_link,
    over_a_plain_link,
    over_memory,
    payloads,
    rough,
    send_on,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from muxkit import Channel, Session
    from muxkit.protocols.aqueduct import Receiver, Sender, Server
    from tests.protocols.aqueduct._session_pairs import MakeLinks

KIB, MIB = 1024, 1024 * 1024
QUIET = 0.05  # s without any task running, over links that are real


def unused_credit(side: Server, receiver: Receiver) -> int:
    """Give the credit that the peer has on the streams of this receiver, as the carrier or the link counts it."""
    streams = [
        stream for stream, it in connection_of(side).engine.state.incoming.items() if it.half is receiver.half.machine
    ]
    pump: Any = connection_of(side).pump
    if isinstance(pump, StreamPump):
        carrier: Any = pump._engine
        return sum(incoming_of(carrier)[stream].window.credit for stream in streams)
    granted = pump._link._quic.incoming._arriving
    return sum(granted[stream].granted - granted[stream].delivered for stream in streams)


def held(side: Server, receiver: Receiver) -> int:
    """Give the bytes that came for this receiver and were not read."""
    incoming = connection_of(side).engine.state.incoming.values()
    return sum(each.unconsumed for each in incoming if each.half is receiver.half.machine)


@pytest.mark.requirement("R-07", "R-08", "R-09")
@pytest.mark.parametrize(
    "make_links", [pytest.param(LINKS[name], id=name) for name in ("memory", "tcp", "unix", "ws", "quic")]
)
async def test_a_stalled_receiver_holds_its_sender_at_exactly_the_credit_that_it_gave(make_links: MakeLinks) -> None:
    async with rough(make_links) as pair:
        sender, receiver = await carried_receiver(pair)
        async with background() as nursery:
            nursery.start_soon(_until_lost, lambda: send_on(sender, bytes(1000)))
            await canary(pair)  # after this, the window is granted as a whole
            while unused_credit(pair.server, receiver) or not held(pair.server, receiver):
                await at_rest(QUIET)
            await at_rest(QUIET)
            before = held(pair.server, receiver)
            assert before <= pair.server.limits.channel_bytes
            assert sender.half.machine.queued <= pair.client.limits.channel_bytes
            await canary(pair)  # and no other task
            await at_rest(QUIET)
            assert (unused_credit(pair.server, receiver), held(pair.server, receiver)) == (0, before)
            # Reading lets the next ones come, which could not be sent before.
            await take(receiver, sender.half.machine.messages_sent + 1)


@pytest.mark.requirement("R-03", "R-08")
@pytest.mark.parametrize("size", [1000, 64 * KIB, MIB])
async def test_64_mib_sent_to_a_peer_that_does_not_read_cost_little_more_than_the_messages_themselves(
    size: int, autojump_clock: MockClock
) -> None:
    await send_64_mib(over_memory, size)


@pytest.mark.requirement("R-03", "R-08", "R-09")
async def test_nor_do_they_over_quic() -> None:
    await send_64_mib(LINKS["quic"], 64 * KIB)


async def send_64_mib(make_links: MakeLinks, size: int) -> None:
    async with rough(make_links) as pair:
        sender, receiver = await carried_receiver(pair)
        message = bytes(size)

        async def send_all() -> None:
            for _ in range(64 * MIB // size):
                await sender.send(message)
            raise AssertionError("64 MiB were taken from the sender and not read")

        async with background() as nursery:
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                nursery.start_soon(_until_lost, send_all)
                while unused_credit(pair.server, receiver) or not held(pair.server, receiver):
                    await at_rest(QUIET)
                await at_rest(QUIET)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak - before < 4 * MIB
            assert receiver.unread > 0


@pytest.mark.requirement("R-03", "R-08")
async def test_64_mib_sent_into_a_link_that_takes_nothing_cost_little_more(autojump_clock: MockClock) -> None:
    here, _there = memory.pair()
    messages = [bytes(MIB) for _ in range(64)]

    async def push() -> None:
        async with aqueduct.connection(here, linger=1) as client, background() as nursery:
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                nursery.start_soon(_until_lost, lambda: client.entrypoint.send_many(messages))
                await at_rest(0.001)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak - before < 4 * MIB
            assert 1 <= client.entrypoint.half.machine.messages_sent < 5

    with pytest.raises(LinkLost):
        await push()


@pytest.mark.requirement("R-04", "R-05")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED])
async def test_a_flood_of_empty_messages_is_bounded_by_count(mode: Mode, autojump_clock: MockClock) -> None:
    limits = Limits(channel_bytes=256 * KIB, channel_first=64 * KIB)
    async with connected(limits=limits, config=Config(in_flight=100_000)) as pair:
        sender, receiver = await carried_receiver(pair)
        sent = 0

        async def push() -> None:
            nonlocal sent
            for _ in range(6000):
                await sender.send(b"", mode=mode)
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            await at_rest(0.1)
            assert receiver.unread == 256 * KIB // 256
            got = 0
            while got < 6000:
                got += len(await receiver.receive_many())
                assert receiver.unread <= 256 * KIB // 256
        await sender.finish()
        await at_rest(1)
        assert leftovers(pair) == []


@pytest.mark.requirement("R-05", "R-07")
async def test_unread_messages_hold_back_no_channel_that_is_read(autojump_clock: MockClock) -> None:
    limits = Limits(connection_bytes=256 * KIB, channel_bytes=64 * KIB)  # 1024 messages may wait, 256 of one channel
    async with rough(limits=limits) as pair:
        stalled = [await carried_receiver(pair) for _ in range(6)]
        reading_sender, reading = await carried_receiver(pair)
        async with background() as nursery:
            for sender, _ in stalled:
                nursery.start_soon(_until_lost, partial(send_on, sender, b""))
                await at_rest(0.1)
            # A receiver without unread messages may have one message whatever the others have.
            assert 1024 <= sum(receiver.unread for _, receiver in stalled) <= 1024 + len(stalled)
            for number in range(300):
                await reading_sender.send(b"%d" % number)
                assert (await reading.receive()).payload == b"%d" % number
            # And receivers that were held back by others go on when those are read.
            waiting = [receiver for _, receiver in stalled if receiver.unread < 256]
            assert waiting
            before = [receiver.unread for receiver in waiting]
            full = next(receiver for _, receiver in stalled if receiver.unread == 256)
            await take(full, 100)
            await at_rest(0.1)
            assert sum(receiver.unread for receiver in waiting) > sum(before)


@pytest.mark.requirement("R-07")
@pytest.mark.parametrize(("first", "floor"), [(100, 4096), (1, 50), (1, 1), (64 * KIB, 1)])
async def test_messages_get_through_windows_that_begin_below_their_size(
    first: int, floor: int, autojump_clock: MockClock
) -> None:
    limits = Limits(channel_first=first, channel_floor=floor, channel_bytes=100_000, message=30_000, reassembly=30_000)
    async with rough(limits=limits) as pair:
        sender, receiver = await carried_receiver(pair)
        async with background() as nursery:
            nursery.start_soon(_send_all, sender, [bytes(300)] * 60)
            with trio.fail_after(60):
                assert await payloads(receiver) == [bytes(300)] * 60


async def test_unreliable_messages_never_wait_and_the_oldest_give_way(autojump_clock: MockClock) -> None:
    async with connected(over_a_plain_link, config=Config(unreliable_queue=10)) as pair:
        await at_rest()
        entrypoint = pair.client.entrypoint
        receipts = [await entrypoint.send_tracked(b"%d" % number, mode=Mode.UNRELIABLE) for number in range(60)]
        assert [receipt.known for receipt in receipts] == [False] * 50 + [None] * 10
        assert [await receipt.arrived() for receipt in receipts] == [False] * 50 + [True] * 10
        assert [int(message.payload) for message in await take(pair.server.entrypoint, 10)] == [*range(50, 60)]


async def test_large_unreliable_messages_to_a_peer_that_does_not_read_give_way_as_well(
    autojump_clock: MockClock,
) -> None:
    # Only one such message can be reassembled at a time, so the others are not sent.
    limits = Limits(channel_bytes=100_000, channel_first=1000, outbox=200_000, message=30_000, reassembly=30_000)
    async with rough(limits=limits) as pair:
        sender, _receiver = await carried_receiver(pair)
        for _ in range(200):
            await sender.send(bytes(20_000), mode=Mode.UNRELIABLE)
            await at_rest()
        assert 50_000 < sender.half.machine.queued <= 100_000
        assert sender.half.machine.datagram_bytes <= 100_000


async def test_a_sender_whose_turn_came_waits_again_when_a_datagram_that_was_too_large_takes_the_room(
    autojump_clock: MockClock,
) -> None:
    limits = Limits(channel_bytes=100_000, channel_first=1000, outbox=200_000, message=30_000, reassembly=30_000)
    async with rough(limits=limits) as pair:
        sender, receiver = await carried_receiver(pair)
        for _ in range(5):
            await sender.send(bytes(20_000))
            await at_rest()
        queued, sent = sender.half.machine.queued, sender.half.machine.messages_sent
        assert 71_000 < queued < 82_000  # they are not read, so they stay
        async with background() as nursery:
            first = trio.CancelScope()
            nursery.start_soon(_within, first, lambda: sender.send(bytes(29_000)))
            await at_rest()
            nursery.start_soon(sender.send, b"second".ljust(size := 99_000 - queued))
            await at_rest()
            assert sender.half.machine.messages_sent == sent
            first.cancel()  # wakes the second task, which has not run when the datagram leaves the queue
            await sender.send(b"datagram".ljust(17_000), mode=Mode.UNRELIABLE)
            assert connection_of(pair.client).engine.datagram_to_send(Config().datagram) is None
            assert sender.half.machine.messages_sent == sent + 1
            assert not sender.half.has_room(size)
            got = {message.payload.rstrip() for message in await take(receiver, sent + 2)}
        assert got == {bytes(20_000), b"datagram", b"second"}


async def test_unordered_messages_wait_for_a_stream(autojump_clock: MockClock) -> None:
    limits = Limits(channels=4)
    config = Config(streams=10, unopened=3)
    async with rough(limits=limits, config=config) as pair:
        sender, receiver = await carried_receiver(pair)
        async with background() as nursery:
            nursery.start_soon(_until_lost, lambda: _send_unordered(sender))
            await at_rest(0.1)
            assert len(sender.half.machine.unordered) == 3
            before = sender.half.machine.messages_sent
            assert before < 40
            await at_rest(0.1)
            assert sender.half.machine.messages_sent == before
            await take(receiver, 10)
            await at_rest(0.1)
            assert sender.half.machine.messages_sent >= before + 10 - 4
            assert len(sender.half.machine.unordered) == 3


@pytest.mark.requirement("R-07")
async def test_sixteen_channels_a_side_push_both_ways_over_a_link_that_takes_little(autojump_clock: MockClock) -> None:
    count = 20

    async def push(sender: Sender) -> None:
        for number in range(count):
            await sender.send(bytes(500), mode=(Mode.ORDERED, Mode.UNORDERED)[number % 2])
        await sender.finish()

    async def drain(receiver: Receiver) -> None:
        assert len([message async for message in receiver]) == count

    with trio.fail_after(60):
        async with connected(over_a_narrow_link, limits=TINY) as pair, trio.open_nursery() as nursery:
            for _ in range(8):
                for sender, receiver in (await carried_receiver(pair), await carried_sender(pair)):
                    nursery.start_soon(push, sender)
                    nursery.start_soon(drain, receiver)


async def test_senders_of_one_half_are_served_in_the_order_in_which_they_came(autojump_clock: MockClock) -> None:
    async with connected(config=Config(in_flight=1)) as pair:
        order: list[int] = []

        async def send(number: int) -> None:
            await pair.client.entrypoint.send(b"%d" % number)
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(send, number)
                await at_rest()
        assert order == [0, 1, 2, 3, 4]
        got = [message.payload for message in await take(pair.server.entrypoint, 5)]
        assert got == [b"0", b"1", b"2", b"3", b"4"]


async def _send_all(sender: Sender, messages: list[bytes]) -> None:
    for message in messages:
        await sender.send(message)
    await sender.finish()


async def _send_unordered(sender: Sender) -> None:
    while True:
        await sender.send(b"x", mode=Mode.UNORDERED)


async def _until_lost(call: Callable[[], Awaitable[object]]) -> None:
    with suppress(trio.BrokenResourceError):
        await call()


async def _within(scope: trio.CancelScope, call: Callable[[], Awaitable[object]]) -> None:
    with scope:
        await call()


@pytest.mark.requirement("R-41")
@pytest.mark.parametrize("is_batch", [False, True], ids=["send", "send_many"])
async def test_many_channels_that_wait_for_the_same_room_send_one_after_the_other(
    is_batch: bool, autojump_clock: MockClock
) -> None:
    """All are told that the outbox has room, and those that come too late wait again."""
    messages = [bytes(10_000)] * 20

    async def echo(session: Session, nursery: trio.Nursery) -> None:
        async for channel in session:
            nursery.start_soon(echo_on, channel)

    async def echo_on(channel: Channel) -> None:
        async for message in channel:
            await channel.send(message)
        await channel.aclose()

    async def send(channel: Channel) -> None:
        if is_batch:
            await channel.send_many(messages)
        else:
            for message in messages:
                await channel.send(message)

    async def talk(session: Session) -> None:
        async with session.open() as channel, background() as nursery:
            nursery.start_soon(send, channel)
            for message in messages:
                assert await channel.receive() == message

    links = weather_pair(4, latency=0.01, jitter=0.01, bandwidth=1e8)
    async with connected(lambda: nullcontext(links)) as pair, background() as nursery:
        nursery.start_soon(echo, pair.client, nursery)
        nursery.start_soon(echo, pair.server, nursery)
        async with trio.open_nursery() as talks:
            for _ in range(16):
                talks.start_soon(talk, pair.client)
                talks.start_soon(talk, pair.server)
