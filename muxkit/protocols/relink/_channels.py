"""The channels of a Relink session, as the application uses them.

Relink calls a session a *link*, because it outlives the connections that carry it. On a link, the application can use
two kinds of channels:

- The channels of the Relink specification have one direction. The sending side has a `Sender`, the receiving side a
  `Receiver`. Messages can have several parts. The sender gets a `Receipt` for each message, with which it can wait
  until the peer has received or consumed the message. With transactions, the receiver's application also answers if it
  has processed the message.
- `Channel` is the two-way channel that all protocols of muxkit have. Relink has no such channels, so a `Channel`
  consists of two Relink channels with the same number, one in each direction.

Each object consists of three layers, and each layer has one object for each direction, called a *half* of the channel:

    application     Sender              Receiver            Channel (both directions)
    runtime         SenderHalf          MessageHalf         SendHalf, CommonReceiveHalf
    engine          ChannelSender       ChannelReceiver     CommonChannel (both directions)

The runtime's halves let tasks wait, for example for room to send. The engine's halves know the protocol. `Connection`
handles the events of the engine and calls the runtime's halves.
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

# When the application takes messages from a `Channel`, the engine is notified after this many messages at the latest.
PORTION: int = 16
# A message with several parts needs more room in the window than its payload. These are upper bounds for the additional
# bytes: PARTS_ROOM for the message, and PART_ROOM for each of its parts.
PART_ROOM = 56
PARTS_ROOM = 32

_log = logging.getLogger("muxkit")


# --- two-way channels


class CommonReceiveHalf(ReceiveHalf[bytes]):
    """The receiving half of a `Channel`. It exists only to set `portion_most`."""

    __slots__ = ()

    portion_most = PORTION


class Channel(MuxChannel):
    """A two-way channel. It consists of two channels of Relink with the same number, one in each direction.

    The side that opens the connections (the connector) opens channels with even numbers, and the listener opens
    channels with odd numbers.
    """

    __slots__ = ("common",)

    _connection: Connection

    def __init__(self, connection: Connection, sender: EngineSender, channel: CommonChannel) -> None:
        super().__init__(connection, SendHalf(connection, sender), CommonReceiveHalf(connection, channel))
        self.common: CommonChannel = channel
        """The engine's side of the channel."""

    @property
    def id(self) -> int:
        """The number of the channel in its packets."""
        return self.common.id

    @property
    def _observed_name(self) -> str:
        return f"channel {self.id}"  # all these channels share the frames of one channel of Relink

    @property
    def sent_with_opening(self) -> bytes:
        return self.common.opening

    def close(self) -> None:
        """Close both directions of the channel without waiting. The peer still gets the messages that were sent."""
        with self._connection.written_together():
            self.common.leave()
            super().close()
            self.common.close_if_done()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self._connection.budget.thread.check()
        if self._span is not None:
            self._span.end(code)
        with self._connection.written_together():
            self.common.leave()
            self.sending.abort(reason, code=code)
            self.receiving.close(Reason(reason, code))
            self.common.close_if_done()

    def as_stream(self) -> ByteStream:
        return ByteStream(self.sending, self, self._span)

    def stats(self) -> ChannelStats:
        """Return statistics about the channel. Sizes are numbers of messages.

        Both credits are None, because a receiver of Relink doesn't grant credit.
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


# --- sending on Relink's own channels


class Outcome(Enum):
    """The result of a transaction for one message."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    ROLLED_BACK = "rolled back"


@attrs.define(eq=False)
class Receipt:
    """A receipt for one message. Use it to wait until the peer has received, consumed, or committed the message."""

    _half: SenderHalf
    number: int
    """The number of the message. The first message of a channel has number 0."""
    outcome: Outcome | None = attrs.field(default=None, init=False)
    """The result of the transaction, or None while it isn't known. Always None without transactions."""
    _answer: trio.Event | None = attrs.field(default=None, init=False)

    async def received(self) -> None:
        """Wait until the peer has received the message. From then on it is never repeated on another connection.

        Cancelling the call only stops the wait.

        Raises:
            LinkChanged: The listener has replaced the link, so it will never be known.
            LinkLost: The link has ended, so it will never be known.
        """
        self._half.check_thread()
        await self._half.reception.reached(self.number, self._half.raise_if_lost)

    async def consumed(self) -> None:
        """Wait until the peer's application has consumed the message, or the peer has dropped it after a rollback.

        Cancelling the call only stops the wait. Raises the same errors as `received`.
        """
        self._half.check_thread()
        await self._half.consumption.reached(self.number, self._half.raise_if_lost)

    async def committed(self) -> None:
        """Wait until the peer's application has answered that it has processed the message.

        Call `Sender.commit` first. Without a commit the peer doesn't deliver the message, so this would wait forever.
        Cancelling the call only stops the wait.

        Raises:
            NotCommitted: The peer's application couldn't process the message.
            RolledBackError: This side has rolled the message back.
            LocalProtocolError: The channel has no transactions.
            LinkChanged: The listener has replaced the link, so the answer will never be known.
            LinkLost: The link has ended, so the answer will never be known.
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
        """Set the outcome and wake all tasks that wait for it. Only `SenderHalf` calls this."""
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait for the outcome. Only `SenderHalf` calls this."""
        if self._answer is not None:
            self._answer.set()

    def __repr__(self) -> str:
        became = "" if self.outcome is None else f" {self.outcome.value}"
        return f"<relink.Receipt of message {self.number} on channel {self._half.out.channel}{became}>"


class SenderHalf(SendHalf):
    """The sending half of one of our channels. It keeps the receipts of messages that the peer hasn't answered."""

    __slots__ = ("_decided", "_failure", "_unanswered", "consumption", "last", "out", "reception")

    _connection: Connection

    def __init__(self, connection: Connection, out: ChannelSender) -> None:
        super().__init__(connection, out)
        self.out: ChannelSender = out
        self.reception: Watermark = Watermark()
        """The number up to which the peer has received all messages."""
        self.consumption: Watermark = Watermark()
        """The number up to which the peer's application has consumed all messages."""
        self.last: int | None = None
        """The number of the last message that was sent."""
        # The number up to which all messages are committed or rolled back.
        self._decided = -1
        # Makes the error for receipts whose result will never be known, after the link was lost or replaced.
        self._failure: ErrorMaker | None = None
        # With transactions, the receipts of messages that the peer hasn't answered, oldest first.
        self._unanswered: deque[Receipt] = deque()

    @property
    def has_transactions(self) -> bool:
        """True if messages have to be committed or rolled back."""
        return self.out.state.out_transactions

    def check_thread(self) -> None:
        """Raise RuntimeError if the caller runs in a thread other than the link's."""
        self._budget.thread.check()

    def raise_if_lost(self) -> None:
        """Raise the error for receipts if the link was lost or replaced."""
        if self._failure is not None:
            raise self._failure()

    # --- messages

    def size_of(self, parts: Sequence[bytes]) -> int:
        """Return the size of a message as `has_room` counts it.

        Raises:
            LocalProtocolError: A message with these parts can never be sent.
        """
        self.out.state.check_parts(parts)
        size, count = sum(map(len, parts)), len(parts)
        return size if count == 1 else size + PART_ROOM * count + PARTS_ROOM

    def may_send_parts(self, parts: Sequence[bytes]) -> bool:
        """Return True if `send_parts` would queue this message without waiting."""
        return self.state is Sending.OPEN and self.may_send(self.size_of(parts))

    async def send_parts(self, parts: Sequence[bytes]) -> Receipt:
        """Send a message and return its receipt. See `Sender.send`."""
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
        """Create the receipt of a message that the engine has queued as number `number`."""
        receipt = Receipt(self, number)
        self.last = number
        if self.has_transactions:
            self._unanswered.append(receipt)
        return receipt

    # --- transactions

    def commit(self, through: Receipt | int | None) -> Receipt:
        """Commit the undecided messages up to `through`, and return the receipt of the last one."""
        last = self._number(through)
        self.out.commit(last)
        receipt = self._unanswered[last - self._unanswered[0].number]
        self._decided = last
        self._connection.request_write()
        return receipt

    def rollback(self, through: Receipt | int | None) -> None:
        """Roll back the undecided messages up to `through`."""
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
            raise LocalProtocolError(
                f"channel {self.out.channel}: no message was sent that could be committed or rolled back"
            )
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
        if is_open and self.last is None:  # nothing was sent, so the peer has nothing to confirm
            self._connection.forget_sender(self)
            self.confirmed()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Do the same as `close`. Relink can't take messages back, except for a rollback of undecided messages."""
        self.close()

    @property
    def is_unheard(self) -> bool:
        """True if the peer's application may not have consumed all messages that were sent."""
        return self.last is not None and self.consumption.value < self.last

    @property
    def is_live(self) -> bool:
        """True if messages were sent, the peer hasn't confirmed the close, and the link wasn't lost."""
        return self.last is not None and self.state is not Sending.CLOSED

    # --- for the connection

    def acknowledged(self, event: events.Acknowledged) -> None:
        """Handle an acknowledgement. Any kind of acknowledgement implies that the messages were received."""
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
        """Handle the peer's confirmation that the channel has ended. It implies that all messages were consumed."""
        if self.last is not None:
            self.reception.advance(self.last)
            self._consumed(self.last)
        self.confirmed()

    def lost(self, error: ErrorMaker) -> None:
        super().lost(error)
        self.out.owner = None  # break the reference cycle, so that no garbage collection is needed
        self._failure = self._failure or error  # even if the half was closed before, tasks may wait for its receipts
        self.reception.wake_all()
        self.consumption.wake_all()
        for receipt in self._unanswered:
            receipt.wake()


class Sender(Sink):
    """Sends messages on one of our channels. `Link.sender` creates it.

    Use it with `async with` to close the channel when the block ends, normally or with an exception. The close follows
    all messages that were sent before. Messages that are neither committed nor rolled back by then are rolled back.
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
        """True once this sender was closed, or its link was lost or replaced."""
        return self.half.state is not Sending.OPEN

    async def send(self, *parts: bytes) -> Receipt:  # type: ignore[override]  # it has parts, and a receipt
        """Send one message that consists of `parts`, and return its receipt.

        The call returns when the link has queued the message, whether or not it has a connection. If the window is
        full, the call waits. The window gets room when the peer's application consumes messages. With transactions it
        gets room when the peer's application answers messages, so commit or roll back before the window is full.

        If the call is cancelled, the message wasn't sent. Every call checks for cancellation. To keep short messages
        fast, not every call is a full checkpoint: the task yields at least every 64 calls or 128 KiB.

        Raises:
            trio.ClosedResourceError: This sender was closed.
            LinkChanged: The listener has replaced the link that the channel belonged to.
            LinkLost: The link has ended.
            LocalProtocolError: The message can never be sent, or the channel can't be opened.
        """
        self.half.check_thread()
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.half.send_parts(as_parts(parts))

    async def send_many(self, messages: Iterable[bytes]) -> list[Receipt]:  # type: ignore[override]  # the same
        """Send several messages of one part each, and return their receipts.

        If the call is cancelled, it may already have sent some of the first messages. Raises the same errors as `send`.
        """
        return [await self.send(message) for message in messages]

    def commit(self, *, through: Receipt | int | None = None) -> Receipt:
        """Commit the undecided messages up to `through`, or all of them. The peer may now process these messages.

        Never waits. Returns the receipt of the last committed message, so that you can wait for the answer with
        `await sender.commit().committed()`.
        """
        self.half.check_thread()
        return self.half.commit(through)

    def rollback(self, *, through: Receipt | int | None = None) -> None:
        """Roll back the undecided messages up to `through`, or all of them. The peer drops these messages."""
        self.half.check_thread()
        self.half.rollback(through)

    async def finish(self, payload: bytes = b"") -> None:
        """Close the channel, and wait until the peer's application has consumed all messages.

        If the call is cancelled, the channel is closed all the same.

        Raises:
            LinkChanged: The listener has replaced the link, so it will never be known.
            LinkLost: The link has ended, so it will never be known.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.close()
        await self.half.wait_over()

    def __repr__(self) -> str:
        return f"<relink.Sender {self.channel} {self.state.value}>"


def as_parts(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Convert the parts of a message to bytes. Raises TypeError for a part that isn't bytes-like."""
    return tuple(part if type(part) is bytes else as_bytes(part) for part in parts)


# --- receiving from Relink's own channels


@attrs.define(eq=False)
class Message:
    """A message that was received from the peer.

    Use it in a `with` block to acknowledge the message when the block ends:

    * If the block ends normally, the message is answered with `committed`, or consumed without transactions.
    * If the block raises an `Exception`, the message is answered with `uncommitted`, or without transactions stays
      unconsumed. The exception propagates.
    * If the block is cancelled, the message stays unanswered and unconsumed. The next receiver of the channel gets the
      message again.
    """

    _half: MessageHalf
    number: int
    """The number of the message. The first message of a channel has number 0."""
    parts: Parts

    @property
    def data(self) -> bytes:
        """The parts of the message, joined."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def consume(self) -> None:
        """Consume this message and all messages before it. With transactions this is the same as `committed`."""
        self._half.consume(self.number)

    def committed(self) -> None:
        """Answer that this message, and all unanswered messages before it, were processed."""
        self._half.committed(self.number)

    def uncommitted(self) -> None:
        """Answer that this message, and all unanswered messages before it, could not be processed."""
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
    """The receiving half of one of the peer's channels. The application has to consume or answer each message."""

    __slots__ = ("_came", "_done", "_given", "incoming", "is_open", "unusable")

    _connection: Connection

    new_storage: ClassVar[type[Storage[Any]]] = ItemQueue
    size_of: staticmethod[[Any], int] = staticmethod(_size)
    portion_most = 0  # `_took` must be called for every message, because the application may only consume these

    def __init__(self, connection: Connection, incoming: ChannelReceiver) -> None:
        super().__init__(connection, incoming)
        self.incoming: ChannelReceiver = incoming
        self.is_open: bool = incoming.is_open
        """True once the peer has opened the channel."""
        self.unusable: ErrorMaker | None = None
        """Makes the error for a call that consumes or answers, once the link is lost or the receiver was closed."""
        # Each of the following attributes is a message number, or -1 if there is no such message.
        self._came = -1  # the last message that the engine has delivered to this half
        self._given = -1  # the last message that the application has taken
        self._done = -1  # the last message that the application has consumed or answered

    @property
    def has_transactions(self) -> bool:
        """True if messages have to be answered with `committed` or `uncommitted`."""
        return self.incoming.state.in_transactions

    # --- for the application

    def consume(self, through: Message | int) -> None:
        """Consume all messages up to `through`. With transactions this is the same as `committed`."""
        if self.has_transactions:
            self.committed(through)
        elif (number := self._number(through)) > self._done:
            self.incoming.consume(number, trio.current_time())
            self._told(number)

    def committed(self, through: Message | int) -> None:
        """Answer that all unanswered messages up to `through` were processed."""
        if (number := self._number(through)) > self._done:
            self.incoming.committed(number, trio.current_time())
            self._told(number)

    def uncommitted(self, through: Message | int) -> None:
        """Answer that all unanswered messages up to `through` could not be processed."""
        if (number := self._number(through)) > self._done:
            self.incoming.uncommitted(number, trio.current_time())
            self._told(number)

    def _number(self, through: Message | int) -> int:
        """Return the number of a message. Raises if the application can't consume it, or hasn't received it."""
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
        """Note that the peer has opened the channel."""
        self.is_open = True

    def arrived(self, event: events.Arrived) -> None:
        """Deliver messages that have arrived."""
        if event.first <= self._came:
            # When this half was created, it requested all stored messages (`rewind`). These messages were among them,
            # and the event about their arrival follows only now.
            return
        self._came = event.first + len(event.messages) - 1
        for number, parts in enumerate(event.messages, event.first):
            self.deliver(Message(self, number, parts))

    def peer_closed(self) -> None:
        """End the channel, because the peer has closed it."""
        self.ended(trio.EndOfChannel)
        self._forget_if_over()

    def peer_shut_down(self) -> None:
        """End the channel if no message can arrive after the peer's shutdown.

        That is the case if the channel isn't open, because the peer opens no channels after its shutdown. It is also
        the case for the only channel of a link with channel ids of 0 bytes. Relink's original implementation has no
        close in that mode, and sends its shutdown when all messages of the channel were consumed.
        """
        if not self.is_open or not self.incoming.state.in_id_size:
            self.peer_closed()

    def lost(self, error: ErrorMaker) -> None:
        """Fail all calls from now on, because the link was lost and nothing can be consumed any more."""
        self.incoming.owner = None  # break the reference cycle, so that no garbage collection is needed
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
        """Release an ended channel once all messages are consumed, so that its next life can get another receiver."""
        if self.state is not Receiving.OPEN and self._done >= self._came:
            self._connection.forget_receiver(self)


class Receiver(trio.abc.ReceiveChannel[Message]):
    """Receives the messages of one channel of the peer. `Link.receiver` and `Link.receivers` create it.

    If the channel isn't open, the receiver waits for the peer to open it. A message has to be consumed, or with
    transactions answered. Either always applies to all messages before it as well.

    An `async for` loop consumes each message, or answers it with `committed`, when the loop asks for the next message.
    If the loop's body doesn't finish, the message stays unconsumed, and the channel's next receiver gets it again.

    `receive` raises `trio.EndOfChannel` after the last message of a channel that the peer has closed. It raises
    `trio.ClosedResourceError` after `close`. It raises `LinkChanged` or `LinkLost` as soon as the link is lost, even if
    messages are left, because these messages could no longer be consumed.
    """

    __slots__ = ("_current", "half")

    def __init__(self, half: MessageHalf) -> None:
        self.half: MessageHalf = half
        # The message that the iterator has returned last, to be consumed before it returns the next one.
        self._current: Message | None = None

    @property
    def channel(self) -> int:
        """The number of the channel."""
        return self.half.incoming.channel

    @property
    def has_transactions(self) -> bool:
        """True if messages have to be answered with `committed` or `uncommitted`."""
        return self.half.has_transactions

    @property
    def state(self) -> Receiving:
        """The state of the receiver: more messages can arrive, only stored messages are left, or it is closed."""
        return self.half.state

    @property
    def unread(self) -> int:
        """Number of messages that have arrived and that the application hasn't received."""
        return self.half.unread

    async def receive(self) -> Message:
        """Wait for the next message and return it. If the call is cancelled, no message was taken."""
        return await self.half.receive()

    async def receive_many(self, limit: int | None = None) -> list[Message]:
        """Wait for at least one message, and return all messages that have arrived, but at most `limit`."""
        return await self.half.receive_many(limit)

    def consume(self, *, through: Message | int) -> None:
        """Consume all messages up to `through`. With transactions this is the same as `committed`."""
        self.half.consume(through)

    def committed(self, *, through: Message | int) -> None:
        """Answer that all unanswered messages up to `through` were processed."""
        self.half.committed(through)

    def uncommitted(self, *, through: Message | int) -> None:
        """Answer that all unanswered messages up to `through` could not be processed."""
        self.half.uncommitted(through)

    async def process(self, handler: Handler) -> None:
        """Call `handler` with each message until the channel ends, and consume or answer the message afterwards.

        With transactions, an exception of `handler` is logged, the message is answered with `uncommitted`, and the next
        message follows. Without transactions the peer can't be notified of a failure, so the exception propagates, and
        the message stays unconsumed.
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
                # The text of the exception may contain data of the peer, so it is logged only for debugging.
                if may_log("messages that could not be processed"):
                    # log: A receiver of transactions left its block by an error: the sender learns that nothing was
                    # committed.
                    _log.info("channel %d: %s, answered with uncommitted", self.channel, type(error).__name__)
                _log.debug("in full", exc_info=error)

    def close(self) -> None:
        """Release the channel. The next receiver that is created for the channel gets the unconsumed messages."""
        self.half.close()

    async def aclose(self) -> None:
        """Call `close` and execute a checkpoint."""
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
    """The listener no longer has our link, so all channels and unconfirmed messages of the link are lost.

    The session continues with a new link. With `Config(require_link=True)` there is no new link: `change.link_id` is 0,
    and the session ends.

    Attributes:
        change: The engine's event, with the epochs and ids of both links.
        lost: How many of our messages the peer hadn't answered. Nothing is known about what became of them.
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
    """The link was given up because the peer ended many connections in a row right after the handshake.

    Each of the last `connections` connections ended within a second and made no progress. Relink has no packet that
    refuses a link, so we can't know whether the peer refuses the link or fails. The peer's log may have the reason.
    `__cause__` is the error of the last connection.
    """

    def __init__(self, connections: int, last: BaseException, *, peer: str = "", unsent: int = 0) -> None:
        what = f"{connections} connections in a row were ended at once and brought nothing forward: the peer may refuse"
        super().__init__(f"{what} to go on with the link; the last one: {last}", by="peer", peer=peer, unsent=unsent)
        self.connections = connections
        self.__cause__: BaseException | None = last


class NotCommitted(MuxError):
    """The peer's application couldn't process a committed message: it answered with `uncommitted`."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: the peer answered message {number} with uncommitted")
        self.channel = channel
        self.number = number


class RolledBackError(MuxError):
    """Our side has rolled the message back, so the peer doesn't answer it."""

    def __init__(self, channel: int, number: int) -> None:
        super().__init__(f"channel {channel}: message {number} was rolled back")
        self.channel = channel
        self.number = number
