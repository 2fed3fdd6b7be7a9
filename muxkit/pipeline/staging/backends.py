"""The backends of a staging store: memory, a SQLite file, or a PostgreSQL database that several servers share.

`open_staging` opens a store by its address. All backends run the same units of work on the same tables. They differ in
durability, and in how they wait for other servers.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from muxkit.pipeline.errors import StagingFull
from muxkit.pipeline.staging.records import Block, StagingLimits, Transaction
from muxkit.pipeline.staging.rows import MIGRATIONS, Rows, postgres_migrations
from muxkit.pipeline.staging.store import Now, Staging
from muxkit.storage import Job, Kind, Schema, StoreClosed, StoreError, Waiters, Worker, kind_of
from muxkit.storage.errors import copy_of
from muxkit.storage.postgres import Database, migrate_postgres
from muxkit.storage.sqlite import Connection, SqliteBackend, SqliteFile, StandardConnection, Value, give_back_pages

T = TypeVar("T")

LIMITS = StagingLimits()
NUMBER, NOUN = 0x6D787374, "a staging store"  # "mxst"
SQLITE_SCHEMA = Schema(NUMBER, NOUN, MIGRATIONS)
POSTGRES_SCHEMA = Schema(NUMBER, NOUN, postgres_migrations(), version_table="staging_store")

MIN_UNUSED_PAGES = 64  # of a file; fewer pages aren't returned to the disk
APPLICATION = "muxkit staging"  # the name of the connections in PostgreSQL
MAX_TRIES = 10  # of a job that conflicted with another server's job, or lost its connection
POLL_INTERVAL = 1.0  # s between two looks for commits of other servers


def open_staging(
    where: str, *, limits: StagingLimits = LIMITS, now: Now = time.time
) -> AbstractAsyncContextManager[Staging]:
    """Open a staging store. Leaving the context completes running operations and closes the store.

    Args:
        where: `memory:`, `sqlite:PATH` or `postgresql://…`.
        limits: the limits of the store.
        now: a clock in seconds since 1970. It may be called in any thread.

    Raises:
        ValueError: if the address is invalid.
        StoreError: on entry, if the store can't be opened.
    """
    kind, place = kind_of(where)
    match kind:
        case Kind.MEMORY:
            return _open_memory(limits, now)
        case Kind.SQLITE:
            return _open_sqlite(Path(place), limits, now)
        case Kind.POSTGRES:
            return _open_postgres(place, limits, now)


# ---------------------------------------------------------------------------- memory


@asynccontextmanager
async def _open_memory(limits: StagingLimits, now: Now) -> AsyncIterator[Staging]:
    waiters = Waiters()
    backend = _Memory(limits.bytes, waiters)
    try:
        yield Staging(backend, waiters, limits, now)
    finally:
        backend.close()


class _Memory:
    """A database in memory, which is lost with the process. Units of work can't overlap, because none of them waits."""

    def __init__(self, most_bytes: int, waiters: Waiters) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        for statements in SQLITE_SCHEMA.migrations:
            for statement in statements:
                self._connection.execute(statement)
        self._rows = _MemoryRows(self._connection, most_bytes)
        self._waiters = waiters
        self._is_closed = False

    async def work(self, key: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise StoreClosed("the store is closed; open it again")
        self._rows.begin()
        with self._connection:  # commits, or rolls back after an error
            self._connection.execute("BEGIN")
            result = act(self._rows)
        for stream in self._rows.take_changed():
            self._waiters.wake(stream)
        return result

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()
        self._waiters.wake_all()


class _MemoryRows(Rows):
    """Rows in memory. `most_bytes` limits the size of all blocks. Deleted transactions are freed immediately."""

    def __init__(self, connection: sqlite3.Connection, most_bytes: int) -> None:
        super().__init__(lambda sql, values: connection.execute(sql, values).fetchall(), connection.executemany)
        self._most_bytes = most_bytes
        self._used = 0

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        growth = sum(len(block.body) for block in blocks)
        if self._used + growth > self._most_bytes:
            raise StagingFull(
                f"{self._used:,} bytes are used and {growth:,} more would pass "
                f"StagingLimits(bytes={self._most_bytes}); trim streams that were read, or raise it"
            )
        super().add(id, blocks)
        self._used += growth

    def remove_transaction(self, id: str) -> None:
        found = self.get(Transaction, id)
        self._used -= 0 if found is None else found.size
        super().remove_transaction(id)
        self.reclaim(id)


# ---------------------------------------------------------------------------- SQLite


@asynccontextmanager
async def _open_sqlite(path: Path, limits: StagingLimits, now: Now) -> AsyncIterator[Staging]:
    waiters = Waiters()
    file = SqliteFile(path, SQLITE_SCHEMA, StandardConnection, most_bytes=limits.bytes, limit_name="StagingLimits")
    backend = SqliteBackend(file, _rows_of, waiters, thread_name=f"muxkit staging {path.name}")
    try:
        await backend.open()
        yield Staging(backend, waiters, limits, now)
    finally:
        await backend.close()


def _rows_of(connection: Connection) -> Rows:
    shrink = partial(give_back_pages, connection, least=MIN_UNUSED_PAGES)
    return Rows(connection.run, connection.run_many, shrink=shrink)


# ---------------------------------------------------------------------------- PostgreSQL


@asynccontextmanager
async def _open_postgres(url: str, limits: StagingLimits, now: Now) -> AsyncIterator[Staging]:
    """Open a store in this database, in the first schema of its search path. Missing tables are created."""
    waiters = Waiters()
    backend = _Postgres(url, waiters)
    opened = False
    try:
        await backend.call(backend.open)
        opened = True
        yield Staging(backend, waiters, limits, now, poll_interval=POLL_INTERVAL)
    finally:
        await backend.stop(backend.close, shield=opened)


class _Postgres(Worker[Rows]):
    """A thread that runs each job as one database transaction. A job may run twice if a connection breaks.

    Every change to an application's transactions first locks the row of the application, and then that of the stream.
    Two servers therefore agree about each batch and can't deadlock.
    """

    def __init__(self, url: str, waiters: Waiters) -> None:
        self._database = Database(url, APPLICATION)
        super().__init__("muxkit staging", self._run_jobs, waiters)

    # ------------------------------------------------------------------------ in the thread

    def open(self) -> None:
        try:
            migrate_postgres(self._database.connection(), POSTGRES_SCHEMA)
        except self._database.errors as error:
            raise self._database.judge(error) from error

    def close(self) -> None:
        self._database.close()

    def _run_jobs(self, jobs: list[Job[Rows]]) -> None:
        for job in jobs:
            self._run_job(job)

    def _run_job(self, job: Job[Rows]) -> None:
        for tries in range(MAX_TRIES, 0, -1):
            job.error = None
            try:
                self._attempt(job)
                return
            except self._database.errors as error:
                is_lost = self._database.recover()
                if tries > 1 and (is_lost or self._database.is_worth_another_try(error)):
                    continue
                job.error = self._database.judge(error)
                return
            except StoreError as error:
                job.error = copy_of(error)
                return

    def _attempt(self, job: Job[Rows]) -> None:
        connection = self._database.connection()

        def run(sql: str, values: Sequence[Value]) -> list[tuple[Value, ...]]:
            cursor = connection.execute(_translated(sql), values, binary=True)
            return cursor.fetchall() if cursor.description else []

        def run_many(sql: str, values: Sequence[Sequence[Value]]) -> None:
            if values:
                with connection.cursor() as cursor:
                    cursor.executemany(_translated(sql), values)

        rows = Rows(run, run_many, lock=" FOR UPDATE")
        connection.execute("BEGIN")
        try:
            job.result = job.act(rows)
        except self._database.errors:
            raise
        except Exception as error:  # raised by a rule of the store
            connection.execute("ROLLBACK")
            job.error = error
            return
        connection.execute("COMMIT")
        self.changed.extend(rows.take_changed())


def _translated(sql: str) -> str:
    """Return the statement with binary parameters. As text, bytes would be twice as long."""
    return sql.replace("?", "%b")
