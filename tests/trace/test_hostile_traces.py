"""A trace from somebody else may hold anything: what is no event is left out, and no text becomes part of the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from muxkit.trace.reading import parse_record, read
from muxkit.trace.viewing import page

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["</script><script>alert(1)</script>", "{{script}}", "<!--<script>", "\u2028", "<img src=x onerror=alert(1)>"]


@pytest.mark.parametrize("time", ["NaN", "-Infinity", "1e400", "1e308", "-1e16", "9" * 400])
def test_an_event_at_an_impossible_time_is_left_out(time: str) -> None:
    assert parse_record(f'{{"time":{time},"name":"muxkit:frame","data":{{}}}}') is None


def test_a_record_of_too_many_brackets_is_left_out() -> None:
    assert parse_record("[" * 100_000) is None


def test_texts_of_a_trace_do_not_become_part_of_its_page(tmp_path: Path) -> None:
    header = {"qlog_version": "0.3", "title": TEXTS[0], "trace": {"common_fields": {"reference_time": 1e308}}}
    events = [
        {"time": 1, "name": "muxkit:frame", "data": {"channel": text, "kind": text, "direction": "in", "size": -1}}
        for text in TEXTS
    ]
    file = tmp_path / "trace.sqlog"
    file.write_text("".join(f"\x1e{json.dumps(record)}\n" for record in (header, *events)), encoding="utf-8")
    made = page([read(file)])
    assert made.count("<script") == 2, "the data, and the page's own"
    assert "<img" not in made
