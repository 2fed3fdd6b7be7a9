"""The page for programs of 0.1: every new name on it exists, every old one does what its row says."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

from tests.test_public_names import assigned

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "migrate.md"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| 0.1 |")
]
STILL_THERE = {"muxkit.Limits", "muxkit.runtime.Backlog", "muxkit.pipeline"}  # and do something else
NAME = re.compile(r"`[^`]*?\b(muxkit(?:_\w+)?(?:\.\w+)*)(\([^`]*\))?[^`]*`")


def named(cell: str) -> list[tuple[str, str]]:
    """The names of ours in a cell, each with the arguments that stand behind it."""
    return [(name, arguments) for name, arguments in NAME.findall(cell) if name.partition(".")[2]]


def find(name: str) -> object:
    """What a dotted name leads to; raises AttributeError if there is nothing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            is_of_instances = isinstance(found, type) and part in assigned(found)
            found = getattr(found, part, None) if is_of_instances else getattr(found, part)
        return found
    raise AttributeError(name)


def is_there(name: str) -> bool:
    try:
        find(name)
    except AttributeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_row_is_true(row: tuple[str, str, str]) -> None:
    old, new, state = row
    assert state in ("works", "stays", "changed", "removed")
    for name, arguments in named(new):
        assert is_there(name), name
        takes(find(name), arguments)
    for name, arguments in named(old):
        if state in ("works", "stays"):
            takes(find(name), arguments)
        elif name not in STILL_THERE:
            assert not is_there(name), name


def takes(found: object, arguments: str) -> None:
    """Each keyword between the parentheses is one of the function's."""
    keywords = re.findall(r"(\w+)=", arguments)
    if keywords and callable(found):
        parameters = inspect.signature(found).parameters
        assert [each for each in keywords if each not in parameters] == [], found


def test_an_old_name_that_works_warns_of_its_end() -> None:
    import muxkit

    async def handler(channel: muxkit.Channel) -> None: ...

    for use in (lambda: muxkit.Served, lambda: muxkit.each_channel(handler, most=1)):  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        assert [each.category for each in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__


def test_the_page_has_each_kind_of_row() -> None:
    assert {row[2] for row in ROWS} == {"works", "stays", "changed", "removed"}
    assert len(ROWS) > 40
