"""The sending half of a channel: the queue of waiting senders, and the states of the half.

If no task waits and the message fits, `send` passes the message to the engine without waiting. Otherwise, the task
joins the half's queue. The first task in the queue sleeps for one of two reasons:

    The window has no room.    The engine reports `Writable` when the window may have room.
    The budget has no room.    The half waits in the queue of the `OutboxBudget` until bytes have been written or
                               dropped. Then the budget wakes the task, and reserves its bytes until the task runs.

`SendHalf` knows nothing about frames. It calls the methods of the engine's half, which is `sender`. The table
`muxkit.core.SENDING` has the legal changes of `state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from functools import partial
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from muxkit._observer import Blocked, Facts
from muxkit.core import NO_QUEUE, Reason, Sending, Step, advance, counted, queue_of
from muxkit.core.halves import Sender
from muxkit.runtime._thread import refuse_thread
from muxkit.runtime.halves.budget import ErrorMaker, Waiter
from muxkit.runtime.halves.owner import HalfOwner
from muxkit.runtime.pumps.turns import turns

if TYPE_CHECKING:
    from muxkit.runtime.channel import MuxChannel


# A half yields after 64 calls or 128 KiB at the latest. Two messages of 64 KiB take about as long as 64 short messages.
YIELD_CALLS = 64
YIELD_BYTES = 128 * 1024
YIELD_LEAST = YIELD_BYTES // YIELD_CALLS  # minimum charge per call, so that one byte counter enforces both limits
MANY = 16  # `send_many` may send this many times the yield limits before it yields
OPEN: Final = Sending.OPEN  # a global is faster than an attribute of an enum, and `send` reads it for each message
ONLY_BYTES = {bytes}


class Outcome(Enum):
    """Whether a half ends normally, was aborted, or was lost. Its state doesn't contain this information."""

    USUAL = auto()
    GIVEN_UP = auto()
    LOST = auto()  # the connection was lost before the peer confirmed the end


class SendHalf:
    """Sends whole messages on a channel. Several tasks may send simultaneously, and they are served in order.

    A connection that sends something other than a plain message, such as a message with headers, waits for its turn
    explicitly. It calls `await wait_turn(size)` unless `may_send(size)` is True, passes its data to the engine before
    the next checkpoint, and then calls `end_turn` if it had to wait.
    """

    __slots__ = (
        "_budget",
        "_connection",
        "_error",
        "_line",
        "_outcome",
        "_over",
        "_scope",
        "_since_yield",
        "channel",
        "sender",
        "state",
        "was_stuck",
    )

    def __init__(self, connection: HalfOwner, sender: Sender) -> None:
        self.sender: Final = sender
        self._connection = connection
        self._budget: Final = connection.budget
        self._line: deque[Waiter] = NO_QUEUE
        self._error: ErrorMaker | None = None
        self._over: trio.Event | None = None
        self._scope: trio.CancelScope | None = None  # cancelled when the half is closed
        self._since_yield = 0  # bytes sent since the last yield, with `YIELD_LEAST` as the minimum charge per call
        self._outcome = Outcome.USUAL
        self.state: Sending = Sending.OPEN
        self.was_stuck: bool = False
        self.channel: MuxChannel | None = None
        """The two-way channel that this half belongs to. None if there is none, or once the half has ended."""
        sender.owner = self  # type: ignore[misc]  # each implementation has that slot

    # --- for the application

    async def send(self, message: bytes) -> None:
        """Send one message. This returns when the connection has queued the message after earlier ones of this half.

        If this is cancelled, the message hasn't been sent. Every call checks for cancellation. A call yields to other
        tasks if it has to wait, and otherwise after 64 calls or 128 KiB on this half at the latest.

        Raises:
            trio.ClosedResourceError: This side has called `finish`, `abort` or `aclose`.
            ChannelStopped: The peer doesn't receive on this channel any more.
            LinkLost: The connection is lost.
            LocalProtocolError: The message can't be sent, for example because it is too large.
        """
        budget = self._budget
        if get_ident() != budget.thread_ident:
            refuse_thread()
        await trio.lowlevel.checkpoint_if_cancelled()
        if type(message) is not bytes:
            message = as_bytes(message)
        size = len(message)
        sent = None
        if self.state is OPEN and not self._line and budget.admits(size):
            sent = self.sender.try_send(message)
        if sent is None:
            await self._hand_over(message)
            self._connection.request_write()
        else:
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
            if sent:
                self._connection.request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()

    def try_send(self, message: bytes) -> bool:
        """Send one message without a checkpoint, for callers outside of Trio tasks.

        Returns False, and does nothing, if `send` would have to wait or would raise an error.
        """
        if get_ident() != self._budget.thread_ident:
            refuse_thread()
        if type(message) is not bytes or self.state is not OPEN or self._line:
            return False
        if not self._budget.admits(len(message)) or self.sender.try_send(message) is None:
            return False
        self._connection.request_write()
        return True

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages, with one checkpoint if they don't have to wait.

        If this is cancelled, a prefix of the messages has been sent.
        """
        self._budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            rest = iter(messages)
            while batch := list(islice(rest, YIELD_CALLS * MANY)):
                if not self._send_all(batch):
                    for message in batch:
                        await self._hand_over(message if type(message) is bytes else as_bytes(message))
                        if self._since_yield >= YIELD_BYTES * MANY:
                            self._connection.request_write()
                            await self._yield()
                if self._since_yield >= YIELD_BYTES * MANY:
                    self._connection.request_write()
                    await self._yield()
        finally:
            self._connection.request_write()
        await self._yield()

    async def finish(self, payload: bytes = b"") -> None:
        """Send the end of this half, after all messages, and wait until the peer has confirmed it.

        `payload` is an optional last message.

        Raises:
            ChannelStopped: The peer stopped receiving before it got the end.
            LinkLost: The connection is lost, so nobody knows whether the peer got the end.
        """
        self._budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is OPEN:
            if payload:
                await self.wait_turn(len(payload))
            try:
                self._finish(payload)
            finally:
                self.end_turn()
            self._connection.request_write()
        elif self._error is not None:
            await self.refuse()
        await self.wait_finished()

    async def wait_finished(self) -> None:
        """Wait until `finish` may return. In most protocols, that is when the peer has confirmed the end."""
        await self.wait_over()

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size can probably be sent without waiting. Another task may be faster."""
        self._budget.thread.check()
        await trio.lowlevel.checkpoint()
        if self.state is not OPEN:
            await self.refuse()
        await self.wait_turn(size)
        self.end_turn()

    # --- turns

    def may_send(self, size: int) -> bool:
        """Return True if a new sender may send `size` bytes without waiting."""
        return not self._line and self._budget.admits(size) and self.sender.has_room(size)

    async def wait_turn(self, size: int) -> None:
        """Sleep until this task may send `size` bytes.

        The caller must then send before its next checkpoint, and call `end_turn` afterwards. If this is cancelled, the
        caller must not call `end_turn`.
        """
        if not self.may_send(size):
            await self._wait(size)

    def end_turn(self) -> None:
        """End the turn of the first sender, which has sent or was cancelled. The next waiting sender gets its turn."""
        if self._line:
            self.window_changed()
        else:
            self._budget.withdraw(self)
        self._budget.wake_waiting()

    async def refuse(self) -> NoReturn:
        """Raise the error of a half on which nothing can be sent any more.

        This executes a checkpoint first, so that a loop around `send` lets other tasks run.
        """
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise self._reason_to_raise()

    # --- ending the half

    async def aclose(self) -> None:
        """Send the end of this half, after all messages, without waiting for the peer."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close the half like `aclose`, but without a checkpoint."""
        if self.close_quietly():
            self._connection.request_write()

    def close_quietly(self) -> bool:
        """Close the half like `close`, for a caller that requests the write later. Return False if already closed."""
        self._budget.thread.check()
        if self.state is not OPEN:
            return False
        self._finish(b"")
        return True

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Cancel the half. Queued messages are dropped, and the peer is notified that messages are missing.

        The peer gets the reason and the code. `abort` also works after `finish` or `aclose`, as long as the end hasn't
        been sent.
        """
        self._budget.thread.check()
        if self.state is Sending.CLOSED:
            return
        self.sender.cancel(Reason(reason, code))
        self._connection.dispatch_events()
        if self.state is OPEN:
            self.state = advance(self.state, Step.CANCEL)
        self._outcome = Outcome.GIVEN_UP
        self._error = closed
        self._close_gate(closed)
        self._budget.wake_waiting()  # `cancel` has dropped the queued bytes
        self._connection.request_write()

    async def wait_over(self) -> None:
        """Wait until the peer has confirmed the end. Raises an error if the half has ended in another way."""
        self._budget.thread.check()
        if self.state is not Sending.CLOSED:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    def cancel_when_over(self, scope: trio.CancelScope | None) -> None:
        """Cancel this scope when the half is closed, for whatever reason. None forgets the scope that was given before.

        This ends work whose result the peer doesn't want any more. Unlike `wait_over`, it doesn't need a task.
        """
        self._scope = scope
        if scope is not None and self.state is Sending.CLOSED:
            scope.cancel()

    @property
    def waiting_since(self) -> float | None:
        """The time at which the first waiting sender began to wait, or None if no task waits."""
        return self._line[0].since if self._line else None

    @property
    def is_unheard(self) -> bool:
        """True while the peer hasn't confirmed every message, and after the connection was lost in that state."""
        outcome = self._outcome
        return outcome is Outcome.LOST or (outcome is Outcome.USUAL and self.state is not Sending.CLOSED)

    @property
    def was_given_up(self) -> bool:
        """True after `abort`. A closing session doesn't wait until the peer has confirmed the end of such a half."""
        return self._outcome is Outcome.GIVEN_UP

    @property
    def starves(self) -> bool:
        """True while a task waits to send a message for which the window has no room."""
        return bool(self._line) and not self.sender.has_room(self._line[0].size)

    def __repr__(self) -> str:
        return f"<{self.sender.label} {self.state_text()}>"

    def state_text(self) -> str:
        """Return a description of the state and of the waiting senders for `repr`."""
        if not self._line:
            return self.state.value
        senders = counted(len(self._line), "sender")
        try:
            waited = f" {trio.current_time() - self._line[0].since:.1f} s"
        except RuntimeError:  # `repr` was called outside of Trio
            waited = ""
        return f"{self.state.value}, {senders} waiting{waited} for credit"

    # --- for the connection

    def window_changed(self) -> None:
        """Wake the first sender if its message can be sent now, because the half's window may have changed."""
        if self._line and not self._line[0].reserved:
            size = self._line[0].size
            if self._budget.admits(size):  # the first sender may overtake waiting halves, as a new sender may
                self._budget.dequeue(self)
                self.wake_first(max(size, 1))
            else:
                self._ask_for(size)

    def confirmed(self) -> None:
        """Close the half, because the peer has confirmed its end."""
        self._over_by(Step.CONFIRMED, None)

    def stopped(self, error: ErrorMaker) -> None:
        """Close the half, because the peer has stopped receiving. Senders raise `error()`."""
        self._over_by(Step.STOPPED, error)

    def lost(self, error: ErrorMaker) -> None:
        """Close the half, because the connection is lost. Senders raise `error()`."""
        if self.state is not Sending.CLOSED:
            if self._outcome is Outcome.USUAL:
                self._outcome = Outcome.LOST
            self._over_by(Step.LOST, error)

    # --- for the budget

    @property
    def first_size(self) -> int:
        """The size of the first sender's message while that sender waits, otherwise 0."""
        return self._line[0].size if self._line and not self._line[0].reserved else 0

    @property
    def first_waiter(self) -> Waiter | None:
        """The first waiting sender, or None if no task waits."""
        return self._line[0] if self._line else None

    def has_room(self, size: int) -> bool:
        """Return True if the window has room for `size` bytes."""
        return self.sender.has_room(size)

    def unread_beside(self) -> int:
        """Return the number of messages that wait to be received on the same channel."""
        return 0 if self.channel is None else self.channel.receiving.unread

    def wake_first(self, reserved: int) -> None:
        """Wake the first sender, and reserve `reserved` bytes of the budget for it."""
        if not self._line or self._line[0].reserved:
            return
        first = self._line[0]
        if self.sender.has_room(first.size):
            first.reserved = reserved
            self._budget.reserved += reserved
            trio.lowlevel.reschedule(first.task)
        else:
            self._ask_for(first.size)

    # --- waiting

    async def _hand_over(self, message: bytes) -> None:
        """Wait for a turn, then pass the message to the engine without a checkpoint in between."""
        size = len(message)
        if self.state is not OPEN:
            await self.refuse()
        if self.may_send(size):
            self.sender.send(message)
            self._since_yield += max(size, YIELD_LEAST)
            return
        await self._wait(size)
        try:
            if self.sender.try_send(message) is None:
                self.sender.send(message)
        finally:
            self.end_turn()

    def _send_all(self, messages: list[bytes]) -> bool:
        """Pass all messages to the engine if none of them has to wait. Otherwise, do nothing and return False."""
        if self.state is not OPEN or self._line or set(map(type, messages)) != ONLY_BYTES:
            return False
        size = sum(map(len, messages))
        if size > YIELD_BYTES * MANY or not self._budget.admits(size) or not self.sender.try_send_all(messages):
            return False
        self._since_yield += max(size, YIELD_LEAST * len(messages))
        return True

    async def _wait(self, size: int) -> None:
        self.sender.check_size(size)
        self._connection.request_write()
        if self.state is not OPEN:  # `request_write` may have noticed that the connection is broken
            await self.refuse()
        if self.may_send(size):  # `request_write` may have made room
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
        if self.state is not OPEN:  # the half was closed after this sender was woken and before it ran
            self.end_turn()
            raise self._reason_to_raise()

    async def _sleep(self, waiter: Waiter) -> None:
        """Sleep until it is this sender's turn."""

        def abort(_: object) -> trio.lowlevel.Abort:
            was_first = self._line[0] is waiter
            self._line.remove(waiter)
            self._free_line()
            if was_first:
                self.end_turn()
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            await trio.lowlevel.wait_task_rescheduled(abort)
            self._budget.reserved -= waiter.reserved  # this task sends before its next checkpoint
            if waiter.error is not None:
                self._budget.wake_waiting()  # the reserved bytes are free
                raise waiter.error()
            if self.sender.has_room(waiter.size):
                return
            # Another half has used the room in a window that both share. Let other senders use the reserved bytes. Only
            # then reset `reserved`, because a waiter without a reservation could be rescheduled while it runs.
            self._budget.wake_waiting()
            waiter.reserved = 0
            self._ask_for(waiter.size)

    async def _sleep_measured(self, waiter: Waiter, facts: Facts) -> None:
        on: Blocked = "transport" if self.sender.has_room(waiter.size) else "credit"
        facts.wait_began(on)
        try:
            await self._sleep(waiter)
        finally:
            facts.wait_ended(on, trio.current_time() - waiter.since)

    def _ask_for(self, size: int) -> None:
        """Ask to be woken when `size` bytes fit: by the engine if the window has no room, otherwise by the budget."""
        if self.sender.has_room(size):
            self._budget.enqueue(self)
            return
        self._budget.dequeue(self)  # the half may still be in the budget's queue because of an earlier, smaller message
        loss = self._connection.loss
        if loss is None:
            self.sender.notify_when_room(size)
        else:
            # The connection is lost, so the window never gets room. Close the half in the next pass of Trio's loop,
            # because the calling task may be one of the tasks that must be woken.
            trio.lowlevel.current_trio_token().run_sync_soon(self.lost, loss)

    def _free_line(self) -> None:
        """Drop the empty deque. Every channel we open waits once for its first credit, so each would keep 760 bytes."""
        if not self._line:
            self._line = NO_QUEUE

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    # --- closing

    def _finish(self, payload: bytes) -> None:
        self.sender.finish(payload)
        self.state = advance(self.state, Step.FINISH)
        self._close_gate(closed)
        loss = self._connection.loss
        if loss is not None:  # the connection is lost, so `finish` would wait forever for the confirmation of the end
            trio.lowlevel.current_trio_token().run_sync_soon(self.lost, loss)

    def _over_by(self, step: Step, error: ErrorMaker | None) -> None:
        if self.state is Sending.CLOSED:
            return
        self.state = advance(self.state, step)
        self._error = self._error or error
        if step is Step.LOST and (self._line or self._over is not None or self._scope is not None):
            turns().wake(partial(self._wake_all, error or closed))
        else:
            self._wake_all(error or closed)

    def _wake_all(self, error: ErrorMaker) -> None:
        self._close_gate(error)
        if self._over is not None:
            self._over.set()
        if self._scope is not None:
            self._scope.cancel()

    def _close_gate(self, error: ErrorMaker) -> None:
        """Wake all waiting senders, which raise `error()`. The state already keeps new senders out."""
        line, self._line = self._line, NO_QUEUE
        for waiter in line:
            waiter.error = error
            if not waiter.reserved:
                trio.lowlevel.reschedule(waiter.task)
        self._budget.withdraw(self)

    def _reason_to_raise(self) -> Exception:
        return (self._error or closed)()


def closed() -> Exception:
    """Return the error for using a half that this side has closed."""
    return trio.ClosedResourceError("this side of the channel was closed")


def as_bytes(message: object) -> bytes:
    """Convert a bytes-like message to bytes. Raises `TypeError` for any other object."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message is bytes, not {type(message).__name__}")


# Python prints this name in the warning for a coroutine that was never awaited, so it must be the public name.
for _method in (SendHalf.send, SendHalf.send_many, SendHalf.finish):
    _method.__qualname__ = f"Channel.{_method.__name__}"
