"""A self-contained HTML page: its frame and style, tables, and charts as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import attrs

WIDTH = 940  # of a drawing, in its own units
NAMES = 170.0  # the column of names; wider for longer names
LETTER = 6.6  # per letter of the notes to the right of the bars
ROW = 22
BAR = 12
GAP = 14
HEAD = 20
HEIGHT = 170  # of a line chart
COLOURS = 6


@attrs.frozen(kw_only=True)
class Bar:
    """One row of a bar chart: its parts from left to right, and the range of the whole over several measurements."""

    name: str
    parts: Sequence[float]
    colour: int
    """The index of the colour. Parts after the first are paler."""
    note: str
    least: float | None = None
    most: float | None = None
    marks: Sequence[float] = ()
    """Points on the same axis."""

    @property
    def reach(self) -> float:
        """The largest value that the row shows."""
        return max(sum(self.parts), self.most or 0.0, *self.marks, 0.0)


@attrs.frozen
class Group:
    """Bars that share an axis."""

    title: str
    bars: Sequence[Bar]


def bars(title: str, groups: Sequence[Group]) -> str:
    """Draw a bar chart. Each group has its own axis, which starts at 0."""
    pieces: list[str] = []
    top = 4.0
    longest = max((len(bar.name) for group in groups for bar in group.bars), default=0)
    names = max(NAMES, 16 + LETTER * longest)
    for group in groups:
        if not group.bars:
            continue
        pieces.append(_text(0, top + 13, group.title, "head"))
        top += HEAD
        reach = max(bar.reach for bar in group.bars) or 1.0
        notes = 16 + LETTER * max(len(bar.note) for bar in group.bars)
        scale = max(WIDTH - names - notes, ROW) / reach
        for bar in group.bars:
            pieces.append(_row(bar, top, scale, names))
            top += ROW
        top += GAP
    return _drawing(title, top, pieces)


@attrs.frozen
class Series:
    """One line of a line chart: a value for each point of its axis."""

    name: str
    values: Sequence[float]
    colour: int


def lines(title: str, series: Sequence[Series], *, left: str, right: str, most: str) -> str:
    """Draw a line chart. `left` and `right` label the ends of the axis, and `most` labels the highest value."""
    reach = max((max(one.values, default=0.0) for one in series), default=0.0) or 1.0
    floor = HEAD + HEIGHT
    pieces = [f'<path class="axis" d="M0 {HEAD}H{WIDTH}M0 {floor}H{WIDTH}"/>', _text(0, HEAD - 6, most, "note")]
    at = WIDTH - 170.0 * len(series)
    for one in series:
        shade = f"c{one.colour % COLOURS}"
        pieces.append(f'<rect class="{shade}" x="{at:.0f}" y="{HEAD - 15}" width="10" height="10"/>')
        pieces.append(_text(at + 15, HEAD - 6, one.name, "note"))
        at += 170.0
        step = WIDTH / max(1, len(one.values) - 1)
        points = " ".join(
            f"{place * step:.1f},{floor - value / reach * HEIGHT:.1f}" for place, value in enumerate(one.values)
        )
        if one.values:
            pieces.append(f'<polyline class="line {shade}" points="{points}"/>')
    pieces += [_text(0, floor + 16, left, "note"), _text(WIDTH, floor + 16, right, "name")]
    return _drawing(title, floor + 24, pieces)


@attrs.frozen
class Cell:
    """A cell of a heat map. Its column and row are counted from 0, and its shade is up to 1."""

    column: int
    row: int
    shade: float
    note: str


def heat(title: str, cells: Sequence[Cell], *, columns: int, rows: Sequence[str], left: str, right: str) -> str:
    """Draw a heat map. `rows` are the names of its rows, starting with the lowest."""
    wide, high = (WIDTH - NAMES) / max(1, columns), 14.0
    floor = 6 + high * len(rows)
    pieces = []
    for number, name in enumerate(rows):
        pieces.append(_text(NAMES - 8, floor - high * number - 3, name, "name"))
    for each in cells:
        x, y = NAMES + each.column * wide, floor - high * (each.row + 1)
        pieces.append(
            f'<rect class="c0" x="{x:.1f}" y="{y:.1f}" width="{wide:.2f}" height="{high - 1:.1f}" '
            f'opacity="{0.12 + 0.88 * each.shade:.2f}"><title>{escape(each.note)}</title></rect>'
        )
    pieces.append(f'<path class="axis" d="M{NAMES} {floor:.1f}H{WIDTH}"/>')
    pieces += [_text(NAMES, floor + 16, left, "note"), _text(WIDTH, floor + 16, right, "name")]
    return _drawing(title, floor + 24, pieces)


def histogram(title: str, columns: Sequence[tuple[str, float, str]], *, most: str) -> str:
    """Draw a histogram. Each column has a name, a height and a note, and `most` labels the greatest height."""
    reach = max((height for _, height, _ in columns), default=0.0) or 1.0
    floor, wide = HEAD + HEIGHT, WIDTH / max(1, len(columns))
    pieces = [f'<path class="axis" d="M0 {HEAD}H{WIDTH}M0 {floor}H{WIDTH}"/>', _text(0, HEAD - 6, most, "note")]
    every = max(1, round(len(columns) * 70 / WIDTH))  # show only as many names as fit
    for number, (name, height, note) in enumerate(columns):
        tall = height / reach * HEIGHT
        pieces.append(
            f'<rect class="c0" x="{number * wide + 1:.1f}" y="{floor - tall:.1f}" width="{max(1.0, wide - 2):.1f}" '
            f'height="{tall:.1f}"><title>{escape(note)}</title></rect>'
        )
        if number % every == 0:
            pieces.append(_text(number * wide, floor + 16, name, "note"))
    return _drawing(title, floor + 24, pieces)


def folded(summary: str, body: str, *, is_open: bool = False) -> str:
    """Return a part of the page that opens when its summary is clicked."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"


def _drawing(title: str, height: float, pieces: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(pieces)}</svg>"
    )


def _row(bar: Bar, top: float, scale: float, names: float) -> str:
    middle = top + ROW / 2
    pieces = [f"<g><title>{escape(f'{bar.name}: {bar.note}')}</title>", _text(names - 8, middle + 4, bar.name, "name")]
    left = names
    for number, part in enumerate(bar.parts):
        width = part * scale
        shade = f"c{bar.colour % COLOURS}" + (" pale" if number else "")
        pieces.append(
            f'<rect class="{shade}" x="{left:.1f}" y="{middle - BAR / 2:.1f}" width="{width:.1f}" height="{BAR}"/>'
        )
        left += width
    if bar.least is not None and bar.most is not None and bar.least != bar.most:
        start, end = names + bar.least * scale, names + bar.most * scale
        pieces.append(
            f'<path class="spread" d="M{start:.1f} {middle:.1f}H{end:.1f}'
            f'M{start:.1f} {middle - 4:.1f}v8M{end:.1f} {middle - 4:.1f}v8"/>'
        )
        left = max(left, end)
    for mark in bar.marks:
        at = names + mark * scale
        pieces.append(f'<circle class="mark" cx="{at:.1f}" cy="{middle:.1f}" r="4"/>')
        left = max(left, at)
    pieces.append(_text(left + 8, middle + 4, bar.note, "note"))
    return "".join(pieces) + "</g>"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --faint: #59636e; --line: #d5dae0;
  --c0: #1f6feb; --c1: #8a939d; --c2: #b9c0c7; --c3: #d9822b; --c4: #8250df; --c5: #1a7f5a;
  --good: #1a7f37; --bad: #c01c28; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e6e9ed; --faint: #9aa4af; --line: #343c46;
  --c0: #58a6ff; --c1: #8a939d; --c2: #5c656f; --c3: #f0a35a; --c4: #b392f0; --c5: #56d39b;
  --good: #57d272; --bad: #ff7b72; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; } h3 { margin: 2rem 0 .3rem; }
p, dd { color: var(--faint); } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.number, th.number { text-align: right; } .good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
text.head { fill: var(--faint); font-weight: 600; } text.name { text-anchor: end; } text.note { fill: var(--faint); }
.spread { stroke: var(--ink); stroke-width: 1.2; fill: none; }
.mark { fill: var(--ground); stroke: var(--ink); stroke-width: 1.5; }
.pale { opacity: .5; }
summary { cursor: pointer; color: var(--faint); } details { margin: .4rem 0; }
.axis { stroke: var(--line); fill: none; } .line { stroke-width: 1.5; }
""" + "".join(
    f".c{number} {{ fill: var(--c{number}); }} polyline.c{number} {{ fill: none; stroke: var(--c{number}); }} "
    for number in range(COLOURS)
)


def document(title: str, body: str) -> str:
    """Return a complete page. It neither loads other files nor runs scripts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def table(heads: Iterable[str], body: Iterable[str]) -> str:
    """Return a table that scrolls if it is too wide. `body` contains its rows, made of `cell`."""
    head = "".join(f"<th>{escape(title)}</th>" for title in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def cell(text: str, kind: str = "") -> str:
    """Return a table cell. `kind` is a CSS class of the page: `number`, `good` or `bad`."""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
