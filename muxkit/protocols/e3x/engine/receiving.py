"""What has come on a reliable channel, what is missing, and what do we owe the peer to say?

Packets wait here, by seq, from their arrival until the application has processed them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from muxkit.core import Ranges
from muxkit.protocols.e3x.config import FIRST_WINDOW
from muxkit.protocols.e3x.miss import LISTED_MOST, encode_miss

if TYPE_CHECKING:
    from muxkit.protocols.e3x.packets import Packet

ACK_DELAY = 1.0  # s, e3x "ack": "for up to one second"
GAP_REPEAT = 0.25  # s between reports of one and the same gap; ours
ACK_SHARE = 4  # an ack is due at the latest when a quarter of the window was processed since the last; ours


class Arrival(Enum):
    """What became of a packet with a seq?"""

    KEPT = "kept"
    DUPLICATE = "duplicate"
    BEYOND = "beyond the window"
    FULL = "no memory left"


class Incoming:
    """The receiving side of a reliable channel. `processed` is what an ack says."""

    __slots__ = (
        "_acked",
        "_again",
        "_asked",
        "_late",
        "_over_half",
        "_seen",
        "_waiting",
        "ack_at",
        "ack_now",
        "bytes",
        "capacity",
        "end_seq",
        "ended",
        "handed",
        "heard_at",
        "processed",
    )

    def __init__(self, capacity: int, *, processed: int = 0) -> None:
        self.capacity = capacity  # packets
        self.processed = processed
        self.bytes = 0
        self.handed = 0  # packets after `processed` that are with the application
        self.end_seq: int | None = None
        self.ended = False  # the end was processed
        self.ack_now = False
        self.ack_at: float | None = None
        self.heard_at = 0.0
        self._waiting: dict[int, Packet] = {}
        self._seen = Ranges(capacity + 2)  # seqs of what waits
        self._acked = processed  # what the peer was told last
        self._again = False  # what was acked last will be once more
        self._asked = 0  # the highest seq whose sender wants an ack soon
        self._late = False  # what comes to be processed next has waited for its second already
        self._over_half = False

    # --- arriving

    def take(self, packet: Packet, seq: int, now: float, room: int, room_next: int) -> Arrival:
        """A packet came; there are `room` bytes for it if it is to wait, `room_next` if it is the next in order."""
        self.heard_at = now
        if seq <= self.processed or seq in self._waiting:
            # An ack that was lost would otherwise be missed forever.
            self.ack_now = True
            return Arrival.DUPLICATE
        if seq > self.processed + self.capacity:
            self.ack_now = True
            return Arrival.BEYOND
        # There is always some room for the next packet in order, or the channel could wait for memory forever.
        if len(packet.body) > (room_next if seq == self.processed + 1 else room):
            self.ack_now = True
            return Arrival.FULL
        highest = self.highest
        self._waiting[seq] = packet
        self._seen.add(seq)
        self.bytes += len(packet.body)
        if seq > highest + 1 or (packet.ack is not None and self.has_gaps):
            self.ack_now = True  # a gap, or a question that cannot be answered by processing
        if packet.ack is not None or seq < highest or packet.end:
            self._asked = max(self._asked, seq)
        elif self.ack_at is None or self.ack_at > now + ACK_DELAY:
            self.ack_at = now + ACK_DELAY
        over_half = 2 * len(self._waiting) > self.capacity
        if over_half and not self._over_half:
            self.ack_now = True
        self._over_half = over_half
        return Arrival.KEPT

    @property
    def highest(self) -> int:
        """The highest seq that came."""
        highest = self._seen.highest
        return self.processed if highest is None else highest

    @property
    def has_gaps(self) -> bool:
        return len(self._seen) > 1 or self.highest > self.processed + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Packets that came and are not processed."""
        return len(self._waiting)

    # --- processing

    def next(self) -> Packet | None:
        """The packet to process next, if it is there and the application has none."""
        return None if self.handed else self._waiting.get(self.processed + 1)

    def further(self) -> Packet | None:
        """The packet behind those that the application has, if it is there."""
        return self._waiting.get(self.processed + self.handed + 1)

    def done(self) -> Packet:
        """The packet that `next` gave is processed."""
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
        return packet

    # --- acknowledging

    @property
    def owes_news(self) -> bool:
        """Has something been processed that the peer was not told of?"""
        return self.ack_now or self.processed > self._acked

    def handle_time(self, now: float, patience: float) -> None:
        """The moment of `ack_at` has come. A gap is reported again as long as the peer was heard of lately."""
        self.ack_at = None
        if self.processed > self._acked or self._again or (self.has_gaps and now - self.heard_at < patience):
            self.ack_now = True
        else:
            self._late = True
            self.ack_at = now + ACK_DELAY

    def ack(self, most: int, *, wants_miss: bool = True) -> tuple[int, list[int] | None] | None:
        """`ack` and `miss` as they stand, the array at most `most` long; None if that is too short."""
        has_gaps = self.has_gaps
        needs_miss = has_gaps or self._over_half or self.processed == 0
        if needs_miss and most < (2 if has_gaps else 1):
            return None
        # A peer counts on `FIRST_WINDOW` packets until it is told: another window is told with each ack of its own.
        if needs_miss or (wants_miss and self.capacity != FIRST_WINDOW):
            most = min(most, LISTED_MOST)
            return self.processed, encode_miss(self.processed, self._missing(most), self.capacity, most=most)
        return self.processed, None

    def mark_acked(self, now: float) -> None:
        """What `ack` gave goes out now."""
        # An ack of much is said once more: the peer may stand still until it comes, and nothing acks an ack.
        self._again = (self.processed - self._acked) * ACK_SHARE >= self.capacity
        self.ack_now = False
        self._acked = self.processed
        if self.has_gaps or self._again:
            self.ack_at = now + GAP_REPEAT
        else:
            self.ack_at = now + ACK_DELAY if self._waiting else None

    def _missing(self, most: int) -> list[int]:
        missing: list[int] = []
        for first, last in self._seen.missing(self.processed + 1, self.highest):
            missing.extend(range(first, min(last + 1, first + most - len(missing))))
            if len(missing) >= most:
                break
        return missing
