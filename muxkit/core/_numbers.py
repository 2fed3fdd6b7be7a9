"""Encodes and decodes numbers, and keeps sets of numbers.

- `Cursor` reads numbers and bytes from received data. `encode_varu64` and `encode_varint` are the opposite.
- `Pieces` joins bytes that arrive in pieces.
- `Ranges` is a set of numbers that is stored as ranges.
- `serial_add` and `serial_distance` calculate with sequence numbers that wrap around.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, Literal

from muxkit._errors import LocalProtocolError, RemoteProtocolError

U64_MAX: Final = 2**64 - 1

# In a VarU64, a first byte below this is the number itself. Otherwise, the number follows in (first byte - 247) bytes.
_VARU64_DIRECT: Final = 248
# The smallest number that needs 0, 1, 2, … bytes after the first one. A smaller number must have a shorter encoding.
_VARU64_LEAST: Final = (0, _VARU64_DIRECT, 1 << 8, 1 << 16, 1 << 24, 1 << 32, 1 << 40, 1 << 48, 1 << 56)

_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(_VARU64_DIRECT))

_COALESCE: Final = 1024  # smaller pieces are copied into a common buffer, to save the memory of an object for each


class NeedMore(Exception):
    """Raised when the input ends in the middle of a value. At least `missing` more bytes are needed.

    This isn't a `MuxError`, because it isn't an error. Each `raise` needs a new object: an object that is raised again
    keeps all its tracebacks, and with them the frames, in memory.
    """

    def __init__(self, missing: int) -> None:
        super().__init__(missing)
        self.missing = missing


class Cursor:
    """A position in received bytes. Each read moves it after the value that was read.

    If a read raises an exception, the position doesn't change. To go back to the start of an incomplete frame, set
    `position`. Bytes from `end` on aren't read.
    """

    __slots__ = ("_size", "data", "position")

    def __init__(self, data: bytes, position: int = 0, end: int | None = None) -> None:
        self.data: bytes = data
        self.position: int = position
        self._size = len(data) if end is None else end

    @property
    def remaining(self) -> int:
        """The number of bytes after the position."""
        return self._size - self.position

    def byte(self) -> int:
        """Read one byte. Raises `NeedMore` if there is none."""
        position = self.position
        if position >= self._size:
            raise NeedMore(1)
        self.position = position + 1
        return self.data[position]

    def exact(self, size: int) -> bytes:
        """Read the next `size` bytes. Raises `NeedMore` if there are fewer."""
        position = self.position
        end = position + size
        if not position <= end <= self._size:
            if size < 0:
                raise LocalProtocolError(f"invalid size: expected 0 or more bytes, got {size}")
            raise NeedMore(end - self._size)
        self.position = end
        return self.data[position:end]

    def uint(self, size: int, order: Literal["big", "little"]) -> int:
        """Read an unsigned integer of `size` bytes. With a size of 0, it is 0."""
        return int.from_bytes(self.exact(size), order)

    def varu64(self, rule: str | None = None) -> int:
        """Read a VarU64. Raises `RemoteProtocolError` with `rule` if its encoding is longer than necessary."""
        position = self.position
        if position >= self._size:
            raise NeedMore(1)
        first = self.data[position]
        start = position + 1
        if first < _VARU64_DIRECT:
            self.position = start
            return first
        size = first - (_VARU64_DIRECT - 1)
        end = start + size
        if end > self._size:
            raise NeedMore(end - self._size)
        number = int.from_bytes(self.data[start:end], "big")
        if number < _VARU64_LEAST[size]:
            least = len(encode_varu64(number))
            raise RemoteProtocolError(f"VarU64 {number} is too long: expected {least} bytes, got {1 + size}", rule=rule)
        self.position = end
        return number

    def varint(self, max_bytes: int = 10, rule: str | None = None) -> int:
        """Read an LEB128 varint. Its encoding may be longer than necessary.

        Raises:
            RemoteProtocolError: If it has more than `max_bytes` bytes or more than 64 bits. The error has `rule`.
            NeedMore: If it is incomplete.
        """
        position = self.position
        if position < self._size and (byte := self.data[position]) < 0x80:  # the usual case
            self.position = position + 1
            return byte
        end = min(self._size, position + max_bytes)
        number = shift = 0
        while position < end:
            byte = self.data[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if number > U64_MAX:
                    raise RemoteProtocolError(f"varint {number} is too large: expected at most 64 bits", rule=rule)
                self.position = position
                return number
            shift += 7
        if position - self.position >= max_bytes:
            raise RemoteProtocolError(f"varint is too long: expected at most {max_bytes} bytes", rule=rule)
        raise NeedMore(1)

    def align(self, size: int, origin: int) -> None:
        """Skip padding up to the next position whose distance from `origin` is a multiple of `size`."""
        padding = (origin - self.position) % size
        if padding > self._size - self.position:
            raise NeedMore(padding - (self._size - self.position))
        self.position += padding


def encode_varu64(number: int) -> bytes:
    """Return a number as a VarU64, which has 1 to 9 bytes."""
    if 0 <= number < _VARU64_DIRECT:
        return _ONE_BYTE[number]
    if 0 <= number < 1 << 8:
        return (0xF8 << 8 | number).to_bytes(2, "big")
    if 0 <= number < 1 << 16:
        return (0xF9 << 16 | number).to_bytes(3, "big")
    if 0 <= number < 1 << 24:
        return (0xFA << 24 | number).to_bytes(4, "big")
    _check_u64(number)
    size = (number.bit_length() + 7) // 8
    return bytes((_VARU64_DIRECT - 1 + size,)) + number.to_bytes(size, "big")


def encode_varint(number: int) -> bytes:
    """Return a number as an LEB128 varint in its shortest form, which has 1 to 10 bytes."""
    if 0 <= number < 0x80:
        return _ONE_BYTE[number]
    if 0 <= number < 1 << 14:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if 0 <= number < 1 << 21:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    _check_u64(number)
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _check_u64(number: int) -> None:
    if not 0 <= number <= U64_MAX:
        # In hexadecimal, because Python refuses to write very long decimal numbers.
        raise LocalProtocolError(f"invalid number {number:#x}: expected 0 to {U64_MAX:#x}")


class Pieces:
    """Collects bytes that arrive in pieces, until they are joined.

    Small pieces are copied into one buffer. Otherwise, a peer that sends single bytes could make us keep an object for
    each of them. Large pieces are copied only by `join`.
    """

    __slots__ = ("_pieces", "_tail", "size")

    def __init__(self) -> None:
        self.size: int = 0
        self._pieces: list[bytes | bytearray | memoryview] = []
        self._tail = bytearray()

    def append(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        if len(data) < _COALESCE:
            self._tail += data
            return
        if self._tail:
            self._pieces.append(self._tail)
            self._tail = bytearray()
        self._pieces.append(data)

    def join(self) -> bytes:
        """Remove all pieces and return them as one bytes object."""
        if self._tail:
            self._pieces.append(self._tail)
            self._tail = bytearray()
        joined = b"".join(self._pieces)
        self._pieces.clear()
        self.size = 0
        return joined


class Ranges:
    """A set of numbers, stored as ranges. The ranges are sorted, and there is a gap between any two of them.

    A lookup takes O(log n) steps for n ranges, and no method takes longer if the ranges are longer.

    Args:
        most: The maximum number of ranges. Adding a number raises `RemoteProtocolError` if there would be more.
        limit: The name of the field of `muxkit.Limits` from which `most` comes, for that error.
    """

    __slots__ = ("_firsts", "_lasts", "_limit", "_most")

    def __init__(self, most: int, limit: str | None = None) -> None:
        self._most = most
        self._limit = limit
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the first and last number of each range, in ascending order."""
        return zip(self._firsts, self._lasts, strict=True)

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self._lasts, number)
        return index < len(self._firsts) and self._firsts[index] <= number

    @property
    def highest(self) -> int | None:
        return self._lasts[-1] if self._lasts else None

    def add(self, number: int) -> bool:
        """Add a number. Return True if it is new."""
        return self.add_range(number, number) == 1

    def add_range(self, first: int, last: int) -> int:
        """Add the numbers from `first` to `last`, both included. Return how many of them are new."""
        if first > last:
            raise LocalProtocolError(f"invalid range: start {first} is greater than end {last}")
        if self._lasts and first == self._lasts[-1] + 1:  # the usual case
            self._lasts[-1] = last
            return last - first + 1
        # The ranges with an index in [begin, end) overlap or touch the new one, so they are merged with it. The loop
        # over them is cheap on average, because each range is merged only once.
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin == end:
            if len(self._firsts) >= self._most:
                raise RemoteProtocolError(
                    f"too many ranges of numbers: expected at most {self._most}, "
                    f"{first} to {last} would be range {len(self._firsts) + 1}",
                    limit=self._limit,
                )
            self._firsts.insert(begin, first)
            self._lasts.insert(begin, last)
            return last - first + 1
        known = sum(self._lasts[index] - self._firsts[index] + 1 for index in range(begin, end))
        first = min(first, self._firsts[begin])
        last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]
        return last - first + 1 - known

    def discard_below(self, number: int) -> None:
        """Remove all numbers less than `number`."""
        index = bisect_left(self._lasts, number)
        del self._firsts[:index]
        del self._lasts[:index]
        if self._firsts and self._firsts[0] < number:
            self._firsts[0] = number

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Iterate over the ranges of missing numbers from `first` to `last`, both included.

        Don't change the set during the iteration.
        """
        index = bisect_left(self._lasts, first)
        while first <= last and index < len(self._firsts):
            if first < self._firsts[index]:
                yield first, min(last, self._firsts[index] - 1)
            first = self._lasts[index] + 1
            index += 1
        if first <= last:
            yield first, last


def serial_add(number: int, steps: int, bits: int = 32) -> int:
    """Return `number + steps` modulo 2^bits. `steps` may be negative."""
    return (number + steps) % (1 << bits)


def serial_distance(start: int, end: int, bits: int = 32) -> int:
    """Return how many steps forward `end` is from `start`, modulo 2^bits."""
    return (end - start) % (1 << bits)
