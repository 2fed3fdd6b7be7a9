"""Each row is there once although driver, JVM and servers are killed. One run with three kills; the soak has many."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs
import pytest

if TYPE_CHECKING:
    from muxkit_bench.proof.data import Verdict
    from muxkit_bench.proof.run import Kill

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform == "win32", reason="it kills process groups and passes sockets on"),
]


@attrs.frozen
class Outcome:
    before_read: Kill
    mid_read: list[Kill]
    after_sink: Kill
    verdict: Verdict
    acknowledged: int


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The query is held at each moment until a process was killed there, so no time decides what is hit."""
    from muxkit_bench.proof.run import Plan, Proof

    plan = Plan(folder=tmp_path_factory.mktemp("kills"), count=2_000, streams=3, batch=2_000)
    with Proof(plan) as proof:
        proof.start_driver()
        proof.kill_driver("before-read")
        proof.start_driver()
        proof.hold("mid-read")
        proof.wait_held("mid-read")
        proof.kill_server(0, "mid-read")
        proof.kill_server(1, "mid-read")
        proof.release("mid-read")
        proof.kill_driver("after-sink")
        verdict = proof.finish()
        acknowledged = proof.acknowledged()
        first, *servers, last = proof.kills
        return Outcome(first, servers, last, verdict, acknowledged)


def test_a_driver_that_dies_between_its_log_and_the_read_reads_the_same_range_again(outcome: Outcome) -> None:
    kill = outcome.before_read
    assert (kill.planned, kill.committed) == (0, -1)
    assert outcome.verdict.is_right, str(outcome.verdict)


def test_servers_that_die_under_a_read_are_read_on_where_it_was(outcome: Outcome) -> None:
    assert [(kill.what, kill.planned, kill.committed) for kill in outcome.mid_read] == [
        ("server 0", 0, -1),
        ("server 1", 0, -1),
    ]
    assert outcome.verdict.is_right, str(outcome.verdict)


def test_a_driver_that_dies_behind_the_sink_writes_the_same_batch_again(outcome: Outcome) -> None:
    kill = outcome.after_sink
    assert kill.planned == kill.committed + 1
    assert outcome.verdict.is_right, str(outcome.verdict)
    assert (outcome.verdict.rows, outcome.acknowledged) == (6_000, 6_000)
