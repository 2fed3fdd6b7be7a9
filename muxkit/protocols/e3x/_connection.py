"""The connection of an e3x session: the parts of `MuxConnection` that differ between e3x and other protocols.

`_session.Session` creates one `Connection`, which runs the engine on a packet link or a byte stream and passes the
engine's events to the channels. Three properties of e3x need code here:

- An e3x ack means that the peer's application has processed a message. So a session that closes waits until the peer
  has processed every message, not only until the messages have arrived.
- A packet link can't signal that the connection has ended. So a side that leaves says goodbye in a packet, and the
  other side answers the goodbye and hangs up as well (`liveness`).
- e3x runs on two kinds of links. `DatagramPump` drives the engine on a packet link, `StreamPump` on a byte stream.

`muxkit.runtime.connection.MuxConnection` has everything else.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, Literal

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit.core import Reason, counted, without_name
from muxkit.core.events import Finished, GoingAway, Opened, Silent
from muxkit.protocols.e3x._channels import Channel, E3xSendHalf
from muxkit.protocols.e3x.chunked import ChunkedEngine, encode_chunks
from muxkit.protocols.e3x.config import LEAST_PACKET, Config
from muxkit.protocols.e3x.engine import Engine, Stats
from muxkit.protocols.e3x.events import Broken, Cause, Closed, Delivered, Faulted, GivenUp, GoodbyeHeard, PingLost
from muxkit.protocols.e3x.packets import RESERVED
from muxkit.protocols.e3x.receive import UnreliableReceiver
from muxkit.protocols.e3x.state import NO_REASON, EngineChannel
from muxkit.runtime import (
    CLOSED_HERE,
    ChannelCancelled,
    ChannelStopped,
    DatagramPump,
    LinkLost,
    NowaitPackets,
    PacketLink,
    Side,
    StreamPump,
)
from muxkit.runtime import SessionStats as CommonStats
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.receive import ReceiveHalf
from muxkit.runtime.halves.send import SendHalf

REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH})
BROKEN_OFF: Final = "the peer aborted the channel"
# Seconds that a closing session waits for the peer to end its channels. The session waits that long a second time for
# the peer's answer to the goodbye.
FAREWELL_TIMEOUT: Final = 1.0
# Seconds that this side waits for outstanding acks after the peer has said goodbye. The peer waits for our answer in
# the meantime.
UNACKED_TIMEOUT: Final = 2.0

_log = logging.getLogger("muxkit")

Role = Literal["connector", "listener"]


@attrs.frozen(kw_only=True)
class SessionStats(CommonStats, Stats):
    """Counters of an e3x session: the counters of every session, the counters of the engine, and the fields below."""

    dropped: int
    """Received unreliable messages that were dropped, to make room for newer ones, before the application took them."""
    too_large: int
    """Packets that were dropped because the link's packet limit had shrunk after the packets were encoded."""
    refused: int
    """Packets that were lost because the network reported an error when the link sent or received."""


class Connection(MuxConnection[Engine, Channel]):
    """The connection of an e3x session. See the module docstring for how it differs from other protocols."""

    wire_name = "e3x"
    refusal_while_closing: ClassVar[Reason] = Reason("closing")
    refusal_of_too_many: ClassVar[Reason] = Reason("too many channels")

    pump: StreamPump[Any] | DatagramPump[Any]

    def __init__(
        self, link: PacketLink | trio.abc.Stream, role: Role, config: Config, limits: Limits, observer: Observer | None
    ) -> None:
        if role not in ("connector", "listener"):
            raise ValueError(f"invalid role={role!r}: expected 'connector' or 'listener'")
        odd, frames, clock = role == "connector", frames_of(observer), trio.lowlevel.current_clock()
        if isinstance(link, trio.abc.Stream):
            chunked = ChunkedEngine(odd, config, limits=limits, observer=frames, clock=clock)
            super().__init__(chunked, link, "e3x", chunked.limits, observer)
            self.pump = StreamPump(link, chunked, self)
        else:
            engine = Engine(odd, config, limits=limits, observer=frames, clock=clock)
            super().__init__(engine, link, "e3x", engine.limits, observer)
            self.pump = DatagramPump(link, engine, self, fatal=REFUSED if config.refusal_is_fatal else ())
            if isinstance(link, NowaitPackets):
                self.engine.packet_size = min(config.packet, link.packet_limit)
        self.acked: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        """Tasks that wait for an ack on any channel. They wake up at every ack and check their own condition."""
        self.written: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        self.dropped: int = 0
        """Number of received unreliable messages that were dropped to make room for newer ones."""
        self._may_be_refused_late: bool = getattr(link, "may_be_refused_late", False)
        self._live: dict[int, Channel] = {}
        self._is_goodbye_heard = False
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        super().start(nursery)
        self._nursery = nursery
        self.engine.start(trio.current_time())

    # --- the link

    @property
    def is_on_packets(self) -> bool:
        """True on a packet link, False on a byte stream."""
        return isinstance(self.pump, DatagramPump)

    def dispatch_events(self) -> None:
        """Dispatch the events that a command has caused, write acks and errs if any are queued, and set the timer."""
        self.pump.dispatch_events()
        if self.engine.owes:
            self.pump.request_write()
        self.pump.rearm()

    def processed(self) -> None:
        """Dispatch the events and write the acks, if any, that were caused by marking messages as processed."""
        if self.engine.has_news:
            self.dispatch_events()

    def lose(self, reason: str, *, by: Side, cause: BaseException | None = None, told: Reason | None = None) -> None:
        """End the connection and tell the peer why.

        On a packet link the peer gets a farewell even without a reason, because the link can't signal the end of the
        connection. The farewell is skipped if neither side has sent a packet yet.
        """
        farewell = b""
        if told or (self.is_on_packets and (self.engine.state.silence.was_heard or self.engine.packets_sent)):
            farewell = self.engine.farewell(told or Reason())
        self._lose_with(farewell, reason, by=by)

    def _lose_with(self, farewell: bytes, reason: str, *, by: Side) -> None:
        """End the connection, and send `farewell` as the last packet unless it is empty."""
        parting = farewell if self.is_on_packets or not farewell else encode_chunks(farewell)
        self.pump.lose(reason, by=by, parting=[parting] if parting else ())

    def queued_bytes(self) -> int:
        return self.engine.outbox

    def has_understood_peer(self) -> bool:
        return self.engine.state.silence.was_heard

    def handle_written(self) -> None:
        super().handle_written()
        if self.written:
            self.written.unpark_all()
        self.openers.wake_waiters()  # a broken channel frees its slot when its err has been sent (`free_slots`)

    def handle_packet_limit(self, limit: int) -> None:
        self.engine.packet_size = max(LEAST_PACKET, min(self.engine.state.config.packet, limit))

    # --- channels that this side opens

    def free_slots(self) -> int:
        # The peer counts a broken channel until our err arrives. So the slot stays occupied while the err is queued, or
        # the peer would refuse the next channel as one too many.
        return super().free_slots() - len(self.engine.state.errs)

    async def open_typed(self, type: str, reliable: bool, body: bytes) -> Channel:
        """Wait for a free slot, then open a channel of this type. `body` contains the headers and the payload."""
        if type in RESERVED:
            await trio.lowlevel.checkpoint()
            raise LocalProtocolError(f"invalid type {type!r}: the session itself uses it; choose another one")
        await self.wait_to_open()
        try:
            return self.new_channel(self.engine.open(type, body, reliable=reliable), body)
        finally:
            self.opened()

    def new_channel(self, channel: EngineChannel, opening: bytes) -> Channel:
        """Create the application's `Channel` and keep it in `_live` until the engine has removed the channel."""
        made = self._live[channel.id] = Channel(self, channel, opening)
        return made

    # --- channels that the peer opens

    def handle_opened(self, event: Opened) -> None:
        channel, body = event.channel, event.opening
        assert isinstance(channel, EngineChannel)
        refusal = self.refusal_of(self.incoming, body)
        if refusal is not None:
            self.engine.give_up(channel, refusal)
            return
        made = self.new_channel(channel, body)
        receiver, payload = channel.receiver, without_name(body).payload
        if payload and isinstance(receiver, UnreliableReceiver):  # the opening of an unreliable channel is a message
            self.messages_received: int = self.messages_received + 1
            receiver.hold(payload)
            made.receiving.deliver(payload)
        self.offer(self.incoming, made)

    def took(self, item: Channel) -> None:
        """Acknowledge the opening of a channel that the application has just taken."""
        item.engine_channel.receiver.done()
        self.dispatch_events()

    def decline(self, item: Channel, reason: Reason) -> None:
        item.abort(reason.text, code=reason.code)

    # --- channels that end

    def give_up(self, channel: Channel, reason: Reason) -> None:
        """Break a channel and send the peer an err.

        The engine reports no event for a channel that we break ourselves, so this method also does what
        `handle_event` does for `Broken`: it forgets the channel and wakes waiting tasks.
        """
        if not self.pump.is_lost:
            self.engine.give_up(channel.engine_channel, reason)
            self.engine.blame(channel.engine_channel)
        self._forget(channel.engine_channel)
        self.dispatch_events()
        self.request_write()

    def _forget(self, channel: EngineChannel) -> Channel | None:
        """Forget a channel that the engine has removed, and wake the tasks that wait for that.

        Returns None if the application doesn't know the channel, as for the channel of a ping.
        """
        gone = self._live.pop(channel.id, None)
        if gone is not None:
            # Break the reference cycles between a channel and its halves, so that the channel doesn't stay in memory
            # until the next garbage collection.
            gone.sending.channel = gone.receiving.channel = None
            channel.sender.owner = channel.receiver.owner = None
        for lot in (self.gone, self.acked, self.written):
            if lot:
                lot.unpark_all()
        self.openers.wake_waiters()
        return gone

    def _handle_broken(self, broken: EngineChannel, cause: Cause, text: str) -> None:
        channel = self._forget(broken)
        if channel is None:
            return
        if cause is Cause.PEER:
            payload = text.encode(errors="replace")
            told = Reason() if text == NO_REASON else Reason.decode(payload)
            channel.sending.stopped(partial(ChannelStopped, BROKEN_OFF, payload=payload, told=told))
            channel.receiving.ended(partial(ChannelCancelled, BROKEN_OFF, payload=payload, told=told))
            # If the channel was still in the backlog, `incoming` never returns it, so its messages aren't needed.
            if self.drop_waiting(channel) is not None:
                channel.receiving.drop()
        elif not channel.is_reliable:
            # An unreliable channel breaks without an err only if the peer's end didn't arrive in time. The end may
            # have been lost like any other packet, so treat the channel as ended.
            channel.sending.confirmed()
            channel.receiving.ended(trio.EndOfChannel)
        else:
            # Nobody knows which of the unacked messages the peer has processed, so this is an error and not an end.
            error = partial(LinkLost, f"channel {channel.id} has failed: {text}", by="network", peer=self.pump.peer)
            channel.sending.lost(error)
            channel.receiving.ended(error)

    # --- events

    def handle_event(self, event: object) -> None:
        match event:
            case Delivered(EngineChannel() as channel, _, last):
                half = channel.sender.owner
                if isinstance(half, E3xSendHalf):
                    half.delivered(last)
                if self.acked:
                    self.acked.unpark_all()
            case Finished(receiver):  # the engine keeps the receiver until it removes the whole channel
                if isinstance(half := receiver.owner, ReceiveHalf):
                    half.ended(trio.EndOfChannel)
            case Closed(EngineChannel() as channel):
                if (closed := self._forget(channel)) is not None:
                    closed.sending.confirmed()
                    closed.receiving.ended(trio.EndOfChannel)
            case Broken(EngineChannel() as channel, cause, text):
                self._handle_broken(channel, cause, text)
            case Faulted(fault, _, limit):
                # The text of a fault may contain payload, so log only the kind of the fault.
                # log: A packet did not fit the session; the kind of fault is told, not its text.
                _log.debug("%s: dropped a packet: %s", self.pump.peer or "a peer", fault.value)
                if limit is not None and self.facts is not None:
                    self.facts.limit(limit)
            case PingLost(key):
                self.pings.ended(self._silence, key)
            case Silent():
                error = self._silence()
                self.pump.lose(error.reason, by=error.by)  # without a farewell, because the peer doesn't answer
            case GoodbyeHeard():
                self._is_goodbye_heard = True
                self.gone.unpark_all()
            case GivenUp(reason):
                self.pump.told(reason)
                self.pump.lose("the peer ended the session", by="peer")
            case _:
                super().handle_event(event)

    def _silence(self) -> LinkLost:
        seconds = self.engine.state.silence.seconds(trio.current_time())
        return LinkLost(f"no data from the peer for {seconds:.0f} s", by="network", peer=self.pump.peer)

    def handle_going_away(self, event: GoingAway) -> None:
        """Stop opening channels and start hanging up, because the peer has said goodbye."""
        self.stop_opening(None)
        if self._nursery is not None:
            self._nursery.start_soon(self._follow_peer)

    async def _follow_peer(self) -> None:
        """Wait for the last acks of a peer that has said goodbye, answer its goodbye, and hang up as well."""
        with trio.move_on_after(UNACKED_TIMEOUT):
            while any(channel.engine_channel.sender.awaits_ack for channel in self._live.values()):
                await self.acked.park()
        self._answer_goodbye()
        await self.pump.flushed()
        count = len(self._live)
        what = f" while {counted(count, 'channel', were=True)} open" if count else ""
        if not self.is_on_packets:  # let the peer close the stream first, since it does so when it has our answer
            with trio.move_on_after(UNACKED_TIMEOUT):
                await self.pump.hung_up.wait()
        self.pump.lose(f"the peer hung up{what}", by="peer")

    def _answer_goodbye(self) -> None:
        self.engine.liveness.answer_goodbye()
        self.dispatch_events()

    def handle_lost(self) -> None:
        if self.engine.liveness.peer_left:
            for channel in self._live.values():
                if not channel.is_reliable:
                    # The peer ends its channels before it says goodbye, so the packet with this channel's end was lost.
                    channel.receiving.ended(trio.EndOfChannel)
        super().handle_lost()
        self.acked.unpark_all()
        self.written.unpark_all()

    def ends_in_order(self) -> bool:
        loss = self.pump.loss()
        has_reason = bool(loss.peer_reason or loss.code)
        return self.engine.liveness.peer_left or (not self._live and loss.by == "peer" and not has_reason)

    # --- closing the session

    def live_halves(self) -> Iterator[SendHalf | ReceiveHalf[Any]]:
        channels = [*self._live.values()]
        yield from (channel.sending for channel in channels)
        yield from (channel.receiving for channel in channels)

    async def wait_until_heard(self, told: Sequence[SendHalf]) -> None:
        """Wait until the peer's application has processed every message, then up to a second for the peer's ends.

        Reliable channels that the peer hasn't ended by then are aborted.
        """
        pump = self.pump
        # Wait for the halves one after the other. Each ack wakes this task, and then only one half has to be checked.
        for half in told:
            assert isinstance(half, E3xSendHalf)
            while not pump.is_lost and half.is_unheard and not half.engine_channel.gone:
                await self.acked.park()
        with trio.move_on_after(FAREWELL_TIMEOUT):
            while not pump.is_lost and any(channel.is_reliable for channel in self._live.values()):
                await self.gone.park()
        # An unreliable channel has no acks that somebody could wait for, so it isn't aborted.
        self._abort([channel for channel in self._live.values() if channel.is_reliable])

    async def say_goodbye(self) -> None:
        """Say goodbye to the peer and wait for the answer, or answer the peer's goodbye if the peer was first."""
        pump, liveness, silence = self.pump, self.engine.liveness, self.engine.state.silence
        if liveness.peer_left:
            self._answer_goodbye()
        elif self._may_be_refused_late and not silence.was_heard:
            with trio.move_on_after(FAREWELL_TIMEOUT), suppress(LinkLost):
                # The server may still refuse this client. Wait for the answer to a ping, because the server answers
                # only after it has accepted the client.
                await self.ping()
        if silence.was_heard and not liveness.peer_left and not pump.is_lost and self.engine.places > 0:
            liveness.say_goodbye()
            self.request_write()
            with trio.move_on_after(FAREWELL_TIMEOUT):
                while not (self.pump.is_lost or self._is_goodbye_heard):
                    await self.gone.park()
        await pump.flushed()
        if not silence.was_heard:  # the peer may be one that only receives, so don't wait for an answer to the goodbye
            packet = liveness.farewell(None) if self.is_on_packets and self.engine.packets_sent else b""
            self._lose_with(packet, CLOSED_HERE, by="local")

    def reason_for_late_leaving(self, linger: float) -> Reason | None:
        return Reason(f"the other side left without what was not processed within {linger} s")

    def close_all(self) -> None:
        if self.pump.is_lost:
            return
        self.stop_opening(None)
        for channel in [*self._live.values()]:
            if channel.engine_channel.taken:
                channel.close()
            else:
                channel.abort()
        self.request_write()

    def abort_all(self) -> None:
        self._abort([*self._live.values()])

    def _abort(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            channel.abort()
        self.request_write()

    # --- pings, numbers

    async def ping_about(self, key: object) -> float:
        """Wait for a free channel slot, send a ping on a channel of a reserved type, and wait for the answer."""
        self.budget.thread.check()
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.engine.places < 1 and not self.pump.is_lost:
            await self.gone.park()
        # Each ping has its own channel, so several pings can be in flight and the answers may arrive in any order.
        return await super().ping_about(object())

    @property
    def live_channels(self) -> int:
        return len(self._live)

    def taken_channels(self) -> Sequence[Channel]:
        return [channel for channel in self._live.values() if channel.engine_channel.taken]

    def stats(self) -> SessionStats:
        common, engine, pump = super().stats(), self.engine.stats(), self.pump
        numbers = attrs.asdict(engine) | attrs.asdict(common)
        if engine.round_trip is not None:
            numbers["round_trip"] = engine.round_trip
        return SessionStats(
            **numbers,
            dropped=self.dropped,
            too_large=pump.too_large if isinstance(pump, DatagramPump) else 0,
            refused=pump.refused if isinstance(pump, DatagramPump) else 0,
        )
