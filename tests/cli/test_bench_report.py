"""A stored run becomes a table, a file and a page."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from muxkit_bench.report.page import page
from muxkit_bench.report.results import Entry, Failure, Machine, Pass, Report, Shape, dump, load
from muxkit_bench.report.table import print_report, print_targets
from muxkit_bench.report.targets import judge

NASTY = "<script>alert('x')</script>\x1b[31m"


def stored(*, peer: str = "h2", failures: list[Failure] | None = None) -> Report:
    """A run of two rounds with two jobs, as its file has it."""
    shapes = [
        Shape(
            key="small/100",
            job="small",
            title="small",
            channels=100,
            unit="messages/s",
            higher_is_better=True,
            counted="message",
            baseline="each",
        ),
        Shape(
            key="rtt/1",
            job="rtt",
            title="rtt",
            channels=1,
            unit="µs",
            higher_is_better=False,
            counted="round trip",
            baseline="each",
        ),
    ]
    names = ["bpmux+tcp", "raw tcp", peer]
    passes = [
        Pass(
            round=number,
            cell=shape.key,
            peer=name,
            units=100_000.0 * (3 - place) * number,
            seconds=0.25,
            client_cpu=0.2,
            server_cpu=0.1,
            also={"p50": 1e-4 * (place + 1), "p99": 3e-4} if shape.job == "rtt" else {},
        )
        for number in (1, 2)
        for shape in shapes
        for place, name in enumerate(names)
    ]
    return Report(
        began="2030-01-01T00:00:00+00:00",
        seconds=12.0,
        rounds=2,
        seed=7,
        pass_seconds=0.25,
        muxkit="0.1.0",
        machine=Machine(
            system="Linux",
            processor="a <fast> one",
            cores=2,
            pinned=[0, 1],
            python="CPython 3.11",
            packages={"trio": "0.30"},
            load_before=[0.5],
            load_after=[1.5],
        ),
        entries=[Entry(name=name, title=f"the title of {name}", baseline="raw tcp") for name in names],
        left_out=["libp2p: is not here"],
        cells=shapes,
        passes=passes,
        failures=failures or [],
    )


def table_of(report: Report, width: int = 200) -> str:
    written = io.StringIO()
    print_report(Console(file=written, width=width, markup=False, highlight=False), report)
    return written.getvalue()


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "onload", "onclick")]
        if tag not in ("meta", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect", "circle"):
            assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


# ---------------------------------------------------------------------------- the file


def test_a_report_is_read_as_it_was_written() -> None:
    report = stored(failures=[Failure(round=1, cell="rtt/1", peer="h2", sentence="it fell over")])
    assert load(dump(report)) == report


def test_a_report_of_another_form_is_refused() -> None:
    text = dump(msgspec.structs.replace(stored(), form=99))
    with pytest.raises(ValueError, match="form 99, this version reads 1"):
        load(text)


# ---------------------------------------------------------------------------- the table


def test_the_table_has_median_spread_and_ratio_of_each_cell() -> None:
    row = next(line for line in table_of(stored()).splitlines() if " bpmux+tcp " in line and " small " in line)
    for part in ("100", "messages/s", "1.80 M", "1.20 M – 2.40 M", "1.50", "0.500 / 0.250"):
        assert f" {part} " in row


def test_a_narrow_terminal_gets_the_table_without_spreads() -> None:
    lines = table_of(stored(), width=100).splitlines()
    assert max(map(len, lines[:-3])) <= 100
    assert any("1.80 M" in line for line in lines)
    assert not any("1.20 M – 2.40 M" in line for line in lines)


def test_who_was_left_out_and_who_failed_is_said() -> None:
    said = table_of(stored(failures=[Failure(round=2, cell="rtt/1", peer="h2", sentence="h2: it fell over")]))
    assert "left out: libp2p: is not here" in said
    assert "FAILED in round 2, rtt/1: h2: it fell over" in said


def test_it_is_said_when_others_needed_the_machine() -> None:
    report = stored()
    assert "other work was running" not in table_of(report)
    busy = msgspec.structs.replace(report, machine=msgspec.structs.replace(report.machine, load_before=[1.2, 0.1]))
    assert "other work was running" in table_of(busy)


def test_names_cannot_command_the_terminal() -> None:
    said = table_of(stored(peer=NASTY, failures=[Failure(round=1, cell="", peer=NASTY, sentence=NASTY)]))
    assert "\x1b" not in said
    assert r"\x1b[31m" in said


def test_several_runs_share_one_table_of_targets() -> None:
    reports = [stored(), stored()]
    written = io.StringIO()
    print_targets(Console(file=written, width=200, markup=False, highlight=False), judge(reports), 2)
    assert "run 2" in written.getvalue()
    row = next(line for line in written.getvalue().splitlines() if "rtt, to raw" in line)
    assert row.count("0.500") == 2
    assert "2 of 2" in row


def test_a_verdict_is_not_contradicted_by_the_figure_beside_it() -> None:
    report = stored()
    changed = [
        msgspec.structs.replace(one, also={"p50": 0.90004e-4 if one.peer == "bpmux+tcp" else 1e-4, "p99": 3e-4})
        for one in report.passes
        if one.cell == "rtt/1"
    ]
    report = msgspec.structs.replace(report, passes=changed)
    written = io.StringIO()
    print_targets(Console(file=written, width=200, markup=False, highlight=False), judge([report]), 1)
    row = next(line for line in written.getvalue().splitlines() if "rtt, to raw" in line)
    assert " 0.90004 " in row
    assert " NO " in row
    assert ">0.90004<" in page([report])


# ---------------------------------------------------------------------------- the page


def test_the_page_needs_nothing_but_itself() -> None:
    reader = read(page([stored()]))
    assert reader.open == []
    assert reader.outside == []
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert "url(" not in page([stored()])


def test_every_plot_is_a_whole_drawing_within_its_bounds() -> None:
    text = page([stored()])
    drawings = [piece.partition("</svg>")[0] for piece in text.split("<svg")[1:]]
    assert len(drawings) == 4
    for drawing in drawings:
        root = ElementTree.fromstring(f"<svg{drawing}</svg>")
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        bars = list(root.iter("rect"))
        assert bars
        for bar in bars:
            assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
            assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height


def test_every_plot_says_of_which_job_it_is_and_that_each_group_has_its_own_scale() -> None:
    text = page([stored()])
    labels = [piece.partition('"')[0] for piece in text.split('aria-label="')[1:]]
    assert len(set(labels)) == 4
    assert [label.partition(":")[0] for label in labels] == ["small", "small", "rtt", "rtt"]
    assert all(label.endswith("each group has its own scale") for label in labels)
    assert "Each group of bars has a scale of its own" in text


def test_bars_are_as_long_as_their_medians() -> None:
    drawing = page([stored()]).split("<svg")[1].partition("</svg>")[0]
    widths = [float(bar.attrib["width"]) for bar in ElementTree.fromstring(f"<svg{drawing}</svg>").iter("rect")]
    assert [width / widths[-1] for width in widths] == pytest.approx([3, 2, 1], rel=0.01)


def test_the_page_suits_light_and_dark() -> None:
    assert "color-scheme: light dark" in page([stored()])
    assert "prefers-color-scheme: dark" in page([stored()])


def test_nothing_that_was_measured_can_run_in_the_page() -> None:
    text = page([stored(peer=NASTY, failures=[Failure(round=1, cell="", peer=NASTY, sentence=NASTY)])])
    assert "<script" not in text
    assert "script" not in read(text).tags
    assert "&lt;script&gt;" in text


def test_several_runs_follow_each_other_on_one_page() -> None:
    text = page([stored(), stored()])
    assert "Run 2 of 2" in text
    assert text.count("<svg") == 8


def test_a_cell_that_nobody_did_leaves_no_plot() -> None:
    report = msgspec.structs.replace(stored(), passes=[])
    assert read(page([report])).tags.count("rect") == 0
