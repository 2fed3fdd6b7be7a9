"""One packet for several channels: its numbers, its order, and what becomes of it when some lack it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.relink.frames import MessagePacket, Operation, OperationPacket, encode_packet
from muxkit.testing._pair import drain
from tests.protocols.relink._helpers import (
    connector,
    deliver,
    exchange,
    fed,
    listener,
    pair,
    parsed,
    quiet,
    reconnect,
    seen,
    settle,
    taken,
    transactional,
)

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@pytest.mark.clause("relink-F05", "relink-F06", "relink-C02")
def test_a_multicast_has_a_number_in_each_channel_and_is_answered_in_each() -> None:
    one, other = pair()
    for _ in range(10):
        one.send(5, (b"x",))
    settle(one, other)
    assert one.multicast([5, 6], (b"tick",)) == [10, 0]
    assert parsed(deliver(one, other)) == [MessagePacket((5, 6), (b"tick",), True)]
    taken(other, 5)
    other.consume(5, through=10, now=0.0)
    settle(one, other)
    assert (one.room(5), one.room(6)) == (65_536, 65_535)
    assert taken(other, 6) == [(b"tick",)]


@pytest.mark.clause("relink-F07", "relink-C05")
def test_a_channel_that_is_named_twice_gets_it_twice() -> None:
    one, other = pair()
    assert one.multicast([5, 6, 5], (b"tick",)) == [0, 0, 1]
    deliver(one, other)
    assert taken(other, 5) == [(b"tick",)] * 2
    assert taken(other, 6) == [(b"tick",)]
    zero = listener(quiet(connector_id_size=0, listener_id_size=0))
    events = fed(zero, "13 01 00 00 03 00 00 00 00 00 00 00 00 00 00 00")
    assert events == [("ChannelOpened", 0), ("Arrived", 0, 0, [(b"",)] * 3)]


@pytest.mark.clause("relink-C07")
def test_a_packet_to_nobody_does_nothing() -> None:
    other = listener()
    assert fed(other, "13 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "03 00 00 00 00 00 00 00") == []
    with pytest.raises(LocalProtocolError, match="invalid number of channels 0"):
        connector().multicast([], (b"x",))
    with pytest.raises(LocalProtocolError, match="invalid number of channels 5"):
        connector(quiet(targets=4)).multicast([1] * 5, (b"x",))


def test_a_multicast_keeps_the_order_of_each_of_its_channels() -> None:
    one, other = pair()
    one.send(1, (b"before",))
    one.multicast([1, 2], (b"first",))
    one.multicast([2, 1, 3], (b"second",))
    one.send(2, (b"after",))
    assert not parsed(b"".join(one.buffers_to_send(0)))
    while one.has_output():
        other.receive_bytes(b"".join(one.buffers_to_send(1)), 0.0)
    assert taken(other, 1) == [(b"before",), (b"first",), (b"second",)]
    assert taken(other, 2) == [(b"first",), (b"second",), (b"after",)]
    assert taken(other, 3) == [(b"second",)]
    assert one.outbox == 0


@pytest.mark.clause("relink-T01", "relink-F05")
def test_decisions_go_out_on_a_channel_whose_next_message_waits_for_another_channel() -> None:
    one, other = pair(transactional())
    one.send(1, (b"x",))
    for _ in range(3):
        one.send(2, (bytes(70_000),))
    one.multicast([1, 2], (b"both",))
    other.receive_bytes(b"".join(one.buffers_to_send(100)), 0.0)
    one.commit(1, through=0)
    for _ in range(2):
        other.receive_bytes(b"".join(one.buffers_to_send(100)), 0.0)
    assert taken(other, 1) == [(b"x",)]
    assert one.state.ours.live[1].stalled
    one.commit(1)
    one.commit(2)
    deliver(one, other)
    assert taken(other, 1) == [(b"both",)]
    assert len(taken(other, 2)) == 4


@pytest.mark.clause("relink-R03", "relink-F06")
def test_a_multicast_is_sent_again_to_those_who_lack_it() -> None:
    one, other = pair()
    one.multicast([1, 2], (b"tick",))
    drain(one)
    one.multicast([1, 2], (b"tock",))
    reconnect(one)
    drain(one)
    fed(one, "0d 00 01 00 00 00 00 00", "60 00 00 00 00 00 00 00")
    packets = parsed(drain(one))
    assert packets == [MessagePacket((2,), (b"tick",)), MessagePacket((1, 2), (b"tock",), True)]
    assert other.peer_channels == ()


@pytest.mark.requirement("R-17")
def test_a_multicast_that_one_channel_has_no_room_for_is_sent_to_none() -> None:
    one, other = pair(quiet(window=2))
    one.send(2, (b"x",))
    with pytest.raises(LocalProtocolError, match="channel 2: no room for a message of 1 bytes: 2"):
        one.multicast([1, 2, 2], (b"x",))
    assert one.channels == (2,)
    assert one.room(2) == 1
    exchange(one, other)
    assert taken(other, 2) == [(b"x",)]


# --- the work of one call


@pytest.mark.requirement("R-27")
@pytest.mark.clause("relink-C02")
def test_each_channel_of_a_multicast_counts_as_a_packet_and_the_rest_come_with_the_next_calls() -> None:
    other = listener()
    other.frames_at_once = 100
    ids = tuple(range(950))
    data = encode_packet(MessagePacket(ids, (b"tick",), multicast=True), 2)
    close = encode_packet(OperationPacket(Operation.CLOSE, (0,)), 2)
    other.receive_bytes(data + close, 0.0)
    steps = [seen(other)]
    while other.unparsed:
        other.receive_bytes(b"", 0.0)
        steps.append(seen(other))
    opened = [len([event for event in events if event[0] == "ChannelOpened"]) for events in steps]
    assert sum(opened) == 950
    assert max(opened) <= 100
    came = [event for events in steps for event in events if event[0] == "Arrived"]
    assert came == [("Arrived", channel, 0, [(b"tick",)]) for channel in ids]


@pytest.mark.requirement("R-27")
def test_a_multicast_that_a_break_cut_short_is_sent_again_to_those_who_lack_it_and_to_no_other() -> None:
    one, other = pair()
    other.frames_at_once = 3
    ids = [*range(10)]
    one.multicast(ids, (b"tick",))
    deliver(one, other)
    assert other.unparsed
    reconnect(one, other)
    other.frames_at_once = 1000
    settle(one, other)
    assert [taken(other, channel) for channel in ids] == [[(b"tick",)]] * 10


@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("size", [0, 8])
def test_a_message_of_many_parts_is_taken_in_several_calls(size: int) -> None:
    other = listener()
    other.frames_at_once = 100
    parts = (bytes(size),) * 20_000 + (b"last",)
    other.receive_bytes(encode_packet(MessagePacket((1,), parts), 2), 0.0)
    calls = 1
    while other.unparsed:
        other.receive_bytes(b"", 0.0)
        calls += 1
    assert calls >= (12 if size else 2)
    assert taken(other, 1) == [parts]


@pytest.mark.requirement("R-27")
def test_the_parts_without_bytes_of_a_message_are_not_gone_through_one_by_one() -> None:
    """Their number is the peer's choice, and the head cannot be cut: 60,000 of them would take a turn of 15 ms."""
    other = listener()
    parts = (b"",) * 60_000 + (b"last",)
    packet = encode_packet(MessagePacket((1,), parts), 2)
    lines = 0

    def count(*_: object) -> TraceFunction:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        other.receive_bytes(packet, 0.0)
    finally:
        sys.settrace(before)
    assert lines < 1000
    assert taken(other, 1) == [parts]


@pytest.mark.requirement("R-27")
def test_packets_to_nobody_count_as_well() -> None:
    other = listener()
    other.frames_at_once = 100
    other.receive_bytes(encode_packet(MessagePacket((), (b"",), multicast=True), 2) * 300, 0.0)
    assert other.unparsed
