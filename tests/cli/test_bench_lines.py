"""`muxkit bench --rtt` measures over a long line, and prints two tables."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli._command import muxkit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses processes as on Unix")


def test_it_prints_what_a_line_carries_and_what_costs_round_trips(tmp_path: Path) -> None:
    stored = tmp_path / "lines.json"
    done = muxkit("bench", "--rtt", "5ms", "--quick", "--protocol", "bpmux", "--json", str(stored))
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert "MiB/s over a round trip of 5 ms" in text
    assert "Round trips until the answer, over a round trip of 5 ms" in text
    found = json.loads(stored.read_text(encoding="utf-8"))["found"]["bpmux+tcp"]
    assert [(bulk["channels"], bulk["beside_stalled"]) for bulk in found["bulk"]] == [
        (1, False),
        (8, False),
        (100, False),
        (1, True),
    ]
    assert all(bulk["rate"] > 0 for bulk in found["bulk"])
    assert found["small"] >= 0.005, "an answer takes a round trip"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rtt", "80ms", "--jobs", "bulk"], "--rtt has jobs of its own: --jobs cannot be given beside it"),
        (["--rate", "1gbit"], "--rate and --loss describe the line of --rtt, which is missing"),
        (["--rtt", "an hour"], "expected a number, or one with a unit"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(arguments: list[str], said: str) -> None:
    done = muxkit("bench", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
