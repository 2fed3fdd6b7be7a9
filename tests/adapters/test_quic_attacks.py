"""A peer that lies, floods or breaks the rules is cut off, with one typed error and bounded cost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
from aioquic.buffer import Buffer, encode_uint_var  # type: ignore[attr-defined]  # it is documented there
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch

from muxkit import Limits
from muxkit.runtime import StreamData
from muxkit_adapters.quic import ConnectionEnded
from muxkit_adapters.quic.connection import SKIP_EVERY
from muxkit_adapters.quic.options import QuicOptions

from ._quic import CLIENT, SERVER, Collected, Pair, on_a_line

if TYPE_CHECKING:
    from trio.testing import MockClock


def number(value: int) -> bytes:
    encoded: bytes = encode_uint_var(value)
    return encoded


def inject(pair: Pair, frames: bytes) -> None:
    """Let the client send a packet with these frames, whatever they are."""
    connection = pair.client_quic
    builder = QuicPacketBuilder(
        host_cid=connection.host_cid,
        is_client=True,
        max_datagram_size=1400,
        packet_number=connection._packet_number,
        peer_cid=connection._peer_cid.cid,
        version=connection._version or 1,
    )
    builder.start_packet(QuicPacketType.ONE_RTT, connection._cryptos[Epoch.ONE_RTT])
    at = Buffer(data=frames)
    builder.start_frame(at.pull_uint_var()).push_bytes(frames[at.tell() :])
    for data in builder.flush()[0]:
        pair.server.feed((data, CLIENT))
    connection._packet_number = builder.packet_number
    pair.server.finish_feeding()


async def how_it_ends(pair: Pair) -> ConnectionEnded:
    """What both sides hear; the server blames the peer."""
    with pytest.raises(ConnectionEnded) as caught:
        await Collected(pair.server).until(lambda: False)
    assert caught.value.by == "peer"
    with pytest.raises(ConnectionEnded) as told:
        await Collected(pair.client).until(lambda: False)
    assert told.value.code == caught.value.code
    return caught.value


STREAM, RESET_STREAM, STOP_SENDING, CRYPTO = b"\x0e", b"\x04", b"\x05", b"\x06"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\x02" + number(1 << 40) + bytes(3), "acknowledged that was not sent"),
        (b"\x02" + number(2) + number(0) + number(0) + number(9), "negative packet number"),
        (b"\x02" + number(2) + number(0) + number(1 << 40), "frame encoding error"),
        (CRYPTO + number(1 << 20) + b"\x01x", "bytes of handshake against"),
        (STREAM + number(2 + 4 * (1 << 58)) + b"\x00\x01x", "Too many streams"),
        (STREAM + number(2 + 4 * 256) + b"\x00\x01x", "Too many streams"),
        (STREAM + number(0) + b"\x00\x01x", "Too many streams"),
        (STREAM + number(3) + b"\x00\x01x", "Stream is send-only"),
        (STREAM + number(2) + number((1 << 62) - 1) + b"\x01x", "offset"),
        (STREAM + number(2) + number(Limits().channel_first) + b"\x01x", "flow control error"),
        (RESET_STREAM + number(2) + number(0) + number(Limits().channel_first + 1), "flow control error"),
        (STOP_SENDING + number(3) + number(0), "Wrong stream initiator"),
        (b"\x11" + number(7) + number(100), "Wrong stream initiator"),
        (b"\x13" + number((1 << 60) + 1), "Maximum Streams"),
        (b"\x1e", "HANDSHAKE_DONE"),
        (b"\x19" + number(1 << 30), "unknown connection ID"),
        (b"\x21", "Unknown frame type"),
        (b"\x0f\x02", "Failed to parse frame"),
        (b"\x31" + number(65_535), "Failed to parse frame"),
    ],
)
@pytest.mark.requirement("R-16", "R-17", "R-19")
async def test_a_frame_that_breaks_a_rule_ends_the_connection(
    frame: bytes, reason: str, autojump_clock: MockClock
) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        inject(pair, frame)
        ended = await how_it_ends(pair)
        assert reason in str(ended)
        assert not ended.is_application


@pytest.mark.requirement("R-21")
@pytest.mark.seeds(20, soak=5000)
async def test_any_bytes_in_a_packet_end_the_connection_or_do_not(seed: int, autojump_clock: MockClock) -> None:
    dice = random.Random(seed)
    async with on_a_line() as pair:
        await trio.sleep(1)
        for _ in range(40):
            kind = dice.choice((dice.randrange(0x40), dice.randrange(2, 0x20)))
            inject(pair, bytes([kind]) + dice.randbytes(dice.randrange(60)))
            if pair.server.is_over:
                break
        await trio.sleep(5)


@pytest.mark.requirement("R-19")
async def test_who_confirms_a_packet_that_was_left_out_is_lying(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        cheat = pair.client_quic._spaces[Epoch.ONE_RTT]
        stream = pair.server.open()
        for _ in range(3 * SKIP_EVERY):
            pair.server.write(stream, b"x", False)
            # Acknowledges everything up to what it has seen, and so what was never sent.
            if cheat.largest_received_packet > 2:
                cheat.ack_queue.add(2, cheat.largest_received_packet)
            await trio.sleep(0.05)
            if pair.server.is_over:
                break
        assert "not sent" in str(await how_it_ends(pair))


async def test_an_honest_peer_never_confirms_what_was_left_out(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.client.open()
        for _ in range(2 * SKIP_EVERY):
            pair.client.write(stream, b"x", False)
            await trio.sleep(0.05)
        pair.client.write(stream, b"", True)
        got = Collected(pair.server)
        await got.until(lambda: got.ended)


@pytest.mark.requirement("R-04")
async def test_a_stream_in_tiny_pieces_with_gaps_is_cut_off(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        for packet in range(40):
            pieces = range(100 * packet, 100 * packet + 100)
            inject(pair, b"".join(STREAM + number(2) + number(1 + 2 * at) + b"\x01x" for at in pieces))
            if pair.server.is_over:
                break
        assert "1025 gaps in a stream against 1024" in str(await how_it_ends(pair))


@pytest.mark.requirement("R-04")
async def test_tiny_pieces_in_order_are_put_together(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        for packet in range(50):
            pieces = range(100 * packet, 100 * packet + 100)
            inject(pair, b"".join(STREAM + number(2) + number(at) + b"\x01x" for at in pieces))
        arrivals = await pair.server.receive()
        assert arrivals == [StreamData(2, b"x" * 5000, False)]


@pytest.mark.requirement("R-13")
async def test_a_handshake_that_does_not_end_is_cut_off(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        ticket = b"\x04" + (0xFFFFFF).to_bytes(3, "big")  # a message of 16 MiB begins
        for packet in range(200):
            data = (ticket if not packet else b"").ljust(1000, b"\0")
            inject(pair, CRYPTO + number(1000 * packet) + number(1000) + data)
            if pair.server.is_over:
                break
        assert "132000 bytes of handshake against 131072" in str(await how_it_ends(pair))


@pytest.mark.requirement("R-10")
async def test_opening_streams_to_give_them_up_is_slowed_down(autojump_clock: MockClock) -> None:
    """Was: "more than 50 streams were given up at once", and the end of every channel on the connection."""
    limits = Limits(channels=50, resets_burst=50, resets_per_second=10)
    async with on_a_line(server=QuicOptions(limits=limits)) as pair, trio.open_nursery() as nursery:
        got = Collected(pair.server)
        nursery.start_soon(got.until, lambda: False)
        nursery.start_soon(Collected(pair.client).until, lambda: False)
        resets = 0
        began = trio.current_time()
        while trio.current_time() < began + 20:
            if pair.client.may_open():
                pair.client.reset(pair.client.open())
                resets += 1
            await trio.sleep(0.001)
        at_once = pair.server._quic._peer_streams.most
        assert 50 + 10 * 19 < resets <= 50 + at_once + 10 * 20 + 1
        assert not pair.client.is_over
        assert not pair.server.is_over
        await trio.sleep(30)
        for _ in range(50):  # what the allowance gave back meanwhile
            assert pair.client.may_open()
            pair.client.reset(pair.client.open())
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-10")
async def test_giving_up_streams_at_the_allowed_pace_is_allowed(autojump_clock: MockClock) -> None:
    limits = Limits(channels=50, resets_burst=50, resets_per_second=10)
    async with on_a_line(server=QuicOptions(limits=limits)) as pair:
        got = Collected(pair.server)
        for count in range(200):
            pair.client.reset(pair.client.open())
            await got.until(lambda count=count: len(got.reset) == count + 1)  # type: ignore[misc]
            await trio.sleep(0.1)


@pytest.mark.requirement("R-11")
async def test_giving_up_what_we_asked_for_does_not_count(autojump_clock: MockClock) -> None:
    limits = Limits(channels=2, resets_burst=2, resets_per_second=1)
    async with on_a_line(server=QuicOptions(limits=limits)) as pair:
        got = Collected(pair.server)
        for count in range(20):
            stream = pair.client.open()
            pair.client.write(stream, b"x", False)
            await got.until(lambda stream=stream: stream in got.streams)  # type: ignore[misc]
            pair.server.stop(stream)
            await got.until(lambda count=count: len(got.reset) == count + 1)  # type: ignore[misc]


@pytest.mark.requirement("R-06", "R-12")
async def test_a_storm_of_pings_is_answered_with_little(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        before = pair.line.sizes[SERVER]
        for _ in range(300):
            inject(pair, b"\x01" * 1000)
        await trio.sleep(1)
        assert pair.line.sizes[SERVER] - before < 10_000
        assert not pair.server.is_over


@pytest.mark.requirement("R-06")
async def test_stopping_a_stream_again_and_again_is_told_once(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        stream = pair.server.open()
        pair.server.write(stream, b"x", False)
        await trio.sleep(1)
        for _ in range(100):
            inject(pair, (STOP_SENDING + number(stream) + number(0)) * 50)
        got = Collected(pair.server)
        await got.once()
        assert got.stopped == {stream}


@pytest.mark.requirement("R-18")
async def test_opening_the_last_stream_that_is_allowed_builds_no_more_than_a_few(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        await trio.sleep(1)
        inject(pair, STREAM + number(2 + 4 * 255) + b"\x00\x01x")
        got = Collected(pair.server)
        await got.once()
        assert got.streams == {2 + 4 * 255: b"x"}
        assert len(pair.server_quic._streams) == 256


@pytest.mark.requirement("R-18")
async def test_streams_that_are_idle_cost_a_packet_nothing(autojump_clock: MockClock) -> None:
    async with on_a_line() as pair:
        got = Collected(pair.server)
        streams = []
        for _ in range(2000):
            while not pair.client.may_open():
                await pair.client.wait_writable()
            streams.append(pair.client.open())
            pair.client.write(streams[-1], b"x", False)
            if len(streams) % 200 == 0:
                await got.until(lambda: len(got.streams) == len(streams))
        await trio.sleep(5)
        assert len(pair.client_quic._streams) == 2000
        assert not pair.client_quic._streams.values()
        assert len(pair.client_quic._streams_queue) <= 64
        assert len(pair.server_quic._streams_queue) <= 64
