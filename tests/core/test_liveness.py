"""Keepalive and the least speed of what was begun, on an engine's deadlines."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from muxkit.core import Deadlines, Keepalive, StallWatch


class Timer(Enum):
    ASK = auto()
    ANSWER = auto()
    STALL = auto()


@pytest.fixture
def deadlines() -> Deadlines[Timer]:
    return Deadlines()


def keepalive(deadlines: Deadlines[Timer], interval: float | None = 20.0) -> Keepalive[Timer]:
    return Keepalive(deadlines, Timer.ASK, Timer.ANSWER, interval=interval, timeout=5.0)


def test_a_silent_peer_is_asked_after_the_interval(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines)
    alive.start(100.0)
    assert deadlines.next == 120.0
    assert deadlines.expired(120.0) == [Timer.ASK]
    assert alive.is_due(120.0)
    alive.asked(120.0)
    assert deadlines.next == 125.0
    assert alive.silence(125.0) == 25.0


def test_what_came_in_between_postpones_the_question(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines)
    alive.start(0.0)
    alive.heard(15.0)
    assert deadlines.next == 20.0  # moving the timer with each read would cost more than to look once
    deadlines.expired(20.0)
    assert not alive.is_due(20.0)
    assert deadlines.next == 35.0


def test_an_answer_of_any_kind_stops_the_clock_and_begins_the_next_interval(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines)
    alive.start(0.0)
    deadlines.expired(20.0)
    alive.asked(20.0)
    alive.heard(21.0)
    assert Timer.ANSWER not in deadlines
    assert deadlines.next == 41.0


def test_without_an_interval_no_peer_is_asked(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines, None)
    alive.start(0.0)
    assert deadlines.next is None


def test_a_question_that_cannot_be_asked_is_postponed(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines)
    alive.start(0.0)
    deadlines.expired(20.0)
    alive.postpone(20.0)
    assert deadlines.next == 40.0


def test_a_new_connection_begins_with_a_peer_that_was_heard(deadlines: Deadlines[Timer]) -> None:
    alive = keepalive(deadlines)
    alive.start(0.0)
    deadlines.expired(20.0)
    alive.asked(20.0)
    alive.start(24.0)
    assert deadlines.expired(25.0) == [Timer.ANSWER]  # an owner of the timers stops them with the old connection
    assert alive.silence(25.0) == 1.0


@pytest.mark.parametrize(("came", "short"), [(0, 0), (99, 99), (100, None), (5000, None)])
def test_what_came_in_an_interval_is_compared_with_the_least(
    deadlines: Deadlines[Timer], came: int, short: int | None
) -> None:
    stall = StallWatch(deadlines, Timer.STALL, seconds=30.0, least=100)
    stall.watch(10.0, 1000)
    stall.watch(20.0, 1050)  # it runs already
    assert deadlines.next == 40.0
    deadlines.expired(40.0)
    assert stall.shortfall(1000 + came) == short
    stall.watch(40.0, 1000 + came)
    assert deadlines.next == 70.0


def test_bytes_that_waited_for_credit_are_not_slow(deadlines: Deadlines[Timer]) -> None:
    stall = StallWatch(deadlines, Timer.STALL, seconds=30.0, least=100)
    stall.watch(0.0, 0, late_loans=3)
    assert stall.shortfall(5, late_loans=4) is None


def test_nothing_unfinished_stops_the_clock(deadlines: Deadlines[Timer]) -> None:
    stall = StallWatch(deadlines, Timer.STALL, seconds=30.0, least=100)
    stall.stop()
    stall.watch(0.0, 0)
    stall.stop()
    assert deadlines.next is None


def test_the_error_names_what_came_and_what_is_asked(deadlines: Deadlines[Timer]) -> None:
    stall = StallWatch(deadlines, Timer.STALL, seconds=30.0, least=1024)
    error = stall.error(7, "line", offset=12)
    assert error.message == "too slow: 7 bytes in 30.0 s while a line is unfinished, expected at least 1024"
    assert (error.offset, error.limit) == (12, "stall")
