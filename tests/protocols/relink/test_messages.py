"""Messages: their numbers, their windows, what is acknowledged about them, and one packet for several channels."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.relink import Config
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
    arrived,
    connector,
    deliver,
    fed,
    listener,
    pair,
    quiet,
    seen,
    settle,
    split,
    taken,
    violation,
    written,
)

KIB = 1024


@pytest.mark.clause("relink-F01", "relink-K05", "relink-P13")
def test_messages_of_a_channel_are_numbered_from_zero_and_open_it() -> None:
    one, other = pair()
    assert [one.send(9, (bytes([n]),)) for n in range(3)] == [0, 1, 2]
    deliver(one, other)
    assert seen(other) == [("ChannelOpened", 9), ("Arrived", 9, 0, [(b"\x00",), (b"\x01",), (b"\x02",)])]
    assert seen(other) == []
    fed(one, "0d 00 09 00 02 00 00 00")
    assert one.state.ours.live[9].received == 2


@pytest.mark.clause("relink-F02")
@pytest.mark.requirement("R-59")
def test_numbers_wrap_on_the_wire_and_never_here() -> None:
    one, other = pair(quiet(first_sequence=2**32 - 1))
    assert [one.send(1, (b"x",)), one.send(1, (b"y",))] == [2**32 - 1, 2**32]
    deliver(one, other)
    assert arrived(other, 1) == [(2**32 - 1, [(b"x",), (b"y",)])]
    other.consume(1, through=2**32, now=0.0)
    assert fed(one, "2d 00 01 00 00 00 00 00") == [("Consumed", 1, 2**32)]
    assert one.room(1) == 65_536


@pytest.mark.clause("relink-H01", "relink-P09", "relink-P10", "relink-P12", "relink-P15")
def test_each_direction_has_its_own_channels_and_its_own_id_size() -> None:
    one, other = pair(quiet(connector_id_size=2, listener_id_size=4))
    one.send(5, (b"",))
    assert deliver(one, other).hex() == "1101050000000000"
    other.send(5, (b"",))
    assert deliver(other, one).hex() == "0500050000000000" + "1101050000000000"  # with the ack of the first message
    one.consume(5, through=0, now=0.0)
    one.handle_deadline(1.0)
    assert deliver(one, other).hex() == "2500050000000000"
    assert other.room(5) == 65_536
    one.send(5, (b"",))
    assert one.state.ours.live[5].next == 2
    assert one.state.theirs.live[5].arrived == 0


@pytest.mark.clause("relink-M16")
def test_a_message_without_parts_is_a_message() -> None:
    one, other = pair()
    one.send(1, ())
    one.send(1, (b"", b""))
    deliver(one, other)
    assert arrived(other, 1) == [(0, [(), (b"", b"")])]


@pytest.mark.parametrize("id_size", range(9))
def test_messages_of_all_sizes_arrive_whole(id_size: int) -> None:
    one, other = pair(quiet(connector_id_size=id_size))
    messages = [(bytes([n & 255]) * size,) for n, size in enumerate((0, 1, 7, 8, 9, 2047, 2048, 2049, 65_535, 65_536))]
    more = [(b"a", b"", bytes(70_000), b"bc"), tuple(bytes([n & 255]) for n in range(300))]
    for message in messages + more:
        one.send(0, message)
    data = drain(one)
    for at in range(0, len(data), 1000):
        other.receive_bytes(data[at : at + 1000], 0.0)
    assert taken(other, 0) == messages + more
    assert one.outbox == 0
    assert other.held_bytes == one.state.ours.retained


# --- windows


@pytest.mark.clause("relink-F03", "relink-F04")
@pytest.mark.requirement("R-08")
def test_a_full_window_takes_nothing_until_the_receiver_consumes() -> None:
    one, other = pair(quiet(window=4))
    for n in range(4):
        assert one.room(1) == 4 - n
        one.send(1, (b"x",))
    assert not one.admits(1, 1)
    with pytest.raises(LocalProtocolError, match="4 messages of 288 bytes"):
        one.send(1, (b"x",))
    deliver(one, other)
    one.watch(1)
    assert seen(one) == []
    other.consume(1, through=1, now=0.0)
    assert written(other) == "0d00010003000000 2d00010001000000"
    fed(one, "2d 00 01 00 01 00 00 00")
    assert one.room(1) == 2
    one.send(1, (b"x",))
    one.send(1, (b"x",))


@pytest.mark.clause("relink-F03")
def test_a_window_above_the_numbers_is_refused() -> None:
    Config(window=2**32 - 1)
    with pytest.raises(ValueError, match="4294967296"):
        Config(window=2**32)


@pytest.mark.requirement("R-08")
def test_who_watches_is_told_when_there_is_room_once() -> None:
    one, other = pair(quiet(window=1))
    one.watch(1)
    assert seen(one) == [("Writable", 1)]
    one.send(1, (b"x",))
    one.watch(1)
    one.watch(2)
    assert seen(one) == [("Writable", 2)]
    deliver(one, other)
    other.consume(1, through=0, now=0.0)
    deliver(other, one)
    assert seen(one) == [("Consumed", 1, 0), ("Writable", 1)]
    one.send(1, (b"x",))
    settle(one, other)
    assert ("Writable", 1) not in seen(one)


@pytest.mark.requirement("R-08")
def test_bytes_bound_a_window_as_well_and_an_empty_one_takes_any_message() -> None:
    one, _ = pair(limits=Limits(channel_bytes=8 * KIB))
    assert one.admits(1, 100 * KIB)
    one.send(1, (bytes(100 * KIB),))
    assert not one.admits(1, 1)
    assert one.admits(2, 4 * KIB)
    one.send(2, (bytes(4 * KIB),))
    assert not one.admits(2, 4 * KIB)
    with pytest.raises(LocalProtocolError, match="messages of 8192 bytes"):
        one.send(2, (bytes(4 * KIB),))


@pytest.mark.requirement("R-07", "R-08")
def test_when_the_links_budget_is_spent_small_windows_are_left() -> None:
    limits = Limits(connection_bytes=20 * KIB, channel_bytes=10 * KIB, channel_floor=2 * KIB)
    one, other = pair(limits=limits)
    for channel in range(1, 4):
        one.send(channel, (bytes(9 * KIB),))
    assert one.state.ours.retained_over > limits.connection_bytes
    assert not one.admits(9, 5 * KIB)
    assert one.admits(9, KIB)
    one.send(9, (bytes(KIB),))
    one.watch(9, 5 * KIB)
    deliver(one, other)
    assert not seen(one)
    other.consume(2, through=0, now=0.0)
    settle(one, other)
    assert ("Writable", 9) in seen(one)


def test_a_message_above_the_limit_is_not_sent() -> None:
    one = connector(limits=Limits(message=1000, reassembly=1000))
    one.send(1, (bytes(600), bytes(400)))
    with pytest.raises(LocalProtocolError, match="1001 bytes"):
        one.send(1, (bytes(601), bytes(400)))
    with pytest.raises(LocalProtocolError, match="1001 bytes"):
        one.multicast([1, 2], (bytes(1001),))
    with pytest.raises(LocalProtocolError, match="too many parts: 5"):
        connector(quiet(parts=4)).send(1, (b"",) * 5)
    assert one.channels == (1,)


@pytest.mark.parametrize("parts", [1, 2, 300])
@pytest.mark.parametrize("size", [0, 1, 5000, 65_535, 65_536])
def test_what_is_admitted_can_be_sent(size: int, parts: int) -> None:
    sizes = [size // parts] * (parts - 1)
    one = connector(limits=Limits(channel_bytes=70_000))
    one.send(1, (b"x",))
    while one.admits(1, size, parts):
        one.send(1, (*map(bytes, sizes), bytes(size - sum(sizes))))
    assert one.room(1) < 65_536


def test_many_are_sent_as_long_as_they_fit() -> None:
    one = connector(quiet(window=3))
    assert [one.send(1, (b"x",)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LocalProtocolError):
        one.send(1, (b"x",))
    assert one.unanswered == 3


@pytest.mark.clause("relink-C03")
@pytest.mark.requirement("R-02")
def test_a_channel_must_fit_its_id_and_the_limit() -> None:
    one = connector(quiet(connector_id_size=1), limits=Limits(channels=2))
    for channel in (-1, 256):
        with pytest.raises(LocalProtocolError, match="fits into"):
            one.send(channel, (b"x",))
    one.send(1, (b"x",))
    one.send(2, (b"x",))
    with pytest.raises(LocalProtocolError, match="too many channels: 2 are open"):
        one.send(3, (b"x",))
    with pytest.raises(LocalProtocolError, match="too many channels: 2 are open"):
        one.multicast([1, 3], (b"x",))
    assert one.channels == (1, 2)
    assert one.room(1) == 65_535


# --- acks


def test_an_ack_goes_with_the_next_message_and_needs_no_timer() -> None:
    one, other = pair(quiet())
    one.send(1, (b"",))
    deliver(one, other)
    assert other.next_deadline() == 0.1
    other.consume(1, through=0, now=0.0)
    other.send(1, (b"",))
    assert deliver(other, one).hex() == "2500010000000000" + "1101010000000000"
    assert other.next_deadline() is None


def test_a_link_that_answers_often_does_not_ack_with_every_answer() -> None:
    one, other = pair(quiet())
    acks = []
    for number in range(6):
        now = 0.02 * number
        one.send(1, (b"",))
        deliver(one, other, now)
        other.send(1, (b"",))
        acks.append(len(split(deliver(other, one, now))) > 1)
        deliver(one, other, now)
    assert acks == [True, False, False, True, False, False]  # 50 ms after the last ones


@pytest.mark.clause("relink-F04", "relink-T07")
def test_acks_wait_for_more_of_them_and_at_most_100_ms() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    deliver(one, other, now=5.0)
    other.consume(1, through=0, now=5.0)
    assert not other.has_output()
    assert other.next_deadline() == pytest.approx(5.1)
    other.handle_deadline(5.05)
    assert not other.has_output()
    other.handle_deadline(5.1)
    assert written(other) == "0d00010001000000 2500010000000000"
    assert other.next_deadline() is None
    other.consume(1, through=1, now=7.0)
    assert other.next_deadline() == pytest.approx(7.1), "counted from the command, not from when something came"
    other.handle_deadline(7.1)
    assert written(other) == "2500010000000000"


@pytest.mark.clause("relink-F04")
def test_consumed_includes_received() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    one.send(1, (b"b",))
    deliver(one, other)
    other.consume(1, through=1, now=0.0)
    other.handle_deadline(1.0)
    assert written(other) == "2d00010001000000"
    fed(one, "2d 00 01 00 01 00 00 00")
    assert one.state.ours.live[1].received == 1


@pytest.mark.clause("relink-F04")
def test_a_quarter_of_a_window_is_acknowledged_at_once() -> None:
    one, other = pair(quiet(window=8))
    one.send(1, (b"a",))
    deliver(one, other)
    assert not other.has_output()
    one.send(1, (b"b",))
    deliver(one, other)
    assert written(other) == "0d00010001000000"
    other.consume(1, through=0, now=0.0)
    assert not other.has_output()
    other.consume(1, through=1, now=0.0)
    assert written(other) == "2d00010001000000"


@pytest.mark.clause("relink-F04")
def test_half_of_the_bytes_is_acknowledged_at_once() -> None:
    one, other = pair(limits=Limits(channel_bytes=8 * KIB))
    one.send(1, (bytes(5 * KIB),))
    deliver(one, other)
    assert not other.has_output()
    other.consume(1, through=0, now=0.0)
    assert written(other) == "2500010000000000"


@pytest.mark.clause("relink-O11", "relink-Q10")
def test_an_ack_without_a_number_means_the_next_one_of_its_kind() -> None:
    one = connector()
    for _ in range(5):
        one.send(1, (b"x",))
    drain(one)
    received, through_3 = "05 00 01 00 00 00 00 00", "0d 00 01 00 03 00 00 00"
    assert fed(one, received) == [("Received", 1, 0)]
    assert fed(one, received) == [("Received", 1, 1)]
    assert fed(one, through_3) == [("Received", 1, 3)]
    assert fed(one, "25 00 01 00 00 00 00 00") == [("Consumed", 1, 0)]
    assert fed(one, received) == [("Received", 1, 4)]


@pytest.mark.clause("relink-P16", "relink-A05")
def test_the_short_length_and_the_padding_of_an_ack_do_not_count() -> None:
    one = connector()
    one.send(1, (b"x",))
    drain(one)
    assert fed(one, "05 ff 01 00 ff ff ff ff") == [("Received", 1, 0)]


def test_what_was_taken_and_not_consumed_is_given_out_again() -> None:
    one, other = pair()
    for n in range(4):
        one.send(1, (bytes([n]),))
    deliver(one, other)
    assert arrived(other, 1) == [(0, [(b"\0",), (b"\1",), (b"\2",), (b"\3",)])]
    other.consume(1, through=0, now=0.0)
    seen(other)
    other.rewind(1)
    assert arrived(other, 1) == [(1, [(b"\1",), (b"\2",), (b"\3",)])]
    other.rewind(1)
    other.rewind(1)
    one.send(1, (b"\4",))
    deliver(one, other)
    assert seen(other) == [("Arrived", 1, 1, [(b"\1",), (b"\2",), (b"\3",), (b"\4",)])]
    other.rewind(9)
    assert seen(other) == []


def test_only_what_arrived_can_be_consumed() -> None:
    one, other = pair()
    for _ in range(3):
        one.send(1, (b"x",))
    deliver(one, other)
    with pytest.raises(LocalProtocolError, match="message 3; 2 is the last"):
        other.consume(1, through=3, now=0.0)
    other.consume(1, through=1, now=0.0)
    other.consume(1, through=0, now=0.0)
    assert other.held_bytes == other.state.theirs.live[1].bytes > 0
    with pytest.raises(LocalProtocolError, match="no channel 4"):
        other.consume(4, through=0, now=0.0)


def test_messages_that_come_before_the_event_is_fetched_are_in_it_and_later_ones_in_another() -> None:
    one, other = pair()
    one.send(1, (b"a",))
    deliver(one, other)
    one.send(1, (b"b",))
    deliver(one, other)
    assert seen(other) == [("ChannelOpened", 1), ("Arrived", 1, 0, [(b"a",), (b"b",)])]
    one.send(1, (b"c",))
    deliver(one, other)
    assert seen(other) == [("Arrived", 1, 2, [(b"c",)])]
    assert seen(other) == []


# --- what a peer may make us hold


@pytest.mark.clause("relink-F03")
@pytest.mark.requirement("R-03", "R-17")
def test_more_messages_than_the_window_are_a_violation() -> None:
    other = listener(quiet(window=2))
    message = "11 01 01 00 00 00 00 00"
    error = violation(other, message + message, message)
    assert error.rule == "relink-F03"
    assert error.offset == 16
    assert "1 beside 2" in str(error)


@pytest.mark.requirement("R-01", "R-03")
def test_more_bytes_than_the_limits_are_a_violation() -> None:
    limits = Limits(connection_bytes=10_000, message=2000, reassembly=2000, channel_floor=64, outbox=1)
    one, other = connector(), listener(quiet(parts=1), limits=limits)
    for channel in range(8):
        one.send(channel, (bytes(2000),))
    packets = [packet.hex() for packet in split(drain(one))]
    error = violation(other, *packets[:7])
    assert error.limit == "connection_bytes"
    assert 10_000 < other.held_bytes < 10_000 + 2000 + 8 * 64 + 100


@pytest.mark.requirement("R-02")
def test_more_channels_than_the_limit_are_a_violation() -> None:
    other = listener(limits=Limits(channels=2))
    fed(other, "11 01 01 00 00 00 00 00", "11 01 02 00 00 00 00 00")
    assert violation(other, "11 01 03 00 00 00 00 00").limit == "channels"
    other = listener(limits=Limits(channels=2))
    three = "13 01 00 00 03 00 00 00 01 00 02 00 03 00 00 00"
    assert violation(other, three).limit == "channels"
    assert other.peer_channels == ()
