"""Conversations of every kind, cancelled on both sides at steps of any task. `tests/soak/call_sweep.py` takes all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.rpc.sweeps import KINDS, PROTOCOLS, TARGETS, Kind, Target, client_stream, run_once, sweep

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_either_side_of_a_conversation_may_be_cancelled_at_any_step(
    protocol: str, kind: Kind, target: Target, autojump_clock: MockClock
) -> None:
    if target == "server" and protocol == "relink":
        pytest.skip("a link of Relink waits for its server to come back")
    assert await sweep(protocol, kind, target, samples=2) == 2


@pytest.mark.requirement("R-71")
async def test_a_lost_connection_ends_a_call_with_a_stream_of_the_caller_by_one_error(
    autojump_clock: MockClock,
) -> None:
    """The tasks that send and receive both raised `LinkLost`, so an exception group came out of the call."""
    for step in range(1, 11):
        await run_once("bpmux", client_stream, "server", step)
