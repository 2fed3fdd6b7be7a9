"""Plans of faults, and `explore`, which finds one that breaks a program and makes it small."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import muxkit
from muxkit.testing import (
    Cut,
    Exploration,
    Fault,
    Plan,
    SimNetwork,
    SimWeather,
    Stuck,
    Wake,
    determined,
    explore,
    run_plan,
)

LOSSES = (muxkit.LinkLost, OSError)
PLAN = """\
muxkit plan 1, seed 17
weather delay=0.01 loss=0.05 splits=False
at 1.25 delay client > server by 0.4 for 2
at 2 throttle server > client to 1000 for 3.5
at 3 cut client - server reset
at 4 partition client - server for 5
wake 3 by 7
wake 142 by 3"""


# ---------------------------------------------------------------------------- plans as text


def test_a_plan_is_a_text_that_reads_back() -> None:
    plan = Plan.parse(PLAN)
    assert str(plan) == PLAN
    assert plan.seed == 17
    assert plan.weather == SimWeather(delay=0.01, loss=0.05, splits=False)
    assert plan.faults[0] == Fault(at=1.25, what="delay", source="client", target="server", amount=0.4, seconds=2.0)
    assert plan.faults[2] == Fault(at=3.0, what="cut", source="client", target="server", both_ways=True, how=Cut.RESET)
    assert plan.wakes == (Wake(3, 7), Wake(142, 3))


def test_empty_lines_and_comments_of_a_plan_are_left_out() -> None:
    text = PLAN.replace("wake 3 by 7", "\n  # found in July\nwake 3 by 7  # this one")
    assert Plan.parse(text) == Plan.parse(PLAN)


@given(st.integers(0, 1 << 40), st.floats(0.0, 1e6), st.integers(0, 20))
def test_every_plan_that_is_drawn_reads_back(seed: int, length: float, most: int) -> None:
    weather = SimWeather(delay=0.3, rate=1234.5, queue=7)
    plan = Plan.draw(
        seed,
        routes=[("a", "b"), ("b", "a")],
        length=length,
        weather=weather,
        most=most,
        passes=500,
        moments=[length / 3, length / 2],
    )
    assert Plan.parse(str(plan)) == plan
    assert len(plan.faults) <= most


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "begins with the line 'muxkit plan 1, seed N'"),
        ("muxkit plan 2, seed 1", "begins with the line"),
        ("muxkit plan 1, seed 1\nat 3 explode a > b", "'at 3 explode a > b' is no event of a plan"),
        ("muxkit plan 1, seed 1\nat 3 partition a > b", "is no event of a plan"),
        ("muxkit plan 1, seed 1\nat 3 cut a - b softly", "'softly' is not a valid Cut"),
        ("muxkit plan 1, seed 1\nweather rain=1", "there is no weather 'rain'; there are: delay"),
    ],
)
def test_a_text_that_is_no_plan_is_refused_with_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Plan.parse(text)


# ---------------------------------------------------------------------------- carrying them out


async def wait(seconds: float, network: SimNetwork) -> None:
    network.route("a", "b")
    await trio.sleep(seconds)


def test_faults_come_and_go_when_the_plan_says() -> None:
    plan = """
        muxkit plan 1, seed 0
        at 1 delay a > b by 0.5 for 4
        at 2 delay a > b by 0.25 for 1
        at 6 partition a - b for 2
        at 9 throttle b > a to 100 for 1
    """
    run = run_plan(partial(wait, 20.0), plan)
    assert run.error is None
    assert [str(event).split("  ")[-1].strip() for event in run.log if event.what != "cut"] != []
    assert [(event.at, event.what, event.source, event.detail) for event in run.log] == [
        (1.0, "delay", "a", "0.5 s more"),
        (2.0, "delay", "a", "0.75 s more"),
        (3.0, "delay", "a", "0.5 s more"),
        (5.0, "delay", "a", "0 s more"),
        (6.0, "partition", "a", ""),
        (6.0, "partition", "b", ""),
        (8.0, "heal", "a", ""),
        (8.0, "heal", "b", ""),
        (9.0, "throttle", "b", "100 bytes/s"),
        (10.0, "throttle", "b", "off"),
    ]


def test_a_run_ends_with_its_program_and_not_with_its_plan() -> None:
    run = run_plan(partial(wait, 2.0), "muxkit plan 1, seed 0\nat 1000 cut a - b reset")
    assert (run.length, run.error) == (2.0, None)


def test_a_program_that_is_stuck_has_failed() -> None:
    async def program(network: SimNetwork) -> None:
        await trio.sleep_forever()

    run = run_plan(program, Plan(), within=50)
    assert isinstance(run.error, Stuck)
    assert run.length == 50.0
    with pytest.raises(Stuck, match="not done after 50 s of virtual time") as caught:
        run.check()
    assert "under the plan\nmuxkit plan 1, seed 0" in caught.value.__notes__[0]


def test_an_expected_error_is_no_failure_and_another_one_is() -> None:
    async def program(network: SimNetwork) -> None:
        raise ExceptionGroup("both", [OSError("the line"), KeyError("the bug")])

    async def fine(network: SimNetwork) -> None:
        raise ExceptionGroup("both", [OSError("the line"), ConnectionResetError("the line")])

    assert run_plan(program, Plan(), expected=OSError).error is not None
    assert run_plan(fine, Plan(), expected=OSError).error is None


# ---------------------------------------------------------------------------- the order of tasks


async def racing(network: SimNetwork) -> None:
    """A bug that only the order of tasks brings out: the first worker must be the first to write."""
    written: list[int] = []
    start = trio.Event()

    async def work(number: int) -> None:
        await start.wait()
        written.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(work, number)
        await trio.testing.wait_all_tasks_blocked()
        start.set()
    assert written[0] == 0, f"worker {written[0]} was first"


def test_a_bug_in_the_order_of_tasks_is_found_and_is_one_reordered_pass() -> None:
    found = explore(racing, seeds=range(50))
    assert found.plan is not None
    assert found.plan.faults == ()
    assert len(found.plan.wakes) == 1
    assert found.is_exact
    assert run_plan(racing, Plan()).error is None
    with pytest.raises(AssertionError, match="another order"):
        found.check()


def test_without_reordering_there_is_nothing_to_find() -> None:
    assert explore(racing, seeds=range(20), kinds=("delay", "cut")).plan is None


# ---------------------------------------------------------------------------- a seeded bug


@attrs.define
class Shop:
    """Clients take what they saw a moment ago: two of them may take the last one."""

    stock: int = 1
    sold: int = 0

    async def serve(self, channel: muxkit.Channel) -> None:
        async for message in channel:
            if message == b"buy":
                self.sold += 1
                self.stock -= 1
            await channel.send(b"%d" % self.stock)


async def shopping(network: SimNetwork) -> None:
    shop = Shop()

    async def buy(host: str, after: float) -> None:
        await trio.sleep(after)
        async with muxkit.connect(f"bpmux+sim://{host}@shop") as session, session.open() as channel:
            await channel.send(b"look")
            if int(await channel.receive()):
                await channel.send(b"buy")
                await channel.receive()

    async with muxkit.open_server(shop.serve, "bpmux+sim://shop"), trio.open_nursery() as nursery:
        nursery.start_soon(buy, "alice", 0.0)
        nursery.start_soon(buy, "bob", 1.0)
    if shop.sold > 1:
        raise AssertionError(f"{shop.sold} were sold, of one")


def found_while_shopping() -> Exploration:
    return explore(shopping, seeds=range(600, 700), expected=LOSSES)


def test_a_seeded_bug_is_found_and_its_plan_is_one_step() -> None:
    found = found_while_shopping()
    assert found.plan is not None
    assert found.drawn is not None
    assert len(found.plan.events) == 1
    assert len(found.drawn.events) >= 5
    assert found.is_exact
    text = str(found)
    assert "AssertionError: 2 were sold, of one" in text
    assert "made 1:\n  1. at " in text
    assert str(found.plan.faults[0]) in text
    with pytest.raises(AssertionError, match="2 were sold") as caught:
        found.check()
    assert isinstance(caught.value.__cause__, AssertionError)


def test_the_text_of_a_plan_repeats_the_failure_exactly_also_in_another_process() -> None:
    found = found_while_shopping()
    assert found.failure is not None
    again = run_plan(shopping, str(found.plan))
    assert again.fingerprint == found.failure.fingerprint
    assert again.log == found.failure.log
    code = (
        "from muxkit.testing import run_plan; from tests.testing.test_explore import shopping\n"
        f"run = run_plan(shopping, '''{found.plan}'''); print(run.error, run.fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split("\n")[0], done.stderr) == (f"{again.error} {again.fingerprint}", "")


def test_the_same_seeds_find_the_same_plan() -> None:
    once, again = found_while_shopping(), found_while_shopping()
    assert (once.seed, once.plan, once.drawn) == (again.seed, again.plan, again.drawn)


def test_a_program_that_fails_without_faults_needs_no_plan() -> None:
    async def program(network: SimNetwork) -> None:
        raise RuntimeError("always")

    found = explore(program)
    assert (found.plan, found.tried) == (Plan(weather=SimWeather(delay=0.01)).with_events([]), 1)
    assert "1. nothing: it fails without any fault" in str(found)


def test_a_program_without_a_bug_is_said_to_have_passed() -> None:
    found = explore(partial(wait, 1.0), seeds=range(7))
    assert str(found).startswith("no failure under 7 seeds (8 runs in ")
    found.check()


def test_the_runs_that_may_be_spent_are_not_exceeded() -> None:
    found = explore(shopping, seeds=range(600, 700), expected=LOSSES, shrink=3)
    assert found.plan is not None
    assert found.runs <= 1 + found.tried + 3 + 2


# ---------------------------------------------------------------------------- what is put back


def test_what_a_run_decides_is_put_back_afterwards() -> None:
    import os
    import random
    import uuid

    from trio._core import _run

    before = (os.urandom, vars(random)["_urandom"], vars(_run)["_r"], random.getstate())
    with determined(3):
        first = (uuid.uuid4(), random.random())
    with determined(3):
        second = (uuid.uuid4(), random.random())
    assert first == second
    assert (os.urandom, vars(random)["_urandom"], vars(_run)["_r"], random.getstate()) == before
    assert uuid.uuid4() != uuid.uuid4()
