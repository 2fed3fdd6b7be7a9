"""A store in PostgreSQL, for several servers behind one address: threads that write, read and listen.

Who owns a session is in its row: an epoch that each `attach` raises. All that is written about a session is written
with its row locked, so a stale owner is found out wherever he is.
"""

from __future__ import annotations

import uuid as uuids
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from muxkit.protocols.restream.store.errors import StoreError, StoreFailed
from muxkit.protocols.restream.store.postgres_rows import PostgresRows, Want
from muxkit.protocols.restream.store.postgres_schema import migrate
from muxkit.protocols.restream.store.store import Store
from muxkit.runtime import protect_package, protected_manager
from muxkit.storage.listener import HEARTBEAT, Listener, beat
from muxkit.storage.postgres import Database
from muxkit.storage.waiters import Waiters
from muxkit.storage.worker import Job, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import psycopg

    from muxkit.protocols.restream.store.protocol import Data, Now, State
    from muxkit.protocols.restream.store.rows import Rows
    from muxkit.protocols.restream.store.rules import Rules

T = TypeVar("T")

TRIES = 10  # of a group that met another server's on its way
LOST = 6 * HEARTBEAT  # s of silence after which a server is taken for dead

LEAVE = "UPDATE restream_sessions SET due = %s + coalesce(keep, %s) WHERE server = %s AND due IS NULL"
BURY = """
WITH lost AS (
    SELECT s.uuid, v.seen FROM restream_sessions AS s JOIN restream_servers AS v ON v.id = s.server
    WHERE s.due IS NULL AND v.seen < %s AND v.id <> %s ORDER BY s.uuid FOR UPDATE OF s SKIP LOCKED
) UPDATE restream_sessions AS s SET due = lost.seen + coalesce(s.keep, %s) FROM lost WHERE s.uuid = lost.uuid
"""
FORGET = """
DELETE FROM restream_servers AS v WHERE seen < %s AND id <> %s
AND NOT EXISTS (SELECT FROM restream_sessions AS s WHERE s.server = v.id AND s.due IS NULL)
"""


@protected_manager
async def open_postgres(url: str, rules: Rules[State, Data]) -> AsyncIterator[Store[State, Data]]:
    """A store in this database, in the first schema of its search path; its tables are made if there are none."""
    waiters = Waiters()
    backend = _Postgres(url, waiters, rules.keep, rules.now)
    listener: Listener | None = None
    try:
        await backend.writer.call(backend.open)
        listener = Listener(Database(url), backend.server, waiters, rules.now)
        await listener.listening.wait()
        yield Store(backend, rules, waiters)
    finally:
        if listener is not None:
            listener.stop()
        opened = listener is not None
        await backend.reader.stop(backend.close_reading, patiently=opened)
        await backend.writer.stop(backend.close_writing, patiently=opened)
        waiters.wake_all()


class _Postgres:
    """The backend: groups of jobs become transactions; those that only read have a thread of their own."""

    def __init__(self, url: str, waiters: Waiters, keep: float, now: Now) -> None:
        self.server = uuids.uuid4().hex
        self._keep = keep
        self._now = now
        self._writing, self._reading = Database(url), Database(url)
        self._waiters = waiters
        self._changed: list[str] = []  # filled in the thread before a group is delivered, emptied when it is
        self.writer = Worker("muxkit store writer", self._write, self._wake)
        self.reader = Worker("muxkit store reader", self._read, lambda: None)

    async def work(self, uuid: str, act: Callable[[Rows], T]) -> T:
        return await self.writer.ask(uuid, act, reads=False)

    async def look(self, uuid: str, act: Callable[[Rows], T], *, after: int = -1, most: int = 0, size: int = 0) -> T:
        return await self.reader.ask(uuid, act, reads=True, after=after, most=most, size=size)

    def _wake(self) -> None:
        while self._changed:
            self._waiters.wake(self._changed.pop())

    # ------------------------------------------------------------------------ in the threads

    def open(self) -> None:
        try:
            connection = self._writing.connection()
            migrate(connection)
            beat(connection, self.server, self._now())
        except self._writing.errors as error:
            raise self._writing.judge(error) from error

    def close_reading(self) -> None:
        self._reading.close()

    def close_writing(self) -> None:
        with suppress(StoreError, self._writing.errors):
            if self._writing.is_open:
                connection = self._writing.connection()
                connection.execute(LEAVE, (self._now(), self._keep, self.server))
                connection.execute("DELETE FROM restream_servers WHERE id = %s", (self.server,))
        self._writing.close()

    def _write(self, jobs: list[Job]) -> None:
        # What is about all sessions has a transaction of its own: it must not mix with the rows that others hold.
        about_one = [job for job in jobs if job.uuid]
        if about_one:
            self._attempt(self._writing, about_one, self._transact)
        for job in jobs:
            if not job.uuid:
                self._attempt(self._writing, [job], self._sweep)

    def _read(self, jobs: list[Job]) -> None:
        self._attempt(self._reading, jobs, self._look)

    def _attempt(
        self, database: Database, jobs: list[Job], act: Callable[[psycopg.Connection, list[Job]], PostgresRows]
    ) -> None:
        """Run the jobs, again if that is safe, and write nothing twice."""
        tries = TRIES
        was_lost = False
        while True:
            rows = None
            try:
                rows = act(database.connection(), jobs)
                if act != self._look:
                    rows.write()
                self._changed.extend(rows.woken)
                return
            except database.errors as error:
                is_lost = database.recover()
                tries -= 1
                if tries and database.is_worth_another_try(error):
                    continue
                # A connection that breaks before anything was written (it was idle, the server was restarted) may be
                # replaced once. Later nobody knows whether the commit came through.
                if rows is None and is_lost and not was_lost:
                    was_lost = True
                    continue
                self._fail(jobs, database.judge(error))
                return
            except StoreError as error:
                self._fail(jobs, error)
                return

    def _transact(self, connection: psycopg.Connection, jobs: list[Job]) -> PostgresRows:
        rows = PostgresRows(connection, self.server)
        rows.load({job.uuid for job in jobs})
        _run(jobs, rows, self._writing.errors)
        return rows

    def _look(self, connection: psycopg.Connection, jobs: list[Job]) -> PostgresRows:
        rows = PostgresRows(connection, self.server)
        wants = [Want(job.uuid, job.after, job.most, job.size) for job in jobs if job.most]
        rows.look({job.uuid for job in jobs if job.uuid}, list(dict.fromkeys(wants)))
        _run(jobs, rows, self._writing.errors)
        return rows

    def _sweep(self, connection: psycopg.Connection, jobs: list[Job]) -> PostgresRows:
        now = self._now()
        beat(connection, self.server, now)
        connection.execute("BEGIN")
        connection.execute(BURY, (now - LOST, self.server, self._keep))
        connection.execute(FORGET, (now - LOST, self.server))
        rows = PostgresRows(connection, self.server)
        _run(jobs, rows, self._writing.errors)
        return rows

    def _fail(self, jobs: list[Job], error: StoreError) -> None:
        for job in jobs:
            job.result = None
            job.error = StoreFailed(str(error)) if type(error) is StoreFailed else error


def _run(jobs: list[Job], rows: PostgresRows, about_everybody: type[Exception]) -> None:
    for job in jobs:
        job.error = None
        try:
            job.result = job.act(rows)
        except about_everybody:
            raise
        except BaseException as error:  # the rules, or the application's transformer
            job.error = error


protect_package("muxkit.protocols.restream")
