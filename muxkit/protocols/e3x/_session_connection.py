"""What ties the engine to Trio? One link: its pump, the channels that wait for events, leaving and losing it."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.e3x._chunked import ChunkedEngine
from muxkit.protocols.e3x._config import LEAST_PACKET
from muxkit.protocols.e3x._engine import Engine
from muxkit.protocols.e3x._events import (
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
from muxkit.protocols.e3x._session_liveness import BYE, IN_ORDER, RESERVED, Liveness
from muxkit.runtime import DatagramPump, LinkLost, NowaitPackets, OutboxBudget, StreamPump, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.e3x._channel import EngineChannel
    from muxkit.protocols.e3x._config import Config
    from muxkit.protocols.e3x._session_channels import Channel
    from muxkit.runtime import PacketLink

ENDLESS = 2**62  # bytes: who may send is for the engine to say, which knows whose queue holds up nobody
FAREWELL = 1.0  # s, at most, for things that are only polite: the peer's ends, and the answer to our goodbye
REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH})

_log = logging.getLogger("muxkit")


class _Nothing:
    used = 0


class Connection:
    """An engine at work, and who is interested in which channel."""

    def __init__(
        self,
        link: PacketLink | trio.abc.Stream,
        *,
        odd: bool,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        on_opened: Callable[[Opened], None],
        on_goodbye: Callable[[Callable[[], Exception] | None], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.is_on_packets = not isinstance(link, trio.abc.Stream)
        if not self.is_on_packets:
            config = attrs.evolve(config, congestion=False)  # the stream knows itself how fast it may go
        self.engine = Engine(odd, config, limits=limits, observer=observer)
        self.pump: StreamPump[Event] | DatagramPump[Event]
        if isinstance(link, trio.abc.Stream):
            self.pump = StreamPump(
                link,
                ChunkedEngine(self.engine, trio.current_time, observer=observer),
                on_events=self._dispatch,
                on_written=self._written,
                on_lost=self._lost,
                queued=self.queued,
                observer=observer,
            )
        else:
            self.pump = DatagramPump(
                link,
                self.engine,
                on_events=self._dispatch,
                on_written=self._written,
                on_lost=self._lost,
                queued=self.queued,
                on_limit=self._limited,
                fatal=REFUSED if config.refusal_is_fatal else (),
                observer=observer,
            )
            if isinstance(link, NowaitPackets):
                self.engine.packet_size = min(config.packet, link.packet_limit)
        self.ring = self.pump.request_write
        self.room = OutboxBudget(ENDLESS, _Nothing())
        self.live: dict[int, Channel] = {}
        self.liveness = Liveness(self, config, odd=odd)
        self.gone = trio.lowlevel.ParkingLot()  # those who wait for channels to go away
        self.moved = trio.lowlevel.ParkingLot()  # or for anything to be confirmed
        self.written = trio.lowlevel.ParkingLot()  # or for something to leave
        self.heard_at = trio.current_time()
        self.was_heard = False
        self.unread = 0  # bytes that wait in inboxes
        self.dropped = 0
        self.messages_received = 0
        self.messages_sent = 0
        self._on_opened = on_opened
        self.on_goodbye = on_goodbye
        self._on_gone = on_gone
        self._actions: dict[type, Callable[..., None]] = {
            Opened: self._opened,
            Message: self._message,
            Ended: self._ended,
            Delivered: self._delivered,
            Writable: self._writable,
            Closed: self._closed,
            Broken: self._broken,
            Faulted: self._faulted,
        }

    # --- commands of channels

    def touch(self) -> None:
        """A command may come after a long silence, and counts its time from now."""
        self.engine.tell_time(trio.current_time())

    def did(self) -> None:
        """A command may have told something, owes something, or set a timer."""
        self.pump.dispatch_events()
        if self.engine.owes:
            self.pump.request_write()
        self.pump.rearm()

    def done(self, channel: EngineChannel) -> None:
        self.touch()
        self.engine.done(channel)
        self.did()

    def close(self, channel: EngineChannel) -> None:
        self.touch()
        self.engine.close(channel)
        self.did()
        self.ring()

    def aborted(self, channel: Channel) -> None:
        """The engine says nothing about what we do ourselves."""
        self._forget(channel.engine_channel)
        self.did()

    # --- loss

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    def _lost(self) -> None:
        loss = self.pump.loss
        is_orderly = self.liveness.peer_left or (not self.live and loss().by == "peer")
        with turns().spreading():
            for channel in [*self.live.values()]:
                if self.liveness.peer_left and not channel.is_reliable:
                    channel.inbox.ended(trio.EndOfChannel)  # its own end got lost
                channel.lost(loss)
        self.liveness.lost(loss)
        self.on_goodbye(None if is_orderly else loss)
        for lot in (self.gone, self.moved, self.written):
            lot.unpark_all()

    def queued(self) -> int:
        """Bytes of messages that have not left."""
        return self.engine.stats().unsent

    @property
    def too_large(self) -> int:
        """Packets that the link could not take."""
        return self.pump.too_large if isinstance(self.pump, DatagramPump) else 0

    @property
    def refused(self) -> int:
        """Errors of the network that cost a packet."""
        return self.pump.refused if isinstance(self.pump, DatagramPump) else 0

    # --- leaving

    async def leave(self, linger: float) -> None:
        """End everything, wait until the peer's application is done with it, hang up; at most `linger` seconds."""
        told = [channel for channel in self.live.values() if channel.sender.is_undelivered]
        with trio.move_on_after(linger) as scope:
            self.goodbye()
            while not self.pump.is_lost and any(
                channel.sender.is_undelivered and not channel.engine_channel.gone for channel in told
            ):
                await self.moved.park()
            with trio.move_on_after(FAREWELL):
                while not self.pump.is_lost and any(channel.is_reliable for channel in self.live.values()):
                    await self.gone.park()
            self.abort_all(only_reliable=True)  # what is lost of the others, their ends too, is lost
            if self.liveness.peer_left:
                self.liveness.answer_goodbye()
            elif self.was_heard:
                with trio.move_on_after(FAREWELL):
                    await self.liveness.say_goodbye()
            await self.pump.flushed()
            if not self.was_heard:  # there may be somebody who only listens
                self.lose("we hung up", by="local", parting=IN_ORDER)
            await self.pump.hang_up()
        if scope.cancelled_caught:
            self.lose(f"the peer did not take leave within {linger} s", by="peer", parting=b"late")
        if any(channel.sender.is_undelivered for channel in told):
            raise self.pump.loss()

    def lose(self, reason: str, *, by: Literal["peer", "local", "network"], parting: bytes) -> None:
        """Hang up without waiting for anything; where closing the link does not say it, one packet does."""
        if isinstance(self.pump, StreamPump):
            self.pump.lose(reason, by=by)
            return
        words: list[bytes] = []
        if self.engine.stats().packets_sent:
            with suppress(LocalProtocolError):  # no id is left
                words.append(self.engine.parting(BYE, parting))
        self.pump.lose(reason, by=by, parting=words)

    def goodbye(self) -> None:
        """Take no new channels, end what we send, take nothing more."""
        if self.pump.is_lost:
            return
        self.on_goodbye(None)
        for channel in [*self.live.values()]:
            if channel.engine_channel.taken:
                channel.close()
            else:
                channel.abort()
        self.ring()

    def abort_all(self, *, only_reliable: bool = False) -> None:
        for channel in [*self.live.values()]:
            if channel.is_reliable or not only_reliable:
                channel.abort()
        self.ring()

    # --- events

    def _dispatch(self, events: Sequence[Event]) -> None:
        actions = self._actions
        for event in events:
            actions[type(event)](event)

    def _heard(self) -> None:
        self.heard_at = trio.current_time()
        self.was_heard = True

    def _opened(self, event: Opened) -> None:
        self._heard()
        if event.channel.type in RESERVED:
            self.liveness.asked(event.channel, event.body)
        else:
            self._on_opened(event)

    def _message(self, event: Message) -> None:
        self._heard()
        channel = self.live.get(event.channel.id)
        if channel is None:
            self.engine.done(event.channel)
            return
        self.messages_received += 1
        channel.inbox.deliver(event.body)

    def _ended(self, event: Ended) -> None:
        channel = self.live.get(event.channel.id)
        if channel is not None:
            channel.inbox.ended(trio.EndOfChannel)

    def _delivered(self, event: Delivered) -> None:
        self._heard()
        channel = self.live.get(event.channel.id)
        if channel is None:
            self.liveness.answered(event.channel.id)
        else:
            channel.sender.advance(event.last)
        if self.moved:
            self.moved.unpark_all()

    def _writable(self, event: Writable) -> None:
        channel = self.live.get(event.channel.id)
        if channel is not None:
            channel.sender.window_changed()

    def _closed(self, event: Closed) -> None:
        channel = self._forget(event.channel)
        if channel is not None:
            channel.sender.confirmed()
            channel.inbox.ended(trio.EndOfChannel)

    def _broken(self, event: Broken) -> None:
        if event.cause is Cause.PEER:
            self._heard()
        elif event.cause is Cause.TIMEOUT:
            self.liveness.suspect()  # first: if it is the peer, all hear the same
        channel = self._forget(event.channel)
        if channel is None:
            self.liveness.broken(event.channel.id, is_answer=event.cause is Cause.PEER)
        elif event.cause is Cause.PEER:
            channel.broken(event.text)
        elif not channel.is_reliable:  # its end may have been lost, and nothing else can be
            channel.sender.confirmed()
            channel.inbox.ended(trio.EndOfChannel)
        else:
            reason = f"channel {event.channel.id} is over: {event.text}"
            channel.lost(lambda: LinkLost(reason, by="network", peer=self.pump.peer))

    def _faulted(self, event: Faulted) -> None:
        # What exactly came may be payload, so only the kind is told.
        _log.debug("%s: dropped a packet: %s", self.pump.peer or "a peer", event.fault.value)

    def _forget(self, engine_channel: EngineChannel) -> Channel | None:
        channel = self.live.pop(engine_channel.id, None)
        for lot in (self.gone, self.moved, self.written):
            if lot:
                lot.unpark_all()
        self._on_gone()
        return channel

    def _written(self) -> None:
        if self.written:
            self.written.unpark_all()

    def _limited(self, limit: int) -> None:
        self.engine.packet_size = max(LEAST_PACKET, min(self.engine.config.packet, limit))
