"""The results of the demo: a table, or JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import click
import msgspec
from rich.table import Table
from rich.text import Text

from muxkit.cli.demo.samples import percentile
from muxkit.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from muxkit.cli.demo.events import Plan, Totals
    from muxkit.cli.outcome import CommandFailed

MIB = 1024 * 1024


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
        "error": None if failure is None else {"sentence": printable(failure.sentence), "exit": int(failure.exit)},
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


def _as_percentiles(samples: Sequence[float]) -> dict[str, float | int | None]:
    return {"samples": len(samples), "p50": percentile(samples, 50), "p99": percentile(samples, 99)}
