"""QUIC as a multiplexer: aioquic's connection on a UDP socket driven by Trio; a bidirectional stream is a channel.

As in aioquic's own asyncio part, what is written in one turn goes out together, by a task of the connection. What
a stream may hold unsent is bounded here, since aioquic itself takes any amount.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # it comes from a C extension
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent, StreamDataReceived, StreamReset
from aioquic.quic.packet import pull_quic_header
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muxkit_bench.bench_work import Connection, Conversation, Peer, Server, StreamConversation, play
else:
    from bench_work import Connection, Conversation, Peer, Server, StreamConversation, play

PROTOCOL = "bench"
BUFFERS = 4 * 1024 * 1024  # bytes asked of the kernel
HIGH_WATER = 256 * 1024  # bytes that a stream may hold
YIELD_CALLS = 64
YIELD_BYTES = 16 * 1024
TURN = 64  # datagrams taken in at once
STREAMS = 2048  # open at the same time; aioquic admits 128, and has no setting for that


class Stream(StreamConversation):
    """A bidirectional stream."""

    __slots__ = ("_bytes", "_calls", "_carrier", "_data", "_news", "has_ended", "id")

    def __init__(self, carrier: Carrier, id: int) -> None:
        super().__init__(self.write, self.read)
        self.id = id
        self._carrier = carrier
        self._data: list[bytes] = []
        self._news = trio.Event()
        self._calls = self._bytes = 0
        self.has_ended = False

    async def write(self, data: bytes) -> None:
        carrier = self._carrier
        while carrier.held(self.id) > HIGH_WATER and not carrier.is_over:
            await carrier.acknowledged.wait()
        if carrier.is_over:
            raise trio.BrokenResourceError
        carrier.quic.send_stream_data(self.id, data)
        carrier.poke()
        self._calls += 1
        self._bytes += len(data)
        if self._calls >= YIELD_CALLS or self._bytes >= YIELD_BYTES:
            self._calls = self._bytes = 0
            await trio.lowlevel.checkpoint()

    async def read(self, most: int) -> bytes:
        while not self._data:
            if self.has_ended:
                return b""
            self._news = trio.Event()
            await self._news.wait()
        data = b"".join(self._data) if len(self._data) > 1 else self._data[0]
        self._data.clear()
        return data

    def end(self) -> None:
        if not self._carrier.is_over:
            self._carrier.quic.send_stream_data(self.id, b"", end_stream=True)
            self._carrier.poke()

    def came(self, data: bytes, *, is_last: bool) -> None:
        if data:
            self._data.append(data)
        self.has_ended = self.has_ended or is_last
        self._news.set()


class Carrier(Connection):
    """A connection, at either end."""

    def __init__(self, sock: socket.socket, quic: QuicConnection, opened: Callable[[Stream], None]) -> None:
        self.quic = quic
        self._socket = sock
        self._opened = opened
        self._streams: dict[int, Stream] = {}
        self._news = trio.Event()
        self.acknowledged = trio.Event()
        self.ready = trio.Event()
        self.is_over = False

    def held(self, id: int) -> int:
        """Bytes of a stream that are unsent or unacknowledged; aioquic does not say so itself."""
        stream = self.quic._streams.get(id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender._buffer_start

    def poke(self) -> None:
        self._news.set()

    def receive(self, data: bytes, address: tuple[str, int]) -> None:
        self.quic.receive_datagram(data, address, now=trio.current_time())

    def took(self) -> None:
        """After each read: wake all waiting tasks, and let the writer answer."""
        while (event := self.quic.next_event()) is not None:
            self._apply(event)
        self.acknowledged.set()
        self.acknowledged = trio.Event()
        self.poke()

    def _apply(self, event: QuicEvent) -> None:
        match event:
            case StreamDataReceived():
                stream = self._streams.get(event.stream_id)
                if stream is None:
                    stream = self._streams[event.stream_id] = Stream(self, event.stream_id)
                    self._opened(stream)
                stream.came(event.data, is_last=event.end_stream)
                if event.end_stream:
                    del self._streams[event.stream_id]
            case StreamReset():
                ended = self._streams.pop(event.stream_id, None)
                if ended is not None:
                    ended.came(b"", is_last=True)
            case HandshakeCompleted():
                self.ready.set()
            case ConnectionTerminated():
                self.is_over = True
                for live in self._streams.values():
                    live.came(b"", is_last=True)

    async def write(self) -> None:
        """Send what there is to send, and keep the connection's time."""
        while not self.is_over:
            await self.flush()
            if self._news.is_set():
                self._news = trio.Event()
                await trio.lowlevel.checkpoint()
                continue
            timer = self.quic.get_timer()
            with trio.move_on_at(float("inf") if timer is None else timer):
                await self._news.wait()
            self._news = trio.Event()
            now = trio.current_time()
            if timer is not None and timer <= now:
                self.quic.handle_timer(now=now)
                self.took()
        self.acknowledged.set()

    async def flush(self) -> None:
        for data, address in self.quic.datagrams_to_send(now=trio.current_time()):
            while True:
                try:
                    self._socket.sendto(data, address)
                    break
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                except ConnectionRefusedError:  # the other end has gone; its own time-out tells
                    break

    # --- for the client

    async def open(self) -> Stream:
        id = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(id, b"")  # or the next one would have the same id
        stream = self._streams[id] = Stream(self, id)
        return stream

    async def open_to_keep(self) -> object:
        stream = await self.open()
        await stream.write(b"\0")  # without a byte there is no frame, and the server never hears of the stream
        return stream

    async def close(self, conversation: Conversation) -> None:
        assert isinstance(conversation, Stream)
        conversation.end()
        await trio.lowlevel.checkpoint()

    async def echo_once(self, message: bytes) -> bytes:
        stream = await self.open()
        await stream.send(message)
        answer = await stream.receive()
        stream.end()
        return answer


class Aioquic(Peer):
    async def serve(self, server: Server, address: str, started: Callable[[str], None]) -> None:
        carriers: dict[tuple[str, int], Carrier] = {}
        configuration = _configuration(is_client=False)
        with tempfile.TemporaryDirectory() as folder:
            _make_certificate(Path(folder))
            configuration.load_cert_chain(Path(folder) / "certificate.pem", Path(folder) / "key.pem")
        async with trio.open_nursery() as nursery:

            async def converse(stream: Stream) -> None:
                try:
                    await server.serve(stream)
                except trio.BrokenResourceError:
                    return
                stream.end()

            def opened(stream: Stream) -> None:
                if not server.keeps(stream):
                    nursery.start_soon(converse, stream)

            def carrier_of(data: bytes, peer: tuple[str, int]) -> Carrier:
                carrier = carriers.get(peer)
                if carrier is None or carrier.is_over:
                    header = pull_quic_header(Buffer(data=data), host_cid_length=8)
                    quic = QuicConnection(
                        configuration=configuration, original_destination_connection_id=header.destination_cid
                    )
                    quic._local_max_streams_bidi.value = quic._local_max_streams_bidi.sent = STREAMS
                    carrier = carriers[peer] = Carrier(sock, quic, opened)
                    nursery.start_soon(carrier.write)
                return carrier

            with _socket() as sock:
                started(str(sock.getsockname()[1]))
                await _read(sock, carrier_of)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[Connection]:
        with _socket() as sock:
            quic = QuicConnection(configuration=_configuration(is_client=True))
            carrier = Carrier(sock, quic, lambda _: None)
            quic.connect(("127.0.0.1", int(address)), now=trio.current_time())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carrier.write)
                nursery.start_soon(_read, sock, lambda data, peer: carrier)
                await carrier.ready.wait()
                yield carrier
                quic.close()
                await carrier.flush()
                nursery.cancel_scope.cancel()


async def _read(sock: socket.socket, carrier_of: Callable[[bytes, tuple[str, int]], Carrier]) -> None:
    while True:
        await trio.lowlevel.wait_readable(sock)
        carriers: set[Carrier] = set()
        for _ in range(TURN):
            try:
                data, peer = sock.recvfrom(65_535)
            except BlockingIOError:
                break
            except ConnectionRefusedError:
                continue
            carrier = carrier_of(data, peer)
            carrier.receive(data, peer)
            carriers.add(carrier)
        for carrier in carriers:
            carrier.took()


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERS)
    sock.bind(("127.0.0.1", 0))
    return sock


def _configuration(*, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[PROTOCOL],
        verify_mode=ssl.CERT_NONE if is_client else None,
        max_data=16 * 1024 * 1024,
        max_stream_data=1024 * 1024,
        idle_timeout=30.0,
    )


def _make_certificate(folder: Path) -> None:
    """Signed by itself: encryption is what QUIC costs, whom to trust is no part of the measurement."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


if __name__ == "__main__":
    sys.exit(play(Aioquic()))
