"""Round trips until an answer comes, counted on a simulated network and a virtual clock, for each protocol."""

from __future__ import annotations

import attrs
import pytest

from muxkit_bench.lines.trips import OVER_STREAM, RoundTrips, simulate

# TCP's handshake is one of the first number. A new channel and leaving may not cost more than these.
COUNTS = {
    "bpmux": RoundTrips(session=4, small=2, large=5, leaving=1),
    "yamux": RoundTrips(session=2, small=1, large=2, leaving=2),
    "relink": RoundTrips(session=4, small=1, large=2, leaving=2.5),
    "aqueduct": RoundTrips(session=2, small=1, large=4, leaving=1),
    OVER_STREAM: RoundTrips(session=2, small=1, large=2.5, leaving=2),
    "e3x": RoundTrips(session=1, small=1, large=7.5, leaving=2),
}


@pytest.mark.parametrize("protocol", COUNTS)
def test_calls_and_sessions_cost_this_many_round_trips(protocol: str) -> None:
    counted = simulate(protocol)
    for name, most in attrs.asdict(COUNTS[protocol]).items():
        assert getattr(counted, name) <= most + 1e-6, name
