"""What goes out next? Errs, then what must go again, then what is new, in turns; and the acks that nothing carried.

An `ack` in a packet with a seq asks the peer for a prompt ack, so we put one there when there is news for the peer,
and otherwise only as often as we want to hear: some four times a round trip, and in the last packet before silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.protocols.e3x.engine.events import Writable
from muxkit.protocols.e3x.packets import ack_part, head_of, join_packet, quoted

if TYPE_CHECKING:
    from muxkit.protocols.e3x.engine._channel_old import EngineChannel
    from muxkit.protocols.e3x.engine.channel import Piece
    from muxkit.protocols.e3x.engine.receiving import Incoming
    from muxkit.protocols.e3x.engine.state import State

MOST = 256  # packets to give out at once
ACK_SIZE = len(b',"ack":4294967295')
MISS_SIZE = len(b',"miss":[]')
DELTA_SIZE = len(b"4294967295,")
LISTED_SIZE = 4  # bytes that one delta of a long list takes, about
ASK_SIZE = ACK_SIZE + MISS_SIZE + len(b"99999")  # kept free in each packet, for the question


def overhead(channel: EngineChannel, seq: int | None, *, frag: int = 0, end: bool = False) -> int:
    """Bytes of a packet of this channel that are not body."""
    # An unreliable channel names its type until the peer was heard on it: the first packet may be lost.
    type = channel.type if channel.ours and (seq is None or seq == 1) else None
    return 4 + len(head_of(channel.id, type, seq, end, frag)) + (0 if seq is None else ASK_SIZE)


class Departures:
    """The sending part of an engine."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def is_waiting(self) -> bool:
        """Is there anything that the rate holds back?"""
        return bool(self._state.resends or self._state.line)

    @property
    def is_owing(self) -> bool:
        """Is there anything that goes at once?"""
        return bool(self._state.errs or self._state.acking or self._state.answers)

    def pull(self, now: float) -> list[bytes]:
        state = self._state
        out: list[bytes] = []
        self._say_errs(out)
        had = state.unsent
        while len(out) < MOST and (state.resends or state.line):
            packet = self._resend(now) if state.resends else self._turn(now)
            if packet is None:
                if not self._may_send(now):
                    break
                continue
            state.congestion.sent(len(packet), now)
            out.append(packet)
        self._say_acks(out, now)
        if state.unsent < had:
            self._tell_writable()
        for packet in out:
            state.counters["bytes_sent"] += len(packet)
        state.counters["packets_sent"] += len(out)
        return out

    def _may_send(self, now: float) -> bool:
        return self._state.congestion.may_send(now)

    # --- packets with content

    def _resend(self, now: float) -> bytes | None:
        """The next packet that goes again; None if it is not wanted any more, or not yet allowed."""
        state = self._state
        channel, piece = state.resends[0]
        if channel.gone or channel.outgoing is None or channel.outgoing.take_back(piece):
            state.resends.popleft()
            return None
        if not self._may_send(now):
            return None
        state.resends.popleft()
        state.counters["resent"] += 1
        return self._encode(channel, piece, now)

    def _turn(self, now: float) -> bytes | None:
        """The next new packet, of the channel whose turn it is; None if it has none, or may not send yet."""
        state = self._state
        channel = state.line[0]
        if channel.gone:
            channel.in_line = False
            state.line.popleft()
            return None
        if channel.outgoing is None:
            return self._unreliable(channel, now)
        piece = channel.outgoing.next()
        if piece is None:
            channel.in_line = False
            state.line.popleft()
            return None
        if not self._may_send(now):
            return None
        state.line.rotate(-1)
        state.unsent -= len(piece.body)
        return self._encode(channel, piece, now)

    def _encode(self, channel: EngineChannel, piece: Piece, now: float) -> bytes:
        outgoing, incoming = channel.outgoing, channel.incoming
        assert outgoing is not None
        assert incoming is not None
        outgoing.mark_sent(piece, now)
        head = head_of(channel.id, piece.type, piece.seq, piece.end, piece.frag)
        pace = self._state.congestion
        wants = outgoing.wants_ack(piece, now, pace.ask_pause, pace.round_trip)
        # The opening says nothing about the other direction: there is nothing to say.
        if piece.type is None and (wants or incoming.owes_news):
            room = self._state.packet - 4 - len(head) - len(piece.body)
            part = self._ack(incoming, now, room, wants_miss=False)
            if part:
                head += part
                self._state.acking.pop(channel.id, None)
                outgoing.mark_asked(piece, now)
        self._state.arm(channel)
        self._observe(channel, "end" if piece.end else "open" if piece.type else "data", len(piece.body))
        return join_packet(b"{%b}" % head, piece.body)

    def _unreliable(self, channel: EngineChannel, now: float) -> bytes | None:
        state = self._state
        if not channel.datagrams:
            channel.in_line = False
            state.line.popleft()
            state.close_if_over(channel)
            return None
        if not self._may_send(now):
            return None
        state.line.rotate(-1)
        body, end = channel.datagrams.popleft()
        channel.queued -= len(body)
        state.unsent -= len(body)
        type = channel.type if channel.ours and not channel.announced else None
        self._observe(channel, "end" if end else "data", len(body))
        return join_packet(b"{%b}" % head_of(channel.id, type, None, end, 0), body)

    # --- packets without

    def _say_errs(self, out: list[bytes]) -> None:
        errs = self._state.errs
        while errs and len(out) < MOST:
            id = next(iter(errs))
            out.append(join_packet(b'{"c":%d,"err":%b}' % (id, quoted(errs.pop(id)))))

    def _say_acks(self, out: list[bytes], now: float) -> None:
        """Acks are not held back by the rate: they are small, and others wait for them."""
        state = self._state
        while state.acking and len(out) < MOST:
            channel = state.acking.pop(next(iter(state.acking)))
            assert channel.incoming is not None
            head = head_of(channel.id, None, None, False, 0)
            part = self._ack(channel.incoming, now, state.packet - 4 - len(head), wants_miss=True)
            out.append(join_packet(b"{%b%b}" % (head, part)))
            self._observe(channel, "ack", 0)
            state.arm(channel)
        while state.answers and len(out) < MOST:
            id = next(iter(state.answers))
            del state.answers[id]
            tombstone = state.buried(id)
            if tombstone is not None:
                out.append(join_packet(b"{%b%b}" % (head_of(id, None, None, False, 0), ack_part(tombstone.ack, None))))

    def _ack(self, incoming: Incoming, now: float, room: int, *, wants_miss: bool) -> bytes:
        """`ack` and perhaps `miss` in at most `room` bytes; empty if it cannot be said."""
        left = room - ACK_SIZE - MISS_SIZE
        # The first delta and the last may be long, those of a list are short: try generously, then surely.
        for most in ((left - 2 * DELTA_SIZE) // LISTED_SIZE, left // DELTA_SIZE, 2, 1):
            said = incoming.ack(most, wants_miss=wants_miss) if most > 0 else None
            if said is not None and len(part := ack_part(*said)) <= room:
                incoming.mark_acked(now)
                return part
        return b""

    def _tell_writable(self) -> None:
        state = self._state
        for channel in tuple(state.watching.values()):
            if channel.outgoing is not None and admits(state, channel, channel.outgoing.watched):
                del state.watching[channel.id]
                channel.outgoing.watched = 0
                state.events.append(Writable(channel))

    def _observe(self, channel: EngineChannel, name: str, size: int) -> None:
        if self._state.observer is not None:
            self._state.observer.frame("out", f"channel {channel.id}", name, size)


def admits(state: State, channel: EngineChannel, size: int) -> bool:
    """May `size` bytes more be queued? An empty queue takes any message, so that no channel waits for another."""
    if channel.outgoing is None:
        return True
    unsent = channel.outgoing.unsent
    return unsent == 0 or (unsent + size <= state.limits.channel_first and state.unsent + size <= state.limits.outbox)
