"""Token buckets, on a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.core import TokenBucket


def take_all(bucket: TokenBucket, now: float) -> int:
    count = 0
    while bucket.take(now):
        count += 1
    return count


@pytest.mark.requirement("R-10")
def test_a_burst_is_allowed_at_once_and_no_more() -> None:
    assert take_all(TokenBucket(rate=10, burst=5), 0.0) == 5


@pytest.mark.requirement("R-10")
def test_then_the_rate_counts() -> None:
    bucket = TokenBucket(rate=10, burst=5)
    take_all(bucket, 0.0)
    assert take_all(bucket, 0.25) == 2
    assert take_all(bucket, 0.5) == 3


def test_what_was_not_used_is_kept_up_to_a_burst() -> None:
    bucket = TokenBucket(rate=10, burst=5)
    take_all(bucket, 0.0)
    assert take_all(bucket, 1000.0) == 5


def test_asking_takes_nothing() -> None:
    bucket = TokenBucket(rate=1, burst=1)
    assert bucket.has_token(0.0)
    assert bucket.has_token(0.0)
    assert bucket.take(0.0)
    assert not bucket.has_token(0.0)


def test_the_first_call_may_be_at_any_moment() -> None:
    assert take_all(TokenBucket(rate=10, burst=5), 1e9) == 5


@pytest.mark.requirement("R-52")
def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=10, burst=5)
    take_all(bucket, 10.0)
    for _ in range(100):
        assert not bucket.take(0.0)
        assert not bucket.take(10.0)


@given(st.lists(st.floats(0, 10), max_size=50), st.integers(1, 20), st.integers(1, 20))
def test_never_more_than_burst_and_rate_together(moments: list[float], rate: int, burst: int) -> None:
    bucket = TokenBucket(rate, burst)
    start = min(moments, default=0.0)
    taken = 0
    for now in sorted(moments):
        taken += bucket.take(now)
        assert taken <= burst + (now - start) * rate + 1e-6
