"""Do all take their turns in each round, in an order that only the seed decides?"""

from __future__ import annotations

import sys

import attrs
import pytest
import trio

from muxkit.cli._bench._cells import cells
from muxkit.cli._bench._contestants import Contestant
from muxkit.cli._bench._rounds import Plan, Rounds

# Answers at once: what it would have measured does not matter here.
PROGRAM = """
import json, sys
print(json.dumps({"ready": "here"}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if sys.argv[1] == "fails": print(json.dumps({"failed": "it will not"}), flush=True)
    if sys.argv[1] == "dies": sys.exit(3)
    units = task["count"] + 1.0
    print(json.dumps(dict(count=7, units=units, seconds=1.0, client_cpu=1, server_cpu=1, also={})), flush=True)
"""


def contestant(name: str, how: str = "works") -> Contestant:
    return Contestant(
        name=name, title="", command=[sys.executable, "-I", "-S", "-c", PROGRAM, how], address=name, baseline="raw tcp"
    )


def plan(*contestants: Contestant, rounds: int = 4, seed: int = 1) -> Plan:
    return Plan(cells=cells(("rtt", "storm")), contestants=contestants, rounds=rounds, seconds=0.1, seed=seed, cores=[])


def run(plan: Plan) -> Rounds:
    rounds = Rounds(plan, lambda number, cell, peer: None)
    trio.run(rounds.run)
    return rounds


def turns(rounds: Rounds, number: int) -> list[tuple[str, str]]:
    return [(one.cell, one.peer) for one in rounds.passes if one.round == number]


@pytest.fixture(scope="module")
def four_rounds() -> Rounds:
    return run(plan(*(contestant(name) for name in "abc")))


def test_everybody_does_each_cell_before_the_next_one(four_rounds: Rounds) -> None:
    for number in range(1, 5):
        done = turns(four_rounds, number)
        assert [cell for cell, _ in done] == ["rtt/1"] * 3 + ["storm/100"] * 3 + ["storm/1000"] * 3
        assert sorted(peer for _, peer in done[:3]) == ["a", "b", "c"]


def test_nobody_always_comes_first(four_rounds: Rounds) -> None:
    assert len({turns(four_rounds, number)[0][1] for number in range(1, 5)}) > 1


def test_the_same_seed_gives_the_same_order(four_rounds: Rounds) -> None:
    again = run(plan(*(contestant(name) for name in "abc")))
    assert [(one.cell, one.peer) for one in again.passes] == [(one.cell, one.peer) for one in four_rounds.passes]


def test_the_first_round_finds_how_much_to_do_in_the_others(four_rounds: Rounds) -> None:
    assert {one.units for one in four_rounds.passes if one.round == 1} == {1.0}
    assert {one.units for one in four_rounds.passes if one.round > 1} == {8.0}


@pytest.mark.parametrize(("how", "said"), [("fails", "it will not"), ("dies", "ended without an answer")])
def test_who_fails_is_left_out_from_then_on(how: str, said: str) -> None:
    rounds = run(plan(contestant("good"), contestant("bad", how), rounds=2))
    (failure,) = rounds.failures
    assert (failure.round, failure.cell, failure.peer) == (1, "rtt/1", "bad")
    assert said in failure.sentence
    assert len([one for one in rounds.passes if one.peer == "good"]) == 6
    assert not [one for one in rounds.passes if one.peer == "bad"]


def test_who_cannot_be_started_is_left_out() -> None:
    nowhere = attrs.evolve(contestant("nowhere"), command=["/does/not/exist"])
    rounds = run(plan(contestant("good"), nowhere, rounds=1))
    assert [failure.peer for failure in rounds.failures] == ["nowhere"]
    assert len(rounds.passes) == 3
