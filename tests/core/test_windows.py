"""Windows: what may be sent, what was allowed, what is granted next. The unit is the caller's."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import U64_MAX, Ceiling, Credit, ReceiveBudget, ReceiveWindow

# --- Credit


def test_credit_is_granted_and_spent() -> None:
    credit = Credit()
    credit.grant(5)
    credit.grant(5)
    credit.spend(7)
    assert credit.available == 3


def test_more_than_the_credit_cannot_be_spent() -> None:
    credit = Credit(2)
    with pytest.raises(LocalProtocolError, match="3 to send, 2 are granted"):
        credit.spend(3)
    assert credit.available == 2


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize(("available", "amount", "fits"), [(0, U64_MAX, True), (1, U64_MAX, False), (U64_MAX, 0, True)])
def test_credit_may_not_pass_its_cap(available: int, amount: int, fits: bool) -> None:
    credit = Credit(available)
    if fits:
        credit.grant(amount)
        assert credit.available == available + amount
    else:
        with pytest.raises(RemoteProtocolError, match=f"too much credit: {amount} on top of {available}"):
            credit.grant(amount)
        assert credit.available == available


@pytest.mark.requirement("R-16")
def test_the_cap_of_credit_belongs_to_the_protocol() -> None:
    with pytest.raises(RemoteProtocolError, match="is more than 2"):
        Credit(1).grant(2, cap=2)


# --- Ceiling


def test_a_ceiling_moves_with_the_acknowledgements() -> None:
    ceiling = Ceiling(10)
    ceiling.spend(10)
    assert ceiling.available == 0
    ceiling.acknowledge(4)
    assert ceiling.available == 4


def test_a_ceiling_may_change_its_size_and_an_old_acknowledgement_changes_nothing() -> None:
    ceiling = Ceiling(10)
    ceiling.spend(10)
    ceiling.acknowledge(10, size=2)
    ceiling.acknowledge(5, size=50)
    assert ceiling.available == 2


def test_a_ceiling_that_shrinks_leaves_no_negative_room() -> None:
    ceiling = Ceiling(10)
    ceiling.spend(10)
    ceiling.acknowledge(5, size=1)
    assert ceiling.available == 0


def test_nothing_goes_above_the_ceiling() -> None:
    with pytest.raises(LocalProtocolError, match="11 to send, room for 10"):
        Ceiling(10).spend(11)


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    with pytest.raises(RemoteProtocolError, match="invalid ack of 1: expected at most 0"):
        Ceiling(10).acknowledge(1)


# --- ReceiveWindow


NEITHER = 2.0  # s after the start: half a window consumed by then is neither fast nor slow


def window_of(size: int = 100, *, total: int = 1000, floor: int = 0) -> ReceiveWindow:
    return ReceiveWindow(size, ReceiveBudget(total, floor, first=100))


def used(window: ReceiveWindow) -> int:
    assert window.budget is not None
    return window.budget.used


def test_a_window_is_granted_whole_at_the_start() -> None:
    window = window_of()
    assert window.start(0.0) == 100
    assert (window.credit, used(window)) == (100, 100)


def test_grants_follow_consumption_half_a_window_at_a_time() -> None:
    window = window_of()
    window.start(0.0)
    window.arrived(100)
    assert window.consumed(49, NEITHER) == (0, 0)
    assert window.consumed(1, NEITHER) == (50, 0)
    assert (window.credit, window.held) == (50, 50)


def test_the_smallest_window_is_renewed_by_one() -> None:
    window = window_of(1)
    assert window.start(0.0) == 1
    window.arrived(1)
    assert window.consumed(1, NEITHER) == (1, 0)


def test_more_than_was_granted_is_a_violation() -> None:
    window = window_of()
    window.start(0.0)
    with pytest.raises(RemoteProtocolError, match="the peer sent 101 bytes: expected at most 100"):
        window.arrived(101)


@pytest.mark.parametrize("amount", [11, -1])
def test_more_than_came_cannot_be_consumed(amount: int) -> None:
    window = window_of()
    window.start(0.0)
    window.arrived(10)
    with pytest.raises(LocalProtocolError, match=f"{amount} bytes consumed: expected at most 10"):
        window.consumed(amount, NEITHER)
    assert window.held == 10


def test_a_window_by_hand_grants_nothing_by_itself() -> None:
    window = ReceiveWindow(0, ReceiveBudget(1000, 1, first=100))
    assert window.start(0.0) == 0
    window.grant(10)
    window.arrived(10)
    assert window.consumed(10, NEITHER) == (0, 0)
    assert window.budget is None


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("amount", [-1, U64_MAX])
def test_credit_by_hand_stays_within_64_bits(amount: int) -> None:
    window = ReceiveWindow()
    window.grant(1)
    with pytest.raises(LocalProtocolError, match=f"invalid credit of {amount}: with the 1 before"):
        window.grant(amount)
    assert (window.credit, window.by_hand) == (1, 1)


@pytest.mark.requirement("R-22")
def test_credit_by_hand_is_beside_the_window() -> None:
    window = window_of()
    window.start(0.0)
    window.grant(1000)
    window.arrived(1100)
    assert window.consumed(1000, NEITHER) == (0, 0)
    assert window.consumed(100, NEITHER) == (100, 0)
    assert used(window) == 100


@pytest.mark.requirement("R-22")
def test_loans_are_repaid_first() -> None:
    window = window_of()
    window.start(0.0)
    window.unfinished = 400
    assert window.shortfall() == 300
    window.lend(300)
    assert window.shortfall() == 0
    window.arrived(400)
    assert window.consumed(400, NEITHER) == (100, 300)
    assert (window.lent, used(window), window.credit) == (0, 100, 100)


def test_a_quiet_window_grants_nothing_more() -> None:
    window = window_of()
    window.start(0.0)
    window.arrived(100)
    window.quiet()
    assert window.consumed(100, NEITHER) == (0, 0)
    assert used(window) == 0


def test_a_retired_window_counts_what_is_held_until_it_is_consumed() -> None:
    window = window_of()
    assert window.budget is not None
    window.start(0.0)
    window.arrived(60)
    assert window.retire() == 0
    assert (used(window), window.budget.windows, window.credit) == (60, 0, 0)
    assert window.consumed(60, NEITHER) == (0, 0)
    assert used(window) == 0


@pytest.mark.requirement("R-22")
def test_a_retired_window_repays_the_loans_that_were_not_used() -> None:
    window = window_of()
    window.start(0.0)
    window.lend(300)
    window.grant(50)
    window.arrived(120)
    assert window.retire() == 180
    assert (window.lent, window.by_hand, window.own, used(window)) == (120, 0, 0, 0)
    assert window.consumed(120, NEITHER) == (0, 120)


def test_a_retired_window_by_hand_touches_no_budget() -> None:
    window = ReceiveWindow()
    window.grant(5)
    assert window.retire() == 0
    assert window.credit == 0


# --- growing


def test_a_window_begins_small_and_doubles_while_its_channel_is_busy() -> None:
    window = ReceiveWindow(1000, ReceiveBudget(10_000, 1, first=100))
    sizes = [window.start(0.0)]
    for turn in range(5):
        window.arrived(window.credit)
        window.consumed(window.held, 0.5 * turn)
        sizes.append(window.credit)
    assert sizes == [100, 200, 400, 800, 1000, 1000]


def test_a_window_that_is_consumed_slowly_shrinks_to_what_it_began_with() -> None:
    window = ReceiveWindow(1000, ReceiveBudget(10_000, 1, first=100))
    window.start(0.0)
    sizes = []
    for now in (0.5, 1.0, 1.5, 10.0, 20.0, 30.0, 40.0):
        window.arrived(window.credit)
        window.consumed(window.held, now)
        sizes.append(window.credit)
    assert sizes == [200, 400, 800, 400, 200, 100, 100]


# --- ReceiveBudget


@pytest.mark.requirement("R-03")
def test_first_grants_use_half_of_the_budget_and_then_the_floor() -> None:
    budget = ReceiveBudget(1000, 10, first=200)
    assert [ReceiveWindow(900, budget).start(0.0) for _ in range(4)] == [200, 200, 10, 10]
    assert ReceiveWindow(5, budget).start(0.0) == 5
    assert budget.used == 380


@pytest.mark.requirement("R-03")
def test_the_floor_of_each_window_is_beside_the_budget() -> None:
    budget = ReceiveBudget(1000, 10, first=10)
    windows = [ReceiveWindow(900, budget) for _ in range(1000)]
    assert sum(window.start(0.0) for window in windows) == 10_000
    assert budget.used == 0
    for window in windows:
        window.arrived(10)
        window.consumed(10, 0.1)
    assert min(window.credit for window in windows) == 10
    assert sum(window.credit for window in windows) == 10_000 + budget.used
    assert 0 < budget.used <= budget.total


@pytest.mark.requirement("R-03")
def test_a_window_at_the_floor_grows_from_there_while_it_is_busy() -> None:
    budget = ReceiveBudget(1000, 10, first=200)
    window = [ReceiveWindow(900, budget) for _ in range(4)][-1]
    for other in range(2):
        ReceiveWindow(900, budget).start(float(other))
    sizes = [window.start(0.0)]
    for turn in range(6):
        window.arrived(window.credit)
        window.consumed(window.held, 0.1 * turn)
        sizes.append(window.credit)
    assert sizes == [10, 20, 40, 80, 130, 320, 500]  # up to `first` out of the half that the others leave


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("now", [0.1, NEITHER, 100.0])
def test_a_word_now_and_then_does_not_make_a_window_grow(now: float) -> None:
    """Was: A word now and then on each of a thousand channels doubled their windows, so a busy channel had the smallest
    and cost four times as much.
    """
    budget = ReceiveBudget(64 * 1024, 4, first=64)
    windows = [ReceiveWindow(1024, budget) for _ in range(1000)]
    before = [window.start(0.0) for window in windows]
    for window in windows:
        window.arrived(1)
        window.consumed(1, now)
    assert [window.credit + 1 for window in windows] == before
    assert budget.grown == 0


def test_a_window_that_began_at_the_floor_gets_its_first_grant_when_there_is_room_whatever_its_pace() -> None:
    budget = ReceiveBudget(1000, 10, first=200)
    others = [ReceiveWindow(900, budget) for _ in range(2)]
    for other in others:
        other.start(0.0)
    window = ReceiveWindow(900, budget)
    assert window.start(0.0) == 10
    for other in others:
        other.retire()
    window.arrived(10)
    assert window.consumed(10, 100.0) == (200, 0)


def test_the_rest_of_a_first_grant_follows_what_was_consumed_first_and_is_no_growth() -> None:
    budget = ReceiveBudget(1000, 10, first=200)
    window = ReceiveWindow(900, budget)
    assert window.start(0.0, 50) == 50
    window.arrived(1)
    assert window.consumed(1, 0.1) == (151, 0)
    assert (window.credit, budget.grown) == (200, 0)


def test_a_slow_window_at_the_floor_stays_there() -> None:
    budget = ReceiveBudget(100, 4, first=64)
    ReceiveWindow(1024, budget).start(0.0)
    window = ReceiveWindow(1024, budget)
    assert window.start(0.0) == 4
    for turn in range(1, 5):
        window.arrived(4)
        window.consumed(4, 10.0 * turn)
        assert window.credit == 4


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-07")
@pytest.mark.parametrize("first", [None, 4])
@pytest.mark.parametrize("idle", [10, 1000, 100_000])
def test_idle_channels_do_not_take_the_window_of_a_busy_one(idle: int, first: int | None) -> None:
    """Was: Idle channels used up what all windows may hold; a bulk channel beside 64 of them fell to a tenth of its
    rate. The floors of ten thousand channels at rest used up what busy channels share.
    """
    budget = ReceiveBudget(64 * 1024, 4, first=64)
    for _ in range(idle):
        window = ReceiveWindow(1024, budget)
        window.start(0.0, first)
        window.arrived(1)
        window.consumed(1, 0.1)
    busy = ReceiveWindow(1024, budget)
    busy.start(0.0)
    for turn in range(20):
        busy.arrived(busy.credit)
        busy.consumed(busy.held, 0.01 * turn)
    assert busy.credit == 1024


@pytest.mark.requirement("R-03")
def test_busy_windows_share_the_other_half() -> None:
    budget = ReceiveBudget(8000, 10, first=100)
    windows = [ReceiveWindow(4000, budget) for _ in range(4)]
    for window in windows:
        window.start(0.0)
    for turn in range(20):
        for window in windows:
            window.arrived(window.credit)
            window.consumed(window.held, 0.01 * turn)
    assert [window.credit for window in windows] == [1000] * 4


@pytest.mark.requirement("R-03")
def test_a_window_that_is_gone_leaves_its_share_to_the_others() -> None:
    budget = ReceiveBudget(8000, 10, first=100)
    stays, goes = ReceiveWindow(4000, budget), ReceiveWindow(4000, budget)
    for window in (stays, goes):
        window.start(0.0)
    for turn in range(20):
        if turn == 10:
            goes.retire()
        for window in (stays, goes)[: 1 if turn >= 10 else 2]:
            window.arrived(window.credit)
            window.consumed(window.held, 0.01 * turn)
    assert (stays.credit, budget.grown) == (4000, 1)


class Windows(RuleBasedStateMachine):
    """Three windows on one budget and a peer that uses what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ReceiveBudget(300, 7, first=40)
        self.now = 0.0
        self.windows = [ReceiveWindow(size, self.budget) for size in (100, 250, 0)]
        self.granted = [window.start(0.0) for window in self.windows]
        self.came = [0, 0, 0]
        self.took = [0, 0, 0]
        self.loans = 0

    @rule(seconds=st.sampled_from([0.1, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(n=st.integers(0, 2), amount=st.integers(0, 300))
    def arrive(self, n: int, amount: int) -> None:
        amount = min(amount, self.windows[n].credit)
        self.windows[n].arrived(amount)
        self.came[n] += amount

    @rule(n=st.integers(0, 2), amount=st.integers(0, 300))
    def consume(self, n: int, amount: int) -> None:
        amount = min(amount, self.windows[n].held)
        granted, repaid = self.windows[n].consumed(amount, self.now)
        self.granted[n] += granted
        self.took[n] += amount
        self.loans -= repaid

    @rule(n=st.integers(0, 2), amount=st.integers(0, 50))
    def grant_by_hand(self, n: int, amount: int) -> None:
        self.windows[n].grant(amount)
        self.granted[n] += amount

    @rule(n=st.integers(0, 2), total=st.integers(1, 400))
    def begin_a_large_message(self, n: int, total: int) -> None:
        window = self.windows[n]
        window.unfinished = total
        need = window.shortfall()
        window.lend(need)
        window.unfinished = 0
        self.granted[n] += need
        self.loans += need

    @precondition(lambda self: self.budget.windows)
    @rule()
    def somebody_can_always_go_on(self) -> None:
        """Consumed to the end, an automatic window has credit: no channel starves."""
        for n, window in enumerate(self.windows[:2]):
            self.consume(n, window.held)
            assert window.credit > 0

    @invariant()
    def credit_is_conserved(self) -> None:
        for window, granted, came, took in zip(self.windows, self.granted, self.came, self.took, strict=True):
            assert granted == came + window.credit
            assert came == took + window.held
            assert window.own + window.lent + window.by_hand == window.credit + window.held
            assert min(window.own, window.lent, window.by_hand, window.credit, window.held) >= 0

    @invariant()
    def the_budget_is_the_sum(self) -> None:
        assert self.budget.used == sum(max(0, window.own - 7) for window in self.windows if window.budget is not None)
        assert self.budget.used <= self.budget.total
        grown = [window for window in self.windows if window.target > self.budget.first]
        assert self.budget.grown == len(grown)
        assert self.loans == sum(window.lent for window in self.windows)


TestWindows = Windows.TestCase
