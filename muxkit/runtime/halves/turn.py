"""Waiting in line to send: a gate for each half, and the budget for queued bytes that all halves of a connection share.

A sender sleeps until a grant, a drained queue or a write lets the first in its line send; later senders go behind.
Between the wake-up and the sender's next step its bytes are reserved.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Final, NoReturn, Protocol

import trio

from muxkit.core import Outbox, Queued, Sending, Step, advance
from muxkit.runtime.pumps.turns import turns

ErrorMaker = Callable[[], Exception]

SMALL_RESERVATION = 4 * 1024  # bytes reserved for a woken sender of small messages
LARGEST_SHARE = 8  # at most 1/8 of the outbox is reserved for one sender, unless its first message is larger
MAX_BYPASSES = 16  # times that smaller messages may go before one that is too large for what is free
YIELD_CALLS = 64  # calls after which a half yields at the latest
YIELD_BYTES = 16 * 1024  # the same in bytes
YIELD_LEAST = YIELD_BYTES // YIELD_CALLS  # bytes that a call counts for at least, so that one number keeps both
OPEN: Final = Sending.OPEN  # looked up for each message


class OutboxBudget:
    """How many bytes the halves of one connection may queue ahead of the transport.

    Gates whose window is open but which find too little free wait in order. A newcomer whose message fits may go
    before them, so that a short message need not wait behind a bulk transfer, but only `MAX_BYPASSES` times in a row.
    Without arguments everything is admitted, for an engine that bounds what it queues by itself.
    """

    __slots__ = ("_bypasses", "_gates", "_largest_share", "_limit", "_outbox", "_reserved")

    def __init__(self, limit: int = sys.maxsize, outbox: Queued | None = None) -> None:
        self._limit = limit
        self._largest_share = limit // LARGEST_SHARE
        self._outbox = Outbox() if outbox is None else outbox
        self._reserved = 0  # bytes, for senders that were woken and have not run yet
        self._gates: OrderedDict[Gate, None] = OrderedDict()
        self._bypasses = 0  # times that the first gate found too little free

    def admits(self, size: int) -> bool:
        """Return True if a sender that comes now may queue so many bytes at once."""
        used = self._outbox.used + self._reserved  # as in `_fits`, which would be one more call for each message
        return (used == 0 or used + size <= self._limit) and (not self._gates or self._bypasses < MAX_BYPASSES)

    def reservation_for(self, size: int) -> int:
        """Return the bytes to reserve for a sender that is woken to send `size`.

        They are more than `size`, unless that is large, to save one wake-up for each of its messages.
        """
        return max(size, min(max(2 * size, SMALL_RESERVATION), self._largest_share), 1)

    def reserve(self, reserved: int) -> None:
        """Keep bytes free for a sender that is being woken."""
        self._reserved += reserved

    def release_reserved(self, reserved: int) -> None:
        """The sender runs now, and uses what was reserved before its next checkpoint."""
        self._reserved -= reserved

    def enqueue(self, gate: Gate) -> None:
        """Let the gate wait until enough is free for its first sender."""
        self._gates.setdefault(gate)

    def dequeue(self, gate: Gate) -> None:
        """Take a gate out of the line that waits for its half's window, or need not wait."""
        self._gates.pop(gate, None)

    def withdraw(self, gate: Gate) -> None:
        """Take out a gate at which no sender waits any more, and let the next one go."""
        if gate in self._gates:
            del self._gates[gate]
            self._bypasses = 0
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Bytes were written or dropped: let as many gates go as now fit, in order."""
        while self._gates:
            gate = next(iter(self._gates))
            reserved = self.reservation_for(gate.first_size)
            if not self._fits(reserved) and gate.is_admitted:  # a shared window may have been taken meanwhile
                self._bypasses += 1
                return
            del self._gates[gate]
            gate.wake_first(reserved)
            self._bypasses = 0

    def _fits(self, size: int) -> bool:
        used = self._outbox.used + self._reserved
        return used == 0 or used + size <= self._limit


class Admission(Protocol):
    """What a gate asks its half."""

    def admits(self, size: int) -> bool:
        """Return True if the half's own window has room."""

    def watch(self, size: int) -> None:
        """Have the gate's `window_changed` called when the window may have room for a message of this size."""


class _Waiter:
    __slots__ = ("error", "reserved", "size", "task")

    def __init__(self, task: trio.lowlevel.Task, size: int) -> None:
        self.task = task
        self.size = size
        self.reserved = 0  # bytes
        self.error: ErrorMaker | None = None


class Gate:
    """The line of senders of one half."""

    __slots__ = ("_budget", "_half", "_line")

    def __init__(self, half: Admission, budget: OutboxBudget) -> None:
        self._half = half
        self._budget = budget
        self._line: deque[_Waiter] = deque()

    def __bool__(self) -> bool:
        """Return True while senders wait."""
        return bool(self._line)

    @property
    def first_size(self) -> int:
        """The size of the first sender's message while that sender waits, otherwise 0."""
        return self._line[0].size if self._line and not self._line[0].reserved else 0

    @property
    def is_admitted(self) -> bool:
        """True if the half's window has room for the first sender's message."""
        return self._half.admits(self.first_size)

    async def wait(self, size: int) -> None:
        """Sleep until it is this sender's turn; it must send before its next checkpoint, then call `end_turn`."""
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

        while True:
            await trio.lowlevel.wait_task_rescheduled(abort)
            if waiter.reserved:
                self._budget.release_reserved(waiter.reserved)
            if waiter.error is not None:
                self._budget.wake_waiting()  # what was reserved is free
                raise waiter.error()
            if self._half.admits(size):
                break
            # Other halves were told of the same room in a window, and have taken it. What was reserved is free; the
            # reservation ends after that, as a waiter without one could be rescheduled while it runs.
            self._budget.wake_waiting()
            waiter.reserved = 0
            self._ask_for(size)
        self._line.popleft()

    def end_turn(self) -> None:
        """The first sender has sent, or gave up: the next one follows, here and in the budget."""
        if self._line:
            self.window_changed()
        else:
            self._budget.withdraw(self)
        self._budget.wake_waiting()

    def window_changed(self) -> None:
        """Wake the first sender if its message can go now."""
        if self._line and not self._line[0].reserved:
            size = self._line[0].size
            if self._budget.admits(size):  # like a newcomer
                self._budget.dequeue(self)
                self.wake_first(max(size, 1))
            else:
                self._ask_for(size)

    def wake_first(self, reserved: int) -> None:
        """Called by the budget when `reserved` bytes are free for this gate."""
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
        """Let every waiting sender raise; no further one may come."""
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
            self._budget.dequeue(self)  # it may be in that line for another message, which was smaller
            self._half.watch(size)


class _Outcome(Enum):
    """How a half ends, as far as its state does not tell."""

    USUAL = auto()
    GIVEN_UP = auto()
    LOST = auto()  # with the connection, before the peer confirmed it


class SendTurn(ABC):
    """The life of a sending half, and the turns in which tasks send on it; what is sent is the subclass's business.

    To send: `await wait_turn(size)` unless `may_send(size)`, hand the message to the engine with no checkpoint in
    between, then `end_turn()` if it had to wait. A protocol fills in the last five methods, and calls `window_changed`,
    `confirmed`, `stopped` and `lost`.
    """

    __slots__ = ("_budget", "_error", "_gate", "_outcome", "_over", "_request_write", "_since_yield", "state")

    def __init__(self, budget: OutboxBudget, request_write: Callable[[], None]) -> None:
        self._request_write = request_write
        self._budget = budget
        self._gate: Gate | None = None  # made when a sender must wait for the first time
        self._error: ErrorMaker | None = None
        self._over: trio.Event | None = None
        self._since_yield = 0  # bytes
        self._outcome = _Outcome.USUAL
        self.state = Sending.OPEN

    # --- turns

    def may_send(self, size: int) -> bool:
        """Return True if a sender that comes now may send so many bytes at once."""
        return not self._gate and self._budget.admits(size) and self.admits(size)

    async def wait_turn(self, size: int) -> None:
        """Sleep until `size` bytes may go; the caller must send before its next checkpoint, then call `end_turn`.

        Cancelled means that there is no turn to end.
        """
        if not self.may_send(size):
            await self._wait(size)

    async def _wait(self, size: int) -> None:
        self.check_size(size)
        self._request_write()
        if self.state is not OPEN:  # writing at once may have found the connection broken
            await self._refuse()
        if self.may_send(size):  # or it has made room
            return
        if self._gate is None:
            self._gate = Gate(self, self._budget)
        await self._gate.wait(size)
        self._since_yield = 0
        if self.state is not OPEN:  # lost, and there was room for this sender before it was told
            self.end_turn()
            raise (self._error or _closed)()

    def end_turn(self) -> None:
        """The turn was used, or not: the next sender may go."""
        if self._gate is not None:
            self._gate.end_turn()
        else:
            self._budget.wake_waiting()

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size might be sent without waiting; no promise."""
        await trio.lowlevel.checkpoint()
        if self.state is not Sending.OPEN:
            await self._refuse()
        await self.wait_turn(size)
        self.end_turn()

    async def _refuse(self) -> NoReturn:
        """Raise why nothing can be sent any more, after a checkpoint: a loop around it must let other tasks run."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise (self._error or _closed)()

    # --- the end

    async def aclose(self) -> None:
        """Say that no more follows, after everything that was sent; does not wait for the peer."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        if self.state is Sending.OPEN:
            self._close(b"")
            self._request_write()

    def abort(self) -> None:
        """Give up: what has not begun to leave is dropped, and the peer learns that messages are missing.

        After `finish` or `aclose` as well, as long as their end has not left.
        """
        if self.state is Sending.CLOSED:
            return
        self._abort()
        if self.state is Sending.OPEN:
            self.state = advance(self.state, Step.FINISH)
        self._outcome = _Outcome.GIVEN_UP
        self._error = _closed
        self._close_gate(_closed)
        self._budget.wake_waiting()  # what was queued was dropped
        self._request_write()

    async def wait_over(self) -> None:
        """Wait until the peer confirmed the end; raises what came instead."""
        if self.state is not Sending.CLOSED:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    @property
    def is_unheard(self) -> bool:
        """True while it is unknown whether the peer has heard everything; also once it can never be known."""
        outcome = self._outcome
        return outcome is _Outcome.LOST or (outcome is _Outcome.USUAL and self.state is not Sending.CLOSED)

    @property
    def given_up(self) -> bool:
        """True after `abort`: then leaving does not wait until the peer has heard of the end."""
        return self._outcome is _Outcome.GIVEN_UP

    # --- for the session

    def window_changed(self) -> None:
        """The half's window may have changed: let the first waiting sender look."""
        if self._gate is not None:
            self._gate.window_changed()

    def confirmed(self) -> None:
        """The peer heard that we are done."""
        self._over_by(Step.CONFIRMED, None)

    def stopped(self, error: ErrorMaker) -> None:
        """The peer wants no more; `error` makes what senders raise."""
        self._over_by(Step.STOPPED, error)

    def lost(self, error: ErrorMaker) -> None:
        """The connection is gone; `error` makes what senders raise."""
        if self.state is not Sending.CLOSED:
            if self._outcome is _Outcome.USUAL:
                self._outcome = _Outcome.LOST
            self._over_by(Step.LOST, error)

    # --- what a protocol fills in

    @abstractmethod
    def admits(self, size: int) -> bool:
        """Return True if the window has room for so many bytes."""

    @abstractmethod
    def watch(self, size: int) -> None:
        """Call `window_changed` when the window may have room for a message of this size."""

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` for a message that can never be sent."""

    @abstractmethod
    def _finish(self, payload: bytes) -> None:
        """Tell the engine that no more follows."""

    @abstractmethod
    def _abort(self) -> None:
        """Tell the engine to give up."""

    # --- inside

    def _close(self, payload: bytes) -> None:
        self._finish(payload)
        self.state = advance(self.state, Step.FINISH)
        self._close_gate(_closed)

    def _over_by(self, step: Step, error: ErrorMaker | None) -> None:
        if self.state is Sending.CLOSED:
            return
        self.state = advance(self.state, step)
        self._error = self._error or error
        if step is Step.LOST and (self._gate or self._over is not None):
            turns().wake(partial(self._wake_all, error or _closed))
        else:
            self._wake_all(error or _closed)

    def _wake_all(self, error: ErrorMaker) -> None:
        self._close_gate(error)
        self._gate = None  # or only a full garbage collection would free the two
        if self._over is not None:
            self._over.set()

    def _close_gate(self, error: ErrorMaker) -> None:
        if self._gate is not None:
            self._gate.close(error)

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()


def _closed() -> Exception:
    return trio.ClosedResourceError("this side of the channel was closed")
