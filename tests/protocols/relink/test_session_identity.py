"""Only a peer with the same verified identity may come back to a link; real TLS, with certificates on both sides."""

from __future__ import annotations

import hmac
import ssl
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import trustme

import muxkit
from muxkit.protocols import relink
from muxkit.protocols.relink import Config, Endpoint, Link
from muxkit.protocols.relink.dial.listen import is_same
from muxkit.runtime import Backoff
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import tls, websocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from muxkit.protocols.relink import Listener

QUIET = Config(keepalive=None)
SOON = Backoff(first=0.01, most=0.1)


class Authority:
    """A certificate authority that issues certificates, and contexts that trust them."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    def server(self, verify: ssl.VerifyMode = ssl.CERT_OPTIONAL) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
        self._authority.configure_trust(context)
        context.verify_mode = verify
        return context

    def client(self, name: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        if name is not None:
            self._authority.issue_cert(name).configure_cert(context)
        return context


def connect_to(url: str, context: ssl.SSLContext) -> AbstractAsyncContextManager[trio.abc.Stream]:
    """Connect to the address of a URL, without a handshake."""
    scheme, _, rest = url.partition("://")
    if scheme.endswith("wss"):
        return websocket.connect(f"wss://{rest.partition('?')[0]}", ssl_context=context)
    return tls.connect("127.0.0.1", int(rest.partition("/")[0].rpartition(":")[2]), ssl_context=context)


async def ask(stream: trio.abc.Stream, link: Link, *, require: bool = False) -> int:
    """Ask for a link by its epoch and id; return the id that the listener answers."""
    config = Config(endpoint="jobs")
    request = relink.handshake.encode_request(
        config, epoch=connection_of(link).link.epoch, link_id=connection_of(link).link.link_id, require_link=require
    )
    await stream.send_all(relink.handshake.encode_version(0))
    assert await receive(stream, 8) == relink.handshake.encode_version(0)
    await stream.send_all(request)
    answer = await receive(stream, 16)
    return int.from_bytes(answer[8:16], "little")


async def receive(stream: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        assert more
        data += more
    return data


@pytest.mark.requirement("R-64")
@pytest.mark.parametrize("url", ["relink+tls://127.0.0.1:0/jobs", "relink+wss://127.0.0.1:0/mux?endpoint=jobs"])
async def test_a_foreign_certificate_does_not_take_a_link_over(url: str) -> None:
    authority = Authority()
    over = trio.Event()

    async def hold(session: muxkit.Session) -> None:
        await over.wait()

    async with trio.open_nursery() as nursery:
        serve = partial(muxkit.serve, hold, url, ssl_context=authority.server(), config=QUIET)
        served: muxkit.Server = await nursery.start(serve)
        owner = authority.client("owner@example.org")
        async with relink.connect(served.url, ssl_context=owner, config=QUIET, backoff=SOON, linger=30) as link:
            await link.connected()
            for name in ("thief@example.org", None):
                thief = authority.client(name)
                async with connect_to(served.url, thief) as stream:
                    assert await ask(stream, link) not in (link.id, 0)
                async with connect_to(served.url, thief) as stream:
                    assert await ask(stream, link, require=True) == 0
            assert link.connections == 1, "its owner was not disturbed"
            async with connect_to(served.url, owner) as stream:
                assert await ask(stream, link) == link.id
            over.set()
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-64")
async def test_who_has_shown_no_certificate_comes_back_without_one_and_not_with_one() -> None:
    authority = Authority()
    over = trio.Event()

    async def hold(session: muxkit.Session) -> None:
        await over.wait()

    async with trio.open_nursery() as nursery:
        url = "relink+tls://127.0.0.1:0/jobs"
        serve = partial(muxkit.serve, hold, url, ssl_context=authority.server(), config=QUIET)
        served: muxkit.Server = await nursery.start(serve)
        nobody = authority.client(None)
        async with relink.connect(served.url, ssl_context=nobody, config=QUIET, backoff=SOON, linger=30) as link:
            await link.connected()
            async with connect_to(served.url, authority.client("somebody@example.org")) as stream:
                assert await ask(stream, link) != link.id
            async with connect_to(served.url, nobody) as stream:
                assert await ask(stream, link) == link.id
            over.set()
        nursery.cancel_scope.cancel()


# --- streams that are not muxkit's


@asynccontextmanager
async def over_trios_tls(listener: Listener, context: ssl.SSLContext) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, listener.handle, 0, context, host="127.0.0.1")
        listeners: list[trio.SSLListener[trio.SocketStream]] = await nursery.start(serve)
        yield listeners[0].transport_listener.socket.getsockname()[1]  # type: ignore[attr-defined]
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-64")
async def test_trios_own_tls_streams_identify_their_peers_as_well() -> None:
    authority = Authority()
    over = trio.Event()

    async def hold(link: Link) -> None:
        await over.wait()

    async with (
        relink.listener({"jobs": Endpoint(hold, QUIET)}) as listener,
        over_trios_tls(listener, authority.server()) as port,
    ):

        @asynccontextmanager
        async def dial(context: ssl.SSLContext) -> AsyncIterator[trio.abc.Stream]:
            stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context)
            try:
                yield stream
            finally:
                await trio.aclose_forcefully(stream)

        owner = authority.client("owner@example.org")
        async with relink.link(lambda: dial(owner), "jobs", config=QUIET, backoff=SOON, linger=30) as link:
            await link.connected()
            async with dial(authority.client("thief@example.org")) as stream:
                assert await ask(stream, link) != link.id
            async with dial(owner) as stream:
                assert await ask(stream, link) == link.id
            over.set()


async def test_a_certificate_that_nobody_verified_identifies_nobody() -> None:
    authority = Authority()
    careless = ssl.create_default_context()
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    identities: list[bytes | None] = []
    looked = trio.Event()

    async def look(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.do_handshake()
        identities.append(relink.identity_of(stream))
        looked.set()

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, look, 0, authority.server(ssl.CERT_NONE), host="127.0.0.1")
        listeners = await nursery.start(serve)
        port = listeners[0].transport_listener.socket.getsockname()[1]
        for context in (careless, authority.client("somebody@example.org")):
            looked = trio.Event()
            stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context)
            await stream.do_handshake()
            identities.append(relink.identity_of(stream))
            await looked.wait()
            await stream.aclose()
        nursery.cancel_scope.cancel()
    verified = [identity for identity in identities if identity is not None]
    assert (len(identities), len(verified)) == (4, 1), "the server's, seen by the client that verified it"


@pytest.mark.requirement("R-64")
@pytest.mark.parametrize(("asked", "who"), [(5, b"owner"), (6, b"owner"), (5, b"thief"), (6, b"thief")])
def test_an_id_and_its_owner_are_both_compared_whatever_comes_of_the_first(
    asked: int, who: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are compared by the library's constant-time function."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert is_same(5, asked, b"owner", who) == (asked == 5 and who == b"owner")
    assert sorted(map(len, sum(compared, ()))) == [5, 5, 8, 8]
