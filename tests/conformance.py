"""Find which test shows which clause. Writes docs/conformance.md; with --check only says whether it is stale.

Tests are read, not run: a citation is `pytest.mark.clause("id", ..)` or `pytest.mark.requirement("id", ..)`
in a decorator, a `pytestmark`, or the `marks` of a `pytest.param`.  What there is to cite is in tests/data.
"""

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import attrs

TESTS: Final = Path(__file__).resolve().parent
DATA: Final = TESTS / "data"
PAGE: Final = TESTS.parent / "docs" / "conformance.md"
MARKS: Final = ("clause", "requirement")


@attrs.frozen
class Rule:
    """One clause of a protocol's document, or one requirement."""

    id: str
    group: str
    says: str


@attrs.frozen
class Reading:
    """A clause that is not kept by its nearest reading: what is done instead, and why."""

    id: str
    how: str
    why: str


@attrs.frozen
class Citation:
    """A test that says it shows a rule; `test` is relative to tests/, as `file::name`."""

    mark: str
    id: str
    test: str


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    check = parser.parse_args(arguments).check

    citations = [found for file in sorted(TESTS.rglob("*.py")) for found in citations_in(file)]
    unknown = sorted(complaints(citations, readings()))
    if unknown:
        print("\n".join(unknown), file=sys.stderr)
        return 1
    page = render(citations)
    if not check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
        print(f"wrote docs/{PAGE.name}")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print(f"docs/{PAGE.name} is stale: run `make conformance` and commit it", file=sys.stderr)
        return 1
    return 0


# ---------------------------------------------------------------------------- what there is to cite


def protocols() -> list[str]:
    return sorted(file.stem for file in (DATA / "clauses").glob("*.toml"))


def clauses(protocol: str) -> list[Rule]:
    rows = tomllib.loads((DATA / "clauses" / f"{protocol}.toml").read_text(encoding="utf-8"))["clause"]
    return [Rule(row["id"], row["section"], row["says"]) for row in rows]


def requirements() -> list[Rule]:
    rows = tomllib.loads((DATA / "requirements.toml").read_text(encoding="utf-8"))["requirement"]
    return [Rule(row["id"], row["group"], row["says"]) for row in rows]


def readings() -> list[Reading]:
    rows = tomllib.loads((DATA / "readings.toml").read_text(encoding="utf-8"))["reading"]
    return [Reading(row["id"], row["how"], row["why"]) for row in rows]


def known_ids(mark: str) -> set[str]:
    """Every id that `pytest.mark.<mark>` may name."""
    if mark == "requirement":
        return {rule.id for rule in requirements()}
    return {rule.id for protocol in protocols() for rule in clauses(protocol)}


def complaints(citations: Iterable[Citation], readings: Iterable[Reading]) -> Iterator[str]:
    known = {mark: known_ids(mark) for mark in MARKS}
    for citation in citations:
        if citation.id not in known[citation.mark]:
            yield f"{citation.test} cites the {citation.mark} {citation.id}, which does not exist"
    for reading in readings:
        if reading.id not in known["clause"]:
            yield f"readings.toml names the clause {reading.id}, which does not exist"


# ---------------------------------------------------------------------------- who cites it


def citations_in(file: Path) -> Iterator[Citation]:
    """The citations of one test file; one of a class or a module counts for each test in it."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    yield from _in_body(tree.body, file.relative_to(TESTS).as_posix(), _marks_assigned(tree.body))


def _in_body(body: list[ast.stmt], place: str, inherited: list[ast.Call]) -> Iterator[Citation]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            marks = [*inherited, *_marks_in(node.decorator_list), *_marks_assigned(node.body)]
            yield from _in_body(node.body, f"{place}::{node.name}", marks)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            # A whole decorator is walked, so the marks of each pytest.param inside parametrize are found too.
            for call in [*inherited, *_marks_in(node.decorator_list)]:
                yield from _cited_by(call, f"{place}::{node.name}")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            # A table of cases that stands above its test cites under its own name.
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if target != "pytestmark":
                for call in _marks_in([node.value]):
                    yield from _cited_by(call, f"{place}::{target}")


def _marks_assigned(body: list[ast.stmt]) -> list[ast.Call]:
    values = [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
    ]
    return _marks_in(values)


def _marks_in(nodes: Iterable[ast.expr]) -> list[ast.Call]:
    """Calls of `pytest.mark.clause` (or of a plain `clause`) anywhere in these expressions."""
    return [
        node
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("pytest.mark.") in MARKS
    ]


def _cited_by(call: ast.Call, test: str) -> Iterator[Citation]:
    mark = ast.unparse(call.func).removeprefix("pytest.mark.")
    for argument in call.args:
        if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
            raise SystemExit(f"{test}: a citation must be written out, not {ast.unparse(argument)}")
        yield Citation(mark, argument.value, test)


# ---------------------------------------------------------------------------- the page

HEAD: Final = """\
# Conformance

<!-- Written by tests/conformance.py from the marks on the tests: change those and run `make conformance`. -->

Each protocol's document is split into numbered clauses, and each clause names the tests that show it, as
`file::name` below `tests/`. A clause that is not kept by its nearest reading has a line under "Read
differently". The clauses themselves are in `tests/data/clauses/`, the requirements in
`tests/data/requirements.toml`.
"""


def render(citations: Iterable[Citation]) -> str:
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    for citation in citations:
        cited = tests[citation.mark, citation.id]
        if citation.test not in cited:
            cited.append(citation.test)
    rules = {protocol: clauses(protocol) for protocol in protocols()}

    parts = [HEAD, "| | rules | shown by a test | read differently |", "|---|---|---|---|"]
    for protocol, listed in rules.items():
        shown = sum(("clause", rule.id) in tests for rule in listed)
        different = sum(reading.id in {rule.id for rule in listed} for reading in readings())
        parts.append(f"| [{protocol}](#{protocol}) | {len(listed)} | {shown} | {different} |")
    shown = sum(("requirement", rule.id) in tests for rule in requirements())
    parts.append(f"| [reliability](#reliability) | {len(requirements())} | {shown} | |")
    for protocol, listed in rules.items():
        parts += ["", f"## {protocol}", "", *_unmet("clause", listed, tests), *_readings(listed)]
        parts += _tables("clause", listed, tests)
    parts += ["", "## reliability", "", *_unmet("requirement", requirements(), tests)]
    parts += _tables("requirement", requirements(), tests)
    return "\n".join(parts) + "\n"


def _unmet(mark: str, rules: list[Rule], tests: dict[tuple[str, str], list[str]]) -> list[str]:
    missing = [rule.id for rule in rules if (mark, rule.id) not in tests]
    if not missing:
        return [f"Every {mark} is shown by a test."]
    return [f"Shown by no test yet ({len(missing)} of {len(rules)}): {', '.join(missing)}."]


def _readings(rules: list[Rule]) -> list[str]:
    ids = {rule.id for rule in rules}
    lines = [f"| {r.id} | {_cell(r.how)} | {_cell(r.why)} |" for r in readings() if r.id in ids]
    if not lines:
        return []
    return ["", "### Read differently", "", "| clause | what is done | why |", "|---|---|---|", *lines]


def _tables(mark: str, rules: list[Rule], tests: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    for group, members in groupby(rules, key=lambda rule: rule.group):
        yield from ("", f"### {group}", "", f"| {mark} | what it says | tests |", "|---|---|---|")
        for rule in members:
            shown = "<br>".join(f"`{test}`" for test in tests.get((mark, rule.id), ())) or "none"
            yield f"| {rule.id} | {_cell(rule.says)} | {shown} |"


def _cell(text: str) -> str:
    """Text that can neither end the table cell it stands in nor be taken for a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
