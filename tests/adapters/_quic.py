"""What the tests of QUIC share: certificates in files, two ends over real sockets, two ends on a virtual line."""

from __future__ import annotations

import atexit
import os
import shutil
import ssl
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
import trustme

from muxkit import Limits
from muxkit.runtime import Datagram, MultistreamLink, StreamData, StreamReset, StreamStopped
from muxkit_adapters import quic
from muxkit_adapters.quic.connection import LimitedConnection
from muxkit_adapters.quic.link import QuicLink
from muxkit_adapters.quic.options import QuicOptions, identify, trust

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Sequence

    from aioquic.quic.configuration import QuicConfiguration


CLIENT = ("192.0.2.1", 1000)
SERVER = ("192.0.2.2", 443)
DELAY = 0.01  # s, from one end to the other


class Files:
    """An authority and certificates of it, as files."""

    def __init__(self, *names: str, **options: Any) -> None:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        authority = trustme.CA()
        self.ca = os.fspath(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        issued = authority.issue_cert(*(names or ("127.0.0.1", "::1", "localhost", "server.test")), **options)
        self.certificate = os.fspath(folder / "chain.pem")
        self.key = os.fspath(folder / "key.pem")
        self.both = os.fspath(folder / "both.pem")
        issued.private_key_pem.write_to_path(self.key)
        for pem in issued.cert_chain_pems:
            pem.write_to_path(self.certificate, append=True)
        issued.private_key_and_cert_chain_pem.write_to_path(self.both)


FILES = Files()


async def keep_open(link: QuicLink) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def serving(
    handler: Callable[[QuicLink], Any] = keep_open, *, files: Files = FILES, **options: Any
) -> AsyncIterator[tuple[str, int]]:
    """A server on a real socket for the length of the block; gives where it is."""
    async with trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await quic.serve(handler, certificate=files.certificate, key=files.key, task_status=task_status, **options)

        (address,) = await nursery.start(serve)
        host, _, port = address.rpartition(":")
        yield host.strip("[]"), int(port)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def real_pair(
    *, server: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[QuicLink, QuicLink]]:
    """The two ends of a connection over real sockets: the client's, then the server's."""
    accepted: list[QuicLink] = []
    arrived, is_over = trio.Event(), trio.Event()

    async def keep(link: QuicLink) -> None:
        accepted.append(link)
        arrived.set()
        await is_over.wait()

    async with serving(keep, **(server or {})) as (host, port):
        async with quic.connect(host, port, ca=FILES.ca, **options) as link:
            await arrived.wait()
            try:
                yield link, accepted[0]
            finally:
                is_over.set()


class Line:
    """A network of two, on the virtual clock; what `fate` gives for a packet are the delays of its copies."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.ends: dict[tuple[str, int], QuicLink] = {}
        self.fate: Callable[[bytes], list[float]] = lambda data: [DELAY]
        self.has_first = trio.Event()
        self.sizes = {CLIENT: 0, SERVER: 0}
        self._arriving: dict[float, list[tuple[tuple[str, int], bytes, tuple[str, int]]]] = {}
        self._seen_as: dict[tuple[str, int], tuple[str, int]] = {}

    def move(self, end: tuple[str, int], now: tuple[str, int]) -> None:
        """From now on the others see that end at another address; it does not notice."""
        self.ends[now] = self.ends[end]
        self._seen_as[end] = now

    def carry(self, source: tuple[str, int], data: bytes, target: tuple[str, int]) -> None:
        self.sizes[source] += len(data)
        for delay in self.fate(data):
            arrives = trio.current_time() + delay
            if arrives not in self._arriving:
                self._arriving[arrives] = []
                self._nursery.start_soon(self._deliver, arrives)
            self._arriving[arrives].append((source, data, target))

    async def _deliver(self, arrives: float) -> None:
        """Deliver the packets that arrive at the same time, in the order in which they were sent."""
        await trio.sleep_until(arrives)
        for source, data, target in self._arriving.pop(arrives):
            end = self.ends[target]
            end.feed((data, self._seen_as.get(source, source)))
            end.finish_feeding()
            if target == SERVER:
                self.has_first.set()


class LineSocket:
    """What a link sees of the line: a socket that always takes everything."""

    def __init__(self, line: Line, address: tuple[str, int]) -> None:
        self._line = line
        self._address = address

    def send(self, packets: Sequence[bytes], address: tuple[str, int]) -> int:
        for packet in packets:
            self._line.carry(self._address, packet, address)
        return len(packets)

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None: ...


def configured(options: QuicOptions, *, is_client: bool) -> QuicConfiguration:
    configuration = options.configuration(is_client=is_client)
    if is_client:
        trust(configuration, ca=FILES.ca, name="server.test", insecure=False)
        assert configuration.verify_mode == ssl.CERT_REQUIRED
    else:
        identify(configuration, certificate=FILES.certificate, key=FILES.key, password=None)
    return configuration


class Pair:
    """Both ends on a line, and what is below them."""

    def __init__(self, nursery: trio.Nursery, client: QuicOptions, server: QuicOptions) -> None:
        self.line = Line(nursery)
        self.client_quic = LimitedConnection(
            configured(client, is_client=True), streams=client.most_streams, window_most=client.limits.channel_bytes
        )
        self.server_quic = LimitedConnection(
            configured(server, is_client=False),
            streams=server.most_streams,
            window_most=server.limits.channel_bytes,
            original_destination_connection_id=self.client_quic.original_destination_connection_id,
        )
        self.client = self._link(self.client_quic, CLIENT, client)
        self.server = self._link(self.server_quic, SERVER, server)

    def _link(self, connection: LimitedConnection, address: tuple[str, int], options: QuicOptions) -> QuicLink:
        wire: Any = LineSocket(self.line, address)  # it has what a link uses of a socket
        link = QuicLink(
            connection,
            wire,
            role="client" if address == CLIENT else "server",
            name=f"quic {(SERVER if address == CLIENT else CLIENT)[0]}",
            options=options,
        )
        self.line.ends[address] = link
        return link


@asynccontextmanager
async def on_a_line(
    client: QuicOptions | None = None, server: QuicOptions | None = None, *, established: bool = True
) -> AsyncIterator[Pair]:
    """Two ends of a connection in virtual time; needs `autojump_clock`."""
    async with trio.open_nursery() as nursery:
        pair = Pair(nursery, client or QuicOptions(), server or QuicOptions())
        pair.client_quic.connect(SERVER, now=trio.current_time())
        nursery.start_soon(_run_server, pair)
        nursery.start_soon(pair.client.run)
        if established:
            await pair.client.established.wait()
            await pair.server.established.wait()
        yield pair
        nursery.cancel_scope.cancel()


async def _run_server(pair: Pair) -> None:
    """It has no timer, and no peer to send to, before the first packet."""
    await pair.line.has_first.wait()
    await pair.server.run()


class Collected:
    """What came over a link, put together by stream."""

    def __init__(self, link: MultistreamLink, *, consume: bool = True) -> None:
        self._link = link
        self._consume = consume
        self.streams: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.stopped: set[int] = set()
        self.datagrams: list[bytes] = []
        self.is_over = False

    async def once(self) -> None:
        arrivals = await self._link.receive()
        self.is_over = not arrivals
        for arrival in arrivals:
            match arrival:
                case StreamData(stream, data, is_last):
                    self.streams.setdefault(stream, bytearray()).extend(data)
                    if is_last:
                        self.ended.add(stream)
                    if self._consume:
                        self._link.consumed(stream, len(data))
                case StreamReset(stream):
                    self.reset.add(stream)
                case StreamStopped(stream):
                    self.stopped.add(stream)
                case Datagram(data):
                    self.datagrams.append(data)

    async def until(self, test: Callable[[], object]) -> Collected:
        while not test():
            await self.once()
        return self


async def write_all(link: MultistreamLink, stream: int, data: bytes) -> None:
    """Write the whole of a stream, as the credit for it comes; no other task may wait for room."""
    view, is_last = memoryview(data), False
    while not is_last:
        room = link.room(stream)
        if not room and view:
            await link.wait_writable()
            continue
        part, view = view[:room], view[room:]
        is_last = not view
        link.write(stream, bytes(part), is_last)
    await trio.lowlevel.checkpoint()


def some_bytes(dice: random.Random, most: int) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 100, dice.randrange(most), most)))


SMALL = Limits(
    channel_first=16 * 1024, channel_bytes=16 * 1024, channel_floor=4096, connection_bytes=40 * 1024, outbox=64 * 1024
)
