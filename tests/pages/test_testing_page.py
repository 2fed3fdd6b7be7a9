"""The tests on the page about testing, run by pytest as a reader would run them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests._pages import PYTHON, ROOT, program, run

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "docs/how-to/testing.md"
TEXT = (ROOT / "docs/how-to/testing.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    # One file, as the page says, without a configuration: a reader may only have installed pytest and pytest-trio.
    text = "\n".join(program(PAGE, number) for number in (1, 2, 3))
    (tmp_path / "test_page.py").write_text(text, encoding="utf-8")
    done = run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_page.py"], tmp_path)
    assert re.search(rf"^{1 + 2 + 4 * 5 + 3} passed in ", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_the_report_on_the_page_is_what_its_program_prints(tmp_path: Path) -> None:
    done = run([PYTHON, "-c", program(PAGE, 5)], tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)[-1]

    # Which seed finds it is the business of this version; the form of the report and the size of the plan are not.
    form = r"failed with seed (\d+), the \d+\w\w that was tried \(\d+ runs in \d+\.\d s\)\n"
    form += r"AssertionError: counted 1 of 2\n\d+ events \(.*\) were made 1:\n  1\. at .*\n"
    form += r"run it again with run_plan\(program, TEXT\), where TEXT is\n"
    form += r"  muxkit plan 1, seed \1\n  weather delay=0\.01\n  at \d.*\n"
    assert re.match(form, done.stdout), done.stdout + done.stderr
    assert re.fullmatch(form, shown)
