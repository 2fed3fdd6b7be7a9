"""Nothing on the pages is left out unseen: what is not run by itself is listed, with what runs it or a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests._pages import ROOT, Entry, Item, entries, everything

ENTRIES = entries()
ITEMS = everything()


def ident(entry: Entry | Item) -> str:
    return f"{entry.page}: {entry.name}"


def test_every_command_is_run_somewhere_or_has_its_reason() -> None:
    listed = {entry.key for entry in ENTRIES}
    assert [ident(item) for item in ITEMS if item.kind == "command" and item.key not in listed] == []


def test_nothing_is_listed_that_is_not_there_and_nothing_twice() -> None:
    there = {item.key for item in ITEMS}
    keys = [entry.key for entry in ENTRIES]
    assert [key for key in keys if key not in there] == []
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("entry", ENTRIES, ids=ident)
def test_what_is_listed_is_run_where_the_list_says_or_has_a_reason(entry: Entry) -> None:
    assert (entry.by is None) != (entry.why is None)
    if entry.why is not None:
        assert entry.why.endswith(".")
        assert len(entry.why) > 20
        return
    assert entry.by is not None
    file, _, name = entry.by.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert f'"{entry.page}"' in source or entry.name in source, f"{file} does not take it from its page"
    if name:
        functions = {
            each.name
            for each in ast.walk(ast.parse(source))
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{entry.by} is gone"


@pytest.mark.parametrize("item", [item for item in ITEMS if item.kind == "program"], ids=ident)
def test_every_program_can_be_compiled(item: Item) -> None:
    compile(item.text, ident(item), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_few_things_are_not_run() -> None:
    reasons = [entry for entry in ENTRIES if entry.why is not None and entry.page.startswith(("docs/t", "docs/h", "R"))]
    assert len(reasons) <= 8, "a tutorial, a how-to or the README has more that no test runs"


def test_no_page_keeps_a_list_of_its_own() -> None:
    pages = {Path(ROOT, item.page) for item in ITEMS}
    assert [str(page) for page in pages if "<!-- not run" in page.read_text(encoding="utf-8")] == []
