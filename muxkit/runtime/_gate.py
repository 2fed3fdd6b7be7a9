"""Who may send now? Senders wait in line for their half's window and for room in the connection's outbox.

Nobody polls: a sender sleeps until a grant, a drained queue or a write changes the answer for the first in his
line. Newcomers go behind. Between the wake-up and the sender's next step the room is kept for him.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import trio

ErrorMaker = Callable[[], Exception]

SHARE = 4 * 1024  # bytes for somebody who is woken and sends small messages
PORTION = 8  # no more than such a part of the outbox is kept for somebody, unless his first message is larger
MAX_BYPASSES = 16  # times that others may slip past a message that is too large for the room that is left


class Admission(Protocol):
    """What a gate asks its half."""

    def admits(self, size: int) -> bool:
        """Does the half's own window have room?"""

    def watch(self, size: int) -> None:
        """Call the gate's `window_changed` when it may have room for a message of this size."""


class Queued(Protocol):
    """What a room asks: how many bytes wait for the transport."""

    @property
    def used(self) -> int: ...


class OutboxBudget:
    """The outbox of one connection: how many bytes may wait for the transport.

    Halves whose window is open but for whom there is no room stand in line. A newcomer whose message fits may
    slip past them, so that a short one need not wait behind a bulk transfer, but not for ever.
    """

    __slots__ = ("_bypasses", "_gates", "_largest_share", "_limit", "_outbox", "_reserved")

    def __init__(self, limit: int, outbox: Queued) -> None:
        self._limit = limit
        self._largest_share = limit // PORTION
        self._outbox = outbox
        self._reserved = 0  # to senders that were woken and have not run yet
        self._gates: OrderedDict[Gate, None] = OrderedDict()
        self._bypasses = 0  # times that the first in line found too little room

    def admits(self, size: int) -> bool:
        """May somebody who comes now go in at once?"""
        used = self._outbox.used + self._reserved  # as in `_fits`, which would be one more call for each message
        return (used == 0 or used + size <= self._limit) and (not self._gates or self._bypasses < MAX_BYPASSES)

    def reservation_for(self, size: int) -> int:
        """What is kept for somebody who is woken to send `size` bytes, which is more unless they are many.

        Or he would have to be woken for each of his messages.
        """
        return max(size, min(max(2 * size, SHARE), self._largest_share), 1)

    def reserve(self, reserved: int) -> None:
        """Keep room for somebody who is being woken."""
        self._reserved += reserved

    def release_reserved(self, reserved: int) -> None:
        """He runs now."""
        self._reserved -= reserved

    def enqueue(self, gate: Gate) -> None:
        """Poke the gate when there is room again."""
        self._gates.setdefault(gate)

    def dequeue(self, gate: Gate) -> None:
        """The gate waits for its half's window, or need not wait, so nobody has to wait for it here."""
        self._gates.pop(gate, None)

    def withdraw(self, gate: Gate) -> None:
        """Nobody waits at this gate any more."""
        if gate in self._gates:
            del self._gates[gate]
            self._bypasses = 0
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """There may be more room than there was: let in as many as fit, in order."""
        while self._gates:
            gate = next(iter(self._gates))
            reserved = self.reservation_for(gate.first_size)
            if not self._fits(reserved):
                self._bypasses += 1
                return
            del self._gates[gate]
            gate.wake_first(reserved)
            self._bypasses = 0

    def _fits(self, size: int) -> bool:
        used = self._outbox.used + self._reserved
        return used == 0 or used + size <= self._limit


class _Waiter:
    __slots__ = ("error", "reserved", "size", "task")

    def __init__(self, task: trio.lowlevel.Task, size: int) -> None:
        self.task = task
        self.size = size
        self.reserved = 0  # bytes
        self.error: ErrorMaker | None = None


class Gate:
    """The line of senders on one half."""

    __slots__ = ("_budget", "_half", "_line")

    def __init__(self, half: Admission, room: OutboxBudget) -> None:
        self._half = half
        self._budget = room
        self._line: deque[_Waiter] = deque()

    def __bool__(self) -> bool:
        """Does anybody stand in line?"""
        return bool(self._line)

    @property
    def first_size(self) -> int:
        """The size of the message of the first in line, if he waits."""
        return self._line[0].size if self._line and not self._line[0].reserved else 0

    async def wait(self, size: int) -> None:
        """Sleep until it is our turn; on return the caller must act before his next checkpoint, then `end_turn`."""
        waiter = _Waiter(trio.lowlevel.current_task(), size)
        self._line.append(waiter)
        if self._line[0] is waiter:
            self._ask_for(size)

        def abort(_: object) -> trio.lowlevel.Abort:
            was_first = self._line[0] is waiter
            self._line.remove(waiter)
            if was_first:
                self.end_turn()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if waiter.reserved:
            self._budget.release_reserved(waiter.reserved)
        if waiter.error is not None:
            self._budget.wake_waiting()  # what was kept for us is free
            raise waiter.error()
        self._line.popleft()

    def end_turn(self) -> None:
        """The first in line has acted, or gave up: it is the next one's turn, here and in the room."""
        if self._line:
            self.window_changed()
        else:
            self._budget.withdraw(self)
        self._budget.wake_waiting()

    def window_changed(self) -> None:
        """The window may have changed: wake the first in line if he can go now."""
        if self._line and not self._line[0].reserved:
            size = self._line[0].size
            if self._budget.admits(size):  # like a newcomer
                self._budget.dequeue(self)
                self.wake_first(max(size, 1))
            else:
                self._ask_for(size)

    def wake_first(self, reserved: int) -> None:
        """For the room, which has so much to spare: it is this gate's turn there."""
        if not self._line or self._line[0].reserved:
            return
        first = self._line[0]
        if self._half.admits(first.size):
            first.reserved = reserved
            self._budget.reserve(reserved)
            trio.lowlevel.reschedule(first.task)
        else:
            self._ask_for(first.size)

    def close(self, error: ErrorMaker) -> None:
        """Nobody will be let in any more."""
        line, self._line = self._line, deque()
        for waiter in line:
            waiter.error = error
            if not waiter.reserved:
                trio.lowlevel.reschedule(waiter.task)
        self._budget.withdraw(self)

    def _ask_for(self, size: int) -> None:
        if self._half.admits(size):
            self._budget.enqueue(self)
        else:
            self._budget.dequeue(self)  # it may have come there for another message, that was smaller
            self._half.watch(size)
