"""All contestants take turns in each round, in an order that the seed decides, until the run ends or is stopped."""

from __future__ import annotations

import io
import signal
import sys
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from rich.console import Console

from muxkit_bench.contestants.contestant import Contestant
from muxkit_bench.run.cells import cells
from muxkit_bench.run.measure import measure
from muxkit_bench.run.rounds import Plan, Rounds

if TYPE_CHECKING:
    from pathlib import Path

    from muxkit_bench.report.results import Report

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


# ---------------------------------------------------------------------------- cut short

# Ends the run itself, in the round after those that it is told; and leaves a mark if it is let go before that.
STOPPER = """
import json, os, pathlib, signal, sys
role, folder, rounds, number = sys.argv[-2], pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print(json.dumps({"ready": "here"}), flush=True)
for line in sys.stdin:
    if json.loads(line)["job"] == "storm":
        if len([*folder.glob("round*")]) == rounds:
            os.kill(os.getppid(), number)
            for line in sys.stdin: pass
            break
        (folder / f"round{os.getpid()}").touch()
    print(json.dumps(dict(count=7, units=1, seconds=1.0, client_cpu=1, server_cpu=1, also={})), flush=True)
(folder / f"{role}{os.getpid()}").touch()
"""


def stopped_after(rounds: int, number: signal.Signals, folder: Path) -> tuple[Report | None, signal.Signals | None]:
    stopper = attrs.evolve(
        contestant("stopper"),
        command=[sys.executable, "-I", "-S", "-c", STOPPER, str(folder), str(rounds), str(int(number))],
    )
    asked = Plan(
        cells=[cell for cell in cells(("rtt", "storm")) if cell.channels <= 100],
        contestants=[contestant("good"), stopper],
        rounds=4,
        seconds=0.1,
        seed=1,
        cores=[],
    )
    return measure(asked, ["somebody"], Console(file=io.StringIO()))


needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_cut_short_has_its_complete_rounds_only(number: signal.Signals, tmp_path: Path) -> None:
    report, stopped = stopped_after(2, number, tmp_path)
    assert stopped is number
    assert report is not None
    assert report.rounds == 2
    assert {one.round for one in report.passes} == {1, 2}
    assert len(report.passes) == 8
    assert report.left_out == ["somebody", "the rounds from 3 to 4: the run was cut short"]


@needs_signals
def test_a_run_without_a_complete_round_has_nothing_to_show_and_lets_no_process_say_more(tmp_path: Path) -> None:
    assert stopped_after(0, signal.SIGTERM, tmp_path) == (None, signal.SIGTERM)
    assert [*tmp_path.iterdir()] == []
