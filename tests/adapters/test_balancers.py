"""The PROXY protocol on listeners, with headers by hand, and with haproxy and nginx as witnesses."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
import trustme

import muxkit
from muxkit_adapters import tcp, tls, websocket
from muxkit_adapters.balancers import SIGNATURE, Balancers, Header, HeaderError, parse_block, parse_line
from muxkit_web import Pages
from tests.adapters.test_proxy import free_port, running


def block(
    host: str = "203.0.113.7", port: int = 4711, *, command: int = 1, family: int = 0x11, extra: bytes = b""
) -> bytes:
    """A header of version 2."""
    version = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.inet_pton(version, host)
    rest = address * 2 + port.to_bytes(2) + (80).to_bytes(2) + extra
    return SIGNATURE + bytes((0x20 | command, family)) + len(rest).to_bytes(2) + rest


LINE = b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 80\r\n"
LINE_6 = b"PROXY TCP6 2001:db8::7 2001:db8::1 4711 80\r\n"
IPV6_HEADERS = (LINE_6, block("2001:db8::7", family=0x21, extra=bytes(500)))
HAPROXY = ("send-proxy", "send-proxy-v2", "send-proxy-v2 proxy-v2-options unique-id,crc32c")
STREAM_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


# --- parsing


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LINE, Header("203.0.113.7", 4711)),
        (LINE_6, Header("2001:db8::7", 4711)),
        (b"PROXY UNKNOWN\r\n", Header()),
        (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", Header()),
    ],
)
def test_a_line_says_where_a_connection_comes_from(line: bytes, expected: Header) -> None:
    assert parse_line(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 80\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 4711\r\n",
        b"PROXY TCP4  203.0.113.7 192.0.2.1 4711 80\r\n",
        b"PROXY TCP4 203.0.113 192.0.2.1 4711 80\r\n",
        b"PROXY TCP4 2001:db8::7 2001:db8::1 4711 80\r\n",
        b"PROXY TCP6 203.0.113.7 192.0.2.1 4711 80\r\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 65536 80\r\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 -1 80\r\n",
        b"PROXY UDP4 203.0.113.7 192.0.2.1 4711 80\r\n",
        b"PROXY\r\n",
        b"PROXY \xff\r\n",
    ],
)
def test_an_invalid_line_is_refused(line: bytes) -> None:
    with pytest.raises(HeaderError):
        parse_line(line)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (block(), Header("203.0.113.7", 4711)),
        (block("2001:db8::7", family=0x21), Header("2001:db8::7", 4711)),
        (block(extra=b"\x04\x00\x03abc"), Header("203.0.113.7", 4711)),
        (block(command=0), Header()),
        (block(family=0x00), Header()),
        (block(family=0x31), Header()),
    ],
)
def test_a_block_says_where_a_connection_comes_from(header: bytes, expected: Header) -> None:
    assert parse_block(header[:16], header[16:]) == expected


@pytest.mark.parametrize("header", [block(command=2), block(family=0x21), SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12)])
def test_an_invalid_block_is_refused(header: bytes) -> None:
    with pytest.raises(HeaderError):
        parse_block(header[:16], header[16:])


def test_balancers_are_addresses_and_networks() -> None:
    some = Balancers(["10.0.0.5", "10.1.0.0/16", "2001:db8::/32"])
    assert [host for host in ("10.0.0.5", "10.1.2.3", "::ffff:10.1.2.3", "2001:db8::9") if not some.has(host)] == []
    assert [host for host in ("10.0.0.6", "127.0.0.1", "2001:db9::9", "fe80::1%eth0") if some.has(host)] == []
    for wrong in (["balancer.internal"], ["10.0.0.0/99"], "10.0.0.5"):
        with pytest.raises(ValueError, match="balancers="):
            Balancers(wrong)


# --- listeners


@asynccontextmanager
async def serving(module: ModuleType, balancers: list[str], **options: Any) -> AsyncIterator[tuple[int, list[str]]]:
    """Serve an echo; give the port, and the peers that the handler saw."""
    peers: list[str] = []

    async def handle(stream: tcp.SocketStream | tls.TLSStream | websocket.WebSocketStream) -> None:
        peers.append(stream.peer)
        async for data in stream:
            await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(partial(module.serve, handle, balancers=balancers, **options))
        yield int(address.rpartition(":")[2]), peers
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("header", [LINE, block(), *IPV6_HEADERS])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_the_peer_is_the_one_of_the_header_however_it_was_cut(header: bytes, size: int) -> None:
    async with serving(tcp, ["127.0.0.0/8"]) as (port, peers):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            data = header + b"hello"
            for start in range(0, len(data), size):
                await stream.send_all(data[start : start + size])
            got = b""
            while len(got) < 5:
                got += await stream.receive_some()
            assert got == b"hello"
    assert peers == ["tcp [2001:db8::7]:4711" if header in IPV6_HEADERS else "tcp 203.0.113.7:4711"]


@pytest.mark.parametrize("header", [block(command=0), b"PROXY UNKNOWN\r\n"])
async def test_a_connection_of_the_balancer_itself_keeps_its_address(header: bytes) -> None:
    async with serving(tcp, ["127.0.0.1"]) as (port, peers):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(header + b"ok?")
            assert await stream.receive_some() == b"ok?"
            own = stream.socket.getsockname()[1]
    assert peers == [f"tcp 127.0.0.1:{own}"]


@pytest.mark.parametrize(
    "header",
    [
        b"hello, I am a client",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PROXY TCP4 nonsense\r\n",
        b"PROXY " + b"x" * 200,
        SIGNATURE + b"\x21\x11\xff\xff" + bytes(100),
        SIGNATURE + b"\x31\x11\x00\x0c" + bytes(12),
    ],
)
async def test_a_balancer_without_a_valid_header_is_dropped_and_named(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "muxkit.adapters")
    async with serving(tcp, ["127.0.0.1"]) as (port, peers):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(header)
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
    assert peers == []
    logged = [record.getMessage() for record in caplog.records]
    assert all(text.startswith("dropped a connection from the balancer 127.0.0.1: no PROXY header") for text in logged)


async def test_a_balancer_that_sends_nothing_is_dropped_when_the_time_for_handshakes_is_over() -> None:
    async with serving(tcp, ["127.0.0.1"], limits=muxkit.Limits(handshake=0.1)) as (port, peers):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"PROXY TCP4 203")
            with trio.fail_after(10), suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
    assert peers == []


@pytest.mark.parametrize("header", [LINE, block()])
async def test_a_header_from_an_address_that_is_not_trusted_is_no_header(header: bytes) -> None:
    async with serving(tcp, ["192.0.2.1"]) as (port, peers):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(header)
            got = b""
            while len(got) < len(header):
                got += await stream.receive_some()
            assert got == header
            own = stream.socket.getsockname()[1]
    assert peers == [f"tcp 127.0.0.1:{own}"]


async def test_a_forged_header_breaks_the_protocol_of_a_session() -> None:
    users: list[str] = []

    def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
        users.append(info.peer)
        return "anybody"

    async def park(channel: muxkit.Channel) -> None:
        await trio.sleep_forever()

    url = "bpmux+tcp://127.0.0.1:0"
    async with muxkit.open_server(park, url, authorize=authorize, balancers=["192.0.2.1"]) as server:
        port = int(server.url.rpartition(":")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(block())
            with trio.fail_after(10), suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
    assert all("203.0.113.7" not in each for each in users)


async def test_clients_behind_a_balancer_do_not_share_its_allowance_of_half_open_connections() -> None:
    limits = muxkit.Limits(half_open_per_address=1)
    async with serving(tcp, ["127.0.0.1"], limits=limits) as (port, peers):
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as first,
            await trio.open_tcp_stream("127.0.0.1", port) as second,
        ):
            await first.send_all(b"PROXY ")
            await second.send_all(LINE + b"x")
            assert await second.receive_some() == b"x"
            await first.send_all(LINE.removeprefix(b"PROXY ") + b"y")
            assert await first.receive_some() == b"y"
    assert len(peers) == 2


# --- witnesses


@asynccontextmanager
async def haproxy(folder: Path, there: int, how: str) -> AsyncIterator[int]:
    port = free_port()
    path = folder / "haproxy.cfg"
    timeouts = "timeout connect 5s\n timeout client 60s\n timeout server 60s"
    path.write_text(
        f"defaults\n mode tcp\n {timeouts}\n"
        f"listen balanced\n bind 127.0.0.1:{port}\n server one 127.0.0.1:{there} {how}\n",
        encoding="utf-8",
    )
    async with running("haproxy", "-f", str(path), "-db", port=port):
        yield port


@asynccontextmanager
async def nginx(folder: Path, there: int) -> AsyncIterator[int]:
    port = free_port()
    path = folder / "nginx.conf"
    if not await trio.Path(STREAM_MODULE).exists():
        pytest.skip("there is no nginx with its stream module on this machine")
    path.write_text(
        f"load_module {STREAM_MODULE};\ndaemon off;\nmaster_process off;\n"
        f"pid {folder}/nginx.pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"stream {{ server {{ listen 127.0.0.1:{port}; proxy_pass 127.0.0.1:{there}; proxy_protocol on; }} }}\n",
        encoding="utf-8",
    )
    async with running("nginx", "-c", str(path), "-p", str(folder), port=port):
        yield port


@pytest.mark.parametrize("how", [*HAPROXY, "nginx"])
@pytest.mark.parametrize("scheme", ["tcp", "tls", "ws", "wss"])
async def test_sessions_behind_haproxy_and_nginx_know_the_real_client(tmp_path: Path, scheme: str, how: str) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    is_secure = scheme in ("tls", "wss")
    trust = muxkit.TLS(ca=authority.cert_pem.bytes()) if is_secure else None
    options: dict[str, Any] = {"ssl_context": context} if is_secure else {}
    judged: list[str] = []
    seen: list[str] = []

    def authorize(info: muxkit.SessionInfo, token: str | None) -> str:
        judged.append(info.peer)
        return "client"

    async def answer(channel: muxkit.Channel) -> None:
        seen.append(channel.session.info.peer)
        await channel.send(await channel.receive())

    url = f"bpmux+{scheme}://127.0.0.1:0"
    async with muxkit.open_server(answer, url, authorize=authorize, balancers=["127.0.0.1"], **options) as server:
        there = int(server.url.rpartition(":")[2])
        balanced = nginx(tmp_path, there) if how == "nginx" else haproxy(tmp_path, there, how)
        async with balanced as port:
            balanced_url = f"bpmux+{scheme}://127.0.0.1:{port}"
            async with muxkit.connect(balanced_url, tls=trust) as session, session.open() as channel:
                await channel.send(b"hello")
                assert await channel.receive() == b"hello"
                mine = session.info.local.rpartition(":")[2]
    assert len(seen) == 1
    assert seen[0] in judged  # with the connection by which `running` finds out that the balancer listens, perhaps
    assert [peer.split(" ")[:2] for peer in seen] == [[scheme, f"127.0.0.1:{mine}"]]


async def test_pages_are_delivered_behind_a_balancer(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("hello", encoding="utf-8")
    async with serving(websocket, ["127.0.0.1"], pages=Pages(tmp_path)) as (port, _):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(LINE + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            got = b""
            while data := await stream.receive_some():
                got += data
    assert got.endswith(b"\r\n\r\nhello")


def test_modules_take_the_same_option() -> None:
    for module in (tcp, tls, websocket):
        assert "balancers" in module.transport.options("server")
