"""The receiving halves of channels, which buffer packets, deliver messages in order, and send acks.

A `ReliableReceiver` buffers the packets of a reliable channel by seq until the application has processed them. The
application gets one message at a time. When it calls `done`, the receiver marks that message as processed and delivers
the next one. The ack contains the seq of the last processed packet, so the peer's window includes every packet that
the application hasn't processed. A `miss` in the same packet lists the gaps.

An `UnreliableReceiver` reports each message as soon as it arrives, and sends no acks.

A receiver discards messages of a channel that the application has closed. `state` explains how such a channel ends.
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
    Packet,
    ack_part,
    encode_miss,
    head_of,
)
from muxkit.protocols.e3x.send import RESEND_PAUSE, ReliableSender
from muxkit.protocols.e3x.state import CLOSE_TIMEOUT, NEVER, EngineChannel, EngineReceiver, State

ACK_DELAY: Final = 1.0  # maximum delay of an ack in seconds. The specification says "for up to one second".
# Seconds between two reports of the same gap. The specification gives no value.
GAP_REPEAT: Final = 0.25
# An ack is due when 1/ACK_SHARE of the window has been processed since the last ack. The specification has no such
# rule.
ACK_SHARE: Final = 4
# The receiver adjusts its window each time that 1/PARTS_OF_WINDOW of the initial window has been processed.
PARTS_OF_WINDOW: Final = 16
UNREAD_OVERHEAD: Final = 64  # bytes of memory charged for each waiting unreliable message in addition to its body


class Arrival(Enum):
    """The result of `ReliableReceiver.take_in`: the packet was kept, or the reason for dropping it."""

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
        self.capacity: int = capacity  # current size of the receive window in packets; `_base` is the initial size
        self._base = capacity
        self._window: ReceiveWindow | None = None  # created once the channel has used half of its initial window
        # `capacity` is adjusted when `_used` reaches `_use_most`. Each processed packet counts as `State.unit` bytes or
        # more. `_sized_seq` is the seq at which it was adjusted the last time.
        self._used = 0
        self._use_most = max(1, capacity // 2) * state.unit
        self._sized_seq = 0
        self.bytes: int = 0  # size of the bodies of all waiting packets
        self.handed: int = 0  # number of waiting packets that the application has and is processing
        self.end_seq: int | None = None
        self.ack_now: bool = False
        self.heard_at: float = 0.0
        self._waiting: dict[int, Packet] = {}
        self.highest: int = 0
        """The highest seq that this side has received."""
        # The seqs of the waiting packets while packets are missing, otherwise empty
        self._seen = Ranges(max(capacity, state.most_window) + 2)
        self._acked = 0  # the last ack that this side sent
        self._again = False  # True if the last ack must be sent once more
        self._asked = 0  # the highest seq of a waiting packet that asked for an ack
        self._late = False  # True if the ack has been delayed long enough, so the next processed packet is acked
        # True if the peer has resent a packet that waits here. The peer may then rest, and probe rarely.
        self._was_asked = False
        self._over_half = False  # True while more than half of the window is occupied
        self._gap_at = 0.0  # when the current gap appeared; only meaningful while packets are missing

    # --- properties

    @property
    def held(self) -> int:
        return self.bytes

    @property
    def credit_in(self) -> int | None:
        """The rest of the window in packets, because the specification counts windows in packets."""
        return self.capacity - self.waiting

    @property
    def last_ack(self) -> int | None:
        return self.processed

    @property
    def has_gaps(self) -> bool:
        """True if a packet is missing whose successor has arrived."""
        return self.highest > self.processed + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of received packets that the application hasn't processed."""
        return len(self._waiting)

    # --- receiving packets

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
        if seq is not None and (packet.end or self.end_seq is not None) and self._is_beyond_end(packet, seq):
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
            if self.ack_now:
                state.acking[channel.id] = self
            state.arm(channel)

    def _is_beyond_end(self, packet: Packet, seq: int) -> bool:
        """Return True if a packet comes after the end of its channel, or would change the position of the end."""
        if self.end_seq is not None:
            return seq > self.end_seq or (packet.end and seq != self.end_seq)
        return packet.end and seq < self.highest

    def _keep(self, packet: Packet, seq: int) -> None:
        state, channel = self.state, self.channel
        # Drop the fields that we don't need any more. They can be large, and the memory limits only count bodies.
        type, packet.type, packet.miss = packet.type, None, None
        room = min(state.limits.channel_bytes - self.bytes, state.room)
        arrival = self.take_in(packet, seq, state.now, room)
        if arrival is not Arrival.KEPT:
            fault = Fault.DUPLICATE if arrival is Arrival.DUPLICATE else Fault.FULL
            state.fault(fault, f"channel {channel.id}: seq {seq} is {arrival.value}")
            return
        state.silence.heard(state.now)
        state.held += len(packet.body)
        state.waiting += 1
        if packet.end:
            self.end_seq = seq
        if seq == 1 and not channel.ours:
            self._accept_opening(type or "")
        # `done` delivers the packet if the application is still processing an earlier one.
        if (not self.handed or channel.closing) and not channel.gone and (channel.ours or channel.type):
            self.deliver()

    def take_in(self, packet: Packet, seq: int, now: float, room: int) -> Arrival:
        """Buffer a packet if it is new, within the window, and there is memory for it.

        The limit is `room` bytes. For the next packet in order it is `State.room_next`, if that is more.
        """
        self.heard_at = now
        if seq <= self.processed or seq in self._waiting:
            # The peer resends the packet because our ack may have been lost, so send the ack again.
            self.ack_now = True
            self._was_asked = self._was_asked or seq > self.processed
            return Arrival.DUPLICATE
        if seq > self.processed + self.capacity:
            self.ack_now = True
            return Arrival.BEYOND
        # The next packet in order always gets memory, or the channel could wait for memory forever.
        size = len(packet.body)
        if size > room and (seq != self.processed + 1 or size > self.state.room_next):
            self.ack_now = True
            return Arrival.FULL
        highest = self.highest
        had_gaps = highest > self.processed + len(self._waiting)
        self._waiting[seq] = packet
        self.bytes += size
        if seq > highest:
            self.highest = seq
        if had_gaps or seq > highest + 1:
            self._note_gaps(packet, seq, highest, now, had_gaps=had_gaps)
        if packet.ack is not None or seq < highest or packet.end:
            self._asked = max(self._asked, seq)
        else:
            self.ack_at = min(self.ack_at, now + ACK_DELAY)
        over_half = 2 * len(self._waiting) > self.capacity
        if over_half and not self._over_half:
            self.ack_now = True
        self._over_half = over_half
        return Arrival.KEPT

    def _note_gaps(self, packet: Packet, seq: int, highest: int, now: float, *, had_gaps: bool) -> None:
        """Update the record of missing packets, after a packet has arrived that leaves or closes a gap.

        `highest` and `had_gaps` are from the time before the packet arrived.
        """
        if not had_gaps and highest > self.processed:
            self._seen.add_range(self.processed + 1, highest)
        self._seen.add(seq)
        if seq > highest + 1:
            self.ack_now = True
            if not had_gaps:
                self._gap_at = now
        elif packet.ack is not None and self.has_gaps:
            self.ack_now = True  # the packet asks for an ack, and a gap prevents us from processing the packet
        if seq < highest and now - self._gap_at > GAP_REPEAT:
            # The missing packet must have been lost twice. The peer waits `RESEND_PAUSE` before it resends the packet a
            # second time, so the window has to cover that pause as well.
            self.state.budget.round_trip.besides = RESEND_PAUSE
        if not self.has_gaps:
            self._seen.discard_below(self.highest + 1)

    def _accept_opening(self, type: str) -> None:
        """Admit or refuse a channel of the peer whose first packet has arrived."""
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

    # --- delivering messages

    def deliver(self) -> None:
        """Report the next message as an event, unless the application is still processing a message.

        Joins the pieces of a message that was larger than a packet. Pieces before the last count as processed.
        """
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
                    state.update_time()
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
        """Return the next packet to deliver, or None if it is missing or if the application is processing a message."""
        return None if self.handed else self._waiting.get(self.processed + 1)

    def further(self) -> Packet | None:
        """Return the packet that follows the packets that the application has, or None if that packet is missing."""
        return self._waiting.get(self.processed + self.handed + 1)

    def take(self, most: int) -> list[bytes]:
        """Return up to `most` messages that follow the last reported one. The next `done` marks them all as processed.

        Only messages of one packet are returned. `deliver` reports the others.
        """
        return [] if self.channel.gone or not self.handed else self._take_whole(most)

    def _take_whole(self, most: int) -> list[bytes]:
        """Hand the application up to `most` messages of one packet each, which follow the messages that it has."""
        bodies: list[bytes] = []
        if self.assembly.expected or self.channel.closing:
            return bodies
        while len(bodies) < most and (packet := self.further()) is not None:
            if (packet.frag and self.state.config.frag) or (packet.end and not packet.body):
                break
            self.handed += 1
            bodies.append(packet.body)
        return bodies

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Do nothing, because a message doesn't count as processed until the application asks for the next (`done`)."""
        return False

    def done(self) -> None:
        """Mark the messages that the application has as processed, and report the next message.

        This also accepts a channel that the peer has opened. Does nothing if the channel has been removed.
        """
        if not self.channel.gone:
            self._process_handed()
            self.deliver()

    def advance(self) -> bytes | None:
        """Mark the messages that the application has as processed, and return the next message.

        Return None if no message waits. A message in several packets and the end of the channel are reported as events,
        as by `done`.
        """
        channel = self.channel
        if channel.gone:
            return None
        self._process_handed()
        messages = self._take_whole(1)
        if messages:
            return messages[0]
        self.deliver()
        return None

    def _process_handed(self) -> None:
        if not self.channel.taken:
            self.accept()
        if not self.handed:
            raise LocalProtocolError(
                f"channel {self.channel.id}: the application has no message that it could mark as processed"
            )
        for _ in range(self.handed):
            self._process()

    def _process(self) -> None:
        """Remove the next packet from the buffer, decide whether its ack may be delayed, and handle an end."""
        state, channel = self.state, self.channel
        seq = self.processed + 1
        packet = self._waiting.pop(seq)
        if self.highest > seq + len(self._waiting):
            self._seen.discard_below(seq + 1)
        size, unit = len(packet.body), state.unit
        self.bytes -= size
        state.held -= size
        state.waiting -= 1
        if self.handed:
            self.handed -= 1
        self.processed = seq
        self._over_half = self._over_half and 2 * len(self._waiting) > self.capacity
        if self._late or 0 < self._asked <= seq or (seq - self._acked) * ACK_SHARE >= self.capacity:
            self.ack_now = True
        if self._asked <= seq:
            self._asked = 0
        self._late = False
        self._used += size if size > unit else unit  # noqa: FURB136 - `max` is a call
        if self._used >= self._use_most:
            self._size_window(seq)
        if packet.end:
            self.ended = True
            self.ack_now = True
            state.update_time()
            state.report(channel, Finished(self))
        if self.ack_now:
            state.acking[channel.id] = self
        if packet.end:
            state.close_if_over(channel)

    def _size_window(self, seq: int) -> None:
        """Adjust the receive window (`capacity`) to the path, each time that part of a window has been processed.

        `ReceiveWindow` works in bytes, so each packet counts as a full one. The window shrinks only by as many packets
        as have been processed, so a packet that the peer was allowed to send is never refused.
        """
        state, window = self.state, self._window
        used, self._used = self._used, 0
        state.update_time()
        if window is None:
            if state.limits.channel_bytes <= state.limits.short_window:
                return
            window = self._window = ReceiveWindow(state.limits.channel_bytes, state.budget)
            window.start(state.now)
        part = max(1, self._base // PARTS_OF_WINDOW) * state.unit
        size = min(max(part, used) if self._sized_seq else part, window.credit)
        window.arrived(size)
        window.consumed(size, state.now)
        self.capacity = max(self._base, window.target // state.unit, self.capacity - (seq - self._sized_seq))
        self._sized_seq = seq
        self._use_most = part

    def dropped(self) -> None:
        self.state.held -= self.bytes
        self.state.waiting -= self.waiting
        self.assembly.drop()
        if self._window is not None:
            self._window.retire()

    # --- closing

    def stop(self, reason: Reason) -> None:
        """Discard all further messages and wait for the peer's end.

        The peer isn't notified, because the specification has no packet that asks it to stop sending.
        """
        channel = self.channel
        if channel.gone or channel.closing:
            return
        self.state.update_time()
        channel.closing = True
        self.assembly.drop()
        self.continue_closing()

    def continue_closing(self, *, has_advanced: bool = False) -> None:
        """Check whether a channel that the application has closed can end now, or set the timeout for that.

        `has_advanced` means that an ack has just acked new packets. See the module docstring of `state` for the rules.
        """
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
        """Queue an ack if one is due now."""
        if self.ack_now:
            self.state.acking[self.channel.id] = self

    @property
    def owes_news(self) -> bool:
        return self.ack_now or self.processed > self._acked

    def handle_time(self, now: float, gap_timeout: float) -> None:
        """Send the delayed ack, because `ack_at` has passed.

        A gap is reported again only if a packet has arrived in the last `gap_timeout` seconds.
        """
        self.ack_at = NEVER
        if self.processed > self._acked or self._again or (self.has_gaps and now - self.heard_at < gap_timeout):
            self.ack_now = True
        else:
            self._late = True  # an ack has no new information until the application has processed a message
        self._owe_ack()

    def write_ack(self, now: float) -> bytes:
        state, channel = self.state, self.channel
        head = head_of(channel.id, None, None, False, 0)
        head += self.encode_ack(state.packet - 4 - len(head), wants_miss=True, now=now)
        packet = state.packet_of(channel.id, head, "ack")
        state.arm(channel)
        return packet

    def encode_ack(self, room: int, *, wants_miss: bool, now: float) -> bytes:
        if not self.has_gaps:
            has_miss = self._over_half or self.processed == 0 or (wants_miss and self.capacity != FIRST_WINDOW)
            part = ack_part(self.processed, [self.capacity] if has_miss else None)
            if len(part) > room:
                return b""
            self._mark_acked(now)
            return part
        left = room - ACK_SIZE - MISS_SIZE
        # The first and the last delta may have many digits, and the other deltas are usually short. So try the longest
        # list that fits with short deltas, and then shorter lists.
        for most in ((left - 2 * DELTA_SIZE) // LISTED_SIZE, left // DELTA_SIZE, 2, 1):
            fields = self.ack(most, wants_miss=wants_miss) if most > 0 else None
            if fields is not None and len(part := ack_part(*fields)) <= room:
                self._mark_acked(now)
                return part
        return b""

    def ack(self, most: int, *, wants_miss: bool = True) -> tuple[int, list[int] | None] | None:
        """Return the current `ack` and `miss`, with at most `most` deltas, or None if the miss needs more deltas."""
        has_gaps = self.has_gaps
        needs_miss = has_gaps or self._over_half or self.processed == 0
        if needs_miss and most < (2 if has_gaps else 1):
            return None
        # The peer assumes a window of `FIRST_WINDOW` packets. Only a miss can announce a different window, so include a
        # miss in each packet that contains only an ack.
        if needs_miss or (wants_miss and self.capacity != FIRST_WINDOW):
            most = min(most, LISTED_MOST)
            return self.processed, encode_miss(self.processed, self._missing(most), self.capacity, most=most)
        return self.processed, None

    def _mark_acked(self, now: float) -> None:
        """Record that the current ack is sent now, and schedule the next ack."""
        # If the ack covers many packets, or if the peer has resent a packet, the peer may be waiting for this ack. The
        # ack may get lost, so send it twice.
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
    """The receiving half of an unreliable channel.

    It reports each message as soon as it arrives, and the session stores the message until the application takes it.
    This half only counts the stored bytes. It sends no acks.
    """

    def __init__(self, state: State, channel: EngineChannel) -> None:
        super().__init__(state, channel)
        self.unread: int = 0  # bytes of messages that the application hasn't taken, including `UNREAD_OVERHEAD`

    @property
    def held(self) -> int:
        """Bytes of messages that the application hasn't taken, including `UNREAD_OVERHEAD` for each message."""
        return self.unread

    @property
    def is_too_much(self) -> bool:
        """True if this channel, or all unreliable channels together, exceed a limit and must drop old messages."""
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
        state.silence.heard(state.now)
        if (packet.body or not packet.end) and not channel.closing:
            self.hold(packet.body)
            state.report(channel, Received(self, [packet.body]))
        self.receive_end(packet)

    def receive_end(self, packet: Packet) -> None:
        """End this direction of the channel if the packet has `end`."""
        if packet.end:
            self.ended = True
            self.state.report(self.channel, Finished(self))
            self.state.close_if_over(self.channel)

    def consumed(self, items: Sequence[bytes], size: int) -> bool:
        """Stop counting `items`, which the application has taken, or all messages if `items` is empty."""
        self._count(-size - UNREAD_OVERHEAD * len(items) if items else -self.unread)
        return False

    def hold(self, message: bytes) -> None:
        """Count a message that the session stores for the application."""
        self._count(len(message) + UNREAD_OVERHEAD)

    def _count(self, size: int) -> None:
        self.unread += size
        self.state.unread += size

    def done(self) -> None:
        """Accept a channel that the peer has opened. There are no acks, so no message is marked as processed."""
        self.accept()

    def stop(self, reason: Reason) -> None:
        self.channel.closing = True

    def dropped(self) -> None:
        pass  # the session still stores the messages, and the application may take them
