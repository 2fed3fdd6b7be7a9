"""A client without the certificate that the server wants learns of it, whatever it does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trustme

import muxkit
from muxkit.protocols import relink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

AUTHORITY = trustme.CA()
STRANGER = trustme.CA()

URLS = ["bpmux+tls", "bpmux+wss", "aqueduct+tls", "aqueduct+wss", "aqueduct+quic", "e3x+tls", "e3x+wss", "e3x+dtls"]
URLS += ["relink+tls", "relink+wss"]


@attrs.frozen
class Certificates:
    """What the server shows, and what clients show to it."""

    server: muxkit.TLS
    without: muxkit.TLS
    stranger: muxkit.TLS
    client: muxkit.TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca = folder / "ca.pem"
    AUTHORITY.cert_pem.write_to_path(ca)

    def issued(authority: trustme.CA, name: str) -> Path:
        file = folder / f"{name}.pem"
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(file)
        return file

    return Certificates(
        server=muxkit.TLS(cert=issued(AUTHORITY, "127.0.0.1"), client_ca=ca),
        without=muxkit.TLS(ca=ca),
        stranger=muxkit.TLS(ca=ca, cert=issued(STRANGER, "stranger.test")),
        client=muxkit.TLS(ca=ca, cert=issued(AUTHORITY, "client.test")),
    )


async def echo(channel: muxkit.Channel) -> None:
    async for message in channel:
        await channel.send(message)


async def leave(session: muxkit.Session) -> None:
    """Do nothing, and leave."""


async def ping(session: muxkit.Session) -> None:
    with suppress(muxkit.Unsupported):  # Aqueduct over a byte stream has none
        took = await session.ping()
        raise AssertionError(f"a server that refuses this client answered within {took} s")


async def wait(session: muxkit.Session) -> None:
    async for _ in session.incoming():
        pass


@pytest.mark.parametrize("use", [leave, ping, wait])
@pytest.mark.parametrize("scheme", URLS)
async def test_a_client_without_a_certificate_is_told_to_show_one(
    scheme: str, use: Callable[[muxkit.Session], Awaitable[None]], certificates: Certificates
) -> None:
    """Was: over QUIC the ping was answered, and over TLS and QUIC the session was left as though all were well."""
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(8), pytest.raises((OSError, muxkit.LinkLost)) as caught:
            async with muxkit.connect(running.url, tls=certificates.without) as session:
                await use(session)
    assert "certificate required" in str(caught.value)
    assert "tls=muxkit.TLS(cert=…, key=…)" in str(caught.value)


@pytest.mark.parametrize("shown", ["without", "stranger"])
@pytest.mark.parametrize("scheme", [url for url in URLS if not url.startswith("relink")])
async def test_a_client_that_the_server_refuses_never_gets_into_its_block(
    scheme: str, shown: str, certificates: Certificates
) -> None:
    """Was: over `tls` the block began, and the next call in it raised."""
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(8), pytest.raises(OSError, match=r"(?i)certificate required|unknown|bad certificate"):
            async with muxkit.connect(running.url, tls=getattr(certificates, shown)):
                raise AssertionError("the server refused this client")


@pytest.mark.parametrize("shown", ["without", "stranger"])
@pytest.mark.parametrize("scheme", ["relink+tls", "relink+wss"])
async def test_a_relink_client_that_is_refused_is_never_connected(
    scheme: str, shown: str, certificates: Certificates
) -> None:
    """Entering a link waits for no connection: `connected` does."""
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(8), pytest.raises(muxkit.LinkLost, match=r"certificate required|unknown"):  # noqa: PT012
            async with relink.connect(running.url, tls=getattr(certificates, shown)) as link:
                await link.connected()
                raise AssertionError("the server refused this client")


@pytest.mark.parametrize("scheme", URLS)
async def test_a_loop_without_a_certificate_ends(scheme: str, certificates: Certificates) -> None:
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(20), pytest.raises((OSError, muxkit.LinkLost), match="certificate required"):  # noqa: PT012
            async with muxkit.reconnecting(running.url, tls=certificates.without) as sessions:
                async for session in sessions:
                    with suppress(muxkit.LinkLost):
                        await wait(session)


@pytest.mark.parametrize("use", [leave, wait])
@pytest.mark.parametrize("scheme", URLS)
async def test_a_client_with_the_certificate_of_a_stranger_is_told_so(
    scheme: str, use: Callable[[muxkit.Session], Awaitable[None]], certificates: Certificates
) -> None:
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(8), pytest.raises((OSError, muxkit.LinkLost), match=r"(?i)unknown|bad certificate"):
            async with muxkit.connect(running.url, tls=certificates.stranger) as session:
                await use(session)


@pytest.mark.parametrize("scheme", URLS)
async def test_a_client_with_its_certificate_is_let_in_and_leaves_in_order(
    scheme: str, certificates: Certificates
) -> None:
    async with muxkit.open_server(echo, f"{scheme}://127.0.0.1:0", tls=certificates.server) as running:
        with trio.fail_after(8):
            async with muxkit.connect(running.url, tls=certificates.client):
                pass
            async with muxkit.connect(running.url, tls=certificates.client) as session, session.open("x") as channel:
                await channel.send(b"here")
                assert await channel.receive() == b"here"
