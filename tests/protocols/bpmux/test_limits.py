"""Every limit that concerns an engine, reached and not passed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from muxkit._limits import Limits
from muxkit.core import encode_varu64
from muxkit.core.events import Failed, Opened
from muxkit.protocols.bpmux import Kind, Requested
from muxkit.testing._pair import drain, feed
from tests.protocols.bpmux._helpers import automatic, by_hand, fed, grant, sums_of, the, violation, written

if TYPE_CHECKING:
    from muxkit._errors import RemoteProtocolError

KIB = 1024

# The test of each field. Fields of other layers: listeners and transports, sessions, the core's channel table.
MET_HERE = {
    "channels": "test_the_peer_cannot_have_more_channels_than_the_limit",
    "channel_memory": "test_more_openings_than_the_limit_end_the_session_and_name_the_knob",
    "pongs": "test_pings_beyond_the_limit_are_a_violation",
    "resets_burst": "test_cancelling_slows_a_peer_down_and_never_ends_the_connection",
    "resets_per_second": "test_cancelling_slows_a_peer_down_and_never_ends_the_connection",
    "backlog": "test_channels_that_have_to_be_refused_are_limited",
    "channel_bytes": "test_the_window_of_a_channel_is_what_the_limit_says",
    "channel_first": "test_a_channel_begins_with_a_smaller_window_and_grows",
    "channel_floor": "test_every_channel_gets_the_floor_when_the_connection_has_nothing_left",
    "connection_bytes": "test_channels_share_what_the_connection_has",
    "message": "test_a_message_above_the_limit_is_refused_however_it_comes",
    "reassembly": "test_loans_never_pass_the_limit",
    "outbox": "test_a_channel_that_waits_for_credit_takes_no_room_in_the_outbox",
    "stall": "test_dribbling_is_over_at_the_limit",
    "stall_bytes": "test_dribbling_is_over_at_the_limit",
}
MET_ELSEWHERE = {"connections", "headers", "half_open", "half_open_per_address", "handshake", "tombstones"}


@pytest.mark.requirement("R-01")
def test_every_limit_is_met_by_a_test() -> None:
    assert {field.name for field in attrs.fields(Limits)} == MET_HERE.keys() | MET_ELSEWHERE
    here = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")]
    assert [test for test in MET_HERE.values() if not any(f"def {test}(" in text for text in here)] == []


@pytest.mark.requirement("R-01")
def test_every_limit_is_finite_and_above_0() -> None:
    assert all(0 < value < math.inf for value in attrs.asdict(Limits()).values())
    for field in attrs.fields(Limits):
        for value in (0, -1, math.inf, math.nan):
            with pytest.raises(ValueError, match=field.name):
                Limits(**{field.name: value})  # type: ignore[arg-type]  # numbers, and wrong ones


@pytest.mark.requirement("R-01")
def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="reassembly=5"):
        Limits(reassembly=5)
    with pytest.raises(ValueError, match="channel_floor=10"):
        Limits(channel_floor=10, channel_bytes=9)


# --- channels


OPENINGS = {"request": "10", "sink": "50", "stream": "90", "duplex": "d0"}


@pytest.mark.requirement("R-01", "R-02")
@pytest.mark.parametrize("tag", OPENINGS.values(), ids=OPENINGS)
@pytest.mark.parametrize("in_parts", ["", "e0 09"], ids=["whole", "in parts"])
def test_the_peer_cannot_have_more_channels_than_the_limit(tag: str, in_parts: str) -> None:
    engine = by_hand(limits=Limits(channels=20))
    chunks = [bytes.fromhex(in_parts + tag) + encode_varu64(id) + b"\x00" for id in range(1, 201)]
    events = feed(engine, [b"".join(chunks)])
    assert isinstance(events[-1], Failed)
    assert events[-1].error.limit == "channels"
    assert "20 are open" in str(events[-1].error)
    assert engine.channels == 20
    assert sum(len(engine.entities(kind)) for kind in Kind) <= 2 * 20 + 2


@pytest.mark.requirement("R-02")
@pytest.mark.parametrize("tag", ["00", "20", "40", "60", "80", "a0", "c0", "48", "44", "42", "41", "a8"])
def test_no_other_chunk_makes_a_channel(tag: str) -> None:
    engine = by_hand()
    violation(engine, f"{tag} 09 00")
    assert engine.channels == 0


@pytest.mark.requirement("R-02", "R-06")
@pytest.mark.parametrize("chunk", ["52 {} 00 00", "92 {} 00 00", "12 {} 00 00"])
def test_channels_that_ended_count_until_the_peer_could_know(chunk: str) -> None:
    """Otherwise a peer that never reads could make the engine queue acknowledgements without bound."""
    engine = by_hand(limits=Limits(channels=20))
    events = feed(engine, [bytes.fromhex(chunk.format("09"))] * 200)
    assert isinstance(events[-1], Failed)
    assert events[-1].error.limit == "channels"
    assert sum(isinstance(event, Opened | Requested) for event in events) == 20


@pytest.mark.requirement("R-02", "R-12")
def test_a_peer_that_reads_may_open_and_end_as_many_as_it_likes() -> None:
    engine = by_hand(limits=Limits(channels=20))
    for _ in range(50):
        feed(engine, [bytes.fromhex("52 09 00 00")] * 20)
        assert len(drain(engine)) == 40
    assert not engine.over


@pytest.mark.requirement("R-02")
def test_ends_of_our_own_channels_do_not_count_against_the_peer() -> None:
    engine = by_hand(limits=Limits(channels=20))
    sinks = [engine.open_sink() for _ in range(20)]
    drain(engine)
    cancelled = b"".join(b"\xa2" + encode_varu64(sink.id) + b"\x00" for sink in sinks)
    feed(engine, [cancelled + bytes.fromhex("50 09 00")])
    assert not engine.over


@pytest.mark.requirement("R-02")
def test_a_duplex_of_which_one_half_ended_counts_once() -> None:
    engine = by_hand(limits=Limits(channels=20))
    feed(engine, [bytes([0xD0, id, 0]) for id in range(1, 16)])
    halves = b"".join(bytes([0x42, id, 0]) for id in range(1, 16))
    feed(engine, [halves + bytes.fromhex("50 7f 00")])
    assert not engine.over
    assert engine.channels == 16


@pytest.mark.requirement("R-02")
def test_we_open_no_more_than_the_limit_either() -> None:
    engine = by_hand(limits=Limits(channels=2))
    engine.open_request()
    assert engine.places == 1
    engine.open_duplex()
    assert engine.places == 0
    with pytest.raises(Exception, match=r"2 are open; close one, or raise Limits\(channels=…\)"):
        engine.open_sink()


# --- what a channel may hold


@pytest.mark.requirement("R-01")
def test_the_window_of_a_channel_is_what_the_limit_says() -> None:
    engine = automatic(limits=Limits(channel_bytes=5000))
    assert written(engine) == "a80000 a800f91000 a80000 a800f90388"  # 4096, the first credit of channels, and 904
    fed(engine, "50 09 00")
    assert written(engine) == "a809f91388"


@pytest.mark.requirement("R-01")
def test_a_channel_begins_with_a_smaller_window_and_grows() -> None:
    engine = automatic(limits=Limits(channel_first=100, channel_bytes=5000))
    fed(engine, "50 09 00")
    stream = the(engine, Kind.STREAM_IN, 9)
    assert stream.credit_in == 100
    fed(engine, "50 09 64" + "00" * 100)
    stream.consumed((), 100)
    assert stream.credit_in == 200


@pytest.mark.requirement("R-01")
def test_channels_share_what_the_connection_has() -> None:
    engine = automatic(limits=Limits(channel_bytes=5000, connection_bytes=20_000, channel_floor=10))
    for id in range(1, 20):
        fed(engine, f"50 {id:02x} 00")
    windows = [entity.credit_in for entity in engine.entities(Kind.STREAM_IN).values()]
    assert windows == [5000] + [10] * 18  # first grants stop at half of the budget, and the top level had one
    assert sum(windows) + engine.top_stream.credit_in <= 20_000 + 19 * 10


@pytest.mark.requirement("R-01")
def test_every_channel_gets_the_floor_when_the_connection_has_nothing_left() -> None:
    engine = automatic(limits=Limits(channel_bytes=5000, connection_bytes=5000, channel_floor=10))
    for id in range(1, 100):
        fed(engine, f"50 {id:02x} 00")
    assert {entity.credit_in for entity in engine.entities(Kind.STREAM_IN).values()} == {10}


@pytest.mark.requirement("R-01")
def test_a_channel_at_the_floor_goes_on_as_it_is_consumed() -> None:
    engine = automatic(limits=Limits(channel_bytes=5000, connection_bytes=1, channel_floor=10))
    fed(engine, "50 09 00")
    stream = the(engine, Kind.STREAM_IN, 9)
    for _ in range(100):
        size = stream.credit_in
        assert 0 < size <= 10
        fed(engine, f"50 09 {size:02x}" + "00" * size)
        stream.consumed((), size)
    assert sums_of(engine).budget.used == 0


@pytest.mark.requirement("R-01", "R-26")
@pytest.mark.parametrize("chunks", ["e1 01 2d", "70 05 f9 01 2d", "62 05 f9 01 2d", "70 05 f9 01 2d" + "00" * 400])
def test_a_message_above_the_limit_is_refused_however_it_comes(chunks: str) -> None:
    engine = by_hand(limits=Limits(message=300, reassembly=300))
    engine.open_stream(id=5, credit=5000)
    error: RemoteProtocolError = violation(engine, chunks)
    assert error.limit == "message"
    assert "got 301" in str(error)
    assert "expected at most 300 bytes" in str(error)


@pytest.mark.requirement("R-01", "R-22")
def test_loans_never_pass_the_limit() -> None:
    engine = by_hand(limits=Limits(message=100, reassembly=250))
    for id in range(1, 20):
        fed(engine, f"50 {id:02x} 00")
        the(engine, Kind.STREAM_IN, id).give_credit(10)
        fed(engine, f"e0 64 50 {id:02x} 0a" + "00" * 10)
        assert sums_of(engine).reassembly.left >= 0
    assert sum(entity.window.lent for entity in engine.entities(Kind.STREAM_IN).values()) == 180
    assert sums_of(engine).reassembly.waiting == 17


@pytest.mark.requirement("R-01", "R-29")
def test_dribbling_is_over_at_the_limit() -> None:
    engine = by_hand(limits=Limits(stall=5.0, stall_bytes=7))
    engine.handle_deadline(0.0)
    engine.open_stream(id=5, credit=500)
    fed(engine, "70 05 64 00", now=1.0)
    fed(engine, "00" * 7, now=5.9)
    engine.handle_deadline(6.0)
    assert not engine.over
    fed(engine, "00" * 6, now=10.9)
    (event,) = engine.handle_deadline(11.0)
    assert isinstance(event, Failed)
    assert "6 bytes in 5.0 s while a message is unfinished, expected at least 7" in str(event.error)
    assert event.error.limit == "stall"


# --- queues


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-01", "R-07", "R-08")
def test_a_channel_that_waits_for_credit_takes_no_room_in_the_outbox() -> None:
    """Was: A message tail that waited for credit filled the outbox and stopped every other channel."""
    engine = by_hand()
    sink = engine.open_sink(id=3)
    grant(engine, "in-stream 0", 100)
    drain(engine)
    grant(engine, "in-stream 3", 100_000)
    sink.send(b"x" * 1_000_000)
    assert 100_000 <= engine.outbox <= 100_100
    drain(engine)
    assert engine.outbox == 0
    assert sink.outgoing is not None
    assert sink.outgoing.queued == 900_000


@pytest.mark.requirement("R-08")
def test_the_outbox_counts_what_the_transport_alone_holds_up() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    drain(engine)
    grant(engine, "in-stream 3", 10_000)
    for _ in range(10):
        sink.send(b"x" * 1000)
    assert engine.outbox == 10 * 1016
    engine.buffers_to_send(2000)
    assert engine.outbox == 8 * 1016
    fed(engine, "a2 03 00")
    assert engine.outbox == 0


# --- pings


@pytest.mark.requirement("R-01", "R-06", "R-12")
def test_pings_beyond_the_limit_are_a_violation() -> None:
    engine = by_hand(limits=Limits(pongs=10))
    assert len(fed(engine, "64 00" * 10)) == 10
    error = violation(engine, "64 00")
    assert error.limit == "pongs"
    assert "10 answers are waiting" in str(error)
