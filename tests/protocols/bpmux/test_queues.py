"""The queues of an engine: admission, the order of openings and ends, aborts and refusals."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.bpmux import Kind, Life, Type
from tests.protocols.bpmux._helpers import (
    allowed_to_open,
    by_hand,
    channel_of,
    fed,
    grant,
    ids,
    pair_of,
    parsed,
    seen,
    sums_of,
    the,
    violation,
    with_sink,
    written,
)

# --- many at once


def test_many_messages_are_taken_together_or_not_at_all() -> None:
    engine, sink = with_sink(6)
    sink.send(b"!")
    assert not sink.try_send_all([b"ab", b"cd", b"ef", b""])
    assert written(engine) == "50030121"
    assert sink.try_send_all([b"ab", b"", b"cde"])
    assert written(engine) == "5003026162 500300 500303636465"


@pytest.mark.requirement("R-32")
def test_many_messages_are_not_taken_if_one_of_them_is_too_large() -> None:
    engine, sink = with_sink(1000, limits=Limits(message=10, reassembly=10))
    sink.send(b"!")
    assert not sink.try_send_all([b"ab", b"x" * 11])
    assert written(engine) == "50030121"
    with pytest.raises(LocalProtocolError, match="11 bytes"):
        sink.send(b"x" * 11)


def test_many_answers_are_not_taken() -> None:
    engine = by_hand()
    fed(engine, "18 03 00 05")
    request = the(engine, Kind.REQUEST_IN, 3)
    request.notify_when_room(1)
    assert not request.try_send_all([b"", b""])
    assert written(engine) == ""


# --- waiting for credit


def test_a_single_byte_of_credit_behind_the_queue_makes_room_for_a_longer_message() -> None:
    engine, sink = with_sink(3)
    sink.send(b"abcde")
    sink.notify_when_room(9)
    written(engine)
    assert fed(engine, "a8 03 02") == []
    assert fed(engine, "a8 03 01") == [("Writable", "out-sink 3")]


def test_who_watches_is_told_once_when_there_is_room() -> None:
    engine, sink = with_sink(3)
    sink.send(b"abcde")
    sink.notify_when_room(1)
    written(engine)
    assert fed(engine, "a8 03 02") == []
    written(engine)
    assert fed(engine, "a8 03 09") == [("Writable", "out-sink 3")]
    assert fed(engine, "a8 03 09") == []


def test_who_watches_is_told_when_the_queue_has_gone_out() -> None:
    engine, sink = with_sink(5)
    sink.send(b"abcde")
    sink.send(b"")
    sink.notify_when_room(1)
    fed(engine, "a8 03 00")
    written(engine)
    grant(engine, "in-stream 3", 0)
    assert not sink.has_room(1)
    assert fed(engine, "a8 03 05") == [("Writable", "out-sink 3")]


def test_who_watches_the_top_level_is_told_when_an_opening_has_been_paid() -> None:
    engine = allowed_to_open(500)
    engine.open_sink(b"x" * 100)
    assert not engine.top_sink.has_room(1000)
    engine.top_sink.notify_when_room(1)
    written(engine)
    assert [type(event).__name__ for event in engine.events()] == ["Writable"]
    assert engine.top_sink.has_room(1000)


# --- openings and the end of the top level


@pytest.mark.requirement("R-71")
@pytest.mark.clause("bpmux-T01")
def test_the_top_level_ends_after_the_openings_that_were_queued_before() -> None:
    """Was: The end of the top level overtook openings that were queued: a violation between honest peers."""
    pair = pair_of(limits=Limits(channel_bytes=1000, channel_floor=1, message=300_000, reassembly=300_000))
    engine = pair.engines[0]
    for size in (200_000, 0):
        engine.open_sink(b"x" * size)
    engine.top_sink.end()
    pair.run_until_quiet()
    assert [(event[0], len(event[2])) for event in seen(pair, 1) if event[0] == "Opened"] == [  # type: ignore[arg-type]
        ("Opened", 0),
        ("Opened", 200_000),
    ]
    assert engine.top_sink.gone
    assert pair.engines[1].top_stream.gone


@pytest.mark.clause("bpmux-T01")
def test_an_opening_that_the_peer_does_not_take_any_more_is_declined_as_a_whole() -> None:
    engine = allowed_to_open(2)
    sink, stream = engine.open_duplex(b"abc", id=4)
    assert written(engine) == "e003 d004026162"
    assert fed(engine, "a2 00 00") == [
        ("Stopped", "top-level in-sink", b""),
        ("Refused", "out-sink 4"),
        ("Refused", "out-stream 4"),
    ]
    assert sink.gone
    assert stream.gone
    assert (engine.channels, engine.outbox) == (0, 0)
    assert written(engine) == "6100"


@pytest.mark.clause("bpmux-T01", "bpmux-P18")
def test_who_stops_the_top_level_forgets_openings_that_will_not_be_completed() -> None:
    pair = pair_of(limits=Limits(channel_bytes=1000, channel_floor=1, message=5000, reassembly=5000), latency=1.0)
    here, there = pair.engines
    sink = here.open_duplex(b"x" * 3000)[0]
    pair.step()
    there.top_stream.end()
    pair.run_until_quiet()
    assert ids(here) == {"stream_out": [0]}
    assert ids(there) == {"sink_out": [0]}
    assert sink.gone
    assert (there.channels, sums_of(there).unfinished, sums_of(there).reassembly.left) == (0, 0, 5000)
    assert seen(pair, 1) == [("Confirmed", "top-level in-stream")]
    assert seen(pair, 0) == [
        ("Stopped", "top-level in-sink", b""),
        ("Refused", "out-sink 1"),
        ("Refused", "out-stream 1"),
    ]


# --- aborts


def test_giving_up_drops_what_was_not_begun_and_says_that_something_is_missing() -> None:
    engine, sink = with_sink(6)
    sink.send(b"ab")
    sink.send(b"cd")
    sink.abort()
    assert written(engine) == "42030101"
    assert engine.outbox == 0


def test_giving_up_never_tears_a_message_that_was_begun() -> None:
    engine, sink = with_sink(2)
    sink.send(b"abcd")
    assert written(engine) == "e004 5003026162"
    sink.abort()
    assert written(engine) == ""
    grant(engine, "in-stream 3", 3)
    assert written(engine) == "5003026364 42030101"


def test_giving_up_without_credit_waits_for_a_byte_of_it_rather_than_look_like_an_orderly_end() -> None:
    engine, sink = with_sink(0)
    sink.abort()
    assert written(engine) == ""
    grant(engine, "in-stream 3", 1)
    assert written(engine) == "42030101"


def test_giving_up_after_the_end_was_queued_still_drops_what_waits() -> None:
    engine, sink = with_sink(2)
    sink.send(b"ab")
    sink.end()
    sink.abort()
    assert written(engine) == "42030101"


def test_giving_up_after_the_end_was_queued_changes_nothing_when_nothing_is_lost() -> None:
    engine, sink = with_sink(2)
    sink.send(b"abc")
    assert written(engine) == "e003 5003026162"
    sink.end()
    sink.abort()
    grant(engine, "in-stream 3", 1)
    assert written(engine) == "50030163 420300"


def test_giving_up_what_we_read_is_a_plain_cancellation() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=3)
    written(engine)
    stream.abort()
    assert written(engine) == "820300"


@pytest.mark.parametrize(("opening", "wire"), [("18 03 00 05", "22030101"), ("10 03 00", "220300")])
def test_giving_up_a_request_explains_itself_if_it_may(opening: str, wire: str) -> None:
    engine = by_hand()
    fed(engine, opening)
    the(engine, Kind.REQUEST_IN, 3).abort()
    assert written(engine) == wire


def test_giving_up_a_request_takes_back_an_answer_that_was_not_begun() -> None:
    engine = by_hand()
    fed(engine, "18 03 00 05")
    request = the(engine, Kind.REQUEST_IN, 3)
    request.send(b"ok")
    request.abort()
    assert written(engine) == "22030101"


def test_giving_up_a_request_lets_an_answer_that_was_begun_go_on() -> None:
    engine = by_hand()
    fed(engine, "18 03 00 01")
    request = the(engine, Kind.REQUEST_IN, 3)
    request.send(b"ok")
    assert written(engine) == "e002 3003016f"
    request.abort()
    grant(engine, "out-request 3", 1)
    assert written(engine) == "3003016b"
    assert request.end_out


def test_giving_up_the_top_level_takes_back_openings_of_which_nothing_went_out() -> None:
    engine = allowed_to_open(3)
    begun = engine.open_sink(b"abcd", id=4)
    written(engine)
    engine.open_sink(id=5)
    engine.top_sink.abort()
    assert [type(event).__name__ for event in engine.events()] == ["Refused"]
    assert ids(engine)["sink_out"] == [0, 4]
    grant(engine, "in-stream 0", 5)
    assert [chunk.type for chunk in parsed(bytes.fromhex(written(engine).replace(" ", "")))] == [  # type: ignore[union-attr]
        Type.OUT_SINK,
        Type.IN_SINK,
    ]
    assert begun.life is Life.OPEN


# --- refusals


def test_a_refusal_ends_both_halves() -> None:
    engine = by_hand()
    fed(engine, "d0 03 00", "10 03 00")
    engine.refuse(channel_of(the(engine, Kind.SINK_IN, 3)))
    engine.refuse(channel_of(the(engine, Kind.REQUEST_IN, 3)))
    assert sorted(written(engine).split()) == ["220300", "620300", "a20300"]


def test_a_refusal_of_what_is_gone_by_now_sends_nothing() -> None:
    engine = by_hand()
    fed(engine, "50 03 00")
    entity = the(engine, Kind.STREAM_IN, 3)
    fed(engine, "42 03 00")
    written(engine)
    engine.refuse(channel_of(entity))
    assert written(engine) == ""


# --- openings and ends without payload, which are written among the control chunks


def test_openings_and_ends_without_payload_are_written_in_the_order_of_the_commands() -> None:
    engine = by_hand()
    sinks = [engine.open_sink(id=id) for id in (3, 4, 5)]
    assert written(engine) == "500300 500400 500500"
    for sink in reversed(sinks):
        sink.end()
    assert written(engine) == "420500 420400 420300"


def test_an_end_waits_for_the_messages_before_it_and_for_the_end_of_the_other_half() -> None:
    engine = by_hand()
    sink, stream = engine.open_duplex(id=3, credit=0)
    written(engine)
    grant(engine, "in-stream 3", 2)
    sink.send(b"hi")
    sink.end()
    stream.end()
    assert written(engine) == "5003026869 420300 820300"


def test_nothing_is_sent_behind_an_end_that_waits_for_nothing() -> None:
    engine, sink = with_sink(100)
    sink.end()
    sink.notify_when_room(1)
    assert sink.try_send(b"late") is None
    assert written(engine) == "420300"
    sink.notify_when_room(1)
    assert sink.try_send(b"late") is None
    assert written(engine) == ""


@pytest.mark.clause("bpmux-R33")
def test_an_end_that_is_only_queued_cannot_be_confirmed() -> None:
    engine, sink = with_sink(100)
    sink.end()
    assert violation(engine, "a1 03").rule == "bpmux-R33"
    engine, sink = with_sink(100)
    sink.end()
    written(engine)
    assert fed(engine, "a1 03") == [("Confirmed", "out-sink 3")]


def test_an_end_is_not_written_once_the_peers_end_has_come() -> None:
    engine, sink = with_sink(100)
    sink.end()
    assert fed(engine, "a2 03 00") == [("Stopped", "out-sink 3", b"")]
    assert written(engine) == "4103"
    assert not engine.has_output()


def test_an_opening_that_is_declined_is_not_written() -> None:
    engine = by_hand()
    engine.open_sink(id=3)
    engine.open_duplex(id=4)
    assert [one[0] for one in fed(engine, "a2 00 00")] == ["Stopped", "Refused", "Refused", "Refused"]
    assert written(engine) == "6100"
    assert engine.channels == 0
