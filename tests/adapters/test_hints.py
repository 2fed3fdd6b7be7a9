"""A client that was refused reads what to try: TLS against plaintext, a certificate that is missing."""

from __future__ import annotations

import socket
import ssl
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trustme

import muxkit
from muxkit import TLS, LinkLost, Session
from muxkit.runtime import looks_like
from muxkit_adapters import tcp, tls, websocket
from muxkit_adapters.tls import HandshakeFailed

from ._links import PATIENCE, Certificates, echo, paired, park, port_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GOOD = Certificates()


@asynccontextmanager
async def hanging_up(context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server of another implementation that hangs up, after its handshake if there is one, without any alert."""

    async def hang_up(stream: trio.SocketStream) -> None:
        if context is not None:
            wrapped = trio.SSLStream(stream, context, server_side=True)
            await wrapped.do_handshake()
        await stream.receive_some(1)
        await stream.send_eof()
        while await stream.receive_some():
            pass

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, hang_up, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def lost(url: str, **options: object) -> LinkLost:
    """How a session ends that was refused."""
    with trio.fail_after(PATIENCE), pytest.raises(LinkLost) as caught:
        async with muxkit.connect(url, **options) as session:  # type: ignore[arg-type]
            await session.ping()
    return caught.value


async def test_a_plaintext_client_whose_peer_ends_before_a_byte_reads_that_this_may_be_a_tls_port() -> None:
    """F11: "the peer hung up while 1 channels were open, 0.0 s after it began"."""
    async with hanging_up() as port:
        error = await lost(f"bpmux+tcp://127.0.0.1:{port}")
    assert error.hint == "Is this a TLS port? Then the URL begins with …+tls://. Or the server speaks another protocol"
    assert error.phase == "handshake"
    assert str(error).endswith(str(error.hint))


async def test_a_plaintext_client_on_a_tls_port_of_ours_reads_that_this_is_tls() -> None:
    async with serving(tls.serve, park, ssl_context=GOOD.server()) as (address,):
        error = await lost(f"bpmux+tcp://{address}")
    assert error.hint is not None
    assert "TLS" in error.hint


async def test_who_accepted_a_connection_is_not_asked_about_tls() -> None:
    async with paired(tcp.serve, lambda address: tcp.connect("127.0.0.1", port_of(address))) as (here, there):
        assert here.hint_if_silent is not None
        assert there.hint_if_silent is None


async def test_a_client_without_a_certificate_reads_that_one_is_required(tmp_path: Path) -> None:
    """F10: "the connection broke while reading", cause "cut off without close_notify, so data may be missing"."""
    GOOD.authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    GOOD.certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "cert.pem"))
    GOOD.authority.issue_cert("alice@users.test").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "alice.pem")
    )
    trustme.CA().issue_cert("mallory@users.test").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "mallory.pem")
    )
    ca = tmp_path / "ca.pem"

    async def handler(session: Session) -> None:
        async for _ in session:
            pass

    async with muxkit.open_server(
        handler, "bpmux+tls://127.0.0.1:0", tls=TLS(tmp_path / "cert.pem", client_ca=ca)
    ) as server:
        async with muxkit.connect(server.url, tls=TLS(tmp_path / "alice.pem", ca=ca)) as session:
            await session.ping()
        error = await lost(server.url, tls=TLS(ca=ca))
        assert (error.peer_reason, error.by) == ("TLS alert: certificate required", "peer")
        assert error.hint == "If the server wants a client certificate: tls=muxkit.TLS(cert=…, key=…)"
        assert "give it one: tls=muxkit.TLS(cert=…, key=…)" in str(error.__cause__)
        error = await lost(server.url, tls=TLS(tmp_path / "mallory.pem", ca=ca))
        assert error.peer_reason == "TLS alert: unknown ca"
        assert error.hint is None


async def test_without_an_alert_a_client_without_a_certificate_reads_what_may_be_missing() -> None:
    async with hanging_up(GOOD.server()) as port:
        ca = GOOD.authority.cert_pem.bytes()
        error = await lost(f"bpmux+tls://127.0.0.1:{port}", tls=TLS(ca=ca))
        certificate = "If the server wants a client certificate: tls=muxkit.TLS(cert=…, key=…)"
        assert error.hint == f"{certificate}. It may speak another protocol, too"
        # Whether a context of the application has a certificate cannot be seen.
        error = await lost(f"bpmux+tls://127.0.0.1:{port}", ssl_context=GOOD.client())
        assert error.hint == "It may speak another protocol"


@pytest.mark.parametrize("least", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_refuses_says_so_in_an_alert_to_any_client(least: ssl.TLSVersion) -> None:
    server = GOOD.server()
    GOOD.authority.configure_trust(server)
    server.verify_mode = ssl.CERT_REQUIRED
    server.maximum_version = least
    async with serving(tls.serve, echo, ssl_context=server) as (address,):
        async with await trio.open_tcp_stream("127.0.0.1", port_of(address)) as wire:
            other = trio.SSLStream(wire, GOOD.client(), server_hostname="127.0.0.1")
            with pytest.raises(trio.BrokenResourceError) as caught:
                await other.receive_some()
    assert "ALERT" in str(getattr(caught.value.__cause__, "reason", ""))


async def test_a_tls_client_on_a_plaintext_port_reads_that() -> None:
    async def talk(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"220 mail.test ready\r\n")
        await park(stream)

    async with serving(tcp.serve, talk) as (address,):
        with pytest.raises(HandshakeFailed, match=rf"tls {address}: .* is not TLS: is this a plaintext port\?"):
            async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client()):
                pass


async def test_a_websocket_client_on_a_port_of_something_else_reads_that() -> None:
    async def talk(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        await stream.aclose()

    async with serving(tcp.serve, talk) as (address,):
        with pytest.raises(HandshakeFailed, match="its bytes look like SSH"):
            async with websocket.connect(f"ws://{address}"):
                pass
    async with hanging_up() as port:
        with pytest.raises(HandshakeFailed, match=r"Is this a TLS port\? Then the URL begins with wss://"):
            async with websocket.connect(f"ws://127.0.0.1:{port}"):
                pass


async def test_who_does_not_read_the_alert_is_not_waited_for_long(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(tls.serve, park, ssl_context=GOOD.server()) as (address,):
        with socket.create_connection(("127.0.0.1", port_of(address))) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wire = trio.SocketStream(trio.socket.from_stdlib_socket(silent.dup()))
            async with wire:
                with trio.fail_after(5):
                    while await wire.receive_some():
                        pass


@pytest.mark.parametrize(
    ("protocol", "name"), [("aqueduct", "Aqueduct"), ("relink", "Relink"), ("e3x", "e3x"), ("bpmux", "bpmux")]
)
async def test_what_a_client_of_each_protocol_says_first_is_recognised(protocol: str, name: str) -> None:
    """F8: "an opening without a payload (bpmux-R14, byte 0)"."""
    heads: list[bytes] = []
    heard = trio.Event()

    async def listen(stream: trio.SocketStream) -> None:
        heads.append(bytes(await stream.receive_some(64)))
        heard.set()
        await trio.sleep_forever()

    async def call(port: int) -> None:
        async with muxkit.connect(f"{protocol}+tcp://127.0.0.1:{port}") as session, session.open("call") as channel:
            await channel.send(b"x")
            await channel.receive()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, listen, 0, host="127.0.0.1"))
        nursery.start_soon(call, listener.socket.getsockname()[1])
        with trio.fail_after(PATIENCE):
            await heard.wait()
        nursery.cancel_scope.cancel()
    assert looks_like(heads[0]) == name


@pytest.mark.parametrize("head", [b"", b"\x00\x00", b"x" * 24, b"\xa9\x00", b"AQUEDUX"])
def test_what_could_be_anything_is_not_named(head: bytes) -> None:
    assert looks_like(head) is None
