"""The build hook for compiled wheels asks for what compiling needs, and for nothing where nothing is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def requirements(**variables: str) -> set[str]:
    """What the build backend tells pip to put into an isolated build of the wheel."""
    program = "from hatchling.build import get_requires_for_build_wheel as ask; print(*ask())"
    plain = {name: value for name, value in os.environ.items() if name != "MUXKIT_COMPILE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**plain, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


@pytest.mark.requirement("R-71")
def test_an_isolated_build_is_given_what_mypy_needs_to_see() -> None:
    """Was: `MUXKIT_COMPILE=1 pip install .` failed in a fresh environment: the isolated build held nothing that mypy
    needs to see.
    """
    asked = requirements(MUXKIT_COMPILE="1")
    pinned = set((ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert asked - pinned == set()
    names = {requirement.partition("==")[0] for requirement in asked}
    assert names == {"mypy", "setuptools", "attrs", "h11", "msgspec", "trio", "trio-websocket", "wsproto"}


@pytest.mark.parametrize("variables", [{}, {"MUXKIT_COMPILE": ""}, {"MUXKIT_COMPILE": "0"}])
def test_a_pure_wheel_needs_none_of_it(variables: dict[str, str]) -> None:
    assert requirements(**variables) == set()


def test_each_python_that_the_classifiers_name_gets_a_compiled_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(project["project"]["classifiers"]))
    recipe = project["tool"]["cibuildwheel"]
    assert recipe["build"] == [f"cp3{number}-*" for number in named]
    assert recipe["environment"] == {"MUXKIT_COMPILE": "1"}
