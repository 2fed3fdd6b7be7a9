"""The pytest plugin: the fixtures `weather`, `muxkit_server`, `muxkit_pair` and `chaos`, for async tests.

A test that uses one of them runs on a virtual clock, and its seed decides the order in which Trio runs tasks. The
report of a failure says how to repeat the run. `@pytest.mark.muxkit(protocol=, weather=, seed=, seeds=, faults=,
clock=)` configures the fixtures. pytest-trio runs the tests.

The first test that needs muxkit and Trio imports them. Loading this plugin doesn't.
"""

from __future__ import annotations

import inspect
import random
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack

import pytest

if TYPE_CHECKING:
    import trio

    import muxkit
    from muxkit.testing import PlanRun, SimNetwork, SimWeather

    class MuxkitServer(Protocol):
        """The type of `muxkit_server`, which takes the options of `muxkit.open_server`."""

        async def __call__(
            self,
            handler: muxkit.SessionHandler | muxkit.ChannelHandler,
            name: str = "server",
            *,
            protocol: str | None = None,
            **options: Unpack[muxkit.ServeOptions],
        ) -> muxkit.Server:
            """Serve at `sim://name` until the test ends."""
            ...

    MuxkitPair = tuple[muxkit.Session, muxkit.Session]
    """The type of `muxkit_pair`: the client's session and the server's."""

FIXTURES: Final = frozenset({"weather", "muxkit_server", "muxkit_pair", "chaos"})
PARAMETERS: Final = {"protocol": "muxkit_protocol", "weather": "muxkit_weather", "seeds": "muxkit_seed"}
MARK: Final = (
    "muxkit(protocol=, weather=, seed=, seeds=, faults=, clock=): what the fixtures of muxkit do. A list of protocols "
    "or of weathers, and seeds, run the test once for each; faults is the most that `chaos` does, or a Plan or its "
    "text; clock='real' leaves the clock alone"
)
MARK_OPTIONS: Final = frozenset({"protocol", "weather", "seed", "seeds", "faults", "clock"})
FAULTS: Final = 4
LENGTH: Final = 10.0  # s of virtual time over which `chaos` spreads its faults
_SEED: Final = pytest.StashKey[int]()
_PLAN: Final = pytest.StashKey[object]()


# ---------------------------------------------------------------------------- pytest's hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("muxkit")
    group.addoption(
        "--muxkit-seed",
        metavar="N",
        help="the seed of simulated networks, or 'random'; tests that name their seeds keep them",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    given = config.getoption("--muxkit-seed")
    if given == "random":
        config.option.muxkit_seed = str(random.randrange(1 << 32))
    elif given is not None and not given.lstrip("-").isdigit():
        raise pytest.UsageError(f"--muxkit-seed={given}: must be a whole number, or 'random'")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each protocol, weather and seed that its mark lists."""
    given = _options(metafunc.definition)
    for name, fixture in PARAMETERS.items():
        values = given.get(name)
        if values is None or isinstance(values, str) or not isinstance(values, Iterable):
            continue
        if fixture not in metafunc.fixturenames:
            needed = "muxkit_protocol, muxkit_server or muxkit_pair" if name == "protocol" else "weather or the like"
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: {name}= of its mark needs a fixture: {needed}")
        if any(fixture in _names_of(mark) for mark in metafunc.definition.iter_markers("parametrize")):
            continue
        metafunc.parametrize(fixture, list(values), indirect=True, ids=_id)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-trio run the tests that use our fixtures on a virtual clock, in the order of tasks of their seed."""
    for item in items:
        if isinstance(item, pytest.Function) and _uses_us(item):
            _options(item)
            if inspect.iscoroutinefunction(item.obj) and _has_pytest_trio(item.config):
                item.add_marker(pytest.mark.trio(run=_runner(item)), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail with a helpful text, where pytest would only report that async functions aren't supported."""
    if isinstance(item, pytest.Function) and _uses_us(item):
        if not _has_pytest_trio(item.config):
            pytest.fail("the fixtures of muxkit need pytest-trio: pip install pytest-trio", pytrace=False)
        if not inspect.iscoroutinefunction(getattr(item.obj, "hypothesis", item).__dict__.get("inner_test", item.obj)):
            pytest.fail("the fixtures of muxkit are for async tests: write `async def`", pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Add the seed to the report of a failure, and the command that repeats the run."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    seed = item.stash.get(_SEED, None)
    if report.failed and seed is not None:
        lines = [f"seed {seed}; again: pytest {shlex.quote(item.nodeid)} --muxkit-seed={seed}"]
        if (plan := item.stash.get(_PLAN, None)) is not None:
            lines += ["the faults of `chaos`, which @pytest.mark.muxkit(faults=TEXT) repeats:", str(plan)]
        report.sections.append(("muxkit", "\n".join(lines)))


# ---------------------------------------------------------------------------- fixtures


@pytest.fixture
def muxkit_seed(request: pytest.FixtureRequest) -> int:
    """The seed of the test: from its parametrization, its mark, the command line, or 0."""
    given = getattr(request, "param", None)
    if given is None:
        given = _options(request.node).get("seed", request.config.getoption("--muxkit-seed") or 0)
    return int(given)


@pytest.fixture
def muxkit_protocol(request: pytest.FixtureRequest) -> str:
    """The protocol of `muxkit_server` and `muxkit_pair`: from the parametrization, the mark, or bpmux."""
    given = getattr(request, "param", None) or _options(request.node).get("protocol", "bpmux")
    return str(given)


@pytest.fixture
def muxkit_weather(request: pytest.FixtureRequest) -> SimWeather:
    """The network conditions: from the parametrization, the mark, or a delay of 10 ms in each direction."""
    from muxkit.testing import SimWeather

    given = getattr(request, "param", None) or _options(request.node).get("weather")
    if given is None:
        return SimWeather(delay=0.01)
    if not isinstance(given, SimWeather):
        raise pytest.UsageError(f"weather={given!r}: must be a muxkit.testing.SimWeather, or a list of them")
    return given


@pytest.fixture
async def weather(
    request: pytest.FixtureRequest, muxkit_seed: int, muxkit_weather: SimWeather
) -> AsyncGenerator[SimNetwork, None]:
    """The simulated network of the test, a `muxkit.testing.SimNetwork`, for `sim://` URLs."""
    from muxkit.testing import SimNetwork

    request.node.stash[_SEED] = muxkit_seed
    _check_clock(request.node)
    with SimNetwork(muxkit_seed, weather=muxkit_weather) as network:
        yield network


@pytest.fixture
async def muxkit_server(weather: SimNetwork, muxkit_protocol: str) -> AsyncGenerator[MuxkitServer, None]:
    """A function that starts a server: `server = await muxkit_server(handler)`. Clients connect to `server.url`.

    Its keyword `name` is the host, "server" by default. `protocol` overrides the protocol of the test. Other keywords
    are passed to `muxkit.open_server`. The servers end with the test.
    """
    import trio

    import muxkit

    over = trio.Event()

    async def run(
        handler: muxkit.SessionHandler | muxkit.ChannelHandler,
        url: str,
        options: muxkit.ServeOptions,
        task_status: trio.TaskStatus[muxkit.Server],
    ) -> None:
        async with muxkit.open_server(handler, url, **options) as server:
            task_status.started(server)
            await over.wait()

    async def serve(
        handler: muxkit.SessionHandler | muxkit.ChannelHandler,
        name: str = "server",
        *,
        protocol: str | None = None,
        **options: Unpack[muxkit.ServeOptions],
    ) -> muxkit.Server:
        url = f"{protocol or muxkit_protocol}+sim://{name}"
        # Start the server in the fixture's nursery. The caller is a task of the test, and the server must outlive it.
        server: muxkit.Server = await nursery.start(run, handler, url, options)
        return server

    async with trio.open_nursery() as nursery:
        yield serve
        over.set()


@pytest.fixture
async def muxkit_pair(muxkit_server: MuxkitServer) -> AsyncGenerator[MuxkitPair, None]:
    """Two connected sessions, one on the host `client` and one on the host `server`."""
    import trio

    import muxkit

    came = trio.Event()
    done = trio.Event()
    sessions: list[muxkit.Session] = []

    async def handler(session: muxkit.Session) -> None:
        sessions.append(session)
        came.set()
        await done.wait()

    server = await muxkit_server(handler)
    try:
        async with muxkit.connect(server.url) as client:
            await came.wait()
            yield client, sessions[0]
            done.set()
    except (muxkit.LinkLost, OSError):
        if not sessions:
            raise
        # The test cut the connection and has handled the consequences.
    finally:
        done.set()


@pytest.fixture
async def chaos(
    request: pytest.FixtureRequest, weather: SimNetwork, muxkit_seed: int, nursery: trio.Nursery
) -> PlanRun:
    """Random faults on the network while the test runs, as a `muxkit.testing.PlanRun`.

    Its `plan` holds the faults, and its `done` those that have begun. The seed decides them. They are delays,
    throttles, partitions and cuts between all hosts, spread over the first ten seconds.
    `@pytest.mark.muxkit(faults=…)` sets the largest number of faults, or the faults themselves, as a `Plan` or its
    text.
    """
    from muxkit.testing import Plan, PlanRun

    given = _options(request.node).get("faults", FAULTS)
    if isinstance(given, str):
        given = Plan.parse(given)
    if not isinstance(given, Plan):
        given = Plan.draw(muxkit_seed, routes=[("*", "*")], length=LENGTH, weather=weather.weather, most=int(given))
        given = given.with_events(given.faults)  # remove the reordered passes, because the seed decides the order
    request.node.stash[_PLAN] = given
    running = PlanRun(weather, given)
    nursery.start_soon(running.run)
    return running


# ---------------------------------------------------------------------------- helpers


def _options(node: Any) -> dict[str, Any]:  # noqa: ANN401 - pytest does not type nodes of requests
    """Return the keywords of the marks of a test. Of several marks, the closest one takes precedence."""
    found: dict[str, Any] = {}
    for mark in node.iter_markers("muxkit"):
        if mark.args or not MARK_OPTIONS.issuperset(mark.kwargs):
            wrong = ", ".join([*map(repr, mark.args), *sorted(set(mark.kwargs) - MARK_OPTIONS)])
            raise pytest.UsageError(
                f"{node.nodeid}: the mark muxkit takes the keywords {', '.join(sorted(MARK_OPTIONS))}, and not {wrong}"
            )
        found = mark.kwargs | found
    return found


def _uses_us(item: pytest.Function) -> bool:
    # `weather` or `chaos` may be a fixture or parameter of the test suite itself. `muxkit_seed` can't.
    return bool(FIXTURES.intersection(item.fixturenames)) and "muxkit_seed" in item.fixturenames


def _names_of(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _id(value: object) -> str:
    return f"seed={value}" if isinstance(value, int) else value if isinstance(value, str) else repr(value)


def _has_pytest_trio(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("trio") or config.pluginmanager.hasplugin("pytest_trio.plugin")


def _runner(item: pytest.Function) -> Callable[..., object]:
    """Return the function that pytest-trio calls instead of `trio.run`.

    pytest-trio takes the clock only from the arguments of the test function. A clock that only a fixture requests is
    created but not used, and the test would run in real time. So we look for such a clock here.
    """

    def run(main: Callable[..., Awaitable[object]], *, clock: trio.abc.Clock | None = None, **options: Any) -> object:
        import trio
        import trio.testing

        from muxkit.testing import determined

        if clock is None and not _is_real(item):
            asked = [each for each in item.funcargs.values() if isinstance(each, trio.abc.Clock)]
            clock = asked[0] if asked else trio.testing.MockClock(autojump_threshold=0)
        seed = item.funcargs.get("muxkit_seed", 0)
        number = seed if isinstance(seed, int) else 0
        item.stash[_SEED] = number
        with determined(number, shuffled=True):
            return trio.run(main, clock=clock, **options)

    return run


def _is_real(item: pytest.Item) -> bool:
    return _options(item).get("clock") == "real"


def _check_clock(item: pytest.Item) -> None:
    """Fail a test that would run in real time, as under Hypothesis, which calls Trio on its own."""
    import trio
    import trio.testing

    if not _is_real(item) and not isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
        pytest.fail(
            "this test runs in real time. Name `autojump_clock` among the arguments of the test function itself, or "
            "say @pytest.mark.muxkit(clock='real') if that is meant",
            pytrace=False,
        )
