"""Calls that time out at once, and an attacker who resets what it opens; tests/soak has the long forms."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.soak import hostile_neighbours
from tests.soak.storm import run


@pytest.mark.parametrize("name", ["bpmux requests", "aqueduct+quic", "e3x+udp"])
async def test_a_thousand_calls_that_time_out_at_once_harm_no_other(name: str) -> None:
    """Was: "more than 1000 resets at once", or "streams were given up at once", and the end of the connection."""
    result = await run(name, 1000, 300.0)
    assert result.complaints == []
    assert result.echoes


MEMORY_MOST = 32 * 2**20  # bytes, what the default `Limits.channel_memory` holds a connection to


@pytest.mark.parametrize("scheme", ["bpmux+tcp", "relink+tcp", "aqueduct+tcp", "e3x+tcp"])
def test_a_peer_that_resets_what_it_opens_costs_bounded_memory_and_no_neighbour(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hostile_neighbours.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(hostile_neighbours, "PATIENCE", 60.0)  # a busy machine is no fault of the server
    figures = hostile_neighbours.run(f"{scheme}: opened and reset", 1.0, clients=10)
    assert len(figures.echoes) >= 10
    assert math.inf not in figures.echoes
    assert math.inf not in figures.connections
    if os.path.exists("/proc/self/status"):
        assert 0 < figures.memory < MEMORY_MOST
