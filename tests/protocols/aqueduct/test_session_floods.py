"""Peers that break the rules or flood a connection: one typed error each, and bounded memory."""

from __future__ import annotations

import logging
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from muxkit import Limits, LinkLost, RemoteProtocolError
from muxkit.core import encode_varint
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config
from muxkit.protocols.aqueduct.carrier import DATA, DATAGRAM, HELLO, LAST, RESET
from muxkit.protocols.aqueduct.frames import VERSION, AckReliable, MessageFrame, RouteTo, encode_frame
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.aqueduct._helpers import statistics_of
from tests.protocols.aqueduct._session_pairs import at_rest, payloads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from trio.testing import MockClock

MIB = 1024 * 1024
FEW = Limits(channels=10, backlog=8, resets_per_second=5, resets_burst=20, tombstones=8, message=100_000)
NARROW = Config(streams=10)
GREETING = VERSION + b"\x01\x02\x00"  # and ACK_VERSION, and CONNECTION_HEADERS without any
MOST = 1000  # turns of a flood, most of which are read and dropped while the server says why it ends


def chunk(tag: int, stream: int, data: bytes = b"") -> bytes:
    return bytes([tag]) + encode_varint(stream) + encode_varint(len(data)) + data


def message(channel: int, *attachments: int, payload: bytes = b"", number: int = 0) -> bytes:
    frame = MessageFrame(number, (), tuple((id, ()) for id in attachments), payload)
    return encode_frame(RouteTo(channel)) + encode_frame(frame)


def ours(index: int) -> int:
    """A client-made channel on which the client sends."""
    return index << 3


@attrs.frozen
class Attack:
    """What is sent after the handshake, turn by turn, and the error of the server."""

    turns: Callable[[], Iterator[bytes]]
    expected: str
    """The rule, the limit, or a part of the text."""


def each(make: Callable[[int], bytes]) -> Callable[[], Iterator[bytes]]:
    return lambda: map(make, range(1, MOST))


def stream_of(make: Callable[[int], bytes]) -> Callable[[], Iterator[bytes]]:
    """Send each in a stream of its own."""
    return each(lambda turn: chunk(LAST, turn, make(turn)))


ATTACKS = {
    "attachments in one message": Attack(stream_of(lambda _: message(0, *map(ours, range(1, 12)))), "channels"),
    "attachments that are not taken": Attack(
        each(lambda turn: chunk(DATA, 1, b"\x03\x00" if turn == 1 else message(0, ours(turn), number=turn - 2)[2:])),
        "backlog",
    ),
    "an attachment twice": Attack(stream_of(lambda _: message(0, 8, 8)), "aqueduct-T15"),
    "the entrypoint attached": Attack(stream_of(lambda _: message(0, 0)), "aqueduct-T15"),
    "channels by routing": Attack(stream_of(lambda turn: message(ours(turn))), "channels"),
    "channels by datagram": Attack(each(lambda turn: datagram(message(ours(turn)))), "channels"),
    "streams that stay open": Attack(each(lambda turn: chunk(DATA, turn, b"\x03\x00")), "Config(streams=…)"),
    "routes to channels of ours that never were": Attack(
        stream_of(lambda turn: encode_frame(RouteTo(turn << 3 | 1)) + b"\x04"), "resets_per_second"
    ),
    "streams for nothing": Attack(stream_of(lambda _: b""), "resets_per_second"),
    "an ack of 2^60 numbers": Attack(
        stream_of(lambda _: encode_frame(RouteTo(2)) + encode_frame(AckReliable([0, 2**60]))), "aqueduct-A04"
    ),
    "a message that was announced too large": Attack(
        stream_of(lambda _: b"\x03\x00\x04\x00\x00\x00" + encode_varint(2**40)), "message"
    ),
    "headers that were announced too large": Attack(
        stream_of(lambda _: b"\x03\x00\x04\x00" + encode_varint(2**40)), "Config(headers=…)"
    ),
    "a number that never ends": Attack(stream_of(lambda _: b"\x03" + b"\x80" * 20), "aqueduct-E"),
    "a frame that is none": Attack(stream_of(lambda _: b"\x03\x00\x0c"), "aqueduct-"),
    "headers a second time": Attack(stream_of(lambda _: b"\x02\x00"), "aqueduct-H06"),
    "a stream that ends inside a frame": Attack(stream_of(lambda _: b"\x03\x00\x04"), "aqueduct-F09"),
    "more than the credit": Attack(each(lambda _: chunk(DATA, 1, bytes(200_000))), "its credit"),
    "a frame that the carrier does not have": Attack(each(lambda _: b"\x0b"), "no frame of the carrier"),
}  # fmt: skip
BROKEN_OFF: dict[str, Callable[[int], bytes]] = {
    "opened and forgotten": lambda turn: chunk(LAST, turn, message(ours(turn)) + b"\x0b"),
    "opened and cancelled": lambda turn: chunk(LAST, turn, encode_frame(RouteTo(ours(turn))) + b"\x07"),
    "opened and reset": lambda turn: chunk(DATA, turn, b"\x03") + bytes([RESET]) + encode_varint(turn),
}


def datagram(data: bytes) -> bytes:
    return bytes([DATAGRAM]) + encode_varint(len(data)) + data


@asynccontextmanager
async def attacked(
    *, limits: Limits = FEW, config: Config = NARROW
) -> AsyncIterator[tuple[aqueduct.Server, memory.MemoryStream]]:
    """Run a server; give the bare link to it, from which everything is read and ignored."""
    here, there = memory.pair()

    async def listen() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await here.receive_some():
                pass

    with suppress(LinkLost):
        async with aqueduct.connection(there, role="server", limits=limits, config=config, linger=0.1) as server:
            async with background() as nursery:
                nursery.start_soon(listen)
                yield server, here
            connection_of(server).pump.lose("the test is over", by="local")


@pytest.mark.requirement("R-02", "R-10", "R-12", "R-21", "R-26")
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_peer_that_breaks_a_rule_or_a_limit_meets_one_typed_error(
    name: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    attack = ATTACKS[name]
    async with attacked():
        pass  # so that what is allocated once is not counted
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with caplog.at_level(logging.WARNING, "muxkit"):
            async with attacked() as (server, link):
                await link.send_all(HELLO + chunk(LAST, 0, GREETING))
                assert await server.peer_headers() == ()
                with suppress(trio.BrokenResourceError):
                    for turn in attack.turns():
                        await link.send_all(turn)
                await at_rest()
                with pytest.raises(LinkLost) as caught:
                    await payloads(server.entrypoint)  # what came before the violation can be read
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteProtocolError)
    assert caught.value.by == "peer"
    assert attack.expected == cause.limit or attack.expected in str(cause)
    assert len(caplog.records) == 1
    assert peak - before < 2 * MIB


@pytest.mark.requirement("R-10", "R-12")
@pytest.mark.parametrize("name", BROKEN_OFF)
async def test_channels_that_are_opened_and_broken_off_end_no_connection_and_leave_nothing(
    name: str, autojump_clock: MockClock
) -> None:
    async with attacked() as (server, link):
        await link.send_all(HELLO + chunk(LAST, 0, GREETING))
        await server.peer_headers()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for turn in range(1, 2000):
                await link.send_all(BROKEN_OFF[name](turn))
            await link.send_all(chunk(LAST, 2000, message(0, payload=b"sane")))
            assert (await server.entrypoint.receive()).payload == b"sane"
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        held = statistics_of(connection_of(server).engine)
        assert held.channels == 1
        assert held.ended_unattached <= FEW.tombstones
        assert peak - before < 2 * MIB


@pytest.mark.clause("aqueduct-V06")
@pytest.mark.parametrize("first", [chunk(LAST, 0, b"\x01"), datagram(b"\x03\x00")], ids=["stream", "datagram"])
async def test_a_peer_that_does_not_begin_with_its_version_is_refused(first: bytes, autojump_clock: MockClock) -> None:
    async with attacked() as (server, link):
        await link.send_all(HELLO + first)
        with pytest.raises(LinkLost, match="aqueduct-V06"):
            await server.peer_headers()


@pytest.mark.requirement("R-13")
async def test_what_comes_before_the_handshake_is_bounded(autojump_clock: MockClock) -> None:
    config = attrs.evolve(NARROW, early_bytes=50_000)
    async with attacked(config=config) as (server, link):
        await link.send_all(HELLO + chunk(LAST, 0, VERSION))
        early = datagram(VERSION + message(0, payload=bytes(900)))
        for _ in range(2000):
            await link.send_all(early)
        await at_rest()
        engine = connection_of(server).engine
        assert engine.reader.early_bytes <= 50_000
        assert statistics_of(engine).dropped_datagrams > 1900
        assert not engine.over


@pytest.mark.requirement("R-47")
@pytest.mark.parametrize("size", [1, 3, 100, 2500])
async def test_an_end_inside_a_message_is_a_loss_and_delivers_none_of_it(size: int, autojump_clock: MockClock) -> None:
    async with attacked() as (server, link):
        whole, broken = message(0, payload=b"whole"), message(0, payload=bytes(3000), number=1)[2:]
        await link.send_all(HELLO + chunk(LAST, 0, GREETING))
        await link.send_all(chunk(DATA, 1, whole) + chunk(DATA, 1, broken)[: size + 4])
        await at_rest()
        await link.send_eof()
        assert (await server.entrypoint.receive()).payload == b"whole"
        with pytest.raises(LinkLost, match="the peer hung up in mid-message"):
            await server.entrypoint.receive()


@pytest.mark.requirement("R-04", "R-05")
async def test_a_flood_of_empty_messages_from_a_peer_without_manners_is_bounded(autojump_clock: MockClock) -> None:
    limits = Limits(channel_bytes=64 * 1024, connection_bytes=MIB)
    async with attacked(limits=limits) as (server, link), background() as nursery:

        async def flood() -> None:
            await link.send_all(HELLO + chunk(LAST, 0, GREETING))
            for channel in range(20):
                frames = b"".join(
                    message(ours(channel), number=number)[-5 if number < 128 else -6 :] for number in range(600)
                )
                data = encode_frame(RouteTo(ours(channel))) + frames
                await link.send_all(
                    b"".join(chunk(DATA, channel + 1, data[at : at + 4000]) for at in range(0, len(data), 4000))
                )

        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            nursery.start_soon(flood)
            await at_rest(0.1)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        crowd = connection_of(server).engine.state.unread_limit
        assert server.entrypoint.unread == 64 * 1024 // 256
        assert crowd.unread <= MIB // 256 + 20
        assert held - before < 1.5 * 2 * MIB + 64 * 1024
        assert not connection_of(server).engine.over
