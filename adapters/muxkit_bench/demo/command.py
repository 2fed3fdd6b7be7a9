"""`muxkit demo`: run a server and a client process on this machine, over one transport after another."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import click
import msgspec
import trio
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muxkit.cli.terminal import CommandFailed, Exit, console, failure_as_fields, is_live, printable
from muxkit_bench.children import Child, child
from muxkit_bench.demo.processes import Event, Failed, Plan, Progress, Ready, Totals, understand

if TYPE_CHECKING:
    from rich.console import Console

TRANSPORTS = ("tcp", "unix", "ws") if hasattr(socket, "AF_UNIX") else ("tcp", "ws")
IDLE_MOST = 1.0  # s of round trips on an idle connection
IDLE_PART = 0.25  # of the time under load
LINE_EVERY = 1.0  # s
BAR = 24  # columns
MIB = 1024 * 1024
PROCESSES = "muxkit_bench.demo.processes"


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600.0),
    default=4.0,
    show_default=True,
    help="How long the channels work, for each transport.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    help=f"Only over this one; may be given again. [default: {', '.join(TRANSPORTS)}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON at the end, and nothing before.")
def demo(seconds: float, transports: tuple[str, ...], as_json: bool) -> int:
    """Run 100 echo channels and one bulk channel on one connection, and verify every byte.

    Two processes on this machine compare what they receive with the contents that a seed gives. The client measures
    round trips under load. Exits with 1 if any payload was lost or changed.
    """
    plan = Plan(seconds=seconds, idle_seconds=min(IDLE_MOST, seconds * IDLE_PART))
    runs: list[Run] = []
    try:
        with display_for(None if as_json else console(), plan) as display:
            trio.run(_run_all, transports or TRANSPORTS, plan, display, runs)
    except CommandFailed as failure:
        if as_json:
            print_json(plan, runs, failure)
        raise
    if as_json:
        print_json(plan, runs)
    else:
        print_table(console(), plan, runs)
    return Exit.OK if all(run.is_verified for run in runs) else Exit.FAILED


async def _run_all(transports: Sequence[str], plan: Plan, display: Display, runs: list[Run]) -> None:
    for transport in transports:
        display.begin(transport)
        runs.append(await _run(transport, plan, display))
        display.end()


async def _run(transport: str, plan: Plan, display: Display) -> Run:
    async with child("the server process", PROCESSES, "server", transport) as server:
        url = await _url_of(server)
        plan_text = msgspec.json.encode(plan).decode()
        async with child("the client process", PROCESSES, "client", url, plan_text) as client:
            try:
                found = await _follow(client, display)
            except CommandFailed as failure:
                await server.end()
                if server.has_died:  # its end caused the failure
                    raise CommandFailed(f"{transport}: {server.name} {server.end_in_words}") from failure
                raise CommandFailed(f"{transport}: {failure.sentence}", failure.exit) from failure
        await server.release()
        return Run(transport=transport, url=url, client=found, server=await _follow(server, display))


async def _url_of(server: Child) -> str:
    event = await _next_event(server)
    if isinstance(event, Failed):
        raise CommandFailed(f"{server.name}: {event.sentence}", event.exit)
    assert isinstance(event, Ready)
    return event.url


async def _follow(one: Child, display: Display) -> Totals:
    """Follow a process to its result."""
    while True:
        match await _next_event(one):
            case Progress() as progress:
                display.progress(progress)
            case Totals() as totals:
                return totals
            case Failed(sentence, code):
                raise CommandFailed(f"{one.name}: {sentence}", code)


async def _next_event(one: Child) -> Event:
    """Read the next event of a process; raises `CommandFailed` if it has ended."""
    line = await one.next_line()
    if line is None:
        await one.end()
        raise CommandFailed(f"{one.name} {one.end_in_words}")
    return understand(line)


# ---------------------------------------------------------------------------- progress


class Display:
    """Shows the progress of runs; this one shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def begin(self, transport: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def end(self) -> None: ...


def display_for(out: Console | None, plan: Plan) -> Display:
    """Choose the display for a console; without a console nothing is shown."""
    if out is None:
        return Display()
    return _Live(out, plan) if is_live(out) else _Lines(out)


class _Lines(Display):
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


class _Live(Display):
    """Draws one line for each transport, with a progress bar."""

    def __init__(self, out: Console, plan: Plan) -> None:
        self._plan = plan
        self._rows: list[tuple[str, ProgressBar, str]] = []
        # Drawn on progress only, never by a thread.
        self._live = Live(console=out, auto_refresh=False)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
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


# ---------------------------------------------------------------------------- results


@attrs.frozen(kw_only=True)
class Run:
    """The results of both processes over one transport."""

    transport: str
    url: str
    client: Totals
    server: Totals

    @property
    def messages(self) -> int:
        """Messages sent in both directions, each counted once."""
        return self.client.messages_sent + self.server.messages_sent

    @property
    def bytes(self) -> int:
        return self.client.bytes_sent + self.server.bytes_sent

    @property
    def messages_verified(self) -> int:
        return self.client.messages_verified + self.server.messages_verified

    @property
    def bytes_verified(self) -> int:
        return self.client.bytes_verified + self.server.bytes_verified

    @property
    def seconds(self) -> float:
        return self.client.seconds or math.nan

    @property
    def problems(self) -> list[str]:
        return [*self.client.problems, *self.server.problems]

    @property
    def is_verified(self) -> bool:
        sent, verified = (self.messages, self.bytes), (self.messages_verified, self.bytes_verified)
        return sent == verified and self.messages > 0 and not self.problems


# --- the table


ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("messages", lambda run: f"{run.messages:,}"),
    ("messages/s", lambda run: f"{run.messages / run.seconds:,.0f}"),
    ("MiB", lambda run: f"{run.bytes / MIB:,.0f}"),
    ("MiB/s", lambda run: f"{run.bytes / MIB / run.seconds:,.0f}"),
    ("ping, idle: p50 / p99, ms", lambda run: _times(run.client.idle_pings)),
    ("ping, loaded: p50 / p99, ms", lambda run: _times(run.client.load_pings)),
    ("echo, loaded: p50 / p99, ms", lambda run: _times(run.client.echoes)),
    ("memory client / server, MiB", lambda run: f"{_memory(run.client)} / {_memory(run.server)}"),
    ("messages verified", lambda run: f"{run.messages_verified:,}"),
    ("bytes not verified", lambda run: f"{run.bytes - run.bytes_verified:,}"),
)


def print_table(out: Console, plan: Plan, runs: Sequence[Run]) -> None:
    table = Table(
        title=f"{plan.channels} echo channels and one bulk channel on one connection, {plan.seconds:g} s each"
    )
    table.add_column("bpmux over")
    for run in runs:
        table.add_column(run.transport, justify="right", no_wrap=True)
    for title, cell in ROWS:
        table.add_row(title, *(cell(run) for run in runs))
    out.print(table)
    for run in runs:
        for problem in run.problems:
            out.print(Text(printable(f"{run.transport}: {problem}"), style="red"))
    if all(run.is_verified for run in runs):
        out.print(Text("Every payload was verified at the end that received it.", style="green"))
    else:
        failed = ", ".join(run.transport for run in runs if not run.is_verified)
        out.print(Text(f"Not every payload was verified: {failed}.", style="bold red"))


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _times(samples: Sequence[float]) -> str:
    return f"{milliseconds(percentile(samples, 50))} / {milliseconds(percentile(samples, 99))}"


def _memory(totals: Totals) -> str:
    return "-" if totals.memory is None else f"{totals.memory / MIB:.0f}"


# --- JSON


def print_json(plan: Plan, runs: Sequence[Run], failure: CommandFailed | None = None) -> None:
    """Print the report as JSON, with times in seconds and sizes in bytes."""
    report = {
        "ok": failure is None and all(run.is_verified for run in runs),
        "echo_channels": plan.channels,
        "seconds": plan.seconds,
        "runs": [_as_fields(run) for run in runs],
        "error": failure_as_fields(failure),
    }
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())


def _as_fields(run: Run) -> dict[str, object]:
    return {
        "transport": run.transport,
        "url": run.url,
        "seconds": run.seconds,
        "messages": run.messages,
        "bytes": run.bytes,
        "messages_verified": run.messages_verified,
        "bytes_verified": run.bytes_verified,
        "verified": run.is_verified,
        "problems": [printable(problem) for problem in run.problems],
        "ping_idle": _as_percentiles(run.client.idle_pings),
        "ping_load": _as_percentiles(run.client.load_pings),
        "echo_load": _as_percentiles(run.client.echoes),
        "memory": {"client": run.client.memory, "server": run.server.memory},
    }


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Return the smallest sample that so many percent of all do not exceed."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def _as_percentiles(samples: Sequence[float]) -> dict[str, float | int | None]:
    return {"samples": len(samples), "p50": percentile(samples, 50), "p99": percentile(samples, 99)}
