"""`muxkit fleet` lists, runs and replays."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from muxkit.cli.terminal import CommandFailed, Exit
from muxkit_bench.fleet import named_simulations, simulate
from muxkit_bench.fleet_command import fleet


def run(*arguments: str) -> Result:
    return CliRunner().invoke(fleet, list(arguments), standalone_mode=False)


def test_the_simulations_are_listed_with_what_they_do() -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*named_simulations()]
    assert all(len(line.split()) > 3 for line in lines)


def test_a_range_that_goes_well_ends_with_0() -> None:
    done = run("run", "bpmux", "0-9")
    assert done.return_value == Exit.OK
    assert "10 seeds" in done.stdout
    assert "0 failed" in done.stdout


def test_each_seed_that_fails_is_told_with_the_command_that_replays_it() -> None:
    done = run("run", "builtins:chr", "1114110-1114113")
    assert done.return_value == Exit.FAILED
    assert "again: muxkit fleet replay builtins:chr 1114112" in done.stdout
    assert "2 failed" in done.stdout


def test_a_seed_is_replayed() -> None:
    """Was: "34 messages over 28 connections, a5538840", without a word on what ran and whether it went well."""
    assert run("replay", "e3x", "4").stdout.strip() == f"e3x, seed 4: ok: {simulate('e3x', 4).summary}"
    assert "a digest of the run" in run("replay", "--help").stdout


def test_a_seed_that_fails_is_replayed_with_its_trace() -> None:
    done = run("replay", "math:isqrt", "--", "-4")
    assert isinstance(done.exception, CommandFailed)
    assert "ValueError" in done.exception.sentence
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["run", "unheard-of", "1"], ["run", "bpmux", "9-1"], ["replay", "bpmux", "x"]], ids=" ".join
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(fleet, arguments).exit_code == 2
