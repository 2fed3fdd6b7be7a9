"""e3x on a simulated 10 Mbit/s line: goodput by loss and round trip, and the shares of several links on one line.

    python -m tests.bench.e3x_network [--seconds 20] [--svg shares.svg] [--seed 0]

Prints two tables; the plot shows the shares of two e3x flows and one like TCP's over a minute, and the queue.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tests.protocols.e3x._world import LINE, Shared, goodput, jain

if TYPE_CHECKING:
    from collections.abc import Sequence

LOSSES = (0.0, 0.01, 0.05, 0.2)
ROUND_TRIPS = (0.001, 0.05, 0.3)
MINUTE = 60  # s
NAMES = ("e3x, one", "e3x, other", "like TCP")
COLOURS = ("#1f6f8b", "#8bb8c8", "#c8743c")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="virtual seconds for each goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path, help="where to write the plot of the shared line")
    options = parser.parse_args(arguments)
    print_goodput(options.seconds, options.seed)
    shared = Shared(seed=options.seed)
    seconds = range(1, MINUTE + 1)
    taken: list[list[int]] = []
    for second in seconds:
        shared.network.run(second)
        taken.append(shared.shares)
    print_shares(shared)
    if options.svg is not None:
        options.svg.write_text(plot(taken, shared.line.samples, shared.line.queue), encoding="utf-8")
        print(f"\nwrote {options.svg}")
    return 0


def print_goodput(seconds: float, seed: int) -> None:
    print(f"Goodput in Mbit/s over a line of 10, packets of 1,400 bytes, a window of 2,000; {seconds:g} virtual s\n")
    print(f"{'round trip':>12}" + "".join(f"{f'{loss:.0%} lost':>12}" for loss in LOSSES))
    for round_trip in ROUND_TRIPS:
        got = [goodput(loss=loss, round_trip=round_trip, seconds=seconds, seed=seed)[0] for loss in LOSSES]
        print(f"{round_trip * 1e3:>9.0f} ms" + "".join(f"{rate * 8 / 1e6:>12.2f}" for rate in got))


def print_shares(shared: Shared) -> None:
    total = sum(shared.shares)
    print(f"\nA shared line of 10 Mbit/s, 50 ms, a queue of {shared.line.queue:,} bytes; {MINUTE} virtual s\n")
    for name, share in zip(NAMES, shared.shares, strict=True):
        print(f"{name:>18}: {share * 8 / MINUTE / 1e6:5.2f} Mbit/s, {share / total:6.1%}")
    waiting = sum(size for _, size in shared.line.samples) / len(shared.line.samples)
    print(f"{'all':>18}: {total * 8 / MINUTE / 1e6:5.2f} Mbit/s")
    print(f"{'Jain, e3x':>18}: {jain(shared.shares[:2]):.3f}")
    print(f"{'queue':>18}: {waiting / LINE * 1e3:.0f} ms on average; {shared.line.refused:,} packets refused")


# ---------------------------------------------------------------------------- the plot

WIDTH, HEIGHT, LEFT, GAP = 760, 200, 56, 60


def plot(taken: Sequence[Sequence[int]], queue: Sequence[tuple[float, int]], most: int) -> str:
    """Two charts: what each flow got in each second, stacked, and the bytes that waited."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {2 * HEIGHT + 2 * GAP + 30}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Two e3x flows and one like TCP's on a line of 10 Mbit/s</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += _stacked(taken)
    parts += _queue(queue, most)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _stacked(taken: Sequence[Sequence[int]]) -> list[str]:
    top = 30
    parts = [f'<text x="{LEFT}" y="18">Mbit/s of each flow, stacked, over a minute</text>']
    before = [0] * len(NAMES)
    bar = WIDTH / len(taken)
    for second, shares in enumerate(taken):
        base = float(top + HEIGHT)
        for share, old, colour in zip(shares, before, COLOURS, strict=True):
            # What waited behind a lost packet arrives all at once: more than the line in one second.
            height = min((share - old) / LINE * HEIGHT * 0.8, base - top)
            base -= height
            parts.append(
                f'<rect x="{LEFT + second * bar:.1f}" y="{base:.1f}" width="{bar:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
        before = list(shares)
    parts += _axis(top, [(f"{rate}", rate / 12.5) for rate in (0, 5, 10)])
    for place, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        x = LEFT + 320 + place * 150
        parts.append(
            f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="18">{name}</text>'
        )
    return parts


def _queue(queue: Sequence[tuple[float, int]], most: int) -> list[str]:
    top = 30 + HEIGHT + GAP
    step = max(1, len(queue) // 3000)
    points = " ".join(
        f"{LEFT + when / MINUTE * WIDTH:.1f},{top + HEIGHT - size / most * HEIGHT:.1f}" for when, size in queue[::step]
    )
    full = most / LINE * 1e3
    return [
        f'<text x="{LEFT}" y="{top - 12}">ms of queue in front of the line</text>',
        f'<polyline points="{points}" fill="none" stroke="#555555" stroke-width="0.7"/>',
        *_axis(top, [(f"{part * full:.0f}", part) for part in (0, 0.5, 1)]),
    ]


def _axis(top: int, marks: Sequence[tuple[str, float]]) -> list[str]:
    parts = [f'<path d="M{LEFT} {top} V{top + HEIGHT} H{LEFT + WIDTH}" fill="none" stroke="black"/>']
    for text, part in marks:
        y = top + HEIGHT * (1 - part)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{text}</text>')
    for second in range(0, MINUTE + 1, 10):
        x = LEFT + second / MINUTE * WIDTH
        parts.append(f'<text x="{x:.0f}" y="{top + HEIGHT + 16}" text-anchor="middle">{second} s</text>')
    return parts


if __name__ == "__main__":
    raise SystemExit(main())
