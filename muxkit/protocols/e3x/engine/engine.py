"""The e3x engine: received packets and commands go in, events and packets to send come out.

An `ack` in a packet with a seq asks the peer for a prompt ack. So a packet carries one when it tells the peer something
new, and otherwise about four times a round trip and before a pause.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.core import queue_of
from muxkit.protocols.e3x import packets
from muxkit.protocols.e3x.config import LEAST_PACKET, Config
from muxkit.protocols.e3x.engine.channel import EngineChannel, Incoming, Piece
from muxkit.protocols.e3x.engine.events import Cause, Event, Writable
from muxkit.protocols.e3x.engine.state import State, too_long

PACKETS_AT_ONCE = 256  # packets that one call of `pull` returns at most
ACK_SIZE = len(b',"ack":4294967295')
MISS_SIZE = len(b',"miss":[]')
DELTA_SIZE = len(b"4294967295,")
LISTED_SIZE = 4  # bytes of one delta of a long list, on average
ASK_SIZE = ACK_SIZE + MISS_SIZE + len(b"99999")  # kept free in each packet for an ack
COUNTERS = ("packets_sent", "packets_received", "bytes_sent", "bytes_received", "resent", "lost", "evicted")
ERR_MOST = 512  # bytes of an err that is sent
ERR_HEAD = len(b'{"c":4294967295,"err":}') + 2  # bytes of its packet beside the text


@attrs.frozen(kw_only=True, slots=False)  # a session adds its own to them
class Stats:
    """Counters of an engine since its beginning; times in seconds."""

    packets_sent: int
    packets_received: int
    bytes_sent: int
    bytes_received: int
    resent: int
    """Packets sent again."""
    lost: int
    """Packets that the peer reported missing."""
    evicted: int
    """Packets of unreliable channels that made way for newer ones before they were sent."""
    channels: int
    held: int
    """Bytes received and not processed."""
    unsent: int
    """Bytes queued and not sent."""
    faults: dict[str, int]
    """Dropped packets, by `Fault`."""
    round_trip: float | None
    """Smoothed; None before the first one was measured."""
    least_round_trip: float | None
    queue: float
    """The part of it that the path's queue causes."""
    rate: float
    """Bytes a second that may be sent, by the congestion control; without meaning over a byte stream."""
    falls: int
    """Times that the rate was lowered."""


CHANNEL_PRICE = 7 * 1024  # bytes of memory for a channel, its session objects and a task that handles it


class Engine(State):
    """One end of e3x towards one peer; a `DatagramEngine`.

    The connector is odd, the listener even. Commands take and return `EngineChannel` objects; each either does all of
    its work, or raises `LocalProtocolError` and changes nothing. No packet of a peer makes an engine raise or end.
    """

    unsent: int  # what the state counts

    def __init__(
        self, odd: bool, config: Config | None = None, *, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        super().__init__(odd, config or Config(), (limits or Limits()).at_price(CHANNEL_PRICE), observer)

    # --- state

    @property
    def channels(self) -> int:
        """Number of live channels of both sides."""
        return len(self.table)

    @property
    def frames(self) -> int:
        """Packets received."""
        return self.counters["packets_received"]

    @property
    def places(self) -> int:
        """Number of channels that this side may still open under its limit."""
        return self.table.census.places

    @property
    def packet_size(self) -> int:
        """The largest packet to send, in bytes. A new size holds for messages that are queued afterwards."""
        return self.packet

    @packet_size.setter
    def packet_size(self, size: int) -> None:
        if not LEAST_PACKET <= size <= 65_507:
            raise LocalProtocolError(f"packets of {size} bytes; from {LEAST_PACKET} to 65507 are possible")
        self.packet = size

    def channel(self, id: int) -> EngineChannel | None:
        """Return the live channel with this id."""
        return self.table.get(id)

    def quota(self, channel: EngineChannel) -> int:
        """Return the bytes that the next packet can carry: on an unreliable channel, the largest message."""
        seq = None if channel.outgoing is None else channel.outgoing.next_seq
        return self.packet - overhead(channel, seq, end=True)

    def stats(self) -> Stats:
        """Return the counters of now."""
        counters, congestion = self.counters, self.congestion
        return Stats(
            **{name: counters[name] for name in COUNTERS},
            channels=len(self.table),
            held=self.held,
            unsent=self.unsent,
            faults={fault.value: count for fault, count in self.faults.items()},
            round_trip=congestion.round_trip,
            least_round_trip=congestion.least_round_trip,
            queue=congestion.queue,
            rate=congestion.rate,
            falls=congestion.falls,
        )

    # --- packets

    def receive_datagram(self, data: bytes, now: float) -> None:
        """Parse and apply a received packet; never raises."""
        self.now: float = max(self.now, now)
        self.counters["packets_received"] += 1
        self.counters["bytes_received"] += len(data)
        self.receive(bytes(data))

    def events(self) -> Sequence[Event]:
        """Take the events since the last call, oldest first."""
        if not self.happened:
            return ()
        taken = self.happened
        self.happened: list[Event] = []
        self.reported.clear()
        return taken

    @property
    def owes(self) -> bool:
        """Whether acks wait, which are sent at any rate, or errs."""
        return bool(self.errs or self.acking or self.answers)

    def parting(self, type: str, body: bytes) -> bytes:
        """Return a packet that opens and ends a channel, past all queues; it is not sent again if it is lost."""
        return packets.encode_packet(packets.Packet(self.table.allocate(), type, seq=1, end=True, body=body))

    def final_acks(self) -> list[tuple[int, int]]:
        """Return the last processed seq of each channel, with those that ended lately, to tell a peer when leaving."""
        live = [(channel.id, channel.incoming.processed) for channel in self.table if channel.incoming]
        ended = [(id, tombstone.processed) for id, tombstone in self.tombstones.items()]
        return [(id, ack) for id, ack in live + ended if ack > 0]

    def take_final_ack(self, id: int, ack: int) -> None:
        """Apply the last ack of a channel by a peer that leaves."""
        channel = self.table.get(id)
        if channel is not None and channel.outgoing is not None and channel.outgoing.acked < ack:
            self.receive(packets.encode_packet(packets.Packet(id, ack=ack)))

    # --- time

    def tell_time(self, now: float) -> None:
        """Set the time for commands that follow a long silence."""
        self.now = max(self.now, now)

    def next_deadline(self) -> float | None:
        """When to call `handle_deadline`, and `datagrams_to_send` after it."""
        if self.acking or self.answers:
            return self.now
        moment = self.next_timer()
        if not (self.errs or self.resends or self.line):
            return moment
        # A channel in line may be unable to send because of its window; then this deadline has no effect, once.
        ready = max(self.congestion.free_at, self.now) if self.config.congestion else self.now
        if self.config.congestion and not (self.resends or self.line):
            ready = max(ready, self.now + self.err_pace.pause(self.now))
        return ready if moment is None else min(ready, moment)

    def handle_deadline(self, now: float) -> None:
        """Act on the timers that are due; harmless when early."""
        self.now = now = max(self.now, now)
        for channel in self.due_channels(now):
            self._handle_time(channel, now)
            if not channel.gone:
                self.arm(channel)

    def _handle_time(self, channel: EngineChannel, now: float) -> None:
        if self.observer is not None:
            self.observer.timer(f"channel {channel.id}")
        if channel.dies_at <= now:
            if channel.closing:
                self.close_timed_out(channel)
            elif channel.id in self.unopened:
                self.drop_unopened(channel)
            else:
                self.break_channel(channel, Cause.TIMEOUT, f"no end came for {self.linger} s after ours", tell=False)
            return
        incoming, outgoing = channel.incoming, channel.outgoing
        if channel.silent_at(self.config.timeout) <= now:
            text = f"nothing came for {self.config.timeout:g} s"
            self.break_channel(channel, Cause.TIMEOUT, text, tell=True)
            return
        if incoming is not None and incoming.ack_at <= now:
            # A channel without its first packet may be forged: its gaps are reported once.
            incoming.handle_time(now, 0.0 if channel.id in self.unopened else self.config.timeout)
            self.owe_ack(channel)
        if outgoing is not None and outgoing.probe_at <= now:
            self.resends.extendleft((channel, piece) for piece in reversed(outgoing.probes(now)))

    # --- opening

    def open(
        self, type: str, body: bytes = b"", *, reliable: bool = True, id: int | None = None, end: bool = False
    ) -> EngineChannel:
        """Open a channel; its first packet, which carries `body`, is queued at once. With `end` it is also the last."""
        if not type:
            raise LocalProtocolError("a channel needs a type")
        if len(type) > packets.TYPE_MOST:
            raise LocalProtocolError(too_long(type))
        if reliable and type in self.config.unreliable_types:
            raise LocalProtocolError(f"channels of type {type!r} are unreliable")
        try:
            packets.quoted(type)
        except UnicodeEncodeError:
            raise LocalProtocolError(f"type {type!r} is no text that can be sent") from None
        if id is None:
            self.table.census.check_ours()
            id = self.table.allocate()
        elif not 1 <= id <= packets.ID_MOST or not self.is_ours(id):
            side = "odd" if self.odd else "even"
            raise LocalProtocolError(f"channel {id}: ours are {side}, from {1 if self.odd else 2} to {packets.ID_MOST}")
        elif id in self.tombstones:
            raise LocalProtocolError(f"channel {id} was used a moment ago")
        channel = self.new_channel(id, type, ours=True, reliable=reliable)
        sizes = self._check_size(channel, len(body))
        self.table.add_ours(id, channel)
        if self.observer is not None:
            self.observer.state(f"channel {id}", "open")
        self._queue(channel, body, end, sizes)
        return channel

    # --- sending

    def admits(self, channel: EngineChannel, size: int) -> bool:
        """Whether a message of `size` bytes may be queued.

        An empty queue takes any message, so no channel waits for another; an unreliable channel always does.
        """
        if channel.outgoing is None or channel.gone:
            return not channel.gone
        unsent, limits = channel.outgoing.unsent, self.limits
        return unsent == 0 or (unsent + size <= limits.channel_first and self.unsent + size <= limits.outbox)

    def watch(self, channel: EngineChannel, size: int = 1) -> None:
        """Report `Writable` when a message of `size` bytes may fit."""
        if channel.outgoing is not None and not channel.gone:
            channel.outgoing.watched = size
            self.drained[channel.id] = channel  # to be looked at once, since there may be room already

    def send(self, channel: EngineChannel, body: bytes, *, end: bool = False) -> int:
        """Queue a message, with `end` the last one; return its receipt.

        On a reliable channel the message is delivered when a `Delivered` reaches the receipt. On an unreliable one the
        receipt is 0, and the oldest message is dropped if too much waits.
        """
        self._check_sending(channel)
        sizes = self._check_size(channel, len(body))
        if not self.admits(channel, len(body)):
            raise LocalProtocolError(
                f"channel {channel.id}: {len(body)} bytes beside those queued, "
                f"against Limits(channel_first={self.limits.channel_first}, outbox={self.limits.outbox})"
            )
        return self._queue(channel, body, end, sizes)

    def end(self, channel: EngineChannel) -> int:
        """End this side of a channel, after what is queued; return a receipt, as `send` does."""
        self._check_sending(channel)
        if channel.outgoing is not None and channel.outgoing.next_seq > packets.SEQ_MOST:
            raise LocalProtocolError(f"channel {channel.id}: no seq is left for an end; break it with err")
        return self._queue(channel, b"", True, self._body_sizes(channel, 0))

    def err(self, channel: EngineChannel, text: str) -> None:
        """Break a channel and tell the peer why; what is queued is dropped. Harmless when it is gone."""
        if not channel.gone:
            self.break_silently(channel, self._short(text) or "err", is_ordered=True)

    def done(self, channel: EngineChannel) -> None:
        """Count the last reported message of a channel as processed, with all that `take` gave; harmless when gone."""
        if channel.gone:
            return
        self.accept(channel)
        if channel.incoming is not None:
            if not channel.incoming.handed:
                raise LocalProtocolError(f"channel {channel.id}: nothing is being processed")
            for _ in range(channel.incoming.handed):
                self.processed(channel)
            self.deliver(channel)

    def accept(self, channel: EngineChannel) -> None:
        """Count a channel of the peer as accepted, without its first message as processed."""
        if not channel.gone and not channel.taken:
            channel.taken = True
            self.table.accept(channel.id)

    def close(self, channel: EngineChannel) -> None:
        """Discard what arrives from now on, and end this side; see `state`. Harmless when the channel is gone."""
        if channel.gone or channel.closing:
            return
        if not channel.ended:
            self.end(channel)
        self.discard(channel)

    def blame(self, channel: EngineChannel) -> None:
        """Count a failure of local work on a channel that the peer opened, as if the peer had broken it."""
        if not channel.ours:
            self.starts.broken_off(self.now)

    def _short(self, text: str) -> str:
        """Return as much of the text of an err as fits into a packet, and not more than `ERR_MOST` bytes."""
        short = text.encode(errors="replace")[:ERR_MOST].decode(errors="ignore")
        while (over := len(packets.quoted(short)) + ERR_HEAD - self.packet) > 0:
            short = short[: -max(1, over // 6)]  # a character may take six bytes
        return short

    def _check_sending(self, channel: EngineChannel) -> None:
        if channel.gone:
            raise LocalProtocolError(f"channel {channel.id} is gone")
        if channel.ended:
            raise LocalProtocolError(f"channel {channel.id} was ended")

    def _check_size(self, channel: EngineChannel, size: int) -> tuple[int, int]:
        """Raise `LocalProtocolError` for a message that cannot be sent; return its `_body_sizes`."""
        if channel.outgoing is None or not self.config.frag:
            room = self.quota(channel)
            if size > room:
                raise LocalProtocolError(
                    f"channel {channel.id}: {size} bytes; a packet of {self.packet} has room for {room}"
                )
            if channel.outgoing is None:
                return room, room
        if size > self.limits.message:
            raise LocalProtocolError(
                f"channel {channel.id}: {size} bytes against Limits(message={self.limits.message})"
            )
        first, other = self._body_sizes(channel, size)
        if first < 1:
            raise LocalProtocolError(f"a packet of {self.packet} bytes has no room beside type {channel.type[:64]!r}")
        seq = channel.outgoing.next_seq + packets.pieces_after(size, first, other)
        if seq > packets.SEQ_MOST:
            raise LocalProtocolError(
                f"channel {channel.id}: seq {seq} would be needed, {packets.SEQ_MOST} is the last; break it with err"
            )
        return first, other

    def _body_sizes(self, channel: EngineChannel, size: int) -> tuple[int, int]:
        """Return the bytes of body in the first packet of a message, and in each other one."""
        packet, seq = self.packet, 0 if channel.outgoing is None else channel.outgoing.next_seq
        whole = packet - overhead(channel, seq, end=True)
        if size <= whole:
            return whole, whole
        # Numbers are counted with as many digits as they can have in this message.
        frag, last = size, min(packets.SEQ_MOST, seq + size)
        first = packet - overhead(channel, seq, frag=frag, end=True)
        return first, packet - overhead(channel, max(2, last), frag=frag, end=True)

    def _queue(self, channel: EngineChannel, body: bytes, end: bool, sizes: tuple[int, int]) -> int:
        outgoing = channel.outgoing
        channel.ended = channel.ended or end
        self.queue_up(channel)
        if outgoing is None:
            channel.datagrams = queue_of(channel.datagrams)
            channel.datagrams.append((body, end))
            channel.queued += len(body)
            self.unsent += len(body)
            while channel.queued > self.limits.channel_first and len(channel.datagrams) > 1:
                size = len(channel.datagrams.popleft()[0])
                channel.queued -= size
                self.unsent -= size
                self.counters["evicted"] += 1
            if end:
                channel.dies_at = self.now + self.linger
                self.arm(channel)
            return 0
        for frag, piece in packets.cut(body, *sizes):
            type = channel.type if channel.ours and outgoing.next_seq == 1 else None
            outgoing.push(Piece(outgoing.next_seq, piece, type=type, end=end and frag == 0, frag=frag))
        self.unsent += len(body)
        return outgoing.next_seq - 1

    # --- writing packets

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        """Take out the packets to send now: errs, then packets to send again, then new ones in turns, then acks."""
        self.now = now = max(self.now, now)
        out: list[bytes] = []
        self._write_errs(out, now)
        had = self.unsent
        while len(out) < PACKETS_AT_ONCE and (self.resends or self.line):
            packet = self._take_resend(now) if self.resends else self._take_new(now)
            if packet is None:
                if not self.congestion.may_send(now):
                    break
                continue
            self.congestion.sent(len(packet), now)
            out.append(packet)
        self._write_acks(out, now)
        if self.unsent < had and (self.drained or self.crowded):
            self._report_writable()
        self.counters["bytes_sent"] += sum(map(len, out))
        self.counters["packets_sent"] += len(out)
        return out

    # --- packets with a body

    def _take_resend(self, now: float) -> bytes | None:
        """Take the next packet to send again; None if it is not needed any more, or not allowed yet."""
        channel, piece = self.resends[0]
        if channel.gone or channel.outgoing is None or channel.outgoing.take_back(piece):
            self.resends.popleft()
            return None
        if not self.congestion.may_send(now):
            return None
        self.resends.popleft()
        self.counters["resent"] += 1
        return self._encode(channel, piece, now)

    def _take_new(self, now: float) -> bytes | None:
        """Take the next new packet, of the channel whose turn it is; None if it has none, or none is allowed yet."""
        channel = self.line[0]
        piece = None if channel.outgoing is None else channel.outgoing.next()
        if channel.gone or (piece is None and not channel.datagrams):
            channel.in_line = False
            self.line.popleft()
            if channel.outgoing is None:
                self.close_if_over(channel)
            return None
        if not self.congestion.may_send(now):
            return None
        self.line.rotate(-1)
        if piece is not None and channel.outgoing is not None:
            self.unsent -= len(piece.body)
            if channel.outgoing.watched:
                self.drained[channel.id] = channel
            return self._encode(channel, piece, now)
        body, end = channel.datagrams.popleft()
        channel.queued -= len(body)
        self.unsent -= len(body)
        type = channel.type if channel.ours and not channel.announced else None
        self._observe(channel.id, "end" if end else "data", len(body))
        return packets.join_packet(b"{%b}" % packets.head_of(channel.id, type, None, end, 0), body)

    def _encode(self, channel: EngineChannel, piece: Piece, now: float) -> bytes:
        outgoing, incoming = channel.outgoing, channel.incoming
        assert outgoing is not None
        assert incoming is not None
        outgoing.mark_sent(piece, now)
        head = packets.head_of(channel.id, piece.type, piece.seq, piece.end, piece.frag)
        pace = self.congestion
        wants = outgoing.wants_ack(piece, now, pace.ask_pause, pace.round_trip)
        # An opening carries no ack: nothing was received on its channel.
        if piece.type is None and (wants or incoming.owes_news):
            room = self.packet - 4 - len(head) - len(piece.body)
            part = self._ack(incoming, now, room, wants_miss=False)
            if part:
                head += part
                self.acking.pop(channel.id, None)
                outgoing.mark_asked(piece, now)
        self.arm(channel)
        if self.observer is not None:
            name = "end" if piece.end else "open" if piece.type else "data"
            self._observe(channel.id, f"{name} again" if piece.times > 1 else name, len(piece.body))
        return packets.join_packet(b"{%b}" % head, piece.body)

    # --- packets without a body

    def _write_errs(self, out: list[bytes], now: float) -> None:
        errs, pace = self.errs, self.congestion
        while errs and len(out) < PACKETS_AT_ONCE:
            if self.config.congestion and not (pace.may_send(now) and self.err_pace.take(now)):
                break
            id = next(iter(errs))
            packet = packets.join_packet(b'{"c":%d,"err":%b}' % (id, packets.quoted(errs.pop(id))))
            pace.sent(len(packet), now)
            out.append(packet)
            self._observe(id, "err", 0)

    def _write_acks(self, out: list[bytes], now: float) -> None:
        """Write acks at any rate: they are small, and the peer waits for them."""
        while self.acking and len(out) < PACKETS_AT_ONCE:
            channel = self.acking.pop(next(iter(self.acking)))
            assert channel.incoming is not None
            head = packets.head_of(channel.id, None, None, False, 0)
            part = self._ack(channel.incoming, now, self.packet - 4 - len(head), wants_miss=True)
            out.append(packets.join_packet(b"{%b%b}" % (head, part)))
            self._observe(channel.id, "ack", 0)
            self.arm(channel)
        while self.answers and len(out) < PACKETS_AT_ONCE:
            id = next(iter(self.answers))
            del self.answers[id]
            tombstone = self.tombstone(id)
            if tombstone is not None:
                head = packets.head_of(id, None, None, False, 0)
                out.append(packets.join_packet(b"{%b%b}" % (head, packets.ack_part(tombstone.ack, None))))
                self._observe(id, "ack", 0)

    def _ack(self, incoming: Incoming, now: float, room: int, *, wants_miss: bool) -> bytes:
        """Encode `ack` and, if needed, `miss` in at most `room` bytes; empty if they do not fit."""
        left = room - ACK_SIZE - MISS_SIZE
        # The first and the last delta may be long, the others are short: try a long list, then shorter ones.
        for most in ((left - 2 * DELTA_SIZE) // LISTED_SIZE, left // DELTA_SIZE, 2, 1):
            fields = incoming.ack(most, wants_miss=wants_miss) if most > 0 else None
            if fields is not None and len(part := packets.ack_part(*fields)) <= room:
                incoming.mark_acked(now)
                return part
        return b""

    def _report_writable(self) -> None:
        """Report channels that have room again: those that sent something, and then who waits for the outbox, in turn.

        A channel whose own queue is full is not looked at while others send.
        """
        drained = [*self.drained.values()]
        self.drained.clear()
        for channel in drained:
            self._report_if_writable(channel)
        while self.crowded:
            first = next(iter(self.crowded.values()))
            self._report_if_writable(first)
            if first.id in self.crowded:
                break  # the outbox has no room for it, and it is its turn

    def _report_if_writable(self, channel: EngineChannel) -> None:
        outgoing = channel.outgoing
        if outgoing is not None and outgoing.watched:
            if self.admits(channel, outgoing.watched):
                outgoing.watched = 0
                self.happened.append(Writable(channel))
            elif outgoing.unsent + outgoing.watched <= self.limits.channel_first:
                self.crowded.setdefault(channel.id, channel)
                return
        self.crowded.pop(channel.id, None)

    def _observe(self, id: int, name: str, size: int) -> None:
        if self.observer is not None:
            self.observer.frame("out", f"channel {id}", name, size)


def overhead(channel: EngineChannel, seq: int | None, *, frag: int = 0, end: bool = False) -> int:
    """Return the bytes of a packet of this channel beside its body."""
    # An unreliable channel tells its type until the peer answers on it: the first packet may be lost.
    type = channel.type if channel.ours and (seq is None or seq == 1) else None
    return 4 + len(packets.head_of(channel.id, type, seq, end, frag)) + (0 if seq is None else ASK_SIZE)
