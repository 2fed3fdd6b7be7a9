"""Nothing is left after hundreds of channels and sessions: objects, memory, tasks and descriptors are counted."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit import ChannelStopped, Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Duplex, Engine, Entity, IncomingRequest, Request, Session, Sink, Source
from muxkit.runtime import StreamPump
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory, tcp
from tests.protocols.bpmux._pairs import answer_each, at_rest, cut, echo_each, next_source, rough_sessions, sessions
from tests.protocols.bpmux._sessions import tasks_alive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from tests.protocols.bpmux._pairs import Pair

    Cycle = Callable[[Pair], Awaitable[object]]

pytestmark = pytest.mark.requirement("R-43")

KIB = 1024
MANY_RESETS = Limits(resets_burst=1_000_000)  # some cycles cancel their channels
DESCRIPTORS = Path("/proc/self/fd")
OURS = (Duplex, Engine, Entity, IncomingRequest, Request, Session, Sink, Source, StreamPump)


def held() -> int:
    """Count the live objects of this library."""
    gc.collect()
    return sum(isinstance(one, OURS) for one in gc.get_objects())


def descriptors() -> int:
    return len([*DESCRIPTORS.iterdir()])


# --- channels


async def echo(pair: Pair) -> None:
    async with pair.one.open() as channel:
        await channel.send(b"message")
        assert await channel.receive() == b"message"
        await channel.finish()
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()


async def echo_bytes(pair: Pair) -> None:
    """Close before the peer has ended, as programs close sockets."""
    async with pair.one.open() as channel:
        stream = channel.as_stream()
        await stream.send_all(b"bytes")
        assert await stream.receive_some() == b"bytes"
        await stream.aclose()


async def ask(pair: Pair) -> None:
    assert await pair.one.request(b"?") == b"??"


async def close_at_once(pair: Pair) -> None:
    async with pair.one.open() as channel:
        await channel.send(b"message")


async def abort_at_once(pair: Pair) -> None:
    async with pair.one.open() as channel:
        await channel.send(bytes(1000))
        channel.abort()


async def be_cancelled_in_a_receive(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with pair.one.open() as channel:
            await at_rest()
            scope.cancel()
            await channel.receive()


async def ping(pair: Pair) -> None:
    async with pair.one.open() as channel:
        await channel.ping()


CYCLES = (echo, echo_bytes, ask, close_at_once, abort_at_once, be_cancelled_in_a_receive, ping)


async def many(pair: Pair, cycle: Cycle, count: int) -> None:
    """Run many cycles; after some of them all that is in transit arrives."""
    for number in range(count):
        await cycle(pair)
        if number % 50 == 0:
            await at_rest()
    await at_rest()


@pytest.mark.parametrize("cycle", CYCLES)
async def test_nothing_is_left_of_channels_that_ended(cycle: Cycle) -> None:
    async with sessions(limits=MANY_RESETS) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        nursery.start_soon(answer_each, pair.other)
        await many(pair, cycle, 50)
        tasks, before = tasks_alive(), held()
        await many(pair, cycle, 300)
        assert tasks_alive() == tasks
        assert held() == before
        for session in (pair.one, pair.other):
            assert session.stats().channels == 0
            assert [*connection_of(session).live_halves()] == [
                connection_of(session).top,
                connection_of(session).messages,
            ]
            assert not connection_of(session).pings
            assert connection_of(session).engine.outbox == 0
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-71")
async def test_byte_streams_may_be_closed_as_fast_as_sockets() -> None:
    """A stream that is closed in order is no reset: it does not count against `Limits.resets_burst`."""
    async with sessions(limits=Limits(resets_burst=10, resets_per_second=1)) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        await many(pair, echo_bytes, 50)
        nursery.cancel_scope.cancel()


async def growth(cycle: Cycle, warm: int, count: int) -> int:
    """Return the bytes that so many cycles leave allocated, after some cycles to warm up."""
    async with sessions(limits=MANY_RESETS) as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        nursery.start_soon(answer_each, pair.other)
        await many(pair, cycle, warm)
        tracemalloc.start()
        try:
            await many(pair, cycle, 50)  # memory of the tracing itself
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            await many(pair, cycle, count)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        nursery.cancel_scope.cancel()
    return after - before


@pytest.mark.parametrize("cycle", CYCLES)
async def test_memory_does_not_grow_with_the_channels_that_were(cycle: Cycle) -> None:
    # Up to 16 channels end in one pass, so buffers and tables differ by some KiB from one moment to another. A leak of
    # one object per channel, which has at least 32 bytes, would exceed the bound.
    assert await growth(cycle, warm=100, count=1200) <= 32 * KIB


@pytest.mark.soak
@pytest.mark.parametrize("cycle", CYCLES)
async def test_memory_does_not_grow_with_ten_thousand_channels_that_were(cycle: Cycle) -> None:
    assert await growth(cycle, warm=5000, count=5000) <= 64 * KIB


async def test_a_refused_channel_leaves_nothing_behind() -> None:
    limits = Limits(backlog=1, resets_burst=10_000)
    async with sessions(limits=limits) as pair, pair.one.open_sink():
        await at_rest()  # the only place in the backlog is taken
        for _ in range(100):
            with pytest.raises(ChannelStopped):
                await pair.one.request(b"x")
        await at_rest()
        assert pair.one.stats().channels == pair.other.stats().channels == 1
        await next_source(pair.other)


# --- sessions


async def talk_and_leave() -> None:
    async with sessions() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(echo_each, pair.other)
        await echo(pair)
        nursery.cancel_scope.cancel()


async def leave_by_an_error() -> None:
    with suppress(ValueError, LinkLost):
        async with sessions() as pair, pair.one.open() as channel:
            await channel.send(b"unread")
            raise ValueError


async def be_cancelled() -> None:
    with trio.CancelScope() as scope:
        async with sessions() as pair, pair.one.open() as channel:
            await channel.send(b"unread")
            scope.cancel()
            await trio.lowlevel.checkpoint()


async def lose_the_link() -> None:
    async with rough_sessions() as pair, pair.one.open() as channel, pair.one.open_request():
        await channel.send(b"unread")
        cut(pair)


async def linger_in_vain() -> None:
    """The peer does not leave in order."""
    here, _there = memory.pair()
    async with bpmux.session(here, linger=1):
        pass


@pytest.mark.parametrize("use", [talk_and_leave, leave_by_an_error, be_cancelled, lose_the_link, linger_in_vain])
async def test_nothing_is_left_of_a_hundred_sessions_however_they_ended(
    use: Callable[[], Awaitable[None]], autojump_clock: MockClock
) -> None:
    async def use_some(count: int) -> None:
        for _ in range(count):
            with suppress(LinkLost):
                await use()

    await use_some(1)
    tasks, before = tasks_alive(), held()
    await use_some(100)
    assert tasks_alive() == tasks
    assert held() == before


async def test_a_session_that_was_left_dies() -> None:
    references: list[weakref.ref[object]] = []

    async def use() -> None:
        async with sessions() as pair, trio.open_nursery() as nursery:
            nursery.start_soon(echo_each, pair.other)
            await echo(pair)
            for session in (pair.one, pair.other):
                kept = (session, connection_of(session).engine, connection_of(session).pump)
                # An engine that was compiled takes no weak references.
                references.extend(weakref.ref(one) for one in kept if type(one).__weakrefoffset__)
            nursery.cancel_scope.cancel()

    await use()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


# --- descriptors


async def use_by_url(url: str) -> None:
    async with muxkit.connect(url) as session, session.open() as channel:
        await channel.send(b"message")
        assert await channel.receive() == b"message"


async def be_cancelled_by_url(url: str) -> None:
    with trio.CancelScope() as scope:
        async with muxkit.connect(url) as session, session.open() as channel:
            await channel.send(b"message")
            scope.cancel()
            await channel.receive()


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("use", [use_by_url, be_cancelled_by_url])
async def test_no_descriptor_is_left_of_a_hundred_connections(use: Callable[[str], Awaitable[None]]) -> None:
    await check_connections(use, 100)


@pytest.mark.soak
@pytest.mark.parametrize("use", [use_by_url, be_cancelled_by_url])
async def test_nor_of_a_thousand_connections(use: Callable[[str], Awaitable[None]]) -> None:
    await check_connections(use, 1000)


async def check_connections(use: Callable[[str], Awaitable[None]], count: int) -> None:
    """Connect so often, twenty at once; no task, no descriptor and no memory of the second half may be left."""
    served = 0
    changed = trio.lowlevel.ParkingLot()

    async def serve(stream: trio.abc.Stream) -> None:
        nonlocal served
        with suppress(LinkLost):
            async with bpmux.session(stream) as session:
                await echo_each(session)
        served += 1
        changed.unpark_all()

    async def use_some(count: int) -> None:
        until = served + count
        async with trio.open_nursery() as clients:
            for _ in range(count):
                clients.start_soon(use, f"bpmux+tcp://{address}")
        while served < until:
            await changed.park()
        await at_rest()

    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(tcp.serve, serve)
        await use_some(1)
        tasks, before = tasks_alive(), descriptors()
        for _ in range(count // 40):
            await use_some(20)
        tracemalloc.start()
        try:
            await use_some(20)  # memory of the tracing itself
            gc.collect()
            held_before, _ = tracemalloc.get_traced_memory()
            for _ in range(count // 40):
                await use_some(20)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - held_before <= 64 * KIB
        finally:
            tracemalloc.stop()
        assert descriptors() == before
        assert tasks_alive() == tasks
        nursery.cancel_scope.cancel()
