"""A Unix socket is its owner's alone, and is never taken from another process."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.testing._links import check_link
from muxkit_adapters import unix

from ._links import PATIENCE, at_most, echo, paired, reset, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio.testing import MockClock

    from muxkit_adapters._sockets import SocketStream

pytestmark = pytest.mark.requirement("R-67")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.sock"


@asynccontextmanager
async def pair(path: Path) -> AsyncIterator[tuple[SocketStream, SocketStream]]:
    async with paired(unix.serve, unix.transport.connect, path) as streams:
        yield streams


async def test_a_unix_connection_is_a_link(path: Path) -> None:
    await check_link(lambda: pair(path), half_close=True)


async def test_only_the_owner_may_open_the_socket_whatever_the_umask_is(path: Path) -> None:
    before = os.umask(0)
    try:
        async with serving(unix.serve, echo, path) as addresses:
            assert addresses == [str(path)]
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    finally:
        os.umask(before)


async def test_the_socket_is_gone_when_the_server_has_stopped(path: Path) -> None:
    async with serving(unix.serve, echo, path):
        assert is_socket(path)
    assert os.listdir(path.parent) == []


async def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(unix.serve, echo, path), unix.connect(path) as stream:
        await stream.send_all(b"alive")
        assert await stream.receive_some() == b"alive"


async def test_a_socket_in_use_is_left_alone(path: Path) -> None:
    async with serving(unix.serve, echo, path):
        with pytest.raises(OSError, match="a process listens"):
            await unix.serve(echo, path)
        async with unix.connect(path) as stream:
            await stream.send_all(b"still mine")
            assert await stream.receive_some() == b"still mine"
        assert os.listdir(path.parent) == [path.name]


async def test_a_socket_whose_backlog_is_full_is_in_use(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(OSError, match="a process listens"):
            await unix.serve(echo, path)


@pytest.mark.requirement("R-71")
async def test_a_client_waits_while_the_backlog_is_full(path: Path) -> None:
    """Was: Connecting to a Unix socket whose backlog was full gave a link that was not connected."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(str(path))
        listening.listen(0)
        first.connect(str(path))

        async def connect() -> None:
            async with unix.connect(str(path)) as stream:
                await stream.send_all(b"hello")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect)
            await trio.testing.wait_all_tasks_blocked()
            listening.accept()[0].close()
            with trio.fail_after(PATIENCE):
                await trio.lowlevel.wait_readable(listening)
            with listening.accept()[0] as accepted, trio.fail_after(PATIENCE):
                await trio.lowlevel.wait_readable(accepted)
                assert accepted.recv(5) == b"hello"


@pytest.mark.parametrize("kind", ["file", "directory", "symlink to a dead socket", "symlink to nothing"])
async def test_anything_that_is_no_socket_stays_as_it_is(path: Path, kind: str) -> None:
    put(kind, path)
    before = os.lstat(path)
    with pytest.raises(FileExistsError, match="stays as it is"):
        await unix.serve(echo, path)
    assert os.lstat(path) == before
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


async def test_of_many_servers_that_find_a_stale_socket_one_wins(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    won, lost = 0, 0

    async def try_to_serve(nursery: trio.Nursery) -> None:
        nonlocal won, lost
        try:
            async with serving(unix.serve, echo, path):
                won += 1
                await trio.sleep_forever()
        except* OSError:
            lost += 1
            if lost == 9:
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(try_to_serve, nursery)
    assert (won, lost) == (1, 9)


async def test_a_server_waits_while_another_process_sets_its_socket_up(path: Path) -> None:
    lock = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(unix.serve, echo, path)
        await trio.testing.wait_all_tasks_blocked(0.005)
        assert os.listdir(path.parent) == []
        os.close(lock)
        with trio.fail_after(PATIENCE):
            while path.name not in os.listdir(path.parent):
                await trio.testing.wait_all_tasks_blocked(0.005)
        nursery.cancel_scope.cancel()


async def test_a_successors_socket_is_not_removed_at_exit(path: Path) -> None:
    async with serving(unix.serve, echo, path):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
    assert is_socket(path)


async def test_a_missing_socket_is_an_error_that_names_the_path(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.sock"):
        async with unix.connect(path):
            pass


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-27")
async def test_connections_that_were_closed_before_they_were_accepted_cost_no_handler(path: Path) -> None:
    """Those that said something first are served: what they said counts."""
    served: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        served.append(await stream.receive_some())

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(unix.serve, handle, str(path)))
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(str(path))
        with socket.socket(socket.AF_UNIX) as brief:
            brief.connect(str(path))
            brief.sendall(b"brief")
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(str(path))
            half.shutdown(socket.SHUT_WR)
            with trio.fail_after(PATIENCE):
                while len(served) < 2:
                    await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert sorted(served) == [b"", b"brief"]


async def test_the_ends_know_the_path(path: Path) -> None:
    async with pair(path) as (here, there):
        assert here.peer == there.peer == f"unix {path}"


@pytest.mark.parametrize(
    ("address", "expected"), [("x.sock", "absolute path"), ("/" + "x" * 200, "at most 103 bytes"), ("", "absolute")]
)
def test_a_bad_address_is_refused_with_the_form_that_is_expected(address: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        unix.transport.connect(address)


@pytest.mark.requirement("R-38")
@pytest.mark.parametrize("behaviour", ["stalls", "resets", "hangs up"])
async def test_close_is_quick_whatever_the_peer_does(path: Path, behaviour: str, mock_clock: MockClock) -> None:
    async with pair(path) as (here, there):
        if behaviour == "stalls":
            while here.send_nowait([bytes(65_536)]):
                pass
        elif behaviour == "resets":
            here.send_nowait([b"unread"])
            reset(there.socket)
        else:
            await there.aclose()
        with at_most(0.5, mock_clock):
            await here.aclose()
            await here.aclose()


def is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def put(kind: str, path: Path) -> None:
    target = path.parent / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        if "dead" in kind:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(target))
        path.symlink_to(target)
