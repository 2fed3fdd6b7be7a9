"""Forwards that send headers of the PROXY protocol to their targets: read by haproxy, and by muxkit's own server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import muxkit
from muxkit import forward
from muxkit.forward.proxy_header import ProxyHeader, encode_header
from muxkit_adapters.balancers import Header, parse_block, parse_line
from tests.forward._targets import PATIENCE, dial, pair, port_of, read_all
from tests.soak.forward_peers import free_port

VERSIONS: list[ProxyHeader] = [1, 2]


@pytest.mark.parametrize(
    ("source", "destination", "host"),
    [
        ("192.0.2.7:5000", "10.0.0.1:80", "192.0.2.7"),
        ("[2001:db8::7]:5000", "[2001:db8::1]:80", "2001:db8::7"),
        ("[::ffff:192.0.2.7]:5000", "10.0.0.1:80", "192.0.2.7"),
        ("192.0.2.7:5000", "[2001:db8::1]:80", "::ffff:192.0.2.7"),
    ],
)
def test_a_header_names_the_client(source: str, destination: str, host: str) -> None:
    assert parse_line(encode_header(1, source, destination)) in (Header(host, 5000), Header("::ffff:c000:207", 5000))
    block = encode_header(2, source, destination)
    assert int.from_bytes(block[14:16], "big") == len(block) - 16
    assert parse_block(block[:16], block[16:]) in (Header(host, 5000), Header("::ffff:c000:207", 5000))


@pytest.mark.parametrize(("source", "destination"), [("", "10.0.0.1:80"), ("192.0.2.7:5000", "/run/there.sock")])
def test_a_header_without_an_address_says_so(source: str, destination: str) -> None:
    assert parse_line(encode_header(1, source, destination)) == Header()
    block = encode_header(2, source, destination)
    assert parse_block(block[:16], block[16:]) == Header()


@asynccontextmanager
async def haproxy(folder: Path) -> AsyncIterator[int]:
    """Run a web server that requires a header, and answers with the address in it."""
    program = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None:
        pytest.skip("there is no haproxy on this machine")
    port = free_port()
    (folder / "haproxy.cfg").write_text(
        "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
        f"frontend who\n bind 127.0.0.1:{port} accept-proxy\n"
        ' http-request return status 200 content-type text/plain lf-string "%[src]:%[src_port]"\n',
        encoding="utf-8",
    )
    process = await trio.lowlevel.open_process([program, "-f", str(folder / "haproxy.cfg"), "-db"])
    try:
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    assert process.returncode is None
                    await trio.sleep(0.05)
        yield port
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            await process.wait()


async def who_am_i(address: str) -> tuple[str, str]:
    """Ask the web server through a forward; return its answer, and the address of this end."""
    async with await dial(address) as stream:
        await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
        answer = (await read_all(stream)).decode()
        host, port = stream.socket.getsockname()
        return answer.rpartition("\r\n\r\n")[2], f"{host}:{port}"


@pytest.mark.parametrize("version", VERSIONS)
async def test_haproxy_learns_the_client_of_a_listener_on_either_side(version: ProxyHeader, tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with haproxy(tmp_path) as port, pair("bpmux+tcp://127.0.0.1:0", [str(port)], listen=["*"]) as there:
            async with forward.open_local(there.session, "0", str(port), proxy_header=version) as local:
                seen, mine = await who_am_i(local.address)
                assert seen == mine
            async with forward.open_remote(there.session, "0", str(port), proxy_header=version) as remote:
                seen, mine = await who_am_i(remote.address)
                assert seen == mine


async def test_a_muxkit_server_learns_the_client_of_a_forward() -> None:
    async def who(channel: muxkit.Channel) -> None:
        await channel.send(channel.session.info.peer.encode())

    with trio.fail_after(PATIENCE):
        async with muxkit.open_server(who, "bpmux+tcp://127.0.0.1:0", balancers=["127.0.0.1"]) as behind:
            port = port_of(behind.url)
            async with (
                pair("bpmux+tcp://127.0.0.1:0", [str(port)]) as there,
                forward.open_local(there.session, "0", str(port), proxy_header=2) as local,
                muxkit.connect(f"bpmux+tcp://{local.address}") as session,
                session.open() as channel,
            ):
                assert (await channel.receive()).decode() == session.info.local


async def test_a_version_that_does_not_exist_is_a_mistake() -> None:
    async with pair("bpmux+tcp://127.0.0.1:0", ["9"]) as there:
        with pytest.raises(ValueError, match="expected 1 or 2"):
            async with forward.open_local(there.session, "0", "9", proxy_header=3):  # type: ignore[arg-type]
                pass
