"""Packets as bytes: written and read again, whole and in pieces; the bits that count and those that do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.relink.frames import (
    Ack,
    AckPacket,
    Bounds,
    General,
    MessagePacket,
    Operation,
    OperationPacket,
    Packet,
    encode_general,
    encode_notice,
    encode_packet,
    message_size,
    parse_packet,
)

U32_MAX = 2**32 - 1


def bounds(id_size: int, **settings: int) -> Bounds:
    return Bounds(id_size, id_size, **{"targets": 1024, "parts": 1024, "message": 2**20, **settings})


@st.composite
def sized_packets(draw: st.DrawFn) -> tuple[Packet, int]:
    id_size = draw(st.integers(0, 8))
    ids = st.integers(0, 256**id_size - 1)
    multicast = draw(st.booleans())
    channels = tuple(draw(st.lists(ids, max_size=5))) if multicast else (draw(ids),)
    sequence = draw(st.none() | st.integers(0, U32_MAX))
    kind = draw(st.sampled_from((General, OperationPacket, AckPacket, MessagePacket)))
    if kind is General:
        return draw(st.sampled_from(General)), id_size
    if kind is OperationPacket:
        operation = draw(st.sampled_from(Operation))
        return OperationPacket(
            operation, channels, None if operation is Operation.CLOSE else sequence, multicast
        ), id_size
    if kind is AckPacket:
        ack = draw(st.sampled_from(Ack))
        return AckPacket(ack, channels, None if ack is Ack.CLOSED else sequence, multicast), id_size
    parts = draw(st.lists(st.binary(max_size=40), max_size=4))
    scale = draw(st.sampled_from((0, 0, 0, 256, 65_535, 65_536)))
    if scale == 256:
        parts += [b""] * scale
    elif scale:
        parts.append(bytes(scale))
    return MessagePacket(channels, tuple(parts), multicast), id_size


@pytest.mark.clause("relink-P01", "relink-A03", "relink-C03", "relink-Q01", "relink-P08")
@pytest.mark.requirement("R-16")
@given(sized_packets(), st.binary(max_size=20))
def test_a_packet_is_read_as_it_was_written_and_what_follows_is_left(packet: tuple[Packet, int], rest: bytes) -> None:
    data = encode_packet(*packet)
    cursor = Cursor(data + rest)
    assert len(data) % 8 == 0
    assert parse_packet(cursor, bounds(packet[1])) == packet[0]
    assert cursor.position == len(data)


@pytest.mark.clause("relink-G07")
@given(sized_packets())
def test_a_packet_that_is_cut_short_asks_for_what_is_missing_and_no_more(packet: tuple[Packet, int]) -> None:
    data = encode_packet(*packet)
    ends = range(len(data)) if len(data) < 300 else (0, 1, 7, 8, 9, 15, 16, 17, 24, 100, len(data) - 1)
    for end in ends:
        cursor = Cursor(data[:end])
        with pytest.raises(NeedMore) as need:
            parse_packet(cursor, bounds(packet[1]))
        assert 0 < need.value.missing <= len(data) - end
        assert cursor.position == 0


@pytest.mark.requirement("R-21")
@given(st.binary(max_size=60), st.integers(0, 8))
def test_any_bytes_are_packets_or_too_few_or_a_violation(data: bytes, id_size: int) -> None:
    cursor = Cursor(data)
    try:
        while cursor.remaining:
            parse_packet(cursor, bounds(id_size))
    except (NeedMore, RemoteProtocolError):
        pass


@given(sized_packets())
def test_the_size_of_a_message_is_known_before_it_is_written(packet: tuple[Packet, int]) -> None:
    message, id_size = packet
    if isinstance(message, MessagePacket) and not message.multicast:
        assert message_size([len(part) for part in message.parts], id_size) == len(encode_packet(message, id_size))


@pytest.mark.clause("relink-A04", "relink-A05", "relink-M03", "relink-M07", "relink-P07", "relink-P16")
@pytest.mark.requirement("R-23")
@pytest.mark.seeds(50, soak=1000)
def test_padding_and_unused_bits_are_sent_as_zero_and_ignored_when_they_come(seed: int) -> None:
    """Flip each bit: a packet that still means the same had a zero there."""
    dice = random.Random(seed)
    id_size = dice.choice((0, 1, 2, 3, 4, 5, 8))
    channels = tuple(dice.randrange(256**id_size) for _ in range(dice.choice((1, 1, 2, 3))))
    multicast = len(channels) > 1
    packet: Packet = dice.choice(
        (
            dice.choice(list(General)),
            OperationPacket(
                dice.choice((Operation.COMMIT, Operation.ROLLBACK)), channels, dice.randrange(99), multicast
            ),
            AckPacket(dice.choice(list(Ack)), channels, None, multicast),
            MessagePacket(
                channels, tuple(bytes([1] * dice.randrange(12)) for _ in range(dice.randrange(4))), multicast
            ),
        )
    )
    data = encode_packet(packet, id_size)
    ignored = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            same = parse_packet(Cursor(bytes(flipped)), bounds(id_size)) == packet
        except (NeedMore, RemoteProtocolError):
            same = False
        if same:
            ignored += 1
            assert not data[bit // 8] >> bit % 8 & 1, f"bit {bit} of {data.hex()}"
    assert ignored or len(data) * 8 < 200


@pytest.mark.parametrize(
    ("packet", "id_size", "expected"),
    [
        pytest.param(
            OperationPacket(Operation.COMMIT, (0,)), 0, "0100000000000000", marks=pytest.mark.clause("relink-P02")
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (5, 6), None, True),
            2,
            "03000000020000000500060000000000",
            marks=pytest.mark.clause("relink-P03", "relink-C02"),
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (5,)), 2, "0100050000000000", marks=pytest.mark.clause("relink-P09")
        ),
        pytest.param(AckPacket(Ack.RECEIVED, (5,)), 4, "0500050000000000", marks=pytest.mark.clause("relink-P10")),
        pytest.param(
            OperationPacket(Operation.COMMIT, (5,), 7), 2, "0900050007000000", marks=pytest.mark.clause("relink-P11")
        ),
        pytest.param(
            AckPacket(Ack.RECEIVED, (5,), 7),
            4,
            "0d000500000000000700000000000000",
            marks=pytest.mark.clause("relink-P12"),
        ),
        pytest.param(MessagePacket((5,), (b"",)), 2, "1101050000000000", marks=pytest.mark.clause("relink-P13")),
        pytest.param(
            AckPacket(Ack.CLOSED, (1,)), 2, "8500010000000000", marks=pytest.mark.clause("relink-P05", "relink-O09")
        ),
        pytest.param(General.SHUTDOWN, 2, "8000000000000000", marks=pytest.mark.clause("relink-P05", "relink-G05")),
        pytest.param(General.NOP, 2, "0000000000000000", marks=pytest.mark.clause("relink-G01")),
        pytest.param(General.PING, 2, "2000000000000000", marks=pytest.mark.clause("relink-G02")),
        pytest.param(General.PONG, 2, "4000000000000000", marks=pytest.mark.clause("relink-G03")),
        pytest.param(General.RESUME, 2, "6000000000000000", marks=pytest.mark.clause("relink-G04")),
        pytest.param(
            OperationPacket(Operation.COMMIT, (0x0102,)), 2, "0100020100000000", marks=pytest.mark.clause("relink-C01")
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (0, 0, 0), None, True),
            0,
            "0300000003000000",
            marks=pytest.mark.clause("relink-C04"),
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (1,)), 2, "0100010000000000", marks=pytest.mark.clause("relink-O01")
        ),
        pytest.param(
            OperationPacket(Operation.ROLLBACK, (1,)), 2, "2100010000000000", marks=pytest.mark.clause("relink-O02")
        ),
        pytest.param(
            OperationPacket(Operation.CLOSE, (1,)), 2, "4100010000000000", marks=pytest.mark.clause("relink-O03")
        ),
        pytest.param(AckPacket(Ack.RECEIVED, (1,)), 2, "0500010000000000", marks=pytest.mark.clause("relink-O05")),
        pytest.param(AckPacket(Ack.CONSUMED, (1,)), 2, "2500010000000000", marks=pytest.mark.clause("relink-O06")),
        pytest.param(AckPacket(Ack.COMMITTED, (1,)), 2, "4500010000000000", marks=pytest.mark.clause("relink-O07")),
        pytest.param(AckPacket(Ack.UNCOMMITTED, (1,)), 2, "6500010000000000", marks=pytest.mark.clause("relink-O08")),
        pytest.param(
            OperationPacket(Operation.COMMIT, (0x0201,)), 2, "0100010200000000", marks=pytest.mark.clause("relink-O14")
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (1,), 7), 2, "0900010007000000", marks=pytest.mark.clause("relink-Q02")
        ),
        pytest.param(
            OperationPacket(Operation.ROLLBACK, (1,), 7), 2, "2900010007000000", marks=pytest.mark.clause("relink-Q03")
        ),
        pytest.param(AckPacket(Ack.RECEIVED, (1,), 7), 2, "0d00010007000000", marks=pytest.mark.clause("relink-Q05")),
        pytest.param(AckPacket(Ack.CONSUMED, (1,), 7), 2, "2d00010007000000", marks=pytest.mark.clause("relink-Q06")),
        pytest.param(AckPacket(Ack.COMMITTED, (1,), 7), 2, "4d00010007000000", marks=pytest.mark.clause("relink-Q07")),
        pytest.param(
            AckPacket(Ack.UNCOMMITTED, (1,), 7), 2, "6d00010007000000", marks=pytest.mark.clause("relink-Q08")
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (1, 2, 3), 7, True),
            1,
            "0b000000030000000102030007000000",
            marks=pytest.mark.clause("relink-Q13"),
        ),
        pytest.param(
            OperationPacket(Operation.COMMIT, (0, 0, 0), 7, True),
            0,
            "0b000000030000000700000000000000",
            marks=pytest.mark.clause("relink-Q13"),
        ),
        pytest.param(
            AckPacket(Ack.RECEIVED, (1,), 7),
            8,
            "0d000100000000000000000007000000",
            marks=pytest.mark.clause("relink-Q14"),
        ),
        pytest.param(
            MessagePacket((7,), (b"abc", b"", b"hello")),
            1,
            "1103070003000000050000000000000061626300000000006 8656c6c6f000000".replace(" ", ""),
            marks=pytest.mark.clause(
                "relink-X01", "relink-P06", "relink-M05", "relink-M09", "relink-M13", "relink-M15"
            ),
        ),
        pytest.param(MessagePacket((1,), ()), 2, "1100010000000000", marks=pytest.mark.clause("relink-M16")),
    ],
)
def test_packets_look_as_the_clauses_say(packet: Packet, id_size: int, expected: str) -> None:
    data = bytes.fromhex(expected)
    assert encode_packet(packet, id_size) == data
    assert parse_packet(Cursor(data), bounds(id_size)) == packet


@pytest.mark.clause("relink-P04")
def test_the_five_formats_stand_in_bits_two_to_four() -> None:
    packets: list[Packet] = [
        OperationPacket(Operation.COMMIT, (0,)),
        AckPacket(Ack.RECEIVED, (0,)),
        OperationPacket(Operation.COMMIT, (0,), 0),
        AckPacket(Ack.RECEIVED, (0,), 0),
        MessagePacket((0,), ()),
    ]
    assert [encode_packet(packet, 0)[0] for packet in packets] == [0x01, 0x05, 0x09, 0x0D, 0x11]


@pytest.mark.clause("relink-Q01")
def test_the_number_stands_on_a_four_byte_boundary() -> None:
    sizes = {0: 4, 1: 4, 2: 4, 3: 8, 4: 8, 8: 12}
    for id_size, at in sizes.items():
        assert encode_notice(Operation.COMMIT, (0,), id_size, U32_MAX).index(b"\xff\xff\xff\xff") == at


@pytest.mark.clause("relink-M01", "relink-M02", "relink-M08", "relink-M11", "relink-X02")
@pytest.mark.parametrize(
    ("count", "size", "first"),
    [(255, 0, 0x11), (256, 0, 0x31), (1, 65_535, 0x11), (1, 65_536, 0x51), (256, 65_536, 0x71)],
)
def test_a_message_is_long_and_large_only_when_it_must(count: int, size: int, first: int) -> None:
    parts = (*[b""] * (count - 1), bytes(size))
    assert encode_packet(MessagePacket((0,), parts), 2)[0] == first
    assert encode_packet(MessagePacket((0, 1), parts, True), 2)[0] == first | 2


@pytest.mark.clause("relink-X02")
def test_a_long_and_large_multicast_is_read_as_in_the_second_example() -> None:
    head = "73000000020000000100000002000000 02000000000000000100000000000000 0200000000000000"
    data = bytes.fromhex(head) + b"a" + bytes(7) + b"bc" + bytes(6)
    assert parse_packet(Cursor(data), bounds(4)) == MessagePacket((1, 2), (b"a", b"bc"), True)


@pytest.mark.clause("relink-M06", "relink-M08", "relink-M10")
@pytest.mark.parametrize(
    "data",
    [
        "31 00 01 00 01 00 00 00 03 00 00 00 00 00 00 00 61 62 63 00 00 00 00 00",
        "51 01 01 00 00 00 00 00 03 00 00 00 00 00 00 00 61 62 63 00 00 00 00 00",
        "71 ff 01 00 01 00 00 00 03 00 00 00 00 00 00 00 61 62 63 00 00 00 00 00",
        "11 01 01 00 03 00 00 00 61 62 63 00 00 00 00 00",
        "91 01 01 00 03 00 ff ff 61 62 63 ff ff ff ff ff",
    ],
)
def test_any_form_of_a_message_is_accepted(data: str) -> None:
    assert parse_packet(Cursor(bytes.fromhex(data)), bounds(2)) == MessagePacket((1,), (b"abc",))


@pytest.mark.clause("relink-A06")
def test_values_that_are_not_in_use_are_not_written() -> None:
    refusals = (ValueError, TypeError)  # a compiled function looks at the types first
    with pytest.raises(refusals):
        encode_general(5)  # type: ignore[arg-type]
    with pytest.raises(refusals):
        encode_notice(3, (1,), 2)  # type: ignore[arg-type]
    with pytest.raises(refusals):
        encode_notice(5, (1,), 2)  # type: ignore[arg-type]


@pytest.mark.clause("relink-O13")
def test_close_and_closed_name_no_message() -> None:
    with pytest.raises(LocalProtocolError):
        encode_notice(Operation.CLOSE, (1,), 2, 7)
    with pytest.raises(LocalProtocolError):
        encode_notice(Ack.CLOSED, (1,), 2, 7)


@pytest.mark.clause("relink-C03")
@pytest.mark.parametrize(("channel", "id_size"), [(-1, 2), (1, 0), (256, 1), (2**64, 8)])
def test_a_channel_that_does_not_fit_its_id_is_not_written(channel: int, id_size: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_notice(Operation.COMMIT, (channel,), id_size)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-G06", marks=pytest.mark.clause("relink-G06"))
            for x in (0xA0, 0xC0, 0xE0)
        ],
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-P14", marks=pytest.mark.clause("relink-P14"))
            for x in (0x15, 0x19, 0x1D)
        ],
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-O04", marks=pytest.mark.clause("relink-O04"))
            for x in (0x61, 0x81, 0xA1, 0xC1, 0xE1)
        ],
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-O10", marks=pytest.mark.clause("relink-O10"))
            for x in (0xA5, 0xC5, 0xE5)
        ],
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-Q04", marks=pytest.mark.clause("relink-Q04"))
            for x in (0x49, 0x69, 0x89, 0xA9, 0xC9, 0xE9)
        ],
        *[
            pytest.param(f"{x:02x}" + "00" * 7, "relink-Q09", marks=pytest.mark.clause("relink-Q09"))
            for x in (0x8D, 0xAD, 0xCD, 0xED)
        ],
        pytest.param("03000000ffffffff", "relink-C06", marks=pytest.mark.clause("relink-C06")),
        pytest.param("1300000001040000", "relink-C06", marks=pytest.mark.clause("relink-C06")),
        pytest.param("31000100ffffffff", "relink-M08", marks=pytest.mark.clause("relink-M08")),
        pytest.param("5101010000000000" + "01001000" + "00" * 4, "relink-M11", marks=pytest.mark.clause("relink-M11")),
        pytest.param("5101010000000000" + "ff" * 8, "relink-M11", marks=pytest.mark.clause("relink-M11")),
        pytest.param("5102010000000000" + ("f8" + "ff" * 7) * 2, "relink-M11", marks=pytest.mark.clause("relink-M12")),
        pytest.param(  # a part that is too large by itself, behind one that is not
            "5102010000000000" + "0100000000000000" + "0100100000000000",
            "relink-M11",
            marks=pytest.mark.clause("relink-M11"),
        ),
        pytest.param(
            "5102010000000000" + ("0000100000000000") * 2, "relink-M12", marks=pytest.mark.clause("relink-M12")
        ),
    ],
)
@pytest.mark.requirement("R-16", "R-18", "R-26")
def test_what_no_packet_can_say_is_refused_as_soon_as_it_is_read(data: str, rule: str) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        parse_packet(Cursor(bytes.fromhex(data)), bounds(2))
    assert refusal.value.rule == rule
