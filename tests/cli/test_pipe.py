"""`muxkit serve` and `muxkit pipe`: two processes and one channel between them."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli._command import ESCAPE, PATIENCE, completed, environment, is_there, line_of
from tests.cli._forking import Muxkit

PROTOCOLS = ["bpmux", "relink", "aqueduct", "e3x", "yamux"]
TOKEN = "a-token-that-no-log-shows"

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


@contextmanager
def serving(*arguments: str, **changes: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`muxkit serve` at work, and the URL that it listens on."""
    with Muxkit(
        "serve", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**changes)
    ) as process:
        try:
            said = re.fullmatch(r"listening on (\S+)\n", line_of(process))
            assert said is not None, process.communicate(timeout=PATIENCE)
            yield process, said[1]
        finally:
            if process.poll() is None:
                process.kill()


def pipe(url: str, data: bytes = b"", *arguments: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    return completed("pipe", url, *arguments, input=data, env=environment(**changes))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_goes_in_comes_out(protocol: str) -> None:
    data = os.urandom(3_000_000)
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--echo") as (_, url):
        done = pipe(url, data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_output_errors_and_exit_code_of_a_command_come_through(protocol: str) -> None:
    with serving(f"{protocol}+tcp://127.0.0.1:0", "--exec", "sh -c 'wc -c; echo no >&2; exit 7'") as (_, url):
        done = pipe(url, bytes(200_000))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (7, b"200000", b"no\n")


def test_a_command_that_a_signal_ends_has_an_exit_code_as_in_a_shell() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "sh -c 'kill -9 $$'") as (_, url):
        assert pipe(url).returncode == 137


def test_a_command_that_needs_no_more_input_ends_the_pipe() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "head -n 1") as (_, url):
        # Its input stays open, and more is written than any buffer holds.
        with Muxkit("pipe", url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"first\nsecond\n")
            process.stdin.flush()
            assert process.stdout.read() == b"first\n"
            assert process.wait(PATIENCE) == 0


def test_the_command_knows_its_channel_and_the_user_but_no_token() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "env", MUXKIT_TOKEN=TOKEN) as (_, url):
        done = pipe(url, b"", "--name", "backup\x1b[31m", MUXKIT_TOKEN=TOKEN)
    said = done.stdout.decode()
    assert done.returncode == 0
    assert "MUXKIT_CHANNEL=backup\\x1b[31m\n" in said
    assert "MUXKIT_USER=client\n" in said
    assert TOKEN not in said


def test_a_command_that_is_no_longer_there_is_an_exit_code_and_a_line(tmp_path: Path) -> None:
    command = tmp_path / "command"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", str(command)) as (_, url):
        command.unlink()
        done = pipe(url)
    assert (done.returncode, done.stderr) == (126, b"muxkit: failed to start the command\n")


def test_a_client_without_the_framing_gets_the_output_alone() -> None:
    import trio

    import muxkit

    async def read(url: str) -> list[bytes]:
        async with muxkit.connect(url) as session, session.open("raw") as channel:
            await channel.send(b"tea")
            await channel.finish()
            return [message async for message in channel]

    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "cat") as (_, url):
        assert b"".join(trio.run(read, url)) == b"tea"


def test_a_command_ends_with_its_client(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    script = tmp_path / "script"
    script.write_text(f"echo $$; exec 9>{fifo}; sleep 1000 & wait\n")
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", f"sh {script}") as (_, url):
        with Muxkit("pipe", url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdout is not None
            number = int(process.stdout.readline())
            with fifo.open("rb") as alive:
                assert is_there(number)
                process.kill()
                assert alive.read() == b""  # until the last process that holds it is gone: the shell and its child


def test_more_commands_than_allowed_are_refused_with_a_reason() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--exec", "cat", "--processes", "1") as (_, url):
        with Muxkit("pipe", url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as first:
            assert first.stdin is not None
            assert first.stdout is not None
            first.stdin.write(b"x\n")
            first.stdin.flush()
            assert first.stdout.readline() == b"x\n"
            second = pipe(url, b"y")
            first.stdin.close()
            assert first.wait(PATIENCE) == 0
    assert second.returncode == 1
    assert second.stderr == b"muxkit: 1 commands are running already\n"


def test_a_full_pipe_stalls_the_sender_and_nothing_is_lost(tmp_path: Path) -> None:
    """The reader of the output begins after everything that fits between has been taken."""
    big = tmp_path / "big"
    big.write_bytes(os.urandom(1 << 20) * 24)
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url), big.open("rb") as source:
        with Muxkit("pipe", url, stdin=source, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            digest = hashlib.sha256(first)
            while data := process.stdout.read(1 << 20):
                digest.update(data)
            assert process.wait(PATIENCE) == 0
    assert digest.digest() == hashlib.sha256(big.read_bytes()).digest()


# ---------------------------------------------------------------------------- who may come in


def test_a_token_comes_from_a_file_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# clients\nalice {TOKEN}\n")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "guess").write_text("a-guess")
    with serving("bpmux+tcp://127.0.0.1:0", "--echo", "--token-file", str(tmp_path / "tokens")) as (process, url):
        assert pipe(url, b"x", "--token-file", str(tmp_path / "token")).stdout == b"x"
        wrong = pipe(url, b"x", "--token-file", str(tmp_path / "guess"))
        none = pipe(url, b"x")
        process.send_signal(signal.SIGTERM)
        said = "".join(process.communicate(timeout=PATIENCE))
    assert (wrong.returncode, none.returncode) == (3, 3)
    assert b"does not know the token" in wrong.stderr
    assert b"--token-file or $MUXKIT_TOKEN" in none.stderr
    assert b"authorize" not in none.stderr
    assert TOKEN not in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bpmux+tcp://127.0.0.1:0"], "expected one of --echo"),
        (["bpmux+tcp://127.0.0.1:0", "--echo", "--exec", "cat"], "expected one of --echo"),
        (["bpmux+tcp://0.0.0.0:0", "--echo"], "the server would accept every client: use --token-file or --client-ca"),
        (["bpmux+tls://127.0.0.1:0", "--echo"], "--cert"),
        (["bpmux+tcp://127.0.0.1:0", "--exec", "'"], "No closing quotation"),
        (["restream+tcp://127.0.0.1:0", "--echo"], "restream"),
        (["bpmux+carrier://127.0.0.1:0", "--echo"], "carrier"),
        (["nonsense", "--echo"], "protocol+transport"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_served_is_refused_in_words_of_options(arguments: list[str], text: str) -> None:
    """F18: "a server needs ssl_context=, with its certificate and key loaded"."""
    done = completed("serve", *arguments, text=True, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "ssl_context" not in done.stderr
    assert "insecure=True" not in done.stderr
    assert "Traceback" not in done.stderr


def test_plaintext_to_another_machine_is_refused_in_words_of_options() -> None:
    """F18: "use tls, or pass insecure=True"."""
    done = pipe("bpmux+tcp://192.0.2.1:7000")
    assert done.returncode == 2
    assert b"--insecure" in done.stderr
    assert b"insecure=True" not in done.stderr


def test_no_server_is_an_exit_code_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for protocol in PROTOCOLS:
        done = pipe(f"{protocol}+tcp://127.0.0.1:{port}", b"", "--timeout", "2")
        assert done.returncode == 3, (protocol, done.stderr)
        *outage, end = done.stderr.splitlines()
        assert end.startswith(b"muxkit: ")
        assert bool(outage) == (protocol == "relink"), outage  # a link waits for its server, and says so
        assert ESCAPE.encode() not in done.stderr


# ---------------------------------------------------------------------------- life and death of a server


def test_the_first_signal_drains_and_a_second_aborts() -> None:
    for signals, code in ((1, 0), (2, 1)):
        with serving("bpmux+tcp://127.0.0.1:0", "--exec", "cat", "--grace", "300") as (server, url):
            with Muxkit(
                "pipe", url, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
            ) as client:
                assert client.stdin is not None
                assert client.stdout is not None
                client.stdin.write(b"before\n")
                client.stdin.flush()
                assert client.stdout.readline() == b"before\n"
                server.send_signal(signal.SIGINT)
                assert line_of(server) == "shutting down; waiting up to 300 s for 1 session\n"
                client.stdin.write(b"while it drains\n")
                client.stdin.flush()
                assert client.stdout.readline() == b"while it drains\n"
                if signals == 2:
                    server.send_signal(signal.SIGINT)
                else:
                    client.stdin.close()
                assert server.wait(PATIENCE) == code
                assert (client.wait(PATIENCE) == 0) is (signals == 1)


def notify_socket(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(path)
    listener.settimeout(PATIENCE)
    return listener


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_hears_that_it_is_ready_and_that_it_ends(abstract: bool) -> None:
    if abstract and sys.platform != "linux":
        return
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/notify"
        with notify_socket(f"\0{path}" if abstract else path) as manager:
            shown = f"@{path}" if abstract else path
            with serving("bpmux+tcp://127.0.0.1:0", "--echo", NOTIFY_SOCKET=shown) as (process, url):
                assert manager.recv(1000) == b"READY=1"
                assert pipe(url, b"x").stdout == b"x"
                process.send_signal(signal.SIGTERM)
                assert manager.recv(1000) == b"STOPPING=1"
                assert process.wait(PATIENCE) == 0


# Like systemd: the sockets from 3 on, and an environment that names this process.
ACTIVATE = """
import os, sys
sockets = [int(each) for each in sys.argv[1].split(",")]
kept = [os.dup(each) for each in sockets]
for number, each in enumerate(kept):
    os.dup2(each, 3 + number)
    os.set_inheritable(3 + number, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(kept))}
os.execv(sys.executable, [sys.executable, "-P", "-m", "muxkit.cli", *sys.argv[2:]])
"""


def activated(sockets: list[socket.socket], *arguments: str) -> subprocess.Popen[str]:
    numbers = [each.fileno() for each in sockets]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", ACTIVATE, ",".join(map(str, numbers)), "serve", *arguments],
        pass_fds=numbers,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_it_serves_on_the_sockets_that_a_service_manager_passes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        port = tcp.getsockname()[1]
        with activated([tcp, unix], "bpmux+tcp://127.0.0.1:1", "bpmux+unix:///nowhere", "--echo") as process:
            assert line_of(process) == f"listening on bpmux+tcp://127.0.0.1:{port}\n"
            line_of(process)
            assert pipe(f"bpmux+tcp://127.0.0.1:{port}", b"tcp").stdout == b"tcp"
            assert pipe(f"bpmux+unix://{path}", b"unix").stdout == b"unix"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0


def test_sockets_for_another_process_are_left_alone() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo", LISTEN_PID="1", LISTEN_FDS="1") as (_, url):
        assert pipe(url, b"x").stdout == b"x"


def test_as_many_sockets_as_urls_or_one_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        urls = ["bpmux+tcp://127.0.0.1:1"] * 3
        with activated([one, two], *urls, "--echo") as process:
            assert process.wait(PATIENCE) == 2
            assert process.stderr is not None
            assert "one socket for each of the 3 URLs, got 2 sockets" in process.stderr.read()
