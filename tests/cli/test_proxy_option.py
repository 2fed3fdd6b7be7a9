"""`--proxy` of the commands that connect, with a small CONNECT proxy, and the step that `muxkit doctor` shows."""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli._command import PATIENCE, completed, environment, muxkit
from tests.cli.test_forward import command
from tests.cli.test_pipe import serving
from tests.cli.test_restream_read import serving as streaming

pytestmark = [
    pytest.mark.timeout(400),  # programs start slowly on a busy machine
    pytest.mark.skipif(sys.platform == "win32", reason="it sends signals"),
]

CREDENTIALS = "Basic " + base64.b64encode(b"ann:s3cret").decode()


class _Connect(socketserver.StreamRequestHandler):
    """A CONNECT proxy that does nothing else, and wants a user."""

    def handle(self) -> None:
        head = [line.decode().strip() for line in iter(self.rfile.readline, b"\r\n")]
        server = self.server
        assert isinstance(server, _Proxy)
        if f"Proxy-Authorization: {CREDENTIALS}" not in head:
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        host, _, port = head[0].split()[1].rpartition(":")
        server.asked.append(f"{host}:{port}")
        with socket.create_connection((host, int(port))) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_copy, args=(there, self.connection))
            back.start()
            _copy(self.connection, there)
            back.join()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connect)
        self.asked: list[str] = []


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def proxying() -> Iterator[tuple[str, list[str]]]:
    """Run the proxy; give its URL with the user, and what it was asked for."""
    with _Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://ann:s3cret@127.0.0.1:{proxy.server_address[1]}", proxy.asked
        finally:
            proxy.shutdown()
            thread.join()


def test_a_pipe_goes_through_the_proxy_of_the_environment_of_muxkit() -> None:
    with serving("bpmux+tcp://127.0.0.1:0", "--echo") as (_, url), proxying() as (proxy, asked):
        done = completed("pipe", url, input=b"through the proxy", env=environment(MUXKIT_PROXY=proxy))
        assert (done.returncode, done.stdout) == (0, b"through the proxy"), done.stderr
        assert asked == [url.rpartition("/")[2]]


def test_a_stream_of_restream_is_read_through_the_proxy() -> None:
    with streaming() as url, proxying() as (proxy, asked):
        done = muxkit("restream", "read", url, "--count", "5", "--values", MUXKIT_PROXY=proxy)
        assert (done.returncode, len(done.stdout.splitlines())) == (0, 5), done.stderr
        assert asked == [url.rpartition("/")[2]]


def test_a_forward_goes_through_the_proxy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target, proxying() as (proxy, asked):
        port = target.getsockname()[1]
        with command("bpmux+ws://127.0.0.1:0", "--serve", "--allow", str(port)) as server:
            url = str(server.next("listening")["url"])
            with command(url, "-L", f"0:{port}", MUXKIT_PROXY=proxy) as client:
                host, _, local = str(client.next("listening")["address"]).rpartition(":")
                with socket.create_connection((host, int(local)), timeout=PATIENCE) as connection:
                    connection.sendall(b"through the proxy")
                    carried, _ = target.accept()
                    with carried:
                        assert carried.recv(17, socket.MSG_WAITALL) == b"through the proxy"
        assert asked == [url.partition("//")[2].partition("/")[0]]


def test_the_doctor_shows_the_proxy_as_a_step_and_its_refusal_without_the_password() -> None:
    with serving("bpmux+ws://127.0.0.1:0", "--echo") as (_, url), proxying() as (proxy, asked):
        place = proxy.rpartition("@")[2]
        done = muxkit("doctor", url, "--json", MUXKIT_PROXY=proxy)
        steps = [json.loads(line) for line in done.stdout.splitlines()]
        names = [each["name"] for each in steps if each["event"] == "step"]
        assert names == ["url", "proxy", "websocket", "protocol", "authorisation"]
        [shown] = [each["text"] for each in steps if each.get("name") == "proxy"]
        assert shown == f"http://{place} opened a tunnel to 127.0.0.1 port {url.rpartition(':')[2]}"
        assert len(asked) >= 3
        refused = muxkit("doctor", url, "--proxy", f"http://ann:wr0ng@{place}")
    assert refused.returncode == 3
    assert "the proxy answered 407 Proxy Authentication Required" in refused.stdout
    assert "--proxy http://user:password@host:port" in refused.stdout
    assert "wr0ng" not in refused.stdout + refused.stderr


def test_a_transport_without_proxies_and_an_invalid_url_are_usage_errors() -> None:
    done = muxkit("pipe", "bpmux+tcp://127.0.0.1:1", "--proxy", "ftp://proxy")
    assert done.returncode == 2
    assert "--proxy: invalid URL 'ftp://proxy': expected http://host:port" in " ".join(done.stderr.split())
    done = muxkit("pipe", "e3x+udp://127.0.0.1:1", "--proxy", "http://proxy:1")
    assert done.returncode == 2
    assert "proxy" in done.stderr
