"""The section "State": the state of an endpoint."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.bpmux import Config, Engine, Kind
from tests.protocols.bpmux._helpers import allowed_to_open, by_hand, fed, grant, ids, pair_of, the, violation, written


@pytest.mark.clause("bpmux-S01", "bpmux-R11")
def test_a_new_entity_has_no_credit_and_no_ends() -> None:
    engine = by_hand()
    assert fed(engine, "50 09 00") == [("Opened", "in-stream 9", b"")]
    entity = the(engine, Kind.STREAM_IN, 9)
    assert (entity.credit_out, entity.credit_in, entity.partial) == (0, 0, 0)
    assert (entity.end_out, entity.end_in) == (False, False)


@pytest.mark.clause("bpmux-S02")
def test_each_kind_of_entity_is_in_its_map_on_both_sides() -> None:
    pair = pair_of()
    here, there = pair.engines
    here.open_request(id=1)
    here.open_sink(id=2)
    here.open_stream(id=3)
    here.open_duplex(id=4)
    pair.run_until_quiet()
    assert ids(here) == {"request_out": [1], "sink_out": [0, 2, 4], "stream_out": [0, 3, 4]}
    assert (here.live, here.channels) == (7, 4)
    assert ids(there) == {"request_in": [1], "stream_in": [2, 4], "sink_in": [3, 4], "sink_out": [0], "stream_out": [0]}


@pytest.mark.clause("bpmux-S03")
def test_at_the_start_there_is_only_the_top_level() -> None:
    assert ids(by_hand()) == {"sink_out": [0], "stream_out": [0]}


@pytest.mark.clause("bpmux-S04")
def test_the_top_level_starts_without_credit() -> None:
    engine = by_hand()
    for top in (engine.top_sink, engine.top_stream):
        assert (top.credit_out, top.credit_in, top.end_out, top.end_in) == (0, 0, False, False)
    with pytest.raises(LocalProtocolError, match="1 bytes to send, 0 granted"):
        engine.top_sink.send(b"a")
    assert written(engine) == ""
    fed(engine, "a8 00 01")
    engine.top_sink.send(b"a")
    assert written(engine) == "70000161"


@pytest.mark.clause("bpmux-S05")
def test_id_0_cannot_be_opened_here_but_for_a_request() -> None:
    engine = by_hand()
    for open_something in (engine.open_sink, engine.open_stream, engine.open_duplex):
        with pytest.raises(LocalProtocolError, match="id 0"):
            open_something(id=0)
    engine.open_request(id=0)
    assert written(engine) == "100000"


@pytest.mark.clause("bpmux-S05")
@pytest.mark.parametrize("chunk", ["50 00 00", "90 00 00"])
def test_id_0_cannot_be_opened_by_the_peer_either(chunk: str) -> None:
    assert violation(by_hand(), chunk).rule == "bpmux-S05"


@pytest.mark.clause("bpmux-S05")
def test_request_0_of_the_peer_is_an_ordinary_request() -> None:
    engine = by_hand()
    assert fed(engine, "10 00 00") == [("Requested", "in-request 0", b"")]
    the(engine, Kind.REQUEST_IN, 0).send(b"")
    assert written(engine) == "300000"


@pytest.mark.clause("bpmux-S05")
def test_ids_of_ours_never_reach_0_when_they_start_over() -> None:
    engine = Engine(Config(first_id=2**64 - 1))
    assert [engine.open_sink().id for _ in range(3)] == [2**64 - 1, 1, 2]


@pytest.mark.clause("bpmux-S05")
def test_ids_that_are_taken_are_passed_over() -> None:
    engine = by_hand()
    engine.open_sink(id=1)
    engine.open_stream(id=2)
    assert [engine.open_duplex()[0].id, engine.open_sink().id, engine.open_request(id=0).id] == [3, 4, 0]


@pytest.mark.clause("bpmux-S01")
def test_an_entity_holds_two_credits_the_rest_of_a_partial_message_and_two_ends() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    stream = the(engine, Kind.STREAM_IN, 9)
    stream.give_credit(2**64 - 1)
    fed(engine, "48 09 07")
    assert (stream.credit_out, stream.credit_in) == (7, 2**64 - 1)
    fed(engine, "e0 05", "50 09 02 68 65")
    assert (stream.credit_in, stream.partial) == (2**64 - 3, 3)
    fed(engine, "50 09 03 6c 6c 6f")
    assert (stream.credit_in, stream.partial) == (2**64 - 6, 0)
    assert (stream.end_out, stream.end_in) == (False, False)
    stream.end()
    written(engine)
    assert (stream.end_out, stream.end_in) == (True, False)
    other = by_hand()
    fed(other, "50 09 00")
    ended = the(other, Kind.STREAM_IN, 9)
    fed(other, "42 09 00")
    assert (ended.end_out, ended.end_in) == (False, True)


def test_an_entity_shows_both_credits() -> None:
    engine = allowed_to_open()
    sink = engine.open_sink(id=3)
    grant(engine, "in-stream 3", 12)
    sink.give_credit(5)
    assert repr(sink) == "<out-sink 3 credit_out=12 credit_in=5>"
    assert repr(engine.top_sink) == "<top-level in-sink credit_out=1000 credit_in=0>"
