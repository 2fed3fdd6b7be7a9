"""The delta coding of `miss`: the document's examples, and the round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.e3x import decode_miss, encode_miss

EXAMPLE = [78236, 78235, 78245, 78238]


@pytest.mark.clause("e3x-X01", "e3x-X02")
def test_missing_seqs_are_sorted_and_told_as_differences_from_the_ack() -> None:
    assert encode_miss(78231, EXAMPLE) == [4, 1, 2, 7]


@pytest.mark.clause("e3x-X03")
def test_the_limit_comes_last_as_the_highest_seq_that_is_accepted() -> None:
    assert encode_miss(78231, EXAMPLE, 20) == [4, 1, 2, 7, 6]


@pytest.mark.clause("e3x-X04", "e3x-M06")
def test_reading_gives_the_seqs_the_limit_and_the_window() -> None:
    miss = decode_miss(78231, [4, 1, 2, 7, 6])
    assert (miss.missing, miss.limit, miss.window) == (sorted(EXAMPLE), 78251, 20)


@pytest.mark.clause("e3x-M02")
def test_two_missing_of_a_window_of_20() -> None:
    assert encode_miss(10, [11, 14], 20) == [1, 3, 16]
    miss = decode_miss(10, [1, 3, 16])
    assert (miss.missing, miss.limit) == ([11, 14], 30)


@pytest.mark.clause("e3x-X05")
def test_the_last_delta_is_positive_because_the_limit_itself_is_never_missing() -> None:
    assert encode_miss(0, range(1, 20), 20) == [1] * 20
    assert encode_miss(0, range(1, 30), 20)[-1] == 1


@pytest.mark.clause("e3x-M11")
def test_a_list_that_is_cut_still_ends_with_the_limit() -> None:
    assert encode_miss(10, [12, 14, 16], 20, most=3) == [2, 2, 16]
    assert encode_miss(10, [12, 14, 16], 20, most=1) == [20]
    assert encode_miss(10, [12, 14, 16], 20, most=4) == [2, 2, 2, 14]


@pytest.mark.clause("e3x-M03")
@pytest.mark.parametrize("deltas", [[], [0], [0, 3], [3, 0], [-1], [5, -1, 5]])
def test_an_empty_array_and_a_delta_below_1_have_no_meaning(deltas: list[int]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_miss(5, deltas)


@given(ack=st.integers(0, 2**32 - 1), offsets=st.sets(st.integers(1, 3000), max_size=300), spare=st.integers(1, 3000))
def test_whatever_is_missing_is_read_as_it_was_written(ack: int, offsets: set[int], spare: int) -> None:
    missing = sorted(ack + offset for offset in offsets)
    capacity = max(offsets, default=0) + spare
    miss = decode_miss(ack, encode_miss(ack, missing, capacity))
    assert (miss.missing, miss.limit, miss.window) == (missing, ack + capacity, capacity)
