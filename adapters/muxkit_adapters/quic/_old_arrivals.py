"""What came on a QUIC connection and nobody has taken yet? Small pieces of a stream put together, datagrams counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit import RemoteProtocolError
from muxkit.runtime import Datagram, StreamData, StreamReset, StreamStopped

if TYPE_CHECKING:
    from muxkit import Limits
    from muxkit.runtime import Arrival

JOIN_BELOW = 16 * 1024  # bytes of one stream that are put together
DATAGRAMS_MOST = 1024  # that wait; more are dropped
DATAGRAM_BYTES_MOST = 1024 * 1024


class Arrivals:
    """In the order in which they came; bytes are bounded by the credit that was granted for them."""

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []
        self._tails: dict[int, _Tail] = {}  # the last of each stream, to be added to
        self._datagrams = 0
        self._datagram_bytes = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Arrival]:
        """All of it."""
        waiting, self._waiting = self._waiting, []
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()
        self._datagrams = self._datagram_bytes = 0
        return waiting

    def add_data(self, stream: int, data: bytes, is_last: bool) -> None:
        tail = self._tails.get(stream)
        if tail is not None and tail.size < JOIN_BELOW:
            tail.add(data, is_last)
            return
        if tail is not None:
            tail.close()
        arrival = StreamData(stream, data, is_last)
        self._waiting.append(arrival)
        self._tails[stream] = _Tail(arrival)

    def add_reset(self, stream: int) -> None:
        if (tail := self._tails.pop(stream, None)) is not None:
            tail.close()
        self._waiting.append(StreamReset(stream))

    def add_stop(self, stream: int) -> None:
        self._waiting.append(StreamStopped(stream))

    def add_datagram(self, data: bytes) -> None:
        if self._datagrams >= DATAGRAMS_MOST or self._datagram_bytes + len(data) > DATAGRAM_BYTES_MOST:
            self.dropped += 1
            return
        self._datagrams += 1
        self._datagram_bytes += len(data)
        self._waiting.append(Datagram(data))


class Resets:
    """A peer may open streams and give them up at once, as fast as `Limits` let him; each costs us more than him."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._left = float(limits.resets_burst)
        self._at = now
        self.asked: set[int] = set()
        """Streams that we wanted him to give up."""

    def count(self, stream: int, now: float) -> bool:
        """One was given up; False if that was one too many."""
        if stream in self.asked:
            self.asked.discard(stream)
            return True
        renewed = self._left + (now - self._at) * self._limits.resets_per_second
        self._left = min(renewed, float(self._limits.resets_burst)) - 1
        self._at = now
        return self._left >= 0

    @property
    def error(self) -> RemoteProtocolError:
        most = self._limits.resets_burst
        return RemoteProtocolError(f"more than {most} streams were given up at once", limit="resets_per_second")


class _Tail:
    """The last data of a stream that nobody has taken yet; more of it is added without a copy for each piece."""

    __slots__ = ("_arrival", "_pieces", "size")

    def __init__(self, arrival: StreamData) -> None:
        self._arrival = arrival
        self._pieces: list[bytes] = [arrival.data]
        self.size = len(arrival.data)

    def add(self, data: bytes, is_last: bool) -> None:
        self._pieces.append(data)
        self.size += len(data)
        self._arrival.is_last = is_last

    def close(self) -> None:
        if len(self._pieces) > 1:
            self._arrival.data = b"".join(self._pieces)
