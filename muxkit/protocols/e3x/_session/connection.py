"""An e3x engine on a link, with what all channels of a session share: the pump, counters, pings and goodbyes."""

from __future__ import annotations

import errno
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import attrs
import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.e3x.config import LEAST_PACKET
from muxkit.protocols.e3x.engine import ChunkedEngine, Engine, Event
from muxkit.runtime import DatagramPump, LinkLost, NowaitPackets, OutboxBudget, Pings, StreamPump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.e3x.config import Config
    from muxkit.protocols.e3x.engine import EngineChannel
    from muxkit.runtime import ErrorMaker, PacketLink, Side

REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH})

PING: Final = "muxkit.ping"
BYE: Final = "muxkit.bye"
RESERVED: Final = frozenset({PING, BYE})
IN_ORDER: Final = b"\0"
ACKS_MOST: Final = 8000  # channels whose last acks a goodbye tells
ACKS_MOST_IN_PACKET: Final = 20  # the same if it must fit into one packet
LISTENER_DELAY: Final = 1.25
_ACK: Final = struct.Struct("!II")


class Connection:
    """Runs an engine over a link; `on_events` receives the engine's events, `on_lost` is called once.

    `on_aborted` is called for each channel that this side aborts, because the engine reports no event for that.
    """

    def __init__(
        self,
        link: PacketLink | trio.abc.Stream,
        *,
        odd: bool,
        config: Config,
        limits: Limits,
        observer: Observer | None,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[], None],
        on_aborted: Callable[[EngineChannel], object],
    ) -> None:
        self.is_on_packets = not isinstance(link, trio.abc.Stream)
        if not self.is_on_packets:
            config = attrs.evolve(config, congestion=False)  # the stream limits the rate itself
        self.engine = Engine(odd, config, limits=limits, observer=observer)
        self.pump: StreamPump[Event] | DatagramPump[Event]
        if isinstance(link, trio.abc.Stream):
            self.pump = StreamPump(
                link,
                ChunkedEngine(self.engine, trio.current_time, observer=observer),
                on_events=on_events,
                on_written=self._on_written,
                on_lost=on_lost,
                queued=self._queued,
                observer=observer,
            )
        else:
            self.pump = DatagramPump(
                link,
                self.engine,
                on_events=on_events,
                on_written=self._on_written,
                on_lost=on_lost,
                queued=self._queued,
                on_limit=self._limit_packets,
                fatal=REFUSED if config.refusal_is_fatal else (),
                observer=observer,
            )
            if isinstance(link, NowaitPackets):
                self.engine.packet_size = min(config.packet, link.packet_limit)
        self.request_write = self.pump.request_write
        self.budget = OutboxBudget()  # the engine itself limits what each channel queues
        self.gone = trio.lowlevel.ParkingLot()  # tasks that wait until channels are gone
        self.acked = trio.lowlevel.ParkingLot()  # tasks that wait until something is confirmed
        self.written = trio.lowlevel.ParkingLot()  # tasks that wait until something is written
        self.heard_at = trio.current_time()
        self.was_heard = False
        self.unread = 0  # bytes in the inboxes of all channels
        self.dropped = 0
        self.messages_received = 0
        self.messages_sent = 0
        self._on_aborted = on_aborted
        self.liveness = Liveness(self, config, odd=odd)

    def heard(self) -> None:
        """Note that the peer answered now."""
        self.heard_at = trio.current_time()
        self.was_heard = True

    def wake_all(self) -> None:
        """Wake the tasks in all three parking lots."""
        for lot in (self.gone, self.acked, self.written):
            if lot:
                lot.unpark_all()

    # --- commands

    def update_time(self) -> None:
        """Tell the engine the time before a command, which may follow a long silence."""
        self.engine.tell_time(trio.current_time())

    def after_command(self) -> None:
        """Dispatch the events of a command, write its acks and set its timers."""
        self.pump.dispatch_events()
        if self.engine.owes:
            self.pump.request_write()
        self.pump.rearm()

    def done(self, channel: EngineChannel) -> None:
        """Count the messages that the application has as processed."""
        self.update_time()
        self.engine.done(channel)
        self.after_command()

    def close(self, channel: EngineChannel) -> None:
        """End a channel, and discard what arrives on it."""
        self.update_time()
        self.engine.close(channel)
        self.after_command()
        self.request_write()

    def aborted(self, channel: EngineChannel) -> None:
        """Forget a channel that this side has aborted."""
        self._on_aborted(channel)
        self.after_command()

    # --- the pump

    def lose(self, reason: str, *, by: Side, parting: bytes) -> None:
        """Hang up at once; where closing the link does not tell the peer, one packet with `parting` does."""
        if isinstance(self.pump, StreamPump):
            self.pump.lose(reason, by=by)
            return
        packets: list[bytes] = []
        if self.engine.stats().packets_sent:
            with suppress(LocalProtocolError):  # no id is left
                packets.append(self.engine.parting(BYE, parting))
        self.pump.lose(reason, by=by, parting=packets)

    def raise_if_lost(self) -> None:
        if self.pump.is_lost:
            raise self.pump.loss()

    @property
    def too_large(self) -> int:
        """Packets that the link could not take."""
        return self.pump.too_large if isinstance(self.pump, DatagramPump) else 0

    @property
    def refused(self) -> int:
        """Errors of the network that cost a packet."""
        return self.pump.refused if isinstance(self.pump, DatagramPump) else 0

    def _queued(self) -> int:
        return self.engine.stats().unsent

    def _on_written(self) -> None:
        if self.written:
            self.written.unpark_all()

    def _limit_packets(self, limit: int) -> None:
        self.engine.packet_size = max(LEAST_PACKET, min(self.engine.config.packet, limit))


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
        self._pings: Pings[int] = Pings()  # by the ids of their channels
        self._goodbyes: Pings[int] = Pings()  # apart, so that they do not count in the round trip
        self._bye: EngineChannel | None = None
        self._peer_said_bye = trio.Event()
        self.peer_left = False
        """The peer has left in order."""

    @property
    def round_trip(self) -> float | None:
        """Seconds, smoothed; None before the first answer to a ping."""
        return self._pings.round_trip

    # --- questions

    async def ping(self) -> float:
        """Wait for one round trip through the peer's session; raises `LinkLost` if no answer comes."""
        connection = self._connection
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
            due = float("inf") if self._keepalive is None else connection.heard_at + self._keepalive
            with trio.move_on_at(due):
                await self._peer_said_bye.wait()
            if not self._peer_said_bye.is_set() and trio.current_time() >= connection.heard_at + (self._keepalive or 0):
                await self._check()

    async def _check(self) -> None:
        """Ping, and end the session if no answer comes."""
        try:
            with trio.move_on_after(self._timeout):
                await self.ping()
                return
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
