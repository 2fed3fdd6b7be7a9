"""Limits how many bytes one connection may hold that were sent but not yet written to the transport.

`await channel.send(message)` returns once the message is in the connection's *outbox*, the queue of bytes that the
connection will write. If the transport is slow, the outbox must not grow without limit, so `send` has to wait. This
module decides who waits. A *half* is one direction of a channel, here always the sending one, and several tasks may
send on it.

- A task may queue its message if the outbox has room. Otherwise, the half waits in the budget's queue, and the task
  waits on the half.
- When the transport has taken bytes, `OutboxBudget.wake_waiting` wakes the first task of the half that has waited
  longest. It also reserves room for that task, because another task could send first and take the room before the woken
  task runs.

`SenderWatchdog` logs a warning if a task waits so long that both sides may be waiting for each other. `Watermark` lets
tasks wait until a number, such as the number of acknowledged messages, is high enough.
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
"""A function that creates an error. Each task needs its own error object, because raising changes the traceback."""

# Reserve at least this many bytes for a woken task. A task that sends small messages then sends many of them before it
# has to wait again, and waking a task costs more than sending a small message.
SMALL_RESERVATION = 4 * 1024
# But reserve at most 1/8 of the outbox for one task, so that several can be woken together. A larger message gets as
# much as it needs.
LARGEST_SHARE = 8
# A message that fits may overtake a larger one that doesn't fit yet. After this many attempts to serve the larger
# message, the others wait behind it, so that it can't be overtaken forever.
MAX_BYPASSES = 16
# If the same task has waited to send for this many seconds, and the channel has messages that nobody receives, both
# sides may be waiting for each other, and we log a warning.
STUCK_AFTER_SECONDS: Final = 10.0
MIN_CHECK_SECONDS: Final = 1.0  # between two checks for stuck halves, because a check looks at all waiting halves

_log = logging.getLogger("muxkit")


class Half(Protocol):
    """The methods of a sending half that the budget calls while senders wait on the half."""

    was_stuck: bool
    """True once the log contains a warning that this half is stuck."""

    @property
    def first_size(self) -> int:
        """The size of the first sender's message while that sender waits, otherwise 0."""

    @property
    def first_waiter(self) -> Waiter | None:
        """The first waiting sender, or None if no task waits."""

    def has_room(self, size: int) -> bool:
        """Return True if the window of the half has room for `size` bytes."""

    def wake_first(self, reserved: int) -> None:
        """Wake the first sender, and reserve `reserved` bytes of the budget for it."""

    def unread_beside(self) -> int:
        """Return the number of messages that wait to be received on the same channel."""


class OutboxBudget:
    """Limits how many bytes the halves of one connection may queue ahead of the transport.

    If a half's window has room for a message but the budget hasn't, the half waits in a first-in, first-out queue. A
    new sender whose message fits may overtake the waiting halves, so that a short message doesn't have to wait for a
    bulk transfer. But only `MAX_BYPASSES` messages in a row may do so. A budget that is created without arguments
    admits all messages, for an engine that limits its queues itself.
    """

    __slots__ = (
        "_bypasses",
        "_largest_share",
        "_limit",
        "_outbox",
        "facts",
        "line",
        "reserved",
        "thread",
        "thread_ident",
        "watchdog",
    )

    def __init__(self, limit: int = sys.maxsize, outbox: Queued | None = None, *, facts: Facts | None = None) -> None:
        self.facts: Facts | None = facts
        """Receives a callback for each wait of a sender."""
        self.thread: HomeThread = home_thread()
        """The thread whose tasks may send."""
        self.thread_ident: int = self.thread.ident
        """The identifier of that thread, as returned by `get_ident`. It makes the check for each message fast."""
        self._limit = limit
        self._largest_share = limit // LARGEST_SHARE
        self._outbox = Outbox() if outbox is None else outbox
        self.reserved: int = 0
        """Bytes that are reserved for senders that have been woken and haven't run yet."""
        self.line: OrderedDict[Half, None] = OrderedDict()
        """The halves that wait for room, longest first."""
        # How often in a row `wake_waiting` has found too little room for the half that has waited longest. Until this
        # reaches `MAX_BYPASSES`, smaller messages may overtake the message of that half.
        self._bypasses = 0
        self.watchdog: SenderWatchdog = SenderWatchdog()

    def admits(self, size: int) -> bool:
        """Return True if a new sender may queue `size` bytes without waiting."""
        used = self._outbox.used + self.reserved
        return (used == 0 or used + size <= self._limit) and (not self.line or self._bypasses < MAX_BYPASSES)

    def reservation_for(self, size: int) -> int:
        """Return the number of bytes to reserve for a sender that is woken to send `size` bytes.

        For a small message, the reservation is larger than `size`. Then the sender can send further messages without
        another wake-up.
        """
        return max(size, min(max(2 * size, SMALL_RESERVATION), self._largest_share), 1)

    def enqueue(self, half: Half) -> None:
        """Add the half to the queue, where it waits until the budget has room for its first sender."""
        self.line.setdefault(half)

    def dequeue(self, half: Half) -> None:
        """Remove a half from the queue, because it waits for its own window or doesn't have to wait."""
        self.line.pop(half, None)

    def withdraw(self, half: Half) -> None:
        """Remove a half on which no sender waits any more, and wake the next half if there is room."""
        self.watchdog.forget(half)
        if half in self.line:
            del self.line[half]
            self._bypasses = 0
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Wake waiting halves in order while there is room, because queued bytes have been written or dropped."""
        while self.line:
            half = next(iter(self.line))
            size = half.first_size
            reservation = self.reservation_for(size)
            used = self._outbox.used + self.reserved
            # If the half has no room in its window, another half has used up a window that both share. Wake the half
            # nevertheless, and it will wait for its window instead of the budget.
            if used and used + reservation > self._limit and half.has_room(size):
                self._bypasses += 1
                return
            del self.line[half]
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
    """Warns about channels on which a task waits to send while no task receives the channel's messages.

    If the other side does the same, both sides wait forever. Each half is logged once. The clock of the connection's
    pump calls the watchdog.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        super().__init__()
        # For each half with waiting senders: the first sender, and the time at which we saw it become the first
        self._waiting: dict[Half, tuple[Waiter, float]] = {}

    def note(self, half: Half, waiter: Waiter) -> None:
        """Begin to watch a half, because a sender has become the first that waits on it."""
        if half not in self._waiting and not half.was_stuck:
            self._waiting[half] = waiter, waiter.since
            self.set(waiter.since + STUCK_AFTER_SECONDS)

    def forget(self, half: Half) -> None:
        """Stop watching a half, because no sender waits on it any more."""
        self._waiting.pop(half, None)

    def ring(self, now: float) -> None:
        """Check all watched halves, and log those that are stuck."""
        due = now + STUCK_AFTER_SECONDS
        for half, (waiter, since) in [*self._waiting.items()]:
            first = half.first_waiter
            if first is None:
                del self._waiting[half]
            elif first is not waiter:
                self._waiting[half] = first, now
            elif (
                now < since + STUCK_AFTER_SECONDS
            ):  # compare with the sum, as `set` does, because `now - since` may be rounded
                due = min(due, since + STUCK_AFTER_SECONDS)
            elif unread := half.unread_beside():
                half.was_stuck = True
                del self._waiting[half]
                if not may_log("channels that could not send"):
                    continue
                # log: A task waits to send on a channel, and nobody receives the messages that have arrived on the same
                # channel. If the other side does the same, both sides wait for each other.
                _log.warning(
                    "%s: a task has been waiting to send for %.0f s, and %s to be received: if the other side does the "
                    "same, both wait forever; receive in a separate task",
                    repr(half),  # format it now, because a logging handler may run later, when the state has changed
                    STUCK_AFTER_SECONDS,
                    "1 message waits" if unread == 1 else f"{unread:,} messages wait",
                )
        if self._waiting:
            self.set(max(due, now + MIN_CHECK_SECONDS))


class Watermark:
    """A growing number, and tasks that wait until the number reaches a certain value.

    The cost of `advance` depends only on the number of tasks that it wakes, not on the number of waiting tasks.
    """

    __slots__ = ("_events", "_numbers", "value")

    def __init__(self, value: int = -1) -> None:
        self._numbers: list[int] = []  # a heap
        self._events: dict[int, trio.Event] = {}
        self.value: int = value

    async def reached(self, number: int, raise_if_lost: Callable[[], None]) -> None:
        """Wait until the value is at least `number`. `raise_if_lost` raises an error if the value can't grow again."""
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
        """Wake all waiting tasks, because the value can't grow any more."""
        for event in self._events.values():
            event.set()
        self._events.clear()
        self._numbers.clear()
