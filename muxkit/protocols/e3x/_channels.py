"""What applications hold of an e3x session: channels, and receipts for processed messages.

e3x differs from other protocols in what it confirms: the peer tells what its application has processed, not what has
come. So a sending half has receipts (`Receipt`), and `finish` waits only until the end was sent. On a reliable channel
packets wait in the engine, where the peer's window counts them, and the receiving half holds only the message that the
application takes next; asking for the next one counts it as processed. An unreliable channel confirms nothing, never
waits, and drops its oldest messages if too many wait at either end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from muxkit.core import Reason, Receiving, printable, without_name
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

MESSAGES_MOST = 1_000_000  # messages that one call of `receive_many` takes


class Channel(MuxChannel):
    """A channel; made by `session.open`, or taken from `session.incoming`.

    On a reliable channel a message counts as processed, and the peer is told, with the next call of `receive` or
    `receive_many`, with `done`, or when the channel is closed. On an unreliable one `send` never waits, each message
    must fit into one packet (`quota`), and the oldest messages are dropped if too much waits at either end.
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
            assert isinstance(receiver, UnreliableReceiver)  # as there are two kinds
            receiving = UnreliableReceiveHalf(connection, receiver)
        super().__init__(connection, E3xSendHalf(connection, channel), receiving, opening)
        self.engine_channel: EngineChannel = channel

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        # The end of a channel that the peer closed looks like the end of its messages, until we send something.
        super()._cancel_when_stopped(scope)
        self.receiving.cancel_when_ended(scope)

    @property
    def id(self) -> int:
        """The number of the channel in its packets."""
        return self.engine_channel.id

    @property
    def type(self) -> str:
        """The type that its opener gave it, as it came."""
        return self.engine_channel.type

    @property
    def name(self) -> str:
        return "" if self.type == DEFAULT_TYPE else printable(self.type)

    @property
    def opening(self) -> bytes:
        return without_name(self._opening).payload if self.is_reliable else b""

    @property
    def is_reliable(self) -> bool:
        """False for a channel whose messages may be lost and may overtake each other."""
        return self.engine_channel.is_reliable

    @property
    def quota(self) -> int:
        """Bytes that fit into the next packet: on an unreliable channel, the largest message."""
        return self.engine_channel.sender.quota

    @property
    def dropped(self) -> int:
        """Received messages of an unreliable channel that made way for newer ones before the application took them."""
        return self.receiving.dropped

    async def post(self, message: bytes) -> Receipt:
        """Send a message; `await receipt.delivered()` returns when the peer's application has processed it."""
        self._need_receipts()
        return await self.sending.post(message)

    async def delivered(self) -> None:
        """Wait until the peer's application has processed everything sent so far, with a `finish`."""
        self._need_receipts()
        await self.sending.wait_delivered()

    def done(self) -> None:
        """Count the received messages as processed, before the next one is asked for."""
        self.receiving.done()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self.sending.abort(reason, code=code)
        self.receiving.drop()
        self._connection.give_up(self, Reason(reason, code))

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel.

        Raises `Unsupported` for an unreliable channel.
        """
        if not self.is_reliable:
            raise Unsupported("messages of an unreliable channel may be lost, so it is no stream of bytes")
        return super().as_stream()

    def __repr__(self) -> str:
        kind = "reliable" if self.is_reliable else "unreliable"
        state = self.sending.state_text()
        return f"<e3x.Channel {self.id} {self.type[:64]!r}, {kind}, {state}, {self.receiving.unread} unread>"

    def _need_receipts(self) -> None:
        if not self.is_reliable:
            raise Unsupported("an unreliable channel confirms nothing, so it has no receipts")


@attrs.define(eq=False)
class Receipt:
    """A receipt for a message sent on a reliable channel."""

    _half: E3xSendHalf
    number: int
    """The seq of its last packet."""

    @property
    def is_delivered(self) -> bool:
        return self._half.delivery.value >= self.number

    async def delivered(self) -> None:
        """Wait until the peer's application has processed the message.

        Raises `ChannelStopped` if the peer broke the channel before, `LinkLost` if it is lost and the peer may have
        processed the message or not. A cancellation changes nothing.
        """
        await self._half.wait_delivered(self.number)

    def __repr__(self) -> str:
        return f"<e3x.Receipt {self.number} {'delivered' if self.is_delivered else 'under way'}>"


class E3xSendHalf(SendHalf):
    """The sending half of a channel, with the receipts of a reliable one."""

    __slots__ = ("_failure", "_is_broken", "_written", "delivery", "engine_channel")

    def __init__(self, connection: Connection, channel: EngineChannel) -> None:
        super().__init__(connection, channel.sender)
        self.engine_channel: EngineChannel = channel
        self.delivery: Watermark = Watermark(0)
        """The receipt up to which the peer's application has processed everything."""
        self._written = connection.written
        self._failure: ErrorMaker | None = None
        self._is_broken = False  # by the peer, so it knows that messages are missing

    async def post(self, message: bytes) -> Receipt:
        """Send a message; return its receipt."""
        self._budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._hand_over(message if type(message) is bytes else as_bytes(message))
        sender = self.engine_channel.sender
        assert isinstance(sender, ReliableSender)
        receipt = Receipt(self, sender.last)  # before another task can send
        self._connection.request_write()
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return receipt

    async def wait_finished(self) -> None:
        """Wait until the end was sent. The peer confirms only what its application has processed."""
        channel = self.engine_channel
        while self._error is None and not (channel.gone or channel.sender.is_written):
            await self._written.park()
        await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error()

    async def wait_delivered(self, number: int | None = None) -> None:
        """Wait until the peer's application has processed everything up to a receipt; None waits for everything."""
        self._budget.thread.check()
        if number is None:
            sender = self.engine_channel.sender
            assert isinstance(sender, ReliableSender)
            number = sender.next_seq - 1 if sender.ended else sender.last
        await self.delivery.reached(number, self._raise_if_failed)

    def _raise_if_failed(self) -> None:
        """Raise why nothing more will be confirmed."""
        if self._failure is not None:
            raise self._failure()

    # --- for the connection

    @property
    def is_unheard(self) -> bool:
        """True while messages may be unprocessed by the peer's application, on a channel that nobody gave up."""
        return self.sender.has_sent and not (self.was_given_up or self._is_broken)

    def delivered(self, last: int) -> None:
        """The peer's application has processed everything up to a receipt."""
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
        self._fail(partial(trio.ClosedResourceError, "this side gave the channel up"))

    def _fail(self, error: ErrorMaker) -> None:
        self._failure = self._failure or error
        self.delivery.wake_all()


class E3xReceiveHalf(ReceiveHalf[bytes]):
    """The receiving half of a channel whose end may mean that the peer has closed the channel as a whole."""

    __slots__ = ("_scope",)

    def __init__(self, connection: Connection, receiver: ReliableReceiver | UnreliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._scope: trio.CancelScope | None = None  # cancelled when the peer sends no more

    def cancel_when_ended(self, scope: trio.CancelScope) -> None:
        """Cancel this scope when the peer sends no more."""
        self._scope = scope
        if self.state is not Receiving.OPEN:
            scope.cancel()

    def ended(self, error: ErrorMaker) -> None:
        super().ended(error)
        if self._scope is not None:
            self._scope.cancel()


class ReliableReceiveHalf(E3xReceiveHalf):
    """The receiving half of a reliable channel, which holds only the message that the application takes next."""

    __slots__ = ("_e3x", "_reliable")

    portion_most = 0  # the engine gives one message at a time

    def __init__(self, connection: Connection, receiver: ReliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._e3x = connection
        self._reliable = receiver

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        """Wait for at least one message, then take all that have arrived; they count as processed together."""
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
        """Count the taken messages as processed, and tell the peer. Harmless if none was taken."""
        self._thread.check()
        if self._reliable.handed and not self._stored.count:
            self._reliable.done()
            self._e3x.dispatch_events()

    def close(self, reason: Reason | None = None) -> None:
        """Stop receiving; the taken messages count as processed."""
        self.done()
        super().close(reason)

    def drop(self) -> None:
        """Stop receiving; the taken messages do not count as processed."""
        super().close()

    @property
    def dropped(self) -> int:
        return 0

    @property
    def unread(self) -> int:
        """Messages that wait to be received, in the packets that came."""
        return max(super().unread, self._reliable.waiting)

    async def _wait(self) -> bytes:
        """Count the message before as processed: the engine may have the next one."""
        self.done()
        if not self._stored.count:
            return await super()._wait()
        message = self._stored.take()
        self._since_yield += max(len(message), YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return message

    def _drain(self) -> None:
        """Do nothing: after the loss of the connection the engine still gives what came before."""


class UnreliableReceiveHalf(E3xReceiveHalf):
    """The receiving half of an unreliable channel, which drops the oldest messages when too much waits."""

    __slots__ = ("_e3x", "_unreliable", "dropped")

    portion_most = 0  # the engine hears of each message

    def __init__(self, connection: Connection, receiver: UnreliableReceiver) -> None:
        super().__init__(connection, receiver)
        self._e3x = connection
        self._unreliable = receiver
        self.dropped: int = 0

    def done(self) -> None:
        """Do nothing, since an unreliable channel confirms nothing."""
        self._thread.check()

    def drop(self) -> None:
        """Stop receiving."""
        self.close()

    def deliver(self, item: bytes) -> None:
        super().deliver(item)
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest messages while one channel, or all together, hold too much."""
        while self._stored.count and self._unreliable.is_too_much:
            oldest: Sequence[bytes] = (self._stored.take(),)
            self._unreliable.consumed(oldest, len(oldest[0]))
            self.dropped += 1
            self._e3x.dropped += 1


ReliableReceiveHalf.receive_many.__qualname__ = "Channel.receive_many"  # which Python prints if it is never awaited
