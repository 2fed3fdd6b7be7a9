"""Senders and receivers of a link: messages of several parts, receipts, transactions."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from types import TracebackType

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Reason, Receiving, Sending, counted
from muxkit.protocols.relink._session.core import Core, NotCommitted, RolledBackError
from muxkit.protocols.relink.engine.events import Acknowledged, Arrived, Committed, Consumed, Received
from muxkit.protocols.relink.frames import Parts
from muxkit.runtime import (
    YIELD_BYTES,
    YIELD_LEAST,
    ErrorMaker,
    Reading,
    ReceiveHalf,
    SendTurn,
    Watermark,
    as_bytes,
    may_log,
    run_handler,
    turns,
)

Handler = Callable[["Message"], Awaitable[object]]

PART_ROOM = 56  # bytes that a part beside others takes in a window, at most
PARTS_ROOM = 32  # and the head of such a message

_log = logging.getLogger("muxkit")


# --- sending


class Outcome(Enum):
    """The fate of a message in a transaction."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    ROLLED_BACK = "rolled back"


@attrs.define(eq=False)
class Receipt:
    """A receipt for one message: wait until the peer has received, consumed, or committed it."""

    _sender: Sender
    number: int
    """Counted from 0 since the channel was opened."""
    outcome: Outcome | None = attrs.field(default=None, init=False)
    """Under transactions: what became of it, None while that is not known."""
    _answer: trio.Event | None = attrs.field(default=None, init=False)

    async def received(self) -> None:
        """Wait until the peer has it: it will not be sent again. Cancelled, nothing changes.

        Raises `LinkChanged` or `LinkLost` if that will never be known.
        """
        self._sender._budget.owner.check()
        await self._sender.reception.reached(self.number, self._sender._raise_if_lost)

    async def consumed(self) -> None:
        """Wait until the peer's application is done with it, or until it was rolled back and dropped there."""
        self._sender._budget.owner.check()
        await self._sender.consumption.reached(self.number, self._sender._raise_if_lost)

    async def committed(self) -> None:
        """Wait until the peer's application has processed it; `commit` comes first, or this waits for ever.

        Raises `NotCommitted` if it could not, `RolledBackError` if we took it back, `LocalProtocolError` on a channel
        without transactions, and `LinkChanged` or `LinkLost` if it will never be known.
        """
        self._sender._budget.owner.check()
        await trio.lowlevel.checkpoint()
        channel = self._sender.channel
        if not self._sender.has_transactions:
            raise LocalProtocolError(f"channel {channel} has no transactions")
        if self.outcome is None:
            self._sender._raise_if_lost()
            self._answer = self._answer or trio.Event()
            await self._answer.wait()
        if self.outcome is None:
            self._sender._raise_if_lost()
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
        "_core",
        "_decided",
        "_engine",
        "_last",
        "_unanswered",
        "channel",
        "consumption",
        "has_transactions",
        "reception",
    )

    def __init__(self, core: Core, channel: int) -> None:
        super().__init__(core.budget, core.request_write)
        self._core = core
        self._engine = core.engine
        self.channel: int = channel
        self.has_transactions: bool = core.engine.out_transactions
        self.reception: Watermark = Watermark()
        self.consumption: Watermark = Watermark()
        self._unanswered: deque[Receipt] = deque()  # under transactions
        self._last: int | None = None
        self._decided = -1

    # --- for the application

    async def send(self, *parts: bytes) -> Receipt:
        """Send one message of so many parts; returns when the link has it, connected or not.

        Cancelled means not sent. Waits while the window is full, which empties as the peer's application consumes
        (under transactions: answers, so commit or roll back before). Checks for cancellation in every call, yields at
        the latest on every 64th call or 128 KiB.

        Raises `trio.ClosedResourceError` after `close`, `LinkChanged` or `LinkLost` when what the channel was is gone,
        `LocalProtocolError` for what cannot be sent.
        """
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        parts = as_parts(parts)
        size = self._size_of(parts)
        if self.state is not Sending.OPEN:
            await self._refuse()
        if self._may_send(size):
            number = self._engine.send(self.channel, parts)
        else:
            await self._wait_turn(size)
            try:
                number = self._engine.send(self.channel, parts, overdraw=True)
            finally:
                self._end_turn()
        receipt = self._sent(number)
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
        self._budget.owner.check()
        last = self._number(through)
        self._engine.commit(self.channel, through=last)
        receipt = self._unanswered[last - self._unanswered[0].number]
        self._decided = last
        self._core.after_command()
        return receipt

    def rollback(self, *, through: Receipt | int | None = None) -> None:
        """Have the peer ignore what is not decided yet, up to this message (None: everything sent so far)."""
        self._budget.owner.check()
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
            self._confirmed()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """The same as `close`: what was sent cannot be taken back, but for what is not decided.

        The protocol has no place for the reason; the common channels have one.
        """
        self.close()

    @property
    def _is_unheard(self) -> bool:
        """True if something was sent that the peer's application may not have consumed."""
        return self._last is not None and self.consumption.value < self._last

    @property
    def is_closed(self) -> bool:
        """True once it was closed on our side, or lost."""
        return self.state is not Sending.OPEN

    @property
    def _is_live(self) -> bool:
        """True if something was sent and the close is neither confirmed nor lost."""
        return self._last is not None and self.state is not Sending.CLOSED

    def __repr__(self) -> str:
        return f"<relink.Sender {self.channel} {self.state.value}>"

    # --- for receipts and multicasts

    def _size_of(self, parts: Sequence[bytes]) -> int:
        """Return the size of a message as `has_room` counts it; raises `LocalProtocolError` if it can never be sent."""
        size, count = sum(map(len, parts)), len(parts)
        if size > self._core.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._core.limits.message})")
        if count == 1:
            return size
        if count > self._engine.config.parts:
            raise LocalProtocolError(f"{count} parts against Config(parts={self._engine.config.parts})")
        return size + PART_ROOM * count + PARTS_ROOM

    def _sent(self, number: int) -> Receipt:
        """Make the receipt of a message that the engine has queued."""
        receipt = Receipt(self, number)
        self._last = number
        self._core.messages_sent += 1
        if self.has_transactions:
            self._unanswered.append(receipt)
        return receipt

    def _raise_if_lost(self) -> None:
        if self._error is not None:
            raise self._error()

    # --- for the link

    def _acknowledged(self, event: Acknowledged) -> None:
        self.reception.advance(event.through)
        if isinstance(event, Consumed):
            self._consumed(event.through)
        elif not isinstance(event, Received):
            self._answered(event.through, Outcome.COMMITTED if isinstance(event, Committed) else Outcome.UNCOMMITTED)

    def _consumed(self, through: int) -> None:
        self.consumption.advance(through)
        waiting = self._unanswered
        while waiting and waiting[0].number <= through and waiting[0].outcome is Outcome.ROLLED_BACK:
            waiting.popleft()

    def _answered(self, through: int, outcome: Outcome) -> None:
        waiting = self._unanswered
        while waiting and waiting[0].number <= through:
            receipt = waiting.popleft()
            if receipt.outcome is None:
                receipt.decide(outcome)
        self._window_changed()

    def _closed(self) -> None:
        if self._last is not None:
            self.reception.advance(self._last)
            self._consumed(self._last)
        self._confirmed()

    def _lost(self, error: ErrorMaker) -> None:
        super()._lost(error)
        self._error = self._error or error  # also if it was over: its receipts wait
        self.reception.wake_all()
        self.consumption.wake_all()
        for receipt in self._unanswered:
            receipt.wake()

    # --- turns

    def has_room(self, size: int) -> bool:
        # Behind a life of the channel that is ending, its end has to be waited for.
        return self.channel not in self._core.successors and self._engine.admits(self.channel, size)

    def _watch(self, size: int) -> None:
        self._engine.watch(self.channel, size)

    def _check_size(self, size: int) -> None:
        """Do nothing: `size_of` has checked it, and here it includes the parts' overhead."""

    def _finish(self, payload: bytes) -> None:
        if self._last is None:
            return
        if self.has_transactions and self._decided < self._last:
            self.rollback()
        self._engine.close(self.channel)
        self._core.after_command()

    def _abort(self, reason: Reason) -> None:
        """Do nothing: `abort` closes."""

    # --- inside

    def _number(self, through: Receipt | int | None) -> int:
        self._raise_if_lost()
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


# --- receiving


@attrs.define(eq=False)
class Message:
    """A message of the peer. As a block it is processed: left normally it is committed (without transactions:
    consumed), left by an `Exception` it is answered `uncommitted` (without transactions: it stays unconsumed); the
    exception goes on. A cancellation leaves it as it is, and a receiver that is opened anew gives it again.
    """

    _receiver: Receiver
    number: int
    """Counted from 0 since the peer opened the channel."""
    parts: Parts

    @property
    def data(self) -> bytes:
        """All parts in one."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def consume(self) -> None:
        """Consume this message and those before it; under transactions the same as `committed`."""
        self._receiver.consume(through=self.number)

    def committed(self) -> None:
        """We have processed it, and those before it."""
        self._receiver.committed(through=self.number)

    def uncommitted(self) -> None:
        """We could not process it, nor those before it that are not answered yet."""
        self._receiver.uncommitted(through=self.number)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.consume()
        elif isinstance(error, Exception) and self._receiver.has_transactions:
            self.uncommitted()

    def __repr__(self) -> str:
        return f"<relink.Message {self.number}, {_size(self)} bytes in {counted(len(self.parts), 'part')}>"


def _size(message: Message) -> int:
    return sum(map(len, message.parts))


class Receiver(ReceiveHalf[Message]):
    """A channel of the peer, in its present life or the next one if it is not open.

    As an iterator it consumes (under transactions: commits) each message when the next one is asked for, so what a
    loop's body did not get through with is given again. Answers and consumption always cover everything before.

    `receive` raises `trio.EndOfChannel` behind the last message of a closed channel, `LinkChanged` or `LinkLost` at
    once when the link is gone, since nothing can be consumed any more, `trio.ClosedResourceError` after `close`.
    """

    __slots__ = (
        "_came",
        "_core",
        "_current",
        "_done",
        "_given",
        "_has_ended",
        "_is_open",
        "_unusable",
        "channel",
        "has_transactions",
    )

    _size_of = staticmethod(_size)

    def __init__(self, core: Core, channel: int) -> None:
        super().__init__(core.request_write)
        self._core = core
        self.channel: int = channel
        self.has_transactions: bool = core.engine.in_transactions
        self._is_open = channel in core.peer_channels
        self._has_ended = False
        self._came = -1  # the last message that the engine gave
        self._given = -1  # the last that the application has
        self._done = -1  # consumed or answered through this one
        self._current: Message | None = None  # of the iterator, and not consumed yet
        self._unusable: ErrorMaker | None = None  # why nothing can be consumed: the link is gone, or it was closed

    # --- for the application

    def consume(self, *, through: Message | int) -> None:
        """Consume the messages through this one; under transactions the same as `committed`."""
        engine = self._core.engine
        self._tell(engine.committed if self.has_transactions else engine.consume, through)

    def committed(self, *, through: Message | int) -> None:
        """We have processed the messages through this one that are not answered yet."""
        self._tell(self._core.engine.committed, through)

    def uncommitted(self, *, through: Message | int) -> None:
        """We could not process the messages through this one that are not answered yet."""
        self._tell(self._core.engine.uncommitted, through)

    async def process(self, handler: Handler) -> None:
        """Call `handler` with each message until the channel ends, and answer what became of it.

        What it raises is logged and, under transactions, answered `uncommitted`; the next message follows. Without
        transactions there is no such answer: the error comes out, and the message stays unconsumed.
        """
        while True:
            try:
                message = await self.receive()
            except trio.EndOfChannel:
                return
            try:
                with message:
                    await run_handler(handler, message)
            except Exception as error:
                if not self.has_transactions or self._unusable is not None:
                    raise
                # A message may hold what a peer sent, so it is for debugging only.
                if may_log("messages that could not be processed"):
                    # log: A receiver of transactions left its block by an error: the sender learns that nothing was
                    # committed.
                    _log.info("channel %d: %s, answered with uncommitted", self.channel, type(error).__name__)
                _log.debug("in full", exc_info=error)

    def close(self) -> None:
        """Release the channel; messages that were not consumed go to the next receiver that is opened for it."""
        self._owner.check()
        if self._unusable is not _closed:
            self._unusable = _closed
            if self._core.ins.get(self.channel) is self:
                del self._core.ins[self.channel]
            super().close()

    async def __anext__(self) -> Message:
        if self._current is not None:
            current, self._current = self._current, None
            if current.number > self._done:
                current.consume()
        self._current = await super().__anext__()
        return self._current

    def __repr__(self) -> str:
        is_closed = self._unusable is _closed
        state = "closed" if is_closed else "ended" if self._has_ended else "open" if self._is_open else "not open"
        return f"<relink.Receiver {self.channel} {state}, {self.unread} unread>"

    # --- for the link

    def _opened(self) -> bool:
        was_open, self._is_open = self._is_open, True
        return not was_open

    def _arrived(self, event: Arrived) -> None:
        if event.first <= self._came:
            return  # a receiver that is new has asked for everything, and got this before the event came
        self._came = event.first + len(event.messages) - 1
        for number, parts in enumerate(event.messages, event.first):
            self._deliver(Message(self, number, parts))

    def _peer_closed(self) -> None:
        self._has_ended = True
        self._ended(trio.EndOfChannel)
        self._forget_if_over()

    def _peer_shut_down(self) -> None:
        """End a channel that can bring nothing more after the peer's shutdown.

        That is a channel that is not open, since the peer opens no more. With ids of 0 bytes it is also the only
        channel: the original program has no close in that form, and sends its shutdown when the channel is drained.
        """
        if not self._is_open or not self._core.engine.in_id_size:
            self._peer_closed()

    def _lost(self, error: ErrorMaker) -> None:
        self._unusable = self._error = error
        self.state = Receiving.CLOSED
        self._discard()
        if self._waiters:
            turns().wake(self._wake_all)

    # --- inside

    def _taken(self, items: Sequence[Message], size: int) -> bool:
        if items:
            self._given = items[-1].number
            self._core.messages_received += len(items)
        return False

    def _stop(self) -> None:
        """Do nothing: the peer does not learn that a receiver was closed."""

    def _reading(self) -> Reading | None:
        return self._core.reading()

    def _tell(self, command: Callable[..., None], through: Message | int) -> None:
        """Consume or answer the messages through this one, once."""
        self._owner.check()
        if self._unusable is not None:
            raise self._unusable()
        number = through.number if isinstance(through, Message) else through
        if number > self._given:
            raise LocalProtocolError(
                f"channel {self.channel}: message {number}; {self._given} is the last that was received"
            )
        if number > self._done:
            command(self.channel, through=number, now=trio.current_time())
            self._done = number
            self._forget_if_over()
            self._core.after_consuming()

    def _forget_if_over(self) -> None:
        """Remove a closed channel once all is consumed; the peer can then open it anew, for another receiver."""
        core = self._core
        if self._has_ended and self._done >= self._came and core.ins.get(self.channel) is self:
            del core.ins[self.channel]
            core.peer_channels.pop(self.channel, None)


def _closed() -> trio.ClosedResourceError:
    return trio.ClosedResourceError("this side of the channel was closed")
