"""Congestion control: measures round trips, and decides how many bytes the path may hold and when a packet may be sent.

None of it is in the document, which knows only the peer's window. On a network that loses packets anyway a loss says
nothing about the rate: halving it at each loss leaves a hundredth of the path at 5 % of loss. An ack that stands still
behind one packet, which the document allows for seconds, says nothing about the packets in flight. So packets in flight
are not counted. The measure is the queue: the round trip's excess over the least one of the last half minute.

- `share` is the number of bytes that the path may hold. They are sent evenly over one current round trip, so the rate
  falls by itself as a queue grows.
- At the start the share doubles with each round trip, until a queue shows or much of what was sent is lost.
- Afterwards it grows by a packet a round trip, and faster while no queue shows.
- It falls to 0.6 when packets are lost while the queue is near the longest one of late (that queue overflows), or when
  the share of lost packets is well above its own floor (a queue too short to be measured). Other losses change nothing.

The share does not grow while it is not used, and shrinks towards twice what is used. A short burst makes up for coarse
timers.
"""

from __future__ import annotations

from typing import Final

FIRST_SHARE: Final = 10  # packets
FIRST_ROUND_TRIP: Final = 0.1  # s, assumed until the first is measured
LEAST_SHARE: Final = 2  # packets
MOST_SHARE: Final = 2**30  # bytes
BURST: Final = 0.001  # s of the rate that may be sent late at once
BURST_LEAST: Final = 2  # packets
LEAST_ROUND: Final = 0.005  # s; shorter rounds are joined
LEAST_ROUND_TRIP: Final = 1e-5  # s
UNLIKELY: Final = 0.05  # s beyond twice the round trip
FALL: Final = 0.6
START_LOST: Final = 0.4  # of what a round sent; more is never a random loss
START_LEAST: Final = 20  # packets lost
HOLD: Final = 1.25  # round trips
FAST_GROWTH: Final = 1 / 16  # a round, while no queue is to be seen
FASTER_AFTER: Final = 3  # such rounds; then twice as fast after each further one
QUEUE_SEEN: Final = 0.005  # s; a shorter one may be noise
QUEUE_LEAST: Final = 0.005  # s; a queue that is shorter never counts as near its longest
QUEUE_NEAR: Final = 0.5  # of the longest
EXCESS: Final = 0.15  # share of lost packets above the floor
FLOOR_MOST: Final = 0.15  # more than this and the excess together is never a random loss
RATIO_LEAST: Final = 300  # packets over which the share of lost ones is measured
MEMORY: Final = 15.0  # s; minima and maxima cover one to two of these


class Extreme:
    """The least number of the last `MEMORY` to `2 * MEMORY` seconds."""

    def __init__(self) -> None:
        self._now = self._then = float("inf")
        self._since = 0.0

    @property
    def value(self) -> float:
        return min(self._now, self._then)

    def add(self, number: float, now: float) -> None:
        if now - self._since > MEMORY:
            self._then = self._now if now - self._since <= 2 * MEMORY else float("inf")
            self._now = float("inf")
            self._since = now
        self._now = min(self._now, number)


class Congestion:
    """The congestion control for all channels to one peer, which share a path."""

    def __init__(self, packet: int, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._packet = packet
        self.share: float = float(FIRST_SHARE * packet)
        self.starting: bool = True
        self.round_trip: float | None = None  # s, smoothed
        self.queue: float = 0.0  # s, the excess of the last round
        self.falls: int = 0
        self.fell_at: float = float("-inf")
        self.free_at: float = float("-inf")  # when the next packet may be sent
        self._current = FIRST_ROUND_TRIP  # s, mean of the last rounds
        self._base = Extreme()
        self._peak = Extreme()  # of the negative excess: the longest queue
        self._floor = Extreme()  # of the share of lost packets
        self._round_began = self._round_ends = float("-inf")
        self._round_least = float("inf")
        self._hold_until = float("-inf")  # acks until then are about packets sent before the last fall
        self._used = False  # a packet had to wait for the rate in this round
        self._round_sent = self._sent_before = 0  # bytes, in this round and the one before
        self._free_rounds = 0  # rounds without a queue, in a row
        self._lost = 0  # packets in this round
        self._is_cut = self._was_cut = False
        self._ratio_lost = self._ratio_sent = 0

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.share / self._current

    @property
    def least_round_trip(self) -> float | None:
        """The least round trip of late, without any queue."""
        least = self._base.value
        return None if least == float("inf") else least

    @property
    def ask_pause(self) -> float:
        """Seconds between packets that ask for an ack: about four a round trip."""
        return 0.02 if self.round_trip is None else min(0.1, max(0.002, self.round_trip / 4))

    # --- sending

    def may_send(self, now: float) -> bool:
        """Return True if the rate allows a packet now."""
        if not self.is_on or self.free_at <= now:
            return True
        self._used = True
        return False

    def sent(self, size: int, now: float) -> None:
        """Count a sent packet that the rate governs."""
        self._ratio_sent += 1
        self._round_sent += size
        rate = self.rate
        if self.round_trip is None:
            burst = FIRST_SHARE * self._packet / rate
        else:
            burst = max(BURST, BURST_LEAST * self._packet / rate)
        self.free_at = max(self.free_at, now - burst) + size / rate

    # --- acks

    def ack_received(
        self, round_trip: float | None, lost: int, now: float, *, is_sure: bool = True, is_cut: bool = False
    ) -> None:
        """Apply an ack: a round trip, if it measured one, and `lost` packets that were sent since `fell_at`.

        A round trip that is not sure counts if it is likely. `is_cut` means that more is missing than can be listed.
        """
        if round_trip is not None and (is_sure or self._is_likely(round_trip)):
            self._add_round_trip(max(round_trip, LEAST_ROUND_TRIP), now)
        self._lost += lost
        self._ratio_lost += lost
        self._is_cut = self._is_cut or (is_cut and not self._was_cut)  # once: the list stays long for a while
        self._was_cut = is_cut
        if now >= self._round_ends and self.round_trip is not None:
            self._end_round(now)

    def _is_likely(self, round_trip: float) -> bool:
        return self.round_trip is not None and self._base.value <= round_trip <= 2 * self.round_trip + UNLIKELY

    def _add_round_trip(self, round_trip: float, now: float) -> None:
        if self.round_trip is None:
            self.round_trip = self._current = round_trip
            self._round_ends = now + max(round_trip, LEAST_ROUND)
        else:
            self.round_trip += (round_trip - self.round_trip) / 8
        self._base.add(round_trip, now)
        self._round_least = min(self._round_least, round_trip)

    def _end_round(self, now: float) -> None:
        has_sample = self._round_least < float("inf")
        standing = 0.0
        if has_sample:
            self._current += (self._round_least - self._current) / 2
            queue = max(0.0, self._round_least - self._base.value)
            standing = min(queue, self.queue)  # a single long round trip may be an outlier
            self._peak.add(-standing, now)
            self.queue = queue
        else:  # no round trip was measured: a queue may be over
            self._current += (self._base.value - self._current) / 4
        span = max(self._current, LEAST_ROUND)
        self._round_ends = now + span
        overflows = self._lost > 0 and standing >= max(QUEUE_LEAST, QUEUE_NEAR * -self._peak.value)
        excess = self._excess(now)
        if self._round_began < self._hold_until:
            pass
        elif self.starting and (self._is_cut or self._loses_much()):
            self._fall(now, span, FALL / 2)  # the lost packets were sent before the last doubling
        elif excess or overflows or self._is_cut:
            self._fall(now, span, FALL)
        elif self._used and has_sample:
            self._grow()
        elif not self._used:
            self.share = min(self.share, max(FIRST_SHARE * self._packet, 2 * self._round_sent, FALL * self.share))
        self._round_began = now
        self._sent_before, self._round_sent = self._round_sent, 0
        self._lost = 0
        self._is_cut = False
        self._used = False
        self._round_least = float("inf")

    def _loses_much(self) -> bool:
        return self._lost * self._packet > START_LOST * self._sent_before > START_LEAST * self._packet

    def _fall(self, now: float, span: float, factor: float) -> None:
        self.falls += 1
        self.fell_at = now
        self.starting = False
        self.share = max(LEAST_SHARE * self._packet, self.share * factor)
        self._hold_until = now + HOLD * span
        self._free_rounds = 0

    def _excess(self, now: float) -> bool:
        """Return True if clearly more packets are lost than this path loses at random."""
        if self._ratio_sent < RATIO_LEAST:
            return False
        ratio = self._ratio_lost / self._ratio_sent
        self._ratio_lost = self._ratio_sent = 0
        self._floor.add(ratio, now)
        return ratio > min(FLOOR_MOST, self._floor.value) + EXCESS

    def _grow(self) -> None:
        if self.starting and self.queue > min(0.02, max(QUEUE_SEEN, self._base.value / 8)):
            self.starting = False
            self.share *= FALL
            return
        step = float(self._packet)
        if self.starting:
            step = self.share
        elif self.queue < QUEUE_SEEN:
            self._free_rounds += 1
            growth = min(1 / 2, FAST_GROWTH * 2.0 ** max(0, min(9, self._free_rounds - FASTER_AFTER)))
            step = max(step, self.share * growth * (1 - self.queue / QUEUE_SEEN))
        else:
            self._free_rounds = 0
        self.share = min(MOST_SHARE, self.share + step)
