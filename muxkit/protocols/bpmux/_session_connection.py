"""What ties the engine to Trio? One connection: its pump, the halves that wait for events, leaving and losing it."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import trio

from muxkit.protocols.bpmux._engine import Engine
from muxkit.protocols.bpmux._entities import Kind
from muxkit.protocols.bpmux._events import (
    Confirmed,
    Declined,
    Ended,
    Event,
    Failed,
    HungUp,
    Message,
    Opened,
    Ponged,
    Probed,
    Responded,
    Silent,
    Writable,
)
from muxkit.protocols.bpmux._session_channels import Sink, Source
from muxkit.protocols.bpmux._session_requests import Request
from muxkit.runtime import ChannelCancelled, ChannelStopped, OutboxBudget, StreamPump, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.bpmux._config import Config
    from muxkit.protocols.bpmux._entities import Entity

REASON_MOST = 4096  # bytes of an end payload that are kept for the error that tells of it

_log = logging.getLogger("muxkit")


def _ended_before_the_pong() -> Exception:
    return ChannelStopped("the channel ended before the answer to the ping came")


class _Ping:
    """One ping on its way; those that the engine sends by itself have nobody who waits."""

    __slots__ = ("answer", "error", "sent_at", "took")

    def __init__(self, answer: trio.Event | None) -> None:
        self.answer = answer
        self.sent_at = trio.current_time()
        self.took: float | None = None
        self.error: Callable[[], Exception] = _ended_before_the_pong


class Connection:
    """An engine at work, and who is interested in which entity."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        on_opened: Callable[[Opened], None],
        on_goodbye: Callable[[Callable[[], Exception] | None], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.engine = Engine(config, limits=limits, observer=observer)
        self.room = OutboxBudget(limits.outbox, self.engine.waiting)
        self.pump: StreamPump[Event] = StreamPump(
            stream,
            self.engine,
            on_events=self._dispatch,
            on_written=self.room.wake_waiting,
            on_lost=self._lost,
            queued=self.queued,
            outbox=self.engine.waiting,
            observer=observer,
        )
        self.ring = self.pump.request_write
        self.gone = trio.lowlevel.ParkingLot()  # those who wait for channels to go away
        self.round_trip: float | None = None
        self.messages_received = 0
        self._on_opened = on_opened
        self._on_goodbye = on_goodbye
        self.on_gone = on_gone
        self._pings: dict[Entity, deque[_Ping]] = {}
        self._actions: dict[type, Callable[..., None]] = {
            Message: self._on_message,
            Opened: lambda event: self._on_opened(event),
            Responded: self._on_responded,
            Ended: self._on_ended,
            Confirmed: self._on_confirmed,
            Declined: self._on_declined,
            Writable: self._on_writable,
            Ponged: self._on_ponged,
            Probed: self._on_probed,
            HungUp: self._on_hung_up,
            Silent: lambda event: self.pump.lose(f"nothing was heard for {event.seconds:.0f} s", by="network"),
            Failed: self._on_failed,
        }

    # --- the halves of live entities, to go through all of them

    @property
    def senders(self) -> dict[Entity, Sink]:
        return {entity: half for entity in self._live() if isinstance(half := entity.half, Sink)}

    @property
    def receivers(self) -> dict[Entity, Source]:
        return {entity: half for entity in self._live() if isinstance(half := entity.half, Source)}

    @property
    def requests(self) -> dict[Entity, Request]:
        ours = self.engine.entities(Kind.REQUEST_OUT).values()
        return {entity: half for entity in ours if isinstance(half := entity.half, Request)}

    def _live(self) -> Iterator[Entity]:
        return (entity for kind in Kind for entity in self.engine.entities(kind).values())

    # --- pings

    async def ping(self, entity: Entity) -> float:
        """One round trip about an entity, in seconds."""
        if self.pump.is_lost or entity.gone:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        self.raise_if_lost()
        answer = trio.Event()
        self.engine.ping(entity)
        ping = self._expect_pong(entity, answer)
        self.ring()
        await answer.wait()
        if ping.took is None:
            raise ping.error()
        return ping.took

    def _expect_pong(self, entity: Entity, answer: trio.Event | None) -> _Ping:
        ping = _Ping(answer)
        self._pings.setdefault(entity, deque()).append(ping)
        return ping

    def _on_probed(self, event: Probed) -> None:
        self._expect_pong(event.entity, None)

    def _on_ponged(self, event: Ponged) -> None:
        waiting = self._pings.get(event.entity)
        if not waiting:
            return
        ping = waiting.popleft()
        if not waiting:
            del self._pings[event.entity]
        ping.took = took = trio.current_time() - ping.sent_at
        self.round_trip = took if self.round_trip is None else 0.875 * self.round_trip + 0.125 * took
        if ping.answer is not None:
            ping.answer.set()

    # --- loss

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    def _lost(self) -> None:
        loss = self.pump.loss
        with turns().spreading():
            for entity in [*self._live()]:
                half = entity.half
                if isinstance(half, Sink):
                    half.lost(loss)
                elif isinstance(half, Source):
                    half.ended(loss)
                elif isinstance(half, Request):
                    half.failed(loss)
        for entity in [*self._pings]:
            self._forget_pings(entity, loss)
        self._on_goodbye(loss)
        self.gone.unpark_all()

    def _forget_pings(self, entity: Entity, error: Callable[[], Exception] = _ended_before_the_pong) -> None:
        for ping in self._pings.pop(entity, ()):
            ping.error = error
            if ping.answer is not None:
                ping.answer.set()

    def queued(self) -> int:
        """Bytes of messages that the engine holds, those that wait for credit among them."""
        queues = (entity.outgoing for entity in (*self.senders, *self.requests))
        return sum(queue.queued + queue.opening_left for queue in queues if queue is not None)

    # --- leaving

    async def leave(self, linger: float) -> None:
        """Finish everything, wait until the peer has heard it, hang up; at most `linger` seconds.

        A rule that the peer broke is told here at the latest: behind its orderly end no other call raises.
        """
        told = [half for half in self.senders.values() if half.has_spoken]
        with trio.move_on_after(linger) as scope:
            self.goodbye()
            while not self.pump.is_lost and self.engine.live > sum(half.given_up for half in self.senders.values()):
                await self.gone.park()
            await self.pump.flushed()
            unheard = [half for half in told if half.is_unheard]
            if not unheard:
                await self.pump.hang_up()
        if scope.cancelled_caught:
            self.pump.lose(f"the peer did not take leave within {linger} s", by="peer")
        if self.pump.is_violated or any(half.is_unheard for half in told):
            raise self.pump.loss()

    def goodbye(self) -> None:
        """Finish what we send, stop what we receive, close the top level."""
        if self.pump.is_lost:
            return
        self._on_goodbye(None)
        for sender in [*self.senders.values()]:
            sender.close()
        for receiver in [*self.receivers.values()]:
            receiver.close()
        for request in [*self.requests.values()]:
            request.abort()
        self.ring()

    def abort_all(self) -> None:
        """Give up every channel that is still alive, the top level apart."""
        for entity, sender in [*self.senders.items()]:
            if not entity.is_top:
                sender.abort()
        for entity, receiver in [*self.receivers.items()]:
            if not entity.is_top:
                receiver.close()
        for request in [*self.requests.values()]:
            request.abort()
        self.ring()

    # --- events

    def _dispatch(self, events: Sequence[Event]) -> None:
        actions = self._actions
        for event in events:
            action = actions.get(type(event))
            if action is not None:
                action(event)

    def _on_message(self, event: Message) -> None:
        self.messages_received += 1
        # Messages come on nothing else; a `cast` would be one more call for each.
        receiver: Source | None = event.entity.half  # type: ignore[assignment]
        if receiver is not None:
            receiver.deliver(event.payload)
        else:
            self.engine.consumed(event.entity, len(event.payload))

    def _on_responded(self, event: Responded) -> None:
        self.messages_received += 1
        request = _let_go(event.entity)
        if isinstance(request, Request):
            request.responded(event.payload)
        self._entity_gone(event.entity)

    def _on_ended(self, event: Ended) -> None:
        entity, payload = event.entity, event.payload
        half = _let_go(entity)
        if isinstance(half, Source):
            half.ended(_end_of(payload))
        elif isinstance(half, Sink):
            half.stopped(lambda: ChannelStopped("the peer does not receive on this channel any more", payload=payload))
        elif isinstance(half, Request):
            half.failed(lambda: ChannelStopped("the peer declined to answer this request", payload=payload))
        if entity is self.engine.top_stream:
            self._on_goodbye(None)
        self._entity_gone(entity)

    def _on_confirmed(self, event: Confirmed) -> None:
        half = _let_go(event.entity)
        if isinstance(half, Sink):
            half.confirmed()
        self._entity_gone(event.entity)

    def _on_declined(self, event: Declined) -> None:
        def error() -> Exception:
            return ChannelStopped("the peer takes no new channels")

        for entity in (event.entity, event.twin):
            if entity is None:
                continue
            half = _let_go(entity)
            if isinstance(half, Sink):
                half.stopped(error)
            elif isinstance(half, Source):
                half.ended(error)
            elif isinstance(half, Request):
                half.failed(error)
            self._entity_gone(entity)

    def _on_writable(self, event: Writable) -> None:
        sender = event.entity.half
        if isinstance(sender, Sink):
            sender.window_changed()

    def _on_failed(self, event: Failed) -> None:
        # The protocol has no error frame: the peer sees a closed connection, and only this log can say why.
        _log.warning("%s broke a rule, the session was closed: %s", self.pump.peer or "a peer", event.error)
        self.pump.lose(str(event.error), by="peer", cause=event.error)

    def _on_hung_up(self, event: HungUp) -> None:
        channels = self.engine.channels
        what = "" if event.clean else f" while {channels} channels were open" if channels else " in mid-message"
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def _entity_gone(self, entity: Entity) -> None:
        self.room.wake_waiting()  # what it had queued is not any more
        if entity in self._pings:
            self._forget_pings(entity)
        if self.gone:
            self.gone.unpark_all()
        self.on_gone()


def _let_go(entity: Entity) -> object:
    """The half of an entity that is gone."""
    half, entity.half = entity.half, None
    return half


def _end_of(payload: bytes) -> Callable[[], Exception]:
    """By the custom of bpmux an end payload that is not empty means an error."""
    if not payload:
        return trio.EndOfChannel
    reason = payload[:REASON_MOST]  # nobody may ever ask for it, so it must not be what a peer likes to store here
    return lambda: ChannelCancelled("the peer gave up on this channel before it was done", payload=reason)
