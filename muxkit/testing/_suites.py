"""Suites for any protocol's sessions: cancellation, reading, pressure, openings and leaving.

    await check_cancellation(make_pair)

Each takes the same function as `check_session`, which has the basic promises, and makes a fresh pair for each check.
"""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
import trio.testing

from muxkit.runtime import LinkLost, Unsupported, background
from muxkit.testing._cancel import cancel_sweep
from muxkit.testing._demands import require
from muxkit.testing._sessions import (
    WINDOW_MOST,
    at_rest,
    echo_each,
    receive_on,
    run_check,
    talk,
    two_ends,
    use_new,
    with_cancellations,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from muxkit.runtime import Channel, Session
    from muxkit.testing._sessions import Check, MakePair, SessionPair

LEAVE_TIME = 30.0  # s in which a session must be left, at most; longer than the `linger` of the pairs
SETTLE_TIME = 60.0  # s in which both sides must forget channels that are over


async def check_cancellation(make_pair: MakePair) -> None:
    """Cancel each call of the common interface at each of its steps; the sessions must go on as promised.

    A cancelled send sent nothing, a cancelled `send_many` sent the first messages or none, a cancelled receive took
    nothing, and after each of them new channels work.
    """
    for name, call in _CALLS.items():
        try:
            await cancel_sweep(partial(_cancelled_call, make_pair, call))
        except AssertionError as error:
            raise AssertionError(f"cancelled {name}: {error}") from error
    await cancel_sweep(partial(_cancelled_session, make_pair))
    await run_check(_every_call_is_a_checkpoint, make_pair)


async def check_reading(make_pair: MakePair, *, messages: int = 2000) -> None:
    """Receive with cancellations at random moments; each message must come once, in order, before the end."""
    for seed in (1, 2, 3):
        await run_check(partial(_each_message_comes_once, seed=seed, messages=messages), make_pair)


async def check_pressure(make_pair: MakePair) -> None:
    """Send more than is read: senders must stop, and only those whose own channel is not read."""
    for check in (
        _channels_push_both_ways,
        _stalled_channels_stop_only_themselves,
        _channels_that_are_not_taken_stop_their_senders,
        _small_messages_pass_a_bulk_transfer,
    ):
        await run_check(check, make_pair)


async def check_openings(make_pair: MakePair) -> None:
    """Open many channels from both sides at once, close, abort and cancel them; nothing may be left behind."""
    for check in (_many_openings_have_their_turns, _ends_that_cross_leave_nothing, _loss_reaches_waiting_openings):
        await run_check(check, make_pair)


async def check_leaving(make_pair: MakePair) -> None:
    """Leave sessions in order, by an error, by a cancellation and after a loss; each must end in time."""
    for leave in (_leave_in_order, _leave_with_open_channels, _leave_with_unread_messages, _leave_after_a_loss):
        await _leave_within_time(make_pair, leave)
    await _leave_by_an_error(make_pair)
    await _leave_by_a_cancellation(make_pair)
    await _sessions_leave_nothing_behind(make_pair)


# Cancellation


class _Ends:
    """A channel at both ends, for one run of a sweep."""

    def __init__(self, pair: SessionPair, here: Channel, there: Channel) -> None:
        self.pair = pair
        self.here = here
        self.there = there
        self.is_done = False
        self.got: list[bytes] = []

    async def receive_rest(self) -> list[bytes]:
        """Return all messages that were received, up to the clean end."""
        await self.here.finish()
        with suppress(trio.EndOfChannel):
            while True:
                self.got.append(await self.there.receive())
        return self.got


@asynccontextmanager
async def _cancelled_call(make_pair: MakePair, call: _Call) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    prepare, operation, check = call
    with suppress(LinkLost):  # a check may leave with unread messages
        async with make_pair() as pair, two_ends(pair) as (here, there):
            ends = _Ends(pair, here, there)
            await prepare(ends)

            async def run() -> None:
                await operation(ends)
                ends.is_done = True

            yield run
            await check(ends)
            async with background() as nursery:
                nursery.start_soon(echo_each, pair.other)
                await talk(pair.one, b"after a cancellation")


async def _nothing(ends: _Ends) -> None: ...


async def _send(ends: _Ends) -> None:
    await ends.here.send(b"cancelled")


async def _send_was_all_or_nothing(ends: _Ends) -> None:
    await ends.here.send(b"after")
    expected = [b"cancelled", b"after"] if ends.is_done else [b"after"]
    got = await ends.receive_rest()
    require(got == expected, f"a send that {'returned' if ends.is_done else 'was cancelled'} gave {got}")


async def _send_many(ends: _Ends) -> None:
    await ends.here.send_many([b"1", b"2", b"3"])


async def _send_many_sent_a_prefix(ends: _Ends) -> None:
    await ends.here.send(b"after")
    got = await ends.receive_rest()
    count = len(got) - 1
    require(got == [*[b"1", b"2", b"3"][:count], b"after"], f"send_many gave {got}")
    require(count == 3 or not ends.is_done, f"send_many that returned gave {got}")


async def _receive(ends: _Ends) -> None:
    ends.got.append(await ends.there.receive())


async def _receive_many(ends: _Ends) -> None:
    ends.got += await ends.there.receive_many()


async def _receive_took_nothing(ends: _Ends) -> None:
    got = await ends.receive_rest()
    require(got == [b"1", b"2", b"3"], f"after a cancelled receive all messages were {got}")


async def _finish(ends: _Ends) -> None:
    await ends.here.finish()


async def _finish_can_be_repeated(ends: _Ends) -> None:
    got = await ends.receive_rest()
    require(got == [], f"finish gave {got}")


async def _ping(ends: _Ends) -> None:
    with suppress(Unsupported):
        await ends.pair.one.ping()


async def _open(ends: _Ends) -> None:
    async with ends.pair.one.open():
        pass


async def _close(ends: _Ends) -> None:
    await ends.here.aclose()


if TYPE_CHECKING:
    Step = Callable[[_Ends], Awaitable[None]]
    _Call = tuple[Step, Step, Step]

_CALLS: dict[str, _Call] = {
    "send": (_nothing, _send, _send_was_all_or_nothing),
    "send_many": (_nothing, _send_many, _send_many_sent_a_prefix),
    "receive": (_send_many, _receive, _receive_took_nothing),
    "receive_many": (_send_many, _receive_many, _receive_took_nothing),
    "finish": (_nothing, _finish, _finish_can_be_repeated),
    "ping": (_nothing, _ping, _nothing),
    "open": (_nothing, _open, _nothing),
    "aclose": (_nothing, _close, _nothing),
}
"""Of each call: what is done before, what is cancelled, and what must hold afterwards."""


@asynccontextmanager
async def _cancelled_session(make_pair: MakePair) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async def operation() -> None:
        with suppress(LinkLost):
            async with make_pair() as pair, two_ends(pair) as (here, there):
                await here.send(b"1")
                require(await there.receive() == b"1", "a message came out different")

    yield operation


async def _every_call_is_a_checkpoint(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        await here.send_many([b"1", b"2", b"3"])
        await at_rest()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "send": partial(here.send, b"4"),
            "send_many": partial(here.send_many, [b"4"]),
            "receive": there.receive,
            "receive_many": there.receive_many,
            "finish": here.finish,
        }
        for name, call in calls.items():
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            require(scope.cancelled_caught, f"{name} is no checkpoint")


# Reading


async def _each_message_comes_once(pair: SessionPair, *, seed: int, messages: int) -> None:
    dice = random.Random(seed)
    async with two_ends(pair) as (here, there), background() as nursery:

        async def send() -> None:
            for number in range(messages):
                await with_cancellations(dice, partial(here.send, b"%d" % number))
            await here.finish()

        async def receive() -> list[bytes]:
            if dice.random() < 0.5:
                return [await there.receive()]
            return await there.receive_many(limit=dice.randrange(1, 10))

        nursery.start_soon(send)
        number = 0
        while number < messages:
            got = cast("list[bytes]", await with_cancellations(dice, receive))
            expected = [b"%d" % (number + index) for index in range(len(got))]
            require(got == expected, f"instead of message {number} and the next came {got!r}")
            number += len(got)
        with suppress(trio.EndOfChannel):
            raise AssertionError(f"behind the last message came {await there.receive()!r}")


# Pressure


async def _channels_push_both_ways(pair: SessionPair) -> None:
    async def push(session: Session) -> None:
        async def send() -> None:
            for _ in range(10):
                await channel.send(bytes(10_000))

        async with session.open() as channel, background() as nursery:
            nursery.start_soon(send)
            for _ in range(10):
                require(len(await channel.receive()) == 10_000, "an echo came back with another size")

    async with background() as nursery:
        for session in (pair.one, pair.other):
            nursery.start_soon(echo_each, session)
        async with trio.open_nursery() as work:
            for _ in range(16):
                work.start_soon(push, pair.one)
                work.start_soon(push, pair.other)


async def _push(channel: Channel, sent: list[int]) -> None:
    """Send until the channel stops it, and count the bytes in `sent`."""
    with suppress(trio.BrokenResourceError):
        while sum(sent) < WINDOW_MOST:
            await channel.send(bytes(10_000))
            sent.append(10_000)


async def _stalled_channels_stop_only_themselves(pair: SessionPair) -> None:
    async with two_ends(pair) as (first, _), two_ends(pair) as (second, _), background() as nursery:
        sent: list[int] = []
        for stalled in (first, second):
            nursery.start_soon(_push, stalled, sent)
        await at_rest()
        require(sum(sent) < WINDOW_MOST, f"{sum(sent)} bytes were taken while no task read")
        nursery.start_soon(echo_each, pair.other)
        async with trio.open_nursery() as talkers:
            for number in range(20):
                talkers.start_soon(talk, pair.one, b"%d" % number)


async def _channels_that_are_not_taken_stop_their_senders(pair: SessionPair) -> None:
    sent: list[int] = []

    async def push() -> None:
        async with pair.one.open() as channel:
            await _push(channel, sent)

    async with background() as nursery:
        for _ in range(8):
            nursery.start_soon(push)
        await at_rest()
        require(sum(sent) < WINDOW_MOST, f"{sum(sent)} bytes were taken into channels that no task took")


async def _small_messages_pass_a_bulk_transfer(pair: SessionPair) -> None:
    async with background() as nursery:
        nursery.start_soon(echo_each, pair.other)

        async def push() -> None:
            async with pair.one.open() as bulk, background() as inner:
                inner.start_soon(receive_on, bulk)
                while True:
                    await bulk.send(bytes(10_000))
                    await trio.lowlevel.checkpoint()

        nursery.start_soon(push)
        for number in range(20):
            await talk(pair.one, b"%d" % number)


# Openings


async def _many_openings_have_their_turns(pair: SessionPair) -> None:
    async with background() as nursery:
        for session in (pair.one, pair.other):
            nursery.start_soon(echo_each, session)
        async with trio.open_nursery() as work:
            for number in range(100):
                work.start_soon(talk, pair.one, b"%d" % number)
                work.start_soon(talk, pair.other, b"%d" % number)
    await _settled(pair)


async def _ends_that_cross_leave_nothing(pair: SessionPair) -> None:
    dice = random.Random(5)

    async def end(channel: Channel) -> None:
        for _ in range(dice.randrange(3)):
            await trio.lowlevel.checkpoint()
        if dice.random() < 0.5:
            channel.abort()
        else:
            await channel.aclose()

    async def end_each() -> None:
        async for channel in pair.other.incoming():
            nursery.start_soon(end, channel)

    async def use() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(dice.random()):
            async with pair.one.open() as channel:
                await channel.send(b"x")
                await end(channel)

    async with background() as nursery:
        nursery.start_soon(end_each)
        for _ in range(20):
            async with trio.open_nursery() as work:
                for _ in range(5):
                    work.start_soon(use)
        await _settled(pair)


async def _loss_reaches_waiting_openings(pair: SessionPair) -> None:
    errors: list[Exception] = []

    async def use() -> None:
        try:
            await use_new(pair.one)
        except Exception as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(use)
        await at_rest()
        pair.cut()
    require(len(errors) == 20, f"{20 - len(errors)} of 20 openings went on after the link was lost")
    for error in errors:
        require(isinstance(error, trio.BrokenResourceError), f"an opening on a lost link raised {error!r}")


async def _settled(pair: SessionPair) -> None:
    """Wait until both sides have forgotten their channels."""
    with trio.move_on_after(SETTLE_TIME):
        while pair.one.stats().channels or pair.other.stats().channels:  # noqa: ASYNC110 - stats has no event
            await trio.sleep(0.1)
    counts = pair.one.stats().channels, pair.other.stats().channels
    require(counts == (0, 0), f"{counts} channels are left {SETTLE_TIME:g} s after all had ended")


# Leaving


async def _leave_within_time(make_pair: MakePair, leave: Check) -> None:
    name = leave.__name__.strip("_").replace("_", " ")
    began = trio.current_time()
    with suppress(LinkLost):
        async with make_pair() as pair:
            await leave(pair)
            began = trio.current_time()
    took = trio.current_time() - began
    require(took <= LEAVE_TIME, f"{name}: the sessions were left after {took:g} s, with {LEAVE_TIME:g} s allowed")


async def _leave_in_order(pair: SessionPair) -> None:
    async with two_ends(pair) as (here, there):
        await here.send(b"x")
        require(await there.receive() == b"x", "a message came out different")


async def _leave_with_open_channels(pair: SessionPair) -> None:
    for session, other in ((pair.one, pair.other), (pair.other, pair.one)):
        opening = two_ends(type(pair)(session, other, pair.cut))
        await opening.__aenter__()


async def _leave_with_unread_messages(pair: SessionPair) -> None:
    async with pair.one.open() as channel:
        await channel.send(b"unread")
        channel.abort()


async def _leave_after_a_loss(pair: SessionPair) -> None:
    pair.cut()
    await at_rest()


async def _leave_by_an_error(make_pair: MakePair) -> None:
    error = ValueError("what the block raised")
    began = trio.current_time()
    try:
        async with make_pair() as pair, two_ends(pair):
            began = trio.current_time()
            raise error
    except ValueError as same:
        require(same is error, "a block's own error came out as another one")
    took = trio.current_time() - began
    require(took <= LEAVE_TIME, f"leave by an error: it took {took:g} s, with {LEAVE_TIME:g} s allowed")


async def _leave_by_a_cancellation(make_pair: MakePair) -> None:
    began = trio.current_time()
    with trio.CancelScope() as scope:
        async with make_pair() as pair, two_ends(pair):
            began = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    require(scope.cancelled_caught, "leave by a cancellation: the cancellation was swallowed")
    took = trio.current_time() - began
    require(took <= LEAVE_TIME, f"leave by a cancellation: it took {took:g} s, with {LEAVE_TIME:g} s allowed")


async def _sessions_leave_nothing_behind(make_pair: MakePair) -> None:
    async def live() -> list[weakref.ref[object]]:
        async with make_pair() as pair, two_ends(pair) as (here, there):
            await here.send(b"x")
            await there.receive()
            return [weakref.ref(pair.one), weakref.ref(pair.other)]

    references = await live()
    await at_rest()
    gc.collect()
    left = sum(reference() is not None for reference in references)
    require(not left, f"{left} of 2 sessions are referenced after they were left")
