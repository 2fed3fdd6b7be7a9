"""The clock of an engine: its deadlines, keepalive by asking a silent peer, and the least speed of what was begun."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, TypeVar

from muxkit._errors import RemoteProtocolError

ItemT = TypeVar("ItemT")
TimerT = TypeVar("TimerT", bound=Enum)

FURTHEST: Final = 2.0**53  # s, beyond any clock; from here on a float does not even count whole seconds


class Deadlines(Generic[TimerT]):
    """The running timers of an engine and their moments, on the clock that `now` comes from.

    A moment may be computed from what a peer sent, so infinite and absurd numbers are brought within ±`FURTHEST`.
    Costs grow with the members of the enum only.
    """

    __slots__ = ("_moments", "next")

    def __init__(self) -> None:
        self._moments: dict[TimerT, float] = {}
        self.next: float | None = None
        """The earliest moment of all, or None; a plain attribute, as it is asked for after each read."""

    def __contains__(self, timer: TimerT) -> bool:
        """Return True if the timer runs."""
        return timer in self._moments

    def set(self, timer: TimerT, when: float | int) -> None:
        """Start the timer, or move it."""
        # `int` is named because compiled code refuses one that does not fit where only a float is announced.
        # The order of the arguments decides about NaN, which compares as false: it becomes FURTHEST.
        self._moments[timer] = float(max(-FURTHEST, min(FURTHEST, when)))
        self._find_next()

    def stop(self, timer: TimerT) -> None:
        """Stop the timer; harmless if it does not run."""
        if self._moments.pop(timer, None) is not None:
            self._find_next()

    def expired(self, now: float) -> list[TimerT]:
        """Stop and return the timers that are due, earliest first."""
        due = [timer for timer, moment in self._moments.items() if moment <= now]
        due.sort(key=self._moments.__getitem__)
        for timer in due:
            del self._moments[timer]
        self._find_next()
        return due

    def _find_next(self) -> None:
        self.next = min(self._moments.values()) if self._moments else None


class Keepalive(Generic[TimerT]):
    """Asks a peer that was silent for `interval` seconds, and gives it up after `timeout` more; None never asks.

    An engine calls `start` when the connection begins and `heard` when something came. When its `ask` timer expires it
    sends a ping if `is_due`, then calls `asked`; when its `answer` timer expires the peer is gone.
    """

    __slots__ = ("_answer", "_ask", "_deadlines", "_is_asking", "heard_at", "interval", "timeout")

    def __init__(
        self, deadlines: Deadlines[TimerT], ask: TimerT, answer: TimerT, *, interval: float | None, timeout: float
    ) -> None:
        self._deadlines = deadlines
        self._ask = ask
        self._answer = answer
        self._is_asking = False  # the answer timer runs
        self.interval: float | None = interval
        self.timeout: float = timeout
        self.heard_at: float = 0.0

    def start(self, now: float) -> None:
        """Begin anew, with a peer that counts as heard."""
        self.heard_at = now
        self._is_asking = False
        self._wait_for_silence()

    def heard(self, now: float) -> None:
        """Something came."""
        self.heard_at = now
        if self._is_asking:
            self._is_asking = False
            self._deadlines.stop(self._answer)
            self._wait_for_silence()

    def is_due(self, now: float) -> bool:
        """Return True if the peer has been silent for the whole interval; if not, the timer is set again."""
        if self.interval is not None and now < self.heard_at + self.interval:
            self._wait_for_silence()
            return False
        return True

    def asked(self, now: float) -> None:
        """A ping was sent: wait for anything to come."""
        self._is_asking = True
        self._deadlines.set(self._answer, now + self.timeout)

    def postpone(self, now: float) -> None:
        """Nothing can be asked now: try again after another interval."""
        self._deadlines.set(self._ask, now + (self.interval or 0.0))

    def silence(self, now: float) -> float:
        """Return the seconds since something came."""
        return now - self.heard_at

    def _wait_for_silence(self) -> None:
        if self.interval is not None:
            self._deadlines.set(self._ask, self.heard_at + self.interval)


class StallWatch(Generic[TimerT]):
    """Measures in intervals of `seconds` whether a message that has begun goes on with at least `least` bytes.

    An engine calls `watch` while something is unfinished and `stop` when nothing is; when the timer expires it asks
    `shortfall`, and calls `watch` again if something still is unfinished. Both are told the bytes received so far, and
    how often credit was lent late: bytes that waited for credit do not count as slow.
    """

    __slots__ = ("_deadlines", "_late_loans", "_least", "_mark", "_seconds", "_timer", "is_running")

    def __init__(self, deadlines: Deadlines[TimerT], timer: TimerT, *, seconds: float, least: int) -> None:
        self._deadlines = deadlines
        self._timer = timer
        self._seconds = seconds
        self._least = least
        self.is_running: bool = False
        """True during an interval."""
        self._mark = 0  # bytes received when the interval began
        self._late_loans = 0  # the loans that had been waited for, then

    def watch(self, now: float, received: int, late_loans: int = 0) -> None:
        """Begin an interval, unless one has begun."""
        if not self.is_running:
            self.is_running = True
            self._mark, self._late_loans = received, late_loans
            self._deadlines.set(self._timer, now + self._seconds)

    def stop(self) -> None:
        """Nothing is unfinished."""
        if self.is_running:
            self.is_running = False
            self._deadlines.stop(self._timer)

    def shortfall(self, received: int, late_loans: int = 0) -> int | None:
        """End the interval, whose timer has expired; return the bytes that came if they were too few, else None.

        With 0 bytes the line may be dead, and the peer need not have broken a rule.
        """
        self.is_running = False
        came = received - self._mark
        return came if came < self._least and late_loans == self._late_loans else None

    def error(self, came: int, unfinished: str, offset: int | None = None) -> RemoteProtocolError:
        """Make the error of a peer that was too slow with what is `unfinished`: a message, a frame, a line."""
        return RemoteProtocolError(
            f"{came} bytes in {self._seconds} s while a {unfinished} is unfinished, {self._least} are asked",
            offset=offset,
            limit="stall",
        )


class DelayQueue(Generic[ItemT]):
    """Items that each become due after the same delay, so that the first to come is the first that is due.

    A timer for each item would have to be compared with all others. This costs one entry for each item.
    """

    __slots__ = ("_due", "delay")

    def __init__(self, delay: float) -> None:
        self.delay: float = delay
        self._due: OrderedDict[ItemT, float] = OrderedDict()

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over a copy of the items, oldest first."""
        return iter(tuple(self._due))

    def add(self, item: ItemT, now: float) -> None:
        """Let an item wait, unless it does already."""
        self._due.setdefault(item, now + self.delay)

    def discard(self, item: ItemT) -> None:
        """The item doesn't have to wait any more; harmless if it doesn't wait."""
        self._due.pop(item, None)

    @property
    def next(self) -> float | None:
        """When the first item is due; None if there is none."""
        return self._due[next(iter(self._due))] if self._due else None

    def pop_due(self, now: float) -> list[ItemT]:
        """Remove and return the items that are due."""
        due: list[ItemT] = []
        while self._due and self._due[item := next(iter(self._due))] <= now:
            del self._due[item]
            due.append(item)
        return due
