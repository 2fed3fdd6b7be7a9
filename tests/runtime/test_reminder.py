"""A reminder rings on the clock of the pump that it is attached to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.runtime.pumps.clock import Reminder
from muxkit_adapters import memory

from ._pumps import Lines, Running

if TYPE_CHECKING:
    from trio.testing import MockClock


class Diary(Reminder):
    """Writes down when it rings, and asks to be rung again after each of `pauses`."""

    def __init__(self, *pauses: float) -> None:
        super().__init__()
        self.pauses = [*pauses]
        self.rung_at: list[float] = []

    def ring(self, now: float) -> None:
        self.rung_at.append(trio.current_time())
        if self.pauses:
            self.set(now + self.pauses.pop(0))


class Reminded(Running):
    """A pump whose owner has a reminder."""

    def __init__(self, reminder: Diary) -> None:
        self.reminder = reminder
        super().__init__(memory.pair()[0], Lines())


async def test_a_pump_rings_the_reminder_of_its_owner_at_its_time(autojump_clock: MockClock) -> None:
    diary = Diary()
    run = Reminded(diary)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.pump.run)
        await trio.sleep(1)  # the clock sleeps without a deadline by now
        diary.set(trio.current_time() + 5)
        begun = trio.current_time()
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert diary.rung_at == [pytest.approx(begun + 5)]


async def test_a_reminder_may_ask_for_its_next_time_while_it_rings(autojump_clock: MockClock) -> None:
    diary = Diary(2, 3)
    run = Reminded(diary)
    async with trio.open_nursery() as nursery:
        diary.set(1)
        nursery.start_soon(run.pump.run)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert diary.rung_at == pytest.approx([1, 3, 6])


async def test_a_nearer_time_takes_the_place_of_a_later_one_and_not_the_other_way_round(
    autojump_clock: MockClock,
) -> None:
    diary = Diary()
    run = Reminded(diary)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.pump.run)
        for due in (50, 20, 30):
            diary.set(due)
            await trio.sleep(1)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert diary.rung_at == [pytest.approx(20)]


async def test_a_reminder_rings_on_the_pump_that_it_was_attached_to_last(autojump_clock: MockClock) -> None:
    """A session that is resumed has a new pump for each connection."""
    diary = Diary()
    Reminded(diary)  # a pump that isn't running any more
    run = Reminded(diary)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.pump.run)
        await trio.sleep(1)
        diary.set(5)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert diary.rung_at == [pytest.approx(5)]


def test_a_reminder_without_a_clock_keeps_its_time() -> None:
    diary = Diary()
    diary.set(7)
    diary.ring_if_due(6)
    assert (diary.due, diary.rung_at) == (7, [])
