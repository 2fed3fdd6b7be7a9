"""Pings and goodbyes, by channels of reserved types.

The document has neither a ping nor an end of a session, and a packet link has no end of its own. So, and this is not in
the document, two types of channels are reserved. Applications can't open them and never see them.

    muxkit.ping   ends with its opening, and is answered with an ack, as every channel is
    muxkit.bye    tells that its sender leaves. If the sender has processed everything, the body is 0, then the id and
                  the last ack of each channel, because the last acks may have been lost and are not sent again.
                  Otherwise it is something else: the reason, if there is one. The answer is an err

A peer that knows neither type answers with an err, which counts as an answer.
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

IN_ORDER: Final = b"\0"  # how the body of a goodbye begins that is in order
WITHOUT_REASON: Final = b"\1"  # the body of a goodbye that is not in order, and gives no reason
REASON_MOST: Final = 512  # bytes
BYE_HEAD: Final = 64  # bytes of the packet of a goodbye beside its body
ACKS_MOST: Final = 8000  # channels whose last acks a goodbye tells
ACKS_MOST_IN_PACKET: Final = 20  # the same if it must fit into one packet
_ACK: Final = struct.Struct("!II")


class Liveness:
    """Sends and answers pings and goodbyes."""

    def __init__(self, state: State, openings: Openings) -> None:
        self.peer_left: bool = False
        """True once the peer has left in order."""
        self._state = state
        self._openings = openings
        self._pings: dict[int, object] = {}  # the keys of pings under way, by the ids of their channels
        self._round_trip: object = None  # of these, the one that measures the round trip for the windows
        self._goodbye: EngineChannel | None = None  # ours
        self._bye: EngineChannel | None = None  # the peer's

    def handle_events(self) -> None:
        """Act on what has happened on the session's own channels."""
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
                    pass  # messages and ends on these channels mean nothing

    # --- questions

    def ping(self, key: object) -> None:
        """Ask the peer for an answer, which is reported as a `Pong`; raises `LocalProtocolError` if no id is left."""
        channel = self._ask(PING)
        self._pings[channel.id] = key

    def measure(self) -> None:
        """Ask the peer for an answer, to measure the round trip for the windows."""
        state = self._state
        if self._openings.places > 0:
            key = object()
            self.ping(key)
            state.budget.round_trip.asked(state.now)
            self._round_trip = key
            state.happened.append(Probed(key))

    def say_goodbye(self) -> None:
        """Tell the peer that this side leaves in order. The answer is reported as `GoodbyeHeard`."""
        acks = self._final_acks()[: ACKS_MOST if self._state.config.frag else ACKS_MOST_IN_PACKET]
        self._goodbye = self._ask(BYE, IN_ORDER + b"".join(_ACK.pack(id, ack) for id, ack in acks))

    def _ask(self, type: str, body: bytes = b"") -> EngineChannel:
        return self._openings.open(type, body, reliable=True, id=None, end=True)

    def farewell(self, reason: Reason | None) -> bytes:
        """Return a packet that tells that this side leaves, past all queues; None says that it leaves in order.

        It is not sent again if it is lost.
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
        """Return the last processed seq of each channel, with those that ended lately."""
        state = self._state
        live = [(channel.id, channel.receiver.processed) for channel in state.table]
        ended = [(id, tombstone.processed) for id, tombstone in state.tombstones.items()]
        return [(id, ack) for id, ack in live + ended if ack > 0]

    def _answered(self, channel: EngineChannel) -> None:
        """The peer has processed or refused a channel that asked it."""
        if channel.id in self._pings:
            key = self._pings.pop(channel.id)
            if key is self._round_trip:
                self._state.budget.round_trip.answered(self._state.now)
            self._state.happened.append(Pong(key))
        elif channel is self._goodbye:
            self._goodbye = None
            self._state.happened.append(GoodbyeHeard())

    def _broken(self, channel: EngineChannel, *, is_answer: bool) -> None:
        """A channel that asked the peer is broken; an err by the peer is an answer."""
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

    # --- answers

    def _answer(self, channel: EngineChannel, body: bytes) -> None:
        """Answer a channel of a reserved type that the peer has opened."""
        state = self._state
        if not channel.is_reliable:  # a forged packet could open an unreliable one
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
        """Apply the last ack of a channel by a peer that leaves."""
        channel = self._state.table.get(id)
        sender = None if channel is None else channel.sender
        if isinstance(sender, ReliableSender) and sender.acked < ack:
            sender.channel.receiver.receive(Packet(id, ack=ack))

    def answer_goodbye(self) -> None:
        """Answer the peer's goodbye, for which it waits before it hangs up."""
        if self._bye is not None:
            self._state.update_time()
            self._state.err(self._bye, "bye")

    # --- silence

    def handle_time(self, now: float) -> None:
        """Ask a peer that is silent, and give up one that does not answer."""
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
            except LocalProtocolError:  # every id was used, so no ping can be sent
                return
            state.happened.append(Probed(key))
        state.silence.asked(now)  # without a place for a ping, whatever the peer sends is an answer
