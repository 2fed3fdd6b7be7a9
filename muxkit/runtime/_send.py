"""How does an application send? One direction of a channel, as a `trio.abc.SendChannel` of whole messages."""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import trio

from muxkit.core import Sending, Step, advance
from muxkit.runtime._gate import ErrorMaker, Gate, OutboxBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

YIELD_CALLS = 64  # calls after which a half yields at the latest
YIELD_BYTES = 16 * 1024  # the same in bytes
YIELD_LEAST = YIELD_BYTES // YIELD_CALLS  # bytes that a call counts for at least, so that one number keeps both
OPEN = Sending.OPEN  # looked up for each message
ONLY_BYTES = {bytes}
MANY = 16  # times as much for messages that are sent with one call


class _Outcome(Enum):
    """How a half ends, as far as that cannot be seen from its state."""

    USUAL = auto()
    GIVEN_UP = auto()
    LOST = auto()  # with the connection, before the peer confirmed it


class SendHalf(trio.abc.SendChannel[bytes]):
    """Sends whole messages; a protocol fills in the six methods at the end.

    Several tasks may send at once: they are served in the order in which they came.
    """

    __slots__ = ("_budget", "_error", "_gate", "_outcome", "_over", "_request_write", "_since_yield", "state")

    def __init__(self, room: OutboxBudget, ring: Callable[[], None]) -> None:
        self._request_write = ring
        self._budget = room
        self._gate: Gate | None = None  # made when somebody must wait for the first time
        self._error: ErrorMaker | None = None
        self._over: trio.Event | None = None
        self._since_yield = 0  # bytes
        self._outcome = _Outcome.USUAL
        self.state = Sending.OPEN

    # --- for the application

    async def send(self, message: bytes) -> None:
        """Send one message; returns when the connection has it, in order behind the half's earlier ones.

        Cancelled means not sent. Checks for cancellation in every call, yields at the latest on every 64th call
        or 16 KiB of this half, and always when it had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `abort` or `aclose`, `ChannelStopped` when the peer
        wants no more, `LinkLost` when the connection is gone, `LocalProtocolError` for what cannot be sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if type(message) is not bytes:
            message = _as_bytes(message)
        size = len(message)
        if self.state is OPEN and not self._gate and self._budget.admits(size) and self._try_push(message):
            self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        else:
            await self._hand_over(message)
        self._request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()

    async def send_many(self, messages: Iterable[bytes]) -> None:
        """Send several messages with one checkpoint, if they need not wait; cancelled, a prefix was sent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            rest = iter(messages)
            while batch := list(islice(rest, YIELD_CALLS * MANY)):
                if not self._push_all(batch):
                    for message in batch:
                        await self._hand_over(message if type(message) is bytes else _as_bytes(message))
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
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.state is Sending.OPEN:
            if payload:
                await self.wait_turn(len(payload))
            try:
                self._close(payload)
            finally:
                self.end_turn()
            self._request_write()
        elif self._error is not None:
            await self._refuse()
        await self.wait_over()

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
        self._budget.wake_waiting()  # what was queued is not any more
        self._request_write()

    async def wait_over(self) -> None:
        """Wait until the peer confirmed the end."""
        if self.state is not Sending.CLOSED:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    async def wait_for_room(self, size: int = 1) -> None:
        """Wait until a message of this size might be sent without waiting; no promise."""
        await trio.lowlevel.checkpoint()
        if self.state is not Sending.OPEN:
            await self._refuse()
        await self.wait_turn(size)
        self.end_turn()

    # --- for the session

    async def wait_turn(self, size: int) -> None:
        """Sleep until `size` bytes may go; the caller must use that before his next checkpoint, then `end_turn`."""
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

    def end_turn(self) -> None:
        """The turn that we waited for was used, or not."""
        if self._gate is not None:
            self._gate.end_turn()
        else:
            self._budget.wake_waiting()

    def window_changed(self) -> None:
        """The half's window may have changed."""
        if self._gate is not None:
            self._gate.window_changed()

    def confirmed(self) -> None:
        """The peer heard that we are done."""
        self._shut(Step.CONFIRMED, None)

    def stopped(self, error: ErrorMaker) -> None:
        """The peer wants no more."""
        self._shut(Step.STOPPED, error)

    @property
    def is_unheard(self) -> bool:
        """Is it unknown whether the peer has heard everything? True also once it can never be known."""
        outcome = self._outcome
        return outcome is _Outcome.LOST or (outcome is _Outcome.USUAL and self.state is not Sending.CLOSED)

    @property
    def given_up(self) -> bool:
        """Was it aborted, so that nobody waits for the peer to hear of it?"""
        return self._outcome is _Outcome.GIVEN_UP

    def lost(self, error: ErrorMaker) -> None:
        """The connection is gone."""
        if self.state is not Sending.CLOSED:
            if self._outcome is _Outcome.USUAL:
                self._outcome = _Outcome.LOST
            self._shut(Step.LOST, error)

    def _shut(self, step: Step, error: ErrorMaker | None) -> None:
        if self.state is Sending.CLOSED:
            return
        self.state = advance(self.state, step)
        self._error = self._error or error
        self._close_gate(error or _closed)
        if self._over is not None:
            self._over.set()

    # --- inside

    async def _hand_over(self, message: bytes) -> None:
        """Wait for room, then give the message to the engine with nothing in between."""
        size = len(message)
        if self.state is not Sending.OPEN:
            await self._refuse()
        if self.may_send(size):
            self._push(message)
            self._since_yield += max(size, YIELD_LEAST)
            return
        await self._wait(size)
        try:
            if not self._try_push(message):
                self._push(message)
        finally:
            self.end_turn()

    def may_send(self, size: int) -> bool:
        """May somebody who comes now send at once?"""
        return not self._gate and self._budget.admits(size) and self.admits(size)

    def _push_all(self, messages: list[bytes]) -> bool:
        """Give all of them to the engine, if they fit as they are; otherwise none."""
        if self.state is not OPEN or self._gate or set(map(type, messages)) != ONLY_BYTES:
            return False
        size = sum(map(len, messages))
        if size > YIELD_BYTES * MANY or not self._budget.admits(size) or not self._try_push_all(messages):
            return False
        self._since_yield += max(size, YIELD_LEAST * len(messages))
        return True

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _close(self, payload: bytes) -> None:
        self._finish(payload)
        self.state = advance(self.state, Step.FINISH)
        self._close_gate(_closed)

    def _close_gate(self, error: ErrorMaker) -> None:
        if self._gate is not None:
            self._gate.close(error)

    async def _refuse(self) -> NoReturn:
        """Nothing can be sent any more; a yield, so that a loop around it cannot keep everybody waiting."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        raise (self._error or _closed)()

    def _try_push(self, message: bytes) -> bool:
        """Give a message to the engine, if the window has room and nothing else is in the way.

        A protocol may have a quicker way than to ask first. False means that nothing was done.
        """
        if not self.admits(len(message)):
            return False
        self._push(message)
        return True

    def _try_push_all(self, messages: list[bytes]) -> bool:
        """The same for several at once: all or none."""
        return False

    @abstractmethod
    def admits(self, size: int) -> bool:
        """Does the window have room?"""

    @abstractmethod
    def watch(self, size: int) -> None:
        """Call `window_changed` when it may have it for a message of this size."""

    @abstractmethod
    def _push(self, message: bytes) -> None:
        """Give a message to the engine."""

    @abstractmethod
    def check_size(self, size: int) -> None:
        """Raise `LocalProtocolError` for a message that can never be sent."""

    @abstractmethod
    def _finish(self, payload: bytes) -> None:
        """Tell the engine that no more follows."""

    @abstractmethod
    def _abort(self) -> None:
        """Tell the engine to give up."""


def _closed() -> Exception:
    return trio.ClosedResourceError("this side of the channel was closed")


def _as_bytes(message: object) -> bytes:
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a message is bytes, not {type(message).__name__}")
