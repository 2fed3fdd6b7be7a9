"""Receive packets: check each completely before it changes anything; a packet ends at most its own channel.

A channel that the application has closed goes on until its end. The document has no way to say "stop sending", only
`err`, which drops everything in both directions. So, and this is not in the document:

- An err is sent only after all packets of this side are confirmed: before, it could cost the peer what it has not
  processed yet.
- Then an end by the peer closes the channel in order, and any other unread packet is answered with an err.
- A peer that sends nothing has `State.linger` seconds for its end.
- A peer that goes on sending and processes nothing for `CLOSE_TIMEOUT` would wait for this side as this side waits for
  it; the channel breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.e3x.engine.channel import Arrival
from muxkit.protocols.e3x.engine.events import Broken, Cause, Closed, Delivered, Ended, Fault, Message, Opened
from muxkit.protocols.e3x.packets import SEQ_MOST, TYPE_MOST, Packet, decode_miss, parse_packet

if TYPE_CHECKING:
    from muxkit.protocols.e3x.engine.channel import EngineChannel, Incoming, Outgoing
    from muxkit.protocols.e3x.engine.state import State


CLOSE_TIMEOUT: Final = 5.0  # s
CLOSED: Final = "closed"  # the err of a closed channel


class PacketReader:
    """The receiving part of an engine."""

    def __init__(self, state: State) -> None:
        self._state = state

    def close(self, channel: EngineChannel) -> None:
        """Discard from now on what arrives on a channel, and wait for its end."""
        channel.closing = True
        if channel.assembly is not None:
            channel.assembly.drop()
        self._continue_closing(channel)

    def receive(self, data: bytes) -> None:
        """Parse a packet and apply it."""
        state = self._state
        try:
            packet = parse_packet(data)
        except RemoteProtocolError as error:
            state.fault(Fault.MALFORMED, str(error))
            return
        if state.observer is not None:
            state.observer.frame("in", f"channel {packet.channel}", name_of(packet), len(packet.body))
        channel = state.table.get(packet.channel)
        if channel is None:
            self._receive_unknown(packet)
        elif packet.err is not None:
            state.break_channel(channel, Cause.PEER, packet.err, tell=False)
        elif channel.is_reliable:
            self._receive_reliable(channel, packet)
        else:
            self._receive_unreliable(channel, packet)

    # --- packets of unknown channels

    def _receive_unknown(self, packet: Packet) -> None:
        state = self._state
        tombstone = state.tombstone(packet.channel)
        if tombstone is not None:
            if packet.seq is not None and packet.err is None:  # the last ack, or the err, was lost
                if tombstone.ack is not None:
                    state.answers[packet.channel] = None
                elif tombstone.err is not None and state.refusals.take(state.now):
                    state.errs[packet.channel] = tombstone.err
            state.fault(Fault.DUPLICATE, f"channel {packet.channel} is over")
        elif packet.err is not None or state.is_ours(packet.channel) or packet.channel in state.used:
            state.fault(Fault.UNKNOWN, f"channel {packet.channel} does not exist")
        elif packet.ack is not None and packet.ack > 0:
            state.fault(Fault.UNSENT, f"channel {packet.channel}: ack {packet.ack} where nothing was sent")
        elif packet.seq is None:
            if packet.type is None:
                state.fault(Fault.UNKNOWN, f"channel {packet.channel} does not exist")
            else:
                self._open_unreliable(packet, packet.type)
        elif packet.seq == 1:
            if packet.type is None:
                state.fault(Fault.MISPLACED, f"channel {packet.channel}: a first packet without a type")
            else:
                self._open_reliable(packet, packet.type)
        elif state.config.reliable and packet.seq <= state.window:
            self._await_opening(packet)
        else:
            state.fault(Fault.UNKNOWN, f"channel {packet.channel} does not exist")

    def _open_unreliable(self, packet: Packet, type: str) -> None:
        if len(type) > TYPE_MOST:
            self._refuse(packet.channel, Fault.MISPLACED, too_long(type))
            return
        channel = self._admit(packet.channel, type, reliable=False)
        if channel is not None:
            self._state.used.add(packet.channel)
            channel.announced = True
            self._state.events.append(Opened(channel, packet.body))
            self._end_unreliable(channel, packet)

    def _open_reliable(self, packet: Packet, type: str) -> None:
        state = self._state
        refusal = self._refusal(type)
        if refusal is not None:
            self._refuse(packet.channel, Fault.MISPLACED, refusal)
            return
        if len(packet.body) > state.room_next:
            state.fault(Fault.FULL, f"channel {packet.channel}: no memory left for its first packet")
            return
        channel = self._admit(packet.channel, type, reliable=True)
        if channel is not None:
            state.used.add(packet.channel)
            self._receive_reliable(channel, packet)

    def _refusal(self, type: str) -> str | None:
        if len(type) > TYPE_MOST:
            return too_long(type)
        if not self._state.config.reliable:
            return "only unreliable channels are taken"
        return f"{type[:64]} is unreliable" if type in self._state.config.unreliable_types else None

    def _await_opening(self, packet: Packet) -> None:
        """Keep a packet that arrived before the first of its channel, so that a miss can ask for that."""
        state = self._state
        channel = self._admit(packet.channel, "", reliable=True, answers=False)
        if channel is not None:
            while len(state.unopened) >= state.limits.half_open:
                state.drop_unopened(next(iter(state.unopened.values())))
                state.fault(Fault.FLOOD, f"{state.limits.half_open} channels wait for their first packet")
            state.unopened[channel.id] = channel
            channel.dies_at = state.now + state.limits.handshake
            self._receive_reliable(channel, packet)

    def _admit(self, id: int, type: str, *, reliable: bool, answers: bool = True) -> EngineChannel | None:
        state = self._state
        census = state.table.census
        if census.theirs >= state.limits.channels or not census.has_backlog_room:
            limit = "backlog" if census.theirs < state.limits.channels else "channels"
            text = f"{census.theirs} channels, {census.waiting} not taken: Limits({limit})"
            if answers:
                self._refuse(id, Fault.FLOOD, text)
            else:
                state.fault(Fault.FLOOD, f"channel {id}: {text}")
            return None
        channel = state.new_channel(id, type, ours=False, reliable=reliable)
        channel.taken = False
        state.table.add_theirs(id, channel)
        if state.observer is not None:
            state.observer.state(f"channel {id}", "open")
        return channel

    def _refuse(self, id: int, fault: Fault, text: str) -> None:
        state = self._state
        state.fault(fault, f"channel {id}: {text}")
        if len(state.errs) < state.limits.tombstones and state.refusals.take(state.now):
            state.errs[id] = text if fault is not Fault.FLOOD else "too many channels"

    # --- reliable channels

    def _receive_reliable(self, channel: EngineChannel, packet: Packet) -> None:
        state, outgoing, incoming = self._state, channel.outgoing, channel.incoming
        assert outgoing is not None
        assert incoming is not None
        where = f"channel {channel.id}"
        if packet.ack is not None and packet.ack > outgoing.sent:
            state.fault(Fault.UNSENT, f"{where}: ack {packet.ack} where {outgoing.sent} was the last sent")
            return
        if packet.seq is None and (packet.ack is None or packet.body or packet.end or packet.type is not None):
            state.fault(Fault.MISPLACED, f"{where} is reliable, and a packet came without seq")
            return
        if packet.seq == 1 and not channel.ours and packet.type is None:
            state.fault(Fault.MISPLACED, f"{where}: a first packet without a type")
            return
        if packet.seq is not None and self._is_beyond_end(incoming, packet, packet.seq):
            state.fault(Fault.MISPLACED, f"{where}: seq {packet.seq} does not fit to its end")
            return
        channel.heard_at = state.now
        if packet.miss_fault:
            state.fault(Fault.MISS, f"{where}: {packet.miss_fault}")
        if packet.ack is not None:
            self._acknowledge(channel, outgoing, packet, packet.ack)
        if packet.seq is not None and not channel.gone:
            self._keep(channel, incoming, packet, packet.seq)
        if not channel.gone:
            state.owe_ack(channel)
            state.arm(channel)

    def _is_beyond_end(self, incoming: Incoming, packet: Packet, seq: int) -> bool:
        """Whether a packet lies behind the end of its channel, or moves the end."""
        if incoming.end_seq is not None:
            return seq > incoming.end_seq or (packet.end and seq != incoming.end_seq)
        return packet.end and seq < incoming.highest

    def _acknowledge(self, channel: EngineChannel, outgoing: Outgoing, packet: Packet, ack: int) -> None:
        state = self._state
        window, missing = None, []
        if packet.miss is not None:
            miss = decode_miss(ack, packet.miss)
            window, missing = miss.window, miss.missing
        congestion = state.congestion
        news = outgoing.acknowledge(ack, window, missing, state.now, congestion.fell_at)
        if news is None:
            return
        congestion.ack_received(news.round_trip, news.lost, state.now, is_sure=news.is_sure, is_cut=news.is_cut)
        state.counters["lost"] += news.named
        state.resends.extend((channel, piece) for piece in news.resend)
        if news.last >= news.first:
            state.events.append(Delivered(channel, news.first, news.last))
        state.queue_up(channel)
        if ack == SEQ_MOST and not channel.ended:
            state.break_channel(channel, Cause.EXHAUSTED, f"seq {SEQ_MOST} was used, and there is no other", tell=True)
        state.close_if_over(channel)
        if channel.closing:
            self._continue_closing(channel, has_advanced=news.last >= news.first)

    def _keep(self, channel: EngineChannel, incoming: Incoming, packet: Packet, seq: int) -> None:
        state = self._state
        # Do not keep fields that are not needed any more: a head may be large, and only bodies are counted.
        type, packet.type, packet.miss = packet.type, None, None
        before = incoming.bytes
        room = min(state.limits.channel_bytes - before, state.room)
        arrival = incoming.take(packet, seq, state.now, room, state.room_next)
        state.held += incoming.bytes - before
        if arrival is not Arrival.KEPT:
            fault = Fault.DUPLICATE if arrival is Arrival.DUPLICATE else Fault.FULL
            state.fault(fault, f"channel {channel.id}: seq {seq} is {arrival.value}")
            return
        state.waiting += 1
        if packet.end:
            incoming.end_seq = seq
        if seq == 1 and not channel.ours:
            self._accept_opening(channel, type or "")
        if not channel.gone and (channel.ours or channel.type):
            self.deliver(channel)

    def _accept_opening(self, channel: EngineChannel, type: str) -> None:
        """Accept or refuse a channel whose first packet has arrived."""
        state = self._state
        refusal = self._refusal(type)
        if refusal is not None:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: {refusal}")
            state.break_silently(channel, refusal)
            return
        channel.type = type
        channel.dies_at = None
        state.unopened.pop(channel.id, None)
        state.used.add(channel.id)

    def deliver(self, channel: EngineChannel) -> None:
        """Report the next message, unless the application has one; put pieces together on the way."""
        state, incoming, assembly = self._state, channel.incoming, channel.assembly
        assert incoming is not None
        assert assembly is not None
        if channel.closing:
            self._continue_closing(channel)
            return
        while not channel.gone and (packet := incoming.next()) is not None:
            body: bytes | None = packet.body
            if state.config.frag:
                try:
                    body = assembly.add(packet.frag, packet.body)
                    if packet.end and body is None:
                        raise RemoteProtocolError(f"an end before {packet.frag} pieces of its message")
                except RemoteProtocolError as error:
                    state.break_channel(channel, Cause.MESSAGE, str(error), tell=True)
                    return
            if body is None:
                self.processed(channel)
            elif not channel.ours and not channel.announced:
                channel.announced = True
                incoming.handed = 1
                state.events.append(Opened(channel, body))
            elif body or not packet.end:
                incoming.handed = 1
                state.events.append(Message(channel, body))
            else:
                self.processed(channel)

    def take(self, channel: EngineChannel, most: int) -> list[bytes]:
        """Take whole messages behind the one that the application has, at most `most`."""
        incoming, assembly = channel.incoming, channel.assembly
        assert incoming is not None
        assert assembly is not None
        bodies: list[bytes] = []
        if not incoming.handed or assembly.expected:
            return bodies
        while len(bodies) < most and (packet := incoming.further()) is not None:
            if (packet.frag and self._state.config.frag) or (packet.end and not packet.body):
                break
            incoming.handed += 1
            bodies.append(packet.body)
        return bodies

    def processed(self, channel: EngineChannel) -> None:
        """Count the next packet of a channel as processed."""
        state, incoming = self._state, channel.incoming
        assert incoming is not None
        before = incoming.bytes
        packet = incoming.done()
        state.held += incoming.bytes - before
        state.waiting -= 1
        if packet.end:
            incoming.ended = channel.peer_ended = True
            incoming.ack_now = True
            state.events.append(Ended(channel))
        state.owe_ack(channel)
        state.arm(channel)
        state.close_if_over(channel)

    # --- closed channels

    def _continue_closing(self, channel: EngineChannel, *, has_advanced: bool = False) -> None:
        """End a closed channel, or set its timeout, after a packet or, with `has_advanced`, an ack has arrived."""
        state, incoming, outgoing = self._state, channel.incoming, channel.outgoing
        if channel.gone or incoming is None or outgoing is None:
            return
        packet = incoming.next()
        if packet is not None and packet.end and not packet.body:
            self.processed(channel)
        if channel.gone:
            return
        is_unread = incoming.waiting > 0
        if outgoing.acked == outgoing.next_seq - 1:
            if is_unread:
                self._end_closed(channel)
            elif has_advanced or channel.dies_at is None:
                channel.dies_at = state.now + state.linger
        elif is_unread and (has_advanced or channel.dies_at is None):
            channel.dies_at = state.now + CLOSE_TIMEOUT
        if not channel.gone:
            state.arm(channel)

    def close_timed_out(self, channel: EngineChannel) -> None:
        """End a closed channel that has waited for too long."""
        outgoing = channel.outgoing
        if outgoing is None or outgoing.acked == outgoing.next_seq - 1:
            self._end_closed(channel)
        else:
            text = f"the peer went on sending, and processed nothing of ours for {CLOSE_TIMEOUT} s"
            self._state.break_silently(channel, CLOSED)
            self._state.events.append(Broken(channel, Cause.TIMEOUT, text))

    def _end_closed(self, channel: EngineChannel) -> None:
        self._state.break_silently(channel, CLOSED)
        self._state.events.append(Closed(channel))

    # --- unreliable channels

    def _receive_unreliable(self, channel: EngineChannel, packet: Packet) -> None:
        state = self._state
        if packet.seq is not None or packet.ack is not None or packet.miss_fault:
            state.fault(Fault.MISPLACED, f"channel {channel.id} is unreliable, and a packet came with seq or ack")
            return
        if packet.type is not None and packet.type != channel.type:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: a second type")
            return
        if channel.peer_ended:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: a packet after its end")
            return
        channel.heard_at = state.now
        if channel.ours:
            channel.announced = True
        if (packet.body or not packet.end) and not channel.closing:
            state.events.append(Message(channel, packet.body))
        self._end_unreliable(channel, packet)

    def _end_unreliable(self, channel: EngineChannel, packet: Packet) -> None:
        if packet.end:
            channel.peer_ended = True
            self._state.events.append(Ended(channel))
            self._state.close_if_over(channel)


def too_long(type: str) -> str:
    return f"a type of {len(type)} characters, {TYPE_MOST} are allowed"


def name_of(packet: Packet) -> str:
    """Return the name of a packet for an observer."""
    if packet.err is not None:
        return "err"
    if packet.end:
        return "end"
    if packet.type is not None:
        return "open"
    return "ack" if packet.seq is None and packet.ack is not None else "data"
