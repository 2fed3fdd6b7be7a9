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
        for alert, shown in (
            ("certificate required; give it one: tls=muxkit.TLS(cert=…, key=…)", TLS(ca=ca)),
            ("unknown ca", TLS(tmp_path / "mallory.pem", ca=ca)),
        ):
            with trio.fail_after(PATIENCE), pytest.raises(HandshakeFailed) as caught:
                async with muxkit.connect(server.url, tls=shown):
                    raise AssertionError("the server refused this client")
            assert str(caught.value).endswith(f": the peer refused the connection: {alert}")


async def test_a_client_that_was_asked_for_no_certificate_is_not_told_to_show_one() -> None:
    async with hanging_up(GOOD.server()) as port:
        error = await lost(f"bpmux+tls://127.0.0.1:{port}", tls=TLS(ca=GOOD.authority.cert_pem.bytes()))
        assert error.hint == "It may speak another protocol"


async def test_a_client_whose_peer_asks_for_a_certificate_and_hangs_up_reads_what_may_be_missing() -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await trio.SSLStream(stream, asking(), server_side=True).do_handshake()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, hang_up, 0, host="127.0.0.1"))
        url = f"bpmux+tls://127.0.0.1:{listener.socket.getsockname()[1]}"
        with trio.fail_after(PATIENCE), pytest.raises(HandshakeFailed, match=r"asked for .*; give it one: tls="):
            async with muxkit.connect(url, tls=TLS(ca=GOOD.authority.cert_pem.bytes())):
                raise AssertionError("the server hung up")
        nursery.cancel_scope.cancel()


def asking(*, tickets: int = 0) -> ssl.SSLContext:
    """Return the context of a server that asks clients for a certificate, and lets in who has none."""
    context = GOOD.server()
    GOOD.authority.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = tickets
    return context


async def test_a_client_that_is_not_asked_for_a_certificate_does_not_wait_for_the_server() -> None:
    """A server of ours keeps its session tickets until it sends something, so a client that waited would time out."""
    async with serving(tls.serve, park, ssl_context=GOOD.server()) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client()) as stream:
            assert not stream.may_be_refused_late


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1"])  # the client offers a share of another one at first
@pytest.mark.parametrize("has_certificate", [False, True])
async def test_the_session_tickets_of_a_server_that_asks_for_a_certificate_let_the_client_in(
    curve: str, has_certificate: bool
) -> None:
    server, client = asking(tickets=2), GOOD.client()
    server.set_ecdh_curve(curve)
    if has_certificate:
        GOOD.authority.issue_cert("alice@users.test").configure_cert(client)
    async with serving(tls.serve, park, ssl_context=server) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=client) as stream:
            assert not stream.may_be_refused_late


async def test_the_first_bytes_of_a_server_without_session_tickets_let_the_client_in_and_are_not_lost() -> None:
    async def greet(stream: tls.TLSStream) -> None:
        await stream.send_all(b"welcome")
        await park(stream)

    async with serving(tls.serve, greet, ssl_context=asking()) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client()) as stream:
            assert not stream.may_be_refused_late
            assert await stream.receive_some(1) == b"w"
            assert await stream.receive_some() == b"elcome"


async def test_a_server_without_session_tickets_that_waits_for_the_client_is_waited_for_one_second() -> None:
    async with serving(tls.serve, echo, ssl_context=asking()) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client()) as stream:
            assert stream.may_be_refused_late
            await stream.send_all(b"here")
            assert await stream.receive_some() == b"here"


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
    ("protocol", "name"),
    [("aqueduct", "Aqueduct"), ("relink", "Relink"), ("e3x", "e3x"), ("bpmux", "bpmux"), ("yamux", "yamux")],
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
