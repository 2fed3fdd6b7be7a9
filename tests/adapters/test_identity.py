"""An encrypted stream knows the verified identity of its peer."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest

from muxkit_adapters import tls, websocket

from ._links import Certificates, paired, port_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

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
            assert (theirs.identity, ours.identity) == (there, here)


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
        assert [one.identity, other.identity] == (certificates if secure else [None, None])
