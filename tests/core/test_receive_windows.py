"""The sizes of windows on a path whose round trip is known: `muxkit.core.receive_windows`."""

from __future__ import annotations

import pytest

from muxkit._limits import SHORT_WINDOW
from muxkit.core import ReceiveBudget, ReceiveWindow, RoundTrip
from muxkit.core.receive_windows import ASK_FROM, LONGER_AFTER, PROBE_PAUSE

MIB = 1024 * 1024
TOTAL = 64 * MIB
LARGEST = 32 * MIB
PIECE = 16 * 1024  # bytes that the application takes at once
FAST = 1e12  # bytes a second


def budget_of(round_trip: float | None) -> ReceiveBudget:
    budget = ReceiveBudget(TOTAL, 4096, first=64 * 1024)
    if round_trip is not None:
        budget.round_trip.measured(round_trip)
    return budget


class Line:
    """A channel that a peer fills in one round trip after the other, and that is read at once."""

    def __init__(self, budget: ReceiveBudget, round_trip: float, *, size: int = LARGEST) -> None:
        self.window = ReceiveWindow(size, budget)
        self.window.start(0.0)
        self.now = 0.0
        self.round_trip = round_trip

    def run(self, rate: float, *, laps: int = 20) -> int:
        """Let the peer use all its credit in each of so many round trips, or what the line carries meanwhile."""
        for _ in range(laps):
            self.now += self.round_trip
            left = min(self.window.credit, int(rate * self.round_trip))
            while left > 0:
                size = min(PIECE, left, self.window.credit)
                self.window.arrived(size)
                self.window.consumed(size, self.now)
                left -= size
        return self.window.target


@pytest.mark.parametrize("round_trip", [0.02, 0.08, 0.3])
def test_a_window_grows_to_what_the_path_holds_with_room_to_spare(round_trip: float) -> None:
    product = 4 * MIB
    target = Line(budget_of(round_trip), round_trip).run(product / round_trip)
    assert 2 * product <= target <= 3 * product


def test_a_window_that_alone_limits_its_channel_doubles_in_each_round_trip() -> None:
    line = Line(budget_of(0.1), 0.1)
    line.run(FAST, laps=10)
    assert line.window.target == LARGEST


def test_no_window_exceeds_the_short_one_while_the_round_trip_is_unknown() -> None:
    line = Line(budget_of(None), 0.1)
    assert line.run(FAST) == SHORT_WINDOW
    assert line.window.budget is not None
    assert line.window.budget.round_trip.is_wanted


def test_no_window_exceeds_the_short_one_on_a_short_path() -> None:
    assert Line(budget_of(0.0005), 0.0005).run(500 * MIB, laps=200) == SHORT_WINDOW


def test_a_window_whose_largest_size_is_short_does_not_want_the_round_trip() -> None:
    line = Line(budget_of(None), 0.1, size=SHORT_WINDOW)
    line.run(FAST)
    assert line.window.target == SHORT_WINDOW
    assert line.window.budget is not None
    assert not line.window.budget.round_trip.is_wanted


def test_a_channel_with_little_traffic_does_not_want_the_round_trip() -> None:
    line = Line(budget_of(None), 0.1)
    for _ in range(100):
        line.run(100.0, laps=1)
    assert line.window.target < ASK_FROM
    assert line.window.budget is not None
    assert not line.window.budget.round_trip.is_wanted


def test_a_window_is_taken_back_from_a_channel_that_becomes_slow() -> None:
    line = Line(budget_of(0.1), 0.1)
    line.run(FAST)
    assert line.window.target == LARGEST
    assert line.run(1 * MIB, laps=600) == SHORT_WINDOW
    assert line.window.credit <= SHORT_WINDOW


def test_a_reader_that_stops_keeps_what_it_was_granted_and_gets_no_more() -> None:
    line = Line(budget_of(0.1), 0.1)
    line.run(FAST, laps=3)
    granted, budget = line.window.credit, line.window.budget
    assert budget is not None
    line.window.arrived(granted)
    assert (line.window.own, budget.used) == (granted, granted - budget.floor)


def test_a_stalled_reader_costs_the_others_no_more_than_its_own_window() -> None:
    budget = budget_of(0.1)
    stalled = Line(budget, 0.1)
    stalled.run(FAST, laps=2)
    stalled.window.arrived(stalled.window.credit)
    assert stalled.window.target > budget.first
    assert Line(budget, 0.1).run(FAST) == TOTAL // 2 - stalled.window.target


def test_a_window_above_the_equal_share_makes_room_for_those_below() -> None:
    budget = budget_of(0.1)
    first, second = Line(budget, 0.1), Line(budget, 0.1)
    first.run(FAST)
    for _ in range(20):
        first.run(FAST, laps=1)
        second.run(FAST, laps=1)
    assert (first.window.target, second.window.target) == (TOTAL // 4, TOTAL // 4)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_all_windows_together_stay_within_the_bound(count: int) -> None:
    budget = budget_of(0.1)
    lines = [Line(budget, 0.1) for _ in range(count)]
    for _ in range(30):
        for line in lines:
            line.run(FAST, laps=1)
    assert sum(line.window.credit for line in lines) <= TOTAL + count * budget.floor
    assert budget.grown_bytes == sum(line.window.target for line in lines if line.window.target > budget.first)
    for line in lines:
        line.window.retire()
    assert (budget.grown, budget.grown_bytes, budget.used, budget.windows) == (0, 0, 0, 0)


def test_a_large_window_is_renewed_a_quarter_at_a_time() -> None:
    line = Line(budget_of(0.1), 0.1)
    line.run(FAST)
    line.window.arrived(LARGEST)
    assert line.window.consumed(LARGEST // 4 - 1, line.now) == (0, 0)
    assert line.window.consumed(1, line.now) == (LARGEST // 4, 0)


# --- the round trip


def test_the_least_sample_is_the_round_trip() -> None:
    path = RoundTrip()
    for sample in (0.3, 0.1, 0.2):
        path.measured(sample)
    assert path.seconds == 0.1


def test_samples_that_the_windows_may_have_caused_do_not_make_the_path_longer() -> None:
    path = RoundTrip()
    path.measured(0.1)
    for _ in range(10 * LONGER_AFTER):
        path.measured(0.55)
    assert path.seconds == 0.1


def test_a_path_that_has_become_longer_is_believed_after_some_samples() -> None:
    path = RoundTrip()
    path.measured(0.1)
    seconds = []
    for sample in (0.9, 0.8, 0.85):
        path.measured(sample)
        seconds.append(path.seconds)
    assert seconds == [0.1, 0.1, 0.8]


def test_a_single_short_sample_interrupts_what_looks_like_a_longer_path() -> None:
    path = RoundTrip()
    path.measured(0.1)
    for sample in (0.9, 0.9, 0.2, 0.9, 0.9):
        path.measured(sample)
    assert path.seconds == 0.1


def test_a_ping_is_due_only_when_one_is_wanted_and_none_is_under_way() -> None:
    path = RoundTrip()
    assert not path.is_due(0.0)
    path.is_wanted = True
    assert path.is_due(0.0)
    path.asked(0.0)
    path.is_wanted = True
    assert not path.is_due(2 * PROBE_PAUSE)
    path.answered(0.25)
    assert path.seconds == 0.25


def test_pings_come_with_a_pause_between_them() -> None:
    path = RoundTrip()
    path.asked(10.0)
    path.answered(10.1)
    path.is_wanted = True
    assert not path.is_due(10.0 + PROBE_PAUSE - 0.01)
    assert path.is_due(10.0 + PROBE_PAUSE)


def test_an_answer_that_will_not_come_is_not_waited_for() -> None:
    path = RoundTrip()
    path.asked(0.0)
    path.gave_up()
    path.is_wanted = True
    assert path.is_due(PROBE_PAUSE)
    path.answered(PROBE_PAUSE)
    assert path.seconds is None
