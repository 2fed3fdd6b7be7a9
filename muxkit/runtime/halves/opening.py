"""Opening of channels: slots under a limit, and the channels that the peer opened."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from itertools import count, takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.runtime.halves.turn import ErrorMaker


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


ItemT = TypeVar("ItemT")


class Backlog(AsyncIterator[ItemT], Generic[ItemT]):
    """An async iterator; `taken` is told of each item that the application gets.

    Iterating ends when the backlog has been ended and is empty, or raises what `ended` was given.
    """

    __slots__ = ("_error", "_is_over", "_items", "_lot", "_taken")

    def __init__(self, taken: Callable[[ItemT], None]) -> None:
        self._taken = taken
        self._items: deque[ItemT] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._is_over = False
        self._error: ErrorMaker | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        self._lot.unpark()

    def ended(self, error: ErrorMaker | None = None) -> None:
        """No more will come; `error` says why if that is not as it should be."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._lot.unpark_all()

    async def __anext__(self) -> ItemT:
        if self._items or self._is_over:
            await trio.lowlevel.checkpoint()
        while not self._items:
            if self._error is not None:
                raise self._error()
            if self._is_over:
                raise StopAsyncIteration
            await self._lot.park()
        item = self._items.popleft()
        self._taken(item)
        return item
