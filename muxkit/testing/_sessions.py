"""The suite for sessions of any protocol: the basic promises of `muxkit.Session` and `muxkit.Channel`.

    @asynccontextmanager
    async def make_pair():
        here, there = memory.pair()
        async with my.session(here) as one, my.session(there) as other:
            yield SessionPair(one, other, cut=lambda: …)

    await check_session(make_pair)

Each check makes a pair of its own. It may leave channels and the sessions in any state.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
import trio.testing

from muxkit.runtime import Channel, LinkLost, Session, Unsupported, background
from muxkit.testing._demands import must_raise, require

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

CHECK_TIMEOUT = 30.0  # s, for a single check; reached only by a session that hangs
QUIET = 0.01  # s without any running task, after which a task counts as waiting
WINDOW_MOST = 32 * 1024 * 1024  # bytes that a sender may send to a peer that reads nothing


@attrs.frozen
class SessionPair:
    """Two connected sessions; `cut` breaks the link between them without notice."""

    one: Session
    other: Session
    cut: Callable[[], None]


if TYPE_CHECKING:
    MakePair = Callable[[], AbstractAsyncContextManager[SessionPair]]
    Check = Callable[[SessionPair], Awaitable[None]]


async def check_session(make_pair: MakePair, *, largest: int = 1_000_000) -> None:
    """Try every promise of `muxkit.Session` and `muxkit.Channel`; raises AssertionError with what was broken.

    `largest` is the size in bytes of the largest message that is tried.
    """
    await _errors_come_out_bare(make_pair)
    first: Check = partial(_messages_arrive_whole, largest=largest)
    for check in (first, *_CHECKS):
        await run_check(check, make_pair)


async def run_check(check: Check, make_pair: MakePair) -> None:
    """Run one check with a pair of its own; raises AssertionError with the name of the check and what was broken."""
    name = getattr(check, "func", check).__name__.strip("_").replace("_", " ")
    failure: Exception | None = None
    with trio.move_on_after(CHECK_TIMEOUT) as scope:
        try:
            async with make_pair() as pair:
                try:
                    await check(pair)
                except Exception as error:
                    failure = error
        except LinkLost:
            pass  # a check may leave with unread messages
        except Exception as error:
            failure = failure or error
    require(not scope.cancelled_caught, f"{name}: not over within {CHECK_TIMEOUT:g} s")
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise AssertionError(f"{name}: {str(failure) or type(failure).__name__}") from failure


# The checks


async def _messages_arrive_whole(pair: SessionPair, *, largest: int) -> None:
    async with background() as nursery:
        nursery.start_soon(echo_each, pair.other)
        for size in (0, 1, 1000, 65_536, largest):
            message = random.Random(size).randbytes(size)
            async with pair.one.open() as channel:
                await channel.send(message)
                require(await channel.receive() == message, f"a message of {size} bytes came back different")


async def _both_sides_open_channels(pair: SessionPair) -> None:
    async with background() as nursery:
        nursery.start_soon(echo_each, pair.one)
        nursery.start_soon(echo_each, pair.other)
        async with trio.open_nursery() as work:
            for number in range(25):
                for session in (pair.one, pair.other):
                    work.start_soon(talk, session, b"%d" % number)


async def _order_is_kept(pair: SessionPair) -> None:
    messages = [b"%d" % number for number in range(2000)]
    async with two_ends(pair) as (here, there):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await here.send_many(messages[:1000])
                for message in messages[1000:]:
                    await here.send(message)
                await here.finish()

            nursery.start_soon(send)
            got = [await there.receive()]
            with suppress(trio.EndOfChannel):
                while True:
                    got += await there.receive_many(limit=100)
        require(got == messages, f"{len(got)} of {len(messages)} messages came in order")


async def _half_close_keeps_the_way_back(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        await here.send(b"question")
        await here.finish()
        require(await there.receive() == b"question", "what was sent before finish was lost")
        await must_raise(trio.EndOfChannel, "receive after the peer finished", there.receive)
        await there.send(b"answer")
        require(await here.receive() == b"answer", "after finish nothing came back")
        await must_raise(trio.ClosedResourceError, "send after finish", here.send, b"x")


async def _abort_is_no_clean_end(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        here.abort()
        await must_raise(trio.BrokenResourceError, "receive after the peer gave up", receive_on, there)
        await must_raise(trio.BrokenResourceError, "send after the peer gave up", send_on, there, b"x")
        await must_raise(trio.ClosedResourceError, "send after abort", here.send, b"x")
        await must_raise(trio.ClosedResourceError, "receive after abort", here.receive)


async def _an_unread_channel_stops_its_sender_only(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        async with background() as nursery:
            sent = 0

            async def push() -> None:
                nonlocal sent
                while sent * 10_000 < WINDOW_MOST:
                    await here.send(bytes(10_000))
                    sent += 1

            nursery.start_soon(push)
            await at_rest()
            require(sent * 10_000 < WINDOW_MOST, f"{sent * 10_000} bytes were taken while no task read")
            nursery.start_soon(echo_each, pair.other)
            for number in range(100):
                await talk(pair.one, b"%d" % number)
            before = sent
            while sent == before:
                await there.receive()


async def _a_cancelled_receive_loses_nothing(pair: SessionPair) -> None:
    dice = random.Random(1)
    async with two_ends(pair) as (here, there):
        async with background() as nursery:

            async def send() -> None:
                for number in range(1000):
                    await here.send(b"%d" % number)
                    if dice.random() < 0.5:
                        await trio.lowlevel.checkpoint()

            nursery.start_soon(send)
            for number in range(1000):
                message = await with_cancellations(dice, there.receive)
                require(message == b"%d" % number, f"instead of message {number} came {message!r}")


async def _a_cancelled_send_sends_nothing(pair: SessionPair) -> None:
    dice = random.Random(2)
    async with two_ends(pair) as (here, there):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(300):
                    await with_cancellations(dice, partial(here.send, b"%6d" % number * 500))
                await here.finish()

            nursery.start_soon(send)
            for number in range(300):
                message = await there.receive()
                require(message[:6] == b"%6d" % number, f"instead of message {number} came {message[:6]!r}")
            await must_raise(trio.EndOfChannel, "receive behind the last message", there.receive)


async def _loss_wakes_all_tasks(pair: SessionPair) -> None:
    woken: dict[str, BaseException | None] = {}
    async with two_ends(pair) as (here, _there), pair.one.open() as finished, pair.one.open() as idle:
        await finished.send(b"x")

        async def iterate() -> None:
            async for _ in pair.one.incoming():
                pass

        async def wait(name: str, call: Callable[[], Awaitable[object]]) -> None:
            try:
                await call()
                woken[name] = None
            except Exception as error:
                woken[name] = error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "receive", idle.receive)
            nursery.start_soon(wait, "receive_many", finished.receive_many)
            nursery.start_soon(wait, "send", partial(send_on, here, bytes(10_000)))
            nursery.start_soon(wait, "incoming", iterate)
            await at_rest()
            pair.cut()
            nursery.start_soon(wait, "finish", idle.finish)
            nursery.start_soon(wait, "ping", pair.one.ping)
        for name, error in woken.items():
            fine = isinstance(error, LinkLost) or (name == "ping" and isinstance(error, Unsupported))
            require(fine, f"after the link was lost {name} gave {error!r}, not LinkLost")
        for name, call in (
            ("send", partial(idle.send, b"x")),
            ("receive", idle.receive),
            ("open", partial(use_new, pair.one)),
        ):
            await must_raise(LinkLost, f"{name} after the link was lost", call)


async def _shutdown_lets_live_channels_end(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(pair.other.shutdown, grace=CHECK_TIMEOUT / 2))
            await at_rest()
            await here.send(b"late")
            require(await there.receive() == b"late", "a live channel did not work any more during shutdown")
            await here.aclose()
            await there.aclose()
        async for _ in pair.other.incoming():
            raise AssertionError("a channel came in after shutdown")
        await must_raise(trio.BrokenResourceError, "a channel opened after the peer's shutdown", use_new, pair.one)


async def _shutdown_cuts_what_does_not_end(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, _there):
        await pair.other.shutdown(grace=0.01)
        await must_raise(trio.BrokenResourceError, "receive on a channel that was cut", receive_on, here)


async def _a_session_knows_itself(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        await here.send(b"12345")
        await there.receive()
        require(bool(pair.one.info.protocol), "info.protocol is empty")
        stats = pair.one.stats()
        require(stats.messages_sent >= 1 and stats.bytes_sent >= 5, f"after sending the counters are {stats}")
        with suppress(Unsupported):
            require(await pair.one.ping() >= 0, "ping gave a negative time")


async def _errors_come_out_bare(make_pair: MakePair) -> None:
    error = _MadeUp("what the block raised")
    try:
        async with make_pair() as pair, pair.one.open():
            raise error
    except _MadeUp as same:
        require(same is error, "a block's own error came out as another one")
    except BaseExceptionGroup as group:
        raise AssertionError("errors come out bare: a block's own error came out in a group") from group


_CHECKS: tuple[Check, ...] = (
    _both_sides_open_channels,
    _order_is_kept,
    _half_close_keeps_the_way_back,
    _abort_is_no_clean_end,
    _an_unread_channel_stops_its_sender_only,
    _a_cancelled_receive_loses_nothing,
    _a_cancelled_send_sends_nothing,
    _loss_wakes_all_tasks,
    _shutdown_lets_live_channels_end,
    _shutdown_cuts_what_does_not_end,
    _a_session_knows_itself,
)


# Helpers


class _MadeUp(Exception):
    pass


class two_ends:
    """A channel of `pair.one` and the same channel at `pair.other`."""

    def __init__(self, pair: SessionPair) -> None:
        self._pair = pair
        self._opening = pair.one.open()

    async def __aenter__(self) -> tuple[Channel, Channel]:
        here = await self._opening.__aenter__()
        # Some protocols announce a channel with its first message only.
        await here.send(b"first")
        async for there in self._pair.other.incoming():
            require(await there.receive() == b"first", "the first message came out different")
            return here, there
        raise AssertionError("incoming ended before the channel came")

    async def __aexit__(self, *details: object) -> None:
        await self._opening.__aexit__(None, None, None)


async def echo_each(session: Session) -> None:
    async def echo(channel: Channel) -> None:
        with suppress(trio.BrokenResourceError):
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

    async with trio.open_nursery() as nursery:
        async for channel in session.incoming():
            nursery.start_soon(echo, channel)


async def talk(session: Session, message: bytes) -> None:
    async with session.open() as channel:
        for _ in range(5):
            await channel.send(message)
            require(await channel.receive() == message, "an echo came back different")


async def with_cancellations(dice: random.Random, call: Callable[[], Awaitable[object]]) -> object:
    """Call until a call is not cancelled, and return its result; cancels before, during and just after its wait."""
    while True:
        with trio.CancelScope() as scope:
            throw = dice.random()
            if throw < 0.2:
                scope.cancel()
            elif throw < 0.5:
                scope.deadline = trio.current_time()
            return await call()


async def send_on(channel: Channel, message: bytes) -> None:
    while True:
        await channel.send(message)


async def receive_on(channel: Channel) -> None:
    while True:
        await channel.receive()


async def use_new(session: Session) -> None:
    async with session.open() as channel:
        await channel.send(b"x")
        await channel.receive()


async def at_rest() -> None:
    await trio.testing.wait_all_tasks_blocked(QUIET)
