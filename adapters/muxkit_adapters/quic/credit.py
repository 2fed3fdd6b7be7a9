"""Credit for a QUIC peer: how much it may send, raised when data is consumed and not when it arrives."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from aioquic.quic.connection import Limit

BUSY = 1.0  # s; a stream that consumes half a window within this time could use a larger one
STREAMS_AT_ONCE = 256  # streams that the peer may open ahead, which bounds what one frame can create


class Credit:
    """Windows of bytes for each stream and for all of them, and the number of streams that the peer may open.

    `granted = consumed + window + loan`, told to the peer once it has grown by half a window. A window that is used
    quickly doubles, up to `most`, while all growth together takes at most half of the connection's window.
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
        self._arriving: dict[int, _StreamCredit] = {}
        self._consumed = 0
        self._loans = 0
        self._grown = 0

    @property
    def held(self) -> int:
        """Bytes that were handed to the application and not consumed."""
        return sum(arriving.delivered - arriving.consumed for arriving in self._arriving.values())

    def arrived(self, stream: int, size: int, now: float) -> None:
        """Count bytes of a stream that were handed to the application."""
        arriving = self._arriving.get(stream)
        if arriving is None:
            arriving = self._arriving[stream] = _StreamCredit(self._first, self._first, now)
        arriving.delivered += size

    def ended(self, stream: int, final_size: int, now: float) -> None:
        """End a stream; credit for bytes that never came is free again."""
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
        """Count bytes that the application has consumed; return True if there is news for the peer."""
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
        """Let the peer send more than the window; return False if it has ended the stream."""
        arriving = self._arriving.get(stream)
        if arriving is None or arriving.is_over:
            return False
        arriving.loan += amount
        self._loans += amount
        self._data.granted += amount
        self._tell(stream, arriving, arriving.granted + amount)
        return True

    def _release(self, stream: int, arriving: _StreamCredit) -> bool:
        if arriving.consumed < arriving.delivered:
            return False
        del self._arriving[stream]
        self._streams.done += 1
        return self._streams.is_due

    def _renew(self, stream: int, arriving: _StreamCredit, now: float) -> bool:
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

    def _tell(self, stream: int, arriving: _StreamCredit, limit: int) -> None:
        arriving.granted = limit
        self._grant(stream, limit)


@attrs.define
class _StreamCredit:
    """The credit of one stream, and the bytes received and consumed."""

    window: int
    granted: int
    renewed_at: float
    delivered: int = 0
    consumed: int = 0
    loan: int = 0
    is_over: bool = False


class Granted(Limit):
    """A limit that aioquic reads and cannot raise; `granted` is its value."""

    def __init__(self, like: Limit, granted: int) -> None:
        self.granted = granted
        super().__init__(like.frame_type, like.name, granted)

    @property
    def value(self) -> int:
        return self.granted

    @value.setter
    def value(self, value: int) -> None:
        pass


class GrantedStreams(Granted):
    """The number of streams that the peer may open: those open at once are bounded, and those opened ahead.

    A stream that is withheld has ended, and does not make room for another one yet.
    """

    def __init__(self, like: Limit, most: int) -> None:
        self.most = most
        self.done = 0
        self.withheld = 0
        super().__init__(like, min(most, STREAMS_AT_ONCE))

    @property
    def value(self) -> int:
        return min(self.done - self.withheld + self.most, self.used + STREAMS_AT_ONCE)

    @value.setter
    def value(self, value: int) -> None:
        pass

    @property
    def is_due(self) -> bool:
        """True if the peer should be told now: when the news gives it more streams than it has left."""
        return self.sent - self.used < self.value - self.sent
