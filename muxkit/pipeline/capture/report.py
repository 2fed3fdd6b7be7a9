"""The report about captures, a self-contained HTML page.

`report` analyzes captures and renders the answers as charts and tables. The page loads nothing else and runs no
scripts, so it can be mailed or archived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from muxkit.pipeline.capture.analysis import SLICES, Answers, Raw, Row, Rows, Value, analyse
from muxkit.pipeline.capture.files import Selection
from muxkit.pipeline.capture.page import (
    Bar,
    Cell,
    Group,
    Series,
    bars,
    cell,
    document,
    folded,
    heat,
    histogram,
    lines,
    table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOP: Final = 20  # bars per chart
LONGEST_NAME: Final = 40  # letters in the name of a bar
OPEN_ROWS: Final = 15  # a table with more rows is folded
STEP: Final = 2**0.5  # ratio of successive durations in the answer `latency`
_OWN_NAME: Final = re.compile(r"(.+)-(\d+)-\d{13}")  # default name of a capture: host, process, time
IN, OUT = 0, 3  # colours


@attrs.frozen
class Section:
    """A part of the page: an explanation, a chart, and a table with the answers to one question."""

    title: str
    explained: str
    """The explanation. `{width}` stands for the width of the time slices."""
    rows: str = ""
    """The field of `Answers` that the table shows."""
    columns: str = ""
    """Titles and values of the columns, separated by `|`: `title: name`, or one text for both. The first character of a
    name gives its type: `#` a number, `~` bytes, `@` microseconds, `&` a connection, `%` a capture."""
    chart: Callable[[Answers, Names], str] | None = None


def report(
    captures: str | Path,
    page: str | Path | None = None,
    *,
    raw: Raw | None = None,
    only: Selection | None = None,
    spark: SparkSession | None = None,
    title: str = "muxkit captures",
) -> Path:
    """Write an HTML page about the captures below a directory, with the content of `Answers`.

    Args:
        captures: the directory or URL of the captures.
        page: where to write the page. By default `report.html` in the directory. Captures at a URL need a `page`.
        raw: decode the raw bytes in this way. By default the recorded frames are used.
        only: the rows to read. By default all rows.
        spark: a Spark session that does the work. By default DuckDB does it in this process.
        title: the title of the page.

    Returns:
        The path of the page.

    Raises:
        ValueError: if `page` is missing for captures at a URL.
        CaptureError: if a file is damaged or isn't part of a capture.
    """
    if page is None and "://" in str(captures):
        raise ValueError(f"{captures}: say where the page goes: report(captures, page)")
    target = Path(page) if page is not None else Path(captures) / "report.html"
    target.write_text(render(analyse(captures, raw=raw, only=only, spark=spark), title), encoding="utf-8")
    return target


class Names:
    """Short names of captures and connections: the host, and the process if a host has several captures."""

    def __init__(self, captures: Sequence[str]) -> None:
        told = {capture: _OWN_NAME.fullmatch(capture) for capture in captures}
        hosts = [match[1] if match else capture for capture, match in told.items()]
        self._captures = {
            capture: capture if match is None else match[1] if hosts.count(match[1]) == 1 else f"{match[1]} {match[2]}"
            for capture, match in told.items()
        }
        if len({*self._captures.values()}) < len(self._captures):
            self._captures = {capture: capture for capture in captures}

    def capture(self, name: str) -> str:
        """Return the short name of a capture."""
        return self._captures.get(name, name)

    def connection(self, connection: str) -> str:
        """Return the name of a connection, followed by its capture if there are several captures."""
        for capture, short in self._captures.items():
            if connection.startswith(f"{capture}/"):
                name = connection[len(capture) + 1 :]
                return name if len(self._captures) == 1 else f"{name} · {short}"
        return connection


def render(answers: Answers, title: str = "muxkit captures") -> str:
    """Return the page as text."""
    names = Names([str(row["capture"]) for row in answers.captures])
    pieces = [_facts(answers)]
    for section in SECTIONS:
        explained = section.explained.format(width=span(answers.width_us))
        pieces.append(f"<h2>{escape(section.title)}</h2><p>{escape(explained)}</p>")
        if section.chart is not None:
            pieces.append(section.chart(answers, names))
        if section.rows:
            pieces.append(_table(getattr(answers, section.rows), section.columns, names))
    return document(title, "".join(pieces))


def _facts(answers: Answers) -> str:
    totals = {name: _number(value) for name, value in answers.totals.items()}
    facts = {
        "from": moment(answers.first_us),
        "to": moment(answers.last_us),
        "rows": f"{answers.count:,}",
        "left out": f"{totals['dropped']:,.0f} rows, because the disk was too slow" if totals["dropped"] else "nothing",
        "broken rules": f"{totals['broken']:,.0f}",
    }
    if totals["gaps"]:
        facts["not recorded"] = (
            f"{amount(totals['missing'])} of raw bytes in {totals['gaps']:,.0f} places, because the disk was too slow; "
            "behind such a gap it goes on where chunks of bpmux are found again (not with engines, and not in Relink)"
        )
    if totals["unverified"]:
        facts["not verified"] = f"{totals['unverified']:,.0f} connections, whose recording does not begin with them"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>"


def _table(rows: Rows, columns: str, names: Names) -> str:
    if not rows:
        return "<p>None.</p>"
    titles, shown = [], []
    for column in columns.split(" | "):
        title, _, name = column.rpartition(": ")
        titles.append(title or name.lstrip("#~@&%"))
        shown.append(name)
    body = [f"<tr>{''.join(_cell(row, name, names) for name in shown)}</tr>" for row in rows]
    made = table(titles, body)
    return made if len(rows) <= OPEN_ROWS else folded(f"{len(rows):,} rows", made)


def _cell(row: Row, name: str, names: Names) -> str:
    kind, value = name[0], row[name.lstrip("#~@&%")]
    match kind:
        case "#":
            return cell(_figure(value), "number")
        case "~":
            return cell("" if value is None else amount(value), "number")
        case "@":
            return cell("" if value is None else span(value), "number")
        case "&":
            return cell(names.connection(str(value)))
        case "%":
            return cell(names.capture(str(value)))
        case _:
            return cell(str(value or ""))


def _chart(
    title: str,
    rows: str,
    name: str,
    said: Callable[[Value], str],
    called: Callable[[Row, Names], str],
    colour: Callable[[Row], int],
) -> Callable[[Answers, Names], str]:
    """Return a function that draws the largest values of a column, without values of 0."""

    def chart(answers: Answers, names: Names) -> str:
        found: Rows = getattr(answers, rows)
        made = [
            Bar(name=_short(called(row, names)), parts=[_number(row[name])], colour=colour(row), note=said(row[name]))
            for row in [row for row in found if _number(row[name])][:TOP]
        ]
        return bars(title, [Group(title, made)]) if made else ""

    return chart


def _channel(row: Row, names: Names) -> str:
    return f"{row['channel']} · {names.connection(str(row['connection']))}"


def _direction(row: Row) -> int:
    return IN if row["direction"] == "in" else OUT


def _connection(row: Row, names: Names) -> str:
    return f"{row['direction']} · {names.connection(str(row['connection']))}"


def _short(name: str) -> str:
    """Shorten a name in the middle. Hosts often start with the same letters, and clients differ at the end."""
    if len(name) <= LONGEST_NAME:
        return name
    begin = LONGEST_NAME // 4
    return f"{name[:begin]}…{name[begin + 1 - LONGEST_NAME :]}"


def _number(value: Value) -> float:
    return float(value) if value is not None else 0.0


def _figure(value: Value) -> str:
    if value is None:
        return ""
    number = float(value)
    return f"{number:,.0f}" if number == int(number) or abs(number) >= 1000 else f"{number:,.3f}"


def moment(us: int) -> str:
    """Format microseconds since 1970 as a date and time in UTC."""
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def amount(value: Value) -> str:
    """Format a number of bytes with a suitable unit."""
    number = _number(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def span(us: Value) -> str:
    """Format microseconds with a suitable unit."""
    number = _number(us)
    if number < 1000:
        return f"{number:.0f} µs"
    return f"{number / 1e3:.3g} ms" if number < 1e6 else f"{number / 1e6:.4g} s"


# --- the sections


def _rates(answers: Answers, names: Names) -> str:
    return _rates_of(answers, answers.rates)


def _rates_of(answers: Answers, rows: Rows) -> str:
    """Draw bytes per second in time slices."""
    width, first, slices = answers.width_us, *_axis(answers)
    values = {"in": [0.0] * slices, "out": [0.0] * slices}
    for row in rows:
        place = (int(_number(row["bucket_us"])) - first) // width
        if row["direction"] in values and 0 <= place < slices:
            values[str(row["direction"])][place] = _number(row["bytes"]) * 1e6 / width
    series = [Series("in", values["in"], IN), Series("out", values["out"], OUT)]
    most = f"{amount(max(max(one.values) for one in series))}/s"
    return lines("bytes a second", series, left=moment(answers.first_us), right=moment(answers.last_us), most=most)


def _axis(answers: Answers) -> tuple[int, int]:
    """Return the start of the first time slice, and the number of slices."""
    first = answers.first_us - answers.first_us % answers.width_us
    return first, min(SLICES + 2, (answers.last_us - first) // answers.width_us + 1)


def _round_trips(answers: Answers, names: Names) -> str:
    groups = []
    for what in dict.fromkeys(str(row["what"]) for row in answers.round_trips):
        rows = [row for row in answers.round_trips if row["what"] == what][:TOP]
        made = [
            Bar(
                name=_short(names.connection(str(row["connection"]))),
                parts=[_number(row["p50_us"])],
                marks=[_number(row["p99_us"])],
                colour=IN,
                note=f"p50 {span(row['p50_us'])}, p99 {span(row['p99_us'])}, {_number(row['trips']):,.0f} times",
            )
            for row in rows
        ]
        groups.append(Group(f"{what}: the bar is the median, the ring where 99 of 100 were over", made))
    return bars("round trips", groups) if groups else ""


def _latency(answers: Answers, names: Names) -> str:
    """Draw a heat map of durations over time, and their histogram, for each kind of round trip."""
    pieces = []
    first, slices = _axis(answers)
    for what in dict.fromkeys(str(row["what"]) for row in answers.latency):
        rows = [row for row in answers.latency if row["what"] == what]
        lows = sorted({int(_number(row["low_us"])) for row in rows})
        most = max(_number(row["trips"]) for row in rows)
        cells = [
            Cell(
                (int(_number(row["bucket_us"])) - first) // answers.width_us,
                lows.index(int(_number(row["low_us"]))),
                _number(row["trips"]) / most,
                f"{_number(row['trips']):,.0f} times {_steps(row['low_us'])}, {moment(int(_number(row['bucket_us'])))}",
            )
            for row in rows
        ]
        whole: dict[int, float] = dict.fromkeys(lows, 0.0)
        for row in rows:
            whole[int(_number(row["low_us"]))] += _number(row["trips"])
        ends = {"left": moment(answers.first_us), "right": moment(answers.last_us)}
        rows_of_heat = [span(low) for low in lows]
        pieces.append(f"<h3>{escape(what)}</h3>")
        pieces.append(heat(f"{what}: durations over time", cells, columns=slices, rows=rows_of_heat, **ends))
        columns = [(span(low), count, f"{count:,.0f} times {_steps(low)}") for low, count in whole.items()]
        pieces.append(histogram(f"{what}: histogram", columns, most=f"{max(whole.values()):,.0f} times"))
    return "".join(pieces) or "<p>None.</p>"


def _steps(low: Value) -> str:
    return f"{span(low)} to {span(_number(low) * STEP)}"


def _drill_down(answers: Answers, names: Names) -> str:
    """Return a foldable part for each of the busiest connections."""
    pieces = []
    for row in answers.connections:
        connection = row["connection"]
        activity = [each for each in answers.activity if each["connection"] == connection]
        if not activity:
            continue
        body = [_rates_of(answers, activity)]
        for section in SECTIONS:
            found = [each for each in getattr(answers, section.rows, ()) if each.get("connection") == connection]
            if section.rows not in ("", "connections") and found:
                columns = " | ".join(part for part in section.columns.split(" | ") if "&" not in part)
                body.append(f"<h3>{escape(section.title)}</h3>{_table(found, columns, names)}")
        told = (
            f"{names.connection(str(connection))}: {amount(row['bytes_in'])} in, {amount(row['bytes_out'])} out, "
            f"{_figure(row['channels'])} channels, {span(_number(row['last_us']) - _number(row['first_us']))}"
        )
        pieces.append(folded(told, "".join(body)))
    return "".join(pieces) or "<p>None.</p>"


SECTIONS: Final = (
    Section(
        "Hosts and processes",
        "Each capture is what one process recorded.",
        "captures",
        "capture: %capture | #connections | #frames | in: ~bytes_in | out: ~bytes_out | rows left out: #dropped | "
        "not recorded: ~missing",
    ),
    Section(
        "Connections",
        "",
        "connections",
        "connection: &connection | #frames | in: ~bytes_in | out: ~bytes_out | #channels | #errors | "
        "not recorded: ~missing",
    ),
    Section("Payload over time", "Bytes a second of all connections, in slices of {width}.", chart=_rates),
    Section(
        "Volume by channel",
        "Bytes of payload; the rate is that between a channel's first and last frame.",
        "volumes",
        "connection: &connection | channel | direction | #frames | bytes: ~bytes | a second: ~bytes_per_second",
        _chart("bytes by channel", "volumes", "bytes", amount, _channel, _direction),
    ),
    Section(
        "Without credit",
        "How long a channel that we send on had no credit left, until the peer granted more: nothing could be sent "
        "then. Whether anything was waiting is not recorded. The last stop counts only if a grant ended it.",
        "credit",
        "connection: &connection | channel | #grants | granted: ~granted | #stops | without credit: @stopped_us | "
        "least credit: #least",
        _chart("time without credit", "credit", "stopped_us", span, _channel, lambda row: 4),
    ),
    Section(
        "Round trips",
        "From a ping to its answer, from a request to the end of its response, from a message to the acknowledgement "
        "that names it (decoded Relink only).",
        "round_trips",
        "what | connection: &connection | times: #trips | p50: @p50_us | p90: @p90_us | p99: @p99_us | most: @most_us",
        _round_trips,
    ),
    Section(
        "Latency over time",
        "The same round trips: how many took how long in each slice of {width}, and in all. A darker field has more of "
        "them.",
        chart=_latency,
    ),
    Section(
        "Fairness between channels",
        "Jain's index of the bytes that the channels of a connection had: 1 if all had the same, 1/n if one had "
        "everything. The mean is over slices of {width} in which more than one channel was busy.",
        "fairness",
        "connection: &connection | direction | #channels | index: #jain | #slices | #mean | #least",
        _chart("fairness", "fairness", "jain", lambda value: f"{_number(value):.3f}", _connection, lambda row: 5),
    ),
    Section(
        "Sent again",
        "Messages that went over more than one transport of their link; known from decoded Relink captures only.",
        "resends",
        "connection: &connection | channel | direction | #messages | again: #resent",
    ),
    Section(
        "Violations and losses",
        "What ended connections: rules that were broken, with their clause, and links that were lost.",
        "violations",
        "what: kind | clause: rule | #times | #connections | first in: &connection | text",
    ),
    Section("Connection by connection", "The connections with most bytes; a click opens one.", chart=_drill_down),
)
