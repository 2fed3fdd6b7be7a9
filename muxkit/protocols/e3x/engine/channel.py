"""One channel of an engine: its sending side, its receiving side, and the message that is put together from pieces."""

from __future__ import annotations

from collections import deque  # the compiled class looks its annotations up
from enum import Enum
from typing import Final

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import NO_QUEUE, Ceiling, Ranges
from muxkit.protocols.e3x.config import FIRST_WINDOW
from muxkit.protocols.e3x.packets import LISTED_MOST, Packet, encode_miss

NEVER: Final = float("inf")

# sending
RESEND_PAUSE = 1.0  # s, e3x "miss": "only be resent once until at least one second has passed"
SPOKE_UNASKED = 0.2  # s without an ack; the next ack may be a repetition by the peer, not an answer
PROBE_FIRST = 1.0  # s without an ack, after which the oldest and the last packet are sent again
PROBE_FACTOR = 1.1
PROBE_MOST = 1.3  # s; eight probes in the ten seconds that a channel lives without an answer
# A peer that answers a probe, and misses nothing, has everything: its application is at work. The document lets it wait
# with its ack, so there is no hurry. Only that ack can be lost from then on, and a receiver sends such an ack twice.
REST_FIRST = 2.0  # s between an answer and the next probe, doubled with each answer
REST_MOST = 30.0  # s; long enough to cost nothing, and short enough to wait for an ack that was lost twice

# receiving
ACK_DELAY = 1.0  # s, e3x "ack": "for up to one second"
GAP_REPEAT = 0.25  # s between reports of the same gap; not in the document
ACK_SHARE = 4  # an ack is due when a quarter of the window was processed since the last; not in the document


@attrs.define(eq=False)
class EngineChannel:
    """A channel of an engine; read-only, and an argument of the engine's commands."""

    id: int
    type: str = ""
    ours: bool = True
    """Whether this side opened it."""
    outgoing: Outgoing | None = None
    """The sending side of a reliable channel."""
    incoming: Incoming | None = None
    assembly: Assembly | None = None
    datagrams: deque[tuple[bytes, bool]] = NO_QUEUE
    """Unsent messages of an unreliable channel, each with whether it is the last."""
    queued: int = 0
    """Bytes in `datagrams`."""
    announced: bool = False
    """The application knows the peer's channel, or the peer knows this side's channel."""
    taken: bool = True
    """The application has accepted it."""
    ended: bool = False
    """This side sends nothing more."""
    peer_ended: bool = False
    closing: bool = False
    """The application receives nothing more on it."""
    gone: bool = False
    heard_at: float = 0.0
    """When a packet was last received on it."""
    dies_at: float = NEVER
    """When it is removed in any case: it waits for its opening, or for an end that may be lost."""
    timer_at: float = NEVER
    """When its timer fires."""
    in_line: bool = False
    """It is in the line of channels with something to send."""

    @property
    def is_reliable(self) -> bool:
        return self.outgoing is not None

    def due(self, timeout: float) -> float:
        """Return when the engine must act on it next."""
        if self.incoming is None or self.outgoing is None:
            return self.dies_at
        return min(self.dies_at, self.incoming.ack_at, self.outgoing.probe_at, self.silent_at(timeout))

    def silent_at(self, timeout: float) -> float:
        """Return when it breaks because nothing was received while packets are unacked."""
        outgoing = self.outgoing
        if outgoing is None or outgoing.probe_at == NEVER:
            return NEVER
        if outgoing.is_resting:
            return outgoing.probe_at + timeout  # it owes an answer to the next probe, and none before
        return max(self.heard_at, outgoing.waiting_since) + timeout


@attrs.define(eq=False)
class Tombstone:
    """What is kept of a channel that is gone, to answer late packets."""

    until: float
    ack: int | None = None
    """The last seq that was processed, if the channel ended in order: the peer is told it again."""
    processed: int = 0
    """The last seq that was processed, in any case."""
    err: str | None = None
    """The err that this side broke it with."""
    repeats: int = 0
    """How often the err will be sent again: it may be lost, and is not acked."""
    is_ordered: bool = False
    """The application broke the channel: its err is not dropped for the sake of newer ones."""


# --- sending


@attrs.define(eq=False)
class Piece:
    """A packet that this side sends, from `send` until it is acked."""

    seq: int
    body: bytes
    type: str | None
    end: bool
    frag: int
    times: int = 0  # times that it was sent
    sent_at: float = 0.0  # when it was sent last
    asks: bool = False  # it asked for an ack
    is_named: bool = False  # a miss listed it
    is_queued: bool = False  # it waits to be sent again


@attrs.define(eq=False)
class News:
    """The information in an ack and its miss."""

    first: int  # first and last of the newly acked seqs; none if `last` is smaller
    last: int
    resend: list[Piece]
    named: int = 0  # packets that were listed as missing for the first time
    lost: int = 0  # of those, the packets sent since the rate was last lowered
    is_cut: bool = False  # the list may not hold all that is missing
    round_trip: float | None = None
    is_sure: bool = True  # the round trip was measured without doubt


class Outgoing:
    """The sending side of a reliable channel."""

    def __init__(self, window: int, most_window: int, most_flying: int) -> None:
        self._ceiling = Ceiling(min(window, most_window))
        self._most_window = most_window
        self._most_flying = most_flying  # bytes
        self._pieces: dict[int, Piece] = {}
        self.next_seq: int = 1
        self.unsent: int = 0  # bytes queued
        self.flying: int = 0  # bytes sent and not acked
        self.is_cut: bool = False  # the last list of missing packets may have been longer
        self.ended: bool = False  # the last piece is queued
        self.watched = 0  # bytes of the message that a `Writable` event was asked for; 0 for none
        self.acked_at: float = 0.0  # when the last ack arrived
        self.asked_at: float = -1.0
        self.asked_seq: int = 0
        self.stands_still: bool = False  # the last ack did not advance, and packets are missing
        self.timed_at: float | None = None  # while acks stand still: when the packet was sent that the next ack answers
        self.waiting_since: float = 0.0  # since when packets are unacked
        self.probe_at: float = NEVER
        self.probe_pause: float = PROBE_FIRST
        self._probed = 0  # the last packet that the peer accepts, if it was sent again and no answer has come yet
        self.is_resting: bool = False  # the peer has everything that was sent, and its application is at work
        self._rest_pause = REST_FIRST

    @property
    def acked(self) -> int:
        return self._ceiling.acknowledged

    @property
    def sent(self) -> int:
        """The highest seq that was sent."""
        return self._ceiling.sent

    @property
    def window(self) -> int:
        """Packets that may be sent ahead of the acks."""
        return self._ceiling.size

    @property
    def limit(self) -> int:
        """The highest seq that the peer accepts: a miss may have put it below what was sent."""
        return self._ceiling.acknowledged + self._ceiling.size

    # --- sending

    def push(self, piece: Piece) -> None:
        """Queue a new packet."""
        self._pieces[piece.seq] = piece
        self.next_seq = piece.seq + 1
        self.unsent += len(piece.body)
        self.ended = piece.end

    def next(self) -> Piece | None:
        """Return the next new packet if the window and the memory limit allow it to be sent.

        No packet is sent while more is missing than the peer can list: the peer could not report what became of it.
        """
        piece = self._pieces.get(self._ceiling.sent + 1)
        if piece is None or self._ceiling.available <= 0 or self.is_cut:
            return None
        return piece if not self.flying or self.flying + len(piece.body) <= self._most_flying else None

    def mark_sent(self, piece: Piece, now: float) -> None:
        """Count a packet as sent, for the first time or again."""
        if piece.times == 0:
            if self._ceiling.sent == self._ceiling.acknowledged:
                self.waiting_since = now
                self.probe_pause = PROBE_FIRST
                self.probe_at = now + PROBE_FIRST
            elif self.is_resting:
                self._wake(now)
                self.probe_at = now + PROBE_FIRST
            self._ceiling.spend(1)
            self.unsent -= len(piece.body)
            self.flying += len(piece.body)
        piece.times += 1
        piece.sent_at = now
        piece.is_queued = False

    def take_back(self, piece: Piece) -> bool:
        """Return True, and let it be queued anew, if a queued packet must not go again: acked, or above the window."""
        if self._ceiling.acknowledged < piece.seq <= self.limit:
            return False
        piece.is_queued = False
        return True

    # --- acks

    def acknowledge(
        self, ack: int, window: int | None, missing: list[int], now: float, fell_at: float = float("-inf")
    ) -> News | None:
        """Apply an ack up to `sent`, with `window` and `missing` of its miss; None if it is older than the last."""
        before = self._ceiling.acknowledged
        if ack < before:
            return None
        self._ceiling.acknowledge(ack, None if window is None else min(window, self._most_window))
        news = News(before + 1, ack, [])
        rested, self.acked_at = now - self.acked_at, now
        if ack > before:
            self._forget(before, ack, news, now)
            self.timed_at = None
        # The peer cannot know packets that were not sent; those above the own bound are not sent again either.
        highest = min(self._ceiling.sent, self.limit)
        missing = [seq for seq in missing if ack < seq <= highest]
        self.stands_still = ack == before and bool(missing)
        for seq in missing:
            piece = self._pieces[seq]
            if not piece.is_named:
                piece.is_named = True
                news.named += 1
                news.lost += piece.times == 1 and piece.sent_at > fell_at
                if seq == self.asked_seq:
                    self.timed_at = None  # the packet that asked was lost
            # The first resend may follow at once; later ones pause for a second.
            if not piece.is_queued and (piece.times == 1 or now >= piece.sent_at + RESEND_PAUSE):
                piece.is_queued = True
                news.resend.append(piece)
        if self._probed and not missing and ack == before and self._probed == highest:
            self._rest(now)
        was_cut, self.is_cut = self.is_cut, len(missing) >= LISTED_MOST - 1
        news.is_cut = self.is_cut
        if was_cut or news.is_cut:
            self.timed_at = None
        elif news.named and news.round_trip is None:
            news.round_trip = self._seen_beyond(missing[-1], now)
        elif self.stands_still and not news.named and self.timed_at is not None:
            if rested < SPOKE_UNASKED:
                news.round_trip, news.is_sure = now - self.timed_at, False
            self.timed_at = None
        return news

    def wants_ack(self, piece: Piece, now: float, pause: float, round_trip: float | None) -> bool:
        """Whether this packet, which was just marked as sent, asks for an ack.

        About four packets a round trip do, and the last one before a pause. While acks stand still behind a missing
        packet, an ack does not show which packet it answers: then one packet at a time asks, so that its ack measures
        the round trip.
        """
        if self.next() is None:
            return True
        if not self.stands_still:
            return piece.times > 1 or now - self.asked_at >= pause or self._asked_long_ago(piece)
        if round_trip is None or now - self.asked_at < 1.5 * round_trip:
            return False
        return self.timed_at is None or now - self.timed_at > 3 * round_trip

    def _asked_long_ago(self, piece: Piece) -> bool:
        return piece.seq - self.asked_seq >= max(1, self.window // 4)

    def mark_asked(self, piece: Piece, now: float) -> None:
        """Note that this packet asks for an ack."""
        self.timed_at = now if self.stands_still and self.next() is not None else None
        self.asked_at, self.asked_seq = now, piece.seq
        piece.asks = True

    def _forget(self, before: int, ack: int, news: News, now: float) -> None:
        first = self._pieces[before + 1]
        is_clean = True
        asked: Piece | None = None
        for seq in range(before + 1, ack + 1):
            piece = self._pieces.pop(seq)
            self.flying -= len(piece.body)
            is_clean = is_clean and piece.times == 1
            if piece.asks:
                asked = piece
        # The packet that asked for this ack measures the round trip, unless it has waited for another packet. An ack
        # that a resend made possible measures the resend.
        if asked is not None and is_clean and not self.stands_still:
            news.round_trip = now - asked.sent_at
        elif first.times == 2 and first.is_named:
            news.round_trip, news.is_sure = now - first.sent_at, False
        self._probed, self.is_resting, self._rest_pause = 0, False, REST_FIRST
        self.probe_pause = PROBE_FIRST
        self.waiting_since = now
        self.probe_at = now + PROBE_FIRST if self._ceiling.sent > ack else NEVER

    def _seen_beyond(self, last_missing: int, now: float) -> float | None:
        """Return the round trip of the packet after the last missing one, whose arrival made the peer send the miss."""
        after = self._pieces.get(last_missing + 1)
        return now - after.sent_at if after is not None and after.times == 1 else None

    # --- probes

    def probes(self, now: float) -> list[Piece]:
        """Return the packets to send again because no ack came: the oldest and the last, each at most once a second.

        The last is the last one that the peer accepts: it would drop one above its window, and might not answer.
        """
        oldest, last = self._pieces[self.acked + 1], self._pieces[min(self.sent, self.limit)]
        pieces = [oldest] if oldest is last else [oldest, last]
        rested = [piece for piece in pieces if now >= piece.sent_at + RESEND_PAUSE]
        if rested:
            if self.is_resting:
                self._wake(now)
            self._probed = last.seq if last in rested else self._probed
            self.probe_pause = min(self.probe_pause * PROBE_FACTOR, PROBE_MOST)
            self.probe_at = now + self.probe_pause
        else:
            self.probe_at = min(piece.sent_at for piece in pieces) + RESEND_PAUSE
        probes = [piece for piece in rested if not piece.is_queued]
        for piece in probes:
            piece.is_queued = True
        return probes

    def _rest(self, now: float) -> None:
        """A probe was answered: probe again later, and later each time."""
        self._probed = 0
        self.is_resting = True
        self.probe_at = now + self._rest_pause
        self._rest_pause = min(2 * self._rest_pause, REST_MOST)

    def _wake(self, now: float) -> None:
        """End a rest: from now on an answer is due within the timeout."""
        self._probed = 0
        self.is_resting = False
        self.waiting_since = now
        self.probe_pause = PROBE_FIRST


# --- receiving


class Arrival(Enum):
    """What `Incoming.take` did with a packet."""

    KEPT = "kept"
    DUPLICATE = "duplicate"
    BEYOND = "beyond the window"
    FULL = "no memory left"


class Incoming:
    """The receiving side of a reliable channel: packets wait here, by seq, until the application has processed them.

    `processed` is the seq that an ack tells.
    """

    def __init__(self, capacity: int, *, processed: int = 0) -> None:
        self.capacity = capacity  # packets
        self.processed: int = processed
        self.bytes: int = 0
        self.handed: int = 0  # packets after `processed` that the application has
        self.end_seq: int | None = None
        self.ended = False  # the end was processed
        self.ack_now: bool = False
        self.ack_at: float = NEVER
        self.heard_at: float = 0.0
        self._waiting: dict[int, Packet] = {}
        self._seen = Ranges(capacity + 2)  # seqs of the waiting packets
        self._acked = processed  # the last ack that was sent
        self._again = False  # the last ack will be sent once more
        self._asked = 0  # the highest seq of a packet that asked for an ack
        self._late = False  # the ack of the next processed packet is not delayed further
        self._was_asked = False  # the peer has sent a packet again that waits here, and may ask rarely from now on
        self._over_half = False

    # --- arrival

    def take(self, packet: Packet, seq: int, now: float, room: int, room_next: int) -> Arrival:
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
        self._waiting[seq] = packet
        self._seen.add(seq)
        self.bytes += len(packet.body)
        if seq > highest + 1 or (packet.ack is not None and self.has_gaps):
            self.ack_now = True  # a gap, or a packet that asks for an ack and cannot be processed yet
        if packet.ack is not None or seq < highest or packet.end:
            self._asked = max(self._asked, seq)
        else:
            self.ack_at = min(self.ack_at, now + ACK_DELAY)
        over_half = 2 * len(self._waiting) > self.capacity
        if over_half and not self._over_half:
            self.ack_now = True
        self._over_half = over_half
        return Arrival.KEPT

    @property
    def highest(self) -> int:
        """The highest seq that was received."""
        highest = self._seen.highest
        return self.processed if highest is None else highest

    @property
    def has_gaps(self) -> bool:
        """Whether a packet is missing before one that was received."""
        return len(self._seen) > 1 or self.highest > self.processed + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of packets that are not processed."""
        return len(self._waiting)

    # --- processing

    def next(self) -> Packet | None:
        """Return the next packet to process, if it was received and the application has none."""
        return None if self.handed else self._waiting.get(self.processed + 1)

    def further(self) -> Packet | None:
        """Return the packet behind those that the application has, if it was received."""
        return self._waiting.get(self.processed + self.handed + 1)

    def done(self) -> Packet:
        """Count the next packet as processed, and remove it."""
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

    # --- acks

    @property
    def owes_news(self) -> bool:
        """Whether an ack would tell the peer something new."""
        return self.ack_now or self.processed > self._acked

    def handle_time(self, now: float, gap_timeout: float) -> None:
        """Act at `ack_at`. A gap is reported again while packets arrived in the last `gap_timeout` seconds."""
        self.ack_at = NEVER
        if self.processed > self._acked or self._again or (self.has_gaps and now - self.heard_at < gap_timeout):
            self.ack_now = True
        else:
            self._late = True  # there is nothing to tell before the application is done

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

    def mark_acked(self, now: float) -> None:
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
            self.ack_at = now + ACK_DELAY if self._waiting else NEVER

    def _missing(self, most: int) -> list[int]:
        missing: list[int] = []
        for first, last in self._seen.missing(self.processed + 1, self.highest):
            missing.extend(range(first, min(last + 1, first + most - len(missing))))
            if len(missing) >= most:
                break
        return missing


@attrs.define(eq=False)
class Reassembly:
    """Counts the bytes of incomplete messages on all channels of an engine."""

    limits: Limits
    used: int = 0


class Assembly:
    """A message that is put together from pieces.

    Pieces are not in the document. Those before the last are processed when they arrive, so that a message may be
    larger than the window; the last one is processed when the application is done with the message.
    """

    __slots__ = ("_bytes", "_shared", "expected", "size")

    def __init__(self, shared: Reassembly) -> None:
        self._shared = shared
        self._bytes = bytearray()  # not a list: a piece of one byte would cost fifty
        self.size: int = 0
        self.expected: int = 0  # pieces missing

    def add(self, frag: int, piece: bytes) -> bytes | None:
        """Add a piece; return the message with its last piece, None before that."""
        if self.expected == 0 and frag == 0:
            return piece
        self._check(frag, piece)
        if frag == 0:
            message = bytes(self._bytes + piece)
            self.drop()
            return message
        self._bytes += piece
        self.expected = frag
        self.size += len(piece)
        self._shared.used += len(piece)
        return None

    def _check(self, frag: int, piece: bytes) -> None:
        if self.expected and frag != self.expected - 1:
            raise RemoteProtocolError(f"a piece before {frag} others where one before {self.expected - 1} must come")
        if not piece:
            raise RemoteProtocolError(f"an empty piece before {frag} others")
        limits = self._shared.limits
        # Pieces have one size, except the last: a message above the limit is refused at its first piece.
        announced = self.size + len(piece) * max(1, frag if not self.expected else 1)
        if announced > limits.message:
            raise RemoteProtocolError(
                f"a message of at least {announced} bytes against {limits.message} allowed", limit="message"
            )
        if self._shared.used + len(piece) > limits.reassembly:
            raise RemoteProtocolError(
                f"{self._shared.used} bytes of unfinished messages against {limits.reassembly} allowed",
                limit="reassembly",
            )

    def drop(self) -> None:
        """Discard the pieces."""
        self._shared.used -= self.size
        self._bytes = bytearray()
        self.size = self.expected = 0
