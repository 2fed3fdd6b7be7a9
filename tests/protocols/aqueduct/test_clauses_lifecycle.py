"""Section 3.5: how channels come, end, are forgotten and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.protocols.aqueduct import Mode, Outcome, ReceiverMachine, SenderMachine
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    Talk,
    client,
    entry,
    hexed,
    receiver_of,
    sender_of,
    server,
)

if TYPE_CHECKING:
    from collections.abc import Callable

clause = pytest.mark.clause


def both(talk: Talk, **options: object) -> tuple[SenderMachine, ReceiverMachine]:
    """Two channels of the client that go with one message: 8, on which it sends, and 2, on which it receives."""
    sender, one = talk.engine.channel(sends=True)
    receiver, other = talk.engine.channel(sends=False)
    talk.engine.send(entry(talk), b"", attachments=[one, other], **options)  # type: ignore[arg-type]  # mode, receipt
    return sender, receiver


# ---------------------------------------------------------------------------- coming


@clause("aqueduct-O01", "aqueduct-L09")
def test_attaching_makes_the_opposite_halves_on_both_sides() -> None:
    talk, peer = client(), server()
    both(talk)
    ((_, data, _),) = talk.written()
    assert data == hexed("03 00 04 00 00 04 08 00 02 00 00")
    assert (set(talk.engine.senders), set(talk.engine.receivers)) == ({0, 8}, {2})
    (message,) = peer.messages(data)
    assert [type(attachment.half).__name__ for attachment in message.attachments] == [
        "ReceiverMachine",
        "SenderMachine",
    ]
    assert (set(peer.engine.senders), set(peer.engine.receivers)) == ({2}, {0, 8})


@clause("aqueduct-L01", "aqueduct-L10")
def test_a_channel_may_speak_before_its_attachment_comes() -> None:
    talk = server()
    (early,) = talk.messages("03 08" + EMPTY)
    assert not early.receiver.attached
    (message,) = talk.messages("03 00 04 00 00 02 08 00 00")
    assert message.attachments[0].half is early.receiver
    assert receiver_of(talk, 8).attached


def test_a_channel_that_is_attached_again_is_not_given_twice() -> None:
    talk = server()
    talk.messages("03 00 04 00 00 02 08 00 00", stream=2)
    (again,) = talk.messages("04 01 00 00 02 08 00 00".replace("00 00 02 08", "00 02 08 00", 1), stream=2)
    assert again.attachments == ()


@clause("aqueduct-L02")
def test_route_to_a_channel_of_ours_that_there_is_not_is_answered_with_forget() -> None:
    talk = client()
    assert talk.say("03 02" + EMPTY + "ff ff ff", fin=True) == []
    assert talk.written() == [(6, hexed("03 02 0B"), True)]
    assert talk.engine.receivers == {}
    other = client()
    assert other.datagram("03 02" + EMPTY) == []
    assert other.bytes_written() == [hexed("03 02 0B")]


def test_a_half_is_sent_once_and_not_used_before() -> None:
    talk = client()
    sender, ticket = talk.engine.channel(sends=True)
    receiver, _ = talk.engine.channel(sends=False)
    commands: list[Callable[[], object]] = [
        lambda: talk.engine.send(sender, b""),
        lambda: talk.engine.finish(sender),
        lambda: talk.engine.close(receiver, 0.0),
        lambda: talk.engine.forget(receiver, 0.0),
        lambda: talk.engine.send(entry(talk), b"", attachments=[ticket, ticket]),
    ]
    for command in commands:
        with pytest.raises(LocalProtocolError):
            command()
    assert (sender.id, ticket.spent) == (None, False)
    talk.engine.send(entry(talk), b"", attachments=[ticket])
    with pytest.raises(LocalProtocolError, match="sent once"):
        talk.engine.send(entry(talk), b"", attachments=[ticket])


def test_a_refused_message_leaves_its_tickets_unspent() -> None:
    talk = client()
    _, ticket = talk.engine.channel(sends=True)
    talk.engine.finish(entry(talk))
    with pytest.raises(LocalProtocolError):
        talk.engine.send(entry(talk), b"", attachments=[ticket])
    assert not ticket.spent


# ---------------------------------------------------------------------------- forgetting


@clause("aqueduct-L03", "aqueduct-L04", "aqueduct-L05", "aqueduct-L06")
def test_a_channel_that_is_forgotten_is_gone_with_all_that_was_on_its_way() -> None:
    talk = server()
    talk.say("03 00 04 00 00 04 08 00 02 00 00")
    talk.later(0.025)
    talk.written()
    talk.say("03 08" + EMPTY)  # an ack for it is owed
    sender = sender_of(talk, 2)
    talk.engine.send(sender, b"x" * 100)
    assert talk.engine.next_stream(True) == 11
    talk.engine.stream_to_send(11, 10)
    talk.engine.send(sender, b"", mode=Mode.UNRELIABLE)
    assert talk.say("03 08 0B") == [("Forgotten", 8)]
    assert talk.say("03 02 0B") == [("Forgotten", 2)]
    assert talk.resets() == [11]
    talk.later(2)
    assert (talk.written(), talk.datagrams()) == ([], [])
    assert set(talk.engine.receivers) == {0}


@clause("aqueduct-L06", "aqueduct-L22")
def test_a_close_that_is_not_out_yet_is_dropped_too() -> None:
    talk = server()
    talk.say("03 08 06 00")
    assert talk.engine.receivers.keys() == {0}
    talk.say("03 08 0B")
    assert talk.written() == []
    talk.say("03 10 06 02", stream=50)
    talk.say("03 10" + EMPTY)
    assert talk.say("03 10 0B") == [("Forgotten", 16)]
    talk.later(2)
    assert talk.written() == []


@clause("aqueduct-L07")
def test_to_forget_what_is_not_known_leaves_nothing_behind() -> None:
    talk = server()
    assert talk.say("03 08 0B", fin=True) == []
    assert talk.engine.receivers.keys() == {0}
    assert talk.say("03 08" + EMPTY) == []  # it counts as just destroyed


@clause("aqueduct-L08")
def test_the_application_may_forget_a_channel_that_it_made() -> None:
    talk = client()
    sender, receiver = both(talk)
    talk.written()
    talk.engine.forget(sender, 0.0)
    talk.engine.forget(receiver, 0.0)
    assert talk.bytes_written() == [hexed("03 08 0B"), hexed("03 02 0B")]
    assert talk.heard() == [("Forgotten", 8), ("Forgotten", 2)]
    assert set(talk.engine.senders) == {0}
    other = server()
    other.messages("03 00 04 00 00 02 08 00 00")
    with pytest.raises(LocalProtocolError, match="made by the peer"):
        other.engine.forget(receiver_of(other, 8), 0.0)


# ---------------------------------------------------------------------------- closing


@clause("aqueduct-L11", "aqueduct-L12", "aqueduct-L14")
def test_a_receiver_that_is_closed_says_so_behind_its_acks() -> None:
    talk = server()
    talk.say("03 00" + EMPTY, stream=2)
    talk.later(0.025)
    ((stream, first, _),) = talk.written()
    talk.say("04 01 00 00 00", stream=2)
    talk.engine.close(receiver_of(talk, 0), talk.now)
    assert talk.engine.receivers == {}
    assert first == hexed("03 00 08 02 00 01")
    assert talk.written() == [(stream, hexed("08 02 01 01 0A"), True)]
    assert talk.heard() == []


@clause("aqueduct-L13")
def test_a_close_is_a_nack_for_all_that_was_not_acked() -> None:
    talk = client()
    receipts = [talk.engine.send(entry(talk), b"", receipt=True) for _ in range(4)]
    receipts.append(talk.engine.send(entry(talk), b"", receipt=True, mode=Mode.UNRELIABLE))
    talk.written()
    talk.datagrams()
    assert talk.say("03 00 08 02 00 02 0A") == [("Acked", 0)] * 2 + [("Nacked", 0)] * 3 + [("NoReceiver", 0)]
    assert [receipt and receipt.arrived for receipt in receipts] == [True, True, False, False, False]


@clause("aqueduct-L15")
def test_a_close_waits_for_room_and_is_then_written_in_full() -> None:
    talk = server()
    talk.say("03 00" + EMPTY)
    talk.engine.close(receiver_of(talk, 0), 0.0)
    assert talk.written(may_open=False) == []
    stream = talk.engine.next_stream(True)
    assert stream is not None
    first, _ = talk.engine.stream_to_send(stream, 3)
    talk.engine.stream_to_send(stream, 0)
    assert talk.engine.next_stream(True) is None
    talk.later(2)
    talk.engine.stream_writable(stream)
    assert (first.hex(), talk.written()) == ("030008", [(stream, hexed("02 00 01 0A"), True)])


@clause("aqueduct-L16")
def test_a_sender_whose_receiver_was_closed_is_gone() -> None:
    talk = client()
    talk.engine.send(entry(talk), b"x" * 100)
    talk.engine.next_stream(True)
    talk.engine.stream_to_send(6, 10)
    sender = entry(talk)
    assert talk.say("03 00 0A") == [("NoReceiver", 0)]
    assert talk.resets() == [6]
    assert talk.engine.senders == {}
    with pytest.raises(LocalProtocolError, match="no receiver"):
        talk.engine.send(sender, b"")
    assert talk.engine.statistics().outbox == 0


@clause("aqueduct-L16")
@pytest.mark.parametrize(("acks", "event"), [("08 02 00 01", "Finished"), ("", "NoReceiver")])
def test_after_the_end_a_close_means_that_all_came_if_all_was_acked(acks: str, event: str) -> None:
    talk = client()
    talk.engine.send(entry(talk), b"")
    talk.engine.finish(entry(talk))
    talk.written()
    assert talk.say("03 00" + acks + "0A") == [(event, 0)]


@clause("aqueduct-L17")
def test_a_cancelled_receiver_closes() -> None:
    talk = server()
    talk.say("03 08" + EMPTY, stream=2)
    assert talk.say("03 08 07", fin=True) == [("Cancelled", 8)]
    assert talk.bytes_written() == [hexed("03 08 08 02 00 01 0A")]
    assert set(talk.engine.receivers) == {0}


@clause("aqueduct-L18", "aqueduct-L21")
def test_the_end_waits_for_every_reliable_message() -> None:
    talk = server()
    talk.say("03 08" + EMPTY + "04 01 00 00 00 06 03", fin=True)
    assert talk.heard() == []
    talk.later(0.025)
    assert talk.bytes_written() == [hexed("03 08 08 02 00 02")]
    assert talk.say("03 08 04 02 00 00 00", fin=True) == [("Arrived", 8, 2, b""), ("Finished", 8)]
    assert talk.bytes_written() == [hexed("08 02 02 01 0A")]


@clause("aqueduct-L19", "aqueduct-L20", "aqueduct-L21")
def test_the_end_waits_for_the_report_on_datagrams_which_comes_no_earlier() -> None:
    talk = server()
    talk.datagram("03 08" + EMPTY)
    talk.say("03 08 05 02 06 00", fin=True)
    assert talk.later(0.999) == []
    assert talk.written() == []
    assert talk.later(0.001) == [("Finished", 8)]
    assert talk.bytes_written() == [hexed("03 08 09 08 02 01 01 0A")]


@clause("aqueduct-L22")
def test_an_application_that_closes_first_ends_the_wait() -> None:
    talk = server()
    talk.say("03 08 06 01", fin=True)
    talk.engine.close(receiver_of(talk, 8), 0.0)
    assert talk.bytes_written() == [hexed("03 08 0A")]
    assert talk.say("03 08" + EMPTY) == []
    assert talk.later(1) == []
    assert talk.written() == []


# ---------------------------------------------------------------------------- tombstones


@clause("aqueduct-L23", "aqueduct-L24")
def test_a_channel_that_ended_is_remembered_for_a_second() -> None:
    talk = server()
    talk.say("03 08 07")
    talk.written()
    talk.now = 0.9
    assert talk.say("03 08" + EMPTY) == []
    assert (set(talk.engine.receivers), talk.written()) == ({0}, [])
    assert talk.datagram("03 08" + EMPTY) == []
    talk.now = 1.1
    assert talk.say("03 08" + EMPTY) == [("Arrived", 8, 0, b"")]


@clause("aqueduct-L25")
def test_as_long_as_it_is_remembered_nobody_is_told_to_forget_it() -> None:
    talk = client()
    _, receiver = both(talk)
    talk.written()
    talk.engine.close(receiver, 0.0)
    talk.written()
    talk.now = 0.9
    talk.say("03 02" + EMPTY)
    assert talk.written() == []
    talk.now = 1.1
    talk.say("03 02" + EMPTY)
    assert talk.bytes_written() == [hexed("03 02 0B")]


@clause("aqueduct-L10", "aqueduct-L23")
@pytest.mark.parametrize("late", [0.5, 60.0])
def test_a_channel_that_ended_before_its_attachment_came_is_given_as_it_ended(late: float) -> None:
    talk = server()
    (early,) = talk.messages("03 08" + EMPTY, stream=2)
    talk.say("03 08 07")
    talk.say("03 02 0A")
    talk.now = late
    (message,) = talk.messages("03 00 04 00 00 04 08 00 02 00 00")
    one, other = (attachment.half for attachment in message.attachments)
    assert (one, one.outcome) == (early.receiver, Outcome.CANCELLED)
    assert other.outcome is Outcome.NO_RECEIVER
    assert set(talk.engine.receivers) | set(talk.engine.senders) == {0}


def test_a_receiver_that_only_a_datagram_has_brought_back_does_not_stay() -> None:
    talk = server()
    assert talk.datagram("03 08" + EMPTY) == [("Arrived", 8, 0, b"")]
    assert talk.later(1) == [("Forgotten", 8)]
    assert set(talk.engine.receivers) == {0}
    talk.datagram("03 10" + EMPTY)
    talk.say("03 00 04 00 00 02 10 00 00")
    talk.datagram("03 18" + EMPTY)
    talk.say("03 18 05 01")
    talk.later(5)
    assert set(talk.engine.receivers) == {0, 16, 24}
