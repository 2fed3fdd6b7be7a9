"""Illegal and forged packets are dropped and counted; nothing ends, and nothing grows beyond `Limits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._limits import Limits
from muxkit.protocols.e3x import Engine, EngineChannel, encode_packet, join_packet
from muxkit.protocols.e3x.packets import TYPE_MOST, Packet
from muxkit.protocols.e3x.receive import ReliableReceiver
from muxkit.protocols.e3x.send import ReliableSender
from muxkit.protocols.e3x.state import OVERHEAD, UsedIds
from tests.protocols.e3x._helpers import (
    acks,
    connector,
    fed,
    heard,
    listener,
    opened,
    raw,
    received,
    sending,
    sent,
    told,
    unacked,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def talking() -> tuple[Engine, EngineChannel]:
    """Make a channel with packets 1 to 4 sent, 2 of them acked, and packets 1 to 2 of the peer processed."""
    engine = connector()
    channel = sending(engine, 4)
    fed(engine, c=1, seq=1, ack=2)
    channel.receiver.done()
    fed(engine, c=1, seq=2)
    channel.receiver.done()
    wait(engine, 0.5)
    return engine, channel


def state_of(engine: Engine, channel: EngineChannel) -> object:
    """Return all that a dropped packet must not change."""
    incoming, outgoing = channel.receiver, channel.sender
    assert isinstance(incoming, ReliableReceiver)
    assert isinstance(outgoing, ReliableSender)
    return (
        outgoing.unacked,
        outgoing.window,
        outgoing.acked,
        incoming.processed,
        incoming.waiting,
        incoming.end_seq,
        engine.channels,
        engine.stats().held,
        engine.next_deadline(),
    )


DROPPED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "malformed"),
    "one byte": (b"\0", "malformed"),
    "no head": (b"\0\0", "malformed"),
    "a binary head": (join_packet(b"\1\2\3", b"x"), "malformed"),
    "a head beyond the packet": (b"\xff\xff{}", "malformed"),
    "a JSON bomb": (join_packet(b'{"c":1,"x":' + b"[" * 60_000), "malformed"),
    "a long number": (join_packet(b'{"c":' + b"1" * 5000 + b"}"), "malformed"),
    "no channel": (raw(seq=3), "malformed"),
    "seq 0": (raw(c=1, seq=0, ack=3), "malformed"),
    "an ack that is true": (raw(c=1, ack=True), "malformed"),
    "an ack of the unsent": (raw(c=1, ack=5), "unsent"),
    "content and an ack of the unsent": (raw(b"x", c=1, seq=3, ack=5, miss=[1, 1]), "unsent"),
    "no seq": (raw(b"x", c=1), "misplaced"),
    "an end without seq": (raw(c=1, end=True), "misplaced"),
    "content with an ack and without seq": (raw(b"x", c=1, ack=3), "misplaced"),
    "a miss without ack": (raw(c=1, miss=[1, 5]), "misplaced"),
    "an end behind us": (raw(c=1, seq=1, end=True), "misplaced"),
    "another channel of ours": (raw(b"x", c=3, seq=1, type="x"), "unknown"),
    "a channel of theirs that is not open": (raw(b"x", c=2), "unknown"),
    "one that acks what we never sent": (raw(c=2, seq=1, type="x", ack=1), "unsent"),
    "a first packet without type": (raw(c=2, seq=1), "misplaced"),
    "far ahead on a channel that is not open": (raw(c=2, seq=2**32 - 1), "unknown"),
    "an err for a channel that is not open": (raw(c=2, err="x"), "unknown"),
    "beyond the window": (raw(b"x", c=1, seq=103), "full"),
}


@pytest.mark.requirement("R-17", "R-19", "R-21")
@pytest.mark.parametrize(("packet", "fault"), DROPPED.values(), ids=DROPPED)
def test_a_bad_packet_is_dropped_and_counted_and_changes_nothing(packet: bytes, fault: str) -> None:
    engine, channel = talking()
    before = state_of(engine, channel)
    for count in (1, 2):
        assert received(engine, packet, 0.5) == [("fault", fault)]
        assert engine.stats().faults[fault] == count
    if fault == "full":  # the answer tells the window
        assert acks(sent(engine, 0.5)) == [(2, None)]
    assert state_of(engine, channel) == before
    assert fed(engine, b"good", c=1, seq=3, ack=4, now=0.5) == [("delivered", 1, 3, 4), ("message", 1, b"good")]


@pytest.mark.requirement("R-19")
def test_nothing_comes_after_an_end() -> None:
    engine, channel = talking()
    assert fed(engine, c=1, seq=4, end=True) == []
    assert fed(engine, b"x", c=1, seq=5) == [("fault", "misplaced")]
    assert fed(engine, c=1, seq=3, end=True) == [("fault", "misplaced")]
    assert fed(engine, b"x", c=1, seq=3) == [("message", 1, b"x")]
    channel.receiver.done()
    assert told(engine) == [("ended", 1)]


def test_a_flood_of_faults_is_told_once_until_the_events_are_taken() -> None:
    engine = listener()
    events = [event for _ in range(1000) for event in heard(engine.receive_datagram(b"", 0.0))]
    assert events == [("fault", "malformed")]
    assert told(engine) == []
    assert engine.stats().faults == {"malformed": 1000}


def test_an_err_ends_its_channel_at_once_and_drops_what_it_held() -> None:
    engine = listener()
    opened(engine)
    fed(engine, bytes(100), c=1, seq=3)
    assert fed(engine, c=1, err="\x1b[31mno") == [("broken", 1, "peer", "\x1b[31mno")]
    assert engine.channels == engine.stats().held == 0
    assert wait(engine, 60.0) == []


# --- limits


@pytest.mark.requirement("R-01", "R-02")
@pytest.mark.parametrize("reliable", [True, False])
def test_a_flood_of_opens_stops_at_the_limit_and_is_answered_with_errs(reliable: bool) -> None:
    engine = listener(limits=Limits(channels=20))
    for id in range(1, 2001, 2):
        engine.receive_datagram(raw(c=id, type="x", seq=1) if reliable else raw(c=id, type="x"), 0.0)
    assert engine.channels == 20
    assert engine.stats().faults == {"flood": 980}
    errs = [packet for packet in sent(engine) if packet.err is not None]
    assert {packet.err for packet in errs} == {"too many channels"}


@pytest.mark.requirement("R-01", "R-02")
def test_channels_that_nobody_took_are_limited_by_themselves() -> None:
    engine = listener(limits=Limits(backlog=5))
    for id in range(1, 41, 2):
        fed(engine, c=id, type="x", seq=1)
    assert engine.channels == 5
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    assert fed(engine, c=99, type="x", seq=1) == [("opened", 99, "x", b"")]


@pytest.mark.requirement("R-06", "R-10")
def test_refusals_are_not_given_out_without_end() -> None:
    engine = listener(limits=Limits(channels=1, resets_burst=10, resets_per_second=1))
    for id in range(1, 1001, 2):
        fed(engine, c=id, type="x", seq=1)
    assert len([packet for packet in sent(engine) if packet.err]) == 10


@pytest.mark.requirement("R-13")
def test_channels_without_their_first_packet_are_few_and_do_not_last() -> None:
    engine = listener(limits=Limits(half_open=5, handshake=2.0))
    for id in range(1, 201, 2):
        fed(engine, bytes(100), c=id, seq=2, now=1.0)
    assert engine.channels == 5
    assert engine.stats().held == 500
    assert engine.channel(199) is not None, "the oldest give way"
    sent(engine, 1.0)
    assert wait(engine, 10.0) == [], "nothing is said twice to who may not exist"
    assert engine.channels == engine.stats().held == 0
    assert fed(engine, c=1, type="x", seq=1, now=10.0) == [("opened", 1, "x", b"")]


@pytest.mark.requirement("R-01", "R-03")
def test_what_all_channels_hold_together_is_limited() -> None:
    engine = listener(limits=Limits(connection_bytes=100_000))
    for id in range(1, 101, 2):
        for seq in range(2, 12):
            fed(engine, bytes(1000), c=id, seq=seq)
    assert engine.stats().held <= 100_000


@pytest.mark.requirement("R-01", "R-03")
def test_packets_that_wait_count_for_more_than_their_bodies() -> None:
    engine = listener(limits=Limits(connection_bytes=100_000))
    for id in range(1, 21, 2):
        for seq in range(2, 101):
            fed(engine, c=id, seq=seq)
    assert engine.stats().held == 0
    assert engine.state.waiting <= 100_000 / OVERHEAD + 10, "and the next in order on each channel"
    assert engine.stats().faults["full"] > 500
    for id in range(1, 21, 2):
        fed(engine, c=id, type="x", err="enough")
    assert engine.state.waiting == 0


@pytest.mark.requirement("R-01", "R-18")
def test_what_stands_in_the_head_of_a_packet_is_not_kept_while_it_waits() -> None:
    engine = listener()
    channel = opened(engine)
    fed(engine, b"x", c=1, seq=3, type="y" * 50_000, ack=0, miss=[1] * 5000)
    assert isinstance(channel.receiver, ReliableReceiver)
    fed(engine, c=1, seq=2)
    packet = channel.receiver.further()
    assert packet is not None
    assert (packet.seq, packet.body, packet.type, packet.miss) == (3, b"x", None, None)


@pytest.mark.requirement("R-01", "R-03")
def test_a_first_packet_for_which_there_is_no_memory_may_come_again_and_a_small_one_is_always_taken() -> None:
    engine = listener(limits=Limits(connection_bytes=100_000))
    for id in range(1, 201, 2):
        fed(engine, bytes(60_000), c=id, type="x", seq=1)
    assert engine.stats().held == 60_000
    assert engine.channels == 1
    assert engine.stats().faults == {"full": 99}
    assert fed(engine, bytes(4000), c=201, type="x", seq=1) == [("opened", 201, "x", bytes(4000))]
    channel = engine.channel(1)
    assert channel is not None
    channel.receiver.done()
    assert fed(engine, bytes(60_000), c=3, type="x", seq=1) == [("opened", 3, "x", bytes(60_000))]


@pytest.mark.requirement("R-01", "R-19")
def test_a_type_that_is_too_long_to_be_kept_is_answered_with_an_err() -> None:
    engine = listener()
    fed(engine, c=1, type="x" * (TYPE_MOST + 1), seq=1)
    fed(engine, c=3, type="x" * (TYPE_MOST + 1))
    fed(engine, c=5, seq=2)
    fed(engine, c=5, type="x" * (TYPE_MOST + 1), seq=1)
    assert engine.channels == 0
    assert engine.stats().faults == {"misplaced": 3}
    assert {packet.channel: packet.err for packet in sent(engine)} == dict.fromkeys(
        (1, 3, 5), "type too long: expected at most 1024 characters, got 1025"
    )
    assert fed(engine, c=7, type="x" * TYPE_MOST, seq=1) == [("opened", 7, "x" * TYPE_MOST, b"")]


@pytest.mark.requirement("R-01")
def test_ends_of_channels_are_remembered_within_a_limit() -> None:
    engine = listener(limits=Limits(tombstones=10))
    for id in range(1, 201, 2):
        fed(engine, c=id, type="x", seq=1)
        fed(engine, c=id, err="x")
    assert len(engine.state.tombstones) == 10
    assert fed(engine, c=1, type="x", seq=1) == [("fault", "unknown")], "an id is used once"


@pytest.mark.requirement("R-01", "R-06")
def test_while_nothing_can_be_sent_what_is_to_be_answered_does_not_pile_up() -> None:
    engine = listener(limits=Limits(tombstones=10, channels=50), unreliable=("p",))
    for id in range(1, 2001, 4):
        fed(engine, b"x", c=id, type="x", seq=1, frag=2**32 - 1)  # broken by this side
        fed(engine, c=id + 2, type="p", seq=1)  # refused
    assert len(engine.state.errs) <= 20
    assert len(sent(engine)) <= 20


@pytest.mark.requirement("R-01")
def test_ids_that_leave_holes_are_remembered_within_a_limit() -> None:
    used = UsedIds()
    for id in range(1, 40_001, 4):
        used.add(id)
        assert id in used
    assert used.gaps <= 1024
    assert 40_003 not in used


@pytest.mark.requirement("R-30")
@pytest.mark.parametrize(
    "packet",
    [raw(c=1, type="x", seq=1), raw(c=1, seq=2), raw(c=1, type="p", seq=1), raw(c=1, type="x"), raw(c=2, ack=1), b""],
    ids=str,
)
def test_one_packet_of_a_stranger_brings_at_most_three_times_its_bytes(packet: bytes) -> None:
    """From any claimed address; the adapter limits what the application sends."""
    engine = listener(unreliable=("p",), window=748)
    engine.receive_datagram(packet, 0.0)
    channel = engine.channel(1)
    if channel is not None and channel.announced and channel.is_reliable:
        channel.receiver.done()
    out = [encode_packet(answer) for answer in sent(engine)]
    out += [encode_packet(answer) for _, answer in wait(engine, 60.0)]
    assert sum(map(len, out)) <= 3 * len(packet)


@pytest.mark.requirement("R-06")
def test_what_we_owe_a_peer_is_one_ack_a_channel_however_often_it_asks() -> None:
    engine = listener()
    opened(engine)
    for _ in range(10_000):
        engine.receive_datagram(raw(c=1, type="chat", seq=1), 2.0)
    assert acks(sent(engine, 2.0)) == [(1, None)]


# --- garbage

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SMALL = st.integers(0, 6)
FIELDS = st.fixed_dictionaries(
    {"c": st.integers(1, 6)},
    optional={
        "seq": SMALL | JSON,
        "ack": SMALL | JSON,
        "miss": st.lists(SMALL, max_size=4) | JSON,
        "type": st.sampled_from(["x", "p"]) | JSON,
        "end": st.booleans() | JSON,
        "err": st.just("no") | JSON,
        "frag": SMALL | JSON,
    },
)


def _bytes_of(fields: dict[str, object], body: bytes) -> bytes:
    try:
        return raw(body, **fields)
    except (ValueError, UnicodeEncodeError):  # NaN and lone surrogates cannot be expressed in JSON
        return body


@pytest.mark.requirement("R-17", "R-21")
@given(
    steps=st.lists(
        st.tuples(FIELDS, st.binary(max_size=10), st.sampled_from(["feed", "done", "send", "time", "pull"])),
        max_size=30,
    )
)
def test_no_sequence_of_packets_makes_an_engine_raise_or_lose_count(
    steps: list[tuple[dict[str, object], bytes, str]],
) -> None:
    engine = connector(limits=Limits(channels=3, half_open=2), unreliable=("p",))
    engine.open("x").sender.send(b"hello")
    now = 0.0
    does: dict[str, Callable[[], object]] = {
        "time": lambda: engine.handle_deadline(now),
        "pull": lambda: engine.datagrams_to_send(now),
    }
    for fields, body, command in steps:
        now += 0.3
        engine.receive_datagram(_bytes_of(fields, body), now)
        engine.events()
        for id in range(1, 7):
            channel = engine.channel(id)
            receiver = None if channel is None else channel.receiver
            if command == "done" and isinstance(receiver, ReliableReceiver) and receiver.handed:
                receiver.done()
            if channel is not None and command == "send" and channel.announced and not channel.sender.ended:
                channel.sender.send(body)
        does.get(command, lambda: None)()
        live = list(engine.state.table)
        receivers = [it.receiver for it in live if isinstance(it.receiver, ReliableReceiver)]
        assert engine.state.waiting == sum(receiver.waiting for receiver in receivers)
        assert engine.stats().held == sum(receiver.held for receiver in receivers)
        assert engine.stats().unsent == sum(it.sender.queued for it in live)


@given(data=st.lists(st.binary(max_size=80), max_size=20))
@pytest.mark.requirement("R-21")
def test_any_datagrams_leave_an_engine_as_it_was(data: list[bytes]) -> None:
    engine = connector()
    channel = sending(engine, 3)
    for datagram in data:
        engine.receive_datagram(datagram, 0.0)
        engine.receive_datagram(join_packet(datagram, datagram), 0.0)
    assert unacked(channel) == [1, 2, 3]
    assert engine.channels == 1
    engine.receive_datagram(encode_packet(Packet(1, ack=3)), 0.0)
    assert unacked(channel) == []
