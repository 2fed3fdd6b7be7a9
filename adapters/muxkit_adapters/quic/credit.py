"""What did we let a QUIC peer send, and when do we let him send more? Once somebody has consumed it, never before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._old_parts import Granted, GrantedStreams

BUSY = 1.0  # s; half a window consumed within this: the stream could use a larger one


@attrs.define
class _Arriving:
    """What was granted on one stream, and what became of it."""

    window: int
    granted: int
    renewed_at: float
    delivered: int = 0
    consumed: int = 0
    loan: int = 0
    is_over: bool = False


class Credit:
    """Windows of bytes for each stream and for all of them, and how many streams there may be.

    `granted = consumed + window + loan`, told to the peer when half of a window has come together. A window doubles,
    up to `most`, while it is used quickly and all that grew together leave half of the connection's to the others.
    """

    def __init__(
        self, *, first: int, most: int, data: Granted, streams: GrantedStreams, grant: Callable[[int, int], None]
    ) -> None:
        self._first = first
        self._most = most
        self._data = data
        self._window = data.granted
        self._streams = streams
        self._grant = grant
        self._arriving: dict[int, _Arriving] = {}
        self._consumed = 0
        self._loans = 0
        self._grown = 0

    @property
    def held(self) -> int:
        """Bytes that were handed out and not consumed."""
        return sum(arriving.delivered - arriving.consumed for arriving in self._arriving.values())

    def arrived(self, stream: int, size: int, now: float) -> None:
        """Bytes of a stream were handed to the application."""
        arriving = self._arriving.get(stream)
        if arriving is None:
            arriving = self._arriving[stream] = _Arriving(self._first, self._first, now)
        arriving.delivered += size

    def ended(self, stream: int, final_size: int, now: float) -> None:
        """Nothing more will come; what was granted for bytes that never came is free again."""
        self.arrived(stream, 0, now)
        arriving = self._arriving[stream]
        arriving.is_over = True
        self._consumed += final_size - arriving.delivered
        self._loans -= arriving.loan
        arriving.loan = 0
        self._grown -= arriving.window - self._first
        self._renew_all()
        self._release(stream, arriving)

    def consumed(self, stream: int, amount: int, now: float) -> bool:
        """The application is done with so many bytes; True if the peer is to be told of something."""
        arriving = self._arriving.get(stream)
        if arriving is None:
            return False
        amount = min(amount, arriving.delivered - arriving.consumed)
        arriving.consumed += amount
        self._consumed += amount
        repaid = min(arriving.loan, amount)
        arriving.loan -= repaid
        self._loans -= repaid
        has_news = self._renew_all()
        if arriving.is_over:
            return self._release(stream, arriving) or has_news
        return self._renew(stream, arriving, now) or has_news

    def lend(self, stream: int, amount: int) -> bool:
        """Let the peer send more than the window; False if he has ended the stream."""
        arriving = self._arriving.get(stream)
        if arriving is None or arriving.is_over:
            return False
        arriving.loan += amount
        self._loans += amount
        self._data.granted += amount
        self._tell(stream, arriving, arriving.granted + amount)
        return True

    def _release(self, stream: int, arriving: _Arriving) -> bool:
        if arriving.consumed < arriving.delivered:
            return False
        del self._arriving[stream]
        self._streams.done += 1
        return self._streams.is_due

    def _renew(self, stream: int, arriving: _Arriving, now: float) -> bool:
        if 2 * (arriving.consumed + arriving.window + arriving.loan - arriving.granted) < arriving.window:
            return False
        larger = min(2 * arriving.window, self._most)
        growth = larger - arriving.window
        if now - arriving.renewed_at < BUSY and 2 * (self._grown + growth) <= self._window:
            self._grown += growth
            arriving.window = larger
        arriving.renewed_at = now
        self._tell(stream, arriving, arriving.consumed + arriving.window + arriving.loan)
        return True

    def _renew_all(self) -> bool:
        limit = self._consumed + self._window + self._loans
        if 2 * (limit - self._data.granted) < self._window:
            return False
        self._data.granted = limit
        return True

    def _tell(self, stream: int, arriving: _Arriving, limit: int) -> None:
        arriving.granted = limit
        self._grant(stream, limit)
