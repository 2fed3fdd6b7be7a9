"""bpmux sessions: open and accept channels, dispatch the engine's events to them, and leave in order."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypeVar, overload

import trio

from muxkit._limits import Limits
from muxkit._observer import Observer, measured
from muxkit._typed import Connect, OpenServer, Reconnecting
from muxkit.codecs import Codec, announced
from muxkit.core import Headers, Reason, Receiving, Sending, counted, encode_headers, opening_refusal, with_name
from muxkit.protocols.bpmux._session.channels import (
    REASON_MOST,
    Connection,
    Duplex,
    IncomingRequest,
    Request,
    Sink,
    Source,
)
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine.entities import Entity, Kind
from muxkit.protocols.bpmux.engine.events import (
    Confirmed,
    Declined,
    Ended,
    Event,
    Failed,
    HalfClosed,
    HungUp,
    Message,
    Messages,
    Opened,
    Ponged,
    Probed,
    Responded,
    Silent,
    Writable,
)
from muxkit.runtime import (
    Backlog,
    ChannelOpening,
    ChannelStopped,
    ErrorMaker,
    LinkLost,
    Opening,
    SessionInfo,
    SessionStats,
    SlotQueue,
    TypedChannel,
    Unclaimed,
    ValueT,
    background,
    describe,
    may_log,
    protect_package,
    protected_manager,
    reason_for_leaving,
    turns,
    typed,
)
from muxkit.runtime import Session as CommonSession
from muxkit.trace import traced

MadeT = TypeVar("MadeT", Duplex, Sink, Source, Request)
Half = Sink | Source | Request

LINGER = 5.0  # s to leave in order
LEFT_BY_ERROR = Reason("the other side left the session by an error", 500)
TOO_MANY_WAIT = Reason("too many channels wait here", 503)
PEER_BROKE_A_RULE = 400  # the code of a connection that ends because its peer broke a rule
# In this order halves are closed: those to send on, those to receive from, requests.
CLOSING_ORDER = (Kind.REQUEST_IN, Kind.SINK_OUT, Kind.SINK_IN, Kind.STREAM_OUT, Kind.STREAM_IN, Kind.REQUEST_OUT)

_log = logging.getLogger("muxkit")


@protected_manager
async def session(
    stream: trio.abc.Stream,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """Run a bpmux session on a connected byte stream, which the session owns from now on.

    Leaving the block normally finishes all channels, waits until the peer has confirmed that, and hangs up, all within
    `linger` seconds. It raises `LinkLost` if the peer may not have received everything. Leaving by an error or a
    cancellation hangs up at once.
    """
    mux = Session(stream, config or Config(), limits or Limits(), traced(observer, "bpmux session"))
    with measured(mux._connection.facts, mux):
        async with background() as nursery:
            nursery.start_soon(mux._connection.pump.run)
            mux._unclaimed.nursery = nursery
            try:
                yield mux
            except Exception as error:
                told = reason_for_leaving(error, LEFT_BY_ERROR)
                mux._connection.lose("the session was left by an error", by="local", told=told)
                raise
            except BaseException:
                mux._connection.abandon()
                raise
            await mux._leave(linger)


class Session(CommonSession):
    """A bpmux session; made by `session`."""

    def __init__(self, stream: trio.abc.Stream, config: Config, limits: Limits, observer: Observer | None) -> None:
        self._draining = False
        self._openers = SlotQueue(self._free_slots)
        self._gone = trio.lowlevel.ParkingLot()  # tasks that wait until channels are gone
        self._messages_received = 0
        self._info = describe(stream, "bpmux")
        self._connection: Connection = Connection(
            stream, config, limits, observer, session=self, on_events=self._dispatch, on_lost=self._on_lost
        )
        self._engine = self._connection.engine
        pace = self._engine.starts
        self._duplexes: Backlog[Duplex] = Backlog(lambda duplex: self._took(duplex.sent_with_opening), pace)
        self._sources: Backlog[tuple[Source, bytes]] = Backlog(lambda item: self._took(item[1]), pace, kind="sinks")
        self._sinks: Backlog[tuple[Sink, bytes]] = Backlog(lambda item: self._took(item[1]), pace, kind="sources")
        self._requests: Backlog[IncomingRequest] = Backlog(
            lambda request: self._took(request.payload), pace, kind="requests"
        )
        self._backlogs = (self._duplexes, self._sources, self._sinks, self._requests)
        self._unclaimed: Unclaimed = Unclaimed(self._backlogs, self._decline, peer=self._info.peer)
        self._messages: Source = _TopSource(self._connection, self._engine.top_stream)
        """The half that receives the peer's top-level messages."""
        self._top: _TopSink = _TopSink(self._connection, self._engine.top_sink, self._openers)
        """The half that sends top-level messages."""

    # --- the top level

    async def send(self, message: bytes) -> None:
        """Send a top-level message; the same as `top.send`."""
        await self._top.send(message)

    async def receive(self) -> bytes:
        """Receive the peer's next top-level message; the same as `messages.receive`."""
        return await self._messages.receive()

    async def request(self, payload: bytes) -> bytes:
        """Send a request and wait for the response; a cancellation cancels the request."""
        async with self.open_request(payload) as request:
            return await request.response()

    # --- opening: waits for a slot under the limits, and for top-level credit if there is a payload

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[Duplex]: ...
    @overload
    def open(
        self, name: str = "", *, codec: Codec[ValueT], payload: bytes = b"", headers: Headers | None = None
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
    ) -> ChannelOpening[Duplex] | ChannelOpening[TypedChannel[ValueT]]:
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec)), codec)
        return self.open_duplex(with_name(name, payload, encode_headers(headers, self.limits.headers)))

    def open_duplex(self, payload: bytes = b"", *, credit: int | None = None) -> ChannelOpening[Duplex]:
        """Open a two-way channel, which is announced at once. With `credit` all further grants are made by hand."""

        def make() -> Duplex:
            sink, stream = self._engine.open_duplex(payload, credit=credit)
            return Duplex(Sink(self._connection, sink), Source(self._connection, stream), payload)

        return ChannelOpening(self._opener(payload, make))

    def open_sink(self, payload: bytes = b"") -> ChannelOpening[Sink]:
        """Open a channel to send on."""
        return ChannelOpening(self._opener(payload, lambda: Sink(self._connection, self._engine.open_sink(payload))))

    def open_source(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Source]:
        """Open a channel to receive from. With `credit` all further grants are made by hand."""
        return Opening(
            self._opener(payload, lambda: Source(self._connection, self._engine.open_stream(payload, credit=credit)))
        )

    def open_request(self, payload: bytes = b"", *, credit: int | None = None) -> Opening[Request]:
        """Send a request. `credit` is the largest response, in bytes; without it that is the usual window."""
        return Opening(
            self._opener(payload, lambda: Request(self._connection, self._engine.open_request(payload, credit=credit)))
        )

    def _opener(self, payload: bytes, make: Callable[[], MadeT]) -> Callable[[], Awaitable[MadeT]]:
        async def open() -> MadeT:
            try:
                await self._wait_to_open(payload)
                try:
                    return make()
                finally:
                    self._connection.request_write()
                    if payload:
                        self._top._end_turn()
            finally:
                self._openers.wake_waiters()

        return open

    async def _wait_to_open(self, payload: bytes) -> None:
        """Wait until a channel may be opened; the caller must open it before its next checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # Opening payloads use top-level credit, so they wait in line with the top-level messages.
        waits_for_credit = bool(payload) and not self._engine.config.letter
        while True:
            await self._openers.wait_for_slot()
            if (error := self._closed()) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            if not waits_for_credit or self._top._may_send(len(payload)):
                return
            self._openers.wake_waiters()  # the next openers in line may need no credit
            try:
                await self._top._wait_turn(len(payload))
            except ChannelStopped:
                continue
            if self._engine.places > 0:
                return
            self._top._end_turn()

    def _free_slots(self) -> int:
        """Return how many channels may be opened now; once none ever may, more than wait, so that all wake."""
        return self._engine.places if self._closed() is None else sys.maxsize

    def _closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        if (loss := self._connection.loss) is not None:
            return loss()
        top = self._engine.top_sink
        if self._top.state is not Sending.OPEN and not top.end_in:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        if top.gone or top.ending:
            return _refused()
        return None

    # --- channels that the peer opens

    def incoming(self) -> AsyncIterator[Duplex]:
        return self._duplexes.claim()

    def sources(self) -> AsyncIterator[tuple[Source, bytes]]:
        """Iterate over the sinks that the peer opens: a source on this side, and the opening payload."""
        return self._sources.claim()

    def sinks(self) -> AsyncIterator[tuple[Sink, bytes]]:
        """Iterate over the streams that the peer opens: a sink on this side, and the opening payload."""
        return self._sinks.claim()

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """Iterate over the requests of the peer."""
        return self._requests.claim()

    def _on_opened(self, event: Opened) -> None:
        if self._draining and not self._engine.top_stream.gone:
            # The peer cannot know yet that this side accepts no channels, so this does not count as refused.
            self._engine.consumed_opening(len(event.payload))
            self._engine.decline(event.entity)
            return
        waiting = len(self._duplexes) + len(self._sources) + len(self._sinks) + len(self._requests)
        # Messages that the application has not taken stay in memory after their channel, so such channels count, too.
        if self._draining or waiting >= self.limits.backlog or self._engine.unread >= self.limits.channels:
            self._engine.consumed_opening(len(event.payload))
            self._engine.refuse(event.entity, Reason() if self._draining else TOO_MANY_WAIT)
            facts = self._connection.facts
            if facts is not None and not self._draining:
                facts.limit("backlog" if waiting >= self.limits.backlog else "channels")
            return
        entity, connection = event.entity, self._connection
        backlog = self._backlog_of(event)
        refusal = opening_refusal(event.payload, self.limits.headers) if backlog is self._duplexes else None
        if not backlog.is_claimed:
            refusal = self._unclaimed.refusal(backlog) or refusal
        if refusal is not None:
            self._engine.consumed_opening(len(event.payload))
            self._engine.refuse(entity, refusal)
            return
        if event.source is not None:
            sink, source = Sink(connection, entity), Source(connection, event.source)
            self._duplexes.put(Duplex(sink, source, event.payload))
        elif entity.kind is Kind.STREAM_IN:
            self._sources.put((Source(connection, entity), event.payload))
        elif entity.kind is Kind.SINK_IN:
            self._sinks.put((Sink(connection, entity), event.payload), entity)
        else:
            self._requests.put(IncomingRequest(connection, entity, event.payload), entity)
        if not backlog.is_claimed:
            self._unclaimed.arrived()

    def _backlog_of(self, event: Opened) -> Backlog[Any]:
        if event.source is not None:
            return self._duplexes
        kind = event.entity.kind
        return self._sources if kind is Kind.STREAM_IN else self._sinks if kind is Kind.SINK_IN else self._requests

    def _takes_only(self, kinds: Sequence[str]) -> None:
        self._unclaimed.take_only(kinds)

    def _decline(
        self, item: Duplex | tuple[Source, bytes] | tuple[Sink, bytes] | IncomingRequest, reason: Reason
    ) -> None:
        """End something that the peer opened and the application hasn't taken, with a reason where there is credit."""
        match item:
            case Duplex():
                self._took(item.sent_with_opening)
                item.abort(reason.text, code=reason.code)
            case IncomingRequest():
                self._took(item.payload)
                item.abort(reason.text, code=reason.code)
            case (Sink() as sink, opening):
                self._took(opening)
                sink.abort(reason.text, code=reason.code)
            case (Source() as source, opening):
                self._took(opening)
                source.close()

    def _drop_waiting(self, key: Duplex | Entity) -> None:
        """Forget what the peer cancelled before the application took it: it needs no work."""
        if (duplex := self._duplexes.drop(key)) is not None:
            duplex.source.close()
            self._engine.consumed_opening(len(duplex.sent_with_opening))
        elif (item := self._sinks.drop(key)) is not None:
            self._engine.consumed_opening(len(item[1]))
        elif (request := self._requests.drop(key)) is not None:
            self._engine.consumed_opening(len(request.payload))
        else:
            return
        self._engine.starts.spared()

    def _took(self, opening: bytes) -> None:
        """Note that the application has taken a channel, and renew the credit of its opening payload."""
        self._engine.consumed_opening(len(opening))
        self._connection.request_write()

    def _stop_opening(self, error: ErrorMaker | None) -> None:
        """End the iterators over new channels and fail the waiting openers; `error` is None if that is in order.

        A peer that sent this side away, with 401 for example, has not ended in order.
        """
        orderly = error is None or (self._engine.hung_up_cleanly and not self._connection.pump.is_refusal)
        self._draining = True
        for backlog in self._backlogs:
            backlog.ended(None if orderly else error)
        self._openers.wake_waiters()

    # --- events

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            if type(event) is Message:
                self._messages_received += 1
                # Messages arrive on nothing else; a `cast` would be one more call for each.
                source: Source | None = event.entity.half  # type: ignore[assignment]
                if source is not None:
                    source._deliver(event.payload)
                else:
                    self._engine.consumed(event.entity, len(event.payload))
            elif type(event) is Messages:
                self._messages_received += len(event.payloads)
                source = event.entity.half  # type: ignore[assignment]  # as above
                if source is not None:
                    source._deliver_all(event.payloads)
                else:
                    self._engine.consumed(event.entity, sum(map(len, event.payloads)))
            else:
                self._act(event)

    def _act(self, event: Event) -> None:
        pump = self._connection.pump
        match event:  # first what happens to each channel
            case Opened():
                self._on_opened(event)
            case Ended():
                half: Half | None = event.entity.half  # type: ignore[assignment]  # as in `_detach_half`
                channel = None if half is None or isinstance(half, Request) else half._channel
                if half is not None:
                    half._peer_ended(event.payload)
                _detach_half(event.entity)
                if event.entity is self._engine.top_stream:
                    if event.payload:
                        pump.told(Reason.decode(event.payload))
                    self._stop_opening(pump.loss if pump.is_refusal else None)
                elif event.cancels:
                    self._drop_waiting(channel or event.entity)
                self._entity_gone(event.entity)
            case Confirmed():
                half = _detach_half(event.entity)
                if half is not None:
                    half._confirmed()
                self._entity_gone(event.entity)
            case Writable():
                sink = event.entity.half
                if isinstance(sink, Sink):
                    sink._window_changed()
            case Responded():
                self._messages_received += 1
                request = _detach_half(event.entity)
                if isinstance(request, Request):
                    request._responded(event.payload)
                self._entity_gone(event.entity)
            case Declined():
                for each in (event.entity, event.twin):
                    if each is not None:
                        half = _detach_half(each)
                        if half is not None:
                            half._stopped(_refused)
                        self._entity_gone(each)
            case Ponged():
                self._connection.pings.answered(event.entity)
            case Probed():
                self._connection.pings.sent(event.entity)
            case Silent():
                pump.lose(f"nothing was heard for {event.seconds:.0f} s", by="network")
            case Failed():
                what = f"{event.error}{pump.foreign}"
                if may_log("peers that broke a rule"):
                    _log.warning("%s broke a rule, the session was closed: %s", pump.peer or "a peer", what)
                told = Reason(str(event.error), PEER_BROKE_A_RULE)
                self._connection.lose(str(event.error), by="peer", cause=event.error, told=told)
            case HalfClosed():
                self._on_half_closed()
            case HungUp():
                channels = self._engine.channels
                live = counted(channels, "channel", were=True)
                what = "" if event.clean else f" while {live} open" if channels else " in mid-message"
                pump.lose(f"the peer hung up{what}", by="peer")

    def _on_half_closed(self) -> None:
        """End everything that needs the peer to send; what is owed to it goes on."""
        loss = self._connection.loss
        assert loss is not None
        with turns().spreading():
            for half in self._halves():
                if not self._engine.owes(half._entity) or (isinstance(half, Sink) and half._waits_for_credit):
                    half._lost(loss)
        self._connection.pings.ended(loss)
        self._stop_opening(loss)
        self._gone.unpark_all()

    def _on_lost(self) -> None:
        loss = self._connection.pump.loss
        with turns().spreading():
            for half in self._halves():
                half._lost(loss)
        self._connection.pings.ended(loss)
        self._stop_opening(loss)
        self._gone.unpark_all()

    def _entity_gone(self, entity: Entity) -> None:
        self._connection.budget.wake_waiting()  # its queue no longer counts
        if entity in self._connection.pings:
            self._connection.pings.ended(_ended_before_the_pong, entity)
        if self._gone:
            self._gone.unpark_all()
        self._openers.wake_waiters()

    # --- leaving

    def channels(self) -> Sequence[Duplex]:
        halves = (half for half in self._halves() if not isinstance(half, Request))
        return [*dict.fromkeys(half._channel for half in halves if half._channel is not None)]

    def _halves(self) -> list[Half]:
        """Return the halves and the requests of all live entities, in the order in which they are closed."""
        entities = (entity for kind in CLOSING_ORDER for entity in self._engine.entities(kind).values())
        return [half for entity in entities if isinstance(half := entity.half, Half)]

    async def _leave(self, linger: float) -> None:
        """Close everything, wait until the peer has confirmed it, hang up; at most `linger` seconds.

        Raises also for a violation by the peer that came after its orderly end, and if the peer sent this side away
        (401 for example), because no other call may have reported them.
        """
        pump = self._connection.pump
        pump.phase = "leave"
        told = [half for half in self._halves() if isinstance(half, Sink) and half._needs_confirmation]
        with trio.move_on_after(linger) as scope:
            self._close_all()
            while not pump.is_lost and self._awaits_confirmation():
                await self._gone.park()
            await pump.flushed()
            if not any(half._is_unheard for half in told):
                await pump.hang_up()
        if scope.cancelled_caught:
            pump.lose(f"the peer did not take leave within {linger} s", by="peer")
        if pump.is_violated or pump.is_refusal or any(half._is_unheard for half in told):
            raise pump.loss()

    def _awaits_confirmation(self) -> bool:
        """Return True while an entity lives that was not given up. Looks at the first of them, not at all."""
        engine = self._engine
        entities = (entity for kind in CLOSING_ORDER for entity in engine.entities(kind).values())
        return any(not (isinstance(half := entity.half, Sink) and half._given_up) for entity in entities)

    def _close_all(self) -> None:
        """Finish all sinks, close all sources, abort all requests; the top level with them."""
        if self._connection.pump.is_lost:
            return
        self._stop_opening(None)
        for half in self._halves():
            if isinstance(half, Request):
                half.abort()
            else:
                half.close()
        self._connection.request_write()

    def _abort_all(self) -> None:
        """Abort every live channel and request; the top level stays."""
        for half in self._halves():
            if not half._entity.is_top:
                half.abort()
        self._connection.request_write()

    # --- the connection

    async def ping(self) -> float:
        half = self._messages if self._messages.state is Receiving.OPEN else self._top
        return await half.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new channels, let the live ones end for up to `grace` seconds, then abort them.

        The peer is told at once. Channels that it opens before it knows are refused. `incoming` ends after the channels
        that arrived before.
        """
        self._connection.budget.owner.check()
        await trio.lowlevel.checkpoint()
        if not self._connection.pump.is_lost:
            self._stop_opening(None)
            self._messages.close()
        with trio.move_on_after(grace):
            while self._engine.channels and not self._connection.pump.is_lost:
                await self._gone.park()
        if not self._connection.pump.is_lost:
            self._abort_all()

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    @property
    def info(self) -> SessionInfo:
        return self._info

    def stats(self) -> SessionStats:
        connection = self._connection
        return SessionStats(
            bytes_received=self._engine.bytes_received,
            bytes_sent=connection.pump.bytes_sent,
            messages_received=self._messages_received,
            messages_sent=self._engine.messages_sent,
            channels=self._engine.channels,
            queued=self._engine.outbox + connection.pump.unsent,
            round_trip=connection.pings.round_trip,
        )

    def __repr__(self) -> str:
        state = "lost" if self._connection.pump.is_lost else counted(self._engine.channels, "channel")
        return f"<bpmux.Session {self._connection.pump.peer or 'on a stream'}: {state}>"


class _TopSource(Source):
    """The half that receives top-level messages: an end with a payload is the reason why the connection ends."""

    __slots__ = ()

    def _peer_ended(self, payload: bytes) -> None:
        if not payload:
            super()._peer_ended(payload)
            return
        told = Reason.decode(payload)
        self.end_payload = payload[:REASON_MOST]
        peer = self._connection.pump.peer

        def left() -> Exception:
            reason, code = told.text or None, told.code or None
            return LinkLost("the peer ends the connection", by="peer", peer=peer, peer_reason=reason, code=code)

        self._ended(left)


class _TopSink(Sink):
    """The half that sends top-level messages; once it is closed, no channel can be opened."""

    __slots__ = ("_openers",)

    def __init__(self, connection: Connection, entity: Entity, openers: SlotQueue) -> None:
        super().__init__(connection, entity)
        self._openers = openers

    def _close(self, payload: bytes) -> None:
        super()._close(payload)
        self._openers.wake_waiters()


def _detach_half(entity: Entity) -> Half | None:
    """Return the half of an entity that is gone, and drop the reference to it."""
    half: Half | None = entity.half  # type: ignore[assignment]  # sessions put nothing else there
    entity.half = None
    if half is not None and not isinstance(half, Request):
        half._channel = None  # or only a garbage collection would free both
    return half


def _refused() -> Exception:
    return ChannelStopped("no channel can be opened any more: the peer is closing the session")


def _ended_before_the_pong() -> Exception:
    return ChannelStopped("the channel ended before the answer to the ping came")


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `bpmux`."""

    options: frozenset[str] = frozenset({"config"})
    has_requests: bool = True

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        return session(stream, config=config, limits=limits, observer=observer, linger=linger)


protocol: _Protocol = _Protocol()
connect: Connect[Session] = Connect("bpmux")
open_server: OpenServer[Session, Duplex] = OpenServer("bpmux")
reconnecting: Reconnecting[Session] = Reconnecting("bpmux")

protect_package("muxkit.protocols.bpmux")
