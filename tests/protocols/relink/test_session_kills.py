"""What is left of a link when one of its processes is killed; real processes, killed by their number."""

from __future__ import annotations

import random

import pytest

from tests.soak.relink_kills import Figures, lose_the_queue, lose_the_worker, survive


@pytest.mark.requirement("R-51")
@pytest.mark.seeds(1, soak=20)
def test_every_job_is_done_once_though_what_carries_the_connection_is_killed(seed: int) -> None:
    figures = Figures()
    survive(figures, random.Random(seed), jobs=60, kills=3)
    assert (figures.wrong, figures.kills, figures.jobs) == ([], 3, 60)
    assert figures.refused == 9
    assert figures.connections >= 4


@pytest.mark.clause("relink-H26", "relink-H34")
@pytest.mark.requirement("R-39")
@pytest.mark.seeds(1, soak=20)
def test_a_connector_is_told_when_its_listener_was_killed_and_goes_on_with_the_next(seed: int) -> None:
    figures = Figures()
    lose_the_queue(figures, random.Random(seed))
    assert figures.wrong == []


@pytest.mark.requirement("R-01", "R-39")
@pytest.mark.seeds(1, soak=20)
def test_a_listener_gives_the_link_of_a_killed_connector_up_and_says_so(seed: int) -> None:
    figures = Figures()
    lose_the_worker(figures, random.Random(seed))
    assert figures.wrong == []
