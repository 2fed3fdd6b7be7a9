"""A staging store in PostgreSQL, which several servers share: one thread, one database transaction for each job.

Each change of an application's transactions locks the row of the application first, then that of the stream; so two
servers agree about each batch, and cannot deadlock.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from muxkit.pipeline.staging.store.sql import POSTGRES, SqlRows, migrations
from muxkit.pipeline.staging.store.store import Staging
from muxkit.storage import Job, Schema, StoreError, Waiters, Worker
from muxkit.storage.errors import copy_of
from muxkit.storage.postgres import Database, migrate_postgres

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import psycopg

    from muxkit.pipeline.staging.store.rows import Rows
    from muxkit.pipeline.staging.store.rules import Rules
    from muxkit.storage.sqlite import Value

T = TypeVar("T")

APPLICATION = "muxkit staging"  # of the connections, as the database shows them
SCHEMA = Schema(0x6D787374, "a staging store", migrations(POSTGRES), version_table="staging_store")
MAX_TRIES = 10  # of a job that collided with one of another server, or lost its connection
POLL_INTERVAL = 1.0  # s between two looks for the commits of other servers


@asynccontextmanager
async def open_postgres(url: str, rules: Rules) -> AsyncIterator[Staging]:
    """Open a store in this database, in the first schema of its search path; missing tables are made."""
    waiters = Waiters()
    backend = _Postgres(url, waiters)
    opened = False
    try:
        await backend.call(backend.open)
        opened = True
        yield Staging(backend, rules, waiters, poll_interval=POLL_INTERVAL)
    finally:
        await backend.stop(backend.close, shield=opened)


class _Postgres(Worker["Rows"]):
    """The backend. A job may be run twice when a connection breaks, which the rules allow."""

    def __init__(self, url: str, waiters: Waiters) -> None:
        self._database = Database(url, APPLICATION)
        self._statements: dict[str, str] = {}
        super().__init__("muxkit staging", self._run_jobs, waiters)

    # ------------------------------------------------------------------------ in the thread

    def open(self) -> None:
        try:
            migrate_postgres(self._database.connection(), SCHEMA)
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
        rows = SqlRows(self._runs(connection), self._runs_many(connection), POSTGRES, lambda: False)
        connection.execute("BEGIN")
        try:
            job.result = job.act(rows)
        except self._database.errors:
            raise
        except Exception as error:  # the rules
            connection.execute("ROLLBACK")
            job.error = error
            return
        connection.execute("COMMIT")
        self.changed.extend(rows.take_changed())

    def _runs(self, connection: psycopg.Connection) -> Callable[[str, Sequence[Value]], list[tuple[Value, ...]]]:
        def run(sql: str, values: Sequence[Value]) -> list[tuple[Value, ...]]:
            cursor = connection.execute(self._translated(sql), values, binary=True)
            return cursor.fetchall() if cursor.description else []

        return run

    def _runs_many(self, connection: psycopg.Connection) -> Callable[[str, Sequence[Sequence[Value]]], None]:
        def run_many(sql: str, values: Sequence[Sequence[Value]]) -> None:
            if values:
                with connection.cursor() as cursor:
                    cursor.executemany(self._translated(sql), values)

        return run_many

    def _translated(self, sql: str) -> str:
        found = self._statements.get(sql)
        if found is None:
            # Binary parameters: bytes as text would be twice as long.
            found = self._statements[sql] = sql.replace("?", "%b")
        return found
