"""The error that each waiting task receives when the link breaks, at any point."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import ChannelCancelled, Limits, LinkLost, RemoteProtocolError
from muxkit.protocols import bpmux
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import weather_pair
from muxkit_adapters import memory

from ._pairs import (
    Pair,
    answer_each,
    at_rest,
    canary,
    cut,
    echo_each,
    next_duplex,
    next_request,
    next_source,
    rough_sessions,
    sessions,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    Call = Callable[[], Awaitable[object]]


class Waiters:
    """Tasks that wait, and the error that each received."""

    def __init__(self, nursery: trio.Nursery, pair: Pair) -> None:
        self.nursery = nursery
        self.pair = pair
        self.errors: dict[str, BaseException | None] = {}
        self.woken_at: dict[str, float] = {}

    def wait(self, name: str, call: Call) -> None:
        async def run() -> None:
            self.errors[name] = None
            try:
                await call()
            except Exception as error:
                self.errors[name] = error
            self.woken_at[name] = trio.current_time()

        self.nursery.start_soon(run)


async def all_of(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass


async def push(channel: bpmux.Duplex | bpmux.Sink | bpmux.Session) -> None:
    while True:
        await channel.send(bytes(500))


@asynccontextmanager
async def one_of_each(links: tuple[trio.abc.Stream, trio.abc.Stream] | None = None) -> AsyncIterator[Waiters]:
    """Run a task in every public coroutine that can wait; the block breaks the link of `pair.one`."""
    limits = Limits(channels=7, channel_bytes=1000, channel_floor=100)
    config = bpmux.Config(pongs=False, keepalive=None)
    async with rough_sessions(links, limits=limits, config=config) as pair, AsyncExitStack() as stack:
        one, enter = pair.one, stack.enter_async_context
        duplex, finishing = await enter(one.open()), await enter(one.open())
        full, source = await enter(one.open_sink()), await enter(one.open_source())
        request, stream = await enter(one.open_request(b"x")), (await enter(one.open())).as_stream()
        await enter(pair.other.open_request(b"z"))
        asked = await next_request(one)
        await at_rest()
        await finishing.send(bytes(1000))
        async with trio.open_nursery() as nursery:
            waiters = Waiters(nursery, pair)
            wait = waiters.wait
            wait("receive", duplex.receive)
            wait("receive as a second", duplex.receive)
            wait("receive_many", source.receive_many)
            wait("send", partial(push, duplex))
            wait("send as a second", partial(push, duplex))
            wait("send_many", partial(full.send_many, [bytes(500)] * 10))
            wait("finish", partial(finishing.finish, b"why"))
            wait("response", request.response)
            wait("request", partial(one.request, b"y"))
            await at_rest()  # before the top level's window is used up below
            wait("ping", one.ping)
            wait("ping a duplex", duplex.ping)
            wait("ping a request", request.ping)
            wait("ping a question", asked.ping)
            wait("incoming", partial(all_of, one.incoming()))
            wait("sources", partial(all_of, one.sources()))
            wait("sinks", partial(all_of, one.sinks()))
            wait("requests", partial(all_of, one.requests()))
            wait("receive at the top", one.receive)
            wait("send at the top", partial(push, one))
            wait("receive_some", stream.receive_some)
            wait("send_all", partial(stream.send_all, bytes(100_000)))
            for number in range(3):  # the limit on channels is reached
                wait(f"open {number}", partial(enter, one.open()))
            await at_rest()
            yield waiters
        cut(pair)


@pytest.mark.requirement("R-39")
async def test_a_loss_wakes_every_waiter_at_once_and_says_who_and_when(autojump_clock: MockClock) -> None:
    async with one_of_each() as waiters:
        await trio.sleep(2.5)
        lost_at = trio.current_time()
        connection_of(waiters.pair.one).pump.lose("the cable", by="network")
    errors = waiters.errors
    assert len(errors) == 24
    for name, error in errors.items():
        assert isinstance(error, LinkLost), f"{name}: {error!r}"
        assert (error.reason, error.by, error.peer) == ("the cable", "network", "mem pair")
        assert error.after == pytest.approx(2.5)
    assert set(waiters.woken_at.values()) == {lost_at}
    assert len({id(error) for error in errors.values()}) == len(errors)


@pytest.mark.requirement("R-39")
async def test_a_loss_says_how_much_was_not_sent(autojump_clock: MockClock) -> None:
    here, there = weather_pair(1, buffer=10_000)
    async with rough_sessions((here, there)) as pair, pair.one.open_sink() as sink:
        await at_rest()
        here.clog()
        await sink.send(bytes(100_000))  # the window covers a part of it, of which the link takes 10,000 bytes
        await at_rest()
        here.reset()
        await at_rest()
        with pytest.raises(LinkLost) as caught:
            await sink.send(b"x")
    assert 90_000 <= caught.value.unsent <= 100_100
    assert f"{caught.value.unsent:,} bytes were not sent" in str(caught.value)


@pytest.mark.requirement("R-39")
async def test_after_a_loss_every_call_says_so(autojump_clock: MockClock) -> None:
    async with rough_sessions() as pair, pair.one.open() as duplex, pair.one.open_request() as request:
        one = pair.one
        connection_of(one).pump.lose("the cable", by="network")
        calls: list[Call] = [
            partial(duplex.send, b"x"),
            partial(duplex.send_many, [b"x"]),
            duplex.receive,
            duplex.receive_many,
            duplex.finish,
            duplex.ping,
            request.response,
            request.ping,
            one.ping,
            partial(one.send, b"x"),
            one.receive,
            partial(one.request, b"x"),
            one.open().__aenter__,
            one.open_sink(b"x").__aenter__,
            partial(anext, one.incoming()),
        ]
        for call in calls:
            with pytest.raises(LinkLost, match="the cable"):
                await call()
        await one.shutdown(grace=1)
        duplex.source.give_credit(5)
        duplex.abort()
        request.abort()
        for close in (duplex.aclose, request.aclose):
            await close()


@pytest.mark.requirement("R-39")
async def test_waiters_in_other_tasks_wake_when_the_session_is_left() -> None:
    errors: dict[str, BaseException | None] = {}

    async def wait(name: str, call: Call) -> None:
        errors[name] = None
        try:
            await call()
        except Exception as error:
            errors[name] = error

    async with trio.open_nursery() as nursery, sessions() as pair, AsyncExitStack() as stack:
        one = pair.other  # it is left first
        duplex = await stack.enter_async_context(one.open())
        nursery.start_soon(wait, "receive", duplex.receive)
        nursery.start_soon(wait, "response", partial(one.request, b"x"))
        nursery.start_soon(wait, "incoming", partial(all_of, one.incoming()))
        nursery.start_soon(wait, "receive at the top", one.receive)
        await at_rest()
        stack.pop_all()  # only the session closes the duplex
    assert isinstance(errors["receive"], trio.ClosedResourceError)
    assert isinstance(errors["response"], trio.ClosedResourceError)
    assert isinstance(errors["receive at the top"], trio.ClosedResourceError | trio.EndOfChannel)
    assert errors["incoming"] is None


class Failing(trio.abc.HalfCloseableStream):
    """A stream whose `k`-th call fails, and each call after it."""

    def __init__(self, inner: trio.abc.HalfCloseableStream, k: int) -> None:
        self.inner = inner
        self.left = k
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        self.left -= 1
        if self.left <= 0:
            raise trio.BrokenResourceError("the k-th call")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._count()
        await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None: ...

    async def send_eof(self) -> None:
        self._count()
        await self.inner.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        self._count()
        return await self.inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.mark.requirement("R-40")
async def test_an_error_of_the_transport_at_any_call_ends_in_the_same_place(autojump_clock: MockClock) -> None:
    async def use(link: trio.abc.Stream) -> None:
        async with bpmux.session(link, linger=1) as session, session.open() as channel:
            for number in range(5):
                await channel.send(b"%d" % number)
                assert await channel.receive() == b"%d" % number
            await channel.finish()
            assert await session.request(b"x") == b"xx"

    async def serve(link: trio.abc.Stream) -> None:
        with suppress(LinkLost):
            async with bpmux.session(link, linger=1) as session, trio.open_nursery() as nursery:
                nursery.start_soon(answer_each, session)
                await echo_each(session)

    outcomes: list[LinkLost] = []
    for k in range(1, 200):
        here, there = memory.pair()
        link = Failing(here, k)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, there)
            try:
                await use(link)
            except LinkLost as error:
                outcomes.append(error)
        for stream in (here, there):
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(b"x")
        if link.calls < k:
            break
    assert len(outcomes) >= 15
    assert {type(error.__cause__) for error in outcomes} == {trio.BrokenResourceError}
    assert {error.by for error in outcomes} == {"network"}


SMALL = Limits(channel_bytes=100, channel_floor=100)


async def _transcript() -> tuple[int, list[bytes]]:
    """Return the number of bytes of a whole session, and the messages that it carries."""
    messages = [b"short", b"", bytes(range(80)), b"p" * 250, b"last"]
    here, there = weather_pair(1)
    async with sessions((here, there), limits=SMALL) as pair, pair.one.open_sink(b"opening") as sink:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.send_many, messages)
            source, _ = await anext(pair.other.sources())
            for message in messages:
                assert await source.receive() == message
        await sink.finish()
    return here.bytes_sent, messages


@pytest.mark.requirement("R-47")
@pytest.mark.parametrize("how", ["reset", "cut"])
async def test_a_loss_at_any_byte_delivers_no_short_message(how: str, autojump_clock: MockClock) -> None:
    total, messages = await _transcript()
    ends: dict[str, int] = {}
    for byte in range(total):
        fault = {"reset_at_byte": byte} if how == "reset" else {"cut_at_byte": byte}
        here, there = weather_pair(byte, splits=False, **fault)
        got: list[bytes] = []

        async def send(link: trio.abc.Stream = here) -> None:
            with suppress(LinkLost):
                async with (
                    bpmux.session(link, limits=SMALL, linger=1) as session,
                    session.open_sink(b"opening") as sink,
                ):
                    await sink.send_many(messages)
                    await sink.finish()

        async def receive(link: trio.abc.Stream = there, got: list[bytes] = got) -> str:
            try:
                async with bpmux.session(link, limits=SMALL, linger=1) as session:
                    source, opening = await anext(session.sources())
                    assert opening == b"opening"
                    while True:
                        got.append(await source.receive())
            except (trio.EndOfChannel, LinkLost, StopAsyncIteration) as error:
                return type(error).__name__

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            end = await receive()
        ends[end] = ends.get(end, 0) + 1
        assert got == messages[: len(got)]
        assert end != "EndOfChannel" or got == messages
    assert ends["LinkLost"] > total * 0.9
    assert ends.get("EndOfChannel", 0) < 40  # the ends behind the last message


@pytest.mark.requirement("R-40")
async def test_a_peer_that_breaks_the_rules_is_the_cause() -> None:
    here, there = memory.pair()

    async def use() -> None:
        async with bpmux.session(here) as session:
            await there.send_all(b"\xff" + bytes(100))
            await session.receive()

    with pytest.raises(LinkLost) as caught:
        await use()
    assert caught.value.by == "peer"
    assert isinstance(caught.value.__cause__, RemoteProtocolError)


@pytest.mark.requirement("R-41")
async def test_what_came_before_the_loss_can_still_be_read(autojump_clock: MockClock) -> None:
    async with rough_sessions() as pair, pair.one.open_sink() as sink:
        await sink.send_many([b"1", b"2"])
        source = await next_source(pair.other)
        await at_rest()
        cut(pair)
        assert await source.receive() == b"1"
        assert await source.receive_many() == [b"2"]
        with pytest.raises(LinkLost):
            await source.receive()


async def test_the_abort_of_a_channel_touches_no_other() -> None:
    async with sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await at_rest()
        here.abort()
        with pytest.raises(ChannelCancelled):
            await there.receive()
        await canary(pair)
