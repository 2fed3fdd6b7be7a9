"""The clauses about the ends of streams, flow control, pings and go-aways."""

from __future__ import annotations

import pytest

from muxkit import Limits
from muxkit.core import Reason
from muxkit.core.events import (
    Cancelled,
    ChannelFailed,
    Confirmed,
    Failed,
    Finished,
    GoingAway,
    Pong,
    Probed,
    Silent,
    Stopped,
)
from muxkit.protocols.yamux import Config
from muxkit.protocols.yamux.frames import HEADER_SIZE, Type
from tests.protocols.yamux._helpers import (
    ACK,
    FIN,
    RST,
    SYN,
    WINDOW,
    Frame,
    Pair,
    data,
    engine,
    failure,
    fed,
    frames_of,
    go_away,
    messages,
    opened,
    ping,
    receiver_of,
    sender_of,
    sums_of,
    update,
    violation,
    written,
)

# --- ends


@pytest.mark.clause("yamux-E01")
def test_a_fin_ends_one_direction() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN)))
    (finished,) = fed(server, update(1, 0, FIN))
    assert isinstance(finished, Finished)
    sender_of(there).send(b"still here")
    assert frames_of(server)[-1].payload == b"still here"


@pytest.mark.clause("yamux-E02")
def test_a_stream_is_over_when_both_sides_have_ended_it() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN | FIN)))
    sender_of(there).finish()
    *_, fin, confirming = frames_of(server)
    assert fin.flags & FIN
    assert server.channels == 1
    fed(server, ping(confirming.length, ACK))
    assert server.channels == 0


@pytest.mark.clause("yamux-E03")
def test_data_after_a_fin_ends_the_session() -> None:
    violation(engine(), data(1, b"x", SYN | FIN), data(1, b"y"), rule="yamux-E03")


@pytest.mark.clause("yamux-E04")
def test_a_second_fin_ends_the_session() -> None:
    violation(engine(), data(1, b"x", SYN | FIN), update(1, 0, FIN), rule="yamux-E04")


@pytest.mark.clause("yamux-E05")
@pytest.mark.parametrize("frame", [update(1, 0, RST), data(1, b"", RST)])
def test_a_reset_ends_both_directions(frame: bytes) -> None:
    server = engine()
    fed(server, data(1, b"x", SYN))
    assert [type(event) for event in fed(server, frame)] == [Cancelled, Stopped]
    assert server.channels == 0


@pytest.mark.clause("yamux-E06")
def test_an_answered_ping_confirms_the_ends_before_it() -> None:
    server = engine()
    streams = [opened(fed(server, data(id, b"x", SYN))) for id in (1, 3)]
    for there in streams:
        sender_of(there).finish()
    *_, confirming = frames_of(server)
    assert confirming.type == Type.PING
    assert [event.half for event in fed(server, ping(confirming.length, ACK)) if isinstance(event, Confirmed)] == [
        there.sender for there in streams
    ]


@pytest.mark.clause("yamux-E07")
def test_the_end_never_shares_a_frame_with_data() -> None:
    client = engine(is_client=True)
    stream = client.open_stream()
    stream.sender.send(b"last words")
    stream.sender.finish()
    payload, fin = (frame for frame in frames_of(client) if frame.stream == 1)
    assert (payload.flags & FIN, payload.payload) == (0, b"last words")
    assert (fin.flags & FIN, fin.length) == (FIN, 0)


@pytest.mark.clause("yamux-E08")
def test_data_for_a_closed_reader_is_answered_by_a_reset() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN)))
    receiver_of(there).stop(Reason())
    fed(server, data(1, b"dropped"))
    assert not any(frame.flags & RST for frame in frames_of(server))
    sender_of(there).finish()
    written(server)
    fed(server, data(1, b"too late"))
    assert Frame(Type.WINDOW_UPDATE, RST, 1, 0) in frames_of(server)


@pytest.mark.clause("yamux-E09")
def test_a_peer_that_never_ends_its_half_is_reset() -> None:
    server = engine(config=Config(keepalive=None, close_timeout=7.0))
    there = opened(fed(server, data(1, b"x", SYN)))
    sender_of(there).finish()
    receiver_of(there).stop(Reason())
    *_, confirming = frames_of(server)
    fed(server, ping(confirming.length, ACK), now=1.0)
    for due in (10.0, 20.0):  # the first one acknowledges what nobody has taken
        server.handle_deadline(due)
    assert Frame(Type.WINDOW_UPDATE, RST, 1, 0) in frames_of(server)
    assert server.channels == 0


# --- flow control


@pytest.mark.clause("yamux-W01")
def test_a_new_stream_has_256_kib_both_ways() -> None:
    client = engine(is_client=True)
    stream = client.open_stream()
    assert (stream.sender.credit_out, stream.receiver.credit_in) == (262_144, 262_144)
    stream.sender.send(bytes(300_000))
    assert sum(len(frame.payload) for frame in frames_of(client)) == 262_144


@pytest.mark.clause("yamux-W02")
def test_only_payload_uses_credit() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"abc", SYN)))
    fed(server, update(1, 5), ping(1), update(1, 0, ACK))
    assert receiver_of(there).credit_in == WINDOW - 3


@pytest.mark.clause("yamux-W03")
def test_more_than_the_window_ends_the_session() -> None:
    server = engine()
    fed(server, data(1, bytes(WINDOW), SYN))
    violation(server, data(1, b"x")[:12], rule="yamux-W03")


@pytest.mark.clause("yamux-W04")
def test_an_update_follows_when_half_of_the_window_was_consumed() -> None:
    server = engine()
    there = opened(fed(server, data(1, bytes(WINDOW), SYN)))
    receiver_of(there).consumed((), WINDOW // 2 - 1)
    assert frames_of(server) == []
    receiver_of(there).consumed((), 1)
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, 0, 1, WINDOW // 2)]


@pytest.mark.clause("yamux-W05")
def test_the_window_of_a_busy_stream_grows() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN)))
    receiver_of(there).consumed((), 1)
    for _ in range(30):
        size = receiver_of(there).credit_in
        fed(server, data(1, bytes(size)), now=0.1)
        receiver_of(there).consumed((), size)
        written(server)
    assert receiver_of(there).credit_in == Limits().short_window


def test_a_busy_stream_makes_the_engine_measure_the_round_trip_once_in_a_while() -> None:
    server = engine()
    there = opened(fed(server, data(1, b"x", SYN)))
    receiver_of(there).consumed((), 1)
    pings = []
    for turn in range(48):  # 12 seconds
        size = min(WINDOW, receiver_of(there).credit_in)
        fed(server, data(1, bytes(size)), now=0.25 * turn)
        receiver_of(there).consumed((), size)
        asked = [frame for frame in frames_of(server) if frame.type == Type.PING]
        for frame in asked:
            fed(server, ping(frame.length, ACK), now=0.25 * (turn + 1))
        pings += asked
    assert len(pings) == 3
    assert sums_of(server).budget.round_trip.seconds == 0.25


@pytest.mark.clause("yamux-W06")
def test_credit_that_no_number_holds_ends_the_session() -> None:
    server = engine()
    fed(server, update(1, 2**32 - 1 - WINDOW, SYN))
    (*_, last) = fed(server, update(1, 1))
    assert isinstance(last, Failed)


@pytest.mark.clause("yamux-W07")
def test_streams_that_hold_too_much_together_are_reset() -> None:
    server = engine(limits=Limits(connection_bytes=2 * WINDOW))
    events = fed(server, *(data(id, bytes(WINDOW), SYN) for id in (1, 3, 5)), data(7, b"x", SYN))
    assert failure(events).error.limit == "connection_bytes"
    assert [frame.stream for frame in frames_of(server) if frame.flags & RST] == [5]
    assert not server.over
    assert messages(events)[-1] == b"x"


# --- pings


@pytest.mark.clause("yamux-P01")
def test_a_ping_for_a_stream_ends_the_session() -> None:
    violation(engine(), ping(1, stream=1), rule="yamux-P01")


@pytest.mark.clause("yamux-P02")
def test_a_ping_is_answered_with_its_value() -> None:
    server = engine()
    fed(server, ping(0xDEADBEEF))
    assert frames_of(server) == [Frame(Type.PING, ACK, 0, 0xDEADBEEF)]


@pytest.mark.clause("yamux-P03")
def test_an_answer_ends_the_ping_of_its_value() -> None:
    server = engine()
    server.ping("first")
    server.ping("second")
    first, second = (frame.length for frame in frames_of(server))
    events = fed(server, ping(second, ACK), ping(first, ACK), ping(first, ACK))
    assert [event.key for event in events if isinstance(event, Pong)] == ["second", "first"]


@pytest.mark.clause("yamux-P04")
def test_a_silent_peer_is_asked_and_then_given_up() -> None:
    server = engine(config=Config(keepalive=10.0, keepalive_timeout=5.0))
    (probed,) = server.handle_deadline(10.0)
    assert isinstance(probed, Probed)
    assert frames_of(server)[0].type == Type.PING
    (silent,) = server.handle_deadline(15.0)
    assert isinstance(silent, Silent)
    assert server.over


@pytest.mark.clause("yamux-P05")
def test_a_peer_that_asks_and_never_reads_is_given_up() -> None:
    server = engine(limits=Limits(pongs=100))
    *_, last = fed(server, *(ping(value) for value in range(101)))
    assert isinstance(last, Failed)
    assert last.error.limit == "pongs"


# --- the end of the session


@pytest.mark.clause("yamux-A01")
def test_a_go_away_for_a_stream_ends_the_session() -> None:
    violation(engine(), go_away(0, stream=1), rule="yamux-A01")


@pytest.mark.clause("yamux-A02")
def test_open_streams_go_on_after_a_normal_go_away() -> None:
    client = engine(is_client=True)
    client.open_stream()
    written(client)
    (event,) = fed(client, go_away(0))
    assert isinstance(event, GoingAway)
    assert not event.reason
    assert client.peer_takes_no_channels
    assert messages(fed(client, data(1, b"still", ACK))) == [b"still"]


@pytest.mark.clause("yamux-A03")
@pytest.mark.parametrize(("code", "meaning"), [(1, 400), (2, 500), (99, 99)])
def test_any_other_code_ends_the_session(code: int, meaning: int) -> None:
    server = engine()
    (event,) = fed(server, go_away(code), data(1, b"x", SYN))
    assert isinstance(event, GoingAway)
    assert event.reason.code == meaning
    assert server.over


@pytest.mark.clause("yamux-A04")
def test_streams_after_our_go_away_are_reset() -> None:
    server = engine()
    server.go_away(Reason())
    assert frames_of(server) == [Frame(Type.GO_AWAY, 0, 0, 0)]
    assert fed(server, data(1, b"x", SYN)) == []
    assert frames_of(server) == [Frame(Type.WINDOW_UPDATE, RST, 1, 0)]


@pytest.mark.clause("yamux-A05")
def test_a_reason_follows_a_go_away_with_an_error() -> None:
    server, client = engine(), engine(is_client=True)
    (event,) = fed(client, server.farewell(Reason("come back on Monday", 9)))
    assert isinstance(event, GoingAway)
    assert event.reason == Reason("come back on Monday", 9)


@pytest.mark.clause("yamux-A05")
def test_a_reason_that_comes_in_parts_is_read_as_a_whole() -> None:
    """Was: the peer read as much of the reason as one read of its transport happened to hold."""
    told = engine().farewell(Reason("come back on Monday", 9))
    for place in range(1, len(told)):
        client = engine(is_client=True)
        events = [*fed(client, told[:place]), *fed(client, told[place:])]
        if place != HEADER_SIZE:  # other implementations say nothing behind a go-away, so nothing is waited for
            assert [event.reason for event in events] == [Reason("come back on Monday", 9)]


# --- channels


@pytest.mark.clause("yamux-C01")
def test_a_channel_begins_with_its_opening_record() -> None:
    client = engine(is_client=True)
    client.open_channel(b"x")
    assert frames_of(client) == [Frame(Type.DATA, SYN, 1, 13, b"\x80\x00\x00\x09muxkit/1x")]


@pytest.mark.clause("yamux-C02")
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"no", b"\xff" * 12])
def test_a_peer_without_channels_costs_the_channel(answer: bytes) -> None:
    client = engine(is_client=True)
    client.open_channel(b"")
    written(client)
    events = fed(client, data(1, answer, ACK), update(1, 0, FIN))
    assert isinstance(failure(events), ChannelFailed)
    assert not client.over
    assert [frame.stream for frame in frames_of(client) if frame.flags & RST] == [1]


@pytest.mark.clause("yamux-C03")
@pytest.mark.parametrize("piece", [1, 7, 65_536])
def test_messages_arrive_as_they_were_sent(piece: int) -> None:
    pair = Pair()
    here, _ = pair.channel()
    sent = [b"", b"x", bytes(range(256)) * 400, b"", b"end"]
    for message in sent:
        sender_of(here).send(message)
    octets = written(pair.client)
    got = [fed(pair.server, octets[place : place + piece]) for place in range(0, len(octets), piece)]
    assert [message for events in got for message in messages(events)] == sent


@pytest.mark.clause("yamux-C04")
def test_a_second_opening_record_costs_the_channel() -> None:
    pair = Pair()
    here, _ = pair.channel()
    sender_of(here).send_opening(b"")
    pair.run()
    assert isinstance(failure(pair.seen[pair.server]), ChannelFailed)
    assert not pair.server.over


@pytest.mark.clause("yamux-C05")
def test_an_end_inside_a_message_costs_the_channel() -> None:
    pair = Pair()
    here, _ = pair.channel()
    sender_of(here).push(b"\x00\x00\x00\x09half")
    sender_of(here).finish()
    pair.run()
    assert failure(pair.seen[pair.server]).error.rule == "yamux-C05"
    assert not pair.server.over


@pytest.mark.clause("yamux-C06")
def test_a_reset_of_a_channel_carries_the_reason() -> None:
    pair = Pair()
    here, _ = pair.channel()
    sender_of(here).cancel(Reason("disk full", 7))
    pair.run()
    (cancelled,) = (event for event in pair.seen[pair.server] if isinstance(event, Cancelled))
    assert Reason.decode(cancelled.payload) == Reason("disk full", 7)


@pytest.mark.clause("yamux-C07")
def test_a_message_larger_than_the_window_borrows_credit() -> None:
    pair = Pair(limits=Limits(message=4 * 2**20))
    here, there = pair.channel()
    sender_of(here).send(bytes(3 * 2**20))
    pair.run()
    (message,) = messages(pair.seen[pair.server])
    assert len(message) == 3 * 2**20
    receiver_of(there).consumed((message,), len(message))
    assert sums_of(pair.server).reassembly.left == Limits().reassembly
    sender_of(here).push(b"\x7f\xff\xff\xff")
    pair.run()
    assert failure(pair.seen[pair.server]).error.limit == "message"


@pytest.mark.clause("yamux-C08")
def test_a_stream_shows_by_its_first_bytes_what_it_carries() -> None:
    server = engine(limits=Limits(handshake=5.0))
    assert fed(server, update(1, 0, SYN), update(3, 0, SYN), data(1, b"\x80\x00\x00\x08mux")) == []
    assert sender_of(opened(fed(server, data(1, b"kit/1")))).carries_messages
    events = [*server.handle_deadline(5.0)]
    assert not sender_of(opened(events)).carries_messages
    server.take_streams()
    assert not sender_of(opened(fed(server, update(5, 0, SYN)))).carries_messages
