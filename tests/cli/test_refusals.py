"""A command ends with one clear error, and exit code 3, when waiting cannot change the server's answer."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cli._command import listening, muxkit
from tests.cli.test_pipe import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(120),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]

HERE = "127.0.0.1:0"
COMMANDS = {"forward": ["forward", "--local", "0:9"], "pipe": ["pipe"], "open": ["open"], "recv": ["recv", "."]}


def command(name: str, url: str) -> list[str]:
    first, *rest = COMMANDS[name]
    return [first, url, *rest]


def last_line(errors: str) -> str:
    return errors.strip().splitlines()[-1]


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text("alice a-token-that-is-long\n")
    return str(path)


@pytest.mark.parametrize(
    ("protocol", "name"),
    [*((each, "forward") for each in ("relink", "aqueduct", "e3x")), *(("bpmux", each) for each in COMMANDS)],
)
def test_a_command_without_a_token_ends(protocol: str, name: str, tokens: str) -> None:
    """Was: `forward` connected, was sent away and connected again for ever."""
    with serving(f"{protocol}+tcp://{HERE}", "--echo", "--token-file", tokens) as (_, url):
        done = muxkit(*command(name, url), typed="hello\n")
    assert done.returncode == 3, done.stderr
    assert "this server wants a token: --token-file or $MUXKIT_TOKEN" in last_line(done.stderr)


@pytest.mark.parametrize("name", ["forward", "pipe"])
def test_a_command_to_a_path_that_is_not_there_ends(name: str) -> None:
    with serving(f"bpmux+ws://{HERE}/here", "--echo") as (_, url):
        done = muxkit(*command(name, url.replace("/here", "/there")))
    assert done.returncode == 3, done.stderr
    assert "HTTP 404: 'this server has another path'" in last_line(done.stderr)


@pytest.mark.parametrize(("ours", "theirs"), [("relink", "bpmux"), ("aqueduct", "bpmux"), ("bpmux", "aqueduct")])
def test_a_forward_to_a_server_of_another_protocol_ends(ours: str, theirs: str) -> None:
    with serving(f"{theirs}+tcp://{HERE}", "--echo") as (_, url):
        done = muxkit("forward", url.replace(theirs, ours, 1), "--local", "0:9")
    assert done.returncode in (3, 4), done.stderr
    assert f"look like {theirs}" in last_line(done.stderr).replace("Aqueduct", "aqueduct")


@pytest.mark.parametrize("url", ["alice@127.0.0.1", "bpmux+tcp://127.0.0.1", "bpmux+tcp://127.0.0.1:1/path"])
def test_a_forward_reads_the_url_before_it_listens(url: str) -> None:
    done = muxkit("forward", url, "--local", "0:9")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: " in done.stderr


def test_a_url_is_quoted_as_it_was_typed_but_for_its_password() -> None:
    assert "'alice@127.0.0.1'" in muxkit("forward", "alice@127.0.0.1", "--local", "0:9").stderr
    told = muxkit("pipe", "alice:wonderland@127.0.0.1").stderr
    assert "'alice:…@127.0.0.1'" in told
    assert "wonderland" not in told


@contextmanager
def web_server() -> Iterator[int]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_pipe_to_a_web_server_says_what_is_there() -> None:
    with web_server() as port:
        done = muxkit("pipe", f"bpmux+tcp://127.0.0.1:{port}", "--timeout", "2")
    assert done.returncode == 3
    assert done.stderr.endswith("no answer within 2 s; what answers there looks like an HTTP response\n")


def test_a_forward_to_a_web_page_ends_without_the_page() -> None:
    with web_server() as port:
        done = muxkit("forward", f"bpmux+ws://127.0.0.1:{port}/", "--local", "0:9")
    assert done.returncode == 3
    assert done.stderr == f"muxkit: ws 127.0.0.1:{port}/: the upgrade was answered with HTTP 200\n"


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(100):
        pass


def test_a_port_that_says_nothing_gets_no_hint() -> None:
    with listening(say_nothing) as address:
        done = muxkit("pipe", f"bpmux+tcp://{address}", "--timeout", "2")
    assert (done.returncode, done.stderr) == (3, f"muxkit: bpmux+tcp://{address}: no answer within 2 s\n")


@pytest.mark.parametrize("name", ["serve", "forward"])
def test_a_command_without_a_url_says_so(name: str) -> None:
    """Was: 60 lines of help, and no word about what is missing."""
    done = muxkit(name)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 5
    assert "Missing argument 'URL" in done.stderr


def test_a_server_of_a_command_that_is_not_there_does_not_start() -> None:
    done = muxkit("serve", f"bpmux+tcp://{HERE}", "--exec", "no-such-command --really")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-command: command not found or not executable" in done.stderr


def test_top_says_why_there_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = muxkit("top", f"127.0.0.1:{port}")
    assert (done.returncode, done.stderr) == (
        3,
        f"muxkit: 127.0.0.1:{port}: connection refused (nothing listens there)\n",
    )
