"""Peers that break the rules or flood a connection over real QUIC: a client of bare aioquic that sends any bytes."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from muxkit import LinkLost, RemoteProtocolError
from muxkit.core import Cursor, encode_varint
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config
from muxkit.protocols.aqueduct.carrier import DATA, DATAGRAM, LAST, RESET
from muxkit.protocols.aqueduct.frames import (
    VERSION,
    AckNackUnreliable,
    FinishSender,
    ForgetChannel,
    Frame,
    MessageFrame,
    RouteTo,
    SentUnreliable,
    encode_frame,
)
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import quic
from tests.adapters._quic import FILES
from tests.protocols.aqueduct._helpers import statistics_of
from tests.protocols.aqueduct._session_pairs import payloads
from tests.protocols.aqueduct.test_session_floods import (
    ATTACKS,
    BROKEN_OFF,
    FEW,
    GREETING,
    NARROW,
    Attack,
    chunk,
    datagram,
    message,
    ours,
    stream_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from muxkit.protocols.aqueduct import Server

MIB = 1024 * 1024
# A channel that only datagrams mention must not be dropped before the others come, however busy the machine is.
PATIENT = attrs.evolve(NARROW, receipt_deadline=60.0)
MOST = 150  # turns; the limits are far below that

OF_THE_CARRIER = ("more than the credit", "a frame that the carrier does not have")
FORGET = b"\x0b"
VAST = 2**60


def routed(channel: int, *frames: Frame) -> bytes:
    return encode_frame(RouteTo(channel)) + b"".join(map(encode_frame, frames))


MESSAGE_BEGUN = b"\x04\x01\x00\x00" + encode_varint(90_000)  # this is allowed; its payload is missing
COUNT = SentUnreliable(2**50)

MORE = {
    "forgets of channels of ours that never were": Attack(
        stream_of(lambda turn: routed(turn << 3 | 1, ForgetChannel())), "resets_per_second"
    ),
    "a report on 2^60 datagrams": Attack(
        stream_of(lambda _: routed(2, AckNackUnreliable([0, VAST], channel=2))), "aqueduct-A"
    ),
    "streams that end before a frame of a channel": Attack(stream_of(lambda _: routed(0)), "resets_per_second"),
    "messages beyond a total of 2^60": Attack(
        stream_of(lambda turn: routed(8, FinishSender(VAST)) if turn == 1 else routed(8, MessageFrame(VAST))),
        "aqueduct-",
    ),
}
HARMLESS: dict[str, Callable[[int], bytes]] = {
    "opened and forgotten": BROKEN_OFF["opened and forgotten"],
    "opened and cancelled": BROKEN_OFF["opened and cancelled"],
    "forgets of channels that never were": lambda turn: chunk(LAST, turn, routed(ours(turn), ForgetChannel())),
    "forgets of one channel": lambda turn: chunk(LAST, turn, routed(8, ForgetChannel())),
    "counts of 2^50": lambda turn: chunk(DATA, 1, routed(0)[: 2 if turn == 1 else 0] + encode_frame(COUNT)),
    "a message that never ends": lambda turn: chunk(DATA, 1, routed(0) + MESSAGE_BEGUN if turn == 1 else b"x"),
}


class Attacker:
    """A client of aioquic alone, on a socket, which translates frames of the carrier to QUIC."""

    def __init__(self, port: int) -> None:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=["muxkit-aqueduct"], max_datagram_frame_size=65_536
        )
        configuration.load_verify_locations(cafile=FILES.ca)
        configuration.server_name = "server.test"
        self._quic = QuicConnection(configuration=configuration)
        self._socket = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        self._port = port
        self._streams: dict[int, int] = {}  # by the stream numbers of the carrier, without gaps
        self._wake = trio.Event()
        self.ready, self.over = trio.Event(), trio.Event()

    async def run(self) -> None:
        with self._socket:
            await self._socket.bind(("127.0.0.1", 0))
            self._quic.connect(("127.0.0.1", self._port), now=trio.current_time())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                while not self.over.is_set():
                    await self._flush()
                    deadline = self._quic.get_timer()
                    with trio.CancelScope(deadline=math.inf if deadline is None else deadline) as scope:
                        await self._wake.wait()
                    self._wake = trio.Event()
                    if scope.cancelled_caught:
                        self._quic.handle_timer(now=trio.current_time())
                        self._hear()
                nursery.cancel_scope.cancel()

    async def _listen(self) -> None:
        while True:
            data, address = await self._socket.recvfrom(65_536)
            self._quic.receive_datagram(data, address, now=trio.current_time())
            self._hear()
            self._wake.set()

    def _hear(self) -> None:
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, events.HandshakeCompleted):
                self.ready.set()
            elif isinstance(event, events.ConnectionTerminated):
                self.over.set()

    async def _flush(self) -> None:
        for data, address in self._quic.datagrams_to_send(now=trio.current_time()):
            await self._socket.sendto(data, address)
        await trio.lowlevel.checkpoint()

    async def send(self, frames: bytes) -> None:
        cursor = Cursor(frames)
        while cursor.remaining:
            tag = cursor.byte()
            if tag == DATAGRAM:
                self._quic.send_datagram_frame(cursor.exact(cursor.varint()))
                continue
            stream = self._streams.setdefault(cursor.varint(), 4 * len(self._streams) + 2)
            if tag == RESET:
                self._quic.reset_stream(stream, 0)
            else:
                self._quic.send_stream_data(stream, cursor.exact(cursor.varint()), tag == LAST)
        await self._flush()
        self._wake.set()


@asynccontextmanager
async def attacked(*, config: Config = NARROW) -> AsyncIterator[tuple[Server, Attacker]]:
    """Run a server over QUIC and the client that attacks it, within a time limit."""
    servers: list[Server] = []
    arrived, is_over = trio.Event(), trio.Event()

    async def serve(link: quic.QuicLink) -> None:
        with suppress(LinkLost):
            async with aqueduct.connection(link, role="server", limits=FEW, config=config, linger=0.1) as server:
                servers.append(server)
                arrived.set()
                await is_over.wait()
                connection_of(server).pump.lose("the test is over", by="local")

    async def listen(*, task_status: trio.TaskStatus[list[str]]) -> None:
        await quic.serve(serve, certificate=FILES.certificate, key=FILES.key, limits=FEW, task_status=task_status)

    with trio.fail_after(60):
        async with background() as nursery:
            (address,) = await nursery.start(listen)
            attacker = Attacker(int(address.rpartition(":")[2]))
            nursery.start_soon(attacker.run)
            await attacker.ready.wait()
            await arrived.wait()
            yield servers[0], attacker
            is_over.set()


@contextmanager
def cheap() -> Iterator[None]:
    """The memory held meanwhile, by the client as well, is bounded."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 2 * MIB


@pytest.mark.requirement("R-02", "R-10", "R-12", "R-21", "R-26")
@pytest.mark.parametrize("name", [*(name for name in ATTACKS if name not in OF_THE_CARRIER), *MORE])
async def test_a_bad_peer_over_quic_meets_one_typed_error(name: str) -> None:
    attack = (ATTACKS | MORE)[name]
    async with attacked(config=PATIENT) as (server, attacker):
        await attacker.send(chunk(LAST, 0, GREETING))
        assert await server.peer_headers() == ()
        with cheap():
            for turn in islice(attack.turns(), MOST):
                await attacker.send(turn)
                if attacker.over.is_set():
                    break
            with pytest.raises(LinkLost) as caught:
                await payloads(server.entrypoint)  # what came before the violation can be read
        assert caught.value.by == "peer"
        error = caught.value.__cause__
        assert isinstance(error, RemoteProtocolError)
        assert attack.expected == error.limit or attack.expected in str(error)
        await attacker.over.wait()  # the client learns it, too


@pytest.mark.requirement("R-10", "R-12")
@pytest.mark.parametrize("name", HARMLESS)
async def test_what_breaks_no_rule_costs_next_to_nothing_however_much_of_it_comes(name: str) -> None:
    async with attacked() as (server, attacker):
        await attacker.send(chunk(LAST, 0, GREETING))
        await server.peer_headers()
        engine = connection_of(server).engine
        with cheap():
            for turn in range(1, MOST):
                await attacker.send(HARMLESS[name](turn))
            await attacker.send(chunk(LAST, MOST, message(0, payload=b"sane")))
            assert (await server.entrypoint.receive()).payload == b"sane"
            held = statistics_of(engine)
        assert (held.channels, held.outbox) == (1, 0)
        assert held.ended_unattached <= FEW.tombstones


@pytest.mark.clause("aqueduct-V06")
@pytest.mark.parametrize("first", [chunk(LAST, 0, b"\x01"), datagram(b"\x03\x00")], ids=["stream", "datagram"])
async def test_a_peer_that_does_not_begin_with_its_version_over_quic_is_refused(first: bytes) -> None:
    async with attacked() as (server, attacker):
        await attacker.send(first)
        with pytest.raises(LinkLost, match="aqueduct-V06"):
            await server.peer_headers()


@pytest.mark.requirement("R-13")
async def test_datagrams_before_the_headers_are_bounded_over_quic() -> None:
    async with attacked(config=attrs.evolve(NARROW, early_bytes=50_000)) as (server, attacker):
        engine = connection_of(server).engine
        await attacker.send(chunk(LAST, 0, VERSION))
        early = datagram(VERSION + message(0, payload=bytes(900)))
        while statistics_of(engine).dropped_datagrams < 200:
            await attacker.send(early)
            assert engine.reader.early_bytes <= 50_000
        assert not engine.over
