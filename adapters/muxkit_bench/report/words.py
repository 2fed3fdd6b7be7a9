"""Figures in words: three digits, a unit for thousands and millions, and the spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit_bench.report.figures import Line, Spread

MICRO = 1e6


def short(number: float) -> str:
    """Format with three significant digits, or all digits below ten thousand."""
    size = abs(number)
    if size >= 999_500:
        return f"{number / 1e6:#.3g} M".replace(". M", " M")
    if size >= 9_999.5:
        return f"{number / 1e3:#.3g} k".replace(". k", " k")
    return f"{number:,.0f}" if size >= 99.95 else f"{number:#.3g}".rstrip(".")


def agreeing(number: float, agrees: Callable[[float], bool]) -> str:
    """Format like `short`, with more digits until the rounded number agrees too."""
    words = short(number)
    if agrees(_read(words)):
        return words
    figures, _, unit = words.partition(" ")
    behind_the_point = 0 if unit else len(figures.partition(".")[2]) + 1
    written = (f"{number:,.{digits}f}" for digits in range(behind_the_point, 18))
    return next((words for words in written if agrees(_read(words))), f"{number!r}")


def _read(words: str) -> float:
    """Parse what `short` wrote."""
    figures, _, unit = words.replace(",", "").partition(" ")
    return float(figures) * {"": 1.0, "k": 1e3, "M": 1e6}[unit]


def median(spread: Spread | None, scale: float = 1.0) -> str:
    return "" if spread is None else short(spread.median * scale)


def extent(spread: Spread | None, scale: float = 1.0) -> str:
    """Format the least and the most; nothing for a single round."""
    if spread is None or spread.least == spread.most:
        return ""
    return f"{short(spread.least * scale)} – {short(spread.most * scale)}"


def cpu(line: Line) -> str:
    if line.client_cpu is None or line.server_cpu is None:
        return ""
    return f"{median(line.client_cpu)} / {median(line.server_cpu)}"


def latency(line: Line) -> str:
    if "p99" not in line.also:
        return ""
    return f"{median(line.also['p50'], MICRO)} / {median(line.also['p99'], MICRO)}"


def beside(line: Line) -> str:
    """Format the other figures of a job."""
    match line.shape.job:
        case "neighbour":
            idle, bulk = line.also["idle_p50"], line.also["bulk"]
            return f"idle p50 {median(idle, MICRO)} µs, bulk {median(bulk)} MiB/s"
        case "idle":
            client, server = line.also["client_bytes"], line.also["server_bytes"]
            return f"client {median(client)}, server {median(server)}, by {line.units:,.0f} channels"
        case _:
            return ""
