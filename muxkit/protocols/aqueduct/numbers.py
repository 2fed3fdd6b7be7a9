"""Message numbers: which ones are unanswered at the sender, and which ones have come at the receiver.

Streams and datagrams number the messages of a channel separately, each from 0. A peer chooses the numbers that it
sends and acks, so nothing here takes time or memory in proportion to the size of a number. The cost depends on how many
runs of numbers there are, and `Config.gaps` bounds those.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from muxkit._errors import RemoteProtocolError
from muxkit.core import Ranges

RecordT = TypeVar("RecordT")


def acked_ranges(varints: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges that an ACK_RELIABLE acks, as (first, last). Gaps and lengths alternate; a gap comes first."""
    at = 0
    for gap, length in zip(varints[::2], varints[1::2], strict=True):
        at += gap
        yield at, at + length - 1
        at += length


def ack_varints(ranges: Ranges) -> list[int]:
    """Encode ranges as the varints of an ACK_RELIABLE."""
    varints, at = [], 0
    for first, last in ranges:
        varints += [first - at, last - first + 1]
        at = last + 1
    return varints


class Flight(Generic[RecordT]):
    """Sent numbers without an answer, with a record for each one that a receipt or an attachment depends on.

    The numbers are kept as runs. So a message without a record takes no memory, as long as the peer acks in order.
    """

    __slots__ = ("_count", "_records", "_runs")

    def __init__(self) -> None:
        self._count = 0
        self._runs: list[int] = []  # the first and the last number of each run, in turn; one list takes less memory
        self._records: dict[int, RecordT] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def kept(self) -> int:
        """What takes memory: records and runs of numbers."""
        return len(self._records) + len(self._runs) // 2

    def add(self, number: int, record: RecordT | None) -> None:
        """Add a number above all earlier ones."""
        self._count += 1
        if self._runs and self._runs[-1] == number - 1:
            self._runs[-1] = number
        else:
            self._runs += (number, number)
        if record is not None:
            self._records[number] = record

    def take(self, first: int, last: int) -> list[RecordT]:
        """Remove the numbers from `first` to `last`, and return their records."""
        # The runs of which at least one number is in the range; bounds of runs that only touch it are outside.
        begin, end = bisect_left(self._runs, first) // 2 * 2, (bisect_right(self._runs, last) + 1) // 2 * 2
        touched = self._runs[begin:end]
        taken: list[RecordT] = []
        left: list[int] = []
        for start, stop in zip(touched[::2], touched[1::2], strict=True):
            if start < first:
                left += (start, first - 1)
            if stop > last:
                left += (last + 1, stop)
            numbers = range(max(start, first), min(stop, last) + 1)
            self._count -= len(numbers)
            if self._records:
                taken += [self._records.pop(number) for number in numbers if number in self._records]
        self._runs[begin:end] = left
        return taken

    def records(self) -> list[RecordT]:
        """Return the records of all unanswered numbers."""
        return list(self._records.values())

    def clear(self) -> list[RecordT]:
        """Remove all numbers, and return their records."""
        records = self.records()
        self._count = 0
        self._runs.clear()
        self._records.clear()
        return records


class ReliableNumbers:
    """The numbers of messages that came in streams, and the acks that are owed for them."""

    __slots__ = ("got", "owed", "total")

    def __init__(self, gaps: int) -> None:
        self.got: Ranges = Ranges(gaps)
        # An owed range ends at a number that was acked before or is missing, so there are at most twice as many.
        self.owed: Ranges = Ranges(2 * gaps + 2)
        self.total: int | None = None  # how many messages there are, once the sender has finished

    def check(self, number: int) -> None:
        if self.total is not None and number >= self.total:
            raise RemoteProtocolError(
                f"message {number} on a channel that finished with {self.total}", rule="aqueduct-S08"
            )
        if number in self.got:
            raise RemoteProtocolError(f"message {number} came a second time", rule="aqueduct-S08")

    def arrived(self, number: int) -> None:
        """Record a number that `check` has passed; an ack is owed for it."""
        self.got.add(number)
        self.owed.add(number)

    @property
    def is_complete(self) -> bool:
        """True once the sender has finished and every message that it sent in a stream has come."""
        if self.total is None:
            return False
        return self.total == 0 or (len(self.got) == 1 and next(iter(self.got)) == (0, self.total - 1))

    def take_acks(self) -> list[int]:
        """Return the varints of the ACK_RELIABLE that is owed. Nothing is owed after that."""
        varints = ack_varints(self.owed)
        self.owed.discard_below((self.owed.highest or 0) + 1)
        return varints


class UnreliableNumbers:
    """The numbers of messages that came in datagrams. It always holds that reported ≤ due ≤ known."""

    __slots__ = ("_got", "due", "known", "reported")

    def __init__(self, gaps: int) -> None:
        self._got = Ranges(gaps)
        self.reported: int = 0  # all numbers below were acked or nacked
        self.due: int = 0  # all numbers below may be reported now
        self.known: int = 0  # all numbers below have been sent

    @property
    def any(self) -> bool:
        """True once the peer has sent a datagram on the channel."""
        return self.known > 0 or len(self._got) > 0

    def is_new(self, number: int) -> bool:
        """Return True for a number that has neither come nor been nacked."""
        return number >= self.reported and number not in self._got

    def arrived(self, number: int) -> bool:
        """Record a number; return False if it is known, nacked, or would open one gap too many."""
        if not self.is_new(number):
            return False
        try:
            self._got.add(number)
        except RemoteProtocolError:
            return False
        return True

    def take_report(self) -> list[int]:
        """Return the varints of the ACK_NACK_UNRELIABLE that is due. Acked and nacked lengths alternate."""
        varints, at = [], self.reported
        for first, last in self._got.missing(self.reported, self.due - 1):
            varints += [first - at, last - first + 1]
            at = last + 1
        if at < self.due:
            varints.append(self.due - at)
        self.reported = self.due
        self._got.discard_below(self.reported)
        return varints
