"""When must I be called? One moment for each timer that a protocol has."""

from __future__ import annotations

from enum import Enum
from typing import Final, Generic, TypeVar

TimerT = TypeVar("TimerT", bound=Enum)

FURTHEST: Final = 2.0**53  # s, beyond any clock; from here on a float does not even count whole seconds


class Deadlines(Generic[TimerT]):
    """Running timers and their moments, on the clock that `now` comes from.

    A moment may be worked out from what a peer sent: whatever it is, infinite and absurd numbers included, it
    is brought within ±`FURTHEST`. Costs grow with the members of the enum only.
    """

    __slots__ = ("_moments", "next")

    def __init__(self) -> None:
        self._moments: dict[TimerT, float] = {}
        self.next: float | None = None
        """The earliest moment of all; a plain attribute, as it is asked for after each read."""

    def __contains__(self, timer: TimerT) -> bool:
        """Is it running?"""
        return timer in self._moments

    def set(self, timer: TimerT, when: float | int) -> None:
        """Start the timer, or move it."""
        # `int` is named because compiled code refuses one that does not fit where only a float is announced.
        # The order of the arguments decides about NaN, which compares as false: it becomes FURTHEST.
        self._moments[timer] = float(max(-FURTHEST, min(FURTHEST, when)))
        self._find_next()

    def stop(self, timer: TimerT) -> None:
        """Fine also if it is not running."""
        if self._moments.pop(timer, None) is not None:
            self._find_next()

    def expired(self, now: float) -> list[TimerT]:
        """The timers that are due, earliest first; they are stopped."""
        due = [timer for timer, moment in self._moments.items() if moment <= now]
        due.sort(key=self._moments.__getitem__)
        for timer in due:
            del self._moments[timer]
        self._find_next()
        return due

    def _find_next(self) -> None:
        self.next = min(self._moments.values()) if self._moments else None
