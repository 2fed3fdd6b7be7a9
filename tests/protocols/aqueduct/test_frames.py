"""Primitives and frames as bytes: encoded and parsed again, whole and in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varint
from muxkit.protocols.aqueduct import Role
from muxkit.protocols.aqueduct import frames as ids
from muxkit.protocols.aqueduct.frames import (
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    Bounds,
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
    channel_id,
    decode_headers,
    decode_varints,
    decode_varranges,
    encode_frame,
    encode_headers,
    encode_varbytes,
    encode_varranges,
    inner_varbytes,
    parse_frame,
    read_varint,
)
from tests.protocols.aqueduct._helpers import client, hexed, senders_of, server

U64_MAX = 2**64 - 1
NUMBERS = st.integers(0, U64_MAX) | st.sampled_from([0, 1, 127, 128, 2**32, 2**63, U64_MAX])
HEADERS = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=3).map(tuple)
POSITIVE = st.integers(1, U64_MAX)
ACKS = st.tuples(NUMBERS, POSITIVE, st.lists(st.tuples(POSITIVE, POSITIVE), max_size=4)).map(
    lambda parts: [parts[0], parts[1], *(number for pair in parts[2] for number in pair)]
)
REPORTS = st.lists(POSITIVE, min_size=1, max_size=6) | st.lists(POSITIVE, min_size=1, max_size=5).map(
    lambda it: [0, *it]
)
FRAMES = st.one_of(
    st.just(Version()),
    st.just(AckVersion()),
    st.builds(ConnectionHeaders, HEADERS),
    st.builds(RouteTo, NUMBERS),
    st.builds(
        MessageFrame,
        number=NUMBERS,
        headers=HEADERS,
        attachments=st.lists(st.tuples(NUMBERS, HEADERS), max_size=3).map(tuple),
        payload=st.binary(max_size=300),
    ),
    st.builds(SentUnreliable, NUMBERS),
    st.builds(FinishSender, NUMBERS),
    st.just(CancelSender()),
    st.builds(AckReliable, ACKS),
    st.builds(AckNackUnreliable, REPORTS, NUMBERS),
    st.just(CloseReceiver()),
    st.just(ForgetChannel()),
)


# ---------------------------------------------------------------------------- primitives


@pytest.mark.clause("aqueduct-E01", "aqueduct-E02")
@pytest.mark.parametrize(
    ("number", "wire"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (16384, "808001"), (U64_MAX, "ff" * 9 + "01")],
)
def test_a_varint_has_seven_bits_a_byte_lowest_first(number: int, wire: str) -> None:
    assert encode_varint(number).hex() == wire
    assert read_varint(Cursor(bytes.fromhex(wire))) == number


@pytest.mark.clause("aqueduct-E03")
@pytest.mark.requirement("R-16", "R-20")
@pytest.mark.parametrize("wire", ["ff" * 9 + "02", "80" * 10 + "01", "ff" * 10])
def test_a_varint_of_more_than_64_bits_ends_the_connection(wire: str) -> None:
    assert server().violation("03" + wire).rule == "aqueduct-E03"


@pytest.mark.clause("aqueduct-E04")
@pytest.mark.requirement("R-20")
def test_a_longer_form_of_a_number_is_accepted_and_never_written() -> None:
    assert read_varint(Cursor(bytes.fromhex("8000"))) == 0
    assert parse_frame(Cursor(bytes.fromhex("038800"))) == RouteTo(8)
    assert encode_frame(RouteTo(8)).hex() == "0308"


@pytest.mark.clause("aqueduct-E05")
@pytest.mark.requirement("R-20")
def test_a_varint_that_is_cut_off_waits_in_a_stream_and_nowhere_else() -> None:
    peer = server()
    assert peer.send("03 80") == []
    assert peer.send("00 04 00 00 00 00", stream=peer.last) == [("Arrived", 0, 0, b"")]
    with pytest.raises(RemoteProtocolError, match="E05"):
        decode_varints(bytes.fromhex("0180"))
    assert server().datagram_violation("03 80").rule == "aqueduct-F09"


@pytest.mark.clause("aqueduct-E06")
@pytest.mark.parametrize(("content", "head"), [(b"abc", "03"), (b"", "00"), (b"z" * 128, "8001")])
def test_varbytes_have_their_length_in_front(content: bytes, head: str) -> None:
    assert encode_varbytes(content).hex() == head + content.hex()
    assert inner_varbytes(Cursor(encode_varbytes(content))) == content


@pytest.mark.clause("aqueduct-E07")
def test_varbytes_may_not_pass_their_container() -> None:
    with pytest.raises(RemoteProtocolError, match="5 bytes in a container with 3 left"):
        decode_headers(bytes.fromhex("05616263"), 10)
    assert server().violation("03 00 04 00 04 05 61 62 63 00 00").rule == "aqueduct-E07"


@pytest.mark.clause("aqueduct-E08", "aqueduct-E09", "aqueduct-E10", "aqueduct-E12")
@pytest.mark.parametrize(
    ("ranges", "wire"), [([(0, 2), (5, 5)], "03030201"), ([(2, 3)], "03000202"), ([(0, 2)], "0103"), ([], "00")]
)
def test_varranges_alternate_lengths_and_gaps(ranges: list[tuple[int, int]], wire: str) -> None:
    assert encode_varranges(ranges).hex() == wire
    assert decode_varranges(bytes.fromhex(wire)[1:]) == ranges
    assert decode_varranges(bytes.fromhex("0300")) == [(0, 2)]


@pytest.mark.clause("aqueduct-E11")
def test_varranges_have_no_zero_in_the_middle() -> None:
    with pytest.raises(RemoteProtocolError, match="E11"):
        decode_varranges(bytes.fromhex("010001"))


def test_varranges_that_do_not_rise_are_not_written() -> None:
    with pytest.raises(LocalProtocolError):
        encode_varranges([(0, 2), (3, 4)])


@pytest.mark.clause("aqueduct-E13", "aqueduct-E14")
@pytest.mark.parametrize(
    ("headers", "wire"),
    [
        ((), "00"),
        (((b"k", b"v"),), "0401 6b 01 76"),
        (((b"a", b"1"), (b"b", b"2")), "08 01 61 01 31 01 62 01 32"),
        (((b"a", b"1"), (b"a", b"")), "07 01 61 01 31 01 61 00"),
    ],
)
def test_headers_are_pairs_in_order_and_may_repeat(headers: tuple[tuple[bytes, bytes], ...], wire: str) -> None:
    assert encode_headers(headers).hex() == hexed(wire)
    assert decode_headers(bytes.fromhex(wire)[1:], 10) == headers


@pytest.mark.clause("aqueduct-E15")
def test_an_odd_number_of_header_items_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="E15"):
        decode_headers(bytes.fromhex("016b"), 10)


# ---------------------------------------------------------------------------- channel ids


@pytest.mark.clause("aqueduct-E16", "aqueduct-E17", "aqueduct-E18", "aqueduct-E19", "aqueduct-E20", "aqueduct-E23")
@pytest.mark.parametrize(
    ("id", "creator", "sender", "oneshot", "index"),
    [
        (0, Role.CLIENT, Role.CLIENT, False, 0),
        (8, Role.CLIENT, Role.CLIENT, False, 1),
        (9, Role.SERVER, Role.CLIENT, False, 1),
        (2, Role.CLIENT, Role.SERVER, False, 0),
        (4, Role.CLIENT, Role.CLIENT, True, 0),
        (47, Role.SERVER, Role.SERVER, True, 5),
        (U64_MAX, Role.SERVER, Role.SERVER, True, 2**61 - 1),
    ],
)
def test_an_id_is_three_bits_and_an_index(id: int, creator: Role, sender: Role, oneshot: bool, index: int) -> None:
    assert channel_id(creator=creator, sender=sender, oneshot=oneshot, index=index) == id
    assert (ids.creator_of(id), ids.sender_of(id), ids.is_oneshot(id), ids.index_of(id)) == (
        creator,
        sender,
        oneshot,
        index,
    )


@pytest.mark.clause("aqueduct-E21")
def test_an_index_has_61_bits() -> None:
    with pytest.raises(LocalProtocolError):
        channel_id(creator=Role.CLIENT, sender=Role.CLIENT, oneshot=False, index=2**61)
    counter = ids.id_counters(Role.SERVER)[7]
    counter._next = U64_MAX
    assert counter.allocate(()) == U64_MAX
    with pytest.raises(LocalProtocolError):
        counter.allocate(())


@pytest.mark.clause("aqueduct-E22", "aqueduct-E24", "aqueduct-E25")
def test_each_space_counts_for_itself() -> None:
    made = [ids.id_counters(Role.CLIENT)[bits].allocate(()) for bits in (0, 2, 4, 6)]
    made += [ids.id_counters(Role.SERVER)[bits].allocate(()) for bits in (1, 3, 5, 7)]
    assert made == [8, 2, 4, 6, 1, 3, 5, 7]
    peer = client()
    engine = peer.engine
    for oneshot in (False, False, False, True, True):
        half, ticket = engine.channel(sends=True, oneshot=oneshot)
        senders_of(engine)[0].transmit(b"", attachments=[ticket])
        made.append(half.id or 0)
    assert made[8:] == [0x08, 0x10, 0x18, 0x04, 0x0C]


# ---------------------------------------------------------------------------- frames


@pytest.mark.requirement("R-16")
@given(FRAMES, st.binary(max_size=20))
def test_a_frame_is_read_as_it_was_written_and_what_follows_is_left(frame: Frame, rest: bytes) -> None:
    data = encode_frame(frame)
    cursor = Cursor(data + rest)
    assert parse_frame(cursor) == frame
    assert cursor.position == len(data)


@pytest.mark.clause("aqueduct-F11")
@given(FRAMES)
def test_a_frame_that_is_cut_short_asks_for_what_is_missing_and_no_more(frame: Frame) -> None:
    data = encode_frame(frame)
    for end in range(len(data)):
        with pytest.raises(NeedMore) as need:
            parse_frame(Cursor(data[:end]))
        assert 0 < need.value.missing <= len(data) - end


@pytest.mark.requirement("R-21")
@given(st.binary(max_size=60))
def test_any_bytes_are_frames_or_too_few_or_a_violation(data: bytes) -> None:
    cursor = Cursor(data)
    try:
        while cursor.remaining:
            parse_frame(cursor)
    except (NeedMore, RemoteProtocolError):
        pass


@pytest.mark.requirement("R-14", "R-18")
@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ("02 ff ff 03", "connection headers: 65535 against 100"),
        ("04 00 65", "message headers: 101 against 100"),
        ("04 00 00 81 08", "a message of 1025 bytes against 1024"),
        ("04 00 00 00 81 08", "a message of 1025 bytes against 1024"),
        ("04 00 00 ff ff ff ff ff ff ff ff ff 01", "a message of 18446744073709551615 bytes"),
        ("08 c9 01", "bytes of ranges: 201 against 200"),
        ("09 00 c9 01", "bytes of ranges: 201 against 200"),
        ("04 00 00 06 08 00 10 00 18 00 00", "attachments: 3 against 2"),
        ("02 04 00 00 00 00", None),
        ("02 06 00 00 00 00 00 00", "more than 2 headers"),
    ],
)
def test_what_a_frame_announces_is_bounded_before_it_comes(wire: str, says: str | None) -> None:
    bounds = Bounds(message=1024, connection_headers=100, headers=100, header_pairs=2, attachments=2, ranges=20)
    if says is None:
        parse_frame(Cursor(bytes.fromhex(wire)), bounds)
        return
    with pytest.raises(RemoteProtocolError, match=says):
        parse_frame(Cursor(bytes.fromhex(wire)), bounds)


@pytest.mark.parametrize("frame", [AckReliable([]), AckReliable([0, 0]), AckNackUnreliable([0], 0)])
def test_ranges_that_have_no_form_are_not_written(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(frame)
