"""What all pumps share."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Calls `on_due` with the time whenever `next_deadline` has come; None means that there is none."""

    __slots__ = ("_alarm", "_due", "_next_deadline", "_on_due")

    def __init__(self, next_deadline: Callable[[], float | None], on_due: Callable[[float], None]) -> None:
        self._next_deadline = next_deadline
        self._on_due = on_due
        self._due = math.inf
        self._alarm = trio.CancelScope()

    async def run(self) -> NoReturn:
        while True:
            deadline = self._next_deadline()
            self._due = math.inf if deadline is None else deadline
            self._alarm = trio.CancelScope(deadline=self._due)
            with self._alarm:
                await trio.sleep_forever()
            self._on_due(trio.current_time())

    def rearm(self) -> None:
        """The deadline may have come nearer while the clock sleeps; a later one it sees when it wakes."""
        deadline = self._next_deadline()
        if deadline is not None and deadline < self._due:
            self._alarm.deadline = self._due = deadline


BLOCK = 8 * 1024 * 1024  # bytes; larger than what one connection's windows hold at a time


@cache  # once is enough, and later the block would have to be cleared
def keep_freed_memory() -> None:
    """Let freed memory up to twice `BLOCK` stay with the process. Its pages are never touched, so this is quick."""
    bytes(BLOCK)
