"""Reliable Channels and `seq`: what the document says about opening and numbering, rule by rule."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.e3x import Config, Engine
from muxkit.protocols.e3x.packets import Packet
from muxkit.protocols.e3x.receive import Arrival, ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from tests.protocols.e3x._helpers import (
    SEQ_MOST,
    acks,
    connector,
    fed,
    listener,
    opened,
    receiver_with,
    sending,
    sent,
    seqs,
    told,
    unacked,
    wait,
)


@pytest.mark.clause("e3x-R01")
def test_a_channel_opened_without_seq_is_unreliable() -> None:
    engine = listener()
    assert fed(engine, c=1, type="x") == [("opened", 1, "x", b"")]
    assert fed(engine, b"B", c=1) == [("message", 1, b"B")]
    assert fed(engine, b"A", c=1) == [("message", 1, b"A")]
    assert fed(engine, b"A", c=1) == [("message", 1, b"A")]
    assert sent(engine) + [packet for _, packet in wait(engine, 60.0)] == []


@pytest.mark.clause("e3x-R03", "e3x-A04")
def test_an_opening_carries_type_and_seq_1_and_no_ack() -> None:
    engine = connector()
    engine.open("chat", b"hello")
    assert sent(engine) == [Packet(1, type="chat", seq=1, body=b"hello")]


@pytest.mark.clause("e3x-R04")
def test_who_cannot_take_reliable_channels_answers_with_an_err() -> None:
    engine = listener(reliable=False)
    assert fed(engine, c=1, type="chat", seq=1) == [("fault", "misplaced")]
    assert sent(engine) == [Packet(1, err="only unreliable channels are taken")]
    assert engine.channels == 0
    assert fed(engine, c=3, type="chat") == [("opened", 3, "chat", b"")]


@pytest.mark.clause("e3x-R05")
def test_a_type_that_is_known_as_unreliable_cannot_be_opened_as_reliable() -> None:
    engine = connector(unreliable=("ping",))
    with pytest.raises(LocalProtocolError, match="'ping' are unreliable"):
        engine.open("ping")
    assert sent(engine) == []
    assert engine.channels == 0
    assert engine.open("ping", reliable=False).id == 1


@pytest.mark.clause("e3x-R05")
def test_a_peer_that_opens_such_a_type_with_a_seq_gets_an_err() -> None:
    engine = listener(unreliable=("ping",))
    fed(engine, c=1, type="ping", seq=1)
    assert sent(engine) == [Packet(1, err="ping is unreliable")]
    assert engine.channels == 0


@pytest.mark.clause("e3x-R05")
def test_the_err_also_comes_when_a_later_packet_was_there_first() -> None:
    engine = listener(unreliable=("ping",))
    fed(engine, c=1, seq=2)
    fed(engine, c=1, type="ping", seq=1)
    assert Packet(1, err="ping is unreliable") in sent(engine)
    assert engine.channels == 0


@pytest.mark.clause("e3x-S01", "e3x-S03")
def test_every_packet_with_content_has_the_next_seq_also_the_end() -> None:
    engine = connector()
    channel = engine.open("chat")
    for body in (b"a", b"b", b"c", b""):
        channel.sender.send(body)
    channel.sender.finish()
    packets = sent(engine)
    assert seqs(packets) == [1, 2, 3, 4, 5, 6]
    assert [packet.end for packet in packets] == [False] * 5 + [True]


@pytest.mark.clause("e3x-S02")
@pytest.mark.parametrize("seq", [0, -1, 1.5, "2", True])
def test_a_malformed_seq_reaches_nobody(seq: object) -> None:
    engine = listener()
    opened(engine)
    assert fed(engine, b"x", c=1, seq=seq) == [("fault", "malformed")]
    assert fed(engine, b"y", c=1, seq=2) == [("message", 1, b"y")]


@pytest.mark.clause("e3x-S04")
def test_each_direction_has_its_own_seqs() -> None:
    engine = listener()
    fed(engine, c=1, type="chat", seq=1)
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    channel.sender.send(b"welcome")
    assert sent(engine) == [Packet(1, seq=1, ack=1, body=b"welcome")]


def worn_out(left: int) -> Engine:
    """Make an engine whose channel 1 has used all seqs but the last `left`, all of them acked."""
    engine = connector()
    channel = sending(engine, 1)
    fed(engine, c=1, ack=1)
    assert isinstance(channel.sender, ReliableSender)
    ceiling = channel.sender._ceiling
    ceiling.sent = ceiling.acknowledged = SEQ_MOST - left
    channel.sender.next_seq = SEQ_MOST - left + 1
    return engine


@pytest.mark.clause("e3x-S05")
@pytest.mark.requirement("R-70")
def test_the_last_seq_is_used_and_no_other_comes_after_it() -> None:
    engine = worn_out(1)
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.send(b"last")
    assert isinstance(channel.sender, ReliableSender)
    assert channel.sender.last == SEQ_MOST
    assert seqs(sent(engine)) == [SEQ_MOST]
    with pytest.raises(LocalProtocolError, match="expected seqs up to 4294967295"):
        channel.sender.send(b"x")
    with pytest.raises(LocalProtocolError, match="expected seqs up to 4294967295"):
        channel.sender.finish()
    assert sent(engine) == []
    assert fed(engine, c=1, ack=SEQ_MOST) == [
        ("delivered", 1, SEQ_MOST, SEQ_MOST),
        ("broken", 1, "exhausted", f"seq {SEQ_MOST} was used, and there is no other"),
    ]
    assert sent(engine)[0].err is not None


@pytest.mark.clause("e3x-S05")
@pytest.mark.requirement("R-70")
def test_a_message_whose_pieces_do_not_all_have_a_seq_is_refused_whole() -> None:
    engine = worn_out(2)
    channel = engine.channel(1)
    assert channel is not None
    with pytest.raises(LocalProtocolError, match="the message needs 4294967297"):
        channel.sender.send(bytes(4000))
    channel.sender.send(bytes(2000))
    assert isinstance(channel.sender, ReliableSender)
    assert channel.sender.last == SEQ_MOST


@pytest.mark.clause("e3x-S05")
@pytest.mark.requirement("R-70")
def test_an_end_may_be_the_last_seq() -> None:
    engine = worn_out(1)
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.finish()
    assert sent(engine)[0].end
    assert fed(engine, c=1, ack=SEQ_MOST) == [("delivered", 1, SEQ_MOST, SEQ_MOST)]
    assert fed(engine, c=1, seq=1, end=True) == [("ended", 1), ("closed", 1)]


@pytest.mark.clause("e3x-S06", "e3x-A10")
def test_packets_are_kept_until_an_ack_covers_them() -> None:
    engine = connector()
    channel = sending(engine, 4)
    assert unacked(channel) == [1, 2, 3, 4]
    fed(engine, c=1, ack=3)
    assert unacked(channel) == [4]


@pytest.mark.clause("e3x-S07")
def test_a_receiver_that_is_full_says_what_is_missing_and_what_room_is_left() -> None:
    engine = listener(window=4)
    for seq in (2, 3, 4, 5):
        fed(engine, c=1, seq=seq)
    assert acks(sent(engine)) == [(0, [1, 3])]


@pytest.mark.clause("e3x-S08")
def test_the_application_sees_packets_in_order_one_at_a_time() -> None:
    engine = listener()
    channel = opened(engine)
    assert fed(engine, b"4", c=1, seq=4) == []
    assert fed(engine, b"3", c=1, seq=3) == []
    assert fed(engine, b"2", c=1, seq=2) == [("message", 1, b"2")]
    assert told(engine) == []
    for expected in ([("message", 1, b"3")], [("message", 1, b"4")], []):
        channel.receiver.done()
        assert told(engine) == expected


@pytest.mark.clause("e3x-S09")
def test_an_old_packet_is_dropped_and_answered() -> None:
    engine = listener()
    channel = opened(engine)
    for seq in (2, 3):
        assert fed(engine, b"x", c=1, seq=seq) == [("message", 1, b"x")]
        channel.receiver.done()
    wait(engine, 2.0)
    assert fed(engine, b"x", c=1, seq=2, now=2.0) == []
    assert acks(sent(engine, 2.0)) == [(3, None)]
    assert engine.stats().faults == {"duplicate": 1}
    assert fed(engine, b"y", c=1, seq=4, now=2.0) == [("message", 1, b"y")]


@pytest.mark.clause("e3x-S10")
@pytest.mark.parametrize(("capacity", "arrival"), [(3, Arrival.KEPT), (2, Arrival.KEPT), (0, Arrival.BEYOND)])
def test_what_is_ahead_is_kept_as_far_as_there_is_room(capacity: int, arrival: Arrival) -> None:
    receiver = receiver_with(capacity)
    assert receiver.take_in(Packet(1, seq=2), 2, 0.0, 10_000) is arrival
    assert receiver.take_in(Packet(1, seq=capacity + 1), capacity + 1, 0.0, 10_000) is not Arrival.KEPT


@pytest.mark.clause("e3x-S10")
@pytest.mark.requirement("R-03")
def test_what_is_ahead_and_does_not_fit_into_memory_is_dropped_but_what_is_next_never() -> None:
    engine = listener(limits=Limits(channel_bytes=30_000, channel_floor=1000))
    opened(engine)
    for seq in range(3, 25):
        fed(engine, bytes(10_000), c=1, seq=seq)
    assert engine.stats().held == 30_000
    assert engine.stats().faults["full"] >= 2
    assert fed(engine, bytes(10_000), c=1, seq=2) == [("message", 1, bytes(10_000))]


@pytest.mark.clause("e3x-S10", "e3x-S11")
def test_kept_packets_flow_when_the_gap_is_filled_and_a_copy_takes_no_room() -> None:
    engine = listener()
    for seq in (3, 3, 2):
        fed(engine, b"%d" % seq, c=1, seq=seq)
    channel = engine.channel(1)
    assert channel is not None
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.waiting == 2
    assert engine.stats().held == 2
    assert fed(engine, c=1, type="chat", seq=1) == [("opened", 1, "chat", b"")]
    channel.receiver.done()
    assert told(engine) == [("message", 1, b"2")]
    channel.receiver.done()
    assert told(engine) == [("message", 1, b"3")]
    channel.receiver.done()
    assert told(engine) == []
    assert engine.stats().held == 0


def test_ids_are_odd_for_one_side_and_even_for_the_other() -> None:
    one, other = Engine(True, Config()), Engine(False, Config())
    assert [one.open("x").id for _ in range(3)] == [1, 3, 5]
    assert [other.open("x").id for _ in range(3)] == [2, 4, 6]
    assert one.open("x", id=99).id == 99
    for wrong in (2, 0, -1, 2**32 + 1, 1):
        with pytest.raises(LocalProtocolError):
            one.open("x", id=wrong)


def test_a_type_must_be_text_that_can_be_sent() -> None:
    engine = connector()
    for wrong in ("", "\ud800", "x" * 2000):
        with pytest.raises(LocalProtocolError):
            engine.open(wrong)
    assert engine.channels == 0
