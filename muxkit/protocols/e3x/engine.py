"""The e3x engine, which implements the protocol without I/O.

The session's pump passes received packets, deadlines and commands to an `Engine`, and gets events and packets to send.
This module has the public methods of the engine, and decides which packet is sent next. Messages are sent and received
on the halves of a channel (`send`, `receive`). The module `state` explains the states of a channel and has the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import Clock, Reason, StartPace
from muxkit.core.events import Halves
from muxkit.core.mux_engine import MuxEngine
from muxkit.protocols.e3x.config import DEFAULT_TYPE, LEAST_PACKET, MOST_PACKET, Config
from muxkit.protocols.e3x.events import Cause, Event, Fault
from muxkit.protocols.e3x.liveness import Liveness
from muxkit.protocols.e3x.openings import Openings
from muxkit.protocols.e3x.packets import ack_part, head_of, name_of, parse_packet, quoted
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.protocols.e3x.state import EngineChannel, EngineSender, State

PACKETS_AT_ONCE = 256  # maximum number of packets that one call of `datagrams_to_send` returns
# `datagrams_to_send` encodes no further packet after this many bytes. On a byte stream, encoded packets wait for the
# stream, and a new message would wait for all of them.
BYTES_AT_ONCE = 64 * 1024
# Estimated memory of a channel in bytes, including its session objects and the task that handles it.
CHANNEL_PRICE = 7 * 1024


@attrs.frozen(kw_only=True, slots=False)  # without slots, because `SessionStats` inherits from two such classes
class Stats:
    """Counters of an engine since it was created. Times are in seconds."""

    packets_sent: int
    packets_received: int
    bytes_sent: int
    bytes_received: int
    resent: int
    """Packets that were sent again."""
    lost: int
    """Packets that the peer reported missing."""
    evicted: int
    """Packets of unreliable channels that were dropped before they were sent, to make room for newer packets."""
    channels: int
    held: int
    """Bytes that were received and that the application hasn't processed."""
    unsent: int
    """Bytes that are queued and not sent."""
    faults: dict[str, int]
    """Number of dropped packets for each `Fault`."""
    round_trip: float | None
    """Smoothed round-trip time. None until the first round trip has been measured."""
    least_round_trip: float | None
    queue: float
    """The part of the round-trip time that packets spend in queues on the path."""
    rate: float
    """Bytes per second that the congestion control allows. Meaningless over a byte stream."""
    falls: int
    """Number of times that the congestion control has lowered the rate."""


class Engine(MuxEngine):
    """The engine of one session with one peer. It implements `DatagramEngine`.

    A command either does all of its work, or raises `LocalProtocolError` and changes nothing. No packet of the peer
    makes an engine raise an exception or end the session.

    Args:
        odd: True for the connector, whose channels have odd ids. False for the listener, whose channels have even ids.
        config: The settings of the protocol.
        limits: The limits on memory and channels.
        observer: Receives a callback for each packet and each change of state.
        clock: Commands read the time from this clock. Packets and deadlines pass the time as an argument.
    """

    def __init__(
        self,
        odd: bool,
        config: Config | None = None,
        *,
        limits: Limits | None = None,
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.state: State = State(
            odd=odd,
            config=config or Config(),
            limits=(limits or Limits()).at_price(CHANNEL_PRICE),
            observer=observer,
            clock=clock,
        )
        self.openings: Openings = Openings(self.state)
        self.liveness: Liveness = Liveness(self.state, self.openings)
        self._round_trip = self.state.budget.round_trip
        self.starts: StartPace = self.state.starts
        self._was_err = False  # True if the last packet was an err, so it is the turn of another packet
        self.packets_received: int = 0
        self.packets_sent: int = 0
        self.bytes_received: int = 0
        self.bytes_sent: int = 0

    # --- properties

    @property
    def limits(self) -> Limits:
        return self.state.limits

    @property
    def channels(self) -> int:
        """Number of live channels, whichever side opened them."""
        return len(self.state.table)

    @property
    def frames(self) -> int:
        """Number of received packets."""
        return self.packets_received

    @property
    def places(self) -> int:
        return self.openings.places

    @property
    def outbox(self) -> int:
        return self.state.unsent

    @property
    def messages_sent(self) -> int:
        return self.state.messages_sent

    @property
    def peer_takes_no_channels(self) -> bool:
        return self.liveness.peer_left

    @property
    def packet_size(self) -> int:
        """Maximum size of a packet to send, in bytes. A new size applies to messages that are queued afterwards."""
        return self.state.packet

    @packet_size.setter
    def packet_size(self, size: int) -> None:
        if not LEAST_PACKET <= size <= MOST_PACKET:
            raise LocalProtocolError(f"invalid packet size {size}: expected {LEAST_PACKET} to {MOST_PACKET} bytes")
        self.state.packet = size

    def channel(self, id: int) -> EngineChannel | None:
        """Return the live channel with this id, or None."""
        return self.state.table.get(id)

    def stats(self) -> Stats:
        """Return the current counters."""
        state, congestion = self.state, self.state.congestion
        return Stats(
            packets_sent=self.packets_sent,
            packets_received=self.packets_received,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            resent=state.resent,
            lost=state.lost,
            evicted=state.evicted,
            channels=len(state.table),
            held=state.held,
            unsent=state.unsent,
            faults={fault.value: count for fault, count in state.faults.items()},
            round_trip=congestion.round_trip,
            least_round_trip=congestion.least_round_trip,
            queue=congestion.queue,
            rate=congestion.rate,
            falls=congestion.falls,
        )

    # --- commands

    def open(
        self, type: str, body: bytes = b"", *, reliable: bool = True, id: int | None = None, end: bool = False
    ) -> EngineChannel:
        """Open a channel and queue its first packet, which contains `body`. See `Openings.open`."""
        return self.openings.open(type, body, reliable=reliable, id=id, end=end)

    def open_channel(self, opening: bytes) -> Halves:
        """Open a reliable channel of the default type."""
        channel = self.open(DEFAULT_TYPE, opening)
        return Halves(channel.sender, channel.receiver)

    def err(self, channel: EngineChannel, text: str) -> None:
        """Break a channel, drop its queued packets, and tell the peer why. Does nothing if the channel is removed."""
        self.state.err(channel, text)

    def refuse(self, channel: Halves, reason: Reason) -> None:
        assert isinstance(channel.sender, EngineSender)
        self.give_up(channel.sender.channel, reason)

    def give_up(self, channel: EngineChannel, reason: Reason) -> None:
        """Break a channel and tell the peer the reason. Does nothing if the channel has been removed."""
        self.state.give_up(channel, reason)

    def blame(self, channel: EngineChannel) -> None:
        """Count a channel as cancelled by the peer, because its local handler failed.

        `StartPace` then limits how fast handlers start for further channels of this peer. Channels that this side
        opened don't count.
        """
        if not channel.ours:
            self.starts.broken_off(self.state.now)

    def ping(self, key: object) -> None:
        self.liveness.ping(key)

    def go_away(self, reason: Reason) -> None:
        """Do nothing, because e3x has no packet for this. The session answers each further opening with an err."""

    def farewell(self, reason: Reason) -> bytes:
        """Return a packet with a goodbye, which the caller sends immediately, before all queued packets."""
        return self.liveness.farewell(reason)

    # --- receiving packets

    def receive_datagram(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse and apply a received packet, and return the events. Never raises."""
        self.take_in(data, now)
        return self.take_events()

    def take_in(self, data: bytes, now: float) -> None:
        """Parse and apply a received packet. `take_events` returns the events. Never raises."""
        state = self.state
        state.now = max(state.now, now)
        self.packets_received += 1
        self.bytes_received += len(data)
        try:
            packet = parse_packet(bytes(data))
        except RemoteProtocolError as error:
            state.fault(Fault.MALFORMED, str(error))
            return
        if state.observer is not None:
            state.observer.frame("in", f"channel {packet.channel}", name_of(packet), len(packet.body))
        channel = state.table.get(packet.channel)
        if channel is None:
            self.openings.receive(packet)
        elif packet.err is None:
            channel.receiver.receive(packet)
            round_trip = self._round_trip
            if round_trip.is_wanted and round_trip.is_due(state.now):
                self.liveness.measure()
        else:
            if not channel.ours:
                state.starts.broken_off(state.now)
            state.break_channel(channel, Cause.PEER, packet.err, tell=False)

    def events(self) -> Sequence[Event]:
        """Return the events that have happened since the last call, oldest first, and forget them.

        After this call, the engine reports the first fault of each kind again.
        """
        state = self.state
        if state.reported:
            state.reported.clear()
        return self.take_events() if state.happened or state.own else ()

    def take_events(self) -> Sequence[Event]:
        """Return and forget the events like `events`, but don't report faults of a kind that was already reported."""
        while self.state.own:
            self.liveness.handle_events()
        happened = self.state.happened
        if not happened:
            return ()
        self.state.happened = []
        return happened

    # --- time

    def start(self, now: float) -> None:
        """Start the keepalive timers. Before this call, the engine sends no pings and never reports `Silent`."""
        self.state.now = max(self.state.now, now)
        self.state.silence.start(now)

    def next_timer(self) -> float | None:
        """Return when the next timer fires, disregarding packets that wait to be sent. Part of `SeparateTimers`."""
        timers, of_session = self.state.timers, self.state.silence.deadlines.next
        if timers and (of_session is None or timers[0][0] < of_session):
            return timers[0][0]
        return of_session

    def next_deadline(self) -> float | None:
        """Return when the caller must call `handle_deadline` and then `datagrams_to_send`; None for never."""
        state = self.state
        now, congestion = state.now, state.congestion
        if state.acking or state.answers:
            return now
        moment = self.next_timer()
        if not (state.errs or state.resends or state.line):
            return moment
        # A channel in `line` may have a full window. Then this deadline has no effect, but only once, because
        # `datagrams_to_send` removes the channel from `line`.
        ready = max(congestion.free_at, now) if congestion.is_on else now
        if congestion.is_on and not (state.resends or state.line):
            ready = max(ready, now + state.err_pace.pause(now))
        return ready if moment is None else min(ready, moment)

    def handle_deadline(self, now: float) -> Sequence[Event]:
        """Act on the timers that are due, and return the events. Does nothing if no timer is due yet."""
        state = self.state
        state.now = now = max(state.now, now)
        for channel in state.due_channels(now):
            self._handle_time(channel, now)
            if not channel.gone:
                state.arm(channel)
        if (due := state.silence.deadlines.next) is not None and due <= now:
            self.liveness.handle_time(now)
        return self.take_events()

    def _handle_time(self, channel: EngineChannel, now: float) -> None:
        state, sender, receiver = self.state, channel.sender, channel.receiver
        timeout = state.config.timeout
        if state.observer is not None:
            state.observer.timer(f"channel {channel.id}")
        if channel.dies_at <= now:
            if channel.closing:
                state.close_timed_out(channel)
            elif channel.id in state.unopened:
                state.drop_unopened(channel)
            else:
                text = f"no end came for {state.linger} s after ours"
                state.break_channel(channel, Cause.TIMEOUT, text, tell=False)
        elif isinstance(sender, ReliableSender) and isinstance(receiver, ReliableReceiver):
            # If this process was suspended, both are due. Then probe first, because the ack may be on its way.
            if sender.silent_at(timeout) <= now < sender.probe_at:
                state.break_channel(channel, Cause.TIMEOUT, f"nothing came for {timeout:g} s", tell=True)
                return
            if receiver.ack_at <= now:
                # A channel without its first packet may come from a forged address, so report its gaps only once.
                receiver.handle_time(now, 0.0 if channel.id in state.unopened else timeout)
            if sender.probe_at <= now:
                state.resends.extendleft((sender, piece) for piece in reversed(sender.probes(now)))

    # --- sending packets

    @property
    def owes(self) -> bool:
        """True if acks or errs are queued."""
        state = self.state
        return bool(state.acking or state.errs or state.answers)

    @property
    def has_news(self) -> bool:
        """True if a command has caused events, acks or errs."""
        state = self.state
        return bool(state.happened or state.own or state.acking or state.errs or state.answers)

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        """Remove the packets to send now from their queues, and return at most `PACKETS_AT_ONCE` of them.

        Errs alternate with other packets, because errs alone can use up the rate for as long as the application breaks
        channels. The other packets are resent packets, and then new packets of the channels in round-robin order. Acks
        come last.
        """
        state = self.state
        state.now = now = max(state.now, now)
        out: list[bytes] = []
        if not (state.line or state.resends or self.owes):
            return out
        had, size = state.unsent, 0
        while len(out) < PACKETS_AT_ONCE and size < BYTES_AT_ONCE:
            packet = self._take_next(now)
            if packet is None:
                break
            out.append(packet)
            size += len(packet)
        if state.acking or state.answers:
            self._write_acks(out, now)
        if state.unsent < had and (state.drained or state.crowded):
            self._report_writable()
        self.bytes_sent += sum(map(len, out))
        self.packets_sent += len(out)
        return out

    def _take_next(self, now: float) -> bytes | None:
        """Encode the next err or the next packet of a channel, in turn.

        Returns None if there is no packet, or if the rate doesn't allow one yet.
        """
        state, congestion = self.state, self.state.congestion
        if state.errs and not self._was_err:
            packet = self._take_err(now)
            if packet is not None:
                self._was_err = True
                return packet
        while state.resends or state.line:
            packet = self._take_resend(now) if state.resends else self._take_new(now)
            if packet is not None:
                if congestion.is_on:
                    congestion.sent(len(packet), now)
                self._was_err = False
                return packet
            if not congestion.may_send(now):
                return None
        return self._take_err(now) if state.errs else None

    def _take_resend(self, now: float) -> bytes | None:
        """Encode the next packet to resend.

        Returns None if the packet doesn't have to be resent any more, or if the rate doesn't allow a packet yet.
        """
        state = self.state
        sender, piece = state.resends[0]
        assert isinstance(sender, ReliableSender)
        if sender.channel.gone or sender.take_back(piece):
            state.resends.popleft()
            return None
        if not state.congestion.may_send(now):
            return None
        state.resends.popleft()
        state.resent += 1
        return sender.encode(piece, now)

    def _take_new(self, now: float) -> bytes | None:
        """Encode the next new packet of the channel whose turn it is.

        Returns None if the channel has no packet to send, or if the rate doesn't allow a packet yet.
        """
        state = self.state
        channel = state.line[0]
        packet: bytes | None = None
        if not channel.gone and channel.sender.is_ready:
            if not state.congestion.may_send(now):
                return None
            packet = channel.sender.write(now)
            if channel.sender.has_more:
                state.line.rotate(-1)
                return packet
        self.leave_line()
        return packet

    def leave_line(self) -> None:
        """Remove the first channel from the line, because it has no packet that the window allows."""
        channel = self.state.line.popleft()
        channel.in_line = False
        if not channel.is_reliable:
            self.state.close_if_over(channel)

    def _take_err(self, now: float) -> bytes | None:
        """Encode the next err, or return None if the rate doesn't allow an err yet."""
        state = self.state
        errs, congestion = state.errs, state.congestion
        if congestion.is_on and not (congestion.may_send(now) and state.err_pace.take(now)):
            return None
        id = next(iter(errs))
        packet = state.packet_of(id, b'"c":%d,"err":%b' % (id, quoted(errs.pop(id))), "err")
        congestion.sent(len(packet), now)
        state.err_sent(id)
        return packet

    def _write_acks(self, out: list[bytes], now: float) -> None:
        """Write the queued acks. The congestion control doesn't delay them: they are small, and the peer needs them."""
        state = self.state
        while state.acking and len(out) < PACKETS_AT_ONCE:
            receiver = state.acking.pop(next(iter(state.acking)))
            out.append(receiver.write_ack(now))
        while state.answers and len(out) < PACKETS_AT_ONCE:
            id = next(iter(state.answers))
            del state.answers[id]
            tombstone = state.tombstone(id)
            if tombstone is not None:
                head = head_of(id, None, None, False, 0) + ack_part(tombstone.ack, None)
                out.append(state.packet_of(id, head, "ack"))

    def _report_writable(self) -> None:
        """Report `Writable` for senders that have room again.

        First check the senders that have sent a packet, and then those that wait for room in the session's outbox, in
        the order in which they began to wait. A sender whose own queue is full isn't checked until it sends a packet.
        """
        state = self.state
        drained = [*state.drained.values()]
        state.drained.clear()
        for sender in drained:
            sender.report_if_writable()
        while state.crowded:
            first = next(iter(state.crowded.values()))
            first.report_if_writable()
            if first.channel.id in state.crowded:
                break  # the outbox has no room for the first sender, and no other sender may overtake it
