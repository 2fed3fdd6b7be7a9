"""What of ours is under way on a reliable channel, what must go again, and how far ahead may we go?

Every packet with a seq is kept, by seq, until an ack covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.core import Ceiling
from muxkit.protocols.e3x.miss import LISTED_MOST

if TYPE_CHECKING:
    from collections.abc import Iterable

RESEND_PAUSE = 1.0  # s, e3x "miss": "only be resent once until at least one second has passed"
SPOKE_UNASKED = 0.2  # s without an ack; what comes then may be the peer's own repetition, not an answer
PROBE_FIRST = 1.0  # s without an ack until the oldest and the last packet are sent again
PROBE_FACTOR = 1.1
PROBE_MOST = 1.3  # s; so eight times within the ten seconds that a channel lives without an answer


class Piece:
    """One packet of ours, from `send` until it is acked."""

    __slots__ = ("asks", "body", "end", "frag", "is_named", "is_queued", "sent_at", "seq", "times", "type")

    def __init__(self, seq: int, body: bytes, *, type: str | None, end: bool, frag: int) -> None:
        self.seq = seq
        self.body = body
        self.type = type
        self.end = end
        self.frag = frag
        self.times = 0  # how often it was sent
        self.sent_at = 0.0  # when it was sent last
        self.asks = False  # it asked for an ack
        self.is_named = False  # a miss named it
        self.is_queued = False  # it waits to be sent again


class News:
    """What an ack and its miss told."""

    __slots__ = ("first", "is_cut", "is_sure", "last", "lost", "named", "resend", "round_trip")

    def __init__(self, first: int, last: int) -> None:
        self.first = first  # newly acked, none if `last` is smaller
        self.last = last
        self.named = 0  # packets that were named as missing for the first time
        self.lost = 0  # of those, the ones that were sent since the rate fell last
        self.is_cut = False  # so much is missing that the list does not hold it
        self.resend: list[Piece] = []
        self.round_trip: float | None = None
        self.is_sure = True  # it is what it seems to be


class Outgoing:
    """The sending side of a reliable channel."""

    __slots__ = (
        "_ceiling",
        "_most_flying",
        "_most_window",
        "_pieces",
        "acked_at",
        "asked_at",
        "asked_seq",
        "ended",
        "flying",
        "is_cut",
        "next_seq",
        "probe_at",
        "probe_pause",
        "stands_still",
        "timed_at",
        "unsent",
        "waiting_since",
        "watched",
    )

    def __init__(self, window: int, most_window: int, most_flying: int) -> None:
        self._ceiling = Ceiling(min(window, most_window))
        self._most_window = most_window
        self._most_flying = most_flying  # bytes
        self._pieces: dict[int, Piece] = {}
        self.next_seq = 1
        self.unsent = 0  # bytes queued
        self.flying = 0  # bytes sent and not acked
        self.is_cut = False  # the last list of missing packets may have been longer
        self.ended = False  # the last piece is queued
        self.watched = 0  # bytes that somebody waits to send, 0 for nobody
        self.acked_at = 0.0  # when an ack came last
        self.asked_at = -1.0
        self.asked_seq = 0
        self.stands_still = False  # the last ack was as the one before, and something is missing
        self.timed_at: float | None = None  # when the one question was sent that the next such ack answers
        self.waiting_since = 0.0  # since when something is unacked
        self.probe_at: float | None = None
        self.probe_pause = PROBE_FIRST

    @property
    def acked(self) -> int:
        return self._ceiling.acknowledged

    @property
    def sent(self) -> int:
        """The highest seq that has left."""
        return self._ceiling.sent

    @property
    def window(self) -> int:
        """Packets that may be sent ahead of the acks."""
        return self._ceiling.size

    @property
    def limit(self) -> int:
        """The highest seq that the peer accepts: a miss may have put it below what was sent."""
        return self._ceiling.acknowledged + self._ceiling.size

    @property
    def unacked(self) -> Iterable[int]:
        """The seqs that are kept, rising."""
        return self._pieces.keys()

    # --- sending

    def push(self, piece: Piece) -> None:
        self._pieces[piece.seq] = piece
        self.next_seq = piece.seq + 1
        self.unsent += len(piece.body)
        self.ended = piece.end

    def next(self) -> Piece | None:
        """The next new packet, if the window and our own memory let it go.

        None goes while more is missing than the peer can list: what became of it would never be told.
        """
        piece = self._pieces.get(self._ceiling.sent + 1)
        if piece is None or self._ceiling.available <= 0 or self.is_cut:
            return None
        return piece if not self.flying or self.flying + len(piece.body) <= self._most_flying else None

    def mark_sent(self, piece: Piece, now: float) -> None:
        if piece.times == 0:
            if self._ceiling.sent == self._ceiling.acknowledged:
                self.waiting_since = now
                self.probe_pause = PROBE_FIRST
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

    # --- hearing

    def acknowledge(
        self, ack: int, window: int | None, missing: list[int], now: float, fell_at: float = float("-inf")
    ) -> News | None:
        """An ack that is not above `sent` came, `window` and `missing` from its miss; None if it goes back."""
        before = self._ceiling.acknowledged
        if ack < before:
            return None
        self._ceiling.acknowledge(ack, None if window is None else min(window, self._most_window))
        news = News(before + 1, ack)
        rested, self.acked_at = now - self.acked_at, now
        if ack > before:
            self._forget(before, ack, news, now)
            self.timed_at = None
        # Of what was not sent a peer cannot know, and what is above our own bound is not sent again either.
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
                    self.timed_at = None  # the question itself was lost
            # The first resend may follow at once; the second of rest is for repeats.
            if not piece.is_queued and (piece.times == 1 or now >= piece.sent_at + RESEND_PAUSE):
                piece.is_queued = True
                news.resend.append(piece)
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
        """Should this packet, which was just marked as sent, ask for an ack?

        Some four times a round trip, and before silence. While acks stand still behind a missing packet they do not
        say what they answer: then there is one question at a time, so that its answer tells the round trip.
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
        # What a resend set free says how long the resend took; otherwise the packet that asked for this ack does, but
        # not if it has waited for another.
        if asked is not None and is_clean and not self.stands_still:
            news.round_trip = now - asked.sent_at
        elif first.times == 2 and first.is_named:
            news.round_trip, news.is_sure = now - first.sent_at, False
        self.probe_pause = PROBE_FIRST
        self.waiting_since = now
        self.probe_at = now + PROBE_FIRST if self._ceiling.sent > ack else None

    def _seen_beyond(self, last_missing: int, now: float) -> float | None:
        """The packet after the last that is missing has arrived, and that made the peer speak."""
        after = self._pieces.get(last_missing + 1)
        return now - after.sent_at if after is not None and after.times == 1 else None

    # --- waiting

    def probes(self, now: float) -> list[Piece]:
        """Nothing was acked for a while: the oldest and the last packet, each if its second of rest is over.

        The last is the last that the peer accepts: it would drop one above its window, and might not answer.
        """
        oldest, last = self._pieces[self.acked + 1], self._pieces[min(self.sent, self.limit)]
        pieces = [oldest] if oldest is last else [oldest, last]
        rested = [piece for piece in pieces if now >= piece.sent_at + RESEND_PAUSE]
        if rested:
            self.probe_pause = min(self.probe_pause * PROBE_FACTOR, PROBE_MOST)
            self.probe_at = now + self.probe_pause
        else:
            self.probe_at = min(piece.sent_at for piece in pieces) + RESEND_PAUSE
        probes = [piece for piece in rested if not piece.is_queued]
        for piece in probes:
            piece.is_queued = True
        return probes
