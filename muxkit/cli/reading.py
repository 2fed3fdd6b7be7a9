"""`muxkit restream read`: read a stream to its end, or continue where an earlier run stopped."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import click
import msgspec
import trio
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muxkit import LinkLost
from muxkit.cli.common import proxy_option
from muxkit.cli.terminal import (
    CommandFailed,
    Exit,
    console,
    failure_as_fields,
    failure_of,
    in_options,
    is_live,
    printable,
)
from muxkit.protocols import restream
from muxkit.protocols.restream import Json, JsonObject, Reader
from muxkit.runtime import background

if TYPE_CHECKING:
    from rich.console import Console

Mode = Literal["stateful", "stateless"]

COUNT: Final = 1000
MOST_COUNT: Final = 0xFFFF  # of a stateful stream
SAVE_AFTER: Final = 0.5  # s
DRAW_EVERY: Final = 0.1  # s
LINE_EVERY: Final = 1.0  # s
BAR: Final = 24  # columns
MOST_STATE: Final = 1024 * 1024  # bytes of a saved state
BY_HAND: Final = restream.ClientConfig(ack_every=None)


@click.command()
@click.argument("url")
@click.option(
    "--count",
    type=click.IntRange(1),
    help=f"How many values to read; at most {MOST_COUNT:,} of a stateful stream. [default: {COUNT:,}]",
)
@click.option(
    "--mode",
    type=click.Choice(["stateful", "stateless"]),
    help="Numbers of a session, with a final CRC, or plain integers. [default: stateful, or as saved]",
)
@click.option(
    "--state",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Resume from this file, and save the position in it. It is created if it does not exist.",
)
@click.option("--values", is_flag=True, help="Print each value, one per line.")
@click.option("--timeout", type=click.FloatRange(0.001, 1e9), help="Give up after that many seconds. [default: never]")
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False),
    help="For tls and wss: certificates of the authorities to trust, PEM.",
)
@proxy_option
@click.option("--insecure", is_flag=True, help="Allow plaintext to another machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def read(
    url: str,
    count: int | None,
    mode: Mode | None,
    path: Path | None,
    values: bool,
    timeout: float | None,
    ca: str | None,
    proxy: str | None,
    insecure: bool,
    as_json: bool,
) -> int:
    """Read the stream at URL, such as restream+tcp://127.0.0.1:7000.

    A lost connection is reopened immediately, and a failed attempt is repeated after five seconds or more, until the
    command is interrupted or --timeout has passed. With --state, nothing is acknowledged before it is saved. You can
    kill the command and start it again, because the server keeps what it may need. A finished state file stays
    finished.
    """
    state = None if path is None else StateFile(path)
    saved = None if state is None else state.load()
    wanted = _wanted(url, count, mode, saved)
    report = Report(wanted, values=values, as_json=as_json)
    options: dict[str, Any] = {"insecure": True} if insecure else {}
    if proxy is not None:
        options["proxy"] = proxy
    if ca is not None:
        options["ssl_context"] = ssl.create_default_context(cafile=ca)
    failure: CommandFailed | None = None
    try:
        trio.run(_read, wanted, state, report, timeout, options)
    except BaseException as error:
        failure = failure_of(error)
        if failure is None or isinstance(error, BrokenPipeError):  # standard output is closed
            raise
    report.total(failure)
    if failure is not None:
        raise failure
    return Exit.OK


@attrs.frozen
class Wanted:
    """The stream to read, its mode and its length."""

    url: str
    mode: Mode
    count: int
    saved: JsonObject | None

    @property
    def begins_at(self) -> int:
        """How many values earlier runs have read."""
        id = 0 if self.saved is None else self.saved.get("id", 0)
        return id if isinstance(id, int) else 0


def _wanted(url: str, count: int | None, mode: Mode | None, saved: JsonObject | None) -> Wanted:
    if saved is None:
        chosen: Mode = mode or "stateful"
        wanted = COUNT if count is None else count
    else:
        chosen = "stateless" if saved.get("mode") == "stateless" else "stateful"
        if mode not in (None, chosen):
            raise CommandFailed(f"--mode {mode}: the saved state belongs to a {chosen} stream; omit --mode", Exit.USAGE)
        params = saved.get("params")
        of_stream = params.get("count") if isinstance(params, dict) else None
        wanted = of_stream if type(of_stream) is int else COUNT if count is None else count
        if count not in (None, wanted):
            raise CommandFailed(f"--count {count}: the saved stream has {wanted} numbers; omit --count", Exit.USAGE)
    if chosen == "stateful" and wanted > MOST_COUNT:
        raise CommandFailed(f"--count {wanted}: a stateful stream has at most {MOST_COUNT} numbers", Exit.USAGE)
    return Wanted(url, chosen, wanted, saved)


async def _read(
    wanted: Wanted, state: StateFile | None, report: Report, limit: float | None, options: dict[str, Any]
) -> None:
    with report.shown():
        try:
            async with _open(wanted, state, report, options) as report.reader:
                with report.reader.fail_after(float("inf") if limit is None else limit):
                    await _take(report.reader, wanted, state, report)
        except (TypeError, ValueError) as error:  # an invalid address, or an option that it does not take
            if report.connections:
                raise
            raise CommandFailed(in_options(str(error)), Exit.USAGE) from error
        except (LinkLost, trio.TooSlowError) as error:
            if report.connections:
                raise
            raise CommandFailed(f"could not connect to {wanted.url}: {error}", Exit.NOT_CONNECTED) from error


def _open(
    wanted: Wanted, state: StateFile | None, report: Report, options: dict[str, Any]
) -> AbstractAsyncContextManager[Reader[int]]:
    config = None if state is None else BY_HAND
    options = {"resume": wanted.saved, "config": config, "on_failed": report.failed_attempt, **options}
    if wanted.mode == "stateless":
        return restream.integers(wanted.url, **options)
    return restream.numbers(wanted.url, count=wanted.count if wanted.saved is None else None, **options)


async def _take(reader: Reader[int], wanted: Wanted, state: StateFile | None, report: Report) -> None:
    """Read values until there are enough. Save them regularly and at the end."""
    saver = None if state is None else Saver(state, reader)
    try:
        async with background() as nursery:
            if saver is not None:
                nursery.start_soon(saver.run)
            async for value in reader:
                report.took(value, reader.last_id)
                if saver is not None:
                    saver.changed.set()
                if wanted.mode == "stateless" and report.taken == wanted.count:
                    break
    finally:
        if state is not None:
            state.save(reader.snapshot())
    if state is not None and wanted.mode == "stateful":
        reader.acknowledge()


# ---------------------------------------------------------------------------- what is saved


class StateFile:
    """The state of a stream in a file that is replaced atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> JsonObject | None:
        """Read the state. Return None if the file doesn't exist."""
        try:
            with self._path.open("rb") as file:
                text = file.read(MOST_STATE + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommandFailed(f"{self._path}: {error.strerror}") from error
        try:
            saved: Json = msgspec.json.decode(text) if len(text) <= MOST_STATE else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            saved = None
        if not isinstance(saved, dict):
            raise CommandFailed(f"{self._path}: not a saved state of a stream")
        return saved

    def save(self, snapshot: dict[str, Json]) -> None:
        """Replace the file durably. If interrupted, the old file is unchanged."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open(beside, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.json.encode(snapshot) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise CommandFailed(f"{self._path}: {error.strerror}") from error


class Saver:
    """Saves the position, then acknowledges it."""

    def __init__(self, state: StateFile, reader: Reader[int]) -> None:
        self._state = state
        self._reader = reader
        self.changed: trio.Event = trio.Event()

    async def run(self) -> None:
        while True:
            await self.changed.wait()
            await trio.sleep(SAVE_AFTER)
            self.changed = trio.Event()
            snapshot, id = self._reader.snapshot(), self._reader.last_id
            await trio.to_thread.run_sync(self._state.save, snapshot)
            if id > self._reader.acknowledged:
                self._reader.acknowledge(id)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Only Unix needs and allows this."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------- what is told


class Report:
    """Prints the progress and the result."""

    def __init__(self, wanted: Wanted, *, values: bool, as_json: bool) -> None:
        self.reader: Reader[int] | None = None
        self.taken: int = 0
        self._wanted = wanted
        self._values = values
        self._as_json = as_json
        self._failed = 0
        self._began = monotonic()
        self._out: Console | None = None if values or as_json else console()
        self._live: Live | None = None
        self._next = self._began

    @property
    def connections(self) -> int:
        """How many connections there were."""
        return 0 if self.reader is None else self.reader.connections

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self._out is None or not is_live(self._out):
            self._next = self._began + LINE_EVERY
            yield
            return
        # Drawn on progress only, never by a thread.
        with Live(console=self._out, auto_refresh=False, transient=True) as self._live:
            self._draw()
            yield

    def took(self, value: int, id: int) -> None:
        self.taken += 1
        if self._values:
            self._say_value(value, id)
        elif self._out is not None and monotonic() >= self._next:
            self._draw()

    def failed_attempt(self, error: Exception, pause: float) -> None:
        self._failed += 1
        click.echo(f"muxkit: no connection: {printable(str(error))}; trying again in {pause:.1f} s", err=True)

    def total(self, failure: CommandFailed | None) -> None:
        seconds, connections = monotonic() - self._began, self.connections
        verified = failure is None and self._wanted.mode == "stateful"
        if self._as_json:
            fields = {
                "event": "total",
                "ok": failure is None,
                "url": printable(self._wanted.url),
                "mode": self._wanted.mode,
                "uuid": None if self.reader is None else self.reader.uuid or None,
                "taken": self.taken,
                "taken_before": self._wanted.begins_at,
                "verified": verified,
                "connections": connections,
                "failed_attempts": self._failed,
                "seconds": seconds,
                "error": failure_as_fields(failure),
            }
            click.echo(msgspec.json.encode(fields).decode())
        elif failure is None and not self._values:
            before = f" after {self._wanted.begins_at:,} of another run" if self._wanted.begins_at else ""
            right = "; their count and CRC are right" if verified else ""
            plural = "" if connections == 1 else "s"
            click.echo(
                f"{self.taken:,} {self._noun}{before} in {seconds:.2f} s over {connections:,} connection{plural}{right}"
            )

    # --- inside

    @property
    def _noun(self) -> str:
        return "numbers" if self._wanted.mode == "stateful" else "integers"

    def _say_value(self, value: int, id: int) -> None:
        text = restream.format_integer(value)
        if not self._as_json:
            click.echo(text)
        elif self._wanted.mode == "stateful":
            click.echo(f'{{"event":"value","id":{id},"value":{text}}}')
        else:  # as a string, as on the wire: few programs read integers of any size
            click.echo(f'{{"event":"value","value":"{text}"}}')

    def _draw(self) -> None:
        assert self._out is not None
        done = self._wanted.begins_at + self.taken
        text = f"{done:,} of {self._wanted.count:,} {self._noun}, connection {self.connections:,}"
        if self._live is None:
            self._next = monotonic() + LINE_EVERY
            self._out.print(text)
            return
        self._next = monotonic() + DRAW_EVERY
        table = Table.grid(padding=(0, 1))
        table.add_row(ProgressBar(total=self._wanted.count, completed=done, width=BAR), Text(text))
        self._live.update(table, refresh=True)
