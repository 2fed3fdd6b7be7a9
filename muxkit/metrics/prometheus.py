"""Metrics for Prometheus: a collector for a prometheus-client registry, and the text that a server scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from muxkit.metrics.collecting import Family, Histogram, Metrics
from muxkit.runtime import ExtraNeeded

try:
    from prometheus_client import exposition
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as _missing:
    raise ExtraNeeded("prometheus-client", "prometheus") from _missing


class PrometheusCollector(Collector):
    """Adds metrics to a registry: `prometheus_client.REGISTRY.register(PrometheusCollector(metrics))`.

    A registry may be read by another thread. Waits that haven't ended then count until they were last seen.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics: Metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Return each metric in the form of prometheus-client."""
        return map(_as_prometheus, self.metrics.collect())

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering doesn't collect."""
        return iter(())


def render(metrics: Metrics, accept: str = "") -> tuple[bytes, str]:
    """Return the text and its content type for a server that sent this `Accept` header."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(metrics))
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]  # of prometheus-client
        return text, openmetrics.CONTENT_TYPE_LATEST
    return exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST


def _as_prometheus(family: Family) -> Metric:
    metric = family.metric
    if metric.kind == "histogram":
        shown = HistogramMetricFamily(metric.name, metric.help, labels=family.labels, unit=metric.unit)
        for labels, value in family.values.items():
            assert isinstance(value, Histogram)
            bounds = [*map(str, value.bounds), "+Inf"]
            shown.add_metric(labels, [*zip(bounds, map(float, accumulate(value.counts)), strict=True)], value.sum)
        return shown
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    one = make(metric.name, metric.help, labels=family.labels, unit=metric.unit)
    for labels, value in family.values.items():
        assert not isinstance(value, Histogram)
        one.add_metric(labels, value)
    return one
