"""The site: links to files above docs lead to pages, diagrams of states are drawn, nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import re
from types import ModuleType

import pytest

from tests._pages import DOCS, ROOT

CONFIG = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The hooks as mkdocs loads them: by their path, since docs are no package."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_example_and_each_file_that_a_page_links_to_has_a_page(hooks: ModuleType) -> None:
    above = hooks.above()
    assert above[ROOT / "examples" / "echo.py"] == "examples/echo.md"
    assert above[ROOT / "CONTRIBUTING.md"] == "project/contributing.md"
    linked = {
        target for page in DOCS.rglob("*.md") for target in hooks.targets(page) if not target.is_relative_to(DOCS)
    }
    assert linked <= above.keys()


def test_a_link_to_a_file_above_docs_leads_to_its_page(hooks: ModuleType) -> None:
    elsewhere = "[d](https://example.org), [e](#x)"
    assert hooks.relinked(elsewhere, DOCS, "x.md") == elsewhere
    made = hooks.relinked("[b](../../examples/echo.py#main)", DOCS / "reference", "reference/x.md")
    assert made == "[b](../examples/echo.md#main)"
    found = hooks.relinked("[a](../README.md) [b](../examples/echo.py)", DOCS, "x.md")
    assert found == "[a](index.md) [b](examples/echo.md)"


def test_a_link_that_leads_to_nothing_is_a_warning(hooks: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hooks.relinked("[a](../nowhere.py)", DOCS, "x.md")
    assert "x.md: the link to '../nowhere.py' leads to nothing of the project" in caplog.text


def test_each_state_and_each_step_of_a_diagram_is_drawn(hooks: ModuleType) -> None:
    text = (DOCS / "explanation" / "why-halves.md").read_text(encoding="utf-8")
    for found in hooks.DIAGRAM.finditer(text):
        drawn = hooks.state_diagram(found["steps"])
        words = re.findall(r"\b\w+\b", re.sub(r"\[\*\]|-->|:", " ", found["steps"]))
        assert [word for word in words if f">{word}<" not in drawn and word not in drawn] == []


def test_the_site_asks_no_other_machine_for_anything() -> None:
    """Fonts and scripts of elsewhere would tell others who reads, and be missing without a network."""
    assert "font: false" in CONFIG
    plugins = re.search(r"^plugins:\n((?:  .*\n)+)", CONFIG, re.MULTILINE)
    assert plugins is not None
    assert re.findall(r"^  - (\w+)", plugins[1], re.MULTILINE) == ["search", "mkdocstrings"]
    assert re.findall(r"https?://\S+", CONFIG) == ["https://muxkit.readthedocs.io/"]
    for style in (DOCS / "site").glob("*.css"):
        assert "http" not in style.read_text(encoding="utf-8")
