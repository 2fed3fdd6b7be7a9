"""The Trio side of a link: runs one connection after the other and dispatches the engine's events to the channels."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import trio

from muxkit.protocols.relink._session.errors import LinkChanged, LinkRefused
from muxkit.protocols.relink.engine.engine import LinkEngine
from muxkit.protocols.relink.engine.events import (
    Arrived,
    ChannelClosed,
    Committed,
    Consumed,
    Ended,
    EpochChanged,
    Event,
    Failed,
    Finished,
    LinkReplaced,
    Opened,
    PeerShutDown,
    Ponged,
    Received,
    Resumed,
    RolledBack,
    Silent,
    Uncommitted,
    Writable,
)
from muxkit.runtime import LinkLost, OutboxBudget, StreamPump, background, turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.relink.config import Config
    from muxkit.runtime import Side


ErrorMaker = Callable[[], Exception]


class Out(Protocol):
    """A sender of one channel, as the core sees it."""

    def heard(self, through: int) -> None:
        """The peer has the messages through this one."""

    def consumed(self, through: int) -> None: ...
    def answered(self, through: int, *, committed: bool) -> None: ...
    def closed(self) -> None:
        """The peer confirmed the end of the channel."""

    def window_changed(self) -> None:
        """There may be room."""

    def lost(self, error: ErrorMaker) -> None: ...


class In(Protocol):
    """A receiver of one channel, as the core sees it."""

    def opened(self) -> bool:
        """The channel's first message came; False if this one belonged to an earlier life of the channel."""

    def arrived(self) -> None: ...
    def ended(self) -> None: ...
    def in_lost(self, error: ErrorMaker) -> None: ...


class Owner(Protocol):
    """The session, which handles events that concern no open channel."""

    def channel_opened(self, channel: int) -> None: ...
    def peer_shut_down(self) -> None: ...
    def changed(self, change: LinkReplaced, error: ErrorMaker) -> None: ...
    def ending(self) -> None:
        """The link will be over at once; all channels are still there."""

    def over(self, error: ErrorMaker) -> None: ...


CHANNEL_COST = 3 * 1024  # bytes that a channel in one direction counts, with nothing in it; it takes up to twice that
CLOSE_TIMEOUT = 1.0  # s, for the end of a connection whose link is finished
SHORT_CONNECTION = 1.0  # s; a connection that ends sooner and brought nothing forward may have been refused
MOST_REFUSALS = 50  # such connections in a row; bad weather alone makes dozens

_log = logging.getLogger("muxkit")


class Core:
    """A link: its engine, and the connection that it has at the moment, if any."""

    def __init__(self, config: Config, limits: Limits, observer: Observer | None, *, is_connector: bool) -> None:
        self.engine = LinkEngine(config, is_connector=is_connector, limits=limits, observer=observer)
        self.config = config
        self.limits = self.engine.limits
        self.is_connector = is_connector
        self.out_transactions = config.connector_transactions if is_connector else config.listener_transactions
        self.in_transactions = config.listener_transactions if is_connector else config.connector_transactions
        self.out_id_size = config.connector_id_size if is_connector else config.listener_id_size
        self.in_id_size = config.listener_id_size if is_connector else config.connector_id_size
        self.room = OutboxBudget(limits.outbox, self.engine.waiting)
        self.owner: Owner | None = None
        self.outs: dict[int, Out] = {}
        self.successors: dict[int, Out] = {}  # senders that wait until the channel's present use is closed
        self.ins: dict[int, In] = {}
        self.peer_channels: dict[int, bool] = {}  # open on the peer's side; True once the peer has closed it
        self.pump: StreamPump[Event] | None = None
        self.error: ErrorMaker | None = None  # why the link is over
        self.unreported: ErrorMaker | None = (
            None  # a change of the link that lost messages, and that was raised nowhere yet
        )
        self.is_finished = False  # in the way that both sides wanted
        self.is_violated = False  # the link is over because the peer broke a rule
        self.last_loss: ErrorMaker = _never  # why the last connection is over
        self.over = trio.Event()
        self.moved = trio.lowlevel.ParkingLot()  # tasks that wait for any change
        self.on_weight: Callable[[], None] = _nothing  # while absent: more is held, or less
        self.peer = ""
        self.connections = 0
        self.progress = 0  # grows with everything that brings the application's work forward
        self.refusals = 0  # connections in a row that were over at once and brought nothing forward
        self._began = 0.0  # the present connection
        self._progress_before = 0
        self._arrivals_before = 0
        self.messages_received = 0
        self.messages_sent = 0
        self.pings = Pings(self)
        self._observer = observer
        self._bytes_received = 0  # on connections that are over
        self._bytes_sent = 0
        self._armed: float | None = None
        self._actions: dict[type, Callable[..., None]] = {
            Opened: self._on_opened,
            Arrived: self._on_arrived,
            Ended: self._on_ended,
            Received: self._on_received,
            Consumed: self._on_consumed,
            Committed: self._on_answered,
            Uncommitted: self._on_answered,
            ChannelClosed: self._on_closed,
            Writable: self._on_writable,
            Ponged: lambda event: self.pings.answered(),
            RolledBack: self._on_rolled_back,
            Resumed: self._on_resumed,
            LinkReplaced: self._on_changed,
            EpochChanged: self._on_changed,
            Silent: self._on_silent,
            PeerShutDown: self._on_peer_shut_down,
            Finished: self._on_finished,
            Failed: self._on_failed,
        }

    # --- after a command to the engine

    def request_write(self) -> None:
        """Wake the writer, or weigh the absent link again."""
        if self.pump is not None:
            self.pump.request_write()
        else:
            self.on_weight()

    def after_command(self) -> None:
        """Dispatch events, wake the writer and set the timer again, after any command."""
        self.dispatch_events()
        if self.pump is not None:
            self.pump.request_write()
            self.pump.rearm()
        else:
            self.on_weight()

    def after_consuming(self) -> None:
        """As `after_command`, after consuming; skips the writer and the timer where nothing changed."""
        engine, pump = self.engine, self.pump
        self.dispatch_events()
        if pump is None:
            self.on_weight()
            return
        if engine.owes_control:
            pump.request_write()
        deadline = engine.next_deadline()
        if deadline != self._armed:
            self._armed = deadline
            pump.rearm()

    def dispatch_events(self) -> None:
        """Dispatch the engine's events until there are no more."""
        while events := self.engine.events():
            self._dispatch(events)

    def raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error()

    @property
    def retained_bytes(self) -> int:
        """What is kept of messages in both directions, and of the channels themselves."""
        engine = self.engine
        return engine.held_bytes + engine.retained_bytes + CHANNEL_COST * engine.channel_count

    @property
    def owes_the_application(self) -> bool:
        """True if received messages wait for our application."""
        return bool(self.engine.owed_answers if self.in_transactions else self.engine.held_bytes)

    # --- connections

    async def run_connection(self, stream: trio.abc.Stream, *, epoch: int, link_id: int) -> None:
        """Run the link over this stream until the connection is lost or the link is over; closes the stream."""
        if self.pump is not None:
            raise RuntimeError("the link has a connection; it has to be over first")
        engine = self.engine
        pump: StreamPump[Event] = StreamPump(
            stream,
            engine,
            on_events=self._dispatch,
            on_written=self.room.wake_waiting,
            on_lost=_nothing,
            queued=lambda: engine.outbox,
            outbox=engine.waiting,
            observer=self._observer,
        )
        engine.connection_made(trio.current_time(), epoch=epoch, link_id=link_id)
        self.pump = pump
        self.peer = pump.peer or self.peer
        self.connections += 1
        self._armed = None
        self._began, self._progress_before = trio.current_time(), self.progress
        self._arrivals_before = engine.arrivals
        try:
            self.dispatch_events()
            self.pings.again()
            self.moved.unpark_all()
            async with background() as nursery:
                nursery.start_soon(self._part, pump)
                nursery.start_soon(self._notice_that_it_works)
                await pump.run()
        finally:
            works = self.works
            self.progress += engine.arrivals != self._arrivals_before
            self._bytes_received += engine.bytes_received
            self._bytes_sent += pump.bytes_sent
            self.pump = None
            self.last_loss = pump.loss
            engine.connection_lost(trio.current_time())
            self.dispatch_events()
            self._count_refusal(works=works)
            self.moved.unpark_all()

    @property
    def works(self) -> bool:
        """True if the connection has made progress or lasted SHORT_CONNECTION; a handshake alone is none."""
        if self.pump is None:
            return False
        if self.progress != self._progress_before or trio.current_time() >= self._began + SHORT_CONNECTION:
            return True
        return self.engine.arrivals != self._arrivals_before

    async def _notice_that_it_works(self) -> None:
        await trio.sleep(SHORT_CONNECTION)
        self.moved.unpark_all()

    def _count_refusal(self, *, works: bool) -> None:
        self.refusals = 0 if works else self.refusals + 1
        if self.refusals < MOST_REFUSALS or self.error is not None:
            return
        count, last, peer = self.refusals, self.last_loss(), self.peer

        def error() -> LinkRefused:
            return LinkRefused(count, last, peer=peer, unsent=self.engine.outbox)

        _log.warning("%s", error())
        self.lose(error)

    async def _part(self, pump: StreamPump[Event]) -> None:
        """End the connection once the link is over, with a flush if the link finished in order."""
        await self.over.wait()
        if self.is_finished:
            with trio.move_on_after(CLOSE_TIMEOUT):
                await pump.flushed()
                await pump.hang_up()
        pump.lose("the link is over", by="local")

    def lose(self, error: ErrorMaker) -> None:
        """End the link with this error; later calls do nothing."""
        if self.error is not None:
            return
        self.error = error
        if self.owner is not None:
            self.owner.ending()
        self._fail_channels(error)
        if self.owner is not None:
            self.owner.over(error)
        self.pings.lost()
        self.over.set()
        self.moved.unpark_all()

    def lose_because(self, reason: str, *, by: Side, cause: BaseException | None = None) -> None:
        """End the link with a `LinkLost`."""
        peer = self.peer

        def error() -> LinkLost:
            lost = LinkLost(reason, by=by, peer=peer, unsent=self.engine.outbox)
            lost.__cause__ = cause
            return lost

        self.lose(error)

    def _fail_channels(self, error: ErrorMaker) -> None:
        outs = [*self.outs.values(), *self.successors.values()]
        ins = [*self.ins.values()]
        self.outs.clear()
        self.successors.clear()
        self.ins.clear()
        self.peer_channels.clear()
        with turns().spreading():
            for one in outs:
                one.lost(error)
            for other in ins:
                other.in_lost(error)

    async def connected(self) -> None:
        """Wait for a connection on which messages can be sent."""
        await trio.lowlevel.checkpoint()
        while self.pump is None or not self.engine.is_resumed:
            self.raise_if_over()
            await self.moved.park()

    # --- counters

    @property
    def bytes_received(self) -> int:
        return self._bytes_received + (self.engine.bytes_received if self.pump is not None else 0)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent + (self.pump.bytes_sent if self.pump is not None else 0)

    # --- events

    def _dispatch(self, events: Sequence[Event]) -> None:
        actions = self._actions
        for event in events:
            action = actions.get(type(event))
            if action is not None:
                action(event)
        if self.moved:
            self.moved.unpark_all()

    def _on_opened(self, event: Opened) -> None:
        self.progress += 1
        self.peer_channels[event.channel] = False
        taker = self.ins.get(event.channel)
        if taker is not None and taker.opened():
            return
        self.ins.pop(event.channel, None)
        if self.owner is not None:
            self.owner.channel_opened(event.channel)

    def _on_arrived(self, event: Arrived) -> None:
        self.progress += 1
        taker = self.ins.get(event.channel)
        if taker is not None:
            taker.arrived()

    def _on_ended(self, event: Ended) -> None:
        self.progress += 1
        self.peer_channels[event.channel] = True
        taker = self.ins.get(event.channel)
        if taker is not None:
            taker.ended()

    def _on_received(self, event: Received) -> None:
        self.progress += 1
        sender = self.outs.get(event.channel)
        if sender is not None:
            sender.heard(event.through)

    def _on_consumed(self, event: Consumed) -> None:
        self.progress += 1
        sender = self.outs.get(event.channel)
        if sender is not None:
            sender.consumed(event.through)

    def _on_answered(self, event: Committed | Uncommitted) -> None:
        self.progress += 1
        sender = self.outs.get(event.channel)
        if sender is not None:
            sender.answered(event.through, committed=isinstance(event, Committed))

    def _on_rolled_back(self, _event: RolledBack) -> None:
        self.progress += 1

    def _on_closed(self, event: ChannelClosed) -> None:
        self.progress += 1
        sender = self.outs.pop(event.channel, None)
        successor = self.successors.pop(event.channel, None)
        if successor is not None:
            self.outs[event.channel] = successor
        if sender is not None:
            sender.closed()
        self.room.wake_waiting()

    def _on_writable(self, event: Writable) -> None:
        sender = self.successors.get(event.channel) or self.outs.get(event.channel)
        if sender is not None:
            sender.window_changed()

    def _on_resumed(self, _event: Resumed) -> None:
        self.room.wake_waiting()

    def _on_changed(self, event: LinkReplaced) -> None:
        peer = self.peer

        def error() -> LinkChanged:
            self.unreported = None
            return LinkChanged(event, peer=peer)

        # Watches of the old link are over; new senders and receivers use the new one.
        owner = self.owner
        if owner is not None:
            owner.changed(event, error)
        self._fail_channels(error)
        self.room.wake_waiting()
        if not event.link_id:
            self.lose(error)

    def _on_silent(self, event: Silent) -> None:
        if self.pump is not None:
            what = "a packet made no progress" if event.stalled else "nothing was heard"
            self.pump.lose(f"{what} for {event.seconds:.0f} s", by="network")

    def _on_peer_shut_down(self, _event: PeerShutDown) -> None:
        self.progress += 1
        if self.owner is not None:
            self.owner.peer_shut_down()

    def _on_finished(self, _event: Finished) -> None:
        self.is_finished = True
        self.lose_because("the link was shut down by both sides", by="peer")

    def _on_failed(self, event: Failed) -> None:
        # The protocol has no error packet: the peer sees a closed connection, and only this log can say why.
        _log.warning("%s broke a rule, the link was given up: %s", self.peer or "a peer", event.error)
        self.is_violated = self.error is None
        self.lose_because(str(event.error), by="peer", cause=event.error)


def _nothing() -> None:
    pass


def _never() -> Exception:
    return LinkLost("there was no connection", by="local")


class _Ping:
    """A ping on its way, or one that waits for a connection."""

    __slots__ = ("answer", "is_wanted", "sent_at", "took")

    def __init__(self) -> None:
        self.answer = trio.Event()
        self.is_wanted = True
        self.sent_at = 0.0
        self.took = 0.0


class Pings:
    """The pings of a link, in the order of their answers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: deque[_Ping] = deque()
        self.round_trip: float | None = None
        """Smoothed."""

    async def ping(self) -> float:
        """Measure one round trip; repeated on the next connection if this one is lost before."""
        await trio.lowlevel.checkpoint()
        core = self._core
        core.raise_if_over()
        if core.pump is None:
            self._forget_unwanted()
        ping = _Ping()
        self._waiting.append(ping)
        if core.pump is not None:
            self._send(ping)
        try:
            await ping.answer.wait()
        finally:
            ping.is_wanted = False
        core.raise_if_over()
        return ping.took

    def again(self) -> None:
        """Send the waiting pings again, on a new connection."""
        self._forget_unwanted()
        for ping in self._waiting:
            self._send(ping)

    def answered(self) -> None:
        if self._waiting:
            ping = self._waiting.popleft()
            ping.took = took = trio.current_time() - ping.sent_at
            self.round_trip = took if self.round_trip is None else 0.875 * self.round_trip + 0.125 * took
            ping.answer.set()

    def lost(self) -> None:
        """The link is over."""
        for ping in self._waiting:
            ping.answer.set()
        self._waiting.clear()

    def _send(self, ping: _Ping) -> None:
        ping.sent_at = trio.current_time()
        self._core.engine.ping()
        self._core.request_write()

    def _forget_unwanted(self) -> None:
        self._waiting = deque(ping for ping in self._waiting if ping.is_wanted)
