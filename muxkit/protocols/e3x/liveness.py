"""Pings and goodbyes, which the engine sends on channels of two reserved types.

The specification has no ping and no packet that ends a session, and a packet link doesn't signal that the peer has
left. So muxkit reserves two types of channels, which are not in the specification. Applications can't open channels of
these types, and never see them.

    muxkit.ping   The channel ends with its first packet. The peer acks the packet as on every channel, and the ack is
                  the answer to the ping.
    muxkit.bye    The sender of this channel leaves the session, and the peer answers with an err. The body of the first
                  packet depends on whether the sender has processed every message. If it has, the body is a 0 byte and
                  then the id and the last ack of each channel. The body includes the acks because the last ack of a
                  channel may have been lost, and the sender won't be there to send the ack again. If the sender hasn't
                  processed every message, the body is the reason for leaving, or a 1 byte if there is no reason.

A peer that doesn't know these types answers with an err, which counts as an answer.
"""

from __future__ import annotations

import struct
from typing import Final

from muxkit._errors import LocalProtocolError
from muxkit.core import Reason
from muxkit.core.events import GoingAway, Opened, Pong, Probed
from muxkit.protocols.e3x.events import Broken, Cause, Delivered, GivenUp, GoodbyeHeard, PingLost
from muxkit.protocols.e3x.openings import Openings
from muxkit.protocols.e3x.packets import BYE, PING, Packet, encode_packet
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.protocols.e3x.silence import Timer
from muxkit.protocols.e3x.state import EngineChannel, State

IN_ORDER: Final = b"\0"  # first byte of a goodbye whose sender has processed every message
WITHOUT_REASON: Final = b"\1"  # body of a goodbye whose sender hasn't processed every message and gives no reason
REASON_MOST: Final = 512  # maximum size of the reason in bytes
BYE_HEAD: Final = 64  # upper bound for the size of a goodbye's packet without the body
ACKS_MOST: Final = 8000  # maximum number of acks in a goodbye
ACKS_MOST_IN_PACKET: Final = 20  # maximum number of acks in a goodbye that must fit into one packet
_ACK: Final = struct.Struct("!II")


class Liveness:
    """Sends and answers pings and goodbyes."""

    def __init__(self, state: State, openings: Openings) -> None:
        self.peer_left: bool = False
        """True once the peer has said goodbye after it had processed every message."""
        self._state = state
        self._openings = openings
        self._pings: dict[int, object] = {}  # maps the id of each unanswered ping's channel to the ping's key
        self._round_trip: object = None  # the key of the ping that measures the round trip for the receive windows
        self._goodbye: EngineChannel | None = None  # the channel of our goodbye
        self._bye: EngineChannel | None = None  # the channel of the peer's goodbye

    def handle_events(self) -> None:
        """Handle the queued events of reserved channels."""
        events, self._state.own = self._state.own, []
        for event in events:
            match event:
                case Opened(EngineChannel() as channel, body):
                    self._answer(channel, body)
                case Delivered(EngineChannel() as channel):
                    self._answered(channel)
                case Broken(EngineChannel() as channel, cause):
                    self._broken(channel, is_answer=cause is Cause.PEER)
                case _:
                    pass  # further messages and ends on reserved channels have no meaning

    # --- sending pings and goodbyes

    def ping(self, key: object) -> None:
        """Send a ping. The peer's answer is reported as a `Pong` with the same key.

        Raises `LocalProtocolError` if no channel can be opened.
        """
        channel = self._ask(PING)
        self._pings[channel.id] = key

    def measure(self) -> None:
        """Send a ping that measures the round trip for the receive windows, unless there is no free channel slot."""
        state = self._state
        if self._openings.places > 0:
            key = object()
            self.ping(key)
            state.budget.round_trip.asked(state.now)
            self._round_trip = key
            state.happened.append(Probed(key))

    def say_goodbye(self) -> None:
        """Say goodbye after this side has processed every message. The answer is reported as `GoodbyeHeard`."""
        acks = self._final_acks()[: ACKS_MOST if self._state.config.frag else ACKS_MOST_IN_PACKET]
        self._goodbye = self._ask(BYE, IN_ORDER + b"".join(_ACK.pack(id, ack) for id, ack in acks))

    def _ask(self, type: str, body: bytes = b"") -> EngineChannel:
        return self._openings.open(type, body, reliable=True, id=None, end=True)

    def farewell(self, reason: Reason | None) -> bytes:
        """Return a packet with a goodbye, which the caller sends immediately, before all queued packets.

        `reason` is None if this side has processed every message. The packet isn't sent again if it gets lost. Returns
        `b""` if no id is left for the channel of the goodbye.
        """
        state = self._state
        body = IN_ORDER
        if reason is not None:
            body = reason.encode(min(REASON_MOST, state.packet - BYE_HEAD)) or WITHOUT_REASON
        try:
            return encode_packet(Packet(state.table.allocate(), BYE, seq=1, end=True, body=body))
        except LocalProtocolError:  # no id is left
            return b""

    def _final_acks(self) -> list[tuple[int, int]]:
        """Return the last processed seq of each live channel and of each channel that still has a tombstone."""
        state = self._state
        live = [(channel.id, channel.receiver.processed) for channel in state.table]
        ended = [(id, tombstone.processed) for id, tombstone in state.tombstones.items()]
        return [(id, ack) for id, ack in live + ended if ack > 0]

    def _answered(self, channel: EngineChannel) -> None:
        """Handle the answer to a ping or a goodbye: the peer has acked or refused its channel."""
        if channel.id in self._pings:
            key = self._pings.pop(channel.id)
            if key is self._round_trip:
                self._state.budget.round_trip.answered(self._state.now)
            self._state.happened.append(Pong(key))
        elif channel is self._goodbye:
            self._goodbye = None
            self._state.happened.append(GoodbyeHeard())

    def _broken(self, channel: EngineChannel, *, is_answer: bool) -> None:
        """Handle the loss of a ping's or goodbye's channel. If the peer broke the channel, that is an answer."""
        if is_answer:
            self._answered(channel)
        elif channel.id in self._pings:
            key = self._pings.pop(channel.id)
            if key is self._round_trip:
                self._state.budget.round_trip.gave_up()
            self._state.happened.append(PingLost(key))
        elif channel is self._goodbye:
            self._goodbye = None
            self._state.happened.append(GoodbyeHeard())

    # --- answering the peer

    def _answer(self, channel: EngineChannel, body: bytes) -> None:
        """Answer a channel of a reserved type that the peer has opened."""
        state = self._state
        if not channel.is_reliable:  # one packet from a forged address is enough to open an unreliable channel
            state.err(channel, "reliable only")
        elif channel.type == PING:
            channel.receiver.done()
            channel.sender.finish()
        elif not body.startswith(IN_ORDER):
            state.happened.append(GivenUp(Reason.decode(body)))
        elif self._bye is not None:
            state.err(channel, "bye")
        else:
            channel.receiver.accept()
            for id, ack in _ACK.iter_unpack(body[1 : 1 + (len(body) - 1) // _ACK.size * _ACK.size]):
                self._take_final_ack(id, ack)
            self._bye = channel
            self.peer_left = True
            state.silence.stop()
            state.happened.append(GoingAway(Reason()))

    def _take_final_ack(self, id: int, ack: int) -> None:
        """Apply the last ack of a channel, which the peer's goodbye contains."""
        channel = self._state.table.get(id)
        sender = None if channel is None else channel.sender
        if isinstance(sender, ReliableSender) and sender.acked < ack:
            sender.channel.receiver.receive(Packet(id, ack=ack))

    def answer_goodbye(self) -> None:
        """Answer the peer's goodbye. The peer waits for the answer before it hangs up."""
        if self._bye is not None:
            self._state.update_time()
            self._state.err(self._bye, "bye")

    # --- keepalive

    def handle_time(self, now: float) -> None:
        """Ping a peer that has been silent, and report `Silent` for a peer that doesn't answer."""
        state = self._state
        due = state.silence.deadlines.expired(now)
        if Timer.ANSWER in due:
            state.suspect()
        if not (Timer.ASK in due and state.silence.is_due(now)):
            return
        if self._openings.places > 0:
            key = object()
            try:
                self.ping(key)
            except LocalProtocolError:  # every id has been used, so no channel can be opened for a ping
                return
            state.happened.append(Probed(key))
        # If there was no free slot for a ping, still start the timeout. Any packet of the peer stops the timeout.
        state.silence.asked(now)
