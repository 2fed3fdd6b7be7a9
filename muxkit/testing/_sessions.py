"""Conformance suites for the sessions of any protocol.

They cover the basic promises, cancellation, reading, flow control under pressure, opening channels, and closing.

    @asynccontextmanager
    async def make_pair():
        here, there = memory.pair()
        async with my.session(here) as one, my.session(there) as other:
            yield SessionPair(one, other, cut=lambda: …)

    await check_session(make_pair)      # the promises of `muxkit.Session` and `muxkit.Channel`
    await check_cancellation(make_pair)

Each check makes its own pair, and may leave the channels and sessions in any state. Every suite raises AssertionError
with the name of the check that failed and the promise that was broken.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import attrs
import trio
import trio.testing

from muxkit.runtime import Channel, LinkLost, Session, Unsupported, background
from muxkit.testing._checks import CHECK_TIMEOUT, cancel_sweep, must_raise, run_check
from muxkit.testing._pair import require

LEAVE_TIME = 30.0  # s within which the block of a session must end; longer than the `linger` of the pairs
SETTLE_TIME = 60.0  # s within which both sides must forget closed channels
QUIET = 0.01  # s without any running task, after which a task counts as blocked
WINDOW_MOST = 32 * 1024 * 1024  # bytes that a sender may send to a peer that reads nothing


@attrs.frozen
class SessionPair:
    """Two connected sessions. Calling `cut` breaks the link between them without notifying either side."""

    one: Session
    other: Session
    cut: Callable[[], None]


MakePair = Callable[[], AbstractAsyncContextManager[SessionPair]]
Check = Callable[[SessionPair], Awaitable[None]]
Step = Callable[["_Ends"], Awaitable[None]]
_Call = tuple[Step, Step, Step]
Leave = Callable[[SessionPair, trio.CancelScope], Awaitable[None]]


T = TypeVar("T")


async def check_session(make_pair: MakePair, *, largest: int = 1_000_000) -> None:
    """Check every promise of `muxkit.Session` and `muxkit.Channel`.

    Args:
        make_pair: returns an async context manager that yields a `SessionPair`.
        largest: the size in bytes of the largest message to send.

    Raises:
        AssertionError: if a promise is broken.
    """
    await _errors_come_out_bare(make_pair)
    await _run(make_pair, partial(_messages_arrive_whole, largest=largest), *_CHECKS)


async def check_cancellation(make_pair: MakePair) -> None:
    """Cancel each call of the common interface at each of its steps, and check that the session keeps its promises.

    A cancelled `send` must not have sent anything. A cancelled `send_many` must have sent the first few messages or
    none. A cancelled `receive` or `receive_many` must not have taken a message. After each of them, new channels must
    work.

    Raises:
        AssertionError: if a promise is broken.
    """
    for name, call in _CALLS.items():
        try:
            await cancel_sweep(partial(_cancelled_call, make_pair, call))
        except AssertionError as error:
            raise AssertionError(f"cancelled {name}: {error}") from error
    await cancel_sweep(partial(_cancelled_session, make_pair))
    await _run(make_pair, _every_call_is_a_checkpoint)


async def check_reading(make_pair: MakePair, *, messages: int = 2000) -> None:
    """Receive with cancellations at random moments. Each message must arrive once and in order.

    Args:
        make_pair: returns an async context manager that yields a `SessionPair`.
        messages: the number of messages to send in each of three runs.

    Raises:
        AssertionError: if a message is lost, repeated or out of order.
    """
    checks = [partial(_each_message_comes_once, seed=seed, count=messages) for seed in (1, 2, 3)]
    await _run(make_pair, *checks)


async def check_pressure(make_pair: MakePair) -> None:
    """Send more than the peer reads. Flow control must block the senders of unread channels, and only those.

    Raises:
        AssertionError: if a sender isn't blocked, or if one is blocked although its channel is read.
    """
    await _run(
        make_pair,
        _channels_push_both_ways,
        _stalled_channels_stop_only_themselves,
        _channels_that_are_not_taken_stop_their_senders,
        _small_messages_pass_a_bulk_transfer,
    )


async def check_openings(make_pair: MakePair) -> None:
    """Open many channels from both sides simultaneously, and close, abort and cancel them.

    Raises:
        AssertionError: if channels remain afterwards, or if an opening continues after the link was lost.
    """
    await _run(
        make_pair, _many_openings_have_their_turns, _ends_that_cross_leave_nothing, _loss_reaches_waiting_openings
    )


async def check_leaving(make_pair: MakePair) -> None:
    """Leave the block of a session normally, with an error, by cancellation, and after a loss of the link.

    Raises:
        AssertionError: if leaving takes too long, swallows a cancellation, or leaves references to a session.
    """
    for leave in _LEAVES:
        await _leave_within_time(make_pair, leave)
    await _sessions_leave_nothing_behind(make_pair)


async def _run(make_pair: MakePair, *checks: Check) -> None:
    for check in checks:
        await run_check(getattr(check, "func", check).__name__, check, make_pair)


# The basic promises


async def _messages_arrive_whole(pair: SessionPair, *, largest: int) -> None:
    async with background() as nursery:
        nursery.start_soon(echo_each, pair.other)
        for size in (0, 1, 1000, 65_536, largest):
            message = random.Random(size).randbytes(size)
            async with pair.one.open() as channel:
                await channel.send(message)
                require(await channel.receive() == message, f"a message of {size} bytes came back different")


async def _both_sides_open_channels(pair: SessionPair, *, count: int = 25) -> None:
    async with background() as nursery:
        for session in (pair.one, pair.other):
            nursery.start_soon(echo_each, session)
        async with trio.open_nursery() as work:
            for number in range(count):
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


async def _an_unread_channel_stops_its_sender_only(pair: SessionPair, *, count: int = 1) -> None:
    async with AsyncExitStack() as stack, background() as nursery:
        ends = [await stack.enter_async_context(two_ends(pair)) for _ in range(count)]
        sent: list[int] = []
        for here, _there in ends:
            nursery.start_soon(_push, here, sent)
        await at_rest()
        require(sum(sent) < WINDOW_MOST, f"{sum(sent)} bytes were taken while no task read")
        nursery.start_soon(echo_each, pair.other)
        async with trio.open_nursery() as talkers:
            for number in range(20):
                talkers.start_soon(talk, pair.one, b"%d" % number)
        for _here, there in ends:
            before = len(sent)
            while len(sent) == before:
                await there.receive()


async def _a_cancelled_receive_loses_nothing(pair: SessionPair) -> None:
    await _each_message_comes_once(pair, seed=1, count=1000, cancels_sending=False)


async def _a_cancelled_send_sends_nothing(pair: SessionPair) -> None:
    await _each_message_comes_once(pair, seed=2, count=300, padding=3000, cancels_receiving=False)


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


# Cancellation


@attrs.define
class _Ends:
    """Both ends of a channel, for one run of a sweep."""

    pair: SessionPair
    here: Channel
    there: Channel
    is_done: bool = False
    got: list[bytes] = attrs.field(factory=list)

    async def receive_rest(self) -> list[bytes]:
        """Finish sending, then return all messages received so far and those that follow, up to the clean end."""
        await self.here.finish()
        with suppress(trio.EndOfChannel):
            while True:
                self.got.append(await self.there.receive())
        return self.got


@asynccontextmanager
async def _cancelled_call(make_pair: MakePair, call: _Call) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    prepare, operation, check = call
    with suppress(LinkLost):  # a check may leave unread messages, and then leaving the session may report a loss
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


async def _send_was_all_or_nothing(ends: _Ends) -> None:
    await ends.here.send(b"after")
    expected = [b"cancelled", b"after"] if ends.is_done else [b"after"]
    got = await ends.receive_rest()
    require(got == expected, f"a send that {'returned' if ends.is_done else 'was cancelled'} gave {got}")


def _send_many(ends: _Ends) -> Awaitable[None]:
    return ends.here.send_many([b"1", b"2", b"3"])


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


async def _finish_can_be_repeated(ends: _Ends) -> None:
    got = await ends.receive_rest()
    require(got == [], f"finish gave {got}")


async def _ping(ends: _Ends) -> None:
    with suppress(Unsupported):
        await ends.pair.one.ping()


async def _open(ends: _Ends) -> None:
    async with ends.pair.one.open():
        pass


_CALLS: dict[str, _Call] = {
    "send": (_nothing, lambda ends: ends.here.send(b"cancelled"), _send_was_all_or_nothing),
    "send_many": (_nothing, _send_many, _send_many_sent_a_prefix),
    "receive": (_send_many, _receive, _receive_took_nothing),
    "receive_many": (_send_many, _receive_many, _receive_took_nothing),
    "finish": (_nothing, lambda ends: ends.here.finish(), _finish_can_be_repeated),
    "ping": (_nothing, _ping, _nothing),
    "open": (_nothing, _open, _nothing),
    "aclose": (_nothing, lambda ends: ends.here.aclose(), _nothing),
}
"""For each call: the preparation, the operation to cancel, and the check that must pass afterwards."""


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


async def _each_message_comes_once(
    pair: SessionPair,
    *,
    seed: int,
    count: int,
    padding: int = 0,
    cancels_sending: bool = True,
    cancels_receiving: bool = True,
) -> None:
    dice = random.Random(seed)

    async def run(call: Callable[[], Awaitable[T]], with_cancellations: bool) -> T:
        """Call until a call isn't cancelled. Cancellation comes before, during or just after the wait."""
        while True:
            with trio.CancelScope() as scope:
                throw = dice.random()
                if with_cancellations and throw < 0.2:
                    scope.cancel()
                elif with_cancellations and throw < 0.5:
                    scope.deadline = trio.current_time()
                elif throw > 0.75:
                    await trio.lowlevel.checkpoint()
                return await call()

    async def send() -> None:
        for number in range(count):
            await run(partial(here.send, b"%d " % number + bytes(padding)), cancels_sending)
        await here.finish()

    async def receive() -> list[bytes]:
        if dice.random() < 0.5:
            return [await there.receive()]
        return await there.receive_many(limit=dice.randrange(1, 10))

    async with two_ends(pair) as (here, there), background() as nursery:
        nursery.start_soon(send)
        number = 0
        while number < count:
            got = [int(message.rstrip(b"\0")) for message in await run(receive, cancels_receiving)]
            expected = list(range(number, number + len(got)))
            require(got == expected, f"instead of message {number} and the next came {got}")
            number += len(got)
        await must_raise(trio.EndOfChannel, "receive behind the last message", there.receive)


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
    """Send until flow control blocks the sender, and append the number of bytes to `sent` for each message."""
    with suppress(trio.BrokenResourceError):
        while sum(sent) < WINDOW_MOST:
            await channel.send(bytes(10_000))
            sent.append(10_000)


async def _stalled_channels_stop_only_themselves(pair: SessionPair) -> None:
    await _an_unread_channel_stops_its_sender_only(pair, count=2)


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
    await _both_sides_open_channels(pair, count=100)
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
    """Wait until both sides have forgotten their channels. Raises AssertionError after `SETTLE_TIME`."""
    with trio.move_on_after(SETTLE_TIME):
        while pair.one.stats().channels or pair.other.stats().channels:  # noqa: ASYNC110 - stats has no event
            await trio.sleep(0.1)
    counts = pair.one.stats().channels, pair.other.stats().channels
    require(counts == (0, 0), f"{counts} channels are left {SETTLE_TIME:g} s after all had ended")


# Leaving


async def _leave_within_time(make_pair: MakePair, leave: Leave) -> None:
    name = leave.__name__.strip("_").replace("_", " ")
    began = trio.current_time()
    with trio.CancelScope() as scope:
        try:
            async with make_pair() as pair:
                try:
                    await leave(pair, scope)
                finally:
                    began = trio.current_time()
        except (LinkLost, _MadeUp):
            pass
    took = trio.current_time() - began
    require(took <= LEAVE_TIME, f"{name}: the sessions were left after {took:g} s, with {LEAVE_TIME:g} s allowed")
    require(scope.cancelled_caught or not scope.cancel_called, f"{name}: the cancellation was swallowed")


async def _leave_in_order(pair: SessionPair, scope: trio.CancelScope) -> None:
    async with two_ends(pair) as (here, there):
        await here.send(b"x")
        require(await there.receive() == b"x", "a message came out different")


async def _leave_with_open_channels(pair: SessionPair, scope: trio.CancelScope) -> None:
    for each in (pair, SessionPair(pair.other, pair.one, pair.cut)):
        await two_ends(each).__aenter__()


async def _leave_with_unread_messages(pair: SessionPair, scope: trio.CancelScope) -> None:
    async with pair.one.open() as channel:
        await channel.send(b"unread")
        channel.abort()


async def _leave_after_a_loss(pair: SessionPair, scope: trio.CancelScope) -> None:
    pair.cut()
    await at_rest()


async def _leave_by_an_error(pair: SessionPair, scope: trio.CancelScope) -> None:
    async with two_ends(pair):
        raise _MadeUp("what the block raised")


async def _leave_by_a_cancellation(pair: SessionPair, scope: trio.CancelScope) -> None:
    async with two_ends(pair):
        scope.cancel()
        await trio.sleep_forever()


_LEAVES: tuple[Leave, ...] = (
    _leave_in_order,
    _leave_with_open_channels,
    _leave_with_unread_messages,
    _leave_after_a_loss,
    _leave_by_an_error,
    _leave_by_a_cancellation,
)


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


# Helpers


class _MadeUp(Exception):
    pass


class two_ends:
    """Opens a channel in `pair.one` and yields it together with its other end in `pair.other`."""

    def __init__(self, pair: SessionPair) -> None:
        self._pair = pair
        self._opening = pair.one.open()

    async def __aenter__(self) -> tuple[Channel, Channel]:
        here = await self._opening.__aenter__()
        # Some protocols announce a channel only with its first message.
        await here.send(b"first")
        async for there in self._pair.other.incoming():
            require(await there.receive() == b"first", "the first message came out different")
            return here, there
        raise AssertionError("incoming ended before the channel came")

    async def __aexit__(self, *details: object) -> None:
        await self._opening.__aexit__(None, None, None)


async def echo_each(session: Session) -> None:
    """Send every message on every channel that the peer opens back to it, until the session ends."""

    async def echo(channel: Channel) -> None:
        with suppress(trio.BrokenResourceError):
            async for message in channel:
                await channel.send(message)
            await channel.aclose()

    async with trio.open_nursery() as nursery:
        async for channel in session.incoming():
            nursery.start_soon(echo, channel)


async def talk(session: Session, message: bytes) -> None:
    """Open a channel and check that five messages come back unchanged."""
    async with session.open() as channel:
        for _ in range(5):
            await channel.send(message)
            require(await channel.receive() == message, "an echo came back different")


async def send_on(channel: Channel, message: bytes) -> None:
    """Send the same message repeatedly, until an error or a cancellation."""
    while True:
        await channel.send(message)


async def receive_on(channel: Channel) -> None:
    """Receive messages until the end of the channel, which raises, or a cancellation."""
    while True:
        await channel.receive()


async def use_new(session: Session) -> None:
    """Open a channel, send a message and receive one."""
    async with session.open() as channel:
        await channel.send(b"x")
        await channel.receive()


async def at_rest() -> None:
    """Wait until no task has run for `QUIET` seconds."""
    await trio.testing.wait_all_tasks_blocked(QUIET)
