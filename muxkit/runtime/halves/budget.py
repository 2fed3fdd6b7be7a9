"""The budget for queued bytes that all sending halves of a connection share, and what waits for it.

A sender may queue its message if the connection has little queued ahead of the transport. If not, its half stands in
line here, and is woken when bytes were written or dropped. Between the wake-up and the sender's next step its bytes are
reserved, or a newcomer could take them.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio

from muxkit._observer import Facts
from muxkit.core import Outbox, Queued
from muxkit.runtime._log_pace import may_log
from muxkit.runtime._thread import HomeThread, home_thread
from muxkit.runtime.pumps.clock import Reminder

ErrorMaker = Callable[[], Exception]
"""Makes an error. Each task that raises needs one of its own, since raising changes the traceback."""

SMALL_RESERVATION = 4 * 1024  # bytes reserved for a woken sender of small messages
LARGEST_SHARE = 8  # at most 1/8 of the outbox is reserved for one sender, unless its first message is larger
MAX_BYPASSES = 16  # times that smaller messages may go before one that is too large for what is free
STUCK_AFTER: Final = 10.0  # s without a turn for the same sender, while messages wait to be received beside it
LEAST_LOOK: Final = 1.0  # s between two looks for such senders, each of which goes through all that wait

_log = logging.getLogger("muxkit")


class Half(Protocol):
    """What the budget asks of a sending half whose senders wait."""

    was_stuck: bool
    """True once it was logged that no sender here can go on."""

    @property
    def first_size(self) -> int:
        """The size of the first sender's message while that sender waits, otherwise 0."""

    @property
    def first_waiter(self) -> Waiter | None:
        """The first sender that waits; None if no task does."""

    def has_room(self, size: int) -> bool:
        """Return True if the window of the half has room for so many bytes."""

    def wake_first(self, reserved: int) -> None:
        """Wake the first sender, for which so many bytes are free."""

    def unread_beside(self) -> int:
        """Return how many messages wait to be received on the same channel."""


class OutboxBudget:
    """How many bytes the halves of one connection may queue ahead of the transport.

    Halves whose window is open but which find too little free wait in order. A newcomer whose message fits may go
    before them, so that a short message need not wait behind a bulk transfer, but only `MAX_BYPASSES` times in a row.
    Without arguments everything is admitted, for an engine that bounds what it queues by itself.
    """

    __slots__ = (
        "_bypasses",
        "_largest_share",
        "_limit",
        "_line",
        "_outbox",
        "facts",
        "reserved",
        "thread",
        "thread_ident",
        "watchdog",
    )

    def __init__(self, limit: int = sys.maxsize, outbox: Queued | None = None, *, facts: Facts | None = None) -> None:
        self.facts: Facts | None = facts
        """Told how long senders waited."""
        self.thread: HomeThread = home_thread()
        """The thread whose tasks may send."""
        self.thread_ident: int = self.thread.ident
        """The same as `get_ident` gives it, for the check that each message makes."""
        self._limit = limit
        self._largest_share = limit // LARGEST_SHARE
        self._outbox = Outbox() if outbox is None else outbox
        self.reserved: int = 0
        """Bytes that are kept for senders which were woken and have not run yet."""
        self._line: OrderedDict[Half, None] = OrderedDict()
        self._bypasses = 0  # times that the first half found too little free
        self.watchdog: SenderWatchdog = SenderWatchdog()

    def admits(self, size: int) -> bool:
        """Return True if a sender that comes now may queue so many bytes at once."""
        used = self._outbox.used + self.reserved
        return (used == 0 or used + size <= self._limit) and (not self._line or self._bypasses < MAX_BYPASSES)

    def reservation_for(self, size: int) -> int:
        """Return the bytes to reserve for a sender that is woken to send `size`.

        They are more than `size`, unless that is large, to save one wake-up for each of its messages.
        """
        return max(size, min(max(2 * size, SMALL_RESERVATION), self._largest_share), 1)

    def enqueue(self, half: Half) -> None:
        """Let the half wait until enough is free for its first sender."""
        self._line.setdefault(half)

    def dequeue(self, half: Half) -> None:
        """Take a half out of the line that waits for its own window, or need not wait."""
        self._line.pop(half, None)

    def withdraw(self, half: Half) -> None:
        """Take out a half on which no sender waits any more, and let the next one go."""
        self.watchdog.forget(half)
        if half in self._line:
            del self._line[half]
            self._bypasses = 0
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Bytes were written or dropped: let as many halves go as now fit, in order."""
        while self._line:
            half = next(iter(self._line))
            size = half.first_size
            reservation = self.reservation_for(size)
            used = self._outbox.used + self.reserved
            if (
                used and used + reservation > self._limit and half.has_room(size)
            ):  # else others took a window they share
                self._bypasses += 1
                return
            del self._line[half]
            half.wake_first(reservation)
            self._bypasses = 0


@attrs.define(eq=False)
class Waiter:
    """A task that waits to send `size` bytes."""

    task: trio.lowlevel.Task
    size: int
    since: float = attrs.field(factory=trio.current_time)
    reserved: int = 0  # bytes
    error: ErrorMaker | None = None


class SenderWatchdog(Reminder):
    """Logs each half of a connection once that cannot send while no task receives what came beside it.

    If the other side does the same, both wait for ever. The clock of the connection's pump calls it.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[Half, tuple[Waiter, float]] = {}  # the first sender, and since when it was seen

    def note(self, half: Half, waiter: Waiter) -> None:
        """A sender became the first that waits on this half."""
        if half not in self._waiting and not half.was_stuck:
            self._waiting[half] = waiter, waiter.since
            self.set(waiter.since + STUCK_AFTER)

    def forget(self, half: Half) -> None:
        """No sender waits on this half any more."""
        self._waiting.pop(half, None)

    def ring(self, now: float) -> None:
        """Look through the halves, and log those that are stuck."""
        due = now + STUCK_AFTER
        for half, (waiter, since) in [*self._waiting.items()]:
            first = half.first_waiter
            if first is None:
                del self._waiting[half]
            elif first is not waiter:
                self._waiting[half] = first, now
            elif now < since + STUCK_AFTER:  # as the reminder was set: a difference might round to less
                due = min(due, since + STUCK_AFTER)
            elif unread := half.unread_beside():
                half.was_stuck = True
                del self._waiting[half]
                if not may_log("channels that could not send"):
                    continue
                # log: A sender is blocked while messages wait beside it: the two sides may wait for each other.
                _log.warning(
                    "%s: nothing could be sent for %.0f s and longer, and %s to be received here: if the other side "
                    "waits likewise, neither goes on; receive in a task of its own",
                    repr(half),  # as it is now, even if a handler writes it later
                    STUCK_AFTER,
                    "1 message waits" if unread == 1 else f"{unread:,} messages wait",
                )
        if self._waiting:
            self.set(max(due, now + LEAST_LOOK))


class Watermark:
    """A growing number, with tasks that wait until it reaches theirs. An advance costs only what it wakes."""

    __slots__ = ("_events", "_numbers", "value")

    def __init__(self, value: int = -1) -> None:
        self._numbers: list[int] = []  # a heap
        self._events: dict[int, trio.Event] = {}
        self.value: int = value

    async def reached(self, number: int, raise_if_lost: Callable[[], None]) -> None:
        """Wait until it is at least `number`; `raise_if_lost` raises why it will not grow any more."""
        await trio.lowlevel.checkpoint()
        if self.value >= number:
            return
        raise_if_lost()
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = trio.Event()
            heapq.heappush(self._numbers, number)
        await event.wait()
        if self.value < number:
            raise_if_lost()

    def advance(self, number: int) -> None:
        if number > self.value:
            self.value = number
            while self._numbers and self._numbers[0] <= number:
                self._events.pop(heapq.heappop(self._numbers)).set()

    def wake_all(self) -> None:
        """Wake all waiters: the number will not grow any more."""
        for event in self._events.values():
            event.set()
        self._events.clear()
        self._numbers.clear()
