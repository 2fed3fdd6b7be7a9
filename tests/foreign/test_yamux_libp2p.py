"""yamux against py-libp2p's implementation, in both roles.

The peer is `yamux_libp2p.py`. The package `libp2p` needs versions of its own of many others, so it may be in another
environment, whose Python the variable MUXKIT_LIBP2P names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.conftest import SOAK
from tests.foreign.yamux_lives import Role, cut_short, live, meet, note_lives

PROGRAM = Path(__file__).with_name("yamux_libp2p.py")
PYTHON = os.environ.get("MUXKIT_LIBP2P", sys.executable)
PATIENCE = 300.0  # s
CUTS = 50 if SOAK else 3
LIVES = 1000 if SOAK else 40


@pytest.fixture(scope="module")
def peer() -> list[str]:
    """Return the command that runs the peer."""
    command = [PYTHON, "-c", "import libp2p.stream_muxer.yamux.yamux"]
    if subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE).returncode:
        pytest.skip("needs the package libp2p, here or in the environment of MUXKIT_LIBP2P=…/bin/python")
    return [PYTHON, str(PROGRAM)]


@pytest.mark.parametrize("role", ["client", "server"])
async def test_random_lives_with_py_libp2p_are_byte_exact(peer: list[str], role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet(peer, role) as session:
            done = await live(session, LIVES, seed=len(role), without=frozenset({"leave"}))
            assert sum(done.values()) == LIVES
            note_lives("py-libp2p", role, LIVES)


@pytest.mark.parametrize("role", ["client", "server"])
async def test_a_cut_in_the_middle_of_lives_ends_both_sides(peer: list[str], role: Role) -> None:
    with trio.fail_after(PATIENCE):
        await cut_short(peer, "py-libp2p", role, CUTS, without=frozenset({"leave"}))
