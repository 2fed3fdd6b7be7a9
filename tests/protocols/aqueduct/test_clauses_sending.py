"""Section 3.3: what goes where, with which number, and how a channel is finished or cancelled."""

from __future__ import annotations

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.aqueduct import Config, Mode
from tests.protocols.aqueduct._helpers import EMPTY, Talk, client, entry, hexed, server

clause = pytest.mark.clause


def sent(talk: Talk, *payloads: bytes, mode: Mode = Mode.ORDERED) -> None:
    for payload in payloads:
        talk.engine.send(entry(talk), payload, mode=mode)


@clause("aqueduct-S01")
def test_a_message_is_one_frame() -> None:
    talk = client()
    sent(talk, b"hi")
    assert talk.bytes_written() == [hexed("03 00 04 00 00 00 02 68 69")]


@clause("aqueduct-S02", "aqueduct-S07")
def test_ordered_messages_share_one_stream_and_one_route() -> None:
    talk = client()
    sent(talk, b"", b"", b"")
    assert talk.written() == [(6, hexed("03 00 04 00 00 00 00 04 01 00 00 00 04 02 00 00 00"), False)]
    sent(talk, b"")
    assert talk.written() == [(6, hexed("04 03 00 00 00"), False)]


@clause("aqueduct-S03")
def test_unordered_messages_have_a_stream_each() -> None:
    talk = client()
    sent(talk, b"", b"", b"", mode=Mode.UNORDERED)
    assert talk.written() == [
        (stream, hexed(f"03 00 04 0{number} 00 00 00"), True) for number, stream in enumerate((6, 10, 14))
    ]


@clause("aqueduct-S04", "aqueduct-S07")
def test_unreliable_messages_go_in_datagrams() -> None:
    talk = client()
    sent(talk, b"", b"", b"", mode=Mode.UNRELIABLE)
    assert talk.written() == []
    assert talk.datagrams() == [hexed(f"03 00 04 0{number} 00 00 00") for number in range(3)]


@clause("aqueduct-S05", "aqueduct-S06")
def test_what_does_not_fit_a_datagram_goes_in_a_stream_with_a_number_of_its_space() -> None:
    talk = client()
    sent(talk, b"a", b"b" * 200, b"c", mode=Mode.UNRELIABLE)
    assert talk.datagrams(100) == [hexed("03 00 04 00 00 00 01 61"), hexed("03 00 04 01 00 00 01 63")]
    assert talk.written() == [(6, hexed("03 00 04 00 00 00 c8 01" + "62" * 200), True)]


@clause("aqueduct-S09")
def test_datagrams_are_counted_soon_after_all_together() -> None:
    talk = client()
    sent(talk, *[b""] * 5, mode=Mode.UNRELIABLE)
    talk.datagrams()
    assert talk.written() == []
    assert talk.engine.next_deadline() == 0.025
    talk.later(0.025)
    assert talk.written() == [(6, hexed("03 00 05 05"), False)]
    sent(talk, b"", b"", mode=Mode.UNRELIABLE)
    talk.datagrams()
    talk.later(0.025)
    assert talk.written() == [(6, hexed("05 02"), False)]


@clause("aqueduct-S10", "aqueduct-S11")
def test_the_end_counts_reliable_messages_and_shares_the_stream_of_the_counts() -> None:
    talk = client()
    sent(talk, b"", b"")
    sent(talk, b"", mode=Mode.UNRELIABLE)
    assert len(talk.datagrams()) == 1
    talk.later(0.025)
    assert talk.written() == [(6, hexed("03 00 05 01" + EMPTY + "04 01 00 00 00"), False)]
    sent(talk, b"", mode=Mode.UNRELIABLE)
    talk.engine.finish(entry(talk))
    assert talk.written() == []  # the datagram goes first
    talk.datagrams()
    assert talk.written() == [(6, hexed("05 01 06 02"), True)]


@clause("aqueduct-S10")
def test_the_end_waits_until_every_message_has_its_number() -> None:
    talk = client()
    sent(talk, b"", mode=Mode.UNORDERED)
    talk.engine.finish(entry(talk))
    assert talk.written(may_open=False) == []
    assert talk.written() == [(6, hexed("03 00" + EMPTY), True), (10, hexed("03 00 06 01"), True)]


@clause("aqueduct-S12", "aqueduct-S14")
@pytest.mark.requirement("R-17")
@pytest.mark.parametrize("first", ["finish", "cancel"])
def test_after_its_last_word_a_sender_says_nothing(first: str) -> None:
    talk = client()
    engine = talk.engine
    if first == "finish":
        engine.finish(entry(talk))
    else:
        engine.cancel(entry(talk), 0.0)
    written = talk.written()
    for mode in Mode:
        with pytest.raises(LocalProtocolError):
            engine.send(entry(talk), b"", mode=mode)
    with pytest.raises(LocalProtocolError):
        engine.finish(entry(talk))
    with pytest.raises(LocalProtocolError):
        engine.cancel(entry(talk), 0.0)
    talk.later(1)
    assert (len(written), talk.written(), talk.datagrams()) == (1, [], [])
    engine.forget(entry(talk), 1.0)  # that may still be
    assert talk.bytes_written() == [hexed("03 00 0B")]


@clause("aqueduct-S13", "aqueduct-S15")
def test_a_cancel_has_a_fresh_stream_and_resets_those_of_messages() -> None:
    talk = client()
    sent(talk, b"ordered")
    sent(talk, b"a", b"b", b"c", mode=Mode.UNORDERED)
    assert [stream for stream, _, _ in talk.written()] == [6, 10, 14, 18]
    talk.say("03 00 08 02 01 01")  # one of the three has arrived
    acked = 10
    sent(talk, b"never opened", mode=Mode.UNORDERED)
    talk.engine.cancel(entry(talk), 0.0)
    assert talk.resets() == [stream for stream in (6, 10, 14, 18) if stream != acked]
    assert talk.written() == [(22, hexed("03 00 07"), True)]
    assert talk.say("03 00 0A") == [("Cancelled", 0)]


@clause("aqueduct-S15")
def test_a_message_that_was_cut_by_a_cancel_does_not_go_on() -> None:
    talk = client()
    sent(talk, b"x" * 1000)
    stream = talk.engine.next_stream(True)
    assert stream == 6
    assert len(talk.engine.stream_to_send(6, 100)[0]) == 100
    talk.engine.cancel(entry(talk), 0.0)
    assert talk.resets() == [6]
    assert talk.written() == [(10, hexed("03 00 07"), True)]
    assert talk.engine.statistics().outbox == 0


@clause("aqueduct-E26")
def test_a_oneshot_sender_sends_once_and_finishes_by_itself() -> None:
    talk = client()
    half, ticket = talk.engine.channel(sends=True, oneshot=True)
    sent_on = entry(talk)
    talk.engine.send(sent_on, b"", attachments=[ticket])
    talk.engine.send(half, b"")
    with pytest.raises(LocalProtocolError):
        talk.engine.send(half, b"")
    assert talk.bytes_written() == [hexed("03 00 04 00 00 02 04 00 00"), hexed("03 04" + EMPTY + "06 01")]


@clause("aqueduct-E26")
def test_a_oneshot_message_may_be_unreliable() -> None:
    talk = client()
    half, ticket = talk.engine.channel(sends=True, oneshot=True)
    talk.engine.send(entry(talk), b"", attachments=[ticket])
    talk.engine.send(half, b"", mode=Mode.UNRELIABLE)
    talk.written()
    assert talk.datagrams() == [hexed("03 04" + EMPTY)]
    assert talk.bytes_written() == [hexed("03 04 05 01 06 00")]


# ---------------------------------------------------------------------------- room


@pytest.mark.requirement("R-08")
def test_a_sender_admits_one_message_of_any_size_and_more_up_to_a_mark() -> None:
    talk = client()
    sender = entry(talk)
    assert talk.engine.admits(sender, 10**7)
    sent(talk, b"x" * 2 * 1024 * 1024)
    assert not talk.engine.admits(sender, 1)
    with pytest.raises(LocalProtocolError, match="bytes to send beside"):
        sent(talk, b"x")
    talk.engine.watch(sender, 1)
    assert talk.heard() == []
    talk.engine.next_stream(True)
    talk.engine.stream_to_send(6, 1024 * 1024)
    assert talk.heard() == []
    talk.written()
    assert talk.heard() == [("Writable", 0)]


@pytest.mark.requirement("R-08")
def test_unanswered_messages_are_bounded_and_an_ack_makes_room() -> None:
    talk = client(config=Config(in_flight=2))
    sent(talk, b"", b"")
    talk.written()
    talk.engine.watch(entry(talk), 1)
    assert not talk.engine.admits(entry(talk), 1)
    assert talk.say("03 00 08 02 00 01") == [("Writable", 0)]


@pytest.mark.requirement("R-08")
def test_of_unreliable_messages_the_oldest_give_way() -> None:
    talk = client(config=Config(unreliable_queue=2))
    receipts = [talk.engine.send(entry(talk), bytes([n]), mode=Mode.UNRELIABLE, receipt=True) for n in range(4)]
    assert talk.heard() == [("Nacked", 0)] * 2
    assert [receipt and receipt.arrived for receipt in receipts] == [False, False, None, None]
    assert talk.datagrams() == [hexed("03 00 04 00 00 00 01 02"), hexed("03 00 04 01 00 00 01 03")]


@pytest.mark.requirement("R-08")
def test_large_unreliable_messages_give_way_by_their_bytes() -> None:
    talk = client()
    sent(talk, *[b"x" * 300_000] * 10, mode=Mode.UNRELIABLE)
    assert entry(talk).datagram_bytes <= talk.engine.limits.channel_bytes
    assert len(entry(talk).datagrams) == 3


def test_datagrams_that_somebody_waits_for_are_sent_only_so_far_ahead_of_the_reports() -> None:
    talk = client(config=Config(in_flight=2))
    for _ in range(3):
        talk.engine.send(entry(talk), b"", mode=Mode.UNRELIABLE, receipt=True)
    assert len(talk.datagrams()) == 2
    talk.say("03 00 09 00 01 01")
    assert len(talk.datagrams()) == 1


def test_streams_take_turns_and_a_parked_one_waits() -> None:
    talk = client()
    sent(talk, b"x" * 200)
    sent(talk, b"y" * 200, mode=Mode.UNORDERED)
    engine, order = talk.engine, []
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
    talk = client()
    sent(talk, b"x" * 100)
    engine = talk.engine
    engine.next_stream(True)
    engine.stream_to_send(6, 10)
    engine.receive_stopped(6, 0.0)
    assert talk.heard() == [("NoReceiver", 0)]
    assert talk.resets() == [6]
    assert talk.bytes_written() == [hexed("03 00 07")]
    assert talk.say("03 00 0A") == []
    assert engine.senders == {}


def test_a_stop_for_the_acks_silences_them() -> None:
    talk = server()
    talk.say("03 00" + EMPTY, stream=2)
    talk.later(0.025)
    ((stream, _, _),) = talk.written()
    talk.engine.receive_stopped(stream, talk.now)
    talk.say("04 01 00 00 00", stream=2)
    talk.later(1)
    assert (talk.written(), talk.resets()) == ([], [stream])
    talk.engine.close(talk.engine.receivers[0], talk.now)
    assert talk.written() == []


def test_a_stop_after_the_last_word_brings_no_cancel() -> None:
    talk = client()
    sent(talk, b"x" * 100, mode=Mode.UNORDERED)
    engine = talk.engine
    assert engine.next_stream(True) == 6
    engine.stream_to_send(6, 10)
    engine.stream_to_send(6, 0)
    engine.finish(entry(talk))
    assert talk.written() == [(10, hexed("03 00 06 01"), True)]
    engine.receive_stopped(6, 0.0)
    assert talk.heard() == [("NoReceiver", 0)]
    assert (talk.resets(), talk.written(), engine.senders) == ([6], [], {})


def test_a_forget_that_is_stopped_may_be_sent_again() -> None:
    talk = client()
    talk.say("03 02" + EMPTY)
    engine = talk.engine
    assert engine.next_stream(True) == 6
    engine.stream_to_send(6, 1)
    engine.receive_stopped(6, 0.0)
    talk.now = 1.1
    talk.say("03 02" + EMPTY)
    assert talk.bytes_written() == [hexed("03 02 0B")]


def test_messages_that_leave_with_one_write_all_make_room_again() -> None:
    talk = client()
    sender = entry(talk)
    for _ in range(10):
        talk.engine.send(sender, b"x" * 100)
    assert sender.queued == talk.engine.outbox == 10 * 102
    stream = talk.engine.next_stream(True)
    assert stream is not None
    talk.engine.stream_to_send(stream, 550)
    assert sender.queued == talk.engine.outbox == 5 * 102  # the sixth is not whole yet
    talk.written()
    assert sender.queued == talk.engine.outbox == 0
