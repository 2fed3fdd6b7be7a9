"""The byte cursor, the two kinds of varints, and bytes that arrive in bits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import LocalProtocolError, MuxError, RemoteProtocolError
from muxkit.core._numbers import Cursor, NeedMore, Pieces, encode_varint, encode_varu64

BOUNDARIES = [0, 1, 2**7 - 1, 2**7, 2**7 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
OUTSIDE = [-(2**64), -1, 2**64, 2**64 + 1, 10**5000]

Read = Callable[[Cursor], object]

u64s = st.one_of(st.sampled_from(BOUNDARIES), st.integers(0, 2**64 - 1), st.integers(0, 2**17))


def missing(read: Read, data: bytes) -> int:
    """How many bytes the cursor asks for; it must not have moved."""
    cursor = Cursor(data)
    with pytest.raises(NeedMore) as caught:
        read(cursor)
    assert cursor.position == 0
    return caught.value.missing


def read_fragments(read: Read, fragments: list[bytes]) -> tuple[object, bytes]:
    """What `read` gives when the bytes come like this, and what is left over; tried again after each one."""
    data = b""
    for fragment in fragments:
        data += fragment
        cursor = Cursor(data)
        try:
            return read(cursor), b"".join(fragments)[cursor.position :]
        except NeedMore:
            continue
    raise AssertionError(f"{data!r} was not enough")


# Reference decoders: straight from the descriptions, with no care for speed; None stands for "not complete".


def decode_varint(data: bytes) -> tuple[int, int] | None:
    for end, byte in enumerate(data, 1):
        if byte < 128:
            digits = [byte & 127 for byte in data[:end]]
            return sum(digit * 128**place for place, digit in enumerate(digits)), end
    return None


def decode_varu64(data: bytes) -> tuple[int, int] | Literal["not canonical"] | None:
    follow = max(0, data[0] - 247)
    if len(data) < 1 + follow:
        return None
    number = sum(byte * 256**place for place, byte in enumerate(reversed(data[1 : 1 + follow]))) if follow else data[0]
    shorter = number < 248 or any(number < 256**size for size in range(1, follow))
    return "not canonical" if follow and shorter else (number, 1 + follow)


# Bytes, integers, padding


def test_a_byte_is_read_and_passed() -> None:
    cursor = Cursor(b"\x07\xff")
    assert [cursor.byte(), cursor.byte()] == [7, 255]


def test_a_byte_behind_the_end_is_missing() -> None:
    assert missing(Cursor.byte, b"") == 1


def test_exact_gives_as_many_bytes_as_asked_for() -> None:
    cursor = Cursor(b"abcdef")
    assert (cursor.exact(2), cursor.exact(0), cursor.exact(4)) == (b"ab", b"", b"cdef")


def test_position_and_remaining_follow_each_read() -> None:
    cursor = Cursor(b"abcdef", position=1)
    cursor.exact(3)
    assert (cursor.position, cursor.remaining) == (4, 2)


def test_setting_the_position_goes_back_to_the_start_of_a_frame() -> None:
    cursor = Cursor(b"abc")
    cursor.exact(2)
    cursor.position = 0
    assert cursor.exact(3) == b"abc"


@pytest.mark.parametrize("size", [3, 2**7, 2**32, 2**63, 2**64])
@pytest.mark.requirement("R-16", "R-18")
def test_exact_says_how_much_is_missing_and_holds_nothing_for_it(size: int) -> None:
    assert missing(lambda cursor: cursor.exact(size), b"ab") == size - 2


def test_a_negative_size_is_refused_rather_than_read_backwards() -> None:
    cursor = Cursor(b"abc", position=2)
    with pytest.raises(LocalProtocolError, match="invalid size: expected 0 or more bytes, got -1"):
        cursor.exact(-1)
    assert cursor.position == 2


def test_uint_reads_both_byte_orders() -> None:
    assert Cursor(b"\x01\x02\x03").uint(3, "big") == 0x010203
    assert Cursor(b"\x01\x02\x03").uint(3, "little") == 0x030201


def test_uint_of_no_bytes_is_zero() -> None:
    assert Cursor(b"").uint(0, "little") == 0


def test_uint_says_how_many_of_its_bytes_are_missing() -> None:
    assert missing(lambda cursor: cursor.uint(8, "big"), b"abc") == 5


@given(st.integers(1, 16), st.integers(0, 20), st.integers(0, 20))
def test_align_goes_to_the_nearest_multiple_from_the_origin(size: int, origin: int, distance: int) -> None:
    cursor = Cursor(bytes(64), position=origin + distance)
    cursor.align(size, origin)
    passed = cursor.position - origin
    assert passed % size == 0
    assert distance <= passed < distance + size


def test_align_ignores_what_the_padding_holds() -> None:
    cursor = Cursor(b"\x01\xff\xee\xdd\x05", position=1)
    cursor.align(4, 0)
    assert cursor.byte() == 5


def test_align_says_how_much_padding_is_missing() -> None:
    cursor = Cursor(b"abc", position=1)
    with pytest.raises(NeedMore) as caught:
        cursor.align(8, 0)
    assert (caught.value.missing, cursor.position) == (5, 1)


def test_missing_input_is_no_error_of_anybody() -> None:
    assert not issubclass(NeedMore, MuxError)


def test_each_raise_has_its_own_exception_so_that_tracebacks_do_not_pile_up() -> None:
    raised = []
    for _ in range(2):
        with pytest.raises(NeedMore) as caught:
            Cursor(b"").byte()
        raised.append(caught.value)
    assert raised[0] is not raised[1]


# VarU64


@pytest.mark.clause("bpmux-G11")
@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "80"),
        (129, "81"),
        (247, "f7"),
        (248, "f8f8"),
        (255, "f8ff"),
        (256, "f90100"),
        (65535, "f9ffff"),
        (65536, "fa010000"),
        (2**24 - 1, "faffffff"),
        (2**24, "fb01000000"),
        (2**32 - 1, "fbffffffff"),
        (2**32, "fc0100000000"),
        (2**40, "fd010000000000"),
        (2**48, "fe01000000000000"),
        (2**56 - 1, "feffffffffffffff"),
        (2**56, "ff0100000000000000"),
        (2**63, "ff8000000000000000"),
        (2**64 - 1, "ffffffffffffffffff"),
    ],
)
def test_varu64_has_the_form_of_the_document(number: int, encoded: str) -> None:
    assert encode_varu64(number).hex() == encoded
    cursor = Cursor(bytes.fromhex(encoded))
    assert (cursor.varu64(), cursor.remaining) == (number, 0)


@pytest.mark.clause("bpmux-G12")
@pytest.mark.parametrize(
    "encoded",
    [
        "f807",
        "f800",
        "f8f7",
        "f90000",
        "f900ff",
        "fa00ffff",
        "fb00ffffff",
        "fc00ffffffff",
        "fd00ffffffffff",
        "fe00ffffffffffff",
        "ff0000000000000000",
        "ff00ffffffffffffff",
    ],
)
def test_varu64_in_a_longer_form_than_needed_is_an_error_of_the_peer(encoded: str) -> None:
    cursor = Cursor(bytes.fromhex(encoded))
    with pytest.raises(RemoteProtocolError):
        cursor.varu64()
    assert cursor.position == 0


@pytest.mark.clause("bpmux-G12")
def test_the_error_for_a_longer_form_holds_both_sizes_and_the_clause() -> None:
    with pytest.raises(RemoteProtocolError, match="VarU64 7 is too long: expected 1 bytes, got 2") as caught:
        Cursor(b"\xf8\x07").varu64("bpmux-G12")
    assert caught.value.rule == "bpmux-G12"


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("number", BOUNDARIES)
def test_varu64_carries_the_boundaries(number: int) -> None:
    assert Cursor(encode_varu64(number)).varu64() == number


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("number", OUTSIDE, ids=lambda number: f"{number.bit_length()} bits")
def test_varu64_refuses_what_64_bits_cannot_hold(number: int) -> None:
    with pytest.raises(LocalProtocolError, match="0xffffffffffffffff"):
        encode_varu64(number)


@given(u64s)
def test_varu64_comes_back_as_it_was(number: int) -> None:
    assert Cursor(encode_varu64(number)).varu64() == number


@pytest.mark.requirement("R-20")
def test_varu64_agrees_with_the_reference_on_every_input_of_up_to_three_bytes() -> None:
    # The first byte alone says how many follow, so behind one that stands for itself or asks for more than
    # two a single value of each further byte is enough.
    inputs = [bytes((first,)) for first in range(256)]
    inputs += [bytes((first, second)) for first in range(256) for second in (range(256) if first == 248 else [7])]
    for first in range(256):
        seconds = range(256) if first in (248, 249) else [7]
        thirds = range(256) if first == 249 else [9]
        inputs += [bytes((first, second, third)) for second in seconds for third in thirds]
    for data in inputs:
        cursor = Cursor(data)
        expected = decode_varu64(data)
        try:
            found: object = (cursor.varu64(), cursor.position)
        except RemoteProtocolError:
            found = "not canonical"
        except NeedMore:
            found = None
        assert found == expected, data.hex()


@given(u64s, st.binary(max_size=3))
def test_varu64_leaves_what_follows_alone(number: int, rest: bytes) -> None:
    cursor = Cursor(encode_varu64(number) + rest)
    cursor.varu64()
    assert cursor.exact(cursor.remaining) == rest


@pytest.mark.requirement("R-20")
@given(u64s)
def test_varu64_cut_short_waits_for_exactly_the_rest(number: int) -> None:
    encoded = encode_varu64(number)
    assert missing(Cursor.varu64, b"") == 1
    for size in range(1, len(encoded)):
        assert missing(Cursor.varu64, encoded[:size]) == len(encoded) - size


# LEB128


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (129, "8101"),
        (16383, "ff7f"),
        (16384, "808001"),
        (2**32 - 1, "ffffffff0f"),
        (2**32, "8080808010"),
        (2**63 - 1, "ffffffffffffffff7f"),
        (2**63, "80808080808080808001"),
        (2**64 - 1, "ffffffffffffffffff01"),
    ],
)
def test_varint_puts_the_lowest_seven_bits_first(number: int, encoded: str) -> None:
    assert encode_varint(number).hex() == encoded
    cursor = Cursor(bytes.fromhex(encoded))
    assert (cursor.varint(), cursor.remaining) == (number, 0)


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("number", BOUNDARIES)
def test_varint_carries_the_boundaries(number: int) -> None:
    assert Cursor(encode_varint(number)).varint() == number


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("number", OUTSIDE, ids=lambda number: f"{number.bit_length()} bits")
def test_varint_refuses_what_64_bits_cannot_hold(number: int) -> None:
    with pytest.raises(LocalProtocolError, match="0xffffffffffffffff"):
        encode_varint(number)


@given(u64s)
def test_varint_comes_back_as_it_was(number: int) -> None:
    assert Cursor(encode_varint(number)).varint() == number


@pytest.mark.requirement("R-20")
def test_varint_agrees_with_the_reference_on_every_input_of_up_to_two_bytes() -> None:
    inputs = [bytes((first,)) for first in range(256)]
    inputs += [bytes((first, second)) for first in range(256) for second in range(256)]
    for data in inputs:
        cursor = Cursor(data)
        try:
            found = (cursor.varint(), cursor.position)
        except NeedMore:
            found = None
        assert found == decode_varint(data), data.hex()


@pytest.mark.requirement("R-20")
@pytest.mark.parametrize(
    ("firsts", "seconds"),
    [
        ((128, 170, 255), range(128, 256)),
        (range(128, 256), (128, 213, 255)),
        pytest.param(range(128, 256), range(128, 256), marks=pytest.mark.soak),
    ],
    ids=["every second byte", "every first byte", "all"],
)
def test_varint_agrees_with_the_reference_on_three_bytes(firsts: Sequence[int], seconds: Sequence[int]) -> None:
    # A first or second byte below 128 ends the number, which the test above has seen; here neither does.
    # Every third byte is followed by a zero, which belongs to the number if the third does not end it.
    thirds = range(256)
    row = bytearray(4 * len(thirds))
    row[2::4] = bytes(thirds)
    for first, second in product(firsts, seconds):
        row[0::4] = bytes((first,)) * len(thirds)
        row[1::4] = bytes((second,)) * len(thirds)
        cursor = Cursor(bytes(row))
        found = []
        for third in thirds:
            found.append(cursor.varint())
            if third < 128:
                assert cursor.byte() == 0
        assert cursor.remaining == 0
        assert found == [(first & 127) + (second & 127) * 128 + (third & 127) * 16384 for third in thirds]


@pytest.mark.requirement("R-20")
@given(u64s, st.data())
def test_varint_accepts_longer_forms_up_to_ten_bytes(number: int, data: st.DataObject) -> None:
    encoded = bytearray(encode_varint(number))
    padding = data.draw(st.integers(0, 10 - len(encoded)), label="padding")
    if padding:
        encoded[-1] |= 0x80
        encoded += b"\x80" * (padding - 1) + b"\x00"
    cursor = Cursor(bytes(encoded))
    assert (cursor.varint(), cursor.remaining) == (number, 0)


@pytest.mark.requirement("R-20")
@given(st.binary(min_size=9, max_size=9), st.integers(0, 255), st.binary(max_size=2))
def test_the_tenth_byte_of_a_varint_may_hold_one_bit_and_must_end_it(head: bytes, tenth: int, rest: bytes) -> None:
    data = bytes(byte | 0x80 for byte in head) + bytes((tenth,)) + rest
    cursor = Cursor(data)
    if tenth <= 1:
        assert (cursor.varint(), cursor.position) == decode_varint(data)
    else:
        with pytest.raises(RemoteProtocolError):
            cursor.varint()
        assert cursor.position == 0


@pytest.mark.requirement("R-16", "R-20")
def test_a_varint_of_2_to_the_64_is_an_error_that_names_the_clause() -> None:
    with pytest.raises(
        RemoteProtocolError, match="18446744073709551616 is too large: expected at most 64 bits"
    ) as caught:
        Cursor(bytes.fromhex("80808080808080808002")).varint(rule="aqueduct-E03")
    assert caught.value.rule == "aqueduct-E03"


@pytest.mark.requirement("R-20")
def test_a_varint_that_goes_on_is_refused_before_more_of_it_comes() -> None:
    with pytest.raises(RemoteProtocolError, match="too long: expected at most 10 bytes") as caught:
        Cursor(b"\xff" * 10).varint(rule="aqueduct-E03")
    assert caught.value.rule == "aqueduct-E03"


@pytest.mark.requirement("R-20")
def test_a_varint_is_held_to_the_number_of_bytes_that_the_caller_allows() -> None:
    assert Cursor(b"\x80\x00").varint(max_bytes=2) == 0
    with pytest.raises(RemoteProtocolError, match="too long: expected at most 2 bytes"):
        Cursor(b"\x80\x80\x00").varint(max_bytes=2)


@pytest.mark.requirement("R-20")
@given(u64s)
def test_varint_cut_short_waits_for_one_byte_more(number: int) -> None:
    encoded = encode_varint(number)
    for size in range(len(encoded)):
        assert missing(Cursor.varint, encoded[:size]) == 1


# A frame of everything, split anywhere


def read_frame(cursor: Cursor) -> tuple[object, ...]:
    first = cursor.byte()
    size = cursor.varint()
    cursor.align(4, 0)
    return first, cursor.uint(4, "little"), cursor.varu64(), cursor.exact(size)


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), u64s, st.binary(max_size=300), st.binary(max_size=3), st.data())
def test_any_split_of_a_frame_gives_the_same_values_and_the_same_rest(
    first: int, number: int, varu64: int, payload: bytes, rest: bytes, data: st.DataObject
) -> None:
    head = bytes((first,)) + encode_varint(len(payload))
    head += bytes(-len(head) % 4) + number.to_bytes(4, "little")
    frame = head + encode_varu64(varu64) + payload
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=5), label="cuts"))
    fragments = [frame[start:end] for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True)]
    fragments[-1] += rest
    values, left = read_fragments(read_frame, fragments)
    assert values == (first, number, varu64, payload)
    assert left == rest


def test_a_frame_byte_by_byte_gives_the_same_values() -> None:
    frame = bytes.fromhex("2a 03 0000 04030201 f90100") + b"abc"
    fragments = [frame[index : index + 1] for index in range(len(frame))]
    assert read_fragments(read_frame, fragments) == ((42, 0x01020304, 256, b"abc"), b"")


# Pieces


@given(st.lists(st.one_of(st.binary(max_size=5), st.integers(1020, 1030).map(bytes))))
def test_pieces_join_to_what_was_put_in_in_order(pieces: list[bytes]) -> None:
    held = Pieces()
    for piece in pieces:
        held.append(piece)
    assert held.size == sum(map(len, pieces))
    assert held.join() == b"".join(pieces)


def test_joining_pieces_lets_go_of_them() -> None:
    held = Pieces()
    held.append(b"one")
    held.join()
    assert held.size == 0
    held.append(b"two")
    assert held.join() == b"two"


def test_no_pieces_join_to_nothing() -> None:
    assert Pieces().join() == b""


def test_one_large_piece_is_given_back_without_a_copy() -> None:
    held, piece = Pieces(), bytes(4096)
    held.append(piece)
    assert held.join() is piece


@pytest.mark.requirement("R-04")
@pytest.mark.parametrize("sizes", [(1,), (1, 1024), (1023,), (1024,), (0, 1)], ids=str)
def test_small_pieces_cost_at_most_four_times_their_size(sizes: tuple[int, ...]) -> None:
    held = Pieces()
    tracemalloc.start()
    try:
        while held.size < 50_000:
            for size in sizes:
                held.append(bytes(size))
        current, _ = tracemalloc.get_traced_memory()
        amount = held.size
        assert current <= 4 * amount
        held.join()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 4 * amount
