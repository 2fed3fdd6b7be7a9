"""Floods: everything that a peer can make an engine hold or do is bounded by a named limit."""

from __future__ import annotations

import tracemalloc

import pytest

from muxkit._errors import LocalProtocolError
from muxkit._limits import Limits
from muxkit.core import Consumed, Lent, encode_varint
from muxkit.core.events import Silent
from muxkit.protocols.aqueduct import Config
from muxkit.protocols.aqueduct.events import Arrived
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    ScriptedPeer,
    client,
    entry,
    hexed,
    receiver_of,
    receivers_of,
    server,
    statistics_of,
    taken,
)

FEW = Limits(channels=10, resets_per_second=5, resets_burst=20, tombstones=8)


def channel(index: int) -> str:
    """Give the id of a client-made client-sends channel."""
    id, encoded = index << 3, bytearray()
    while id >= 0x80:
        encoded.append(id & 0x7F | 0x80)
        id >>= 7
    return bytes([*encoded, id]).hex()


def flood(peer: ScriptedPeer, *texts: str, most: int = 100) -> int:
    """Send this for new channels until the engine fails; give how often it was accepted."""
    for index in range(most):
        for text in texts:
            peer.send(text.replace("{}", channel(index + 1)), fin=True)
        if peer.engine.over:
            return index
    return most


@pytest.mark.requirement("R-01", "R-02")
@pytest.mark.parametrize(
    "text", ["03 {} 04 00 00 00 00", "03 {} 05 01", "03 {} 06 05"], ids=["messages", "counts", "ends"]
)
def test_channels_that_a_route_makes_are_bounded(text: str) -> None:
    peer = server(limits=FEW)
    assert flood(peer, text) == 9  # beside the entrypoint
    assert len(receivers_of(peer.engine)) <= 10


@pytest.mark.requirement("R-01", "R-02")
def test_channels_that_attachments_or_datagrams_make_are_bounded() -> None:
    peer = server(limits=FEW)
    many = "".join(channel(index) + "00" for index in range(1, 12))
    error = peer.violation(f"03 00 04 00 00 {len(bytes.fromhex(many)):02x} {many} 00")
    assert error.limit == "channels"
    assert "11 channels made beside 1 live" in str(error)
    other = server(limits=FEW)
    for index in range(1, 10):
        other.datagram(f"03 {channel(index)} {EMPTY}")
    assert other.datagram_violation(f"03 {channel(10)} {EMPTY}").limit == "channels"


@pytest.mark.requirement("R-02", "R-10")
def test_channels_whose_close_cannot_be_written_count_until_it_is() -> None:
    peer = server(limits=FEW)
    assert flood(peer, "03 {} 06 00") == 9
    other = server(limits=FEW)
    for index in range(1, 50):
        assert other.send(f"03 {channel(index)} 06 00", fin=True) == [("Finished", index << 3)]
        other.written()
    assert not other.engine.over


@pytest.mark.requirement("R-01")
def test_channels_that_are_not_taken_are_bounded() -> None:
    peer = server(limits=Limits(backlog=3))
    peer.messages("03 00 04 00 00 04 08 00 10 00 00", stream=2)
    peer.engine.accept(receiver_of(peer, 8))
    peer.send("04 01 00 04 18 00 20 00 00", stream=2)
    assert not peer.engine.over
    assert peer.violation("04 02 00 02 28 00 00", stream=2).limit == "backlog"


@pytest.mark.requirement("R-10", "R-12")
@pytest.mark.parametrize(
    "texts",
    [("03 {} 07",), ("03 {} 04 00 00 00 00", "03 {} 0b"), ("03 {} 04 00 00 00 00", "03 {} 07")],
    ids=["open and cancel", "open and forget", "message and cancel"],
)
def test_churn_only_paces_what_is_opened(texts: tuple[str, ...]) -> None:
    peer = server(limits=FEW)
    for index in range(1, 100):
        assert (peer.engine.starts.pause(0.0) > 0) == (index > FEW.resets_burst)
        for text in texts:
            peer.receive_stream(100 + 8 * index + len(text), _bytes(text, index), True, 0.0)
        peer.written()
    assert not peer.engine.over
    assert peer.engine.starts.pause(0.0) == 1 / FEW.resets_per_second
    assert peer.engine.starts.pause(1.0) == 0


@pytest.mark.requirement("R-10", "R-12")
def test_streams_for_nothing_are_budgeted() -> None:
    peer = server(limits=FEW)
    for index in range(1, 100):
        peer.receive_stream(100 + 4 * index, _bytes("03 {}", index), True, 0.0)
        peer.written()
        if peer.engine.over:
            break
    assert index == 21
    assert peer.failure().limit == "resets_per_second"


@pytest.mark.requirement("R-10", "R-12")
def test_streams_that_are_opened_and_reset_take_from_an_allowance_that_comes_back() -> None:
    peer = server(limits=FEW)
    for index in range(20):
        peer.send("03 08 04", stream=100 + 4 * index)
        peer.reset(100 + 4 * index)
    assert peer.engine.starts.pause(0.0) > 0
    assert peer.engine.starts.pause(1.0) == 0
    for index in range(5):
        peer.send("03 08 04", stream=300 + 4 * index)
        peer.receive_reset(300 + 4 * index, 1.0)
    assert peer.engine.starts.pause(1.0) > 0
    assert not peer.engine.over


def _bytes(text: str, index: int) -> bytes:
    return bytes.fromhex(text.replace("{}", channel(index)))


@pytest.mark.requirement("R-06", "R-12")
def test_routes_to_channels_of_ours_that_never_were_are_answered_once_and_budgeted() -> None:
    peer = client(limits=FEW)
    for _ in range(50):
        peer.send("03 02" + EMPTY, fin=True)
    assert peer.bytes_written() == [hexed("03 02 0B")]
    peer.send("03 02" + EMPTY, fin=True)
    assert peer.written() == []
    for index in range(1, 21):
        peer.receive_stream(300 + 4 * index, b"\x03" + encode_varint(index << 3 | 2), True, 0.0)
        peer.written()
    assert peer.failure().limit == "resets_per_second"
    other = client(limits=FEW)
    for index in range(8):
        other.send(f"03 {index << 3 | 2:02x}", fin=True)
    assert other.violation("03 7a", fin=True).limit == "tombstones"


@pytest.mark.requirement("R-06")
def test_what_is_remembered_of_channels_that_ended_unseen_is_bounded() -> None:
    peer = server(limits=Limits(tombstones=8))
    for index in range(1, 100):
        peer.send(f"03 {channel(index)} 0b", fin=True)
    assert statistics_of(peer.engine).ended_unattached == 8


@pytest.mark.requirement("R-13")
def test_streams_are_bounded() -> None:
    peer = server(limits=FEW, config=Config(streams=5))
    for index in range(25):
        peer.send("03", stream=100 + 4 * index)
    assert not peer.engine.over
    assert "26 streams at once against 25" in str(peer.violation("03", stream=500))


@pytest.mark.requirement("R-04", "R-18")
def test_a_frame_that_never_ends_is_cut_at_its_announcement() -> None:
    peer = server(limits=Limits(message=1000))
    peer.send("03 00 04 00 00", stream=2)
    error = peer.violation("ff ff 03", stream=2)
    assert error.limit == "message"
    assert "65535 bytes against 1000" in str(error)


@pytest.mark.requirement("R-04")
def test_a_message_in_single_bytes_costs_little_more_than_itself() -> None:
    peer = server()
    peer.send("03 00 04 00 00 00 80 80 04", stream=2)  # 64 KiB
    tracemalloc.start()
    for _ in range(65_535):
        peer.receive_stream(2, b"x", False, 0.0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= 2 * 65_536
    peer.receive_stream(2, b"x", False, 0.0)
    (message,) = peer.full_events()
    assert isinstance(message, Arrived)
    assert len(message.payload) == 65_536


# ---------------------------------------------------------------------------- credit and loans


def controls(peer: ScriptedPeer) -> list[tuple[str, int, int]]:
    return [
        (type(control).__name__, control.stream, control.amount)
        for control in peer.engine.control_to_run()
        if isinstance(control, Consumed | Lent)
    ]


@pytest.mark.requirement("R-09", "R-22")
def test_a_stream_is_renewed_as_its_messages_are_consumed() -> None:
    peer = server()
    one, other = peer.messages("03 00" + EMPTY + "04 01 00 00 02 68 69", stream=2)
    assert controls(peer) == [("Consumed", 2, 2)]
    taken(other)
    assert controls(peer) == [("Consumed", 2, 7)]
    taken(other)
    taken(one)
    assert controls(peer) == [("Consumed", 2, 5)]
    peer.send("05 00", stream=2)
    assert controls(peer) == [("Consumed", 2, 2)]


@pytest.mark.requirement("R-22")
def test_a_message_larger_than_a_window_borrows_its_rest_and_repays_it() -> None:
    peer = server()
    left = peer.engine.reader.reassembly.left
    peer.send("03 00 04 00 00 00 90 4e" + "61" * 1000, stream=2)  # 10,000 bytes
    assert controls(peer) == [("Consumed", 2, 2), ("Lent", 2, 9000)]
    assert peer.engine.reader.reassembly.left == left - 9000
    (message,) = peer.messages("61" * 9000, stream=2)
    assert controls(peer) == []
    taken(message)
    assert controls(peer) == [("Consumed", 2, 10_006)]
    assert peer.engine.reader.reassembly.left == left


@pytest.mark.requirement("R-03")
def test_loans_are_given_whole_and_in_turn() -> None:
    peer = server(limits=Limits(message=6000, reassembly=10_000))
    for stream in (2, 6, 10):
        peer.send("03 08 04" + f"{stream:02x}" + "00 00 88 27", stream=stream)  # 5000 bytes each
    assert [control for control in controls(peer) if control[0] == "Lent"] == [("Lent", 2, 5000), ("Lent", 6, 5000)]
    peer.reset(2)
    assert [control for control in controls(peer) if control[0] == "Lent"] == [("Lent", 10, 5000)]
    (message,) = peer.messages("61" * 5000, stream=6)
    assert len(peer.messages("61" * 5000, stream=10)) == 1
    taken(message)
    assert peer.engine.reader.reassembly.left == 5000


@pytest.mark.requirement("R-03")
def test_a_head_that_comes_in_parts_reserves_for_the_largest_message() -> None:
    peer = server(limits=Limits(message=6000, reassembly=10_000))
    peer.send("03 00 04 00 88 27" + "00" * 100, stream=2)  # 5000 bytes of headers
    assert controls(peer) == [("Consumed", 2, 2), ("Lent", 2, 4900)]
    assert peer.engine.reader.reassembly.left < 4100
    peer.send("00" * 4900 + "00 80 01", stream=2)  # no attachments, a payload of 128 bytes
    assert [control for control in controls(peer) if control[0] == "Lent"] == [("Lent", 2, 131)]
    assert peer.engine.reader.reassembly.left == 10_000 - 4900 - 131


@pytest.mark.requirement("R-03")
def test_what_was_reserved_and_not_needed_comes_back_when_the_frame_is_complete() -> None:
    peer = server(limits=Limits(message=6000, reassembly=10_000), config=Config(header_pairs=5000))
    peer.send("03 00 04 00 88 27" + "00" * 100, stream=2)  # 5000 bytes of headers
    assert peer.engine.reader.reassembly.left < 4100
    (message,) = peer.messages("00" * 4900 + "00 00", stream=2)
    assert peer.engine.reader.reassembly.left == 10_000 - 4900
    taken(message)
    assert peer.engine.reader.reassembly.left == 10_000


@pytest.mark.requirement("R-22")
def test_what_comes_for_a_channel_that_is_gone_is_renewed_at_once() -> None:
    peer = server()
    peer.send("03 08 04 00 00 00 88 27" + "61" * 100, stream=2)
    assert receivers_of(peer.engine).keys() == {0}  # the size of an incomplete message is unknown
    peer.send("03 08 07")
    controls(peer)
    peer.send("61" * 4900, stream=2)
    assert sum(amount for name, _, amount in controls(peer) if name == "Consumed") == 5006
    assert peer.engine.reader.reassembly.left == peer.engine.reader.reassembly.total


# ---------------------------------------------------------------------------- our own side


def test_our_own_channels_and_messages_are_bounded() -> None:
    peer = client(limits=Limits(channels=3, message=1000), config=Config(headers=100, attachments=5))
    tickets = [peer.engine.channel(sends=True)[1] for _ in range(3)]
    with pytest.raises(LocalProtocolError, match="expected at most 2 more, got 3 attachments"):
        entry(peer).transmit(b"", attachments=tickets)
    entry(peer).transmit(b"", attachments=tickets[:2])
    with pytest.raises(LocalProtocolError, match="got 1001"):
        entry(peer).transmit(b"x" * 1000)
    with pytest.raises(LocalProtocolError, match="headers"):
        entry(peer).transmit(b"", headers=[(b"k", b"v" * 100)])
    with pytest.raises(LocalProtocolError, match="headers"):
        peer.engine.channel(sends=True, headers=[(b"k", b"v" * 100)])


@pytest.mark.parametrize("setting", ["flush_delay", "tombstone", "in_flight", "receipt_deadline", "datagram"])
def test_a_setting_must_be_above_zero(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        Config(**{setting: 0})  # type: ignore[arg-type]  # no two settings have one type


@pytest.mark.requirement("R-29")
def test_a_message_that_has_begun_must_go_on_arriving() -> None:
    peer = server(limits=Limits(stall=10.0, stall_bytes=100))
    peer.send("03 00 04 00 00 00 50" + "61" * 10)
    peer.send("61", stream=peer.last)
    peer.later(9.9)
    assert not peer.engine.over
    peer.handle_deadline(10.0)
    error = peer.failure()
    assert error.limit == "stall"
    assert "1 bytes in 10.0 s while a frame is unfinished, expected at least 100" in str(error)


@pytest.mark.requirement("R-29")
def test_a_slow_peer_that_is_fast_enough_goes_on() -> None:
    peer = server(limits=Limits(stall=10.0, stall_bytes=100))
    peer.send("03 00 04 00 00 00 80 10")  # 2048 bytes are to come
    stream = peer.last
    for _ in range(20):
        peer.send("61" * 102, stream=stream)
        peer.later(9.0)
    assert not peer.engine.over
    assert len(peer.messages("61" * 8, stream=stream)) == 1
    peer.later(100)
    assert not peer.engine.over


@pytest.mark.requirement("R-29")
def test_a_peer_that_may_lack_credit_is_not_stalled() -> None:
    peer = server(limits=Limits(stall=10.0, stall_bytes=100, channel_floor=100, channel_bytes=1000))
    messages = peer.messages("03 00 04 00 00 00 01 61", stream=50)  # which is not read
    peer.send("04 01 00 00 10 61", stream=50)  # and the next one is held back
    peer.later(100)
    assert not peer.engine.over
    for message in messages:
        taken(message)
    peer.send("61", stream=50)
    peer.send("61", stream=50)
    peer.handle_deadline(peer.now + 10)
    assert peer.failure().limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_peer_is_not_stalled_while_others_of_its_streams_have_used_what_all_may_have() -> None:
    peer = server(limits=Limits(stall=10.0, connection_bytes=1000))
    messages = peer.messages("03 00 04 00 00 00 d8 04" + "61" * 600)
    peer.send("03 08 04 00 00 00 10 61", stream=54)
    peer.later(100)
    assert not peer.engine.over
    taken(messages[0])
    peer.send("61", stream=54)
    peer.handle_deadline(peer.now + 10)
    assert peer.failure().limit == "stall"


@pytest.mark.requirement("R-29")
def test_a_line_that_dies_inside_a_frame_is_silence_and_no_broken_rule() -> None:
    peer = server(limits=Limits(stall=10.0))
    peer.send("03 00 04 00 00 00 50" + "61" * 10)
    peer.handle_deadline(10.0)
    *_, last = peer.full_events()
    assert isinstance(last, Silent)
    assert last.seconds == 10.0
    assert peer.engine.over
    assert peer.engine.next_deadline() is None
