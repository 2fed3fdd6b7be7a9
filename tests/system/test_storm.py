"""A thousand calls that time out at once between two processes; tests/soak/storm.py is the long form."""

from __future__ import annotations

import pytest

from tests.soak.storm import run


@pytest.mark.parametrize("name", ["bpmux requests", "aqueduct+quic", "e3x+udp"])
async def test_a_thousand_calls_that_time_out_at_once_harm_no_other(name: str) -> None:
    """Was: "more than 1000 resets at once", or "streams were given up at once", and the end of the connection."""
    result = await run(name, 1000, 300.0)
    assert result.complaints == []
    assert result.echoes
