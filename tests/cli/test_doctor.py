"""`muxkit doctor`: what works on this machine, and the step at which a URL fails."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.cli._command import ESCAPE, PATIENCE, install_transport, listening, muxkit
from tests.cli.test_pipe import TOKEN, serving

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it uses Unix sockets"),
]

PAIRS = {
    *(f"bpmux+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss")),
    *(f"relink+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss")),
    *(f"restream+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss")),
    *(f"yamux+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss")),
    *(f"aqueduct+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss", "quic")),
    *(f"e3x+{name}" for name in ("mem", "sim", "tcp", "tls", "unix", "ws", "wss", "udp", "dtls")),
}


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check(url: str, *arguments: str, **changes: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the exit code, the step that failed or was the last, and the result."""
    done = muxkit("doctor", url, "--json", *arguments, **changes)
    assert done.stdout, done.stderr
    said = lines(done.stdout)
    assert said[-1]["exit"] == done.returncode
    steps = [each for each in said if each["event"] == "step"]
    assert all(each["ok"] for each in steps[:-1])
    return done.returncode, steps[-1], said[-1]


def test_each_protocol_is_tried_over_each_transport() -> None:
    done = muxkit("doctor", "--json")
    assert done.returncode == 0, done.stdout
    said = lines(done.stdout)
    tested = {each["name"]: each["ok"] for each in said if each["event"] == "tested"}
    assert tested == dict.fromkeys(PAIRS, True)
    installed = {each["name"]: each["text"] for each in said if each["event"] == "installed"}
    assert {"python", "muxkit", "required", "cli", "quic", "dtls"} <= {*installed}
    assert "trio " in installed["required"]


def test_what_does_not_work_is_named_and_has_an_exit_code() -> None:
    with tempfile.TemporaryDirectory(prefix="x" * 100) as folder:  # too long for the address of a Unix socket
        done = muxkit("doctor", TMPDIR=folder, FORCE_COLOR="1")
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert sorted(failed) == [f"{name}+unix" for name in ("aqueduct", "bpmux", "e3x", "relink", "restream", "yamux")]
    assert done.stderr == "muxkit: some installed plugins don't work\n"
    assert ESCAPE not in done.stdout + done.stderr


def test_without_openssl_what_needs_a_certificate_is_not_tried(tmp_path: Path) -> None:
    done = muxkit("doctor", PATH=str(tmp_path))
    assert done.returncode == 0
    assert "-       bpmux+tls        not tried: needs the program openssl" in done.stdout
    assert "ok      bpmux+tcp " in done.stdout


def test_a_transport_of_others_is_not_tried_and_a_broken_one_is_told(tmp_path: Path) -> None:
    code = "from muxkit_adapters.tcp import transport"
    path = install_transport(tmp_path, "fine", "fine", code)
    other = tmp_path / "other"
    other.mkdir()
    broken = install_transport(other, "broken", "broken", "1 / 0")
    fine = muxkit("doctor", PYTHONPATH=path)
    assert (fine.returncode, "-       bpmux+fine       not tried" in fine.stdout) == (0, True)
    failed = muxkit("doctor", PYTHONPATH=broken)
    assert failed.returncode == 1
    assert "FAILED  broken" in failed.stdout
    assert "division by zero" in failed.stdout


# ---------------------------------------------------------------------------- a URL


@pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
@pytest.mark.parametrize("transport", ["tcp", "ws"])
def test_a_server_that_answers_passes_every_step(protocol: str, transport: str) -> None:
    with serving(f"{protocol}+{transport}://127.0.0.1:0", "--echo") as (_, url):
        done = muxkit("doctor", url)
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")]
    more = ["websocket"] if transport == "ws" else []
    assert steps == ["url", "name", "tcp", *more, "protocol", "authorisation"]
    assert done.stdout.splitlines()[-1] == f"{url}: all is well"


def test_a_server_of_streams_passes_too() -> None:
    from tests.cli._command import line_of, running

    with running("restream", "serve", "restream+tcp://127.0.0.1:0") as server:
        url = line_of(server).removeprefix("listening on ").strip()
        code, step, _ = check(url)
    assert (code, step["name"], step["ok"]) == (0, "protocol", True)


@pytest.mark.parametrize(
    "url", ["nonsense", "bpmux+carrier://127.0.0.1:1", "bpmux+tcp://127.0.0.1", "bpmux+udp://127.0.0.1:1"]
)
def test_a_url_that_cannot_be_meant_fails_at_the_url(url: str) -> None:
    code, step, result = check(url)
    assert (code, step["name"], result["failed"]) == (2, "url", "url")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_name_without_address_fails_at_the_name(host: str) -> None:
    code, step, result = check(f"bpmux+tls://{host}:7000", "--timeout", str(PATIENCE))
    assert (code, step["name"], result["failed"]) == (3, "name", "name")
    assert host in step["text"]


def test_a_port_on_which_nothing_listens_fails_at_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, step, _ = check(f"bpmux+tcp://127.0.0.1:{port}")
    assert (code, step["name"]) == (3, "tcp")
    assert "refused" in step["text"]


def test_a_path_that_is_not_there_fails_at_the_socket(tmp_path: Path) -> None:
    code, step, _ = check(f"bpmux+unix://{tmp_path}/no")
    assert (code, step["name"]) == (3, "socket")


def test_a_port_without_tls_fails_at_tls() -> None:
    with listening(lambda connection: connection.sendall(b"SSH-2.0-other\r\n")) as address:
        code, step, _ = check(f"bpmux+tls://{address}")
    assert (code, step["name"]) == (3, "tls")
    assert "speak TLS at this port" in step["text"]


def test_a_certificate_that_is_not_trusted_fails_at_tls_and_names_the_option(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    server = ["bpmux+wss://127.0.0.1:0/chat", "--echo", "--cert", str(tmp_path / "server.pem")]
    with serving(*server) as (_, url):
        wrong = check(url, "--ca", str(tmp_path / "other.pem"))
        right = muxkit("doctor", url, "--ca", str(tmp_path / "ca.pem"))
    assert (wrong[0], wrong[1]["name"]) == (3, "tls")
    assert "--ca" in wrong[1]["text"]
    assert right.returncode == 0, right.stdout
    assert "a certificate for 127.0.0.1, until " in right.stdout
    assert "the server takes the upgrade at /chat" in right.stdout


def test_a_client_without_certificate_is_told_which_options_to_give(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.issue_cert("alice@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    ca = str(tmp_path / "ca.pem")
    server = ["bpmux+tls://127.0.0.1:0", "--echo", "--cert", str(tmp_path / "server.pem"), "--client-ca", ca]
    with serving(*server) as (_, url):
        without = check(url, "--ca", ca)
        shown = check(url, "--ca", ca, "--cert", str(tmp_path / "client.pem"))
    assert without[0] in (3, 4)
    assert "--cert and --key" in without[1]["text"]
    assert shown[0] == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nno such \x1b", "404 Not Found"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "401"),
        (b"SSH-2.0-other\r\n", "looks like SSH"),
        (b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: x\r\n\r\n", "wrong Sec-WebSocket-Accept"),
        (b"", "closed the connection"),
    ],
    ids=["404", "401", "ssh", "wrong", "silent"],
)
def test_a_server_without_websocket_fails_at_the_upgrade(answer: bytes, said: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    with listening(serve) as address:
        code, step, _ = check(f"bpmux+ws://{address}/chat")
    assert (code, step["name"]) == (3, "websocket")
    assert said in step["text"]
    assert ESCAPE not in step["text"]


def test_another_path_fails_at_the_upgrade_with_the_servers_words() -> None:
    with serving("bpmux+ws://127.0.0.1:0/chat", "--echo") as (_, url):
        code, step, _ = check(url.replace("/chat", "/other"))
    assert (code, step["name"]) == (3, "websocket")
    assert "404" in step["text"]
    assert "this server has another path" in step["text"]


@pytest.mark.parametrize(("served", "asked"), [("relink", "bpmux"), ("bpmux", "relink"), ("e3x", "bpmux")])
def test_a_server_of_another_protocol_fails_at_the_protocol(served: str, asked: str) -> None:
    with serving(f"{served}+tcp://127.0.0.1:0", "--echo") as (_, url):
        code, step, _ = check(url.replace(served, asked), "--timeout", "3")
    assert (code, step["name"]) == (4, "protocol")


def test_a_server_that_says_nothing_fails_after_the_timeout() -> None:
    with listening(lambda connection: connection.recv(65_536) and connection.recv(1)) as address:
        code, step, _ = check(f"bpmux+tls://{address}", "--timeout", "0.5")
    assert (code, step["name"], step["text"]) == (3, "tls", "no answer within 0.5 s")


@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
def test_a_client_that_is_not_let_in_fails_at_the_authorisation(protocol: str, tmp_path: Path) -> None:
    (tmp_path / "guess").write_text("a-guess")
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--echo", MUXKIT_TOKEN=TOKEN) as (_, url):
        without = check(url)
        wrong = check(url, "--token-file", str(tmp_path / "guess"))
        right = check(url, MUXKIT_TOKEN=TOKEN)
    for code, step, _ in (without, wrong):
        assert (code, step["name"]) == (3, "authorisation")
    assert "--token-file" in without[1]["text"]
    assert "does not know the token" in wrong[1]["text"]
    assert right[0] == 0
