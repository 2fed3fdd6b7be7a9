"""The halves of channels as Trio objects, and the connection that moves their messages between engine and pump."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, TypeVar
from weakref import WeakSet

import trio

from muxkit._errors import LocalProtocolError, MuxError
from muxkit._limits import Limits
from muxkit._observer import Facts, Observer, facts_of, frames_of
from muxkit.core import Headers as ChannelHeaders
from muxkit.core import Reason, Receiving, Sending, Step, advance, counted, decode_headers
from muxkit.protocols.aqueduct.carrier import Carrier
from muxkit.protocols.aqueduct.config import Config
from muxkit.protocols.aqueduct.engine import events
from muxkit.protocols.aqueduct.engine.engine import Engine
from muxkit.protocols.aqueduct.engine.events import Arrived, Event
from muxkit.protocols.aqueduct.engine.halves import Half, Mode, Outcome, Promise, ReceiverMachine, SenderMachine, Ticket
from muxkit.protocols.aqueduct.frames import Headers, Pairs, Role, label, reason_in
from muxkit.runtime import (
    YIELD_BYTES,
    YIELD_LEAST,
    ByteStream,
    ChannelCancelled,
    ChannelStats,
    ChannelStopped,
    ErrorMaker,
    Inbox,
    ItemQueue,
    MultistreamLink,
    MultistreamPump,
    OutboxBudget,
    PumpOwner,
    Reading,
    SendHalf,
    Session,
    SessionInfo,
    Side,
    StreamPump,
    as_bytes,
    describe,
    may_log,
    turns,
)
from muxkit.runtime import Channel as CommonChannel
from muxkit.runtime.pumps.clock import Reminder

NO_HEADERS_SIZE = 1  # byte, what the headers of a message without any take
REASON_MOST = 4096  # bytes that are kept of the reason of a cancellation
WORTH_A_GRANT = 1024  # bytes; half of the smallest window

PEER_BROKE_A_RULE = 400  # the code of a connection that ends because its peer broke a rule

_log = logging.getLogger("muxkit")


# --- errors


class Finished(MuxError, trio.EndOfChannel):
    """The clean end: the sender finished, and everything that it sent was received."""


class Cancelled(ChannelCancelled):
    """The sender gave up; messages may be missing."""


class NoReceiver(ChannelStopped):
    """The receiver was closed: what is sent will not be read, and perhaps not all that was sent before."""


class LostInTransit(MuxError, trio.BrokenResourceError):
    """The message that carried the other half did not arrive, so the channel has only one end.

    The side that made the channel detects it, and tells the other side in case it knows of the channel after all.
    """


def finished() -> Exception:
    return Finished("the sender finished, and everything was received")


def closed() -> Exception:
    return trio.ClosedResourceError("this half was closed on our side")


def refused() -> Exception:
    return ChannelStopped("no channel can be opened any more: the peer is closing the connection")


ERRORS: Final[dict[Outcome, ErrorMaker]] = {
    Outcome.FINISHED: finished,
    Outcome.CANCELLED: lambda: Cancelled("the sender gave up before it was done"),
    Outcome.NO_RECEIVER: lambda: NoReceiver("the receiver was closed"),
    Outcome.LOST_IN_TRANSIT: lambda: LostInTransit("the message that carried the other half did not arrive"),
    Outcome.FORGOTTEN: lambda: LostInTransit("the peer, which made this channel, has discarded it"),
}


BROKEN_OFF: Final = (Outcome.CANCELLED, Outcome.LOST_IN_TRANSIT, Outcome.FORGOTTEN)
"""How a channel ended on which no work is to begin."""


# --- sending


class Receipt:
    """Tells whether one message arrived."""

    __slots__ = ("_core", "_known", "_promise")

    def __init__(self, core: Core, promise: Promise) -> None:
        self._core = core
        self._promise = promise
        self._known: trio.Event | None = None
        promise.owner = self

    @property
    def known(self) -> bool | None:
        """True if it arrived, False if not, None while that is unknown."""
        return self._promise.arrived

    async def arrived(self) -> bool:
        """Wait until it is known; False as well if that will never be known, though the connection lives.

        That it arrived does not say that it was read. Raises `LinkLost` if the connection is lost first.
        """
        self._core.budget.owner.check()
        await trio.lowlevel.checkpoint()
        if self._promise.arrived is None:
            self._core.raise_if_lost()
            if self._known is None:
                self._known = trio.Event()
            self._core.receipts[self] = None
            await self._known.wait()
        if self._promise.arrived is None:
            self._core.raise_if_lost()
        return bool(self._promise.arrived)

    def resolve(self) -> None:
        """For the connection: end all waiting."""
        self._core.receipts.pop(self, None)
        self._promise.owner = None
        if self._known is not None:
            self._known.set()

    def __repr__(self) -> str:
        state = {None: "not known yet", True: "arrived", False: "lost"}[self.known]
        return f"<aqueduct.Receipt: {state}>"


class Sender(SendHalf):
    """Sends messages; as a block it finishes when it is left, without waiting for the peer."""

    __slots__ = ("__weakref__", "_channel", "_core", "_engine", "_machine", "_sent", "_ticket", "headers")

    def __init__(
        self, core: Core, machine: SenderMachine, *, headers: Headers = (), ticket: Ticket | None = None
    ) -> None:
        super().__init__(core.budget, core.after_command)
        self._core = core
        self._engine = core.engine
        self._ticket = ticket  # of the other half, until it is sent
        self._machine: SenderMachine = machine
        self.headers: Headers = headers
        """Headers of the channel, set by the side that made it."""
        self._sent: int = 0
        """Messages that the connection has taken."""
        self._channel: Channel | None = None
        """The common channel that it is a half of, until it has ended."""
        machine.owner = self

    # --- for the application

    async def send(
        self, message: bytes, *, headers: Pairs = (), attachments: Sequence[Ticket] = (), mode: Mode = Mode.ORDERED
    ) -> None:
        """Send one message; returns when the connection has it.

        Cancelled means not sent, and the tickets can be used again. Waits while too much of this channel is unsent or
        unanswered, behind earlier senders; with `Mode.UNRELIABLE` it never waits, and the oldest messages are dropped.
        Checks for cancellation in every call, yields at the latest on every 64th call or 128 KiB, and always when it
        had to wait.

        Raises `trio.ClosedResourceError` after `finish`, `cancel` or `aclose`, `NoReceiver` when the receiver was
        closed, `LostInTransit` when the other half did not arrive, `LinkLost` when the connection is gone, and
        `LocalProtocolError` for what cannot be sent, or when the other half was not sent yet.
        """
        await self._transmit(message, headers, attachments, mode, receipt=False)

    async def send_tracked(
        self, message: bytes, *, headers: Pairs = (), attachments: Sequence[Ticket] = (), mode: Mode = Mode.ORDERED
    ) -> Receipt:
        """The same as `send`, with a receipt that tells whether the message arrived."""
        promise = await self._transmit(message, headers, attachments, mode, receipt=True)
        assert promise is not None  # since one was asked for
        return Receipt(self._core, promise)

    def cancel(self, reason: str = "", *, code: int = 0) -> None:
        """Give up: what has not arrived may be lost, and the receiver learns that. Too late once all was finished.

        A reason goes as an empty message with the header `muxkit.reason`, which muxkit's receiver takes into its
        error. A oneshot channel has no room for it.
        """
        self.abort(reason, code=code)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """The same as `cancel`."""
        super().abort(reason, code=code)
        if self._machine.id is None:
            self._confirmed()

    def __repr__(self) -> str:
        return f"<aqueduct.Sender {name_of(self._machine)}: {self._state_text()}>"

    def unread_beside(self) -> int:
        return 0 if self._channel is None else self._channel.receiver.unread

    # --- for the connection

    def _push_with(self, message: bytes, attachments: Sequence[Ticket], headers: Pairs = ()) -> None:
        """Hand a message to the engine at once; there must be room for it."""
        self._engine.send(self._machine, message, headers=headers, attachments=attachments)
        self._count()
        self._core.handed_over(attachments)

    @property
    def _is_over(self) -> bool:
        """Whether the end of this half was reported."""
        return self.state is Sending.CLOSED

    def _machine_ended(self, outcome: Outcome) -> None:
        """The engine reports the end of this half."""
        channel, self._channel = self._channel, None
        if outcome in (Outcome.FINISHED, Outcome.CANCELLED) and self.state is not Sending.OPEN:
            self._confirmed()
        elif outcome is Outcome.NO_RECEIVER and channel is not None:
            receiver = channel.receiver  # an abort of the whole channel tells the reason to the half that receives
            self._stopped(lambda: NoReceiver("the receiver was closed", payload=receiver._told))
        else:
            self._stopped(self._core.error_of(outcome, channel))

    def _lost(self, error: ErrorMaker) -> None:
        self._channel = None
        super()._lost(error)

    def has_room(self, size: int) -> bool:
        return self._engine.admits(self._machine, size + NO_HEADERS_SIZE)

    def _watch(self, size: int) -> None:
        # A half whose other half was not sent has nothing on its way, so it admits everything and is never watched.
        self._engine.watch(self._machine, size + NO_HEADERS_SIZE)

    def _check_size(self, size: int) -> None:
        if size > self._engine.limits.message:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={self._engine.limits.message})")

    # --- inside

    async def _transmit(
        self, message: bytes, headers: Pairs, attachments: Sequence[Ticket], mode: Mode, *, receipt: bool
    ) -> Promise | None:
        self._budget.owner.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        payload = message if type(message) is bytes else as_bytes(message)
        for ticket in attachments:
            if not isinstance(ticket, Ticket):
                raise LocalProtocolError(f"only the ticket of a new channel can be sent, not a {type(ticket).__name__}")
        if self.state is not Sending.OPEN:
            await self._refuse()
        size = len(payload)  # `has_room` and `_watch` add what the headers of a plain message take
        if headers or attachments:
            size = self._engine.size_of(payload, headers, attachments) - NO_HEADERS_SIZE
        must_wait = mode is not Mode.UNRELIABLE and not self._may_send(size)
        if must_wait:
            await self._wait_turn(size)
        try:
            promise = self._engine.send(
                self._machine, payload, headers=headers, attachments=attachments, mode=mode, receipt=receipt
            )
            self._count()
            self._core.handed_over(attachments)
        finally:
            if must_wait:
                self._end_turn()
        self._core.after_command()
        self._since_yield += max(size, YIELD_LEAST)
        if self._since_yield >= YIELD_BYTES:
            await self._yield()
        return promise

    def _push(self, message: bytes) -> None:
        self._engine.send(self._machine, message)
        self._count()

    def _count(self) -> None:
        self._sent += 1
        self._core.messages_sent += 1
        if self._machine.oneshot:
            self.state: Sending = advance(self.state, Step.FINISH)
            self._close_gate(closed)

    def _close(self, payload: bytes) -> None:
        super()._close(payload)
        if self._machine.id is None:
            self._confirmed()

    def _finish(self, payload: bytes) -> None:
        if payload:
            raise LocalProtocolError("an end says nothing in Aqueduct: send a message before it")
        if self._machine.id is None:
            self._void_ticket()
        else:
            self._engine.finish(self._machine)

    def _abort(self, reason: Reason) -> None:
        if self._machine.id is None:
            self._void_ticket()
        elif self._machine.is_cancellable:
            self._engine.cancel(self._machine, trio.current_time(), reason)

    def _void_ticket(self) -> None:
        """Let the other half be sent no more."""
        if self._ticket is not None:
            self._ticket.spent = True


# --- receiving

HalfT = TypeVar("HalfT", "Sender", "Receiver")


class Message:
    """A message that came. As a block it owns the halves that came with it: at its end those that were not taken are
    closed, or aborted if it ends by an error. A message without attachments needs no block.
    """

    __slots__ = ("_taken", "attachments", "headers", "is_unreliable", "number", "payload")

    def __init__(self, arrived: Arrived, attachments: tuple[Sender | Receiver, ...]) -> None:
        self.payload: bytes = arrived.payload
        self.headers: Headers = arrived.headers
        self.number: int = arrived.number
        """Counted from 0, those in streams and those in datagrams each by themselves."""
        self.is_unreliable: bool = arrived.unreliable
        """It came in a datagram."""
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
        """Take an attachment to send on; `LocalProtocolError` if it is none."""
        return self._take_as(Sender, index)

    def receiver(self, index: int = 0) -> Receiver:
        """Take an attachment to receive from; `LocalProtocolError` if it is none."""
        return self._take_as(Receiver, index)

    def _take_as(self, kind: type[HalfT], index: int) -> HalfT:
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


class Receiver(Inbox[Arrived], trio.abc.ReceiveChannel[Message]):
    """Receives messages; several tasks may, and get them in the order in which they began to wait.

    Iterating ends when the sender has finished.
    """

    __slots__ = (
        "__weakref__",
        "_channel",
        "_consumed",
        "_core",
        "_machine",
        "_redirected_to",
        "_tally",
        "_ticket",
        "_told",
        "headers",
    )

    _size_of = staticmethod(lambda arrived: len(arrived.payload))

    def __init__(
        self, core: Core, machine: ReceiverMachine, *, headers: Headers = (), ticket: Ticket | None = None
    ) -> None:
        super().__init__(core.after_command)
        self._core = core
        self._ticket = ticket  # of the other half, until it is sent
        self._redirected_to: Callable[[Arrived | None], None] | None = None
        self._consumed = 0  # bytes for which no grant was asked for
        self._machine: ReceiverMachine = machine
        self.headers: Headers = headers
        """Headers of the channel, set by the side that made it."""
        self._tally: int = 0
        """Messages that the application has received."""
        self._told: bytes = b""
        """The reason with which the sender gave up, as it came."""
        self._channel: Channel | None = None
        """The common channel that it is a half of, until it has ended."""
        machine.owner = self

    # --- for the application

    async def receive(self) -> Message:
        """Receive the next message. Cancelled means that none was taken.

        Checks for cancellation in every call, yields at the latest on every 64th call or 128 KiB, and always when it
        had to wait. What came before the end is given first. May be waited for before the other half was sent.

        Raises `Finished`, a `trio.EndOfChannel`, at the clean end, `Cancelled` when the sender gave up, `LostInTransit`
        when the other half did not arrive, `LinkLost` when the connection is gone, `trio.ClosedResourceError` after
        `aclose`.
        """
        arrived = await self._next_item()
        return Message(arrived, self._core.attachments_of(arrived) if arrived.attachments else ())

    async def receive_many(self, limit: int | None = None) -> list[Message]:
        """Wait for at least one message, then give all that have come, at most `limit`; one checkpoint."""
        return [Message(each, self._core.attachments_of(each)) for each in await self._next_items(limit)]

    async def aclose(self) -> None:
        """Accept no more: what has come is dropped, its attachments are closed, and the peer is told to stop."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        super().close()
        self._error = closed
        self._channel = None

    def abort(self) -> None:
        """The same as `close`."""
        self.close()

    def __repr__(self) -> str:
        return f"<aqueduct.Receiver {name_of(self._machine)}: {self.state.value}, {self.unread} unread>"

    # --- for the connection

    @property
    def _unread_bytes(self) -> int:
        """Bytes of the messages that wait to be received."""
        stored = self._stored
        return sum(len(arrived.payload) for arrived in stored) if isinstance(stored, ItemQueue) else 0

    _next_arrived: Final = Inbox[Arrived]._next_item
    _next_all: Final = Inbox[Arrived]._next_items

    def _first_unread(self) -> Arrived | None:
        """Return the message that `receive` would give next, if it is there."""
        stored = self._stored
        return next(iter(stored), None) if isinstance(stored, ItemQueue) else None

    def _redirect(self, to: Callable[[Arrived | None], None]) -> None:
        """Pass messages to a function from now on, those that are stored first, and None at the end."""
        self._redirected_to = to
        for arrived in self._stored.take_all(None):
            to(arrived)
        if self.state is not Receiving.OPEN:
            to(None)

    def _deliver(self, arrived: Arrived) -> None:
        if arrived.headers and (told := reason_in(arrived.headers)) is not None:
            self._told = told[:REASON_MOST]
            self._core.dispose(arrived)
        elif self.state is not Receiving.OPEN:
            self._core.dispose(arrived)
        elif self._redirected_to is not None:
            self._redirected_to(arrived)
        else:
            super()._deliver(arrived)
            if self._machine is self._core.engine.entrypoint:
                self._core.on_unread()

    @property
    def _is_over(self) -> bool:
        """Whether the end of this half was reported."""
        return self.state is not Receiving.OPEN

    def _machine_ended(self, outcome: Outcome) -> None:
        """The engine reports the end of this half."""
        if outcome is Outcome.CANCELLED and self._told:
            told = self._told
            self._ended(lambda: Cancelled("the sender gave up before it was done", payload=told))
        else:
            self._ended(self._core.error_of(outcome, self._channel))

    def _lost(self, error: ErrorMaker) -> None:
        """The connection is gone."""
        self._ended(error)

    def _refuse_more(self) -> None:
        """Tell the peer to send no more; what has come can still be received."""
        if self.state is Receiving.OPEN:
            self._stop()
            self._ended(finished)
            self._core.after_command()

    def _ended(self, error: ErrorMaker) -> None:
        self._channel = None
        if self.state is Receiving.OPEN:
            super()._ended(error)
            if self._redirected_to is not None:
                self._redirected_to(None)

    def _discard_unread(self) -> None:
        """Drop the messages that are stored and close what came with them."""
        self._took((), self._discard())

    # --- inside

    def _taken(self, items: Sequence[Arrived], size: int) -> bool:
        if not items:
            return False
        self._tally += len(items)
        now = trio.current_time()
        may_open = False
        for arrived in items:
            self._consumed += arrived.cost
            may_open |= self._core.engine.consumed(arrived, now)
        if may_open or not self._stored.count or self._consumed >= WORTH_A_GRANT:
            self._consumed = 0
            return True
        return False

    def _discard(self) -> int:
        for arrived in self._stored.take_all(None):
            self._core.dispose(arrived)
        return 0

    def _reading(self) -> Reading | None:
        pump = self._core.pump
        return pump.reading if isinstance(pump, StreamPump) else None

    def _stop(self) -> None:
        core = self._core
        if self._machine.id is None:
            if self._ticket is not None:
                self._ticket.spent = True
        elif not (core.pump.is_lost or core.engine.over or self._machine.gone):
            core.engine.close(self._machine, trio.current_time())


# --- common channels


class Channel(CommonChannel):
    """A sender and a receiver: the common two-way channel."""

    __slots__ = ("_core", "_headers", "_is_ours", "_name", "_opening", "receiver", "sender")

    def __init__(
        self,
        core: Core,
        sender: Sender,
        receiver: Receiver,
        *,
        name: str,
        opening: bytes,
        headers: bytes = b"",
        is_ours: bool,
    ) -> None:
        self._core = core
        self._is_ours = is_ours
        self._name = name
        self._opening = opening
        self._headers = headers
        self.sender: Sender = sender
        self.receiver: Receiver = receiver
        for half in (sender, receiver):
            if not half._is_over:
                half._channel = self

    @property
    def session(self) -> Session:
        return self._core.session

    @property
    def name(self) -> str:
        return self._name

    @property
    def opening(self) -> bytes:
        return self._opening

    @property
    def headers(self) -> ChannelHeaders:
        return decode_headers(self._headers)

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sender.send(message)

    async def send_unreliable(self, message: bytes) -> None:
        """Send a message that may be lost, or overtake others, where the transport has datagrams; waits as `send`."""
        await self.sender.wait_for_room(len(message))
        await self.sender.send(message, mode=Mode.UNRELIABLE)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sender.send_many(messages)

    async def receive(self) -> bytes:
        return self._payload(await self.receiver._next_arrived())

    async def receive_many(self, limit: int | None = None) -> list[bytes]:
        return [self._payload(arrived) for arrived in await self.receiver._next_all(limit)]

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        self.sender.cancel_when_over(scope)

    def _try_send(self, message: bytes) -> bool:
        return self.sender._try_send(message)

    def _try_receive(self) -> bytes | None:
        arrived = self.receiver._try_receive()
        return None if arrived is None else self._payload(arrived)

    def _payload(self, arrived: Arrived) -> bytes:
        if arrived.attachments:  # a common channel cannot give them to the application
            for half in self._core.attachments_of(arrived):
                half.close()
        return arrived.payload

    async def finish(self) -> None:
        await self.sender.finish()

    async def aclose(self) -> None:
        self.sender._close_quietly()
        await self.receiver.aclose()  # writes both ends

    def close(self) -> None:
        """`aclose` without the checkpoint."""
        self.sender._close_quietly()
        self.receiver.close()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        """Give up both directions now; the peer learns that messages are missing, and the reason.

        No reason can follow the end of our direction: after `finish` the peer learns of the abort only.
        """
        is_news = self.sender.state is not Sending.CLOSED or self.receiver.state is not Receiving.CLOSED
        self.sender.abort(reason, code=code)
        self.receiver.close()
        if is_news and not self._is_ours:
            self._core.engine.charge_failure()

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel."""
        return ByteStream(self.sender, self)

    def stats(self) -> ChannelStats:
        return ChannelStats(
            queued=self.sender._machine.queued,
            unread=self.receiver._unread_bytes,
            credit_out=None,
            credit_in=None,
            waiting_since=self.sender.waiting_since,
        )

    def __repr__(self) -> str:
        return f"<aqueduct.Channel {self.sender!r} {self.receiver!r}>"


# --- the connection


class Core(PumpOwner[Event]):
    """An engine with its pump, and the Trio objects of its halves."""

    wire_name = "Aqueduct"
    session: Session  # set by the session that is made with it

    def __init__(
        self,
        link: trio.abc.Stream | MultistreamLink,
        role: Role,
        *,
        headers: Pairs,
        config: Config | None,
        limits: Limits | None,
        observer: Observer | None,
    ) -> None:
        self.facts: Facts | None = facts_of(observer)
        self.observer: Observer | None = frames_of(observer)
        self.engine: Engine = Engine(
            role, config, headers=headers, limits=limits, observer=self.observer, now=trio.current_time()
        )
        self.limits: Limits = self.engine.limits
        self.budget: OutboxBudget = OutboxBudget(facts=self.facts)
        self.reminder: Reminder | None = self.budget.watchdog
        self._may_be_refused_late: bool = getattr(link, "may_be_refused_late", False)
        self._carrier = None if isinstance(link, MultistreamLink) else Carrier(self.engine)
        self.pump: MultistreamPump[Event] | StreamPump[Event]
        if isinstance(link, MultistreamLink):
            self.pump = MultistreamPump(link, self.engine, self)
        else:
            assert self._carrier is not None  # made for any link that is not of that kind
            self.pump = StreamPump(link, self._carrier, self)
        self.info: SessionInfo = describe(link, "aqueduct")
        self.round_trip: Callable[[], float | None] | None = None
        if isinstance(link, MultistreamLink):
            self.round_trip = lambda: link.round_trip
        self.changed: trio.lowlevel.ParkingLot = (
            trio.lowlevel.ParkingLot()
        )  # tasks that wait for channels to come or end
        self.receipts: dict[Receipt, None] = {}  # those that tasks wait for
        self.messages_sent = 0
        self.messages_received: int = 0
        self.is_leaving: bool = False
        self.unconfirmed: set[Half] = set()  # senders of the common channels that we opened
        self.is_told: bool = False  # the peer said why it ends the connection
        self.on_end: Callable[[ErrorMaker | None], None] = lambda error: None
        self.on_cancelled: Callable[[Receiver], None] = lambda receiver: None
        self.on_unread: Callable[[], None] = lambda: None  # a message waits on the entrypoint
        self.takes_no_channels: Callable[[], bool] = lambda: False  # the peer has said so
        self.reserved: set[Half] = {self.engine.entrypoint}  # halves that are not the application's
        self.peer_headers: Headers | None = None
        self.connected: trio.Event = trio.Event()  # the peer's headers have come, or never will
        self._unsent: WeakSet[Sender | Receiver] = WeakSet()  # halves whose other half was not sent yet
        self._is_dispatching = False

    # --- halves

    def new_sender(self, *, oneshot: bool = False, headers: Pairs = ()) -> tuple[Sender, Ticket]:
        """Make a channel whose receiver is to be sent to the peer."""
        machine, ticket = self.engine.channel(sends=True, oneshot=oneshot, headers=headers)
        half = Sender(self, machine, headers=tuple(headers), ticket=ticket)
        self._unsent.add(half)
        return half, ticket

    def new_receiver(self, *, oneshot: bool = False, headers: Pairs = ()) -> tuple[Receiver, Ticket]:
        """Make a channel whose sender is to be sent to the peer."""
        machine, ticket = self.engine.channel(sends=False, oneshot=oneshot, headers=headers)
        half = Receiver(self, machine, headers=tuple(headers), ticket=ticket)
        self._unsent.add(half)
        return half, ticket

    def handed_over(self, tickets: Sequence[Ticket]) -> None:
        """Note that the other halves of channels were sent."""
        for ticket in tickets:
            half = ticket.half.owner
            if isinstance(half, Sender | Receiver):
                self._unsent.discard(half)

    def half_of(self, machine: Half) -> Sender | Receiver:
        """Give the Trio object of a half; it is made when it is first asked for."""
        owner = machine.owner
        if isinstance(owner, Sender | Receiver):
            return owner
        half = Sender(self, machine) if isinstance(machine, SenderMachine) else Receiver(self, machine)
        # The end of a receiver that is told of comes as an event, behind the messages.
        if machine.outcome is not None and (isinstance(half, Sender) or not machine.is_told):
            half._machine_ended(machine.outcome)
        elif self.pump.is_lost:
            half._lost(self.pump.loss)
        return half

    def sender_of(self, machine: Half) -> Sender:
        half = self.half_of(machine)
        assert isinstance(half, Sender)  # as is the machine
        return half

    def receiver_of(self, machine: Half) -> Receiver:
        half = self.half_of(machine)
        assert isinstance(half, Receiver)  # as is the machine
        return half

    def attachments_of(self, arrived: Arrived) -> tuple[Sender | Receiver, ...]:
        """Give the halves that came with a message, which the application is to have."""
        if not arrived.attachments:
            return ()
        halves = []
        for attachment in arrived.attachments:
            half = self.half_of(attachment.half)
            half.headers = attachment.headers
            self.engine.accept(attachment.half)
            if half._is_over:
                self._release(attachment.half)
            halves.append(half)
        return tuple(halves)

    def _release(self, machine: Half) -> None:
        """Let reference counting free a half that the application has and that is over."""
        if machine.taken and (machine.gone or self.pump.is_lost):
            machine.owner = None

    # --- commands

    def dispose(self, arrived: Arrived) -> None:
        """Consume a message without using it, and close what came with it."""
        if self.engine.consumed(arrived, trio.current_time()):
            self.after_command()
        for half in self.attachments_of(arrived):
            half.close()

    def after_command(self) -> None:
        """Let the pump dispatch events, set its timer and write, after commands to the engine."""
        if self._is_dispatching or self.pump.is_lost:
            return
        self.pump.dispatch_events()
        self.pump.rearm()
        self.pump.request_write()

    # --- the end

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason) -> None:
        """End the connection, and tell the peer why: in QUIC's goodbye, or in the carrier's."""
        farewell = told.encode() if self._carrier is None else self._carrier.farewell(told)
        self.pump.lose(reason, by=by, cause=cause, parting=[farewell], farewell=told)

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    @property
    def live(self) -> int:
        """Live halves of the application's channels."""
        return len(self.engine.halves) - sum(not half.gone for half in self.reserved)

    def _halves(self) -> Iterator[Sender | Receiver]:
        for machine in self.engine.halves:
            yield self.half_of(machine)
        yield from [*self._unsent]

    async def leave(self, linger: float) -> None:
        """Finish everything, wait until the peer has heard it, hang up; at most `linger` seconds.

        A violation by the peer is raised here at the latest: after an orderly end no other call raises it. The same
        holds for the refusal of a client.
        """
        self.pump.phase = "leave"
        used = [sender for half in self._halves() if isinstance(sender := half, Sender) and sender._sent]
        with trio.move_on_after(linger) as scope:
            self.close_all()
            while not self.pump.is_lost and any(
                not self.sender_of(machine)._given_up for machine in self.engine.senders.values()
            ):
                await self.changed.park()
            await self.pump.flushed()
            if self._may_be_refused_late:
                await self.connected.wait()  # by the server's headers or its refusal
            if not any(sender._is_unheard for sender in used):
                await self.pump.hang_up()
        if scope.cancelled_caught:
            self.pump.lose(f"the peer did not take leave within {linger} s", by="peer")
        if self.pump.is_violated or self.pump.is_refusal or any(sender._is_unheard for sender in used):
            raise self.pump.loss()

    def _live_senders(self) -> list[Sender]:
        return [self.sender_of(machine) for machine in self.engine.senders.values()]

    def close_all(self) -> None:
        """Finish all senders and close all receivers."""
        if self.pump.is_lost:
            return
        self.is_leaving = True
        self.on_end(None)
        for half in [*self._halves()]:
            half.close()
        self.after_command()

    def abort_all(self) -> None:
        """Abort every live channel of the application."""
        for machine in self.engine.halves:
            if machine not in self.reserved:
                self.half_of(machine).abort()
        self.after_command()

    # --- called by the pump

    def handle_written(self) -> None:
        self.pump.rearm()  # what was written may have to be announced to the peer after a delay
        if self.changed:  # among it may be the end of channels, which makes room for others
            self.changed.unpark_all()

    def queued_bytes(self) -> int:
        return self.engine.outbox

    def handle_lost(self) -> None:
        loss = self.pump.loss
        with turns().spreading():
            for half in self._halves():
                half._lost(loss)
                self._release(half._machine)
        self.engine.receive_closed(trio.current_time(), clean=False)
        for receipt in [*self.receipts]:
            receipt.resolve()
        self.connected.set()
        self.on_end(loss)
        self.changed.unpark_all()

    def handle_events(self, events: Sequence[Event]) -> None:
        before, self._is_dispatching = self._is_dispatching, True
        try:
            for event in events:
                if isinstance(event, Arrived):
                    self.messages_received += 1
                    receiver = event.receiver.owner
                    if not isinstance(receiver, Receiver):
                        receiver = self.receiver_of(event.receiver)
                    if self.is_leaving:
                        receiver.close()
                    receiver._deliver(event)
                else:
                    self._on_event(event)
        finally:
            self._is_dispatching = before

    def _on_event(self, event: Event) -> None:
        match event:
            case events.Ended(half, outcome):
                self._on_ended(half, outcome)
            case events.Unclaimed(half):
                if isinstance(half.owner, Receiver):
                    half.owner._discard_unread()
            case events.Acked(promise) | events.Nacked(promise):
                if isinstance(promise.owner, Receipt):
                    promise.owner.resolve()
            case events.Writable(sender):
                if isinstance(sender.owner, Sender) and sender.owner.state is Sending.OPEN:
                    sender.owner._window_changed()
            case events.Connected(headers):
                self.peer_headers = headers
                self.connected.set()
            case events.Parted(reason):
                self.is_told = True
                self.pump.told(reason)
            case events.HungUp(clean):
                if clean and not self.is_told:
                    self.on_end(None)
                live = counted(self.live, "half", "halves", were=True)
                what = "" if clean else f" while {live} open" if self.live else " in mid-message"
                self.pump.lose(f"the peer hung up{what}", by="peer")
            case events.Silent(seconds):
                self.pump.lose(f"nothing was heard for {seconds:.0f} s", by="network")
            case events.Failed(error):
                what = f"{error}{self.pump.foreign}"
                if may_log("peers that broke a rule"):
                    # log: The peer, or something that is no peer of this protocol, sent what the rules forbid or more
                    # than a limit allows; the text names the rule, the byte and the field of `Limits`.
                    _log.warning("%s broke a rule, the connection was closed: %s", self.pump.peer or "a peer", what)
                self.lose(str(error), by="peer", cause=error, told=Reason(str(error), PEER_BROKE_A_RULE))

    def error_of(self, outcome: Outcome, channel: Channel | None) -> ErrorMaker:
        """Return what makes the error of a half that ended so; `channel` is the common channel that it is part of."""
        error = ERRORS[outcome]
        if outcome is not Outcome.LOST_IN_TRANSIT or channel is None:
            return error
        # What opens a common channel may cross the peer's word that it takes no more: then that is the reason.
        return lambda: refused() if self.takes_no_channels() else error()

    def _on_ended(self, machine: Half, outcome: Outcome) -> None:
        self.unconfirmed.discard(machine)
        if isinstance(machine, SenderMachine):
            machine.is_report_unread = False
        half = self.half_of(machine)
        half._machine_ended(outcome)
        # A receiver whose attachment did not come, of a channel that is forgotten, will never be taken.
        if isinstance(half, Receiver) and not machine.attached and outcome is Outcome.FORGOTTEN:
            half._discard_unread()
        if isinstance(half, Receiver) and outcome in BROKEN_OFF:
            self.on_cancelled(half)
        self._release(machine)
        if self.changed:
            self.changed.unpark_all()


def name_of(machine: Half) -> str:
    return "not sent yet" if machine.id is None else label(machine.id)
