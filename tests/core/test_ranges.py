"""Sets of numbers as ranges, and sequence numbers that wrap."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core._numbers import Ranges, serial_add, serial_distance

BOUNDARIES = [0, 1, 2**7 - 1, 2**7, 2**7 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1]
BOUNDARIES += [2**64 - 1, 2**64]

numbers = st.integers(0, 40)


def ranges_of(*pairs: tuple[int, int]) -> Ranges:
    ranges = Ranges(100)
    for first, last in pairs:
        ranges.add_range(first, last)
    return ranges


def numbers_in(pairs: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in pairs for number in range(first, last + 1)}


class RangesAgainstASet(RuleBasedStateMachine):
    """Whatever is done to them, the ranges hold what a plain set holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(100)
        self.model: set[int] = set()

    @rule(number=numbers)
    def add(self, number: int) -> None:
        assert self.ranges.add(number) == (number not in self.model)
        self.model.add(number)

    @rule(first=numbers, size=st.integers(1, 12))
    def add_range(self, first: int, size: int) -> None:
        added = set(range(first, first + size))
        assert self.ranges.add_range(first, first + size - 1) == len(added - self.model)
        self.model |= added

    @rule(number=numbers)
    def discard_below(self, number: int) -> None:
        self.ranges.discard_below(number)
        self.model = {kept for kept in self.model if kept >= number}

    @rule(first=numbers, size=st.integers(0, 20))
    def ask_for_holes(self, first: int, size: int) -> None:
        holes = list(self.ranges.missing(first, first + size - 1))
        assert numbers_in(holes) == set(range(first, first + size)) - self.model
        assert all(first <= last for first, last in holes)

    @invariant()
    def holds_the_same_numbers(self) -> None:
        assert numbers_in(list(self.ranges)) == self.model
        assert {number for number in range(-1, 60) if number in self.ranges} == self.model
        assert self.ranges.highest == max(self.model, default=None)

    @invariant()
    def ranges_rise_and_never_touch(self) -> None:
        pairs = list(self.ranges)
        assert len(self.ranges) == len(pairs)
        assert all(first <= last for first, last in pairs)
        assert all(left[1] + 1 < right[0] for left, right in pairwise(pairs))


TestRangesAgainstASet = RangesAgainstASet.TestCase


def test_a_number_that_fills_a_hole_makes_one_range_of_two() -> None:
    ranges = ranges_of((1, 2), (4, 5))
    assert ranges.add(3)
    assert list(ranges) == [(1, 5)]


def test_a_range_swallows_all_that_it_covers() -> None:
    ranges = ranges_of((2, 2), (4, 4), (6, 6), (9, 9))
    assert ranges.add_range(1, 7) == 4
    assert list(ranges) == [(1, 7), (9, 9)]


def test_a_number_that_was_there_is_not_new() -> None:
    assert not ranges_of((1, 5)).add(3)


def test_empty_ranges_are_false_and_have_no_highest() -> None:
    ranges = Ranges(1)
    assert not ranges
    assert ranges.highest is None


def test_discarding_below_cuts_a_range_in_two() -> None:
    ranges = ranges_of((1, 2), (4, 8))
    ranges.discard_below(6)
    assert list(ranges) == [(6, 8)]


def test_holes_are_cut_at_the_bounds_asked_for() -> None:
    assert list(ranges_of((3, 4), (8, 9)).missing(1, 6)) == [(1, 2), (5, 6)]


def test_nothing_is_missing_in_no_numbers() -> None:
    assert list(Ranges(1).missing(5, 4)) == []


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="start 5 is greater than end 4"):
        Ranges(1).add_range(5, 4)


def test_one_range_too_many_is_refused_with_its_limit_and_changes_nothing() -> None:
    ranges = Ranges(2, limit="tombstones")
    ranges.add_range(1, 2)
    ranges.add(5)
    with pytest.raises(RemoteProtocolError, match="expected at most 2, 9 to 9 would be range 3") as caught:
        ranges.add(9)
    assert caught.value.limit == "tombstones"
    assert list(ranges) == [(1, 2), (5, 5)]


def test_at_the_limit_ranges_may_still_grow() -> None:
    ranges = Ranges(1)
    ranges.add(5)
    assert ranges.add(6)
    assert list(ranges) == [(5, 6)]


@pytest.mark.requirement("R-18")
def test_a_range_of_2_to_the_60_numbers_costs_no_more_than_one() -> None:
    ranges = Ranges(100)
    tracemalloc.start()
    try:
        assert ranges.add_range(1, 2**60) == 2**60
        assert ranges.add_range(2**61, 2**62) == 2**61 + 1
        assert 2**59 in ranges
        assert list(ranges.missing(0, 2**62)) == [(0, 0), (2**60 + 1, 2**61 - 1)]
        assert ranges.add_range(0, 2**64) == 2**64 + 1 - 2**60 - (2**61 + 1)
        ranges.discard_below(2**63)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(ranges) == [(2**63, 2**64)]
    assert peak < 4096


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("number", BOUNDARIES)
def test_a_boundary_is_a_number_like_any_other(number: int) -> None:
    ranges = ranges_of((number, number))
    assert (number - 1 in ranges, number in ranges, number + 1 in ranges) == (False, True, False)
    assert ranges.add(number + 1)
    assert list(ranges) == [(number, number + 1)]


# Serial numbers


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(
    ("number", "steps", "after"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (2**32 - 1, 1, 0),
        (2**32 - 1, 2**32 - 1, 2**32 - 2),
        (0, -1, 2**32 - 1),
        (2**31 - 1, 1, 2**31),
        (5, 2**32, 5),
        (5, 2**64, 5),
    ],
)
def test_counting_wraps_at_2_to_the_32(number: int, steps: int, after: int) -> None:
    assert serial_add(number, steps) == after


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_distance_is_what_has_to_be_added(start: int, end: int) -> None:
    distance = serial_distance(start, end)
    assert 0 <= distance < 2**32
    assert serial_add(start, distance) == end


@given(st.integers(1, 70), st.data())
def test_any_width_counts_to_its_own_end(bits: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 2**bits - 1))
    assert serial_add(number, 2**bits - number, bits) == 0
    assert serial_distance(number, 0, bits) == -number % 2**bits
