"""TLS is refused whenever it should be, and a cut connection is never taken for an end."""

from __future__ import annotations

import datetime
import gc
import socket
import ssl
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import Limits
from muxkit.testing._links import check_link
from muxkit_adapters import tcp, tls
from muxkit_adapters.tls import HandshakeFailed, TLSStream

from ._links import (
    PATIENCE,
    Certificates,
    at_most,
    comes_down_to,
    descriptors_and_tasks,
    drain,
    echo,
    flood,
    paired,
    park,
    port_of,
    reset,
    serving,
    wire_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

GOOD = Certificates()
LIMITS = Limits()


@asynccontextmanager
async def pair(client: ssl.SSLContext | None = None) -> AsyncIterator[tuple[TLSStream, TLSStream]]:
    def connect(address: str) -> AbstractAsyncContextManager[TLSStream]:
        return tls.connect("127.0.0.1", port_of(address), ssl_context=client or GOOD.client(), close_timeout=0.2)

    async with paired(tls.serve, connect, ssl_context=GOOD.server(), close_timeout=0.2) as streams:
        yield streams


async def test_a_tls_connection_is_a_link() -> None:
    await check_link(pair, half_close=False)


async def test_by_url_with_a_context_for_each_side() -> None:
    options = {"limits": LIMITS, "ssl_context": GOOD.server()}
    async with serving(tls.transport.serve, echo, "127.0.0.1:0", **options) as (address,):
        async with tls.transport.connect(address, ssl_context=GOOD.client()) as stream:
            await stream.send_all(b"secret")
            assert await stream.receive_some() == b"secret"


async def test_the_default_is_tls_1_3_and_the_peer_is_named() -> None:
    async with pair() as (here, there):
        assert "TLSv1.3" in repr(here)
        assert here.peer.startswith("tls 127.0.0.1:")
        assert there.peer.startswith("tls 127.0.0.1:")


async def refused(server: ssl.SSLContext, client: ssl.SSLContext | None, **options: object) -> str:
    served = []

    async def remember(stream: trio.abc.Stream) -> None:
        served.append(stream)

    async with serving(tls.serve, remember, ssl_context=server) as (address,):
        with pytest.raises(HandshakeFailed) as caught:
            async with tls.connect("127.0.0.1", port_of(address), ssl_context=client, **options):  # type: ignore[arg-type]
                pass
        assert address in str(caught.value)
        return str(caught.value)


@pytest.mark.requirement("R-62")
async def test_an_expired_certificate_is_refused() -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    expired = GOOD.authority.issue_cert("127.0.0.1", not_after=past)
    assert "certificate has expired" in await refused(GOOD.server_with(expired), GOOD.client())


@pytest.mark.requirement("R-62")
async def test_a_certificate_for_another_name_is_refused() -> None:
    other = GOOD.authority.issue_cert("example.org")
    assert "not valid for '127.0.0.1'" in await refused(GOOD.server_with(other), GOOD.client())
    assert "'example.net'" in await refused(GOOD.server(), GOOD.client(), server_hostname="example.net")


@pytest.mark.requirement("R-62")
async def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    stranger = Certificates()
    assert "the certificate was refused: " in await refused(stranger.server(), GOOD.client())
    assert "the certificate was refused: " in await refused(stranger.server(), None)


@pytest.mark.requirement("R-62")
async def test_a_self_signed_certificate_is_refused() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority = Certificates().authority
    with authority.private_key_pem.tempfile() as key, authority.cert_pem.tempfile() as certificate:
        context.load_cert_chain(certificate, key)
    assert "self-signed certificate" in await refused(context, GOOD.client())


@pytest.mark.requirement("R-62")
async def test_peers_without_a_common_protocol_are_refused_on_both_sides() -> None:
    async with serving(tls.serve, echo, ssl_context=GOOD.server(), alpn=["bpmux"]) as (address,):
        with pytest.raises(HandshakeFailed, match=r"none of the protocols other \(ALPN\)"):
            async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client(), alpn=["other"]):
                pass
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client(), alpn=["bpmux"]) as stream:
            assert stream.alpn == "bpmux"
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client()) as stream:
            with pytest.raises(trio.BrokenResourceError):
                assert await stream.receive_some()


MINIMUMS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.MINIMUM_SUPPORTED]  # Debian's Python leaves it to OpenSSL


@pytest.mark.requirement("R-62")
@pytest.mark.parametrize("minimum", MINIMUMS)
async def test_a_server_that_speaks_only_tls_1_1_is_refused(minimum: ssl.TLSVersion) -> None:
    old, ours = old_context(GOOD.server()), GOOD.client()
    ours.minimum_version = minimum
    ours.set_ciphers("ALL:@SECLEVEL=0")  # nothing but the version is in the way

    def answer(listener: socket.socket) -> None:
        # The standard library's blocking sockets send the alert that says why; Trio's stream just hangs up.
        with listener, listener.accept()[0] as wire, pytest.raises(ssl.SSLError):
            old.wrap_socket(wire, server_side=True)

    async with trio.open_nursery() as nursery:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        nursery.start_soon(trio.to_thread.run_sync, answer, listener)
        # An older Python may have no name for what a newer OpenSSL says.
        with pytest.raises(HandshakeFailed, match=r"(refused the connection: protocol version|TLS failed: sslerror)$"):
            async with tls.connect("127.0.0.1", port, ssl_context=ours):
                pass


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-62")
@pytest.mark.parametrize("minimum", MINIMUMS)
async def test_a_client_that_speaks_only_tls_1_1_is_refused(minimum: ssl.TLSVersion) -> None:
    """Was: With Debian's Python, which leaves the oldest version of TLS to OpenSSL, `tls` refused every context of
    `ssl.create_default_context()`.
    """
    served = []

    async def remember(stream: trio.abc.Stream) -> None:
        served.append(stream)

    context = GOOD.server()
    context.minimum_version = minimum
    async with serving(tls.serve, remember, ssl_context=context) as (address,):
        wire = await trio.open_tcp_stream("127.0.0.1", port_of(address))
        stream = trio.SSLStream(wire, old_context(GOOD.client()), server_hostname="127.0.0.1")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)
    assert not served


def old_context(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


@pytest.mark.requirement("R-62")
@pytest.mark.parametrize("weakness", ["no host name", "no chain", "old versions"])
async def test_a_context_that_does_not_verify_is_refused_before_any_connection(weakness: str) -> None:
    context = GOOD.client()
    if weakness == "old versions":
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = ssl.TLSVersion.TLSv1_1
    else:
        context.check_hostname = False
    if weakness == "no chain":
        context.verify_mode = ssl.CERT_NONE
    with pytest.raises(ValueError, match=r"does not verify the server|set minimum_version"):
        async with tls.connect("127.0.0.1", 1, ssl_context=context):
            pass


@pytest.mark.requirement("R-62")
async def test_an_unverified_connection_must_be_asked_for_and_shows_it() -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with serving(tls.serve, echo, ssl_context=GOOD.server()) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=context, insecure=True) as stream:
            assert "(not verified, insecure)" in repr(stream)


async def test_a_server_without_a_certificate_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="a server needs its certificate and key: tls="):
        await tls.transport.serve(echo, "127.0.0.1:0", limits=LIMITS, task_status=trio.TASK_STATUS_IGNORED)


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-63")
@pytest.mark.parametrize("ignores", [False, True])
async def test_an_end_without_close_notify_is_an_error_and_not_an_end(ignores: bool) -> None:
    """Was: With the first versions of Python 3.11 a TLS connection that was cut looked like one that had ended."""
    context = GOOD.client()
    if ignores:  # as Python 3.11.0 sets it for every context
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    async with pair(context) as (here, there):
        await there.send_all(b"half of it")
        assert await here.receive_some() == b"half of it"
        await cut(there)
        with pytest.raises(trio.BrokenResourceError, match="cut off without close_notify, so data may be missing"):
            await here.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await here.receive_some()


@pytest.mark.requirement("R-49")
async def test_a_changed_byte_on_the_wire_is_an_error() -> None:
    async with pair() as (here, there):
        raw = wire_of(there)
        await raw.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(trio.BrokenResourceError, match="TLS failed: "):
            await here.receive_some()


async def test_a_server_that_hangs_up_in_the_handshake_is_a_failure_with_its_address() -> None:
    async with serving(tcp.serve, hang_up) as (address,):
        with pytest.raises(HandshakeFailed, match=rf"tls {address}: the peer hung up during the TLS handshake"):
            async with tls.connect("127.0.0.1", port_of(address)):
                pass


async def test_a_server_that_never_answers_is_given_up() -> None:
    async with serving(tcp.serve, park) as (address,):
        with pytest.raises(HandshakeFailed, match=r"not over within 0\.05 s"):
            async with tls.connect("127.0.0.1", port_of(address), handshake_timeout=0.05):
                pass


async def test_clients_that_never_finish_their_handshake_do_not_keep_a_good_one_out() -> None:
    limits = Limits(half_open=100, handshake=3.0)
    async with serving(tls.serve, echo, ssl_context=GOOD.server(), limits=limits) as (address,):
        slow = [await trio.open_tcp_stream("127.0.0.1", port_of(address)) for _ in range(300)]
        for stream in slow:
            await stream.send_all(b"\x16")
        client = GOOD.client()
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=client, handshake_timeout=PATIENCE) as good:
            await good.send_all(b"hello")
            assert await good.receive_some() == b"hello"
        for stream in slow:
            await stream.aclose()


@pytest.mark.requirement("R-35")
async def test_a_handshake_that_trickles_is_dropped_at_the_deadline(mock_clock: MockClock) -> None:
    async with serving(tls.serve, echo, ssl_context=GOOD.server(), limits=Limits(handshake=0.1)) as (address,):
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(address))
        await stream.send_all(b"\x16\x03\x01")
        with at_most(2, mock_clock):
            await drain(stream)
        await stream.aclose()


@pytest.mark.requirement("R-38", "R-35")
@pytest.mark.parametrize("behaviour", ["stalls", "resets", "floods", "hangs up", "cuts", "is gone for good"])
async def test_close_is_over_in_time_whatever_the_peer_does(behaviour: str, mock_clock: MockClock) -> None:
    async with pair() as (here, there):
        raw = wire_of(there)
        async with trio.open_nursery() as nursery:
            if behaviour == "stalls":
                while wire_of(here).send_nowait([bytes(65_536)]):
                    pass
            elif behaviour == "resets":
                trio.lowlevel.notify_closing(raw.socket)
                reset(raw.socket)
            elif behaviour == "floods":
                nursery.start_soon(flood, there)
                await here.receive_some()
            elif behaviour == "hangs up":
                await there.aclose()
            elif behaviour == "cuts":
                await cut(there)
            else:
                nursery.start_soon(flood, here)  # a sender that waits for ever holds TLS's own lock
                await trio.testing.wait_all_tasks_blocked(0.01)
            with at_most(0.2 + 0.5, mock_clock):
                await here.aclose()
                await here.aclose()
            nursery.cancel_scope.cancel()


def test_the_close_timeout_is_five_seconds_unless_told_otherwise() -> None:
    assert tls.CLOSE_TIMEOUT == 5.0


@pytest.mark.requirement("R-43")
async def test_many_connections_leave_no_descriptor_and_no_stream_behind() -> None:
    async with serving(tls.serve, echo, ssl_context=GOOD.server()) as (address,):
        await visit(address, 10)
        before = await descriptors_and_tasks()
        await visit(address, 100)
        await comes_down_to(before)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, TLSStream)]


async def visit(address: str, times: int) -> None:
    client = GOOD.client()
    for _ in range(times):
        async with tls.transport.connect(address, ssl_context=client) as stream:
            await stream.send_all(b"x")
            await stream.receive_some()


async def cut(stream: TLSStream) -> None:
    await trio.aclose_forcefully(wire_of(stream))


async def hang_up(stream: trio.abc.Stream) -> None:
    await stream.receive_some()
