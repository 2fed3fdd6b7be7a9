"""SOCKS5: what a client is told, whom a proxy lets in, handshakes that stall, and curl as the client."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import muxkit
from muxkit import forward
from tests.forward._targets import PATIENCE, Pair, dial, names, pair, read_all, reset, target

URL = "bpmux+tcp://127.0.0.1:0"
HELLO = b"\5\1\0"
CURL = shutil.which("curl")


def connect_to(host: str, port: int, command: int = 1) -> bytes:
    """A request as a client writes it."""
    try:
        where = b"\1" + socket.inet_aton(host)
    except OSError:
        where = (
            b"\4" + socket.inet_pton(socket.AF_INET6, host) if ":" in host else bytes((3, len(host))) + host.encode()
        )
    return bytes((5, command, 0)) + where + struct.pack(">H", port)


@asynccontextmanager
async def proxy(reachable: list[str], **options: Any) -> AsyncIterator[tuple[Pair, forward.Forward]]:
    async with pair(URL, reachable) as there, forward.socks(there.session, "0", **options) as opened:
        yield there, opened


async def exchange(opened: forward.Forward, *said: bytes) -> bytes:
    """Say things one after the other, each after an answer to the one before; return the last answer."""
    async with await dial(opened.address) as stream:
        answer = b""
        for each in said:
            await stream.send_all(each)
            answer = await stream.receive_some()
        return answer


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_client_is_connected_and_what_it_sends_at_once_is_not_lost(host: str) -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, proxy([str(port), "localhost:*"]) as (_, opened):
            if host == "::1":
                assert await exchange(opened, HELLO, connect_to(host, port)) == b"\5\5\0\1" + bytes(6)  # not there
                return
            async with await dial(opened.address) as stream:
                await stream.send_all(HELLO + connect_to(host, port) + b"tea")
                await stream.send_eof()
                assert await read_all(stream) == b"\5\0" + b"\5\0\0\1" + bytes(6) + b"tea"


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (connect_to("127.0.0.1", 1, command=2), 7),
        (connect_to("127.0.0.1", 1, command=3), 7),
        (connect_to("127.0.0.1", 1, command=9), 7),
        (b"\5\1\0\7" + bytes(6), 8),
        (connect_to("127.0.0.1", 0), 8),
        (connect_to("no name", 80), 8),
        (connect_to("a" * 64, 80), 8),  # a label of a name has at most 63 characters
        (connect_to("a" * 255, 80), 8),
        (connect_to("10.0.0.1", 80), 2),
        (connect_to("www.example.com", 81), 2),
        (connect_to("unknown.invalid", 443), 4),
        (b"\4\1\0\1" + bytes(6), 1),
    ],
)
async def test_a_request_that_cannot_be_met_has_its_code(said: bytes, reply: int) -> None:
    names()
    with trio.fail_after(PATIENCE):
        async with proxy(["unknown.invalid:443", "any:80", "!10.0.0.1:80"], allow=["any:*", "unknown.invalid:*"]) as (
            _,
            opened,
        ):
            assert await exchange(opened, HELLO, said) == bytes((5, reply, 0, 1)) + bytes(6)


async def test_nothing_listens_is_told_as_refused() -> None:
    async with target() as port:
        pass
    with trio.fail_after(PATIENCE):
        async with proxy([str(port)]) as (_, opened):
            assert (await exchange(opened, HELLO, connect_to("127.0.0.1", port)))[1] == 5


@pytest.mark.parametrize("said", [b"\4\1\0\1", b"GET / HTTP/1.1\r\n\r\n", b"\5\1\2", b"\5\0"])
async def test_other_protocols_and_clients_that_offer_no_method_of_ours_are_sent_away(said: bytes) -> None:
    with trio.fail_after(PATIENCE):
        async with proxy(["9"]) as (_, opened):
            try:
                answer = await exchange(opened, said)
            except trio.BrokenResourceError:
                answer = b""
            assert answer == (b"\5\xff" if said.startswith(b"\5") else b"")
            assert opened.stats().connections in (0, 1)


async def test_users_show_their_passwords() -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, proxy([str(port)], users={"alice": "tea", "bob": "milk"}) as (_, opened):
            wanted = connect_to("127.0.0.1", port)
            assert await exchange(opened, HELLO) == b"\5\xff"
            assert await exchange(opened, b"\5\2\0\2", b"\1\5alice\3tea") == b"\1\0"
            assert await exchange(opened, b"\5\1\2", b"\1\3bob\4milk", wanted) == b"\5\0\0\1" + bytes(6)
            for wrong in (b"\1\5alice\4milk", b"\1\5alice\0", b"\1\0\3tea", b"\1\3eve\3tea", b"\2\5alice\3tea"):
                assert await exchange(opened, b"\5\1\2", wrong) == b"\1\1"


async def test_a_handshake_that_stalls_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    limits = forward.ForwardLimits(handshake=7.0)
    async with muxkit.open_server(forward.handler(), "bpmux+mem://stalls") as server:
        async with muxkit.connect(server.url) as session, forward.socks(session, "0", limits=limits) as opened:
            autojump_clock.autojump_threshold = 0.2  # s; what comes through the kernel takes its time
            async with await dial(opened.address) as stream:
                began = trio.current_time()
                await stream.send_all(HELLO + b"\5\1")
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)
                assert trio.current_time() - began == pytest.approx(7.0, abs=1.0)
            assert opened.stats().refused == 1


async def test_a_thousand_half_open_handshakes_keep_no_client_out() -> None:
    limits = forward.ForwardLimits(half_open=64, connections=100, handshake=600.0)  # only room for newer ones helps
    with trio.fail_after(PATIENCE):
        async with target() as port, proxy([str(port)], limits=limits) as (_, opened):
            stalled: list[trio.SocketStream] = []
            for number in range(1000):
                stalled.append(await dial(opened.address))
                await stalled[-1].send_all(HELLO)
                if number >= 300:
                    await stalled.pop(0).aclose() if number % 2 else await reset(stalled.pop(0))
            assert opened.stats().connections <= 100
            async with await dial(opened.address) as stream:
                await stream.send_all(HELLO + connect_to("127.0.0.1", port) + b"tea")
                await stream.send_eof()
                assert (await read_all(stream)).endswith(b"tea")
            for each in stalled:
                await each.aclose()


async def test_a_client_that_is_refused_again_and_again_does_not_fill_the_log_of_the_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "muxkit.forward")
    with trio.fail_after(PATIENCE):
        async with proxy([], allow=["any:80"]) as (_, opened):
            for _ in range(100):
                await exchange(opened, HELLO, connect_to("127.0.0.1", 81))
    assert opened.stats().refused == 100
    assert 0 < caplog.text.count("failed to forward a connection") < 100


async def test_a_proxy_may_be_stricter_than_its_server() -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, proxy(["loopback:*"], allow=["127.0.0.1:80"]) as (there, opened):
            assert (await exchange(opened, HELLO, connect_to("127.0.0.1", port)))[1] == 2
            assert there.handler.stats().refused == 0  # the server was not even asked


@pytest.mark.skipif(CURL is None, reason="there is no curl")
async def test_curl_reads_a_page_through_the_proxy_by_name_and_by_address(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"tea" * 100_000)

    async def curl(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        assert CURL is not None
        done: subprocess.CompletedProcess[bytes] = await trio.run_process(
            [CURL, "-sS", "--noproxy", "", "--max-time", "30", *arguments],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        return done

    with trio.fail_after(PATIENCE):
        async with (
            page_server(tmp_path) as port,
            proxy([str(port), f"localhost:{port}"], users={"u": "p"}) as (there, opened),
        ):
            by_name = await curl("--socks5-hostname", f"u:p@{opened.address}", f"http://localhost:{port}/page")
            assert by_name.stdout == b"tea" * 100_000, by_name.stderr
            by_address = await curl("--socks5", f"u:p@{opened.address}", f"http://127.0.0.1:{port}/page")
            assert by_address.stdout == b"tea" * 100_000, by_address.stderr
            forbidden = await curl("--socks5-hostname", f"u:p@{opened.address}", "http://forbidden.example/")
            assert forbidden.returncode == 97  # the proxy said no
            stranger = await curl("--socks5-hostname", opened.address, f"http://localhost:{port}/page")
            assert stranger.returncode == 97
            async with forward.open_local(there.session, "0", str(port)) as local:
                direct = await curl(f"http://{local.address}/page")
                assert direct.stdout == b"tea" * 100_000, direct.stderr


@asynccontextmanager
async def page_server(folder: Path) -> AsyncIterator[int]:
    """A web server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
        process = await nursery.start(
            partial(trio.run_process, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        )
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                break
            except OSError:
                assert process.poll() is None
                await trio.sleep(0.05)
        yield port
        process.terminate()
