"""e3x sessions: they open and accept channels, dispatch the engine's events to them, keep alive and leave in order."""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Literal, overload

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, measured
from muxkit._typed import Connect, OpenServer, Reconnecting
from muxkit.codecs import Codec, announced
from muxkit.core import Headers, Reason, counted, encode_headers, encode_name, opening_refusal, with_name
from muxkit.protocols.e3x._session.channels import BYE, IN_ORDER, TYPE, Channel, Connection
from muxkit.protocols.e3x.config import Config
from muxkit.protocols.e3x.engine import events
from muxkit.protocols.e3x.engine.channel import EngineChannel
from muxkit.protocols.e3x.engine.engine import Stats
from muxkit.protocols.e3x.engine.events import Cause
from muxkit.runtime import (
    CLOSED_HERE,
    Backlog,
    ChannelOpening,
    ChannelStopped,
    DatagramPump,
    ErrorMaker,
    LinkKind,
    LinkLost,
    PacketLink,
    Pings,
    SessionInfo,
    SlotQueue,
    TypedChannel,
    Unclaimed,
    ValueT,
    background,
    describe,
    protect_package,
    protected_manager,
    read_first,
    reason_for_leaving,
    turns,
    typed,
)
from muxkit.runtime import Session as CommonSession
from muxkit.runtime import SessionStats as CommonStats
from muxkit.trace import traced

LINGER = 5.0  # s to leave in order
FAREWELL_TIMEOUT = 1.0  # s to wait for the peer's ends, and again for its answer to the goodbye
UNACKED_TIMEOUT = 2.0  # s that a peer which has left is kept waiting for acks
LEFT_BY_ERROR = Reason("the other side left the session by an error", 500)
PING: Final = "muxkit.ping"
RESERVED: Final = frozenset({PING, BYE})
ACKS_MOST: Final = 8000  # channels whose last acks a goodbye tells
ACKS_MOST_IN_PACKET: Final = 20  # the same if it must fit into one packet
LISTENER_DELAY: Final = 1.25
_ACK: Final = struct.Struct("!II")

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
    mux = Session(link, role, config or Config(), limits or Limits(), traced(observer, f"e3x {role}"))
    connection = mux._connection
    with measured(connection.facts, mux):
        async with background() as nursery:
            nursery.start_soon(connection.pump.run)
            nursery.start_soon(mux._run_liveness)
            mux._unclaimed.nursery = nursery
            try:
                yield mux
            except Exception as error:
                told = reason_for_leaving(error, LEFT_BY_ERROR)
                connection.lose("the session was left by an error", by="local", told=told)
                raise
            except BaseException:
                connection.lose("the session was left by an error", by="local")
                raise
            await mux._leave(linger)


@attrs.frozen(kw_only=True)
class SessionStats(CommonStats, Stats):
    """The common counters, those of the engine, and these."""

    dropped: int
    """Received unreliable messages that made way for newer ones before the application took them."""
    too_large: int
    """Packets that were too large for the link, after its limit on packets fell."""
    refused: int
    """Errors of the network that cost one packet each."""


class Session(CommonSession):
    """An e3x session; made by `session`."""

    def __init__(
        self, link: PacketLink | trio.abc.Stream, role: Role, config: Config, limits: Limits, observer: Observer | None
    ) -> None:
        if role not in ("connector", "listener"):
            raise ValueError(f"role={role!r}: one side is the connector, the other the listener")
        self._info = describe(link, "e3x")
        self._may_be_refused_late: bool = getattr(link, "may_be_refused_late", False)
        self._draining = False
        self._openers = SlotQueue(self._free_slots)
        self._live: dict[int, Channel] = {}
        self._actions: dict[type, Callable[..., None]] = {
            events.Opened: self._on_opened,
            events.Message: self._on_message,
            events.Ended: self._on_ended,
            events.Delivered: self._on_delivered,
            events.Writable: self._on_writable,
            events.Closed: self._on_closed,
            events.Broken: self._on_broken,
            events.Faulted: self._on_faulted,
        }
        self._connection: Connection = Connection(
            link,
            session=self,
            odd=role == "connector",
            config=config,
            limits=limits,
            observer=observer,
            on_events=self._dispatch,
            on_lost=self._on_lost,
            on_aborted=self._forget,
            on_written=self._openers.wake_waiters,
        )
        self._liveness: Liveness = Liveness(self._connection, config, odd=role == "connector")
        self._engine = self._connection.engine
        self._limits = self._engine.limits
        self._backlog: Backlog[Channel] = Backlog(Channel._took, self._engine.starts)
        self._unclaimed: Unclaimed = Unclaimed([self._backlog], self._decline, peer=self._info.peer)

    # --- channels

    @overload
    def open(
        self, name: str = "", *, payload: bytes = b"", headers: Headers | None = None, reliable: bool = True
    ) -> ChannelOpening[Channel]: ...
    @overload
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT],
        payload: bytes = b"",
        headers: Headers | None = None,
        reliable: bool = True,
    ) -> ChannelOpening[TypedChannel[ValueT]]: ...
    def open(
        self,
        name: str = "",
        *,
        codec: Codec[ValueT] | None = None,
        payload: bytes = b"",
        headers: Headers | None = None,
        reliable: bool = True,
    ) -> ChannelOpening[Channel] | ChannelOpening[TypedChannel[ValueT]]:
        """Open a channel and announce it to the peer immediately. The call waits only for a slot under the limits.

        The peer reads `name` as `channel.name`, which the specification calls the channel's type. It reads `payload`
        as `channel.opening`. The opening of an unreliable channel may be lost, so there the payload is the first
        message, and the headers may be missing.
        """
        if codec is not None:
            return typed(self.open(name, payload=payload, headers=announced(headers, codec), reliable=reliable), codec)
        if name:
            encode_name(name)  # raises for one that cannot be sent
        body = with_name("", payload, encode_headers(headers, self.limits.headers))
        return ChannelOpening(lambda: self._open(name or TYPE, reliable, body))

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
            connection = self._connection
            connection.update_time()
            opened = self._engine.open(type, body, reliable=reliable)
            channel = self._live[opened.id] = Channel(connection, opened, body)
            connection.messages_sent += bool(body) and not reliable
            connection.request_write()
            return channel
        finally:
            self._openers.wake_waiters()

    def _free_slots(self) -> int:
        """Return how many channels may be opened now; once none ever may, more than wait, so that all wake."""
        if self._closed() is not None:
            return sys.maxsize
        # A place is free for the peer, too, only once it knows that the channel is over.
        return self._engine.places - len(self._engine.errs)

    def _closed(self) -> Exception | None:
        """Return why no channel can be opened any more, or None."""
        if self._connection.pump.is_lost:
            return self._connection.pump.loss()
        if self._liveness.peer_left:
            return ChannelStopped("no channel can be opened any more: the peer has left")
        if self._draining:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        return None

    def incoming(self) -> AsyncIterator[Channel]:
        """Iterate over the channels that the peer opens; `channel.type` tells what each is for."""
        return self._backlog.claim()

    def _on_opened(self, event: events.Opened) -> None:
        self._connection.heard()
        if event.channel.type in RESERVED:
            self._liveness.answer(event.channel, event.body)
        elif self._draining:
            self._engine.err(event.channel, "closing")
        elif not self._backlog.is_claimed and (refusal := self._unclaimed.refusal(self._backlog)) is not None:
            self._engine.err(event.channel, refusal.encode().decode())
        elif len(self._backlog) >= self._limits.backlog:
            self._engine.err(event.channel, "too many channels")
            if self._connection.facts is not None:
                self._connection.facts.limit("backlog")
        elif (refusal := opening_refusal(event.body, self._limits.headers)) is not None:
            self._engine.err(event.channel, refusal.encode().decode())
        else:
            connection = self._connection
            connection.messages_received += bool(event.body) and not event.channel.is_reliable
            channel = self._live[event.channel.id] = Channel(connection, event.channel, event.body)
            self._backlog.put(channel)
            if not self._backlog.is_claimed:
                self._unclaimed.arrived()

    def _decline(self, channel: Channel, reason: Reason) -> None:
        """End a channel that the peer opened and the application hasn't taken."""
        channel.abort(reason.text, code=reason.code)

    def _stop_opening(self, error: ErrorMaker | None) -> None:
        """End the iterator over new channels and fail the waiting openers; `error` is None if that is in order."""
        self._draining = True
        self._backlog.ended(error)
        self._openers.wake_waiters()

    # --- events

    def _dispatch(self, happened: Sequence[events.Event]) -> None:
        for event in happened:
            self._actions[type(event)](event)

    def _on_message(self, event: events.Message) -> None:
        connection = self._connection
        connection.heard()
        channel = self._live.get(event.channel.id)
        if channel is None:
            self._engine.done(event.channel)
            return
        connection.messages_received += 1
        channel._inbox._deliver(event.body)

    def _on_ended(self, event: events.Ended) -> None:
        self._connection.heard()
        channel = self._live.get(event.channel.id)
        if channel is not None:
            channel._inbox._ended(trio.EndOfChannel)

    def _on_delivered(self, event: events.Delivered) -> None:
        connection = self._connection
        connection.heard()
        channel = self._live.get(event.channel.id)
        if channel is None:
            self._liveness.answered(event.channel.id)
        else:
            channel._sender._mark_delivered(event.last)
        if connection.acked:
            connection.acked.unpark_all()

    def _on_writable(self, event: events.Writable) -> None:
        channel = self._live.get(event.channel.id)
        if channel is not None:
            channel._sender._window_changed()

    def _on_closed(self, event: events.Closed) -> None:
        channel = self._forget(event.channel)
        if channel is not None:
            channel._sender._confirmed()
            channel._inbox._ended(trio.EndOfChannel)

    def _on_broken(self, event: events.Broken) -> None:
        connection, is_answer = self._connection, event.cause is Cause.PEER
        if is_answer:
            connection.heard()
        elif event.cause is Cause.TIMEOUT:
            self._liveness.suspect()  # first: if the peer is silent, all channels get the same error
        channel = self._forget(event.channel)
        if channel is None:
            self._liveness.broken(event.channel.id, is_answer=is_answer)
        elif is_answer:
            channel._broken(event.text)
            if self._backlog.drop(channel) is not None:  # it needs no work
                channel._inbox._drop()
                connection.engine.starts.spared()
        elif not channel.is_reliable:  # only its end can be lost
            channel._sender._confirmed()
            channel._inbox._ended(trio.EndOfChannel)
        else:
            reason = f"channel {event.channel.id} is over: {event.text}"
            channel._lost(lambda: LinkLost(reason, by="network", peer=connection.pump.peer))

    def _on_faulted(self, event: events.Faulted) -> None:
        # The text of a fault may hold payload, so the log tells only its kind.
        _log.debug("%s: dropped a packet: %s", self._connection.pump.peer or "a peer", event.fault.value)
        if event.limit is not None and self._connection.facts is not None:
            self._connection.facts.limit(event.limit)

    def _forget(self, engine_channel: EngineChannel) -> Channel | None:
        """Remove a channel that is gone."""
        channel = self._live.pop(engine_channel.id, None)
        self._connection.wake_all()
        self._openers.wake_waiters()
        return channel

    def _on_lost(self) -> None:
        connection = self._connection
        loss, peer_left = connection.pump.loss, self._liveness.peer_left
        lost = loss()
        has_reason = bool(lost.peer_reason or lost.code)
        is_orderly = peer_left or (not self._live and lost.by == "peer" and not has_reason)
        with turns().spreading():
            for channel in [*self._live.values()]:
                if peer_left and not channel.is_reliable:
                    channel._inbox._ended(trio.EndOfChannel)  # its end was lost
                channel._lost(loss)
        self._liveness.lost(loss)
        self._stop_opening(None if is_orderly else loss)
        connection.wake_all()

    # --- leaving

    async def _leave(self, linger: float) -> None:
        """End all channels, wait until the peer's application has processed them, hang up; at most `linger` seconds."""
        connection = self._connection
        pump, liveness = connection.pump, self._liveness
        pump.phase = "leave"
        told = [channel for channel in self._live.values() if channel._sender._is_undelivered]
        with trio.move_on_after(linger) as scope:
            self._close_all()
            for channel in told:  # one after the other, so that an ack costs one look and not all
                while not pump.is_lost and channel._sender._is_undelivered and not channel._engine_channel.gone:
                    await connection.acked.park()
            with trio.move_on_after(FAREWELL_TIMEOUT):
                while not pump.is_lost and any(channel.is_reliable for channel in self._live.values()):
                    await connection.gone.park()
            self._abort_all(only_reliable=True)  # unreliable channels wait for nothing
            if liveness.peer_left:
                liveness.answer_goodbye()
            elif self._may_be_refused_late and not connection.was_heard:
                with trio.move_on_after(FAREWELL_TIMEOUT), suppress(LinkLost):
                    await self.ping()  # the answer is the first word of a server that has let this client in
            if connection.was_heard and not liveness.peer_left:
                with trio.move_on_after(FAREWELL_TIMEOUT):
                    await liveness.say_goodbye()
            await pump.flushed()
            if not connection.was_heard:  # the peer may be one that only receives
                connection.lose(CLOSED_HERE, by="local", in_order=True)
            await pump.hang_up()
        if scope.cancelled_caught:
            late = Reason(f"the other side left without what was not processed within {linger} s")
            connection.lose(f"the peer did not take leave within {linger} s", by="peer", told=late)
        if pump.is_refusal or any(channel._sender._is_undelivered for channel in told):
            raise pump.loss()

    def _close_all(self) -> None:
        """Accept no new channels, and end all live ones."""
        if self._connection.pump.is_lost:
            return
        self._stop_opening(None)
        for channel in [*self._live.values()]:
            if channel._engine_channel.taken:
                channel.close()
            else:
                channel.abort()
        self._connection.request_write()

    def _abort_all(self, *, only_reliable: bool = False) -> None:
        for channel in [*self._live.values()]:
            if channel.is_reliable or not only_reliable:
                channel.abort()
        self._connection.request_write()

    async def _run_liveness(self) -> None:
        """Keep the session alive until the peer leaves; then wait for its last acks, answer, and hang up, too."""
        connection = self._connection
        await self._liveness.keep_alive()
        self._stop_opening(None)
        with trio.move_on_after(UNACKED_TIMEOUT):
            while any(_is_unacked(channel._engine_channel) for channel in self._live.values()):
                await connection.acked.park()
        self._liveness.answer_goodbye()
        await connection.pump.flushed()
        count = len(self._live)
        what = f" while {counted(count, 'channel', were=True)} open" if count else ""
        if not connection.is_on_packets:  # the stream is about to end
            with trio.move_on_after(UNACKED_TIMEOUT):
                await connection.pump.hung_up.wait()
        connection.pump.lose(f"the peer hung up{what}", by="peer")

    # --- the session

    async def ping(self) -> float:
        """Wait for one round trip through the peer's session, by a channel of a reserved type; return its seconds."""
        return await self._liveness.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new channels, let the live ones end for up to `grace` seconds, then abort them.

        Channels that the peer opens from now on are answered with an err.
        """
        self._connection.budget.owner.check()
        await trio.lowlevel.checkpoint()
        connection = self._connection
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
        return self._info

    def channels(self) -> Sequence[Channel]:
        return [channel for channel in self._live.values() if channel._engine_channel.taken]

    def stats(self) -> SessionStats:
        connection, pump, stats = self._connection, self._connection.pump, self._engine.stats()
        common: dict[str, object] = {
            "messages_received": connection.messages_received,
            "messages_sent": connection.messages_sent,
            "channels": len(self._live),
            "queued": stats.unsent + pump.unsent,
            "round_trip": self._liveness.round_trip if stats.round_trip is None else stats.round_trip,
            "dropped": connection.dropped,
            "too_large": pump.too_large if isinstance(pump, DatagramPump) else 0,
            "refused": pump.refused if isinstance(pump, DatagramPump) else 0,
        }
        return SessionStats(**attrs.asdict(stats) | common)

    def __repr__(self) -> str:
        state = "lost" if self._connection.pump.is_lost else counted(len(self._live), "channel")
        return f"<e3x.Session {self._connection.pump.peer or 'on a link'}: {state}>"


class Liveness:
    """Sends and answers pings and goodbyes, and ends the session after a long silence.

    The document has neither a ping nor an end of a session, and a packet link has no end of its own. So, and this is
    not in the document, two types of channels are reserved. A channel of type `PING` ends with its opening and is
    answered with an ack, as every channel is. One of type `BYE` tells that its sender leaves. If the sender has
    processed everything, the body is 0, then the id and the last ack of each channel, because the last acks may have
    been lost and are not sent again; otherwise it is something else. A peer that knows neither type answers with an
    err, which counts as an answer.
    """

    def __init__(self, connection: Connection, config: Config, *, odd: bool) -> None:
        self._connection = connection
        # The listener pings a little later, so that the connector's ping makes its own unnecessary.
        self._keepalive = None if config.keepalive is None else config.keepalive * (1.0 if odd else LISTENER_DELAY)
        self._timeout = config.timeout
        self._pings: Pings[int] = Pings(connection.facts)  # by the ids of their channels
        self._goodbyes: Pings[int] = Pings()  # apart, so that they do not count in the round trip
        self._bye: EngineChannel | None = None
        self._peer_said_bye = trio.Event()
        self.peer_left: bool = False
        """The peer has left in order."""

    @property
    def round_trip(self) -> float | None:
        """Seconds, smoothed; None before the first answer to a ping."""
        return self._pings.round_trip

    # --- questions

    async def ping(self) -> float:
        """Wait for one round trip through the peer's session; raises `LinkLost` if no answer comes."""
        connection = self._connection
        connection.budget.owner.check()
        await trio.lowlevel.checkpoint()
        connection.raise_if_lost()
        while connection.engine.places < 1:
            await connection.gone.park()
            connection.raise_if_lost()
        return await self._ask(self._pings, PING)

    async def say_goodbye(self) -> None:
        """Tell the peer that this side leaves, and wait for its answer; it may hang up instead of answering."""
        if self._connection.pump.is_lost or self._connection.engine.places < 1:
            return
        engine = self._connection.engine
        acks = engine.final_acks()[: ACKS_MOST if engine.config.frag else ACKS_MOST_IN_PACKET]
        with suppress(LinkLost):
            await self._ask(self._goodbyes, BYE, IN_ORDER + b"".join(_ACK.pack(id, ack) for id, ack in acks))

    async def _ask(self, pings: Pings[int], type: str, body: bytes = b"") -> float:
        connection = self._connection
        connection.update_time()
        channel = connection.engine.open(type, body, end=True)
        ping = pings.sent(channel.id)
        connection.request_write()
        return await ping.wait()

    def answered(self, id: int) -> None:
        """Wake the task whose channel the peer has processed or refused."""
        self._pings.answered(id)
        self._goodbyes.answered(id)

    def broken(self, id: int, *, is_answer: bool) -> None:
        """Wake the task whose channel is broken; an err by the peer is an answer."""
        if is_answer:
            self.answered(id)
        else:
            self._pings.ended(self._silence, id)
            self._goodbyes.ended(self._silence, id)

    def lost(self, error: ErrorMaker) -> None:
        """Fail all pings and goodbyes: the link is lost."""
        self._pings.ended(error)
        self._goodbyes.ended(error)

    # --- answers

    def answer(self, channel: EngineChannel, body: bytes) -> None:
        """Answer a channel of a reserved type that the peer has opened."""
        engine = self._connection.engine
        if not channel.is_reliable:  # a forged packet could open an unreliable one
            engine.err(channel, "reliable only")
        elif channel.type == PING:
            engine.done(channel)
            if not channel.gone:
                engine.end(channel)
        elif not body.startswith(IN_ORDER):
            self._connection.pump.told(Reason.decode(body))
            self._connection.pump.lose("the peer gave the session up", by="peer")
        elif self._bye is not None:
            engine.err(channel, "bye")
        else:
            engine.accept(channel)
            for id, ack in _ACK.iter_unpack(body[1 : 1 + (len(body) - 1) // _ACK.size * _ACK.size]):
                engine.take_final_ack(id, ack)
            self._bye = channel
            self.peer_left = True
            self._peer_said_bye.set()

    def answer_goodbye(self) -> None:
        """Answer the peer's goodbye, for which it waits before it hangs up."""
        if self._bye is not None:
            self._connection.update_time()
            self._connection.engine.err(self._bye, "bye")
            self._connection.after_command()

    # --- silence

    async def keep_alive(self) -> None:
        """Ping after each `Config.keepalive` of silence, until the peer has left; raises nothing."""
        connection = self._connection
        while not self._peer_said_bye.is_set():
            if connection.pump.is_lost:  # the block that is left ends this task
                await trio.sleep_forever()
            due = float("inf") if self._keepalive is None else connection.heard_at + self._keepalive
            with trio.move_on_at(due):
                await self._peer_said_bye.wait()
            if not self._peer_said_bye.is_set() and trio.current_time() >= connection.heard_at + (self._keepalive or 0):
                await self._check()

    async def _check(self) -> None:
        """Ping, and end the session if no answer comes."""
        try:
            with trio.move_on_after(self._timeout) as patience:
                await self.ping()
                return
            await read_first(patience.deadline)
        except LocalProtocolError:  # every id was used, so no ping can be sent
            await trio.sleep_forever()
        except LinkLost:
            pass
        self.suspect()

    def suspect(self) -> None:
        """End the session if nothing was received for `Config.timeout`."""
        if trio.current_time() - self._connection.heard_at >= self._timeout:
            error = self._silence()
            self._connection.pump.lose(error.reason, by=error.by)

    def _silence(self) -> LinkLost:
        silence = trio.current_time() - self._connection.heard_at
        return LinkLost(f"nothing was heard for {silence:.0f} s", by="network", peer=self._connection.pump.peer)


def _is_unacked(channel: EngineChannel) -> bool:
    """Whether packets of this side are not confirmed."""
    outgoing = channel.outgoing
    return outgoing is not None and not channel.gone and outgoing.acked < outgoing.next_seq - 1


class _Protocol:
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `e3x`."""

    options: frozenset[str] = frozenset({"config"})
    links: frozenset[LinkKind] = frozenset({"stream", "packets"})

    def session(
        self, link: PacketLink | trio.abc.Stream, /, *, role: Literal["client", "server"], address: str, **options: Any
    ) -> AbstractAsyncContextManager[Session]:
        return session(link, role="connector" if role == "client" else "listener", **options)


protocol: _Protocol = _Protocol()
connect: Connect[Session] = Connect("e3x")
open_server: OpenServer[Session, Channel] = OpenServer("e3x")
reconnecting: Reconnecting[Session] = Reconnecting("e3x")

protect_package("muxkit.protocols.e3x")
