"""The block that opens a channel, the backlog of what the peer opened, and the queue for slots."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import trio
import trio.testing

from muxkit import LinkLost
from muxkit.runtime import Backlog, Opening, SlotQueue, StartPace
from muxkit.runtime.halves.opening import YIELD_ITEMS

from ._halves import at_rest, lost


class Door:
    def __init__(self) -> None:
        self.log: list[str] = []

    async def open(self) -> Door:
        await trio.lowlevel.checkpoint()
        self.log.append("opened")
        return self

    async def fail(self) -> Door:
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self.log.append("closed")
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.log.append("aborted")


async def test_it_opens_when_it_is_entered_and_closes_when_it_is_left() -> None:
    door = Door()
    opening = Opening(door.open)
    assert door.log == []
    async with opening as opened:
        assert opened is door
        assert door.log == ["opened"]
    assert door.log == ["opened", "closed"]


async def test_it_aborts_when_it_is_left_by_an_error() -> None:
    door = Door()
    with pytest.raises(KeyError):
        async with Opening(door.open):
            raise KeyError
    assert door.log == ["opened", "aborted"]


async def test_it_opens_once() -> None:
    opening = Opening(Door().open)
    async with opening:
        pass
    with pytest.raises(RuntimeError, match="opened before"):
        async with opening:
            raise AssertionError


async def test_what_was_not_opened_is_not_closed() -> None:
    door = Door()
    opening = Opening(door.fail)
    with pytest.raises(trio.ClosedResourceError):
        async with opening:
            raise AssertionError
    assert door.log == []
    await opening.__aexit__(None, None, None)
    assert door.log == []


def backlog() -> tuple[Backlog[int], list[int]]:
    taken: list[int] = []
    return Backlog(taken.append), taken


async def test_items_come_in_order_and_are_reported_when_taken() -> None:
    items, taken = backlog()
    items.put(1)
    items.put(2)
    assert len(items) == 2
    assert await anext(items) == 1
    assert taken == [1]
    items.ended()
    assert [item async for item in items] == [2]


async def test_items_are_given_after_the_pause_and_at_once_when_no_more_will_come(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pace = StartPace(1 / 5, 1)
    for _ in range(2):
        pace.broken_off(0.0)  # then the first may start after 5 s, and the second 5 s later
    items: Backlog[int] = Backlog(lambda item: None, pace)
    for item in (1, 2, 3):
        items.put(item)
    assert await anext(items) == 1
    assert trio.current_time() == 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_after, items, 2)
        assert [item async for item in items] == [2, 3]
    assert trio.current_time() == 7


async def end_after(items: Backlog[int], seconds: float) -> None:
    await trio.sleep(seconds)
    items.ended()


async def test_iteration_ends_behind_the_last_item() -> None:
    items, _ = backlog()
    items.put(1)
    items.ended()
    assert [item async for item in items] == [1]
    assert [item async for item in items] == []


async def test_an_end_with_an_error_raises_it_behind_the_last_item() -> None:
    items, _ = backlog()
    items.put(1)
    items.ended(lost)
    assert await anext(items) == 1
    for _ in range(2):
        with pytest.raises(LinkLost):
            await anext(items)


async def test_the_first_end_counts() -> None:
    items, _ = backlog()
    items.ended()
    items.ended(lost)
    assert [item async for item in items] == []


@pytest.mark.seeds(20, soak=500)
async def test_several_iterators_share_everything_also_when_some_are_cancelled(seed: int) -> None:
    items, _ = backlog()
    got: list[int] = []
    scopes: list[trio.CancelScope] = []

    async def iterate() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            async for item in items:
                got.append(item)
                if item % 3 == seed % 3:
                    await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(iterate)
        await at_rest()
        for item in range(100):
            items.put(item)
            if item % 10 == 0 and item < 70:
                scopes[item // 10].cancel()
            if item % 7 == 0:
                await trio.lowlevel.checkpoint()
            if item % 50 == 0:
                await at_rest()
        items.ended()
    assert sorted(got) == list(range(100))


async def test_the_end_wakes_every_iterator() -> None:
    items, _ = backlog()
    over = 0

    async def iterate() -> None:
        nonlocal over
        async for _ in items:
            pass
        over += 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(iterate)
        await at_rest()
        items.ended()
    assert over == 5


@pytest.mark.requirement("R-34")
async def test_taking_checks_for_cancellation_each_time_and_takes_nothing_then() -> None:
    items, _ = backlog()
    items.put(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(items)
    assert scope.cancelled_caught
    assert await anext(items) == 1


@pytest.mark.requirement("R-34")
async def test_taking_yields_before_every_16th_item() -> None:
    items, _ = backlog()
    for item in range(3 * YIELD_ITEMS):
        items.put(item)
    steps, counts = Steps(), []
    trio.lowlevel.add_instrument(steps)
    for _ in range(3 * YIELD_ITEMS):
        await anext(items)
        counts.append(steps.of[trio.lowlevel.current_task().name])
    trio.lowlevel.remove_instrument(steps)
    assert counts == [0] * YIELD_ITEMS + [1] * YIELD_ITEMS + [2] * YIELD_ITEMS


async def test_taking_yields_with_each_item_while_the_peer_breaks_off_what_it_opens() -> None:
    pace = StartPace(0.001, 20)
    pace.broken_off(trio.current_time())
    items: Backlog[int] = Backlog(lambda item: None, pace)
    for item in range(4):
        items.put(item)
    for _ in range(4):
        with trio.testing.assert_checkpoints():
            await anext(items)


@pytest.mark.requirement("R-34")
async def test_the_end_is_a_checkpoint() -> None:
    items, _ = backlog()
    items.ended()
    with trio.testing.assert_checkpoints(), pytest.raises(StopAsyncIteration):
        await anext(items)


class Yard:
    """So many places, and who took them in which order."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.took: list[int] = []
        self.line = SlotQueue(lambda: self.free)

    async def take(self, number: int) -> None:
        await self.line.wait_for_slot()
        self.free -= 1
        self.took.append(number)
        self.line.wake_waiters()

    def give_back(self, places: int = 1) -> None:
        self.free += places
        self.line.wake_waiters()


class Steps(trio.abc.Instrument):
    """How often was each task stepped?"""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.of[task.name] += 1


async def start(nursery: trio.Nursery, yard: Yard, numbers: range) -> None:
    """One after the other, since Trio starts those of one turn in any order."""
    for number in numbers:
        nursery.start_soon(yard.take, number, name=f"taker {number}")
        await at_rest()


async def test_who_finds_a_place_does_not_wait() -> None:
    yard = Yard(2)
    with trio.CancelScope() as scope:
        scope.cancel()
        await yard.take(1)
        await yard.take(2)
    assert yard.took == [1, 2]


async def test_places_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    yard = Yard(2)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(20))
        for places in (1, 5, 1, 1, 10):
            yard.give_back(places)
            await at_rest()
    assert sorted(yard.took[:3]) + sorted(yard.took[3:8]) == list(range(8))
    assert yard.took[8:10] == [8, 9]
    assert sorted(yard.took[10:]) == list(range(10, 20))


@pytest.mark.requirement("R-71")
async def test_nobody_is_woken_who_finds_no_place() -> None:
    """Was: Whenever a channel ended, all who waited to open one were woken, and which of them got its place was a
    matter of chance.
    """
    yard, steps = Yard(1), Steps()
    trio.lowlevel.add_instrument(steps)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(50))
        for _ in range(49):
            yard.give_back()
            yard.line.wake_waiters()
            await at_rest()
    trio.lowlevel.remove_instrument(steps)
    assert yard.took == list(range(50))
    assert [steps.of[f"taker {number}"] for number in range(50)] == [1] + [2] * 49  # to begin with, and when called


async def test_a_newcomer_stands_behind_those_who_were_called_already() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(2))
        yard.give_back(2)
        assert yard.took == []
        with trio.CancelScope() as scope:
            scope.cancel()
            await yard.take(2)
        assert scope.cancelled_caught
        await at_rest()
        assert sorted(yard.took) == [0, 1]


@pytest.mark.requirement("R-31")
async def test_who_gives_up_leaves_the_line_to_the_others() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def give_up() -> None:
            with scope:
                await yard.take(-1)

        nursery.start_soon(give_up)
        await at_rest()
        await start(nursery, yard, range(2))
        scope.cancel()
        await at_rest()
        yard.give_back(2)
    assert sorted(yard.took) == [0, 1]


async def test_who_was_called_and_does_not_take_his_place_passes_it_on() -> None:
    yard = Yard(0)

    async def think_better_of_it() -> None:
        await yard.line.wait_for_slot()
        yard.line.wake_waiters()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(think_better_of_it)
        await at_rest()
        await start(nursery, yard, range(1))
        yard.give_back()
    assert yard.took == [0]


async def test_a_place_that_somebody_else_took_meanwhile_is_waited_for_again() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(2))
        yard.give_back(2)
        yard.free -= 2
        await at_rest()
        assert yard.took == []
        yard.give_back(2)
    assert sorted(yard.took) == [0, 1]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("called", [1, 2, 3])
async def test_who_was_called_for_a_place_that_is_gone_keeps_his_own_in_the_line(called: int) -> None:
    """Was: Of those who waited to open a channel and were called for places that somebody else had taken, two came back
    in each other's place.
    """
    for _ in range(10):  # Trio lets those who were called run in any order
        yard = Yard(0)
        async with trio.open_nursery() as nursery:
            await start(nursery, yard, range(5))
            yard.give_back(called)
            yard.free -= called
            await at_rest()
            for _ in range(5):
                yard.give_back()
                await at_rest()
        assert yard.took == [0, 1, 2, 3, 4]


async def test_a_newcomer_does_not_wait_behind_others_when_there_will_be_no_more_places() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(3))
        yard.free = sys.maxsize  # and no other task was woken yet
        await yard.take(9)
        assert yard.took == [9]


async def test_everybody_comes_out_when_there_will_be_no_more_places() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(100))
        yard.give_back(sys.maxsize)
        await at_rest()
        assert sorted(yard.took) == list(range(100))
