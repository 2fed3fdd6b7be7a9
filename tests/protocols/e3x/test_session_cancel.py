"""Cancellations at any point have the documented meaning."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits, LinkLost
from muxkit.protocols import e3x
from muxkit.runtime import background
from muxkit.testing import cancel_sweep
from tests.protocols.e3x._sessions import CALM, channels, next_channel, on_packets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    from muxkit import Session

    Operation = Callable[[], Awaitable[object]]

NARROW = e3x.Config(window=10, first_window=10, congestion=False)
SHORT = Limits(channel_first=1000)
FILLING = bytes(100)


@asynccontextmanager
async def full() -> AsyncIterator[tuple[e3x.Channel, e3x.Channel]]:
    """Make a channel on which a sender waits until the peer reads."""
    async with on_packets(config=NARROW, limits=SHORT) as pair, channels(pair) as (here, there):
        await trio.sleep(1)
        while here.sending.sender.has_room(len(FILLING)):
            await here.send(FILLING)
            await trio.sleep(0.1)
        yield here, there


@pytest.mark.requirement("R-31", "R-32")
@pytest.mark.parametrize("call", ["send", "post", "send_many"])
async def test_a_cancelled_send_sends_nothing_or_a_prefix(call: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with background() as nursery, full() as (here, there):
            got: list[bytes] = []

            async def read() -> None:
                await trio.sleep(0.5)
                got.extend([message async for message in there])

            nursery.start_soon(read)
            returned = False

            async def operation() -> None:
                nonlocal returned
                if call == "send_many":
                    await here.send_many([b"a", b"b", b"c"])
                else:
                    await (here.send if call == "send" else here.post)(b"a")
                returned = True

            yield operation
            await here.send(b"last")
            await here.finish()
            await here.delivered()
            extra = [message for message in got[:-1] if message != FILLING]
            assert got[-1] == b"last"
            if call == "send_many":
                assert extra == [b"a", b"b", b"c"][: len(extra)]
                assert len(extra) == 3 or not returned
            else:
                assert extra == ([b"a"] if returned else [])

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31", "R-33")
@pytest.mark.parametrize("call", ["receive", "receive_many"])
async def test_a_cancelled_receive_takes_nothing(call: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with on_packets() as pair, channels(pair) as (here, there), background() as nursery:
            got: list[bytes] = []

            async def operation() -> None:
                if call == "receive":
                    got.append(await there.receive())
                else:
                    got.extend(await there.receive_many())

            async def send() -> None:
                await trio.sleep(0.1)
                await here.send_many([b"1", b"2", b"3"])

            nursery.start_soon(send)
            yield operation
            while len(got) < 3:
                await operation()
            assert got == [b"1", b"2", b"3"]

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31")
@pytest.mark.parametrize("call", ["delivered", "receipt", "finish", "ping"])
async def test_cancelled_waiting_changes_nothing(call: str, autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with on_packets() as pair, channels(pair) as (here, there), background() as nursery:
            receipt = await here.post(b"1")
            got: list[bytes] = []

            async def read() -> None:
                await trio.sleep(0.5)
                got.extend([message async for message in there])

            nursery.start_soon(read)
            operations: dict[str, Operation] = {
                "delivered": here.delivered,
                "receipt": receipt.delivered,
                "finish": here.finish,
                "ping": pair.one.ping,
            }
            yield operations[call]
            if call != "finish":
                await here.send(b"2")
            await here.finish()
            await here.delivered()
            assert got == ([b"1"] if call == "finish" else [b"1", b"2"])

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31")
async def test_a_channel_that_is_cancelled_while_it_opens_is_not_there(autojump_clock: MockClock) -> None:
    async def close_each(session: Session) -> None:
        async for channel in session:
            await channel.aclose()

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with on_packets() as pair, background() as nursery:

            async def operation() -> None:
                async with pair.one.open():
                    pass

            nursery.start_soon(close_each, pair.other)
            yield operation
            await trio.sleep(15)
            assert pair.one.stats().channels == pair.other.stats().channels == 0

    await cancel_sweep(scenario)


@pytest.mark.requirement("R-31", "R-38")
async def test_a_session_can_be_left_by_a_cancellation_at_any_step(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        here, there = CALM.pair(1)
        async with background() as nursery:

            async def echo() -> None:
                with suppress(LinkLost):  # as for a peer whose session was left by an error
                    async with e3x.session(there, role="listener") as session:
                        async for channel in session:
                            async for message in channel:
                                await channel.send(message)
                            await channel.aclose()

            async def operation() -> None:
                async with e3x.session(here, role="connector") as session, session.open() as channel:
                    await channel.send(b"1")
                    assert await channel.receive() == b"1"

            nursery.start_soon(echo)
            yield operation

    assert await cancel_sweep(scenario) > 3


@pytest.mark.requirement("R-34")
async def test_every_call_is_a_checkpoint(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send_many([b"1", b"2", b"3"])
        await trio.sleep(1)
        for call in (
            partial(here.send, b"4"),
            partial(here.post, b"4"),
            partial(here.send_many, [b"4"]),
            there.receive,
            there.receive_many,
            here.delivered,
            here.finish,
            pair.one.ping,
        ):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            assert scope.cancelled_caught, call


async def test_a_backlog_item_is_not_lost_by_a_cancellation(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, pair.one.open():
        await trio.sleep(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await next_channel(pair.other)  # type: ignore[arg-type]
        assert scope.cancelled_caught
        await next_channel(pair.other)  # type: ignore[arg-type]


async def test_a_receive_of_a_message_that_waits_can_be_cancelled(autojump_clock: MockClock) -> None:
    async with on_packets() as pair, channels(pair) as (here, there):
        await here.send_many([b"1", b"2", b"3"])
        await trio.sleep(1)
        assert await there.receive() == b"1"
        with trio.CancelScope() as scope:
            scope.cancel()
            await there.receive()
        assert scope.cancelled_caught
        assert await there.receive() == b"2"
