"""`miss`: when it is sent, its effect on the window, which packets are sent again and when; rule by rule."""

from __future__ import annotations

import itertools

import pytest

from muxkit._limits import Limits
from muxkit.protocols.e3x import Config, Engine
from muxkit.protocols.e3x.send import ReliableSender
from tests.protocols.e3x._helpers import acks, connector, fed, listener, opened, raw, sending, sent, seqs, unacked, wait


@pytest.mark.clause("e3x-M01")
def test_while_something_is_missing_each_ack_says_what() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, c=1, seq=2)
    channel.receiver.done()
    fed(engine, c=1, seq=4)
    assert acks(sent(engine)) == [(2, [1, 49])]
    channel.sender.send(b"x")
    (packet,) = sent(engine)
    assert (packet.ack, packet.miss) == (2, [1, 49])
    fed(engine, c=1, seq=3)
    channel.receiver.done()
    channel.receiver.done()
    assert acks(sent(engine)) == [(4, None)]


@pytest.mark.clause("e3x-M01")
def test_a_gap_is_reported_at_once_and_again_until_it_is_filled_or_the_peer_is_silent() -> None:
    engine = listener()
    opened(engine)
    fed(engine, c=1, seq=5, now=2.0)
    assert acks(sent(engine, 2.0)) == [(1, [1, 1, 1, 47])]
    again = wait(engine, 60.0)
    assert {packet.ack for _, packet in again} == {1}
    assert again[0][0] == pytest.approx(2.25)
    assert 11.5 < again[-1][0] < 12.5


@pytest.mark.clause("e3x-M03")
@pytest.mark.parametrize("miss", [[0, 3], [-1], ["a"], []])
def test_a_miss_without_a_meaning_is_ignored_and_counted_beside_its_ack(miss: list[object]) -> None:
    engine = connector()
    channel = sending(engine, 5)
    assert fed(engine, c=1, ack=2, miss=miss) == [("fault", "miss"), ("delivered", 1, 1, 2)]
    assert sent(engine) == []
    assert isinstance(channel.sender, ReliableSender)
    assert channel.sender.window == 50


@pytest.mark.clause("e3x-M03")
def test_a_miss_without_an_ack_is_dropped() -> None:
    engine = connector()
    channel = sending(engine, 5)
    assert fed(engine, c=1, miss=[1, 5]) == [("fault", "misplaced")]
    assert sent(engine) == []
    assert isinstance(channel.sender, ReliableSender)
    assert channel.sender.window == 50


@pytest.mark.clause("e3x-M04")
def test_the_last_delta_is_the_limit_and_never_sent_again() -> None:
    engine = connector()
    sending(engine, 14)
    fed(engine, c=1, ack=5, miss=[8])
    assert sent(engine) == []


@pytest.mark.clause("e3x-M05", "e3x-S07")
def test_a_receiver_that_is_more_than_half_full_says_so_once_and_with_each_ack() -> None:
    engine = listener(window=10)
    fed(engine, c=1, type="chat", seq=1)
    for seq in (2, 3, 4, 5):
        fed(engine, c=1, seq=seq)
    assert sent(engine) == []
    fed(engine, c=1, seq=6)
    assert acks(sent(engine)) == [(0, [10])]
    fed(engine, c=1, seq=7)
    assert sent(engine) == []
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.send(b"x")
    channel.receiver.done()
    assert [(packet.ack, packet.miss) for packet in sent(engine)] == [(1, [10])]


@pytest.mark.clause("e3x-M05")
@pytest.mark.parametrize("window", [10, 11, 50])
def test_a_receiver_that_is_just_half_full_says_nothing_yet(window: int) -> None:
    engine = listener(window=window)
    fed(engine, c=1, type="chat", seq=1)
    for seq in range(2, window // 2 + 1):
        fed(engine, c=1, seq=seq)
    assert sent(engine) == []
    fed(engine, c=1, seq=window // 2 + 1)
    assert acks(sent(engine)) == [(0, [window])]


@pytest.mark.clause("e3x-M06")
def test_nothing_goes_beyond_the_window_that_the_peer_told() -> None:
    engine = connector()
    channel = sending(engine, 5)
    fed(engine, c=1, ack=5, miss=[8])
    for _ in range(20):
        channel.sender.send(b"x")
    assert seqs(sent(engine)) == list(range(6, 14))
    assert sent(engine) == []


@pytest.mark.requirement("R-71")
@pytest.mark.clause("e3x-M06")
def test_before_any_miss_the_window_is_50_packets() -> None:
    """Was: e3x: before the first miss 100 packets went out, twice what the original implementations buffer."""
    engine = connector()
    channel = engine.open("chat")
    for _ in range(150):
        channel.sender.send(b"x")
    assert seqs(sent(engine)) == list(range(1, 51))


@pytest.mark.clause("e3x-M06")
def test_our_own_bound_holds_before_the_first_miss_too() -> None:
    engine = Engine(True, Config(congestion=False, most_window=20))
    channel = engine.open("chat")
    for _ in range(150):
        channel.sender.send(b"x")
    assert seqs(sent(engine)) == list(range(1, 21))


@pytest.mark.requirement("R-71")
@pytest.mark.clause("e3x-M06", "e3x-R02")
def test_after_a_miss_lowered_the_window_a_probe_stays_inside_it() -> None:
    """Was: e3x: after a miss that lowered the window, the probe and what waited to go again were still sent above it:
    with a receiver that buffers 50 packets one lost opening cost a second for each packet.
    """
    engine = Engine(True, Config(congestion=False, first_window=100))
    sending(engine, 100)
    fed(engine, c=1, ack=1, miss=[50])
    assert {packet.seq for _, packet in wait(engine, 9.9)} == {2, 51}


@pytest.mark.clause("e3x-M06", "e3x-R02")
def test_a_probe_follows_the_window_as_acks_move_it() -> None:
    engine = Engine(True, Config(congestion=False, first_window=100))
    sending(engine, 100)
    fed(engine, c=1, ack=1, miss=[50])
    fed(engine, c=1, ack=30)
    assert {packet.seq for _, packet in wait(engine, 5.0)} == {31, 80}
    fed(engine, c=1, ack=60, now=5.0)
    assert {packet.seq for _, packet in wait(engine, 9.0)} == {61, 100}


@pytest.mark.clause("e3x-M06", "e3x-M08")
def test_what_waits_to_go_again_stays_when_the_window_falls_below_it() -> None:
    """The rate delays the resends, and the next miss arrives before they are sent."""
    engine = Engine(True, Config(congestion=False, first_window=100))
    sending(engine, 100)
    fed(engine, c=1, ack=1, miss=[*[1] * 60, 30])
    fed(engine, c=1, ack=1, miss=[1, 19])
    assert seqs(sent(engine)) == list(range(2, 22))
    fed(engine, c=1, ack=21, miss=[*[1] * 40, 10], now=2.0)
    assert seqs(sent(engine, 2.0)) == list(range(22, 62))


@pytest.mark.clause("e3x-M06", "e3x-M08")
def test_what_a_miss_names_above_our_own_bound_is_not_sent_again() -> None:
    engine = Engine(True, Config(congestion=False, first_window=100, most_window=100))
    sending(engine, 100)
    engine.receive_datagram(raw(c=1, ack=1, miss=[5, 5]), 0.0)
    engine.receive_datagram(raw(c=1, ack=1, miss=[50, 50]), 0.0)
    assert seqs(sent(engine)) == [6, 51]


@pytest.mark.clause("e3x-M07")
def test_the_window_moves_with_each_ack() -> None:
    engine = connector()
    channel = sending(engine, 5)
    fed(engine, c=1, ack=5, miss=[8])
    for _ in range(20):
        channel.sender.send(b"x")
    sent(engine)
    fed(engine, c=1, ack=9)
    assert seqs(sent(engine)) == [14, 15, 16, 17]


@pytest.mark.clause("e3x-M06")
def test_a_window_that_shrinks_takes_nothing_back() -> None:
    engine = connector()
    channel = sending(engine, 20)
    fed(engine, c=1, ack=2, miss=[3])
    channel.sender.send(b"x")
    assert sent(engine) == []
    fed(engine, c=1, ack=20)
    assert seqs(sent(engine)) == [21]


@pytest.mark.clause("e3x-M06")
@pytest.mark.requirement("R-01", "R-08")
def test_a_window_that_the_peer_inflates_is_cut_to_our_own_bounds() -> None:
    config = Config(congestion=False, most_window=50)
    engine = Engine(True, config)
    channel = sending(engine, 1)
    fed(engine, c=1, ack=1, miss=[2**32 - 1, 2**32 - 1, 2**32 - 1])
    for _ in range(200):
        channel.sender.send(b"x")
    assert len(sent(engine)) == 50


@pytest.mark.requirement("R-01", "R-08")
def test_what_is_under_way_is_bounded_in_bytes_too() -> None:
    engine = connector(limits=Limits(channel_bytes=10_000, channel_floor=1000))
    channel = sending(engine, 1)
    fed(engine, c=1, ack=1, miss=[4000])
    channel.sender.send(bytes(50_000))
    packets = sent(engine)
    assert 9000 < sum(len(packet.body) for packet in packets) <= 10_000
    fed(engine, c=1, ack=4)
    assert seqs(sent(engine)) == [packets[-1].seq + 1 + number for number in range(3)]  # type: ignore[operator]  # a seq


@pytest.mark.clause("e3x-M08", "e3x-M11")
def test_exactly_the_missing_packets_go_again_and_the_others_stay() -> None:
    engine = connector()
    channel = sending(engine, 6)
    assert fed(engine, c=1, ack=1, miss=[1, 2, 10]) == [("delivered", 1, 1, 1)]
    packets = sent(engine)
    assert seqs(packets) == [2, 4]
    assert [packet.body for packet in packets] == [b"2", b"4"]
    assert unacked(channel) == [2, 3, 4, 5, 6]


@pytest.mark.clause("e3x-M09")
@pytest.mark.requirement("R-19")
def test_missing_seqs_that_we_do_not_have_are_ignored() -> None:
    engine = connector()
    channel = sending(engine, 3)
    fed(engine, c=1, ack=3)
    assert fed(engine, c=1, ack=3, miss=[1, 5]) == []
    assert sent(engine) == []
    channel.sender.send(b"not sent yet")
    assert fed(engine, c=1, ack=3, miss=[1, 5]) == []
    assert seqs(sent(engine)) == [4]


@pytest.mark.clause("e3x-M10")
def test_a_packet_goes_again_at_its_first_miss_and_then_at_most_once_a_second() -> None:
    engine = connector()
    sending(engine, 3)
    resent = []
    for now in (0.0, 0.2, 0.9, 1.0, 1.5, 1.999, 2.0):
        fed(engine, c=1, ack=1, miss=[1, 50], now=now)
        resent += [(now, seq) for seq in seqs(sent(engine, now))]
    assert resent == [(0.0, 2), (1.0, 2), (2.0, 2)]


@pytest.mark.clause("e3x-M10")
def test_a_packet_that_waits_to_go_again_is_not_queued_twice() -> None:
    engine = connector()
    sending(engine, 3)
    for _ in range(5):
        fed(engine, c=1, ack=1, miss=[1, 50])
    assert seqs(sent(engine)) == [2]
    assert engine.stats().resent == 1
    assert engine.stats().lost == 1


@pytest.mark.requirement("R-18", "R-19")
def test_a_miss_of_as_many_entries_as_a_packet_can_hold_resends_only_what_there_is() -> None:
    engine = connector()
    sending(engine, 6)
    fed(engine, c=1, ack=1, miss=[1] * 30_000)
    assert seqs(sent(engine)) == [2, 3, 4, 5, 6]


@pytest.mark.requirement("R-18", "R-19")
def test_a_miss_of_what_was_never_sent_stops_nothing() -> None:
    """Nothing is in flight, so neither side would correct it: the peer owes no ack, and this side asks for none."""
    engine = connector()
    channel = sending(engine, 3)
    fed(engine, c=1, ack=3, miss=[1] * 300)
    channel.sender.send(b"4")
    assert seqs(sent(engine)) == [4]


@pytest.mark.clause("e3x-M01")
def test_a_list_of_missing_packets_is_cut_to_what_a_packet_holds() -> None:
    engine = listener(window=2000, limits=Limits(channel_bytes=8 * 2**20))
    opened(engine)
    for seq in range(3, 2000, 2):
        fed(engine, c=1, seq=seq)
    (packet,) = engine.datagrams_to_send(0.0)
    assert len(packet) <= 1400
    channel = engine.channel(1)
    assert channel is not None
    channel.sender.send(bytes(channel.sender.quota))
    assert all(len(packet) <= 1400 for packet in engine.datagrams_to_send(5.0))


@pytest.mark.clause("e3x-R02")
def test_with_nothing_acked_for_a_second_the_oldest_and_the_last_go_again_ever_more_slowly() -> None:
    engine = connector()
    channel = sending(engine, 5)
    fed(engine, c=1, ack=2)
    probes = wait(engine, 9.9)
    assert {packet.seq for _, packet in probes} == {3, 5}
    times = sorted({when for when, _ in probes})
    assert times[0] == 1.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[0] == pytest.approx(1.1)
    assert pauses == sorted(pauses)
    assert all(pause <= 1.31 for pause in pauses)
    assert len(times) == 8
    assert unacked(channel) == [3, 4, 5]


@pytest.mark.clause("e3x-R02")
def test_ten_seconds_without_an_answer_are_the_end_of_a_channel_that_waits_for_one() -> None:
    engine = connector()
    sending(engine, 2)
    fed(engine, c=1, ack=1, now=3.0)
    wait(engine, 12.99)
    assert engine.channel(1) is not None
    errs = [packet.err for _, packet in wait(engine, 13.0)]
    assert errs == ["nothing came for 10 s"]
    assert engine.channels == 0


@pytest.mark.clause("e3x-R02")
def test_a_channel_whose_timer_comes_after_the_timeout_is_probed_before_it_is_given_up() -> None:
    """Was: a process that was suspended for longer than the timeout lost its sessions without asking."""
    engine = connector()
    channel = sending(engine, 2)
    engine.handle_deadline(21.0)
    assert engine.channel(1) is not None
    assert [packet.seq for packet in sent(engine, 21.0)] == [1, 2]
    fed(engine, c=1, ack=2, now=21.0)
    engine.handle_deadline(21.0)
    assert engine.channel(1) is not None
    assert unacked(channel) == []


@pytest.mark.clause("e3x-R02")
def test_any_answer_keeps_a_channel_alive() -> None:
    """The peer's application is slow; its engine answers."""
    engine = connector()
    sending(engine, 2)
    fed(engine, c=1, ack=1)
    for second in range(1, 60):
        wait(engine, second)
        fed(engine, c=1, ack=1, now=second)
    assert engine.channels == 1


@pytest.mark.requirement("R-52")
def test_after_a_jump_of_the_clock_nothing_comes_in_a_burst() -> None:
    engine = connector()
    sending(engine, 2)
    fed(engine, c=1, ack=2)
    engine.handle_deadline(3600.0)
    assert sent(engine, 3600.0) == []
    assert engine.channels == 1
