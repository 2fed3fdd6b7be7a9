"""Metrics for OpenTelemetry: instruments of its API, which a program's SDK reads and exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from muxkit.metrics.collecting import METRICS, Family, Histogram, Labels, Metric, Metrics
from muxkit.runtime import ExtraNeeded

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ImportError as _missing:
    raise ExtraNeeded("opentelemetry-api", "otel") from _missing

FRESH_SECONDS: Final = 0.1  # for which one collection serves all instruments
UNITS: Final = {"seconds": "s", "bytes": "By"}


def instrument(metrics: Metrics, meter: Meter | None = None) -> None:
    """Export metrics with OpenTelemetry, using your own meter or the one named `muxkit`.

    Names are those of Prometheus with the prefix `muxkit.` and without the unit: `muxkit.sessions`,
    `muxkit.send_blocked`. Call this once for each `Metrics`. The SDK reads them in its own thread, so waits that
    haven't ended count until they were last seen.
    """
    meter = meter or get_meter("muxkit")
    recent = _Recent(metrics)
    for metric in METRICS:
        name, unit = name_of(metric), UNITS.get(metric.unit, "1")
        if metric.kind == "histogram":
            histogram = meter.create_histogram(
                name, unit, metric.help, explicit_bucket_boundaries_advisory=metrics.round_trips
            )
            metrics.on_round_trip.append(partial(_record, histogram.record, metrics.labels))
            continue
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(name, [partial(_observe, recent, metric)], unit, metric.help)


def name_of(metric: Metric) -> str:
    """Return the OpenTelemetry name of a metric."""
    return metric.name.removesuffix(f"_{metric.unit}").replace("_", ".", 1)


class _Recent:
    """The last collection, which all instruments share while it is fresh."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._until = 0.0
        self._families: dict[Metric, Family] = {}

    def family(self, metric: Metric) -> Family:
        with self._lock:
            if time.monotonic() >= self._until:
                self._families = {family.metric: family for family in self._metrics.collect()}
                self._until = time.monotonic() + FRESH_SECONDS
            return self._families[metric]


def _observe(recent: _Recent, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
    family = recent.family(metric)
    for labels, value in family.values.items():
        assert not isinstance(value, Histogram)
        yield Observation(value, dict(zip(family.labels, labels, strict=True)))


def _record(
    record: Callable[[float, dict[str, str]], None], names: tuple[str, ...], seconds: float, labels: Labels
) -> None:
    record(seconds, dict(zip(names, labels, strict=True)))
