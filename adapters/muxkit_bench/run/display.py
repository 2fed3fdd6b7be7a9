"""How far is it? A line that is printed over on a terminal, a line for each round anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from muxkit.cli.terminal import is_live, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

Say = Callable[[int, str, str], None]  # which round, which cell, which peer


@contextmanager
def progress(out: Console, rounds: int) -> Iterator[Say]:
    """Tell before each pass what it is."""
    if not is_live(out):
        yield _Lines(out, rounds)
        return
    # Drawn before a pass and never by a thread of its own, which would be measured as well.
    with Live(console=out, auto_refresh=False, transient=True) as live:
        yield lambda number, cell, peer: live.update(
            Text(printable(f"round {number} of {rounds}: {cell}, {peer}")), refresh=True
        )


class _Lines:
    def __init__(self, out: Console, rounds: int) -> None:
        self._out = out
        self._rounds = rounds
        self._last = 0

    def __call__(self, number: int, cell: str, peer: str) -> None:
        if number != self._last:
            self._last = number
            self._out.print(f"round {number} of {self._rounds}")
