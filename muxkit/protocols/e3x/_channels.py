"""The channels of an e3x session, and receipts for messages that the peer has processed.

In other protocols, a peer acks the messages that it has received. An e3x peer acks the messages that its application
has processed. That is why channels of e3x differ from those of other protocols:

- `post` returns a `Receipt`, which tells when the peer's application has processed the message.
- `finish` waits only until the end has been sent, because the ack of the end depends on the peer's application.
- Received packets of a reliable channel stay in the engine, where they occupy the peer's window. The receiving half
  stores only the next message, and acks it when the application asks for the one after it.
- An unreliable channel has no acks. `send` never waits, and each side drops the oldest messages if too many are queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.core import Headers, Reason, Receiving, printable, without_name
from muxkit.protocols.e3x.config import DEFAULT_TYPE
from muxkit.protocols.e3x.receive import ReliableReceiver, UnreliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.protocols.e3x.state import EngineChannel
from muxkit.runtime import YIELD_BYTES, YIELD_LEAST, ByteStream, ErrorMaker, Unsupported, Watermark, as_bytes
from muxkit.runtime.channel import MuxChannel
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

if TYPE_CHECKING:
    from muxkit.protocols.e3x._connection import Connection

MESSAGES_MOST = 1_000_000  # maximum number of messages that one call of `receive_many` returns


class Channel(MuxChannel):
    """A channel. `session.open` and `session.incoming` return it.

    On a reliable channel, a received message counts as processed when the application calls `receive` or `receive_many`
    again, calls `done`, or closes the channel. The peer is then notified with an ack.

    On an unreliable channel, each message must fit into one packet (`quota`). `send` never waits. If too many messages
    are queued on either side, the oldest messages are dropped.
    """

    __slots__ = ("engine_channel",)

    _connection: Connection
    sending: E3xSendHalf
    receiving: ReliableReceiveHalf | UnreliableReceiveHalf

    def __init__(self, connection: Connection, channel: EngineChannel, opening: bytes = b"") -> None:
        receiver = channel.receiver
        receiving: ReliableReceiveHalf | UnreliableReceiveHalf
        if isinstance(receiver, ReliableReceiver):
            receiving = ReliableReceiveHalf(connection, receiver)
        else:
            assert isinstance(receiver, UnreliableReceiver)  # because there are only two kinds of receivers
            receiving = UnreliableReceiveHalf(connection, receiver)
        super().__init__(connection, E3xSendHalf(connection, channel), receiving, opening)
        self.engine_channel: EngineChannel = channel

    def _cancel_when_stopped(self, scope: trio.CancelScope | None) -> None:
        # If the peer has closed the whole channel, we only see that it sends no more messages, until we send a message.
        super()._cancel_when_stopped(scope)
        self.receiving.cancel_when_ended(scope)

    @property
    def id(self) -> int:
        """The number of the channel in its packets."""
        return self.engine_channel.id

    @property
    def type(self) -> str:
        """The type of the channel, as chosen by the side that opened it."""
        return self.engine_channel.type

    @property
    def name(self) -> str:
        return "" if self.type == DEFAULT_TYPE else printable(self.type)

    @property
    def opening(self) -> bytes:
        return without_name(self._opening).payload if self.is_reliable else b""

    def _opened_with(self) -> tuple[str, Headers, bytes]:
        return self.name, self.headers, self.opening  # the name is the type of the channel and not in the opening

    @property
    def is_reliable(self) -> bool:
        """False for a channel whose messages may be lost or reordered."""
        return self.engine_channel.is_reliable

    @property
    def quota(self) -> int:
        """Maximum size of the next packet's body in bytes. An unreliable channel can't send larger messages."""
        return self.engine_channel.sender.quota

    @property
    def dropped(self) -> int:
        """Received messages that were dropped, to make room for newer ones, before the application took them.

        Always 0 for a reliable channel.
        """
        return self.receiving.dropped

    async def post(self, message: bytes) -> Receipt:
        """Send a message and return its receipt.

        `await receipt.delivered()` waits until the peer's application has processed the message. Otherwise `post` is
        like `send`. Raises `Unsupported` on an unreliable channel.
        """
        self._need_receipts()
        return await self.sending.post(message)

    async def delivered(self) -> None:
        """Wait until the peer's application has processed every message that was sent before this call.

        If `finish` was called, this also waits until the peer has acked the end. Raises `Unsupported` on an unreliable
        channel.
        """
        self._need_receipts()
        await self.sending.wait_delivered()

    def done(self) -> None:
        """Mark the received messages as processed now, instead of when the application asks for the next message."""
        self.receiving.done()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        if self._span is not None:
            self._span.end(code)
        self.sending.abort(reason, code=code)
        self.receiving.drop()
        self._connection.give_up(self, Reason(reason, code))

    def as_stream(self) -> ByteStream:
        """Return a `trio.abc.HalfCloseableStream` that sends and receives on this channel.

        Don't mix the methods of the stream with those of the channel. Raises `Unsupported` for an unreliable channel.
        """
        if not self.is_reliable:
            raise Unsupported(
                "an unreliable channel can't be a byte stream, because its messages may be lost; open a reliable one"
            )
        return super().as_stream()

    def __repr__(self) -> str:
        kind = "reliable" if self.is_reliable else "unreliable"
        state = self.sending.state_text()
        return f"<e3x.Channel {self.id} {self.type[:64]!r}, {kind}, {state}, {self.receiving.unread} unread>"

    def _need_receipts(self) -> None:
        if not self.is_reliable:
            raise Unsupported(
                "an unreliable channel has no receipts, because the peer confirms nothing; open a reliable one"
            )


@attrs.define(eq=False)
class Receipt:
    """A receipt for a message sent on a reliable channel."""

    _half: E3xSendHalf
    number: int
    """The seq of the message's last packet."""

    @property
    def is_delivered(self) -> bool:
        return self._half.delivery.value >= self.number

    async def delivered(self) -> None:
        """Wait until the peer's application has processed the message. Cancelling this call has no effect on it.

        Raises:
            ChannelStopped: The peer has broken the channel before it acked the message.
            LinkLost: The channel or the connection is lost. The peer may or may not have processed the message.
            trio.ClosedResourceError: This side has aborted the channel.
        """
        await self._half.wait_delivered(self.number)

    def __repr__(self) -> str:
        return f"<e3x.Receipt {self.number} {'delivered' if self.is_delivered else 'under way'}>"


class E3xSendHalf(SendHalf):
    """The sending half of a channel. It adds receipts to `SendHalf`, for reliable channels only."""

    __slots__ = ("_failure", "_is_broken", "_written", "delivery", "engine_channel")

    def __init__(self, connection: Connection, channel: EngineChannel) -> None:
        super().__init__(connection, channel.sender)
        self.engine_channel: EngineChannel = channel
        self.delivery: Watermark = Watermark(0)
        """The highest receipt number such that the peer's application has processed all messages up to it."""
        self._written = connection.written
        self._failure: ErrorMaker | None = None
        self._is_broken = False  # True if the peer has broken the channel, so it knows that messages are missing

    async def post(self, message: bytes) -> Receipt:
        """Send a message and return its receipt. See `Channel.post`."""
        self._budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._hand_over(message if type(message) is bytes else as_bytes(message))
        sender = self.engine_channel.sender
        assert isinstance(sender, ReliableSender)
        receipt = Receipt(self, sender.last)  # read `last` before the next checkpoint, where another task could send
        self._connection.request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return receipt

    async def wait_finished(self) -> None:
        """Wait until the end has been sent. Don't wait for the ack, which depends on the peer's application."""
        channel = self.engine_channel
        while self._error is None and not (channel.gone or channel.sender.is_written):
            await self._written.park()
        await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    async def wait_delivered(self, number: int | None = None) -> None:
        """Wait until the peer's application has processed all messages up to the receipt `number`, or all messages."""
        self._budget.thread.check()
        if number is None:
            sender = self.engine_channel.sender
            assert isinstance(sender, ReliableSender)
            number = sender.next_seq - 1 if sender.ended else sender.last
        await self.delivery.reached(number, self._raise_if_failed)

    def _raise_if_failed(self) -> None:
        """Raise the error of this half if the peer can't ack any more messages."""
        if self._failure is not None:
            raise self._failure()

    # --- for the connection

    @property
    def is_unheard(self) -> bool:
        """True while the peer may have unprocessed messages, unless either side has broken the channel."""
        return self.sender.has_sent and not (self.was_given_up or self._is_broken)

    def delivered(self, last: int) -> None:
        """Wake tasks that wait for receipts, because the peer has processed all messages up to the receipt `last`."""
        self.delivery.advance(last)
        sender = self.engine_channel.sender
        if sender.ended and sender.is_done:
            self.confirmed()

    def stopped(self, error: ErrorMaker) -> None:
        self._is_broken = True
        self._fail(error)
        super().stopped(error)

    def lost(self, error: ErrorMaker) -> None:
        self._fail(error)
        super().lost(error)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        super().abort(reason, code=code)
        self._fail(partial(trio.ClosedResourceError, "this side aborted the channel"))

    def _fail(self, error: ErrorMaker) -> None:
        self._failure = self._failure or error
        self.delivery.wake_all()


class E3xReceiveHalf(ReceiveHalf[bytes]):
    """Base class of the receiving halves. The peer's end may mean that the peer has closed the whole channel."""

    __slots__ = ("_scope",)

    def __init__(self, connection: Connection, receiver: ReliableReceiver | UnreliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._scope: trio.CancelScope | None = None  # cancelled when the peer has sent its end

    def cancel_when_ended(self, scope: trio.CancelScope | None) -> None:
        """Cancel this scope when the peer has sent its end. None forgets the scope that was given before."""
        self._scope = scope
        if scope is not None and self.state is not Receiving.OPEN:
            scope.cancel()

    def ended(self, error: ErrorMaker) -> None:
        super().ended(error)
        if self._scope is not None:
            self._scope.cancel()


class ReliableReceiveHalf(E3xReceiveHalf):
    """The receiving half of a reliable channel. It stores one message at most. The engine has the others."""

    __slots__ = ("_e3x", "_reliable")

    portion_most = 0  # the engine reports one message at a time

    def __init__(self, connection: Connection, receiver: ReliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._e3x = connection
        self._reliable = receiver

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, and return all messages that have arrived, up to `limit`.

        The next call of `receive`, `receive_many` or `done` marks all these messages as processed.
        """
        messages = await super().receive_many(limit)
        most = MESSAGES_MOST if limit is None else limit
        further = self._reliable.take(most - len(messages))
        self._e3x.messages_received += len(further)
        self._since_yield += max(sum(map(len, further)), YIELD_LEAST * len(further))
        messages += further
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return messages

    def done(self) -> None:
        """Mark the messages that the application has taken as processed, and ack them. Does nothing without any."""
        self._thread.check()
        if self._reliable.handed and not self._stored.count:
            self._reliable.done()
            self._e3x.processed()

    def close_quietly(self, reason: Reason | None = None) -> None:
        """Stop receiving, and mark the messages that the application has taken as processed."""
        self.done()
        super().close_quietly(reason)

    def drop(self) -> None:
        """Stop receiving, without marking the messages that the application has taken as processed."""
        super().close_quietly()
        self._connection.request_write()

    @property
    def dropped(self) -> int:
        return 0

    @property
    def unread(self) -> int:
        """Number of messages that wait to be received. The packets in the engine count as one message each."""
        return max(super().unread, self._reliable.waiting)

    async def _wait(self) -> bytes:
        """Mark the previous messages as processed, and take the next one if it has arrived."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self.done()
            raise
        message: bytes | None = None
        if self._reliable.handed and not self._stored.count:
            self._thread.check()
            message = self._reliable.advance()
            if message is not None:
                self._e3x.messages_received += 1
            self._e3x.processed()
        if message is None:
            if not self._stored.count:
                return await super()._wait()
            message = self._stored.take()
        self._since_yield += max(len(message), YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return message

    def _drain(self) -> None:
        """Do nothing, because the engine still delivers received messages after the connection has been lost."""


class UnreliableReceiveHalf(E3xReceiveHalf):
    """The receiving half of an unreliable channel. It drops the oldest messages if it stores too many bytes."""

    __slots__ = ("_e3x", "_unreliable", "dropped")

    portion_most = 0  # notify the engine of each message that the application takes, because the engine counts bytes

    def __init__(self, connection: Connection, receiver: UnreliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._e3x = connection
        self._unreliable = receiver
        self.dropped: int = 0

    def done(self) -> None:
        """Do nothing, because an unreliable channel has no acks."""
        self._thread.check()

    def drop(self) -> None:
        """Stop receiving."""
        self.close()

    def deliver(self, item: bytes) -> None:
        super().deliver(item)
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest messages while this channel, or all unreliable channels together, exceed a limit."""
        while self._stored.count and self._unreliable.is_too_much:
            oldest: Sequence[bytes] = (self._stored.take(),)
            self._unreliable.consumed(oldest, len(oldest[0]))
            self.dropped += 1
            self._e3x.dropped += 1


# Python prints this name in the warning for a coroutine that was never awaited.
ReliableReceiveHalf.receive_many.__qualname__ = "Channel.receive_many"
