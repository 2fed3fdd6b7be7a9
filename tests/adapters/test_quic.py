"""A QUIC connection is a link: streams and datagrams both ways, giving up and stopping, and every kind of end."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.runtime import MultistreamLink
from muxkit.testing import cancel_sweep
from muxkit_adapters.quic.options import QuicOptions

from ._quic import Collected, on_a_line, real_pair, some_bytes, write_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    from muxkit_adapters.quic import QuicLink


async def test_a_link_says_who_is_at_its_ends() -> None:
    async with real_pair() as (here, there):
        assert isinstance(here, MultistreamLink)
        assert (here.role, there.role) == ("client", "server")
        assert here.peer.startswith("quic 127.0.0.1:")
        assert there.peer.startswith("quic 127.0.0.1:")
        assert here.alpn == there.alpn == "muxkit-aqueduct"
        assert repr(here) == f"<QuicLink {here.peer}>"


async def test_streams_carry_bytes_both_ways_beside_each_other() -> None:
    dice = random.Random(7)
    sent = [some_bytes(dice, 200_000) for _ in range(40)]
    async with real_pair() as (here, there), trio.open_nursery() as nursery:
        for link, other in ((here, there), (there, here)):
            nursery.start_soon(_write_each, link, sent)
            nursery.start_soon(_expect_each, other, sent, 2 if link is here else 3)


async def _write_each(link: QuicLink, contents: list[bytes]) -> None:
    """Turn by turn, as each has room."""
    left = {link.open(): memoryview(content) for content in contents}
    while left:
        for stream in [*left]:
            room = link.room(stream)
            if not room and left[stream]:
                continue
            part, left[stream] = left[stream][: min(room, 20_000)], left[stream][min(room, 20_000) :]
            link.write(stream, bytes(part), not left[stream])
            if not left[stream]:
                del left[stream]
        if left and not any(map(link.room, left)):
            await link.wait_writable()


async def _expect_each(link: QuicLink, contents: list[bytes], first: int) -> None:
    got = Collected(link)
    await got.until(lambda: len(got.ended) == len(contents))
    for number, content in enumerate(contents):
        assert got.streams.get(first + 4 * number, b"") == content


async def test_streams_are_numbered_as_quic_numbers_them(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        assert [pair.client.open() for _ in range(3)] == [2, 6, 10]
        assert [pair.server.open() for _ in range(3)] == [3, 7, 11]


async def test_opening_a_stream_tells_the_peer_nothing_until_something_is_written(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        first, second = pair.client.open(), pair.client.open()
        pair.client.write(second, b"x", False)
        got = Collected(pair.server)
        await got.once()
        assert got.streams == {second: b"x"}
        pair.client.write(first, b"", True)
        await got.once()
        assert got.ended == {first}


async def test_a_stream_that_is_given_up_is_reset_at_the_peer(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        pair.client.write(stream, b"begun", False)
        got = Collected(pair.server)
        await got.once()
        pair.client.reset(stream)
        pair.client.reset(stream)
        await got.once()
        assert (got.reset, got.ended) == ({stream}, set())
        assert pair.client.room(stream) == 0
        pair.client.write(stream, b"nobody wants it", True)


async def test_what_was_not_sent_of_a_stream_that_is_given_up_never_is(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.line.fate = lambda data: []
        stream = pair.client.open()
        pair.client.write(stream, bytes(60_000), False)
        await trio.sleep(0.01)
        pair.client.reset(stream)
        assert pair.client_quic.buffered == 0
        pair.line.fate = lambda data: [0.01]
        got = Collected(pair.server)
        await got.until(lambda: got.reset)
        assert not got.streams


async def test_a_stream_that_the_reader_stops_is_stopped_at_the_writer_once(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        pair.client.write(stream, bytes(30_000), False)
        got = Collected(pair.server)
        await got.once()
        pair.server.stop(stream)
        pair.server.stop(stream)
        told = Collected(pair.client)
        await told.once()
        assert told.stopped == {stream}
        assert pair.client.room(stream) == 0
        await got.until(lambda: got.reset)
        with trio.move_on_after(5) as scope:
            await told.once()
        assert scope.cancelled_caught


async def test_stopping_a_stream_that_has_ended_does_nothing(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        pair.client.write(stream, b"all", True)
        got = Collected(pair.server)
        await got.once()
        pair.server.stop(stream)
        pair.server.stop(stream + 400)
        with trio.move_on_after(5) as scope:
            await pair.client.receive()
        assert scope.cancelled_caught


async def test_a_waiting_writer_hears_of_a_stream_that_was_stopped(autojump_clock: MockClock) -> None:
    async with on_a_line(server=QuicOptions(limits=Limits(channel_first=8192))) as pair, trio.open_nursery() as nursery:
        stream = pair.client.open()
        pair.client.write(stream, bytes(pair.client.room(stream)), False)
        assert pair.client.room(stream) == 0
        got = Collected(pair.server, consume=False)
        await got.once()
        pair.server.stop(stream)
        nursery.start_soon(pair.client.wait_writable)
        await Collected(pair.client).once()
        nursery.cancel_scope.deadline = trio.current_time() + 1


# --- datagrams


async def test_datagrams_go_both_ways() -> None:
    async with real_pair() as (here, there):
        for link, other in ((here, there), (there, here)):
            largest = bytes(link.datagram_limit)
            for data in (b"one", b"", largest):
                assert link.send_datagram(data)
            got = Collected(other)
            await got.until(lambda got=got: len(got.datagrams) == 3)  # type: ignore[misc]
            assert sorted(got.datagrams) == sorted([b"one", b"", largest])


@pytest.mark.requirement("R-45")
async def test_a_datagram_above_the_limit_is_refused_with_both_sizes(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        limit = pair.client.datagram_limit
        assert 1100 < limit < 1200
        with pytest.raises(ValueError, match=f"{limit + 1} bytes against {limit}"):
            pair.client.send_datagram(bytes(limit + 1))


async def test_a_queue_full_of_datagrams_takes_no_more_and_tells_when_it_does(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        count = 0
        while pair.client.may_send_datagram():
            assert pair.client.send_datagram(bytes([count]))
            count += 1
        assert not pair.client.send_datagram(b"too many")
        assert await pair.client.wait_writable() == []
        assert pair.client.may_send_datagram()
        got = Collected(pair.server)
        await got.until(lambda: len(got.datagrams) == count)


async def test_datagrams_do_not_keep_streams_from_their_turn(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        pair.client.write(stream, b"x" * 1000, True)
        while pair.client.may_send_datagram():
            pair.client.send_datagram(bytes(pair.client.datagram_limit))
        got = Collected(pair.server)
        await got.until(lambda: got.ended)
        assert len(got.datagrams) < 32


@pytest.mark.requirement("R-03", "R-05")
async def test_datagrams_that_nobody_takes_are_dropped_beyond_a_bound(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        for _ in range(3000):
            while not pair.client.may_send_datagram():
                await pair.client.wait_writable()
            pair.client.send_datagram(b"x")
        await pair.client.wait_delivered()
        await trio.sleep(1)
        got = Collected(pair.server)
        await got.once()
        assert len(got.datagrams) == 1024
        assert pair.server.dropped_datagrams == 3000 - 1024


# --- waiting


async def test_delivered_means_that_the_peer_has_it(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        pair.line.fate = lambda data: []
        pair.client.write(pair.client.open(), b"x" * 5000, True)
        with trio.move_on_after(1) as scope:
            await pair.client.wait_delivered()
        assert scope.cancelled_caught
        pair.line.fate = lambda data: [0.01]
        await pair.client.wait_delivered()
        got = Collected(pair.server)
        await got.once()
        assert got.streams == {2: b"x" * 5000}


async def test_one_receiver_and_one_who_waits_for_room_at_a_time(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair, trio.open_nursery() as nursery:
        for call in (pair.client.receive, pair.client.wait_writable):
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await call()
        nursery.cancel_scope.cancel()


async def test_the_round_trip_is_measured(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        assert pair.client.round_trip == pytest.approx(0.02, abs=0.005)


@pytest.mark.requirement("R-31", "R-33")
async def test_a_cancelled_call_loses_nothing(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def receiving() -> AsyncIterator[Callable[[], Awaitable[object]]]:
        async with on_a_line() as pair:
            stream = pair.client.open()
            pair.client.write(stream, b"x" * 1000, False)
            got = Collected(pair.server)
            yield got.once
            pair.client.write(stream, b"y", True)
            await got.until(lambda: got.ended)
            assert got.streams == {stream: b"x" * 1000 + b"y"}

    @asynccontextmanager
    async def waiting() -> AsyncIterator[Callable[[], Awaitable[object]]]:
        async with on_a_line(server=QuicOptions(limits=Limits(channel_first=8192))) as pair:
            stream = pair.client.open()
            pair.client.write(stream, bytes(pair.client.room(stream)), False)
            assert not pair.client.room(stream)
            got = Collected(pair.server)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(got.until, lambda: len(got.streams.get(stream, b"")) == 8192)
                yield pair.client.wait_writable
            while not pair.client.room(stream):
                await pair.client.wait_writable()

    assert await cancel_sweep(receiving) > 1
    assert await cancel_sweep(waiting) > 1


@pytest.mark.requirement("R-48")
@pytest.mark.seeds(6, soak=500)
async def test_streams_survive_loss_and_disorder(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)

    def fate(data: bytes) -> list[float]:
        if dice.random() < 0.05:
            return []
        copies = 2 if dice.random() < 0.03 else 1
        return [dice.uniform(0.005, 0.03) for _ in range(copies)]

    contents = [some_bytes(dice, 60_000) for _ in range(8)]
    async with on_a_line() as pair:
        pair.line.fate = fate
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_write_each, pair.client, contents)
            nursery.start_soon(_write_each, pair.server, contents)
            nursery.start_soon(_expect_each, pair.server, contents, 2)
            nursery.start_soon(_expect_each, pair.client, contents, 3)


async def test_a_handshake_survives_a_bad_line(autojump_clock: MockClock) -> None:
    dice = random.Random(3)
    async with on_a_line(established=False) as pair:
        pair.line.fate = lambda data: [] if dice.random() < 0.3 else [0.01]
        await pair.client.established.wait()
        await write_all(pair.client, pair.client.open(), b"hello")
        got = Collected(pair.server)
        await got.until(lambda: got.ended)
