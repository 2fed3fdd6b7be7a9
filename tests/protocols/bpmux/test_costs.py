"""Memory and time that a peer can cost with chunks that use no credit, and with huge numbers."""

from __future__ import annotations

import math
import time
import tracemalloc

import pytest

from muxkit._limits import Limits
from muxkit.core import encode_varu64
from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Engine, Kind
from muxkit.testing._pair import drain
from tests.protocols.bpmux._helpers import (
    allowed_to_open,
    automatic,
    by_hand,
    fed,
    grant,
    pair_of,
    sums_of,
    violation,
    with_top_credit,
    written,
)

KIB = 1024


# --- chunks that use no credit


def memory_of(engine: Engine, chunk: bytes, count: int, *, at_once: int = 1000) -> int:
    """Return the bytes that stay allocated after these chunks, received so many times, and their events are taken."""
    tracemalloc.start()
    try:
        for _ in range(count // at_once):
            engine.receive_bytes(chunk * at_once, 0.0)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("R-05")
@pytest.mark.parametrize("chunk", ["60 00", "70 00 00", "a8 00 00", "a8 00 01", "40 09", "50 09 00"])
def test_chunks_that_cost_nothing_leave_nothing_behind(chunk: str) -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    written(engine)
    count = 30_000
    assert memory_of(engine, bytes.fromhex(chunk), count) < 16 * KIB
    assert not engine.over
    assert written(engine) == ""


@pytest.mark.requirement("R-05", "R-06")
def test_a_million_pings_of_a_peer_that_never_reads_are_a_number() -> None:
    engine = by_hand()
    data = bytes.fromhex("64 00") * 10_000
    tracemalloc.start(1)
    held = 0
    for count in range(100):
        engine.receive_bytes(data, 0.0)
        if count == 0:
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
    assert held < 64 * KIB
    assert sums_of(engine).control.pongs_queued == 1_000_000
    buffers = engine.buffers_to_send(64 * KIB)
    assert 64 * KIB <= sum(map(len, buffers)) <= 64 * KIB + 2
    assert len(drain(engine)) + sum(map(len, buffers)) == 2_000_000


@pytest.mark.requirement("R-06")
def test_pings_may_come_for_ever_if_the_answers_are_read() -> None:
    engine = by_hand(limits=Limits(pongs=10))
    for _ in range(100):
        fed(engine, "64 00" * 10)
        assert written(engine) == " ".join(["a000"] * 10)


@pytest.mark.requirement("R-06")
def test_pongs_owed_to_a_channel_that_ends_are_forgotten() -> None:
    engine = by_hand()
    fed(engine, "50 09 00", "44 09" * 5, "42 09 00")
    assert sums_of(engine).control.pongs_queued == 0
    assert written(engine) == "a109"


@pytest.mark.requirement("R-12")
@pytest.mark.parametrize("chunk", ["60 00", "a8 00 00", "64 00", "52 09 00 00", "e0 01 70 00 01 61", "70 00 00"])
def test_an_honest_storm_of_control_is_served_and_costs_little(chunk: str) -> None:
    engine = by_hand()
    engine.top_stream.give_credit(1_000_000)
    drain(engine)
    before = time.process_time()
    for _ in range(100):
        for event in engine.receive_bytes(bytes.fromhex(chunk) * 100, 0.0):
            assert not isinstance(event, Failed)
        drain(engine)
    assert time.process_time() - before < 1.0


# --- memory and time


@pytest.mark.requirement("R-03")
def test_memory_stays_within_what_was_declared_when_every_window_is_full() -> None:
    limits = Limits(
        channels=100, channel_bytes=20 * KIB, connection_bytes=1024 * KIB, channel_floor=KIB, message=64 * KIB,
        reassembly=256 * KIB,
    )  # fmt: skip
    engine = automatic(limits=limits)
    drain(engine)
    declared = limits.connection_bytes + limits.channels * limits.channel_floor + limits.reassembly
    tracemalloc.start()
    try:
        mailbox: list[object] = []
        for id in range(1, 101):
            mailbox += engine.receive_bytes(b"\x50" + encode_varu64(id) + b"\x00", 0.0)
        streams = [*engine.entities(Kind.STREAM_IN).values()]
        for stream in streams[:50]:
            while stream.credit_in:
                size = min(stream.credit_in, 1000)
                mailbox += engine.receive_bytes(
                    b"\x50" + encode_varu64(stream.id) + encode_varu64(size) + bytes(size), 0.0
                )
        for stream in streams[50:]:
            engine.receive_bytes(b"\xe1\xff\xff", 0.0)
            while stream.credit_in and not engine.over:
                size = min(stream.credit_in, 1000)
                mailbox += engine.receive_bytes(
                    b"\x50" + encode_varu64(stream.id) + encode_varu64(size) + bytes(size), 0.0
                )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not engine.over
    assert sum(stream.credit_in for stream in streams) == 0
    assert peak <= declared * 1.5 + 64 * KIB


@pytest.mark.requirement("R-04")
@pytest.mark.parametrize("way", ["parts", "bytes"])
def test_single_bytes_cost_at_most_four_times_their_number(way: str) -> None:
    engine = by_hand(limits=Limits(message=200_000, reassembly=200_000))
    engine.open_stream(id=5, credit=100_000)
    drain(engine)
    if way == "parts":
        start, piece = b"\xe2\x01\x86\xa0\x60\x05", b"\x70\x05\x01x"
    else:
        start, piece = b"\x70\x05" + encode_varu64(100_000), b"x"
    engine.receive_bytes(start, 0.0)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            engine.receive_bytes(piece, 0.0)
        assert tracemalloc.get_traced_memory()[0] < 4 * 20_000
    finally:
        tracemalloc.stop()


HUGE = {
    "a length": (with_top_credit, "50 09 ff ff ff ff ff ff ff ff ff"),
    "an end length": (with_top_credit, "52 09 00 ff ff ff ff ff ff ff ff ff"),
    "credit": (by_hand, "a8 00 ff ff ff ff ff ff ff ff ff"),
    "an id": (with_top_credit, "50 ff ff ff ff ff ff ff ff ff 00"),
    "a total": (by_hand, "e7 ff ff ff ff ff ff ff ff"),
}


@pytest.mark.requirement("R-18")
@pytest.mark.parametrize(("make", "chunk"), HUGE.values(), ids=HUGE)
def test_a_huge_number_costs_no_time(make: type[Engine], chunk: str) -> None:
    engine = make()
    fastest = math.inf
    for _ in range(5):
        engine = make()
        before = time.perf_counter()
        fed(engine, chunk)
        fastest = min(fastest, time.perf_counter() - before)
    assert fastest < 0.001
    assert engine.buffers_to_send() is not None


@pytest.mark.requirement("R-18")
def test_credit_for_the_top_level_costs_the_same_with_many_openings_in_the_queue() -> None:
    engine = allowed_to_open(20_000, limits=Limits(channel_memory=100 * 1024 * KIB))
    for _ in range(10_000):
        engine.open_sink(b"x")
    fastest = math.inf
    for _ in range(20):
        before = time.perf_counter()
        engine.receive_bytes(b"\xa8\x00\x01", 0.0)
        fastest = min(fastest, time.perf_counter() - before)
    assert fastest < 0.0005
    assert len(drain(engine)) > 10_000


@pytest.mark.requirement("R-28")
def test_a_small_message_beside_a_large_one_waits_for_one_quantum_at_most() -> None:
    engine = by_hand()
    bulk, small = engine.open_sink(id=1), engine.open_sink(id=2)
    drain(engine)
    for channel in ("in-stream 1", "in-stream 2"):
        grant(engine, channel, 100_000_000)
    for _ in range(100):
        bulk.send(b"x" * 100_000)
    engine.buffers_to_send(256 * KIB)
    small.send(b"small")
    ahead = 0
    while b"small" not in (data := b"".join(engine.buffers_to_send(256 * KIB))):
        ahead += len(data)
    assert ahead <= 64 * KIB + 100_000


@pytest.mark.requirement("R-70")
@pytest.mark.parametrize("first", [2**32 - 2, 2**62 - 2, 2**64 - 3])
def test_ids_near_the_end_of_their_range_go_on(first: int) -> None:
    pair = pair_of(first_id=first)
    engine = pair.engines[0]
    opened = []
    for _ in range(6):
        sink = engine.open_sink(b"hello")
        opened.append(sink.id)
        sink.end()
        pair.run_until_quiet()
        pair.engines[1].consumed_opening(5)
        assert sink.gone
    assert opened == [id if id < 2**64 else id - 2**64 + 1 for id in range(first, first + 6)]


@pytest.mark.requirement("R-70")
def test_big_counters_of_bytes_go_on() -> None:
    engine = by_hand()
    engine.bytes_received = 2**70
    assert violation(engine, "60 00", "30 09 00").offset == 2**70 + 2
