"""Sessions share the processor by time: turns end when theirs is used up, and one is given in each pass of the loop.

The clock is a number that the tests move, so no verdict depends on the machine.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.runtime import DatagramPump, PumpOwner, StreamData
from muxkit.runtime.pumps.turns import LONG_PASS, NEW, TURN_LEAST, TURN_MOST, Turns, share_turns
from muxkit_adapters import memory

from ._pumps import Letters, running_multistream
from ._pumps import running as running_stream
from .test_packet_pump import Bursty, Parcels

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

STEP = 128  # frames that a stream pump parses before it asks the clock


class Clock:
    """Time passes only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Passes:
    """Counts what happens in each pass of Trio's loop."""

    def __init__(self) -> None:
        self.number = 0
        self.work: Counter[int] = Counter()

    def did(self, amount: int = 1) -> None:
        self.work[self.number] += amount

    async def run(self) -> None:
        while True:
            self.number += 1
            await trio.lowlevel.checkpoint()

    def most(self, *, together: int) -> int:
        """The most work in so many passes; Trio shuffles a pass, so two turns may fall between two counts."""
        return max(sum(self.work[number + each] for each in range(together)) for number in range(self.number + 1))


@asynccontextmanager
async def passes(made: Passes | None = None) -> AsyncIterator[Passes]:
    """Count them; from here on tasks are never all blocked."""
    counted = made or Passes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted.run)
        yield counted
        nursery.cancel_scope.cancel()


async def until(counted: Passes, amount: int) -> None:
    """Wait until so much was done."""
    while counted.work.total() < amount:
        await trio.lowlevel.checkpoint()


# --- the queue


@pytest.mark.requirement("R-27")
async def test_one_turn_is_given_in_each_pass_and_all_have_the_same_number_of_them() -> None:
    turns = Turns(Clock())
    given: Counter[int] = Counter()

    async def work(who: int) -> None:
        while True:
            await turns.wait()
            given[who] += 1
            counted.did()

    async with passes() as counted, trio.open_nursery() as nursery:
        for who in range(10):
            nursery.start_soon(work, who)
        await until(counted, 100)
        nursery.cancel_scope.cancel()
    assert counted.most(together=1) <= 2
    assert counted.work.total() <= counted.number + 1
    assert max(given.values()) - min(given.values()) <= 1


async def test_who_is_cancelled_in_the_queue_keeps_nobody_waiting() -> None:
    turns = Turns(Clock())
    served: list[int] = []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def work(who: int) -> None:
        with scopes[who]:
            await turns.wait()
            served.append(who)

    async with trio.open_nursery() as nursery:
        for who in range(4):
            nursery.start_soon(work, who)
        scopes[0].cancel()
        scopes[2].cancel()
    assert sorted(served) == [1, 3]
    with trio.move_on_after(0) as late:  # already over: the turn is given back
        await turns.wait()
    assert late.cancelled_caught
    await turns.wait()
    assert turns.given == 3


@pytest.mark.requirement("R-27")
async def test_while_the_tasks_that_turns_wake_take_long_turns_are_shorter_and_further_apart() -> None:
    clock = Clock()
    turns = Turns(clock)

    class SlowHandlers(trio.abc.Instrument):
        """Tasks that take long in each pass."""

        def after_io_wait(self, timeout: float) -> None:
            clock.seconds += 2 * LONG_PASS

    slow = SlowHandlers()
    trio.lowlevel.add_instrument(slow)
    before = clock.seconds
    for _ in range(10):
        await turns.wait()
    assert turns.allowance == TURN_LEAST
    assert clock.seconds - before > 10 * 3 * LONG_PASS
    trio.lowlevel.remove_instrument(slow)
    for _ in range(10):
        await turns.wait()
    assert turns.allowance == TURN_MOST


@pytest.mark.requirement("R-27")
async def test_while_a_connection_is_new_turns_are_short() -> None:
    clock = Clock()
    turns = Turns(clock)
    await turns.wait()
    assert turns.allowance == TURN_MOST
    turns.connection_came()
    for _ in range(10):
        await turns.wait()
        assert turns.allowance == TURN_LEAST
    clock.seconds += NEW
    for _ in range(10):
        await turns.wait()
    assert turns.allowance == TURN_MOST


# --- the pumps


class Costly(Letters):
    """An engine each of whose frames takes a while."""

    def __init__(self, clock: Clock, cost: float, counted: Passes) -> None:
        super().__init__()
        self._clock = clock
        self._cost = cost
        self._counted = counted

    def receive_bytes(self, data: bytes, now: float) -> None:
        super().receive_bytes(data, now)
        self._clock.seconds += self._cost * self.fed[-1]
        self._counted.did(self.fed[-1])


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_a_turn_ends_when_its_time_is_used_up_whatever_the_number_of_its_frames() -> None:
    """Was: A turn was bounded by frames and bytes, not by time: floods of frames that take long kept the other sessions
    of a server waiting for a second.
    """
    clock = Clock()
    share_turns(Turns(clock))
    here, there = memory.pair(capacity=1_000_000)
    cost = TURN_MOST / 300
    counted = Passes()
    async with running_stream(here, Costly(clock, cost, counted)) as run, passes(counted):
        await there.send_all(bytes(30_000))
        while len(run.got) < 30_000:
            await trio.lowlevel.checkpoint()
    assert counted.most(together=1) <= 2 * (300 + STEP)
    assert counted.number >= 30_000 // (300 + STEP)


@pytest.mark.requirement("R-27")
async def test_what_is_done_about_events_counts_as_well() -> None:
    clock = Clock()
    share_turns(Turns(clock))
    here, there = memory.pair(capacity=1_000_000)
    async with running_stream(here, Letters()) as run, passes() as counted:

        def handle(event: bytes) -> None:
            clock.seconds += TURN_MOST / 300
            counted.did()

        run.on_event = handle
        await there.send_all(bytes(30_000))
        await until(counted, 30_000)
    assert counted.most(together=1) <= 2 * (300 + STEP)


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_many_floods_add_no_more_to_a_pass_than_one() -> None:
    """Was: Each of many flooding sessions had a turn in each pass of the loop, so that the others waited for all of
    them.
    """
    clock = Clock()
    share_turns(Turns(clock))
    cost = TURN_MOST / 100
    async with AsyncExitStack() as stack:
        counted, ends = Passes(), []
        engines = [Costly(clock, cost, counted) for _ in range(10)]
        for engine in engines:
            here, there = memory.pair(capacity=1_000_000)
            await stack.enter_async_context(running_stream(here, engine))
            ends.append(there)
        await stack.enter_async_context(passes(counted))
        for end in ends:
            await end.send_all(bytes(10_000))
        while not all(engine.fed for engine in engines):  # no session queues for its first turn
            await trio.lowlevel.checkpoint()
        first = counted.number
        await until(counted, 100_000)
    later = [amount for number, amount in counted.work.items() if number > first + 1]
    assert max(later) <= 2 * STEP


class Collecting(PumpOwner[bytes]):
    """An owner that keeps the events of its pump."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def handle_events(self, events: Sequence[bytes]) -> None:
        self.got.extend(events)

    def queued_bytes(self) -> int:
        return 0


@pytest.mark.requirement("R-27")
async def test_a_packet_pump_stops_taking_packets_when_its_time_is_used_up() -> None:
    clock = Clock()
    share_turns(Turns(clock))

    class CostlyParcels(Parcels):
        def receive_datagram(self, data: bytes, now: float) -> None:
            super().receive_datagram(data, now)
            clock.seconds += TURN_MOST / 10
            counted.did()

    async with passes() as counted, trio.open_nursery() as nursery:
        link = Bursty()
        engine = CostlyParcels()
        owner = Collecting()
        pump: DatagramPump[bytes] = DatagramPump(link, engine, owner)
        nursery.start_soon(pump.run)
        for _ in range(500):
            link.arrivals.send_nowait(b"x")
        await until(counted, 500)
        assert len(owner.got) == 500
        nursery.cancel_scope.cancel()
    assert counted.most(together=1) <= 2 * (1 + 16)


@pytest.mark.requirement("R-27")
async def test_a_multistream_pump_stops_feeding_when_its_time_is_used_up() -> None:
    clock = Clock()
    share_turns(Turns(clock))
    async with running_multistream() as run, passes() as counted:

        def costs() -> None:
            clock.seconds += TURN_MOST / 2
            counted.did()

        run.engine.on_receive = costs
        run.link.to_receive.send_nowait([StreamData(3, b"x", False)] * 100)
        await until(counted, 100)
    assert counted.most(together=1) <= 2 * 3
