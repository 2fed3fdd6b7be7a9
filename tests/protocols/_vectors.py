"""Rows of the collected vectors, and the kind of each: what a row holds decides what is tested, not which row it is.

The names of rows are sentences with a grammar (`message parts=[a,bb] idsize=2 id=0x0102`). A kind may read values from
a name; none may know one. A row of no kind, or of two, fails the suite.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = dict[str, Any]  # what a row holds depends on its kind

DATA = Path(__file__).parents[1] / "data" / "vectors"


@attrs.frozen
class Kind:
    """A kind of row: how to recognise one, and what has to hold of it."""

    name: str
    matches: Callable[[Row], bool]
    check: Callable[[Row], None]


def rows_of(protocol: str) -> list[Row]:
    rows: list[Row] = json.loads((DATA / f"{protocol}.json").read_text(encoding="utf-8"))
    return rows


def expects(row: Row, word: str) -> bool:
    """Does the row's `expect` begin with this word?"""
    return str(row["expect"]).split(":")[0].strip() == word


def first_word(row: Row) -> str:
    """The word that a name begins with, which says what the row is where its fields do not."""
    return str(row["name"]).replace(":", " ").split()[0]


def evidence(row: Row) -> bool:
    """Whether the row is what a reference program did and no implementation has to do."""
    return expects(row, "reference-only")


def nothing_owed(row: Row) -> None:
    """Evidence never rules."""


def kind_of(row: Row, kinds: Sequence[Kind]) -> Kind:
    found = [kind for kind in kinds if kind.matches(row)]
    if len(found) != 1:
        names = ", ".join(kind.name for kind in found) or "none"
        fields = ", ".join(sorted(row))
        raise AssertionError(
            f"row {row['name']!r} (expect {row['expect']!r}; {fields}) has to be of one kind, it is of {names}"
        )
    return found[0]


def check(row: Row, kinds: Sequence[Kind]) -> None:
    """Test a row as its kind says."""
    kind_of(row, kinds).check(row)


def params(rows: Sequence[Row]) -> list[object]:
    return [pytest.param(row, id=str(row["name"])) for row in rows]
