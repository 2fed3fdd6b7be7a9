"""The life of a channel: opening, ending, breaking, late packets; unreliable channels; queues and local limits."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit.protocols.e3x import Config, Engine, Packet
from muxkit.protocols.e3x.packets import parse_packet
from tests.protocols.e3x._helpers import acks, connector, fed, listener, opened, sending, sent, told, told_until, wait


def test_a_channel_is_over_when_both_sides_ended_it_and_know() -> None:
    engine = connector()
    channel = engine.open("chat")
    channel.sender.finish()
    sent(engine)
    assert fed(engine, b"bye", c=1, seq=1, end=True, ack=2) == [("delivered", 1, 1, 2), ("message", 1, b"bye")]
    channel.receiver.done()
    assert told(engine) == [("ended", 1), ("closed", 1)]
    assert sent(engine) == [Packet(1, ack=1)], "the peer has to know, too"
    assert engine.channels == 0
    assert channel.gone


def test_after_our_end_the_peer_may_go_on() -> None:
    engine = connector()
    channel = engine.open("chat", end=True)
    sent(engine)
    fed(engine, c=1, ack=1)
    with pytest.raises(LocalProtocolError, match="this side has finished sending"):
        channel.sender.send(b"x")
    assert fed(engine, b"a", c=1, seq=1, now=100.0) == [("message", 1, b"a")]
    channel.receiver.done()
    assert fed(engine, c=1, seq=2, end=True, now=200.0) == [("ended", 1), ("closed", 1)]


@pytest.mark.clause("e3x-S09")
def test_who_missed_our_last_ack_gets_it_again_for_ten_seconds() -> None:
    engine = connector()
    engine.open("chat", end=True)
    sent(engine)
    fed(engine, c=1, seq=1, end=True, ack=1)
    assert acks(sent(engine)) == [(1, None)]
    for now in (1.0, 3.0, 9.0):
        assert fed(engine, c=1, seq=1, end=True, now=now) == []
        assert acks(sent(engine, now)) == [(1, None)]
    assert fed(engine, c=1, seq=1, end=True, now=11.0) == [("fault", "unknown")]
    assert sent(engine, 11.0) == []


def test_an_err_is_said_three_times_and_to_whoever_goes_on() -> None:
    engine = listener()
    channel = opened(engine)
    engine.err(channel, "no more")
    assert told(engine) == [], "who broke it knows"
    assert [packet.err for packet in sent(engine, 5.0)] == ["no more"]
    assert [packet.err for _, packet in wait(engine, 60.0)] == ["no more"] * 2
    other = listener()
    other.err(opened(other), "no more")
    sent(other)
    fed(other, b"x", c=1, seq=2)
    assert [packet.err for packet in sent(other)] == ["no more"]
    other.err(channel, "again")
    assert sent(other) == []


def test_an_err_that_is_no_text_or_too_long_is_mended() -> None:
    engine = listener()
    engine.err(opened(engine), "\ud800" + "x" * 1000)
    (packet,) = sent(engine)
    assert packet.err == "?" + "x" * 511


def test_an_err_fits_into_a_packet_whatever_its_characters_take() -> None:
    for text in ("x" * 1000, "\n" * 1000, '"' * 1000, "€" * 1000):
        engine = Engine(False, Config(packet=256))
        engine.err(opened(engine), text)
        (data,) = engine.datagrams_to_send(engine.state.now)
        err = parse_packet(data).err
        assert err
        assert text.startswith(err)
        assert 230 < len(data) <= 256


def test_an_opening_that_comes_twice_or_late_opens_once() -> None:
    engine = listener()
    opened(engine)
    assert fed(engine, c=1, type="chat", seq=1) == []
    fed(engine, c=1, err="over")
    assert fed(engine, c=1, type="chat", seq=1) == []
    assert fed(engine, c=1, type="chat", seq=1, now=60.0) == [("fault", "unknown")]
    assert engine.channels == 0


def test_openings_may_overtake_each_other() -> None:
    engine = listener()
    for id in (5, 1, 9, 3, 7):
        opened(engine, id)
    assert engine.channels == 5


def test_a_channel_whose_first_packet_was_lost_asks_for_it() -> None:
    engine = listener()
    assert fed(engine, b"2", c=1, seq=2) == []
    assert acks(sent(engine)) == [(0, [1, 49])]
    assert fed(engine, b"1", c=1, seq=1, type="chat") == [("opened", 1, "chat", b"1")]


def test_an_idle_channel_lives_as_long_as_nothing_waits() -> None:
    engine = connector()
    sending(engine, 2)
    fed(engine, c=1, ack=2)
    assert wait(engine, 10_000.0) == []
    assert engine.next_deadline() is None
    assert engine.channels == 1


# --- unreliable


def test_an_unreliable_channel_names_its_type_until_the_peer_was_heard() -> None:
    engine = connector()
    channel = engine.open("samples", b"1", reliable=False)
    channel.sender.send(b"2")
    assert sent(engine) == [Packet(1, type="samples", body=b"1"), Packet(1, type="samples", body=b"2")]
    fed(engine, b"hi", c=1)
    channel.sender.send(b"3")
    assert sent(engine) == [Packet(1, body=b"3")]


def test_the_second_packet_opens_an_unreliable_channel_if_the_first_was_lost() -> None:
    engine = listener()
    assert fed(engine, b"2", c=1, type="samples") == [("opened", 1, "samples", b"2")]
    assert fed(engine, b"3", c=1, type="samples") == [("message", 1, b"3")]
    assert fed(engine, b"4", c=1, type="other") == [("fault", "misplaced")]


def test_what_has_a_seq_or_an_ack_does_not_belong_on_an_unreliable_channel() -> None:
    engine = listener()
    fed(engine, c=1, type="samples")
    for fields in ({"seq": 2}, {"ack": 1}, {"ack": 0, "miss": [5]}, {"miss": [0]}):
        assert fed(engine, c=1, **fields) == [("fault", "misplaced")]


def test_an_unreliable_channel_is_over_when_both_ended_it() -> None:
    engine = listener()
    assert fed(engine, b"only", c=1, type="x", end=True) == [("opened", 1, "x", b"only"), ("ended", 1)]
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    assert fed(engine, b"late", c=1) == [("fault", "misplaced")]
    channel.sender.finish(b"answer")
    assert sent(engine) == [Packet(1, end=True, body=b"answer")]
    assert told(engine) == [("closed", 1)]


def test_an_end_that_is_lost_does_not_keep_an_unreliable_channel_forever() -> None:
    engine = connector()
    channel = engine.open("samples", reliable=False)
    channel.sender.finish()
    sent(engine)
    assert told_until(engine, 11.0) == [("broken", 1, "timeout", "no end came for 10.0 s after ours")]


def test_too_many_unreliable_packets_push_out_the_oldest() -> None:
    engine = Engine(True, limits=Limits(channel_first=1000))
    channel = engine.open("samples", reliable=False)
    for number in range(100):
        channel.sender.send(b"%100d" % number)
    bodies = [packet.body for packet in sent(engine)]
    assert bodies == [b"%100d" % number for number in range(90, 100)]
    assert engine.stats().evicted == 91
    assert engine.stats().unsent == 0


# --- queues


@pytest.mark.requirement("R-08")
def test_what_waits_to_be_sent_is_bounded_and_room_is_told() -> None:
    engine = connector(limits=Limits(channel_first=5000))
    channel = engine.open("chat")
    count = 0
    while channel.sender.has_room(1000):
        channel.sender.send(bytes(1000))
        count += 1
    assert count == 5
    with pytest.raises(LocalProtocolError, match=r"channel_first=5000"):
        channel.sender.send(bytes(1000))
    channel.sender.notify_when_room(1000)
    assert told(engine) == []
    sent(engine)
    assert told(engine) == [("writable", 1)]
    assert channel.sender.has_room(1000)


@pytest.mark.requirement("R-07", "R-08")
def test_a_channel_that_its_peer_does_not_read_leaves_room_to_the_others() -> None:
    engine = connector(limits=Limits(channel_first=5000, outbox=20_000))
    stuck = [engine.open("chat") for _ in range(10)]
    for channel in stuck:
        sent(engine)
        fed(engine, c=channel.id, ack=1, miss=[1])
        while channel.sender.has_room(900):
            channel.sender.send(bytes(900))
        sent(engine)
    assert engine.stats().unsent > 15_000
    free = engine.open("chat")
    for _ in range(12):
        assert free.sender.has_room(5000)
        free.sender.send(bytes(4000))
        assert sum(packet.channel == free.id for packet in sent(engine)) >= 1


@pytest.mark.requirement("R-28")
def test_channels_take_turns_packet_by_packet() -> None:
    engine = connector()
    channels = [engine.open("chat") for _ in range(3)]
    sent(engine)
    for channel in channels:
        for _ in range(4):
            channel.sender.send(b"x")
    assert [packet.channel for packet in sent(engine)] == [1, 3, 5] * 4


def test_our_own_channels_are_limited() -> None:
    engine = connector(limits=Limits(channels=2))
    engine.open("a")
    assert engine.places == 1
    engine.open("b")
    assert engine.places == 0
    with pytest.raises(LocalProtocolError, match="expected at most 2, 2 are open"):
        engine.open("c")


def test_a_window_that_no_memory_backs_is_not_told() -> None:
    engine = listener(window=2000, limits=Limits(channel_bytes=140_000))
    fed(engine, c=1, type="chat", seq=1)
    fed(engine, c=1, type="chat", seq=1)
    assert acks(sent(engine)) == [(0, [100])]


@pytest.mark.parametrize(
    "wrong",
    [{"packet": 100}, {"packet": 70_000}, {"window": 0}, {"first_window": 0}, {"most_window": 2**32}, {"timeout": 0}],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]  # numbers all, and wrong ones


class Log(Observer):
    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def frame(self, direction: str, channel: str, name: str, size: int) -> None:
        self.lines.append((direction, channel, name, size))

    def state(self, channel: str, state: str) -> None:
        self.lines.append((channel, state))

    def timer(self, name: str) -> None:
        self.lines.append(("timer", name))

    def credit(self, direction: str, channel: str, amount: int) -> None:
        self.lines.append((direction, channel, amount))

    def error(self, error: BaseException) -> None:
        self.lines.append((error,))

    def transport(self, direction: str, data: bytes | memoryview) -> None:
        self.lines.append((direction, bytes(data)))


def test_an_observer_sees_packets_states_and_timers() -> None:
    log = Log()
    engine = Engine(False, observer=log)
    fed(engine, b"hi", c=1, type="chat", seq=1)
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    channel.sender.finish(b"hello")
    sent(engine)
    fed(engine, c=1, seq=2, end=True, ack=1)
    sent(engine)
    wait(engine, 5.0)
    assert log.lines[:4] == [
        ("in", "channel 1", "open", 2),
        ("channel 1", "open"),
        ("out", "channel 1", "end", 5),
        ("in", "channel 1", "end", 0),
    ]
    assert ("channel 1", "gone") in log.lines
