"""The report is complete, needs no other file, and escapes what peers sent."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from muxkit.pipeline import report
from muxkit.pipeline.capture.analysis import answers
from muxkit.pipeline.capture.report import Names, amount, render, span
from tests.pipeline._captures import Made, record_sessions

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta"}


class Checker(HTMLParser):
    """That everything that is opened is closed, and which tags there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def rich() -> Made:
    """Something of everything."""
    made = Made()
    made.add(0, "credit", "in", "out-sink 1", credit=100)
    made.frame(10, "out", "out-sink 1", "payload", 100)
    made.add(2_000_000, "credit", "in", "out-sink 1", credit=100)
    made.frame(2_000_001, "out", "out-sink 2", "payload", 50)
    made.frame(2_000_002, "out", "c 1", "ping")
    made.frame(2_000_502, "in", "c 1", "pong")
    for id in (0, 1, 1):
        made.frame(2_001_000, "out", "out 3", "message", 10, id)
    made.add(2_002_000, "error", kind="RemoteProtocolError", rule="bpmux-R29", text="too much", id=4)
    made.add(2_003_000, "dropped", size=40)
    made.add(2_003_001, "gap", "in", size=2048)
    return made


async def test_a_page_is_written_beside_the_captures(tmp_path: Path) -> None:
    await record_sessions(tmp_path, channels=2, messages=3)
    page = report(tmp_path)
    assert page == tmp_path / "report.html"
    assert "one: " in checked(page.read_text(encoding="utf-8")).text
    other = report(tmp_path, tmp_path / "other.html", title="of today")
    assert "<h1>of today</h1>" in other.read_text(encoding="utf-8")


def test_every_question_has_its_section_and_its_figures() -> None:
    text = checked(render(answers(rich().ask()))).text
    for title in ("Connections", "Payload over time", "Volume by channel", "Without credit", "Round trips",
                  "Fairness between channels", "Sent again", "Violations and losses"):  # fmt: skip
        assert title in text
    assert "bpmux-R29" in text
    assert "too much" in text
    assert "500 µs" in text, "the round trip"
    assert "2 s" in text, "without credit"
    assert "40 rows" in text, "what is missing"
    assert "2.0 KiB of raw bytes in 1 places" in text, "what was not recorded"
    assert "broken rules1" in text, "neither a gap nor a dropped row is a broken rule"


def test_a_capture_that_left_nothing_out_says_so() -> None:
    made = Made()
    made.frame(10, "out", "out-sink 1", "payload", 100)
    text = checked(render(answers(made.ask()))).text
    assert "left outnothing" in text
    assert "too slow" not in text
    assert "not recorded" not in text.split("Hosts and processes")[0]


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    page = render(answers(rich().ask()))
    tags = checked(page).tags
    assert not tags & {"script", "link", "img", "iframe", "object", "a"}
    assert not re.search(r"(?:https?:)?//|url\(|@import|\bon\w+=", page)


def test_each_plot_is_a_well_formed_drawing() -> None:
    drawings = re.findall(r"<svg.*?</svg>", render(answers(rich().ask())), re.DOTALL)
    titles = [re.findall(r'aria-label="([^"]+)"', drawing)[0] for drawing in drawings]
    assert titles == [
        "bytes a second", "bytes by channel", "time without credit", "round trips", "ping: durations over time",
        "ping: histogram", "fairness", "bytes a second",
    ]  # fmt: skip
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.find("title") is not None


def test_names_that_peers_chose_are_shown_as_they_are_and_do_nothing() -> None:
    made = Made()
    nasty = '<script>alert("1")</script>&'
    made.frame(1, "in", nasty, "payload", 10, of=nasty)
    made.add(2, "error", kind=nasty, rule=nasty, text=nasty, connection=nasty)
    checker = checked(render(answers(made.ask()), nasty))
    assert "script" not in checker.tags
    assert nasty in checker.text


def test_a_capture_of_nothing_has_a_page_as_well() -> None:
    text = checked(render(answers(Made().ask()))).text
    assert "None." in text


@pytest.mark.parametrize(
    ("us", "told"), [(0, "0 µs"), (999, "999 µs"), (1500, "1.5 ms"), (2_000_000, "2 s"), (None, "0 µs")], ids=str
)
def test_times_are_told_in_the_unit_that_suits_them(us: int | None, told: str) -> None:
    assert span(us) == told


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**40, "1024.0 GiB")],
    ids=str,
)
def test_amounts_are_told_in_the_unit_that_suits_them(size: int, told: str) -> None:
    assert amount(size) == told


def test_hosts_and_processes_have_short_names_that_tell_them_apart() -> None:
    captures = ["alpha-7-1795640000123", "beta-8-1795640000123", "beta-9-1795640000123", "by hand"]
    names = Names(captures)
    assert [names.capture(each) for each in captures] == ["alpha", "beta 8", "beta 9", "by hand"]
    assert names.connection("beta-9-1795640000123/client 3") == "client 3 · beta 9"
    assert Names(captures[:1]).connection("alpha-7-1795640000123/client 3") == "client 3"
    twice = ["alpha-7-1795640000123", "alpha-7-1795640000999"]
    assert [Names(twice).capture(each) for each in twice] == twice


def test_long_tables_are_folded_and_short_ones_are_not() -> None:
    made = Made()
    for number in range(30):
        made.frame(number, "in", f"channel {number}", "payload", 10)
    page = render(answers(made.ask()))
    assert "<summary>30 rows</summary>" in page
    assert page.index("<summary>30 rows</summary>") > page.index("Volume by channel")
    assert "rows</summary>" not in page.partition("Volume by channel")[0]


def test_each_busy_connection_has_a_part_of_its_own_with_its_figures() -> None:
    made = Made()
    for number in range(3):
        made.frame(number, "in", f"channel {number}", "payload", 2048, of=f"client {number}")
    page = render(answers(made.ask()))
    parts = re.findall(r"<details><summary>(client \d): ([^<]*)</summary>(.*?)</details>", page, re.DOTALL)
    assert [(name, told.startswith("2.0 KiB in, 0 B out, 1 channels")) for name, told, _ in parts] == [
        (f"client {number}", True) for number in range(3)
    ]
    assert all(f"channel {name[-1]}" in body and "<svg" in body for name, _, body in parts)


@pytest.mark.requirement("R-71")
def test_names_that_begin_alike_are_still_told_apart() -> None:
    """Was: Of the bars of a capture's report all read alike: names were cut where they differ."""
    from muxkit.pipeline.capture.report import LONGEST_NAME, _short

    names = [f"sink 1 · a-long-name-vm-9492-1795380000123/client-{n}" for n in range(20)]
    short = [_short(name) for name in names]
    assert len(set(short)) == 20
    assert all(len(name) <= LONGEST_NAME and name.endswith(f"client-{n}") for n, name in enumerate(short))
    assert _short("short") == "short"
