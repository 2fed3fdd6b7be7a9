"""Pages on the port of a WebSocket: what is delivered, and which pages may connect."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

import muxkit
from muxkit import HandshakeFailed
from muxkit_adapters import websocket
from muxkit_web import MODULE, TYPES, Pages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    www = tmp_path / "www"
    (www / "sub").mkdir(parents=True)
    (www / "index.html").write_text("<h1>Hello</h1>", encoding="utf-8")
    (www / "sub" / "index.html").write_text("below", encoding="utf-8")
    (www / "app.mjs").write_text("export {};", encoding="utf-8")
    (www / "large.bin").write_bytes(bytes(range(256)) * 4096)
    (www / ".secret").write_text("hidden", encoding="utf-8")
    (tmp_path / "outside.txt").write_text("outside", encoding="utf-8")
    (www / "link.txt").symlink_to(tmp_path / "outside.txt")
    return www


async def echo(stream: trio.abc.Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[str]:
    """Serve an echo; give `host:port`, or `host:port/path`."""
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(partial(websocket.serve, echo, **options))
        yield address
        nursery.cancel_scope.cancel()


async def ask(address: str, head: str, *, context: ssl.SSLContext | None = None) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return the status, the headers and the body that came until the server hung up."""
    host, _, port = address.partition("/")[0].rpartition(":")
    stream: trio.abc.Stream = await trio.open_tcp_stream(host, int(port))
    if context is not None:
        stream = trio.SSLStream(stream, context, server_hostname=host)
    async with stream:
        await stream.send_all(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
        got = b""
        with trio.fail_after(10):
            while data := await stream.receive_some():
                got += data
                if got.startswith(b"HTTP/1.1 101"):
                    break
    top, _, body = got.partition(b"\r\n\r\n")
    line, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
    return int(line.split()[1]), headers, body


def get(target: str, *more: str, host: str = "127.0.0.1") -> str:
    return "\n".join([f"GET {target} HTTP/1.1", f"Host: {host}", *more])


def upgrade(host: str, origin: str | None) -> str:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    lines = ["Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13"]
    return get("/", *lines, *([] if origin is None else [f"Origin: {origin}"]), host=host)


# --- files


@pytest.mark.parametrize(
    ("target", "kind", "body"),
    [
        ("/", "text/html; charset=utf-8", b"<h1>Hello</h1>"),
        ("/?x=1", "text/html; charset=utf-8", b"<h1>Hello</h1>"),
        ("/sub/", "text/html; charset=utf-8", b"below"),
        ("/app.mjs", "text/javascript; charset=utf-8", b"export {};"),
        ("/large.bin", "application/octet-stream", bytes(range(256)) * 4096),
    ],
)
async def test_files_of_the_folder_are_delivered(folder: Path, target: str, kind: str, body: bytes) -> None:
    async with serving(pages=Pages(folder)) as address:
        status, headers, got = await ask(address, get(target))
    assert (status, headers["content-type"], got) == (200, kind, body)
    assert headers["x-content-type-options"] == "nosniff"


async def test_the_javascript_client_and_its_types_are_delivered(folder: Path) -> None:
    async with serving(pages=Pages(folder)) as address:
        status, headers, body = await ask(address, get("/muxkit.js"))
        _, _, types = await ask(address, get("/muxkit.d.ts"))
    assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert body == MODULE.read_bytes()
    assert types == TYPES.read_bytes()


async def test_a_file_of_the_folder_goes_before_the_client_of_the_same_name(folder: Path) -> None:
    (folder / "muxkit.js").write_text("// mine", encoding="utf-8")
    async with serving(pages=Pages(folder)) as address:
        _, _, body = await ask(address, get("/muxkit.js"))
    assert body == b"// mine"


@pytest.mark.parametrize(
    "target",
    [
        "/missing",
        "/.secret",
        "/../outside.txt",
        "/%2e%2e/outside.txt",
        "/..%2foutside.txt",
        "/sub/..%5c..%5coutside.txt",
        "/link.txt",
        "/%00",
        "//etc/passwd",
        "/sub/muxkit.js",
    ],
)
async def test_what_is_not_there_or_not_meant_is_answered_with_404(folder: Path, target: str) -> None:
    async with serving(pages=Pages(folder)) as address:
        status, _, body = await ask(address, get(target))
    assert (status, body) == (404, b"Not Found\n")


async def test_a_browser_that_has_the_file_gets_no_body(folder: Path) -> None:
    async with serving(pages=Pages(folder)) as address:
        _, headers, _ = await ask(address, get("/"))
        status, _, body = await ask(address, get("/", f"If-None-Match: {headers['etag']}"))
    assert (status, body) == (304, b"")


async def test_a_head_request_gets_the_headers_only(folder: Path) -> None:
    async with serving(pages=Pages(folder)) as address:
        status, headers, body = await ask(address, "HEAD /app.mjs HTTP/1.1\nHost: x")
    assert (status, headers["content-length"], body) == (200, "10", b"")


async def test_other_methods_are_refused(folder: Path) -> None:
    async with serving(pages=Pages(folder)) as address:
        status, headers, _ = await ask(address, "POST / HTTP/1.1\nHost: x\nContent-Length: 0")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


async def test_pages_are_delivered_over_tls_too(folder: Path) -> None:
    authority = trustme.CA()
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    async with serving(pages=Pages(folder), ssl_context=server) as address:
        status, _, body = await ask(address, get("/sub/"), context=client)
    assert (status, body) == (200, b"below")


async def test_a_folder_that_is_not_there_is_refused_immediately(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder"):
        Pages(tmp_path / "missing")


async def test_a_full_server_answers_pages_with_503(folder: Path) -> None:
    async def park(channel: muxkit.Channel) -> None:
        await channel.send(b"ready")
        await trio.sleep_forever()

    limits = muxkit.Limits(connections=1, handshake=2.0)
    url = "bpmux+ws://127.0.0.1:0"
    async with muxkit.open_server(park, url, pages=Pages(folder), limits=limits) as server:
        async with muxkit.connect(server.url) as session, session.open() as channel:
            await channel.receive()
            status, _, body = await ask(server.url.partition("://")[2], get("/"))
            channel.abort()
    assert (status, b"the server is full" in body) == (503, True)


# --- WebSockets beside them


async def test_a_websocket_opens_beside_pages_and_programs_need_no_origin(folder: Path) -> None:
    async with serving(pages=Pages(folder), path="/mux") as address, websocket.connect(f"ws://{address}") as stream:
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"


async def test_a_channel_opens_beside_pages(folder: Path) -> None:
    async def answer(channel: muxkit.Channel) -> None:
        await channel.send(await channel.receive())

    async with (
        muxkit.open_server(answer, "bpmux+ws://127.0.0.1:0", pages=Pages(folder)) as server,
        muxkit.connect(server.url) as session,
        session.open() as channel,
    ):
        await channel.send(b"hello")
        assert await channel.receive() == b"hello"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 101),
        ("localhost:{port}", "http://localhost:{port}", 101),
        ("[::1]:{port}", "http://[::1]:{port}", 101),
        ("192.168.1.7", "http://192.168.1.7", 101),
        ("127.0.0.1:{port}", "https://127.0.0.1:{port}", 403),
        ("127.0.0.1:{port}", "http://127.0.0.1", 403),
        ("127.0.0.1:{port}", "https://evil.example", 403),
        ("127.0.0.1:{port}", "null", 403),
        ("rebound.example:{port}", "http://rebound.example:{port}", 403),  # its owner may have it lead here
        ("pages.example", "https://pages.example", 101),  # listed
    ],
)
async def test_own_pages_may_connect_by_an_address_and_listed_ones_by_name(
    folder: Path, host: str, origin: str, status: int
) -> None:
    async with serving(pages=Pages(folder), origins=["https://pages.example"]) as address:
        port = address.rpartition(":")[2]
        head = upgrade(host.format(port=port), origin.format(port=port))
        assert (await ask(address, head))[0] == status


async def test_without_pages_no_origin_is_the_servers_own() -> None:
    async with serving() as address:
        assert (await ask(address, upgrade(address, f"http://{address}")))[0] == 403


async def test_a_foreign_page_is_refused_with_a_reason_for_it_and_for_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "muxkit.adapters")
    async with serving(pages=Pages(folder)) as address:
        status, _, body = await ask(address, upgrade(address, "https://evil.example"))
    reason = "pages of 'https://evil.example' may not connect here: the server lists those that may in origins="
    assert (status, body.decode()) == (403, reason)
    assert [record.getMessage() for record in caplog.records] == [
        "refused a WebSocket from a page of 'https://evil.example': origins= lists the pages that may connect"
    ]


async def test_a_connection_that_sends_no_http_is_dropped(folder: Path) -> None:
    async with serving(pages=Pages(folder)) as address:
        host, _, port = address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(b"\x16\x03\x01 this is TLS\r\n\r\n")
            with trio.fail_after(10):
                assert await stream.receive_some() == b""


async def test_another_path_is_refused_as_before(folder: Path) -> None:
    async with serving(pages=Pages(folder), path="/mux") as address:
        with pytest.raises(HandshakeFailed, match="404"):
            async with websocket.connect(f"ws://{address.removesuffix('/mux')}/other"):
                pass
