"""How does a page look that needs nothing else? Its frame, its style in the colours that people prefer, its tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from muxkit.pipeline.capture.plots import COLOURS

if TYPE_CHECKING:
    from collections.abc import Iterable

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
.axis { stroke: var(--line); fill: none; } .line { stroke-width: 1.5; }
""" + "".join(
    f".c{number} {{ fill: var(--c{number}); }} polyline.c{number} {{ fill: none; stroke: var(--c{number}); }} "
    for number in range(COLOURS)
)


def document(title: str, body: str) -> str:
    """A whole page: nothing is fetched, nothing runs."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def table(heads: Iterable[str], body: Iterable[str]) -> str:
    """A table that scrolls by itself when it is too wide; `body` are rows of `cell`."""
    head = "".join(f"<th>{escape(title)}</th>" for title in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def cell(text: str, kind: str = "") -> str:
    """One cell; `kind` is a class of the page: `number`, `good`, `bad`."""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
