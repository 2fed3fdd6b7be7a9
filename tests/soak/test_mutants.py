"""The program that mutates the code draws, writes, tries and counts mutants as it says."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Final

import attrs
import pytest

from tests.soak import _mutation_tests
from tests.soak._mutation_tests import TimedTest, choose
from tests.soak._mutations import Mutant, candidates, code_lines, draw, is_valid, shares
from tests.soak.mutants import ROOT, Campaign, Plan, Result, Summary, muxkit_plan, restore, summarise

# ---------------------------------------------------------------------------- what can be mutated


def mutated(body: str) -> set[str]:
    """Return the last lines of all valid mutants of a function `f(a, b)` with this body."""
    source = f"def f(a: int, b: int) -> int:\n    c = 0\n    for _ in b:\n        {body}\n"
    found = [mutant for mutant in candidates("m.py", source) if mutant.line == 4 and is_valid(mutant, source)]
    return {mutant.apply(source).splitlines()[3].strip() for mutant in found}


@pytest.mark.parametrize(
    ("body", "mutants"),
    [
        ("c = a < b", {"c = a <= b", "pass"}),
        ("c = a is not b", {"c = a is b", "pass"}),
        ("c = a  not  in  b", {"c = a  in  b", "pass"}),
        ("c = (a) == (b)", {"c = (a) != (b)", "pass"}),
        ("c = a + b", {"c = a - b", "pass"}),
        ("c = a << b", {"c = a >> b", "pass"}),
        ("c += a", {"c -= a", "pass"}),
        ("c = a and b", {"c = a or b", "pass"}),
        ("c = not a", {"c = (a)", "pass"}),
        ("c = min(a, b)", {"c = max(a, b)", "pass"}),
        ("c = 7", {"c = 8", "c = 6", "pass"}),
        ("c = 0", {"c = 1", "c = (-1)", "pass"}),
        ("c = 1024", {"c = 2048", "c = 512", "pass"}),
        ("c = True", {"c = False", "pass"}),
        ("c = a if b else c", {"c = a if not (b) else c", "pass"}),
        ("c = [d for d in a if d]", {"c = [d for d in a if not (d)]", "pass"}),
        ("a.g(b)", {"pass"}),
        ("raise a", {"pass"}),
        ("del c", {"pass"}),
        ("break", {"continue"}),
        ("return a", {"return 0"}),
        ("while a: b()", {"while not (a): b()", "while a: pass"}),
        ("c = 'é' + a", {"c = 'é' - a", "pass"}),
    ],
)
def test_each_kind_of_place_has_its_mutants(body: str, mutants: set[str]) -> None:
    assert mutated(body) == mutants


@pytest.mark.parametrize(
    "body",
    [
        "assert a < b",
        "'a docstring'",
        "d: int = a",  # the first assignment of a local variable
        "d = a",
        "import d",
        "yield",
    ],
)
def test_what_is_no_fault_or_obviously_one_is_left_alone(body: str) -> None:
    assert mutated(body) == set()


def test_what_runs_only_for_type_checkers_is_left_alone() -> None:
    source = dedent("""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            A = 1 + 2
        B = int | str
        __slots__ = ("a",) + ("b",)
        class C:
            def __init__(self, a: Literal[1]) -> None:
                self.a = a
    """)
    assert candidates("m.py", source) == []


def test_a_mutant_changes_one_place_and_compiles() -> None:
    path = ROOT / "muxkit" / "core" / "_windows.py"
    source = path.read_text()
    found = candidates("muxkit/core/_windows.py", source)
    assert len({mutant.id for mutant in found}) == len(
        {(mutant.start, mutant.before, mutant.after) for mutant in found}
    )
    for mutant in [each for each in found[::20] if is_valid(each, source)]:
        changed = mutant.apply(source)
        assert changed.replace(mutant.after, "") != source
        assert changed[: mutant.start].isascii() is source[: mutant.start].isascii()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert source.splitlines()[: mutant.line - 1] == changed.splitlines()[: mutant.line - 1]
        first, last = mutant.lines
        assert first <= mutant.line <= last


def test_a_mutant_of_another_version_of_the_file_is_refused() -> None:
    (mutant, *_) = candidates("m.py", "A = 1\n")
    with pytest.raises(AssertionError, match="the source is another one"):
        mutant.apply("B = 'x'\n")


# ---------------------------------------------------------------------------- drawing

SOURCES: Final = {
    "one": {"one.py": "def f(a):\n" + "".join(f"    a.g({number})\n" for number in range(50))},
    "two": {"two.py": "def f(a):\n" + "".join(f"    a.h({number})\n" for number in range(50))},
}


def test_the_same_seed_draws_the_same_mutants_and_another_one_others() -> None:
    quotas = {"one": 10, "two": 5}
    first = draw(SOURCES, quotas=quotas, seed=1)
    assert draw(SOURCES, quotas=quotas, seed=1) == first
    assert draw(SOURCES, quotas=quotas, seed=2) != first
    assert [mutant.part for mutant in first] == ["one"] * 10 + ["two"] * 5
    assert len({(mutant.path, mutant.line) for mutant in first}) == 15


def test_a_change_in_one_part_leaves_the_mutants_of_the_others() -> None:
    quotas = {"one": 10, "two": 5}
    before = draw(SOURCES, quotas=quotas, seed=1)
    after = draw({**SOURCES, "one": {"one.py": "A = 1\n"}}, quotas=quotas, seed=1)
    assert after[-5:] == before[-5:]
    assert len(after) == 6  # there's no second line to mutate


def test_parts_get_shares_in_proportion_to_their_lines() -> None:
    assert shares({"a": 100, "b": 50, "c": 49}, 10) == {"a": 5, "b": 3, "c": 2}
    assert sum(shares({"a": 1, "b": 1, "c": 1}, 200).values()) == 200


def test_lines_of_code_are_counted_without_comments_docstrings_and_blank_lines() -> None:
    assert (
        code_lines('"""Doc."""\n\n# comment\na = (\n    1,  # one\n)\n\n\ndef f():\n    """Doc.\n\n    More."""\n') == 4
    )


def test_the_plan_names_folders_that_exist() -> None:
    plan = muxkit_plan(ROOT)
    assert all((ROOT / folder).is_dir() for folder in (*plan.parts.values(), *plan.close.values()))
    assert all((ROOT / path).exists() for paths in plan.groups.values() for path in paths)


# ---------------------------------------------------------------------------- the choice of tests


def test_close_tests_come_first_and_functions_take_turns() -> None:
    tests = [
        TimedTest("tests/far/t.py::quick", 0.1),
        TimedTest("tests/near/t.py::slow", 5.0),
        TimedTest("tests/near/t.py::many[1]", 0.2),
        TimedTest("tests/near/t.py::many[2]", 0.3),
    ]
    choice = choose(tests, "tests/near")
    assert [test.id.partition("::")[2] for test in choice.tests] == ["many[1]", "slow", "many[2]", "quick"]
    assert choice.covering == 4


def test_the_cap_cuts_off_the_last_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [TimedTest(f"tests/t.py::t{number}", 10.0) for number in range(8)]
    monkeypatch.setattr(_mutation_tests, "MAX_SECONDS", 45.0)
    assert (len(choose(tests, "tests").tests), choose(tests, "tests").covering) == (4, 8)
    monkeypatch.setattr(_mutation_tests, "MAX_TESTS", 3)
    assert len(choose(tests, "tests").tests) == 3
    assert len(choose([TimedTest("tests/t.py::long", 100.0)], "tests").tests) == 1  # one is always tried


# ---------------------------------------------------------------------------- a whole campaign on a tiny project

TINY: Final = {
    "tiny/shapes/area.py": """
        def larger(one: int, other: int) -> int:
            return max(one, other)


        def forgotten(one: int) -> int:
            return one + 1


        def loosely_tested(one: int) -> int:
            return one - 1


        def endless(one: int) -> int:
            while one > 1:
                one -= 1
            return one
    """,
    "tests/shapes/test_area.py": """
        from pathlib import Path

        from tiny.shapes.area import endless, larger, loosely_tested

        def test_the_larger_one_is_found() -> None:
            assert larger(1, 2) == 2

        def test_nothing_is_asserted() -> None:
            loosely_tested(1)

        def test_it_ends() -> None:
            assert endless(3) == 1

        def test_that_passes_only_once() -> None:
            loosely_tested(1)
            marker = Path(__file__).with_name("ran")
            assert not marker.exists()
            marker.touch()
    """,
}
PLAN: Final = Plan(
    package="tiny",
    parts={"shapes": "tiny/shapes"},
    close={"shapes": "tests/shapes"},
    groups={"shapes": ["tests/shapes"]},
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """A tiny project whose mutants of `max`, `+`, `-` and `-=` were tried."""
    root = tmp_path_factory.mktemp("tiny")
    for name, text in TINY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text).lstrip())
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.soak.mutants.LEAST_TIMEOUT", 2.0)
        # The tiny tests need no plugins, and each of the processes that run them would import all of them.
        patch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:trio -p no:muxkit -p no:xdist.looponfail")
        made = Campaign(work, root, PLAN)
        made.copy_tree()
        made.map()
        made.run(wanted(made))
    return made


def wanted(campaign: Campaign) -> list[Mutant]:
    path = "tiny/shapes/area.py"
    source = (campaign.tree / path).read_text()
    kinds = [("max", "min"), ("+", "-"), ("-", "+"), ("-=", "+=")]
    found = [mutant for mutant in candidates(path, source) if (mutant.before, mutant.after) in kinds]
    assert len(found) == len(kinds)
    return [attrs.evolve(mutant, part="shapes") for mutant in found]


def result(campaign: Campaign, before: str) -> Result:
    return campaign.results()[next(mutant.id for mutant in wanted(campaign) if mutant.before == before)]


def test_a_mutant_that_a_test_notices_is_killed_by_that_test(campaign: Campaign) -> None:
    killed = result(campaign, "max")
    assert (killed.fate, killed.by) == ("killed", "tests/shapes/test_area.py::test_the_larger_one_is_found")


def test_a_mutant_that_never_ends_times_out(campaign: Campaign) -> None:
    assert result(campaign, "-=").fate == "timeout"


def test_a_line_that_no_test_runs_is_not_covered(campaign: Campaign) -> None:
    assert result(campaign, "+").fate == "not covered"


def test_a_mutant_survives_if_only_a_test_fails_that_fails_without_it_as_well(campaign: Campaign) -> None:
    survived = result(campaign, "-")
    assert (survived.fate, survived.by, survived.covering) == ("survived", "", 1)


def test_the_source_is_restored_after_each_mutant_and_after_a_crash(campaign: Campaign) -> None:
    path = campaign.tree / "tiny/shapes/area.py"
    assert path.read_text() == dedent(TINY["tiny/shapes/area.py"]).lstrip()
    mutation = campaign._mutated(wanted(campaign)[0])
    mutation.__enter__()
    assert path.read_text() != dedent(TINY["tiny/shapes/area.py"]).lstrip()
    restore(campaign.tree)
    assert path.read_text() == dedent(TINY["tiny/shapes/area.py"]).lstrip()


def test_a_copy_of_an_older_version_is_noticed(campaign: Campaign) -> None:
    path = campaign.tree / "tiny/shapes/area.py"
    assert campaign.outdated() == []
    text = path.read_text()
    try:
        path.write_text(text + "\n")
        assert campaign.outdated() == ["tiny/shapes/area.py"]
    finally:
        path.write_text(text)


def test_what_has_a_result_is_not_tried_again(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it was tried again")

    monkeypatch.setattr(campaign, "_try", fail)
    monkeypatch.setattr(campaign, "_failing_without_mutant", set)
    campaign.run(wanted(campaign))


def test_the_summary_counts_by_part_and_can_be_read_again(campaign: Campaign, tmp_path: Path) -> None:
    summary = summarise(wanted(campaign), campaign.results(), seed=1)
    assert summary.fates == {"shapes": {"killed": 1, "timeout": 1, "not covered": 1, "survived": 1}}
    assert summary.score() == summary.score("shapes") == 0.5
    (tmp_path / "summary.json").write_text(summary.to_json())
    read = Summary.read(tmp_path / "summary.json")
    assert (read.quotas, read.mutants) == ({"shapes": 4}, summary.mutants)
    assert "50.0%, 50.0% before" in summary.table(read)
