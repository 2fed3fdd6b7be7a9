"""The section "Partial Mode": messages that travel in parts."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._limits import Limits
from muxkit.protocols.bpmux import Engine, Kind
from tests.protocols.bpmux._helpers import (
    allowed_to_open,
    by_hand,
    fed,
    grant,
    ids,
    pair_of,
    seen,
    state_of,
    sums_of,
    the,
    violation,
    with_top_credit,
    written,
)


def reading(credit: int, *, limits: Limits | None = None) -> Engine:
    """Make an engine whose stream 5 has granted the peer so much credit."""
    engine = by_hand(limits=limits)
    engine.open_stream(id=5, credit=credit)
    written(engine)
    return engine


@pytest.mark.clause("bpmux-P01")
def test_a_partial_is_followed_by_the_next_chunk_directly() -> None:
    engine = allowed_to_open(2)
    engine.top_sink.send(b"abc")
    assert written(engine) == "e003 7000026162"


@pytest.mark.clause("bpmux-P02")
@pytest.mark.requirement("R-23")
@pytest.mark.parametrize("tag", ["e0", "e8", "f0", "f8"])
def test_the_two_middle_bits_mean_nothing(tag: str) -> None:
    engine = reading(5)
    assert fed(engine, f"{tag} 02", "70 05 01 61", "70 05 01 62") == [("Received", "out-stream 5", b"ab")]


@pytest.mark.clause("bpmux-P03")
@pytest.mark.parametrize("length", range(1, 9))
def test_the_size_has_as_many_bytes_as_the_tag_says(length: int) -> None:
    size = 1 << 8 * (length - 1)
    engine = by_hand(limits=Limits(message=2**64 - 1, reassembly=2**64 - 1))
    fed(engine, f"{0xE0 + length - 1:02x}" + size.to_bytes(length).hex(), "64 00")
    assert engine.top_stream.partial == size


@pytest.mark.clause("bpmux-P04")
@pytest.mark.requirement("R-16")
def test_a_size_of_0_is_a_violation() -> None:
    assert violation(by_hand(), "e0 00").rule == "bpmux-P04"


@pytest.mark.clause("bpmux-P05")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("chunk", ["e1 00 2a", "e1 00 00", "e7 00 00 00 00 00 00 00 01"])
def test_a_size_in_more_bytes_than_needed_is_a_violation(chunk: str) -> None:
    assert violation(by_hand(), chunk).rule == "bpmux-P05"


@pytest.mark.clause("bpmux-P05")
def test_a_size_in_as_many_bytes_as_needed_is_good() -> None:
    assert fed(by_hand(), "e0 2a") == []


@pytest.mark.clause("bpmux-P06")
def test_the_next_chunk_says_who_is_in_partial_mode_and_may_make_it() -> None:
    engine = with_top_credit()
    assert fed(engine, "e0 05", "50 09 00") == []
    assert the(engine, Kind.STREAM_IN, 9).partial == 5


@pytest.mark.clause("bpmux-P06", "bpmux-P18")
@pytest.mark.parametrize("tag", ["10", "50", "90", "d0"])
def test_every_opening_may_come_in_parts_of_its_own_type(tag: str) -> None:
    engine = with_top_credit(5)
    assert fed(engine, "e0 05", f"{tag} 09 02 68 65", "64 00", f"{tag} 09 00")[1:] == []
    events = fed(engine, f"{tag} 09 03 6c 6c 6f")
    assert [(event[0], event[2]) for event in events] == [("Requested" if tag == "10" else "Opened", b"hello")]
    assert engine.top_stream.credit_in == 0
    assert engine.channels == 1


@pytest.mark.clause("bpmux-P06")
def test_credit_in_the_parts_of_a_duplex_opening_is_for_its_sink() -> None:
    engine = with_top_credit()
    fed(engine, "e0 02", "d8 03 01 61 07", "d8 03 01 62 05")
    assert the(engine, Kind.SINK_IN, 3).credit_out == 12


@pytest.mark.clause("bpmux-P06")
@pytest.mark.parametrize("chunk", ["90 09 01 61", "50 09 00", "42 09 00"])
def test_the_opening_of_a_duplex_must_be_complete_before_its_halves_are_used(chunk: str) -> None:
    assert violation(with_top_credit(), "e0 02", "d0 09 01 61", chunk).rule == "bpmux-P06"


@pytest.mark.clause("bpmux-P06", "bpmux-R21")
def test_a_duplex_chunk_without_payload_continues_nothing() -> None:
    assert violation(with_top_credit(), "e0 02", "d0 09 01 61", "c4 09").rule == "bpmux-R21"


@pytest.mark.clause("bpmux-P06", "bpmux-R17")
def test_pings_and_pongs_about_an_opening_in_parts_are_told_when_it_is_known() -> None:
    engine = with_top_credit()
    assert fed(engine, "e0 02", "d4 09 01 61", "80 09", "40 09", "44 09", "44 09") == []
    assert fed(engine, "d0 09 01 62") == [
        ("Opened", "in-sink 9", b"ab", "in-stream 9"),
        ("Pinged", "in-sink 9"),
        ("Pinged", "in-stream 9"),
    ]
    assert written(engine) == "6009 a009 a009"


@pytest.mark.clause("bpmux-P07")
def test_a_partial_after_a_partial_is_a_violation() -> None:
    assert violation(by_hand(), "e0 05 e0 06").rule == "bpmux-P07"


@pytest.mark.clause("bpmux-P08")
def test_a_partial_for_who_is_in_partial_mode_is_a_violation() -> None:
    assert violation(reading(10), "e0 05", "70 05 02 68 69", "e0 03", "70 05 01 61").rule == "bpmux-P08"


@pytest.mark.clause("bpmux-P09", "bpmux-P10")
def test_parts_are_kept_until_the_last_has_come() -> None:
    engine = reading(10)
    assert fed(engine, "e0 05", "70 05 02 68 65", "70 05 02 6c 6c") == []
    assert the(engine, Kind.STREAM_OUT, 5).partial == 1
    assert fed(engine, "70 05 01 6f") == [("Received", "out-stream 5", b"hello")]
    assert the(engine, Kind.STREAM_OUT, 5).partial == 0
    assert fed(engine, "70 05 01 21") == [("Received", "out-stream 5", b"!")]


@pytest.mark.clause("bpmux-P10")
def test_a_message_in_parts_may_come_in_one() -> None:
    assert fed(reading(10), "e0 02", "70 05 02 68 69") == [("Received", "out-stream 5", b"hi")]


@pytest.mark.clause("bpmux-P11")
@pytest.mark.parametrize("chunks", [("70 05 03 61 62 63",), ("70 05 01 61", "70 05 02 62 63"), ("62 05 03 61 62 63",)])
def test_a_part_larger_than_what_is_left_is_a_violation(chunks: tuple[str, ...]) -> None:
    assert violation(reading(10), "e0 02", *chunks).rule == "bpmux-P11"


@pytest.mark.clause("bpmux-P12")
def test_a_part_needs_credit_like_any_payload() -> None:
    assert violation(reading(2), "e0 05", "70 05 03 61 62 63").rule == "bpmux-R23"
    assert fed(reading(5), "e0 05", "70 05 03 61 62 63", "70 05 02 64 65") == [("Received", "out-stream 5", b"abcde")]


@pytest.mark.clause("bpmux-P12")
@pytest.mark.requirement("R-22")
def test_what_a_message_in_parts_needs_beyond_the_window_is_lent_at_its_first_part() -> None:
    engine = reading(2)
    fed(engine, "e0 05", "70 05 02 61 62")
    assert written(engine) == "880503"
    assert fed(engine, "70 05 03 63 64 65") == [("Received", "out-stream 5", b"abcde")]
    the(engine, Kind.STREAM_OUT, 5).consumed((), 5)
    assert sums_of(engine).reassembly.left == engine.limits.reassembly
    assert written(engine) == ""


@pytest.mark.clause("bpmux-P13")
def test_other_chunks_may_come_between_the_parts() -> None:
    engine = reading(10)
    engine.open_stream(id=6, credit=1)
    engine.open_sink(id=3)
    written(engine)
    assert fed(engine, "e0 04", "70 05 02 61 62", "70 06 01 21", "64 05", "a8 03 01", "70 05 02 63 64") == [
        ("Received", "out-stream 6", b"!"),
        ("Pinged", "out-stream 5"),
        ("Received", "out-stream 5", b"abcd"),
    ]


@pytest.mark.clause("bpmux-P13")
def test_an_empty_part_is_legal_and_gets_nowhere() -> None:
    engine = reading(10)
    assert fed(engine, "e0 01", "70 05 00", "70 05 00") == []
    assert fed(engine, "70 05 01 61") == [("Received", "out-stream 5", b"a")]


@pytest.mark.clause("bpmux-P14")
@pytest.mark.parametrize(
    "chunks",
    [
        ("70 05 02 61 62", "62 05 02 63 64"),
        ("62 05 02 61 62", "70 05 02 63 64"),
        ("72 05 02 61 62 02 63 64",),
        ("70 05 02 61 62", "72 05 01 63 01 64"),
    ],
)
def test_payload_and_end_payload_cannot_be_mixed_in_parts(chunks: tuple[str, ...]) -> None:
    assert violation(reading(10), "e0 04", *chunks).rule == "bpmux-P14"


@pytest.mark.clause("bpmux-P14")
def test_an_opening_in_parts_cannot_be_an_end() -> None:
    assert violation(with_top_credit(), "e0 04", "52 09 02 61 62 00").rule == "bpmux-P14"
    assert violation(with_top_credit(), "e0 04", "90 09 02 61 62", "82 09 00").rule == "bpmux-P14"


@pytest.mark.clause("bpmux-P15")
def test_an_end_in_parts_is_one_end_with_one_acknowledgement() -> None:
    engine = reading(4)
    assert fed(engine, "e0 04", "62 05 02 61 62") == []
    assert written(engine) == ""
    assert fed(engine, "62 05 02 63 64") == [("Cancelled", "out-stream 5", b"abcd")]
    assert written(engine) == "8105"


@pytest.mark.clause("bpmux-P15")
def test_an_answer_in_parts_is_acknowledged_once() -> None:
    engine = by_hand()
    engine.open_request(id=3, credit=4)
    written(engine)
    assert fed(engine, "e0 04", "30 03 02 61 62", "30 03 02 63 64") == [("Responded", "out-request 3", b"abcd")]
    assert written(engine) == "0103"


@pytest.mark.clause("bpmux-P15")
def test_an_explanation_in_parts_of_who_stops_us_is_lent_what_it_needs() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    sink.give_credit(1)
    written(engine)
    assert fed(engine, "e0 03", "a2 03 01 61") == []
    assert written(engine) == "480302"
    assert fed(engine, "a2 03 02 62 63") == [("Stopped", "out-sink 3", b"abc")]
    assert sums_of(engine).reassembly.left == engine.limits.reassembly


@pytest.mark.clause("bpmux-P15")
def test_we_send_an_end_in_parts_when_the_credit_does_not_cover_it() -> None:
    engine = by_hand()
    fed(engine, "98 05 00 02")
    sink = the(engine, Kind.SINK_IN, 5)
    sink.end(b"abc")
    assert written(engine) == "e003 6205026162"
    assert not sink.end_out
    grant(engine, "out-stream 5", 1)
    assert written(engine) == "62050163"
    assert sink.end_out


@pytest.mark.clause("bpmux-P16")
def test_a_partial_before_a_chunk_without_payload_counts() -> None:
    engine = reading(10)
    assert fed(engine, "e0 03", "64 05") == [("Pinged", "out-stream 5")]
    assert the(engine, Kind.STREAM_OUT, 5).partial == 3
    assert fed(engine, "70 05 01 61", "70 05 02 62 63") == [("Received", "out-stream 5", b"abc")]


@pytest.mark.clause("bpmux-P16")
def test_a_partial_before_the_acknowledgement_of_our_end_leaves_nothing_behind() -> None:
    engine = reading(0)
    the(engine, Kind.STREAM_OUT, 5).end()
    written(engine)
    assert fed(engine, "e0 03", "61 05") == [("Confirmed", "out-stream 5")]
    assert (sums_of(engine).unfinished, sums_of(engine).reassembly.left) == (0, engine.limits.reassembly)


@pytest.mark.clause("bpmux-P17")
@pytest.mark.requirement("R-26")
def test_a_size_above_the_limit_is_refused_before_a_byte_is_kept_or_granted() -> None:
    engine = with_top_credit()
    before = state_of(engine)
    tracemalloc.start()
    try:
        error = violation(engine, "e7 ff ff ff ff ff ff ff ff")
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert (error.rule, error.limit) == ("bpmux-P17", "message")
    assert str(2**64 - 1) in str(error)
    assert state_of(engine) == before


@pytest.mark.clause("bpmux-P17")
@pytest.mark.requirement("R-18", "R-26")
def test_a_size_of_2_64_that_the_limits_allow_costs_nothing_either() -> None:
    engine = with_top_credit(limits=Limits(message=2**64 - 1, reassembly=2**64 - 1))
    tracemalloc.start()
    try:
        assert fed(engine, "e7 ff ff ff ff ff ff ff ff", "50 09 00") == []
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert the(engine, Kind.STREAM_IN, 9).partial == 2**64 - 1


@pytest.mark.clause("bpmux-P18")
def test_all_parts_of_an_opening_are_paid_from_the_top_level() -> None:
    engine = with_top_credit(3)
    fed(engine, "e0 06", "50 09 03 61 62 63")
    assert written(engine) == "a80003"
    assert fed(engine, "50 09 03 64 65 66") == [("Opened", "in-stream 9", b"abcdef")]
    engine.consumed_opening(6)
    assert sums_of(engine).reassembly.left == engine.limits.reassembly


@pytest.mark.clause("bpmux-P18")
def test_by_the_letter_no_opening_comes_in_parts() -> None:
    assert violation(with_top_credit(letter=True), "e0 03", "50 09 00").rule == "bpmux-P18"


@pytest.mark.clause("bpmux-P18")
@pytest.mark.parametrize("opener", ["open_request", "open_sink", "open_stream", "open_duplex"])
def test_our_large_openings_go_out_in_parts_and_arrive_whole(opener: str) -> None:
    pair = pair_of(limits=Limits(channel_bytes=1000, channel_floor=1, message=200_000, reassembly=200_000))
    payload = bytes(range(256)) * 700
    getattr(pair.engines[0], opener)(payload)
    pair.run_until_quiet()
    assert [event[2] for event in seen(pair, 1)] == [payload]


@pytest.mark.clause("bpmux-P18", "bpmux-T01")
@pytest.mark.parametrize("opener", ["open_request", "open_sink", "open_stream", "open_duplex"])
def test_nothing_is_said_about_an_entity_before_its_opening_is_complete(opener: str) -> None:
    engine = allowed_to_open(1)
    made = getattr(engine, opener)(b"abc", id=3)
    for entity in made if isinstance(made, tuple) else (made,):
        entity.ping()
        entity.give_credit(5)
    assert len(written(engine).split()) == 2
    grant(engine, "in-stream 0", 2)
    assert bytes.fromhex(written(engine).split()[0])[2:] == b"\x02bc"
    assert engine.has_output() is False


@pytest.mark.clause("bpmux-P09")
def test_what_came_of_a_message_is_dropped_when_its_entity_ends() -> None:
    engine = reading(10)
    fed(engine, "e0 05", "70 05 02 68 65")
    stream = the(engine, Kind.STREAM_OUT, 5)
    stream.end()
    assert written(engine) == "820500"
    assert fed(engine, "70 05 02 6c 6c") == []
    assert fed(engine, "70 05 01 6f", "70 05 01 21") == []
    assert fed(engine, "61 05") == [("Confirmed", "out-stream 5")]
    assert stream.window.held == 0
    assert ids(engine)["stream_out"] == [0]


@pytest.mark.clause("bpmux-P15", "bpmux-R24")
@pytest.mark.requirement("R-44")
def test_an_answer_in_parts_that_crosses_a_cancellation_ends_without_an_acknowledgement() -> None:
    engine = by_hand()
    request = engine.open_request(id=3, credit=4)
    written(engine)
    fed(engine, "e0 04", "30 03 02 61 62")
    request.end()
    assert written(engine) == "020300"
    assert fed(engine, "30 03 02 63 64") == [("Cancelled", "out-request 3", b"")]
    assert written(engine) == ""


@pytest.mark.clause("bpmux-P15", "bpmux-R31")
def test_an_end_in_parts_of_something_we_have_cancelled_is_only_counted() -> None:
    engine = reading(4)
    the(engine, Kind.STREAM_OUT, 5).end()
    written(engine)
    assert fed(engine, "e0 04", "62 05 02 61 62", "62 05 02 63 64") == [("Finished", "out-stream 5")]
    assert written(engine) == ""
