"""Metrics of sessions, for Prometheus, OpenTelemetry, an HTTP endpoint and `muxkit top`."""

from __future__ import annotations

from muxkit.metrics.collecting import METRICS, ROUND_TRIPS, Family, Histogram, Metric, Metrics, SessionMeter
from muxkit.metrics.endpoint import Endpoint, endpoint

__all__ = ["METRICS", "ROUND_TRIPS", "Endpoint", "Family", "Histogram", "Metric", "Metrics", "SessionMeter", "endpoint"]
