"""Connections through proxies: tinyproxy and microsocks, and small ones of our own for what those never do."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import trustme

import muxkit
from muxkit import HandshakeFailed
from muxkit.runtime import can_heal
from muxkit_adapters import tcp, tls, websocket
from muxkit_adapters.proxy import proxy_for

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def echo(stream: trio.abc.Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def greet(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"hello")
    await echo(stream)


@asynccontextmanager
async def serving(handler: Callable[[trio.abc.Stream], Awaitable[None]] = greet) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(tcp.serve, handler)
        yield int(address.rpartition(":")[2])
        nursery.cancel_scope.cancel()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def running(*command: str, port: int) -> AsyncIterator[None]:
    """Run a proxy until the end of the block; skips the test if the machine lacks it."""
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"there is no {command[0]} on this machine")
    process = await trio.lowlevel.open_process([program, *command[1:]], stdout=-3, stderr=-3)
    try:
        with trio.fail_after(30):
            while True:
                with suppress(OSError):
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                await trio.sleep(0.02)
        yield
    finally:
        with trio.CancelScope(shield=True):
            # tinyproxy looks for a SIGTERM before it waits for connections, so one that comes in between is lost.
            process.kill()
            await process.wait()


@asynccontextmanager
async def tinyproxy(folder: Path, *lines: str, ports: tuple[int, ...] = ()) -> AsyncIterator[int]:
    """Run tinyproxy, which allows CONNECT to these ports only and does nothing else."""
    port = free_port()
    config = [f"Port {port}", "Listen 127.0.0.1", "Timeout 60", "MaxClients 100", *lines]
    config += [f"ConnectPort {each}" for each in ports]
    path = folder / "tinyproxy.conf"
    path.write_text("\n".join(config), encoding="utf-8")
    async with running("tinyproxy", "-d", "-c", str(path), port=port):
        yield port


@asynccontextmanager
async def microsocks(*options: str) -> AsyncIterator[int]:
    port = free_port()
    async with running("microsocks", "-i", "127.0.0.1", "-p", str(port), *options, port=port):
        yield port


@asynccontextmanager
async def answering(
    answer: bytes, *, after: bytes = b"\r\n\r\n", pieces: int | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a proxy that reads until `after`, and then sends one answer, in pieces if so many bytes are given."""
    heard: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        said = b""
        while after not in said:
            data = await stream.receive_some()
            if not data:
                return
            said += data
        heard.append(said)
        size = pieces or max(1, len(answer))
        for start in range(0, len(answer), size):
            await stream.send_all(answer[start : start + size])
            await trio.testing.wait_all_tasks_blocked(0.001)
        if answer:
            await echo(stream)

    async with serving(handle) as port:
        yield port, heard


# --- real proxies


async def test_tinyproxy_opens_a_tunnel_with_a_user_and_nothing_without_one(tmp_path: Path) -> None:
    async with serving() as there, tinyproxy(tmp_path, "BasicAuth ann secret", ports=(there,)) as port:
        async with tcp.connect("127.0.0.1", there, proxy=f"http://ann:secret@127.0.0.1:{port}") as stream:
            assert await stream.receive_some() == b"hello"
            await stream.send_all(b"x" * 100_000)
            got = b""
            while len(got) < 100_000:
                got += await stream.receive_some()
            assert stream.peer == f"tcp 127.0.0.1:{there} through http://127.0.0.1:{port}"
        for proxy in (f"http://127.0.0.1:{port}", f"http://ann:wrong@127.0.0.1:{port}"):
            with pytest.raises(HandshakeFailed) as caught:
                async with tcp.connect("127.0.0.1", there, proxy=proxy):
                    pass
            assert caught.value.status in (401, 407)
            assert "secret" not in str(caught.value)
            assert "wrong" not in str(caught.value)
            assert not can_heal(caught.value)


async def test_tinyproxy_refuses_a_port_that_is_not_allowed(tmp_path: Path) -> None:
    async with serving() as there, tinyproxy(tmp_path, ports=(1,)) as port:
        with pytest.raises(HandshakeFailed, match="the proxy answered 403") as caught:
            async with tcp.connect("127.0.0.1", there, proxy=f"http://127.0.0.1:{port}"):
                pass
    assert caught.value.status == 403


async def test_microsocks_opens_a_tunnel_with_a_user_and_nothing_without_one() -> None:
    async with serving() as there, microsocks("-u", "ann", "-P", "secret") as port:
        for host, kind in (("127.0.0.1", "socks5"), ("localhost", "socks5"), ("localhost", "socks5h")):
            async with tcp.connect(host, there, proxy=f"{kind}://ann:secret@127.0.0.1:{port}") as stream:
                assert await stream.receive_some() == b"hello"
        with pytest.raises(HandshakeFailed, match="the proxy wants a user and a password") as caught:
            async with tcp.connect("127.0.0.1", there, proxy=f"socks5://127.0.0.1:{port}"):
                pass
        assert not can_heal(caught.value)
        with pytest.raises(HandshakeFailed, match="doesn't accept this user and password"):
            async with tcp.connect("127.0.0.1", there, proxy=f"socks5://ann:wrong@127.0.0.1:{port}"):
                pass


async def test_microsocks_reports_that_nothing_listens() -> None:
    async with microsocks() as port:
        with pytest.raises(OSError, match="the proxy can't connect: nothing listens there") as caught:
            async with tcp.connect("127.0.0.1", free_port(), proxy=f"socks5://127.0.0.1:{port}"):
                pass
    assert can_heal(caught.value)


@pytest.mark.parametrize("scheme", ["tls", "ws", "wss"])
async def test_sessions_go_through_a_proxy_over_every_transport_of_tcp(tmp_path: Path, scheme: str) -> None:
    authority = trustme.CA()
    trust = muxkit.TLS(ca=authority.cert_pem.bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    served: dict[str, Any] = {} if scheme == "ws" else {"ssl_context": context}
    shown = None if scheme == "ws" else trust

    async def answer(channel: muxkit.Channel) -> None:
        await channel.send(await channel.receive())

    async with muxkit.open_server(answer, f"bpmux+{scheme}://127.0.0.1:0", **served) as server:
        there = int(server.url.rpartition(":")[2])
        async with tinyproxy(tmp_path, ports=(there,)) as port:
            proxy = f"http://127.0.0.1:{port}"
            async with muxkit.connect(server.url, proxy=proxy, tls=shown) as session, session.open() as channel:
                await channel.send(b"through the proxy")
                assert await channel.receive() == b"through the proxy"
        with pytest.raises(OSError, match="the proxy http://127"):
            async with muxkit.connect(server.url, proxy=proxy, tls=shown):
                pass


# --- what the answer of a proxy may look like


@pytest.mark.parametrize("pieces", [None, 1, 7])
async def test_bytes_of_the_server_behind_the_answer_of_the_proxy_are_not_lost(pieces: int | None) -> None:
    answer = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nfirst words of the server"
    async with answering(answer, pieces=pieces) as (port, heard):
        async with tcp.connect("127.0.0.1", 4711, proxy=f"http://a%40b:p%3Aw@127.0.0.1:{port}") as stream:
            got = b""
            while len(got) < 25:
                got += await stream.receive_some()
            assert got == b"first words of the server"
    credentials = base64.b64encode(b"a@b:p:w").decode()
    head = f"CONNECT 127.0.0.1:4711 HTTP/1.1\r\nHost: 127.0.0.1:4711\r\nProxy-Authorization: Basic {credentials}"
    assert heard == [f"{head}\r\n\r\n".encode()]


async def test_socks_leaves_what_follows_its_answer_too_and_names_to_the_proxy() -> None:
    answer = b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6) + b"first words"
    asked = b"\x05\x01\x00\x03\x09localhost" + (5432).to_bytes(2)  # which this proxy sends back as payload
    async with answering(answer, after=b"\x05\x01\x00") as (port, _):
        async with tcp.connect("localhost", 5432, proxy=f"socks5h://127.0.0.1:{port}") as stream:
            got = b""
            while len(got) < len(b"first words" + asked):
                got += await stream.receive_some()
    assert got == b"first words" + asked


async def test_an_ipv6_address_is_sent_as_one() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n"
    async with answering(answer) as (port, heard), tcp.connect("::1", 9, proxy=f"http://127.0.0.1:{port}"):
        pass
    assert heard[0].startswith(b"CONNECT [::1]:9 HTTP/1.1\r\nHost: [::1]:9\r\n")


@pytest.mark.parametrize(
    ("answer", "reason", "heals"),
    [
        (
            b"HTTP/1.1 407 Auth\r\nContent-Length: 0\r\n\r\n",
            r"answered 407 Auth\. Give it a user and a password",
            False,
        ),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "answered 502 Bad Gateway", True),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "this isn't an HTTP proxy", False),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000, "a head of more than 16384 bytes", False),
        (b"", "the proxy hung up", True),
        (b"HTTP/1.1 200", "the proxy hung up", True),
    ],
)
async def test_a_proxy_that_refuses_or_is_none_is_named_with_its_reason(
    answer: bytes, reason: str, heals: bool
) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)

    async with serving(handle) as port:
        with pytest.raises(OSError, match=reason) as caught:
            async with tcp.connect("127.0.0.1", 4711, proxy=f"http://u:p4ss@127.0.0.1:{port}"):
                pass
    assert str(caught.value).startswith(f"tcp 127.0.0.1:4711 through http://127.0.0.1:{port}: ")
    assert "p4ss" not in str(caught.value)
    assert can_heal(caught.value) is heals


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad", "this isn't a SOCKS5 proxy"),
        (b"\x05\xff", "the proxy wants a user"),
        (b"\x05\x02", "accepts no user and password"),
        (b"\x05\x00\x05\x02\x00\x01" + bytes(6), "its rules don't allow this"),
        (b"\x05\x00\x05\x04\x00\x01" + bytes(6), "the host is unreachable from there"),
        (b"\x05\x00\x05\x63\x00\x01" + bytes(6), "it answered with 99"),
        (b"\x05", "the proxy hung up"),
    ],
)
async def test_a_socks_proxy_that_refuses_is_named_with_its_reason(answer: bytes, reason: str) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)

    async with serving(handle) as port:
        with pytest.raises(OSError, match=reason):
            async with tcp.connect("127.0.0.1", 4711, proxy=f"socks5://127.0.0.1:{port}"):
                pass


async def test_a_proxy_that_says_nothing_is_given_up() -> None:
    async def sleep(stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    async with serving(sleep) as port:
        with pytest.raises(TimeoutError, match=r"through http://127\.0\.0\.1:\d+: no answer within 0\.05 s"):
            async with tcp.connect("127.0.0.1", 4711, proxy=f"http://127.0.0.1:{port}", connect_timeout=0.05):
                pass


# --- which proxy


@pytest.mark.parametrize(
    "url",
    ["proxy:3128", "ftp://proxy:21", "http://", "http://proxy:99999", "http://proxy:1/path", "socks5://u:s3cret@:x"],
)
def test_an_invalid_url_of_a_proxy_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://host:port") as caught:
        proxy_for(url, "example.org", 443)
    assert "s3cret" not in str(caught.value)


def test_a_proxy_that_wants_tls_itself_is_not_supported() -> None:
    with pytest.raises(ValueError, match="aren't supported"):
        proxy_for("https://proxy:3129", "example.org", 443)


@pytest.mark.parametrize(
    ("variables", "host", "expected"),
    [
        ({"HTTPS_PROXY": "http://proxy:3128"}, "example.org", "http://proxy:3128"),
        ({"https_proxy": "proxy:3128"}, "example.org", "http://proxy:3128"),
        ({"ALL_PROXY": "socks5h://proxy"}, "example.org", "socks5h://proxy:1080"),
        ({"HTTPS_PROXY": "http://a:1", "ALL_PROXY": "socks5://b:2"}, "example.org", "http://a:1"),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example.org"}, "db.example.org", None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "example.org:443"}, "example.org", None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "example.org", None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "localhost", None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "127.0.0.1", None),
        ({"HTTP_PROXY": "http://proxy:3128"}, "example.org", None),
        ({}, "example.org", None),
    ],
)
def test_the_environment_names_the_proxy_and_what_goes_around_it(
    variables: dict[str, str], host: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for("environment", host, 443)
    assert (None if found is None else str(found)) == expected
    assert proxy_for(None, host, 443) is None


def test_the_password_of_a_proxy_is_not_shown() -> None:
    proxy = proxy_for("http://ann:s3cret@proxy:3128", "example.org", 443)
    assert proxy is not None
    assert proxy.password == "s3cret"
    assert "s3cret" not in f"{proxy} {proxy!r}"


# --- plaintext


@pytest.mark.parametrize("host", ["example.invalid", "127.0.0.1"])
async def test_plaintext_through_a_proxy_on_another_machine_leaves_this_one(host: str) -> None:
    proxy = "http://192.0.2.1:3128"
    with pytest.raises(ValueError, match="is plaintext"):
        async with tcp.connect(host, 9, proxy=proxy):
            pass
    with pytest.raises(ValueError, match="is plaintext"):
        async with websocket.connect(f"ws://{host}:9", proxy=proxy):
            pass


async def test_names_are_not_looked_up_here(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    original = trio.socket.getaddrinfo

    async def getaddrinfo(host: str, *arguments: object, **options: object) -> object:
        looked_up.append(host)
        return await original(host, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trio.socket, "getaddrinfo", getaddrinfo)
    context = ssl.create_default_context()
    async with answering(b"HTTP/1.1 503 No\r\n\r\n") as (port, heard):
        with pytest.raises(HandshakeFailed, match="503"):
            async with tls.connect("db.invalid", 443, ssl_context=context, proxy=f"http://127.0.0.1:{port}"):
                pass
    assert heard[0].startswith(b"CONNECT db.invalid:443 ")
    assert "db.invalid" not in looked_up
