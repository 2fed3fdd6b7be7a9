"""The adapter speaks QUIC with another implementation, qh3, in both roles."""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # it is documented there
from aioquic.quic.packet import encode_quic_retry, pull_quic_header
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection

from muxkit import Limits
from muxkit_adapters import quic
from muxkit_adapters.quic import ConnectionEnded, QuicLink

from ._quic import FILES, Collected, serving, write_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    _Pair = AbstractAsyncContextManager[tuple[QuicLink, "Other"]]

ALPN = "muxkit-aqueduct"
MOST = 64 * 1024


class Other:
    """A connection of qh3 on a UDP socket, and what came over it."""

    def __init__(self, *, is_client: bool) -> None:
        self._configuration = QuicConfiguration(
            is_client=is_client, alpn_protocols=[ALPN], max_datagram_frame_size=MOST, probe_datagram_size=False
        )
        if is_client:
            self._configuration.load_verify_locations(cafile=FILES.ca)
            self._configuration.server_name = "server.test"
        else:
            self._configuration.load_cert_chain(FILES.certificate, FILES.key)
        self._socket = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        self._wake = trio.Event()
        self._news = trio.Event()
        self._first_id = b""
        self.connection: QuicConnection | None = None
        self.is_ready = False
        self.streams: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        self.stopped: dict[int, int] = {}
        self.datagrams: list[bytes] = []
        self.end: events.ConnectionTerminated | None = None

    async def bind(self) -> int:
        await self._socket.bind(("127.0.0.1", 0))
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def quic(self) -> QuicConnection:
        assert self.connection is not None
        return self.connection

    async def connect(self, port: int, nursery: trio.Nursery) -> None:
        await self.bind()
        self.connection = QuicConnection(configuration=self._configuration)
        self.connection.connect(("127.0.0.1", port), now=trio.current_time())
        nursery.start_soon(self.run)
        await self.until(lambda: self.is_ready)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                while True:
                    await self._flush()
                    deadline = self.connection.get_timer() if self.connection is not None else None
                    with trio.CancelScope(deadline=math.inf if deadline is None else deadline) as scope:
                        await self._wake.wait()
                    self._wake = trio.Event()
                    if scope.cancelled_caught:
                        self.quic.handle_timer(now=trio.current_time())
                        self._collect()
        finally:
            self._socket.close()

    async def _read(self) -> None:
        while True:
            data, address = await self._socket.recvfrom(65_536)
            if self.connection is None and not await self._accept(data, address):
                continue
            assert self.connection is not None
            self.connection.receive_datagram(data, address, now=trio.current_time())
            self._collect()
            self._wake.set()

    async def _accept(self, data: bytes, address: tuple[str, int]) -> bool:
        """A server of qh3 2.1 cannot answer a first flight of one packet unless its address was shown to be right."""
        header = pull_quic_header(Buffer(data=data), host_cid_length=8)
        if not header.token:
            self._first_id = header.destination_cid
            assert header.version is not None
            retry = encode_quic_retry(
                version=header.version,
                source_cid=b"retry-id",
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=b"you are there",
            )
            await self._socket.sendto(retry, address)
            return False
        assert header.token == b"you are there"
        self.connection = QuicConnection(
            configuration=self._configuration,
            original_destination_connection_id=self._first_id,
            retry_source_connection_id=header.destination_cid,
        )
        return True

    async def _flush(self) -> None:
        if self.connection is not None:
            for data, address in self.connection.datagrams_to_send(now=trio.current_time()):
                await self._socket.sendto(data, address)

    def flush(self) -> None:
        self._wake.set()

    def _collect(self) -> None:
        while (event := self.quic.next_event()) is not None:
            match event:
                case events.HandshakeCompleted():
                    self.is_ready = True
                case events.StreamDataReceived(data=data, end_stream=is_last, stream_id=stream):
                    self.streams.setdefault(stream, bytearray()).extend(data)
                    if is_last:
                        self.ended.add(stream)
                case events.StreamReset(error_code=code, stream_id=stream):
                    self.reset[stream] = code
                case events.StopSendingReceived(error_code=code, stream_id=stream):
                    self.stopped[stream] = code
                case events.DatagramFrameReceived(data=data):
                    self.datagrams.append(data)
                case events.ConnectionTerminated():
                    self.end = event
        self._news.set()

    async def until(self, test: Callable[[], object]) -> None:
        while not test():
            self._news = trio.Event()
            await self._news.wait()


@asynccontextmanager
async def our_client() -> AsyncIterator[tuple[QuicLink, Other]]:
    async with trio.open_nursery() as nursery:
        other = Other(is_client=False)
        port = await other.bind()
        nursery.start_soon(other.run)
        async with quic.connect("127.0.0.1", port, ca=FILES.ca) as link:
            yield link, other
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def our_server() -> AsyncIterator[tuple[QuicLink, Other]]:
    links: list[QuicLink] = []
    arrived, is_over = trio.Event(), trio.Event()

    async def keep(link: QuicLink) -> None:
        links.append(link)
        arrived.set()
        await is_over.wait()

    async with serving(keep) as (_, port), trio.open_nursery() as nursery:
        other = Other(is_client=True)
        await other.connect(port, nursery)
        await arrived.wait()
        yield links[0], other
        is_over.set()
        nursery.cancel_scope.cancel()


both_roles = pytest.mark.parametrize("pair", [our_client, our_server])


@both_roles
async def test_a_handshake_agrees_on_the_protocol(pair: Callable[[], _Pair]) -> None:
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        assert link.alpn == ALPN


@both_roles
async def test_streams_both_ways(pair: Callable[[], _Pair]) -> None:
    dice = random.Random(1)
    contents = [dice.randbytes(size) for size in (0, 1, 5000, 300_000, 70_000)]
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        for content in contents:
            stream = other.quic.get_next_available_stream_id(is_unidirectional=True)
            other.quic.send_stream_data(stream, content, end_stream=True)
        other.flush()
        for content in contents:
            await write_all(link, link.open(), content)
        got = Collected(link)
        await got.until(lambda: len(got.ended) == len(contents))
        await other.until(lambda: len(other.ended) == len(contents))
        theirs = 3 if link.role == "client" else 2
        ours = 5 - theirs
        assert [got.streams.get(theirs + 4 * number, b"") for number in range(5)] == contents
        assert [other.streams.get(ours + 4 * number, b"") for number in range(5)] == contents


@both_roles
async def test_datagrams_both_ways(pair: Callable[[], _Pair]) -> None:
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        assert link.send_datagram(b"from us" * 100)
        other.quic.send_datagram_frame(b"from them")
        other.flush()
        got = Collected(link)
        await got.until(lambda: got.datagrams)
        await other.until(lambda: other.datagrams)
        assert (got.datagrams, other.datagrams) == ([b"from them"], [b"from us" * 100])


@both_roles
async def test_resets_and_stops_both_ways(pair: Callable[[], _Pair]) -> None:
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        # we give up
        given_up = link.open()
        link.write(given_up, b"begun", False)
        await other.until(lambda: given_up in other.streams)
        link.reset(given_up)
        await other.until(lambda: given_up in other.reset)
        # they give up
        theirs = other.quic.get_next_available_stream_id(is_unidirectional=True)
        other.quic.send_stream_data(theirs, b"begun")
        other.flush()
        got = Collected(link)
        await got.until(lambda: theirs in got.streams)
        other.quic.reset_stream(theirs, 5)
        other.flush()
        await got.until(lambda: got.reset)
        # they want no more
        unwanted = link.open()
        link.write(unwanted, b"begun", False)
        await other.until(lambda: unwanted in other.streams)
        other.quic.stop_stream(unwanted, 6)
        other.flush()
        await got.until(lambda: got.stopped)
        assert got.stopped == {unwanted}
        # we want no more
        theirs = other.quic.get_next_available_stream_id(is_unidirectional=True)
        other.quic.send_stream_data(theirs, b"begun")
        other.flush()
        await got.until(lambda: theirs in got.streams)
        link.stop(theirs)
        await other.until(lambda: theirs in other.stopped)


@both_roles
async def test_goodbyes_both_ways(pair: Callable[[], _Pair]) -> None:
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        link.close(error="enough", code=77)
        await other.until(lambda: other.end)
        assert other.end is not None
        assert (other.end.error_code, other.end.reason_phrase) == (77, "enough")
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        other.quic.close(error_code=78, reason_phrase="enough of you")
        other.flush()
        with pytest.raises(ConnectionEnded, match="code 78: enough of you"):
            await Collected(link).until(lambda: False)


@pytest.mark.requirement("R-09")
@both_roles
async def test_a_stalled_reader_of_ours_holds_them_at_its_credit(pair: Callable[[], _Pair]) -> None:
    async with pair() as (link, other):
        await other.until(lambda: other.is_ready)
        stream = other.quic.get_next_available_stream_id(is_unidirectional=True)
        other.quic.send_stream_data(stream, bytes(1_000_000), end_stream=True)
        other.flush()
        got = Collected(link, consume=False)
        first = Limits().channel_first
        await got.until(lambda: len(got.streams.get(stream, b"")) >= first)
        with trio.move_on_after(0.3):
            await got.once()
        assert len(got.streams[stream]) == first
        link.consumed(stream, first)
        rest = Collected(link)
        await rest.until(lambda: rest.ended)
        assert len(rest.streams[stream]) == 1_000_000 - first
