"""Timers for engines: deadlines, keepalive pings, and a minimum transfer rate for incomplete messages.

None of these classes reads a clock. The caller passes the time as `now`, and the engine's pump calls the engine when
`Deadlines.next` has come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, TypeVar

from muxkit._errors import RemoteProtocolError

ItemT = TypeVar("ItemT")
TimerT = TypeVar("TimerT", bound=Enum)

FURTHEST: Final = 2.0**53  # seconds, later than any clock; beyond it, a float can't even represent whole seconds


class Deadlines(Generic[TimerT]):
    """The timers of an engine. Each member of the enum `TimerT` is a timer, which may be running.

    A deadline may be computed from a number that the peer has sent. So infinite and absurdly large values are replaced
    by ±`FURTHEST`.
    """

    __slots__ = ("_moments", "next")

    def __init__(self) -> None:
        self._moments: dict[TimerT, float] = {}
        self.next: float | None = None
        """The earliest deadline, or None. This is an attribute, because the pump reads it after each read."""

    def __contains__(self, timer: TimerT) -> bool:
        """Return True if the timer is running."""
        return timer in self._moments

    def set(self, timer: TimerT, when: float | int) -> None:
        """Start the timer, or change its deadline if it is running."""
        # The annotation contains `int`, because code compiled with mypyc doesn't accept large integers as `float`.
        # All comparisons with NaN are False. With this order of the arguments, NaN becomes FURTHEST.
        moment = float(max(-FURTHEST, min(FURTHEST, when)))
        previous = self._moments.get(timer)
        self._moments[timer] = moment
        if self.next is None or moment <= self.next:
            self.next = moment
        elif previous == self.next:
            self._find_next()

    def stop(self, timer: TimerT) -> None:
        """Stop the timer if it is running."""
        moment = self._moments.pop(timer, None)
        if moment is not None and moment == self.next:
            self._find_next()

    def expired(self, now: float) -> list[TimerT]:
        """Stop the timers that are due, and return them in the order of their deadlines."""
        due = [timer for timer, moment in self._moments.items() if moment <= now]
        due.sort(key=self._moments.__getitem__)
        for timer in due:
            del self._moments[timer]
        self._find_next()
        return due

    def _find_next(self) -> None:
        self.next = min(self._moments.values()) if self._moments else None


class Keepalive(Generic[TimerT]):
    """Detects a dead peer: pings after `interval` seconds of silence, and a timeout after another `timeout` seconds.

    The engine calls `start` when the connection begins, and `heard` when anything has arrived. When the timer `ask`
    expires and `is_due` returns True, the engine sends a ping and calls `asked`. When the timer `answer` expires, it
    ends the connection. If `interval` is None, no pings are sent.
    """

    __slots__ = ("_answer", "_ask", "_deadlines", "_is_asking", "heard_at", "interval", "timeout")

    def __init__(
        self, deadlines: Deadlines[TimerT], ask: TimerT, answer: TimerT, *, interval: float | None, timeout: float
    ) -> None:
        self._deadlines = deadlines
        self._ask = ask
        self._answer = answer
        self._is_asking = False  # True while the timer `answer` is running
        self.interval: float | None = interval
        self.timeout: float = timeout
        self.heard_at: float = 0.0

    def start(self, now: float) -> None:
        """Start the interval, as if something had just arrived."""
        self.heard_at = now
        self._is_asking = False
        self._wait_for_silence()

    def heard(self, now: float) -> None:
        """Record that something has arrived."""
        self.heard_at = now
        if self._is_asking:
            self._is_asking = False
            self._deadlines.stop(self._answer)
            self._wait_for_silence()

    def is_due(self, now: float) -> bool:
        """Return True if the peer has been silent for the whole interval. Otherwise, start the timer again."""
        if self.interval is not None and now < self.heard_at + self.interval:
            self._wait_for_silence()
            return False
        return True

    def asked(self, now: float) -> None:
        """Record that a ping was sent, and start the timer `answer`."""
        self._is_asking = True
        self._deadlines.set(self._answer, now + self.timeout)

    def postpone(self, now: float) -> None:
        """Try again after another interval, because no ping can be sent now."""
        self._deadlines.set(self._ask, now + (self.interval or 0.0))

    def silence(self, now: float) -> float:
        """Return how many seconds ago something last arrived."""
        return now - self.heard_at

    def _wait_for_silence(self) -> None:
        if self.interval is not None:
            self._deadlines.set(self._ask, self.heard_at + self.interval)


class StallWatch(Generic[TimerT]):
    """Checks that at least `least` bytes arrive every `seconds` while a message is incomplete.

    The engine calls `watch` while a message is incomplete, and `stop` when none is. When the timer expires, it calls
    `shortfall`, and then `watch` again if a message is still incomplete.

    Both get the number of bytes received so far, and `Reassembly.served`, which counts the loans of credit that had to
    wait. An interval in which such a loan was made isn't counted as too slow, because the peer had to wait for credit.
    """

    __slots__ = ("_deadlines", "_late_loans", "_least", "_mark", "_seconds", "_timer", "is_running")

    def __init__(self, deadlines: Deadlines[TimerT], timer: TimerT, *, seconds: float, least: int) -> None:
        self._deadlines = deadlines
        self._timer = timer
        self._seconds = seconds
        self._least = least
        self.is_running: bool = False
        """True during an interval."""
        self._mark = 0  # number of bytes received when the interval began
        self._late_loans = 0  # number of loans that had to wait when the interval began

    def watch(self, now: float, received: int, late_loans: int = 0) -> None:
        """Begin an interval, unless one is running."""
        if not self.is_running:
            self.is_running = True
            self._mark, self._late_loans = received, late_loans
            self._deadlines.set(self._timer, now + self._seconds)

    def stop(self) -> None:
        """End the interval, because no message is incomplete."""
        if self.is_running:
            self.is_running = False
            self._deadlines.stop(self._timer)

    def shortfall(self, received: int, late_loans: int = 0) -> int | None:
        """End the interval after its timer has expired.

        Returns:
            None if enough bytes arrived, otherwise their number. If it is 0, treat the connection as dead rather than
            the peer as misbehaving.
        """
        self.is_running = False
        came = received - self._mark
        return came if came < self._least and late_loans == self._late_loans else None

    def error(self, came: int, unfinished: str, offset: int | None = None) -> RemoteProtocolError:
        """Return the error for a peer that was too slow. `unfinished` names the incomplete thing, such as "frame"."""
        return RemoteProtocolError(
            f"too slow: {came} bytes in {self._seconds} s while a {unfinished} is unfinished, "
            f"expected at least {self._least}",
            offset=offset,
            limit="stall",
        )


class DelayQueue(Generic[ItemT]):
    """A queue of items that each become due after the same delay.

    The item that was added first is due first, so the queue needs no sorting and no timer for each item.
    """

    __slots__ = ("_due", "delay")

    def __init__(self, delay: float) -> None:
        self.delay: float = delay
        self._due: OrderedDict[ItemT, float] = OrderedDict()

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over a copy of the items, oldest first."""
        return iter(tuple(self._due))

    def add(self, item: ItemT, now: float) -> None:
        """Add an item, unless it is in the queue."""
        self._due.setdefault(item, now + self.delay)

    def discard(self, item: ItemT) -> None:
        """Remove an item if it is in the queue."""
        self._due.pop(item, None)

    @property
    def next(self) -> float | None:
        """The time when the first item is due, or None if there is none."""
        return self._due[next(iter(self._due))] if self._due else None

    def pop_due(self, now: float) -> list[ItemT]:
        """Remove and return the items that are due."""
        due: list[ItemT] = []
        while self._due and self._due[item := next(iter(self._due))] <= now:
            del self._due[item]
            due.append(item)
        return due
