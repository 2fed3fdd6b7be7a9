"""The short forms of tests/soak/forward_*.py: forwards as processes, beside `ssh -L` and over a line that is cut."""

from __future__ import annotations

import sys

import pytest

from tests.soak import forward_cuts, forward_hostile, forward_line
from tests.soak.forward_peers import PEERS, Sizes, is_right, run, table

NAMES = ("no forward", "OpenSSH -L", "bpmux+tcp", "bpmux+wss", "relink+tcp")

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform != "linux", reason="it reads the memory of processes in /proc"),
]


def test_each_forward_carries_a_hundred_connections_beside_a_stalled_and_a_large_one() -> None:
    """No byte is lost and the memory of the processes is bounded; a peer that is not installed is left out."""
    figures = run(Sizes(rounds=1, bulk=16, calls=100, talks=320, held=98, large=400, seconds=0), NAMES)
    assert is_right(figures), table(figures)
    assert {peer.name for peer in PEERS if peer.is_ours and peer.name in NAMES} <= {*figures}


def test_a_forward_over_a_long_line_loses_no_byte_and_answers_keystrokes_beside_bulk() -> None:
    lines = forward_line.run(["bpmux+tcp"], delay=0.005, seconds=0.05)
    assert [line.is_right for line in lines] == [True]
    assert lines[0].alone >= 0.01, "the delay of both directions"


async def test_no_byte_is_lost_on_a_line_that_is_cut_and_listeners_survive_a_kill() -> None:
    figures = await forward_cuts.survive(forward_cuts.Sizes(cuts=6, connections=4, kills=1))
    assert figures.are_right, figures
    assert figures.whole == 4
    assert figures.cuts >= 6


async def test_callers_are_served_while_others_attack_and_nothing_forbidden_is_reached() -> None:
    figures = await forward_hostile.withstand(
        forward_hostile.Sizes(half_open=400, stalled=40, asks=4 * len(forward_hostile.WANTED), calls=20)
    )
    assert figures.are_right, figures
    assert {*figures.p99} == {"none", "strangers", "socks", "forbidden", "stalled"}
