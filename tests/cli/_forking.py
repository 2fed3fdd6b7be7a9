"""Start `muxkit` as a process of its own, without the half second in which Python starts and imports everything.

For each process that runs tests there is one server: it has imported every command, and forks for each that is asked
for. The fork is a process like any other, with its own id, signals, environment, folder and standard streams;
`Muxkit` is a `subprocess.Popen` of it. What is about the start itself, such as which modules a command imports, is
tested with an interpreter of its own.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

STATUS = struct.Struct("i")  # the id of the process that was forked, and later its status as of `os.waitpid`
LENGTH = struct.Struct("I")
OWN_INTERPRETER = ("PYTHON", "LD_", "MALLOC")  # variables that are read when an interpreter starts
IMPORTED = (
    *(f"muxkit.protocols.{name}" for name in ("aqueduct", "bpmux", "e3x", "relink", "restream", "yamux")),
    *(f"muxkit_adapters.{name}" for name in ("memory", "packets", "quic", "tcp", "tls", "unix", "websocket")),
    *("muxkit.asyncio", "muxkit.metrics", "muxkit.trace", "rich.live", "rich.progress", "rich.table"),
)


class Muxkit(subprocess.Popen[Any]):
    """`muxkit ARGUMENTS` at work. The options are those of `subprocess.Popen`."""

    def __init__(self, *arguments: str, start_new_session: bool = False, **options: Any) -> None:
        environment = dict(options.get("env") or os.environ)
        self._order = {
            "arguments": arguments,
            "environment": environment,
            "folder": str(options.get("cwd") or Path.cwd()),
            "session": start_new_session,
        }
        self._server: socket.socket | None = None
        self._forks = sys.platform != "win32" and _of_interpreter(environment) == _of_interpreter(os.environ)
        command = [sys.executable, "-P", "-m", "muxkit.cli", *arguments]
        super().__init__(command, start_new_session=start_new_session, **options)

    def _execute_child(self, *given: Any, **named: Any) -> None:
        """Have the server fork, in place of `fork` and `exec` in this process: `Popen` calls this for both."""
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        pipes: tuple[int, ...] = given[10:16]
        if not self._forks:
            super()._execute_child(*given, **named)  # type: ignore[misc]  # of CPython, and in no stub
            return
        ends = dict(zip(names, pipes, strict=True))
        streams = [
            own if end == -1 else end for own, end in enumerate((ends["p2cread"], ends["c2pwrite"], ends["errwrite"]))
        ]
        try:
            self._server = socket.socket(socket.AF_UNIX)
            self._server.connect(_server())
            order = json.dumps(self._order).encode()
            socket.send_fds(self._server, [LENGTH.pack(len(order))], streams)
            self._server.sendall(order)
            (self.pid,) = STATUS.unpack(_exactly(self._server, STATUS.size))
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # of CPython, and in no stub

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Do what `os.waitpid` does for a child of this process: `Popen` calls this to wait."""
        if self._server is None:
            given: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]  # of CPython, and in no stub
            return given
        self._server.setblocking(not flags & os.WNOHANG)
        try:
            (status,) = STATUS.unpack(_exactly(self._server, STATUS.size))
        except BlockingIOError:
            return 0, 0
        self._server.close()
        return self.pid, status

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._server is None:
            code: int | None = super()._internal_poll(*given, **named)  # type: ignore[misc]  # of CPython, and in no stub
            return code
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OWN_INTERPRETER)}


@cache
def _server() -> str:
    """Start the server, which ends with this process; return where it listens."""
    folder = tempfile.mkdtemp(prefix="muxkit-forks-")
    place = str(Path(folder) / "orders")
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert ready == b"ready\n"

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        Path(place).unlink(missing_ok=True)
        Path(folder).rmdir()

    atexit.register(end)
    return place


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises `BlockingIOError` if none has come to a socket that does not block."""
    data = connection.recv(count, socket.MSG_WAITALL if connection.getblocking() else 0)
    assert len(data) == count, "the server of forks has ended"
    return data


# ---------------------------------------------------------------------------- the server


def serve(place: str) -> dict[str, Any] | None:
    """Fork for each order until standard input ends; in a fork, return the order."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for each in (listener, woken, sys.stdin):
            selector.register(each, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is woken:
                    woken.recv(4096)
                    _tell_ends(waiting)
                    continue
                connection, _ = listener.accept()
                length, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
                order: dict[str, Any] = json.loads(_exactly(connection, *LENGTH.unpack(length)))
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (listener, woken, waking, connection, *waiting.values()):
                        each.close()
                    return order | {"streams": streams}
                for stream in streams:
                    os.close(stream)
                waiting[child] = connection
                with suppress(OSError):  # the test that asked may have ended
                    connection.sendall(STATUS.pack(child))


def _tell_ends(waiting: dict[int, socket.socket]) -> None:
    while waiting:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with waiting.pop(child) as connection:
            with suppress(OSError):  # nobody may wait for it any more
                connection.sendall(STATUS.pack(status))


def become(order: dict[str, Any]) -> None:
    """Take the place of an interpreter that was started with this order."""
    if order["session"]:
        os.setsid()
    for own, stream in enumerate(order["streams"]):
        os.dup2(stream, own)
    for stream in order["streams"]:
        if stream > 2:
            os.close(stream)
    if order["session"] and os.isatty(0):
        import fcntl  # of Unix, as forks are
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["muxkit", *order["arguments"]]
    sys.stdin = _text(0, "r", "strict")
    sys.stdout = sys.__stdout__ = _text(1, "w", "strict")  # type: ignore[misc]  # an interpreter sets it as well
    sys.stderr = sys.__stderr__ = _text(2, "w", "backslashreplace")  # type: ignore[misc]  # as above


def _text(stream: int, mode: str, errors: str) -> io.TextIOWrapper:
    binary = open(stream, f"{mode}b", closefd=False)  # noqa: SIM115 - it stays open until the process ends
    return io.TextIOWrapper(binary, errors=errors, line_buffering=mode == "w" and (stream == 2 or os.isatty(stream)))


def import_everything() -> None:
    """Import what the commands import when they are run."""
    from muxkit.cli.commands import OWN, RESTREAM, STAGE
    from muxkit_bench.commands import bench, demo

    for later in (*OWN.values(), *RESTREAM.values(), *STAGE.values(), bench, demo):
        later.load()
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    import_everything()
    found = serve(sys.argv[1])
    if found is not None:
        become(found)
        from muxkit.cli import main

        sys.exit(main())
