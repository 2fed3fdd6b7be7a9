"""The sending half of a channel: the line of its senders, and how the half ends.

Several tasks may send on one half. They stand in a line, and the first of them sleeps until its message can go:

    the window has no room           the engine reports `Writable` when that may have changed
    the budget is used up            the half stands in the budget's line, until bytes were written or dropped
    woken                            the sender's bytes are reserved until its next step

A sender that comes while nobody waits, and whose message fits, goes at once. What all this does to the wire is the
engine's business: `sender` is the engine's half, and its methods are called directly. `state` goes by the table
`muxkit.core.SENDING`.
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


YIELD_CALLS = 64  # calls after which a half yields at the latest
YIELD_BYTES = 128 * 1024  # the same in bytes; two of 64 KiB take about as long as 64 short calls
YIELD_LEAST = YIELD_BYTES // YIELD_CALLS  # bytes that a call counts for at least, so that one number keeps both
MANY = 16  # one `send_many` may send so many times what a half sends between two yields
OPEN: Final = Sending.OPEN  # looked up for each message
ONLY_BYTES = {bytes}


class Outcome(Enum):
    """How a half ends, as far as its state doesn't tell."""

    USUAL = auto()
    GIVEN_UP = auto()
    LOST = auto()  # with the connection, before the peer confirmed it


class SendHalf:
    """Sends whole messages on a channel, for as many tasks as want to, first come, first served.

    A session that sends something other than a plain message waits for its turn by itself: `await wait_turn(size)`
    unless `may_send(size)`, then it gives the engine what it has with no checkpoint in between, then it calls
    `end_turn` if it had to wait.
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
        self._scope: trio.CancelScope | None = None  # cancelled when the half is over
        self._since_yield = 0  # bytes
        self._outcome = Outcome.USUAL
        self.state: Sending = Sending.OPEN
        self.was_stuck: bool = False
        self.channel: MuxChannel | None = None
        """The two-way channel that this is a half of, until the half has ended."""
        sender.owner = self  # type: ignore[misc]  # each implementation has that slot

    # --- for the application

    async def send(self, message: bytes) -> None:
        """Send one message; returns when the connection has it, in order behind the half's earlier ones.

        Cancelled means not sent. Checks for cancellation in every call, yields at the latest on every 64th call
        or 128 KiB of this half, and always when it had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `abort` or `aclose`, `ChannelStopped` when the peer
        wants no more, `LinkLost` when the connection is gone, `LocalProtocolError` for what cannot be sent.
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
        """`send` outside of Trio's tasks; False means that it would wait or raise, and that nothing was done."""
        if get_ident() != self._budget.thread_ident:
            refuse_thread()
        if type(message) is not bytes or self.state is not OPEN or self._line:
            return False
        if not self._budget.admits(len(message)) or self.sender.try_send(message) is None:
            return False
        self._connection.request_write()
        return True

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint, if they need not wait; cancelled, a prefix was sent."""
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
        """Say that no more follows, after everything that was sent, and wait until the peer has heard it.

        Raises `ChannelStopped` if the peer stopped listening before, `LinkLost` if that is never known.
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
        """Wait, in `finish`, for what a finished half can know: in most protocols that the peer has heard its end."""
        await self.wait_over()

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size might be sent without waiting; no promise."""
        self._budget.thread.check()
        await trio.lowlevel.checkpoint()
        if self.state is not OPEN:
            await self.refuse()
        await self.wait_turn(size)
        self.end_turn()

    # --- turns

    def may_send(self, size: int) -> bool:
        """Return True if a sender that comes now may send so many bytes at once."""
        return not self._line and self._budget.admits(size) and self.sender.has_room(size)

    async def wait_turn(self, size: int) -> None:
        """Sleep until `size` bytes may go; the caller must send before its next checkpoint, then call `end_turn`.

        Cancelled means that there is no turn to end.
        """
        if not self.may_send(size):
            await self._wait(size)

    def end_turn(self) -> None:
        """The first sender has sent, or gave up: the next one follows, here and in the budget."""
        if self._line:
            self.window_changed()
        else:
            self._budget.withdraw(self)
        self._budget.wake_waiting()

    async def refuse(self) -> NoReturn:
        """Raise why nothing can be sent any more, after a checkpoint: a loop around it must let other tasks run."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise self._reason_to_raise()

    # --- the end

    async def aclose(self) -> None:
        """Say that no more follows, after everything that was sent; does not wait for the peer."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        if self.close_quietly():
            self._connection.request_write()

    def close_quietly(self) -> bool:
        """`close`, for a caller that requests the write itself, behind another command; return False if it was done."""
        self._budget.thread.check()
        if self.state is not OPEN:
            return False
        self._finish(b"")
        return True

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up: what has not begun to leave is dropped, and the peer learns that messages are missing, and why.

        After `finish` or `aclose` as well, as long as their end has not left.
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
        self._budget.wake_waiting()  # what was queued was dropped
        self._connection.request_write()

    async def wait_over(self) -> None:
        """Wait until the peer confirmed the end; raises what came instead."""
        self._budget.thread.check()
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

    @property
    def is_unheard(self) -> bool:
        """True while it is unknown whether the peer has heard everything; also once it can never be known."""
        outcome = self._outcome
        return outcome is Outcome.LOST or (outcome is Outcome.USUAL and self.state is not Sending.CLOSED)

    @property
    def was_given_up(self) -> bool:
        """True after `abort`: then leaving does not wait until the peer has heard of the end."""
        return self._outcome is Outcome.GIVEN_UP

    @property
    def starves(self) -> bool:
        """True while a task waits here to send what the window has no room for."""
        return bool(self._line) and not self.sender.has_room(self._line[0].size)

    def __repr__(self) -> str:
        return f"<{self.sender.label} {self.state_text()}>"

    def state_text(self) -> str:
        """Describe the state for `repr`, with those who wait."""
        if not self._line:
            return self.state.value
        senders = counted(len(self._line), "sender")
        try:
            waited = f" {trio.current_time() - self._line[0].since:.1f} s"
        except RuntimeError:  # shown outside of Trio
            waited = ""
        return f"{self.state.value}, {senders} waiting{waited} for credit"

    # --- for the connection

    def window_changed(self) -> None:
        """The half's window may have changed: wake the first sender if its message can go now."""
        if self._line and not self._line[0].reserved:
            size = self._line[0].size
            if self._budget.admits(size):  # like a newcomer
                self._budget.dequeue(self)
                self.wake_first(max(size, 1))
            else:
                self._ask_for(size)

    def confirmed(self) -> None:
        """The peer heard that we are done."""
        self._over_by(Step.CONFIRMED, None)

    def stopped(self, error: ErrorMaker) -> None:
        """The peer wants no more; `error` makes what senders raise."""
        self._over_by(Step.STOPPED, error)

    def lost(self, error: ErrorMaker) -> None:
        """The connection is gone; `error` makes what senders raise."""
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
        """The first sender that waits; None if no task does."""
        return self._line[0] if self._line else None

    def has_room(self, size: int) -> bool:
        """Return True if the window has room for so many bytes."""
        return self.sender.has_room(size)

    def unread_beside(self) -> int:
        """Return how many messages wait to be received on the same channel."""
        return 0 if self.channel is None else self.channel.receiving.unread

    def wake_first(self, reserved: int) -> None:
        """Wake the first sender, for which `reserved` bytes are free."""
        if not self._line or self._line[0].reserved:
            return
        first = self._line[0]
        if self.sender.has_room(first.size):
            first.reserved = reserved
            self._budget.reserved += reserved
            trio.lowlevel.reschedule(first.task)
        else:
            self._ask_for(first.size)

    # --- inside: waiting

    async def _hand_over(self, message: bytes) -> None:
        """Wait for a turn, then give the message to the engine with no checkpoint in between."""
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
        """Give all of them to the engine, if they fit as they are; otherwise none."""
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
        if self.state is not OPEN:  # writing at once may have found the connection broken
            await self.refuse()
        if self.may_send(size):  # or it has made room
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
            self._budget.reserved -= waiter.reserved  # it is used before the next checkpoint
            if waiter.error is not None:
                self._budget.wake_waiting()  # what was reserved is free
                raise waiter.error()
            if self.sender.has_room(waiter.size):
                return
            # Other halves were told of the same room in a window, and have taken it. What was reserved is free; the
            # reservation ends after that, as a waiter without one could be rescheduled while it runs.
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
        """Have this half woken when `size` bytes fit: by the budget, or by the engine if its window is too small."""
        if self.sender.has_room(size):
            self._budget.enqueue(self)
            return
        self._budget.dequeue(self)  # it may be in that line for another message, which was smaller
        loss = self._connection.loss
        if loss is None:
            self.sender.notify_when_room(size)
        else:  # no room can come; the calling task may be the one to wake
            trio.lowlevel.current_trio_token().run_sync_soon(self.lost, loss)

    def _free_line(self) -> None:
        """Let go of an empty line: each channel that this side opened has waited once, for its first credit."""
        if not self._line:
            self._line = NO_QUEUE

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    # --- inside: the end

    def _finish(self, payload: bytes) -> None:
        self.sender.finish(payload)
        self.state = advance(self.state, Step.FINISH)
        self._close_gate(closed)
        loss = self._connection.loss
        if loss is not None:  # the end is sent, but no confirmation can come, and `finish` would wait for it
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
        """Let every waiting sender raise; no further one may come."""
        line, self._line = self._line, NO_QUEUE
        for waiter in line:
            waiter.error = error
            if not waiter.reserved:
                trio.lowlevel.reschedule(waiter.task)
        self._budget.withdraw(self)

    def _reason_to_raise(self) -> Exception:
        return (self._error or closed)()


def closed() -> Exception:
    """Make the error for using a half that this side has closed."""
    return trio.ClosedResourceError("this side of the channel was closed")


def as_bytes(message: object) -> bytes:
    """Return a bytes-like message as bytes; raises TypeError for anything else."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message is bytes, not {type(message).__name__}")


# The name of a coroutine is what Python prints if it is never awaited; a program knows the channel, not its halves.
for _method in (SendHalf.send, SendHalf.send_many, SendHalf.finish):
    _method.__qualname__ = f"Channel.{_method.__name__}"
