"""The short forms of the programs in tests/soak: servers that are killed under load, clients that hop between two."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.soak import restream_kills, restream_two_servers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)  # each of the programs has a time limit of 120 s
pytest_plugins = ["tests.protocols.restream._postgres"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the server is forked")
@pytest.mark.requirement("R-53", "R-54")
@pytest.mark.clause("restream-A05", "restream-N09")
@pytest.mark.seeds(1, soak=5)
def test_a_server_that_is_killed_ten_times_under_load_loses_repeats_and_invents_nothing(
    seed: int, tmp_path: Path
) -> None:
    tally = restream_kills.run(f"sqlite:{tmp_path / 'sessions.db'}", seed, kills=10, clients=6, most_count=500)
    assert tally.errors == []
    assert tally.interruptions >= 10
    assert tally.sessions >= 6


@pytest.mark.requirement("R-54")
@pytest.mark.clause("restream-T02", "restream-S20")
@pytest.mark.seeds(1, soak=5)
def test_clients_that_hop_between_two_servers_get_every_message_once(seed: int, schema: str) -> None:
    tally = restream_two_servers.run(schema, seed, seconds=2.0, clients=6)
    assert tally.errors == []
    assert tally.connections > 2 * tally.sessions
    assert tally.left > 0
    assert tally.sessions >= 6
