"""The section "Sending Chunks": what is written, and which commands are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.bpmux import Engine, Kind, Sender
from tests.protocols.bpmux._helpers import (
    U64_MAX,
    allowed_to_open,
    by_hand,
    channel_of,
    fed,
    grant,
    ids,
    pair_of,
    state_of,
    the,
    violation,
    with_sink,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def refused(engine: Engine, command: Callable[[], object], match: str) -> None:
    """Check that a command raises, writes nothing and changes nothing."""
    before = state_of(engine)
    with pytest.raises(LocalProtocolError, match=match):
        command()
    assert state_of(engine) == before
    assert written(engine) == ""


@pytest.mark.clause("bpmux-T01", "bpmux-T03")
def test_both_sides_agree_about_credit_when_they_are_quiet() -> None:
    pair = pair_of()
    here, there = pair.engines
    sink = here.open_sink()
    pair.run_until_quiet()
    sink.send(b"x" * 1000)
    pair.run_until_quiet()
    the(there, Kind.STREAM_IN, sink.id).consumed((), 1000)
    pair.run_until_quiet()
    assert sink.credit_out == the(there, Kind.STREAM_IN, sink.id).credit_in == Limits().channel_first - 1000


@pytest.mark.clause("bpmux-T02", "bpmux-R22")
def test_what_we_read_has_no_command_that_sends() -> None:
    stream = by_hand().open_stream()
    assert not isinstance(stream, Sender)
    assert not hasattr(stream, "send")


@pytest.mark.clause("bpmux-T02", "bpmux-T10", "bpmux-R28")
def test_a_second_end_is_refused() -> None:
    engine, sink = with_sink()
    sink.end()
    written(engine)
    refused(engine, lambda: sink.end(), "this side has ended it")


@pytest.mark.clause("bpmux-T02", "bpmux-R27")
def test_an_answer_together_with_an_end_is_refused() -> None:
    engine = by_hand()
    fed(engine, "10 03 00")
    refused(engine, lambda: the(engine, Kind.REQUEST_IN, 3).send(b"", end=b""), "a response can't have an end")


@pytest.mark.clause("bpmux-T02", "bpmux-R24")
def test_a_second_answer_and_an_end_after_one_are_refused() -> None:
    engine = by_hand()
    fed(engine, "10 03 00")
    request = the(engine, Kind.REQUEST_IN, 3)
    request.send(b"")
    assert written(engine) == "300300"
    refused(engine, lambda: request.send(b""), "this side has ended it")
    refused(engine, lambda: request.end(), "this side has ended it")


@pytest.mark.clause("bpmux-T02")
def test_everything_about_an_entity_that_is_gone_is_refused() -> None:
    engine, sink = with_sink(5)
    fed(engine, "a2 03 00")
    written(engine)
    for command in (
        lambda: sink.send(b""),
        lambda: sink.end(),
        lambda: sink.abort(),
        lambda: sink.give_credit(1),
        lambda: sink.ping(),
        lambda: sink.pong(),
    ):
        refused(engine, command, "it has ended")
    assert sink.try_send(b"") is None
    assert not sink.try_send_all([b""])


@pytest.mark.clause("bpmux-T02", "bpmux-G20")
def test_everything_is_refused_once_the_connection_is_over() -> None:
    engine, sink = with_sink(5)
    violation(engine, "30 09 00")
    for command in (
        lambda: sink.send(b""),
        lambda: sink.end(),
        lambda: sink.abort(),
        lambda: sink.give_credit(1),
        lambda: sink.ping(),
        lambda: sink.pong(),
        engine.open_sink,
        engine.open_request,
    ):
        refused(engine, command, "the connection has ended")
    assert sink.try_send(b"") is None
    assert not sink.try_send_all([b""])


@pytest.mark.clause("bpmux-T02")
def test_what_comes_after_the_end_of_the_connection_harms_nobody() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    entity = the(engine, Kind.STREAM_IN, 9)
    entity.give_credit(5)
    fed(engine, "50 09 01 61")
    violation(engine, "30 09 00")
    entity.consumed((), 1)
    engine.refuse(channel_of(entity))
    assert not engine.events()


@pytest.mark.clause("bpmux-T02")
@pytest.mark.parametrize("id", [-1, 0, 2**64, 3])
def test_an_id_that_is_taken_or_no_id_is_refused(id: int) -> None:
    engine, _ = with_sink()
    refused(engine, lambda: engine.open_sink(id=id), f"invalid id {id}: expected an unused one from 1")
    refused(engine, lambda: engine.open_duplex(id=id), f"invalid id {id}: expected an unused one from 1")


@pytest.mark.clause("bpmux-T02", "bpmux-T07")
@pytest.mark.parametrize("credit", [-1, 2**64])
def test_a_first_credit_outside_64_bits_is_refused(credit: int) -> None:
    engine = by_hand()
    for command in (
        lambda: engine.open_stream(credit=credit),
        lambda: engine.open_duplex(credit=credit),
        lambda: engine.open_request(credit=credit),
    ):
        refused(engine, command, "expected 0 to")


@pytest.mark.clause("bpmux-T02")
def test_nothing_can_be_opened_after_the_top_level_was_closed() -> None:
    engine = by_hand()
    engine.top_sink.end()
    written(engine)
    refused(engine, engine.open_sink, "the top level was closed")


@pytest.mark.clause("bpmux-T02")
def test_nothing_can_be_opened_when_the_peer_takes_nothing_more() -> None:
    engine = by_hand()
    fed(engine, "a2 00 00")
    written(engine)
    refused(engine, engine.open_duplex, "the top level was closed")


@pytest.mark.clause("bpmux-T03")
def test_a_duplex_is_two_entities_here() -> None:
    engine = by_hand()
    engine.open_duplex(id=4)
    assert written(engine) == "d00400"
    assert ids(engine) == {"sink_out": [0, 4], "stream_out": [0, 4]}
    assert engine.channels == 1


@pytest.mark.clause("bpmux-T03", "bpmux-T06")
def test_credit_for_a_stream_of_the_peer_counts_in_its_map() -> None:
    engine = by_hand()
    fed(engine, "50 09 00")
    the(engine, Kind.STREAM_IN, 9).give_credit(7)
    assert written(engine) == "a80907"
    assert the(engine, Kind.STREAM_IN, 9).credit_in == 7


@pytest.mark.clause("bpmux-T04")
def test_a_payload_takes_its_length_off_the_credit() -> None:
    engine, sink = with_sink(5)
    sink.send(b"abc")
    assert written(engine) == "500303616263"
    assert sink.credit_out == 2


@pytest.mark.clause("bpmux-T05")
def test_a_payload_above_the_credit_goes_out_in_parts_and_never_beyond_it() -> None:
    engine, sink = with_sink(2)
    sink.send(b"abc")
    assert written(engine) == "e003 5003026162"
    assert sink.credit_out == 0
    grant(engine, "in-stream 3", 5)
    assert written(engine) == "50030163"
    assert sink.credit_out == 4


@pytest.mark.clause("bpmux-T05")
def test_a_payload_without_any_credit_is_refused() -> None:
    engine, sink = with_sink(0)
    refused(engine, lambda: sink.send(b"abc"), "3 bytes to send, 0 granted")


@pytest.mark.clause("bpmux-T05")
def test_behind_a_queue_only_what_the_credit_covers_is_admitted() -> None:
    engine, sink = with_sink(5)
    sink.send(b"abc")
    assert sink.has_room(2)
    assert not sink.has_room(3)
    refused_engine_state = state_of(engine)
    with pytest.raises(LocalProtocolError):
        sink.send(b"def")
    assert state_of(engine) == refused_engine_state


@pytest.mark.clause("bpmux-T06")
def test_given_credit_goes_out_and_counts() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=3, credit=0)
    written(engine)
    stream.give_credit(10)
    assert stream.credit_in == 10
    assert written(engine) == "88030a"


@pytest.mark.clause("bpmux-T06")
def test_credit_given_before_the_opening_is_out_travels_with_it() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=3, credit=5)
    stream.give_credit(10)
    assert written(engine) == "9803000f"


@pytest.mark.clause("bpmux-T07")
@pytest.mark.requirement("R-16")
def test_credit_that_would_pass_64_bits_is_refused() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=3, credit=U64_MAX)
    written(engine)
    refused(engine, lambda: stream.give_credit(1), str(U64_MAX))
    refused(engine, lambda: stream.give_credit(-1), "credit of -1")


@pytest.mark.clause("bpmux-T08")
def test_an_end_payload_takes_its_length_off_the_credit() -> None:
    engine, sink = with_sink(1)
    sink.end(b"x")
    assert written(engine) == "42030178"
    assert sink.credit_out == 0


@pytest.mark.clause("bpmux-T09")
def test_an_end_payload_without_credit_is_refused_and_an_empty_one_works() -> None:
    engine, sink = with_sink(0)
    refused(engine, lambda: sink.end(b"x"), "1 bytes with 0 bytes of credit")
    assert not sink.end_out
    sink.end()
    assert written(engine) == "420300"


@pytest.mark.clause("bpmux-T10")
def test_after_the_end_nothing_more_is_sent() -> None:
    engine, sink = with_sink(5)
    sink.end()
    assert written(engine) == "420300"
    assert sink.end_out
    for command in (lambda: sink.send(b""), lambda: sink.give_credit(1), lambda: sink.ping(), lambda: sink.pong()):
        refused(engine, command, "this side has ended it")
    sink.abort()
    assert written(engine) == ""


@pytest.mark.clause("bpmux-T10")
def test_a_ping_that_waits_for_the_opening_ends_with_the_entity() -> None:
    engine = by_hand()
    sink = engine.open_sink(id=3)
    sink.ping()
    sink.give_credit(5)
    sink.end()
    assert written(engine) == "500300 420300"


@pytest.mark.clause("bpmux-T10")
def test_what_was_asked_before_the_end_goes_out_before_it() -> None:
    engine, sink = with_sink()
    sink.ping()
    sink.give_credit(5)
    sink.end()
    assert written(engine) == "4c0305 420300"


@pytest.mark.clause("bpmux-T11")
def test_a_message_and_an_end_are_taken_together_or_not_at_all() -> None:
    engine, sink = with_sink(3)
    refused(engine, lambda: sink.send(b"ab", end=b"xy"), r"2 \+ 2 bytes to send, 3 granted")
    sink.send(b"ab", end=b"x")
    assert written(engine) == "5003026162 42030178"
    assert (sink.credit_out, sink.end_out) == (0, True)


@pytest.mark.clause("bpmux-T11")
def test_an_end_beside_a_message_counts_what_openings_have_claimed() -> None:
    engine = allowed_to_open(10)
    engine.open_sink(b"x" * 6)
    with pytest.raises(LocalProtocolError, match=r"2 \+ 3 bytes to send, 10 granted"):
        engine.top_sink.send(b"ab", end=b"xyz")


@pytest.mark.clause("bpmux-T02")
@pytest.mark.requirement("R-01")
def test_nothing_above_the_limit_on_messages_is_sent() -> None:
    limits = Limits(message=10, reassembly=10)
    engine, sink = with_sink(1000, limits=limits)
    grant(engine, "in-stream 0", 1000)
    for command in (
        lambda: sink.send(b"x" * 11),
        lambda: sink.send(b"", end=b"x" * 11),
        lambda: sink.end(b"x" * 11),
        lambda: engine.open_sink(b"x" * 11),
    ):
        refused(engine, command, r"11 bytes against Limits\(message=10\)")


@pytest.mark.clause("bpmux-T02", "bpmux-R15")
def test_by_the_letter_only_empty_openings_are_sent() -> None:
    engine = allowed_to_open(letter=True)
    refused(engine, lambda: engine.open_sink(b"x"), "letter=True")
    engine.open_sink()
    assert written(engine) == "500100"


@pytest.mark.clause("bpmux-T02", "bpmux-R15")
def test_an_opening_payload_needs_top_level_credit() -> None:
    engine = by_hand()
    refused(engine, lambda: engine.open_request(b"x"), "1 bytes to send, 0 granted")
    grant(engine, "in-stream 0", 1)
    engine.open_request(b"x", credit=0)
    assert written(engine) == "10010178"
    assert engine.top_sink.credit_out == 0
