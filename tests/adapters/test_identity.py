"""A link knows the proved identity of its peer: by a certificate, or by the kernel."""

from __future__ import annotations

import os
import socket
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from cryptography import x509

import muxkit
from muxkit import Identity, Session, SessionInfo
from muxkit_adapters import tcp, tls, unix, websocket
from muxkit_adapters._identity import of_certificate, of_socket, of_x509

from ._links import Certificates, paired, port_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from muxkit_adapters.tls import TLSStream
    from muxkit_adapters.websocket import WebSocketStream

GOOD = Certificates()


@pytest.mark.requirement("R-64")
async def test_the_identity_is_the_certificate_that_was_verified_and_nothing_else() -> None:
    mutual = GOOD.server()
    GOOD.authority.configure_trust(mutual)
    mutual.verify_mode = ssl.CERT_OPTIONAL
    shown = GOOD.authority.issue_cert("client@example.org")
    client = GOOD.client()
    shown.configure_cert(client)
    careless = ssl.create_default_context()
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    server_der = ssl.PEM_cert_to_DER_cert(GOOD.certificate.cert_chain_pems[0].bytes().decode())
    client_der = ssl.PEM_cert_to_DER_cert(shown.cert_chain_pems[0].bytes().decode())
    for context, server, there, here in (
        (client, mutual, client_der, server_der),
        (GOOD.client(), mutual, None, server_der),
        (client, GOOD.server(), None, server_der),  # it was not asked for
        (careless, mutual, None, None),
    ):

        def connect(address: str, context: ssl.SSLContext = context) -> AbstractAsyncContextManager[TLSStream]:
            insecure = context is careless
            return tls.connect("127.0.0.1", port_of(address), ssl_context=context, insecure=insecure)

        async with paired(tls.serve, connect, ssl_context=server) as (ours, theirs):
            assert (certificate_of(theirs), certificate_of(ours)) == (there, here)


@pytest.mark.requirement("R-64")
@pytest.mark.parametrize("secure", [True, False])
async def test_the_identity_is_that_of_the_stream_below(secure: bool) -> None:
    mutual, client = GOOD.server(), GOOD.client()
    GOOD.authority.configure_trust(mutual)
    mutual.verify_mode = ssl.CERT_REQUIRED
    shown = GOOD.authority.issue_cert("client@example.org")
    shown.configure_cert(client)
    ours: dict[str, Any] = {"ssl_context": mutual} if secure else {}
    theirs: dict[str, Any] = {"ssl_context": client} if secure else {}

    def connect(address: str) -> AbstractAsyncContextManager[WebSocketStream]:
        return websocket.connect(f"{'wss' if secure else 'ws'}://{address}", **theirs)

    async with paired(websocket.serve, connect, **ours) as (one, other):
        pems = (GOOD.certificate.cert_chain_pems[0], shown.cert_chain_pems[0])
        certificates = [ssl.PEM_cert_to_DER_cert(pem.bytes().decode()) for pem in pems]
        assert [certificate_of(one), certificate_of(other)] == (certificates if secure else [None, None])


def certificate_of(link: TLSStream | WebSocketStream) -> bytes | None:
    return None if link.identity is None else link.identity.certificate


NAMED = trustme.CA().issue_cert(
    "alice@users.test",
    "host.test",
    "::1",
    common_name='alice "a", b ',
    organization_name="users",
    organization_unit_name="#1",
)
SUBJECT = r"CN=alice \"a\"\, b\ ,OU=\#1,O=users"
NAMES = ("alice@users.test", "host.test", "::1")


def test_both_readers_of_certificates_tell_the_same() -> None:
    """The one without further packages, for TLS, and the one of QUIC and DTLS."""
    certificate = x509.load_pem_x509_certificate(NAMED.cert_chain_pems[0].bytes())
    der = ssl.PEM_cert_to_DER_cert(NAMED.cert_chain_pems[0].bytes().decode())
    with NAMED.cert_chain_pems[0].tempfile() as path:
        told = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
    assert of_x509(certificate) == of_certificate(der, told) == Identity(certificate=der, subject=SUBJECT, names=NAMES)


def test_a_certificate_without_names_is_an_identity_without_names() -> None:
    assert of_certificate(b"der", {}) == Identity(certificate=b"der")


def test_an_identity_is_shown_without_the_bytes_of_its_certificate() -> None:
    shown = repr(Identity(certificate=bytes(800), subject="CN=ann"))
    assert shown.startswith("Identity(certificate=<800 bytes>, subject='CN=ann', ")
    authority = x509.load_pem_x509_certificate(GOOD.authority.cert_pem.bytes())
    assert of_x509(authority).names == ()
    assert of_x509(authority).subject is not None


async def test_a_handler_knows_the_process_at_the_other_end_of_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with paired(unix.serve, lambda _: unix.connect(path), path) as (here, there):
        for end in (here, there):
            assert end.identity == Identity(pid=os.getpid(), uid=os.getuid(), gid=os.getgid())
        assert (here.local, there.local) == ("", f"unix {path}")


async def test_without_proof_there_is_no_identity() -> None:
    async with paired(tcp.serve, lambda address: tcp.connect("127.0.0.1", port_of(address))) as (here, there):
        assert (here.identity, there.identity) == (None, None)
    with socket.socket(socket.AF_UNIX) as lonely:  # it was never connected
        assert of_socket(lonely) is None


# F12: `SessionInfo(protocol='bpmux', peer='tls 127.0.0.1:36604')`, although the certificate was verified


async def test_a_handler_learns_who_the_client_is_and_each_end_where_it_is(tmp_path: Path) -> None:
    """F12: SessionInfo(protocol='bpmux', peer='tls 127.0.0.1:36604'), and nothing of the certificate."""
    server = GOOD.server()
    GOOD.authority.configure_trust(server)
    server.verify_mode = ssl.CERT_REQUIRED
    shown, client = GOOD.authority.issue_cert("alice@users.test", common_name="alice"), GOOD.client()
    shown.configure_cert(client)
    infos: list[SessionInfo] = []

    async def handler(session: Session) -> None:
        infos.append(session.info)
        async for _ in session:
            pass

    async with muxkit.open_server(handler, "bpmux+tls://127.0.0.1:0", ssl_context=server) as running:
        async with muxkit.connect(running.url, ssl_context=client) as session:
            assert session.info.identity is not None
            assert session.info.identity.names == ("127.0.0.1", "localhost")
            await session.ping()
            (info,) = infos
            assert info.identity is not None
            assert info.identity.names == ("alice@users.test",)
            assert str(info.identity.subject).startswith("CN=alice,")
            assert (info.transport, info.local, info.peer) == ("tls", session.info.peer, session.info.local)
