"""Metrics by the API of OpenTelemetry, read by its SDK in memory."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import muxkit
from muxkit.metrics import METRICS, ROUND_TRIPS, Metrics
from muxkit.metrics.otel import instrument, name_of


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


def read(reader: InMemoryMetricReader) -> dict[str, Any]:
    """The metrics that were exported, by name."""
    data = reader.get_metrics_data()
    assert data is not None
    [resource] = data.resource_metrics
    [scope] = resource.scope_metrics
    assert scope.scope.name == "muxkit"
    return {metric.name: metric for metric in scope.metrics}


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


async def test_the_sdk_reads_what_sessions_did(reader: InMemoryMetricReader) -> None:
    metrics = Metrics()
    instrument(metrics, MeterProvider([reader]).get_meter("muxkit"))
    async with muxkit.open_server(muxkit.each_channel(echo), "bpmux+mem://otel") as server:
        async with muxkit.connect(server.url, observer=metrics) as session, session.open() as channel:
            await channel.send(b"tea")
            await channel.receive()
            await session.ping()
            found = await trio.to_thread.run_sync(read, reader)
    [sessions] = found["muxkit.sessions"].data.data_points
    assert (sessions.value, sessions.attributes) == (1, {"protocol": "bpmux", "transport": "mem"})
    sent = {point.attributes["direction"]: point.value for point in found["muxkit.messages"].data.data_points}
    assert sent == {"in": 1, "out": 1}
    assert found["muxkit.messages"].data.is_monotonic
    assert found["muxkit.transport"].unit == "By"
    [round_trips] = found["muxkit.round_trip"].data.data_points
    assert (round_trips.count, round_trips.explicit_bounds) == (1, ROUND_TRIPS)
    assert round_trips.attributes == sessions.attributes


async def test_every_metric_has_an_instrument(reader: InMemoryMetricReader) -> None:
    metrics = Metrics()
    instrument(metrics, MeterProvider([reader]).get_meter("muxkit"))
    async with muxkit.open_server(muxkit.each_channel(echo), "bpmux+mem://all") as server:
        async with muxkit.connect(server.url, observer=metrics) as session:
            await session.ping()
            metrics.turned_away("half_open", "bpmux", "mem")
            assert set(read(reader)) == {name_of(metric) for metric in METRICS}


async def test_one_collection_serves_all_instruments(reader: InMemoryMetricReader) -> None:
    class Counting(Metrics):
        collected = 0

        def collect(self) -> Any:  # noqa: ANN401 - as the base class has it
            self.collected += 1
            return super().collect()

    metrics = Counting()
    instrument(metrics, MeterProvider([reader]).get_meter("muxkit"))
    reader.get_metrics_data()
    assert metrics.collected == 1


def test_without_an_sdk_nothing_is_done() -> None:
    instrument(Metrics())
