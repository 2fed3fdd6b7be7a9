"""The core of metrics: counts what all sessions of a program do and store. Backends read the results.

Engines do no work for metrics. `Metrics.collect` reads the counters of each live session and adds those of ended
sessions. Only waits, round trips, limits and outages are reported as they happen.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Final, Literal, Protocol, TypeAlias

import attrs
import trio

from muxkit._info import SessionInfo
from muxkit._observer import BaseObserver, Blocked, Counted
from muxkit.runtime import LinkLost

ROUND_TRIPS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of the buckets of round trips, in seconds."""
OTHER_PEERS: Final = "other"
"""Stands for all peers beyond `label_peers`."""

Kind = Literal["counter", "gauge", "histogram"]
BLOCKED: Final[tuple[Blocked, ...]] = ("credit", "transport")


@attrs.frozen
class Metric:
    """One metric: its name without a backend's suffixes, and its labels in addition to those of the session."""

    name: str
    kind: Kind
    unit: str
    help: str
    label: str | None = None


SESSIONS: Final = Metric("muxkit_sessions", "gauge", "", "Live sessions.")
OPENED: Final = Metric("muxkit_sessions_opened", "counter", "", "Sessions that began.")
ENDED: Final = Metric(
    "muxkit_sessions_ended", "counter", "", "Sessions that ended: in order, lost, or by an error.", "how"
)
CHANNELS: Final = Metric("muxkit_channels", "gauge", "", "Live channels.")
QUEUED: Final = Metric("muxkit_queued_bytes", "gauge", "bytes", "Accepted by send and not taken by the transport yet.")
BYTES: Final = Metric("muxkit_transport_bytes", "counter", "bytes", "Bytes over the transport.", "direction")
MESSAGES: Final = Metric("muxkit_messages", "counter", "", "Messages of channels.", "direction")
WAITING: Final = Metric("muxkit_senders_waiting", "gauge", "", "Tasks that wait to send.", "on")
WAITS: Final = Metric("muxkit_send_waits", "counter", "", "Times that a send had to wait.", "on")
BLOCKED_SECONDS: Final = Metric(
    "muxkit_send_blocked_seconds", "counter", "seconds", "Time that sends waited, with those that wait now.", "on"
)
ROUND_TRIP: Final = Metric("muxkit_round_trip_seconds", "histogram", "seconds", "Round trips of pings.")
LIMITS: Final = Metric("muxkit_limits_reached", "counter", "", "Times that peers reached a limit.", "limit")
OUTAGES: Final = Metric("muxkit_outages", "counter", "", "Lost connections of links that wait for another.")
RESUMED: Final = Metric("muxkit_resumptions", "counter", "", "Links that got a connection again.")
OUTAGE_SECONDS: Final = Metric(
    "muxkit_outage_seconds", "counter", "seconds", "Time without a connection of links and sessions that came back."
)
RECONNECTIONS: Final = Metric(
    "muxkit_reconnections", "counter", "", "Sessions that muxkit.reconnecting opened after one was over."
)

METRICS: Final = (
    SESSIONS,
    OPENED,
    ENDED,
    CHANNELS,
    QUEUED,
    BYTES,
    MESSAGES,
    WAITING,
    WAITS,
    BLOCKED_SECONDS,
    ROUND_TRIP,
    LIMITS,
    OUTAGES,
    RESUMED,
    RECONNECTIONS,
    OUTAGE_SECONDS,
)
"""All metrics, in the order in which they are shown."""


@attrs.frozen
class Histogram:
    """The number of round trips in each bucket, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One count for each bound, not cumulative, and one for values above the last."""
    sum: float


Labels = tuple[str, ...]


@attrs.frozen
class Family:
    """A metric with its values by labels. `labels` are the names of the labels."""

    metric: Metric
    labels: tuple[str, ...]
    values: dict[Labels, float | Histogram]

    def add(self, key: Labels, number: float) -> None:
        """Add to a value that is a number."""
        before = self.values.get(key, 0)
        assert not isinstance(before, Histogram)
        self.values[key] = before + number


Numbers: TypeAlias = "defaultdict[str, float]"


def _numbers() -> Numbers:
    return defaultdict(float)


@attrs.define
class _Sums:
    """Numbers that can be added up, of one session or of all sessions that have ended."""

    opened: int = 0
    ended: Numbers = attrs.field(factory=_numbers)
    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    waits: Numbers = attrs.field(factory=_numbers)
    blocked: Numbers = attrs.field(factory=_numbers)  # s
    round_trips: list[int] = attrs.field(factory=list)  # by class; empty before the first
    round_trip_sum: float = 0.0
    limits: Numbers = attrs.field(factory=_numbers)
    outages: int = 0
    resumed: int = 0
    outage_seconds: float = 0.0

    def add(self, other: _Sums) -> None:
        self.opened += other.opened
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.messages_in += other.messages_in
        self.messages_out += other.messages_out
        self.round_trip_sum += other.round_trip_sum
        self.outages += other.outages
        self.resumed += other.resumed
        self.outage_seconds += other.outage_seconds
        for mine, theirs in (
            (self.ended, other.ended),
            (self.waits, other.waits),
            (self.blocked, other.blocked),
            (self.limits, other.limits),
        ):
            for key, value in [*theirs.items()]:
                mine[key] += value
        if other.round_trips:
            if not self.round_trips:
                self.round_trips = [0] * len(other.round_trips)
            self.round_trips = [one + more for one, more in zip(self.round_trips, other.round_trips, strict=True)]


class SessionMeter(BaseObserver):
    """What one session did in addition to its own counters. Created by `Metrics.connection`."""

    wants_frames: ClassVar[bool] = False

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._key: Labels | None = None
        self._sums = _Sums(opened=1)
        self._waiting: dict[Blocked, int] = {}
        self._since: dict[Blocked, float] = {}  # the sum of the times at which they began to wait
        self.session: Counted | None = None
        """The session while it lives."""
        self._is_broken = False
        self.channels: int = 0
        self.queued: int = 0

    def session_began(self, session: Counted) -> None:
        self.session = session
        self._metrics._live[self] = None

    def session_ended(self, session: Counted, error: BaseException | None) -> None:
        metrics, sums = self._metrics, self._sums
        with metrics._lock:
            how = _how(error)
            sums.ended["lost" if how == "in_order" and self._is_broken else how] += 1
            self._count(session)
            self.session = None
            metrics._live.pop(self, None)
            metrics._ended.setdefault(self._place(session.info), _Sums()).add(sums)

    def wait_began(self, on: Blocked) -> None:
        self._sums.waits[on] += 1
        self._waiting[on] = self._waiting.get(on, 0) + 1
        self._since[on] = self._since.get(on, 0.0) + trio.current_time()

    def wait_ended(self, on: Blocked, seconds: float) -> None:
        self._sums.blocked[on] += seconds
        left = self._waiting[on] = self._waiting[on] - 1
        self._since[on] = self._since[on] - (trio.current_time() - seconds) if left else 0.0

    def round_trip(self, seconds: float) -> None:
        bounds = self._metrics.round_trips
        if not self._sums.round_trips:
            self._sums.round_trips = [0] * (len(bounds) + 1)
        self._sums.round_trips[bisect_left(bounds, seconds)] += 1
        self._sums.round_trip_sum += seconds
        if self._metrics.on_round_trip and self.session is not None:
            labels = self._place(self.session.info)
            for tell in self._metrics.on_round_trip:
                tell(seconds, labels)

    def limit(self, name: str) -> None:
        self._sums.limits[name] += 1

    def broken(self) -> None:
        self._is_broken = True

    def outage(self) -> None:
        self._sums.outages += 1

    def resumed(self, seconds: float) -> None:
        self._is_broken = False
        self._sums.resumed += 1
        self._sums.outage_seconds += seconds

    # --- for the collection

    def _count(self, session: Counted) -> None:
        """Read the counters of the session."""
        try:
            stats, sums = session.stats(), self._sums
        except RuntimeError:  # it changed while another thread read it; then what was read before counts
            return
        sums.bytes_in, sums.bytes_out = stats.bytes_received, stats.bytes_sent
        sums.messages_in, sums.messages_out = stats.messages_received, stats.messages_sent
        self.channels = stats.channels
        self.queued = stats.queued

    def _place(self, info: SessionInfo) -> Labels:
        """Return the labels, which don't change afterwards."""
        if self._key is None:
            self._key = self._metrics._labels_of(info)
        return self._key


class Included(Protocol):
    """Has its own metrics, which are shown after those of the sessions, such as those of a Spark query."""

    def collect(self) -> list[Family]:
        """Return the metrics as they are now. It may be called in any thread."""


class Metrics(BaseObserver):
    """Counts what sessions do: `muxkit.connect(url, observer=metrics)`, and the same for servers.

    The labels are the protocol and the transport. With `label_peers=N`, the host of the peer is a label for the first N
    hosts, and `other` for the rest.
    """

    wants_frames: ClassVar[bool] = False

    def __init__(self, *, label_peers: int = 0, round_trips: Sequence[float] = ROUND_TRIPS) -> None:
        if not round_trips or sorted(set(round_trips)) != list(round_trips):
            raise ValueError(f"round_trips={round_trips!r}: must be bounds in seconds that ascend")
        self.round_trips: tuple[float, ...] = tuple(round_trips)
        self.labels: tuple[str, ...] = ("protocol", "transport", "peer") if label_peers else ("protocol", "transport")
        """The names of the labels that all metrics have."""
        self.on_round_trip: list[Callable[[float, Labels], None]] = []
        """Called with each round trip and the labels of its session, for a backend that has histograms of its own."""
        self._label_peers = label_peers
        self._included: list[Included] = []
        self._peers: set[str] = set()
        self._live: dict[SessionMeter, None] = {}
        self._ended: dict[Labels, _Sums] = {}  # by labels, the sums of what is over
        self._turned_away: dict[Labels, Numbers] = {}  # by limit
        self._reconnected: dict[Labels, tuple[int, float]] = {}  # and the seconds
        self._shown: dict[tuple[Labels, Blocked], float] = {}  # seconds blocked, as last collected
        self._now = 0.0
        self._lock = threading.Lock()  # metrics may be collected by another thread

    def connection(self, name: str = "") -> SessionMeter:
        """Create the observer of a session that begins."""
        return SessionMeter(self)

    def turned_away(self, limit: str, protocol: str, transport: str) -> None:
        key = self._labels_of(SessionInfo(protocol=protocol, transport=transport, peer=""))
        self._turned_away.setdefault(key, _numbers())[limit] += 1

    def reconnected(self, seconds: float, protocol: str, transport: str) -> None:
        key = self._labels_of(SessionInfo(protocol=protocol, transport=transport, peer=""))
        count, total = self._reconnected.get(key, (0, 0.0))
        self._reconnected[key] = count + 1, total + seconds

    def include(self, other: Included) -> None:
        """Also show the metrics of another object, after those of the sessions. OpenTelemetry doesn't get them."""
        self._included.append(other)

    def sessions(self) -> list[Counted]:
        """Return the live sessions."""
        return [meter.session for meter in [*self._live] if meter.session is not None]

    def collect(self) -> list[Family]:
        """Return all metrics as they are now; it reads the counters of each live session."""
        with suppress(RuntimeError):  # in another thread: waits that are not over end where they were last seen
            self._now = trio.current_time()
        families = {
            metric: Family(metric, (*self.labels, metric.label) if metric.label else self.labels, {})
            for metric in METRICS
        }
        with self._lock:
            groups = self._groups()
        for key, group in groups.items():
            group.show(key, families, self.round_trips)
        for key, limits in [*self._turned_away.items()]:
            for limit, number in [*limits.items()]:
                families[LIMITS].add((*key, limit), number)
        for key, (reconnections, seconds) in [*self._reconnected.items()]:
            families[RECONNECTIONS].add(key, reconnections)
            families[OUTAGE_SECONDS].add(key, seconds)
        return [*families.values(), *(family for other in self._included for family in other.collect())]

    # --- inside

    def _groups(self) -> dict[Labels, _Group]:
        groups: dict[Labels, _Group] = {}
        for key, sums in [*self._ended.items()]:
            groups.setdefault(key, _Group()).sums.add(sums)
        for meter in [*self._live]:
            session = meter.session
            if session is None:
                continue
            meter._count(session)
            info = session.info
            if meter._key is None and not info.transport and not meter._sums.bytes_in:
                continue  # a link without a connection: it is not known yet what will carry it
            groups.setdefault(meter._place(info), _Group()).take(meter, self._now)
        for key, group in groups.items():
            for on in BLOCKED:  # a sum of floats may fall a little, and a counter must not
                shown = self._shown[key, on] = max(group.sums.blocked[on], self._shown.get((key, on), 0.0))
                group.sums.blocked[on] = shown
        return groups

    def _labels_of(self, info: SessionInfo) -> Labels:
        labels = (info.protocol, info.transport)
        if not self._label_peers:
            return labels
        peer = _host_of(info.peer)
        if peer not in self._peers:
            if len(self._peers) >= self._label_peers:
                return (*labels, OTHER_PEERS)
            self._peers.add(peer)
        return (*labels, peer)


@attrs.define
class _Group:
    """All sessions with the same labels, during a collection."""

    sums: _Sums = attrs.field(factory=_Sums)
    live: int = 0
    channels: int = 0
    queued: int = 0
    waiting: Numbers = attrs.field(factory=_numbers)

    def take(self, meter: SessionMeter, now: float) -> None:
        self.sums.add(meter._sums)
        self.live += 1
        self.channels += meter.channels
        self.queued += meter.queued
        for on, count in [*meter._waiting.items()]:
            if count:
                self.waiting[on] += count
                self.sums.blocked[on] += max(0.0, count * now - meter._since[on])

    def show(self, key: Labels, families: dict[Metric, Family], bounds: tuple[float, ...]) -> None:
        sums = self.sums
        for metric, value in (
            (SESSIONS, self.live),
            (OPENED, sums.opened),
            (CHANNELS, self.channels),
            (QUEUED, self.queued),
            (OUTAGES, sums.outages),
            (RESUMED, sums.resumed),
            (RECONNECTIONS, 0),
            (OUTAGE_SECONDS, sums.outage_seconds),
        ):
            families[metric].values[key] = value
        both = ("in", "out")
        by_label: tuple[tuple[Metric, Mapping[str, float]], ...] = (
            (ENDED, {how: sums.ended[how] for how in ("in_order", "lost", "error")}),
            (BYTES, dict(zip(both, (sums.bytes_in, sums.bytes_out), strict=True))),
            (MESSAGES, dict(zip(both, (sums.messages_in, sums.messages_out), strict=True))),
            (WAITING, {on: self.waiting[on] for on in BLOCKED}),
            (WAITS, {on: sums.waits[on] for on in BLOCKED}),
            (BLOCKED_SECONDS, {on: sums.blocked[on] for on in BLOCKED}),
            (LIMITS, sums.limits),
        )
        for metric, values in by_label:
            for label, number in values.items():
                families[metric].values[*key, label] = number
        counts = tuple(sums.round_trips) or (0,) * (len(bounds) + 1)
        families[ROUND_TRIP].values[key] = Histogram(bounds, counts, sums.round_trip_sum)


def _how(error: BaseException | None) -> str:
    if error is None or not isinstance(error, Exception):  # a cancellation is how this side ends a session
        return "in_order"
    return "lost" if isinstance(error, LinkLost) else "error"


def _host_of(peer: str) -> str:
    """Return the host of a peer such as `tcp 127.0.0.1:7000`."""
    address = peer.partition(" ")[2]
    host, colon, port = address.rpartition(":")
    return host if colon and port.isdigit() else address
