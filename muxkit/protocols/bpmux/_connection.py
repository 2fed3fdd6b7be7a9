"""Connects a bpmux engine to Trio: it runs the pump, handles the engine's events, and opens channels.

A `Session` (`_session`) is the application's view of a connection, and all work is done here. `MuxConnection` has
everything that the protocols share. This module adds what only bpmux has: channels in one direction, requests, messages
of the top level, and a peer that ends its direction of the byte stream while it waits for answers.

The module `state` explains the top level, and why the payload of an opening uses its credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import trio

from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit.core import Reason, Receiving, Sending
from muxkit.core.events import Cancelled, Halves, Opened
from muxkit.core.halves import Receiver as CoreReceiver
from muxkit.core.halves import Sender as CoreSender
from muxkit.protocols.bpmux._channels import Duplex, IncomingRequest, Request, Sink, Source
from muxkit.protocols.bpmux.config import Config
from muxkit.protocols.bpmux.engine import Engine
from muxkit.protocols.bpmux.entities import Entity, Kind
from muxkit.protocols.bpmux.events import HalfClosed, Pinged, Requested, Responded
from muxkit.protocols.bpmux.send import Sender
from muxkit.runtime import Backlog, ChannelStopped, ErrorMaker, LinkLost, StreamPump, turns
from muxkit.runtime.channel import MuxChannel, ping_half
from muxkit.runtime.connection import MAX_REASON, MuxConnection, refused_by_peer
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

MadeT = TypeVar("MadeT", Duplex, Sink, Source, Request)

# The order in which entities are closed at the end of a session: those that we send on come first.
CLOSING_ORDER = (Kind.REQUEST_IN, Kind.SINK_OUT, Kind.SINK_IN, Kind.STREAM_OUT, Kind.STREAM_IN, Kind.REQUEST_OUT)
# The entities whose queues can contain messages or the payloads of openings.
QUEUES = (Kind.SINK_OUT, Kind.SINK_IN, Kind.REQUEST_OUT, Kind.REQUEST_IN)


class Connection(MuxConnection[Engine, Duplex]):
    """The connection of a bpmux session."""

    wire_name = "bpmux"
    channel_type = Duplex

    def __init__(self, stream: trio.abc.Stream, config: Config, limits: Limits, observer: Observer | None) -> None:
        engine = Engine(config, limits=limits, observer=frames_of(observer))
        super().__init__(engine, stream, "bpmux", engine.limits, observer, outbox=engine.waiting)
        self.pump: StreamPump[Any] = StreamPump(stream, engine, self, outbox=engine.waiting)
        # A backlog is named with the peer's word for its items, because the peer reads the name in a refusal. A channel
        # that the peer opens as a sink is a source for us.
        self.sources: Backlog[tuple[Source, bytes]] = self.new_backlog("sinks")
        self.sinks: Backlog[tuple[Sink, bytes]] = self.new_backlog("sources")
        self.requests: Backlog[IncomingRequest] = self.new_backlog("requests")
        self.messages: ReceiveHalf[bytes] = ReceiveHalf(self, self.engine.top_stream)
        """The half that receives the peer's top-level messages."""
        self.top: SendHalf = SendHalf(self, self.engine.top_sink)
        """The half that sends top-level messages."""

    # --- opening: waits for a slot under the limits, and for top-level credit if there is a payload

    async def open_channel(self, opening: bytes) -> Duplex:
        return await self.open_duplex(opening, None)

    async def open_duplex(self, payload: bytes, credit: int | None) -> Duplex:
        """Wait until a channel may be opened, and open a duplex."""
        return await self._open(
            payload, lambda: self.new_channel(Halves(*self.engine.open_duplex(payload, credit=credit)), payload)
        )

    async def open_sink(self, payload: bytes) -> Sink:
        """Wait until a channel may be opened, and open a sink."""
        return await self._open(payload, lambda: Sink(self, SendHalf(self, self.engine.open_sink(payload))))

    async def open_source(self, payload: bytes, credit: int | None) -> Source:
        """Wait until a channel may be opened, and open a source."""
        return await self._open(
            payload, lambda: Source(self, ReceiveHalf(self, self.engine.open_stream(payload, credit=credit)))
        )

    async def open_request(self, payload: bytes, credit: int | None) -> Request:
        """Wait until a channel may be opened, and send a request, which counts as a channel."""
        return await self._open(payload, lambda: Request(self, self.engine.open_request(payload, credit=credit)))

    async def _open(self, payload: bytes, make: Callable[[], MadeT]) -> MadeT:
        try:
            await self._wait_to_open(payload)
            try:
                return make()
            finally:
                self.request_write_soon()
                if payload:
                    self.top.end_turn()
        finally:
            self.openers.wake_waiters()

    async def _wait_to_open(self, payload: bytes) -> None:
        """Wait until a channel may be opened, and until there is credit for its payload.

        The caller must open the channel before its next checkpoint.
        """
        # The payload uses top-level credit, so it takes turns with top-level messages.
        waits_for_credit = bool(payload) and not self.engine.config.letter
        while True:
            await self.wait_to_open()
            if not waits_for_credit or self.top.may_send(len(payload)):
                return
            self.openers.wake_waiters()  # a task that opens a channel without payload doesn't have to wait for credit
            try:
                await self.top.wait_turn(len(payload))
            except ChannelStopped:
                continue
            if self.engine.places > 0:
                return
            self.top.end_turn()

    def closed(self) -> Exception | None:
        """Return the error for opening a channel if none can be opened any more, otherwise None.

        A channel can be opened until either side has ended the top level, even while the session is shutting down.
        """
        if (loss := self.loss) is not None:
            return loss()
        top = self.engine.top_sink
        if self.top.state is not Sending.OPEN and not top.end_in:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return refused_by_peer() if top.ending else None

    # --- channels that the peer opens

    def handle_opened(self, event: Opened) -> None:
        sender, receiver = event.channel.sender, event.channel.receiver
        backlog: Backlog[Any] = self.sources if sender is None else self.sinks if receiver is None else self.incoming
        if self._is_declined(backlog, event.channel, event.opening):
            return
        if sender is None:
            assert receiver is not None  # as there is no sender
            self.offer(backlog, (Source(self, ReceiveHalf(self, receiver)), event.opening))
        elif receiver is None:
            self.offer(backlog, (Sink(self, SendHalf(self, sender)), event.opening), sender)
        else:
            self.offer(backlog, self.new_channel(event.channel, event.opening))

    def _on_requested(self, event: Requested) -> None:
        if not self._is_declined(self.requests, Halves(event.request, None), event.payload):
            self.offer(self.requests, IncomingRequest(self, event.request, event.payload), event.request)

    def _is_declined(self, backlog: Backlog[Any], channel: Halves, opening: bytes) -> bool:
        """Decline a channel or request that the peer has just opened, if this side doesn't accept it.

        Returns True if it was declined.
        """
        # Only the openings of duplexes contain a name and headers. Other payloads belong to the application.
        reason = self.refusal_of(backlog, opening if backlog is self.incoming else b"")
        if reason is None:
            return False
        self.engine.consumed_opening(len(opening))
        if self.is_draining and not self.engine.top_stream.gone:
            # The peer can't know yet that this side accepts no channels, so this doesn't count against it.
            self.engine.decline(channel, reason)
        else:
            self.engine.refuse(channel, reason)
        return True

    def full_limit(self) -> str | None:
        # Messages that the application hasn't taken stay in memory after the channel has ended. Otherwise, a peer could
        # fill the memory with short channels.
        return super().full_limit() or ("channels" if self.engine.unread >= self.limits.channels else None)

    def took(self, item: Duplex | tuple[Source | Sink, bytes] | IncomingRequest) -> None:
        """Renew the top-level credit that the payload of an opening has used."""
        self.engine.consumed_opening(len(_opening_of(item)))
        self.request_write_soon()

    def decline(self, item: Duplex | tuple[Source | Sink, bytes] | IncomingRequest, reason: Reason) -> None:
        """Decline an item of a backlog. The peer gets the reason if it has granted credit for it."""
        self.took(item)
        match item:
            case Duplex() | IncomingRequest():
                item.abort(reason.text, code=reason.code)
            case (Sink() as sink, _):
                sink.abort(reason.text, code=reason.code)
            case (source, _):
                source.close()

    def drop_broken_off(self, half: CoreSender | CoreReceiver[Any]) -> None:
        owner = half.owner
        channel = owner.channel if isinstance(owner, (SendHalf, ReceiveHalf)) else None
        item = self.drop_waiting(half if channel is None else channel)
        if item is None:
            return
        if isinstance(item, Duplex):
            item.receiving.close()
        self.engine.consumed_opening(len(_opening_of(item)))

    def channel_aborted(self, channel: MuxChannel) -> None:
        if isinstance(sender := channel.sending.sender, Sender):
            sender.blame()

    def stop_opening(self, error: ErrorMaker | None) -> None:
        """End the iteration over new channels.

        It ends without an error if the peer hung up cleanly, unless the peer has refused this side (with the code 401,
        for example).
        """
        is_orderly = self.engine.hung_up_cleanly and not self.pump.is_refusal
        super().stop_opening(None if is_orderly else error)

    # --- events

    def handle_own_event(self, event: object) -> None:
        match event:
            case Requested():
                self._on_requested(event)
            case Responded():
                self.messages_received: int = self.messages_received + 1
                if isinstance(request := event.request.owner, Request):
                    request.responded(event.payload)
                self.half_ended(event.request)
            case HalfClosed():
                self._on_half_closed()
            case Pinged():
                pass  # the engine answers it
            case _:
                super().handle_own_event(event)

    def handle_finished(self, receiver: CoreReceiver[Any]) -> None:
        if receiver is self.engine.top_stream:
            self._on_top_ended(b"")
        else:
            super().handle_finished(receiver)

    def handle_cancelled(self, event: Cancelled) -> None:
        if event.receiver is self.engine.top_stream:
            self._on_top_ended(event.payload)
        elif isinstance(request := event.receiver.owner, Request):
            request.declined(event.payload)
            self.half_ended(event.receiver)
        else:
            super().handle_cancelled(event)

    def handle_refused(self, end: CoreSender | CoreReceiver[Any]) -> None:
        if isinstance(request := end.owner, Request):
            request.failed(refused_by_peer)
            self.half_ended(end)
        else:
            super().handle_refused(end)

    def _on_top_ended(self, payload: bytes) -> None:
        """Handle the end of the peer's top-level sink, after which the peer opens no channels.

        If the end has a payload, it is the reason for which the peer ends the whole connection.
        """
        if payload:
            told = Reason.decode(payload)
            self.messages.reason = payload[:MAX_REASON]
            self.messages.ended(lambda: self._left(told))
            self.pump.told(told)
        else:
            self.messages.ended(trio.EndOfChannel)
        self.stop_opening(self.pump.loss if self.pump.is_refusal else None)
        self.half_ended(self.engine.top_stream)

    def _left(self, told: Reason) -> Exception:
        reason, code = told.text or None, told.code or None
        return LinkLost("the peer ends the connection", by="peer", peer=self.pump.peer, peer_reason=reason, code=code)

    def _on_half_closed(self) -> None:
        """End all channels and requests except those on which the peer can still receive answers."""
        loss = self._half_lost
        with turns().spreading():
            for entity in self._live_entities():
                half = entity.owner
                if not self.engine.expects_answer(entity) or (isinstance(half, SendHalf) and half.starves):
                    _fail(half, loss)
        self.pings.ended(loss)
        self.stop_opening(loss)
        self.gone.unpark_all()

    @property
    def loss(self) -> ErrorMaker | None:
        if self.pump.is_lost:
            return self.pump.loss
        return self._half_lost if self.engine.is_half_closed else None

    def _half_lost(self) -> Exception:
        return LinkLost("the peer ended its direction of the connection", by="peer", peer=self.pump.peer)

    def handle_lost(self) -> None:
        loss = self.pump.loss
        for request in self._live_requests():
            request.failed(loss)
        super().handle_lost()

    # --- leaving

    def _live_entities(self) -> list[Entity]:
        return [entity for kind in CLOSING_ORDER for entity in self.engine.entities(kind).values()]

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        for entity in self._live_entities():
            if isinstance(half := entity.owner, (SendHalf, ReceiveHalf)):
                yield half

    def _live_requests(self) -> list[Request]:
        requests = self.engine.entities(Kind.REQUEST_OUT).values()
        return [request for entity in requests if isinstance(request := entity.owner, Request)]

    def abandon(self) -> None:
        """End the connection because of an exception in the session's block.

        The last bytes cancel our requests and channels, so that the peer doesn't go on to answer.
        """
        if not self.engine.over and (last := self.engine.cancellations()):
            self.pump.write_last(last)
        self.pump.lose("an error ended the session's block", by="local")

    def close_all(self) -> None:
        super().close_all()
        for request in self._live_requests():
            request.abort()

    def abort_all(self) -> None:
        """Abort all channels and requests, but not the top level."""
        for half in [*self.live_halves()]:
            if half not in (self.top, self.messages):
                half.abort() if isinstance(half, SendHalf) else half.close()
        for request in self._live_requests():
            request.abort()
        self.request_write()

    def awaits_confirmation(self) -> bool:
        return super().awaits_confirmation() or bool(self._live_requests())

    def announce_shutdown(self) -> None:
        self.messages.close()

    # --- the connection

    async def ping(self) -> float:
        if self.messages.state is Receiving.OPEN:
            with suppress(ChannelStopped):  # the peer has begun to leave, which ends `messages` before the session
                return await ping_half(self, self.messages)
        return await ping_half(self, self.top)

    async def ping_about(self, key: object) -> float:
        if isinstance(key, Entity) and key.gone:
            await trio.lowlevel.checkpoint()
        return await super().ping_about(key)

    def queued_bytes(self) -> int:
        """Return the number of bytes of messages that the engine has queued, including those that wait for credit."""
        queues = (entity.outgoing for kind in QUEUES for entity in self.engine.entities(kind).values())
        return sum(queue.queued + queue.opening_left for queue in queues if queue is not None)


def _opening_of(item: Duplex | tuple[Source | Sink, bytes] | IncomingRequest) -> bytes:
    """Return the payload of the opening of a backlog's item."""
    match item:
        case Duplex():
            return item.sent_with_opening
        case IncomingRequest():
            return item.payload
        case (_, opening):
            return opening


def _fail(owner: object, error: ErrorMaker) -> None:
    """Raise an error in the tasks that use a half or wait for a response, because the peer sends nothing more."""
    match owner:
        case SendHalf():
            owner.lost(error)
        case ReceiveHalf():
            owner.ended(error)
        case Request():
            owner.failed(error)
