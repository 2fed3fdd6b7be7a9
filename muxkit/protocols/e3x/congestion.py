"""Congestion control: measures round trips, and decides how fast the engine may send packets.

The specification has no congestion control. It only has the peer's window. Two usual signals don't work here:

- The loss of a packet isn't a signal to slow down, because some networks lose packets at any rate. An algorithm that
  halves the rate at each loss uses only a hundredth of a path that loses 5 % of its packets.
- The number of packets in flight is unknown. The specification allows an ack to stand still behind one missing packet
  for seconds, although the packets after it have arrived.

So the algorithm measures the queue on the path. The queue is the difference between the current round trip and the
shortest round trip of the last half minute.

- `share` is the number of bytes that may be on the path. The engine spreads them evenly over one round trip. When a
  queue grows, the round trip grows, so the rate falls automatically.
- In the beginning, the share doubles with each round trip. That stops when a queue appears, or when a large part of the
  packets is lost.
- Afterwards, the share grows by one packet per round trip, and faster while there is no queue.
- The share is multiplied by 0.6 in two cases. Packets are lost while the queue is about as long as the longest recent
  queue, which means that this queue overflows. Or the percentage of lost packets is clearly above the usual percentage
  of this path, which means that a queue overflows that is too short to be measured. Other losses change nothing.

While the engine doesn't use its share, the share doesn't grow, and shrinks towards twice the number of bytes that the
engine sends. If a timer fires late, a short burst makes up for the lost time.
"""

from __future__ import annotations

from typing import Final

FIRST_SHARE: Final = 10  # packets
FIRST_ROUND_TRIP: Final = 0.1  # seconds, assumed until the first round trip has been measured
LEAST_SHARE: Final = 2  # packets
MOST_SHARE: Final = 2**30  # bytes
# Maximum size of a burst that makes up for a late timer: the bytes of this many seconds, but at least two packets.
BURST: Final = 0.001  # seconds
BURST_LEAST: Final = 2  # packets
LEAST_ROUND: Final = 0.005  # minimum length of a round in seconds; shorter round trips are combined into one round
LEAST_ROUND_TRIP: Final = 1e-5  # seconds
# A doubtful measurement is ignored if it exceeds twice the smoothed round trip by more than this.
UNLIKELY: Final = 0.05  # seconds
FALL: Final = 0.6  # factor for lowering the share
# In the beginning, a round in which more than this part of the packets is lost ends the growth. The loss must be more
# than `START_LEAST` packets. Random losses are never that frequent.
START_LOST: Final = 0.4
START_LEAST: Final = 20  # packets
# After the share was lowered, acks are about packets that were sent before. So the share stays the same for this time.
HOLD: Final = 1.25  # round trips
# While there is no queue, the share grows by 1/16 per round. After three such rounds, the growth doubles each round.
FAST_GROWTH: Final = 1 / 16
FASTER_AFTER: Final = 3  # rounds
QUEUE_SEEN: Final = 0.005  # seconds; a shorter queue may be noise in the measurement
QUEUE_LEAST: Final = 0.005  # seconds; a shorter queue never counts as overflowing
QUEUE_NEAR: Final = 0.5  # a queue counts as overflowing if it is longer than this part of the longest recent queue
# The share is lowered if the ratio of lost packets exceeds the lowest recent ratio by this value.
EXCESS: Final = 0.15
FLOOR_MOST: Final = 0.15  # a ratio above FLOOR_MOST + EXCESS is never random, whatever the lowest ratio is
RATIO_LEAST: Final = 300  # minimum number of packets over which the ratio is measured
MEMORY: Final = 15.0  # seconds; recent minima and maxima cover the last one to two such periods


class Extreme:
    """The smallest number of the last `MEMORY` to `2 * MEMORY` seconds."""

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
    """The congestion control of an engine. It covers all channels, because they share one path."""

    def __init__(self, packet: int, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._packet = packet
        self.share: float = float(FIRST_SHARE * packet)
        self.starting: bool = True
        self.round_trip: float | None = None  # smoothed, in seconds
        self.queue: float = 0.0  # the queue of the last round, in seconds
        self.falls: int = 0
        self.fell_at: float = float("-inf")
        self.free_at: float = float("-inf")  # when the rate allows the next packet
        self._current = FIRST_ROUND_TRIP  # weighted mean of the last rounds' shortest round trips, in seconds
        self._base = Extreme()  # the shortest recent round trip
        self._peak = Extreme()  # the longest recent queue, stored as a negative number
        self._floor = Extreme()  # the lowest recent ratio of lost packets
        self._round_began = self._round_ends = float("-inf")
        self._round_least = float("inf")
        self._hold_until = float("-inf")  # acks before this time are about packets that were sent before the last fall
        self._used = False  # True if a packet had to wait for the rate in this round
        self._round_sent = self._sent_before = 0  # bytes that were sent in this round, and in the previous round
        self._free_rounds = 0  # number of consecutive rounds without a queue
        self._lost = 0  # number of packets that were lost in this round
        self._is_cut = self._was_cut = False
        self._ratio_lost = self._ratio_sent = 0

    @property
    def rate(self) -> float:
        """The current rate in bytes per second."""
        return self.share / self._current

    @property
    def least_round_trip(self) -> float | None:
        """The shortest recent round trip, which is the round trip of an empty path."""
        least = self._base.value
        return None if least == float("inf") else least

    @property
    def ask_pause(self) -> float:
        """Seconds between two packets that ask for an ack, which gives about four such packets per round trip."""
        return 0.02 if self.round_trip is None else min(0.1, max(0.002, self.round_trip / 4))

    # --- sending

    def may_send(self, now: float) -> bool:
        """Return True if the rate allows the engine to send a packet now."""
        if not self.is_on or self.free_at <= now:
            return True
        self._used = True
        return False

    def sent(self, size: int, now: float) -> None:
        """Count a packet that was just sent, and compute when the next one may be sent."""
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
        """Apply the information in an ack.

        Args:
            round_trip: The round trip that the ack has measured, if it has measured one.
            lost: The number of newly lost packets that were sent after `fell_at`.
            now: The current time.
            is_sure: False if the round trip is doubtful. A doubtful round trip is ignored if it is unlikely.
            is_cut: True if the peer misses more packets than a `miss` can list.
        """
        if round_trip is not None and (is_sure or self._is_likely(round_trip)):
            self._add_round_trip(max(round_trip, LEAST_ROUND_TRIP), now)
        self._lost += lost
        self._ratio_lost += lost
        # A list of missing packets stays long for a while, so count only the moment when it becomes too long.
        self._is_cut = self._is_cut or (is_cut and not self._was_cut)
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
            standing = min(queue, self.queue)  # use the shorter of two queues, because one round may be an outlier
            self._peak.add(-standing, now)
            self.queue = queue
        else:  # no round trip was measured, so move towards the round trip of an empty path
            self._current += (self._base.value - self._current) / 4
        span = max(self._current, LEAST_ROUND)
        self._round_ends = now + span
        overflows = self._lost > 0 and standing >= max(QUEUE_LEAST, QUEUE_NEAR * -self._peak.value)
        excess = self._excess(now)
        if self._round_began < self._hold_until:
            pass
        elif self.starting and (self._is_cut or self._loses_much()):
            # The share has doubled since the lost packets were sent, so undo that doubling as well.
            self._fall(now, span, FALL / 2)
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
        """Return True if the path loses clearly more packets than it usually loses at random."""
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
