"""The page of options is up to date, and its text and that about transports say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import options_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_options_is_up_to_date() -> None:
    assert options_page.PAGE.read_text(encoding="utf-8") == options_page.page()


def test_an_option_without_a_docstring_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_page, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text("class SomeOptions(TypedDict):\n    limits: int\n", encoding="utf-8")
    with pytest.raises(ValueError, match="SomeOptions: expected a docstring below 'limits', got none"):
        options_page.declared("module.py")


def test_the_guide_to_transports_shows_the_options_of_the_example() -> None:
    page = (ROOT / "docs/how-to/transport.md").read_text(encoding="utf-8")
    [program] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ConnectOptions" in each]
    assert program in (ROOT / "examples/custom_transport/muxkit_exec.py").read_text(encoding="utf-8")
