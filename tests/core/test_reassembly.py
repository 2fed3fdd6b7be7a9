"""Loans beyond the window: first come, first served, and whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muxkit.core import Reassembly


def test_a_loan_is_taken_out_of_what_is_left() -> None:
    loans: Reassembly[str] = Reassembly(100)
    assert loans.borrow("a", 60)
    assert loans.left == 40
    loans.repay(60)
    assert loans.left == 100


def test_who_asks_for_more_than_is_left_waits_and_gets_nothing_of_it() -> None:
    loans: Reassembly[str] = Reassembly(100)
    assert not loans.borrow("a", 101)
    assert loans.left == 100
    assert loans.waits("a")
    assert loans.waiting == 1
    assert loans.next_waiting() == "a"


@pytest.mark.requirement("R-22")
def test_nobody_overtakes_who_waits() -> None:
    loans: Reassembly[str] = Reassembly(100)
    loans.borrow("a", 101)
    assert not loans.borrow("b", 1)
    assert loans.next_waiting() == "a"


def test_who_asks_twice_keeps_his_place() -> None:
    loans: Reassembly[str] = Reassembly(100)
    loans.borrow("a", 101)
    loans.borrow("b", 1)
    loans.borrow("a", 1)
    assert loans.next_waiting() == "a"
    assert loans.waiting == 2


def test_the_first_in_line_is_served_when_it_is_there() -> None:
    loans: Reassembly[str] = Reassembly(100)
    loans.borrow("a", 100)
    loans.borrow("b", 50)
    assert not loans.serve("b", 50)
    loans.repay(50)
    assert loans.serve("b", 50)
    assert (loans.left, loans.waiting, loans.served) == (0, 0, 1)


def test_who_leaves_is_forgotten_and_who_never_waited_may_leave_too() -> None:
    loans: Reassembly[str] = Reassembly(100)
    loans.borrow("a", 101)
    loans.leave("a")
    loans.leave("b")
    assert loans.next_waiting() is None
    assert not loans.waits("a")


class Loans(RuleBasedStateMachine):
    """Borrowers who take, wait, repay and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.loans: Reassembly[int] = Reassembly(100)
        self.lent: dict[int, int] = {}
        self.line: list[int] = []

    @rule(who=st.integers(0, 5), amount=st.integers(1, 120))
    def borrow(self, who: int, amount: int) -> None:
        if who in self.line:
            return
        fits = not self.line and amount <= self.loans.left
        assert self.loans.borrow(who, amount) == fits
        if fits:
            self.lent[who] = self.lent.get(who, 0) + amount
        else:
            self.line.append(who)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def repay(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.lent)))
        self.loans.repay(self.lent.pop(who))

    @precondition(lambda self: self.line)
    @rule(amount=st.integers(0, 120))
    def serve(self, amount: int) -> None:
        who = self.line[0]
        assert self.loans.next_waiting() == who
        fits = amount <= self.loans.left
        assert self.loans.serve(who, amount) == fits
        if fits:
            self.lent[who] = self.lent.get(who, 0) + amount
            self.line.pop(0)

    @rule(who=st.integers(0, 5))
    def leave(self, who: int) -> None:
        self.loans.leave(who)
        if who in self.line:
            self.line.remove(who)

    @invariant()
    def what_is_left_and_what_is_lent_make_the_total(self) -> None:
        assert self.loans.left == 100 - sum(self.lent.values())
        assert self.loans.left >= 0
        assert self.loans.waiting == len(self.line)
        assert self.loans.next_waiting() == (self.line[0] if self.line else None)


TestLoans = Loans.TestCase
