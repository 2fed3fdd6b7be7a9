"""Senders of a link: messages of several parts, receipts, transactions."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Sending
from muxkit.protocols.relink._session.core import Acknowledged, Core
from muxkit.protocols.relink._session.errors import NotCommitted, RolledBackError
from muxkit.protocols.relink.engine.events import Committed, Consumed, Received
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, ErrorMaker, SendTurn, as_bytes

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
        await self._sender.wait_received(self.number)

    async def consumed(self) -> None:
        """Wait until the peer's application is done with it, or until it was rolled back and dropped there."""
        await self._sender.wait_consumed(self.number)

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


class Sender(SendTurn, trio.abc.AsyncResource):
    """Sends on one of our channels, from its first message until the peer has confirmed the close.

    As a block: left normally it closes the channel behind everything that was sent, left by an error as well. What is
    neither committed nor rolled back by then is rolled back.
    """

    __slots__ = (
        "_consumption",
        "_core",
        "_decided",
        "_engine",
        "_last",
        "_reception",
        "_unanswered",
        "channel",
        "has_transactions",
    )

    def __init__(self, core: Core, channel: int) -> None:
        super().__init__(core.budget, core.request_write)
        self._core = core
        self._engine = core.engine
        self.channel = channel
        self.has_transactions = core.out_transactions
        self._reception = Watermark()
        self._consumption = Watermark()
        self._unanswered: deque[Receipt] = deque()  # under transactions
        self._last: int | None = None
        self._decided = -1

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
        if self.state is not Sending.OPEN:
            await self._refuse()
        if self.may_send(size):
            number = self._engine.send(self.channel, parts)
        else:
            await self.wait_turn(size)
            try:
                number = self._engine.send(self.channel, parts, overdraw=True)
            finally:
                self.end_turn()
        receipt = self.sent(number)
        self._request_write()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
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
        await self.wait_over()

    def close(self) -> None:
        """Close the channel behind everything that was sent; does not wait."""
        is_open = self.state is Sending.OPEN
        super().close()
        if is_open and self._last is None:
            self._forget()
            self.confirmed()

    def abort(self) -> None:
        """The same as `close`: what was sent cannot be taken back, but for what is not decided."""
        self.close()

    @property
    def is_unheard(self) -> bool:
        """True if something was sent that the peer's application may not have consumed."""
        return self._last is not None and self._consumption.value < self._last

    @property
    def is_closed(self) -> bool:
        """True once it was closed on our side, or lost."""
        return self.state is not Sending.OPEN

    @property
    def is_live(self) -> bool:
        """True if something was sent and the close is neither confirmed nor lost."""
        return self._last is not None and self.state is not Sending.CLOSED

    def __repr__(self) -> str:
        return f"<relink.Sender {self.channel} {self.state.value}>"

    # --- for receipts and multicasts

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

    def sent(self, number: int) -> Receipt:
        """Make the receipt of a message that the engine has queued."""
        receipt = Receipt(self, number)
        self._last = number
        self._core.messages_sent += 1
        if self.has_transactions:
            self._unanswered.append(receipt)
        return receipt

    async def wait_received(self, number: int) -> None:
        await self._reception.reached(number, self)

    async def wait_consumed(self, number: int) -> None:
        await self._consumption.reached(number, self)

    def raise_if_lost(self) -> None:
        if self._error is not None:
            raise self._error()

    # --- for the link

    def acknowledged(self, event: Acknowledged) -> None:
        self._reception.advance(event.through)
        if isinstance(event, Consumed):
            self._consumed(event.through)
        elif not isinstance(event, Received):
            self._answered(event.through, Outcome.COMMITTED if isinstance(event, Committed) else Outcome.UNCOMMITTED)

    def _consumed(self, through: int) -> None:
        self._consumption.advance(through)
        waiting = self._unanswered
        while waiting and waiting[0].number <= through and waiting[0].outcome is Outcome.ROLLED_BACK:
            waiting.popleft()

    def _answered(self, through: int, outcome: Outcome) -> None:
        waiting = self._unanswered
        while waiting and waiting[0].number <= through:
            receipt = waiting.popleft()
            if receipt.outcome is None:
                receipt.decide(outcome)
        self.window_changed()

    def closed(self) -> None:
        if self._last is not None:
            self._reception.advance(self._last)
            self._consumed(self._last)
        self.confirmed()

    def lost(self, error: ErrorMaker) -> None:
        super().lost(error)
        self._error = self._error or error  # also if it was over: its receipts wait
        self._reception.wake_all()
        self._consumption.wake_all()
        for receipt in self._unanswered:
            receipt.wake()

    # --- turns

    def admits(self, size: int) -> bool:
        # Behind a life of the channel that is ending, its end has to be waited for.
        return self.channel not in self._core.successors and self._engine.admits(self.channel, size)

    def watch(self, size: int) -> None:
        self._engine.watch(self.channel, size)

    def check_size(self, size: int) -> None:
        """Do nothing: `size_of` has checked it, and here it includes the parts' overhead."""

    def _finish(self, payload: bytes) -> None:
        if self._last is None:
            return
        if self.has_transactions and self._decided < self._last:
            self.rollback()
        self._engine.close(self.channel)
        self._core.after_command()

    def _abort(self) -> None:
        """Do nothing: `abort` closes."""

    # --- inside

    def _number(self, through: Receipt | int | None) -> int:
        self.raise_if_lost()
        if self.state is Sending.CLOSED:
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
    return tuple(part if type(part) is bytes else as_bytes(part) for part in parts)


NONE = -1  # before the first


class Watermark:
    """A growing number, with tasks that wait until it reaches theirs. An advance costs only what it wakes."""

    __slots__ = ("_events", "_numbers", "value")

    def __init__(self) -> None:
        self._numbers: list[int] = []  # a heap
        self._events: dict[int, trio.Event] = {}
        self.value = NONE

    async def reached(self, number: int, sender: Sender) -> None:
        """Wait until it is at least `number`; raises why the sender is lost if it will not grow any more."""
        await trio.lowlevel.checkpoint()
        if self.value >= number:
            return
        sender.raise_if_lost()
        event = self._events.get(number)
        if event is None:
            event = self._events[number] = trio.Event()
            heapq.heappush(self._numbers, number)
        await event.wait()
        if self.value < number:
            sender.raise_if_lost()

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
