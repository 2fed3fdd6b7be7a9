"""Every bug that was found has a test that failed before it was mended, and the list of them names that test."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FRICTION = tomllib.loads((HERE / "data" / "friction.toml").read_text(encoding="utf-8"))["row"]
BUGS = tomllib.loads((HERE / "data" / "regressions.toml").read_text(encoding="utf-8"))["bug"]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("bug", BUGS, ids=[bug["test"].rpartition("::")[2] for bug in BUGS])
def test_a_bug_that_was_mended_keeps_its_test(bug: dict[str, str]) -> None:
    assert stands(bug["test"]), f"{bug['what']} Its test {bug['test']} is gone"


@pytest.mark.parametrize("row", FRICTION, ids=[row["id"] for row in FRICTION])
def test_what_users_met_keeps_the_tests_of_what_comes_instead(row: dict[str, Any]) -> None:
    assert row["tests"]
    assert [test for test in row["tests"] if not stands(test)] == [], row["was"]


def stands(test: str) -> bool:
    file, _, name = test.partition("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in ast.walk(tree)
    )
