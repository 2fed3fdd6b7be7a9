"""What applications hold of a link: common channels, and the senders and receivers of Relink's own channels.

A `Channel` is what every protocol has. A `Sender` and a `Receiver` are what Relink is: messages of several parts in one
direction, receipts for them, and transactions. Below each of them is a half of the runtime, which holds the half of the
engine: `SenderHalf` and `MessageHalf` here, and `SendHalf` and `CommonReceiveHalf` for common channels.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import trio

from muxkit._errors import LocalProtocolError, MuxError
from muxkit.core import Reason, Receiving, Sending, counted
from muxkit.core.halves import Sender as EngineSender
from muxkit.protocols.relink import events
from muxkit.protocols.relink.common import CommonChannel
from muxkit.protocols.relink.frames import Parts
from muxkit.protocols.relink.receive import ChannelReceiver
from muxkit.protocols.relink.send import ChannelSender
from muxkit.runtime import (
    YIELD_BYTES,
    YIELD_LEAST,
    ByteStream,
    ChannelStats,
    ErrorMaker,
    LinkLost,
    Watermark,
    as_bytes,
    may_log,
    run_handler,
    turns,
)
from muxkit.runtime.channel import MuxChannel, Sink
from muxkit.runtime.halves.mailbox import ItemQueue, Storage
from muxkit.runtime.halves.receive import EMPTY, ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.protocols.relink._connection import Connection

Handler = Callable[["Message"], Awaitable[object]]

PORTION: int = 16  # messages of a common channel that are handed out before the engine hears of them
PART_ROOM = 56  # bytes that a part beside others takes in a window, at most
PARTS_ROOM = 32  # and the head of such a message

_log = logging.getLogger("muxkit")


# --- common channels


class CommonReceiveHalf(ReceiveHalf[bytes]):
    """The receiving half of a common channel."""

    __slots__ = ()

    portion_most = PORTION


class Channel(MuxChannel):
    """A common channel: our channel n with the peer's channel n. Connectors open even numbers, listeners odd ones."""

    __slots__ = ("common",)

    _connection: Connection

    def __init__(self, connection: Connection, sender: EngineSender, channel: CommonChannel) -> None:
        super().__init__(connection, SendHalf(connection, sender), CommonReceiveHalf(connection, channel))
        self.common: CommonChannel = channel
        """The channel inside the engine."""

    @property
    def id(self) -> int:
        """The number of the channel in its packets."""
        return self.common.id

    @property
    def sent_with_opening(self) -> bytes:
        return self.common.opening

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        with self._connection.written_together():
            self.common.leave()
            super().close()
            self.common.close_if_done()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self._connection.budget.thread.check()
        with self._connection.written_together():
            self.common.leave()
            self.sending.abort(reason, code=code)
            self.receiving.close(Reason(reason, code))
            self.common.close_if_done()

    def as_stream(self) -> ByteStream:
        return ByteStream(self.sending, self)

    def stats(self) -> ChannelStats:
        """Return the gauges of the channel, in messages.

        Credit is None, because Relink bounds what is kept of all channels together.
        """
        return ChannelStats(
            queued=len(self.common.sender.out.unsent),
            unread=self.receiving.unread,
            credit_out=None,
            credit_in=None,
            waiting_since=self.sending.waiting_since,
        )

    def __repr__(self) -> str:
        state = self.sending.state_text()
        return f"<relink.Channel {self.id} {state}, {self.receiving.state.value}, {self.receiving.unread} unread>"


# --- sending on a channel of Relink's own


class Outcome(Enum):
    """The fate of a message in a transaction."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    ROLLED_BACK = "rolled back"


@attrs.define(eq=False)
class Receipt:
    """A receipt for one message. Use it to wait until the peer has received, consumed, or committed the message."""

    _half: SenderHalf
    number: int
    """Counted from 0 since the channel was opened."""
    outcome: Outcome | None = attrs.field(default=None, init=False)
    """What became of the message under transactions. None while that is not known."""
    _answer: trio.Event | None = attrs.field(default=None, init=False)

    async def received(self) -> None:
        """Wait until the peer has the message, so that it will not be sent again. A cancellation changes nothing.

        Raises `LinkChanged` or `LinkLost` if that will never be known.
        """
        self._half.check_thread()
        await self._half.reception.reached(self.number, self._half.raise_if_lost)

    async def consumed(self) -> None:
        """Wait until the peer's application is done with the message, or until it was rolled back and dropped there."""
        self._half.check_thread()
        await self._half.consumption.reached(self.number, self._half.raise_if_lost)

    async def committed(self) -> None:
        """Wait until the peer's application has processed the message. Call `commit` before, or this waits for ever.

        Raises `NotCommitted` if the peer couldn't, `RolledBackError` if this side took the message back,
        `LocalProtocolError` on a channel without transactions, and `LinkChanged` or `LinkLost` if it will never be
        known.
        """
        half, channel = self._half, self._half.out.channel
        half.check_thread()
        await trio.lowlevel.checkpoint()
        if not half.has_transactions:
            raise LocalProtocolError(f"channel {channel} has no transactions")
        if self.outcome is None:
            half.raise_if_lost()
            self._answer = self._answer or trio.Event()
            await self._answer.wait()
        if self.outcome is None:
            half.raise_if_lost()
        if self.outcome is Outcome.UNCOMMITTED:
            raise NotCommitted(channel, self.number)
        if self.outcome is Outcome.ROLLED_BACK:
            raise RolledBackError(channel, self.number)

    def decide(self, outcome: Outcome) -> None:
        """Set the outcome and wake the waiters; called by the sending half."""
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        """Wake the waiters; called by the sending half."""
        if self._answer is not None:
            self._answer.set()

    def __repr__(self) -> str:
        became = "" if self.outcome is None else f" {self.outcome.value}"
        return f"<relink.Receipt of message {self.number} on channel {self._half.out.channel}{became}>"


class SenderHalf(SendHalf):
    """The sending half of one of our channels, with the receipts of what was sent."""

    __slots__ = ("_decided", "_failure", "_unanswered", "consumption", "last", "out", "reception")

    _connection: Connection

    def __init__(self, connection: Connection, out: ChannelSender) -> None:
        super().__init__(connection, out)
        self.out: ChannelSender = out
        self.reception: Watermark = Watermark()
        """The message up to which the peer has received everything."""
        self.consumption: Watermark = Watermark()
        """The message up to which the peer's application is done with everything."""
        self.last: int | None = None
        """The last message that was sent."""
        self._decided = -1
        self._failure: ErrorMaker | None = None  # why nothing more will be known
        self._unanswered: deque[Receipt] = deque()  # under transactions

    @property
    def has_transactions(self) -> bool:
        """True if messages have to be committed or rolled back."""
        return self.out.state.out_transactions

    def check_thread(self) -> None:
        """Raise RuntimeError in another thread than that of the link."""
        self._budget.thread.check()

    def raise_if_lost(self) -> None:
        """Raise why nothing more will be known about what was sent."""
        if self._failure is not None:
            raise self._failure()

    # --- messages

    def size_of(self, parts: Sequence[bytes]) -> int:
        """Return the size of a message as `has_room` counts it; raises `LocalProtocolError` if it can never be sent."""
        self.out.state.check_parts(parts)
        size, count = sum(map(len, parts)), len(parts)
        return size if count == 1 else size + PART_ROOM * count + PARTS_ROOM

    def may_send_parts(self, parts: Sequence[bytes]) -> bool:
        """Return True if a message that is sent now would go at once."""
        return self.state is Sending.OPEN and self.may_send(self.size_of(parts))

    async def send_parts(self, parts: Sequence[bytes]) -> Receipt:
        """Send a message, and return its receipt."""
        size = self.size_of(parts)
        if self.state is not Sending.OPEN:
            await self.refuse()
        if self.may_send(size):
            number = self.out.send_parts(parts)
        else:
            await self.wait_turn(size)
            try:
                number = self.out.send_parts(parts, overdraw=True)
            finally:
                self.end_turn()
        receipt = self.sent(number)
        self._connection.request_write()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return receipt

    def sent(self, number: int) -> Receipt:
        """Make the receipt of a message that the engine has queued."""
        receipt = Receipt(self, number)
        self.last = number
        if self.has_transactions:
            self._unanswered.append(receipt)
        return receipt

    # --- transactions

    def commit(self, through: Receipt | int | None) -> Receipt:
        """Commit the messages up to one that are not decided yet, and return the receipt of the last of them."""
        last = self._number(through)
        self.out.commit(last)
        receipt = self._unanswered[last - self._unanswered[0].number]
        self._decided = last
        self._connection.request_write()
        return receipt

    def rollback(self, through: Receipt | int | None) -> None:
        """Roll back the messages up to one that are not decided yet."""
        last = self._number(through)
        self.out.rollback(last)
        oldest = self._unanswered[0].number
        for number in range(max(self._decided + 1, oldest), last + 1):
            self._unanswered[number - oldest].decide(Outcome.ROLLED_BACK)
        self._decided = last
        self._connection.request_write()

    def _number(self, through: Receipt | int | None) -> int:
        self.raise_if_lost()
        if self.state is Sending.CLOSED:
            raise trio.ClosedResourceError("this sender was closed")
        if self.last is None:
            raise LocalProtocolError(f"channel {self.out.channel}: nothing was sent that could be decided")
        if through is None:
            return self.last
        return through.number if isinstance(through, Receipt) else through

    # --- the end

    def _finish(self, payload: bytes) -> None:
        if self.has_transactions and self.last is not None and self._decided < self.last:
            self.rollback(None)
        super()._finish(payload)

    def close(self) -> None:
        is_open = self.state is Sending.OPEN
        super().close()
        if is_open and self.last is None:  # the peer never heard of it
            self._connection.forget_sender(self)
            self.confirmed()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Do the same as `close`: what was sent cannot be taken back, but for what is not decided."""
        self.close()

    @property
    def is_unheard(self) -> bool:
        """True if something was sent that the peer's application may not have consumed."""
        return self.last is not None and self.consumption.value < self.last

    @property
    def is_live(self) -> bool:
        """True if something was sent, and the close is neither confirmed nor lost."""
        return self.last is not None and self.state is not Sending.CLOSED

    # --- for the connection

    def acknowledged(self, event: events.Acknowledged) -> None:
        """The peer has the messages through one, or has done more with them."""
        self.reception.advance(event.through)
        if isinstance(event, events.Consumed):
            self._consumed(event.through)
        elif not isinstance(event, events.Received):
            self._answered(
                event.through, Outcome.COMMITTED if isinstance(event, events.Committed) else Outcome.UNCOMMITTED
            )

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
        self.window_changed()

    def closed(self) -> None:
        """The peer confirmed the end of the channel."""
        if self.last is not None:
            self.reception.advance(self.last)
            self._consumed(self.last)
        self.confirmed()

    def lost(self, error: ErrorMaker) -> None:
        super().lost(error)
        self.out.owner = None  # or only a garbage collection would free both
        self._failure = self._failure or error  # also if it was over: its receipts wait
        self.reception.wake_all()
        self.consumption.wake_all()
        for receipt in self._unanswered:
            receipt.wake()


class Sender(Sink):
    """Sends on one of our channels, from its first message until the peer has confirmed the close.

    Leaving its block, normally or by an error, closes the channel behind everything that was sent. What is neither
    committed nor rolled back by then is rolled back.
    """

    __slots__ = ()

    half: SenderHalf

    @property
    def channel(self) -> int:
        """The number of the channel."""
        return self.half.out.channel

    @property
    def has_transactions(self) -> bool:
        """True if messages have to be committed or rolled back."""
        return self.half.has_transactions

    @property
    def is_closed(self) -> bool:
        """True once it was closed on our side, or lost."""
        return self.half.state is not Sending.OPEN

    async def send(self, *parts: bytes) -> Receipt:  # type: ignore[override]  # it has parts, and a receipt
        """Send one message of so many parts. Returns when the link has it, connected or not.

        Cancelled means not sent. Waits while the window is full. The window empties as the peer's application consumes
        messages, or, under transactions, answers them; so commit or roll back before. Checks for cancellation in every
        call, yields at the latest on every 64th call or 128 KiB.

        Raises `trio.ClosedResourceError` after `close`, `LinkChanged` or `LinkLost` when what the channel was is gone,
        `LocalProtocolError` for what cannot be sent.
        """
        self.half.check_thread()
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.half.send_parts(as_parts(parts))

    async def send_many(self, messages: Iterable[bytes]) -> list[Receipt]:  # type: ignore[override]  # the same
        """Send messages of one part each, as `send` does. Cancelled, a prefix was sent."""
        return [await self.send(message) for message in messages]

    def commit(self, *, through: Receipt | int | None = None) -> Receipt:
        """Let the peer process what is not decided yet, up to this message (None: everything sent so far).

        Returns the receipt of the last of them: `await sender.commit().committed()`. Never waits.
        """
        self.half.check_thread()
        return self.half.commit(through)

    def rollback(self, *, through: Receipt | int | None = None) -> None:
        """Let the peer ignore what is not decided yet, up to this message (None: everything sent so far)."""
        self.half.check_thread()
        self.half.rollback(through)

    async def finish(self, payload: bytes = b"") -> None:
        """Close the channel, and wait until the peer's application is done with everything.

        Raises `LinkChanged` or `LinkLost` if that will never be known. After a cancellation the channel is closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.close()
        await self.half.wait_over()

    def __repr__(self) -> str:
        return f"<relink.Sender {self.channel} {self.state.value}>"


def as_parts(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the parts of a message as bytes; TypeError for anything that is not bytes-like."""
    return tuple(part if type(part) is bytes else as_bytes(part) for part in parts)


# --- receiving from a channel of Relink's own


@attrs.define(eq=False)
class Message:
    """A message of the peer.

    Used as a block it is processed: a block that is left normally commits the message (without transactions: consumes
    it). A block that is left by an `Exception` answers `uncommitted` (without transactions: the message stays
    unconsumed), and the exception goes on. A cancellation leaves the message as it is, so a receiver that is opened
    anew gets it again.
    """

    _half: MessageHalf
    number: int
    """Counted from 0 since the peer opened the channel."""
    parts: Parts

    @property
    def data(self) -> bytes:
        """All parts in one."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def consume(self) -> None:
        """Consume this message and those before it; under transactions the same as `committed`."""
        self._half.consume(self.number)

    def committed(self) -> None:
        """We have processed it, and those before it."""
        self._half.committed(self.number)

    def uncommitted(self) -> None:
        """We could not process it, nor those before it that are not answered yet."""
        self._half.uncommitted(self.number)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.consume()
        elif isinstance(error, Exception) and self._half.has_transactions:
            self.uncommitted()

    def __repr__(self) -> str:
        return f"<relink.Message {self.number}, {_size(self)} bytes in {counted(len(self.parts), 'part')}>"


def _size(message: Message) -> int:
    return sum(map(len, message.parts))


class MessageHalf(ReceiveHalf[Message]):
    """The receiving half of one of the peer's channels. The application consumes or answers its messages by itself."""

    __slots__ = ("_came", "_done", "_given", "incoming", "is_open", "unusable")

    _connection: Connection

    new_storage: ClassVar[type[Storage[Any]]] = ItemQueue
    size_of: staticmethod[[Any], int] = staticmethod(_size)
    portion_most = 0  # what the application has is known of each message

    def __init__(self, connection: Connection, incoming: ChannelReceiver) -> None:
        super().__init__(connection, incoming)
        self.incoming: ChannelReceiver = incoming
        self.is_open: bool = incoming.is_open
        """True once the peer has opened the channel."""
        self.unusable: ErrorMaker | None = None
        """Why nothing can be consumed: the link is gone, or the receiver was closed."""
        self._came = -1  # the last message that the engine gave
        self._given = -1  # the last that the application has
        self._done = -1  # consumed or answered through this one

    @property
    def has_transactions(self) -> bool:
        """True if messages are answered."""
        return self.incoming.state.in_transactions

    # --- for the application

    def consume(self, through: Message | int) -> None:
        """Consume the messages through this one; under transactions the same as `committed`."""
        if self.has_transactions:
            self.committed(through)
        elif (number := self._number(through)) > self._done:
            self.incoming.consume(number, trio.current_time())
            self._told(number)

    def committed(self, through: Message | int) -> None:
        """The messages through this one that are not answered yet were processed."""
        if (number := self._number(through)) > self._done:
            self.incoming.committed(number, trio.current_time())
            self._told(number)

    def uncommitted(self, through: Message | int) -> None:
        """The messages through this one that are not answered yet could not be processed."""
        if (number := self._number(through)) > self._done:
            self.incoming.uncommitted(number, trio.current_time())
            self._told(number)

    def _number(self, through: Message | int) -> int:
        """Return the number of a message that the application has; raises if it cannot be consumed."""
        self._thread.check()
        if self.unusable is not None:
            raise self.unusable()
        number = through.number if isinstance(through, Message) else through
        if number > self._given:
            raise LocalProtocolError(
                f"{self.incoming.label}: message {number}; {self._given} is the last that was received"
            )
        return number

    def _told(self, number: int) -> None:
        self._done = number
        self._forget_if_over()
        self._connection.after_consuming()

    def is_done_with(self, message: Message) -> bool:
        """Return True if a message was consumed or answered."""
        return message.number <= self._done

    def close(self, reason: Reason | None = None) -> None:
        if self.unusable is not _closed:
            self.unusable = _closed
            self._connection.forget_receiver(self)
            super().close(reason)

    # --- for the connection

    def opened(self) -> None:
        """The peer opened the channel."""
        self.is_open = True

    def arrived(self, event: events.Arrived) -> None:
        """Messages came."""
        if event.first <= self._came:
            return  # a receiver that is new has asked for everything, and got this before the event came
        self._came = event.first + len(event.messages) - 1
        for number, parts in enumerate(event.messages, event.first):
            self.deliver(Message(self, number, parts))

    def peer_closed(self) -> None:
        """The peer closed the channel."""
        self.ended(trio.EndOfChannel)
        self._forget_if_over()

    def peer_shut_down(self) -> None:
        """End a channel that can bring nothing more after the peer's shutdown.

        That is a channel that is not open, since the peer opens no more. With ids of 0 bytes it is also the only
        channel: the original program has no close in that form, and sends its shutdown when the channel is drained.
        """
        if not self.is_open or not self.incoming.state.in_id_size:
            self.peer_closed()

    def lost(self, error: ErrorMaker) -> None:
        """The link is gone, so nothing can be consumed any more."""
        self.incoming.owner = None  # or only a garbage collection would free both
        self.unusable = self._error = error
        self.state = Receiving.CLOSED
        self._stored = EMPTY
        if self._waiters:
            turns().wake(self._wake_all)

    def _took(self, items: Sequence[Message], size: int) -> None:
        if items:
            self._given = items[-1].number
            self._connection.messages_received += len(items)
        super()._took(items, size)

    def _forget_if_over(self) -> None:
        """Let go of a closed channel once all is consumed. The peer can then open it anew, for another receiver."""
        if self.state is not Receiving.OPEN and self._done >= self._came:
            self._connection.forget_receiver(self)


class Receiver(trio.abc.ReceiveChannel[Message]):
    """A channel of the peer, in its present life or the next one if it is not open.

    Used as an iterator it consumes (under transactions: commits) each message when the next one is asked for, so what a
    loop's body did not get through with is given again. Answers and consumption always cover everything before.

    `receive` raises `trio.EndOfChannel` behind the last message of a closed channel, `LinkChanged` or `LinkLost` at
    once when the link is gone, since nothing can be consumed any more, and `trio.ClosedResourceError` after `close`.
    """

    __slots__ = ("_current", "half")

    def __init__(self, half: MessageHalf) -> None:
        self.half: MessageHalf = half
        self._current: Message | None = None  # of the iterator, and not consumed yet

    @property
    def channel(self) -> int:
        """The number of the channel."""
        return self.half.incoming.channel

    @property
    def has_transactions(self) -> bool:
        """True if messages are answered."""
        return self.half.has_transactions

    @property
    def state(self) -> Receiving:
        """Whether messages can come, the rest is to be received, or it is over."""
        return self.half.state

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return self.half.unread

    async def receive(self) -> Message:
        """Wait for the next message. Cancelled means that none was taken."""
        return await self.half.receive()

    async def receive_many(self, limit: int | None = None) -> list[Message]:
        """Wait for at least one message, then return all that have come, at most `limit`."""
        return await self.half.receive_many(limit)

    def consume(self, *, through: Message | int) -> None:
        """Consume the messages through this one; under transactions the same as `committed`."""
        self.half.consume(through)

    def committed(self, *, through: Message | int) -> None:
        """We have processed the messages through this one that are not answered yet."""
        self.half.committed(through)

    def uncommitted(self, *, through: Message | int) -> None:
        """We could not process the messages through this one that are not answered yet."""
        self.half.uncommitted(through)

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
                if not self.has_transactions or self.half.unusable is not None:
                    raise
                # A message may hold what a peer sent, so it is for debugging only.
                if may_log("messages that could not be processed"):
                    # log: A receiver of transactions left its block by an error: the sender learns that nothing was
                    # committed.
                    _log.info("channel %d: %s, answered with uncommitted", self.channel, type(error).__name__)
                _log.debug("in full", exc_info=error)

    def close(self) -> None:
        """Release the channel; messages that were not consumed go to the next receiver that is opened for it."""
        self.half.close()

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __anext__(self) -> Message:
        if self._current is not None:
            current, self._current = self._current, None
            if not self.half.is_done_with(current):
                current.consume()
        self._current = await super().__anext__()
        return self._current

    def __repr__(self) -> str:
        half = self.half
        is_closed, has_ended = half.unusable is _closed, half.state is not Receiving.OPEN
        state = "closed" if is_closed else "ended" if has_ended else "open" if half.is_open else "not open"
        return f"<relink.Receiver {self.channel} {state}, {self.unread} unread>"


def _closed() -> trio.ClosedResourceError:
    return trio.ClosedResourceError("this side of the channel was closed")


# --- errors


class LinkChanged(LinkLost):
    """The listener no longer has our link: everything that was under way on it is gone.

    `change` is the engine's event, with both epochs and link ids. `lost` counts messages of ours that were not
    answered, so their fate is unknown. The session itself goes on with the new link, unless there is
    none (`change.link_id` is 0, which only happens with `Config(require_link=True)`).
    """

    def __init__(self, change: events.LinkReplaced, *, peer: str = "") -> None:
        why = "it is another instance" if isinstance(change, events.EpochChanged) else "it does not know the old one"
        what = (
            f"the listener has another link for us, since {why}"
            if change.link_id
            else "the listener has no link for us"
        )
        super().__init__(
            f"{what}; {counted(change.lost, 'message', were=True)} not answered",
            by="peer",
            peer=peer,
            hint="If it ended the old one because of a rule or a limit, its log says which",
        )
        self.change = change
        self.lost: int = change.lost


class LinkRefused(LinkLost):
    """The peer ended one connection after another as soon as the link went on over it, so the link was given up.

    Neither side got anything done on the last `connections` connections, each of which was over within a second. The
    protocol has no word for a refusal: the peer's log may have the reason. The cause is the loss of the last one.
    """

    def __init__(self, connections: int, last: BaseException, *, peer: str = "", unsent: int = 0) -> None:
        what = f"{connections} connections in a row were ended at once and brought nothing forward: the peer may refuse"
        super().__init__(f"{what} to go on with the link; the last one: {last}", by="peer", peer=peer, unsent=unsent)
        self.connections = connections
        self.__cause__: BaseException | None = last


class NotCommitted(MuxError):
    """The peer could not process a message that was committed: it answered `uncommitted`."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: the peer answered message {number} with uncommitted")
        self.channel = channel
        self.number = number


class RolledBackError(MuxError):
    """The message was rolled back on our side, so there is no answer to it."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: message {number} was rolled back")
        self.channel = channel
        self.number = number
