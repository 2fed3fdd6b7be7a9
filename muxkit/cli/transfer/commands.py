"""`muxkit send` and `muxkit recv`: transfer files and folders, across lost connections and restarts."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import click
import trio

import muxkit
from muxkit.cli.common import LinkOptions, NotConnected, client_options, run, session_with, timeout_option
from muxkit.cli.terminal import CommandFailed, Exit, console, is_live, printable, say
from muxkit.cli.transfer import files
from muxkit.cli.transfer.files import Entry, FileRefused, Folder, Transferred
from muxkit.runtime import background, can_heal

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE: Final = 60.0  # s
LINE_EVERY: Final = 1.0  # s
BACKOFF: Final = muxkit.Backoff()


def _transfer_options(command: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option("--verbose", "-v", is_flag=True, help="Print a line for each file, with its SHA-256."),
        click.option(
            "--parallel",
            type=click.IntRange(1, 256),
            default=4,
            show_default=True,
            help="Number of files to transfer concurrently, each on its own channel.",
        ),
        click.option(
            "--patience",
            type=click.FloatRange(0.0, 1e9),
            default=PATIENCE,
            show_default=True,
            help="Give up after that many seconds without a connection.",
        ),
        timeout_option,
    ):
        command = option(command)
    return client_options(command)


@click.command()
@click.argument("url")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@_transfer_options
def send(
    link: LinkOptions, url: str, paths: tuple[Path, ...], timeout: float, patience: float, parallel: int, verbose: bool
) -> int:
    """Send files and folders to the server at URL, which runs `muxkit serve --files DIR --upload`.

    A lost connection is reopened, and each file continues where it was, also if this command was killed and started
    again. Identical files aren't sent again. Symbolic links and special files inside folders are skipped and counted.
    """
    report = _Report("sent", link.as_json, verbose)
    code: int = run(_send, paths, _Line(url, link, timeout, patience, report), parallel, report)
    return code


@click.command()
@click.argument("url")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--overwrite", is_flag=True, help="Replace existing files that differ.")
@_transfer_options
def recv(
    link: LinkOptions,
    url: str,
    folder: Path,
    paths: tuple[str, ...],
    overwrite: bool,
    timeout: float,
    patience: float,
    parallel: int,
    verbose: bool,
) -> int:
    """Receive files from the server at URL, which runs `muxkit serve --files DIR`, into the folder DIR.

    Without PATH, it receives everything. Lost connections, restarts and identical files are handled as by `muxkit
    send`. Whatever the server sends, no file is written outside DIR or through a symbolic link.
    """
    report = _Report("received", link.as_json, verbose)
    folder.mkdir(parents=True, exist_ok=True)
    code: int = run(_recv, folder, paths, overwrite, _Line(url, link, timeout, patience, report), parallel, report)
    return code


# ---------------------------------------------------------------------------- reports


class _Report:
    """Prints the progress: a bar on a terminal, lines or JSON elsewhere."""

    def __init__(self, word: str, as_json: bool, verbose: bool) -> None:
        self._word = word
        self._as_json = as_json
        self._verbose = verbose
        self._began = time.monotonic()
        self._said_at = self._began
        self._files = self._failed = self._skipped = 0
        self._bytes = self._already = self._of = 0
        self._bar: Progress | None = None

    def begin(self, entries: Sequence[Entry], skipped: int = 0) -> None:
        self._skipped = skipped
        self._of = sum(entry.size for entry in entries)
        out = console()
        if not self._as_json and is_live(out):
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=out, transient=True)
            self._bar.add_task(self._word, total=self._of)
            self._bar.start()

    def progress(self, count: int) -> None:
        """Add bytes. The number is negative if a file has to start again."""
        self._bytes += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._bytes)
        now = time.monotonic()
        if self._as_json and now - self._said_at >= LINE_EVERY:
            self._said_at = now
            say("", {"event": "progress", "bytes": self._bytes, "of": self._of}, as_json=True)

    def file(self, path: bytes, done: Transferred) -> None:
        self._files += 1
        self._already += done.already
        if not (self._verbose or self._as_json):
            return
        fields = {
            "event": "file",
            "path": files.shown(path),
            "size": done.size,
            "already": done.already,
            "sha256": done.sha256.hex(),
        }
        say(f"{done.sha256.hex()}  {files.shown(path)}  {done.size:,} bytes", fields, as_json=self._as_json)

    def failed(self, path: bytes, reason: str) -> None:
        self._failed += 1
        if self._as_json:
            say("", {"event": "failed", "path": files.shown(path), "reason": reason}, as_json=True)
        else:
            click.echo(f"muxkit: {files.shown(path)}: {printable(reason)}", err=True)

    def outage(self, error: BaseException, pause: float) -> None:
        if self._as_json:
            fields = {"event": "outage", "text": str(error), "pause": pause}
            say("", fields, as_json=True)
        else:
            click.echo(f"muxkit: {printable(str(error))}; trying again in {pause:.1f} s", err=True)

    def total(self) -> int:
        self.stop()
        took = time.monotonic() - self._began
        left_out = f"; skipped {self._skipped:,} links and special files" if self._skipped else ""
        text = (
            f"{self._word} {self._files:,} file{'' if self._files == 1 else 's'}, {self._bytes:,} bytes, "
            f"{self._already:,} of them up to date, in {took:.1f} s{left_out}"
        )
        fields = {
            "event": "total",
            "files": self._files,
            "bytes": self._bytes,
            "already": self._already,
            "failed": self._failed,
            "left_out": self._skipped,
            "seconds": took,
        }
        say(text, fields, as_json=self._as_json)
        if self._failed:
            raise CommandFailed(f"{self._failed:,} file{' was' if self._failed == 1 else 's were'} not {self._word}")
        return Exit.OK

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


# ---------------------------------------------------------------------------- sessions


_Work: TypeAlias = "Callable[[muxkit.Session, files.OnBytes], Awaitable[Transferred | None]]"


@attrs.define
class _Job:
    """One file or empty folder to transfer."""

    path: bytes
    work: _Work
    counted: int = 0
    """Bytes that the report has counted for it."""


class _Line:
    """Sessions with one server, each opened when the previous one was lost, until the patience has run out."""

    def __init__(self, url: str, link: LinkOptions, within: float, patience: float, report: _Report) -> None:
        self.url = url
        self._link = link
        self._within = within
        self._patience = patience
        self._report = report
        self._stood_at: float | None = None
        self._failures = 0

    async def use(self, work: Callable[[muxkit.Session], Awaitable[None]]) -> None:
        """Call `work` with a session, and again with the next one if that is lost before `work` has finished."""
        while True:
            try:
                async with session_with(self.url, self._link, within=self._within) as session:
                    self._stood_at = trio.current_time()
                    self._failures = 0
                    await work(session)
                    return
            except (muxkit.LinkLost, NotConnected) as error:
                await self._pause(error)

    async def _pause(self, error: muxkit.LinkLost | NotConnected) -> None:
        """Wait before the next attempt. Raises the error if there should be none."""
        may_heal = error.may_heal if isinstance(error, NotConnected) else can_heal(error)
        if not may_heal or self._stood_at is None:  # the first connection has to stand at once
            raise error
        self._failures += 1
        pause = BACKOFF.wait(self._failures)
        if trio.current_time() + pause > self._stood_at + self._patience:
            raise error
        self._report.outage(error, pause)
        await trio.sleep(pause)


async def _run_jobs(line: _Line, jobs: Sequence[_Job], parallel: int, report: _Report) -> None:
    waiting = deque(jobs)

    async def one(session: muxkit.Session, job: _Job) -> muxkit.LinkLost | None:
        def on_bytes(count: int) -> None:
            job.counted += count
            report.progress(count)

        report.progress(-job.counted)
        job.counted = 0
        try:
            done = await job.work(session, on_bytes)
        except (FileRefused, muxkit.ChannelCancelled, muxkit.ChannelStopped) as error:
            if isinstance(error, FileRefused) or error.reason or error.code:
                report.failed(job.path, error.reason)
                return None
            return muxkit.LinkLost("the server cancelled a transfer", by="peer")
        except muxkit.LinkLost as error:
            return error
        except OSError as error:
            report.failed(job.path, (error.strerror or str(error)).lower())
            return None
        if done is not None:
            report.file(job.path, done)
        return None

    async def work(session: muxkit.Session) -> None:
        losses: list[muxkit.LinkLost] = []

        async def worker() -> None:
            while waiting and not losses:
                job = waiting.popleft()
                lost = await one(session, job)
                if lost is not None:
                    waiting.appendleft(job)
                    losses.append(lost)

        async with background() as nursery:
            async with trio.open_nursery() as workers:
                for _ in range(parallel):
                    workers.start_soon(worker)
            nursery.cancel_scope.cancel()
        if losses:
            raise losses[0]

    await line.use(work)


async def _send(paths: Sequence[Path], line: _Line, parallel: int, report: _Report) -> int:
    with ExitStack() as stack:
        stack.callback(report.stop)
        entries: list[Entry] = []
        jobs: list[_Job] = []
        skipped = 0
        for path in paths:
            found, left_out = _jobs_of(path, stack)
            skipped += left_out
            for entry, job in found:
                entries.append(entry)
                jobs.append(job)
        if len({job.path for job in jobs}) < len(jobs):
            raise click.UsageError("two of these would have the same name on the server")
        report.begin(entries, skipped)
        await _run_jobs(line, jobs, parallel, report)
    return report.total()


def _jobs_of(path: Path, stack: ExitStack) -> tuple[list[tuple[Entry, _Job]], int]:
    """Return what to send for a path that a user named, which may be a link, and how much was skipped."""
    real = Path(os.path.realpath(path))
    name = os.fsencode(Path(os.path.abspath(path)).name)
    if not name:
        raise click.UsageError(f"{printable(str(path))}: the path has no name; name the files in it")
    is_folder = real.is_dir()
    folder = Folder(real if is_folder else real.parent)
    stack.callback(folder.close)
    found = []
    for entry in folder.entries(() if is_folder else (os.fsencode(real.name),)):
        inside = tuple(entry.path.split(b"/"))
        there = b"/".join((name, *inside)) if is_folder else name
        work: _Work = partial(_send_one, folder, inside, there)
        if entry.is_folder:
            work = partial(_send_folder, there)
        found.append((entry, _Job(there, work)))
    if is_folder and not found:
        found.append((Entry(name, 0, is_folder=True), _Job(name, partial(_send_folder, name))))
    return found, _count_special(real) if is_folder else 0


def _count_special(path: Path) -> int:
    """Count everything below a path that is neither a file nor a folder."""
    count = 0
    for current, folders, names in os.walk(path):
        count += sum(os.path.islink(os.path.join(current, name)) for name in folders)
        for name in names:
            with suppress(OSError):
                full = os.path.join(current, name)
                count += os.path.islink(full) or not os.path.isfile(full)
    return count


async def _send_folder(there: bytes, session: muxkit.Session, on_bytes: files.OnBytes) -> None:
    await files.put_folder(session, there)


async def _send_one(
    folder: Folder, inside: files.Parts, there: bytes, session: muxkit.Session, on_bytes: files.OnBytes
) -> Transferred:
    with folder.open_file(inside) as number:
        return await files.put(session, number, there, on_bytes)


async def _recv(path: Path, wanted: Sequence[str], overwrite: bool, line: _Line, parallel: int, report: _Report) -> int:
    with ExitStack() as stack:
        stack.callback(report.stop)
        folder = Folder(path)
        stack.callback(folder.close)
        entries: list[Entry] = []

        async def ask(session: muxkit.Session) -> None:
            entries.clear()
            for each in wanted or [""]:
                try:
                    entries.extend(await files.list_files(session, os.fsencode(each)))
                except (FileRefused, muxkit.ChannelCancelled) as error:
                    what = printable(each) if each else line.url
                    raise CommandFailed(f"{what}: {error.reason or error}") from error

        await line.use(ask)
        report.begin(entries)
        jobs = []
        for entry in {entry.path: entry for entry in entries}.values():
            work = partial(_receive_one, folder, entry, overwrite)
            jobs.append(_Job(entry.path, work))
        await _run_jobs(line, jobs, parallel, report)
    return report.total()


async def _receive_one(
    folder: Folder, entry: Entry, overwrite: bool, session: muxkit.Session, on_bytes: files.OnBytes
) -> Transferred | None:
    parts = files.parts_of(entry.path)  # the server may be hostile
    if entry.is_folder:
        folder.make(parts)
        return None
    return await files.get(session, entry.path, folder, parts, overwrite=overwrite, on_bytes=on_bytes)
