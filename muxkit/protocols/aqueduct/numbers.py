"""Sets of message numbers: those that are unanswered at the sender, and those that have arrived at the receiver.

The messages of a channel that are sent in streams, and those that are sent in datagrams, are numbered separately, from
0. The peer chooses the numbers that it sends and acks. So nothing in this module takes time or memory in proportion to
the size of a number. Numbers are stored as runs of consecutive numbers, and `Config.gaps` limits how many runs there
are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from muxkit._errors import RemoteProtocolError
from muxkit.core import Ranges

RecordT = TypeVar("RecordT")


def acked_ranges(varints: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in an ACK_RELIABLE frame, as (first, last). The frame contains a gap and a length for each."""
    at = 0
    for gap, length in zip(varints[::2], varints[1::2], strict=True):
        at += gap
        yield at, at + length - 1
        at += length


def ack_varints(ranges: Ranges) -> list[int]:
    """Return the gaps and lengths for the ranges of an ACK_RELIABLE frame. The opposite of `acked_ranges`."""
    varints, at = [], 0
    for first, last in ranges:
        varints += [first - at, last - first + 1]
        at = last + 1
    return varints


class Flight(Generic[RecordT]):
    """The numbers of unanswered messages.

    A message with a receipt or an attachment has a record. A message without a record takes hardly any memory, as long
    as the peer acks in order, because the numbers are stored as runs.
    """

    __slots__ = ("_records", "_runs", "count", "kept")

    def __init__(self) -> None:
        self.count: int = 0
        """How many numbers there are. This and `kept` are attributes because they are read for each message."""
        self.kept: int = 0
        """The number of records and runs, which is a measure of the memory used."""
        # The first and the last number of each run, alternately. One list takes less memory than a list of pairs.
        self._runs: list[int] = []
        self._records: dict[int, RecordT] = {}

    def __len__(self) -> int:
        return self.count

    def add(self, number: int, record: RecordT | None) -> None:
        """Add a number, which must be larger than all earlier ones."""
        self.add_run(number, number)
        if record is not None:
            self._records[number] = record
            self.kept += 1

    def add_run(self, first: int, last: int) -> None:
        """Add the numbers from `first` to `last` without records. They must be larger than all earlier ones."""
        self.count += last - first + 1
        if self._runs and self._runs[-1] == first - 1:
            self._runs[-1] = last
        else:
            self._runs += (first, last)
            self.kept += 1

    def take(self, first: int, last: int) -> list[RecordT]:
        """Remove the numbers from `first` to `last`, and return their records."""
        # The positions of the runs that have at least one number in the range.
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
            self.count -= len(numbers)
            if self._records:
                taken += [self._records.pop(number) for number in numbers if number in self._records]
        self._runs[begin:end] = left
        self.kept = len(self._records) + len(self._runs) // 2
        return taken

    def records(self) -> list[RecordT]:
        """Return the records of all unanswered numbers."""
        return list(self._records.values())

    def clear(self) -> list[RecordT]:
        """Remove all numbers, and return their records."""
        records = self.records()
        self.count = self.kept = 0
        self._runs.clear()
        self._records.clear()
        return records


class ReliableNumbers:
    """The numbers of the messages that have arrived in streams, and those that we haven't acked yet (`owed`)."""

    __slots__ = ("got", "owed", "total")

    def __init__(self, gaps: int) -> None:
        self.got: Ranges = Ranges(gaps)
        # A range in `owed` ends at a number that was acked before or is missing. So there are at most twice as many
        # ranges as in `got`.
        self.owed: Ranges = Ranges(2 * gaps + 2)
        self.total: int | None = None  # the number of messages, or None until the sender has finished

    def check(self, number: int) -> None:
        """Raise `RemoteProtocolError` if the peer may not send a message with this number."""
        if self.total is not None and number >= self.total:
            raise RemoteProtocolError(
                f"message {number} on a channel that finished with {self.total}", rule="aqueduct-S08"
            )
        if number in self.got:
            raise RemoteProtocolError(f"message {number} came a second time", rule="aqueduct-S08")

    @property
    def next_in_order(self) -> int:
        """The number after the highest one that has arrived."""
        highest = self.got.highest
        return 0 if highest is None else highest + 1

    def arrived(self, first: int, last: int) -> None:
        """Record that the messages from `first` to `last` have arrived. `check` must have accepted their numbers."""
        self.got.add_range(first, last)
        self.owed.add_range(first, last)

    @property
    def is_complete(self) -> bool:
        """True once the sender has finished, and all messages that it sent in streams have arrived."""
        if self.total is None:
            return False
        return self.total == 0 or (len(self.got) == 1 and next(iter(self.got)) == (0, self.total - 1))

    def take_acks(self) -> list[int]:
        """Return the content of the next ACK_RELIABLE frame, and clear `owed`."""
        varints = ack_varints(self.owed)
        self.owed.discard_below((self.owed.highest or 0) + 1)
        return varints


class UnreliableNumbers:
    """The numbers of the messages that have arrived in datagrams. Always, reported ≤ due ≤ known."""

    __slots__ = ("_got", "due", "known", "reported")

    def __init__(self, gaps: int) -> None:
        self._got = Ranges(gaps)
        self.reported: int = 0  # all smaller numbers were acked or nacked
        self.due: int = 0  # all smaller numbers may be acked or nacked now
        self.known: int = 0  # the peer has announced that it has sent all smaller numbers

    @property
    def any(self) -> bool:
        """True once the peer has sent a datagram on the channel."""
        return self.known > 0 or len(self._got) > 0

    def is_new(self, number: int) -> bool:
        """Return True if the message with this number hasn't arrived and wasn't nacked."""
        return number >= self.reported and number not in self._got

    def arrived(self, number: int) -> bool:
        """Record that a message has arrived. Return False if it must be dropped.

        That is the case if it has arrived before, if it was nacked, or if there would be too many gaps.
        """
        if not self.is_new(number):
            return False
        try:
            self._got.add(number)
        except RemoteProtocolError:
            return False
        return True

    def take_report(self) -> list[int]:
        """Return the content of the ACK_NACK_UNRELIABLE frame that is due: lengths to ack and to nack, alternately."""
        varints, at = [], self.reported
        for first, last in self._got.missing(self.reported, self.due - 1):
            varints += [first - at, last - first + 1]
            at = last + 1
        if at < self.due:
            varints.append(self.due - at)
        self.reported = self.due
        self._got.discard_below(self.reported)
        return varints
