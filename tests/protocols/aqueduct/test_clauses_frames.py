"""Sections 2.1 and 2.2: how each frame is written, and where in a sequence it is allowed."""

from __future__ import annotations

import pytest

from muxkit.core import Cursor
from muxkit.protocols.aqueduct import Config, Mode, Role
from muxkit.protocols.aqueduct.frames import (
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    Frame,
    MessageFrame,
    RouteTo,
    SentUnreliable,
    Version,
    encode_frame,
    parse_frame,
)
from tests.protocols.aqueduct._helpers import (
    EMPTY,
    V,
    client,
    fresh,
    hexed,
    opened,
    receivers_of,
    senders_of,
    server,
    statistics_of,
    taken,
)

clause = pytest.mark.clause
VERSION = "EF 50 5F A6 60 0F 40 8E 41 51 55 45 44 55 43 54 0B 30 2E 30 2E 30 2D 41 46 54 45 52"
K = ((b"k", b"v"),)


@pytest.mark.parametrize(
    ("frame", "wire"),
    [
        pytest.param(Version(), VERSION, marks=clause("aqueduct-T01")),
        pytest.param(AckVersion(), "01", marks=clause("aqueduct-T05")),
        pytest.param(ConnectionHeaders(()), "02 00", marks=clause("aqueduct-T06")),
        pytest.param(ConnectionHeaders(K), "02 04 01 6B 01 76", marks=clause("aqueduct-T06")),
        pytest.param(RouteTo(0), "03 00", marks=clause("aqueduct-E23")),
        pytest.param(RouteTo(300), "03 AC 02", marks=clause("aqueduct-T07")),
        pytest.param(MessageFrame(0, payload=b"hi"), "04 00 00 00 02 68 69", marks=clause("aqueduct-T08")),
        pytest.param(MessageFrame(300), "04 AC 02 00 00 00", marks=clause("aqueduct-T10")),
        pytest.param(MessageFrame(0, K), "04 00 04 01 6B 01 76 00 00", marks=clause("aqueduct-T11")),
        pytest.param(
            MessageFrame(0, (), ((8, ()), (2, K))),
            "04 00 00 08 08 00 02 04 01 6B 01 76 00",
            marks=clause("aqueduct-T12"),
        ),
        pytest.param(MessageFrame(0), EMPTY, marks=clause("aqueduct-T16")),
        pytest.param(SentUnreliable(3), "05 03", marks=clause("aqueduct-T17")),
        pytest.param(FinishSender(2), "06 02", marks=clause("aqueduct-T20")),
        pytest.param(CancelSender(), "07", marks=clause("aqueduct-T22")),
        pytest.param(AckReliable([0, 3, 2, 1]), "08 04 00 03 02 01", marks=clause("aqueduct-T24")),
        pytest.param(AckReliable([2, 2, 3, 1]), "08 04 02 02 03 01", marks=clause("aqueduct-A02")),
        pytest.param(AckNackUnreliable([3, 1], 0), "09 00 02 03 01", marks=clause("aqueduct-T28")),
        pytest.param(AckNackUnreliable([3], 0), "09 00 01 03", marks=clause("aqueduct-T33")),
        pytest.param(AckNackUnreliable([1, 1, 1], 0), "09 00 03 01 01 01", marks=clause("aqueduct-T33")),
        pytest.param(AckNackUnreliable([0, 2], 0), "09 00 02 00 02", marks=clause("aqueduct-T32")),
        pytest.param(CloseReceiver(), "0A", marks=clause("aqueduct-T34")),
        pytest.param(ForgetChannel(), "0B", marks=clause("aqueduct-T36")),
    ],
)
def test_a_frame_is_written_like_this(frame: Frame, wire: str) -> None:
    assert encode_frame(frame).hex() == hexed(wire)
    assert parse_frame(Cursor(bytes.fromhex(wire))) == frame


@clause("aqueduct-F01")
def test_the_same_bytes_are_the_same_message_in_a_stream_and_in_a_datagram() -> None:
    peer = server()
    assert peer.send("03 00" + EMPTY) == peer.datagram("03 00" + EMPTY) == [("Arrived", 0, 0, b"")]


@clause("aqueduct-F02")
@pytest.mark.parametrize("text", [V + "01 02 00", V + "02 00 01", "01" + V + "01", V + V])
def test_the_frames_of_the_connection_come_first_in_any_order(text: str) -> None:
    peer = fresh(Role.SERVER)
    peer.send(V)
    peer.send(text, fin=True)
    assert not peer.engine.over


@clause("aqueduct-F06")
def test_an_empty_sequence_and_one_without_frames_of_its_channel_are_fine() -> None:
    peer = server()
    peer.send("01 03 00", fin=True)
    peer.send("", fin=True)
    assert not peer.engine.over
    assert statistics_of(peer.engine).streams_in == 0


@clause("aqueduct-F07")
def test_what_follows_route_to_is_for_its_channel_in_order() -> None:
    assert server().send("03 08" + "04 00 00 00 01 61" + "04 01 00 00 01 62") == [
        ("Arrived", 8, 0, b"a"),
        ("Arrived", 8, 1, b"b"),
    ]


@clause("aqueduct-F08")
@pytest.mark.requirement("R-17")
def test_of_a_frame_that_a_reset_cut_short_nothing_is_left() -> None:
    peer = server()
    whole = peer.messages("03 00" + "04 00 00 00 01 61" + "04 01 00 00 05 62", stream=2)
    assert [message.payload for message in whole] == [b"a"]
    assert peer.reset(2) == []
    assert peer.later(1) == []
    assert peer.bytes_written() == [hexed("03 00 08 02 00 01")]
    taken(whole[0])
    assert statistics_of(peer.engine).streams_in == 0


@clause("aqueduct-F03")
def test_frames_before_a_break_of_the_pattern_stay_applied() -> None:
    peer = server()
    peer.receive_stream(2, bytes.fromhex("03 00" + EMPTY + "03 00"), False, 0.0)
    message, failed = peer.full_events()
    assert type(message).__name__ == "Arrived"
    assert type(failed).__name__ == "Failed"


@clause("aqueduct-F11")
@pytest.mark.requirement("R-21")
def test_any_split_of_a_stream_gives_the_same_events() -> None:
    text = bytes.fromhex("03 00 04 00 04 01 6B 01 76 04 08 00 02 00 02 68 69" + "04 01 00 00 01 62" + "06 02")
    whole = server().send(text.hex(), fin=True)
    assert len(whole) == 3
    for cut in range(1, len(text)):
        peer = server()
        assert peer.send(text[:cut].hex(), stream=2) + peer.send(text[cut:].hex(), stream=2, fin=True) == whole
    peer, events = server(), []
    for index in range(len(text)):
        events += peer.send(text[index : index + 1].hex(), stream=2, fin=index == len(text) - 1)
    assert events == whole


@pytest.mark.requirement("R-27")
def test_no_frame_ends_before_so_much_came_as_is_missing() -> None:
    large = MessageFrame(number=0, headers=(), attachments=(), payload=bytes(10_000))
    data = encode_frame(RouteTo(0)) + encode_frame(large) + encode_frame(FinishSender(1))
    end = data.rindex(encode_frame(FinishSender(1)))
    for cut in [*range(1, 20), 5000, end - 1]:
        peer = server()
        peer.send(data[:cut].hex(), stream=2)
        frames, missing = peer.engine.frames, peer.engine.missing(2)
        assert missing == end - cut or cut < 10
        peer.send(data[cut : cut + missing - 1].hex() if missing else "", stream=2)
        assert peer.engine.frames == frames
    peer = server()
    peer.send(data[:5000].hex(), stream=2)
    assert peer.send(data[5000:end].hex(), stream=2) != []
    assert peer.engine.missing(2) == peer.engine.missing(6) == 0


@clause("aqueduct-T19")
def test_a_count_of_zero_is_accepted_and_says_nothing() -> None:
    peer = server()
    assert peer.send("03 00 05 00") == []
    assert peer.engine.next_deadline() is None


@clause("aqueduct-T28")
def test_the_field_of_a_report_can_be_left_out() -> None:
    config = Config(channel_field=False)
    peer = opened(Role.SERVER, config=config)
    peer.datagram("03 00" + EMPTY)
    peer.send("03 00 05 01")
    peer.later(1)
    assert peer.bytes_written() == [hexed("03 00 09 01 01")]
    other = opened(Role.CLIENT, config=config)
    entry = senders_of(other.engine)[0]
    entry.transmit(b"", mode=Mode.UNRELIABLE, receipt=True)
    other.datagrams()
    assert other.send("03 00 09 01 01") == [("Acked", 0)]


@clause("aqueduct-T37", "aqueduct-L03")
def test_the_creator_of_a_channel_may_forget_it() -> None:
    peer = client()
    peer.send("03 03" + EMPTY)
    assert peer.send("03 03 0B") == [("Forgotten", 3)]
    assert receivers_of(peer.engine) == {}
