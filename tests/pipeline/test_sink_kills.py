"""The short form of tests/soak/pipeline_sink_kills.py: a driver and a server that are killed in three moments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.soak import pipeline_sink_kills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform == "win32", reason="it kills groups of processes")
@pytest.mark.requirement("R-54")
def test_each_row_is_committed_once_when_driver_and_server_are_killed(tmp_path: Path) -> None:
    rounds = [("kill the server", "prepared"), ("kill the driver", "committed"), ("kill the driver", "writing")]
    tally = pipeline_sink_kills.run(tmp_path, 1, rounds)
    assert tally.errors == []
    assert (tally.kills, tally.starts) == (3, 3)
    assert tally.rows == tally.batches * 1000 > 0
