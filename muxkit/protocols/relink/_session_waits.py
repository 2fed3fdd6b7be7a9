"""Has it come so far? A number that only grows, and tasks that each wait for it to reach theirs."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

NONE = -1  # before the first


class Mark:
    """An advance costs what it wakes, however many wait for more."""

    __slots__ = ("_check", "_events", "_numbers", "value")

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check  # raises if the number will not grow any more
        self._numbers: list[int] = []  # a heap
        self._events: dict[int, trio.Event] = {}
        self.value = NONE

    async def reached(self, number: int) -> None:
        """Wait until it is at least `number`."""
        await trio.lowlevel.checkpoint()
        if self.value >= number:
            return
        self._check()
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = trio.Event()
            heapq.heappush(self._numbers, number)
        await event.wait()
        if self.value < number:
            self._check()

    def advance(self, number: int) -> None:
        if number > self.value:
            self.value = number
            while self._numbers and self._numbers[0] <= number:
                self._events.pop(heapq.heappop(self._numbers)).set()

    def wake_all(self) -> None:
        """It will not grow any more."""
        for event in self._events.values():
            event.set()
        self._events.clear()
        self._numbers.clear()
