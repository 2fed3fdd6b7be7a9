"""How does a flow fare beside TCP? A sender that behaves like one, and its receiver, as packet engines.

Reno with selective acknowledgements, in outline: slow start, a packet more each round trip, half the window when a
packet is lost (at most once a round trip), and a timeout after which it begins anew. It always has something to send.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKET = 1400  # bytes
FIRST_WINDOW = 10.0  # packets
REORDERING = 3  # packets that may overtake one before it counts as lost
LEAST_TIMEOUT = 1.0  # s
_NUMBER = struct.Struct(">Q")


class AimdSender:
    """The sending end; it tells no events."""

    def __init__(self, *, packet: int = PACKET, starts_at: float = 0.0) -> None:
        self.window = FIRST_WINDOW
        self.threshold = float("inf")
        self.halvings = 0
        self.timeouts = 0
        self.round_trip: float | None = None
        self._packet = packet
        self._starts_at = starts_at
        self._next = 0
        self._flying: dict[int, float] = {}  # number: when it was sent
        self._order: deque[int] = deque()  # numbers in the order in which they were sent
        self._recovers_at = 0  # losses of packets below this number were answered already
        self._heard_at = starts_at

    def receive_datagram(self, data: bytes, now: float) -> None:
        (number,) = _NUMBER.unpack_from(data)
        sent_at = self._flying.pop(number, None)
        if sent_at is None:
            return
        self._heard_at = now
        sample = now - sent_at
        self.round_trip = sample if self.round_trip is None else self.round_trip + (sample - self.round_trip) / 8
        self.window += 1 if self.window < self.threshold else 1 / self.window
        while self._order and (self._order[0] not in self._flying or self._order[0] < number - REORDERING):
            lost = self._order.popleft()
            if self._flying.pop(lost, None) is not None and lost >= self._recovers_at:
                self.threshold = self.window = max(2.0, self.window / 2)
                self._recovers_at = self._next
                self.halvings += 1

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        out = []
        if not self._flying:
            self._heard_at = max(self._heard_at, now)
        while now >= self._starts_at and len(self._flying) < int(self.window):
            self._flying[self._next] = now
            self._order.append(self._next)
            out.append(_NUMBER.pack(self._next).ljust(self._packet, b"\0"))
            self._next += 1
        return out

    def events(self) -> Sequence[object]:
        return ()

    @property
    def _timeout(self) -> float:
        return max(LEAST_TIMEOUT, 3 * (self.round_trip or 0.0))

    def next_deadline(self) -> float | None:
        return self._heard_at + self._timeout if self._flying else self._starts_at

    def handle_deadline(self, now: float) -> None:
        if self._flying and now >= self._heard_at + self._timeout:
            self.timeouts += 1
            self.threshold = max(2.0, self.window / 2)
            self.window = 1.0
            self._flying.clear()
            self._order.clear()
            self._recovers_at = self._next
            self._heard_at = now


class AimdReceiver:
    """The receiving end: acknowledges each packet. `arrivals` says when which number of bytes was there in all."""

    def __init__(self) -> None:
        self.arrived = 0  # bytes
        self.arrivals: list[tuple[float, int]] = []
        self._acks: list[bytes] = []

    def receive_datagram(self, data: bytes, now: float) -> None:
        self.arrived += len(data)
        self.arrivals.append((now, self.arrived))
        self._acks.append(data[: _NUMBER.size])

    def datagrams_to_send(self, now: float) -> Sequence[bytes]:
        acks, self._acks = self._acks, []
        return acks

    def events(self) -> Sequence[object]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def handle_deadline(self, now: float) -> None:
        """There is never one."""
