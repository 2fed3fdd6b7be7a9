"""The page of a trace, in a real browser."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import muxkit
from muxkit.trace import SessionTrace, page, read
from tests.trace._chromium import Browser, browser, needs_chromium

pytestmark = [needs_chromium, pytest.mark.timeout(400)]

PLANTED = (
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<!--<script>",
    "\u202eleft\u2066",
    "\x1b[31m\x00\x07",
    "{{script}}",
    "__proto__",
    "x" * 100_000,
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def show(chromium: Browser, folder: Path, *traces: Path) -> None:
    chromium.complaints.clear()
    target = folder / "page.html"
    target.write_text(page([read(trace) for trace in traces]), encoding="utf-8")
    chromium.open(target)
    chromium.drawn()


def colours(png: bytes) -> int:
    """Count the different pixels of a PNG, row filters left as they are: a blank picture has a handful."""
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    raw = zlib.decompress(data)
    return len({raw[start : start + 3] for start in range(0, len(raw), 3)})


def write(path: Path, events: int, *, channels: tuple[str, ...] = ("in 1",), name: str = "client test") -> Path:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    trace = SessionTrace(path, name=name, clock=clock)
    for number in range(events // 2):
        channel = channels[number % len(channels)]
        trace.credit("in", channel, 100)
        trace.frame("out", channel, f"payload{number}" if number % 1000 == 7 else "payload", 100)
    trace.close()
    return path


def test_a_hundred_thousand_events_are_scrolled_searched_and_clicked(chromium: Browser, tmp_path: Path) -> None:
    show(chromium, tmp_path, write(tmp_path / "trace", 100_000))
    assert chromium.run("document.getElementById('found').textContent") == "100000 events"
    slowest = chromium.run("""(async () => {
      const scroll = document.getElementById("scroll");
      let most = 0;
      for (let step = 0; step <= 100; step++) {
        scroll.scrollTop = scroll.scrollHeight * step / 100;
        const began = performance.now();
        paint();
        most = Math.max(most, performance.now() - began);
      }
      return [most, Math.floor(scroll.scrollTop / ROW) > 99000, document.querySelectorAll("*").length];
    })()""")
    assert slowest[1]
    assert slowest[2] < 200  # no element for each event: drawing is virtual
    chromium.run("document.getElementById('search').focus()")
    chromium.write("payload7007")
    assert chromium.run("document.getElementById('found').textContent") == "1 events"
    chromium.drawn()
    chromium.click(400, chromium.run("document.getElementById('scroll').getBoundingClientRect().top + 8"))
    assert "payload7007" in chromium.run("document.getElementById('selected').textContent")
    assert colours(chromium.picture()) > 50
    assert chromium.complaints == []


def test_a_blank_page_has_few_colours(chromium: Browser, tmp_path: Path) -> None:
    blank = tmp_path / "blank.html"
    blank.write_text("<!doctype html><title>blank</title>")
    chromium.open(blank)
    assert colours(chromium.picture()) < 50


def test_what_a_peer_chose_is_text_and_nothing_else(chromium: Browser, tmp_path: Path) -> None:
    trace = SessionTrace(tmp_path / "trace", name=f"client {PLANTED[0]}")
    for text in PLANTED:
        trace.frame("out", text, text, 1)
        trace.credit("in", text, 5)
        trace.state(text, text)
        trace.error(OSError(text))
    trace.close()
    show(chromium, tmp_path, tmp_path / "trace")
    assert chromium.run("window.hit === undefined")
    assert chromium.run("document.scripts.length") == 2
    assert chromium.run("document.images.length") == 0
    shown = chromium.run("document.body.innerText")
    assert "</script><script>window.hit = 1</script>" in shown
    for sign in "\u202e\u2066\x1b\x07":
        assert sign not in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\\u202eleft" in shown
    assert "(100000 characters)" in shown
    assert len(shown) < 5000
    assert chromium.run("document.getElementById('errors').children.length") == len(PLANTED)
    assert chromium.complaints == []


def test_two_ends_stand_side_by_side_in_the_order_of_time(chromium: Browser, tmp_path: Path) -> None:
    one = write(tmp_path / "one", 100, name="client one")
    other = write(tmp_path / "other", 60, name="server other")
    show(chromium, tmp_path, one, other)
    assert chromium.run("document.getElementById('title').textContent") == "client one | server other"
    assert chromium.run("document.getElementById('found').textContent") == "160 events"
    times = chromium.run("rows.filter((row) => row[0] >= 0).map(([which, event]) => traces[which].at[event])")
    assert times == sorted(times)
    assert {row[0] for row in json.loads(chromium.run("JSON.stringify(rows)"))} >= {0, 1}
    assert chromium.complaints == []


def test_what_blocked_longest_is_shown_first_and_errors_lead_to_their_place(chromium: Browser, tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    trace = SessionTrace(tmp_path / "trace", name="client test", clock=clock)
    for channel, pause in (("quick", 0.01), ("slow", 5.0)):
        trace.credit("in", channel, 100)
        trace.frame("out", channel, "payload", 100)
        now[0] += pause
        trace.credit("in", channel, 100)
        trace.frame("out", channel, "payload", 100)
    for number in range(200):
        trace.frame("out", "slow", f"filler {number}", 0)
    trace.error(muxkit.LinkLost("planted", by="network"))
    trace.frame("out", "slow", "payload again", 100)
    trace.session_closed(muxkit.SessionInfo(protocol="bpmux", peer=""), None)
    show(chromium, tmp_path, tmp_path / "trace")
    assert chromium.run("document.getElementById('channel').selectedOptions[0].textContent") == "slow, blocked 5.00 s"
    assert "5.00 s of" in chromium.run("document.getElementById('blocked').textContent")
    shown = chromium.run("[...document.querySelectorAll('#errors button')].map((each) => each.textContent)")
    assert [text.partition(" ms ")[2] for text in shown] == ["LinkLost: planted", "closed in order"]
    is_red = "(value, at, all) => at % 4 === 0 && value > 180 && all[at + 1] < 60 && all[at + 3]"
    assert chromium.run(f"""(() => {{
      const canvas = document.getElementById("rates");
      return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, 60).data].some({is_red});
    }})()""")
    chromium.run("document.querySelector('#errors button').click()")
    assert chromium.run("document.getElementById('selected').textContent").endswith("LinkLost: planted")
    assert chromium.run("document.getElementById('scroll').scrollTop") > 3000
    assert chromium.run("[...document.querySelectorAll('#channels tr')].map((row) => row.cells[5].textContent)") == [
        "0",
        "1",
    ]
    assert chromium.complaints == []


def test_the_last_of_very_many_rows_is_reached(chromium: Browser, tmp_path: Path) -> None:
    show(chromium, tmp_path, write(tmp_path / "trace", 10))
    last = chromium.run("""(() => {
      const row = rows[0], scroll = document.getElementById("scroll");
      rows = Array(3e6).fill(row); rows[rows.length - 1] = rows[1];
      document.getElementById("space").style.height = TALLEST + "px";
      scroll.scrollTop = scroll.scrollHeight;
      return Math.ceil((hiddenAbove() + scroll.clientHeight) / ROW);
    })()""")
    assert last == 3_000_000
    chromium.drawn()
    assert chromium.complaints == []
