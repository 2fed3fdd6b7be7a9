"""Section 3.5: how channels are made, end, and are forgotten, and how long their ids are remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit._errors import LocalProtocolError
from muxkit.core import Reason
from muxkit.protocols.aqueduct import Mode
from muxkit.protocols.aqueduct.half import Outcome
from muxkit.protocols.aqueduct.receive import EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    client,
    entry,
    hexed,
    receiver_of,
    receivers_of,
    sender_of,
    senders_of,
    server,
    statistics_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

clause = pytest.mark.clause


def both(peer: ScriptedPeer, **options: object) -> tuple[EngineSender, EngineReceiver]:
    """Attach two channels of the client to one message: it sends on 8 and receives on 2."""
    sender, one = peer.engine.channel(sends=True)
    receiver, other = peer.engine.channel(sends=False)
    entry(peer).transmit(b"", attachments=[one, other], **options)  # type: ignore[arg-type]  # mode, receipt
    return sender, receiver


# ---------------------------------------------------------------------------- coming


@clause("aqueduct-O01", "aqueduct-L09")
def test_attaching_makes_the_opposite_halves_on_both_sides() -> None:
    peer, other = client(), server()
    both(peer)
    ((_, data, _),) = peer.written()
    assert data == hexed("03 00 04 00 00 04 08 00 02 00 00")
    assert (set(senders_of(peer.engine)), set(receivers_of(peer.engine))) == ({0, 8}, {2})
    (message,) = other.messages(data)
    assert [type(attachment.half).__name__ for attachment in message.attachments] == ["EngineReceiver", "EngineSender"]
    assert (set(senders_of(other.engine)), set(receivers_of(other.engine))) == ({2}, {0, 8})


@clause("aqueduct-L01", "aqueduct-L10")
def test_a_channel_may_speak_before_its_attachment_comes() -> None:
    peer = server()
    (early,) = peer.messages("03 08" + EMPTY)
    assert not early.receiver.attached
    (message,) = peer.messages("03 00 04 00 00 02 08 00 00")
    assert message.attachments[0].half is early.receiver
    assert receiver_of(peer, 8).attached


@clause("aqueduct-T15")
@pytest.mark.parametrize("id", ["08", "02"], ids=["the peer sends on", "this side sends on"])
def test_a_channel_that_is_attached_to_a_second_message_ends_the_connection(id: str) -> None:
    """The message would otherwise be acknowledged, and arrive without the channel."""
    peer = server()
    (first,) = peer.messages(f"03 00 04 00 00 02 {id} 00 00", stream=2)
    assert len(first.attachments) == 1
    error = peer.violation(f"04 01 00 02 {id} 00 00", stream=2)
    assert error.rule == "aqueduct-T15"
    assert "message 1" in str(error)


@clause("aqueduct-T15")
def test_a_second_message_in_a_datagram_may_not_attach_a_channel_again() -> None:
    peer = server()
    peer.messages("03 00 04 00 00 02 08 00 00")
    assert peer.datagram_violation("03 00 04 00 00 02 08 00 00").rule == "aqueduct-T15"


def test_a_datagram_with_an_attachment_that_comes_twice_is_dropped_in_silence() -> None:
    peer = server()
    datagram = "03 00 04 00 00 02 08 00 00"
    assert len(peer.datagram(datagram)) == 1
    assert peer.datagram(datagram) == []


@clause("aqueduct-L02")
def test_route_to_a_channel_of_ours_that_there_is_not_is_answered_with_forget() -> None:
    peer = client()
    assert peer.send("03 02" + EMPTY + "ff ff ff", fin=True) == []
    assert peer.written() == [(6, hexed("03 02 0B"), True)]
    assert receivers_of(peer.engine) == {}
    other = client()
    assert other.datagram("03 02" + EMPTY) == []
    assert other.bytes_written() == [hexed("03 02 0B")]


def test_a_half_is_sent_once_and_not_used_before() -> None:
    peer = client()
    sender, ticket = peer.engine.channel(sends=True)
    receiver, _ = peer.engine.channel(sends=False)
    commands: list[Callable[[], object]] = [
        lambda: sender.transmit(b""),
        lambda: peer.engine.forget(receiver),
        lambda: entry(peer).transmit(b"", attachments=[ticket, ticket]),
    ]
    for command in commands:
        with pytest.raises(LocalProtocolError):
            command()
    assert (sender.id, ticket.spent) == (None, False)
    entry(peer).transmit(b"", attachments=[ticket])
    with pytest.raises(LocalProtocolError, match="sent once"):
        entry(peer).transmit(b"", attachments=[ticket])


@pytest.mark.parametrize("keeps", ["sender", "receiver"])
def test_a_channel_that_ends_before_its_other_half_was_sent_cannot_be_sent(keeps: str) -> None:
    peer = client()
    if keeps == "sender":
        sender, ticket = peer.engine.channel(sends=True)
        sender.finish()
    else:
        receiver, ticket = peer.engine.channel(sends=False)
        receiver.stop(Reason())
    with pytest.raises(LocalProtocolError, match="sent once"):
        entry(peer).transmit(b"", attachments=[ticket])
    assert peer.written() == []


def test_a_refused_message_leaves_its_tickets_unspent() -> None:
    peer = client()
    _, ticket = peer.engine.channel(sends=True)
    entry(peer).finish()
    with pytest.raises(LocalProtocolError):
        entry(peer).transmit(b"", attachments=[ticket])
    assert not ticket.spent


# ---------------------------------------------------------------------------- forgetting


@clause("aqueduct-L03", "aqueduct-L04", "aqueduct-L05", "aqueduct-L06")
def test_a_channel_that_is_forgotten_is_gone_with_all_that_was_on_its_way() -> None:
    peer = server()
    peer.send("03 00 04 00 00 04 08 00 02 00 00")
    peer.later(0.025)
    peer.written()
    peer.send("03 08" + EMPTY)  # an ack for it is owed
    sender = sender_of(peer, 2)
    sender.transmit(b"x" * 100)
    assert peer.engine.next_stream(True) == 11
    peer.engine.stream_to_send(11, 10)
    sender.transmit(b"", mode=Mode.UNRELIABLE)
    assert peer.send("03 08 0B") == [("Forgotten", 8)]
    assert peer.send("03 02 0B") == [("Forgotten", 2)]
    assert peer.resets() == [11]
    peer.later(2)
    assert (peer.written(), peer.datagrams()) == ([], [])
    assert set(receivers_of(peer.engine)) == {0}


@clause("aqueduct-L06", "aqueduct-L22")
def test_a_close_that_is_not_out_yet_is_dropped_too() -> None:
    peer = server()
    peer.send("03 08 06 00")
    assert receivers_of(peer.engine).keys() == {0}
    peer.send("03 08 0B")
    assert peer.written() == []
    peer.send("03 10 06 02", stream=50)
    peer.send("03 10" + EMPTY)
    assert peer.send("03 10 0B") == [("Forgotten", 16)]
    peer.later(2)
    assert peer.written() == []


@clause("aqueduct-L07")
def test_to_forget_what_is_not_known_leaves_nothing_behind() -> None:
    peer = server()
    assert peer.send("03 08 0B", fin=True) == []
    assert receivers_of(peer.engine).keys() == {0}
    assert peer.send("03 08" + EMPTY) == []  # counts as just destroyed


@clause("aqueduct-L08")
def test_the_application_may_forget_a_channel_that_it_made() -> None:
    peer = client()
    sender, receiver = both(peer)
    peer.written()
    peer.engine.forget(sender)
    peer.engine.forget(receiver)
    assert peer.bytes_written() == [hexed("03 08 0B"), hexed("03 02 0B")]
    assert peer.events() == [("Forgotten", 8), ("Forgotten", 2)]
    assert set(senders_of(peer.engine)) == {0}
    other = server()
    other.messages("03 00 04 00 00 02 08 00 00")
    with pytest.raises(LocalProtocolError, match="only the side that made a channel can discard it"):
        other.engine.forget(receiver_of(other, 8))


# ---------------------------------------------------------------------------- closing


@clause("aqueduct-L11", "aqueduct-L12", "aqueduct-L14")
def test_a_receiver_that_is_closed_says_so_behind_its_acks() -> None:
    peer = server()
    peer.send("03 00" + EMPTY, stream=2)
    peer.later(0.025)
    ((stream, first, _),) = peer.written()
    peer.send("04 01 00 00 00", stream=2)
    receiver_of(peer, 0).stop(Reason())
    assert receivers_of(peer.engine) == {}
    assert first == hexed("03 00 08 02 00 01")
    assert peer.written() == [(stream, hexed("08 02 01 01 0A"), True)]
    assert peer.events() == []


@clause("aqueduct-L13")
def test_a_close_is_a_nack_for_all_that_was_not_acked() -> None:
    peer = client()
    receipts = [entry(peer).transmit(b"", receipt=True) for _ in range(4)]
    receipts.append(entry(peer).transmit(b"", receipt=True, mode=Mode.UNRELIABLE))
    peer.written()
    peer.datagrams()
    assert peer.send("03 00 08 02 00 02 0A") == [("Acked", 0)] * 2 + [("Nacked", 0)] * 3 + [("NoReceiver", 0)]
    assert [receipt and receipt.arrived for receipt in receipts] == [True, True, False, False, False]


@clause("aqueduct-L15")
def test_a_close_waits_for_room_and_is_then_written_in_full() -> None:
    peer = server()
    peer.send("03 00" + EMPTY)
    receiver_of(peer, 0).stop(Reason())
    assert peer.written(may_open=False) == []
    stream = peer.engine.next_stream(True)
    assert stream is not None
    first, _ = peer.engine.stream_to_send(stream, 3)
    peer.engine.stream_to_send(stream, 0)
    assert peer.engine.next_stream(True) is None
    peer.later(2)
    peer.engine.stream_writable(stream)
    assert (first.hex(), peer.written()) == ("030008", [(stream, hexed("02 00 01 0A"), True)])


@clause("aqueduct-L16")
def test_a_sender_whose_receiver_was_closed_is_gone() -> None:
    peer = client()
    entry(peer).transmit(b"x" * 100)
    peer.engine.next_stream(True)
    peer.engine.stream_to_send(6, 10)
    sender = entry(peer)
    assert peer.send("03 00 0A") == [("NoReceiver", 0)]
    assert peer.resets() == [6]
    assert senders_of(peer.engine) == {}
    with pytest.raises(LocalProtocolError, match="no receiver"):
        sender.transmit(b"")
    assert statistics_of(peer.engine).outbox == 0


@clause("aqueduct-L16")
@pytest.mark.parametrize(("acks", "event"), [("08 02 00 01", "Finished"), ("", "NoReceiver")])
def test_after_the_end_a_close_means_that_all_came_if_all_was_acked(acks: str, event: str) -> None:
    peer = client()
    entry(peer).transmit(b"")
    entry(peer).finish()
    peer.written()
    assert peer.send("03 00" + acks + "0A") == [(event, 0)]


@clause("aqueduct-L17")
def test_a_cancelled_receiver_closes() -> None:
    peer = server()
    peer.send("03 08" + EMPTY, stream=2)
    assert peer.send("03 08 07", fin=True) == [("Cancelled", 8)]
    assert peer.bytes_written() == [hexed("03 08 08 02 00 01 0A")]
    assert set(receivers_of(peer.engine)) == {0}


@clause("aqueduct-L18", "aqueduct-L21")
def test_the_end_waits_for_every_reliable_message() -> None:
    peer = server()
    peer.send("03 08" + EMPTY + "04 01 00 00 00 06 03", fin=True)
    assert peer.events() == []
    peer.later(0.025)
    assert peer.bytes_written() == [hexed("03 08 08 02 00 02")]
    assert peer.send("03 08 04 02 00 00 00", fin=True) == [("Arrived", 8, 2, b""), ("Finished", 8)]
    assert peer.bytes_written() == [hexed("08 02 02 01 0A")]


@clause("aqueduct-L19", "aqueduct-L20", "aqueduct-L21")
def test_the_end_waits_for_the_report_on_datagrams_which_comes_no_earlier() -> None:
    peer = server()
    peer.datagram("03 08" + EMPTY)
    peer.send("03 08 05 02 06 00", fin=True)
    assert peer.later(0.999) == []
    assert peer.written() == []
    assert peer.later(0.001) == [("Finished", 8)]
    assert peer.bytes_written() == [hexed("03 08 09 08 02 01 01 0A")]


@clause("aqueduct-L22")
def test_an_application_that_closes_first_ends_the_wait() -> None:
    peer = server()
    peer.send("03 08 06 01", fin=True)
    receiver_of(peer, 8).stop(Reason())
    assert peer.bytes_written() == [hexed("03 08 0A")]
    assert peer.send("03 08" + EMPTY) == []
    assert peer.later(1) == []
    assert peer.written() == []


# ---------------------------------------------------------------------------- tombstones


@clause("aqueduct-L23", "aqueduct-L24")
def test_a_channel_that_ended_is_remembered_for_a_second() -> None:
    peer = server()
    peer.send("03 08 07")
    peer.written()
    peer.now = 0.9
    assert peer.send("03 08" + EMPTY) == []
    assert (set(receivers_of(peer.engine)), peer.written()) == ({0}, [])
    assert peer.datagram("03 08" + EMPTY) == []
    peer.now = 1.1
    assert peer.send("03 08" + EMPTY) == [("Arrived", 8, 0, b"")]


@clause("aqueduct-L25")
def test_while_an_id_is_remembered_the_peer_is_not_told_to_forget_it() -> None:
    peer = client()
    _, receiver = both(peer)
    peer.written()
    receiver.stop(Reason())
    peer.written()
    peer.now = 0.9
    peer.send("03 02" + EMPTY)
    assert peer.written() == []
    peer.now = 1.1
    peer.send("03 02" + EMPTY)
    assert peer.bytes_written() == [hexed("03 02 0B")]


@clause("aqueduct-L10", "aqueduct-L23")
@pytest.mark.parametrize("late", [0.5, 60.0])
def test_a_channel_that_ended_before_its_attachment_came_is_given_as_it_ended(late: float) -> None:
    peer = server()
    (early,) = peer.messages("03 08" + EMPTY, stream=2)
    peer.send("03 08 07")
    peer.send("03 02 0A")
    peer.now = late
    (message,) = peer.messages("03 00 04 00 00 04 08 00 02 00 00")
    one, other = (attachment.half for attachment in message.attachments)
    assert (one, one.outcome) == (early.receiver, Outcome.CANCELLED)
    assert other.outcome is Outcome.NO_RECEIVER
    assert set(receivers_of(peer.engine)) | set(senders_of(peer.engine)) == {0}


def test_a_receiver_that_only_a_datagram_has_brought_back_does_not_stay() -> None:
    peer = server()
    assert peer.datagram("03 08" + EMPTY) == [("Arrived", 8, 0, b"")]
    assert peer.later(1) == [("Forgotten", 8)]
    assert set(receivers_of(peer.engine)) == {0}
    peer.datagram("03 10" + EMPTY)
    peer.send("03 00 04 00 00 02 10 00 00")
    peer.datagram("03 18" + EMPTY)
    peer.send("03 18 05 01")
    peer.later(5)
    assert set(receivers_of(peer.engine)) == {0, 16, 24}
