"""The section "Receiving Chunks": which map, and chunks that make an entity."""

from __future__ import annotations

import pytest

from muxkit.protocols.bpmux import Kind
from tests.protocols.bpmux._helpers import by_hand, fed, ids, the, violation, with_top_credit, written


@pytest.mark.clause("bpmux-R01", "bpmux-P01")
def test_a_partial_chunk_touches_no_map() -> None:
    engine = by_hand()
    before = ids(engine)
    assert fed(engine, "e0 05") == []
    assert ids(engine) == before


@pytest.mark.clause("bpmux-R02")
def test_an_out_request_is_one_of_the_peers() -> None:
    engine = by_hand()
    fed(engine, "10 03 00")
    assert ids(engine)["request_in"] == [3]


@pytest.mark.clause("bpmux-R03")
def test_an_in_request_is_one_of_ours() -> None:
    engine = by_hand()
    request = engine.open_request(id=3, credit=0)
    written(engine)
    assert fed(engine, "2c 03 05") == [("Pinged", "out-request 3")]
    assert request.credit_out == 5


@pytest.mark.clause("bpmux-R04")
def test_an_out_sink_is_a_stream_for_us() -> None:
    engine = by_hand()
    fed(engine, "50 03 00")
    assert ids(engine)["stream_in"] == [3]


@pytest.mark.clause("bpmux-R05")
def test_an_in_sink_is_a_stream_of_ours() -> None:
    engine = by_hand()
    engine.open_stream(id=3, credit=2)
    assert fed(engine, "70 03 02 68 69") == [("Received", "out-stream 3", b"hi")]


@pytest.mark.clause("bpmux-R06")
def test_an_out_stream_is_a_sink_for_us() -> None:
    engine = by_hand()
    fed(engine, "90 03 00")
    assert ids(engine)["sink_in"] == [3]


@pytest.mark.clause("bpmux-R07")
def test_an_in_stream_is_a_sink_of_ours() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    written(engine)
    fed(engine, "a8 03 0a")
    assert sink.credit_out == 10


@pytest.mark.clause("bpmux-R08")
def test_a_duplex_is_a_sink_and_a_stream() -> None:
    engine = by_hand()
    assert fed(engine, "d0 03 00") == [("Opened", "in-sink 3", b"", "in-stream 3")]
    assert ids(engine)["sink_in"] == [3]
    assert ids(engine)["stream_in"] == [3]
    assert engine.channels == 1


@pytest.mark.clause("bpmux-R09")
def test_the_top_level_cannot_be_reopened() -> None:
    engine = by_hand()
    assert fed(engine, "62 00 00") == [("Finished", "top-level in-stream")]
    assert written(engine) == "a100"
    assert violation(engine, "70 00 00").rule == "bpmux-R09"


@pytest.mark.clause("bpmux-R09")
@pytest.mark.parametrize("chunk", ["d0 00 00", "c4 00"])
def test_there_is_no_duplex_0(chunk: str) -> None:
    assert violation(by_hand(), chunk).rule == "bpmux-R09"


@pytest.mark.clause("bpmux-R09")
def test_the_other_half_of_the_top_level_cannot_be_reopened_either() -> None:
    engine = by_hand()
    fed(engine, "a2 00 00")
    assert violation(engine, "a8 00 05").rule == "bpmux-R09"


@pytest.mark.clause("bpmux-R10")
def test_an_answer_to_no_question_is_a_violation() -> None:
    assert violation(by_hand(), "30 09 00").rule == "bpmux-R10"


@pytest.mark.clause("bpmux-R11")
@pytest.mark.parametrize(
    "chunk", ["70 09 00", "68 09 05", "62 09 00", "61 09", "60 09", "a8 09 05", "a2 09 00", "a1 09"]
)
def test_the_peer_cannot_make_entities_of_ours(chunk: str) -> None:
    assert violation(by_hand(), chunk).rule == "bpmux-R11"


@pytest.mark.clause("bpmux-R12")
@pytest.mark.parametrize("first", ["50 03 00", "90 03 00"])
def test_a_duplex_needs_an_id_that_is_free_in_both_maps(first: str) -> None:
    assert violation(by_hand(), first, "d0 03 00").rule == "bpmux-R12"


@pytest.mark.clause("bpmux-R13")
def test_credit_of_a_duplex_chunk_is_for_the_sink() -> None:
    engine = by_hand()
    fed(engine, "d8 03 00 07")
    assert the(engine, Kind.SINK_IN, 3).credit_out == 7
    assert the(engine, Kind.STREAM_IN, 3).credit_out == 0


@pytest.mark.clause("bpmux-R14")
@pytest.mark.requirement("R-02")
@pytest.mark.parametrize("chunk", ["44 09", "48 09 05", "40 09", "42 09 00", "00 09", "80 09", "c0 09"])
def test_an_opening_needs_a_payload(chunk: str) -> None:
    assert violation(by_hand(), chunk).rule == "bpmux-R14"


@pytest.mark.clause("bpmux-R15")
@pytest.mark.parametrize("tag", ["10", "50", "90", "d0"])
def test_an_opening_payload_is_paid_from_the_top_level(tag: str) -> None:
    engine = with_top_credit(3)
    events = fed(engine, f"{tag} 09 03 61 62 63")
    assert [(event[0], event[2]) for event in events] == [("Requested" if tag == "10" else "Opened", b"abc")]
    assert (engine.top_stream.credit_in, engine.top_stream.window.held) == (0, 3)


@pytest.mark.clause("bpmux-R15")
@pytest.mark.parametrize("tag", ["10", "50", "90", "d0"])
def test_an_opening_payload_above_the_top_level_credit_is_a_violation(tag: str) -> None:
    error = violation(with_top_credit(2), f"{tag} 09 03")
    assert error.rule == "bpmux-R15"
    assert "sent 3 bytes with 2 bytes of credit" in str(error)


@pytest.mark.clause("bpmux-R15")
@pytest.mark.parametrize("tag", ["10", "50", "90", "d0"])
def test_by_the_letter_an_opening_payload_is_empty(tag: str) -> None:
    assert fed(with_top_credit(letter=True), f"{tag} 09 00")[0][0] == ("Requested" if tag == "10" else "Opened")
    assert violation(with_top_credit(letter=True), f"{tag} 09 01 61").rule == "bpmux-R15"


@pytest.mark.clause("bpmux-R15")
def test_after_the_end_of_the_top_level_only_empty_openings_are_paid_for() -> None:
    engine = with_top_credit()
    fed(engine, "62 00 00")
    assert fed(engine, "50 09 00") == [("Opened", "in-stream 9", b"")]
    assert violation(engine, "50 0a 01 61").rule == "bpmux-R15"


@pytest.mark.clause("bpmux-R16")
def test_credit_of_an_opening_counts() -> None:
    engine = by_hand()
    fed(engine, "98 09 00 0a")
    assert the(engine, Kind.SINK_IN, 9).credit_out == 10


@pytest.mark.clause("bpmux-R17")
def test_a_ping_of_an_opening_is_told_after_it() -> None:
    engine = by_hand()
    assert fed(engine, "54 09 00") == [("Opened", "in-stream 9", b""), ("Pinged", "in-stream 9")]
    assert written(engine) == "a009"


@pytest.mark.clause("bpmux-R18", "bpmux-R19")
def test_an_opening_may_be_the_end_at_once() -> None:
    engine = by_hand()
    assert fed(engine, "52 09 00 00") == [("Opened", "in-stream 9", b""), ("Finished", "in-stream 9")]
    assert written(engine) == "a109"
    assert ids(engine).get("stream_in") is None


@pytest.mark.clause("bpmux-R18")
def test_an_end_payload_in_an_opening_is_not_paid_from_the_top_level() -> None:
    assert violation(with_top_credit(), "52 09 00 01 61").rule == "bpmux-R18"


@pytest.mark.clause("bpmux-R18")
def test_an_opening_payload_beside_an_end_is_paid_from_the_top_level() -> None:
    engine = with_top_credit(2)
    assert fed(engine, "52 09 02 68 69 00") == [("Opened", "in-stream 9", b"hi"), ("Finished", "in-stream 9")]
    assert engine.top_stream.credit_in == 0


@pytest.mark.clause("bpmux-R19")
@pytest.mark.parametrize(("chunk", "ack"), [("12 09 00 00", "2109"), ("92 09 00 00", "6109"), ("d2 09 00 00", "6109")])
def test_an_end_in_an_opening_is_acknowledged(chunk: str, ack: str) -> None:
    engine = by_hand()
    fed(engine, chunk)
    assert written(engine) == ack


@pytest.mark.clause("bpmux-R19")
def test_an_end_in_a_duplex_opening_leaves_the_stream_half_open() -> None:
    engine = by_hand()
    assert fed(engine, "d2 09 00 00") == [("Opened", "in-sink 9", b"", "in-stream 9"), ("Stopped", "in-sink 9", b"")]
    assert ids(engine)["stream_in"] == [9]
    assert "sink_in" not in ids(engine)
    assert engine.channels == 1


@pytest.mark.clause("bpmux-R20")
@pytest.mark.parametrize(("chunk", "rule"), [("51 09 00", "bpmux-R20"), ("41 09", "bpmux-R20")])
def test_an_opening_cannot_acknowledge(chunk: str, rule: str) -> None:
    assert violation(by_hand(), chunk).rule == rule
