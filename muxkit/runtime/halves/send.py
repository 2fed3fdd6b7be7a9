"""The sending half of a channel as Aqueduct still has it; `sending` is the form that replaces it.

A sender sleeps until a grant, a drained queue or a write lets the first in the line of its half send; later senders go
behind. Between the wake-up and the sender's next step its bytes are reserved.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from itertools import islice
from threading import get_ident
from typing import NoReturn

import trio

from muxkit._observer import Blocked, Facts
from muxkit.core import NO_QUEUE, Reason, Sending, Step, advance, counted, queue_of
from muxkit.runtime._thread import refuse_thread
from muxkit.runtime.halves.budget import ErrorMaker, OutboxBudget, Waiter
from muxkit.runtime.halves.sending import MANY, ONLY_BYTES, OPEN, YIELD_BYTES, YIELD_CALLS, YIELD_LEAST, as_bytes
from muxkit.runtime.pumps.turns import turns

_log = logging.getLogger("muxkit")


class _Outcome(Enum):
    """How a half ends, as far as its state does not tell."""

    USUAL = auto()
    GIVEN_UP = auto()
    LOST = auto()  # with the connection, before the peer confirmed it


class SendTurn(ABC):
    """The life of a sending half, and the turns in which tasks send on it; what is sent is the subclass's business.

    To send: `await _wait_turn(size)` unless `_may_send(size)`, hand the message to the engine with no checkpoint in
    between, then `_end_turn()` if it had to wait. A protocol fills in the last five methods, and calls
    `_window_changed`, `_confirmed`, `_stopped` and `_lost`.
    """

    __slots__ = (
        "_budget",
        "_error",
        "_line",
        "_outcome",
        "_over",
        "_request_write",
        "_scope",
        "_since_yield",
        "state",
        "was_stuck",
    )

    def __init__(self, budget: OutboxBudget, request_write: Callable[[], None]) -> None:
        self._request_write = request_write
        self._budget = budget
        self._line: deque[Waiter] = NO_QUEUE
        self._error: ErrorMaker | None = None
        self._over: trio.Event | None = None
        self._scope: trio.CancelScope | None = None  # cancelled when the half is over
        self._since_yield = 0  # bytes
        self._outcome = _Outcome.USUAL
        self.state: Sending = Sending.OPEN
        self.was_stuck: bool = False

    # --- turns

    def _may_send(self, size: int) -> bool:
        """Return True if a sender that comes now may send so many bytes at once."""
        return not self._line and self._budget.admits(size) and self.has_room(size)

    async def _wait_turn(self, size: int) -> None:
        """Sleep until `size` bytes may go; the caller must send before its next checkpoint, then call `_end_turn`.

        Cancelled means that there is no turn to end.
        """
        if not self._may_send(size):
            await self._wait(size)

    async def _wait(self, size: int) -> None:
        self._check_size(size)
        self._request_write()
        if self.state is not OPEN:  # writing at once may have found the connection broken
            await self._refuse()
        if self._may_send(size):  # or it has made room
            return
        waiter = Waiter(trio.lowlevel.current_task(), size)
        self._line = queue_of(self._line)
        self._line.append(waiter)
        if self._line[0] is waiter:
            self._ask_for(size)
            self._budget.watchdog.note(self, waiter)
        if self._budget.facts is None:
            await self._sleep(waiter)
        else:
            await self._sleep_measured(waiter, self._budget.facts)
        self._line.popleft()
        self._free_line()
        self._since_yield = 0
        if self.state is not OPEN:  # lost, and there was room for this sender before it was told
            self._end_turn()
            raise (self._error or _closed)()

    async def _sleep(self, waiter: Waiter) -> None:
        """Sleep until it is this sender's turn."""

        def abort(_: object) -> trio.lowlevel.Abort:
            was_first = self._line[0] is waiter
            self._line.remove(waiter)
            self._free_line()
            if was_first:
                self._end_turn()
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            await trio.lowlevel.wait_task_rescheduled(abort)
            self._budget.reserved -= waiter.reserved  # it is used before the next checkpoint
            if waiter.error is not None:
                self._budget.wake_waiting()  # what was reserved is free
                raise waiter.error()
            if self.has_room(waiter.size):
                return
            # Other halves were told of the same room in a window, and have taken it. What was reserved is free; the
            # reservation ends after that, as a waiter without one could be rescheduled while it runs.
            self._budget.wake_waiting()
            waiter.reserved = 0
            self._ask_for(waiter.size)

    def _free_line(self) -> None:
        """Let go of an empty line: each channel that this side opened has waited once, for its first credit."""
        if not self._line:
            self._line = NO_QUEUE

    async def _sleep_measured(self, waiter: Waiter, facts: Facts) -> None:
        on: Blocked = "transport" if self.has_room(waiter.size) else "credit"
        facts.wait_began(on)
        try:
            await self._sleep(waiter)
        finally:
            facts.wait_ended(on, trio.current_time() - waiter.since)

    def _end_turn(self) -> None:
        """The first sender has sent, or gave up: the next one follows, here and in the budget."""
        if self._line:
            self._window_changed()
        else:
            self._budget.withdraw(self)
        self._budget.wake_waiting()

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size might be sent without waiting; no promise."""
        self._budget.owner.check()
        await trio.lowlevel.checkpoint()
        if self.state is not OPEN:
            await self._refuse()
        await self._wait_turn(size)
        self._end_turn()

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
        self._budget.owner.check()
        if self.state is OPEN:
            self._close(b"")
            self._request_write()

    def _close_quietly(self) -> None:
        """`close`, for a caller that requests the write itself, behind another command."""
        self._budget.owner.check()
        if self.state is OPEN:
            self._close(b"")

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up: what has not begun to leave is dropped, and the peer learns that messages are missing, and why.

        After `finish` or `aclose` as well, as long as their end has not left.
        """
        self._budget.owner.check()
        if self.state is Sending.CLOSED:
            return
        self._abort(Reason(reason, code))
        if self.state is OPEN:
            self.state = advance(self.state, Step.FINISH)
        self._outcome = _Outcome.GIVEN_UP
        self._error = _closed
        self._close_gate(_closed)
        self._budget.wake_waiting()  # what was queued was dropped
        self._request_write()

    async def wait_over(self) -> None:
        """Wait until the peer confirmed the end; raises what came instead."""
        self._budget.owner.check()
        if self.state is not Sending.CLOSED:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    def cancel_when_over(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the half is over: the peer stopped it, or the end was confirmed, or all was lost.

        For work that nobody wants any more once the peer gave up. It takes no task, unlike `wait_over`.
        """
        self._scope = scope
        if self.state is Sending.CLOSED:
            scope.cancel()

    @property
    def waiting_since(self) -> float | None:
        """The time since which the first sender waits; None if no task does."""
        return self._line[0].since if self._line else None

    def _state_text(self) -> str:
        """Describe the state for `repr`, with those who wait."""
        if not self._line:
            return self.state.value
        senders = counted(len(self._line), "sender")
        try:
            waited = f" {trio.current_time() - self._line[0].since:.1f} s"
        except RuntimeError:  # shown outside of Trio
            waited = ""
        return f"{self.state.value}, {senders} waiting{waited} for credit"

    @property
    def first_waiter(self) -> Waiter | None:
        """The first sender that waits; None if no task does."""
        return self._line[0] if self._line else None

    def unread_beside(self) -> int:
        """Return how many messages wait to be received on the same channel."""
        return 0

    @property
    def _is_unheard(self) -> bool:
        """True while it is unknown whether the peer has heard everything; also once it can never be known."""
        outcome = self._outcome
        return outcome is _Outcome.LOST or (outcome is _Outcome.USUAL and self.state is not Sending.CLOSED)

    @property
    def _given_up(self) -> bool:
        """True after `abort`: then leaving does not wait until the peer has heard of the end."""
        return self._outcome is _Outcome.GIVEN_UP

    # --- for the session

    def _window_changed(self) -> None:
        """The half's window may have changed: wake the first sender if its message can go now."""
        if self._line and not self._line[0].reserved:
            size = self._line[0].size
            if self._budget.admits(size):  # like a newcomer
                self._budget.dequeue(self)
                self.wake_first(max(size, 1))
            else:
                self._ask_for(size)

    def _confirmed(self) -> None:
        """The peer heard that we are done."""
        self._over_by(Step.CONFIRMED, None)

    def _stopped(self, error: ErrorMaker) -> None:
        """The peer wants no more; `error` makes what senders raise."""
        self._over_by(Step.STOPPED, error)

    def _lost(self, error: ErrorMaker) -> None:
        """The connection is gone; `error` makes what senders raise."""
        if self.state is not Sending.CLOSED:
            if self._outcome is _Outcome.USUAL:
                self._outcome = _Outcome.LOST
            self._over_by(Step.LOST, error)

    # --- for the budget

    @property
    def first_size(self) -> int:
        """The size of the first sender's message while that sender waits, otherwise 0."""
        return self._line[0].size if self._line and not self._line[0].reserved else 0

    def wake_first(self, reserved: int) -> None:
        """Called when `reserved` bytes are free for this half."""
        if not self._line or self._line[0].reserved:
            return
        first = self._line[0]
        if self.has_room(first.size):
            first.reserved = reserved
            self._budget.reserved += reserved
            trio.lowlevel.reschedule(first.task)
        else:
            self._ask_for(first.size)

    def _ask_for(self, size: int) -> None:
        if self.has_room(size):
            self._budget.enqueue(self)
        else:
            self._budget.dequeue(self)  # it may be in that line for another message, which was smaller
            self._watch(size)

    # --- what a protocol fills in

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Return True if the window has room for so many bytes."""

    @abstractmethod
    def _watch(self, size: int) -> None:
        """Call `_window_changed` when the window may have room for a message of this size."""

    @abstractmethod
    def _check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` for a message that can never be sent."""

    @abstractmethod
    def _finish(self, payload: bytes) -> None:
        """Tell the engine that no more follows."""

    @abstractmethod
    def _abort(self, reason: Reason) -> None:
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
        if step is Step.LOST and (self._line or self._over is not None or self._scope is not None):
            turns().wake(partial(self._wake_all, error or _closed))
        else:
            self._wake_all(error or _closed)

    def _wake_all(self, error: ErrorMaker) -> None:
        self._close_gate(error)
        if self._over is not None:
            self._over.set()
        if self._scope is not None:
            self._scope.cancel()

    def _close_gate(self, error: ErrorMaker) -> None:
        """Let every waiting sender raise; no further one may come."""
        line, self._line = self._line, NO_QUEUE
        for waiter in line:
            waiter.error = error
            if not waiter.reserved:
                trio.lowlevel.reschedule(waiter.task)
        self._budget.withdraw(self)

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()


class SendHalf(SendTurn, trio.abc.SendChannel[bytes]):
    """Sends whole messages; a protocol fills in `_push` and what `SendTurn` leaves open.

    Several tasks may send at once: they are served in the order in which they came.
    """

    __slots__ = ()

    # --- for the application

    async def send(self, message: bytes) -> None:
        """Send one message; returns when the connection has it, in order behind the half's earlier ones.

        Cancelled means not sent. Checks for cancellation in every call, yields at the latest on every 64th call
        or 128 KiB of this half, and always when it had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `abort` or `aclose`, `ChannelStopped` when the peer
        wants no more, `LinkLost` when the connection is gone, `LocalProtocolError` for what cannot be sent.
        """
        budget = self._budget
        if get_ident() != budget.thread:
            refuse_thread()
        await trio.lowlevel.checkpoint_if_cancelled()
        if type(message) is not bytes:
            message = as_bytes(message)
        size = len(message)
        pushed = None
        if self.state is OPEN and not self._line and budget.admits(size):
            pushed = self._try_push(message)
        if pushed is None:
            await self._hand_over(message)
            self._request_write()
        else:
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
            if pushed:
                self._request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()

    def _try_send(self, message: bytes) -> bool:
        """`send` outside of Trio's tasks; False means that it would wait or raise, and that nothing was done."""
        if get_ident() != self._budget.thread:
            refuse_thread()
        if type(message) is not bytes or self.state is not OPEN or self._line:
            return False
        if not self._budget.admits(len(message)) or self._try_push(message) is None:
            return False
        self._request_write()
        return True

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint, if they need not wait; cancelled, a prefix was sent."""
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            rest = iter(messages)
            while batch := list(islice(rest, YIELD_CALLS * MANY)):
                if not self._push_all(batch):
                    for message in batch:
                        await self._hand_over(message if type(message) is bytes else as_bytes(message))
                        if self._since_yield >= YIELD_BYTES * MANY:
                            self._request_write()
                            await self._yield()
                if self._since_yield >= YIELD_BYTES * MANY:
                    self._request_write()
                    await self._yield()
        finally:
            self._request_write()
        await self._yield()

    async def finish(self, payload: bytes = b"") -> None:
        """Say that no more follows, after everything that was sent, and wait until the peer has heard it.

        Raises `ChannelStopped` if the peer stopped listening before, `LinkLost` if that is never known.
        """
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is OPEN:
            if payload:
                await self._wait_turn(len(payload))
            try:
                self._close(payload)
            finally:
                self._end_turn()
            self._request_write()
        elif self._error is not None:
            await self._refuse()
        await self.wait_over()

    # --- what a protocol fills in

    @abstractmethod
    def _push(self, message: bytes) -> None:
        """Give a message to the engine."""

    def _try_push(self, message: bytes) -> bool | None:
        """Give a message to the engine if the window has room; None means that nothing was done.

        False means that a write was requested before, for a message that is still queued here, and that this one leaves
        with it. A protocol may have a quicker way than to ask first.
        """
        if not self.has_room(len(message)):
            return None
        self._push(message)
        return True

    def _try_push_all(self, messages: list[bytes]) -> bool:
        """The same for several messages at once: all or none."""
        return False

    # --- inside

    async def _hand_over(self, message: bytes) -> None:
        """Wait for a turn, then give the message to the engine with no checkpoint in between."""
        size = len(message)
        if self.state is not OPEN:
            await self._refuse()
        if self._may_send(size):
            self._push(message)
            self._since_yield += max(size, YIELD_LEAST)
            return
        await self._wait(size)
        try:
            if self._try_push(message) is None:
                self._push(message)
        finally:
            self._end_turn()

    def _push_all(self, messages: list[bytes]) -> bool:
        """Give all of them to the engine, if they fit as they are; otherwise none."""
        if self.state is not OPEN or self._line or set(map(type, messages)) != ONLY_BYTES:
            return False
        size = sum(map(len, messages))
        if size > YIELD_BYTES * MANY or not self._budget.admits(size) or not self._try_push_all(messages):
            return False
        self._since_yield += max(size, YIELD_LEAST * len(messages))
        return True


# The name of a coroutine is what Python prints if it is never awaited; a program knows the channel, not its halves.
for _method in (SendHalf.send, SendHalf.send_many, SendHalf.finish):
    _method.__qualname__ = f"Channel.{_method.__name__}"


def _closed() -> Exception:
    return trio.ClosedResourceError("this side of the channel was closed")
