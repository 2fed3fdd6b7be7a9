"""yamux against hashicorp's implementation in Go, in both roles.

The peer is built from `yamux_go/main.go` with the packages `golang-go` and `golang-github-hashicorp-yamux-dev`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio

import muxkit
from tests.conftest import SOAK
from tests.foreign.yamux_lives import Role, cut_short, live, meet, note_lives, read_all

PATH = Path("/usr/share/gocode")  # where Debian puts the sources of Go packages
SOURCE = Path(__file__).parent / "yamux_go"
PATIENCE = 300.0  # s
CUTS = 50 if SOAK else 3
LIVES = 1000 if SOAK else 60

pytestmark = pytest.mark.skipif(
    shutil.which("go") is None or not (PATH / "src/github.com/hashicorp/yamux").is_dir(),
    reason="needs the packages golang-go and golang-github-hashicorp-yamux-dev",
)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the peer."""
    folder = tmp_path_factory.mktemp("yamux_go")
    settings = {"GO111MODULE": "off", "GOPATH": str(PATH), "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
    command = ["go", "build", "-o", str(folder / "peer"), "."]
    subprocess.run(command, cwd=SOURCE, env=os.environ | settings, check=True, timeout=PATIENCE)
    return folder / "peer"


@pytest.fixture(params=["client", "server"])
def role(request: pytest.FixtureRequest) -> Role:
    """The role of this side."""
    role: Role = request.param
    return role


async def test_random_lives_with_a_go_program_are_byte_exact(peer: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet([str(peer)], role) as session:
            done = await live(session, LIVES, seed=len(role))
            assert sum(done.values()) == LIVES
            note_lives("Go", role, LIVES)
            while session.stats().channels:  # noqa: ASYNC110 - stats has no event
                await trio.sleep(0.01)


async def test_a_go_program_that_goes_away_still_serves_its_streams(peer: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet([str(peer)], role) as session:
            stream = await session.open_stream()
            await stream.send_all(b"echo\n")
            async with session.open_stream() as other:
                await other.send_all(b"goaway\n")
                assert await read_all(other) == b"ok\n"
            with pytest.raises(muxkit.ChannelStopped):
                await session.open_stream()
            await stream.send_all(b"still here")
            await stream.send_eof()
            assert await read_all(stream) == b"still here"
            await stream.aclose()


async def test_a_go_program_drains_when_this_side_shuts_down(peer: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        async with meet([str(peer)], role) as session, trio.open_nursery() as nursery:
            stream = await session.open_stream()
            await stream.send_all(b"echo\n")
            nursery.start_soon(partial(session.shutdown, grace=60))
            await stream.send_all(b"last words")
            await stream.send_eof()
            assert await read_all(stream) == b"last words"
            await stream.aclose()


async def test_a_channel_to_a_program_without_channels_says_why_it_fails(peer: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with meet([str(peer)], "client") as session:
            channel = await session.open("chat")
            await channel.send(b"hello\n")
            with pytest.raises(muxkit.ChannelCancelled, match=r"got b'what is.*use session.open_stream"):
                await channel.receive()


async def test_a_cut_in_the_middle_of_lives_ends_both_sides(peer: Path, role: Role) -> None:
    with trio.fail_after(PATIENCE):
        await cut_short([str(peer)], "Go", role, CUTS)
