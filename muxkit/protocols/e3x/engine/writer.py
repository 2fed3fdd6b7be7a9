"""Write packets: errs, then packets to send again, then new ones in turns, and the acks that no packet carried.

An `ack` in a packet with a seq asks the peer for a prompt ack. So a packet carries one when it tells the peer something
new, and otherwise about four times a round trip and before a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.protocols.e3x.engine.events import Writable
from muxkit.protocols.e3x.packets import ack_part, head_of, join_packet, quoted

if TYPE_CHECKING:
    from muxkit.protocols.e3x.engine.channel import EngineChannel, Incoming, Piece
    from muxkit.protocols.e3x.engine.state import State

PACKETS_AT_ONCE = 256  # packets that one call of `pull` returns at most
ACK_SIZE = len(b',"ack":4294967295')
MISS_SIZE = len(b',"miss":[]')
DELTA_SIZE = len(b"4294967295,")
LISTED_SIZE = 4  # bytes of one delta of a long list, on average
ASK_SIZE = ACK_SIZE + MISS_SIZE + len(b"99999")  # kept free in each packet for an ack


def overhead(channel: EngineChannel, seq: int | None, *, frag: int = 0, end: bool = False) -> int:
    """Return the bytes of a packet of this channel beside its body."""
    # An unreliable channel tells its type until the peer answers on it: the first packet may be lost.
    type = channel.type if channel.ours and (seq is None or seq == 1) else None
    return 4 + len(head_of(channel.id, type, seq, end, frag)) + (0 if seq is None else ASK_SIZE)


class PacketWriter:
    """The sending part of an engine."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def is_waiting(self) -> bool:
        """Whether packets wait that the rate governs."""
        return bool(self._state.resends or self._state.line)

    @property
    def is_owing(self) -> bool:
        """Whether packets wait that are sent at any rate: errs and acks."""
        return bool(self._state.errs or self._state.acking or self._state.answers)

    def pull(self, now: float) -> list[bytes]:
        """Take out the packets to send now."""
        state = self._state
        out: list[bytes] = []
        self._write_errs(out)
        had = state.unsent
        while len(out) < PACKETS_AT_ONCE and (state.resends or state.line):
            packet = self._take_resend(now) if state.resends else self._take_new(now)
            if packet is None:
                if not self._state.congestion.may_send(now):
                    break
                continue
            state.congestion.sent(len(packet), now)
            out.append(packet)
        self._write_acks(out, now)
        if state.unsent < had:
            self._report_writable()
        for packet in out:
            state.counters["bytes_sent"] += len(packet)
        state.counters["packets_sent"] += len(out)
        return out

    # --- packets with a body

    def _take_resend(self, now: float) -> bytes | None:
        """Take the next packet to send again; None if it is not needed any more, or not allowed yet."""
        state = self._state
        channel, piece = state.resends[0]
        if channel.gone or channel.outgoing is None or channel.outgoing.take_back(piece):
            state.resends.popleft()
            return None
        if not self._state.congestion.may_send(now):
            return None
        state.resends.popleft()
        state.counters["resent"] += 1
        return self._encode(channel, piece, now)

    def _take_new(self, now: float) -> bytes | None:
        """Take the next new packet, of the channel whose turn it is; None if it has none, or none is allowed yet."""
        state = self._state
        channel = state.line[0]
        if channel.gone:
            channel.in_line = False
            state.line.popleft()
            return None
        if channel.outgoing is None:
            return self._take_datagram(channel, now)
        piece = channel.outgoing.next()
        if piece is None:
            channel.in_line = False
            state.line.popleft()
            return None
        if not self._state.congestion.may_send(now):
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
        # An opening carries no ack: nothing was received on its channel.
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

    def _take_datagram(self, channel: EngineChannel, now: float) -> bytes | None:
        """Take the next message of an unreliable channel."""
        state = self._state
        if not channel.datagrams:
            channel.in_line = False
            state.line.popleft()
            state.close_if_over(channel)
            return None
        if not self._state.congestion.may_send(now):
            return None
        state.line.rotate(-1)
        body, end = channel.datagrams.popleft()
        channel.queued -= len(body)
        state.unsent -= len(body)
        type = channel.type if channel.ours and not channel.announced else None
        self._observe(channel, "end" if end else "data", len(body))
        return join_packet(b"{%b}" % head_of(channel.id, type, None, end, 0), body)

    # --- packets without a body

    def _write_errs(self, out: list[bytes]) -> None:
        errs = self._state.errs
        while errs and len(out) < PACKETS_AT_ONCE:
            id = next(iter(errs))
            out.append(join_packet(b'{"c":%d,"err":%b}' % (id, quoted(errs.pop(id)))))

    def _write_acks(self, out: list[bytes], now: float) -> None:
        """Write acks at any rate: they are small, and the peer waits for them."""
        state = self._state
        while state.acking and len(out) < PACKETS_AT_ONCE:
            channel = state.acking.pop(next(iter(state.acking)))
            assert channel.incoming is not None
            head = head_of(channel.id, None, None, False, 0)
            part = self._ack(channel.incoming, now, state.packet - 4 - len(head), wants_miss=True)
            out.append(join_packet(b"{%b%b}" % (head, part)))
            self._observe(channel, "ack", 0)
            state.arm(channel)
        while state.answers and len(out) < PACKETS_AT_ONCE:
            id = next(iter(state.answers))
            del state.answers[id]
            tombstone = state.tombstone(id)
            if tombstone is not None:
                out.append(join_packet(b"{%b%b}" % (head_of(id, None, None, False, 0), ack_part(tombstone.ack, None))))

    def _ack(self, incoming: Incoming, now: float, room: int, *, wants_miss: bool) -> bytes:
        """Encode `ack` and, if needed, `miss` in at most `room` bytes; empty if they do not fit."""
        left = room - ACK_SIZE - MISS_SIZE
        # The first and the last delta may be long, the others are short: try a long list, then shorter ones.
        for most in ((left - 2 * DELTA_SIZE) // LISTED_SIZE, left // DELTA_SIZE, 2, 1):
            fields = incoming.ack(most, wants_miss=wants_miss) if most > 0 else None
            if fields is not None and len(part := ack_part(*fields)) <= room:
                incoming.mark_acked(now)
                return part
        return b""

    def _report_writable(self) -> None:
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
    """Whether `size` bytes more may be queued; an empty queue takes any message, so no channel waits for another."""
    if channel.outgoing is None:
        return True
    unsent = channel.outgoing.unsent
    return unsent == 0 or (unsent + size <= state.limits.channel_first and state.unsent + size <= state.limits.outbox)
