"""What the tests of the command line share: run `muxkit` in a process of its own, and see which processes it has."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli._forking import Muxkit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MUXKIT = [sys.executable, "-P", "-m", "muxkit.cli"]
PATIENCE = 300.0  # s; reached only when something hangs
ESCAPE = "\x1b"
COLOUR = re.compile(ESCAPE + r"\[[0-9;]*(?<![0-9])(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def environment(**changes: str) -> dict[str, str]:
    """Ours, without what would decide about colours, and with time for a server on a busy machine."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**plain, "TERM": "xterm-256color", "MUXKIT_TIMEOUT": str(PATIENCE), **changes}


def muxkit(*arguments: str, typed: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. `typed` is what it reads from its standard input."""
    return completed(*arguments, input=typed, text=True, env=environment(**changes))


def completed(
    *arguments: str, input: str | bytes | None = None, timeout: float = PATIENCE, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run the command to its end, with the options of `subprocess.Popen`; return what it wrote."""
    pipe = subprocess.PIPE
    with Muxkit(*arguments, stdin=None if input is None else pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, errors = process.communicate(input, timeout=timeout)
        finally:
            if process.poll() is None:
                process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command at work; killed with the block if it is still there."""
    pipe = subprocess.PIPE
    with Muxkit(*arguments, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_until_at_work(demo: subprocess.Popen[str]) -> None:
    """Until the first line about the load: then both processes are there, and connected."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if " messages, " in line:
            return
    raise AssertionError("the demo ended before it worked")


def children_of(parent: int) -> dict[str, int]:
    """The processes of a demo: `server` and `client`, as the command line of each says, and its id."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which stands in parentheses and may hold anything: state, then the parent's id.
            of = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if of == parent and "-m" in arguments:  # otherwise it is only about to become what it will be
            children[arguments[arguments.index("-m") + 2]] = int(folder.name)
    return children


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def line_of(process: subprocess.Popen[str]) -> str:
    """Read a line and nothing behind it: `communicate` does not return what Python has read ahead."""
    assert process.stdout is not None
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


@contextmanager
def listening(handle: Callable[[socket.socket], object]) -> Iterator[str]:
    """Start a server that handles one client after another; return its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        handle(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


def install_transport(folder: Path, package: str, name: str, code: str) -> str:
    """Make an installed package with a transport, for PYTHONPATH: `code` is its only module."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[muxkit.transports]\n{name} = {module}:transport\n", encoding="utf-8")
    return str(folder)
