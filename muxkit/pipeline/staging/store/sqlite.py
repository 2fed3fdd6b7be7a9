"""A staging store in one SQLite file: one thread, one connection, one transaction for all that was asked meanwhile.

The file, its lock and its thread are those of restream's stores; the tables are our own.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from muxkit.pipeline.staging.store.sql import SQLITE, SqlRows, migrations
from muxkit.pipeline.staging.store.store import Staging
from muxkit.protocols.restream.store.errors import (
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreVersion,
)
from muxkit.storage.sqlite import SqliteFile
from muxkit.storage.sqlite_connection import CORRUPT, SqliteFault, StandardConnection
from muxkit.storage.waiters import Waiters
from muxkit.storage.worker import Job, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from muxkit.pipeline.staging.store.rows import Rows
    from muxkit.pipeline.staging.store.rules import Rules
    from muxkit.protocols.restream.store.rows import Rows as RestreamRows
    from muxkit.storage.sqlite_connection import Connection

T = TypeVar("T")

APPLICATION = 0x6D787374  # "mxst"
MIGRATIONS = migrations(SQLITE)
VERSION = len(MIGRATIONS)
STATEMENTS = {statement for version in MIGRATIONS for statement in version}
SPARE = 0.2  # part of the file that may be unused before it is given back
LEAST_SPARE = 64  # pages: less is not worth a write
GIVEN_BACK_AT_ONCE = 256  # pages of one unit of work


@asynccontextmanager
async def open_sqlite(path: Path, rules: Rules) -> AsyncIterator[Staging]:
    """A store in this file, which is made if there is none."""
    waiters = Waiters()
    file = StagingFile(path, StandardConnection, journal="auto", most_bytes=rules.limits.bytes)
    backend = _Sqlite(file, waiters)
    try:
        await backend.worker.call(backend.open)
        yield Staging(backend, rules, waiters)
    finally:
        await backend.worker.stop(file.close)
        waiters.wake_all()


class StagingFile(SqliteFile):
    """The file of a restream store with other tables in it."""

    def _identify(self, connection: Connection) -> int:
        tables = connection.run("SELECT count(*) FROM sqlite_master")[0][0]
        application = connection.run("PRAGMA application_id")[0][0]
        version = connection.run("PRAGMA user_version")[0][0]
        if tables == 0 and application == 0 and version == 0:
            if self._side.was_made:
                raise SqliteFault(CORRUPT, "it is missing or empty, though a store was made here")
            return 0
        if application != APPLICATION or type(version) is not int or version < 1:
            raise StoreVersion(f"{self.path} is a database of something else; choose another file")
        if version > VERSION:
            raise StoreVersion(
                f"{self.path} is of version {version}, and this muxkit knows up to {VERSION}; use a newer muxkit"
            )
        return version

    def _look_through(self, connection: Connection) -> None:
        found = connection.run("PRAGMA integrity_check(1)")
        if found != [("ok",)]:
            raise SqliteFault(CORRUPT, "; ".join(str(row[0]) for row in found))
        statements = {row[0] for row in connection.run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if not statements <= STATEMENTS:
            raise SqliteFault(CORRUPT, "its tables are not the ones that a staging store has")

    def _migrate(self, connection: Connection, version: int) -> None:
        connection.run("BEGIN IMMEDIATE")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.run(statement)
        connection.run(f"PRAGMA application_id = {APPLICATION}")
        # Also when it says so already: writing is the only way to learn whether the file can be written.
        connection.run(f"PRAGMA user_version = {VERSION}")
        connection.run("COMMIT")


class _Sqlite:
    """The backend: groups of jobs become transactions."""

    def __init__(self, file: StagingFile, waiters: Waiters) -> None:
        self._file = file
        self._rows: SqlRows | None = None
        self._waiters = waiters
        self._changed: list[str] = []  # filled in the thread before a group is delivered, emptied when it is
        self._is_over = False  # the file was not in order, and no call will succeed any more
        self.worker = Worker(f"muxkit staging {file.path.name}", self._run_group, self._wake)

    async def work(self, act: Callable[[Rows], T]) -> T:
        # The thread hands back to `_act` what it is given here, and never looks at the rows.
        return await self.worker.ask("", cast("Callable[[RestreamRows], T]", act), reads=False)

    @property
    def looks_after(self) -> float | None:
        return None

    def _wake(self) -> None:
        if self._is_over:
            self._waiters.wake_all()
        while self._changed:
            self._waiters.wake(self._changed.pop())

    # ------------------------------------------------------------------------ in the thread

    def open(self) -> None:
        self._file.open()

    def _run_group(self, jobs: list[Job]) -> None:
        try:
            connection = self._file.connection()
            rows = self._rows
            if rows is None:
                rows = self._rows = SqlRows(connection.run, connection.run_many, SQLITE, lambda: _shrink(connection))
            connection.run("BEGIN IMMEDIATE")
            for job in jobs:
                _run_job(job, connection, rows)
            connection.run("COMMIT")
            self._changed.extend(rows.take_changed())
        except SqliteFault as fault:
            self._undo()
            error = self._judged(fault)
            # Nothing of a group that met a full disk was stored: whoever fits alone need not suffer for the others.
            if isinstance(error, StoreFull) and len(jobs) > 1:
                for job in jobs:
                    self._run_group([job])
                return
            self._fail(jobs, error)
        except StoreCorrupt as error:
            self._undo()
            self._rows = None
            self._is_over = True
            self._fail(jobs, self._file.quarantine(str(error)))
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

    def _lose(self) -> None:
        self._rows = None
        self._file.lose()

    def _fail(self, jobs: list[Job], error: StoreError) -> None:
        for job in jobs:
            job.result = None
            job.error = _again(error)


def _run_job(job: Job, connection: Connection, rows: SqlRows) -> None:
    job.error = None
    rows.begin()
    connection.run("SAVEPOINT job")
    try:
        job.result = job.act(cast("RestreamRows", rows))  # it is one of ours, and takes ours
    except (SqliteFault, StoreCorrupt):
        raise  # about the file, so about everybody
    except BaseException as error:  # the rules
        job.error = error
        connection.run("ROLLBACK TO job")
    connection.run("RELEASE job")


def _shrink(connection: Connection) -> bool:
    pages = cast("int", connection.run("PRAGMA page_count")[0][0])
    spare = cast("int", connection.run("PRAGMA freelist_count")[0][0])
    if spare < LEAST_SPARE or spare < pages * SPARE:
        return False
    connection.run(f"PRAGMA incremental_vacuum({GIVEN_BACK_AT_ONCE})")
    return True


def _again(error: StoreError) -> StoreError:
    """The same for another caller: one exception raised in two tasks would mix their tracebacks."""
    if isinstance(error, StoreCorrupt):
        return StoreCorrupt(str(error), aside=error.aside)
    if type(error) in (StoreFull, StoreFailed):
        return type(error)(str(error))
    return error
