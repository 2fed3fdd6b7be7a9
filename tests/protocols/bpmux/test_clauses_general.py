"""The section "General" of the document: how chunks look."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._limits import Limits
from muxkit.core import encode_varu64
from muxkit.protocols.bpmux import Chunk, Engine, Kind, Type, encode_chunk, encode_partial
from muxkit.testing._pair import check_every_split, feed
from tests.protocols.bpmux._helpers import (
    U64_MAX,
    allowed_to_open,
    by_hand,
    fed,
    grant,
    ids,
    pair_of,
    parsed,
    seen,
    the,
    told,
    violation,
    with_top_credit,
    written,
)


@pytest.mark.clause("bpmux-G01")
@pytest.mark.requirement("R-16", "R-70")
@pytest.mark.parametrize("id", [1, 247, 248, 2**32 - 1, 2**32, 2**62, U64_MAX])
def test_data_reaches_the_entity_of_its_id_only(id: int) -> None:
    pair = pair_of()
    here = pair.engines[0]
    sink, other = here.open_sink(id=id), here.open_sink(id=7)
    pair.run_until_quiet()
    sink.send(b"mine")
    other.send(b"not mine")
    pair.run_until_quiet()
    assert seen(pair, 1)[2:] == [("Received", f"in-stream {id}", b"mine"), ("Received", "in-stream 7", b"not mine")]


@pytest.mark.clause("bpmux-G02")
def test_both_sides_may_use_the_same_id_at_once() -> None:
    pair = pair_of()
    sinks = [engine.open_sink(id=5) for engine in pair.engines]
    pair.run_until_quiet()
    for side, message in ((0, b"from 0"), (1, b"from 1")):
        sinks[side].send(message)
    pair.run_until_quiet()
    assert seen(pair, 0)[-1] == ("Received", "in-stream 5", b"from 1")
    assert seen(pair, 1)[-1] == ("Received", "in-stream 5", b"from 0")


@pytest.mark.clause("bpmux-G03")
@pytest.mark.parametrize(("id", "wire"), [(7, "4407"), (300, "44f9012c")])
def test_a_chunk_is_a_tag_and_then_the_id(id: int, wire: str) -> None:
    engine = by_hand()
    sink = engine.open_sink(id=id)
    written(engine)
    sink.ping()
    assert written(engine) == wire


@pytest.mark.clause("bpmux-G04")
def test_the_tag_is_three_bits_of_type_and_five_of_flags() -> None:
    assert encode_chunk(Chunk(Type.IN_SINK, 0, payload=b"", end=b""))[0] == 0x72


@pytest.mark.clause("bpmux-G05")
@pytest.mark.parametrize(("type", "tag"), list(zip(Type, (0, 0x20, 0x40, 0x60, 0x80, 0xA0, 0xC0), strict=False)))
def test_each_type_has_its_code(type: Type, tag: int) -> None:
    data = encode_chunk(Chunk(type, 0))
    assert data == bytes([tag, 0])
    assert parsed(data) == [Chunk(type, 0)]


@pytest.mark.clause("bpmux-G05", "bpmux-P01")
def test_a_partial_has_a_code_and_no_id() -> None:
    assert encode_partial(5).hex() == "e005"


@pytest.mark.clause("bpmux-G06")
def test_the_flag_of_a_payload_is_0x10() -> None:
    engine = by_hand()
    engine.open_sink(id=7)
    assert written(engine) == "500700"


@pytest.mark.clause("bpmux-G07")
def test_the_flag_of_credit_is_0x08() -> None:
    engine = by_hand()
    engine.top_stream.give_credit(100)
    assert written(engine) == "a80064"


@pytest.mark.clause("bpmux-G08")
def test_the_flag_of_a_ping_is_0x04() -> None:
    engine = by_hand()
    engine.top_sink.ping()
    assert written(engine) == "6400"


@pytest.mark.clause("bpmux-G09")
def test_the_flag_of_an_end_is_0x02() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=7)
    written(engine)
    sink.end()
    assert written(engine) == "420700"


@pytest.mark.clause("bpmux-G10")
def test_the_flag_of_an_acknowledgement_is_0x01() -> None:
    engine = by_hand()
    fed(engine, "50 07 00", "42 07 00")
    assert written(engine) == "a107"


@pytest.mark.clause("bpmux-G11")
@pytest.mark.parametrize(
    ("id", "wire"),
    [
        (1, "01"),
        (247, "f7"),
        (248, "f8f8"),
        (255, "f8ff"),
        (256, "f90100"),
        (65536, "fa010000"),
        (2**32, "fc0100000000"),
        (U64_MAX, "ff" + "ff" * 8),
    ],
)
def test_ids_travel_as_varu64(id: int, wire: str) -> None:
    engine = by_hand()
    engine.open_sink(id=id)
    assert written(engine) == f"50{wire}00"


@pytest.mark.clause("bpmux-G12")
@pytest.mark.requirement("R-20")
@pytest.mark.parametrize(
    "chunk",
    [
        "44 f8 07",
        "50 01 f8 00",
        "48 f9 00 07",
        "58 01 00 f9 00 ff",
        "42 01 f8 00",
        "52 01 00 ff 00 00 00 00 00 00 00 01",
    ],
)
def test_a_number_in_a_longer_form_than_needed_ends_the_connection(chunk: str) -> None:
    engine = by_hand()
    fed(engine, "50 01 00") if chunk.startswith("42") else None
    assert violation(engine, chunk).rule == "bpmux-G12"


@pytest.mark.clause("bpmux-G13")
def test_a_chunk_that_comes_byte_by_byte_is_one_chunk() -> None:
    def engine_with_stream() -> Engine:
        engine = by_hand()
        engine.open_stream(id=5, credit=3)
        written(engine)
        return engine

    events = check_every_split(engine_with_stream, bytes.fromhex("7a05026869f9012c0178"), normalise=told)
    assert events == [("Received", "out-stream 5", b"hi"), ("Cancelled", "out-stream 5", b"x")]


@pytest.mark.clause("bpmux-G14")
def test_a_payload_is_its_length_and_its_bytes() -> None:
    engine = by_hand()
    fed(engine, "98 05 00 f8 ff")
    sink = the(engine, Kind.SINK_IN, 5)
    sink.send(b"hi")
    assert written(engine) == "7005026869"
    sink.send(b"x" * 248)
    assert written(engine) == "7005f8f8" + "78" * 248


@pytest.mark.clause("bpmux-G15")
@pytest.mark.requirement("R-18", "R-26")
def test_a_length_of_2_64_is_taken_as_a_number_and_allocates_nothing() -> None:
    engine = by_hand(limits=Limits(message=U64_MAX, reassembly=U64_MAX))
    engine.open_stream(id=5, credit=U64_MAX)
    written(engine)
    tracemalloc.start()
    try:
        assert fed(engine, "70 05 ff ff ff ff ff ff ff ff ff", "61 62 63") == []
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert not engine.over


@pytest.mark.clause("bpmux-G15")
@pytest.mark.requirement("R-26")
def test_a_length_above_the_credit_is_refused_before_its_bytes_come() -> None:
    engine = by_hand()
    engine.open_stream(id=5, credit=1000)
    error = violation(engine, "70 05 ff ff ff ff ff ff ff ff ff")
    assert str(U64_MAX) in str(error)
    assert "1000" in str(error)


@pytest.mark.clause("bpmux-G16")
def test_credit_travels_as_varu64() -> None:
    engine = by_hand()
    engine.top_stream.give_credit(300)
    assert written(engine) == "a800f9012c"


@pytest.mark.clause("bpmux-G16")
def test_credit_of_0_changes_nothing() -> None:
    engine = by_hand()
    assert fed(engine, "a8 00 00") == []
    assert engine.top_sink.credit_out == 0


@pytest.mark.clause("bpmux-G17")
def test_an_end_payload_looks_like_a_payload() -> None:
    engine = by_hand()
    fed(engine, "98 05 00 01")
    the(engine, Kind.SINK_IN, 5).end(b"x")
    assert written(engine) == "62050178"


@pytest.mark.clause("bpmux-G18")
def test_payload_credit_and_end_come_in_this_order() -> None:
    chunk = Chunk(Type.IN_SINK, 5, payload=b"hi", credit=300, end=b"x")
    assert encode_chunk(chunk).hex() == "7a05026869f9012c0178"
    assert parsed(encode_chunk(chunk)) == [chunk]


@pytest.mark.clause("bpmux-G18", "bpmux-R23", "bpmux-R29")
def test_the_parts_of_a_chunk_take_effect_in_this_order() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=5, credit=3)
    written(engine)
    assert fed(engine, "7e 05 02 68 69 f9 01 2c 01 78") == [
        ("Received", "out-stream 5", b"hi"),
        ("Pinged", "out-stream 5"),
        ("Cancelled", "out-stream 5", b"x"),
    ]
    assert stream.credit_out == 300


@pytest.mark.clause("bpmux-G19")
def test_pings_and_acknowledgements_have_no_data() -> None:
    assert parsed(bytes.fromhex("44074408")) == [Chunk(Type.OUT_SINK, 7, ping=True), Chunk(Type.OUT_SINK, 8, ping=True)]
    assert parsed(bytes.fromhex("41074108")) == [
        Chunk(Type.OUT_SINK, 7, ack_end=True),
        Chunk(Type.OUT_SINK, 8, ack_end=True),
    ]


@pytest.mark.clause("bpmux-G20")
def test_after_a_violation_nothing_is_taken_in_and_nothing_goes_out() -> None:
    engine = with_top_credit()
    engine.open_sink()
    engine.top_sink.ping()
    error = violation(engine, "50 09 00", "30 09 00 50 0a 00")
    assert error.rule == "bpmux-R10"
    assert ids(engine)["stream_in"] == [9]


@pytest.mark.clause("bpmux-G13", "bpmux-G20")
def test_a_violation_names_the_rule_and_where_its_chunk_begins() -> None:
    engine = with_top_credit()
    error = violation(engine, "50 09 00", "44 09 30", "09 00")
    assert (error.rule, error.offset) == ("bpmux-R10", 5)


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(
    "number", [0, 1, 127, 128, 129, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, U64_MAX]
)
def test_every_number_of_64_bits_is_good_as_credit(number: int) -> None:
    engine = allowed_to_open()
    sink = engine.open_sink(id=3)
    written(engine)
    grant(engine, "in-stream 3", number)
    assert sink.credit_out == number


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(
    "number", [0, 1, 127, 128, 129, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, U64_MAX]
)
def test_every_number_of_64_bits_is_good_as_an_id(number: int) -> None:
    engine = with_top_credit()
    events = feed(engine, [b"\x10" + encode_varu64(number) + b"\x00"])
    assert [told(event) for event in events] == [("Requested", f"in-request {number}", b"")]
