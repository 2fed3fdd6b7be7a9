"""Who waits for a place, of which there are only so many? First come, first served, and nobody is woken in vain."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count, takewhile
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class SlotQueue:
    """A line of tasks for places that somebody else counts.

    `free` gives how many there are now. When there will be none any more it gives more than stand in line, so that
    everybody comes out and sees for himself.
    """

    __slots__ = ("_called", "_free", "_numbers", "_waiting")

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._waiting: OrderedDict[trio.lowlevel.Task, int] = OrderedDict()
        self._numbers = count()  # in the order in which they came
        self._called = 0  # those who were woken for a place and have not had their turn yet

    async def wait_for_slot(self) -> None:
        """Wait for a place that nobody before us wants; take it before the next checkpoint, then `wake_waiters`.

        Checks for cancellation and yields only if it has to wait.
        """
        if self._free() > self._called + len(self._waiting):
            return
        number = next(self._numbers)
        self._waiting[trio.lowlevel.current_task()] = number
        while True:
            await self._sleep()
            self._called -= 1
            if self._free() > 0:
                return
            self._return(number)  # somebody who does not stand in line was quicker

    def wake_waiters(self) -> None:
        """There may be more places than there were, or one was taken or given up: wake as many as can go."""
        if not self._waiting:
            return
        for _ in range(min(len(self._waiting), self._free() - self._called)):
            task, _number = self._waiting.popitem(last=False)
            self._called += 1
            trio.lowlevel.reschedule(task)

    async def _sleep(self) -> None:
        task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._waiting[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _return(self, number: int) -> None:
        """We were called in vain: go back to where we stood, behind those who came before us and were, too."""
        task = trio.lowlevel.current_task()
        earlier = list(takewhile(lambda other: self._waiting[other] < number, self._waiting))
        self._waiting[task] = number
        for each in (task, *reversed(earlier)):
            self._waiting.move_to_end(each, last=False)
