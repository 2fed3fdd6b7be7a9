"""`muxkit trace`: show traces as pages, counts and differences, and follow them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import msgspec

from muxkit.cli.terminal import CommandFailed, Exit, printable
from muxkit.trace import Event, Follower, Recording, Summary, TraceError, differences, page, read, summary

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
POLL_SECONDS = 0.1  # between two looks at a file that grows; no portable way tells of it


@click.group()
def trace() -> None:
    """Traces of sessions, as MUXKIT_TRACE_DIR or --trace DIR writes them."""


def _read(path: Path) -> Recording:
    try:
        return read(path)
    except TraceError as error:
        raise CommandFailed(str(error), Exit.USAGE) from error


def _print_json(value: object) -> None:
    # ASCII only, since a terminal would obey control characters above 127, which JSON leaves as they are.
    click.echo(json.dumps(msgspec.to_builtins(value)))


@trace.command()
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE [FILE2]")
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The page to write. [default: FILE.html]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def view(files: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Write one page about FILE, or about both ends of a session. It opens without a network."""
    if len(files) > 2:
        raise click.UsageError("expected one trace, or the two traces of a session")
    target = out or files[0].with_name(files[0].name + ".html")
    target.write_text(page([_read(file) for file in files]), encoding="utf-8")
    if as_json:
        _print_json({"page": str(target)})
    else:
        click.echo(printable(str(target)))
    return Exit.OK


@trace.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(file: Path, as_json: bool) -> int:
    """Count the events in FILE: frames, bytes, credit, blocked time, timers and errors."""
    found = summary(_read(file))
    if as_json:
        _print_json(found.as_fields())
    else:
        for line in _lines(found):
            click.echo(printable(line))
    return Exit.OK


def _lines(found: Summary) -> list[str]:
    lines = [
        f"session            {found.title}",
        f"events             {found.events} in {found.milliseconds / 1000:.3f} s",
        f"transport          {found.transport_sent} bytes sent, {found.transport_received} received",
    ]
    if found.broken:
        lines.append(f"unreadable records {found.broken}")
    lines += [f"frames             {number} {name}" for name, number in found.frames.items()]
    lines += [f"timer              {name}: {number}" for name, number in found.timers.items()]
    lines += [f"error              {text}" for text in found.errors]
    for name, one in found.channels.items():
        lines.append(
            f"channel            {name}: {one.bytes_sent} bytes sent in {one.frames_sent} frames,"
            f" {one.bytes_received} received in {one.frames_received}; credit {one.credit_received} received,"
            f" {one.credit_granted} granted; {one.resends} sent again; blocked {one.blocked_ms:.1f} ms;"
            f" {one.state or 'no state'}"
        )
    return lines


@trace.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(first: Path, second: Path, as_json: bool) -> int:
    """Show the differences between the counts of FIRST and SECOND."""
    found = differences(summary(_read(first)), summary(_read(second)))
    if as_json:
        _print_json([{"name": name, "first": one, "second": other} for name, one, other in found])
    else:
        for name, one, other in found:
            click.echo(printable(f"{name}: {_shown(one)} / {_shown(other)}"))
    return Exit.OK


def _shown(value: object) -> object:
    return "none" if value == "" else value


@trace.command()
@click.argument("file", type=FILE)
@click.option("--follow/--no-follow", default=True, help="Continue until the session is closed. [default: follow]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def tail(file: Path, follow: bool, as_json: bool) -> int:
    """Print the events of FILE as they are written, until the session is closed."""
    reader = Follower(file)
    while True:
        events = reader.more()
        for event in events:
            if as_json:
                _print_json({"time": event.time, "name": event.name, "data": event.data})
            else:
                click.echo(printable(_line(event)))
        if not follow or any(event.name == "session_closed" for event in events):
            return Exit.OK
        time.sleep(POLL_SECONDS)


def _line(event: Event) -> str:
    fields = " ".join(f"{name}={value}" for name, value in event.data.items())
    return f"{event.time:12.3f} {event.name} {fields}"
