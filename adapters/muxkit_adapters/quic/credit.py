"""Credit for a QUIC peer: how much the peer may send. We raise it when data is consumed, and not when it arrives.

The windows of streams follow the path, as in all protocols (`muxkit.core.receive_windows`). QUIC measures the round
trip itself. In addition to each stream, QUIC limits the connection: the bytes that arrived on any stream and were not
consumed, including lost bytes. Streams could use up this limit and block streams that are read. Therefore the windows
that have grown share `GROWN_SHARE` of it, and the rest remains for the window that each stream has from its start.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from aioquic.quic.connection import Limit

from muxkit.runtime import ReceiveBudget, ReceiveWindow, RoundTrip

GROWN_SHARE = 0.75  # share of the connection's window that streams may use for grown windows
STREAMS_AT_ONCE = 256  # streams that the peer may open in advance, which bounds how many streams one frame can create


class Credit:
    """Windows for the bytes of each stream and of the connection, and the number of streams that the peer may open.

    The limit of a stream is the sum of its consumed bytes, its window and its loan. The limit of the connection is the
    sum of the consumed bytes of all streams, its window and all loans. We send it when it has grown by half a window.
    """

    def __init__(
        self, *, first: int, most: int, data: Granted, streams: GrantedStreams, grant: Callable[[int, int], None]
    ) -> None:
        self._most = most
        self._data = data
        self._window = data.granted
        self._budget = ReceiveBudget(int(GROWN_SHARE * self._window), first, first)
        self._streams = streams
        self._grant = grant
        self._arriving: dict[int, _StreamCredit] = {}
        self._consumed = 0
        self._loans = 0

    @property
    def held(self) -> int:
        """Bytes that were delivered to the application but not consumed."""
        return sum(arriving.window.held for arriving in self._arriving.values())

    @property
    def round_trip(self) -> RoundTrip:
        """The round trip from which the sizes of windows are computed. QUIC adds samples to it."""
        return self._budget.round_trip

    def of(self, stream: int) -> int:
        """Return how many more bytes the peer may send on a stream, in addition to the delivered ones."""
        arriving = self._arriving.get(stream)
        return 0 if arriving is None else arriving.window.credit

    def arrived(self, stream: int, size: int, now: float) -> None:
        """Count bytes of a stream that were delivered to the application."""
        arriving = self._arriving.get(stream)
        if arriving is None:
            window = ReceiveWindow(self._most, self._budget)
            arriving = self._arriving[stream] = _StreamCredit(window, window.start(now))
        arriving.window.arrived(size)
        arriving.delivered += size

    def ended(self, stream: int, final_size: int, now: float) -> None:
        """Handle the end of a stream. Credit for bytes that never arrived becomes available again."""
        self.arrived(stream, 0, now)
        arriving = self._arriving[stream]
        arriving.is_over = True
        self._consumed += final_size - arriving.delivered
        self._loans -= arriving.window.retire()
        self._renew_all()
        self._release(stream, arriving)

    def consumed(self, stream: int, amount: int, now: float) -> bool:
        """Count bytes that the application has consumed. Return True if there is a new limit to send."""
        arriving = self._arriving.get(stream)
        if arriving is None:
            return False
        amount = min(amount, arriving.window.held)
        grant, repaid = arriving.window.consumed(amount, now)
        self._consumed += amount
        self._loans -= repaid
        has_news = self._renew_all()
        if arriving.is_over:
            return self._release(stream, arriving) or has_news
        if grant:
            self._tell(stream, arriving, grant)
        return grant > 0 or has_news

    def lend(self, stream: int, amount: int) -> bool:
        """Let the peer send more than the window allows. Return False if the stream has ended."""
        arriving = self._arriving.get(stream)
        if arriving is None or arriving.is_over:
            return False
        arriving.window.lend(amount)
        self._loans += amount
        self._data.granted += amount
        self._tell(stream, arriving, amount)
        return True

    def _release(self, stream: int, arriving: _StreamCredit) -> bool:
        if arriving.window.held:
            return False
        del self._arriving[stream]
        self._streams.done += 1
        return self._streams.is_due

    def _renew_all(self) -> bool:
        limit = self._consumed + self._window + self._loans
        if 2 * (limit - self._data.granted) < self._window:
            return False
        self._data.granted = limit
        return True

    def _tell(self, stream: int, arriving: _StreamCredit, more: int) -> None:
        arriving.granted += more
        self._grant(stream, arriving.granted)


@attrs.define
class _StreamCredit:
    """The credit of one stream, and its delivered bytes."""

    window: ReceiveWindow
    granted: int
    delivered: int = 0
    is_over: bool = False


class Granted(Limit):
    """A limit that aioquic reads but can't raise. `granted` is its value."""

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
    """The number of streams that the peer may open.

    It limits both the streams that are open simultaneously and those that the peer opens in advance. A withheld stream
    has ended, but doesn't make room for another one yet.
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
        """True if the new limit should be sent now: when it adds more streams than the peer has left."""
        return self.sent - self.used < self.value - self.sent
