"""Channels that the application has closed, and several messages that are processed at once."""

from __future__ import annotations

from collections import Counter

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import Reason
from muxkit.protocols.e3x import Config, Engine, Packet, parse_packet
from muxkit.protocols.e3x.packets import BYE, PING
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.state import ERR_REPEATS, PINGS_REFUSED_AT_ONCE
from tests.protocols.e3x._helpers import (
    acks,
    close,
    connector,
    fed,
    listener,
    opened,
    sending,
    sent,
    told,
    told_until,
    wait,
)
from tests.protocols.e3x.test_chunked import Clock

# --- closing


def test_closing_ends_our_side_and_the_peers_end_closes_the_channel() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    close(channel)
    assert [(packet.seq, packet.end) for packet in sent(engine)] == [(3, True)]
    assert fed(engine, c=1, seq=1, end=True, ack=3) == [("delivered", 1, 1, 3), ("ended", 1), ("closed", 1)]
    assert acks(sent(engine)) == [(1, None)]


def test_what_comes_on_a_closed_channel_is_neither_told_nor_confirmed() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    assert fed(engine, b"unwanted", c=1, seq=1, ack=1) == [("delivered", 1, 1, 1)]
    assert not [packet for packet in sent(engine) if packet.ack]


def test_it_is_answered_with_an_err_once_all_of_ours_is_processed() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    fed(engine, b"unwanted", c=1, seq=1)
    assert fed(engine, c=1, ack=2) == [("delivered", 1, 1, 2)]
    assert fed(engine, c=1, ack=3) == [("delivered", 1, 3, 3), ("closed", 1)]
    assert [packet.err for packet in sent(engine)] == ["closed"]
    assert channel.gone


def test_what_comes_after_all_of_ours_was_processed_is_answered_at_once() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    fed(engine, c=1, ack=3)
    assert engine.channels == 1
    assert fed(engine, b"unwanted", c=1, seq=1) == [("closed", 1)]
    assert [packet.err for packet in sent(engine)] == ["closed"]


def test_a_silent_peer_has_ten_seconds_for_its_end() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    fed(engine, c=1, ack=3, now=5.0)
    assert wait(engine, 14.0) == []
    assert told_until(engine, 15.5) == [("closed", 1)]
    assert [packet.err for _, packet in wait(engine, 16.5)] == ["closed"]


def test_a_peer_that_sends_and_processes_nothing_has_five() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    fed(engine, b"unwanted", c=1, seq=1, now=1.0)
    wait(engine, 4.0)
    fed(engine, c=1, ack=2, now=4.0)  # it did process something: five seconds more
    wait(engine, 8.5)
    assert not channel.gone
    assert told_until(engine, 9.5) == [
        ("broken", 1, "timeout", "the peer went on sending, and processed nothing of ours for 5.0 s")
    ]


def test_a_peer_that_processes_nothing_and_sends_nothing_is_waited_for() -> None:
    engine = connector()
    channel = sending(engine, 2)
    close(channel)
    sent(engine)
    for now in range(0, 100, 5):
        fed(engine, c=1, ack=1, now=float(now))
        wait(engine, now + 5.0)
    assert not channel.gone


def test_a_message_that_was_told_before_the_close_is_not_confirmed_unless_it_is_done() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, b"1", c=1, seq=2)
    close(channel)
    (end,) = sent(engine)
    assert (end.seq, end.end, end.ack) == (1, True, 1)
    fed(engine, c=1, ack=1)
    assert [packet.err for packet in sent(engine)] == ["closed"]
    other = listener()
    channel = opened(other)
    fed(other, b"1", c=1, seq=2)
    channel.receiver.done()
    close(channel)
    (end,) = sent(other)
    assert end.ack == 2
    assert fed(other, c=1, ack=1) == [("delivered", 1, 1, 1)]
    assert not channel.gone


def test_pieces_of_a_message_that_nobody_will_take_are_given_back() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, bytes(1000), c=1, seq=2, frag=5)
    assert engine.state.reassembly.used == 1000
    close(channel)
    assert engine.state.reassembly.used == 0


def test_closing_an_unreliable_channel_is_ending_it() -> None:
    engine = listener()
    fed(engine, b"1", c=1, type="samples")
    channel = engine.channel(1)
    assert channel is not None
    close(channel)
    assert sent(engine) == [Packet(1, end=True)]
    assert fed(engine, b"2", c=1) == [], "it is discarded"
    assert fed(engine, c=1, end=True) == [("ended", 1), ("closed", 1)]


def test_an_unreliable_channel_whose_peer_says_no_end_goes_by_itself() -> None:
    engine = listener()
    fed(engine, b"1", c=1, type="samples")
    channel = engine.channel(1)
    assert channel is not None
    close(channel)
    sent(engine)
    assert told_until(engine, 11.0) == [("closed", 1)]


def test_closing_what_is_gone_is_harmless() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, c=1, err="over")
    close(channel)
    assert sent(engine) == []


# --- several at once


@pytest.mark.clause("e3x-A02", "e3x-A03")
def test_further_messages_are_given_on_request_and_confirmed_together() -> None:
    engine = listener()
    channel = opened(engine)
    assert isinstance(channel.receiver, ReliableReceiver)
    for seq in (2, 3, 4, 6):
        fed(engine, b"%d" % seq, c=1, seq=seq)
    sent(engine)
    assert channel.receiver.take(1) == [b"3"]
    assert channel.receiver.take(10) == [b"4"]
    assert channel.receiver.take(10) == []
    fed(engine, b"4", c=1, seq=4, ack=0, miss=[10])
    assert acks(sent(engine)) == [(1, [4, 46])], "none of them is confirmed yet"
    channel.receiver.done()
    assert fed(engine, c=1, seq=2) == []
    assert acks(sent(engine))[0][0] == 4


def test_a_batch_ends_before_a_message_in_pieces_and_takes_a_last_one_with_its_end() -> None:
    engine = listener()
    channel = opened(engine)
    assert isinstance(channel.receiver, ReliableReceiver)
    fed(engine, b"1", c=1, seq=2)
    fed(engine, b"2", c=1, seq=3)
    fed(engine, b"3a", c=1, seq=4, frag=1)
    fed(engine, b"3b", c=1, seq=5)
    assert channel.receiver.take(10) == [b"2"]
    channel.receiver.done()
    assert told(engine) == [("message", 1, b"3a3b")]
    fed(engine, b"4", c=1, seq=6, end=True)
    assert channel.receiver.take(10) == [b"4"]
    channel.receiver.done()
    assert told(engine) == [("ended", 1)]


def test_a_batch_ends_before_an_empty_end() -> None:
    engine = listener()
    channel = opened(engine)
    assert isinstance(channel.receiver, ReliableReceiver)
    fed(engine, b"1", c=1, seq=2)
    fed(engine, c=1, seq=3, end=True)
    assert channel.receiver.take(10) == []
    channel.receiver.done()
    assert told(engine) == [("ended", 1)]


def test_nothing_is_taken_where_nothing_was_told() -> None:
    engine = listener()
    channel = opened(engine)
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.take(10) == []
    with pytest.raises(LocalProtocolError, match="the application has no message"):
        channel.receiver.done()
    fed(engine, c=1, err="over")
    assert channel.receiver.take(10) == []


def test_a_channel_can_be_taken_before_its_first_message_is_processed() -> None:
    engine = listener()
    assert fed(engine, b"hello", c=1, type="chat", seq=1) == [("opened", 1, "chat", b"hello")]
    channel = engine.channel(1)
    assert channel is not None
    assert engine.state.table.census.waiting == 1
    channel.receiver.accept()
    assert engine.state.table.census.waiting == 0
    assert not [packet for packet in sent(engine) if packet.ack]
    channel.receiver.done()
    fed(engine, c=1, type="chat", seq=1)
    assert acks(sent(engine))[0][0] == 1


# --- time


def test_a_command_after_a_long_silence_counts_from_now() -> None:
    clock = Clock()
    engine = Engine(True, Config(congestion=False), clock=clock)
    for clock.now in (1000.0, 5.0):
        engine.open("samples", reliable=False, end=True)
    channel = engine.open("samples", reliable=False)
    channel.sender.finish()
    due = engine.next_deadline()
    assert due is not None
    sent(engine, 1000.0)
    assert engine.next_deadline() == 1010.0


def test_last_words_go_past_all_queues() -> None:
    engine = connector()
    words = [parse_packet(engine.farewell(reason)) for reason in (Reason("why"), Reason())]
    assert words == [Packet(id, BYE, seq=1, end=True, body=body) for id, body in ((1, b"why"), (3, b"\1"))]
    assert sent(engine) == []
    assert not engine.owes


def test_a_message_does_not_wait_for_all_errs_of_channels_that_were_given_up() -> None:
    """On a slow path, the errs of an application that gives up channels all the time use up the whole rate."""
    engine = Engine(True, Config())
    channels = [engine.open("chat") for _ in range(2000)]
    wait(engine, 0.9)
    engine.state.congestion.share = 3000.0
    for channel in channels:
        engine.err(channel, "given up")
    kept = engine.open("kept")
    assert len(engine.state.errs) > 500
    assert kept.id in [packet.channel for _, packet in wait(engine, 1.0)]


@pytest.mark.parametrize(("ack", "silent"), [(1, 0.0), (2, 15.0)], ids=["of a packet", "of a packet that was not sent"])
def test_an_ack_for_a_channel_that_was_given_up_is_a_sign_of_life(ack: int, silent: float) -> None:
    """A peer may need longer for its acks than an application keeps its channels."""
    engine = Engine(True, Config())
    engine.start(0.0)
    wait(engine, 14.0)
    channel = engine.open("chat")
    sent(engine, 14.0)
    engine.err(channel, "given up")
    fed(engine, c=channel.id, ack=ack, now=15.0)
    assert engine.state.silence.seconds(15.0) == silent
    fed(engine, c=channel.id, ack=ack, now=16.0)
    assert engine.state.silence.seconds(16.0) == silent + 1.0


@pytest.mark.requirement("R-71")
def test_a_channel_that_is_given_up_before_it_was_announced_costs_no_packet() -> None:
    """Was: The peer got an err for a channel that it didn't know."""
    engine = connector()
    engine.err(engine.open("chat"), "given up")
    assert wait(engine, 60.0) == []
    assert engine.channels == len(engine.state.tombstones) == 0


@pytest.mark.requirement("R-71")
def test_an_err_that_had_to_wait_for_the_rate_is_repeated_as_often_as_any_other() -> None:
    """Was: The repetitions ran out while the err was in the queue, so an err that was lost was never sent again."""
    engine = Engine(True, Config())
    channels = [engine.open("chat") for _ in range(100)]
    wait(engine, 0.9)
    engine.state.congestion.share = 100.0  # a minute is enough for all errs
    for channel in channels:
        engine.err(channel, "given up")
    assert [packet.channel for _, packet in wait(engine, 60.0)].count(channels[-1].id) == 1 + ERR_REPEATS


@pytest.mark.requirement("R-71")
def test_errs_are_repeated_also_if_more_channels_are_given_up_than_tombstones_are_kept() -> None:
    """Was: The tombstone of an err that had been sent was dropped, and nothing repeated the err.

    If the err was lost, a handler of the peer that only waited kept its channel until the session ended.
    """
    engine = connector(limits=Limits(channels=50, tombstones=5))
    packets: list[Packet] = []
    for channel in [engine.open("chat") for _ in range(50)]:
        packets += sent(engine)
        engine.err(channel, "given up")
    packets += [packet for _, packet in wait(engine, 60.0)]
    errs = Counter(packet.channel for packet in packets if packet.err is not None)
    assert [*errs.values()] == [1 + ERR_REPEATS] * 50


@pytest.mark.requirement("R-71")
def test_a_ping_is_answered_by_a_peer_whose_channels_are_all_in_use() -> None:
    """Was: A ping was refused like any other channel, and only a limited number of refusals is sent per second. So a
    session that opened more channels than its peer allowed could be given up as dead.
    """
    engine = listener(limits=Limits(channels=1, resets_burst=2, resets_per_second=1))
    for id in range(1, 21, 2):
        fed(engine, c=id, type="chat", seq=1)
    sent(engine)
    fed(engine, c=21, type=PING, seq=1, end=True)
    assert [packet.channel for packet in sent(engine)] == [21]


def test_the_answers_to_pings_that_have_no_room_are_limited() -> None:
    engine = listener(limits=Limits(channels=1, resets_burst=2, resets_per_second=1))
    for id in range(1, 2001, 2):
        fed(engine, c=id, type="chat" if id == 1 else PING, seq=1)
    assert len(sent(engine)) <= PINGS_REFUSED_AT_ONCE
