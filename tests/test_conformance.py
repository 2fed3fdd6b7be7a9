"""The conformance page finds the citations that are there, and refuses the ones that mean nothing."""

from pathlib import Path

import pytest

from tests import conformance
from tests.conformance import Citation

TESTS = """
import pytest
from pytest import param

CASES = [pytest.param(1, marks=pytest.mark.clause("c-table"))]

@pytest.mark.clause("c-one", "c-two")
def test_plain(): ...

@pytest.mark.parametrize("n", [param(1, marks=[pytest.mark.clause("c-param")])])
async def test_awaited(n): ...

@pytest.mark.requirement("r-class")
class TestGroup:
    pytestmark = pytest.mark.clause("c-mark")
    def test_inside(self): ...

@pytest.mark.clause("c-helper")
def helper(): ...
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conformance, "TESTS", tmp_path)
    return tmp_path / "test_sample.py"


def test_citations_are_found_wherever_a_mark_may_stand(file: Path) -> None:
    file.write_text(TESTS, encoding="utf-8")
    assert set(conformance.citations_in(file)) == {
        Citation("clause", "c-table", "test_sample.py::CASES"),
        Citation("clause", "c-one", "test_sample.py::test_plain"),
        Citation("clause", "c-two", "test_sample.py::test_plain"),
        Citation("clause", "c-param", "test_sample.py::test_awaited"),
        Citation("requirement", "r-class", "test_sample.py::TestGroup::test_inside"),
        Citation("clause", "c-mark", "test_sample.py::TestGroup::test_inside"),
    }


def test_a_mark_of_the_module_counts_for_each_test_in_it(file: Path) -> None:
    text = 'pytestmark = [pytest.mark.clause("c")]\ndef test_a(): ...\ndef test_b(): ...\n'
    file.write_text(text, encoding="utf-8")
    assert [citation.test for citation in conformance.citations_in(file)] == [
        "test_sample.py::test_a",
        "test_sample.py::test_b",
    ]


def test_a_citation_that_is_not_written_out_is_refused(file: Path) -> None:
    file.write_text("@pytest.mark.clause(NAME)\ndef test_a(): ...\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="must be written out, not NAME"):
        list(conformance.citations_in(file))


def test_a_citation_of_a_clause_that_does_not_exist_is_reported() -> None:
    unknown = Citation("clause", "bpmux-Z99", "test_x.py::test_x")
    known = Citation("clause", "bpmux-G01", "test_x.py::test_x")
    assert list(conformance.complaints([known, unknown], [])) == [
        "test_x.py::test_x cites the clause bpmux-Z99, which does not exist"
    ]


def test_the_page_names_the_tests_of_a_clause_and_the_clauses_without_one() -> None:
    page = conformance.render([Citation("clause", "bpmux-G01", "core/test_x.py::test_x")])
    row = next(line for line in page.splitlines() if line.startswith("| bpmux-G01 |"))
    assert row.endswith("| `core/test_x.py::test_x` |")
    unmet = next(line for line in page.splitlines() if line.startswith("Shown by no test yet") and "bpmux" in line)
    assert "bpmux-G02" in unmet
    assert "bpmux-G01" not in unmet
