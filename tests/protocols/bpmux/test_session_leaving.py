"""Sessions end in order and in time, and nothing that was accepted is lost."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import ChannelStopped, Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import replay, weather_pair
from muxkit_adapters import memory
from tests.protocols.bpmux._helpers import sender_of

from ._pairs import (
    SilentStream,
    answer_each,
    at_rest,
    cut,
    next_duplex,
    next_request,
    next_source,
    rough_sessions,
    sessions,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

SLACK = 0.5  # s beyond the linger


# --- leaving


async def test_leaving_delivers_everything_and_hangs_up(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, latency=0.1, bandwidth=100_000)
    got: list[bytes] = []

    async def serve() -> None:
        async with bpmux.session(there) as session:
            source = await next_source(session)
            got.extend([message async for message in source])
            got.append(await session.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with bpmux.session(here) as session:
            async with session.open_sink() as sink:
                await sink.send_many([bytes(30_000)] * 3)
            await session.send(b"goodbye")
    assert got == [bytes(30_000)] * 3 + [b"goodbye"]


async def test_both_may_leave_at_once(autojump_clock: MockClock) -> None:
    async def use(link: trio.abc.Stream) -> None:
        async with bpmux.session(link) as session, session.open() as channel:
            with suppress(ChannelStopped):  # the other may have left before the first credit arrived
                await channel.send(b"x")

    start = trio.current_time()
    for links in (memory.pair(), weather_pair(1, latency=0.2)):
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(use, link)
    assert trio.current_time() - start < 2


async def test_leaving_after_the_peer_hung_up_in_order_is_no_error(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with bpmux.session(here) as session:
        async with bpmux.session(there):
            pass
        await at_rest()
        assert connection_of(session).pump.is_lost
        assert [item async for item in session.incoming()] == []
        with pytest.raises(trio.EndOfChannel):
            await session.receive()
        with pytest.raises((LinkLost, ChannelStopped)):
            async with session.open():
                pass


async def test_leaving_with_openings_that_were_heard_is_no_error_when_the_link_breaks_later() -> None:
    async with rough_sessions() as pair:
        async with pair.one.open_sink(b"with a payload") as sink:
            await sink.finish()
        cut(pair)
        unheard = None
        try:
            await connection_of(pair.one).leave(1)
        except LinkLost as error:
            unheard = error
        assert unheard is None


@pytest.mark.requirement("R-39")
async def test_leaving_with_something_unheard_says_so(autojump_clock: MockClock) -> None:
    async def use() -> None:
        async with bpmux.session(SilentStream(), linger=3) as session:
            async with session.open_sink() as sink:
                await sink.aclose()

    with pytest.raises(LinkLost, match=r"didn't close the session within 3.* s") as caught:
        await use()
    assert caught.value.by == "peer"


async def test_a_channel_that_was_given_up_does_not_hold_up_the_leave(autojump_clock: MockClock) -> None:
    async with sessions() as pair:
        async with pair.one.open_sink() as sink:
            await next_source(pair.other)
            await at_rest()
            await sink.send(bytes(sender_of(sink).credit_out))  # no credit is left for an end payload
            sink.abort()
        start = trio.current_time()
    assert trio.current_time() - start < 1


async def flood(link: trio.abc.Stream) -> None:
    chunk = bytes((0b01010000, 5, 0)) * 10_000
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            await link.send_all(chunk)


async def stall(link: trio.abc.Stream) -> None: ...


async def reset(link: trio.abc.Stream) -> None:
    await trio.sleep(0.5)
    await trio.aclose_forcefully(link)


async def only_read(link: trio.abc.Stream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await link.receive_some():
            pass


async def end_of_file(link: trio.abc.HalfCloseableStream) -> None:
    await link.send_eof()


async def ping_without_end(link: trio.abc.Stream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            await link.send_all(b"\x64\x00" * 1000)
            await trio.sleep(0.01)


@pytest.mark.requirement("R-35", "R-38")
@pytest.mark.parametrize("behave", [flood, stall, reset, only_read, end_of_file, ping_without_end])
@pytest.mark.parametrize("leave_by", ["the end", "an error", "a cancellation"])
async def test_leaving_takes_no_longer_than_the_linger_whatever_the_peer_does(
    behave: Callable[[trio.abc.Stream], Awaitable[None]], leave_by: str, autojump_clock: MockClock
) -> None:
    here, there = weather_pair(1, latency=0.01, bandwidth=100_000)  # a flood takes virtual time

    async def use() -> None:
        async with bpmux.session(here, linger=2) as session, session.open() as channel:
            with trio.move_on_after(1):
                await channel.send(b"x" * 100_000)
            if leave_by == "an error":
                raise ValueError("mine")
            if leave_by == "a cancellation":
                nursery.cancel_scope.cancel()
                await trio.sleep_forever()

    async with trio.open_nursery() as peer:
        peer.start_soon(behave, there)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            with suppress(LinkLost, ValueError):
                await use()
        took = trio.current_time() - start
        peer.cancel_scope.cancel()
    # The linger for an end in order; a second at most to tell the peer of an error.
    assert took <= 1 + {"the end": 2, "an error": 1, "a cancellation": 0}[leave_by] + SLACK
    with pytest.raises(trio.ClosedResourceError):
        await here.send_all(b"x")


@pytest.mark.requirement("R-35")
async def test_a_cancellation_from_outside_cuts_the_linger(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    with trio.move_on_after(1):
        async with bpmux.session(SilentStream(), linger=1000) as session, session.open_sink() as sink:
            await sink.aclose()
    assert trio.current_time() - start == pytest.approx(1)


async def test_nothing_is_written_after_the_goodbye_even_if_the_peer_opens_channels() -> None:
    here, there = memory.pair()
    async with trio.open_nursery() as nursery:

        async def talk_on() -> None:
            # A peer that confirms every end, and opens channels in the same bytes.
            await there.receive_some()
            await there.send_all(bytes.fromhex("620000a20000a1006100") + bytes((0b01010000, 5, 0)) * 10)
            with suppress(trio.BrokenResourceError):
                while await there.receive_some():
                    await there.send_all(bytes((0b01010000, 6, 0)))
            await there.aclose()

        nursery.start_soon(talk_on)
        with suppress(LinkLost):
            async with bpmux.session(here, linger=1):
                await at_rest()


# --- shutdown


async def test_shutdown_lets_live_channels_end_and_takes_no_new_ones(autojump_clock: MockClock) -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(pair.other.shutdown, grace=60))
            await at_rest()
            with pytest.raises(ChannelStopped):
                async with pair.one.open():
                    pass
            with pytest.raises(ChannelStopped):
                await pair.one.request(b"late")
            assert [item async for item in pair.other.incoming()] == []
            await here.send(b"still alive")
            assert await there.receive() == b"still alive"
            await here.aclose()
            await there.aclose()
        assert await pair.one.ping() >= 0
        assert await pair.other.ping() >= 0


async def test_shutdown_cuts_what_is_alive_after_the_grace(autojump_clock: MockClock) -> None:
    async with rough_sessions() as pair, pair.one.open() as here:
        await next_duplex(pair.other)
        async with pair.other.open_request(b"x") as request:
            await next_request(pair.one)
            start = trio.current_time()
            await pair.other.shutdown(grace=7)
            assert trio.current_time() - start == pytest.approx(7)
            with pytest.raises(trio.BrokenResourceError):
                await here.receive()
            with pytest.raises(trio.ClosedResourceError):
                await request.response()


async def test_what_had_come_before_the_shutdown_is_still_handled(autojump_clock: MockClock) -> None:
    async with sessions() as pair, trio.open_nursery() as nursery:
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await pair.one.request(b"x"))

        for _ in range(5):
            nursery.start_soon(ask)
        await at_rest()
        nursery.start_soon(partial(pair.other.shutdown, grace=10))
        await at_rest()
        nursery.start_soon(answer_each, pair.other)
        await trio.sleep(1)
        assert answers == [b"xx"] * 5


async def test_shutdown_refuses_thousands_of_openings_that_were_under_way(autojump_clock: MockClock) -> None:
    """Openings that crossed the end of the top level do not count as refused."""
    limits = Limits(resets_burst=10, resets_per_second=1)
    here, there = weather_pair(1, latency=0.5)
    async with sessions((here, there), limits=limits) as pair:
        refused = 0

        async def ask() -> None:
            nonlocal refused
            with pytest.raises(ChannelStopped):
                await pair.one.request(b"")  # with a payload it would wait for the peer's first grant
            refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(2000):
                nursery.start_soon(ask)
            await at_rest()
            nursery.start_soon(partial(pair.other.shutdown, grace=10))
        assert refused == 2000


async def test_a_second_shutdown_may_be_more_urgent(autojump_clock: MockClock) -> None:
    async with rough_sessions() as pair, pair.one.open(), trio.open_nursery() as nursery:
        await next_duplex(pair.other)
        start = trio.current_time()
        nursery.start_soon(partial(pair.other.shutdown, grace=100))
        await at_rest()
        await pair.other.shutdown(grace=1)
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start < 5


@pytest.mark.requirement("R-42")
@pytest.mark.seeds(20, soak=1000)
async def test_no_request_is_accepted_and_lost_in_a_shutdown_under_load(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    accepted: set[bytes] = set()
    answered: set[bytes] = set()
    refused: set[bytes] = set()
    here, there = weather_pair(seed, latency=dice.choice((0.0, 0.01, 0.2)), jitter=0.01)

    async def serve() -> None:
        async def answer(request: muxkit.IncomingRequest) -> None:
            accepted.add(request.payload)
            await trio.sleep(dice.random() * 0.1)
            async with request:
                await request.respond(request.payload)

        async with bpmux.session(there) as session, trio.open_nursery() as nursery:
            nursery.start_soon(shut_down, session)
            async for request in session.requests():
                nursery.start_soon(answer, request)

    async def shut_down(session: bpmux.Session) -> None:
        await trio.sleep(dice.random() * 0.3)
        await session.shutdown(grace=10)

    async def ask(session: bpmux.Session, number: int) -> None:
        await trio.sleep(dice.random() * 0.5)
        payload = b"%d" % number
        try:
            assert await session.request(payload) == payload
            answered.add(payload)
        except (ChannelStopped, LinkLost):
            refused.add(payload)

    with replay(seed):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with bpmux.session(here) as session, trio.open_nursery() as askers:
                for number in range(60):
                    askers.start_soon(ask, session, number)
        assert accepted == answered
        assert answered | refused == {b"%d" % number for number in range(60)}


async def test_a_session_that_takes_leave_opens_nothing_more() -> None:
    async with sessions() as pair:
        outer = pair.one
        opened = await outer.open_sink().__aenter__()
        await opened.finish()
    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
        async with outer.open_sink():
            pass
    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
        await outer.send(b"x")


async def test_what_is_in_the_backlog_when_the_grace_is_over_is_closed() -> None:
    async with sessions() as pair, pair.one.open() as here, pair.one.open_sink() as sink:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_stop, sink)
            await at_rest()
            await pair.other.shutdown(grace=0)
        with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
            await here.receive()


async def _send_on(sink: bpmux.Sink) -> None:
    while True:
        await sink.send(bytes(1000))


async def _expect_stop(sink: bpmux.Sink) -> None:
    with pytest.raises(ChannelStopped):
        await _send_on(sink)
