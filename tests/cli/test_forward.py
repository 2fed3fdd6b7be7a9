"""`muxkit forward`: a server and a client as processes, what they refuse to do, and what they say."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import trustme

from tests.cli._command import MUXKIT, PATIENCE, environment, muxkit
from tests.cli._forking import Muxkit

CURL = shutil.which("curl")
TOKEN = "a-token-that-no-log-shows"

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]


class Command:
    """`muxkit forward` at work, and the lines that it says as JSON."""

    def __init__(self, *arguments: str, before: Sequence[str] = (), **changes: str) -> None:
        words = ("forward", *arguments, "--json")
        start = partial(subprocess.Popen[str], [*before, *MUXKIT, *words]) if before else partial(Muxkit, *words)
        self.process: subprocess.Popen[str] = start(
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**changes)
        )
        self.lines: list[str] = []

    def started(self) -> AbstractContextManager[object]:
        """Wait until it listens."""
        return nullcontext(self.next("listening"))

    def next(self, event: str) -> dict[str, object]:
        """Wait for the next line about an event."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            said: dict[str, object] = json.loads(line) if line.startswith("{") else {}
            if said.get("event") == event:
                return said
        raise AssertionError(f"it ended without {event}: {self.lines}")

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        """Send signals, wait for the end; return the exit code and everything that was said."""
        for each in signals:
            self.process.send_signal(each)
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        return self.process.wait(PATIENCE), "".join(self.lines) + rest

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def command(*arguments: str, **changes: str) -> Iterator[Command]:
    with killed(Command(*arguments, **changes)) as running:
        yield running


@contextmanager
def killed(running: Command) -> Iterator[Command]:
    try:
        yield running
    finally:
        running.kill()


@pytest.fixture
def echo() -> Iterator[int]:
    """A target that sends back what comes, in threads."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65_536):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def call(address: object, said: bytes = b"tea") -> bytes:
    """Connect, say something, and return all that comes back."""
    host, _, port = str(address).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while data := connection.recv(65_536):
            heard += data
        return heard


@pytest.mark.parametrize(
    "form", ["bpmux+ws://{}/forward", "relink+tcp://{}/forward", "aqueduct+tcp://{}", "e3x+tcp://{}"]
)
def test_forwards_of_all_kinds_go_through_one_line_and_come_back_after_a_kill(
    form: str, echo: int, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# clients\nalice {TOKEN}\nbob another\n")
    url = form.format(f"127.0.0.1:{free_port()}")
    serving = (url, "--serve", "--allow", str(echo), "--allow-listen", "*", "--token-file", str(tokens))
    wanted = ("-L", f"0:{echo}", "-R", f"{free_port()}:{echo}", "-D", "0", "--token-file", str(token))
    with command(*serving) as server, server.started(), command(url, *wanted) as client:
        local = client.next("listening")["address"]
        proxy = client.next("listening")["address"]
        remote = client.next("listening_there")["address"]
        assert call(local) == call(remote) == b"tea"
        hello = b"\5\1\0" + b"\5\1\0\1\x7f\0\0\1" + echo.to_bytes(2, "big")
        assert call(proxy, hello + b"milk").endswith(b"milk")

        server.kill()
        with command(*serving) as again:
            again.next("listening")
            assert call(local) == b"tea"  # the listener stayed, and the connection waited
            assert client.next("listening_there")["address"] == remote  # the same port
            assert call(remote) == b"tea"
            client_code, client_said = client.end(signal.SIGTERM)
            server_code, server_said = again.end(signal.SIGTERM)
    assert (client_code, server_code) == (0, 0)
    assert client_said.count('"disconnected"') == 1  # one line for one outage
    assert '"total":2' in client_said
    for said in (client_said, server_said, *server.lines):
        assert TOKEN not in said


@pytest.mark.skipif(CURL is None, reason="there is no curl")
def test_curl_reads_a_page_through_a_line_of_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "alice@example.com")):
        authority.issue_cert(identity).private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    (tmp_path / "page").write_bytes(b"tea" * 100_000)
    pages, port = free_port(), free_port()
    url = f"bpmux+wss://127.0.0.1:{port}/forward"
    web = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path), str(pages)]
    ca, mine, theirs = (str(tmp_path / f"{name}.pem") for name in ("ca", "client", "server"))
    with (
        subprocess.Popen(web, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pages_server,
        command(url, "--serve", "--allow", f"localhost:{pages}", "--cert", theirs, "--client-ca", ca) as server,
        command(url, "-L", f"0:localhost:{pages}", "-D", "0", "--ca", ca, "--cert", mine) as client,
    ):
        try:
            server.next("listening")
            local, proxy = client.next("listening")["address"], client.next("listening")["address"]
            client.next("connected")
            curl = [str(CURL), "-sS", "--noproxy", "", "--retry", "9", "--retry-all-errors"]
            for how in ([f"http://{local}/page"], ["--socks5-hostname", str(proxy), f"http://localhost:{pages}/page"]):
                done = subprocess.run([*curl, *how], capture_output=True, check=False, timeout=PATIENCE)
                assert done.stdout == b"tea" * 100_000, done.stderr
            stranger = muxkit("forward", url, "-L", f"0:localhost:{pages}", "--ca", ca)
            assert stranger.returncode == 3
            assert "certificate required; give it one: --cert and --key" in stranger.stderr
        finally:
            pages_server.kill()


def test_a_wrong_token_ends_the_command_with_the_servers_reason(echo: int) -> None:
    url = f"bpmux+tcp://127.0.0.1:{free_port()}"
    with command(url, "--serve", "--allow", str(echo), MUXKIT_TOKEN=TOKEN) as server:
        server.next("listening")
        done = muxkit("forward", url, "-L", f"0:{echo}", MUXKIT_TOKEN="a-guess")
    assert done.returncode == 3
    assert "does not know the token" in done.stderr
    assert "a-guess" not in done.stdout + done.stderr


@pytest.mark.parametrize("token", [{}, {"MUXKIT_TOKEN": "a-guess"}])
@pytest.mark.parametrize("protocol", ["bpmux", "aqueduct", "e3x", "yamux"])
def test_a_client_that_the_server_refuses_is_never_told_that_it_is_connected(
    protocol: str, token: dict[str, str], echo: int
) -> None:
    """Was: the server answered a ping before it refused the client, so "connected to" came before the error."""
    url = f"{protocol}+tcp://127.0.0.1:{free_port()}"
    with command(url, "--serve", "--allow", str(echo), MUXKIT_TOKEN=TOKEN) as server:
        server.next("listening")
        done = muxkit("forward", url, "-L", f"0:{echo}", **token)
    assert done.returncode == 3
    assert "token" in done.stderr
    assert "connected to" not in done.stdout + done.stderr


@pytest.mark.parametrize("url", ["bpmux+tcp://192.0.2.1:7", "bpmux+ws://192.0.2.1:7", "e3x+udp://192.0.2.1:7"])
def test_plaintext_beyond_loopback_is_refused_before_anything_listens(url: str, echo: int) -> None:
    """Was: "listening on" came first, and the refusal with the first attempt to connect."""
    done = muxkit("forward", url, "-L", f"0:{echo}")
    assert done.returncode == 2
    assert "is plaintext and '192.0.2.1' is not a loopback address" in done.stderr
    assert "listening on" not in done.stdout + done.stderr


def test_a_listener_that_is_not_allowed_ends_the_command_with_the_servers_reason(echo: int) -> None:
    url = f"bpmux+tcp://127.0.0.1:{free_port()}"
    with command(url, "--serve", "--allow", str(echo)) as server:
        server.next("listening")
        done = muxkit("forward", url, "-R", f"0.0.0.0:0:{echo}")
    assert done.returncode == 1
    assert "listening on 0.0.0.0:0 is not allowed here" in done.stderr


def test_the_first_interrupt_lets_connections_end_and_the_second_resets_them(echo: int) -> None:
    url = f"bpmux+tcp://127.0.0.1:{free_port()}"
    with (
        command(url, "--serve", "--allow", str(echo)) as server,
        command(url, "-L", f"0:{echo}", "--grace", "300") as client,
    ):
        server.next("listening")
        host, _, port = str(client.next("listening")["address"]).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"a")
            assert connection.recv(1) == b"a"
            client.process.send_signal(signal.SIGINT)
            assert client.next("ending")["connections"] == 1
            connection.sendall(b"b")
            assert connection.recv(1) == b"b"
            code, _ = client.end(signal.SIGINT)
            assert code == 130
            with pytest.raises(ConnectionResetError):
                connection.recv(1)


def test_targets_get_the_address_of_the_client_first(echo: int) -> None:
    url = f"bpmux+tcp://127.0.0.1:{free_port()}"
    with (
        command(url, "--serve", "--allow", str(echo)) as server,
        command(url, "-L", f"0:{echo}", "--proxy-header", "1") as client,
    ):
        server.next("listening")
        host, _, port = str(client.next("listening")["address"]).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            mine = connection.getsockname()[1]
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(partial(connection.recv, 65_536), b""))
    assert answer == f"PROXY TCP4 127.0.0.1 127.0.0.1 {mine} {port}\r\nhello".encode()


def test_connections_are_refused_when_patience_is_over(echo: int) -> None:
    with command(f"bpmux+tcp://127.0.0.1:{free_port()}", "-L", f"0:{echo}", "--patience", "0.2") as client:
        address = client.next("listening")["address"]
        client.next("disconnected")
        with pytest.raises(ConnectionResetError):
            call(address)
        assert "within 0.2 s" in str(client.next("refused")["text"])


def test_options_come_from_a_file_and_the_command_line_is_stronger(echo: int, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "server.toml").write_text(
        f'url = "bpmux+tcp://127.0.0.1:{port}"\nserve = true\nallow = ["{echo}"]\ntoken-file = "token"\n'
    )
    (tmp_path / "client.toml").write_text(
        f'url = "bpmux+tcp://127.0.0.1:9"\nlocal = "0:{echo}"\ntoken-file = "token"\npatience = 60\n'
    )
    with (
        command("--config", str(tmp_path / "server.toml")) as server,
        command("--config", str(tmp_path / "client.toml"), f"bpmux+tcp://127.0.0.1:{port}") as client,
    ):
        server.next("listening")
        assert call(client.next("listening")["address"]) == b"tea"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens = 3", "unknown option 'tokens'"),
        ("url = ", "Invalid value"),
        ('token = "x"', "unknown option 'token'"),
        ("json = 3", "'3' is not a valid boolean"),
        ("patience = [1, 2]", "patience: expected one value"),
        ("[local]\na = 1", "local: expected one value or a list"),
        ('local = [["a", "b"]]', "local: expected one value or a list"),
        ("local = [8080]", "expected BIND:TARGET"),
    ],
)
def test_a_faulty_file_of_options_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "faulty.toml").write_text(text)
    done = muxkit("forward", "--config", str(tmp_path / "faulty.toml"))
    assert done.returncode == 2
    assert said in done.stderr


URL = "bpmux+tcp://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((URL,), "nothing to forward"),
        (("-L", "1:2"), "Missing argument 'URL'"),
        ((URL, "--serve"), "--serve requires --allow"),
        ((URL, "--serve", "--allow", "1", "-L", "1:2"), "--local is for clients"),
        ((URL, "-L", "1:2", "--client-ca", __file__), "--client-ca requires --serve"),
        ((URL, "-L", "1:2", "--allow", "3"), "--allow requires --serve"),
        ((URL, "-L", "0:53/udp", "--proxy-header", "2"), "--proxy-header requires --local or --remote for TCP"),
        ((URL, "--serve", "--allow", "1", "--proxy-header", "2"), "--proxy-header is for clients"),
        ((URL, "-L", "nonsense"), "expected BIND:TARGET"),
        ((URL, "-D", "::1:80"), "needs brackets"),
        ((URL, "-L", "0:/run/x.sock:53/udp"), "support Unix sockets"),
        ((URL, "-R", "0:53/udp"), "UDP works with --local only"),
        ((URL, "--serve", "--allow", "ho st:80"), "expected HOST:PORTS"),
        ((URL, "-L", "0:1", "--cert", __file__), "expected a certificate and its key in PEM"),
        (("bpmux+tcp://0.0.0.0:0", "--serve", "--allow", "1"), "would accept every client"),
        (
            ("bpmux+tcp://0.0.0.0:0", "--serve", "--allow", "1", "--token-file", __file__),
            "expected a name and a secret",
        ),
        (("bpmux+tcp://192.0.2.1:9", "-L", "0:1"), "--insecure"),
        (("nonsense", "-L", "0:1"), "invalid URL 'nonsense'"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_that_speaks_of_options(arguments: tuple[str, ...], said: str) -> None:
    done = muxkit("forward", *arguments)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert "insecure=" not in done.stderr


def test_more_connections_are_open_than_the_soft_limit_of_files(echo: int) -> None:
    """It is 1,024 in most places, and a client may have 4,096 connections: it would keep out all others."""
    url = f"bpmux+tcp://127.0.0.1:{free_port()}"
    few = ("bash", "-c", 'ulimit -S -n 64; exec "$@"', "bash")
    with (
        killed(Command(url, "--serve", "--allow", str(echo), before=few)) as server,
        server.started(),
        killed(Command(url, "-L", f"0:{echo}", before=few)) as client,
    ):
        port = int(str(client.next("listening")["address"]).rpartition(":")[2])
        with ExitStack() as stack:
            opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(150)]
            for each in opened:
                each.sendall(b"tea")
            assert [each.recv(3) for each in opened] == [b"tea"] * len(opened)


def test_datagrams_go_through_and_need_a_rule_of_their_own() -> None:
    url = f"e3x+udp://127.0.0.1:{free_port()}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as target, socket.socket(type=socket.SOCK_DGRAM) as caller:
        target.bind(("127.0.0.1", 0))
        port = target.getsockname()[1]

        def answer() -> None:
            while (said := target.recvfrom(65_535))[0] != b"end":
                target.sendto(said[0], said[1])

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            command(url, "--serve", "--allow", f"{port}/udp") as server,
            command(url, "-L", f"0:{port}/udp", "-L", f"0:{port}") as client,
        ):
            server.next("listening")
            listening = client.next("listening")
            assert (listening["kind"], listening["target"]) == ("udp", f"127.0.0.1:{port}/udp")
            caller.connect(("127.0.0.1", int(str(listening["address"]).rpartition(":")[2])))
            caller.settimeout(1.0)
            heard = b""
            while not heard:
                with suppress(TimeoutError):  # said again until it is answered, as it is with UDP
                    caller.send(b"tea")
                    heard = caller.recv(100)
            assert heard == b"tea"
            by_tcp = client.next("listening")["address"]
            with suppress(ConnectionResetError):
                assert call(by_tcp) == b""
            assert client.next("refused")["code"] == 403
            code, said = client.end(signal.SIGTERM)
            assert code == 0
            assert '"bytes_out":3' in said
        target.sendto(b"end", target.getsockname())
        thread.join(PATIENCE)


@pytest.mark.parametrize("form", [("forward", "--serve"), ("serve",)])
def test_a_server_of_forwards_is_a_service(form: tuple[str, ...], echo: int, tmp_path: Path) -> None:
    """It listens on the socket that it is given, says when it is ready and when it ends, and the client does so too."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        notify = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        url = f"bpmux+tls://127.0.0.1:{listener.getsockname()[1]}"
        arguments = [form[0], url, *form[1:], "--allow", str(echo), "--cert", str(tmp_path / "server.pem"), "--json"]
        # As systemd does it: descriptor 3, and a shell that becomes the service keeps its number.
        descriptor = listener.fileno()
        line = f'exec 3<&{descriptor}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        with subprocess.Popen(
            ["bash", "-c", line, "bash", *MUXKIT, *arguments],
            pass_fds=[descriptor],
            env=environment(**notify),
            stdout=subprocess.PIPE,
            text=True,
        ) as service:
            assert manager.recv(100) == b"READY=1"
            with command(url, "-L", f"0:{echo}", "--ca", str(tmp_path / "ca.pem"), **notify) as client:
                assert manager.recv(100) == b"READY=1"
                assert call(client.next("listening")["address"]) == b"tea"
                code, _ = client.end(signal.SIGTERM)
                assert (code, manager.recv(100)) == (0, b"STOPPING=1")
            service.send_signal(signal.SIGHUP)
            assert service.stdout is not None
            said = [json.loads(service.stdout.readline())["event"] for _ in range(2)]
            assert said == ["listening", "reload"]
            service.send_signal(signal.SIGINT)
            assert manager.recv(100) == b"STOPPING=1"
            assert service.wait(PATIENCE) == 0
