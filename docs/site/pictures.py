"""Draw the pictures of docs/explanation from traces of the examples, which `python docs/site/pictures.py` runs.

`slow-reader.svg` has the credit of two channels over time, `first-message.svg` the frames of one between both ends.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import attrs

from muxkit.trace import Event, Recording, read
from muxkit.trace.reading import blocked

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURES: Final = ROOT / "docs" / "explanation"
WIDTH: Final = 760

STYLE: Final = """<style>
svg.trace text{font:13px sans-serif;fill:var(--mux-text,#263238)}
svg.trace .small{font-size:11.5px;paint-order:stroke;stroke:var(--md-default-bg-color,#fff);stroke-width:4px}
svg.trace .line{fill:none;stroke:var(--mux-line,#00796b);stroke-width:1.4}
svg.trace .back{stroke-dasharray:5 3}
svg.trace .axis{fill:none;stroke:var(--mux-text,#263238);stroke-width:1;opacity:.5}
svg.trace .blocked{fill:var(--mux-warn,#d84315);opacity:.28}
svg.trace .under{fill:var(--mux-soft,#e0f2f1)}
svg.trace .tip{fill:var(--mux-line,#00796b)}
svg.trace .middle{text-anchor:middle}
svg.trace .end{text-anchor:end}
</style>"""


def svg(height: int, label: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="trace" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="{html.escape(label)}">\n{STYLE}\n{body}\n</svg>\n'
    )


# ---------------------------------------------------------------------------- credit over time

LEFT, RIGHT, PANEL, GAP = 70, 20, 120, 44


def credit_timeline(recording: Recording, channels: Sequence[tuple[str, str]]) -> str:
    """Draw for each (channel, title) how much may still be sent, and shade the time in which that was too little."""
    names = [name for name, _ in channels]
    events = [event for event in recording.events if event.data.get("channel") in names]
    begin, end = events[0].time, events[-1].time
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    shaded = list(blocked(events))
    parts = []
    for number, (channel, title) in enumerate(channels):
        top = 24 + number * (PANEL + GAP)
        balance = balances(events, channel)
        most = max(value for _, value in balance)
        waited = [(max(start, begin), stop) for name, start, stop in shaded if name == channel]
        total = sum(stop - start for start, stop in waited)
        parts.append(
            f'<text x="{LEFT}" y="{top - 8}">{html.escape(title)}: blocked on credit for {total:.0f} ms</text>'
        )
        columns: dict[int, list[int]] = {}
        at, value = LEFT, 0
        for time, value in balance:
            column = LEFT + round((time - begin) * scale)
            for between in range(at + 1, column):
                columns.setdefault(between, [columns[at][-1] if at in columns else 0])
            columns.setdefault(column, []).append(value)
            at = column
        for between in range(at + 1, WIDTH - RIGHT + 1):
            columns.setdefault(between, [value])
        points = " ".join(
            f"{column},{top + PANEL - PANEL * each / most:.1f}"
            for column, values in sorted(columns.items())
            for each in dict.fromkeys((values[0], max(values), min(values), values[-1]))
        )
        low = top + PANEL
        parts.append(f'<polygon class="under" points="{LEFT},{low} {points} {WIDTH - RIGHT},{low}"/>')
        for start, stop in merged(waited, 1 / scale):
            x = LEFT + (start - begin) * scale
            parts.append(
                f'<rect class="blocked" x="{x:.1f}" y="{top}" width="{(stop - start) * scale:.1f}" height="{PANEL}"/>'
            )
        parts.append(f'<polyline class="line" points="{points}"/>')
        parts.append(f'<path class="axis" d="M{LEFT},{top} V{low} H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="small end" x="{LEFT - 6}" y="{top + 6}">{most / 1024:g} KiB</text>')
        parts.append(f'<text class="small end" x="{LEFT - 6}" y="{low}">0</text>')
    low = 24 + len(channels) * (PANEL + GAP) - GAP
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if (end - begin) / each <= 10)
    parts += [
        f'<text class="small middle" x="{LEFT + time * scale:.0f}" y="{low + 18}">{time} ms</text>'
        for time in range(0, int(end - begin) + 1, step)
    ]
    return svg(low + 28, "The credit of " + " and of ".join(title for _, title in channels), parts)


def balances(events: Iterable[Event], channel: str) -> list[tuple[float, int]]:
    """Return how much credit a channel's sender had left, after each event that changed it."""
    balance, found = 0, []
    for event in events:
        if event.data["channel"] == channel and event.name in ("credit_received", "frame_sent"):
            balance += event.data["amount"] if event.name == "credit_received" else -event.data["size"]
            found.append((event.time, balance))
    return found


def merged(spans: Iterable[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    """Join spans of time that are no further apart than `near`."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] <= near:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


# ---------------------------------------------------------------------------- frames between two ends


@attrs.frozen
class Arrow:
    """A frame: when it left one end and reached the other, in milliseconds since 1970."""

    text: str
    left: float
    reached: float
    is_back: bool


ROW, CLIENT, SERVER = 20, 190, 570
ALONG: Final = 0.22  # of an arrow, where its text begins


def sequence(client: Recording, server: Recording, *, without: str = "top-level") -> str:
    """Draw the frames of a session between its two ends, in the order of time; gaps are not to scale."""
    arrows = [*frames(client, server, is_back=False), *frames(server, client, is_back=True)]
    arrows = [each for each in arrows if not each.text.startswith(without)]
    began = min(each.left for each in arrows)
    moments = sorted({(each.left, 0) for each in arrows} | {(each.reached, 1) for each in arrows})
    rows = {moment: 64.0 + ROW * number for number, moment in enumerate(moments)}
    low = round(max(rows.values()) + 24)
    parts = [
        '<defs><marker id="trace-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    ]
    for name, x in (("client", CLIENT), ("server", SERVER)):
        parts.append(f'<text class="middle" x="{x}" y="28" font-weight="bold">{name}</text>')
        parts.append(f'<path class="axis" d="M{x},40 V{low}"/>')
    for each in arrows:
        start, stop = (SERVER, CLIENT) if each.is_back else (CLIENT, SERVER)
        top, bottom = rows[each.left, 0], rows[each.reached, 1]
        back = " back" if each.is_back else ""
        parts.append(
            f'<path class="line{back}" d="M{start},{top:.0f} L{stop},{bottom:.0f}" marker-end="url(#trace-tip)"/>'
        )
        across, down = start + (stop - start) * ALONG, top + (bottom - top) * ALONG - 5
        side = "end" if each.is_back else ""
        parts.append(f'<text class="small {side}" x="{across:.0f}" y="{down:.0f}">{html.escape(each.text)}</text>')
        for at, moment, row in ((start, each.left, top), (stop, each.reached, bottom)):
            words = f"{moment - began:.1f} ms"
            place = f'class="small end" x="{CLIENT - 10}"' if at == CLIENT else f'class="small" x="{SERVER + 10}"'
            parts.append(f'<text {place} y="{row + 4:.0f}">{words}</text>')
    return svg(low + 12, "The frames of a channel, from its opening to the confirmation of its end", parts)


def frames(sender: Recording, receiver: Recording, *, is_back: bool) -> list[Arrow]:
    """Pair what one end sent with what the other received; both are in the same order."""
    sent = [event for event in sender.events if event.name == "frame_sent"]
    received = [event for event in receiver.events if event.name == "frame_received"]
    arrows = []
    for out, came in zip(sent, received, strict=False):
        size = f", {out.data['size']} bytes" if out.data["size"] else ""
        left = sender.began + out.time
        # Two files are aligned by the time of day at which each began; a frame never arrives before it left.
        reached = max(receiver.began + came.time, left + 0.01)
        arrows.append(Arrow(f"{out.data['channel']}: {out.data['frame']}{size}", left, reached, is_back))
    return arrows


# ---------------------------------------------------------------------------- from the examples


def traces(example: str, folder: Path) -> tuple[Recording, Recording]:
    """Run an example; return the traces of its client and of its server."""
    subprocess.run(
        [sys.executable, ROOT / "examples" / example],
        env={**os.environ, "MUXKIT_TRACE_DIR": str(folder)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    [client], [server] = (list(folder.glob(f"*-{side}-*.sqlog")) for side in ("client", "server"))
    return read(client), read(server)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _, server = traces("slow_reader.py", Path(scratch, "slow"))
        channels = [("in-sink 1", "fast"), ("in-sink 2", "slow, which is read only after the other")]
        (PICTURES / "slow-reader.svg").write_text(credit_timeline(server, channels), encoding="utf-8")
        both = traces("echo.py", Path(scratch, "echo"))
        (PICTURES / "first-message.svg").write_text(sequence(*both), encoding="utf-8")


if __name__ == "__main__":
    main()
