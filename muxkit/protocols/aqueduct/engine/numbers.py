"""Message numbers of a channel: what was sent and not answered, what was received and not acknowledged.

Streams and datagrams number their messages separately. No cost depends on the size of a number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Generic, TypeVar

from muxkit._errors import RemoteProtocolError
from muxkit.core import Ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

RecordT = TypeVar("RecordT")


def acked_ranges(varints: list[int]) -> Iterator[tuple[int, int]]:
    """Give what an ACK_RELIABLE acks as (first, last): gaps and lengths alternate, the first gap from 0 (A02)."""
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
    """Numbers that were sent and not answered, with a record for each that a receipt or an attachment depends on."""

    __slots__ = ("_numbers", "_records")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._records: dict[int, RecordT] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, record: RecordT | None) -> None:
        """Add a number above all earlier ones."""
        self._numbers.append(number)
        if record is not None:
            self._records[number] = record

    def take(self, first: int, last: int) -> list[RecordT]:
        """Remove the numbers from `first` to `last` and give their records; costs what is found, not what is asked."""
        begin = bisect_left(self._numbers, first)
        end = bisect_right(self._numbers, last)
        taken = self._numbers[begin:end]
        del self._numbers[begin:end]
        return [self._records.pop(number) for number in taken if number in self._records]

    def records(self) -> list[RecordT]:
        """The records of all unanswered numbers."""
        return list(self._records.values())

    def clear(self) -> list[RecordT]:
        """Remove all numbers and give their records."""
        records = self.records()
        self._numbers.clear()
        self._records.clear()
        return records


class ReliableNumbers:
    """The numbers of messages received in streams, and the acks owed for them."""

    __slots__ = ("got", "owed", "total")

    def __init__(self, gaps: int) -> None:
        self.got = Ranges(gaps)
        # An owed range ends at a number that was acked before or is missing, so there are at most twice as many.
        self.owed = Ranges(2 * gaps + 2)
        self.total: int | None = None  # how many there are, once the sender has finished

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

    def check_total(self, total: int) -> None:
        highest = self.got.highest
        if highest is not None and highest >= total:
            raise RemoteProtocolError(
                f"finished with {total} messages, but message {highest} came", rule="aqueduct-S08"
            )

    @property
    def is_complete(self) -> bool:
        """Whether the sender has finished and every stream message has come."""
        if self.total is None:
            return False
        return self.total == 0 or (len(self.got) == 1 and next(iter(self.got)) == (0, self.total - 1))

    def take_acks(self) -> list[int]:
        """Give the varints of the ACK_RELIABLE that is owed; nothing is owed after it."""
        varints = ack_varints(self.owed)
        self.owed.discard_below((self.owed.highest or 0) + 1)
        return varints


class UnreliableNumbers:
    """The numbers of messages received in datagrams: reported ≤ due ≤ known."""

    __slots__ = ("_got", "due", "known", "reported")

    def __init__(self, gaps: int) -> None:
        self._got = Ranges(gaps)
        self.reported = 0  # all below were acked or nacked
        self.due = 0  # all below may be reported now
        self.known = 0  # all below have been sent

    @property
    def any(self) -> bool:
        return self.known > 0 or len(self._got) > 0

    def arrived(self, number: int) -> bool:
        """Record a number; False if it is known, nacked, or would open one gap too many."""
        if number < self.reported or number in self._got:
            return False
        try:
            self._got.add(number)
        except RemoteProtocolError:
            return False
        return True

    def take_report(self) -> list[int]:
        """Give the varints of the ACK_NACK_UNRELIABLE that is due: acked and nacked lengths alternate (A09)."""
        varints, at = [], self.reported
        for first, last in self._got.missing(self.reported, self.due - 1):
            varints += [first - at, last - first + 1]
            at = last + 1
        if at < self.due:
            varints.append(self.due - at)
        self.reported = self.due
        self._got.discard_below(self.reported)
        return varints
