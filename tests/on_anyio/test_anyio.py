"""`muxkit.anyio`: what AnyIO's own helpers do with channels, on Trio and on asyncio."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
import trio
import trustme
from anyio.abc import ByteStream, ObjectStream, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.stapled import StapledByteStream
from anyio.streams.text import TextStream
from anyio.streams.tls import TLSAttribute, TLSStream

import muxkit
import muxkit.anyio
import muxkit.asyncio
from muxkit.anyio import AnySession, MuxAttribute
from muxkit.protocols import yamux

PATIENCE = 300.0  # s; reached only when something hangs
URL = "bpmux+tcp://127.0.0.1:0"

pytestmark = pytest.mark.parametrize("backend", ["trio", "asyncio"])


class Door:
    """`connect` and `open_server` of one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def connect(self, url: str, **options: Any) -> AbstractAsyncContextManager[Any]:
        if self._backend == "trio":
            return muxkit.connect(url, **options)
        return muxkit.asyncio.connect(url, **options)

    def serve(
        self, listen: Callable[[AnySession], Awaitable[object]], url: str = URL, **options: Any
    ) -> AbstractAsyncContextManager[Any]:
        if self._backend == "trio":

            async def on_trio(session: muxkit.Session) -> None:
                await listen(session)

            return muxkit.open_server(on_trio, url, **options)

        async def on_asyncio(session: muxkit.asyncio.Session) -> None:
            await listen(session)

        return muxkit.asyncio.open_server(on_asyncio, url, **options)


def run(backend: str, main: Callable[[Door], Awaitable[None]]) -> None:
    async def within() -> None:
        with anyio.fail_after(PATIENCE):
            await main(Door(backend))

    anyio.run(within, backend=backend)


async def echo_bytes(stream: ByteStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send(data)


async def echo_messages(stream: ObjectStream[bytes]) -> None:
    async with stream:
        async for message in stream:
            await stream.send(message)


async def listen_for_bytes(session: AnySession) -> None:
    await muxkit.anyio.listener(session).serve(echo_bytes)


async def listen_for_messages(session: AnySession) -> None:
    await muxkit.anyio.object_listener(session).serve(echo_messages)


def test_bytes_go_there_and_back_until_the_end(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_bytes) as server, door.connect(server.url) as session:
            async with muxkit.anyio.byte_stream(await session.open()) as stream:
                await stream.send(b"x" * 200_000)
                await stream.send_eof()
                got = b"".join([data async for data in stream])
                assert got == b"x" * 200_000
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()

    run(backend, main)


def test_messages_stay_whole(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_messages) as server, door.connect(server.url) as session:
            async with muxkit.anyio.object_stream(await session.open()) as stream:
                for message in (b"", b"a", b"b" * 100_000):
                    await stream.send(message)
                    assert await stream.receive() == message
                await stream.send_eof()
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()

    run(backend, main)


def test_a_buffered_stream_and_a_text_stream_of_anyio_read_lines(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_bytes) as server, door.connect(server.url) as session:
            stream = muxkit.anyio.byte_stream(await session.open())
            lines = BufferedByteReceiveStream(stream)
            await stream.send("zwölf\n13\n".encode())
            assert await lines.receive_until(b"\n", 100) == "zwölf".encode()
            assert await lines.receive_until(b"\n", 100) == b"13"
            text = TextStream(StapledByteStream(stream, stream))
            await text.send("vierzehn")
            assert await text.receive() == "vierzehn"
            await stream.aclose()

    run(backend, main)


def test_tls_of_anyio_runs_over_a_channel(backend: str) -> None:
    """A library that was written for AnyIO's byte streams, with both sides talking at the same time."""
    authority = trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("inner.example.org").configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def encrypted(stream: ByteStream) -> None:
        inner = await TLSStream.wrap(stream, server_side=True, ssl_context=serving, standard_compatible=False)
        await echo_bytes(inner)

    async def listen(session: AnySession) -> None:
        await muxkit.anyio.listener(session).serve(encrypted)

    async def main(door: Door) -> None:
        async with door.serve(listen) as server, door.connect(server.url) as session:
            outer = muxkit.anyio.byte_stream(await session.open())
            inner = await TLSStream.wrap(
                outer, hostname="inner.example.org", ssl_context=trusting, standard_compatible=False
            )
            async with inner:
                await inner.send(b"secret")
                assert await inner.receive() == b"secret"

    run(backend, main)


def test_using_a_closed_stream_raises_the_error_of_anyio(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_bytes) as server, door.connect(server.url) as session:
            data = muxkit.anyio.byte_stream(await session.open())
            messages = muxkit.anyio.object_stream(await session.open())
            for stream in (data, messages):
                await stream.aclose()
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.send(b"late")
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.receive()

    run(backend, main)


def test_a_lost_or_aborted_channel_raises_the_error_of_anyio(backend: str) -> None:
    async def listen(session: AnySession) -> None:
        async for channel in session.incoming():
            channel.abort("disk full", code=7)

    async def main(door: Door) -> None:
        async with door.serve(listen) as server, door.connect(server.url) as session:
            with pytest.raises(anyio.BrokenResourceError) as caught:
                await muxkit.anyio.object_stream(await session.open()).receive()
            assert isinstance(caught.value.__cause__, muxkit.ChannelCancelled)
            assert caught.value.__cause__.reason == "disk full"
            with pytest.raises(anyio.BrokenResourceError):
                await muxkit.anyio.byte_stream(await session.open()).receive()

    run(backend, main)


def test_a_channel_with_another_name_is_refused(backend: str) -> None:
    async def listen(session: AnySession) -> None:
        await muxkit.anyio.listener(session, "http").serve(echo_bytes)

    async def main(door: Door) -> None:
        async with door.serve(listen) as server, door.connect(server.url) as session:
            with pytest.raises(anyio.BrokenResourceError) as caught:
                await muxkit.anyio.byte_stream(await session.open("smtp")).receive()
            assert "only channels named 'http'" in str(caught.value.__cause__)
            async with muxkit.anyio.byte_stream(await session.open("http")) as stream:
                await stream.send(b"tea")
                assert await stream.receive() == b"tea"

    run(backend, main)


def test_serving_on_a_listener_ends_with_the_session_in_order(backend: str) -> None:
    async def main(door: Door) -> None:
        ended = anyio.Event()

        async def listen(session: AnySession) -> None:
            await muxkit.anyio.listener(session).serve(echo_bytes)
            ended.set()

        async with door.serve(listen) as server:
            async with door.connect(server.url) as session:
                async with muxkit.anyio.byte_stream(await session.open()) as stream:
                    await stream.send(b"x")
                    await stream.receive()
            await ended.wait()

    run(backend, main)


def test_a_listener_that_is_closed_accepts_nothing_more(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_bytes) as server, door.connect(server.url) as session:
            mine = muxkit.anyio.listener(session)
            outcomes: list[str] = []

            async def serve() -> None:
                try:
                    await mine.serve(echo_bytes)
                except* anyio.ClosedResourceError:
                    outcomes.append("closed")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await anyio.wait_all_tasks_blocked()
                await mine.aclose()
            await serve()
            assert outcomes == ["closed", "closed"]
            await session.ping()

    run(backend, main)


def test_a_listener_whose_serving_was_cancelled_serves_again(backend: str) -> None:
    async def listen(session: AnySession) -> None:
        mine = muxkit.anyio.listener(session)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mine.serve, echo_bytes)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await mine.serve(echo_bytes)

    async def main(door: Door) -> None:
        async with door.serve(listen) as server, door.connect(server.url) as session:
            async with muxkit.anyio.byte_stream(await session.open()) as stream:
                await stream.send(b"tea")
                assert await stream.receive() == b"tea"

    run(backend, main)


def test_a_cancelled_receive_takes_nothing(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_messages) as server, door.connect(server.url) as session:
            async with muxkit.anyio.object_stream(await session.open()) as stream:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.receive)
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                await stream.send(b"tea")
                assert await stream.receive() == b"tea"

    run(backend, main)


def test_a_stream_closes_also_when_closing_is_cancelled(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_messages) as server, door.connect(server.url) as session:
            for stream in (
                muxkit.anyio.object_stream(await session.open()),
                muxkit.anyio.byte_stream(await session.open()),
            ):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await stream.aclose()
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.send(b"late")

    run(backend, main)


def test_typed_attributes_tell_the_channel_and_the_peer(backend: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")

    async def main(door: Door) -> None:
        with certificate.private_key_and_cert_chain_pem.tempfile() as cert, authority.cert_pem.tempfile() as ca:
            async with (
                door.serve(listen_for_bytes, "bpmux+tls://127.0.0.1:0", tls=muxkit.TLS(cert=cert)) as server,
                door.connect(server.url, tls=muxkit.TLS(ca=ca)) as session,
            ):
                channel = await session.open("", headers={"a": "b"})
                for stream in (muxkit.anyio.byte_stream(channel), muxkit.anyio.object_stream(channel)):
                    port = int(server.url.rpartition(":")[2])
                    assert stream.extra(MuxAttribute.channel_name) == ""
                    assert stream.extra(MuxAttribute.channel_headers) == {"a": "b"}
                    assert stream.extra(MuxAttribute.session_info).protocol == "bpmux"
                    assert stream.extra(SocketAttribute.remote_address) == ("127.0.0.1", port)
                    assert stream.extra(SocketAttribute.remote_port) == port
                    assert stream.extra(TLSAttribute.peer_certificate_binary) is not None

    run(backend, main)


def test_streams_of_yamux_are_byte_streams(backend: str) -> None:
    async def main(door: Door) -> None:
        async def listen(session: AnySession) -> None:
            native = session.native if isinstance(session, muxkit.asyncio.Session) else session
            assert isinstance(native, yamux.Session)
            await muxkit.anyio.stream_listener(native.streams()).serve(echo_bytes)

        async with door.serve(listen, "yamux+tcp://127.0.0.1:0") as server, door.connect(server.url) as session:
            native: yamux.Session = session if backend == "trio" else session.native

            async def open_stream() -> trio.abc.HalfCloseableStream:
                return await native.open_stream()

            opened = await (open_stream() if backend == "trio" else muxkit.asyncio.in_trio(open_stream))
            async with muxkit.anyio.byte_stream(opened) as stream:
                await stream.send(b"tea")
                assert await stream.receive() == b"tea"
                assert stream.extra(MuxAttribute.session_info).protocol == "yamux"

    run(backend, main)


def test_a_typed_channel_is_a_stream_of_its_values(backend: str) -> None:
    async def main(door: Door) -> None:
        async with door.serve(listen_for_messages) as server:
            async with door.connect(server.url) as session:
                async with session.open(codec=muxkit.Json(dict[str, int])) as channel:
                    stream = muxkit.anyio.object_stream(channel)
                    await stream.send({"one": 1})
                    assert await stream.receive() == {"one": 1}
                    assert stream.extra(MuxAttribute.session_info).protocol == "bpmux"

    run(backend, main)
