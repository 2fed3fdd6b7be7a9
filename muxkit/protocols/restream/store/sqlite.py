"""A store in one SQLite file: one thread, one connection, one transaction for all that was asked meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from muxkit.protocols.restream.store.errors import StoreCorrupt, StoreError, StoreFailed, StoreFull
from muxkit.protocols.restream.store.sqlite_rows import SqliteRows
from muxkit.protocols.restream.store.store import Store
from muxkit.runtime import protect_package, protected_manager
from muxkit.storage.sqlite import Journal, SqliteFile
from muxkit.storage.sqlite_connection import Connect, SqliteFault, StandardConnection
from muxkit.storage.waiters import Waiters
from muxkit.storage.worker import Job, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from muxkit.protocols.restream.store.protocol import Data, State
    from muxkit.protocols.restream.store.rows import Rows
    from muxkit.protocols.restream.store.rules import Rules
    from muxkit.storage.sqlite_connection import Connection

T = TypeVar("T")


@protected_manager
async def open_sqlite(
    path: Path, rules: Rules[State, Data], *, connect: Connect = StandardConnection, journal: Journal = "auto"
) -> AsyncIterator[Store[State, Data]]:
    """A store in this file, which is made if there is none.

    Sessions whose clients were connected when the last process ended begin their time of absence now.
    """
    waiters = Waiters()
    file = SqliteFile(path, connect, journal=journal, most_bytes=rules.limits.bytes)
    backend = _Sqlite(file, waiters)
    try:
        await backend.worker.call(lambda: backend.open(rules.keep, rules.now))
        yield Store(backend, rules, waiters)
    finally:
        await backend.worker.stop(file.close)
        waiters.wake_all()


class _Sqlite:
    """The backend: groups of jobs become transactions."""

    def __init__(self, file: SqliteFile, waiters: Waiters) -> None:
        self._file = file
        self._rows: SqliteRows | None = None
        self._waiters = waiters
        self._changed: list[str] = []  # filled in the thread before a group is delivered, emptied when it is
        self._is_over = False  # the file was not in order, and no call will succeed any more
        self.worker = Worker(f"muxkit store {file.path.name}", self._run_group, self._wake)

    async def work(self, uuid: str, act: Callable[[Rows], T]) -> T:
        return await self.worker.ask(uuid, act, reads=False)

    async def look(self, uuid: str, act: Callable[[Rows], T], *, after: int = -1, most: int = 0, size: int = 0) -> T:
        return await self.worker.ask(uuid, act, reads=True)

    def _wake(self) -> None:
        if self._is_over:
            self._waiters.wake_all()
        while self._changed:
            self._waiters.wake(self._changed.pop())

    # ------------------------------------------------------------------------ in the thread

    def open(self, keep: float, now: Callable[[], float]) -> None:
        try:
            connection = self._file.open()
            rows = SqliteRows(connection)
            connection.run("BEGIN IMMEDIATE")
            for session in rows.attached():
                session.due = now() + (keep if session.keep is None else session.keep)
                rows.save(session)
            connection.run("COMMIT")
        except SqliteFault as fault:
            error = self._file.judge(fault)
            self._file.close()
            raise error from fault
        except StoreCorrupt as error:
            error = self._file.quarantine(str(error))
            self._file.close()
            raise error from None
        self._rows = rows

    def _run_group(self, jobs: list[Job]) -> None:
        writes = not all(job.reads for job in jobs)
        try:
            connection = self._file.connection()
            rows = self._rows
            if rows is None:
                rows = self._rows = SqliteRows(connection)
            if writes:
                connection.run("BEGIN IMMEDIATE")
            for job in jobs:
                _run_job(job, connection, rows)
            if writes:
                connection.run("COMMIT")
            self._changed.extend(rows.take_changed())
        except SqliteFault as fault:
            self._undo()
            # Nothing of a group that met a full disk was stored: whoever fits alone need not suffer for the others.
            error = self._judged(fault)
            if isinstance(error, StoreFull) and len(jobs) > 1:
                for job in jobs:
                    self._run_group([job])
                return
            self._fail(jobs, error)
        except StoreCorrupt as error:
            self._undo()
            self._fail(jobs, self._corrupted(error))
        except StoreError as error:  # there is no connection to be had
            self._fail(jobs, error)

    def _undo(self) -> None:
        if self._rows is not None:
            self._rows.take_changed()
        try:
            connection = self._file.connection()
            if connection.in_transaction:
                connection.run("ROLLBACK")
        except (SqliteFault, StoreError):
            self._lose()

    def _judged(self, fault: SqliteFault) -> StoreError:
        error = self._file.judge(fault)
        if not isinstance(error, StoreFull):
            self._lose()
        self._is_over = isinstance(error, StoreCorrupt)
        return error

    def _corrupted(self, error: StoreCorrupt) -> StoreCorrupt:
        self._rows = None
        self._is_over = True
        return self._file.quarantine(str(error))

    def _lose(self) -> None:
        self._rows = None
        self._file.lose()

    def _fail(self, jobs: list[Job], error: StoreError) -> None:
        for job in jobs:
            job.result = None
            job.error = _again(error)


def _run_job(job: Job, connection: Connection, rows: SqliteRows) -> None:
    job.error = None
    rows.begin()
    if job.reads:
        _act(job, rows)
        return
    connection.run("SAVEPOINT job")
    if not _act(job, rows):
        connection.run("ROLLBACK TO job")
    connection.run("RELEASE job")


def _act(job: Job, rows: SqliteRows) -> bool:
    try:
        job.result = job.act(rows)
    except (SqliteFault, StoreCorrupt):
        raise  # about the file, so about everybody
    except BaseException as error:  # the rules, or the application's transformer
        job.error = error
        return False
    return True


def _again(error: StoreError) -> StoreError:
    """The same for another caller: one exception raised in two tasks would mix their tracebacks."""
    if isinstance(error, StoreCorrupt):
        return StoreCorrupt(str(error), aside=error.aside)
    if type(error) in (StoreFull, StoreFailed):
        return type(error)(str(error))
    return error


protect_package("muxkit.protocols.restream")
