"""What applications hold of an Aqueduct connection: senders, receivers, messages, receipts, and two-way channels.

Aqueduct's own channels have one direction. `Sender` and `Receiver` are the faces of their halves. A `Channel` is the
two-way channel of every protocol, made of one half in each direction. Behind all of them are `AqueductSendHalf` and
`AqueductReceiveHalf`, which hold the engine's halves.

What differs from other protocols is that halves travel in messages. A half may get messages, and may end, before the
message comes that brings it to the application. And a half that was made here isn't known to the peer until its ticket
was sent, so ending it before that is no concern of the peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import trio

from muxkit._errors import LocalProtocolError, MuxError
from muxkit.core import Reason, Receiving, Sending, Step, advance
from muxkit.protocols.aqueduct.events import Arrived
from muxkit.protocols.aqueduct.frames import Headers, Pairs, reason_in
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender, Mode, Promise, Ticket
from muxkit.runtime import (
    YIELD_BYTES,
    YIELD_LEAST,
    ByteStream,
    ChannelCancelled,
    ChannelStopped,
    ErrorMaker,
    ItemQueue,
    Storage,
    as_bytes,
)
from muxkit.runtime.channel import MuxChannel, Sink
from muxkit.runtime.connection import MAX_REASON
from muxkit.runtime.halves.receive import EMPTY, ReceiveHalf
from muxkit.runtime.halves.send import SendHalf, closed

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._connection import Connection


# --- errors


class Finished(MuxError, trio.EndOfChannel):
    """The clean end: the sender finished, and everything that it sent was received."""


class Cancelled(ChannelCancelled):
    """The sender gave up; messages may be missing."""


class NoReceiver(ChannelStopped):
    """The receiver was closed: later messages will not be read, and perhaps not all that were sent before."""


class LostInTransit(MuxError, trio.BrokenResourceError):
    """The message that carried the other half did not arrive, so the channel has only one end.

    The side that made the channel detects it, and tells the other side in case it knows of the channel after all.
    """


# --- halves


class AqueductSendHalf(SendHalf):
    """The sending half of a channel, whose messages may have headers, attachments, and a way of their own."""

    __slots__ = ("__weakref__", "_aqueduct", "machine")

    def __init__(self, connection: Connection, machine: EngineSender) -> None:
        super().__init__(connection, machine)
        self.machine: EngineSender = machine
        self._aqueduct = connection

    async def transmit(
        self, message: bytes, headers: Pairs, attachments: Sequence[Ticket], mode: Mode, *, receipt: bool
    ) -> Promise | None:
        """Send a message as soon as there is room for it, and return a promise for it if a receipt is wanted."""
        self._budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        payload = message if type(message) is bytes else as_bytes(message)
        for ticket in attachments:
            if not isinstance(ticket, Ticket):
                raise LocalProtocolError(f"only the ticket of a new channel can be sent, not a {type(ticket).__name__}")
        if self.state is not Sending.OPEN:
            await self.refuse()
        size = len(payload)
        if headers or attachments:
            size = self.machine.size_of(payload, headers, attachments)
        must_wait = mode is not Mode.UNRELIABLE and not self.may_send(size)
        if must_wait:
            await self.wait_turn(size)
        try:
            promise = self.machine.transmit(
                payload, headers=headers, attachments=attachments, mode=mode, receipt=receipt
            )
            self._aqueduct.handed_over(attachments)
            self._close_if_oneshot()
        finally:
            if must_wait:
                self.end_turn()
        self._connection.request_write()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return promise

    async def _hand_over(self, message: bytes) -> None:
        await super()._hand_over(message)
        self._close_if_oneshot()

    def _close_if_oneshot(self) -> None:
        """The engine finishes a oneshot channel after its only message, so nothing more can be sent here."""
        if self.machine.oneshot:
            self.state: Sending = advance(self.state, Step.FINISH)
            self._close_gate(closed)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        super().abort(reason, code=code)
        if self.machine.id is None:
            self.confirmed()

    def _finish(self, payload: bytes) -> None:
        super()._finish(payload)
        if self.machine.id is None:  # the peer will never hear of the channel, so nothing is to be waited for
            self.confirmed()


def payload_size(arrived: Arrived) -> int:
    """Return the bytes of a message that came."""
    return len(arrived.payload)


class AqueductReceiveHalf(ReceiveHalf[Arrived]):
    """The receiving half of a channel, whose messages may have halves of other channels with them."""

    __slots__ = ("__weakref__", "_aqueduct", "machine")

    new_storage: ClassVar[type[Storage[Any]]] = ItemQueue
    size_of: staticmethod[[Any], int] = staticmethod(payload_size)
    portion_most = 0  # the engine hears of each message, because each one has a stream whose credit it renews

    def __init__(self, connection: Connection, machine: EngineReceiver) -> None:
        super().__init__(connection, machine)
        self.machine: EngineReceiver = machine
        self._aqueduct = connection

    def deliver(self, item: Arrived) -> None:
        if item.headers and (told := reason_in(item.headers)) is not None:
            self.reason: bytes = told[:MAX_REASON]  # a cancellation follows
            self._aqueduct.dispose(item)
        elif self.state is not Receiving.OPEN:
            self._aqueduct.dispose(item)
        else:
            super().deliver(item)

    def deliver_all(self, items: list[Arrived]) -> None:
        for item in items:
            self.deliver(item)

    def close_quietly(self, reason: Reason | None = None) -> None:
        unread = self._take_unread()
        super().close_quietly(reason)
        self.channel: MuxChannel | None = None
        for item in unread:
            self._aqueduct.dispose(item)

    def abort(self) -> None:
        """The same as `close`, for callers that give up halves of both kinds."""
        self.close()

    def lost(self, error: ErrorMaker) -> None:
        """The connection is lost; the messages that came can still be received."""
        self.ended(error)

    def discard_unread(self) -> None:
        """Drop the stored messages, and close the halves that came with them."""
        for item in self._take_unread():
            self._aqueduct.dispose(item)
        self._took((), 0)

    def _take_unread(self) -> list[Arrived]:
        unread, self._stored = self._stored.take_all(None), EMPTY
        return unread


class OpeningHalf(AqueductReceiveHalf):
    """The receiving half on which the peer opens two-way channels, or the server's entrypoint, on which it may."""

    __slots__ = ("has_received", "opens_channels")

    def __init__(self, connection: Connection, machine: EngineReceiver, *, opens_channels: bool) -> None:
        super().__init__(connection, machine)
        self.opens_channels: bool = opens_channels
        self.has_received: bool = False
        """The application has received a message here, so the entrypoint is its own."""

    def open_channels(self) -> None:
        """Take messages as openings from now on, those that are stored first."""
        self.opens_channels = True
        for item in self._take_unread():
            self._aqueduct.take_opening(item)
        if self.state is not Receiving.OPEN:
            self._aqueduct.openings_ended()

    @property
    def first_unread(self) -> Arrived | None:
        """The message that `receive` would return next, if it is there."""
        return next(iter(self._stored), None) if isinstance(self._stored, ItemQueue) else None

    def deliver(self, item: Arrived) -> None:
        if self.opens_channels and self.state is Receiving.OPEN:
            self._aqueduct.take_opening(item)
        else:
            super().deliver(item)
            self._aqueduct.entrypoint_unread()

    def refuse_more(self) -> None:
        """Tell the peer to open no more channels; the messages that came can still be received."""
        if self.state is Receiving.OPEN:
            self.machine.stop(Reason())
            self.ended(finished)
            self._connection.request_write()

    def ended(self, error: ErrorMaker) -> None:
        was_open = self.state is Receiving.OPEN
        super().ended(error)
        if was_open and self.opens_channels:
            self._aqueduct.openings_ended()

    def _took(self, items: Sequence[Arrived], size: int) -> None:
        self.has_received = self.has_received or bool(items)
        super()._took(items, size)


# --- faces of single halves


class Receipt:
    """Tells whether one message arrived."""

    __slots__ = ("_connection", "_known", "_promise")

    def __init__(self, connection: Connection, promise: Promise) -> None:
        self._connection = connection
        self._promise = promise
        self._known: trio.Event | None = None
        promise.owner = self

    @property
    def known(self) -> bool | None:
        """True if it arrived, False if not, None while that is unknown."""
        return self._promise.arrived

    async def arrived(self) -> bool:
        """Wait until it is known whether the message arrived, and return that.

        Arriving is not being read. Returns False as well if it will never be known, although the connection lives.
        Raises `LinkLost` if the connection is lost first.
        """
        connection = self._connection
        connection.budget.thread.check()
        await trio.lowlevel.checkpoint()
        if self._promise.arrived is None:
            connection.raise_if_lost()
            if self._known is None:
                self._known = trio.Event()
            connection.receipts[self] = None
            await self._known.wait()
        if self._promise.arrived is None:
            connection.raise_if_lost()
        return bool(self._promise.arrived)

    def resolve(self) -> None:
        """For the connection: end all waiting."""
        self._connection.receipts.pop(self, None)
        self._promise.owner = None
        if self._known is not None:
            self._known.set()

    def __repr__(self) -> str:
        state = {None: "not known yet", True: "arrived", False: "lost"}[self.known]
        return f"<aqueduct.Receipt: {state}>"


class Sender(Sink):
    """Sends messages; as a block it finishes when it is left, without waiting for the peer."""

    __slots__ = ("__weakref__", "_aqueduct", "headers")

    half: AqueductSendHalf

    def __init__(self, connection: Connection, half: AqueductSendHalf, headers: Headers = ()) -> None:
        super().__init__(connection, half)
        self._aqueduct = connection
        self.headers: Headers = headers
        """Headers of the channel, set by the side that made it."""

    async def send(
        self, message: bytes, *, headers: Pairs = (), attachments: Sequence[Ticket] = (), mode: Mode = Mode.ORDERED
    ) -> None:
        """Send one message; returns when the connection has it.

        A cancelled call has sent nothing, and its tickets can be used again. The call waits while too much of this
        channel is unsent or unanswered, after earlier senders. With `Mode.UNRELIABLE` it never waits, and the oldest
        messages are dropped. It checks for cancellation every time, yields at the latest on every 64th call or
        128 KiB, and always when it had to wait.

        Raises:
            trio.ClosedResourceError: after `finish`, `cancel` or `aclose`.
            NoReceiver: the receiver was closed.
            LostInTransit: the other half did not arrive.
            LinkLost: the connection is lost.
            LocalProtocolError: the message can't be sent, or the other half was not sent yet.
        """
        await self.half.transmit(message, headers, attachments, mode, receipt=False)

    async def send_tracked(
        self, message: bytes, *, headers: Pairs = (), attachments: Sequence[Ticket] = (), mode: Mode = Mode.ORDERED
    ) -> Receipt:
        """Do the same as `send`, and return a receipt that tells whether the message arrived."""
        promise = await self.half.transmit(message, headers, attachments, mode, receipt=True)
        assert promise is not None  # since one was asked for
        return Receipt(self._aqueduct, promise)

    def cancel(self, reason: str = "", *, code: int = 0) -> None:
        """Give up: messages that have not arrived may be lost, and the receiver learns that.

        This does nothing once all was finished. A reason goes as an empty message with the header `muxkit.reason`,
        which muxkit's receiver takes into its error. A oneshot channel has no room for it.
        """
        self.half.abort(reason, code=code)

    def __repr__(self) -> str:
        return f"<aqueduct.Sender {self.half.machine.label}: {self.half.state_text()}>"


class Receiver(trio.abc.ReceiveChannel["Message"]):
    """Receives messages; several tasks may, and get them in the order in which they began to wait.

    Iterating ends when the sender has finished.
    """

    __slots__ = ("__weakref__", "_aqueduct", "half", "headers")

    def __init__(self, connection: Connection, half: AqueductReceiveHalf, headers: Headers = ()) -> None:
        self._aqueduct = connection
        self.half: AqueductReceiveHalf = half
        self.headers: Headers = headers
        """Headers of the channel, set by the side that made it."""

    @property
    def state(self) -> Receiving:
        """Whether messages can come, the rest is to be received, or it is over."""
        return self.half.state

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return self.half.unread

    async def receive(self) -> Message:
        """Receive the next message. A cancelled call has taken none.

        It checks for cancellation every time, yields at the latest on every 64th call or 128 KiB, and always when it
        had to wait. Messages that came before the end are returned first. You may wait before the other half was sent.

        Raises:
            Finished: the clean end, which is a `trio.EndOfChannel`.
            Cancelled: the sender gave up.
            LostInTransit: the other half did not arrive.
            LinkLost: the connection is lost.
            trio.ClosedResourceError: after `aclose`.
        """
        return self._message(await self.half.receive())

    async def receive_many(self, limit: int | None = None) -> list[Message]:
        """Wait for at least one message, then return all that have come, at most `limit`; one checkpoint."""
        return [self._message(arrived) for arrived in await self.half.receive_many(limit)]

    def _message(self, arrived: Arrived) -> Message:
        return Message(arrived, self._aqueduct.faces_of(arrived) if arrived.attachments else ())

    async def aclose(self) -> None:
        """Accept no more: unread messages are dropped, their attachments closed, and the peer is told to stop."""
        await self.half.aclose()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.half.close()

    def abort(self) -> None:
        """The same as `close`."""
        self.half.close()

    def __repr__(self) -> str:
        return f"<aqueduct.Receiver {self.half.machine.label}: {self.half.state.value}, {self.half.unread} unread>"


FaceT = TypeVar("FaceT", Sender, Receiver)


class Message:
    """A message that came.

    As a block it owns the halves that came with it: at its end those that were not taken are closed, or aborted if it
    ends by an error. A message without attachments needs no block.
    """

    __slots__ = ("_taken", "attachments", "headers", "is_unreliable", "number", "payload")

    def __init__(self, arrived: Arrived, attachments: tuple[Sender | Receiver, ...]) -> None:
        self.payload: bytes = arrived.payload
        self.headers: Headers = arrived.headers
        self.number: int = arrived.number
        """Counted from 0. Messages in streams and those in datagrams are counted separately."""
        self.is_unreliable: bool = arrived.unreliable
        """True if the message came in a datagram."""
        self.attachments: tuple[Sender | Receiver, ...] = attachments
        """To look at; to use one, take it."""
        self._taken: set[int] = set()

    def take(self, index: int = 0) -> Sender | Receiver:
        """Take an attachment, which the block does not close then."""
        if not 0 <= index < len(self.attachments):
            raise LocalProtocolError(f"attachment {index} of a message that has {len(self.attachments)}")
        if index in self._taken:
            raise LocalProtocolError(f"attachment {index} was taken before")
        self._taken.add(index)
        return self.attachments[index]

    def sender(self, index: int = 0) -> Sender:
        """Take an attachment to send on; raises `LocalProtocolError` for one to receive from."""
        return self._take_as(Sender, index)

    def receiver(self, index: int = 0) -> Receiver:
        """Take an attachment to receive from; raises `LocalProtocolError` for one to send on."""
        return self._take_as(Receiver, index)

    def _take_as(self, kind: type[FaceT], index: int) -> FaceT:
        if 0 <= index < len(self.attachments) and not isinstance(self.attachments[index], kind):
            what = type(self.attachments[index]).__name__
            raise LocalProtocolError(f"attachment {index} is a {what}, not a {kind.__name__}")
        half = self.take(index)
        assert isinstance(half, kind)  # was checked
        return half

    def close(self) -> None:
        """Close the attachments that were not taken."""
        for half in self._take_rest():
            half.close()

    async def aclose(self) -> None:
        """`close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            for half in self._take_rest():
                half.abort()

    def _take_rest(self) -> list[Sender | Receiver]:
        return [self.take(index) for index in range(len(self.attachments)) if index not in self._taken]

    def __repr__(self) -> str:
        attached = f", {len(self.attachments)} attached" if self.attachments else ""
        return f"<aqueduct.Message {self.number}, {len(self.payload)} bytes{attached}>"


# --- two-way channels


class Channel(MuxChannel):
    """A two-way channel, made of two channels of Aqueduct."""

    __slots__ = ("_aqueduct",)

    sending: AqueductSendHalf
    receiving: AqueductReceiveHalf

    def __init__(
        self, connection: Connection, sending: AqueductSendHalf, receiving: AqueductReceiveHalf, opening: bytes
    ) -> None:
        super().__init__(connection, sending, receiving, opening)
        self._aqueduct = connection
        if sending.state is Sending.CLOSED:
            sending.channel = None
        if receiving.state is not Receiving.OPEN:
            receiving.channel = None

    @property
    def sender(self) -> Sender:
        """Our sending half, for messages with headers or attachments and for other modes."""
        return Sender(self._aqueduct, self.sending)

    @property
    def receiver(self) -> Receiver:
        """Our receiving half, for messages with headers or attachments."""
        return Receiver(self._aqueduct, self.receiving)

    async def send_unreliable(self, message: bytes) -> None:
        """Send a message that may be lost, or overtake others, where the transport has datagrams; waits as `send`."""
        await self.sending.wait_for_room(len(message))
        await self.sending.transmit(message, (), (), Mode.UNRELIABLE, receipt=False)

    async def receive(self) -> bytes:
        arrived = await self.receiving.receive()
        return self._payload(arrived) if arrived.attachments else arrived.payload

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        return [self._payload(arrived) for arrived in await self.receiving.receive_many(limit)]

    def _try_receive(self) -> bytes | None:
        arrived = self.receiving.try_receive()
        return None if arrived is None else self._payload(arrived)

    def _payload(self, arrived: Arrived) -> bytes:
        if arrived.attachments:  # a two-way channel has no way to give them to the application
            for half in self._aqueduct.attachments_of(arrived):
                half.close()
        return arrived.payload

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up both directions now; the peer learns that messages are missing, and the reason.

        No reason can follow the end of our direction: after `finish` the peer learns of the abort only.
        """
        is_news = self.sending.state is not Sending.CLOSED or self.receiving.state is not Receiving.CLOSED
        if self._span is not None:
            self._span.end(code)
        self.sending.abort(reason, code=code)
        self.receiving.close()
        if is_news:
            self._connection.channel_aborted(self)

    def as_stream(self) -> ByteStream:
        return ByteStream(self.sending, self, self._span)

    def __repr__(self) -> str:
        return f"<aqueduct.Channel {self.sender!r} {self.receiver!r}>"


# --- the errors that halves raise


def finished() -> Exception:
    """Make the error for a receiver at its clean end."""
    return Finished("the sender finished, and everything was received")


def cancelled(reason: bytes) -> Exception:
    """Make the error for a channel whose sender gave up, with its reason."""
    return Cancelled("the sender gave up before it was done", payload=reason)


def no_receiver(beside: AqueductReceiveHalf | None) -> Exception:
    """Make the error for a sender whose receiver was closed.

    An abort of a whole channel tells the reason to the half `beside` it, which receives. It may come later than the
    end of the sender.
    """
    return NoReceiver("the receiver was closed", payload=b"" if beside is None else beside.reason)


def lost_in_transit() -> Exception:
    """Make the error for a half whose other half was on its way and is lost."""
    return LostInTransit("the message that carried the other half did not arrive")


def forgotten() -> Exception:
    """Make the error for a half of a channel that the peer has made and discarded."""
    return LostInTransit("the peer, which made this channel, has discarded it")


def refused() -> Exception:
    """Make the error for a channel that the peer will not take, because it is closing the connection."""
    return ChannelStopped("no channel can be opened any more: the peer is closing the connection")
