"""Packets over a byte stream: chunks both ways, every split, bounds, and whole conversations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.core import BoundedParsing
from muxkit.protocols.e3x import (
    ChunkedEngine,
    Closed,
    Config,
    Dechunker,
    EngineChannel,
    Event,
    Opened,
    Received,
    encode_chunks,
)
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.testing import EnginePair
from muxkit.testing._pair import check_every_split
from tests.protocols.e3x._helpers import raw
from tests.protocols.e3x.test_channels import Log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.core import StreamEngine


@given(
    packets=st.lists(st.binary(min_size=1, max_size=700), max_size=8), size=st.integers(2, 256), cut=st.integers(1, 99)
)
def test_packets_come_out_as_they_went_in_however_they_are_cut(packets: list[bytes], size: int, cut: int) -> None:
    stream = b"".join(encode_chunks(packet, size) for packet in packets)
    dechunker = Dechunker()
    got = [packet for start in range(0, len(stream), cut) for packet in dechunker.feed(stream[start : start + cut])]
    assert got == packets
    assert not dechunker.is_mid_packet


@pytest.mark.parametrize("size", [1, 257, 0, -1])
def test_chunks_of_an_impossible_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 256"):
        encode_chunks(b"x", size)


@pytest.mark.requirement("R-03", "R-13")
def test_a_packet_that_is_too_large_is_skipped_and_takes_no_memory() -> None:
    dechunker = Dechunker(most=1000)
    for _ in range(10_000):
        assert dechunker.feed(b"\xff" + bytes(255)) == []
        assert len(dechunker._packet) <= 1000
    assert dechunker.is_mid_packet
    assert dechunker.feed(b"\0" + encode_chunks(b"next")) == [b"next"]
    assert dechunker.oversized == 1


def test_a_packet_of_just_the_size_is_taken() -> None:
    dechunker = Dechunker(most=1000)
    assert dechunker.feed(encode_chunks(bytes(1000)) + encode_chunks(bytes(1001)) + encode_chunks(b"x")) == [
        bytes(1000),
        b"x",
    ]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def current_time(self) -> float:
        return self.now


def chunked(odd: bool, clock: Clock) -> ChunkedEngine:
    return ChunkedEngine(odd, clock=clock)


def test_it_is_a_stream_engine() -> None:
    engine: StreamEngine[Event] = chunked(True, Clock())
    assert not engine.has_output()
    assert engine.next_deadline() is None


@pytest.mark.parametrize("way", ["whole", "damaged"])
def test_any_split_of_the_stream_gives_the_same(way: str) -> None:
    packets = [raw(b"hello", c=1, type="x", seq=1), raw(b"more", c=1, seq=2), raw(c=1, seq=3, end=True)]
    if way == "damaged":
        packets[1] = b"\0"
    stream = b"\0".join(encode_chunks(packet) for packet in packets)
    events = check_every_split(lambda: chunked(False, Clock()), stream, normalise=lambda event: type(event).__name__)
    assert events == ["Opened"] if way == "whole" else ["Opened", "Faulted"]


def test_an_end_of_the_stream_inside_a_packet_is_told_from_one_between() -> None:
    for tail, clean in ((b"", True), (b"\5abc", False), (b"\3abc", False)):
        engine = chunked(False, Clock())
        engine.receive_bytes(encode_chunks(raw(c=1, type="x")) + tail, 0.0)
        engine.receive_eof(0.0)
        assert (engine.ended, engine.ended_cleanly) == (True, clean)


@pytest.mark.seeds(10, soak=1000)
@pytest.mark.requirement("R-48")
def test_messages_cross_a_stream_once_and_in_order(seed: int) -> None:
    weather = random.Random(seed)
    clock = Clock()
    one, other = chunked(True, clock), chunked(False, clock)
    messages = [weather.randbytes(weather.choice([0, 1, 100, 2000, 20_000])) for _ in range(30)]
    got: list[bytes] = []
    closed: list[int] = []

    def listener(side: int, event: Event) -> None:
        clock.now = pair.now
        match event:
            case Opened(EngineChannel() as channel, _):
                channel.receiver.done()
                channel.sender.finish()
            case Received(ReliableReceiver() as receiver, [body]):
                got.append(body)
                receiver.done()
            case Closed():
                closed.append(side)
            case _:
                pass

    pair: EnginePair[ChunkedEngine, Event] = EnginePair(one, other, latency=0.01, weather=weather, listener=listener)
    channel = one.open("bulk")
    pending: Sequence[bytes] = messages
    while pending:
        if channel.sender.has_room(len(pending[0])):
            channel.sender.send(pending[0])
            pending = pending[1:]
        else:
            pair.run_for(0.05)
            clock.now = pair.now
    channel.sender.finish()
    pair.run_for(5.0)
    assert got == messages
    assert sorted(closed) == [0, 1]


@pytest.mark.requirement("R-28")
def test_a_read_is_taken_in_turns_of_so_many_chunks() -> None:
    engine = ChunkedEngine(False, clock=Clock())
    assert isinstance(engine, BoundedParsing)
    engine.frames_at_once = 10
    packets = [raw(b"%d" % number, c=1, seq=number, type="x") for number in range(1, 21)]
    data = b"".join(encode_chunks(packet, 20) for packet in packets)
    turns = 0
    engine.receive_bytes(data, 0.0)
    while engine.unparsed:
        turns += 1
        before = engine.frames
        engine.receive_bytes(b"", 0.0)
        assert engine.frames - before <= 10
    assert turns >= 4
    assert engine.frames == 20
    assert engine.stats().faults == {}


def test_an_observer_sees_what_a_stream_brings() -> None:
    log = Log()
    engine = ChunkedEngine(False, clock=Clock(), observer=log)
    engine.receive_bytes(b"\0", 0.0)
    engine.receive_bytes(b"", 0.0)
    assert log.lines == [("in", b"\0")]


def test_large_packets_use_the_window_up_by_their_bytes() -> None:
    """The peer's window counts packets of the usual size, and its memory is for as many of these."""
    config = Config(packet=1000, stream_packet=20_000, first_window=50)
    engine = ChunkedEngine(True, config, clock=Clock())
    channel = engine.open("chat")
    while channel.sender.has_room(100_000):
        channel.sender.send(bytes(100_000))
        engine.buffers_to_send(1_000_000)
    assert 30_000 < engine.state.flying <= 50 * 1000
    assert engine.state.unsent > 0


def test_no_more_is_encoded_than_the_stream_takes() -> None:
    """A message of another channel would have to wait for all packets that are encoded already."""
    engine = ChunkedEngine(True, Config(first_window=1000), clock=Clock())
    for _ in range(8):
        engine.open("bulk").sender.send(bytes(128 * 1024))
    written = sum(map(len, engine.buffers_to_send(100_000)))
    assert written < 200_000
    assert engine.state.unsent > 700_000
