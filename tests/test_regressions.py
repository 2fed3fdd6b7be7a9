"""Every bug that was found has a test that failed before it was mended, and the list of them names that test."""

from __future__ import annotations

import ast
import re
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


def test_each_thing_that_users_met_has_its_row() -> None:
    assert [row["id"] for row in FRICTION] == [f"F{number}" for number in range(1, 34)]


@pytest.mark.parametrize("row", FRICTION, ids=[row["id"] for row in FRICTION])
def test_one_of_the_tests_of_a_row_tells_what_was_read_before(row: dict[str, Any]) -> None:
    told = re.compile(rf"\bwas: |\b{row['id']}\b", re.IGNORECASE)
    assert any(told.search(source_of(test)) for test in row["tests"])


def stands(test: str) -> bool:
    return bool(source_of(test))


def source_of(test: str) -> str:
    """The source of a test that is named file::name; empty if there is none."""
    file, _, name = test.partition("::")
    text = (HERE / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    return ""
