"""Decoding of e3x, over datagrams and byte streams, and of Aqueduct: as the observers were told, and behind gaps."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio

import muxkit
from muxkit.pipeline import Capture, decode_batches, decoder
from muxkit.pipeline.capture.decoding import read_raw, restore
from muxkit.pipeline.capture.files import Found
from muxkit.protocols.aqueduct.carrier import HELLO
from muxkit.protocols.e3x.chunked import encode_chunks
from muxkit.protocols.e3x.packets import Packet, encode_packet
from tests.pipeline._captures import rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit._observer import Direction

UNTOLD = {
    "STREAMS",
    "EARLY",
    "RESET",
    "STOP",
    "VERSION",
    "ACK_VERSION",
    "CONNECTION_HEADERS",
}  # of Aqueduct's connections
SIZES = (0, 3, 300, 9000, 60_000)


async def record(folder: Path, url: str) -> None:
    """Some channels that echo and one that is aborted, with frames and raw bytes of both ends."""

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async def talk(session: muxkit.Session, number: int) -> None:
        dice = random.Random(number)
        async with session.open(f"talk {number}") as channel:
            for _ in range(8):
                told = dice.randbytes(dice.choice(SIZES))
                await channel.send(told)
                assert await channel.receive() == told

    with Capture(folder, raw=True, name="test") as capture:
        async with muxkit.open_server(echo, url, observer=capture) as server:
            async with muxkit.connect(server.url, observer=capture) as session, trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(talk, session, number)
                aborted = await session.open("aborted")
                await aborted.send(b"x" * 100)
                await aborted.receive()
                aborted.abort("enough", code=7)


@pytest.mark.parametrize(
    "url", ["e3x+tcp://127.0.0.1:0", "e3x+udp://127.0.0.1:0", "aqueduct+tcp://127.0.0.1:0", "yamux+tcp://127.0.0.1:0"]
)
async def test_decoded_bytes_say_what_the_observers_were_told_live(tmp_path: Path, url: str) -> None:
    await record(tmp_path, url)
    live = rows_of(tmp_path)
    batches = decode_batches(read_raw(tmp_path), url.partition("+")[0])
    told = [row for batch in batches for row in batch.to_pylist()]
    assert [row for row in told if row["event"] in ("error", "gap", "unverified")] == []
    connections = {row["connection"] for row in live}
    assert len(connections) == 2
    for connection in connections:
        for direction in ("in", "out"):
            here, there = (
                Counter(
                    (row["channel"], row["kind"].removesuffix(" again"), row["size"])  # which no byte says
                    for row in rows
                    if (row["event"], row["connection"], row["direction"]) == ("frame", connection, direction)
                )
                for rows in (live, told)
            )
            assert here - there == Counter()
            assert {kind for _, kind, _ in there - here} <= UNTOLD
            assert here.total() > 40


# ---------------------------------------------------------------------------- e3x


def packets(count: int) -> list[bytes]:
    dice = random.Random(count)
    return [encode_packet(Packet(channel=3, seq=seq, body=dice.randbytes(40))) for seq in range(1, count + 1)]


def numbers(found: list[Found]) -> list[object]:
    """What was found, in order: the number of each packet, and the names of other rows."""
    return [row[6] if row[0] == "frame" else row[0] for row in found]


def test_a_datagram_that_was_not_recorded_is_a_gap_and_no_more() -> None:
    one, offset, found = decoder("e3x"), 0, list[Found]()
    for number, packet in enumerate(packets(6), 1):
        if number not in (3, 4):
            found += one.feed("in", packet, offset=offset)
        offset += len(packet)
    assert numbers(found) == [1, 2, "gap", 5, 6]


def test_behind_a_gap_in_a_byte_stream_the_next_whole_packet_is_found_again() -> None:
    data = b"".join(encode_chunks(packet) for packet in packets(40))
    one = decoder("e3x")
    found = one.feed("in", data[:500], offset=0)
    for start in range(1010, len(data), 7):
        found += one.feed("in", data[start : start + 7], offset=start)
    told = numbers(found)
    gap = told.index("gap")
    assert told[gap + 1] == "found"
    assert told[:gap] == [*range(1, gap + 1)]
    assert told[gap + 2 :] == [*range(41 - len(told[gap + 2 :]), 41)]
    assert len(told[gap + 2 :]) > 20


def test_a_packet_that_is_broken_is_told_and_those_behind_it_are_read() -> None:
    good = packets(2)
    broken = b"\x00\x05{oops" + b"x" * 80
    for frame in (bytes, encode_chunks):
        one, found = decoder("e3x"), list[Found]()
        for packet in (good[0], broken, good[1]):
            found += one.feed("in", bytes(frame(packet)))
        assert numbers(found) == [1, "error", 2]
        assert found[1][6] == len(bytes(frame(good[0])))


def test_what_comes_before_the_first_packet_is_no_packet_and_harms_nothing() -> None:
    one = decoder("e3x")
    assert numbers(one.feed("in", b"hello?") + one.feed("in", packets(1)[0])) == ["error", 1]


# ---------------------------------------------------------------------------- Aqueduct


def test_a_recording_of_quic_is_told_as_such_and_not_as_a_fault_of_the_peer() -> None:
    (found,) = decoder("aqueduct").feed("in", b"\x04\x05\x06\x07")
    assert found[0] == "unverified"


@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        pytest.param(b"\x30", None, id="no frame of the carrier"),
        pytest.param(b"\x01\x00\x01\x63", "aqueduct-F10", id="no frame of Aqueduct"),
        pytest.param(b"\x01\x00\x01\x02", "aqueduct-F09", id="a stream that ends in a frame"),
        pytest.param(b"\x06\x01\x02", "aqueduct-F09", id="a datagram that ends in a frame"),
    ],
)
def test_what_no_peer_may_send_is_found_with_its_place(frame: bytes, rule: str | None) -> None:
    found = decoder("aqueduct").feed("in", HELLO + frame)
    assert [row[0] for row in found] == ["error"]
    assert found[0][7] == rule
    assert found[0][6] is not None


def test_nothing_is_guessed_behind_a_gap_in_aqueduct() -> None:
    one = decoder("aqueduct")
    assert [row[0] for row in one.feed("in", HELLO + b"\x05\x07")] == ["frame"]
    assert [row[0] for row in one.feed("in", b"\x05\x07", offset=100)] == ["gap"]
    assert one.feed("in", b"\x05\x07", offset=102) == []


# ---------------------------------------------------------------------------- both


class Bytes(muxkit.BaseObserver):
    """Keeps what one end of a session reads and writes."""

    def __init__(self) -> None:
        self.recording: list[tuple[Direction, bytes]] = []

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self.recording.append((direction, bytes(data)))


@pytest.mark.parametrize("protocol", ["e3x", "aqueduct"])
@pytest.mark.parametrize("seed", range(3))
async def test_the_pieces_of_a_stream_and_a_decoder_kept_as_bytes_change_nothing(protocol: str, seed: int) -> None:
    seen = Bytes()

    async def echo(channel: muxkit.Channel) -> None:
        async for message in channel:
            await channel.send(message)

    async with muxkit.open_server(echo, f"{protocol}+tcp://127.0.0.1:0") as server:
        async with muxkit.connect(server.url, observer=seen) as session, session.open() as channel:
            for size in SIZES:
                await channel.send(bytes(size))
                await channel.receive()
    dice = random.Random(seed)
    one = decoder(protocol)
    at_once = [found for direction, data in seen.recording for found in one.feed(direction, data)]
    kept, pieces = decoder(protocol), list[Found]()
    for direction, data in seen.recording:
        start = 0
        while start < len(data):
            size = dice.choice((1, 2, 9, 5000, 100_000))
            pieces += kept.feed(direction, data[start : start + size])
            start += size
            if dice.random() < 0.2:
                kept = restore(protocol, kept.dump())
    for each in ("in", "out"):
        assert [row for row in pieces if row[1] == each] == [row for row in at_once if row[1] == each]
    assert len(at_once) > 20


# ---------------------------------------------------------------------------- yamux


def yamux_frame(type: int, flags: int, stream: int, length: int, payload: bytes = b"") -> bytes:
    return bytes((0, type)) + flags.to_bytes(2) + stream.to_bytes(4) + length.to_bytes(4) + payload


def test_frames_of_yamux_are_decoded_wherever_the_bytes_are_cut() -> None:
    data = yamux_frame(0, 1, 1, 5, b"hello") + yamux_frame(1, 2, 1, 300) + yamux_frame(2, 1, 0, 7)
    whole = decoder("yamux").feed("in", data)
    assert whole == [
        ("frame", "in", "stream 1", "data syn", 5, None, None, None, None),
        ("frame", "in", "stream 1", "window-update ack", 0, None, None, None, None),
        ("credit", "in", "stream 1", None, None, 300, None, None, None),
        ("frame", "in", "session", "ping syn", 0, None, None, None, None),
    ]
    one = decoder("yamux")
    pieces: list[Found] = []
    for byte in data:
        pieces += one.feed("in", bytes((byte,)))
        one = restore("yamux", one.dump())
    assert pieces == whole


def test_bytes_that_are_no_frame_of_yamux_are_a_broken_rule() -> None:
    one = decoder("yamux")
    (error,) = one.feed("in", b"GET / HTTP/1.1\r\n")
    assert (error[0], error[7]) == ("error", "yamux-H02")
    assert one.feed("in", yamux_frame(2, 1, 0, 7)) == []
