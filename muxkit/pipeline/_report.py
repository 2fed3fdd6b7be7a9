"""What do captures show, for people with a browser? One page that needs nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muxkit._page import Bar, Group, Series, bars, cell, document, lines, table
from muxkit.pipeline._analytics import SLICES, analyse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyspark.sql import SparkSession

    from muxkit.pipeline._analytics import Answers, Raw, Row, Rows, Value

TOP: Final = 20  # bars of a plot
LONGEST_NAME: Final = 28  # letters beside a bar
IN, OUT = 0, 3  # colours

Column = tuple[str, str]
"""A title, and what stands below it: the name of a value, with `#` in front if it is a number."""


def report(
    captures: str | Path,
    page: str | Path | None = None,
    *,
    raw: Raw | None = None,
    spark: SparkSession | None = None,
    title: str = "muxkit captures",
) -> Path:
    """Write a page about the captures below a folder, `report.html` in it unless `page` says where; gives its path.

    What is in it, `Answers` says. With `raw` the raw captures are decoded for it. Without `spark` this process does
    everything, with all rows in memory.
    """
    target = Path(page) if page is not None else Path(captures) / "report.html"
    target.write_text(render(analyse(captures, raw=raw, spark=spark), title), encoding="utf-8")
    return target


def render(answers: Answers, title: str = "muxkit captures") -> str:
    """The page as text."""
    sections = [
        _facts(answers),
        _section("Connections", "", _table(answers.connections, CONNECTIONS)),
        _rates(answers),
        _volumes(answers),
        _credit(answers),
        _round_trips(answers),
        _fairness(answers),
        _resends(answers),
        _violations(answers),
    ]
    return document(title, "".join(sections))


# --- the sections


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
            "nothing behind such a gap is decoded"
        )
    if totals["unverified"]:
        facts["not verified"] = f"{totals['unverified']:,.0f} connections, whose recording does not begin with them"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>"


def _rates(answers: Answers) -> str:
    width = answers.width_us
    first = answers.first_us - answers.first_us % width
    slices = min(SLICES + 2, (answers.last_us - first) // width + 1)
    values = {"in": [0.0] * slices, "out": [0.0] * slices}
    for row in answers.rates:
        place = (int(_number(row["bucket_us"])) - first) // width
        if row["direction"] in values and 0 <= place < slices:
            values[str(row["direction"])][place] = _number(row["bytes"]) * 1e6 / width
    series = [Series("in", values["in"], IN), Series("out", values["out"], OUT)]
    most = f"{amount(max(max(one.values) for one in series))}/s"
    chart = lines("bytes a second", series, left=moment(first), right=moment(answers.last_us), most=most)
    return _section("Payload over time", f"Bytes a second of all connections, in slices of {span(width)}.", chart)


def _volumes(answers: Answers) -> str:
    rows = [row for row in answers.volumes if _number(row["bytes"])][:TOP]
    chart = _bars(
        "bytes by channel", rows, "bytes", amount, _channel, lambda row: IN if row["direction"] == "in" else OUT
    )
    return _section(
        "Volume by channel",
        "Bytes of payload; the rate is that between a channel's first and last frame.",
        chart + _table(answers.volumes, VOLUMES),
    )


def _credit(answers: Answers) -> str:
    rows = [row for row in answers.credit if _number(row["stopped_us"])][:TOP]
    chart = _bars("time without credit", rows, "stopped_us", span, _channel, lambda row: 4)
    return _section(
        "Without credit",
        "How long a channel that we send on had no credit left, until the peer granted more: nothing could be sent "
        "then. Whether anything was waiting is not recorded. The last stop counts only if a grant ended it.",
        chart + _table(answers.credit, CREDIT),
    )


def _round_trips(answers: Answers) -> str:
    groups = []
    for what in dict.fromkeys(str(row["what"]) for row in answers.round_trips):
        rows = [row for row in answers.round_trips if row["what"] == what][:TOP]
        made = [
            Bar(
                name=_short(str(row["connection"])),
                parts=[_number(row["p50_us"])],
                marks=[_number(row["p99_us"])],
                colour=IN,
                note=f"p50 {span(row['p50_us'])}, p99 {span(row['p99_us'])}, {_number(row['trips']):,.0f} times",
            )
            for row in rows
        ]
        groups.append(Group(f"{what}: the bar is the median, the ring where 99 of 100 were over", made))
    return _section(
        "Round trips",
        "From a ping to its answer, from a request to the end of its response, from a message to the acknowledgement "
        "that names it (decoded Relink only).",
        (bars("round trips", groups) if groups else "") + _table(answers.round_trips, ROUND_TRIPS),
    )


def _fairness(answers: Answers) -> str:
    chart = _bars(
        "fairness", answers.fairness[:TOP], "jain", lambda value: f"{_number(value):.3f}", _connection, lambda row: 5
    )
    return _section(
        "Fairness between channels",
        "Jain's index of the bytes that the channels of a connection had: 1 if all had the same, 1/n if one had "
        f"everything. The mean is over slices of {span(answers.width_us)} in which more than one channel was busy.",
        chart + _table(answers.fairness, FAIRNESS),
    )


def _resends(answers: Answers) -> str:
    what = "Messages that went over more than one transport of their link; known from decoded Relink captures only."
    return _section("Sent again", what, _table(answers.resends, RESENDS))


def _violations(answers: Answers) -> str:
    what = "What ended connections: rules that were broken, with their clause, and links that were lost."
    return _section("Violations and losses", what, _table(answers.violations, VIOLATIONS))


CONNECTIONS: Final[Sequence[Column]] = (
    ("connection", "connection"), ("frames", "#frames"), ("in", "#bytes_in"), ("out", "#bytes_out"),
    ("channels", "#channels"), ("errors", "#errors"), ("not recorded", "#missing"),
)  # fmt: skip
VOLUMES: Final[Sequence[Column]] = (
    ("connection", "connection"), ("channel", "channel"), ("direction", "direction"), ("frames", "#frames"),
    ("bytes", "#bytes"), ("bytes/s", "#bytes_per_second"),
)  # fmt: skip
CREDIT: Final[Sequence[Column]] = (
    ("connection", "connection"), ("channel", "channel"), ("grants", "#grants"), ("bytes granted", "#granted"),
    ("stops", "#stops"), ("without credit, µs", "#stopped_us"), ("least credit", "#least"),
)  # fmt: skip
ROUND_TRIPS: Final[Sequence[Column]] = (
    ("what", "what"), ("connection", "connection"), ("times", "#trips"), ("p50 µs", "#p50_us"),
    ("p90 µs", "#p90_us"), ("p99 µs", "#p99_us"), ("most µs", "#most_us"),
)  # fmt: skip
FAIRNESS: Final[Sequence[Column]] = (
    ("connection", "connection"), ("direction", "direction"), ("channels", "#channels"), ("index", "#jain"),
    ("slices", "#slices"), ("mean", "#mean"), ("least", "#least"),
)  # fmt: skip
RESENDS: Final[Sequence[Column]] = (
    ("connection", "connection"), ("channel", "channel"), ("direction", "direction"), ("messages", "#messages"),
    ("again", "#resent"),
)  # fmt: skip
VIOLATIONS: Final[Sequence[Column]] = (
    ("what", "kind"), ("clause", "rule"), ("times", "#times"), ("connections", "#connections"),
    ("first in", "connection"), ("text", "text"),
)  # fmt: skip


# --- pieces


def _section(title: str, explained: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2><p>{escape(explained)}</p>{body}"


def _table(rows: Rows, columns: Sequence[Column]) -> str:
    if not rows:
        return "<p>None.</p>"
    body = []
    for row in rows:
        cells = []
        for _, name in columns:
            value = row[name.removeprefix("#")]
            cells.append(cell(_figure(value), "number") if name.startswith("#") else cell(str(value or "")))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return table([title for title, _ in columns], body)


def _bars(
    title: str,
    rows: Iterable[Row],
    name: str,
    said: Callable[[Value], str],
    called: Callable[[Row], str],
    colour: Callable[[Row], int],
) -> str:
    made = [
        Bar(name=_short(called(row)), parts=[_number(row[name])], colour=colour(row), note=said(row[name]))
        for row in rows
    ]
    return bars(title, [Group(title, made)]) if made else ""


def _channel(row: Row) -> str:
    return f"{row['channel']} · {row['connection']}"


def _connection(row: Row) -> str:
    return f"{row['direction']} · {row['connection']}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _number(value: Value) -> float:
    return float(value) if value is not None else 0.0


def _figure(value: Value) -> str:
    if value is None:
        return ""
    number = float(value)
    return f"{number:,.0f}" if number == int(number) or abs(number) >= 1000 else f"{number:,.3f}"


def moment(us: int) -> str:
    return f"{datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def amount(value: Value) -> str:
    """Bytes, in the unit that suits them."""
    number = _number(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def span(us: Value) -> str:
    """Microseconds, in the unit that suits them."""
    number = _number(us)
    if number < 1000:
        return f"{number:.0f} µs"
    return f"{number / 1e3:.3g} ms" if number < 1e6 else f"{number / 1e6:.4g} s"
