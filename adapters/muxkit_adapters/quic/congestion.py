"""Congestion control of QUIC connections: Reno that also looks at the queue, so that bulk data keeps the path short.

aioquic's Reno grows until a buffer on the path overflows. On many paths that buffer holds a second of data, and a short
message then waits for a second behind bulk data on another stream. If the peer is the slowest part of the path, the
buffer is that of its socket. `QueueAwareReno` reacts earlier, and otherwise does the same as Reno.

Theory of operation
===================

Time is divided into *rounds* of one round trip. The *queue* of a round is the difference between its shortest round
trip and the shortest round trip of the last `MEMORY` to `2 * MEMORY` seconds. The shortest round trip is used, because
a longer one may only show that a process ran late. A queue is *long* if it exceeds `QUEUE_LEAST` seconds, and also the
`QUEUE_SHARE` of the shortest round trip.

    slow start            the window doubles in each round
      |  a round has a long queue, or packets are lost
      v
    congestion avoidance  the window grows by one packet per round, or by `FAST_GROWTH` while there is no queue and
      |                   nothing was lost for a while
      |  `STANDING` rounds in a row have a long queue
      v
    drain                 the window falls to the rate of the path times its shortest round trip, and a bit more

**A window that isn't used shrinks** to twice the bytes that were in flight. aioquic grows it with each acknowledged
packet, even if the application sends little. Such a window would allow a burst that fills any buffer.

**A part of the queue isn't ours.** Other connections may fill it, the path may have become longer, or the processes at
the ends run late all the time because other programs use the processor. So we look at the queue again after a drain.
The queue that is left is the *ambient* queue. Only a queue that is longer than that by the limit counts as long from
then on. If the drain hardly shortened the queue, we restore the window, and don't drain it for `CONTESTED` seconds. In
that time we compete as Reno does.

**Losses** halve the window, as in Reno, with an exception. Some networks lose packets at random, and at a loss of 1 %
Reno carries 0.2 MiB/s over 80 ms, however fast the path is. So we ignore up to `LOSS_SHARE` of all packets, as long as
there is no long queue. If a buffer overflows that is too short to show a queue, more than that are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.recovery import QuicPacketPacer

if TYPE_CHECKING:
    from aioquic.quic.packet_builder import QuicSentPacket

NAME: Final = "muxkit"  # the value of aioquic's option `congestion_control_algorithm`
FIRST_WINDOW: Final = 10  # packets; the window never shrinks below this because it isn't used
LEAST_WINDOW: Final = 4  # packets; a drain never goes below this
LEAST_ROUND: Final = 0.005  # s; shorter round trips are combined into one round
QUEUE_LEAST: Final = 0.004  # s; timers have a granularity of 1 ms at each end, so a shorter queue may be noise
# A queue ends slow start if it exceeds this share of the shortest round trip, in a round with so many measurements.
START_SHARE: Final = 1 / 10
START_SAMPLES: Final = 8
QUEUE_SHARE: Final = 1 / 20  # of the shortest round trip; bulk data may delay a short message by a tenth of it
# While there is no queue, the window grows by 1/32 per round. After three such rounds, the growth doubles each round.
# A larger first step would overshoot: a window that just fills the path has no queue either.
FAST_GROWTH: Final = 1 / 32
FASTER_AFTER: Final = 3  # rounds
FASTEST_GROWTH: Final = 1 / 4
FAST_AFTER: Final = 3.0  # s without a loss, after which the window may grow fast
LOSS_SHARE: Final = 0.02  # of the packets that may be lost without a sign of congestion, as in BBRv2
ALLOWANCE_FIRST: Final = 3.0  # packets
ALLOWANCE_MOST: Final = 10.0  # packets; more losses at once are a sign of congestion in any case
USED: Final = 0.8  # a window counts as used if this share of it was in flight
STANDING: Final = 4  # rounds in a row with a long queue, before we drain it; one may be due to a process that ran late
LOSS_ROUNDS: Final = 2  # the same before a loss counts as congestion
DRAIN_LEAST: Final = 0.5  # one drain leaves at least this share of the window, since the measured rate may be too low
HOLD: Final = 1.25  # rounds after a drain until the effect can be seen
LOOK_ROUNDS: Final = 3  # rounds after a drain whose median tells which part of the queue isn't ours
CONTESTED: Final = 3.0  # s without a drain, after one that didn't shorten the queue
MEMORY: Final = 15.0  # s
# The window is spread over a bit less than a round trip. In slow start it is less, because the window grows meanwhile.
PACE: Final = 1.05
PACE_AT_START: Final = 1.5
LATE: Final = 0.004  # s by which a timer may be late without reducing the rate; the packets of that time form a burst
# Packets of this time are sent together, since each wake-up costs as much as two packets. Acknowledgements arrive every
# millisecond and would otherwise let one packet go each.
QUANTUM: Final = 0.002  # s
GRAIN: Final = 1e-6  # s by which computed times may differ
BURST_WINDOW: Final = 40  # packets; a connection with a smaller window may send `FIRST_WINDOW` packets at once


class Drain(NamedTuple):
    """The time of a drain, and what it found."""

    at: float
    window: int
    queue: float


class QueueAwareReno(RenoCongestionControl):
    """Congestion control for aioquic. The module explains it."""

    congestion_window: int
    ssthresh: int | None

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._packet_size = max_datagram_size
        self._base = self._base_before = inf  # the shortest round trips of this and of the last period of `MEMORY`
        self._base_since = -inf
        self._before_began = self._round_began = self._round_ends = -inf  # the last round, and this one
        self._round_least = inf  # the shortest round trip of this round
        self._samples = 0  # measurements in this round
        self._queues: deque[float] = deque(maxlen=STANDING)  # of the last rounds
        self._rates: deque[float] = deque(maxlen=STANDING)  # bytes per second, each of two rounds
        self._free_rounds = 0  # in a row without a long queue, in which the window was used
        self._acked_before = self._acked = 0  # bytes that were acknowledged in the last round, and in this one
        self._most_in_flight = 0  # in this round
        self._hold_until = -inf
        self._lost_at = -inf  # when a loss has last reduced the window
        self._allowance = ALLOWANCE_FIRST  # losses that may be ignored
        self._is_draining = False
        self._before_drain = Drain(-inf, 0, 0.0)
        self._ambient = 0.0  # the part of the queue that isn't ours, in seconds
        self._contested_until = -inf

    # --- what aioquic reports

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        super().on_packet_sent(packet=packet)
        self._most_in_flight = max(self._most_in_flight, self.bytes_in_flight)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self._acked += packet.sent_bytes
        self._allowance = min(ALLOWANCE_MOST, self._allowance + LOSS_SHARE)
        super().on_packet_acked(now=now, packet=packet)

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        lost = list(packets)
        has_allowance = len(lost) <= self._allowance
        self._allowance = max(0.0, self._allowance - len(lost))
        if has_allowance and not self._is_standing(LOSS_ROUNDS):
            self.on_packets_expired(packets=lost)  # they are no longer in flight
        else:
            self._lost_at = now
            super().on_packets_lost(now=now, packets=lost)

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        if now - self._base_since > MEMORY:
            self._base_before = self._base if now - self._base_since <= 2 * MEMORY else inf
            self._base, self._base_since = inf, now
        self._base = min(self._base, rtt)
        self._round_least = min(self._round_least, rtt)
        self._samples += 1
        if now >= self._round_ends:
            self._end_round(now)

    # --- rounds

    @property
    def _shortest(self) -> float:
        return min(self._base, self._base_before)

    def _is_long(self, queue: float, share: float = QUEUE_SHARE) -> bool:
        return queue > self._ambient + self._long(share)

    def _long(self, share: float = QUEUE_SHARE) -> float:
        """Return how many seconds our own part of a queue may have."""
        return max(QUEUE_LEAST, share * self._shortest)

    def _is_standing(self, rounds: int) -> bool:
        """Return True if each of the last `rounds` rounds had a long queue."""
        return len(self._queues) >= rounds and all(self._is_long(queue) for queue in list(self._queues)[-rounds:])

    def _end_round(self, now: float) -> None:
        queue = max(0.0, self._round_least - self._shortest)
        self._rates.append((self._acked + self._acked_before) / (now - self._before_began))
        if now >= self._hold_until:
            self._queues.append(queue)
            self._react(queue, now)
        self._before_began, self._round_began = self._round_began, now
        self._round_ends = now + max(self._round_least, LEAST_ROUND)
        self._round_least = inf
        self._samples = 0
        self._acked_before, self._acked = self._acked, 0
        self._most_in_flight = self.bytes_in_flight

    def _react(self, queue: float, now: float) -> None:
        if len(self._queues) == STANDING:
            self._ambient = min(self._ambient, median(self._queues))
        if self._most_in_flight < self.congestion_window / 2:
            self._shrink_unused()  # a queue isn't ours then
        elif self.ssthresh is None:
            if self._samples >= START_SAMPLES and self._is_long(queue, START_SHARE):
                self._drain(queue, now)
        elif self._is_draining:
            if len(self._queues) >= LOOK_ROUNDS:
                self._look_at_drain(now)
        elif self._is_standing(STANDING) and now >= self._contested_until:
            self._drain(min(self._queues), now)
        elif self.congestion_window >= self.ssthresh and self._most_in_flight >= USED * self.congestion_window:
            self._grow(queue, now)

    def _drain(self, queue: float, now: float) -> None:
        used = min(self.congestion_window, self._most_in_flight)
        self._is_draining = True
        self._before_drain = Drain(now, used, queue)
        self._free_rounds = 0
        needed = max(self._rates) * (self._shortest + self._ambient + self._long() / 4)
        window = max(needed, DRAIN_LEAST * used, LEAST_WINDOW * self._packet_size)
        self.congestion_window = self.ssthresh = min(int(window), self.congestion_window)
        self._hold_until = now + HOLD * self._round_least
        self._queues.clear()

    def _look_at_drain(self, now: float) -> None:
        """Decide whether the drained queue was ours. The queue that is left isn't."""
        before, left = self._before_drain, median(self._queues)
        self._is_draining = False
        was_ours = left <= max(self._ambient + self._long(), before.queue / 2)
        if was_ours:
            self._ambient = max(0.0, left - self._long() / 2)  # a part of what is left may be ours
        else:
            self._ambient = left
            self._contested_until = now + CONTESTED
            if self._lost_at < before.at:
                self.congestion_window = self.ssthresh = max(self.congestion_window, before.window)

    def _grow(self, queue: float, now: float) -> None:
        """Grow fast while there is no queue. Reno's growth by one packet per round comes in addition."""
        if self._is_long(queue) or now - self._lost_at < FAST_AFTER:
            self._free_rounds = 0
            return
        if self._is_long(2 * queue):
            self._free_rounds = 0
            self.congestion_window += int(FAST_GROWTH / 2 * self.congestion_window)
            return
        self._free_rounds += 1
        growth = min(FASTEST_GROWTH, FAST_GROWTH * 2.0 ** min(9, max(0, self._free_rounds - FASTER_AFTER)))
        self.congestion_window += int(growth * self.congestion_window)

    def _shrink_unused(self) -> None:
        """Forget a part of the window that wasn't used, because it would allow a burst."""
        used = max(FIRST_WINDOW * self._packet_size, 2 * self._most_in_flight)
        if used < self.congestion_window:
            self.congestion_window = used
            if self.ssthresh is not None:
                self.ssthresh = max(self.ssthresh, used)


class LatePacer(QuicPacketPacer):
    """Spreads packets over the round trip. `congestion` decides how fast.

    It differs from aioquic's own pacer in three ways:

    - It makes up for timers that fire late. aioquic's pacer allows bursts of 16 packets. Trio's and asyncio's timers
      have a granularity of 1 ms, so it sends at most 18 MiB/s unless acknowledgements arrive between the timers.
    - While the window is small, it allows a burst of `FIRST_WINDOW` packets, as RFC 9002 does (section 7.7). aioquic's
      pacer allows two or three on a new connection, and makes the next one wait for 7 ms at a round trip of 80 ms.
    - A packet that is sent before its time makes the next one wait longer. aioquic's pacer allows a packet whenever
      some time has passed, however little. So if an acknowledgement arrives for each packet, it doesn't limit the rate.
    """

    bucket_max: float
    bucket_time: float

    def __init__(self, congestion: QuicCongestionControl, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._congestion = congestion
        self._quantum = 0.0  # s for which to wait once the packets that are due have been sent
        self._is_waiting = False
        self._packet_size = max_datagram_size

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        pace = PACE_AT_START if self._congestion.ssthresh is None else PACE
        super().update_rate(congestion_window=int(pace * congestion_window), smoothed_rtt=smoothed_rtt)
        packet_time = self.packet_time or 0.0
        burst = FIRST_WINDOW if congestion_window <= BURST_WINDOW * self._packet_size else 2
        self.bucket_max = max(LATE, burst * packet_time)
        self._quantum = 0.0 if burst > 2 else QUANTUM
        self.bucket_time = min(self.bucket_time, self.bucket_max)

    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]  # aioquic's returns None, too
        if self.packet_time is None:
            return None
        self.update_bucket(now)
        if self._is_waiting:
            self._is_waiting = self.bucket_time < self._quantum - GRAIN
        else:
            self._is_waiting = self.bucket_time < 0
        return now + self._quantum - self.bucket_time if self._is_waiting else None

    def update_after_send(self, now: float) -> None:
        if self.packet_time is not None:
            self.bucket_time -= self.packet_time


register_congestion_control(NAME, QueueAwareReno)
