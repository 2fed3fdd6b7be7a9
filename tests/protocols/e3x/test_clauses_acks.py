"""`ack`: what it covers, when it is sent, and its effect; rule by rule."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.e3x import Packet
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from tests.protocols.e3x._helpers import (
    acks,
    connector,
    fed,
    listener,
    opened,
    sending,
    sent,
    seqs,
    told,
    unacked,
    wait,
)


@pytest.mark.clause("e3x-A01")
def test_a_packet_says_how_far_the_application_is() -> None:
    engine = listener()
    channel = opened(engine)
    for seq in (2, 3, 4, 5):
        fed(engine, c=1, seq=seq)
    for _ in range(2):
        channel.receiver.done()
    channel.sender.send(b"x")
    assert [packet.ack for packet in sent(engine)] == [3]


@pytest.mark.clause("e3x-A02")
def test_the_next_packet_is_offered_when_the_one_before_is_done() -> None:
    engine = listener()
    fed(engine, c=1, seq=2)
    assert fed(engine, c=1, type="chat", seq=1) == [("opened", 1, "chat", b"")]
    channel = engine.channel(1)
    assert channel is not None
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.processed == 0
    channel.receiver.done()
    assert channel.receiver.processed == 1
    assert told(engine) == [("message", 1, b"")]


@pytest.mark.clause("e3x-A02")
def test_done_without_anything_to_be_done_is_refused() -> None:
    engine = listener()
    channel = opened(engine)
    with pytest.raises(LocalProtocolError, match="the application has no message"):
        channel.receiver.done()


@pytest.mark.clause("e3x-A03")
def test_an_ack_never_covers_what_was_received_and_not_processed() -> None:
    engine = listener()
    fed(engine, c=1, type="chat", seq=1)
    for seq in (2, 3, 4, 5):
        fed(engine, c=1, seq=seq)
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.send(b"x")
    assert all(not packet.ack for packet in sent(engine))
    channel.receiver.done()
    channel.sender.send(b"y")
    assert [packet.ack for packet in sent(engine)] == [1]


@pytest.mark.clause("e3x-A05")
def test_without_an_ack_in_it_a_packet_may_wait_a_second_for_its_own() -> None:
    engine = listener()
    fed(engine, c=1, type="chat", seq=1, now=0.0)
    engine.handle_deadline(0.1)
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    assert sent(engine, 0.1) == []
    assert [(when, packet.ack) for when, packet in wait(engine, 60.0)] == [(1.0, 1)]


@pytest.mark.clause("e3x-A05")
def test_what_was_not_processed_within_its_second_is_acked_as_soon_as_it_is() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, c=1, seq=2, now=5.0)
    fed(engine, c=1, seq=3, now=5.0)
    assert [packet for _, packet in wait(engine, 20.0)] == []
    channel.receiver.done()
    assert acks(sent(engine, 20.0)) == [(2, None)]
    assert [packet.ack for _, packet in wait(engine, 20.9)] == []
    channel.receiver.done()
    assert [packet.ack for _, packet in wait(engine, 21.0)] == [3]


@pytest.mark.clause("e3x-A06")
def test_a_packet_with_an_ack_in_it_wants_its_own_at_once() -> None:
    engine = listener()
    channel = opened(engine)
    channel.sender.send(b"hello")
    sent(engine)
    fed(engine, b"hi", c=1, seq=2, ack=1)
    assert sent(engine) == []
    channel.receiver.done()
    assert acks(sent(engine)) == [(2, None)]


@pytest.mark.clause("e3x-A06")
def test_a_question_that_processing_cannot_answer_is_answered_at_once() -> None:
    """A packet before it is missing: the answer tells which."""
    engine = listener()
    opened(engine)
    fed(engine, c=1, seq=3)
    sent(engine)
    fed(engine, c=1, seq=4, ack=0, miss=[100])
    assert acks(sent(engine)) == [(1, [1, 49])]


@pytest.mark.clause("e3x-A07")
def test_acks_go_on_at_a_regular_rate() -> None:
    engine = listener()
    channel = opened(engine)
    times: list[float] = []
    covered = 1
    for number in range(50):
        now = 10 + number / 10
        times += [when for when, _ in wait(engine, now)]
        fed(engine, c=1, seq=2 + number, now=now)
        channel.receiver.done()
        assert sent(engine, now) == []
    for when, packet in wait(engine, 100.0):
        times.append(when)
        covered = packet.ack or 0
    assert times == pytest.approx([11, 12, 13, 14, 15])
    assert covered == 51


@pytest.mark.clause("e3x-A08")
def test_an_ack_of_its_own_has_no_seq_and_uses_none() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, c=1, seq=2, end=True)
    channel.sender.send(b"one")
    sent(engine)
    fed(engine, c=1, seq=2, end=True)
    (ack,) = sent(engine)
    assert ack == Packet(1, ack=2)
    channel.sender.send(b"two")
    assert seqs(sent(engine)) == [2]


@pytest.mark.clause("e3x-A09")
def test_a_received_ack_of_its_own_is_nothing_for_the_application() -> None:
    engine = connector()
    channel = sending(engine, 4)
    assert fed(engine, c=1, ack=3) == [("delivered", 1, 1, 3)]
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.processed == 0
    assert unacked(channel) == [4]
    assert fed(engine, b"first", c=1, seq=1) == [("message", 1, b"first")]


@pytest.mark.clause("e3x-A11")
def test_the_sender_is_told_of_each_delivered_packet_once() -> None:
    engine = connector()
    sending(engine, 3)
    assert fed(engine, c=1, ack=2) == [("delivered", 1, 1, 2)]
    assert fed(engine, c=1, ack=2) == []
    assert fed(engine, c=1, ack=3) == [("delivered", 1, 3, 3)]


def test_a_message_has_a_receipt_that_delivered_reaches() -> None:
    engine = connector()
    channel = engine.open("chat")
    assert isinstance(channel.sender, ReliableSender)
    channel.sender.send(b"small")
    assert channel.sender.last == 2
    channel.sender.send(bytes(3000))
    assert channel.sender.last == 5
    channel.sender.finish()
    assert [packet.seq for packet in sent(engine) if packet.end] == [6]
    assert fed(engine, c=1, ack=5) == [("delivered", 1, 1, 5)]


@pytest.mark.clause("e3x-A12")
def test_an_ack_that_goes_back_changes_nothing() -> None:
    engine = connector()
    channel = sending(engine, 4)
    fed(engine, c=1, ack=3, miss=[20])
    assert fed(engine, c=1, ack=2, miss=[2, 1]) == []
    assert unacked(channel) == [4]
    assert isinstance(channel.sender, ReliableSender)
    assert channel.sender.window == 20
    assert sent(engine) == []


@pytest.mark.clause("e3x-A13")
@pytest.mark.requirement("R-19")
@pytest.mark.parametrize("ack", [3, 9, 2**32 - 1])
def test_an_ack_of_what_was_never_sent_is_dropped_with_its_packet(ack: int) -> None:
    engine = connector()
    channel = sending(engine, 2)
    channel.sender.send(b"queued, and not sent")
    assert fed(engine, b"content", c=1, seq=1, ack=ack, miss=[1, 50]) == [("fault", "unsent")]
    assert unacked(channel) == [1, 2, 3]
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.highest == 0
    assert fed(engine, b"content", c=1, seq=1) == [("message", 1, b"content")]


def test_a_sender_asks_for_an_ack_with_the_last_packet_that_it_has() -> None:
    engine = connector()
    channel = sending(engine, 1)
    for _ in range(3):
        channel.sender.send(b"x")
    packets = sent(engine)
    assert (packets[-1].ack, packets[-1].miss) == (0, [50])
    assert packets[-2].ack is None


@pytest.mark.clause("e3x-A07")
def test_a_quarter_of_the_window_that_was_processed_is_acked_also_without_a_question() -> None:
    engine = listener(window=50)
    channel = opened(engine)
    for seq in range(2, 15):
        fed(engine, c=1, seq=seq)
        channel.receiver.done()
    assert acks(sent(engine)) == [(14, None)]
    assert [(when, packet.ack) for when, packet in wait(engine, 60.0)] == [(1.25, 14)], "once more: it may be lost"
