"""What holds for the whole suite: Hypothesis profiles, seeds, and the ids that marks may name."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest

from tests._jvm import QUICK
from tests.canaries import LeakWatch
from tests.conformance import MARKS, known_ids

# A shell starts what it runs in the background with interrupts ignored, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK)

HERE = Path(__file__).resolve().parent
FROM_SLOW_TO_QUICK = {"system": 0, "cli": 0, "core": 2, "runtime": 2, "protocols": 2}
SOAK = os.environ.get("MUXKIT_SOAK", "") not in ("", "0")

# `ci` tries the same examples in every run, so only new code can make it fail; `nightly` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=50)
# `again` is for a part of the suite that `.ci/users.py` runs once more, on compiled modules or with other versions. It
# has a fifth of the examples, and tests with seeds run with a third of them.
hypothesis.settings.register_profile("again", hypothesis.settings.get_profile("ci"), max_examples=10)
hypothesis.settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("nightly" if SOAK else "ci")


@pytest.fixture(scope="session")
def watched_log() -> Iterator[LeakWatch]:
    """What listens to the library's log for the whole run."""
    watch = LeakWatch()
    logging.getLogger("muxkit").addHandler(watch)
    yield watch
    logging.getLogger("muxkit").removeHandler(watch)


@pytest.fixture(autouse=True)
def no_secret_is_logged(watched_log: LeakWatch) -> Iterator[None]:
    """Fail a test during which the library logged a secret that tests plant."""
    watched_log.found.clear()
    yield
    assert watched_log.found == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with `@pytest.mark.seeds(20, soak=2000)` once for each value of its argument `seed`."""
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is None:
        return
    if "seed" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: the mark seeds(..) needs an argument `seed`")
    count = mark.kwargs.get("soak", mark.args[0]) if SOAK else mark.args[0]
    if metafunc.config.getoption("hypothesis_profile", None) == "again":
        # A difference between two builds or two versions of a dependency does not hide behind one seed in a hundred.
        count = min(count, max(2, count // 3))
    metafunc.parametrize("seed", range(count), ids=lambda seed: f"seed={seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unknown = sorted(set(_unknown_ids(items)))
    if unknown:
        raise pytest.UsageError("no such clause or requirement:\n  " + "\n  ".join(unknown))
    # A slow file at the end would leave all processes but one without work, so the many quick ones come last.
    items.sort(key=lambda item: FROM_SLOW_TO_QUICK.get(item.path.parts[len(HERE.parts)], 1))
    for item in items:
        if isinstance(item, pytest.Function) and _traces_memory(item.obj, vars(item.module)):
            item.add_marker(pytest.mark.alone)
        # `make test` gives the session of Spark to one process, and everything else file by file to the other.
        shares_session = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if shares_session else str(item.path)))
        if SOAK and _has_a_long_form(item):
            item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's sight.

    The suite's own modules and items are a million objects. Each of the many tests that collect garbage would walk over
    all of them, which takes 0.3 s a time.
    """
    gc.collect()
    gc.freeze()


def _unknown_ids(items: list[pytest.Item]) -> Iterator[str]:
    known = {name: known_ids(name) for name in MARKS}
    for item in items:
        for name in MARKS:
            for mark in item.iter_markers(name):
                for cited in mark.args:
                    if cited not in known[name]:
                        yield f"{item.nodeid}: {name}({cited!r})"


def _has_a_long_form(item: pytest.Item) -> bool:
    """Whether MUXKIT_SOAK makes this test longer: it is given seeds, or Hypothesis examples."""
    if item.get_closest_marker("seeds") is not None:
        return True
    return isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj)


def _traces_memory(test: Callable[..., object], names: Mapping[str, object]) -> bool:
    """Whether this test, or a function of its module that it calls, uses `tracemalloc`."""
    if "tracemalloc" not in names:
        return False
    used = set(_names_in(test))
    helpers = [names[name] for name in used if isinstance(names.get(name), FunctionType)]
    return "tracemalloc" in used.union(*map(_names_in, helpers))


def _names_in(function: object) -> Iterator[str]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
