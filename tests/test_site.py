"""The site: links to files above docs lead to pages, diagrams of states are drawn, nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

import muxkit
from muxkit.trace import Event, Recording
from tests._pages import DOCS, ROOT

CONFIG = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")


def loaded(name: str) -> ModuleType:
    """A module of docs/site, by its path as mkdocs loads it, since docs are no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return loaded("hooks")


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
        picture = ET.fromstring(hooks.state_diagram(found["steps"]))
        drawn = {word for each in picture.iter("text") for word in re.findall(r"\w+", each.text or "")}
        assert drawn == {*re.findall(r"\w+", re.sub(r"\[\*\]|-->|:", " ", found["steps"]))}


def test_the_site_asks_no_other_machine_for_anything() -> None:
    """Fonts and scripts of elsewhere would tell others who reads, and be missing without a network."""
    assert "font: false" in CONFIG
    plugins = re.search(r"^plugins:\n((?:  .*\n)+)", CONFIG, re.MULTILINE)
    assert plugins is not None
    assert re.findall(r"^  - (\w+)", plugins[1], re.MULTILINE) == ["search", "mkdocstrings"]
    assert re.findall(r"https?://\S+", CONFIG) == []
    for style in (DOCS / "site").glob("*.css"):
        assert "http" not in style.read_text(encoding="utf-8")


def test_the_signatures_of_muxkit_are_complete() -> None:
    page = (DOCS / "reference" / "api" / "muxkit.md").read_text(encoding="utf-8")
    shown = [name for members in re.findall(r"members: \[(.*?)\]", page) for name in members.split(", ")]
    assert sorted(shown) == sorted(vars(muxkit)["__all__"])


def test_each_name_of_muxkit_is_documented_on_its_own(hooks: ModuleType) -> None:
    """Was: an option that hid the docstring of the module hid those of its members as well."""
    page = (DOCS / "reference" / "api" / "muxkit.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: muxkit\.(\w+)$", hooks.MEMBERS.sub(hooks.each_member, page), re.MULTILINE)
    assert sorted(shown) == sorted(vars(muxkit)["__all__"])


# ---------------------------------------------------------------------------- pictures from traces


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_frames_of_a_traced_program_are_drawn_in_their_order(tmp_path: Path) -> None:
    pictures = loaded("pictures")
    drawn = texts(pictures.sequence(*pictures.traces("echo.py", tmp_path)))
    assert drawn[:2] == ["client", "server"]
    frames = [each for each in drawn if ": " in each]
    there = [each.partition(": ")[2] for each in frames if each.startswith(("out-", "duplex"))]
    assert there == ["payload", "credit", "payload, 5 bytes", "end", "end"]
    assert "in-sink 1: payload, 5 bytes" in frames
    assert "in-sink 1: ack-end" in frames


def test_the_time_in_which_a_sender_had_no_credit_is_shaded() -> None:
    pictures = loaded("pictures")

    def event(time: float, name: str, **data: object) -> Event:
        return Event(time, name, {"channel": "a", **data})

    recording = Recording(
        {},
        [
            event(0, "credit_received", amount=2048),
            event(10, "frame_sent", frame="payload", size=2048),
            event(50, "credit_received", amount=1024),
            event(51, "frame_sent", frame="payload", size=1024),
        ],
    )
    drawn = pictures.credit_timeline(recording, [("a", "one")])
    assert "one: blocked on credit for 40 ms" in texts(drawn)
    [shaded] = ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
    pixels = (pictures.WIDTH - pictures.LEFT - pictures.RIGHT) / 51
    assert float(shaded.get("width", 0)) == pytest.approx(40 * pixels, abs=0.1)


@pytest.mark.parametrize("picture", ["slow-reader", "first-message"])
def test_a_picture_of_the_pages_is_drawn_from_a_trace(picture: str) -> None:
    drawn = texts((DOCS / "explanation" / f"{picture}.svg").read_text(encoding="utf-8"))
    assert any(each.endswith(" ms") for each in drawn)


def test_each_page_is_in_the_navigation_once() -> None:
    """mkdocs refuses a page that the navigation lacks, but says nothing about one that it has twice."""
    named = re.findall(r"^ +- ([\w/.-]+\.md|[\w/-]+/\*)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(named) == sorted({*named})
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {
        path.relative_to(DOCS).as_posix() for path in (DOCS / "changes").glob("*.md")
    }
    folders = tuple(each.removesuffix("*") for each in named if each.endswith("/*"))
    assert sorted(page for page in pages if page not in named and not page.startswith(folders)) == []
