"""How channels begin: `Openings` opens channels of this side, and admits or refuses channels of the peer.

If a packet belongs to a channel that isn't in the table, there are four cases. The packet opens the channel, it has
overtaken the packet that opens the channel, it belongs to a channel that has ended (whose tombstone answers it), or it
comes from a forged address.

`Limits.channels` and `Limits.backlog` limit how many channels a peer may open. `Limits.half_open` limits the channels
whose first packet is missing. The rate of errs that refuse channels is limited as well, and that of refused pings apart
from the others.
"""

from __future__ import annotations

from muxkit._errors import LocalProtocolError
from muxkit.core import TokenBucket
from muxkit.core.events import Opened
from muxkit.protocols.e3x.events import Fault
from muxkit.protocols.e3x.packets import ID_MOST, RESERVED, TYPE_MOST, Packet, quoted
from muxkit.protocols.e3x.receive import ReliableReceiver, UnreliableReceiver
from muxkit.protocols.e3x.send import ReliableSender, UnreliableSender
from muxkit.protocols.e3x.state import EngineChannel, State, too_long


class Openings:
    """Opens channels of this side, and admits or refuses channels of the peer."""

    def __init__(self, state: State) -> None:
        self.state: State = state

    # --- channels of this side

    @property
    def places(self) -> int:
        """How many more channels this side may open."""
        return self.state.table.census.places

    def open(self, type: str, body: bytes, *, reliable: bool, id: int | None, end: bool) -> EngineChannel:
        """Open a channel and queue its first packet, which contains `body`. With `end`, that is also the last packet.

        If `id` is None, the next free id is used.

        Raises:
            LocalProtocolError: The channel can't be opened with these arguments, or a limit has been reached.
        """
        state = self.state
        if not type:
            raise LocalProtocolError("invalid type of a channel: expected a name, got an empty string")
        if len(type) > TYPE_MOST:
            raise LocalProtocolError(too_long(type))
        if reliable and type in state.config.unreliable_types:
            raise LocalProtocolError(
                f"channels of type {type!r} are unreliable on both sides; open it with reliable=False"
            )
        try:
            quoted(type)
        except UnicodeEncodeError:
            raise LocalProtocolError(f"invalid type {type!r}: expected text that UTF-8 can encode") from None
        if id is None:
            state.table.census.check_ours()
            id = state.table.allocate()
        elif not 1 <= id <= ID_MOST or not state.is_ours(id):
            side = "odd" if state.odd else "even"
            raise LocalProtocolError(
                f"invalid channel id {id}: expected an {side} one from {1 if state.odd else 2} to {ID_MOST}"
            )
        elif id in state.tombstones:
            raise LocalProtocolError(f"channel id {id} was used recently; choose another one")
        state.update_time()
        channel = self._new_channel(id, type, ours=True, reliable=reliable)
        channel.sender.check_size(len(body))
        state.table.add_ours(id, channel)
        if state.observer is not None:
            state.observer.state(f"channel {id}", "open")
        channel.sender.queue(body, end=end, is_message=bool(body))
        state.messages_sent += bool(body) and not reliable  # the opening of a reliable channel isn't a message
        return channel

    def _new_channel(self, id: int, type: str, *, ours: bool, reliable: bool) -> EngineChannel:
        state = self.state
        channel = EngineChannel(id, type, ours=ours, is_reliable=reliable, now=state.now)
        if reliable:
            channel.sender = sender = ReliableSender(state, channel)
            channel.receiver = ReliableReceiver(state, channel, sender, capacity=state.window)
        else:
            channel.sender = UnreliableSender(state, channel)
            channel.receiver = UnreliableReceiver(state, channel)
        return channel

    # --- packets of channels that are not in the table

    def receive(self, packet: Packet) -> None:
        """Apply a packet whose channel is not in the table."""
        state, id = self.state, packet.channel
        tombstone = state.tombstone(id)
        if tombstone is not None:
            if packet.ack is not None and tombstone.acked < packet.ack <= tombstone.sent:
                # The peer has acked a packet of a channel that this side has given up in the meantime.
                tombstone.acked = packet.ack
                state.silence.heard(state.now)
            if packet.seq is not None and packet.err is None:  # our last ack or our err must have been lost
                if tombstone.ack is not None:
                    state.answers[id] = None
                elif tombstone.err is not None and state.refusals.take(state.now):
                    state.errs[id] = tombstone.err
            state.fault(Fault.DUPLICATE, f"channel {id} is over")
        elif packet.err is not None or state.is_ours(id) or id in state.used:
            state.fault(Fault.UNKNOWN, f"channel {id} does not exist")
        elif packet.ack is not None and packet.ack > 0:
            state.fault(Fault.UNSENT, f"channel {id}: ack {packet.ack} where nothing was sent")
        elif packet.seq is None and packet.type is not None:
            self._open_unreliable(packet, packet.type)
        elif packet.seq == 1 and packet.type is not None:
            self._open_reliable(packet, packet.type)
        elif packet.seq == 1:
            state.fault(Fault.MISPLACED, f"channel {id}: a first packet without a type")
        elif packet.seq is not None and state.config.reliable and packet.seq <= state.window:
            self._await_opening(packet)
        else:
            state.fault(Fault.UNKNOWN, f"channel {id} does not exist")

    def _open_unreliable(self, packet: Packet, type: str) -> None:
        state = self.state
        if len(type) > TYPE_MOST:
            self._refuse(packet.channel, Fault.MISPLACED, too_long(type), state.refusals)
            return
        channel = self._admit(packet.channel, type, reliable=False)
        if channel is None:
            return
        channel.announced = True
        state.silence.heard(state.now)
        receiver = channel.receiver
        assert isinstance(receiver, UnreliableReceiver)
        state.report(channel, Opened(channel, packet.body))
        receiver.receive_end(packet)

    def _open_reliable(self, packet: Packet, type: str) -> None:
        state = self.state
        refusal = state.refusal_of(type)
        if refusal is not None:
            self._refuse(packet.channel, Fault.MISPLACED, refusal, state.refusals)
            return
        if len(packet.body) > state.room_next:
            state.fault(Fault.FULL, f"channel {packet.channel}: no memory left for its first packet")
            return
        channel = self._admit(packet.channel, type, reliable=True)
        if channel is not None:
            state.used.add(packet.channel)
            channel.receiver.receive(packet)

    def _await_opening(self, packet: Packet) -> None:
        """Keep a packet that has arrived before the first packet of its channel.

        The channel becomes `unopened`, and its acks list the first packet as missing.
        """
        state = self.state
        channel = self._admit(packet.channel, "", reliable=True, answers=False)
        if channel is None:
            return
        while len(state.unopened) >= state.limits.half_open:
            state.drop_unopened(next(iter(state.unopened.values())))
            what = f"{state.limits.half_open} channels wait for their first packet"
            state.fault(Fault.FLOOD, what, limit="half_open")
        state.unopened[channel.id] = channel
        channel.dies_at = state.now + state.limits.handshake
        channel.receiver.receive(packet)

    def _admit(self, id: int, type: str, *, reliable: bool, answers: bool = True) -> EngineChannel | None:
        """Add a channel of the peer to the table, or return None if a limit has been reached."""
        state = self.state
        census = state.table.census
        if census.theirs >= state.limits.channels or not census.has_backlog_room:
            limit = "backlog" if census.theirs < state.limits.channels else "channels"
            text = f"{census.theirs} channels, {census.waiting} not taken: Limits({limit})"
            if answers:
                pace = state.ping_refusals if type in RESERVED else state.refusals
                self._refuse(id, Fault.FLOOD, text, pace, limit=limit)
            else:
                state.fault(Fault.FLOOD, f"channel {id}: {text}", limit=limit)
            return None
        channel = self._new_channel(id, type, ours=False, reliable=reliable)
        state.table.add_theirs(id, channel)
        if state.observer is not None:
            state.observer.state(f"channel {id}", "open")
        return channel

    def _refuse(self, id: int, fault: Fault, text: str, pace: TokenBucket, *, limit: str | None = None) -> None:
        """Count a fault, and queue an err for the peer if `pace` allows one."""
        state = self.state
        state.fault(fault, f"channel {id}: {text}", limit=limit)
        if len(state.errs) < state.limits.tombstones and pace.take(state.now):
            state.errs[id] = text if fault is not Fault.FLOOD else "too many channels"
