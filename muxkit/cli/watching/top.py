"""`muxkit top`: a live view of the sessions and channels of a program, from its metrics endpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

import attrs
import click
import msgspec
import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from muxkit.cli.common import run
from muxkit.cli.terminal import WIDE, CommandFailed, Exit, console, is_live, printable, why_not
from muxkit.core import counted

ANSWER_MOST: Final = 64 * 1024 * 1024  # bytes
ANSWER_SECONDS: Final = 10.0
READ: Final = 64 * 1024  # bytes
FRAME_ROWS: Final = 9  # lines beside the rows of both tables
SHOWN: Final = 40  # sessions, and as many channels, where there is no height to fit into
UNITS: Final = ("", "k", "M", "G", "T")


class ToldChannel(msgspec.Struct):
    """A channel, as the endpoint reports it."""

    name: str
    queued: int
    unread: int
    credit_out: int | None = None
    credit_in: int | None = None
    blocked: float | None = None


class ToldSession(msgspec.Struct):
    """A session, as the endpoint reports it."""

    number: int
    protocol: str
    transport: str
    peer: str
    bytes_received: int
    bytes_sent: int
    messages_received: int
    messages_sent: int
    channels: int
    queued: int
    local: str = ""
    user: str | None = None
    round_trip: float | None = None
    open: list[ToldChannel] = msgspec.field(default_factory=list)
    open_left_out: int = 0


class Told(msgspec.Struct):
    """The endpoint's response."""

    process: int
    urls: list[str]
    draining: bool
    time: float
    sessions: list[ToldSession]
    sessions_left_out: int = 0


@attrs.frozen
class Rates:
    """The activity of a session per second since the last sample; zeros in the first."""

    bytes_in: float = 0.0
    bytes_out: float = 0.0
    messages_in: float = 0.0
    messages_out: float = 0.0

    @property
    def bytes(self) -> float:
        return self.bytes_in + self.bytes_out


@click.command()
@click.argument("target", metavar="URL-or-socket")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two refreshes.",
)
@click.option("--once", is_flag=True, help="Print once and exit. With --interval, take two samples to show rates.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer of the endpoint as a line of JSON.")
def top(target: str, interval: float, once: bool, as_json: bool) -> int:
    """Show the sessions and channels of a running program, ordered by the bytes they move.

    The program needs an endpoint, such as http://127.0.0.1:9464 or /run/muxkit.sock. `muxkit serve` and `muxkit
    forward` open one with --metrics, and programs with `muxkit.metrics.endpoint`. Press Ctrl-C to exit.
    """
    try:
        run(_watch, target, interval, once, as_json)
    except KeyboardInterrupt:
        return Exit.OK
    return Exit.OK


async def _watch(target: str, interval: float, once: bool, as_json: bool) -> None:
    out = console()
    if as_json:
        while True:
            _print_json(await look(target))
            if once:
                return
            await trio.sleep(interval)
    told = await look(target)
    if once or not is_live(out):
        await trio.sleep(interval)
        later = await look(target)
        out.print(picture(later, told, None, width=out.width))
        return
    before: Told | None = None
    with Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            live.update(picture(told, before, out), refresh=True)
            before = told
            told = await _look_until_there(target, interval, live, out, before)


async def _look_until_there(target: str, interval: float, live: Live, out: Console, last: Told) -> Told:
    while True:
        await trio.sleep(interval)
        try:
            return await look(target)
        except CommandFailed as failed:
            live.update(Group(Text(printable(failed.sentence), style="red"), picture(last, None, out)), refresh=True)


# ---------------------------------------------------------------------------- asking


async def look(target: str) -> Told:
    """Request the sessions from the endpoint. Raises `CommandFailed` with an exit code."""
    with trio.move_on_after(ANSWER_SECONDS):
        try:
            status, body = await _get(target, "/sessions")
        except OSError as error:
            raise CommandFailed(f"{target}: {why_not(error)}", Exit.NOT_CONNECTED) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise CommandFailed(f"{target}: the connection was lost before the answer", Exit.NOT_CONNECTED) from error
        if status != 200:
            what = body[:200].decode("utf-8", "replace").strip()
            raise CommandFailed(f"{target}: it answered {status} to /sessions: {what}")
        try:
            return msgspec.json.decode(body, type=Told)
        except msgspec.DecodeError as error:
            raise CommandFailed(f"{target}: not a muxkit endpoint: {error}") from error
    raise CommandFailed(f"{target}: no answer within {ANSWER_SECONDS:g} s", Exit.TIMED_OUT)


async def _get(target: str, path: str) -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    stream, host = await _stream_to(target)
    async with stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        data = bytearray()
        while more := await stream.receive_some(READ):
            data += more
            if len(data) > ANSWER_MOST:
                raise CommandFailed(f"{target}: an answer of more than {ANSWER_MOST:,} bytes")
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise CommandFailed(f"{target}: not a muxkit endpoint")
    return int(words[1]), body


async def _stream_to(target: str) -> tuple[trio.SocketStream, str]:
    scheme, separator, rest = target.partition("://")
    if not separator and (target.startswith("unix:") or "/" in target):
        return await trio.open_unix_socket(target.removeprefix("unix:")), "localhost"
    if separator and scheme not in ("http", "unix"):
        raise click.UsageError(f"{printable(target)}: expected http://HOST:PORT or the path of a Unix socket")
    if scheme == "unix":
        return await trio.open_unix_socket(rest), "localhost"
    place = (rest if separator else target).partition("/")[0]
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or not host.isascii():
        raise click.UsageError(f"{printable(target)}: expected http://HOST:PORT or the path of a Unix socket")
    return await trio.open_tcp_stream(host.strip("[]"), int(port)), place


def _print_json(told: Told) -> None:
    # ASCII only, since a terminal would obey control characters above 127, which JSON leaves as they are.
    click.echo(json.dumps(msgspec.to_builtins(told)))


# ---------------------------------------------------------------------------- showing


def rates(told: Told, before: Told | None) -> dict[int, Rates]:
    """Return the activity of each session per second between two responses, by its number."""
    earlier = (
        {} if before is None or before.process != told.process else {each.number: each for each in before.sessions}
    )
    seconds = 0.0 if before is None else told.time - before.time
    found: dict[int, Rates] = {}
    for each in told.sessions:
        was = earlier.get(each.number)
        if was is None or seconds <= 0:
            found[each.number] = Rates()
            continue
        found[each.number] = Rates(
            bytes_in=(each.bytes_received - was.bytes_received) / seconds,
            bytes_out=(each.bytes_sent - was.bytes_sent) / seconds,
            messages_in=(each.messages_received - was.messages_received) / seconds,
            messages_out=(each.messages_sent - was.messages_sent) / seconds,
        )
    return found


def picture(told: Told, before: Told | None, out: Console | None, *, width: int = WIDE) -> RenderableType:
    """Return both tables, fitted into the height and width of a terminal."""
    width = width if out is None else out.width
    per_second = rates(told, before)
    sessions = sorted(told.sessions, key=lambda each: (-per_second[each.number].bytes, -each.queued, each.number))
    rows = SHOWN if out is None else max(2, (out.height - FRAME_ROWS) // 2)
    channels = [(each, channel) for each in sessions for channel in each.open]
    channels.sort(key=lambda pair: (-(pair[1].blocked or 0.0), -pair[1].unread - pair[1].queued, pair[0].number))
    where = ", ".join(map(printable, told.urls)) or "no server"
    head = Text(f"{where}: {counted(len(told.sessions) + told.sessions_left_out, 'session')}, ")
    head.append(f"{counted(sum(each.channels for each in told.sessions), 'channel')}, process {told.process}")
    if told.draining:
        head.append(", draining", style="yellow")
    return Group(
        head,
        _sessions(sessions, per_second, rows, width),
        _left_out(len(sessions) - rows + told.sessions_left_out, "session"),
        _channels(channels, rows, width),
        _left_out(len(channels) - rows + sum(each.open_left_out for each in told.sessions), "channel"),
    )


@attrs.frozen
class Column:
    """A column of a table: its heading, and its priority if there isn't room for all."""

    head: str
    rank: int
    """Columns with the highest rank are left out first."""
    is_text: bool = False
    """Names, at the left, which may be shortened; numbers are shown whole."""


MIN_TEXT: Final = 12  # columns that a name gets at least
GAP: Final = 2  # spaces between two columns of a table

SESSION_COLUMNS: Final = (
    Column("#", 0),
    Column("protocol", 8, is_text=True),
    Column("peer", 1, is_text=True),
    Column("user", 9, is_text=True),
    Column("channels", 4),
    Column("in/s", 2),
    Column("out/s", 3),
    Column("msgs in/s", 10),
    Column("msgs out/s", 11),
    Column("queued", 6),
    Column("round trip", 7),
    Column("blocked", 5),
)
CHANNEL_COLUMNS: Final = (
    Column("#", 0),
    Column("channel", 1, is_text=True),
    Column("unread", 3),
    Column("queued", 4),
    Column("credit in", 6),
    Column("credit out", 5),
    Column("blocked", 2),
)


def _sessions(sessions: Sequence[ToldSession], per_second: dict[int, Rates], rows: int, width: int) -> Table:
    cells: list[list[str]] = []
    for each in sessions[:rows]:
        rate = per_second[each.number]
        longest = max((channel.blocked or 0.0 for channel in each.open), default=0.0)
        cells.append(
            [
                str(each.number),
                each.protocol,
                each.peer,
                each.user or "",
                f"{each.channels}",
                short(rate.bytes_in),
                short(rate.bytes_out),
                short(rate.messages_in),
                short(rate.messages_out),
                short(each.queued),
                "" if each.round_trip is None else seconds_of(each.round_trip),
                seconds_of(longest) if longest else "",
            ]
        )
    return _table(SESSION_COLUMNS, cells, width)


def _channels(channels: Sequence[tuple[ToldSession, ToldChannel]], rows: int, width: int) -> Table:
    cells = [
        [
            str(session.number),
            channel.name or "(no name)",
            short(channel.unread),
            short(channel.queued),
            "" if channel.credit_in is None else short(channel.credit_in),
            "" if channel.credit_out is None else short(channel.credit_out),
            "" if channel.blocked is None else seconds_of(channel.blocked),
        ]
        for session, channel in channels[:rows]
    ]
    return _table(CHANNEL_COLUMNS, cells, width)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Make a table of the columns that fit. Headings and numbers are never truncated."""
    shown = fitting(columns, rows, width)
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for number, size in shown.items():
        column = columns[number]
        is_left = column.is_text or column.head == "#"
        table.add_column(
            column.head, justify="left" if is_left else "right", no_wrap=True, overflow="ellipsis", width=size
        )
    for row in rows:
        table.add_row(*(Text(printable(row[number])) for number in shown))
    return table


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Return the columns that fit into a width, by their numbers, and how wide each is."""
    sizes: dict[int, int] = {}
    left = width + GAP
    by_rank = sorted(range(len(columns)), key=lambda number: columns[number].rank)
    for number in by_rank:
        if columns[number].head == "user" and not any(row[number] for row in rows):
            continue
        need = _widest(columns, rows, number)
        if columns[number].is_text:
            need = max(len(columns[number].head), min(need, MIN_TEXT))
        if need + GAP > left and sizes:
            break
        left -= need + GAP
        sizes[number] = need
    for number in by_rank:  # names get the rest of the room
        if number in sizes and columns[number].is_text:
            more = max(0, min(left, _widest(columns, rows, number) - sizes[number]))
            sizes[number] += more
            left -= more
    return dict(sorted(sizes.items()))


def _widest(columns: Sequence[Column], rows: Sequence[Sequence[str]], number: int) -> int:
    return max(len(columns[number].head), *(len(printable(row[number])) for row in rows), 0)


def _left_out(count: int, what: str) -> Text:
    return Text(f"and {counted(count, f'more {what}')}" if count > 0 else "", style="dim")


def short(number: float) -> str:
    """Return a number in at most five characters: 999, 1.5k, 23M."""
    for unit in UNITS:
        if abs(number) < 999.5 or unit == UNITS[-1]:
            return f"{number:.3g}{unit}" if unit or number % 1 else f"{number:.0f}"
        number /= 1000
    raise AssertionError("the last unit takes all")


def seconds_of(seconds: float) -> str:
    """Return a time in the unit that fits: 35 µs, 1.2 ms, 4.0 s, 3 min."""
    if not math.isfinite(seconds):
        return "?"
    for most, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if seconds < most:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 60:.0f} min"
