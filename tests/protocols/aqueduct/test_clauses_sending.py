"""Section 3.3: streams and numbers of messages, and how a channel is finished or cancelled."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.core import Reason
from muxkit.core.events import Stopped
from muxkit.protocols.aqueduct import Config, Mode
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    client,
    entry,
    hexed,
    receivers_of,
    senders_of,
    server,
    statistics_of,
)

clause = pytest.mark.clause


def sent(peer: ScriptedPeer, *payloads: bytes, mode: Mode = Mode.ORDERED) -> None:
    for payload in payloads:
        entry(peer).transmit(payload, mode=mode)


@clause("aqueduct-S01")
def test_a_message_is_one_frame() -> None:
    peer = client()
    sent(peer, b"hi")
    assert peer.bytes_written() == [hexed("03 00 04 00 00 00 02 68 69")]


@clause("aqueduct-S02", "aqueduct-S07")
def test_ordered_messages_share_one_stream_and_one_route() -> None:
    peer = client()
    sent(peer, b"", b"", b"")
    assert peer.written() == [(6, hexed("03 00 04 00 00 00 00 04 01 00 00 00 04 02 00 00 00"), False)]
    sent(peer, b"")
    assert peer.written() == [(6, hexed("04 03 00 00 00"), False)]


@clause("aqueduct-S03")
def test_unordered_messages_have_a_stream_each() -> None:
    peer = client()
    sent(peer, b"", b"", b"", mode=Mode.UNORDERED)
    assert peer.written() == [
        (stream, hexed(f"03 00 04 0{number} 00 00 00"), True) for number, stream in enumerate((6, 10, 14))
    ]


@clause("aqueduct-S04", "aqueduct-S07")
def test_unreliable_messages_go_in_datagrams() -> None:
    peer = client()
    sent(peer, b"", b"", b"", mode=Mode.UNRELIABLE)
    assert peer.written() == []
    assert peer.datagrams() == [hexed(f"03 00 04 0{number} 00 00 00") for number in range(3)]


@clause("aqueduct-S05", "aqueduct-S06")
def test_what_does_not_fit_a_datagram_goes_in_a_stream_with_a_number_of_its_space() -> None:
    peer = client()
    sent(peer, b"a", b"b" * 200, b"c", mode=Mode.UNRELIABLE)
    assert peer.datagrams(100) == [hexed("03 00 04 00 00 00 01 61"), hexed("03 00 04 01 00 00 01 63")]
    assert (6, hexed("03 00 04 00 00 00 c8 01" + "62" * 200), True) in peer.written()


@clause("aqueduct-S09")
def test_datagrams_are_counted_soon_after_all_together() -> None:
    peer = client()
    sent(peer, *[b""] * 5, mode=Mode.UNRELIABLE)
    peer.datagrams()
    assert peer.written() == []
    assert peer.engine.next_deadline() == 0.025
    peer.later(0.025)
    assert peer.written() == [(6, hexed("03 00 05 05"), False)]
    sent(peer, b"", b"", mode=Mode.UNRELIABLE)
    peer.datagrams()
    peer.later(0.025)
    assert peer.written() == [(6, hexed("05 02"), False)]


@clause("aqueduct-S10", "aqueduct-S11")
def test_the_end_counts_reliable_messages_and_shares_the_stream_of_the_counts() -> None:
    peer = client()
    sent(peer, b"", b"")
    sent(peer, b"", mode=Mode.UNRELIABLE)
    assert len(peer.datagrams()) == 1
    peer.later(0.025)
    assert peer.written() == [(6, hexed("03 00 05 01" + EMPTY + "04 01 00 00 00"), False)]
    sent(peer, b"", mode=Mode.UNRELIABLE)
    entry(peer).finish()
    assert peer.written() == []  # the datagram goes first
    peer.datagrams()
    assert peer.written() == [(6, hexed("05 01 06 02"), True)]


@clause("aqueduct-S10")
def test_the_end_waits_until_every_message_has_its_number() -> None:
    peer = client()
    sent(peer, b"", mode=Mode.UNORDERED)
    entry(peer).finish()
    assert peer.written(may_open=False) == []
    assert peer.written() == [(6, hexed("03 00" + EMPTY), True), (10, hexed("03 00 06 01"), True)]


@clause("aqueduct-S12", "aqueduct-S14")
@pytest.mark.requirement("R-17")
@pytest.mark.parametrize("first", ["finish", "cancel"])
def test_after_its_last_word_a_sender_says_nothing(first: str) -> None:
    peer = client()
    engine = peer.engine
    if first == "finish":
        entry(peer).finish()
    else:
        entry(peer).cancel(Reason())
    written = peer.written()
    for mode in Mode:
        with pytest.raises(LocalProtocolError):
            entry(peer).transmit(b"", mode=mode)
    with pytest.raises(LocalProtocolError):
        entry(peer).finish()
    entry(peer).cancel(Reason())  # does nothing
    peer.later(1)
    assert (len(written), peer.written(), peer.datagrams()) == (1, [], [])
    engine.forget(entry(peer))  # still allowed
    assert peer.bytes_written() == [hexed("03 00 0B")]


@clause("aqueduct-S13", "aqueduct-S15")
def test_a_cancel_has_a_fresh_stream_and_resets_those_of_messages() -> None:
    peer = client()
    sent(peer, b"ordered")
    sent(peer, b"a", b"b", b"c", mode=Mode.UNORDERED)
    assert [stream for stream, _, _ in peer.written()] == [6, 10, 14, 18]
    peer.send("03 00 08 02 01 01")  # one of the three has arrived
    acked = 10
    sent(peer, b"never opened", mode=Mode.UNORDERED)
    entry(peer).cancel(Reason())
    assert peer.resets() == [stream for stream in (6, 10, 14, 18) if stream != acked]
    assert peer.written() == [(22, hexed("03 00 07"), True)]
    assert peer.send("03 00 0A") == [("Cancelled", 0)]


@clause("aqueduct-S15")
def test_a_message_that_was_cut_by_a_cancel_does_not_go_on() -> None:
    peer = client()
    sent(peer, b"x" * 1000)
    stream = peer.engine.next_stream(True)
    assert stream == 6
    assert len(peer.engine.stream_to_send(6, 100)[0]) == 100
    entry(peer).cancel(Reason())
    assert peer.resets() == [6]
    assert peer.written() == [(10, hexed("03 00 07"), True)]
    assert statistics_of(peer.engine).outbox == 0


@clause("aqueduct-E26")
def test_a_oneshot_sender_sends_once_and_finishes_by_itself() -> None:
    peer = client()
    half, ticket = peer.engine.channel(sends=True, oneshot=True)
    sent_on = entry(peer)
    sent_on.transmit(b"", attachments=[ticket])
    half.transmit(b"")
    with pytest.raises(LocalProtocolError):
        half.transmit(b"")
    assert peer.bytes_written() == [hexed("03 00 04 00 00 02 04 00 00"), hexed("03 04" + EMPTY + "06 01")]


@clause("aqueduct-E26")
def test_a_oneshot_message_may_be_unreliable() -> None:
    peer = client()
    half, ticket = peer.engine.channel(sends=True, oneshot=True)
    entry(peer).transmit(b"", attachments=[ticket])
    half.transmit(b"", mode=Mode.UNRELIABLE)
    peer.written()
    assert peer.datagrams() == [hexed("03 04" + EMPTY)]
    assert peer.bytes_written() == [hexed("03 04 05 01 06 00")]


# ---------------------------------------------------------------------------- room


@pytest.mark.requirement("R-08")
def test_a_sender_admits_one_message_of_any_size_and_more_up_to_a_mark() -> None:
    peer = client()
    sender = entry(peer)
    assert sender.admits(10**7)
    sent(peer, b"x" * 2 * 1024 * 1024)
    assert not sender.admits(1)
    with pytest.raises(LocalProtocolError, match="no room on entrypoint for 2 bytes"):
        sent(peer, b"x")
    sender.notify_when_room(1 - 1)
    assert peer.events() == []
    peer.engine.next_stream(True)
    peer.engine.stream_to_send(6, 1024 * 1024)
    assert peer.events() == []
    peer.written()
    assert peer.events() == [("Writable", 0)]


@pytest.mark.requirement("R-08")
def test_unanswered_messages_are_bounded_and_an_ack_makes_room() -> None:
    peer = client(config=Config(in_flight=2))
    sent(peer, b"", b"")
    peer.written()
    entry(peer).notify_when_room(1 - 1)
    assert not entry(peer).admits(1)
    assert peer.send("03 00 08 02 00 01") == [("Writable", 0)]


@pytest.mark.requirement("R-08")
def test_ordered_and_unordered_messages_that_wait_are_bounded_together() -> None:
    peer = client(config=Config(in_flight=2))
    sent(peer, b"")
    assert entry(peer).admits(1)
    sent(peer, b"", mode=Mode.UNORDERED)
    assert not entry(peer).admits(1)


@pytest.mark.requirement("R-08")
def test_of_unreliable_messages_the_oldest_give_way() -> None:
    peer = client(config=Config(unreliable_queue=2))
    receipts = [entry(peer).transmit(bytes([n]), mode=Mode.UNRELIABLE, receipt=True) for n in range(4)]
    assert peer.events() == [("Nacked", 0)] * 2
    assert [receipt and receipt.arrived for receipt in receipts] == [False, False, None, None]
    assert peer.datagrams() == [hexed("03 00 04 00 00 00 01 02"), hexed("03 00 04 01 00 00 01 03")]


@pytest.mark.requirement("R-08")
def test_large_unreliable_messages_give_way_by_their_bytes() -> None:
    peer = client()
    sent(peer, *[b"x" * 300_000] * 10, mode=Mode.UNRELIABLE)
    assert entry(peer).datagram_bytes <= peer.engine.limits.channel_bytes
    assert len(entry(peer).datagrams) == 3


def test_datagrams_with_receipts_are_sent_only_so_far_ahead_of_the_reports() -> None:
    peer = client(config=Config(in_flight=2))
    for _ in range(3):
        entry(peer).transmit(b"", mode=Mode.UNRELIABLE, receipt=True)
    assert len(peer.datagrams()) == 2
    peer.send("03 00 09 00 01 01")
    assert len(peer.datagrams()) == 1


def test_streams_take_turns_and_a_parked_one_waits() -> None:
    peer = client()
    sent(peer, b"x" * 200)
    sent(peer, b"y" * 200, mode=Mode.UNORDERED)
    engine, order = peer.engine, []
    for _ in range(5):
        stream = engine.next_stream(True)
        assert stream is not None
        order.append(stream)
        engine.stream_to_send(stream, 40)
    assert order == [6, 6, 10, 6, 10]  # a new stream comes between the turns of the open ones
    assert engine.next_stream(True) == 6
    assert engine.stream_to_send(6, 0) == (b"", False)
    assert [engine.next_stream(True), engine.stream_to_send(10, 1000)[1]] == [10, True]
    assert (engine.next_stream(True), engine.has_output(True)) == (None, False)
    engine.stream_writable(6)
    assert engine.next_stream(True) == 6


def test_a_stopped_stream_is_reset_and_its_sender_gives_up() -> None:
    peer = client()
    sent(peer, b"x" * 100)
    engine = peer.engine
    engine.next_stream(True)
    engine.stream_to_send(6, 10)
    peer.receive_stopped(6, 0.0)
    assert peer.events() == [("NoReceiver", 0)]
    assert peer.resets() == [6]
    assert peer.bytes_written() == [hexed("03 00 07")]
    assert peer.send("03 00 0A") == []
    assert senders_of(engine) == {}


def test_a_sender_that_is_stopped_and_closed_at_once_is_reported_to_its_owner() -> None:
    """Was: the engine forgot the owner before the session had read the event, and the owner stayed open for ever."""
    peer = client()
    sent(peer, b"x" * 100)
    sender, owner = entry(peer), object()
    sender.owner, sender.taken = owner, True
    peer.engine.next_stream(True)
    peer.engine.stream_to_send(6, 10)
    peer.receive_stopped(6, 0.0)
    peer.receive_stream(7, bytes.fromhex("03 00 0A"), fin=False, now=0.0)
    (stopped,) = [event for event in peer.full_events() if isinstance(event, Stopped)]
    assert stopped.sender.owner is owner


def test_a_stop_for_the_acks_silences_them() -> None:
    peer = server()
    peer.send("03 00" + EMPTY, stream=2)
    peer.later(0.025)
    ((stream, _, _),) = peer.written()
    peer.receive_stopped(stream, peer.now)
    peer.send("04 01 00 00 00", stream=2)
    peer.later(1)
    assert (peer.written(), peer.resets()) == ([], [stream])
    receivers_of(peer.engine)[0].stop(Reason())
    assert peer.written() == []


def test_a_stop_after_the_last_word_brings_no_cancel() -> None:
    peer = client()
    sent(peer, b"x" * 100, mode=Mode.UNORDERED)
    engine = peer.engine
    assert engine.next_stream(True) == 6
    engine.stream_to_send(6, 10)
    engine.stream_to_send(6, 0)
    entry(peer).finish()
    assert peer.written() == [(10, hexed("03 00 06 01"), True)]
    peer.receive_stopped(6, 0.0)
    assert peer.events() == [("NoReceiver", 0)]
    assert (peer.resets(), peer.written(), senders_of(engine)) == ([6], [], {})


def test_a_forget_that_is_stopped_may_be_sent_again() -> None:
    peer = client()
    peer.send("03 02" + EMPTY)
    engine = peer.engine
    assert engine.next_stream(True) == 6
    engine.stream_to_send(6, 1)
    peer.receive_stopped(6, 0.0)
    peer.now = 1.1
    peer.send("03 02" + EMPTY)
    assert peer.bytes_written() == [hexed("03 02 0B")]


def test_messages_that_leave_with_one_write_all_make_room_again() -> None:
    peer = client()
    sender = entry(peer)
    for _ in range(10):
        sender.transmit(b"x" * 100)
    assert sender.queued == peer.engine.outbox == 10 * 102
    stream = peer.engine.next_stream(True)
    assert stream is not None
    peer.engine.stream_to_send(stream, 550)
    assert sender.queued == peer.engine.outbox == 5 * 102  # the sixth is incomplete
    peer.written()
    assert sender.queued == peer.engine.outbox == 0
