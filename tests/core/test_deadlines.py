"""Timers by name, on a clock that the test holds."""

from __future__ import annotations

import math
from enum import Enum, auto

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.core._liveness import FURTHEST, Deadlines


class Timer(Enum):
    KEEPALIVE = auto()
    ACK = auto()
    RESEND = auto()


def test_without_timers_nobody_needs_to_call() -> None:
    deadlines = Deadlines[Timer]()
    assert deadlines.next is None
    assert deadlines.expired(1e9) == []


def test_the_next_moment_is_the_earliest() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.KEEPALIVE, 30.0)
    deadlines.set(Timer.ACK, 0.5)
    assert deadlines.next == 0.5


def test_setting_a_timer_again_moves_it() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    deadlines.set(Timer.ACK, 2.0)
    assert deadlines.expired(1.5) == []
    assert deadlines.next == 2.0


def test_a_stopped_timer_never_expires() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    deadlines.stop(Timer.ACK)
    assert Timer.ACK not in deadlines
    assert deadlines.expired(2.0) == []


def test_stopping_a_timer_that_does_not_run_changes_nothing() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    deadlines.stop(Timer.RESEND)
    assert deadlines.next == 1.0


def test_a_timer_is_due_at_its_moment_and_not_before() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    assert deadlines.expired(math.nextafter(1.0, 0.0)) == []
    assert deadlines.expired(1.0) == [Timer.ACK]


def test_what_is_due_comes_once() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    deadlines.expired(1.0)
    assert Timer.ACK not in deadlines
    assert deadlines.expired(1.0) == []


def test_what_is_not_due_goes_on_running() -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, 1.0)
    deadlines.set(Timer.RESEND, 2.0)
    deadlines.expired(1.0)
    assert Timer.RESEND in deadlines
    assert deadlines.next == 2.0


@given(st.dictionaries(st.sampled_from(Timer), st.floats(-1e9, 1e9)), st.floats(-1e9, 1e9))
def test_the_due_timers_come_in_the_order_of_their_moments(moments: dict[Timer, float], now: float) -> None:
    deadlines = Deadlines[Timer]()
    for timer, moment in moments.items():
        deadlines.set(timer, moment)
    expired = [moments[timer] for timer in deadlines.expired(now)]
    assert expired == sorted(moment for moment in moments.values() if moment <= now)
    assert deadlines.next == min((moment for moment in moments.values() if moment > now), default=None)


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("when", [0, 1, 2**7 - 1, 2**7, 2**7 + 1, 2**32 - 1, 2**32, 2**32 + 1])
def test_a_moment_that_fits_is_kept_exactly(when: int) -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, when)
    assert deadlines.next == when


@pytest.mark.requirement("R-16", "R-18")
@pytest.mark.parametrize(
    "when",
    [2**53, 2**60, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64, 1 << 5000, math.inf, math.nan],
    ids=["2^53", "2^60", "2^63-1", "2^63", "2^63+1", "2^64-1", "2^64", "2^5000", "inf", "nan"],
)
def test_a_moment_beyond_every_clock_becomes_the_furthest(when: float) -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, when)
    assert deadlines.next == FURTHEST
    assert deadlines.expired(1e15) == []


@pytest.mark.parametrize("when", [-(2**64), -(1 << 5000), -math.inf], ids=["-2^64", "-2^5000", "-inf"])
def test_a_moment_before_every_clock_is_due_at_once(when: float) -> None:
    deadlines = Deadlines[Timer]()
    deadlines.set(Timer.ACK, when)
    assert deadlines.next == -FURTHEST
    assert deadlines.expired(0.0) == [Timer.ACK]
