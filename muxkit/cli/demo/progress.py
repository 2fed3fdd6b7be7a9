"""The progress of the demo: one line that is redrawn on a terminal, one line per second elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muxkit.cli.demo.report import MIB, milliseconds
from muxkit.cli.terminal import is_live

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from muxkit.cli.demo.events import Plan, Progress

LINE_EVERY = 1.0  # s
BAR = 24  # columns


class Display(Protocol):
    """Shows the progress of runs."""

    def begin(self, transport: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def end(self) -> None: ...


def display_for(out: Console | None, plan: Plan) -> AbstractContextManager[Display]:
    """Choose the display for a console; without a console nothing is shown."""
    if out is None:
        return _Quiet()
    return _Live(out, plan) if is_live(out) else _Lines(out)


class _Quiet(AbstractContextManager["_Quiet"]):
    def begin(self, transport: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def end(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


class _Lines(_Quiet):
    """Prints one line for each second of load."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._transport = ""
        self._next = 0.0

    def begin(self, transport: str) -> None:
        self._transport = transport
        self._next = LINE_EVERY
        self._out.print(f"{transport}: starting a server process and a client process")

    def progress(self, progress: Progress) -> None:
        if progress.phase == "load" and progress.elapsed >= self._next:
            self._next += LINE_EVERY
            self._out.print(f"{self._transport}: {progress.elapsed:.0f} s, {_so_far(progress)}")


class _Live(AbstractContextManager["_Live"]):
    """Draws one line for each transport, with a progress bar."""

    def __init__(self, out: Console, plan: Plan) -> None:
        self._plan = plan
        self._rows: list[tuple[str, ProgressBar, str]] = []
        # Drawn on progress only, never by a thread.
        self._live = Live(console=out, auto_refresh=False)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, transport: str) -> None:
        bar = ProgressBar(total=self._plan.idle_seconds + self._plan.seconds, width=BAR)
        self._rows.append((transport, bar, "starting a server process and a client process"))
        self._draw()

    def progress(self, progress: Progress) -> None:
        before = self._plan.idle_seconds if progress.phase == "load" else 0.0
        self._change(before + progress.elapsed, _so_far(progress))

    def end(self) -> None:
        _, bar, text = self._rows[-1]
        self._change(bar.total or 0.0, text)

    def _change(self, completed: float, text: str) -> None:
        transport, bar, _ = self._rows[-1]
        bar.update(completed)
        self._rows[-1] = (transport, bar, text)
        self._draw()

    def _draw(self) -> None:
        table = Table.grid(padding=(0, 1))
        for transport, bar, text in self._rows:
            table.add_row(Text(transport, style="bold"), bar, Text(text))
        self._live.update(table, refresh=True)


def _so_far(progress: Progress) -> str:
    ping = "" if progress.ping is None else f", ping {milliseconds(progress.ping)} ms"
    if progress.phase == "idle":
        return f"all channels open and silent{ping}"
    return f"{progress.messages:,} messages, {progress.bytes / MIB:,.0f} MiB{ping}"
