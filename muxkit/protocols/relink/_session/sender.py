"""Senders of a link: messages of several parts, receipts, transactions."""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Sending
from muxkit.protocols.relink._session.errors import NotCommitted, RolledBackError
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, SendHalf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from muxkit.protocols.relink._session.core import Core, ErrorMaker


PART_ROOM = 56  # bytes that a part beside others takes in a window, at most
PARTS_ROOM = 32  # and the head of such a message


class Outcome(Enum):
    """The fate of a message in a transaction."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    ROLLED_BACK = "rolled back"


class Receipt:
    """A receipt for one message: wait until the peer has received, consumed, or committed it."""

    __slots__ = ("_answer", "_sender", "number", "outcome")

    def __init__(self, sender: Sender, number: int) -> None:
        self._sender = sender
        self._answer: trio.Event | None = None
        self.number = number
        """Counted from 0 since the channel was opened."""
        self.outcome: Outcome | None = None
        """Under transactions: what became of it, None while that is not known."""

    async def received(self) -> None:
        """Wait until the peer has it: it will not be sent again. Cancelled, nothing changes.

        Raises `LinkChanged` or `LinkLost` if that will never be known.
        """
        await self._sender.received.reached(self.number)

    async def consumed(self) -> None:
        """Wait until the peer's application is done with it, or until it was rolled back and dropped there."""
        await self._sender.consumption.reached(self.number)

    async def committed(self) -> None:
        """Wait until the peer's application has processed it; `commit` comes first, or this waits for ever.

        Raises `NotCommitted` if it could not, `RolledBackError` if we took it back, `LocalProtocolError` on a channel
        without transactions, and `LinkChanged` or `LinkLost` if it will never be known.
        """
        await trio.lowlevel.checkpoint()
        channel = self._sender.channel
        if not self._sender.has_transactions:
            raise LocalProtocolError(f"channel {channel} has no transactions")
        if self.outcome is None:
            self._sender.raise_if_lost()
            self._answer = self._answer or trio.Event()
            await self._answer.wait()
        if self.outcome is None:
            self._sender.raise_if_lost()
        if self.outcome is Outcome.UNCOMMITTED:
            raise NotCommitted(channel, self.number)
        if self.outcome is Outcome.ROLLED_BACK:
            raise RolledBackError(channel, self.number)

    def decide(self, outcome: Outcome) -> None:
        """Set the outcome and wake the waiters; called by the sender."""
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        """Wake the waiters; called by the sender."""
        if self._answer is not None:
            self._answer.set()

    def __repr__(self) -> str:
        became = "" if self.outcome is None else f" {self.outcome.value}"
        return f"<relink.Receipt of message {self.number} on channel {self._sender.channel}{became}>"


class SendQueue(SendHalf):
    """The queue of tasks that wait to send on one channel."""

    __slots__ = ("_channel", "_core")

    def __init__(self, core: Core, channel: int) -> None:
        super().__init__(core.room, core.request_write)
        self._core = core
        self._channel = channel

    def admits(self, size: int) -> bool:
        # Behind a life of the channel that is ending, its end has to be waited for.
        return self._channel not in self._core.successors and self._core.engine.admits(self._channel, size)

    def watch(self, size: int) -> None:
        self._core.engine.watch(self._channel, size)

    def check_size(self, size: int) -> None:
        """Do nothing: the sender has checked the size, which here includes the parts' overhead."""

    def may_go(self, size: int) -> bool:
        return self.may_send(size)

    async def refuse(self) -> NoReturn:
        await self._refuse()

    @property
    def error(self) -> ErrorMaker | None:
        return self._error

    def _push(self, message: bytes) -> None:
        raise AssertionError("a queue is only waited in")

    def _finish(self, payload: bytes) -> None:
        """Do nothing: the sender closes the channel."""

    def _abort(self) -> None:
        """Do nothing: the sender closes the channel."""


class Sender:
    """Sends on one of our channels, from its first message until the peer has confirmed the close.

    As a block: left normally it closes the channel behind everything that was sent, left by an error as well. What is
    neither committed nor rolled back by then is rolled back.
    """

    def __init__(self, core: Core, channel: int) -> None:
        self._core = core
        self._engine = core.engine
        self.channel = channel
        self.has_transactions = core.out_transactions
        self.received = Watermark(self.raise_if_lost)
        self.consumption = Watermark(self.raise_if_lost)
        self._queue = SendQueue(core, channel)
        self._unanswered: deque[Receipt] = deque()  # under transactions
        self._last: int | None = None
        self._decided = -1
        self._since_yield = 0  # bytes
        self._is_closed = False  # the engine knows that it is, or it was never open
        self._error: ErrorMaker | None = None

    # --- for the application

    async def send(self, *parts: bytes) -> Receipt:
        """Send one message of so many parts; returns when the link has it, connected or not.

        Cancelled means not sent. Waits while the window is full, which empties as the peer's application consumes
        (under transactions: answers, so commit or roll back before). Checks for cancellation in every call, yields at
        the latest on every 64th call or 16 KiB.

        Raises `trio.ClosedResourceError` after `close`, `LinkChanged` or `LinkLost` when what the channel was is gone,
        `LocalProtocolError` for what cannot be sent.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        parts = as_parts(parts)
        size = self.size_of(parts)
        queue = self._queue
        if queue.state is Sending.OPEN and queue.may_go(size):
            receipt = self._push(parts)
            self._core.request_write()
        else:
            if queue.state is not Sending.OPEN:
                await queue.refuse()
            await queue.wait_turn(size)
            self._since_yield = 0
            try:
                receipt = self._push(parts, overdraw=True)
            finally:
                queue.end_turn()
            self._core.request_write()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            self._since_yield = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        return receipt

    async def send_many(self, messages: Iterable[bytes]) -> list[Receipt]:
        """Send messages of one part each, as `send` does; cancelled, a prefix was sent."""
        return [await self.send(message) for message in messages]

    def commit(self, *, through: Receipt | int | None = None) -> Receipt:
        """Have the peer process what is not decided yet, up to this message (None: everything sent so far).

        Gives the receipt of the last of them: `await sender.commit().committed()`. Never waits.
        """
        last = self._number(through)
        self._engine.commit(self.channel, through=last)
        receipt = self._unanswered[last - self._unanswered[0].number]
        self._decided = last
        self._core.after_command()
        return receipt

    def rollback(self, *, through: Receipt | int | None = None) -> None:
        """Have the peer ignore what is not decided yet, up to this message (None: everything sent so far)."""
        last = self._number(through)
        self._engine.rollback(self.channel, through=last)
        oldest = self._unanswered[0].number
        for number in range(max(self._decided + 1, oldest), last + 1):
            self._unanswered[number - oldest].decide(Outcome.ROLLED_BACK)
        self._decided = last
        self._core.after_command()

    async def finish(self) -> None:
        """Close the channel, and wait until the peer's application is done with everything.

        Raises `LinkChanged` or `LinkLost` if that will never be known. Cancelled: the channel is closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.close()
        await self._queue.wait_over()

    def close(self) -> None:
        """Close the channel behind everything that was sent; does not wait."""
        if self._is_closed:
            return
        self._is_closed = True
        queue, is_open = self._queue, self._queue.state is Sending.OPEN
        queue.close()
        if not is_open:
            return
        if self._last is None:
            self._forget()
            queue.confirmed()
            return
        if self.has_transactions and self._decided < self._last:
            self.rollback()
        self._engine.close(self.channel)
        self._core.after_command()

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def is_unheard(self) -> bool:
        """True if something was sent that the peer's application may not have consumed."""
        return self._last is not None and self.consumption.value < self._last

    @property
    def is_closed(self) -> bool:
        """True once it was closed on our side."""
        return self._is_closed

    @property
    def is_live(self) -> bool:
        """True if something was sent and the close is neither confirmed nor lost."""
        return self._last is not None and self._queue.state is not Sending.CLOSED

    def __repr__(self) -> str:
        return f"<relink.Sender {self.channel} {self._queue.state.value}>"

    # --- for the link

    def size_of(self, parts: Sequence[bytes]) -> int:
        """Return the size of a message as `admits` counts it; raises `LocalProtocolError` if it can never be sent."""
        size, count = sum(map(len, parts)), len(parts)
        if size > self._core.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._core.limits.message})")
        if count == 1:
            return size
        if count > self._core.config.parts:
            raise LocalProtocolError(f"{count} parts against Config(parts={self._core.config.parts})")
        return size + PART_ROOM * count + PARTS_ROOM

    def may_go(self, size: int) -> bool:
        return self._queue.state is Sending.OPEN and self._queue.may_go(size)

    async def wait_for_room(self, size: int) -> None:
        """Wait until a message of this size might fit; nothing is reserved."""
        if self._queue.state is not Sending.OPEN:
            await self._queue.refuse()
        await self._queue.wait_turn(size)
        self._queue.end_turn()

    def sent(self, number: int) -> Receipt:
        """Make the receipt of a message that the engine has queued."""
        receipt = Receipt(self, number)
        self._last = number
        self._core.messages_sent += 1
        if self.has_transactions:
            self._unanswered.append(receipt)
        return receipt

    def raise_if_lost(self) -> None:
        if self._error is not None:
            raise self._error()

    def heard(self, through: int) -> None:
        self.received.advance(through)

    def consumed(self, through: int) -> None:
        self.received.advance(through)
        self.consumption.advance(through)
        waiting = self._unanswered
        while waiting and waiting[0].number <= through and waiting[0].outcome is Outcome.ROLLED_BACK:
            waiting.popleft()

    def answered(self, through: int, *, committed: bool) -> None:
        self.received.advance(through)
        outcome = Outcome.COMMITTED if committed else Outcome.UNCOMMITTED
        waiting = self._unanswered
        while waiting and waiting[0].number <= through:
            receipt = waiting.popleft()
            if receipt.outcome is None:
                receipt.decide(outcome)
        self._queue.window_changed()

    def closed(self) -> None:
        if self._last is not None:
            self.consumed(self._last)
        self._queue.confirmed()

    def window_changed(self) -> None:
        self._queue.window_changed()

    def lost(self, error: ErrorMaker) -> None:
        self._error = self._error or error
        self._queue.lost(error)
        for mark in (self.received, self.consumption):
            mark.wake_all()
        for receipt in self._unanswered:
            receipt.wake()

    # --- inside

    def _push(self, parts: tuple[bytes, ...], *, overdraw: bool = False) -> Receipt:
        return self.sent(self._engine.send(self.channel, parts, overdraw=overdraw))

    def _number(self, through: Receipt | int | None) -> int:
        self.raise_if_lost()
        if self._queue.error is None and self._is_closed and self._queue.state is Sending.CLOSED:
            raise trio.ClosedResourceError("this sender was closed")
        if self._last is None:
            raise LocalProtocolError(f"channel {self.channel}: nothing was sent that could be decided")
        if through is None:
            return self._last
        return through.number if isinstance(through, Receipt) else through

    def _forget(self) -> None:
        core = self._core
        for table in (core.outs, core.successors):
            if table.get(self.channel) is self:
                del table[self.channel]


def as_parts(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the parts of a message as bytes; TypeError for anything that is not bytes-like."""
    return tuple(part if type(part) is bytes else _as_bytes(part) for part in parts)


def _as_bytes(part: object) -> bytes:
    if isinstance(part, (bytes, bytearray, memoryview)):
        return bytes(part)
    raise TypeError(f"the parts of a message are bytes, not {type(part).__name__}")


NONE = -1  # before the first


class Watermark:
    """A growing number, with tasks that wait until it reaches theirs. An advance costs only what it wakes."""

    __slots__ = ("_check", "_events", "_numbers", "value")

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check  # raises if the number will not grow any more
        self._numbers: list[int] = []  # a heap
        self._events: dict[int, trio.Event] = {}
        self.value = NONE

    async def reached(self, number: int) -> None:
        """Wait until it is at least `number`."""
        await trio.lowlevel.checkpoint()
        if self.value >= number:
            return
        self._check()
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = trio.Event()
            heapq.heappush(self._numbers, number)
        await event.wait()
        if self.value < number:
            self._check()

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
