"""How are the primitives written? Varints, varbytes, varranges and header data, bounded wherever they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Headers = tuple[tuple[bytes, bytes], ...]

VARINT = "aqueduct-E03"
VARINT_BYTES = 10  # the longest varint: 64 bits, 7 a byte


def read_varint(cursor: Cursor) -> int:
    """At most 64 bits in at most 10 bytes; a longer form of a number is as good as its shortest (E04)."""
    return cursor.varint(VARINT_BYTES, VARINT)


def encode_varbytes(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


def encode_varints(numbers: Iterable[int]) -> bytes:
    """A varbytes that holds these varints."""
    return encode_varbytes(b"".join(map(encode_varint, numbers)))


def decode_varints(content: bytes) -> list[int]:
    """All varints of a container that is there as a whole."""
    cursor, numbers = Cursor(content), []
    while cursor.remaining:
        numbers.append(inner_varint(cursor))
    return numbers


def inner_varint(cursor: Cursor) -> int:
    """A varint that must end within its container."""
    try:
        return read_varint(cursor)
    except NeedMore:
        raise RemoteProtocolError(
            f"a varint is cut off by the end of its container of {len(cursor.data)} bytes", rule="aqueduct-E05"
        ) from None


def inner_varbytes(cursor: Cursor) -> bytes:
    """A varbytes that must end within its container."""
    size = inner_varint(cursor)
    if size > cursor.remaining:
        raise RemoteProtocolError(
            f"varbytes of {size} bytes in a container with {cursor.remaining} left", rule="aqueduct-E07"
        )
    return cursor.exact(size)


# ---------------------------------------------------------------------------- header data


def encode_headers(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header data, with its length in front."""
    return encode_varbytes(b"".join(encode_varbytes(key) + encode_varbytes(value) for key, value in headers))


def decode_headers(content: bytes, most: int) -> Headers:
    """Header data whose length was read already; order and repeated keys are kept (E14)."""
    cursor, items = Cursor(content), []
    while cursor.remaining:
        items.append(inner_varbytes(cursor))
        if len(items) > 2 * most:
            raise RemoteProtocolError(f"more than {most} headers; raise Config(header_pairs=…) if this peer is right")
    if len(items) % 2:
        raise RemoteProtocolError(f"header data of {len(items)} varbytes, an odd number", rule="aqueduct-E15")
    return tuple(zip(items[::2], items[1::2], strict=True))


# ---------------------------------------------------------------------------- varranges, which no frame uses (E12)


def encode_varranges(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Rising, disjoint ranges as (first, last): lengths and gaps in turn, beginning with a length."""
    numbers: list[int] = []
    end = 0
    for first, last in ranges:
        if not end <= first <= last or (numbers and first == end):
            raise LocalProtocolError(f"{first} … {last} does not come behind {end}, with a gap")
        if first > end or numbers:
            numbers += [first - end] if numbers else [0, first]
        numbers.append(last - first + 1)
        end = last + 1
    return encode_varints(numbers)


def decode_varranges(content: bytes) -> list[tuple[int, int]]:
    numbers = decode_varints(content)
    if 0 in numbers[1:-1]:
        raise RemoteProtocolError("varranges with a zero that is neither first nor last", rule="aqueduct-E11")
    ranges, at = [], 0
    for index, number in enumerate(numbers):
        if index % 2 == 0 and number:
            ranges.append((at, at + number - 1))
        at += number
    return ranges
