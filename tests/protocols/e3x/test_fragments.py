"""Messages larger than a packet are sent in several packets."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.protocols.e3x import Config, Engine, encode_packet
from muxkit.protocols.e3x.assembly import Assembly, Reassembly
from muxkit.protocols.e3x.packets import cut, pieces_after
from muxkit.protocols.e3x.receive import ReliableReceiver
from tests.protocols.e3x._helpers import acks, connector, fed, listener, opened, received, sent, told


@given(size=st.integers(0, 5000), first=st.integers(1, 700), other=st.integers(1, 700))
def test_the_pieces_are_the_message_and_count_down_to_0(size: int, first: int, other: int) -> None:
    body = bytes(range(256)) * 20
    pieces = list(cut(body[:size], first, other))
    assert b"".join(piece for _, piece in pieces) == body[:size]
    assert [frag for frag, _ in pieces] == list(range(len(pieces)))[::-1]
    assert len(pieces) == pieces_after(size, first, other) + 1
    assert all(0 < len(piece) <= max(first, other) for _, piece in pieces if size)


@given(size=st.integers(0, 20_000), packet=st.integers(256, 2000), type=st.text("x", min_size=1, max_size=80))
def test_no_packet_is_larger_than_configured_and_the_message_arrives_as_one(size: int, packet: int, type: str) -> None:
    config = Config(packet=packet, congestion=False)
    one, other = Engine(True, config), Engine(False, config)
    body = bytes(range(256)) * 80
    channel = one.open(type, body[:size])
    channel.sender.finish(body[:size])
    got: list[object] = []
    for _ in range(20):
        for data in one.datagrams_to_send(0.0):
            assert len(data) <= packet
            got += received(other, data)
        there = other.channel(1)
        assert there is not None
        assert isinstance(there.receiver, ReliableReceiver)
        while there.receiver.handed:
            there.receiver.done()
            got += told(other)
        for data in other.datagrams_to_send(0.0):
            one.receive_datagram(data, 0.0)
    assert got == [("opened", 1, type, body[:size])] + [("message", 1, body[:size])] * bool(size) + [("ended", 1)]


def test_a_message_that_fits_is_one_packet_to_its_last_byte() -> None:
    engine = connector()
    channel = engine.open("chat")
    sent(engine)
    room = channel.sender.quota
    channel.sender.send(bytes(room))
    channel.sender.send(bytes(room + 1))
    packets = sent(engine)
    assert [packet.frag for packet in packets] == [0, 1, 0]
    assert all(len(encode_packet(packet)) <= 1400 for packet in packets)


def test_pieces_are_acked_as_they_come_and_the_last_when_the_message_was_processed() -> None:
    engine = listener(window=4)
    channel = opened(engine)
    for seq in range(2, 40):
        assert fed(engine, b"x", c=1, seq=seq, frag=40 - seq) == []
    assert fed(engine, b"y", c=1, seq=40) == [("message", 1, b"x" * 38 + b"y")]
    assert [ack for ack, _ in acks(sent(engine))] == [39]
    channel.receiver.done()
    assert isinstance(channel.receiver, ReliableReceiver)
    assert channel.receiver.processed == 40


BAD = {
    "one piece too few": [(3, b"a"), (1, b"b")],
    "as many to come as before": [(3, b"a"), (3, b"b")],
    "an end of the message too early": [(3, b"a"), (0, b"b")],
    "an empty piece": [(3, b"a"), (2, b"")],
    "an empty first piece": [(3, b"")],
}


@pytest.mark.parametrize("pieces", BAD.values(), ids=BAD)
def test_pieces_that_do_not_fit_together_break_their_channel_only(pieces: list[tuple[int, bytes]]) -> None:
    engine = listener()
    opened(engine)
    opened(engine, 3)
    events: list[object] = []
    for seq, (frag, piece) in enumerate(pieces, start=2):
        events += fed(engine, piece, c=1, seq=seq, frag=frag)
    assert [(event[0], event[2]) for event in events if isinstance(event, tuple)] == [("broken", "message")]
    assert [packet.channel for packet in sent(engine) if packet.err] == [1]
    assert engine.state.reassembly.used == engine.stats().held == 0
    assert engine.channels == 1


@pytest.mark.requirement("R-26")
def test_a_message_that_announces_more_than_allowed_is_refused_with_its_first_piece() -> None:
    engine = listener(limits=Limits(message=10_000))
    opened(engine)
    (event,) = fed(engine, bytes(1000), c=1, seq=2, frag=2**32 - 1)
    assert isinstance(event, tuple)
    assert event[:3] == ("broken", 1, "message")
    assert "against 10000 allowed" in str(event[3])
    assert engine.state.reassembly.used == 0


@pytest.mark.requirement("R-01", "R-26")
def test_a_message_that_grows_beyond_what_it_announced_is_refused() -> None:
    engine = listener(limits=Limits(message=5000))
    opened(engine)
    fed(engine, b"x", c=1, seq=2, frag=20)
    events = [event for seq in range(3, 10) for event in fed(engine, bytes(1300), c=1, seq=seq, frag=22 - seq)]
    assert [event[2] for event in events if isinstance(event, tuple)] == ["message"]
    assert engine.state.reassembly.used == 0


@pytest.mark.requirement("R-01", "R-26")
def test_a_message_in_tiny_pieces_takes_little_more_memory_than_its_bytes() -> None:
    assembly = Assembly(Reassembly(Limits()))
    tracemalloc.start()
    try:
        for frag in range(10_000, 0, -1):
            assembly.add(frag, b"%02d" % (frag % 100))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert assembly.size == 20_000
    assert taken < 3 * assembly.size


@pytest.mark.requirement("R-01")
def test_unfinished_messages_of_all_channels_share_one_limit() -> None:
    engine = listener(limits=Limits(message=10_000, reassembly=10_000))
    for id in (1, 3, 5):
        opened(engine, id)
        fed(engine, bytes(4000), c=id, seq=2, frag=1)
    assert engine.channels == 2
    assert engine.state.reassembly.used == 8000
    assert fed(engine, b"x", c=1, seq=3, frag=0) == [("message", 1, bytes(4000) + b"x")]
    assert engine.state.reassembly.used == 4000


def test_an_end_inside_a_message_breaks_the_channel() -> None:
    engine = listener()
    opened(engine)
    (event,) = fed(engine, b"a", c=1, seq=2, frag=2, end=True)
    assert isinstance(event, tuple)
    assert event[:3] == ("broken", 1, "message")
    assert engine.state.reassembly.used == 0


def test_towards_a_foreign_peer_nothing_is_cut_and_frag_means_nothing() -> None:
    config = Config(frag=False, congestion=False)
    one, other = Engine(True, config), Engine(False, config)
    channel = one.open("chat")
    with pytest.raises(LocalProtocolError, match="1401 bytes; a packet of 1400 has room for"):
        channel.sender.send(bytes(1401))
    fed(other, c=1, type="chat", seq=1)
    there = other.channel(1)
    assert there is not None
    there.receiver.done()
    assert fed(other, b"a", c=1, seq=2, frag=7) == [("message", 1, b"a")]


@pytest.mark.requirement("R-45")
def test_a_message_that_no_packet_can_carry_is_refused_before_anything_is_sent() -> None:
    engine = connector(limits=Limits(message=100_000))
    lossy = engine.open("samples", reliable=False)
    room = lossy.sender.quota
    with pytest.raises(LocalProtocolError, match=f"{room + 1} bytes; a packet of 1400 has room for {room}"):
        lossy.sender.send(bytes(room + 1))
    lossy.sender.send(bytes(room))
    assert all(len(data) <= 1400 for data in engine.datagrams_to_send(0.0))
    with pytest.raises(LocalProtocolError, match=r"100001 bytes against Limits\(message=100000\)"):
        engine.open("chat", bytes(100_001))
    assert engine.channels == 1


@pytest.mark.requirement("R-45")
def test_a_smaller_path_is_kept_to_from_the_next_message_on() -> None:
    engine = connector()
    channel = engine.open("chat")
    engine.packet_size = 1200
    channel.sender.send(bytes(10_000))
    assert all(len(data) <= 1200 for data in engine.datagrams_to_send(0.0))
    with pytest.raises(LocalProtocolError, match="invalid packet size 100"):
        engine.packet_size = 100
