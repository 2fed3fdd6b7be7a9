"""Section 3.4: when messages are acked, in which form, and what an answer means to the sender."""

from __future__ import annotations

import time

import pytest

from muxkit.protocols.aqueduct import Config, Mode
from muxkit.protocols.aqueduct.events import Arrived
from muxkit.protocols.aqueduct.frames import AckReliable, encode_frame
from muxkit.protocols.aqueduct.numbers import ReliableNumbers, ack_varints, acked_ranges
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    client,
    entry,
    hexed,
    receiver_of,
    sender_of,
    server,
    statistics_of,
    taken,
)

clause = pytest.mark.clause


def message(number: int) -> str:
    return f"04 {number:02x} 00 00 00"


def receipts(peer: ScriptedPeer, count: int, mode: Mode) -> None:
    for _ in range(count):
        entry(peer).transmit(b"", mode=mode, receipt=True)
    peer.written()
    peer.datagrams()


@clause("aqueduct-A01")
def test_what_came_in_streams_is_acked_soon_after_all_together() -> None:
    peer = server()
    peer.send("03 00" + message(0) + message(1), stream=2)
    assert peer.written() == []
    peer.send("03 00" + message(2))
    peer.later(0.025)
    assert peer.bytes_written() == [hexed("03 00 08 02 00 03")]


@clause("aqueduct-A02")
def test_an_ack_begins_with_a_gap_from_zero() -> None:
    peer = server()
    peer.send("03 00" + message(2) + message(3) + message(7), stream=2)
    peer.later(0.025)
    assert peer.bytes_written() == [hexed("03 00 08 04 02 02 03 01")]
    numbers = ReliableNumbers(10)
    for number in (2, 3, 7):
        numbers.arrived(number, number)
    varints = ack_varints(numbers.owed)
    assert list(acked_ranges(varints)) == [(2, 3), (7, 7)]


def answering() -> ScriptedPeer:
    """Make a server that has received a message, with a channel on which it can answer."""
    peer = server()
    peer.send("03 00 04 00 00 02 02 00 00", stream=2)
    sender_of(peer, 2).send(b"a")
    return peer


@clause("aqueduct-A01")
def test_an_ack_goes_with_the_next_message_and_needs_no_timer() -> None:
    peer = answering()
    assert peer.engine.next_deadline() is not None
    assert peer.bytes_written() == [hexed("03 02 04 00 00 00 01 61"), hexed("03 00 08 02 00 01")]
    assert peer.engine.next_deadline() is None


@clause("aqueduct-A01")
def test_a_side_that_answers_often_does_not_ack_with_every_answer() -> None:
    peer = answering()
    peer.written()
    answered = []
    for number in range(1, 8):
        peer.later(0.005)
        peer.send(f"04 {number:02x} 00 00 00", stream=2)
        sender_of(peer, 2).send(b"a")
        answered.append(len(peer.written()))
    assert answered == [1, 1, 2, 1, 1, 2, 1]  # 12.5 ms after the last acks


@clause("aqueduct-A03")
def test_a_gap_is_no_nack() -> None:
    peer = client()
    receipts(peer, 3, Mode.UNORDERED)
    assert peer.send("03 00 08 02 02 01") == [("Acked", 0)]
    assert peer.send("03 00 08 02 00 02") == [("Acked", 0)] * 2


@clause("aqueduct-A04")
@pytest.mark.requirement("R-19")
def test_a_number_may_be_acked_twice_but_not_before_it_was_sent() -> None:
    peer = client()
    receipts(peer, 2, Mode.ORDERED)
    assert peer.send("03 00 08 02 00 02", stream=3) == [("Acked", 0)] * 2
    assert peer.send("08 02 01 01", stream=3) == []
    error = peer.violation("08 02 00 03", stream=3)
    assert (error.rule, error.offset) == ("aqueduct-A04", 10)
    assert "message 2 acked, 2 were sent" in str(error)


@clause("aqueduct-T25", "aqueduct-A04")
def test_even_a_new_channel_may_not_ack_what_was_never_sent() -> None:
    """The clause's own test accepts this; the rule for numbers that were never sent takes precedence."""
    assert server().violation("03 02 08 02 00 01").rule == "aqueduct-A04"


@clause("aqueduct-A05")
@pytest.mark.requirement("R-18")
def test_the_receipt_deadline_is_a_second_or_twice_the_round_trip() -> None:
    engine = server().engine
    assert engine.state.receipt_deadline == 1.0
    engine.set_rtt(0.2)
    assert engine.state.receipt_deadline == 0.4
    assert server(config=Config(receipt_deadline=3.0)).engine.state.receipt_deadline == 3.0


@clause("aqueduct-A06")
def test_counts_add_up() -> None:
    peer = server()
    peer.send("03 00 05 03 05 02", stream=2)
    assert receiver_of(peer, 0).unreliable.known == 5
    peer.later(1.1)
    assert peer.bytes_written() == [hexed("03 00 09 00 02 00 05")]


@clause("aqueduct-A07", "aqueduct-A08")
def test_datagrams_are_reported_once_and_in_a_stream_when_their_time_is_up() -> None:
    peer = server()
    peer.datagram("03 00" + message(0))
    peer.datagram("03 00" + message(2))
    peer.send("03 00 05 03")
    peer.later(0.999)
    assert (peer.written(), peer.datagrams()) == ([], [])
    peer.later(0.001)
    assert peer.bytes_written() == [hexed("03 00 09 00 03 01 01 01")]
    peer.later(5)
    assert peer.written() == []


@clause("aqueduct-A09")
def test_a_report_alternates_acks_and_nacks() -> None:
    peer = server()
    for number in (0, 1, 4):
        peer.datagram("03 00" + message(number))
    peer.send("03 00 05 05")
    peer.later(1)
    assert peer.bytes_written() == [hexed("03 00 09 00 03 02 02 01")]


@clause("aqueduct-A10")
def test_a_report_goes_on_where_the_last_one_left_off() -> None:
    peer = server()
    for number in range(5):
        peer.datagram("03 00" + message(number))
    peer.send("03 00 05 03", stream=2)
    peer.later(0.5)
    peer.send("05 02", stream=2)
    peer.later(0.5)
    assert peer.bytes_written() == [hexed("03 00 09 00 01 03")]
    peer.later(0.5)
    assert peer.bytes_written() == [hexed("09 00 01 02")]


@clause("aqueduct-A11")
@pytest.mark.requirement("R-19")
def test_a_report_may_run_ahead_of_the_counts_but_not_of_what_was_sent() -> None:
    peer = client()
    receipts(peer, 2, Mode.UNRELIABLE)
    assert peer.send("03 00 09 00 02 01 01", stream=3) == [("Acked", 0), ("Nacked", 0)]
    assert peer.violation("09 00 01 01", stream=3).rule == "aqueduct-A11"
    other = client()
    receipts(other, 2, Mode.UNRELIABLE)
    assert other.violation("03 00 09 00 01 03").rule == "aqueduct-A11"


@clause("aqueduct-A12")
def test_counts_come_on_one_stream() -> None:
    peer = server()
    peer.send("03 00 05 01")
    assert peer.violation("03 00 05 01").rule == "aqueduct-A12"


@clause("aqueduct-A13")
def test_a_datagram_that_was_nacked_is_ignored_when_it_comes_after_all() -> None:
    peer = server()
    peer.datagram("03 00" + message(0))
    peer.send("03 00 05 02")
    peer.later(1)
    assert peer.bytes_written() == [hexed("03 00 09 00 02 01 01")]
    assert peer.datagram("03 00" + message(1)) == []
    peer.later(5)
    assert peer.written() == []


@clause("aqueduct-A14")
def test_that_duty_ends_with_the_receiver() -> None:
    peer = server()
    peer.send("03 08 05 02")
    peer.later(1)
    peer.send("03 08 07")
    peer.written()
    peer.later(1.1)
    assert peer.datagram("03 08" + message(1)) == [("Arrived", 8, 1, b"")]


@clause("aqueduct-A15")
def test_a_datagram_is_delivered_at_once_and_reported_only_when_it_was_counted() -> None:
    peer = server()
    assert peer.datagram("03 00" + message(0)) == [("Arrived", 0, 0, b"")]
    peer.later(5)
    assert peer.written() == []
    peer.send("03 00 05 01")
    peer.later(1)
    assert peer.bytes_written() == [hexed("03 00 09 00 01 01")]


@clause("aqueduct-S08")
def test_a_datagram_that_repeats_is_dropped_in_silence() -> None:
    peer = server()
    assert peer.datagram("03 00" + message(0)) == [("Arrived", 0, 0, b"")]
    assert peer.datagram("03 00" + message(0)) == []
    assert statistics_of(peer.engine).dropped_datagrams == 1


@pytest.mark.requirement("R-06")
def test_many_counts_make_few_deadlines_and_none_comes_early() -> None:
    peer = server()
    peer.send("03 00", stream=2)
    for _ in range(10_000):
        peer.send("05 01", stream=2)
        peer.now += 0.0001
    assert len(receiver_of(peer, 0)._reports) <= 41
    reported_at: list[float] = []
    while (due := peer.engine.next_deadline()) is not None:
        peer.now = due
        peer.handle_deadline(due)
        reported_at += [receiver_of(peer, 0).unreliable.due - due * 10_000] if peer.written() else []
    assert receiver_of(peer, 0).unreliable.reported == 10_000
    # Number n was announced at n/10000 s: none is reported less than a second later.
    assert all(number <= -10_000 + 1.01 for number in reported_at)


@pytest.mark.requirement("R-18")
@pytest.mark.parametrize(
    "text",
    [
        "05 ff ff ff ff ff ff ff ff 0f",  # 2^60 datagrams sent
        "06 ff ff ff ff ff ff ff ff 0f",
        "04 ff ff ff ff ff ff ff ff 0f 00 00 00",
    ],
)
def test_a_frame_costs_nothing_for_the_size_of_its_numbers(text: str) -> None:
    peer = server()
    began = time.process_time()
    peer.send("03 00" + text, stream=2)
    peer.datagram("03 00 04 80 80 80 80 80 80 80 80 08 00 00 00")
    peer.later(2)
    peer.written()
    assert not peer.engine.over
    assert time.process_time() - began < 0.5


@pytest.mark.requirement("R-18")
def test_an_ack_of_2_to_60_numbers_is_checked_at_once_and_a_long_one_costs_what_it_answers() -> None:
    peer = client()
    receipts(peer, 2, Mode.ORDERED)
    error = peer.violation("03 00" + encode_frame(AckReliable([0, 2**60])).hex())
    assert error.rule == "aqueduct-A04"
    other = client()
    entry(other).sent_reliable = 2**60
    began = time.process_time()
    assert other.send("03 00" + encode_frame(AckReliable([5, 2**59, 1, 3])).hex()) == []
    assert time.process_time() - began < 0.5


@pytest.mark.requirement("R-06")
def test_acks_are_merged_while_they_are_not_written() -> None:
    peer = server()
    peer.send("03 00", stream=2)
    for number in range(5000):
        (message,) = peer.messages(encode(number), stream=2)
        taken(message)
        peer.later(0.01)
    (text,) = peer.bytes_written()
    assert text == hexed("03 00 08 03 00 88 27")


def encode(number: int) -> str:
    return "04" + bytes([number & 0x7F | 0x80, number >> 7]).hex() + "000000"


@pytest.mark.requirement("R-04")
def test_numbers_with_too_many_holes_end_the_connection_and_in_datagrams_are_not_received() -> None:
    peer = server(config=Config(gaps=3))
    for number in (0, 2, 4, 6, 8):
        peer.datagram("03 00" + message(number))
    assert statistics_of(peer.engine).dropped_datagrams == 2
    peer.send("03 00" + message(0) + message(2) + message(4), stream=2)
    assert "at most 3, 6 to 6 would be range 4" in str(peer.violation(message(6), stream=2))


@pytest.mark.requirement("R-06")
def test_holes_that_were_reported_do_not_count() -> None:
    peer = server(config=Config(gaps=3))
    peer.send("03 00", stream=2)
    for number in range(0, 100, 2):
        assert peer.datagram("03 00" + message(number)) == [("Arrived", 0, number, b"")]
        peer.send("05 02", stream=2)
        peer.later(1)
        peer.written()


def test_a_full_mailbox_takes_no_datagram_and_it_is_nacked() -> None:
    peer = server()
    room = peer.engine.limits.short_window // (1000 + 256 + 6)
    messages: list[Arrived] = []
    for number in range(room + 3):
        peer.receive_datagram(bytes.fromhex("03 00") + encode_large(number), 0.0)
        messages += [event for event in peer.full_events() if isinstance(event, Arrived)]
    assert len(messages) == room
    taken(messages[0])
    assert peer.datagram("03 00" + encode_large(room + 3).hex()) == [("Arrived", 0, room + 3, b"x" * 1000)]


def encode_large(number: int) -> bytes:
    return bytes([4, number & 0x7F | 0x80, number >> 7, 0, 0, 0xE8, 0x07]) + b"x" * 1000


def test_an_empty_message_is_delivered() -> None:
    assert server().send("03 00" + EMPTY) == [("Arrived", 0, 0, b"")]
