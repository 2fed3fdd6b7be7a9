"""Every bug that was found has a test that failed before it was mended, and the list of them names that test."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUGS = tomllib.loads((HERE / "data" / "regressions.toml").read_text(encoding="utf-8"))["bug"]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("bug", BUGS, ids=[bug["test"].rpartition("::")[2] for bug in BUGS])
def test_a_bug_that_was_mended_keeps_its_test(bug: dict[str, str]) -> None:
    assert stands(bug["test"]), f"{bug['what']} Its test {bug['test']} is gone"


def stands(test: str) -> bool:
    """Whether there is a test that is named file::name."""
    file, _, name = test.partition("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in ast.walk(tree)
    )
