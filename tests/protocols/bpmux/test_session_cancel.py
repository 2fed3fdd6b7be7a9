"""A session works like a new one after a cancellation at any moment."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import LinkLost
from muxkit.protocols import bpmux
from muxkit.testing import cancel_sweep
from muxkit_adapters import memory

from ._pairs import (
    TINY,
    Pair,
    answer_each,
    echo_each,
    next_duplex,
    next_request,
    next_sink,
    next_source,
    sessions,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    Operation = Callable[[], Awaitable[object]]
    Arrange = Callable[[Pair, AsyncExitStack], Awaitable[Operation]]

LARGE = bytes(5000)  # above the window, so the peer must read


async def read_on(channel: bpmux.Duplex | bpmux.Session) -> None:
    """Read all messages until the test ends."""
    with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            await channel.receive()


class Arrangements:
    """Prepares the operation that is cancelled; the peer's part runs in the scenario's nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery

    async def _duplexes(self, pair: Pair, stack: AsyncExitStack) -> tuple[bpmux.Duplex, bpmux.Duplex]:
        here = await stack.enter_async_context(pair.one.open())
        return here, await next_duplex(pair.other)

    # --- duplexes, and through them sinks and sources

    async def send(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(read_on, there)
        return partial(here.send, LARGE)

    async def send_many(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(read_on, there)
        return partial(here.send_many, [bytes(400)] * 8)

    async def finish(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(read_on, there)
        return here.finish

    async def finish_with_a_payload(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(read_on, there)
        return partial(here.finish, b"why")

    async def aclose(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return (await self._duplexes(pair, stack))[0].aclose

    async def receive(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(there.send, LARGE)
        return here.receive

    async def receive_many(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(there.send_many, [b"x"] * 5)
        return here.receive_many

    async def ping_a_duplex(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return (await self._duplexes(pair, stack))[0].ping

    async def ping_a_source(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return (await self._duplexes(pair, stack))[0].source.ping

    async def wait_for_room(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, _there = await self._duplexes(pair, stack)
        return partial(here.sink.wait_for_room, 100)

    async def close_a_source(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return (await self._duplexes(pair, stack))[0].source.aclose

    async def stream_send_all(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(read_on, there)
        return partial(here.as_stream().send_all, LARGE)

    async def stream_receive_some(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        here, there = await self._duplexes(pair, stack)
        self.nursery.start_soon(there.send, b"x")
        return here.as_stream().receive_some

    # --- sessions

    async def open_a_duplex(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return partial(_use, partial(pair.one.open_duplex, bytes(300)))

    async def open_a_sink(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return partial(_use, partial(pair.one.open_sink, bytes(300)))

    async def open_a_source(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return partial(_use, partial(pair.one.open_source, bytes(300)))

    async def open_behind_others(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        for _ in range(4):
            self.nursery.start_soon(pair.one.send, bytes(400))
        self.nursery.start_soon(read_on, pair.other)
        return partial(_use, partial(pair.one.open_sink, bytes(300)))

    async def request(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        self.nursery.start_soon(answer_each, pair.other)
        return partial(pair.one.request, LARGE)

    async def response(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        self.nursery.start_soon(answer_each, pair.other)
        return (await stack.enter_async_context(pair.one.open_request(b"x"))).response

    async def close_a_request(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return (await stack.enter_async_context(pair.one.open_request(b"x"))).aclose

    async def respond(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.one.open_request(b"x"))
        return partial((await next_request(pair.other)).respond, LARGE)

    async def decline(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.one.open_request(b"x"))
        return partial((await next_request(pair.other)).decline, b"no")

    async def wait_for_the_cancellation_of_a_request(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        request = await stack.enter_async_context(pair.one.open_request(b"x"))
        asked = await next_request(pair.other)
        self.nursery.start_soon(request.aclose)
        return asked.cancelled

    async def ping(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        return pair.one.ping

    async def send_a_top_level_message(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        self.nursery.start_soon(read_on, pair.other)
        return partial(pair.one.send, LARGE)

    async def receive_a_top_level_message(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        self.nursery.start_soon(pair.other.send, LARGE)
        return pair.one.receive

    async def take_a_duplex(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.other.open())
        return partial(next_duplex, pair.one)

    async def take_a_sink(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.other.open_source(b"x"))
        return partial(next_sink, pair.one)

    async def take_a_source(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.other.open_sink(b"x"))
        return partial(next_source, pair.one)

    async def take_a_request(self, pair: Pair, stack: AsyncExitStack) -> Operation:
        await stack.enter_async_context(pair.other.open_request(b"x"))
        return partial(next_request, pair.one)


async def _use(open: Callable[[], AbstractAsyncContextManager[object]]) -> None:
    async with open():
        await trio.lowlevel.checkpoint()


OPERATIONS = [name for name in vars(Arrangements) if not name.startswith("_")]


@pytest.mark.requirement("R-31")
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_cancellation_at_any_step_leaves_the_session_sound(name: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with sessions(limits=TINY) as pair, trio.open_nursery() as nursery, AsyncExitStack() as stack:
            arrange: Arrange = getattr(Arrangements(nursery), name)
            yield await arrange(pair, stack)
            with trio.fail_after(5):
                await _drained(pair, nursery)
            nursery.cancel_scope.cancel()

    assert await cancel_sweep(scenario) >= 1


async def _drained(pair: Pair, nursery: trio.Nursery) -> None:
    """Accept channels that the operation has opened before the canary's."""
    for session in (pair.one, pair.other):
        nursery.start_soon(echo_each, session)
    for session in (pair.one, pair.other):
        async with session.open() as channel:
            await channel.send(b"canary")
            assert await channel.receive() == b"canary"


@pytest.mark.requirement("R-32", "R-33")
@pytest.mark.parametrize("size", [0, 300, 5000])
async def test_a_send_cancelled_at_any_step_was_not_sent_and_the_others_were(size: int) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with sessions(limits=TINY) as pair, pair.one.open() as here, trio.open_nursery() as nursery:
            there = await next_duplex(pair.other)
            returned = False
            got: list[bytes] = []

            async def send() -> None:
                nonlocal returned
                await here.send(b"2" + bytes(size))
                returned = True

            async def receive() -> None:
                got.extend([message[:1] async for message in there])

            await here.send(b"1" + bytes(900))
            nursery.start_soon(receive)
            yield send
            await here.send(b"3")
            await here.finish()
            await there.finish()
        assert got == ([b"1", b"2", b"3"] if returned else [b"1", b"3"])

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31", "R-35")
async def test_leaving_a_session_can_be_cancelled_at_any_step_and_closes_the_link() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        here, there = memory.pair()

        async def use() -> None:
            async with bpmux.session(here) as session, session.open() as channel:
                await channel.send(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve_politely, there)
            yield use
        assert here._closed
        assert there._closed

    assert await cancel_sweep(scenario) >= 5


async def _serve_politely(link: trio.abc.Stream) -> None:
    with suppress(LinkLost):
        async with bpmux.session(link, linger=1) as session:
            await echo_each(session)
