"""yamux against two implementations in JavaScript, in both roles.

The peer `yamux_js/peer.mjs` has `@chainsafe/libp2p-yamux` from npm. Its application can neither close a stream without
reading it nor send a go-away that drains, so these lives are left out.

The peer `yamux_js/yamux_js_peer.mjs` has `yamux-js`, which never reports the end of a stream. So there are only
conversations whose ends are agreed on in another way, here by their size.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import trio

from tests.conftest import SOAK
from tests.foreign.yamux_lives import AT_ONCE, Role, cut_short, live, meet, note_lives, some_size

if TYPE_CHECKING:
    from muxkit.protocols.yamux import Session

SOURCE = Path(__file__).parent / "yamux_js"
PATIENCE = 300.0  # s
INSTALLING = 60.0  # s
CUTS = 50 if SOAK else 3
LIVES = 1000 if SOAK else 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the packages of both peers beside them."""
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
        pytest.skip(f"npm could not install @chainsafe/libp2p-yamux and yamux-js: {error}")
    return folder


@pytest.mark.parametrize("role", ["client", "server"])
async def test_random_lives_with_a_javascript_program_are_byte_exact(folder: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet(["node", str(folder / "peer.mjs")], role) as session:
            done = await live(session, LIVES, seed=len(role), without=frozenset({"leave"}))
            assert sum(done.values()) == LIVES
            note_lives("@chainsafe/libp2p-yamux", role, LIVES)


@pytest.mark.parametrize("role", ["client", "server"])
async def test_conversations_with_a_program_that_uses_yamux_js_are_byte_exact(folder: Path, role: Role) -> None:
    """Random writes from 1 byte to 1 MiB that come back, pings, and a stream that the peer opens."""
    dice = Random(len(role))

    async def talk(session: Session, number: int) -> None:
        data = Random(number).randbytes(some_size(Random(number)))
        stream = await session.open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, data)
            got = b""
            while len(got) < len(data):
                got += await stream.receive_some()
        assert got == data
        stream.abort()

    with trio.fail_after(PATIENCE):
        async with meet(["node", str(folder / "yamux_js_peer.mjs")], role) as session:
            async for theirs in session.streams():
                assert await theirs.receive_some() == b"hello from yamux-js"
                theirs.abort()
                break
            for _ in range(LIVES // AT_ONCE):
                async with trio.open_nursery() as nursery:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(talk, session, dice.getrandbits(32))
                assert await session.ping() > 0
            note_lives("yamux-js", role, LIVES // AT_ONCE * AT_ONCE)


@pytest.mark.parametrize("role", ["client", "server"])
async def test_a_cut_in_the_middle_of_lives_ends_both_sides(folder: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        await cut_short(
            ["node", str(folder / "peer.mjs")], "@chainsafe/libp2p-yamux", role, CUTS, without=frozenset({"leave"})
        )
