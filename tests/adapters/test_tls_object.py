"""One `muxkit.TLS` for each transport that encrypts: trust on both sides, and files that are read again."""

from __future__ import annotations

import datetime
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from muxkit import TLS, Identity, Limits
from muxkit.runtime import MultistreamLink
from muxkit_adapters import dtls, quic, tls, websocket
from muxkit_adapters._addresses import Transport
from muxkit_adapters.quic.connection import may_authenticate_clients
from muxkit_adapters.tls import HandshakeFailed

from ._links import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Link = Any  # of each kind
LIMITS = Limits()
TRANSPORTS: list[Transport[Any]] = [tls.transport, websocket.secure_transport, quic.transport, dtls.transport]
EACH = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.scheme)
LOST = (HandshakeFailed, trio.BrokenResourceError, trio.EndOfChannel)


class World:
    """An authority, another one, and files of both."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority, self._other = trustme.CA(), trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))
        self.issue("cert", "127.0.0.1")
        self.client = TLS(self.issue("alice", "alice@users.test", common_name="alice"), ca=self.ca)
        stranger = self._other.issue_cert("mallory@users.test")
        stranger.private_key_and_cert_chain_pem.write_to_path(str(folder / "mallory.pem"))
        self.stranger = TLS(folder / "mallory.pem", ca=self.ca)
        self.nobody = TLS(ca=self.ca)
        self.careless = TLS(verify=False)

    def issue(self, name: str, *names: str, **options: Any) -> Path:
        path = self._folder / f"{name}.pem"
        leaf = self._authority.issue_cert(*names, **options)
        leaf.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def server(self, *, asks: bool = False) -> TLS:
        return TLS(self._folder / "cert.pem", client_ca=self.ca if asks else None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


Handler = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def served(transport: Transport[Any], handler: Handler, server: TLS) -> AsyncIterator[Callable[[TLS], Any]]:
    """A server, and what connects to it."""
    async with serving(transport.serve, handler, "127.0.0.1:0", limits=LIMITS, tls=server) as (address,):

        def connect(client: TLS, **options: Any) -> AbstractAsyncContextManager[Any]:
            return transport.connect(address, tls=client, **options)

        yield connect


async def echo(link: Link) -> None:
    """Answer one piece of data."""
    if isinstance(link, MultistreamLink):
        await link.receive()
        link.write(link.open(), b"here", True)
        await link.wait_delivered()
    elif isinstance(link, trio.abc.Channel):
        await link.send(await link.receive())
        with suppress(trio.EndOfChannel):
            await link.receive()
    else:
        await link.send_all(await link.receive_some())


async def ask(link: Link) -> None:
    """Send one piece of data, and wait for the answer."""
    if isinstance(link, MultistreamLink):
        link.write(link.open(), b"there?", True)
        assert await link.receive()
    elif isinstance(link, trio.abc.Channel):
        await link.send(b"there?")
        assert await link.receive()
    else:
        await link.send_all(b"there?")
        assert await link.receive_some()


@EACH
async def test_one_object_serves_and_connects_over_each_transport(transport: Transport[Any], world: World) -> None:
    """F14: three ways to give a certificate: `ssl_context=`, `certificate=` and `ca=`, `dtls.server_context(…)`."""
    async with served(transport, echo, world.server()) as connect:
        async with connect(world.nobody) as link:
            await ask(link)
            assert link.identity.names == ("127.0.0.1",)
            assert "insecure" not in link.peer
        with pytest.raises(HandshakeFailed):
            async with connect(TLS()):  # the authorities of the system
                pass
        async with connect(world.careless) as link:
            await ask(link)
            assert link.identity is None
            assert "(not verified, insecure)" in link.peer


@EACH
async def test_a_client_certificate_is_asked_for_verified_and_told_to_the_handler(
    transport: Transport[Any], world: World
) -> None:
    met: list[Identity | None] = []

    async def meet(link: Link) -> None:
        met.append(link.identity)
        await echo(link)

    async with served(transport, meet, world.server(asks=True)) as connect:
        async with connect(world.client) as link:
            await ask(link)
        (identity,) = met
        assert identity is not None
        assert identity.names == ("alice@users.test",)
        assert str(identity.subject).startswith("CN=alice,")
        quick = {"handshake_timeout": 1.0} if transport.scheme == "dtls" else {}  # which sends no alert for this
        for client in (world.nobody, world.stranger):
            with pytest.raises(LOST):
                async with connect(client, **quick) as link:
                    await ask(link)
    assert len(met) == 1


@EACH
async def test_files_that_are_read_again_count_for_new_handshakes_and_end_no_session(
    transport: Transport[Any], world: World
) -> None:
    async def echo_all(link: Link) -> None:
        while True:
            await echo_once(link)

    server = world.server()
    async with served(transport, echo_all, server) as connect:
        async with connect(world.nobody) as old:
            await ask(old)
            world.issue("cert", "127.0.0.1", "renewed.test")
            async with connect(world.nobody) as link:
                assert link.identity.names == ("127.0.0.1",), "the server has not read them again"
                await ask(link)
            server.reload()
            async with connect(world.nobody) as new:
                assert new.identity.names == ("127.0.0.1", "renewed.test")
                await ask(new)
                await ask(old)


async def echo_once(link: Link) -> None:
    if isinstance(link, MultistreamLink):
        if not await link.receive():
            await trio.sleep_forever()
        link.write(link.open(), b"here", True)
    elif isinstance(link, trio.abc.Channel):
        try:
            await link.send(await link.receive())
        except trio.EndOfChannel:
            await trio.sleep_forever()
    elif data := await link.receive_some():
        await link.send_all(data)
    else:
        await trio.sleep_forever()


@EACH
async def test_a_client_authority_that_is_added_counts_for_new_handshakes(
    transport: Transport[Any], world: World, tmp_path: Path
) -> None:
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(trustme.CA().cert_pem.bytes())
    server = TLS(tmp_path / "cert.pem", client_ca=authorities)
    quick = {"handshake_timeout": 1.0} if transport.scheme == "dtls" else {}
    async with served(transport, echo, server) as connect:
        with pytest.raises(LOST):
            async with connect(world.client, **quick) as link:
                await ask(link)
        authorities.write_bytes(world.ca.read_bytes())
        server.reload()
        async with connect(world.client) as link:
            await ask(link)


@pytest.mark.parametrize("transport", [quic.transport, dtls.transport], ids=["quic", "dtls"])
async def test_files_that_changed_once_more_after_the_reload_change_nothing(
    transport: Transport[Any], world: World, tmp_path: Path
) -> None:
    server = world.server()
    async with served(transport, echo, server) as connect:
        server.reload()
        (tmp_path / "cert.pem").write_text("half written")
        async with connect(world.nobody) as link:
            await ask(link)


@EACH
async def test_what_says_the_same_thing_twice_is_refused(transport: Transport[Any], world: World) -> None:
    older = {"quic": ("ca", "certificate")}.get(transport.scheme, ("ssl_context", "ssl_context"))
    with pytest.raises(ValueError, match=f"tls= and {older[0]}= say the same thing: give one of them"):
        async with transport.connect("127.0.0.1:1", tls=world.nobody, **{older[0]: object()}):
            pass
    start: Callable[..., Awaitable[None]] = partial(
        transport.serve, echo, "127.0.0.1:0", limits=LIMITS, task_status=trio.TASK_STATUS_IGNORED
    )
    with pytest.raises(ValueError, match=f"tls= and {older[1]}= say the same thing: give one of them"):
        await start(tls=world.server(), **{older[1]: object()})
    nothing: dict[str, TLS] = {}
    for options in (nothing, {"tls": world.nobody}):
        with pytest.raises(ValueError, match=r"a server needs its certificate and key: tls=muxkit.TLS\("):
            await start(**options)
    with pytest.raises(ValueError, match="insecure"):
        async with transport.connect("127.0.0.1:1", tls=world.nobody, insecure=True):
            pass


async def test_authorities_and_keys_with_a_password_are_taken_by_quic_and_dtls_as_well(
    world: World, tmp_path: Path
) -> None:
    key = load_pem_private_key((tmp_path / "cert.pem").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"tea"))
    (tmp_path / "key.pem").write_bytes(locked)
    pem = world.ca.read_bytes()
    server = TLS(tmp_path / "cert.pem", tmp_path / "key.pem", client_ca=pem, password="tea")
    client = TLS(tmp_path / "alice.pem", ca=pem)
    for transport in TRANSPORTS:
        async with served(transport, echo, server) as connect, connect(client) as link:
            await ask(link)


async def test_quic_gives_no_tickets_where_it_asks_for_certificates(world: World) -> None:
    with pytest.raises(ValueError, match="a client that comes with a ticket shows no certificate"):
        await quic.serve(echo, tls=world.server(asks=True), tickets=True)


async def test_quic_says_which_certificate_is_missing(world: World) -> None:
    async with served(quic.transport, echo, world.server(asks=True)) as connect:
        with pytest.raises(HandshakeFailed, match="certificate required; give it one: tls="):
            async with connect(world.nobody):
                raise AssertionError("the server refused this client")
        with pytest.raises(HandshakeFailed, match="unable to get local issuer certificate"):
            async with connect(world.stranger):
                raise AssertionError("the server refused this client")


async def test_quic_refuses_a_certificate_that_is_for_servers_only(world: World, tmp_path: Path) -> None:
    made = certificate_for([ExtendedKeyUsageOID.SERVER_AUTH])
    assert not may_authenticate_clients(made)
    assert may_authenticate_clients(certificate_for([ExtendedKeyUsageOID.CLIENT_AUTH]))
    assert may_authenticate_clients(certificate_for([ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]))
    assert may_authenticate_clients(certificate_for([]))


def certificate_for(purposes: list[x509.ObjectIdentifier]) -> x509.Certificate:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(key, hashes.SHA256())


async def test_plaintext_transports_say_where_tls_belongs(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls= and ssl_context= are for wss"):
        async with websocket.transport.connect("127.0.0.1:1", tls=world.nobody):
            pass
    with pytest.raises(ValueError, match="tls= and ssl_context= are for wss"):
        await websocket.transport.serve(
            echo, "127.0.0.1:0", limits=LIMITS, task_status=trio.TASK_STATUS_IGNORED, tls=world.server()
        )
