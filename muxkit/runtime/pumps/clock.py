"""The clock of a pump, and the reminders that it rings in addition to the deadlines of its engine.

An engine knows nothing of time but the deadline that it wants to be called at, and each pump has one clock that wakes
for it. Rules that aren't the engine's, because they concern tasks, share that clock: they are a `Reminder`, which the
owner of the pump names (`PumpOwner.reminder`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Clock(ABC):
    """Wakes at the earliest of several deadlines. Each pump is one."""

    @abstractmethod
    def rearm(self) -> None:
        """Look at all deadlines again, because one of them may have come nearer."""


class Reminder(ABC):
    """Something that a clock has to call at a certain time. A subclass says in `ring` what happens then."""

    __slots__ = ("_clock", "due")

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self.due: float = math.inf
        """When the clock has to call `ring`."""

    def attach(self, clock: Clock) -> None:
        """Let this clock ring from now on, in place of another one: a resumed session has a new pump."""
        self._clock = clock

    def set(self, due: float) -> None:
        """Ring at this time, unless an earlier time is set already."""
        if due < self.due:
            self.due = due
            if self._clock is not None:
                self._clock.rearm()

    def ring_if_due(self, now: float) -> None:
        """Ring if the time has come. The clock calls this whenever it wakes."""
        if now >= self.due:
            self.due = math.inf
            self.ring(now)

    @abstractmethod
    def ring(self, now: float) -> None:
        """Do what was to be done. This may `set` the next time."""
