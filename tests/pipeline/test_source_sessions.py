"""The short form of tests/soak/pipeline_sessions.py: what it measures is done right with fewer sessions."""

from __future__ import annotations

import sys

import pytest

from tests.soak import pipeline_sessions


@pytest.mark.skipif(sys.platform == "win32", reason="the server is ended with a signal")
@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_all_sessions_are_planned_and_acknowledged_in_either_way(transport: str) -> None:
    now, before, cores, acknowledged = pipeline_sessions.measure(30, transport, rounds=1, idle=0.01)
    assert acknowledged == 30 * 7
    assert min(now.driver, now.server, before.driver, before.server, cores) > 0.0
