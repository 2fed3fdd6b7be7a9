"""The dashboard for Grafana asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muxkit.metrics import METRICS, Metrics

FILE = Path(__file__).resolve().parent.parent.parent / "docs" / "dashboards" / "muxkit.json"
OF_PROMETHEUS = {"job", "instance", "le"}
SELECTOR = re.compile(r"(muxkit_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)=~?\"")
BY = re.compile(r"by \(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def shown() -> dict[str, set[str]]:
    """The names that Prometheus stores, with their labels."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    labels = set(Metrics().labels) | OF_PROMETHEUS
    return {
        metric.name + ending: labels | ({metric.label} if metric.label else set())
        for metric in METRICS
        for ending in endings[metric.kind]
    }


def uses() -> Iterator[tuple[str, set[str]]]:
    """Each metric that is asked for, with the labels by which it is chosen and grouped."""
    for expression in expressions():
        grouped = {label for found in BY.findall(expression) for label in found.split(", ")}
        for name, selector in SELECTOR.findall(expression):
            yield name, set(LABEL.findall(selector)) | grouped


def test_every_metric_and_label_that_it_asks_for_exists() -> None:
    there = shown()
    assert {name for name, _ in uses()} <= set(there)
    assert [(name, labels - there[name]) for name, labels in uses() if labels - there[name]] == []


def test_every_metric_is_on_it() -> None:
    asked = {name for name, _ in uses()}
    assert [metric.name for metric in METRICS if not any(name.startswith(metric.name) for name in asked)] == []


def test_every_expression_chooses_by_all_variables() -> None:
    for name, labels in uses():
        assert labels >= {"job", "instance", "protocol", "transport"}, name


@pytest.mark.parametrize("what", ["id", "title"])
def test_panels_can_be_told_apart(what: str) -> None:
    panels = [(panel["type"], panel[what]) for panel in dashboard()["panels"]]
    assert len(panels) == len(set(panels))


def test_no_two_panels_stand_in_the_same_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
