"""Messages larger than the window: what is lent, which entities wait in line, and that the line always moves."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.bpmux import Engine, Kind, Receiver
from tests.protocols.bpmux._helpers import by_hand, fed, grant, pair_of, seen, sums_of, the, written


def two_streams(*, reassembly: int = 100, message: int = 100, credit: int = 10) -> tuple[Engine, Receiver, Receiver]:
    """Make an engine with streams 1 and 3 of the peer, with so much credit each."""
    engine = by_hand(limits=Limits(message=message, reassembly=reassembly))
    fed(engine, "50 01 00", "50 03 00")
    one, other = (the(engine, Kind.STREAM_IN, id) for id in (1, 3))
    for stream in (one, other):
        stream.give_credit(credit)
    written(engine)
    return engine, one, other


@pytest.mark.requirement("R-22")
def test_the_second_message_waits_until_the_first_has_been_consumed() -> None:
    engine, one, other = two_streams()
    fed(engine, "e0 64 50 01 01 61", "e0 64 50 03 01 61")
    assert written(engine) == "a8015a"
    assert fed(engine, "50 01 63" + "62" * 99)[0][0] == "Received"
    assert written(engine) == ""
    one.consumed((), 100)
    assert written(engine) == "a8035a"
    fed(engine, "50 03 63" + "62" * 99)
    other.consumed((), 100)
    assert sums_of(engine).reassembly.left == 100


@pytest.mark.requirement("R-22")
def test_who_waits_is_served_when_the_one_before_him_goes_away_in_mid_message() -> None:
    engine, _, _ = two_streams()
    fed(engine, "e0 64 50 01 01 61", "e0 64 50 03 01 61")
    assert written(engine) == "a8015a"
    the(engine, Kind.STREAM_IN, 1).end()
    assert written(engine) == "a20100"
    fed(engine, "41 01")
    assert written(engine) == "a8035a"


@pytest.mark.requirement("R-22")
def test_who_waits_and_goes_away_does_not_stop_the_line() -> None:
    engine, one, _ = two_streams(reassembly=150)
    fed(engine, "50 05 00")
    third = the(engine, Kind.STREAM_IN, 5)
    third.give_credit(10)
    written(engine)
    fed(engine, "e0 64 50 01 01 61", "e0 64 50 03 01 61", "e0 14 50 05 01 61")
    assert written(engine) == "a8015a"
    assert sums_of(engine).reassembly.waiting == 2
    the(engine, Kind.STREAM_IN, 3).end()
    assert written(engine) == "a8050a a20300"
    assert one.window.lent == 90


@pytest.mark.requirement("R-22")
def test_who_waits_and_gets_by_without_a_loan_does_not_stop_the_line() -> None:
    engine, _, other = two_streams(reassembly=150)
    fed(engine, "50 05 00")
    the(engine, Kind.STREAM_IN, 5).give_credit(10)
    written(engine)
    fed(engine, "e0 64 50 01 01 61", "e0 64 50 03 01 61", "e0 14 50 05 01 61")
    assert written(engine) == "a8015a"
    other.give_credit(90)
    assert written(engine) == "a8035a a8050a"
    assert sums_of(engine).reassembly.waiting == 0


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-22")
def test_who_waits_and_needs_less_by_now_is_served() -> None:
    """Was: A borrower that needed less by its turn blocked all behind it for ever."""
    engine, _, other = two_streams(reassembly=150)
    fed(engine, "e0 64 50 01 01 61", "e0 64 50 03 01 61")
    assert written(engine) == "a8015a"
    other.give_credit(29)
    assert written(engine) == "a8031d"
    other.give_credit(1)
    assert written(engine) == "a8033d"
    assert (sums_of(engine).reassembly.left, sums_of(engine).reassembly.waiting) == (0, 0)


@pytest.mark.requirement("R-22")
def test_who_sends_his_last_word_leaves_the_line() -> None:
    """A request whose cancellation comes in parts and waits for a loan is answered meanwhile."""
    engine = by_hand(limits=Limits(message=100, reassembly=100))
    fed(engine, "50 01 00", "10 03 00", "50 05 00")
    stream, request, third = (
        the(engine, Kind.STREAM_IN, 1),
        the(engine, Kind.REQUEST_IN, 3),
        the(engine, Kind.STREAM_IN, 5),
    )
    for entity in (stream, request, third):
        entity.give_credit(10)
    written(engine)
    fed(engine, "e0 64 50 01 01 61", "e0 64 02 03 01 61", "e0 14 50 05 01 61")
    assert sums_of(engine).reassembly.waiting == 2
    written(engine)
    request.send(b"")
    assert written(engine) == "300300 a8050a"


@pytest.mark.requirement("R-22")
def test_openings_in_parts_share_the_top_level_window() -> None:
    pair = pair_of(limits=Limits(channel_bytes=1000, channel_floor=1, message=200_000, reassembly=200_000))
    here, there = pair.engines
    here.open_sink(b"a" * 200_000)
    pair.run_until_quiet()
    assert not here.top_sink.has_room(1)
    there.consumed_opening(200_000)
    pair.run_until_quiet()
    here.open_request(b"b" * 150_000)
    pair.run_until_quiet()
    there.consumed_opening(150_000)
    pair.run_until_quiet()
    opened = [(event[0], len(str(event[2])) - 3) for event in seen(pair, 1)]
    assert opened == [("Opened", 200_000), ("Requested", 150_000)]
    assert sums_of(there).reassembly.left == 200_000


def with_opening_in_parts(total: int, *, reassembly: int) -> Engine:
    """Make an engine that has 10 bytes of an opening payload, and has lent credit for the rest."""
    engine = by_hand(limits=Limits(message=100, reassembly=reassembly))
    engine.top_stream.give_credit(10)
    fed(engine, f"e0 {total:02x} 50 09 0a" + "61" * 10)
    assert written(engine) == f"a800{total:02x}"
    return engine


@pytest.mark.requirement("R-22")
def test_a_top_level_message_that_uses_up_the_loan_of_an_opening_does_not_stop_it() -> None:
    """This library never sends that, but the document allows it."""
    engine = with_opening_in_parts(0x64, reassembly=100)
    assert fed(engine, "70 00 5a" + "62" * 90) == [("Received", "top-level in-stream", b"b" * 90)]
    assert written(engine) == ""
    engine.top_stream.consumed((), 90)
    assert written(engine) == "a8005a"
    events = fed(engine, "50 09 5a" + "61" * 90)
    assert events == [("Opened", "in-stream 9", b"a" * 100)]
    assert sums_of(engine).reassembly.left == 10
    engine.consumed_opening(100)
    assert sums_of(engine).reassembly.left == 100


@pytest.mark.requirement("R-22")
def test_such_a_loan_is_made_again_at_once_if_there_is_more_to_lend() -> None:
    engine = with_opening_in_parts(0x64, reassembly=300)
    fed(engine, "70 00 5a" + "62" * 90)
    assert written(engine) == "a8005a"


@pytest.mark.requirement("R-22")
def test_an_opening_that_comes_as_a_whole_may_use_up_the_loan_as_well() -> None:
    engine = with_opening_in_parts(0x14, reassembly=100)
    fed(engine, "50 0b 0a" + "62" * 10)
    assert written(engine) == "a8000a"


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-44")
def test_two_ends_with_payloads_above_the_credit_do_not_wait_for_each_other() -> None:
    """Was: Both sides ending with a payload above the credit waited for each other."""
    engine = by_hand()
    sink = engine.open_sink(id=3)
    sink.give_credit(1)
    written(engine)
    grant(engine, "in-stream 3", 1)
    sink.end(b"ours is long")
    assert written(engine) == "e00c 4203016f"
    # The peer has ended it as well, in parts; it gets credit for that although the local end is queued.
    assert fed(engine, "e0 03", "a2 03 01 61") == []
    assert written(engine) == "480302"
    assert fed(engine, "a2 03 02 62 63") == [("Stopped", "out-sink 3", b"abc")]
    assert written(engine) == "4103"


@pytest.mark.requirement("R-22")
def test_a_message_in_parts_that_nobody_wants_is_not_lent_anything() -> None:
    engine, one, _ = two_streams()
    one.end()
    written(engine)
    assert fed(engine, "e0 64 50 01 01 61") == []
    assert written(engine) == ""
    assert sums_of(engine).unfinished == 0


@pytest.mark.requirement("R-22")
def test_credit_by_hand_stands_beside_the_window_and_not_in_its_budget() -> None:
    pair = pair_of(limits=Limits(channel_bytes=1000, channel_floor=1, connection_bytes=10_000))
    here, there = pair.engines
    stream = here.open_stream()
    pair.run_until_quiet()
    stream.give_credit(5000)
    pair.run_until_quiet()
    sink = the(there, Kind.SINK_IN, stream.id)
    assert sink.credit_out == 6000
    sink.send(b"x" * 6000)
    pair.run_until_quiet()
    stream.consumed((), 6000)
    pair.run_until_quiet()
    assert (stream.window.own, stream.window.by_hand, sink.credit_out) == (1000, 0, 1000)
    assert sums_of(here).budget.used == 2 * (1000 - 1)  # beside the floor of each
    stream.end()
    pair.run_until_quiet()
    assert sums_of(here).budget.used == 1000 - 1


@pytest.mark.requirement("R-22")
def test_credit_by_hand_can_be_all_there_is() -> None:
    engine = by_hand()
    stream = engine.open_stream(id=3, credit=5)
    written(engine)
    fed(engine, "70 03 05 61 62 63 64 65")
    stream.consumed((), 5)
    assert written(engine) == ""
    assert (stream.window.held, stream.window.credit) == (0, 0)


def test_more_cannot_be_consumed_than_came() -> None:
    _engine, one, _ = two_streams()
    with pytest.raises(LocalProtocolError, match="1 bytes consumed: expected at most 0"):
        one.consumed((), 1)
