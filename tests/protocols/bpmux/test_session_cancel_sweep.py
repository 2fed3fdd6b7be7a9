"""Cancel every call at each of its steps: no frame is cut, nothing is lost, and the connection works."""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

import muxkit
from muxkit import Limits, LinkLost
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Duplex, IncomingRequest, Request, Session, Sink, Source
from muxkit.runtime import Backlog, ByteStream, Opening
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import cancel_sweep, weather_pair
from muxkit_adapters import memory
from tests.protocols.bpmux._pairs import TINY, Pair, at_rest, canary, echo_each, next_duplex, next_request, sessions
from tests.protocols.bpmux._sessions import (
    LATER,
    Watched,
    check_agreement,
    close_what_comes,
    reading_later,
    round_trip,
    tasks_alive,
)
from tests.protocols.bpmux._sweep_stories import ALONE, FULL, STORIES, sweeps, sweeps_alone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from tests.protocols.bpmux._sweep_stories import Operation, Steps

CLASSES = (Session, Sink, Source, Duplex, Request, IncomingRequest, Opening, Backlog, ByteStream, muxkit.Server)
FUNCTIONS = {"bpmux.session", "muxkit.connect"}
STEPS = ("leave", "open_channel", "ping_about", "say_goodbye", "wait_to_open", "wait_until_heard")
# These are public for the session and its halves, and not for applications.
FOR_THE_SESSION = {"Sink.wait_turn", *(f"Session.{step}" for step in STEPS)}
GIVES = (
    "AbstractAsyncContextManager",
    "Opening",
    "ChannelOpening",
    "AsyncIterator",
    "Coroutine",
)  # awaited a moment later
ENTERED = {"__aenter__", "__aexit__", "__anext__"}

# --- pings: the pong of a cancelled ping belongs to no other ping


@sweeps("Session.ping", "Sink.ping", "Source.ping", "Duplex.ping", "Request.ping", "IncomingRequest.ping")
async def pings_of_every_kind(pair: Pair) -> Steps:
    async with pair.one.open() as here, pair.one.open_request() as request:
        asked = await next_request(pair.other)
        there = await next_duplex(pair.other)
        all_kinds = (pair.one, here.sink, here.source, here, request, asked)

        async def ping_all() -> None:
            for one in all_kinds:
                await one.ping()

        yield ping_all
        for one in all_kinds:
            assert await one.ping() >= 0
        await at_rest()
        assert len(connection_of(pair.one).pings) == len(connection_of(pair.other).pings) == 0
        await asked.respond(b"")
        await there.aclose()


# --- opening and accepting


@sweeps(
    "Session.open",
    "Session.open_duplex",
    "Session.open_sink",
    "Session.open_source",
    "Session.open_request",
    "Session.subscribe",
    "Opening.__aenter__",
    "Opening.__aexit__",
)
async def openings(pair: Pair) -> Steps:
    async def open_each() -> None:
        for make in (pair.one.open, pair.one.open_duplex, pair.one.open_sink, pair.one.open_source):
            async with make():
                pass
        async with pair.one.open_request():
            pass
        with suppress(muxkit.ChannelCancelled):  # the other side has no such topic
            async with pair.one.subscribe("news", codec=muxkit.Json(int)):
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_what_comes, pair.other)
        yield open_each
        await at_rest()
        for session in (pair.one, pair.other):
            assert connection_of(session).engine.channels == 1  # the spare channel
        nursery.cancel_scope.cancel()


@sweeps("Opening.__aenter__", limits=attrs.evolve(TINY, channels=2))
async def an_opening_that_waits_for_room(pair: Pair) -> Steps:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(close_what_comes, pair.other)

        async def open_one() -> None:
            async with pair.one.open_sink():
                pass

        async with pair.one.open_source(credit=5) as last_place:
            nursery.start_soon(_close_later, last_place)
            yield open_one
        await open_one()
        nursery.cancel_scope.cancel()


@sweeps("Opening.__aenter__", limits=TINY)
async def an_opening_that_waits_for_credit(pair: Pair) -> Steps:
    opened = False

    async def open_one() -> None:
        nonlocal opened
        async with pair.one.open_sink(b"payload"):
            opened = True

    async def read_later() -> None:
        await trio.sleep(LATER)
        assert await pair.other.receive() == FULL

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_later)
        await pair.one.send(FULL)
        yield open_one
    async with pair.one.open_sink(b"last"):
        for payload in [*([b"payload"] if opened else []), b"last"]:
            source, opening = await anext(pair.other.sources())
            assert opening == payload
            await source.aclose()


@sweeps("Opening.__aenter__", limits=TINY)
async def an_opening_behind_top_level_messages(pair: Pair) -> Steps:
    """Its payload waits in line with messages of other tasks, and the peer reads all of them."""
    got: list[bytes] = []

    async def read() -> None:
        while len(got) < 4:
            got.append(await pair.other.receive())

    async def open_one() -> None:
        async with pair.one.open_sink(bytes(300)):
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(pair.one.send, bytes(400))
        nursery.start_soon(close_what_comes, pair.other)
        nursery.start_soon(read)
        yield open_one
        await open_one()
        await at_rest()
        assert got == [bytes(400)] * 4
        nursery.cancel_scope.cancel()


@sweeps("Backlog.__anext__", "Session.incoming", "Session.sources", "Session.sinks", "Session.requests")
async def taking_what_the_peer_opens(pair: Pair) -> Steps:
    session = pair.other
    lines = (session.incoming(), session.sources(), session.sinks(), session.requests())
    makers = (pair.one.open, pair.one.open_sink, pair.one.open_source, pair.one.open_request)
    taken = [0, 0, 0, 0]

    async def take() -> None:
        for number, line in enumerate(lines):
            await anext(line)
            taken[number] += 1

    async def open_later() -> None:
        await trio.sleep(LATER)
        for make in makers:
            for _ in range(2):
                await stack.enter_async_context(make())

    async with AsyncExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_later)
            yield take
        for number, line in enumerate(lines):
            for _ in range(2 - taken[number]):
                await anext(line)


# --- stories that make their own sessions


@sweeps_alone("Sink.send")
async def a_send_that_others_wait_behind() -> Steps:
    here, there = weather_pair(1, buffer=1000)
    async with sessions((here, there), limits=Limits(outbox=2000)) as pair, pair.one.open_sink() as sink:
        async with reading_later(pair.other) as got, trio.open_nursery() as nursery:
            await at_rest()
            here.clog()
            with trio.move_on_after(LATER / 4):
                while True:
                    await sink.send(bytes(500))
            large = Watched(partial(sink.send, bytes(800)))
            small = Watched(partial(sink.send, b"small"))

            async def get_in_line() -> None:
                await trio.lowlevel.checkpoint()
                await small()

            async def clear() -> None:
                await trio.sleep(LATER)
                here.unclog()

            nursery.start_soon(get_in_line)
            nursery.start_soon(clear)
            yield large
            await at_rest()
            assert small.done  # at once: there was room for it, and no task in line before it
            await trio.sleep(2 * LATER)
            await sink.finish()
        assert got[-1] == b"small"
        assert (bytes(800) in got) == large.done


@sweeps_alone("Session.shutdown")
async def a_shutdown() -> Steps:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        shutdown = Watched(partial(pair.other.shutdown, grace=LATER))
        yield shutdown
        if not shutdown.done:
            await round_trip(here, there)
            await pair.other.shutdown(grace=LATER)
        with pytest.raises(trio.ClosedResourceError):
            await there.receive()
        with pytest.raises(StopAsyncIteration):
            await anext(pair.other.incoming())


@sweeps_alone("bpmux.session")
async def a_whole_session() -> Steps:
    before = tasks_alive()
    ours, theirs = memory.pair()
    neighbours = memory.pair()

    async def use() -> None:
        async with bpmux.session(ours) as session, session.open() as channel:
            await channel.send(b"x")
            await channel.receive()

    async def serve() -> None:
        with suppress(LinkLost):
            async with bpmux.session(theirs) as session:
                await echo_each(session)

    async with sessions(neighbours) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield use
        with pytest.raises(trio.ClosedResourceError):
            await ours.receive_some()
        await canary(pair)
    assert tasks_alive() == before


@sweeps_alone("muxkit.connect", "Server.shutdown")
async def a_connection_by_url() -> Steps:
    async def use() -> None:
        async with muxkit.connect(served.url) as session, session.open() as channel:
            await channel.send(b"x")
            await channel.receive()

    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(_echo), "bpmux+mem://sweep")
        yield use
        await use()
        await at_rest()
        assert len(served.sessions()) == 0
        await served.shutdown(grace=1)


@sweeps_alone("Server.shutdown")
async def a_server_that_shuts_down() -> Steps:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(_echo), "bpmux+mem://sweep")
        with suppress(LinkLost):
            async with muxkit.connect(served.url) as session, session.open() as channel:
                await channel.send(b"x")
                await channel.receive()
                shutdown = Watched(partial(served.shutdown, grace=LATER))
                yield shutdown
                if not shutdown.done:
                    await channel.send(b"still there")
                    assert await channel.receive() == b"still there"
        await served.shutdown(grace=LATER)


@sweeps_alone("Server.wait_closed")
async def a_task_that_waits_for_the_end_of_a_server() -> Steps:
    async with trio.open_nursery() as nursery:
        served = await nursery.start(muxkit.serve, muxkit.each_channel(_echo), "bpmux+mem://sweep")

        async def end() -> None:
            await trio.sleep(LATER)
            await served.shutdown(grace=1)

        nursery.start_soon(end)
        yield served.wait_closed
        await served.wait_closed()


# --- the sweep


@pytest.mark.requirement("R-31", "R-32", "R-33")
@pytest.mark.parametrize("name", STORIES)
async def test_a_call_may_be_cancelled_at_any_step(name: str, autojump_clock: MockClock) -> None:
    story, _, limits = STORIES[name]

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with sessions(limits=limits) as pair, pair.one.open() as here:
            there = await next_duplex(pair.other)
            async with asynccontextmanager(story)(pair) as operation:
                yield operation
            await at_rest()
            check_agreement(pair)
            await round_trip(here, there)
            if limits is None:
                await canary(pair)

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31", "R-32", "R-35")
@pytest.mark.parametrize("name", ALONE)
async def test_a_session_may_be_cancelled_at_any_step(name: str, autojump_clock: MockClock) -> None:
    await cancel_sweep(asynccontextmanager(ALONE[name][0]))


@pytest.mark.requirement("R-31")
def test_the_sweep_covers_every_public_coroutine() -> None:
    swept = {name for _, names, _ in STORIES.values() for name in names}
    swept |= {name for _, names in ALONE.values() for name in names}
    public = {f"{owner.__name__}.{name}" for owner in CLASSES for name in dir(owner) if _is_awaited(owner, name)}
    assert swept == (public | FUNCTIONS) - FOR_THE_SESSION


def _is_awaited(owner: type, name: str) -> bool:
    member = inspect.getattr_static(owner, name)
    # What Trio adds, such as `async with` around a half, only calls coroutines that are swept.
    if not inspect.isfunction(member) or not member.__module__.startswith("muxkit"):
        return False
    if name.startswith("_") and name not in ENTERED:
        return False
    gives = str(inspect.signature(member).return_annotation)
    return inspect.iscoroutinefunction(member) or (gives.startswith(GIVES) and not name.startswith("_"))


# --- helpers


async def _close_later(source: Source) -> None:
    await trio.sleep(LATER)
    await source.aclose()


async def _echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)
