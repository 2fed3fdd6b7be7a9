"""Every call yields as often as it promises, also when it fails."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits, LocalProtocolError
from muxkit.runtime import YIELD_BYTES, YIELD_CALLS
from tests.protocols.bpmux._pairs import at_rest, cut, next_duplex, next_request, rough_sessions, sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.protocols.bpmux import Duplex
    from tests.protocols.bpmux._pairs import Pair

    Call = Callable[[], Awaitable[object]]

WIDE = Limits(channel_first=4 * YIELD_BYTES)  # a sender waits for no credit

pytestmark = pytest.mark.requirement("R-34")


class Steps(trio.abc.Instrument):
    """Counts the steps of the task that made it."""

    def __init__(self) -> None:
        self._task = trio.lowlevel.current_task()
        self.count = 0

    def __enter__(self) -> Steps:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_: object) -> None:
        trio.lowlevel.remove_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def calls_that_yield(pair: Pair, here: Duplex, there: Duplex) -> AsyncIterator[tuple[str, Call]]:
    """Calls in states in which they succeed without waiting longer than necessary."""
    ours, theirs = here.as_stream(), there.as_stream()
    yield "session.ping", pair.one.ping
    yield "duplex.ping", here.ping
    yield "sink.ping", here.sink.ping
    yield "source.ping", here.source.ping
    yield "wait_for_room", here.sink.wait_for_room
    yield "send_many", partial(here.send_many, [b"1", b"2"])
    yield "send_many of nothing", partial(here.send_many, [])
    await at_rest()
    yield "receive_many", there.receive_many
    yield "wait_send_all_might_not_block", ours.wait_send_all_might_not_block
    yield "send_all", partial(ours.send_all, b"bytes")
    yield "send_all of nothing", partial(ours.send_all, b"")
    await at_rest()
    yield "receive_some", partial(theirs.receive_some, 2)
    yield "receive_some of what is left", partial(theirs.receive_some, 3)
    yield "send_eof", theirs.send_eof
    yield "receive_some at the end", ours.receive_some
    yield "receive_some behind the end", ours.receive_some
    yield "aclose of a stream", ours.aclose
    yield "aclose of a closed stream", ours.aclose
    yield "aclose of a closed duplex", here.aclose
    yield "finish of a finished duplex", here.finish
    yield "wait_over of a finished sink", here.sink.wait_over
    async with pair.one.open_request(b"q") as request:
        asked = await next_request(pair.other)
        yield "request.ping", request.ping
        yield "asked.ping", asked.ping
        await asked.respond(b"a")
        await at_rest()
        yield "cancelled", asked.cancelled
        yield "response", request.response
        yield "aclose of a request", request.aclose
    async with pair.one.open_request(b"q"):
        asked = await next_request(pair.other)
        yield "decline", asked.decline
        yield "decline a second time", asked.decline
    async with pair.one.open() as duplex:
        await next_duplex(pair.other)
        yield "finish", duplex.finish
        yield "aclose of a source", duplex.source.aclose
    yield "shutdown", partial(pair.one.shutdown, grace=0)


async def test_these_calls_yield_every_time() -> None:
    async with rough_sessions() as pair, pair.one.open() as here:
        there = await next_duplex(pair.other)
        await at_rest()
        async for name, call in calls_that_yield(pair, here, there):
            try:
                with trio.testing.assert_checkpoints():
                    await call()
            except AssertionError as error:
                raise AssertionError(f"{name} is no checkpoint") from error


# --- calls that fail: a loop around them must let other tasks run and notice a cancellation


ON_A_DUPLEX: dict[str, Callable[[Duplex], Awaitable[object]]] = {
    "send": lambda duplex: duplex.send(b"x"),
    "send_many": lambda duplex: duplex.send_many([b"x"]),
    "receive": lambda duplex: duplex.receive(),
    "receive_many": lambda duplex: duplex.receive_many(),
    "wait_for_room": lambda duplex: duplex.sink.wait_for_room(),
    "ping of the sink": lambda duplex: duplex.sink.ping(),
    "ping of the source": lambda duplex: duplex.source.ping(),
    "ping": lambda duplex: duplex.ping(),
    "send_all": lambda duplex: duplex.as_stream().send_all(b"x"),
    "receive_some": lambda duplex: duplex.as_stream().receive_some(),
}
ON_A_SESSION: dict[str, Callable[[Pair], Awaitable[object]]] = {
    "send": lambda pair: pair.one.send(b"x"),
    "receive": lambda pair: pair.one.receive(),
    "request": lambda pair: pair.one.request(b"x"),
    "ping": lambda pair: pair.one.ping(),
    "open": lambda pair: pair.one.open().__aenter__(),
    "incoming": lambda pair: anext(pair.one.incoming()),
    "requests": lambda pair: anext(pair.one.requests()),
}
FAILURES = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel, LocalProtocolError)


async def must_fail_and_yield(call: Call) -> None:
    with Steps() as steps, pytest.raises(FAILURES):
        await call()
    assert steps.count > 0


async def must_hear_a_cancellation(call: Call) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with suppress(*FAILURES):
            await call()
    assert scope.cancelled_caught


@pytest.mark.parametrize("check", [must_fail_and_yield, must_hear_a_cancellation])
@pytest.mark.parametrize("name", ON_A_DUPLEX)
async def test_calls_on_a_closed_duplex_yield(name: str, check: Callable[[Call], Awaitable[None]]) -> None:
    async with sessions() as pair, pair.one.open() as here:
        await here.aclose()
        await at_rest()
        if name != "receive_some":  # which makes a closed writing side read an end
            await check(partial(ON_A_DUPLEX[name], here))


@pytest.mark.parametrize("check", [must_fail_and_yield, must_hear_a_cancellation])
@pytest.mark.parametrize("name", ON_A_DUPLEX)
async def test_calls_on_a_duplex_that_was_lost_yield(name: str, check: Callable[[Call], Awaitable[None]]) -> None:
    async with rough_sessions() as pair, pair.one.open() as here:
        cut(pair)
        await check(partial(ON_A_DUPLEX[name], here))


@pytest.mark.parametrize("check", [must_fail_and_yield, must_hear_a_cancellation])
@pytest.mark.parametrize("name", ON_A_SESSION)
async def test_calls_on_a_session_that_was_lost_yield(name: str, check: Callable[[Call], Awaitable[None]]) -> None:
    async with rough_sessions() as pair:
        cut(pair)
        await check(partial(ON_A_SESSION[name], pair))


@pytest.mark.parametrize("check", [must_fail_and_yield, must_hear_a_cancellation])
@pytest.mark.parametrize("name", ["ping", "respond", "the asker's ping"])
async def test_calls_about_a_question_that_was_answered_yield(
    name: str, check: Callable[[Call], Awaitable[None]]
) -> None:
    async with sessions() as pair, pair.one.open_request() as request:
        asked = await next_request(pair.other)
        await asked.respond(b"yes")
        await at_rest()
        calls: dict[str, Call] = {
            "ping": asked.ping,
            "respond": partial(asked.respond, b"again"),
            "the asker's ping": request.ping,
        }
        await check(calls[name])


# --- messages: often enough, and not in every call


async def test_sending_yields_at_every_64th_call() -> None:
    async with sessions() as pair, pair.one.open_sink() as sink:
        await at_rest()
        with Steps() as steps:
            for _ in range(10 * YIELD_CALLS):
                await sink.send(b"x")
        assert steps.count == 10


async def test_sending_yields_at_every_128_kib() -> None:
    async with sessions(limits=WIDE) as pair, pair.one.open_sink() as sink:
        await at_rest()
        with Steps() as steps:
            for _ in range(12):
                await sink.send(bytes(YIELD_BYTES // 4))
        assert steps.count == 3


async def test_receiving_yields_at_every_64th_call() -> None:
    async with sessions() as pair, pair.one.open_sink() as sink:
        source, _ = await anext(pair.other.sources())
        await sink.send_many([b"x"] * 10 * YIELD_CALLS)
        await at_rest()
        with Steps() as steps:
            for _ in range(10 * YIELD_CALLS):
                await source.receive()
        assert steps.count == 10


async def test_receiving_yields_at_every_128_kib() -> None:
    async with sessions(limits=WIDE) as pair, pair.one.open_sink() as sink:
        source, _ = await anext(pair.other.sources())
        await sink.send_many([bytes(YIELD_BYTES // 4)] * 12)
        await at_rest()
        with Steps() as steps:
            for _ in range(12):
                await source.receive()
        assert steps.count == 3


async def test_each_half_counts_for_itself() -> None:
    async with sessions() as pair, pair.one.open_sink() as one, pair.one.open_sink() as other:
        await at_rest()
        with Steps() as steps:
            for _ in range(YIELD_CALLS - 1):
                await one.send(b"x")
                await other.send(b"x")
            assert steps.count == 0
            await one.send(b"x")
            assert steps.count == 1


async def test_another_task_runs_while_two_talk_without_a_pause() -> None:
    async with sessions() as pair, pair.one.open() as here, trio.open_nursery() as nursery:
        there = await next_duplex(pair.other)
        turns = 0

        async def bystander() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        nursery.start_soon(bystander)
        before = turns
        for _ in range(1000):
            await here.send(b"x")
            await there.receive()
        assert turns - before >= 1000 // YIELD_CALLS
        nursery.cancel_scope.cancel()


async def test_having_waited_is_a_yield() -> None:
    async with sessions() as pair, pair.one.open_sink() as sink:
        source, _ = await anext(pair.other.sources())
        await sink.send_many([b"x"] * (YIELD_CALLS - 1))
        await at_rest()
        for _ in range(YIELD_CALLS - 1):
            await source.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.receive)  # the 64th: this one waits
            await at_rest()
            await sink.send_many([b"x"] * (YIELD_CALLS + 1))
        await at_rest()
        with Steps() as steps:
            for _ in range(YIELD_CALLS - 1):
                await source.receive()
            assert steps.count == 0
            await source.receive()
            assert steps.count == 1
