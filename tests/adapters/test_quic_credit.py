"""QUIC credit is exact: nothing is granted before it is consumed, and nothing is sent beyond it."""

from __future__ import annotations

import math
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import trio
from aioquic.quic.connection import Limit

from muxkit import Limits
from muxkit_adapters.quic import ConnectionEnded
from muxkit_adapters.quic.congestion import QueueAwareReno
from muxkit_adapters.quic.credit import Credit, Granted, GrantedStreams
from muxkit_adapters.quic.options import QuicOptions

from ._quic import DELAY, SMALL, Collected, Pair, on_a_line, write_all

if TYPE_CHECKING:
    from trio.testing import MockClock

KIB, MIB = 1024, 1024 * 1024


def fill(pair: Pair, stream: int) -> int:
    """Write as much as the stream takes; gives how much that was."""
    total = 0
    while room := pair.client.room(stream):
        pair.client.write(stream, bytes(room), False)
        total += room
    return total


async def settled(pair: Pair) -> Collected:
    """What the server has after everything that could be sent was; none of it consumed."""
    await trio.sleep(60)
    got = Collected(pair.server, consume=False)
    await got.once()
    return got


@pytest.mark.requirement("R-09")
async def test_a_stalled_reader_holds_a_stream_at_exactly_its_credit(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        stream = pair.client.open()
        assert fill(pair, stream) == 16 * KIB
        got = await settled(pair)
        assert len(got.streams[stream]) == 16 * KIB
        assert pair.client.room(stream) == 0
        assert pair.server_quic.incoming.held == 16 * KIB


@pytest.mark.requirement("R-09", "R-01")
async def test_a_stalled_reader_holds_a_connection_at_exactly_its_credit(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        streams = [pair.client.open() for _ in range(5)]
        assert [fill(pair, stream) for stream in streams] == [16 * KIB, 16 * KIB, 8 * KIB, 0, 0]
        got = await settled(pair)
        assert sum(map(len, got.streams.values())) == 40 * KIB


@pytest.mark.requirement("R-09")
async def test_what_is_consumed_is_granted_again(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        stream = pair.client.open()
        fill(pair, stream)
        await settled(pair)
        pair.server.consumed(stream, 8 * KIB - 1)
        await trio.sleep(1)
        assert pair.client.room(stream) == 0
        pair.server.consumed(stream, 1)
        await trio.sleep(1)
        assert fill(pair, stream) == 8 * KIB
        pair.server.consumed(stream, 10**9)
        await settled(pair)
        assert pair.server_quic.incoming.held == 8 * KIB


@pytest.mark.requirement("R-09")
async def test_a_peer_who_sends_more_than_his_credit_is_cut_off(autojump_clock: MockClock) -> None:
    for beyond in ("stream", "connection"):
        async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
            streams = [pair.client.open() for _ in range(1 if beyond == "stream" else 4)]
            pair.client_quic._remote_max_data = 1 << 40
            for stream in streams:
                if beyond == "stream":
                    pair.client_quic._streams[stream].max_stream_data_remote = 1 << 40
                fill(pair, stream)
            with pytest.raises(ConnectionEnded, match=f"flow control error: Over {beyond} data limit"):
                await Collected(pair.client).until(lambda: False)


async def test_what_is_lent_comes_on_top_and_is_repaid_first(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        stream = pair.client.open()
        fill(pair, stream)
        await settled(pair)
        pair.server.lend(stream, 10_000)
        await trio.sleep(1)
        assert fill(pair, stream) == 10_000
        await settled(pair)
        pair.server.consumed(stream, 10_000)
        await trio.sleep(1)
        assert pair.client.room(stream) == 0
        pair.server.consumed(stream, 16 * KIB)
        await trio.sleep(1)
        assert fill(pair, stream) == 16 * KIB


async def test_nothing_is_lent_to_a_stream_that_has_ended(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        stream = pair.client.open()
        pair.client.write(stream, b"all", True)
        await settled(pair)
        pair.server.lend(stream, 10_000)
        pair.server.lend(999, 10_000)
        others = [pair.client.open() for _ in range(3)]
        await trio.sleep(1)
        assert sum(fill(pair, other) for other in others) == 40 * KIB - 3


@pytest.mark.requirement("R-22")
@pytest.mark.seeds(4, soak=200)
async def test_credit_of_what_is_lost_with_a_reset_comes_back(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair, trio.open_nursery() as nursery:
        got = Collected(pair.server)
        nursery.start_soon(got.until, lambda: got.ended)
        for _ in range(20):
            pair.line.fate = lambda data: [] if dice.random() < 0.5 else [0.01]
            stream = pair.client.open()
            fill(pair, stream)
            await trio.sleep(dice.choice((0.0, 0.01, 0.5)))
            pair.client.reset(stream)
            pair.line.fate = lambda data: [0.01]
            await trio.sleep(5)
        await write_all(pair.client, pair.client.open(), bytes(200 * KIB))
    assert pair.server_quic.incoming.held == 0


@pytest.mark.requirement("R-02")
async def test_a_stream_counts_until_it_has_ended_and_was_consumed(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(streams=4)) as pair:
        streams = []
        while pair.client.may_open():
            streams.append(pair.client.open())
            pair.client.write(streams[-1], b"x", len(streams) != 4)
        assert len(streams) == 4
        await settled(pair)
        assert not pair.client.may_open()
        for stream in streams:
            pair.server.consumed(stream, 1)
        assert await pair.client.wait_writable() == []
        opened = 0
        while pair.client.may_open():
            pair.client.write(pair.client.open(), b"", True)
            opened += 1
        assert opened == 3


@pytest.mark.requirement("R-02")
async def test_empty_streams_are_bounded_as_well(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(streams=4)) as pair:
        for _ in range(100):
            while not pair.client.may_open():
                await pair.client.wait_writable()
            pair.client.write(pair.client.open(), b"", True)
            await trio.sleep(0.1)
        got = Collected(pair.server)
        await got.until(lambda: len(got.ended) == 100)


async def test_a_window_grows_while_it_is_used_and_no_further_than_it_may(autojump_clock: MockClock) -> None:
    limits = Limits(channel_first=16 * KIB, channel_bytes=128 * KIB, connection_bytes=MIB)
    async with on_a_line(server=QuicOptions(limits=limits)) as pair:
        stream = pair.client.open()
        got = Collected(pair.server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(got.until, lambda: len(got.streams.get(stream, b"")) == 3 * MIB)
            left = 3 * MIB
            while left:
                room = min(left, pair.client.room(stream))
                if room:
                    pair.client.write(stream, bytes(room), False)
                    left -= room
                else:
                    await pair.client.wait_writable()
        await trio.sleep(1)
        # A grant waits until it is worth half a window, so more than half of the last window is always free here. The
        # window before it has 64 KiB.
        assert 64 * KIB < fill(pair, stream) <= 128 * KIB


async def test_windows_that_grew_leave_half_of_the_connection_to_the_others(autojump_clock: MockClock) -> None:
    limits = Limits(channel_first=16 * KIB, channel_bytes=64 * KIB, connection_bytes=128 * KIB)
    async with on_a_line(server=QuicOptions(limits=limits)) as pair:
        streams = [pair.client.open() for _ in range(3)]
        got = Collected(pair.server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                got.until, lambda: all(len(got.streams.get(stream, b"")) == 300 * KIB for stream in streams)
            )
            for stream in streams:
                left = 300 * KIB
                while left:
                    room = min(left, pair.client.room(stream))
                    if room:
                        pair.client.write(stream, bytes(room), False)
                        left -= room
                    else:
                        await pair.client.wait_writable()
        await trio.sleep(1)
        assert sum(fill(pair, stream) for stream in streams) <= 64 * KIB + 3 * 16 * KIB


async def send_and_consume(pair: Pair, size: int) -> tuple[int, list[int], list[int]]:
    """Send as fast as the stream takes it, and consume all that comes.

    Returns the stream, and before each write the bytes that were not acknowledged and those that were not sent.
    """
    stream = pair.client.open()
    got = Collected(pair.server)
    buffered, unsent = [0], [0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(got.until, lambda: len(got.streams.get(stream, b"")) == size)
        left = size
        while left:
            room = min(left, pair.client.room(stream), 64 * KIB)
            if room:
                pair.client.write(stream, bytes(room), False)
                left -= room
                buffered.append(pair.client_quic.buffered)
                unsent.append(pair.client_quic.unsent)
            else:
                await pair.client.wait_writable()
    return stream, buffered, unsent


async def test_the_window_of_a_stream_follows_the_path(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream, _, _ = await send_and_consume(pair, 5 * MIB)
        assert pair.server_quic.incoming.of(stream) > 3 * MIB // 2
        assert pair.server_quic.incoming.round_trip.seconds == pytest.approx(2 * DELAY)


# --- the sending side

WIDE = QuicOptions(limits=Limits(channel_first=128 * MIB, channel_bytes=128 * MIB, connection_bytes=128 * MIB))


async def test_the_outbox_bounds_what_waits_and_not_what_is_under_way(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=100_000))) as pair:
        _, buffered, unsent = await send_and_consume(pair, 2 * MIB)
        assert max(unsent) <= 100_000
        assert max(buffered) > 300_000


async def test_bytes_that_are_not_acknowledged_are_bounded_by_eight_outboxes(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=40_000))) as pair:
        _, buffered, _ = await send_and_consume(pair, 2 * MIB)
        assert 300_000 < max(buffered) <= 320_000


@pytest.mark.requirement("R-08", "R-03")
async def test_a_peer_who_confirms_nothing_costs_no_more_than_the_outbox(autojump_clock: MockClock) -> None:
    async with on_a_line(server=WIDE) as pair:
        pair.line.fate = lambda data: []
        block, total = bytes(64 * KIB), 0
        tracemalloc.start()
        try:
            streams = [pair.client.open() for _ in range(4)]
            for _ in range(64 * MIB // len(block)):
                for stream in streams:
                    if room := pair.client.room(stream):
                        pair.client.write(stream, block[:room], False)
                        total += min(room, len(block))
            await trio.sleep(5)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert total == pair.client_quic.buffered
        assert MIB * 15 // 16 <= total <= MIB + pair.client_quic._loss.congestion_window
        assert peak < 4 * MIB


async def test_a_sender_goes_on_when_a_quarter_of_the_outbox_is_free(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=100_000))) as pair:
        got = Collected(pair.server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(got.until, lambda: len(got.streams.get(2, b"")) == 10 * MIB // 8)
            stream, left = pair.client.open(), 10 * MIB // 8
            while left:
                room = min(left, pair.client.room(stream))
                if room:
                    assert pair.client_quic.unsent + room <= 100_000
                    pair.client.write(stream, bytes(room), False)
                    left -= room
                else:
                    await pair.client.wait_writable()
                    assert pair.client_quic.unsent <= 75_000


async def test_a_short_message_does_not_wait_behind_bulk_data_that_fills_the_outbox(autojump_clock: MockClock) -> None:
    async with on_a_line(server=WIDE) as pair:
        bulk, short = pair.client.open(), pair.client.open()
        got = Collected(pair.server)
        congestion = pair.client_quic._loss._cc
        assert isinstance(congestion, QueueAwareReno)
        congestion.congestion_window = congestion.ssthresh = 100_000  # 5 MB/s, a fifth of a second for the outbox
        congestion._lost_at = math.inf  # it doesn't grow any more

        async def send_bulk() -> None:
            while True:
                fill(pair, bulk)
                await pair.client.wait_writable()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_bulk)
            nursery.start_soon(got.until, lambda: False)
            for turn in range(1, 11):
                await trio.sleep(0.023)
                assert pair.client_quic.unsent > 700_000
                pair.client.write(short, bytes(pair.client.room(short) and 64), False)
                await trio.sleep(1.5 * DELAY)
                assert len(got.streams.get(short, b"")) == 64 * turn
            nursery.cancel_scope.cancel()


async def test_only_streams_with_nothing_unsent_use_the_spared_room(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=160_000)), WIDE) as pair:
        streams = [pair.client.open() for _ in range(4)]
        for stream in streams:
            fill(pair, stream)
        assert pair.client_quic.unsent > 150_000
        assert [pair.client.room(stream) for stream in streams] == [0] * 4
        await trio.sleep(DELAY)  # some of it leaves, but the rest of each stream still waits
        assert [pair.client.room(stream) for stream in streams] == [0] * 4


async def test_bulk_streams_leave_the_spared_room_to_others(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=160_000)), WIDE) as pair:
        first, second, short = (pair.client.open() for _ in range(3))
        pair.client.write(second, bytes(pair.client.room(second)), False)  # takes all the room that it has
        await trio.sleep(1)
        fill(pair, first)
        assert pair.client.room(second) == 0
        assert pair.client.room(short) == 4096


async def test_on_a_short_path_the_outbox_bounds_all_that_is_not_acknowledged(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=100_000))) as pair:
        pair.line.fate = lambda data: [0.0001]
        pair.client_quic.incoming.round_trip.measured(0.0002)
        _, buffered, _ = await send_and_consume(pair, MIB)
        assert 90_000 < max(buffered) <= 100_000


async def test_writing_more_than_there_is_room_for_is_refused(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=SMALL)) as pair:
        stream = pair.client.open()
        with pytest.raises(ValueError, match="16385 bytes to write, there is room for 16384"):
            pair.client.write(stream, bytes(16 * KIB + 1), False)


async def test_streams_wait_for_room_in_the_order_in_which_they_found_none(autojump_clock: MockClock) -> None:
    async with on_a_line(QuicOptions(limits=Limits(outbox=50_000))) as pair:
        streams = [pair.client.open() for _ in range(4)]
        fill(pair, streams[0])
        for stream in (streams[2], streams[1], streams[3]):
            fill(pair, stream)
        assert await pair.client.wait_writable() == [streams[0], streams[2], streams[1], streams[3]]


# --- the accounts by themselves


@pytest.mark.requirement("R-22")
@pytest.mark.seeds(16, soak=5000)
def test_the_accounts_of_credit_add_up(seed: int) -> None:
    dice = random.Random(seed)
    first, most, window = 100, 400, 1000
    data = Granted(Limit(0, "", 0), window)
    streams = GrantedStreams(Limit(0, "", 0), 10)
    granted: dict[int, int] = {}
    credit = Credit(first=first, most=most, data=data, streams=streams, grant=granted.__setitem__)
    arrived: dict[int, int] = {}
    eaten: dict[int, int] = {}
    over: set[int] = set()
    lent = total = ended_beyond = 0
    for step in range(400):
        now = step * dice.choice((0.01, 2.0))
        stream = dice.randrange(12)
        may = min(granted.get(stream, first) - arrived.get(stream, 0), data.granted - total - ended_beyond)
        match dice.randrange(5):
            case 0 | 1 if stream not in over and may > 0:
                size = dice.randint(1, may)
                arrived[stream] = arrived.get(stream, 0) + size
                total += size
                credit.arrived(stream, size, now)
            case 2 if (left := arrived.get(stream, 0) - eaten.get(stream, 0)) > 0:
                size = dice.randint(1, left)
                eaten[stream] = eaten.get(stream, 0) + size
                credit.consumed(stream, size, now)
            case 3 if stream in arrived and stream not in over:
                lent += 50
                assert credit.lend(stream, 50)
            case 4 if stream not in over and dice.random() < 0.1:
                beyond = dice.randint(0, max(0, may))
                ended_beyond += beyond
                over.add(stream)
                credit.ended(stream, arrived.get(stream, 0) + beyond, now)
        for known, limit in granted.items():
            assert limit - eaten.get(known, 0) <= most + lent
        assert data.granted - sum(eaten.values()) - ended_beyond <= window + lent
        assert credit.held == sum(arrived.values()) - sum(eaten.values())
    for stream, size in arrived.items():
        credit.consumed(stream, size - eaten.get(stream, 0), 1e9)
        if stream not in over:
            credit.ended(stream, size, 1e9)
            over.add(stream)
    assert credit.held == 0
    assert streams.done == len(over)
    assert data.granted >= total + ended_beyond + window // 2
