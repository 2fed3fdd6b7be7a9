"""Does everybody get a place in the order in which he came, and is nobody woken who finds none?"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import trio
import trio.testing

from muxkit.runtime import SlotQueue

from ._halves import at_rest


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


async def test_nobody_is_woken_who_finds_no_place() -> None:
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


@pytest.mark.parametrize("called", [1, 2, 3])
async def test_who_was_called_for_a_place_that_is_gone_keeps_his_own_in_the_line(called: int) -> None:
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
        yard.free = sys.maxsize  # and nobody has called the others yet
        await yard.take(9)
        assert yard.took == [9]


async def test_everybody_comes_out_when_there_will_be_no_more_places() -> None:
    yard = Yard(0)
    async with trio.open_nursery() as nursery:
        await start(nursery, yard, range(100))
        yard.give_back(sys.maxsize)
        await at_rest()
        assert sorted(yard.took) == list(range(100))
