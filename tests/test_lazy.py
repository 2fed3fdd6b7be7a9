"""Names that a package imports at the first access."""

from __future__ import annotations

import builtins
import difflib
import re
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from muxkit._lazy import lazily

ROOT = Path(__file__).parents[1]


def test_a_name_is_fetched_once_and_then_kept() -> None:
    code = (
        "import sys, muxkit; assert 'trio' not in sys.modules and 'connect' in dir(muxkit);"
        "assert 'connect' not in vars(muxkit); first = muxkit.connect; assert vars(muxkit)['connect'] is first;"
        "from muxkit import Channel, PluginError; assert vars(muxkit)['Channel'] is Channel"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_star_import_gets_every_public_name() -> None:
    code = (
        "from muxkit.protocols.bpmux import *; assert connect and Config and encode_chunk;"
        "from muxkit import *; assert ConnectOptions and MuxError; assert 'lazily' not in globals()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_public_name_may_be_a_module_of_the_package() -> None:
    code = "from muxkit.protocols import relink; assert relink.events.__name__ == 'muxkit.protocols.relink.events'"
    subprocess.run([sys.executable, "-c", code], check=True)


def package(block: str) -> dict[str, Any]:
    """Run a block of lazy imports as a package does."""
    made: dict[str, Any] = {"__name__": "package", "lazily": lazily}
    exec(f"with lazily(globals()):\n{block}", made)
    return made


def test_a_block_imports_nothing_until_a_name_is_used() -> None:
    made = package("    from nowhere.to_be_found import thing as thing\n    from difflib import ndiff as ndiff")
    assert made["__all__"] == ["ndiff", "thing"]
    assert not {"ndiff", "thing"} & {*made}
    assert made["__getattr__"]("ndiff") is difflib.ndiff is made["ndiff"]
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        made["__getattr__"]("thing")


def test_other_modules_import_as_always_while_a_block_runs() -> None:
    with lazily({"__name__": "package"}):
        from difflib import context_diff
    assert context_diff is difflib.context_diff


def test_a_block_that_fails_leaves_importing_as_it_was() -> None:
    before = builtins.__import__
    with pytest.raises(ZeroDivisionError):
        package("    from difflib import ndiff as ndiff\n    1 / 0")
    assert builtins.__import__ is before


def test_a_block_waits_until_that_of_another_thread_has_ended() -> None:
    """Otherwise the second one would restore the `__import__` of the first one after the first one had ended."""
    before = builtins.__import__
    first_is_inside, second_is_inside, first_has_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with lazily({"__name__": "first"}):
            first_is_inside.set()
            second_is_inside.wait(0.1)  # in vain
        first_has_left.set()

    def second() -> None:
        first_is_inside.wait()
        with lazily({"__name__": "second"}):
            second_is_inside.set()
            first_has_left.wait()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert builtins.__import__ is before


def test_a_name_that_the_package_does_not_have_is_said_with_the_package() -> None:
    code = "import muxkit\ntry: muxkit.nothing\nexcept AttributeError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "module 'muxkit' has no attribute 'nothing'\n"


def test_dir_of_a_package_has_what_it_exports_and_no_tools_of_its_own() -> None:
    """Was: `dir(muxkit)` shows `annotations`, `lazily`."""
    for package in MISSPELT:
        module = import_module(package)
        assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__), package


MISSPELT = {
    "muxkit": "Chanel",
    "muxkit.testing": "chaos_rely",
    "muxkit.pipeline": "open_stagin",
    "muxkit.protocols.aqueduct": "Sendr",
    "muxkit.protocols.bpmux": "Sesion",
    "muxkit.protocols.e3x": "Sesion",
    "muxkit.protocols.relink": "Chanel",
    "muxkit.protocols.restream": "Readr",
}


if TYPE_CHECKING:
    # Was: mypy --strict found nothing in these lines. `.ci/run types` checks them: mypy reports a comment that has
    # nothing to ignore, so it must find the error in each line.
    from muxkit import Chanel as _1  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.pipeline import open_stagin as _2  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.protocols.aqueduct import Sendr as _3  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.protocols.bpmux import Sesion as _4  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.protocols.e3x import Sesion as _5  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.protocols.restream import Readr as _7  # type: ignore[attr-defined]  # noqa: F401
    from muxkit.testing import chaos_rely as _8  # type: ignore[attr-defined]  # noqa: F401


def test_pyright_refuses_a_misspelt_name(tmp_path: Path) -> None:
    """Was: pyright found nothing in these lines, nor did mypy."""
    program = tmp_path / "misspelt.py"
    program.write_text("".join(f"from {package} import {name}\n" for package, name in MISSPELT.items()))
    run = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable, str(program)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    for line, name in enumerate(MISSPELT.values(), start=1):
        assert re.search(rf'misspelt\.py:{line}:\d+ - error: "{name}" is unknown import symbol', run.stdout), run.stdout


def test_a_name_that_needs_an_extra_says_which() -> None:
    """F16: "No module named 'pyarrow'", bare."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\nfrom muxkit import pipeline\n"
        "try: pipeline.Capture\nexcept ModuleNotFoundError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    needs = "muxkit.pipeline.Capture needs pyarrow, which is not installed: pip install 'muxkit[spark]'"
    assert said == f"{needs}\n"


@pytest.mark.parametrize("package", MISSPELT)
def test_the_names_of_a_package_are_listed_and_can_all_be_had(package: str) -> None:
    module = import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
