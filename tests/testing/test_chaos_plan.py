"""A plan draws the same fate for the same seed, and each kind as often as it says."""

from __future__ import annotations

import attrs
import pytest

from muxkit.testing import ChaosPlan, Cut, Way


def test_fine_weather_cuts_nothing() -> None:
    assert {ChaosPlan().fate(1, number).cut_at for number in range(100)} == {None}


def test_the_same_seed_draws_the_same_fate() -> None:
    plan = ChaosPlan(cut_after=(0, 10**6), reset=0.3, stall=0.3, refuse=0.5)
    assert [plan.fate(1, number) for number in range(50)] == [plan.fate(1, number) for number in range(50)]
    assert [plan.fate(1, number) for number in range(50)] != [plan.fate(2, number) for number in range(50)]


def test_one_knob_does_not_turn_the_others() -> None:
    calm = ChaosPlan(cut_after=(0, 10**6), cut_share=0.5)
    rough = attrs.evolve(calm, reset=0.5, refuse=0.5, delay=1.0, jitter=1.0)
    for number in range(50):
        assert calm.fate(1, number).cut_at == rough.fate(1, number).cut_at
        assert calm.fate(1, number).way == rough.fate(1, number).way


def test_each_kind_of_cut_has_its_share() -> None:
    plan = ChaosPlan(cut_after=(10, 20), cut_share=0.8, reset=0.25, stall=0.25)
    fates = [plan.fate(1, number) for number in range(4000)]
    cut = [fate for fate in fates if fate.cut_at is not None]
    assert len(cut) == pytest.approx(3200, rel=0.05)
    for how, share in ((Cut.RESET, 0.25), (Cut.STALL, 0.25), (Cut.END, 0.5)):
        assert sum(fate.how is how for fate in cut) == pytest.approx(share * len(cut), rel=0.1)
    assert {fate.cut_at for fate in cut} == set(range(10, 21))
    assert {fate.way for fate in cut} == {Way.THERE, Way.BACK}
    assert {fate.stalled for fate in cut if fate.how is Cut.STALL} == {(Way.THERE,), (Way.BACK,), (Way.THERE, Way.BACK)}


def test_the_directions_to_count_in_can_be_chosen() -> None:
    plan = ChaosPlan(cut_after=(0, 10), cut_ways=(Way.BACK,))
    assert {plan.fate(1, number).way for number in range(50)} == {Way.BACK}


@pytest.mark.parametrize(
    "wrong",
    [
        {"reset": 1.1},
        {"stall": -0.1},
        {"reset": 0.6, "stall": 0.6},
        {"delay": -1.0},
        {"jitter": float("inf")},
        {"rate": 0.0},
        {"cut_after": (5, 4)},
        {"cut_after": (-1, 4)},
        {"buffer": 0},
        {"cut_ways": ()},
    ],
    ids=lambda wrong: "+".join(wrong),
)
def test_a_plan_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("cut_ways", "cut_ways|Length|length")):
        ChaosPlan(**wrong)  # type: ignore[arg-type]  # that is the point
