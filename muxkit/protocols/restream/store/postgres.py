"""A session store in PostgreSQL, which several servers share.

The owner of a session is in its row: an epoch that each `attach` increments. Every write about a session happens with
its row locked, so a superseded owner is refused on any server.
"""

from __future__ import annotations

import math
import time
import uuid as uuids
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from muxkit.protocols.restream.store.rules import LAST_ID, Data, Now, Rows, Rules, Session, State, Wanted
from muxkit.protocols.restream.store.store import SessionStore
from muxkit.protocols.restream.wire import StoredMessage
from muxkit.runtime import protect_package, protected_manager
from muxkit.storage import Job, Schema, StoreError, StoreFull, Waiters, Worker, fail_jobs
from muxkit.storage.postgres import HEARTBEAT, Database, Listener, migrate_postgres, pipeline_of

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

APPLICATION = "muxkit restream"  # of the connections, as the database shows them
CHANNEL = "muxkit_restream"  # of LISTEN and NOTIFY
COLUMNS = "uuid, params, state, head, acknowledged, final, fed, epoch, keep, due, incarnation, readers, written, marks"
RESERVE = 128  # pages of 8 KiB that a full disk still has for VACUUM
# The fill factor leaves one row in a page. Longer rows would give the table a second one for TOAST, and to truncate
# that one takes a new page. Rows are added only up to the number of pages that are missing.
FILL_RESERVE = (
    "INSERT INTO restream_reserve SELECT repeat('x', 400) "
    "FROM generate_series(1, {} - (SELECT count(*) FROM restream_reserve))"
)
# Uuids are in the order that Python gives them. Sessions change often, so their pages keep free space.
MIGRATIONS = (
    (
        "CREATE TABLE restream_servers (id text PRIMARY KEY, seen double precision NOT NULL)",
        'CREATE TABLE restream_sessions (uuid text COLLATE "C" PRIMARY KEY, params bytea NOT NULL, '
        "state bytea NOT NULL, head bigint NOT NULL, acknowledged bigint NOT NULL, final boolean NOT NULL, "
        "fed boolean NOT NULL, epoch bigint NOT NULL, keep double precision, due double precision, server text, "
        "incarnation text NOT NULL, readers bytea NOT NULL, written bigint NOT NULL, marks bytea NOT NULL) "
        "WITH (fillfactor = 50)",
        "CREATE INDEX restream_sessions_due ON restream_sessions (due) WHERE due IS NOT NULL",
        "CREATE INDEX restream_sessions_server ON restream_sessions (server) WHERE due IS NULL",
        'CREATE TABLE restream_messages (uuid text COLLATE "C", id bigint, time double precision, '
        "data bytea NOT NULL, PRIMARY KEY (uuid, id))",
        "CREATE TABLE restream_reserve (filler varchar(400) NOT NULL) WITH (fillfactor = 10)",
        FILL_RESERVE.format(RESERVE),
    ),
)
SCHEMA = Schema(0x6D787273, "a store", MIGRATIONS, version_table="restream_store")

MAKE_ROOM_INTERVAL = 2.0  # s between two attempts to make room, because each reads the pages that changed
MAX_TRIES = 10  # of a group that collided with one of another server
SERVER_TIMEOUT = 6 * HEARTBEAT  # s without a heartbeat after which a server counts as dead

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
LOAD = f"SELECT {COLUMNS} FROM restream_sessions WHERE uuid = ANY(%s) ORDER BY uuid"
PAGE = f"SELECT {COLUMNS} FROM restream_sessions WHERE uuid > %s AND (due IS NULL OR due > %s) ORDER BY uuid LIMIT %s"
MESSAGES = """
SELECT w.n, m.id, m.time, m.data
FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[]) AS w (n, uuid, after, most, size)
CROSS JOIN LATERAL (
    SELECT id, time, data FROM (
        SELECT id, time, data, sum(length(data)) OVER (ORDER BY id) AS total FROM restream_messages
        WHERE uuid = w.uuid AND id > w.after ORDER BY id LIMIT w.most
    ) AS first WHERE total <= w.size OR total = length(data)
) AS m ORDER BY w.n, m.id
"""
# In the order of the index, so that nothing is sorted. A sweep never waits for a lock, so its order cannot deadlock.
OVERDUE = f"SELECT {COLUMNS} FROM restream_sessions WHERE due <= %s ORDER BY due LIMIT %s FOR UPDATE SKIP LOCKED"
GIVE_RESERVE = "TRUNCATE restream_reserve"
VACUUM = "VACUUM restream_messages, restream_sessions"
TRIM = """
DELETE FROM restream_messages AS m USING unnest(%s::text[], %s::bigint[], %s::bigint[]) AS t (uuid, above, upto)
WHERE m.uuid = t.uuid AND m.id > t.above AND m.id <= t.upto
"""
INSERT = f"""
INSERT INTO restream_sessions ({COLUMNS}, server)
SELECT * FROM unnest(%s::text[], %b::bytea[], %b::bytea[], %s::bigint[], %s::bigint[], %s::boolean[], %s::boolean[],
    %s::bigint[], %s::float8[], %s::float8[], %s::text[], %b::bytea[], %s::bigint[], %b::bytea[], %s::text[])
"""
UPDATE = """
UPDATE restream_sessions AS s SET params = n.params, state = n.state, head = n.head, acknowledged = n.acknowledged,
    final = n.final, fed = n.fed, epoch = n.epoch, keep = n.keep, due = n.due, incarnation = n.incarnation,
    readers = n.readers, written = n.written, marks = n.marks, server = coalesce(n.server, s.server)
FROM unnest(%s::text[], %b::bytea[], %b::bytea[], %s::bigint[], %s::bigint[], %s::boolean[], %s::boolean[],
    %s::bigint[], %s::float8[], %s::float8[], %s::text[], %b::bytea[], %s::bigint[], %b::bytea[], %s::text[])
    AS n (uuid, params, state, head, acknowledged, final, fed, epoch, keep, due, incarnation, readers, written, marks,
    server)
WHERE s.uuid = n.uuid
"""
ADD = """
INSERT INTO restream_messages (uuid, id, time, data)
SELECT * FROM unnest(%s::text[], %s::bigint[], %s::float8[], %b::bytea[])
"""


@protected_manager
async def open_postgres(url: str, rules: Rules[State, Data]) -> AsyncIterator[SessionStore[State, Data]]:
    """Open a store in this database, in the first schema of its search path; missing tables are made."""
    waiters = Waiters()
    backend = _Postgres(url, waiters, rules.keep, rules.now)
    listener: Listener | None = None
    try:
        await backend.writer.call(backend.open)
        listening = trio.Event()

        def connected() -> None:
            listening.set()
            waiters.wake_all()

        listener = Listener(
            Database(url, APPLICATION),
            CHANNEL,
            backend.server,
            on_connected=connected,
            on_changed=waiters.wake,
            beat=lambda connection: beat(connection, backend.server, rules.now()),
        )
        await listening.wait()
        yield SessionStore(backend, rules, waiters, is_shared=True)
    finally:
        if listener is not None:
            listener.stop()
        opened = listener is not None
        await backend.reader.stop(backend.close_reading, shield=opened)
        await backend.writer.stop(backend.close_writing, shield=opened)


class _Postgres:
    """The backend: a group of jobs is one transaction; jobs that only read have a thread of their own."""

    def __init__(self, url: str, waiters: Waiters, keep: float, now: Now) -> None:
        self.server = uuids.uuid4().hex
        self._keep = keep
        self._now = now
        self._room_made_at = -math.inf
        self._writing, self._reading = Database(url, APPLICATION), Database(url, APPLICATION)
        self.writer: Worker[Rows] = Worker("muxkit store writer", self._write, waiters)
        self.reader: Worker[Rows] = Worker("muxkit store reader", self._read)

    async def work(self, uuid: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        return await self.writer.work(uuid, act, grows=grows)

    async def look(self, uuid: str, act: Callable[[Rows], T], wants: Wanted | None = None) -> T:
        return await self.reader.look(uuid, act, wants)

    # ------------------------------------------------------------------------ in the threads

    def open(self) -> None:
        try:
            connection = self._writing.connection()
            migrate_postgres(connection, SCHEMA)
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

    def _write(self, jobs: list[Job[Rows]]) -> None:
        # A job about all sessions has a transaction of its own: it must not wait for rows that other jobs have locked.
        single = [job for job in jobs if job.key]
        if single:
            self._attempt(self._writing, single, self._transact)
        for job in jobs:
            if not job.key:
                self._attempt(self._writing, [job], self._sweep)

    def _read(self, jobs: list[Job[Rows]]) -> None:
        self._attempt(self._reading, jobs, self._look)

    def _attempt(
        self,
        database: Database,
        jobs: list[Job[Rows]],
        act: Callable[[psycopg.Connection, list[Job[Rows]]], PostgresRows],
    ) -> None:
        """Run the jobs, again where that is safe, and write nothing twice."""
        tries = MAX_TRIES
        was_lost = was_full = False
        while True:
            rows = None
            try:
                rows = act(database.connection(), jobs)
                if act != self._look:
                    rows.write()
                self.writer.changed.extend(rows.woken)
                if was_full and not jobs[0].grows:
                    self._refill_reserve()
                return
            except database.errors as error:
                is_lost = database.recover()
                tries -= 1
                if tries and database.is_worth_another_try(error):
                    continue
                # A connection that breaks before anything was written (it was idle, the database was restarted) is
                # replaced once. After a write the commit may have been done.
                if rows is None and is_lost and not was_lost:
                    was_lost = True
                    continue
                judged = database.judge(error)
                if isinstance(judged, StoreFull) and act != self._look:
                    database.close()  # after a failure in a pipeline, psycopg may use statements that were not prepared
                    if len(jobs) > 1:
                        # The whole group was undone, though some of its jobs may fit: each is tried alone.
                        for job in jobs:
                            self._attempt(database, [job], act)
                        return
                    if not was_full and self._make_room(grows=jobs[0].grows):
                        was_full = True
                        continue
                fail_jobs(jobs, judged)
                return
            except StoreError as error:
                fail_jobs(jobs, error)
                return

    def _make_room(self, *, grows: bool) -> bool:
        """Make room on a full disk; return True if the write that failed may fit now.

        VACUUM lets the database use the space of deleted rows again. It needs a few new pages itself, for its maps of
        free and of visible rows. A full disk has none, so autovacuum fails as well, and acknowledgements alone would
        never empty the disk. The reserve gives these pages, and those of a write that adds no messages.
        """
        if grows and time.monotonic() < self._room_made_at + MAKE_ROOM_INTERVAL:
            return False
        try:
            connection = self._writing.connection()
            if not grows:
                connection.execute(GIVE_RESERVE)
                return True
            self._room_made_at = time.monotonic()
            try:
                connection.execute(VACUUM)
            except self._writing.errors as error:
                if not isinstance(self._writing.judge(error), StoreFull):
                    raise
                connection.execute(GIVE_RESERVE)
                connection.execute(VACUUM)
        except (StoreError, self._writing.errors):
            return False
        self._refill_reserve()
        return True

    def _refill_reserve(self) -> None:
        """Fill the reserve again, as far as the disk has room."""
        pages = RESERVE
        while pages:
            try:
                self._writing.connection().execute(FILL_RESERVE.format(pages))
            except (StoreError, self._writing.errors) as error:
                if isinstance(error, StoreError) or not isinstance(self._writing.judge(error), StoreFull):
                    return
                pages //= 2
                with suppress(StoreError, self._writing.errors):
                    # The pages of the insertion that failed are part of the table, though without rows.
                    self._writing.connection().execute(GIVE_RESERVE)
            else:
                return

    def _transact(self, connection: psycopg.Connection, jobs: list[Job[Rows]]) -> PostgresRows:
        rows = PostgresRows(connection, self.server)
        rows.load({job.key for job in jobs})
        _run_jobs(jobs, rows, self._writing.errors)
        return rows

    def _look(self, connection: psycopg.Connection, jobs: list[Job[Rows]]) -> PostgresRows:
        rows = PostgresRows(connection, self.server)
        wants = [job.wants for job in jobs if isinstance(job.wants, Wanted)]
        rows.look({job.key for job in jobs if job.key}, list(dict.fromkeys(wants)))
        _run_jobs(jobs, rows, self._writing.errors)
        return rows

    def _sweep(self, connection: psycopg.Connection, jobs: list[Job[Rows]]) -> PostgresRows:
        now = self._now()
        beat(connection, self.server, now)
        connection.execute("BEGIN")
        connection.execute(BURY, (now - SERVER_TIMEOUT, self.server, self._keep))
        connection.execute(FORGET, (now - SERVER_TIMEOUT, self.server))
        rows = PostgresRows(connection, self.server)
        _run_jobs(jobs, rows, self._writing.errors)
        return rows


def _run_jobs(jobs: list[Job[Rows]], rows: PostgresRows, database_errors: type[Exception]) -> None:
    for job in jobs:
        job.error = None
        try:
            job.result = job.act(rows)
        except database_errors:
            raise
        except BaseException as error:  # the rules, or the transformer
            job.error = error


def beat(connection: psycopg.Connection, server: str, now: float) -> None:
    """Record that this server lives, so that the sessions of a dead one do not stay attached."""
    connection.execute(
        "INSERT INTO restream_servers VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
        (server, now),
    )


# ---------------------------------------------------------------------------- rows


class PostgresRows:
    """The rows of one group of jobs.

    First all sessions of the group are read (and locked, in the order of their uuids), then the jobs run on copies in
    memory, last the changes are written: a few statements, however many jobs there are.
    """

    def __init__(self, connection: psycopg.Connection, server: str) -> None:
        self.connection = connection
        self._server = server
        self._sessions: dict[str, Session] = {}
        self._epochs: dict[str, int] = {}  # the epochs in the database
        self._found: dict[Wanted, list[StoredMessage]] = {}
        self._dirty: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._new: dict[str, list[StoredMessage]] = {}
        self._trimmed: dict[str, tuple[int, int]] = {}  # the ids above and up to which
        self._told: dict[str, None] = {}
        self.woken: dict[str, None] = {}

    def load(self, uuids: Iterable[str]) -> None:
        """Begin a transaction; read and lock these sessions."""
        with pipeline_of(self.connection):
            self.connection.execute("BEGIN")
            found = self.connection.execute(LOAD + " FOR UPDATE", (sorted(uuids),), binary=True)
        self._keep(found)

    def look(self, uuids: Iterable[str], wants: Sequence[Wanted]) -> None:
        """Read these sessions and messages in one snapshot."""
        messages = None
        with pipeline_of(self.connection):
            self.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            found = self.connection.execute(LOAD, (sorted(uuids),), binary=True)
            if wants:
                asked = [list(range(len(wants))), *_transposed(wants)]
                messages = self.connection.execute(MESSAGES, asked, binary=True)
            self.connection.execute("COMMIT")
        self._keep(found)
        if messages is not None:
            self._found = {want: [] for want in wants}
            for n, id, time, data in messages:
                self._found[wants[n]].append(StoredMessage(id, time, data))

    def _keep(self, found: Iterable[tuple[Any, ...]]) -> None:
        for row in found:
            session = Session(*row)
            self._sessions[session.uuid] = session
            self._epochs[session.uuid] = session.epoch

    # ------------------------------------------------------------------------ for the rules

    def session(self, uuid: str) -> Session | None:
        session = self._sessions.get(uuid)
        return None if session is None else attrs.evolve(session)

    def save(self, session: Session) -> None:
        self._sessions[session.uuid] = session
        self._dirty[session.uuid] = None

    def remove(self, uuid: str) -> None:
        self._sessions.pop(uuid, None)
        self._dirty.pop(uuid, None)
        self._new.pop(uuid, None)
        self._trimmed.pop(uuid, None)
        self._epochs.pop(uuid, None)
        self._removed[uuid] = None

    def add(self, uuid: str, messages: Sequence[StoredMessage]) -> None:
        self._new.setdefault(uuid, []).extend(messages)

    def messages(self, wanted: Wanted) -> list[StoredMessage]:
        return self._found[wanted]

    def trim(self, uuid: str, above: int, upto: int) -> None:
        # From the first id that is left: rows that vacuum has not removed yet are slow to skip.
        self._trimmed[uuid] = (self._trimmed.get(uuid, (above, 0))[0], upto)
        if uuid in self._new:  # made and acknowledged in one group
            self._new[uuid] = [row for row in self._new[uuid] if row.id > upto]

    def count(self) -> int:
        return 0  # counting reads the whole table, and other servers add to it

    def page(self, after: str, most: int, now: float) -> list[Session]:
        return [Session(*row) for row in self.connection.execute(PAGE, (after, now, most), binary=True)]

    def several(self, uuids: Sequence[str]) -> list[Session]:
        return [Session(*row) for row in self.connection.execute(LOAD, (list(uuids),), binary=True)]

    def overdue(self, now: float, most: int) -> list[Session]:
        found = self.connection.execute(OVERDUE, (now, most), binary=True).fetchall()
        self._keep(found)
        return [attrs.evolve(self._sessions[row[0]]) for row in found]

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self.woken[uuid] = None
        if everywhere:
            self._told[uuid] = None

    def shrink(self) -> bool:
        return False  # the database's own vacuum does it

    # ------------------------------------------------------------------------ writing

    def write(self) -> None:
        """Write the changes and commit."""
        run = self.connection.execute
        removed = list(self._removed)
        gone = [(uuid, -1, LAST_ID) for uuid in removed]
        gone += [(uuid, *ids) for uuid, ids in self._trimmed.items() if uuid not in self._removed]
        added = [uuid for uuid in sorted(self._dirty) if uuid not in self._epochs]
        changed = [uuid for uuid in self._dirty if uuid in self._epochs]
        new = [(uuid, *row) for uuid, rows in self._new.items() for row in rows]
        with pipeline_of(self.connection):
            if gone:
                run(TRIM, _transposed(gone))
            if removed:
                run("DELETE FROM restream_sessions WHERE uuid = ANY(%s)", (removed,))
            if added:
                run(INSERT, self._columns(added))
            if changed:
                run(UPDATE, self._columns(changed))
            if new:
                run(ADD, _transposed(new))
            if self._told:
                payloads = [f"{self._server} {uuid}" for uuid in self._told]
                run("SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS t (payload)", (CHANNEL, payloads))
            run("COMMIT")

    def _columns(self, uuids: Sequence[str]) -> list[list[object]]:
        rows = [(*attrs.astuple(session), self._owner(session)) for session in map(self._sessions.__getitem__, uuids)]
        return _transposed(rows)

    def _owner(self, session: Session) -> str | None:
        """Return this server if it attached the session in this group, which raised the epoch; else None, no change."""
        return None if self._epochs.get(session.uuid, 0) == session.epoch else self._server


def _transposed(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]


protect_package("muxkit.protocols.restream")
