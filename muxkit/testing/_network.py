"""A simulated network for packet engines: it loses, duplicates, delays and queues packets, on a virtual clock.

    network = Network(seed=17)
    line = Bottleneck(1_250_000, queue=64_000)
    network.join(one, other, there=PathWeather(delay=0.025, loss=0.05), via=line, on_other=took)
    network.run(60.0)
    print(network.report())

This module depends neither on Trio nor on any protocol. The same seed and the same engines give the same run, packet by
packet.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import attrs

from muxkit.core import DatagramEngine

EventT = TypeVar("EventT")
OtherT = TypeVar("OtherT")

FLOW_PACKET = 1400  # bytes
FIRST_WINDOW = 10.0  # packets
REORDERING = 3  # a packet counts as lost when a packet sent more than this many later was acknowledged
SHORTEST_TIMEOUT = 1.0  # s
_NUMBER = struct.Struct(">Q")
MOST_AT_ONCE = 100_000  # steps at one moment of the clock; an engine that takes more is in an endless loop


@attrs.frozen(kw_only=True)
class PathWeather:
    """The network conditions in one direction. Probabilities are from 0 to 1, and times are in seconds.

    Attributes:
        delay: the time that each packet takes.
        jitter: up to this much is added at random, so that packets may overtake each other.
        loss: the probability that a packet is lost.
        burst: the probability that a packet starts a burst, in which all packets are lost.
        burst_length: the average duration of a burst.
        duplication: the probability that a packet arrives twice.
        reordering: the probability that a packet takes `late` longer, so that later packets overtake it.
        late: the additional time of such packets.
        corruption: the probability that a packet arrives with one byte changed.
        mtu: larger packets are lost without notice. None means no limit.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    burst: float = 0.0
    burst_length: float = 0.05
    duplication: float = 0.0
    reordering: float = 0.0
    late: float = 0.05
    corruption: float = 0.0
    mtu: int | None = None


class Bottleneck:
    """A line of `bandwidth` bytes per second with a queue of `queue` bytes. Several paths may share it."""

    def __init__(self, bandwidth: float, *, queue: int, keep: bool = True) -> None:
        self._keeps = keep
        self.bandwidth = bandwidth
        self.queue = queue
        self.waiting: int = 0
        self.carried: int = 0  # bytes
        self.refused: int = 0  # packets that arrived at a full queue
        self.samples: list[tuple[float, int]] = []
        """For each packet, its arrival time and the bytes that were queued before it. Empty with `keep=False`."""
        self._free_at = 0.0
        self._leaving: deque[tuple[float, int]] = deque()

    def enter(self, size: int, now: float) -> float | None:
        """Return when a packet that arrives now will have left the line, or None if the queue is full."""
        while self._leaving and self._leaving[0][0] <= now:
            self.waiting -= self._leaving.popleft()[1]
        if self._keeps:
            self.samples.append((now, self.waiting))
        if self.waiting + size > self.queue:
            self.refused += 1
            return None
        self._free_at = max(self._free_at, now) + size / self.bandwidth
        self.waiting += size
        self.carried += size
        self._leaving.append((self._free_at, size))
        return self._free_at


class Fate(Enum):
    """The fates of packets."""

    ARRIVED = "arrived"
    UNDER_WAY = "under way"
    LOST = "lost"
    BURST = "lost in a burst"
    QUEUE = "refused by a full queue"
    LARGE = "larger than the path takes"


@attrs.define
class Journey:
    """The life of one packet."""

    number: int
    path: str
    size: int
    sent_at: float
    fate: Fate = Fate.UNDER_WAY
    arrived_at: list[float] = attrs.field(factory=list)
    """The arrival time of each copy."""
    is_doubled: bool = False
    is_late: bool = False
    is_corrupt: bool = False


class Path:
    """One direction between two engines."""

    def __init__(self, name: str, weather: PathWeather, via: Bottleneck | None, seed: str) -> None:
        self.name = name
        self.weather = weather
        """The network conditions. They may be changed while the network runs."""
        self.via = via
        self.fates: Counter[Fate] = Counter()
        self.doubled: int = 0
        self.late: int = 0
        self.corrupt: int = 0
        self.bytes_sent: int = 0
        self.bytes_arrived: int = 0
        self._random = random.Random(seed)
        self._burst_until = float("-inf")

    def send(self, packet: bytes, journey: Journey) -> list[tuple[float, bytes]]:
        """Return each copy that arrives, with its arrival time."""
        weather, chance, now = self.weather, self._random.random, journey.sent_at
        self.bytes_sent += len(packet)
        # Every packet draws the same values, so that changing one probability doesn't change the draws of the others.
        lost, burst, doubled, bent = chance(), chance(), chance(), chance()
        delays = [(chance() * weather.jitter, chance() < weather.reordering) for _ in range(2)]
        if burst < weather.burst and now >= self._burst_until:
            self._burst_until = now + self._random.expovariate(1 / max(1e-9, weather.burst_length))
        if weather.mtu is not None and len(packet) > weather.mtu:
            return self._gone(journey, Fate.LARGE)
        if now < self._burst_until:
            return self._gone(journey, Fate.BURST)
        if lost < weather.loss:
            return self._gone(journey, Fate.LOST)
        leaves = now if self.via is None else self.via.enter(len(packet), now)
        if leaves is None:
            return self._gone(journey, Fate.QUEUE)
        if bent < weather.corruption and packet:
            place = self._random.randrange(len(packet))
            packet = packet[:place] + bytes([packet[place] ^ self._random.randrange(1, 256)]) + packet[place + 1 :]
            journey.is_corrupt = True
        journey.is_doubled = doubled < weather.duplication
        journey.is_late = delays[0][1]
        self.corrupt += journey.is_corrupt
        self.doubled += journey.is_doubled
        self.late += journey.is_late
        copies = delays if journey.is_doubled else delays[:1]
        return [(leaves + weather.delay + jitter + is_late * weather.late, packet) for jitter, is_late in copies]

    def _gone(self, journey: Journey, fate: Fate) -> list[tuple[float, bytes]]:
        journey.fate = fate
        self.fates[fate] += 1
        return []

    def arrived(self, journey: Journey, now: float) -> None:
        """Count a packet that arrived."""
        if not journey.arrived_at:
            journey.fate = Fate.ARRIVED
            self.fates[Fate.ARRIVED] += 1
        journey.arrived_at.append(now)
        self.bytes_arrived += journey.size


@attrs.define(eq=False)
class _End:
    """An engine, its outgoing path, and the number of the end to which that path leads."""

    engine: DatagramEngine[object]
    out: Path
    sends_to: int
    tell: Callable[[Sequence[Any] | None], None]
    """Dispatches the events that a call returned, and then those that the engine has queued."""

    def pull(self, now: float) -> Sequence[bytes]:
        self.tell(None)
        packets = self.engine.datagrams_to_send(now)
        self.tell(None)
        return packets


def _teller(
    engine: DatagramEngine[EventT], listener: Callable[[EventT], None] | None
) -> Callable[[Sequence[EventT] | None], None]:
    def tell(returned: Sequence[EventT] | None) -> None:
        events = returned or engine.events()
        while events:  # a listener may call the engine, which may queue more events
            if listener is not None:
                for event in events:
                    listener(event)
            events = engine.events()

    return tell


class Network:
    """Engines, the paths between them, and a virtual clock.

    `journeys` records every packet. With `keep=False`, only counters are kept.
    """

    def __init__(self, seed: int = 0, *, now: float = 0.0, keep: bool = True) -> None:
        self.now: float = now
        self.journeys: list[Journey] = []
        self.paths: list[Path] = []
        self._seed = seed
        self._keep = keep
        self._ends: list[_End] = []
        self._count = 0
        self._arrivals: list[tuple[float, int, int, bytes, Journey]] = []
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def join(
        self,
        one: DatagramEngine[EventT],
        other: DatagramEngine[OtherT],
        *,
        there: PathWeather | None = None,
        back: PathWeather | None = None,
        via: Bottleneck | None = None,
        back_via: Bottleneck | None = None,
        on_one: Callable[[EventT], None] | None = None,
        on_other: Callable[[OtherT], None] | None = None,
        name: str = "",
    ) -> tuple[Path, Path]:
        """Connect two engines.

        Args:
            one: the first engine.
            other: the second engine.
            there: the conditions from the first to the second engine. By default packets arrive without delay or loss.
            back: the conditions in the other direction. By default those of `there`.
            via: a bottleneck from the first to the second engine.
            back_via: a bottleneck in the other direction.
            on_one: called with each event of the first engine.
            on_other: called with each event of the second engine.
            name: the name of the paths in reports.

        Returns:
            The path from the first to the second engine, and the path back.
        """
        there = there or PathWeather()
        name = name or f"{len(self.paths) // 2}"
        first = len(self._ends)
        way = Path(f"{name}/there", there, via, f"{self._seed}/{name}/there")
        home = Path(f"{name}/back", back or there, back_via, f"{self._seed}/{name}/back")
        self._ends.append(_End(one, way, first + 1, _teller(one, on_one)))
        self._ends.append(_End(other, home, first, _teller(other, on_other)))
        self.paths += (way, home)
        return way, home

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Call `function` at a time of the virtual clock, for example to call an engine or to change a path."""
        self._count += 1
        heapq.heappush(self._calls, (when, self._count, function))

    def run(self, until: float) -> None:
        """Run until the clock reaches `until`."""
        self.run_until(lambda: False, most=until)
        self.now = max(self.now, until)

    def run_until(self, is_over: Callable[[], bool], *, most: float) -> bool:
        """Run until `is_over()` is true or the clock reaches `most`. Return True if it was over in time.

        Raises:
            AssertionError: if an engine keeps working without letting the clock move.
        """
        for end in range(len(self._ends)):  # the caller may have used the engines since the last run
            self._pull(end)
        at_once = 0
        while not is_over():
            moment = self._next_moment()
            if moment is None or moment > most:
                return False
            at_once = at_once + 1 if moment <= self.now else 0
            if at_once > MOST_AT_ONCE:
                raise AssertionError(f"{MOST_AT_ONCE} steps at {self.now} s, and the clock does not move")
            self.now = max(self.now, moment)
            self._step()
        return True

    def _next_moment(self) -> float | None:
        moments = [due for end in self._ends if (due := end.engine.next_deadline()) is not None]
        if self._arrivals:
            moments.append(self._arrivals[0][0])
        if self._calls:
            moments.append(self._calls[0][0])
        return min(moments, default=None)

    def _step(self) -> None:
        """Make one scheduled call, deliver one packet, or handle the deadlines that are due."""
        if self._calls and self._calls[0][0] <= self.now:
            heapq.heappop(self._calls)[2]()
            for end in range(len(self._ends)):
                self._pull(end)
        elif self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, end, packet, journey = heapq.heappop(self._arrivals)
            self._ends[self._ends[end].sends_to].out.arrived(journey, self.now)
            running = self._ends[end]
            running.tell(running.engine.receive_datagram(packet, self.now))
            self._pull(end)
        else:
            for number, running in enumerate(self._ends):
                due = running.engine.next_deadline()
                if due is not None and due <= self.now:
                    running.tell(running.engine.handle_deadline(self.now))
                    self._pull(number)

    def _pull(self, number: int) -> None:
        end = self._ends[number]
        for packet in end.pull(self.now):
            self._count += 1
            journey = Journey(self._count, end.out.name, len(packet), self.now)
            if self._keep:
                self.journeys.append(journey)
            for arrives, copy in end.out.send(packet, journey):
                self._count += 1
                heapq.heappush(self._arrivals, (arrives, self._count, end.sends_to, copy, journey))

    def report(self) -> str:
        """Return how many packets met which fate, one line per path."""
        lines = []
        for path in self.paths:
            told = [f"{count:,} {fate.value}" for fate, count in sorted(path.fates.items(), key=lambda it: it[0].value)]
            for count, what in ((path.doubled, "doubled"), (path.late, "late"), (path.corrupt, "corrupt")):
                if count:
                    told.append(f"{count:,} {what}")
            lines.append(f"{path.name}: {path.bytes_sent:,} bytes sent; {', '.join(told) or 'nothing'}")
        return "\n".join(lines)


# A flow that behaves like TCP, to compete with the engine under test


class AimdSender:
    """The sending end, with additive increase and multiplicative decrease. It has no events."""

    def __init__(self, *, packet: int = FLOW_PACKET, starts_at: float = 0.0) -> None:
        self.window: float = FIRST_WINDOW
        self.threshold: float = float("inf")
        self.halvings: int = 0
        self.timeouts: int = 0
        self.round_trip: float | None = None
        self._packet = packet
        self._starts_at = starts_at
        self._next = 0
        self._flying: dict[int, float] = {}  # packet number: when it was sent
        self._order: deque[int] = deque()  # packet numbers in the order of sending
        self._recovers_at = 0  # losses of packets below this number have already halved the window
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
        return max(SHORTEST_TIMEOUT, 3 * (self.round_trip or 0.0))

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
    """The receiving end, which acknowledges each packet. `arrivals` holds times and the total of bytes by then."""

    def __init__(self) -> None:
        self.arrived: int = 0  # bytes
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
        """Do nothing: there are no deadlines."""
