"""A reader looks again before it sleeps only where that pays, lets other tasks run, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from muxkit.protocols import bpmux
from muxkit.runtime import Turns, turns
from muxkit.runtime.pumps import turns as turns_module
from muxkit.runtime.pumps.quota import cpu_quota
from muxkit.runtime.pumps.spin import MOST_SLEEPS, SHORT_SLEEP, Spin
from muxkit.runtime.pumps.turns import share_turns, untimed
from muxkit_adapters import memory

SECONDS = 1.0
LOOKS = 4  # in each spin of these tests


class Ticking:
    """A clock that moves on by a part of the spin with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += SECONDS / LOOKS
        return self.now


def spin() -> Spin:
    made = Spin(Turns(Ticking(), spin=SECONDS))
    made.slept(0.0)
    return made


async def test_it_is_due_after_a_short_sleep_only() -> None:
    made = Spin(Turns(Ticking(), spin=SECONDS))
    assert not made.is_due()
    for seconds, is_due in ((0.0, True), (SHORT_SLEEP * SECONDS, False), (SECONDS, True)):
        made.slept(seconds)
        assert made.is_due() is is_due


async def test_without_time_to_spin_it_is_never_due() -> None:
    made = Spin(Turns(Ticking(), spin=0.0))
    made.slept(0.0)
    assert not made.is_due()


async def test_it_looks_until_something_is_there() -> None:
    made, looks = spin(), iter([False, False, True])
    assert await made.until(lambda: next(looks))
    assert made.is_due()


async def test_it_gives_up_when_the_time_is_over() -> None:
    made, looks = spin(), 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    assert not await made.until(look)
    assert looks == LOOKS


async def test_each_spin_in_vain_doubles_the_sleeps_until_the_next() -> None:
    made, sleeps = spin(), []
    for _ in range(12):
        assert not await made.until(lambda: False)
        sleeps.append(0)
        while not made.is_due():
            made.slept(0.0)
            sleeps[-1] += 1
    assert sleeps == [min(2**n, MOST_SLEEPS) for n in range(12)]
    assert await made.until(lambda: True)
    assert not await made.until(lambda: False)
    made.slept(0.0)
    assert made.is_due()


async def test_other_tasks_run_before_each_look() -> None:
    made, ran, looked = spin(), 0, list[int]()

    async def other() -> None:
        nonlocal ran
        while True:
            ran += 1
            await trio.lowlevel.checkpoint()

    def look() -> bool:
        looked.append(ran)
        return False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await made.until(look)
        nursery.cancel_scope.cancel()
    assert len(looked) == LOOKS
    assert all(times >= passes for passes, times in enumerate(looked))  # the order within a pass is random


async def test_one_reader_of_a_run_spins_at_a_time() -> None:
    shared = Turns(Ticking(), spin=SECONDS)
    one, other = Spin(shared), Spin(shared)
    for made in (one, other):
        made.slept(0.0)
    assert await one.until(lambda: not other.is_due())
    assert other.is_due()


async def test_a_cancelled_spin_has_read_nothing_and_lets_others_spin() -> None:
    made, has_looked = spin(), False

    def look() -> bool:
        nonlocal has_looked
        has_looked = True
        return True

    with trio.CancelScope() as scope:
        scope.cancel()
        await made.until(look)
    assert scope.cancelled_caught
    assert not has_looked
    assert made.is_due()


@pytest.mark.parametrize("passes", [0, 20], ids=["for a receiver", "by the reader"])
async def test_messages_come_in_order_while_a_reader_spins(passes: int) -> None:
    """The clock stands, so that no spin is in vain: it ends with what it waits for, or with the connection."""
    share_turns(Turns(lambda: 0.0, spin=SECONDS))
    here, there = memory.pair()
    async with bpmux.session(here) as ours, bpmux.session(there) as theirs, trio.open_nursery() as nursery:

        async def echo() -> None:
            async with await anext(theirs.incoming()) as channel:
                async for message in channel:
                    await channel.send(message)

        nursery.start_soon(echo)
        async with ours.open() as channel:
            for number in range(100):
                await channel.send(str(number).encode())
                for _ in range(passes):  # in which the answer is read, before a task waits for it
                    await trio.lowlevel.checkpoint()
                assert await channel.receive() == str(number).encode()


def test_the_environment_says_for_how_long() -> None:
    program = "import trio, muxkit.runtime as r\nasync def main(): print(round(r.turns().spin * 1e6))\ntrio.run(main)"

    def run(**told: str) -> subprocess.CompletedProcess[str]:
        rest = {name: value for name, value in os.environ.items() if name != "MUXKIT_SPIN"}
        return subprocess.run(
            [sys.executable, "-c", program], env=rest | told, capture_output=True, text=True, check=False
        )

    assert run().stdout.strip() == ("200" if cpu_quota() is None else "0")
    assert run(MUXKIT_SPIN="50").stdout.strip() == "50"
    assert run(MUXKIT_SPIN="0").stdout.strip() == "0"
    assert "MUXKIT_SPIN='soon': must be a number of microseconds" in run(MUXKIT_SPIN="soon").stderr


def cgroup(root: Path, line: str, **files: str) -> Path:
    """Lay out the files that Linux shows to a process in the cgroup that `line` names, as `folder__file=text`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_smallest_quota_of_the_enclosing_cgroups_counts(tmp_path: Path) -> None:
    files = {"app__cpu_max": "150000 100000\n", "app__worker__cpu_max": "max 100000\n"}
    assert cpu_quota(cgroup(tmp_path, "0::/app/worker\n", **files)) == 1.5


def test_a_container_that_sees_the_path_of_its_host_finds_its_own_quota(tmp_path: Path) -> None:
    assert cpu_quota(cgroup(tmp_path, "0::/kubepods/pod7\n", cpu_max="50000 100000\n")) == 0.5


def test_the_quota_of_cgroup_version_1_is_found(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/app\n4:memory:/app\n0::/\n"
    files = {"cpu,cpuacct__app__cfs_quota_us": "200000\n", "cpu,cpuacct__app__cfs_period_us": "100000\n"}
    assert cpu_quota(cgroup(tmp_path, lines, **files)) == 2.0


@pytest.mark.parametrize("line", ["0::/app\n", "5:cpu:/app\n0::/\n", ""])
def test_a_group_without_a_limit_has_no_quota(tmp_path: Path, line: str) -> None:
    files = {"app__cpu_max": "max 100000\n", "cpu__app__cfs_quota_us": "-1\n", "cpu__app__cfs_period_us": "100000\n"}
    assert cpu_quota(cgroup(tmp_path, line, **files)) is None


def test_a_machine_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_readers_do_not_spin_under_a_quota_unless_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "cpu_quota", lambda: 1.5)
    monkeypatch.delenv("MUXKIT_SPIN", raising=False)
    assert turns_module.usual_spin() == 0.0
    monkeypatch.setenv("MUXKIT_SPIN", "50")
    assert turns_module.usual_spin() == pytest.approx(50e-6)


def test_a_run_that_can_be_repeated_exactly_has_no_spin() -> None:
    async def main() -> float:
        return turns().spin

    with untimed():
        assert trio.run(partial(main)) == 0.0
