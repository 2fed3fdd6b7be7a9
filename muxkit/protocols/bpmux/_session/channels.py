"""What applications hold of a session (sinks, sources, duplexes and requests), and the connection that they share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Final

import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, facts_of, frames_of
from muxkit.core import Headers, Reason, Receiving, Sending, decode_headers, without_name
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine.engine import Engine
from muxkit.protocols.bpmux.engine.entities import OURS, Entity, Kind
from muxkit.protocols.bpmux.engine.events import Event
from muxkit.runtime import (
    ByteStream,
    Channel,
    ChannelCancelled,
    ChannelStats,
    ChannelStopped,
    ErrorMaker,
    LinkLost,
    Mailbox,
    OutboxBudget,
    Pings,
    PumpOwner,
    Reading,
    ReceiveHalf,
    SendHalf,
    Session,
    Side,
    StreamPump,
)
from muxkit.runtime import IncomingRequest as CommonRequest

REASON_MOST = 4096  # bytes of an end payload that are kept for the error that holds it
# While messages are unread the engine hears of what was taken by so many parts of the window: it grants half of one.
PARTS_OF_WINDOW = 16
PORTION_MOST = 64  # messages that are taken before, as many as between two yields
QUEUES = (Kind.SINK_OUT, Kind.SINK_IN, Kind.REQUEST_OUT, Kind.REQUEST_IN)  # entities whose queues hold payload


class Connection(PumpOwner[Event]):
    """Runs an engine over a byte stream; `on_events` receives the engine's events, `on_lost` is called once."""

    wire_name = "bpmux"

    def __init__(
        self,
        stream: trio.abc.Stream,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        *,
        session: Session,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.facts = facts_of(observer)
        self.observer = frames_of(observer)
        self.engine: Engine = Engine(config, limits=limits, observer=self.observer, joins_messages=True)
        self.budget: OutboxBudget = OutboxBudget(limits.outbox, self.engine.waiting, facts=self.facts)
        self.reminder = self.budget.watchdog
        self._on_events = on_events
        self._on_lost = on_lost
        self.pump: StreamPump[Event] = StreamPump(stream, self.engine, self, outbox=self.engine.waiting)
        self.session = session
        self.request_write: Final = self.pump.request_write
        self.pings: Pings[Entity] = Pings(self.facts)

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason) -> None:
        """End the connection, and tell the peer why."""
        farewell = self.engine.farewell(told)
        self.pump.lose(reason, by=by, cause=cause, parting=[farewell] if farewell else (), farewell=told)

    def abandon(self) -> None:
        """End the connection without a reason, and tell the peer that it owes this side nothing."""
        if not self.engine.over and (last := self.engine.cancellations()):
            self.pump.write_last(last)
        self.pump.lose("the session was left by an error", by="local")

    @property
    def loss(self) -> ErrorMaker | None:
        """Makes an error that says why the peer can send nothing any more; None while it can."""
        if self.pump.is_lost:
            return self.pump.loss
        return self._half_lost if self.engine.is_half_closed else None

    def _half_lost(self) -> Exception:
        return LinkLost("the peer ended its direction of the connection", by="peer", peer=self.pump.peer)

    def handle_events(self, events: Sequence[Event]) -> None:
        self._on_events(events)

    def handle_written(self) -> None:
        self.budget.wake_waiting()

    def handle_lost(self) -> None:
        self._on_lost()

    def queued_bytes(self) -> int:
        """Return the bytes of messages that the engine holds, with those that wait for credit."""
        queues = (entity.outgoing for kind in QUEUES for entity in self.engine.entities(kind).values())
        return sum(queue.queued + queue.opening_left for queue in queues if queue is not None)

    async def ping(self, entity: Entity) -> float:
        """Send a ping about an entity and wait for the pong; return the seconds between them."""
        self.budget.owner.check()
        if self.pump.is_lost or self.engine.is_half_closed or entity.gone:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        if (loss := self.loss) is not None:
            raise loss()
        self.engine.ping(entity)
        ping = self.pings.sent(entity)
        self.request_write()
        return await ping.wait()


class Sink(SendHalf):
    """The sending half of a channel."""

    __slots__ = ("_channel", "_connection", "_entity")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection.budget, connection.request_write)
        self._connection = connection
        self._entity: Entity = entity
        self._channel: Duplex | None = None
        """What it is a half of, until it has ended."""
        entity.half = self

    async def ping(self) -> float:
        """Wait for one round trip about this channel; return its seconds."""
        if self.state is not Sending.OPEN:
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._refuse()
        return await self._connection.ping(self._entity)

    def _blame(self) -> None:
        """Count a failure of the local handler of a channel that the peer opened, as if the peer had cancelled it."""
        self._connection.engine.blame(self._entity)

    def give_credit(self, amount: int) -> None:
        """Let the peer send an end payload of so many bytes when it stops this half.

        Harmless once either side has ended the channel.
        """
        self._budget.owner.check()
        if self.state is Sending.OPEN:
            self._connection.engine.give_credit(self._entity, amount)
            self._request_write()

    @property
    def _needs_confirmation(self) -> bool:
        """Whether this side has opened the channel or sent on it, so that leaving waits for the peer's confirmation."""
        outgoing, entity = self._entity.outgoing, self._entity
        return (outgoing is not None and outgoing.has_sent) or (
            not entity.is_top and (outgoing is not None or entity.ending or entity.kind in OURS)
        )

    @property
    def _waits_for_credit(self) -> bool:
        """Whether a task waits here to send what the peer's credit does not cover."""
        return self.first_waiter is not None and not self.has_room(self.first_waiter.size)

    def has_room(self, size: int) -> bool:
        return self._connection.engine.admits(self._entity, size)

    def _watch(self, size: int) -> None:
        loss = self._connection.loss
        if loss is not None:  # no credit can come; the calling task may be the one to wake
            trio.lowlevel.current_trio_token().run_sync_soon(self._lost, loss)
            return
        self._connection.engine.watch(self._entity, size)

    def _push(self, message: bytes) -> None:
        self._connection.engine.send(self._entity, message)

    def _try_push(self, message: bytes) -> bool | None:
        return self._connection.engine.try_send(self._entity, message)

    def _try_push_all(self, messages: list[bytes]) -> bool:
        return self._connection.engine.try_send_all(self._entity, messages)

    def _check_size(self, size: int) -> None:
        allowed = self._connection.engine.limits.message
        if size > allowed:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={allowed})")

    def _finish(self, payload: bytes) -> None:
        self._connection.engine.end(self._entity, payload)
        loss = self._connection.loss
        if loss is not None:  # the end is sent, but no confirmation can come, and `finish` would wait for it
            trio.lowlevel.current_trio_token().run_sync_soon(self._lost, loss)

    def _abort(self, reason: Reason) -> None:
        self._connection.engine.abort(self._entity, reason)
        self._connection.pump.dispatch_events()

    def _peer_ended(self, payload: bytes) -> None:
        """Called by the session when the peer receives no more on it."""
        # An abort of the whole channel tells the reason to the half that receives.
        # An end of the other half may come later, since it waits for what was sent before it.
        source = None if self._channel is None else self._channel.source

        def stopped() -> Exception:
            told = payload or (b"" if source is None else source.end_payload)
            return ChannelStopped("the peer does not receive on this channel any more", payload=told)

        self._stopped(stopped)

    def __repr__(self) -> str:
        return f"<bpmux.Sink {self._entity.label} {self._state_text()}>"

    def unread_beside(self) -> int:
        return 0 if self._channel is None else self._channel.source.unread


class Source(ReceiveHalf[bytes]):
    """The receiving half of a channel."""

    __slots__ = ("_channel", "_connection", "_entity", "end_payload")

    _new_storage = Mailbox
    _portion_most = PORTION_MOST

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection.request_write)
        self._connection = connection
        self._entity: Entity = entity
        self._channel: Duplex | None = None
        """What it is a half of, until it has ended."""
        self.end_payload: bytes = b""
        """What the peer said at its end, an error by convention."""
        entity.half = self

    async def ping(self) -> float:
        """Wait for one round trip about this channel; return its seconds."""
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.checkpoint()
            raise self._error()
        return await self._connection.ping(self._entity)

    def give_credit(self, amount: int) -> None:
        """Grant the peer so many bytes beside the automatic grants.

        Harmless once either side has ended the channel.
        """
        self._owner.check()
        if self.state is Receiving.OPEN:
            self._connection.engine.give_credit(self._entity, amount)
            self._request_write()

    def abort(self) -> None:
        """The same as `close`."""
        self.close()

    def _peer_ended(self, payload: bytes) -> None:
        """Called by the session when the peer sends no more on it; by convention a payload means an error."""
        reason = self.end_payload = payload[:REASON_MOST]  # kept as long as the source lives, so its size is bounded

        def gave_up() -> Exception:
            return ChannelCancelled("the peer gave up on this channel before it was done", payload=reason)

        self._ended(gave_up if payload else trio.EndOfChannel)

    def _confirmed(self) -> None:
        """Called by the session when the peer has heard that this half receives no more."""

    # What the session calls when nothing more will come, as for a sink.
    _stopped: Final = ReceiveHalf._ended
    _lost: Final = ReceiveHalf._ended

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        return self._connection.engine.consumed(self._entity, size)

    def _may_wait_untold(self) -> int:
        window = self._entity.window
        return 0 if window.lent else window.target // PARTS_OF_WINDOW  # a loan is repaid with each message

    @property
    def _unread_bytes(self) -> int:
        """Bytes that arrived and were not taken."""
        return self._entity.window.held - self._handed_out

    def _stop(self) -> None:
        self._connection.engine.end(self._entity)

    def _reading(self) -> Reading:
        return self._connection.pump.reading

    def __repr__(self) -> str:
        return f"<bpmux.Source {self._entity.label} {self.state.value}, {self.unread} unread>"


class Duplex(Channel):
    """A two-way channel: a sink and a source with one id."""

    __slots__ = ("_opening", "sink", "source")

    def __init__(self, sink: Sink, source: Source, opening: bytes = b"") -> None:
        self.sink: Sink = sink
        self.source: Source = source
        self._opening = opening
        sink._channel = source._channel = self

    @property
    def sent_with_opening(self) -> bytes:
        """All bytes of the opening's payload, with the name."""
        return self._opening

    @property
    def session(self) -> Session:
        return self.sink._connection.session

    @property
    def name(self) -> str:
        return without_name(self._opening).name

    @property
    def opening(self) -> bytes:
        return without_name(self._opening).payload

    @property
    def headers(self) -> Headers:
        return decode_headers(without_name(self._opening).headers)

    # These return the half's own coroutine, because one more coroutine for each message takes time.

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sink.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sink.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.source.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.source.receive_many(limit)

    def _cancel_when_stopped(self, scope: trio.CancelScope) -> None:
        self.sink.cancel_when_over(scope)

    def _try_send(self, message: bytes) -> bool:
        return self.sink._try_send(message)

    def _try_receive(self) -> bytes | None:
        return self.source._try_receive()

    async def finish(self, payload: bytes = b"") -> None:
        await self.sink.finish(payload)

    async def aclose(self) -> None:
        self.sink._close_quietly()  # first: the peer counts the other order as a cancellation
        await self.source.aclose()  # writes both ends

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        self.sink.abort(reason, code=code)
        self.source.close()
        self.sink._blame()

    async def ping(self) -> float:
        """Wait for one round trip about this channel; return its seconds."""
        return await (self.sink if self.sink.state is Sending.OPEN else self.source).ping()

    def as_stream(self) -> ByteStream:
        """Return the channel as a `trio.abc.HalfCloseableStream`; use either that or the methods of the channel."""
        return ByteStream(self.sink, self.source)

    def stats(self) -> ChannelStats:
        outgoing, window = self.sink._entity, self.source._entity.window
        return ChannelStats(
            queued=0 if outgoing.outgoing is None else outgoing.outgoing.queued,
            unread=self.source._unread_bytes,
            credit_out=outgoing.credit_out,
            credit_in=window.credit,
            waiting_since=self.sink.waiting_since,
        )

    def __repr__(self) -> str:
        return f"<bpmux.Duplex {self.sink!r} {self.source!r}>"


class Request:
    """A request of this side, which the peer answers with one response."""

    __slots__ = ("_connection", "_entity", "_error", "_over", "_response")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        self._connection = connection
        self._over = trio.Event()
        self._response: bytes | None = None
        self._error: ErrorMaker | None = None
        self._entity: Entity = entity
        entity.half = self

    async def response(self) -> bytes:
        """Wait for the response; every call returns the same one.

        Raises `ChannelStopped` when the peer declined, `LinkLost` when the connection is gone,
        `trio.ClosedResourceError` after `abort`.
        """
        self._connection.budget.owner.check()
        await self._over.wait()
        if self._response is None:
            raise (self._error() if self._error is not None else trio.ClosedResourceError("the request was cancelled"))
        return self._response

    def abort(self) -> None:
        """Tell the peer that no response is needed; harmless after the response has arrived."""
        self._connection.budget.owner.check()
        if not self._over.is_set():
            self._over.set()
            if not self._connection.pump.is_lost:
                self._connection.engine.end(self._entity)
                self._connection.request_write()

    async def aclose(self) -> None:
        """`abort`, with a checkpoint."""
        self.abort()
        await trio.lowlevel.checkpoint()

    async def ping(self) -> float:
        """Wait for one round trip about this request; return its seconds."""
        return await self._connection.ping(self._entity)

    def _responded(self, payload: bytes) -> None:
        """Called by the session when the response has arrived."""
        self._response = payload
        self._over.set()
        self._connection.engine.consumed(self._entity, len(payload))

    def _confirmed(self) -> None:
        """Called by the session when the peer has heard that no response is needed."""

    def _peer_ended(self, payload: bytes) -> None:
        """Called by the session when the peer gives no response."""
        self._stopped(lambda: ChannelStopped("the peer declined to answer this request", payload=payload))

    def _stopped(self, error: ErrorMaker) -> None:
        """Called by the session when no response will arrive."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    _lost = _stopped


class _Answer(Sink):
    """The sending half of a request of the peer: one message, which is also its end."""

    __slots__ = ("answered", "on_cancelled")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection, entity)
        self.answered = False
        self.on_cancelled = trio.Event()

    def _confirmed(self) -> None:
        self.on_cancelled.set()
        super()._confirmed()

    def _stopped(self, error: ErrorMaker) -> None:
        self.on_cancelled.set()
        super()._stopped(error)

    def _lost(self, error: ErrorMaker) -> None:
        self.on_cancelled.set()
        super()._lost(error)

    def _push(self, message: bytes) -> None:
        super()._push(message)
        self.answered = True

    def _finish(self, payload: bytes) -> None:
        if not self.answered:
            super()._finish(payload)


class IncomingRequest(CommonRequest):
    """A request of the peer; leaving an `async with` block around it declines it if it has no response."""

    __slots__ = ("_answer", "_entity", "_payload")

    def __init__(self, connection: Connection, entity: Entity, payload: bytes) -> None:
        self._answer = _Answer(connection, entity)
        self._entity: Entity = entity
        self._payload = payload

    @property
    def session(self) -> Session:
        return self._answer._connection.session

    @property
    def payload(self) -> bytes:
        return self._payload

    async def respond(self, payload: bytes) -> None:
        if self._answer.answered:
            await trio.lowlevel.checkpoint()
            raise LocalProtocolError(f"{self._entity.label}: it was answered before")
        await self._answer.send(payload)
        self._answer.close()

    async def decline(self, payload: bytes = b"") -> None:
        await self._answer.finish(payload)

    async def cancelled(self) -> None:
        self._answer._budget.owner.check()
        await self._answer.on_cancelled.wait()

    async def ping(self) -> float:
        """Wait for one round trip about this request; return its seconds."""
        return await self._answer.ping()

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        if not self._answer.answered:
            self._answer.abort(reason, code=code)
        self._answer.close()

    async def __aenter__(self) -> IncomingRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()
