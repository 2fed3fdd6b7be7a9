"""Which numbers were there? Ranges that merge as they fill up, and sequence numbers that wrap around."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from muxkit._errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ranges:
    """A set of numbers as sorted, disjoint, inclusive ranges that never touch each other.

    Finding costs O(log ranges), and no call costs more for longer ranges. At most `most` ranges are kept: a
    peer that leaves more holes than that gets a `RemoteProtocolError` that names `limit`, the field of
    `muxkit.Limits` which `most` was taken from.
    """

    __slots__ = ("_firsts", "_lasts", "_limit", "_most")

    def __init__(self, most: int, limit: str | None = None) -> None:
        self._most = most
        self._limit = limit
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __len__(self) -> int:
        """How many ranges there are; not how many numbers."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First and last of each range, in rising order."""
        return zip(self._firsts, self._lasts, strict=True)

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self._lasts, number)
        return index < len(self._firsts) and self._firsts[index] <= number

    @property
    def highest(self) -> int | None:
        return self._lasts[-1] if self._lasts else None

    def add(self, number: int) -> bool:
        """Put in one number; was it new?"""
        return self.add_range(number, number) == 1

    def add_range(self, first: int, last: int) -> int:
        """Put in `first` to `last`, both included; how many of them were new?"""
        if first > last:
            raise LocalProtocolError(f"{first} … {last} is no range")
        # All ranges that overlap or touch the new one lie in [begin, end): they become one with it. Each
        # is met once and then gone, so the sum is paid for by the calls that made them.
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin == end:
            if len(self._firsts) >= self._most:
                raise RemoteProtocolError(
                    f"{first} … {last} would be range {len(self._firsts) + 1} of {self._most} allowed",
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
        """Forget everything less than `number`."""
        index = bisect_left(self._lasts, number)
        del self._firsts[:index]
        del self._lasts[:index]
        if self._firsts and self._firsts[0] < number:
            self._firsts[0] = number

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The holes from `first` to `last`, both included, as ranges; nothing may be added meanwhile."""
        index = bisect_left(self._lasts, first)
        while first <= last and index < len(self._firsts):
            if first < self._firsts[index]:
                yield first, min(last, self._firsts[index] - 1)
            first = self._lasts[index] + 1
            index += 1
        if first <= last:
            yield first, last


def serial_add(number: int, steps: int, bits: int = 32) -> int:
    """The number that comes `steps` after `number` (before it, if negative) when counting wraps at 2^bits."""
    return (number + steps) % (1 << bits)


def serial_distance(start: int, end: int, bits: int = 32) -> int:
    """How many steps forward from `start` to `end`: 0 to 2^bits - 1."""
    return (end - start) % (1 << bits)


def serial_less(left: int, right: int, bits: int = 32) -> bool:
    """Does `left` come before `right`, going the shorter way (RFC 1982)? At exactly half way neither does."""
    return 0 < serial_distance(left, right, bits) < 1 << (bits - 1)
