"""The commands of the page about metrics, as they stand there, with free ports."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests._pages import ROOT, command, free_ports, ports, run, running, until

PAGE = "docs/how-to/metrics.md"

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


@pytest.mark.extras("cli", "otel", "prometheus")
@pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes")
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_a_server_is_measured_and_watched(tmp_path: Path) -> None:
    with ports(7000, 9464) as free:
        serve, metrics, health, top, once = (
            free_ports(command(PAGE, begins, number), free)
            for begins, number in (
                ("muxkit serve bpmux", 0),
                ("curl", 0),
                ("curl", 1),
                ("muxkit top http://127.0.0.1:9464", 0),
                ("muxkit top http://127.0.0.1:9464 --once --json", 0),
            )
        )
    with running(serve, tmp_path, "serve") as server:
        until(lambda: "listening on" in (tmp_path / "serve").read_text(), server)
        assert "# TYPE muxkit_sessions gauge" in run(metrics, tmp_path).stdout
        assert json.loads(run(health, tmp_path).stdout) == {"status": "serving", "sessions": 0}
        assert "0 sessions" in run(top, tmp_path).stdout  # no terminal: it looks once
        assert json.loads(run(once, tmp_path).stdout)["sessions"] == []
        server.send_signal(signal.SIGINT)
        server.wait()


def test_the_page_has_every_metric_with_its_label() -> None:
    from muxkit.metrics import METRICS

    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`muxkit_.*?) \| (\w+) \| (.*?) ?\|", text, re.MULTILINE)
    told = {
        name: (kind, label.strip("` ") or None) for names, kind, label in rows for name in re.findall(r"`(\w+)`", names)
    }
    there = {metric.name + "_total" * (metric.kind == "counter"): (metric.kind, metric.label) for metric in METRICS}
    assert told == there
