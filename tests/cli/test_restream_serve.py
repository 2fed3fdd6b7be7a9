"""`muxkit restream serve` serves, and ends in order."""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from muxkit import MuxError
from muxkit.cli.commands import commands
from tests.cli._command import muxkit, running

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PATIENCE = 300.0  # s; reached only when something hangs
UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"
TCP = "restream+tcp://127.0.0.1:0"


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().removeprefix("listening on ").rstrip("\n")


def ask(url: str, request: object, most: int = 1 << 20) -> list[dict[str, object]]:
    """What the server answers, up to so many lines or its end."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE) as connection,
        connection.makefile("rwb") as file,
    ):
        file.write(json.dumps(request).encode() + b"\n")
        file.flush()
        lines: list[dict[str, object]] = []
        while len(lines) < most and (line := file.readline()):
            lines.append(json.loads(line))
        return lines


def ends(process: subprocess.Popen[str], by: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(by)
    rest, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, rest, errors.strip()


def test_it_tells_its_address_serves_both_modes_and_ends_on_ctrl_c() -> None:
    with running("restream", "serve", TCP, "--stateless", "doubling", "--status") as process:
        url = url_of(process)
        assert ask(url, {"state": "23"}, 2) == [{"data": "46"}, {"data": "92"}]
        got = ask(url, {"uuid": UUID, "params": {"count": 3}})
        assert [message["id"] for message in got] == [1, 2, 3]
        assert ask(url, {"uuid": UUID, "status": True})[0]["status"]
        assert ends(process, signal.SIGINT) == (130, "ending\n", "muxkit: interrupted")


def test_being_told_to_end_is_no_failure() -> None:
    with running("restream", "serve", TCP, "--json") as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["event"] == "listening"
        assert said["urls"][0].startswith("restream+tcp://127.0.0.1:")
        code, rest, errors = ends(process, signal.SIGTERM)
        assert (code, json.loads(rest), errors) == (0, {"event": "ending", "connections": 0}, "")


def test_a_file_keeps_the_sessions_from_one_server_to_the_next(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'sessions.db'}"
    with running("restream", "serve", TCP, "--store", store) as process:
        first = ask(url_of(process), {"uuid": UUID, "params": {"count": 5}})
        ends(process, signal.SIGTERM)
    with running("restream", "serve", TCP, "--store", store) as process:
        assert ask(url_of(process), {"uuid": UUID, "state": 3}) == first[3:]
        ends(process, signal.SIGTERM)


def test_a_stream_that_is_under_way_ends_behind_a_whole_line() -> None:
    with running("restream", "serve", TCP, "--pace", "1000") as process:
        host, _, port = url_of(process).rpartition("//")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"{}\n")
            data = connection.recv(65_536)
            process.send_signal(signal.SIGTERM)
            while piece := connection.recv(65_536):
                data += piece
        assert data.endswith(b'"}\n')
        assert process.wait(PATIENCE) == 0


def test_the_file_of_another_server_is_refused(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'sessions.db'}"
    with running("restream", "serve", TCP, "--store", store) as process:
        url_of(process)
        second = muxkit("restream", "serve", TCP, "--store", store)
        assert second.returncode == 1
        assert f"is in use by process {process.pid}" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tcp://127.0.0.1:0"], "expected restream+transport://address"),
        (["restream+tcp://0.0.0.0:0"], "is not a loopback address"),
        (["restream+tls://127.0.0.1:0"], "a server needs its certificate and key"),
        (["restream+unix:///nowhere/socket", "--insecure"], "this transport does not take insecure"),
        ([TCP, "--store", "mysql:x"], "expected memory:, sqlite:PATH or postgresql://"),
        ([TCP, "--store", "memory:x"], "expected memory:, sqlite:PATH or postgresql://"),
        ([TCP, "--pace", "0"], "0"),
    ],
)
def test_what_cannot_be_meant_is_a_matter_of_usage(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(commands, ["restream", "serve", *arguments])
    assert done.exit_code == 2
    assert told in done.output


def test_a_database_that_is_not_there_is_a_failure_in_one_sentence() -> None:
    done = CliRunner().invoke(commands, ["restream", "serve", TCP, "--store", "postgresql://127.0.0.1:1/none"])
    assert isinstance(done.exception, MuxError)
    assert str(done.exception).startswith("can't reach the database")
