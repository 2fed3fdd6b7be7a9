"""Other tasks and channels go on while one does not read."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Config
from muxkit.runtime import Mailbox
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.bpmux._helpers import sender_of

from ._pairs import (
    MIB,
    TINY,
    Pair,
    SilentStream,
    at_rest,
    echo_each,
    next_duplex,
    next_source,
    rough_sessions,
    sessions,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

    from muxkit.protocols.bpmux import Duplex, Source


async def drain(channel: Duplex | Source) -> int:
    return sum([len(message) async for message in channel])


@pytest.mark.requirement("R-03", "R-07")
@pytest.mark.parametrize("size", [0, 100, 5000])
async def test_sixteen_channels_a_side_push_both_ways_over_a_link_that_takes_nothing_unread(
    size: int, autojump_clock: MockClock
) -> None:
    async def push(channel: Duplex) -> None:
        for _ in range(60):
            await channel.send(bytes(size))
        await channel.finish()

    async def use(channel: Duplex) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, channel)
            assert await drain(channel) == 60 * size

    async def serve(pair: Pair) -> None:
        for session in (pair.one, pair.other):
            for _ in range(16):
                nursery.start_soon(use, await next_duplex(session))

    async def open_one(session: bpmux.Session) -> None:
        async with session.open() as channel:
            await use(channel)

    with trio.fail_after(20):
        async with sessions(trio.testing.lockstep_stream_pair(), limits=TINY) as pair, trio.open_nursery() as nursery:
            nursery.start_soon(serve, pair)
            for session in (pair.one, pair.other):
                for _ in range(16):
                    nursery.start_soon(open_one, session)


@pytest.mark.requirement("R-07")
async def test_a_stalled_reader_stops_its_own_channel_only(autojump_clock: MockClock) -> None:
    rounds = 0

    async def talk(session: bpmux.Session) -> None:
        nonlocal rounds
        async with session.open() as channel:
            for number in range(20):
                await channel.send(b"%d" % number)
                assert await channel.receive() == b"%d" % number
                rounds += 1

    async with rough_sessions() as pair, pair.one.open() as stalled:
        await next_duplex(pair.other)
        sent = 0

        async def push() -> None:
            nonlocal sent
            while True:
                await stalled.send(bytes(10_000))
                sent += 10_000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            await at_rest()
            assert sent < 2 * MIB
            nursery.start_soon(echo_each, pair.other)
            with trio.fail_after(10):
                async with trio.open_nursery() as talkers:
                    for _ in range(99):
                        talkers.start_soon(talk, pair.one)
            assert rounds == 99 * 20
            before = sent
            await at_rest()
            assert sent == before
            nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-07")
async def test_many_stalled_channels_do_not_use_up_the_outbox_of_the_others() -> None:
    async with rough_sessions(limits=TINY) as pair, trio.open_nursery() as nursery:

        async def stall() -> None:
            async with pair.one.open_sink() as sink:
                while True:
                    await sink.send(bytes(5000))

        for _ in range(50):
            nursery.start_soon(stall)
        await at_rest()
        nursery.start_soon(echo_each, pair.other)
        async with pair.one.open() as channel:
            for _ in range(100):
                await channel.send(b"x" * 50)
                assert await channel.receive() == b"x" * 50
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-07")
async def test_nor_do_they_hold_up_a_message_that_is_larger_than_the_outbox(autojump_clock: MockClock) -> None:
    """Was: The rest of a message that waited for credit counted 16 bytes in the outbox: beside six unread messages of
    16 MiB, one larger than the outbox never went, and then nothing else did.
    """
    async with rough_sessions(limits=TINY) as pair, trio.open_nursery() as nursery:

        async def stall() -> None:
            async with pair.one.open_sink() as sink:
                await sink.send(bytes(TINY.message))
                await trio.sleep_forever()

        for _ in range(20):
            nursery.start_soon(stall)
        await at_rest()
        nursery.start_soon(echo_each, pair.other)
        with trio.fail_after(60):
            async with pair.one.open() as large, pair.one.open() as small:
                await large.send(bytes(TINY.outbox + 1))
                for _ in range(100):
                    await small.send(b"x" * 50)
                    assert await small.receive() == b"x" * 50
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-08")
async def test_a_sender_waits_when_the_transport_takes_nothing() -> None:
    here, _there = memory.pair()  # the other side does not read
    config = Config(grants=True)
    async with rough_sessions((here, memory.pair()[0]), config=config) as pair:
        engine = connection_of(pair.one).engine
        # The peer granted a lot before it stopped reading.
        async with pair.one.open_sink() as sink:
            sender_of(sink).credit.grant(1 << 40)
            sent = 0

            async def push() -> None:
                nonlocal sent
                while True:
                    await sink.send(bytes(10_000))
                    sent += 10_000

            tracemalloc.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(push)
                await at_rest()
                assert engine.outbox <= Limits().outbox
                assert sent <= 2 * Limits().outbox
                assert pair.one.stats().queued >= sent - 65_536
                nursery.cancel_scope.cancel()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 3 * Limits().outbox


@pytest.mark.requirement("R-03")
async def test_the_windows_of_unread_channels_bound_the_memory() -> None:
    limits = Limits(channel_bytes=20_000, connection_bytes=MIB // 2)
    async with rough_sessions(limits=limits) as pair, trio.open_nursery() as nursery:

        async def push(size: int) -> None:
            async with pair.one.open_sink() as sink:
                while True:
                    await sink.send(bytes(size))

        tracemalloc.start()
        for number in range(100):
            nursery.start_soon(push, (10, 100, 1000, 50_000)[number % 4])
        await at_rest()
        before = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        held = sum(
            half.receiver.held for half in connection_of(pair.other).live_halves() if isinstance(half, ReceiveHalf)
        )
        assert held >= MIB / 8
        # both ends are in this process: the sender's queue is bounded, with one message a channel beside it
        assert before <= 2 * limits.connection_bytes * 1.5 + limits.outbox + 100 * 64 * 1024
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-05")
@pytest.mark.parametrize("others", [0, 500])
async def test_a_million_unread_empty_messages_cost_nothing(others: int) -> None:
    flooder, victim = memory.pair(capacity=4 * MIB)
    empty, short = bytes((0b01010000, 5, 0)), bytes((0b01010000, 5, 1, 0))
    async with rough_sessions((victim, memory.pair()[0])) as pair:
        await flooder.send_all(empty)
        source = await next_source(pair.one)
        await flooder.send_all(short * others + empty * 1_000_000)
        await _arrived(source, others + 1_000_000)
        stored = source.half._stored
        assert isinstance(stored, Mailbox)
        assert len(stored._items) <= 1024
        assert await source.receive_many(limit=others + 2) == [bytes(1)] * others + [b""] * 2


async def _arrived(source: Source, count: int) -> None:
    while source.unread < count:
        await trio.lowlevel.checkpoint()


@pytest.mark.requirement("R-27")
async def test_a_flood_of_tiny_frames_leaves_the_other_connections_their_turns() -> None:
    """Count scheduling steps: unlike their time, their number does not depend on the machine."""
    flooder, victim = memory.pair(capacity=4 * MIB)
    steps = 0
    most = 0

    class Longest(trio.abc.Instrument):
        def __init__(self, session: bpmux.Session) -> None:
            self.session = session
            self.before = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.before = connection_of(self.session).messages_received

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal most
            most = max(most, connection_of(self.session).messages_received - self.before)

    async with sessions() as calm:
        async with rough_sessions((victim, memory.pair()[0])) as pair:
            await flooder.send_all(bytes((0b01010000, 5, 0)) * 200_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo_each, calm.other)
                instrument = Longest(pair.one)
                trio.lowlevel.add_instrument(instrument)
                async with calm.one.open() as channel:
                    while connection_of(pair.one).messages_received < 199_999:
                        await channel.send(b"ping")
                        await channel.receive()
                        steps += 1
                trio.lowlevel.remove_instrument(instrument)
                nursery.cancel_scope.cancel()
    assert most <= 64 * 1024 // 3 + 1
    assert steps >= 10


async def test_a_silent_peer_stops_the_sender_and_a_time_limit_frees_it(autojump_clock: MockClock) -> None:
    async def use() -> None:
        async with bpmux.session(SilentStream(), linger=5) as session, session.open() as channel:
            with trio.move_on_after(10) as scope:
                await channel.send(b"nobody grants")
            assert scope.cancelled_caught

    with pytest.raises(LinkLost, match=r"didn't close the session within 5.* s"):
        await use()
