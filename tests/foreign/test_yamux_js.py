"""yamux against libp2p's implementation in JavaScript, in both roles.

The peer is `yamux_js/peer.mjs`, with `@chainsafe/libp2p-yamux` from npm. Its application can neither close a stream
without reading it nor send a go-away that drains, so these lives are left out.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import trio

from tests.conftest import SOAK
from tests.foreign.yamux_lives import Role, live, meet

SOURCE = Path(__file__).parent / "yamux_js"
PATIENCE = 300.0  # s
INSTALLING = 60.0  # s
LIVES = 1000 if SOAK else 40


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Install the peer's package, and return the command that runs it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("yamux_js")
    for file in SOURCE.iterdir():
        shutil.copy(file, folder)
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=INSTALLING)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm could not install @chainsafe/libp2p-yamux: {error}")
    return [node, str(folder / "peer.mjs")]


@pytest.mark.parametrize("role", ["client", "server"])
async def test_random_lives_with_a_javascript_program_are_byte_exact(peer: list[str], role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet(peer, role) as session:
            done = await live(session, LIVES, seed=len(role), without=frozenset({"leave"}))
            assert sum(done.values()) == LIVES
