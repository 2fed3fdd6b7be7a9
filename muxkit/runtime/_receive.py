"""How does an application receive? The other direction of a channel, as a `trio.abc.ReceiveChannel` of messages."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import trio

from muxkit.core import Receiving, Step, advance
from muxkit.runtime._mailbox import Mailbox
from muxkit.runtime._send import YIELD_BYTES, YIELD_LEAST

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.runtime._gate import ErrorMaker
    from muxkit.runtime._reading import Reading


DRAINING = Receiving.DRAINING  # looked up for each message


class _Waiter:
    __slots__ = ("is_called", "message", "reading", "task")

    def __init__(self) -> None:
        self.message: bytes | None = None  # handed over: from then on a cancellation comes too late
        self.is_called = False
        self.task: trio.lowlevel.Task | None = None  # while it sleeps
        self.reading: Reading | None = None  # while it reads for all, and so must not be rescheduled

    def call(self) -> None:
        """It has its message, or will get none."""
        self.is_called = True
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
        elif self.reading is not None and self.reading.borrower_sleeps:
            self.reading.wake_borrower()


# What most halves have most of the time; nothing is ever put into these two.
NOTHING = Mailbox()
NOBODY: list[_Waiter] = []


class ReceiveHalf(trio.abc.ReceiveChannel[bytes]):
    """Receives whole messages; a protocol fills in the methods at the end.

    Several tasks may receive at once: messages go to them in the order in which they came to wait.
    """

    __slots__ = ("_error", "_line", "_mailbox", "_request_write", "_since_yield", "state")

    def __init__(self, ring: Callable[[], None]) -> None:
        self._request_write = ring
        self._mailbox = NOTHING
        self._line = NOBODY
        self._error: ErrorMaker = trio.EndOfChannel
        self._since_yield = 0  # bytes
        self.state = Receiving.OPEN

    # --- for the application

    async def receive(self) -> bytes:
        """The next message. Cancelled means that none was taken.

        Checks for cancellation in every call, yields at the latest on every 64th call or 16 KiB of this half,
        and always when it had to wait. What came before the end or the loss of the connection is given first.

        Raises `trio.EndOfChannel` at the clean end, `ChannelCancelled` when the peer gave up before it was done,
        `LinkLost` when the connection is gone, `trio.ClosedResourceError` after `aclose`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._mailbox.count:
            message = await self._wait()
            self._took(len(message))
            return message
        message = self._mailbox.take()
        size = len(message)
        self._took(size)
        self._since_yield += size if size > YIELD_LEAST else YIELD_LEAST  # noqa: FURB136 - `max` is a call
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return message

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, then give all that have come, at most `limit`; one checkpoint."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        has_waited = not self._mailbox.count
        messages = [await self._wait()] if has_waited else []
        messages += self._mailbox.take_all(None if limit is None else limit - len(messages))
        self._took(sum(map(len, messages)))
        if not has_waited:
            await self._yield()
        return messages

    async def aclose(self) -> None:
        """Stop receiving: what has come is dropped, and the peer is told to send no more."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        if self.state is Receiving.OPEN:
            self._stop()
        if self.state is not Receiving.CLOSED:
            self.state = advance(self.state, Step.STOP)
        self._error = trio.ClosedResourceError
        self._took(self._mailbox.clear())
        self._request_write()
        self._wake_all()

    # --- for the session

    def deliver(self, message: bytes) -> None:
        """A message came."""
        if self.state is Receiving.CLOSED:
            self._consumed(len(message))
            return
        if self._line:  # then nothing lies in the mailbox
            waiter = self._line.pop(0)
            if not self._line:
                self._line = NOBODY
            waiter.message = message
            waiter.call()
        else:
            if self._mailbox is NOTHING:
                self._mailbox = Mailbox()
            self._mailbox.put(message)

    def ended(self, error: ErrorMaker) -> None:
        """No more will come; `error` says why, once everything was taken."""
        if self.state is Receiving.OPEN:
            self.state = advance(self.state, Step.ENDED)
            self._error = error
            self._drain()
            self._wake_all()

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return self._mailbox.count

    # --- inside

    async def _wait(self) -> bytes:
        """The next message, in the order in which the waiting tasks came."""
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.cancel_shielded_checkpoint()  # a loop around it must not keep everybody waiting
            raise self._error()
        waiter = _Waiter()
        if self._line is NOBODY:
            self._line = []
        self._line.append(waiter)
        reading = self._reading()
        if reading is not None and reading.can_borrow():
            waiter.reading = reading
            try:
                await reading.read_for(waiter)
            except BaseException:
                if not waiter.is_called:
                    self._line.remove(waiter)
                raise
            finally:
                waiter.reading = None
        if not waiter.is_called:
            await self._sleep(waiter)
        self._since_yield = 0
        if waiter.message is None:
            raise self._error()
        return waiter.message

    async def _sleep(self, waiter: _Waiter) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._line.remove(waiter)
            return trio.lowlevel.Abort.SUCCEEDED

        waiter.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def _took(self, size: int) -> None:
        if not self._mailbox.count:
            self._mailbox = NOTHING
        if self._consumed(size):
            self._request_write()
        if self.state is DRAINING:
            self._drain()

    def _drain(self) -> None:
        if not self._mailbox.count:
            self.state = advance(self.state, Step.DRAINED)

    def _wake_all(self) -> None:
        line, self._line = self._line, NOBODY
        for waiter in line:
            waiter.call()

    async def _yield(self) -> None:
        self._since_yield = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _reading(self) -> Reading | None:
        """Who reads the connection, if a task that waits here may do it meanwhile."""
        return None

    @abstractmethod
    def _consumed(self, size: int) -> bool:
        """Tell the engine that the application has taken so many bytes; gives whether there is something to write."""

    @abstractmethod
    def _stop(self) -> None:
        """Tell the engine that the application wants no more."""
