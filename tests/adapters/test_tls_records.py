"""TLS record by record: what one read and one write of the socket hold, and what a peer may send between the data."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL import SSL

from muxkit_adapters import tcp, tls
from muxkit_adapters.tls import TLSStream

from ._links import PATIENCE, Certificates, echo, paired, port_of, serving, wire_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

GOOD = Certificates()
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@asynccontextmanager
async def pair(
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, *, close_timeout: float = 0.2
) -> AsyncIterator[tuple[TLSStream, TLSStream]]:
    server = GOOD.server()
    server.maximum_version = version

    def connect(address: str) -> AbstractAsyncContextManager[TLSStream]:
        client = GOOD.client()
        return tls.connect("127.0.0.1", port_of(address), ssl_context=client, close_timeout=close_timeout)

    async with paired(tls.serve, connect, ssl_context=server, close_timeout=close_timeout) as streams:
        yield streams


async def arrived(stream: TLSStream) -> None:
    """Wait until something can be read from the socket below."""
    await trio.lowlevel.wait_readable(wire_of(stream).socket)


async def receive_all(stream: TLSStream) -> int:
    size = 0
    async for data in stream:
        size += len(data)
    return size


@pytest.mark.parametrize("version", VERSIONS)
async def test_one_read_takes_all_records_that_came(version: ssl.TLSVersion) -> None:
    async with pair(version) as (here, there):
        await there.send_all(b"the first one brings the session tickets")
        await here.receive_some()
        for number in range(50):
            there._tls.write(b"%02d" % number)
        assert there._push()
        await arrived(here)
        assert here.receive_nowait(65_536) == b"".join(b"%02d" % number for number in range(50))
        assert here.receive_nowait(65_536) is None


async def test_one_write_calls_the_socket_once() -> None:
    async with pair() as (here, there):
        written = []
        send: Callable[[list[bytes | memoryview]], int] = wire_of(here).send_nowait

        def counted(buffers: list[bytes | memoryview]) -> int:
            written.append(send(buffers))
            return written[-1]

        wire_of(here).send_nowait = counted
        assert here.send_nowait([b"head", bytes(40_000), bytes(40_000)]) == 80_004
        await here.send_buffers([b"a", b"b", b"c"])
        assert len(written) == 2
        got = b""
        while len(got) < 80_007:
            got += await there.receive_some()
        assert got == b"head" + bytes(80_000) + b"abc"


async def test_one_write_fills_its_records_whatever_the_sizes_of_its_buffers_are() -> None:
    """A header of a few bytes in a record of its own would take longer than its payload."""
    async with pair() as (here, there):
        sent: list[bytes] = []
        send: Callable[[list[bytes | memoryview]], int] = wire_of(here).send_nowait

        def kept(buffers: list[bytes | memoryview]) -> int:
            sent.extend(map(bytes, buffers))
            return send(buffers)

        wire_of(here).send_nowait = kept
        here.send_nowait([b"head", bytes(20_000), b"head", bytes(20_000)])
        await here.send_buffers([b"head", bytes(20_000), b"head", bytes(20_000)])
        assert [*map(records_of, sent)] == [3, 3]
        size = 0
        while size < 80_016:
            size += len(await there.receive_some())


def records_of(data: bytes) -> int:
    """Count the records of TLS in these bytes (RFC 8446, section 5.1)."""
    count = at = 0
    while at < len(data):
        at += 5 + int.from_bytes(data[at + 3 : at + 5], "big")
        count += 1
    return count


async def test_a_small_piece_of_a_large_record_leaves_the_rest_for_the_next_read() -> None:
    async with pair() as (here, there):
        await there.send_all(bytes(range(256)) * 64 + b"next record")
        await arrived(here)
        pieces = []
        while (piece := here.receive_nowait(1000)) is not None:
            assert len(piece) <= 1000
            pieces.append(piece)
        assert b"".join(pieces) == bytes(range(256)) * 64 + b"next record"


async def test_what_was_not_taken_is_sent_once_when_it_comes_first_in_the_next_write() -> None:
    async with pair() as (here, there):
        sent = bytearray()
        number = 0
        while True:
            number += 1
            data = bytes([number % 251]) * 100_000
            taken = here.send_nowait([data])
            sent += data
            if taken < len(data):
                break
        rest = data[taken:]
        assert here.send_nowait([rest]) == 0
        got = bytearray()

        async def receive(size: int) -> None:
            while len(got) < size:
                got.extend(await there.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive, len(sent) + 4)
            await here.send_buffers([rest, b"more"])
        assert got == sent + b"more"


async def test_a_send_that_was_cancelled_on_its_way_leaves_a_stream_that_says_so() -> None:
    async with pair() as (here, there):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.send_all, bytes(32 * 1024 * 1024))
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
        with pytest.raises(trio.BrokenResourceError, match="a cancelled call left the stream unusable"):
            await here.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError, match="a cancelled call left the stream unusable"):
            here.send_nowait([b"x"])
        await here.aclose()
        with pytest.raises(trio.BrokenResourceError, match="cut off without close_notify"):
            await receive_all(there)


async def test_a_send_that_was_cancelled_before_it_began_has_sent_nothing() -> None:
    async with pair() as (here, there):
        with trio.CancelScope() as scope:
            scope.cancel()
            await here.send_all(b"never")
        assert scope.cancelled_caught
        await here.send_all(b"after it")
        assert await there.receive_some() == b"after it"


async def test_a_close_lets_a_send_that_is_under_way_finish() -> None:
    data = bytes(8 * 1024 * 1024)
    async with pair(close_timeout=PATIENCE) as (here, there):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.send_all, data)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(here.aclose)
            assert await receive_all(there) == len(data)


@pytest.mark.requirement("R-49")
async def test_the_peer_of_a_broken_record_reads_an_alert() -> None:
    async with pair() as (here, there):
        await wire_of(there).send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(trio.BrokenResourceError, match="TLS failed: "):
            await here.receive_some()
        with pytest.raises(trio.BrokenResourceError, match="refused the connection: bad record mac"):
            await there.receive_some()
        assert there.peer_reason is not None
        assert there.peer_reason.text == "TLS alert: bad record mac"
        with pytest.raises(trio.BrokenResourceError, match="TLS failed: "):
            await here.send_all(b"x")


async def test_a_client_that_only_sends_gets_no_session_tickets_that_it_would_not_read() -> None:
    async with pair() as (here, there):
        await here.send_all(b"request")
        assert await there.receive_some() == b"request"
        assert wire_of(here).receive_nowait(1) is None
        await there.send_all(b"answer")
        assert await here.receive_some() == b"answer"


def openssl_program() -> str:
    found = shutil.which("openssl")
    if found is None:
        pytest.skip("the program openssl is not installed")
    return found


@pytest.mark.parametrize("letter", ["k", "K"])
async def test_a_peer_may_change_its_keys_and_ask_for_ours(letter: str, tmp_path: Path) -> None:
    """`openssl s_client` sends a KeyUpdate when it reads such a line; with K it asks for one."""
    program = openssl_program()
    GOOD.authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with serving(tls.serve, echo, ssl_context=GOOD.server()) as (address,):
        command = [program, "s_client", "-connect", address, "-CAfile", str(tmp_path / "ca.pem")]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdin is not None
        assert process.stdout is not None
        said = b""

        async def until(word: bytes) -> None:
            nonlocal said
            while word not in said:
                more = await process.stdout.receive_some()  # type: ignore[union-attr]
                assert more, said
                said += more
            said = said.rpartition(word)[2]

        with trio.fail_after(PATIENCE):
            await process.stdin.send_all(b"before\n")
            await until(b"before\n")
            for turn in range(3):
                await process.stdin.send_all(letter.encode() + b"\n")
                await until(b"KEYUPDATE\n")
                await process.stdin.send_all(b"after %d\n" % turn)
                await until(b"after %d\n" % turn)
        process.kill()
        await process.wait()


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_renegotiation_is_refused_and_the_peer_is_told(is_full: bool) -> None:
    """The refusal is something that reading has to write, be it later when the socket is full."""
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    context.use_certificate(x509.load_pem_x509_certificate(GOOD.certificate.cert_chain_pems[0].bytes()))
    key = serialization.load_pem_private_key(GOOD.certificate.private_key_pem.bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    context.use_privatekey(key)
    errors = []

    async def ask(wire: tcp.SocketStream) -> None:
        peer = SSL.Connection(context)
        peer.set_accept_state()

        async def attempt(step: Callable[[], object]) -> None:
            while True:
                try:
                    step()
                except SSL.WantReadError:
                    with suppress(SSL.WantReadError):
                        await wire.send_all(peer.bio_read(1 << 20))
                    peer.bio_write(await wire.receive_some())
                else:
                    break
            with suppress(SSL.WantReadError):
                await wire.send_all(peer.bio_read(1 << 20))

        await attempt(peer.do_handshake)
        assert peer.renegotiate()
        try:
            await attempt(peer.do_handshake)
            await attempt(lambda: peer.recv(1))
        except SSL.Error as error:
            errors.append(str(error))

    async with serving(tcp.serve, ask) as (address,):
        async with tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client(), close_timeout=0.1) as stream:
            send, calls = wire_of(stream).send_nowait, []

            def send_after_the_first(buffers: list[bytes | memoryview]) -> int:
                calls.append(buffers)
                return 0 if is_full and len(calls) == 1 else send(buffers)

            wire_of(stream).send_nowait = send_after_the_first
            with pytest.raises(trio.BrokenResourceError, match="cut off without close_notify"):
                await stream.receive_some()
    assert "no renegotiation" in errors[0]
