"""e3x sessions: open and accept channels, dispatch the engine's events to them, and leave in order."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Literal

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.e3x._session.channels import Channel
from muxkit.protocols.e3x._session.connection import IN_ORDER, RESERVED, Connection
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.engine import (
    Broken,
    Cause,
    Closed,
    Delivered,
    Ended,
    Event,
    Faulted,
    Message,
    Opened,
    Writable,
)
from muxkit.runtime import (
    Backlog,
    ChannelStopped,
    LinkLost,
    Opening,
    SessionInfo,
    SlotQueue,
    background,
    protect_package,
    protected_manager,
    turns,
)
from muxkit.runtime import Session as CommonSession
from muxkit.runtime import SessionStats as CommonStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.e3x.engine import EngineChannel
    from muxkit.runtime import ErrorMaker, LinkKind, PacketLink

LINGER = 5.0  # s to leave in order
FAREWELL_TIMEOUT = 1.0  # s to wait for the peer's ends, and again for its answer to the goodbye
UNACKED_TIMEOUT = 2.0  # s that a peer which has left is kept waiting for acks
TYPE = "muxkit"  # the type of channels whose opener gives none

_log = logging.getLogger("muxkit")

Role = Literal["connector", "listener"]


@protected_manager
async def session(
    link: PacketLink | trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """Run an e3x session on a link to one peer, packets or a byte stream, which the session owns from now on.

    The connector's channels have odd ids, the listener's even ones; the two sides must have different roles. Leaving
    the block normally ends all channels, waits until the peer's application has processed what was sent, and hangs up,
    all within `linger` seconds. It raises `LinkLost` if the peer may not have processed everything. Leaving by an error
    or a cancellation hangs up at once.
    """
    mux = Session(link, role, config or Config(), limits or Limits(), observer)
    connection = mux.connection
    async with background() as nursery:
        nursery.start_soon(connection.pump.run)
        nursery.start_soon(mux._run_liveness)
        try:
            yield mux
        except BaseException:
            connection.lose("the session was left by an error", by="local", parting=b"error")
            raise
        await mux._leave(linger)


@attrs.frozen(kw_only=True)
class SessionStats(CommonStats):
    """The common counters and those of e3x; times in seconds."""

    packets_received: int
    packets_sent: int
    resent: int
    """Packets that were sent again."""
    lost: int
    """Packets that the peer reported missing."""
    evicted: int
    """Unreliable messages that made way for newer ones before they were sent."""
    dropped: int
    """Received unreliable messages that made way for newer ones before the application took them."""
    too_large: int
    """Packets that were too large for the link, after its limit on packets fell."""
    refused: int
    """Errors of the network that cost one packet each."""
    faults: dict[str, int]
    """Dropped packets, by the name of their `Fault`."""
    least_round_trip: float | None
    queue: float
    """The part of the round trip that the path's queue causes."""
    rate: float
    """Bytes a second that may be sent now, by the congestion control; without meaning over a byte stream."""
    falls: int
    """Times that the rate was lowered."""


class Session(CommonSession):
    """An e3x session; made by `session`."""

    def __init__(
        self,
        link: PacketLink | trio.abc.Stream,
        role: Role,
        config: Config,
        limits: Limits,
        observer: Observer | None,
    ) -> None:
        if role not in ("connector", "listener"):
            raise ValueError(f"role={role!r}: one side is the connector, the other the listener")
        self._backlog: Backlog[Channel] = Backlog(lambda channel: channel.took())
        self._draining = False
        self._openers = SlotQueue(self._free_slots)
        self._live: dict[int, Channel] = {}
        self._actions: dict[type, Callable[..., None]] = {
            Opened: self._on_opened,
            Message: self._on_message,
            Ended: self._on_ended,
            Delivered: self._on_delivered,
            Writable: self._on_writable,
            Closed: self._on_closed,
            Broken: self._on_broken,
            Faulted: self._on_faulted,
        }
        self.connection = Connection(
            link,
            odd=role == "connector",
            config=config,
            limits=limits,
            observer=observer,
            on_events=self._dispatch,
            on_lost=self._on_lost,
            on_aborted=self._forget,
        )
        self._engine = self.connection.engine
        self._limits = self._engine.limits

    # --- channels

    def open(
        self, *, type: str = TYPE, reliable: bool = True, body: bytes = b""
    ) -> AbstractAsyncContextManager[Channel]:
        """Open a channel, which is announced at once; waits only for a slot under the limits.

        `type` tells the peer what the channel is for. `body`, if not empty, is the first message and is sent with the
        opening.
        """
        return Opening(lambda: self._open(type, reliable, body))

    async def _open(self, type: str, reliable: bool, body: bytes) -> Channel:
        await trio.lowlevel.checkpoint_if_cancelled()
        if type in RESERVED:
            raise LocalProtocolError(f"channels of type {type!r} are the session's own")
        try:
            await self._openers.wait_for_slot()
            error = self._closed()
            if error is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                raise error
            return self._open_now(type, reliable, body)
        finally:
            self._openers.wake_waiters()

    def _open_now(self, type: str, reliable: bool, body: bytes) -> Channel:
        connection = self.connection
        connection.update_time()
        opened = self._engine.open(type, body, reliable=reliable)
        channel = self._live[opened.id] = Channel(connection, opened, spoke=bool(body))
        connection.messages_sent += bool(body)
        connection.request_write()
        return channel

    def _free_slots(self) -> int:
        """Return how many channels may be opened now; once none ever may, more than wait, so that all wake."""
        return self._engine.places if self._closed() is None else sys.maxsize

    def _closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        if self.connection.pump.is_lost:
            return self.connection.pump.loss()
        if self.connection.liveness.peer_left:
            return ChannelStopped("no channel can be opened any more: the peer has left")
        if self._draining:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return None

    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens; `channel.type` tells what each is for."""
        return self._backlog

    def _on_opened(self, event: Opened) -> None:
        self.connection.heard()
        if event.channel.type in RESERVED:
            self.connection.liveness.answer(event.channel, event.body)
        elif self._draining:
            self._engine.err(event.channel, "closing")
        elif len(self._backlog) >= self._limits.backlog:
            self._engine.err(event.channel, "too many channels")
        else:
            connection = self.connection
            connection.messages_received += bool(event.body)
            channel = self._live[event.channel.id] = Channel(connection, event.channel, event.body)
            self._backlog.put(channel)

    def _stop_opening(self, error: ErrorMaker | None) -> None:
        """End the iterator over new channels and fail the waiting openers; `error` is None if that is in order."""
        self._draining = True
        self._backlog.ended(error)
        self._openers.wake_waiters()

    # --- events

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            self._actions[type(event)](event)

    def _on_message(self, event: Message) -> None:
        connection = self.connection
        connection.heard()
        channel = self._live.get(event.channel.id)
        if channel is None:
            self._engine.done(event.channel)
            return
        connection.messages_received += 1
        channel.inbox.deliver(event.body)

    def _on_ended(self, event: Ended) -> None:
        channel = self._live.get(event.channel.id)
        if channel is not None:
            channel.inbox.ended(trio.EndOfChannel)

    def _on_delivered(self, event: Delivered) -> None:
        connection = self.connection
        connection.heard()
        channel = self._live.get(event.channel.id)
        if channel is None:
            connection.liveness.answered(event.channel.id)
        else:
            channel.sender.mark_delivered(event.last)
        if connection.acked:
            connection.acked.unpark_all()

    def _on_writable(self, event: Writable) -> None:
        channel = self._live.get(event.channel.id)
        if channel is not None:
            channel.sender.window_changed()

    def _on_closed(self, event: Closed) -> None:
        channel = self._forget(event.channel)
        if channel is not None:
            channel.sender.confirmed()
            channel.inbox.ended(trio.EndOfChannel)

    def _on_broken(self, event: Broken) -> None:
        connection, is_answer = self.connection, event.cause is Cause.PEER
        if is_answer:
            connection.heard()
        elif event.cause is Cause.TIMEOUT:
            connection.liveness.suspect()  # first: if the peer is silent, all channels get the same error
        channel = self._forget(event.channel)
        if channel is None:
            connection.liveness.broken(event.channel.id, is_answer=is_answer)
        elif is_answer:
            channel.broken(event.text)
        elif not channel.is_reliable:  # only its end can be lost
            channel.sender.confirmed()
            channel.inbox.ended(trio.EndOfChannel)
        else:
            reason = f"channel {event.channel.id} is over: {event.text}"
            channel.lost(lambda: LinkLost(reason, by="network", peer=connection.pump.peer))

    def _on_faulted(self, event: Faulted) -> None:
        # The text of a fault may hold payload, so the log tells only its kind.
        _log.debug("%s: dropped a packet: %s", self.connection.pump.peer or "a peer", event.fault.value)

    def _forget(self, engine_channel: EngineChannel) -> Channel | None:
        """Remove a channel that is gone."""
        channel = self._live.pop(engine_channel.id, None)
        self.connection.wake_all()
        self._openers.wake_waiters()
        return channel

    def _on_lost(self) -> None:
        connection = self.connection
        loss, peer_left = connection.pump.loss, connection.liveness.peer_left
        is_orderly = peer_left or (not self._live and loss().by == "peer")
        with turns().spreading():
            for channel in [*self._live.values()]:
                if peer_left and not channel.is_reliable:
                    channel.inbox.ended(trio.EndOfChannel)  # its end was lost
                channel.lost(loss)
        connection.liveness.lost(loss)
        self._stop_opening(None if is_orderly else loss)
        connection.wake_all()

    # --- leaving

    async def _leave(self, linger: float) -> None:
        """End all channels, wait until the peer's application has processed them, hang up; at most `linger` seconds."""
        connection = self.connection
        pump, liveness = connection.pump, connection.liveness
        told = [channel for channel in self._live.values() if channel.sender.is_undelivered]
        with trio.move_on_after(linger) as scope:
            self._close_all()
            while not pump.is_lost and any(
                channel.sender.is_undelivered and not channel.engine_channel.gone for channel in told
            ):
                await connection.acked.park()
            with trio.move_on_after(FAREWELL_TIMEOUT):
                while not pump.is_lost and any(channel.is_reliable for channel in self._live.values()):
                    await connection.gone.park()
            self._abort_all(only_reliable=True)  # unreliable channels wait for nothing
            if liveness.peer_left:
                liveness.answer_goodbye()
            elif connection.was_heard:
                with trio.move_on_after(FAREWELL_TIMEOUT):
                    await liveness.say_goodbye()
            await pump.flushed()
            if not connection.was_heard:  # the peer may be one that only receives
                connection.lose("we hung up", by="local", parting=IN_ORDER)
            await pump.hang_up()
        if scope.cancelled_caught:
            connection.lose(f"the peer did not take leave within {linger} s", by="peer", parting=b"late")
        if any(channel.sender.is_undelivered for channel in told):
            raise pump.loss()

    def _close_all(self) -> None:
        """Accept no new channels, and end all live ones."""
        if self.connection.pump.is_lost:
            return
        self._stop_opening(None)
        for channel in [*self._live.values()]:
            if channel.engine_channel.taken:
                channel.close()
            else:
                channel.abort()
        self.connection.request_write()

    def _abort_all(self, *, only_reliable: bool = False) -> None:
        for channel in [*self._live.values()]:
            if channel.is_reliable or not only_reliable:
                channel.abort()
        self.connection.request_write()

    async def _run_liveness(self) -> None:
        """Keep the session alive until the peer leaves; then wait for its last acks, answer, and hang up, too."""
        connection = self.connection
        await connection.liveness.keep_alive()
        self._stop_opening(None)
        with trio.move_on_after(UNACKED_TIMEOUT):
            while any(_is_unacked(channel.engine_channel) for channel in self._live.values()):
                await connection.acked.park()
        connection.liveness.answer_goodbye()
        await connection.pump.flushed()
        count = len(self._live)
        what = f" while {count} channels were open" if count else ""
        if not connection.is_on_packets:  # the stream is about to end
            with trio.move_on_after(UNACKED_TIMEOUT):
                await connection.pump.hung_up.wait()
        connection.pump.lose(f"the peer hung up{what}", by="peer")

    # --- the session

    async def ping(self) -> float:
        """Wait for one round trip through the peer's session, by a channel of a reserved type; return its seconds."""
        return await self.connection.liveness.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new channels, let the live ones end for up to `grace` seconds, then abort them.

        Channels that the peer opens from now on are answered with an err.
        """
        await trio.lowlevel.checkpoint()
        connection = self.connection
        self._stop_opening(None)
        with trio.move_on_after(grace):
            while self._live and not connection.pump.is_lost:
                await connection.gone.park()
        if not connection.pump.is_lost:
            self._abort_all()

    @property
    def packet_limit(self) -> int:
        """The largest packet that is sent now, in bytes: as configured, or less if the path takes less."""
        return self._engine.packet_size

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(protocol="e3x", peer=self.connection.pump.peer)

    def stats(self) -> SessionStats:
        connection, stats = self.connection, self._engine.stats()
        pump = connection.pump
        return SessionStats(
            bytes_received=stats.bytes_received,
            bytes_sent=stats.bytes_sent,
            messages_received=connection.messages_received,
            messages_sent=connection.messages_sent,
            channels=len(self._live),
            queued=stats.unsent + pump.unsent,
            round_trip=connection.liveness.round_trip if stats.round_trip is None else stats.round_trip,
            packets_received=stats.packets_received,
            packets_sent=stats.packets_sent,
            resent=stats.resent,
            lost=stats.lost,
            evicted=stats.evicted,
            dropped=connection.dropped,
            too_large=connection.too_large,
            refused=connection.refused,
            faults=stats.faults,
            least_round_trip=stats.least_round_trip,
            queue=stats.queue,
            rate=stats.rate,
            falls=stats.falls,
        )

    def __repr__(self) -> str:
        state = "lost" if self.connection.pump.is_lost else f"{len(self._live)} channels"
        return f"<e3x.Session {self.connection.pump.peer or 'on a link'}: {state}>"


def _is_unacked(channel: EngineChannel) -> bool:
    """Whether packets of this side are not confirmed."""
    outgoing = channel.outgoing
    return outgoing is not None and not channel.gone and outgoing.acked < outgoing.next_seq - 1


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `e3x`."""

    options = frozenset({"config"})
    links: frozenset[LinkKind] = frozenset({"stream", "packets"})

    def session(
        self,
        link: PacketLink | trio.abc.Stream,
        /,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        side: Role = "connector" if role == "client" else "listener"
        return session(link, role=side, config=config, limits=limits, observer=observer, linger=linger)


protocol = _Protocol()


protect_package("muxkit.protocols.e3x")
