"""The section "Receiving Chunks": chunks for an existing entity, its ends and acknowledgements."""

from __future__ import annotations

import pytest

from muxkit.core.events import Failed
from muxkit.protocols.bpmux import Config, Engine, Kind
from tests.protocols.bpmux._helpers import (
    U64_MAX,
    allowed_to_open,
    by_hand,
    fed,
    grant,
    ids,
    pair_of,
    seen,
    state_of,
    the,
    violation,
    with_top_credit,
    written,
)


@pytest.mark.clause("bpmux-R21")
def test_a_duplex_cannot_be_opened_twice() -> None:
    assert violation(by_hand(), "d0 03 00", "d0 03 00").rule == "bpmux-R21"


@pytest.mark.clause("bpmux-R22")
@pytest.mark.parametrize("chunk", ["10 03 00", "90 03 00"])
def test_a_second_payload_on_what_the_peer_reads_is_a_violation(chunk: str) -> None:
    assert violation(by_hand(), chunk, chunk).rule == "bpmux-R22"


@pytest.mark.clause("bpmux-R22")
def test_a_payload_on_our_own_sink_is_a_violation() -> None:
    engine = by_hand()
    engine.open_sink(id=3)
    assert violation(engine, "b0 03 00").rule == "bpmux-R22"


@pytest.mark.clause("bpmux-R23")
def test_payloads_use_up_credit() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    stream = the(engine, Kind.STREAM_IN, 9)
    stream.give_credit(3)
    assert fed(engine, "50 09 03 61 62 63") == [("Received", "in-stream 9", b"abc")]
    assert stream.credit_in == 0
    assert fed(engine, "50 09 00") == [("Received", "in-stream 9", b"")]
    error = violation(engine, "50 09 01 64")
    assert error.rule == "bpmux-R23"
    assert "sent 1 bytes with 0 bytes of credit" in str(error)


@pytest.mark.clause("bpmux-R24")
def test_an_answer_is_acknowledged_and_ends_the_request() -> None:
    engine = by_hand()
    engine.open_request(id=3, credit=2)
    written(engine)
    assert fed(engine, "30 03 02 6f 6b") == [("Responded", "out-request 3", b"ok")]
    assert written(engine) == "0103"
    assert "request_out" not in ids(engine)


@pytest.mark.clause("bpmux-R24", "bpmux-R30")
@pytest.mark.requirement("R-44")
def test_an_answer_that_crosses_a_cancellation_is_not_acknowledged() -> None:
    pair = pair_of(latency=1.0)
    here, there = pair.engines
    request = here.open_request(b"?")
    pair.run_until_quiet()
    request.end()
    the(there, Kind.REQUEST_IN, request.id).send(b"ok")
    before = [len(sent) for sent in pair.sent]
    pair.take_events(0), pair.take_events(1)
    pair.run_until_quiet()
    assert [bytes(pair.sent[side][before[side] :]).hex() for side in (0, 1)] == ["020100", "3001026f6b"]
    assert seen(pair, 0) == [("Cancelled", "out-request 1", b"")]
    assert seen(pair, 1) == [("Stopped", "in-request 1", b"")]
    assert here.channels == there.channels == 0


@pytest.mark.clause("bpmux-R25")
@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(("credit", "more", "fits"), [(U64_MAX, 1, False), (U64_MAX - 1, 1, True), (1, U64_MAX, False)])
def test_credit_may_not_pass_64_bits(credit: int, more: int, fits: bool) -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    written(engine)
    grant(engine, "in-stream 3", credit)
    if fits:
        grant(engine, "in-stream 3", more)
        assert sink.credit_out == U64_MAX
    else:
        error = violation(engine, f"a8 03 {'01' if more == 1 else 'ff' * 9}")
        assert error.rule == "bpmux-R25"
        assert sink.credit_out == credit


@pytest.mark.clause("bpmux-R26")
def test_a_ping_is_told_and_answered() -> None:
    engine = by_hand()
    before = state_of(engine)
    assert fed(engine, "64 00") == [("Pinged", "top-level in-stream")]
    assert written(engine) == "a000"
    assert state_of(engine) == before


@pytest.mark.clause("bpmux-R26")
def test_pings_may_be_answered_by_hand() -> None:
    engine = by_hand(pongs=False)
    fed(engine, "64 00")
    assert written(engine) == ""
    engine.top_stream.pong()
    assert written(engine) == "a000"


@pytest.mark.clause("bpmux-R26", "bpmux-T10")
def test_a_ping_after_our_end_is_told_and_not_answered() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    the(engine, Kind.STREAM_IN, 9).end()
    written(engine)
    assert fed(engine, "44 09") == [("Pinged", "in-stream 9")]
    assert written(engine) == ""


@pytest.mark.clause("bpmux-R26")
def test_a_ping_is_answered_as_long_as_our_end_waits_for_credit() -> None:
    engine = by_hand()
    grant(engine, "in-stream 0", 1)
    engine.top_sink.send(b"ab")
    engine.top_sink.end()
    written(engine)
    assert fed(engine, "a4 00") == [("Pinged", "top-level in-sink")]
    assert written(engine) == "6000"


@pytest.mark.clause("bpmux-R27")
def test_an_answer_and_an_end_in_one_chunk_are_a_violation() -> None:
    engine = by_hand()
    engine.open_request(id=3, credit=5)
    assert violation(engine, "32 03 00 00").rule == "bpmux-R27"


@pytest.mark.clause("bpmux-R28")
@pytest.mark.parametrize("is_acked", [False, True], ids=["before the ack is written", "after it"])
@pytest.mark.parametrize(
    ("opening", "end", "events"),
    [
        ("50 09 00", "42 09 00", ["Opened", "Finished"]),  # Out-Sink
        ("90 09 00", "82 09 00", ["Opened", "Stopped"]),  # Out-Stream, cancelled by its reader
        ("10 09 00", "02 09 00", ["Requested", "Stopped"]),  # Out-Request, cancelled
        ("d0 09 00", "42 09 00", ["Opened", "Finished"]),  # the half that the peer sends on; the other one is alive
        ("d0 09 00", "82 09 00", ["Opened", "Stopped"]),  # the half that it reads
    ],
    ids=["sink", "stream", "request", "duplex, sending", "duplex, reading"],
)
def test_a_second_end_is_a_violation_and_the_first_one_counts_once(
    opening: str, end: str, events: list[str], is_acked: bool
) -> None:
    """The entity is forgotten with the first end, so the second one would create an entity without a payload."""
    engine = by_hand()
    assert [event[0] for event in fed(engine, opening, end)] == events
    if is_acked:
        assert written(engine)
    (event,) = engine.receive_bytes(bytes.fromhex(end), 0.0)
    assert isinstance(event, Failed), "no second end is reported"
    assert event.error.rule == "bpmux-R14"
    assert engine.over
    assert written(engine) == "", "no second acknowledgement"


@pytest.mark.clause("bpmux-R28")
@pytest.mark.parametrize(
    ("opener", "tag", "event"),
    [("open_sink", "a2", "Stopped"), ("open_stream", "62", "Finished"), ("open_request", "22", "Cancelled")],
)
def test_a_second_end_of_what_this_side_opened_is_a_violation(opener: str, tag: str, event: str) -> None:
    engine = by_hand()
    getattr(engine, opener)(id=9)
    written(engine)
    assert [told[0] for told in fed(engine, f"{tag} 09 00")] == [event]
    violation(engine, f"{tag} 09 00")


@pytest.mark.clause("bpmux-R29")
def test_an_end_payload_uses_up_credit() -> None:
    engine = by_hand()
    fed(engine, "50 09 00", "50 0a 00")
    the(engine, Kind.STREAM_IN, 9).give_credit(1)
    assert fed(engine, "42 09 01 78") == [("Cancelled", "in-stream 9", b"x")]
    error = violation(engine, "42 0a 01 78")
    assert error.rule == "bpmux-R29"
    assert "1 bytes with 0 bytes of credit" in str(error)


@pytest.mark.clause("bpmux-R29", "bpmux-T11")
def test_an_end_payload_may_use_what_the_payload_left_and_no_more() -> None:
    engine = by_hand()
    engine.open_stream(id=5, credit=3)
    assert violation(engine, "72 05 02 68 69 02").rule == "bpmux-R29"


@pytest.mark.clause("bpmux-R30")
@pytest.mark.requirement("R-44")
@pytest.mark.parametrize("opener", ["open_sink", "open_stream"])
def test_ends_that_cross_remove_the_entity_without_an_acknowledgement(opener: str) -> None:
    pair = pair_of(latency=1.0)
    here, there = pair.engines
    entity = getattr(here, opener)(id=9)
    pair.run_until_quiet()
    pair.take_events(0), pair.take_events(1)
    other = the(there, Kind.STREAM_IN if opener == "open_sink" else Kind.SINK_IN, 9)
    before = [len(sent) for sent in pair.sent]
    entity.end()
    other.end()
    pair.run_until_quiet()
    assert [len(pair.sent[side]) - before[side] for side in (0, 1)] == [3, 3]
    stopped, finished = [["Stopped"], ["Finished"]]
    assert [event[0] for event in seen(pair, 0)] == (stopped if opener == "open_sink" else finished)
    assert [event[0] for event in seen(pair, 1)] == (finished if opener == "open_sink" else stopped)
    assert entity.gone
    assert other.gone


@pytest.mark.clause("bpmux-R31")
def test_an_end_is_acknowledged_and_the_entity_forgotten() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    assert fed(engine, "42 09 00") == [("Finished", "in-stream 9")]
    assert written(engine) == "a109"
    assert "stream_in" not in ids(engine)
    assert engine.channels == 0


@pytest.mark.clause("bpmux-R32")
@pytest.mark.parametrize("chunk", ["a5 03", "a9 03 01", "a3 03 00", "b1 03 00"])
def test_an_acknowledgement_stands_alone(chunk: str) -> None:
    engine = by_hand()
    engine.open_sink(id=3).end()
    written(engine)
    assert violation(engine, chunk).rule == "bpmux-R32"


@pytest.mark.clause("bpmux-R33")
def test_an_acknowledgement_of_nothing_is_a_violation() -> None:
    engine = by_hand()
    engine.open_sink(id=3)
    written(engine)
    assert violation(engine, "a1 03").rule == "bpmux-R33"


@pytest.mark.clause("bpmux-R33")
def test_an_end_that_is_only_queued_cannot_be_acknowledged() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    written(engine)
    sink.end()
    assert violation(engine, "a1 03").rule == "bpmux-R33"


@pytest.mark.clause("bpmux-R34")
def test_an_acknowledgement_frees_the_id() -> None:
    engine = by_hand()
    engine.open_sink(id=3).end()
    written(engine)
    assert fed(engine, "a1 03") == [("Confirmed", "out-sink 3")]
    assert ids(engine)["sink_out"] == [0]
    engine.open_sink(id=3)
    assert written(engine) == "500300"


@pytest.mark.clause("bpmux-R35")
@pytest.mark.parametrize("chunk", ["48 09 05", "44 09", "40 09", "42 09 00", "68 09 05"])
def test_after_an_end_nothing_more_may_be_said_about_that_entity(chunk: str) -> None:
    violation(by_hand(), "50 09 00", "42 09 00", chunk)


@pytest.mark.clause("bpmux-R35")
def test_after_an_end_a_payload_opens_a_new_entity_with_the_same_id() -> None:
    engine = with_top_credit()
    fed(engine, "50 09 00")
    first = the(engine, Kind.STREAM_IN, 9)
    assert fed(engine, "42 09 00", "50 09 01 61")[-1] == ("Opened", "in-stream 9", b"a")
    assert the(engine, Kind.STREAM_IN, 9) is not first


@pytest.mark.clause("bpmux-R35")
def test_a_response_to_a_request_that_is_over_is_a_violation() -> None:
    engine = by_hand()
    engine.open_request(id=3, credit=2)
    written(engine)
    assert violation(engine, "30 03 00", "30 03 00").rule == "bpmux-R10"


@pytest.mark.clause("bpmux-R36")
@pytest.mark.requirement("R-05")
def test_a_chunk_without_flags_is_told_and_changes_nothing() -> None:
    engine = by_hand()
    before = state_of(engine)
    assert fed(engine, "60 00") == [("Pong", "top-level in-stream")]
    assert state_of(engine) == before
    assert written(engine) == ""


@pytest.mark.clause("bpmux-R37")
def test_an_in_request_may_also_end_grant_ping_and_pong() -> None:
    """The document's sentence about its special handling is incomplete; beside three rules it is like any other."""
    engine = by_hand()
    request = engine.open_request(id=3, credit=2)
    written(engine)
    assert fed(engine, "20 03", "28 03 07", "24 03", "22 03 02 6e 6f") == [
        ("Pong", "out-request 3"),
        ("Pinged", "out-request 3"),
        ("Cancelled", "out-request 3", b"no"),
    ]
    assert request.credit_out == 7
    assert written(engine) == "0103"


ENDS = [("10 03 00", "02 03 00", "2103"), ("50 03 00", "42 03 00", "a103"), ("90 03 00", "82 03 00", "6103")]


@pytest.mark.clause("bpmux-R38")
@pytest.mark.parametrize(("opening", "end", "ack"), ENDS)
def test_an_acknowledgement_has_the_type_that_the_peer_finds(opening: str, end: str, ack: str) -> None:
    engine = by_hand()
    fed(engine, opening, end)
    assert written(engine) == ack


@pytest.mark.clause("bpmux-R38")
@pytest.mark.parametrize(
    ("opener", "end", "ack"),
    [("open_request", "22 03 00", "0103"), ("open_sink", "a2 03 00", "4103"), ("open_stream", "62 03 00", "8103")],
)
def test_an_acknowledgement_about_something_of_ours_says_so(opener: str, end: str, ack: str) -> None:
    engine = Engine(Config(grants=False, keepalive=None))
    getattr(engine, opener)(id=3)
    written(engine)
    fed(engine, end)
    assert written(engine) == ack


@pytest.mark.clause("bpmux-R39")
@pytest.mark.parametrize(("end", "ack", "left"), [("62 00 00", "a100", "sink_out"), ("a2 00 00", "6100", "stream_out")])
def test_the_top_level_is_acknowledged_as_the_peers(end: str, ack: str, left: str) -> None:
    engine = by_hand()
    fed(engine, end)
    assert written(engine) == ack
    assert ids(engine) == {left: [0]}


@pytest.mark.clause("bpmux-R39")
def test_the_top_level_ends_in_order_on_both_sides() -> None:
    pair = pair_of()
    for engine in pair.engines:
        engine.top_sink.end()
        pair.run_until_quiet()
    assert all(engine.live == 0 for engine in pair.engines)
    assert allowed_to_open().live > 0
