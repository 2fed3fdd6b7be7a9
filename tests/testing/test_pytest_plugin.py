"""The pytest plugin, in suites of their own, which pytest runs as it would run those of a user."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import muxkit.testing
from muxkit.protocols import aqueduct, bpmux, e3x, relink, yamux

pytest_plugins = ["pytester"]

# pytester forgets the modules that a suite imports, and their classes would then exist twice in this process. So import
# what the suites use before they do.
IMPORTED = [
    getattr(package, name)
    for package in (muxkit, muxkit.testing, aqueduct, bpmux, e3x, relink, yamux)
    for name in vars(package)["__all__"]
]

HEAD = """
import time
import pytest
import trio
import muxkit
from muxkit.testing import SimWeather

async def echo(channel):
    async for message in channel:
        await channel.send(message)

async def ask(channel, message=b"tea"):
    await channel.send(message)
    assert await channel.receive() == message
"""

TRIO_MODE = "[pytest]\ntrio_mode = true\nfilterwarnings = error\n"
STRICT = "[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n"


def suite(pytester: pytest.Pytester, code: str, *arguments: str, ini: str = TRIO_MODE) -> pytest.RunResult:
    pytester.makefile(".ini", pytest=ini)
    pytester.makepyfile(test_it=HEAD + code)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


# ---------------------------------------------------------------------------- the clock

FOR_MINUTES = """
async def test_minutes_pass_in_a_moment({arguments}):
    server = await muxkit_server(echo)
    async with muxkit.connect(server.url) as session, session.open() as channel:
        began, really = trio.current_time(), time.monotonic()
        for _ in range(10):
            await ask(channel)
            await trio.sleep(60)
        assert trio.current_time() - began > 600
        assert time.monotonic() - really < 60
"""


@pytest.mark.parametrize("ini", [TRIO_MODE, STRICT], ids=["trio_mode", "strict"])
@pytest.mark.parametrize("arguments", ["muxkit_server", "muxkit_server, autojump_clock"])
def test_minutes_pass_in_a_moment_with_and_without_the_clock_named(
    pytester: pytest.Pytester, arguments: str, ini: str
) -> None:
    suite(pytester, FOR_MINUTES.format(arguments=arguments), ini=ini).assert_outcomes(passed=1)


def test_a_clock_that_only_a_fixture_names_is_the_one_that_runs(pytester: pytest.Pytester) -> None:
    code = """
@pytest.fixture
async def later(autojump_clock):
    yield autojump_clock

async def test_the_clock_of_a_fixture(later, weather):
    assert trio.lowlevel.current_clock() is later
    await trio.sleep(600)
"""
    suite(pytester, code).assert_outcomes(passed=1)


def test_a_run_in_real_time_has_to_be_asked_for(pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.muxkit(clock="real")
async def test_really(weather):
    assert not isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
"""
    suite(pytester, "import trio.testing\n" + code).assert_outcomes(passed=1)


# ---------------------------------------------------------------------------- the fixtures


def test_a_pair_is_two_sessions_of_each_protocol(pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.muxkit(protocol=["bpmux", "relink", "aqueduct", "e3x", "yamux"])
async def test_pair(muxkit_pair, muxkit_protocol):
    client, server = muxkit_pair
    assert client.info.protocol == server.info.protocol == muxkit_protocol
    async with client.open("tea") as channel:
        await channel.send(b"hello")
        async for came in server.incoming():
            assert await came.receive() == b"hello"
            await came.send(b"and back")
            break
        assert await channel.receive() == b"and back"
"""
    suite(pytester, code).assert_outcomes(passed=5)


def test_a_pair_may_be_cut(pytester: pytest.Pytester) -> None:
    code = """
async def test_cut(muxkit_pair, weather):
    client, _ = muxkit_pair
    with pytest.raises(muxkit.LinkLost):
        async with client.open() as channel:
            assert weather.cut() == 1
            await channel.receive()
"""
    suite(pytester, code).assert_outcomes(passed=1)


def test_a_mark_or_a_parametrisation_chooses_protocol_weather_and_seed(pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.muxkit(protocol=["bpmux", "e3x"], weather=[SimWeather(delay=0.1), SimWeather(delay=2.0)], seeds=range(3))
async def test_by_mark(muxkit_server, weather, muxkit_protocol):
    server = await muxkit_server(echo)
    assert server.url == f"{muxkit_protocol}+sim://server"
    assert weather.seed in range(3)
    async with muxkit.connect(server.url) as session, session.open() as channel:
        began = trio.current_time()
        await ask(channel)
        assert trio.current_time() - began >= 2 * weather.weather.delay

@pytest.mark.parametrize("muxkit_protocol", ["relink", "aqueduct"])
@pytest.mark.parametrize("muxkit_seed", [5, 6], indirect=True)
async def test_by_parametrisation(muxkit_server, weather, muxkit_protocol):
    server = await muxkit_server(echo, "shop")
    assert server.url == f"{muxkit_protocol}+sim://shop"
    assert weather.seed in (5, 6)
"""
    suite(pytester, code).assert_outcomes(passed=12 + 4)


def test_chaos_comes_over_a_program_and_is_that_of_the_seed(pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.muxkit(seeds=range(5), faults=6)
async def test_all_arrives(muxkit_server, chaos, muxkit_seed):
    server = await muxkit_server(echo)
    got = 0
    async with muxkit.reconnecting(server.url) as sessions:
        async for session in sessions:
            try:
                async with session.open() as channel:
                    while got < 40:
                        await ask(channel)
                        got += 1
                        await trio.sleep(0.5)
                break
            except muxkit.LinkLost:
                pass
    assert chaos.done == [*chaos.plan.faults]
    assert chaos.plan.seed == muxkit_seed

@pytest.mark.muxkit(faults="muxkit plan 1, seed 0\\nat 3 cut client - server reset")
async def test_a_plan_of_ones_own(muxkit_pair, chaos):
    client, _ = muxkit_pair
    began = trio.current_time()
    with pytest.raises(muxkit.LinkLost):
        async with client.open() as channel:
            await channel.receive()
    assert 2.5 < trio.current_time() - began < 3.5
"""
    suite(pytester, code).assert_outcomes(passed=6)


# ---------------------------------------------------------------------------- failures

RACE = """
async def test_race({arguments}):
    first = []
    start = trio.Event()
    async def work(number):
        await start.wait()
        first.append(number)
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(work, number)
        await trio.sleep(1)
        start.set()
    print("ORDER", first)
    assert False
"""


def test_a_failure_tells_its_seed_and_how_to_have_it_again(pytester: pytest.Pytester) -> None:
    said = suite(pytester, RACE.format(arguments="weather, chaos"), "--muxkit-seed=random")
    said.assert_outcomes(failed=1)
    text = said.stdout.str()
    found = re.search(r"seed (\d+); again: pytest (\S+) --muxkit-seed=\1$", text, re.MULTILINE)
    assert found is not None
    assert f"muxkit plan 1, seed {found[1]}" in text
    again = suite(pytester, RACE.format(arguments="weather, chaos"), found[2], f"--muxkit-seed={found[1]}")
    order = re.search(r"^ORDER .*$", text, re.MULTILINE)
    assert order is not None
    assert order[0] in again.stdout.str()


def test_the_seed_decides_the_order_of_tasks(pytester: pytest.Pytester) -> None:
    orders = set()
    for seed in range(4):
        text = suite(pytester, RACE.format(arguments="weather"), f"--muxkit-seed={seed}").stdout.str()
        orders |= {*re.findall(r"^ORDER .*$", text, re.MULTILINE)}
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ("@pytest.mark.muxkit(protocl='e3x')", "the mark muxkit takes the keywords clock, .* and not protocl"),
        ("@pytest.mark.muxkit(5)", "and not 5"),
        ("@pytest.mark.muxkit(weather='bad')", "weather='bad': must be a muxkit.testing.SimWeather"),
    ],
)
def test_a_mark_that_is_wrong_is_told(pytester: pytest.Pytester, mark: str, complaint: str) -> None:
    said = suite(pytester, f"{mark}\nasync def test_it(muxkit_server):\n    pass\n")
    assert said.ret != 0
    assert re.search(complaint, said.stdout.str() + said.stderr.str())


def test_a_seed_that_is_no_number_is_refused(pytester: pytest.Pytester) -> None:
    said = suite(pytester, "", "--muxkit-seed=tea")
    assert "--muxkit-seed=tea: must be a whole number, or 'random'" in said.stderr.str()


def test_without_pytest_trio_the_failure_says_what_to_install(pytester: pytest.Pytester) -> None:
    code = "async def test_it(weather):\n    pass\n"
    said = suite(pytester, code, "-p", "no:trio", ini="[pytest]\n")
    assert "the fixtures of muxkit need pytest-trio: pip install pytest-trio" in said.stdout.str()


def test_a_test_that_is_not_async_is_told(pytester: pytest.Pytester) -> None:
    said = suite(pytester, "def test_it(weather):\n    pass\n")
    assert "the fixtures of muxkit are for async tests" in said.stdout.str()


# ---------------------------------------------------------------------------- other suites


def test_names_of_a_suite_itself_come_first(pytester: pytest.Pytester) -> None:
    code = """
@pytest.fixture
def weather():
    return "rain"

def test_own(weather):
    assert weather == "rain"

@pytest.mark.parametrize("chaos", [1, 2])
def test_parameter(chaos):
    assert chaos in (1, 2)
"""
    suite(pytester, code).assert_outcomes(passed=3)


def test_loading_the_plugin_imports_neither_muxkit_nor_trio() -> None:
    code = "import pytest_muxkit.plugin, sys; print(sorted({'muxkit', 'trio', 'attrs'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_suite_that_does_not_use_it_imports_no_muxkit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="import sys\ndef test_it():\n    assert 'muxkit' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", "no:trio").assert_outcomes(passed=1)
