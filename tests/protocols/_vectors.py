"""Rows of the collected vectors, and the grammar by which every row is replayed.

A row is an object. Its fields decide how it is tested; no test knows a row by its name.

- `name` says what the row is. It may hold settings (`idsize=2 id=0x0102`), and a stream of several parts joins their
  names by ` + `. A setting may also be a field of the row. If both are there they have to agree.
- `hex` holds the bytes, as one string or as a list of strings to join.
- `expect` is the word that decides: `wire`, `reject`, `transcript`, `option`, `overruled` or `reference-only`.
- `meaning`, `source` and the other fields in `NOTES` are for readers, and are not tested.
- Every other field has to be one that the kind of the row tests. A field that nobody reads fails the row.

A row of no kind, or of two, fails. Only `reference-only` rows, which record what a reference program did, ask for
nothing. `test_vectors_meta.py` breaks rows of each kind in many ways, and each broken row has to fail.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = dict[str, Any]  # what a row holds depends on its kind

DATA = Path(__file__).parents[1] / "data" / "vectors"
NOTES = frozenset({"name", "hex", "expect", "meaning", "source", "contested", "reference_bug", "python_agrees"})
SETTING = re.compile(r'(?<!\S)(\w+)=("[^"]*"|\[[^\]]*\]|\{[^}]*\}|[^\s,+()]+)')


@attrs.frozen
class Kind:
    """A kind of row: how to recognise one, and what has to hold of it."""

    name: str
    matches: Callable[[Row], bool]
    check: Callable[[Row], None]
    fields: frozenset[str] = frozenset()
    """The fields that `check` reads in addition to `hex` and `name`."""


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
    unread = row.keys() - NOTES - found[0].fields
    if unread and not evidence(row):
        raise AssertionError(
            f"row {row['name']!r} has fields that nobody reads: {', '.join(sorted(unread))}; "
            f"rows of the kind {found[0].name!r} may have: {', '.join(sorted(found[0].fields)) or 'no others'}"
        )
    return found[0]


def data_of(row: Row) -> bytes:
    """Return the bytes of a row."""
    return bytes.fromhex(row["hex"] if isinstance(row["hex"], str) else "".join(row["hex"]))


def settings_of(row: Row) -> dict[str, str]:
    """Return the settings of a row as text, from its name and from its other fields, which have to agree."""
    settings = {key: value.strip('"') for key, value in SETTING.findall(str(row["name"]))}
    for key, value in row.items():
        if key in NOTES:
            continue
        value = int(value) if isinstance(value, bool) else value
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")
        assert key not in settings or same(settings[key], text), f"{row['name']!r}: {key}={settings[key]}, and {text}"
        settings[key] = text
    return settings


def same(one: str, other: str) -> bool:
    """Return True if two settings are the same number, or the same text but for spaces."""
    try:
        return int(one, 0) == int(other, 0)
    except ValueError:
        return one.replace(" ", "") == other.replace(" ", "")


def agree(row: Row, facts: dict[str, object]) -> int:
    """Compare the settings of a row with what its bytes say; return how many were compared."""
    settings = settings_of(row)
    for key in settings.keys() & facts.keys():
        fact = facts[key]
        text = str(int(fact)) if isinstance(fact, bool) else json.dumps(fact) if isinstance(fact, list) else str(fact)
        assert same(settings[key], text), f"{row['name']!r}: {key}={settings[key]}, and the bytes say {text}"
    unread = row.keys() - NOTES - facts.keys()
    assert not unread, f"{row['name']!r}: the bytes say nothing about {', '.join(sorted(unread))}"
    return len(settings.keys() & facts.keys())


def check(row: Row, kinds: Sequence[Kind]) -> None:
    """Test a row as its kind says."""
    kind_of(row, kinds).check(row)


def params(rows: Sequence[Row]) -> list[object]:
    return [pytest.param(row, id=str(row["name"])) for row in rows]
