"""A staging store in PostgreSQL, for several servers behind one address: one thread, one transaction for each question.

Whatever is done to an application's transactions is done with the row of that application locked, then that of the
stream; so two servers agree about each batch, and wait for each other in one order only.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from muxkit.pipeline.staging.store.sql import POSTGRES, SqlRows, migrations
from muxkit.pipeline.staging.store.store import Staging
from muxkit.protocols.restream.store.errors import StoreError, StoreFailed, StoreVersion
from muxkit.storage.postgres import Database
from muxkit.storage.waiters import Waiters
from muxkit.storage.worker import Job, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import psycopg

    from muxkit.pipeline.staging.store.rows import Rows
    from muxkit.pipeline.staging.store.rules import Rules
    from muxkit.protocols.restream.store.rows import Rows as RestreamRows
    from muxkit.storage.sqlite_connection import Value

T = TypeVar("T")

LOCK = 0x6D787374  # of the advisory lock that whoever looks at the version holds
MIGRATIONS = migrations(POSTGRES)
VERSION = len(MIGRATIONS)
TRIES = 10  # of a unit of work that met another server's on its way, or lost its connection
LOOK = 1.0  # s between two looks for what other servers have committed


@asynccontextmanager
async def open_postgres(url: str, rules: Rules) -> AsyncIterator[Staging]:
    """A store in this database, in the first schema of its search path; its tables are made if there are none."""
    waiters = Waiters()
    backend = _Postgres(url, waiters)
    opened = False
    try:
        await backend.worker.call(backend.open)
        opened = True
        yield Staging(backend, rules, waiters)
    finally:
        await backend.worker.stop(backend.close, patiently=opened)
        waiters.wake_all()


class _Postgres:
    """The backend. What was asked may be done twice when a connection breaks, which all of it can bear."""

    def __init__(self, url: str, waiters: Waiters) -> None:
        self._database = Database(_introduced(url))
        self._waiters = waiters
        self._changed: list[str] = []  # filled in the thread before a group is delivered, emptied when it is
        self._statements: dict[str, str] = {}
        self.worker = Worker("muxkit staging", self._run_group, self._wake)

    async def work(self, act: Callable[[Rows], T]) -> T:
        # The thread hands back to `_attempt` what it is given here, and never looks at the rows.
        return await self.worker.ask("", cast("Callable[[RestreamRows], T]", act), reads=False)

    @property
    def looks_after(self) -> float | None:
        return LOOK

    def _wake(self) -> None:
        while self._changed:
            self._waiters.wake(self._changed.pop())

    # ------------------------------------------------------------------------ in the thread

    def open(self) -> None:
        try:
            _migrate(self._database.connection())
        except self._database.errors as error:
            raise self._database.judge(error) from error

    def close(self) -> None:
        self._database.close()

    def _run_group(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._run_job(job)

    def _run_job(self, job: Job) -> None:
        for tries in range(TRIES, 0, -1):
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
                job.error = StoreFailed(str(error)) if type(error) is StoreFailed else error
                return

    def _attempt(self, job: Job) -> None:
        connection = self._database.connection()
        rows = SqlRows(self._runs(connection), self._runs_many(connection), POSTGRES, lambda: False)
        connection.execute("BEGIN")
        try:
            job.result = job.act(cast("RestreamRows", rows))  # it is one of ours, and takes ours
        except self._database.errors:
            raise
        except Exception as error:  # the rules
            connection.execute("ROLLBACK")
            job.error = error
            return
        connection.execute("COMMIT")
        self._changed.extend(rows.take_changed())

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
            # Binary, or bytes would travel as text of twice their length.
            found = self._statements[sql] = sql.replace("?", "%b")
        return found


def _introduced(url: str) -> str:
    """With a name by which whoever looks after the database knows these connections."""
    if "application_name" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}application_name=muxkit%20staging"


def _migrate(connection: psycopg.Connection) -> None:
    """Make or update the tables, in the first schema of the connection's search path."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        connection.execute("CREATE TABLE IF NOT EXISTS staging_store (version integer NOT NULL)")
        found = connection.execute("SELECT version FROM staging_store").fetchone()
        version: int = 0 if found is None else found[0]
        if version > VERSION:
            raise StoreVersion(
                f"the database's tables are of version {version}, and this muxkit knows up to {VERSION}; "
                "use a newer muxkit"
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        if found is None:
            connection.execute("INSERT INTO staging_store VALUES (%s)", (VERSION,))
        elif version < VERSION:
            connection.execute("UPDATE staging_store SET version = %s", (VERSION,))
