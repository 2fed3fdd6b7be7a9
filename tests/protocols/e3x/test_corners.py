"""Corner cases: rare orders of events, little memory, and harmless calls."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.e3x import Config, Engine, Packet, encode_chunks, join_packet
from muxkit.protocols.e3x.congestion import Congestion
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.protocols.e3x.state import UsedIds
from tests.protocols.e3x._helpers import (
    acks,
    connector,
    fed,
    listener,
    opened,
    raw,
    receiver_with,
    sending,
    sent,
    seqs,
    told,
    wait,
)
from tests.protocols.e3x.test_channels import Log
from tests.protocols.e3x.test_chunked import Clock, chunked


@pytest.mark.requirement("R-02")
def test_a_later_packet_of_a_channel_beyond_the_limit_is_dropped_without_an_answer() -> None:
    engine = listener(limits=Limits(channels=1))
    opened(engine)
    assert fed(engine, c=3, seq=2) == [("fault", "flood")]
    assert sent(engine) == []


def test_an_err_for_a_channel_that_was_never_opened_is_nothing_for_the_application() -> None:
    engine = listener()
    fed(engine, b"2", c=1, seq=2)
    assert fed(engine, c=1, err="no") == []
    assert engine.channels == 0


def test_an_unreliable_end_without_a_body_is_only_an_end() -> None:
    engine = listener()
    fed(engine, c=1, type="x")
    assert fed(engine, c=1, end=True) == [("ended", 1)]


def test_an_unreliable_channel_that_the_peer_ended_still_sends_what_waits() -> None:
    engine = Engine(False, Config())
    fed(engine, c=1, type="x", end=True)
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.send(b"1")
    channel.sender.finish(b"2")
    assert told(engine) == []
    assert [packet.body for packet in sent(engine)] == [b"1", b"2"]
    assert told(engine) == [("closed", 1)]


def test_an_unreliable_channel_that_both_ended_still_sends_what_waits() -> None:
    engine = connector()
    channel = engine.open("x", b"only", reliable=False, end=True)
    assert fed(engine, c=1, end=True) == [("ended", 1)]
    assert not channel.gone
    assert [packet.body for packet in sent(engine)] == [b"only"]
    assert told(engine) == [("closed", 1)]


def test_unreliable_packets_keep_to_the_rate_too() -> None:
    engine = Engine(True, limits=Limits(channel_first=1_000_000))
    channel = engine.open("x", reliable=False)
    for _ in range(50):
        channel.sender.send(bytes(1000))
    assert 10 <= len(sent(engine)) < 20
    due = engine.next_deadline()
    assert due is not None
    assert len(sent(engine, due)) == 1


def test_a_full_packet_still_has_room_to_ask_for_an_ack() -> None:
    engine = connector()
    channel = engine.open("chat")
    sent(engine)
    for size in (channel.sender.quota, 10 * channel.sender.quota):
        channel.sender.send(bytes(size))
        packets = sent(engine)
        assert (packets[-1].ack, packets[-1].miss) == (0, [50])
        channel = engine.open("chat", bytes(engine.open("chat").sender.quota))
        sent(engine)


def test_an_ack_that_does_not_fit_beside_the_content_goes_by_itself() -> None:
    engine = listener(window=100)
    channel = opened(engine)
    fed(engine, c=1, seq=99)
    incoming = channel.receiver
    assert isinstance(incoming, ReliableReceiver)
    channel.sender.send(b"as large as a packet can be")
    engine.packet_size = 256
    assert isinstance(channel.sender, ReliableSender)
    piece = channel.sender.next()
    assert piece is not None
    piece.body = bytes(256 - len(b'00{"c":1,"seq":1}'))
    packets = sent(engine)
    assert [(packet.seq, packet.ack) for packet in packets] == [(1, None), (None, 1)]
    assert len(packets[1].miss or ()) > 40


def test_an_answer_that_nobody_fetched_in_time_is_not_given() -> None:
    engine = connector()
    engine.open("chat", end=True)
    sent(engine)
    fed(engine, c=1, seq=1, end=True, ack=1)
    assert sent(engine, 60.0) == []


def test_an_id_that_was_just_used_cannot_be_chosen() -> None:
    engine = connector()
    engine.err(sending(engine, 1), "no")
    with pytest.raises(LocalProtocolError, match="was used recently"):
        engine.open("chat", id=1)


def test_what_is_gone_cannot_be_sent_on_and_needs_no_done() -> None:
    engine = connector()
    channel = sending(engine, 1)
    engine.err(channel, "no")
    with pytest.raises(LocalProtocolError, match="channel 1 has ended"):
        channel.sender.send(b"x")
    channel.sender.finish()
    channel.receiver.done()
    channel.sender.notify_when_room(1)
    assert not channel.sender.has_room(1)
    assert told(engine) == []


def test_an_unreliable_channel_need_not_be_watched() -> None:
    engine = connector()
    channel = engine.open("x", reliable=False)
    channel.sender.notify_when_room(1)
    sent(engine)
    assert told(engine) == []


def test_sizes_and_counts_can_be_asked_for() -> None:
    engine = connector()
    assert engine.packet_size == 1400
    fed(engine, c=2, type="x")
    assert engine.frames == 1
    stream = chunked(False, Clock())
    stream.receive_bytes(encode_chunks(raw(c=1, type="x")), 0.0)
    assert (stream.frames, stream.oversized) == (1, 0)
    with pytest.raises(ValueError, match="70000 bytes"):
        join_packet(bytes(70_000))


def test_an_observer_hears_of_our_channels_acks_errs_and_timers() -> None:
    log = Log()
    engine = Engine(True, observer=log)
    channel = engine.open("chat")
    sent(engine)
    fed(engine, b"x", c=1, seq=1, ack=1)
    channel.receiver.done()
    fed(engine, c=1, ack=1)
    fed(engine, c=1, seq=2)
    wait(engine, 5.0)
    fed(engine, c=1, err="no")
    names = [(line[0], line[2]) for line in log.lines if line[0] in ("in", "out")]
    assert names == [("out", "open"), ("in", "data"), ("in", "ack"), ("in", "data"), ("out", "ack"), ("in", "err")]
    assert ("channel 1", "open") in log.lines
    assert ("timer", "channel 1") in log.lines


def test_an_id_below_all_that_are_remembered_counts_as_used() -> None:
    used = UsedIds()
    for id in range(5, 10_000, 4):
        used.add(id)
    assert 1 in used
    used.add(1)
    assert 1 in used


def test_a_beginning_that_loses_much_of_what_it_sends_is_over() -> None:
    """On a queue that other flows keep full its growth is not visible."""
    pace = Congestion(1400)
    now, sent_at = 0.0, [0] * 21
    while pace.starting:
        now += 0.001
        sent_at.append(0)
        while pace.may_send(now):
            pace.sent(1400, now)
            sent_at[-1] += 1
        pace.ack_received(0.02, sent_at[-21] // 2, now)
        assert now < 1.0
    assert pace.share < 1000 * 1400


def test_a_window_without_room_says_nothing_of_itself() -> None:
    receiver = receiver_with(100)
    assert receiver.ack(0) is None
    receiver.take_in(Packet(1, seq=2), 2, 0.0, 100)
    assert receiver.ack(1) is None
    assert receiver.ack(2) == (0, [1, 99])


@pytest.mark.clause("e3x-R02")
def test_a_packet_that_was_acked_while_it_waited_to_go_again_does_not_go() -> None:
    engine = Engine(True, Config(window=100))
    channel = sending(engine, 3)
    channel.sender.send(b"4")
    fed(engine, c=1, ack=1, miss=[1, 50])
    fed(engine, c=1, ack=3)
    assert seqs(sent(engine, 1.0)) == [4]


def test_a_gap_that_is_filled_is_not_reported_by_its_timer() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, c=1, seq=3, now=2.0)
    assert acks(sent(engine, 2.0)) == [(1, [1, 49])]
    fed(engine, c=1, seq=2, now=2.1)
    channel.receiver.done()
    channel.receiver.done()
    assert acks(sent(engine, 2.1)) == [(3, None)]
    assert wait(engine, 60.0) == []


def test_the_last_packet_before_our_own_bound_asks_for_an_ack() -> None:
    engine = connector(limits=Limits(channel_bytes=10_000, channel_floor=1000))
    channel = engine.open("chat")
    channel.sender.send(bytes(50_000))
    packets = sent(engine)
    assert len(packets) < 20
    assert (packets[-1].ack, packets[-1].miss) == (0, [7])


@pytest.mark.clause("e3x-M11")
def test_nothing_new_goes_while_more_is_missing_than_the_peer_can_list() -> None:
    engine = connector(window=2000)
    channel = sending(engine, 1)
    fed(engine, c=1, ack=1, miss=[2000])
    for _ in range(600):
        channel.sender.send(b"x")
    while sent(engine):
        pass
    channel.sender.send(b"new")
    fed(engine, c=1, ack=1, miss=[1] * 255 + [1745])
    assert seqs(sent(engine)) == list(range(2, 257))
    assert sent(engine) == []
    fed(engine, c=1, ack=256, miss=[2000], now=0.1)
    assert seqs(sent(engine, 0.1)) == [602]


def test_a_round_trip_that_is_neither_sure_nor_likely_does_not_count() -> None:
    pace = Congestion(1400)
    pace.ack_received(0.05, 0, 0.0)
    for wrong in (0.01, 3.0):
        pace.ack_received(wrong, 0, 0.01, is_sure=False)
    assert pace.round_trip == pace.least_round_trip == 0.05


def test_a_long_round_trip_is_forgotten_when_nothing_more_is_heard_of_it() -> None:
    pace = Congestion(1400)
    pace.ack_received(0.05, 0, 0.0)
    pace.ack_received(None, 0, 0.5)
    pace.ack_received(5.0, 0, 1.0)
    slow = pace.rate
    for second in range(10, 60, 10):
        pace.ack_received(None, 0, float(second))
    assert pace.rate > 3 * slow
