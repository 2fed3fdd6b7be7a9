"""A third party's transport works as soon as it is installed: the one in `examples/` is, and carries a session."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest
import trio

from muxkit.testing import check_link

PACKAGE = Path(__file__).resolve().parent.parent.parent / "examples" / "custom_transport"

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="its pipes need a Unix"),
    pytest.mark.timeout(400),  # an installer and programs start slowly on a busy machine
]

SERVER = """
import muxkit, trio

async def echo(channel):
    async for message in channel:
        print("the server saw", len(message), "bytes")  # must not end up on the wire
        await channel.send(message)

trio.run(muxkit.serve, muxkit.each_channel(echo), "bpmux+exec://-")
"""

CLIENT = """
import sys
import muxkit, trio

async def main():
    message = bytes(range(256)) * 20_000
    async with muxkit.connect("bpmux+exec://" + sys.argv[1]) as session:
        print(session.info.peer)
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(talk, session, message[: number * 500_000])

async def talk(session, message):
    async with session.open() as channel:
        await channel.send(message)
        print("equal:", await channel.receive() == message)

trio.run(main)
"""

# The client waits for its child as long as that takes, instead of killing it after a time.
DEMO = """
import muxkit_exec, trio
muxkit_exec.PATIENCE = float("inf")
trio.run(muxkit_exec.main)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed, without a network."""
    scratch = tmp_path_factory.mktemp("exec")
    source = shutil.copytree(PACKAGE, scratch / "source", ignore=shutil.ignore_patterns("__pycache__"))
    target = scratch / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a program that finds the package."""
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])

    def program(text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", text, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )

    return program


def test_many_channels_run_over_a_strangers_transport(run: Run, tmp_path: Path) -> None:
    server = tmp_path / "a server.py"
    server.write_text(SERVER)
    done = run(CLIENT, shlex.join([sys.executable, str(server)]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"exec {sys.executable}", *["equal: True"] * 10]
    assert done.stderr.splitlines().count("the server saw 500000 bytes") == 1


def test_a_program_that_serves_ends_with_its_only_connection(run: Run) -> None:
    done = run(DEMO)
    assert done.stdout.splitlines() == ["HELLO, CHILD"]
    assert done.stderr == ""


def test_a_program_that_does_not_exist_is_a_plain_error(run: Run) -> None:
    done = run(CLIENT, "no-such-program-anywhere")
    assert done.stderr.splitlines()[-1].startswith("FileNotFoundError: ")


def test_a_program_that_dies_is_a_lost_link(run: Run) -> None:
    done = run(CLIENT, shlex.join([sys.executable, "-c", "raise SystemExit(3)"]))
    assert "LinkLost" in done.stderr


def test_the_program_lists_it(run: Run) -> None:
    found = (
        "from muxkit._plugins import installed\nfor each in installed(): print(each.name, each.package, each.problem)"
    )
    assert "exec muxkit-exec None" in run(found).stdout.splitlines()


@pytest.fixture
def module(installed: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(installed))
    import muxkit_exec  # type: ignore[import-not-found]

    assert Path(muxkit_exec.__file__).parent == installed
    found: ModuleType = muxkit_exec
    return found


async def test_its_stream_keeps_the_promises_of_a_link(module: ModuleType) -> None:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[trio.abc.Stream, trio.abc.Stream]]:
        (here_in, there_out), (there_in, here_out) = os.pipe(), os.pipe()
        fd = trio.lowlevel.FdStream
        here, there = module.Pipes(fd(here_out), fd(here_in)), module.Pipes(fd(there_out), fd(there_in))
        try:
            yield here, there
        finally:
            await trio.aclose_forcefully(here)
            await trio.aclose_forcefully(there)

    await check_link(pair, half_close=True)
