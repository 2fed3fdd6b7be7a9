"""The receiving halves of channels: what is kept, when the application gets it, and what the peer is told.

Packets of a reliable channel wait here, by seq, until the application has processed them. It gets one message at a
time, and asks for the next with `done`, which counts the one before as processed. The ack tells the last seq that was
processed, so the peer's window counts whatever the application has not done. A `miss` beside it lists the gaps.

What comes on a channel that the application has closed is discarded; `state` tells how such a channel ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Ranges, Reason, ReceiveWindow
from muxkit.core.events import Finished, Opened, Received
from muxkit.protocols.e3x.assembly import Assembly
from muxkit.protocols.e3x.config import FIRST_WINDOW
from muxkit.protocols.e3x.events import Cause, Fault
from muxkit.protocols.e3x.packets import (
    ACK_SIZE,
    DELTA_SIZE,
    LISTED_MOST,
    LISTED_SIZE,
    MISS_SIZE,
    RESERVED,
    SEQ_MOST,
    Packet,
    ack_part,
    encode_miss,
    head_of,
)
from muxkit.protocols.e3x.send import RESEND_PAUSE, ReliableSender
from muxkit.protocols.e3x.state import CLOSE_TIMEOUT, NEVER, EngineChannel, EngineReceiver, State

ACK_DELAY: Final = 1.0  # s, e3x "ack": "for up to one second"
GAP_REPEAT: Final = 0.25  # s between reports of the same gap; not in the document
ACK_SHARE: Final = 4  # an ack is due when a quarter of the window was processed since the last; not in the document
PARTS_OF_WINDOW: Final = 16  # of a window that is not large; after each of them its size is looked at
UNREAD_OVERHEAD: Final = 64  # bytes that an unreliable message which waits counts beside its own


class Arrival(Enum):
    """What `ReliableReceiver` did with a packet."""

    KEPT = "kept"
    DUPLICATE = "duplicate"
    BEYOND = "beyond the window"
    FULL = "no memory left"


class ReliableReceiver(EngineReceiver):
    """The receiving half of a reliable channel."""

    def __init__(self, state: State, channel: EngineChannel, sender: ReliableSender, *, capacity: int) -> None:
        super().__init__(state, channel)
        self.sender: ReliableSender = sender
        self.assembly: Assembly = Assembly(state.reassembly)
        self.capacity: int = capacity  # packets
        self._base = capacity
        self._window: ReceiveWindow | None = None  # made when the channel turns out to be busy
        self._sized_at = max(1, capacity // 2)  # the seq with which `capacity` is looked at the next time
        self.bytes: int = 0
        self.handed: int = 0  # packets after `processed` that the application has
        self.end_seq: int | None = None
        self.ack_now: bool = False
        self.heard_at: float = 0.0
        self._waiting: dict[int, Packet] = {}
        self._seen = Ranges(max(capacity, state.most_window) + 2)  # seqs of the waiting packets
        self._acked = 0  # the last ack that was sent
        self._again = False  # the last ack will be sent once more
        self._asked = 0  # the highest seq of a packet that asked for an ack
        self._late = False  # the ack of the next processed packet is not delayed further
        self._was_asked = False  # the peer has sent a packet again that waits here, and may ask rarely from now on
        self._over_half = False
        self._gap_at = 0.0  # since when packets are missing, if any are

    # --- what others ask

    @property
    def held(self) -> int:
        return self.bytes

    @property
    def credit_in(self) -> int | None:
        """Packets, as the windows of the document are."""
        return self.capacity - self.waiting

    @property
    def last_ack(self) -> int | None:
        return self.processed

    @property
    def highest(self) -> int:
        """The highest seq that was received."""
        highest = self._seen.highest
        return self.processed if highest is None else highest

    @property
    def has_gaps(self) -> bool:
        """True if a packet is missing before one that was received."""
        return len(self._seen) > 1 or self.highest > self.processed + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of packets that are not processed."""
        return len(self._waiting)

    # --- packets that arrive

    def receive(self, packet: Packet) -> None:
        state, channel, sender, ack, seq = self.state, self.channel, self.sender, packet.ack, packet.seq
        if ack is not None and ack > sender.sent:
            state.fault(Fault.UNSENT, f"channel {channel.id}: ack {ack} where {sender.sent} was the last sent")
            return
        if seq is None and (ack is None or packet.body or packet.end or packet.type is not None):
            state.fault(Fault.MISPLACED, f"channel {channel.id} is reliable, and a packet came without seq")
            return
        if seq == 1 and not channel.ours and packet.type is None:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: a first packet without a type")
            return
        if seq is not None and self._is_beyond_end(packet, seq):
            state.fault(Fault.MISPLACED, f"channel {channel.id}: seq {seq} does not fit to its end")
            return
        channel.heard_at = state.now
        if packet.miss_fault:
            state.fault(Fault.MISS, f"channel {channel.id}: {packet.miss_fault}")
        if ack is not None:
            sender.receive_ack(ack, packet.miss)
        if seq is not None and not channel.gone:
            self._keep(packet, seq)
        if not channel.gone:
            self._owe_ack()
            state.arm(channel)

    def _is_beyond_end(self, packet: Packet, seq: int) -> bool:
        """Return True if a packet lies behind the end of its channel, or moves the end."""
        if self.end_seq is not None:
            return seq > self.end_seq or (packet.end and seq != self.end_seq)
        return packet.end and seq < self.highest

    def _keep(self, packet: Packet, seq: int) -> None:
        state, channel = self.state, self.channel
        # Do not keep fields that are not needed any more: a head may be large, and only bodies are counted.
        type, packet.type, packet.miss = packet.type, None, None
        room = min(state.limits.channel_bytes - self.bytes, state.room)
        arrival = self.take_in(packet, seq, state.now, room, state.room_next)
        if arrival is not Arrival.KEPT:
            fault = Fault.DUPLICATE if arrival is Arrival.DUPLICATE else Fault.FULL
            state.fault(fault, f"channel {channel.id}: seq {seq} is {arrival.value}")
            return
        state.held += len(packet.body)
        state.waiting += 1
        if packet.end:
            self.end_seq = seq
        if seq == 1 and not channel.ours:
            self._accept_opening(type or "")
        if not channel.gone and (channel.ours or channel.type):
            self.deliver()

    def take_in(self, packet: Packet, seq: int, now: float, room: int, room_next: int) -> Arrival:
        """Keep a packet if there is memory: `room` bytes if it must wait, `room_next` if it is the next in order."""
        self.heard_at = now
        if seq <= self.processed or seq in self._waiting:
            # The ack may have been lost, so it is sent again.
            self.ack_now = True
            self._was_asked = self._was_asked or seq > self.processed
            return Arrival.DUPLICATE
        if seq > self.processed + self.capacity:
            self.ack_now = True
            return Arrival.BEYOND
        # There is always memory for the next packet in order, or the channel could wait for memory for ever.
        if len(packet.body) > (room_next if seq == self.processed + 1 else room):
            self.ack_now = True
            return Arrival.FULL
        highest = self.highest
        had_gaps = highest > self.processed + len(self._waiting)
        self._waiting[seq] = packet
        self._seen.add(seq)
        self.bytes += len(packet.body)
        if seq > highest + 1:
            self.ack_now = True
            if not had_gaps:
                self._gap_at = now
        elif packet.ack is not None and self.has_gaps:
            self.ack_now = True  # a packet that asks for an ack and cannot be processed yet
        if seq < highest and now - self._gap_at > GAP_REPEAT:
            # What is missing was resent, and lost again. It comes after a pause, for which the window has to last.
            self.state.budget.round_trip.besides = RESEND_PAUSE
        if packet.ack is not None or seq < highest or packet.end:
            self._asked = max(self._asked, seq)
        else:
            self.ack_at = min(self.ack_at, now + ACK_DELAY)
        over_half = 2 * len(self._waiting) > self.capacity
        if over_half and not self._over_half:
            self.ack_now = True
        self._over_half = over_half
        return Arrival.KEPT

    def _accept_opening(self, type: str) -> None:
        """Accept or refuse a channel whose first packet has arrived."""
        state, channel = self.state, self.channel
        refusal = state.refusal_of(type)
        if refusal is not None:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: {refusal}")
            state.break_silently(channel, refusal)
            return
        channel.type = type
        channel.is_reserved = type in RESERVED
        channel.dies_at = NEVER
        state.unopened.pop(channel.id, None)
        state.used.add(channel.id)

    # --- the application

    def deliver(self) -> None:
        """Report the next message, unless the application has one; put pieces together on the way."""
        state, channel = self.state, self.channel
        if channel.closing:
            self.continue_closing()
            return
        while not channel.gone and (packet := self.next()) is not None:
            body: bytes | None = packet.body
            if state.config.frag:
                try:
                    body = self.assembly.add(packet.frag, packet.body)
                    if packet.end and body is None:
                        raise RemoteProtocolError(f"an end before {packet.frag} pieces of its message")
                except RemoteProtocolError as error:
                    state.break_channel(channel, Cause.MESSAGE, str(error), tell=True)
                    return
            if body is None:
                self._process()
            elif not channel.ours and not channel.announced:
                channel.announced = True
                self.handed = 1
                state.report(channel, Opened(channel, body))
            elif body or not packet.end:
                self.handed = 1
                state.report(channel, Received(self, [body]))
            else:
                self._process()

    def next(self) -> Packet | None:
        """Return the next packet to process, if it was received and the application has none."""
        return None if self.handed else self._waiting.get(self.processed + 1)

    def further(self) -> Packet | None:
        """Return the packet behind those that the application has, if it was received."""
        return self._waiting.get(self.processed + self.handed + 1)

    def take(self, most: int) -> list[bytes]:
        """Take up to `most` complete messages behind the one reported last; the next `done` counts for all."""
        bodies: list[bytes] = []
        if self.channel.gone or not self.handed or self.assembly.expected:
            return bodies
        while len(bodies) < most and (packet := self.further()) is not None:
            if (packet.frag and self.state.config.frag) or (packet.end and not packet.body):
                break
            self.handed += 1
            bodies.append(packet.body)
        return bodies

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Do nothing: a message that the application has taken is processed when it asks for the next (`done`)."""
        return False

    def done(self) -> None:
        """Count what the application has as processed, and report the next message. Harmless when the channel is gone.

        It accepts a channel of the peer by that.
        """
        if self.channel.gone:
            return
        self.state.update_time()
        self.accept()
        if not self.handed:
            raise LocalProtocolError(f"channel {self.channel.id}: nothing is being processed")
        for _ in range(self.handed):
            self._process()
        self.deliver()

    def _process(self) -> None:
        """Count the next packet as processed."""
        state, channel = self.state, self.channel
        packet = self._remove_next()
        state.held -= len(packet.body)
        state.waiting -= 1
        if packet.end:
            self.ended = True
            self.ack_now = True
            state.report(channel, Finished(self))
        self._owe_ack()
        state.arm(channel)
        state.close_if_over(channel)

    def _remove_next(self) -> Packet:
        """Remove the next packet, and note what the ack of it may wait for."""
        seq = self.processed + 1
        packet = self._waiting.pop(seq)
        self._seen.discard_below(seq + 1)
        self.bytes -= len(packet.body)
        self.handed = max(0, self.handed - 1)
        self.processed = seq
        self._over_half = self._over_half and 2 * len(self._waiting) > self.capacity
        if self._late or 0 < self._asked <= seq or (seq - self._acked) * ACK_SHARE >= self.capacity:
            self.ack_now = True
        if self._asked <= seq:
            self._asked = 0
        self._late = False
        if seq >= self._sized_at:
            self._size_window(seq)
        return packet

    def _size_window(self, seq: int) -> None:
        """Let the number of packets that may come follow the path, each time that a part of a window was processed.

        It counts each packet as a full one. What the peer was told that it may send is never taken back.
        """
        state, window = self.state, self._window
        if window is None:
            if state.limits.channel_bytes <= state.limits.short_window:
                self._sized_at = SEQ_MOST + 1
                return
            window = self._window = ReceiveWindow(state.limits.channel_bytes, state.budget)
            window.start(state.now)
        part = max(1, self._base // PARTS_OF_WINDOW)
        size = min(part * state.packet, window.credit)
        window.arrived(size)
        window.consumed(size, state.now)
        self.capacity = max(self._base, window.target // state.packet, self.capacity - part)
        self._sized_at = seq + part

    def dropped(self) -> None:
        self.state.held -= self.bytes
        self.state.waiting -= self.waiting
        self.assembly.drop()
        if self._window is not None:
            self._window.retire()

    # --- the end

    def stop(self, reason: Reason) -> None:
        """Discard from now on what arrives, and wait for the peer's end; the document has no way to tell the peer."""
        channel = self.channel
        if channel.gone or channel.closing:
            return
        self.state.update_time()
        channel.closing = True
        self.assembly.drop()
        self.continue_closing()

    def continue_closing(self, *, has_advanced: bool = False) -> None:
        """End a closed channel, or set its timeout, after a packet or, with `has_advanced`, an ack has arrived."""
        state, channel = self.state, self.channel
        if channel.gone:
            return
        packet = self.next()
        if packet is not None and packet.end and not packet.body:
            self._process()
        if channel.gone:
            return
        is_unread = self.waiting > 0
        if self.sender.is_done:
            if is_unread:
                state.end_closed(channel)
            elif has_advanced or channel.dies_at == NEVER:
                channel.dies_at = state.now + state.linger
        elif is_unread and (has_advanced or channel.dies_at == NEVER):
            channel.dies_at = state.now + CLOSE_TIMEOUT
        if not channel.gone:
            state.arm(channel)

    # --- acks

    def _owe_ack(self) -> None:
        """Queue an ack, if it is due now."""
        if self.ack_now:
            self.state.acking[self.channel.id] = self

    @property
    def owes_news(self) -> bool:
        return self.ack_now or self.processed > self._acked

    def handle_time(self, now: float, gap_timeout: float) -> None:
        """Act at `ack_at`. A gap is reported again while packets arrived in the last `gap_timeout` seconds."""
        self.ack_at = NEVER
        if self.processed > self._acked or self._again or (self.has_gaps and now - self.heard_at < gap_timeout):
            self.ack_now = True
        else:
            self._late = True  # there is nothing to tell before the application is done
        self._owe_ack()

    def write_ack(self, now: float) -> bytes:
        state, channel = self.state, self.channel
        head = head_of(channel.id, None, None, False, 0)
        head += self.encode_ack(state.packet - 4 - len(head), wants_miss=True, now=now)
        packet = state.packet_of(channel.id, head, "ack")
        state.arm(channel)
        return packet

    def encode_ack(self, room: int, *, wants_miss: bool, now: float) -> bytes:
        left = room - ACK_SIZE - MISS_SIZE
        # The first and the last delta may be long, the others are short: try a long list, then shorter ones.
        for most in ((left - 2 * DELTA_SIZE) // LISTED_SIZE, left // DELTA_SIZE, 2, 1):
            fields = self.ack(most, wants_miss=wants_miss) if most > 0 else None
            if fields is not None and len(part := ack_part(*fields)) <= room:
                self._mark_acked(now)
                return part
        return b""

    def ack(self, most: int, *, wants_miss: bool = True) -> tuple[int, list[int] | None] | None:
        """Return the current `ack` and `miss`, with at most `most` deltas; None if the miss needs more."""
        has_gaps = self.has_gaps
        needs_miss = has_gaps or self._over_half or self.processed == 0
        if needs_miss and most < (2 if has_gaps else 1):
            return None
        # A peer assumes a window of `FIRST_WINDOW` packets: another one is told in each packet that holds only an ack.
        if needs_miss or (wants_miss and self.capacity != FIRST_WINDOW):
            most = min(most, LISTED_MOST)
            return self.processed, encode_miss(self.processed, self._missing(most), self.capacity, most=most)
        return self.processed, None

    def _mark_acked(self, now: float) -> None:
        """Note that the current ack is sent now."""
        # An ack of many packets, or one that the peer has asked for, is sent once more: the peer may wait for it, and
        # it may be lost.
        is_news = self.processed > self._acked
        self._again = is_news and (self._was_asked or (self.processed - self._acked) * ACK_SHARE >= self.capacity)
        if is_news:
            self._was_asked = False
        self.ack_now = False
        self._acked = self.processed
        if self.has_gaps or self._again:
            self.ack_at = now + GAP_REPEAT
        else:
            self.ack_at: float = now + ACK_DELAY if self._waiting else NEVER

    def _missing(self, most: int) -> list[int]:
        missing: list[int] = []
        for first, last in self._seen.missing(self.processed + 1, self.highest):
            missing.extend(range(first, min(last + 1, first + most - len(missing))))
            if len(missing) >= most:
                break
        return missing


class UnreliableReceiver(EngineReceiver):
    """The receiving half of an unreliable channel: each message is reported at once, and the application holds it.

    It acks nothing.
    """

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        self.unread: int = 0  # bytes that the application has not taken

    @property
    def held(self) -> int:
        """Bytes that were not taken, with what each message counts beside its own."""
        return self.unread

    @property
    def is_too_much(self) -> bool:
        """True if this channel, or all unreliable channels together, hold so much that the oldest must make way."""
        limits = self.state.limits
        return self.unread > limits.channel_first or self.state.unread > limits.connection_bytes

    def receive(self, packet: Packet) -> None:
        state, channel = self.state, self.channel
        if packet.seq is not None or packet.ack is not None or packet.miss_fault:
            state.fault(Fault.MISPLACED, f"channel {channel.id} is unreliable, and a packet came with seq or ack")
            return
        if packet.type is not None and packet.type != channel.type:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: a second type")
            return
        if self.ended:
            state.fault(Fault.MISPLACED, f"channel {channel.id}: a packet after its end")
            return
        channel.heard_at = state.now
        if channel.ours:
            channel.announced = True
        if (packet.body or not packet.end) and not channel.closing:
            self.hold(packet.body)
            state.report(channel, Received(self, [packet.body]))
        self.receive_end(packet)

    def receive_end(self, packet: Packet) -> None:
        """Apply the end of the channel, if the packet has one."""
        if packet.end:
            self.ended = True
            self.state.report(self.channel, Finished(self))
            self.state.close_if_over(self.channel)

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Count items as taken, or everything as dropped if there are no items."""
        self._count(-size - UNREAD_OVERHEAD * len(items) if items else -self.unread)
        return False

    def hold(self, message: bytes) -> None:
        """Count a message that the application has not taken."""
        self._count(len(message) + UNREAD_OVERHEAD)

    def _count(self, size: int) -> None:
        self.unread += size
        self.state.unread += size

    def done(self) -> None:
        """Count a channel of the peer as accepted, as a receiver of messages that nothing waits for."""
        self.accept()

    def stop(self, reason: Reason) -> None:
        self.channel.closing = True

    def dropped(self) -> None:
        pass  # what the application has not taken stays its own
