"""The clock of a pump, and reminders, which use the same clock for other deadlines.

An engine can't sleep. It only reports the deadline at which it must be called, and the clock of its pump sleeps until
then. The runtime has deadlines as well, for example for tasks that wait too long. Such a deadline is a `Reminder`. The
owner of the pump sets `PumpOwner.reminder`, so that the connection doesn't need another task for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Clock(ABC):
    """Wakes up at the earliest of several deadlines. Each pump is a clock."""

    @abstractmethod
    def wake_at(self, due: float) -> None:
        """Wake up at this time, or earlier."""


class Reminder(ABC):
    """A deadline of the runtime. The clock calls `ring`, which subclasses override, when the reminder is due."""

    __slots__ = ("_clock", "due")

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self.due: float = math.inf
        """The time at which the clock must call `ring`."""

    def attach(self, clock: Clock) -> None:
        """Use this clock from now on. A session that resumes on a new connection has a new pump, and so a new clock."""
        self._clock = clock

    def set(self, due: float) -> None:
        """Call `ring` at this time, unless an earlier time is already set."""
        if due < self.due:
            self.due = due
            if self._clock is not None:
                self._clock.wake_at(due)

    def ring_if_due(self, now: float) -> None:
        """Call `ring` if the reminder is due. The clock calls this whenever it wakes up."""
        if now >= self.due:
            self.due = math.inf
            self.ring(now)

    @abstractmethod
    def ring(self, now: float) -> None:
        """Handle the deadline. This method may call `set` for the next deadline."""
