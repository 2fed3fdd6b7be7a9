"""The short form of tests/soak/forward_peers.py: forwards at work beside `ssh -L`, as processes."""

from __future__ import annotations

import sys

import pytest

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
