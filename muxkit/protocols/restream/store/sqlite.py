"""A session store in one SQLite file.

The key of a message is the number of its session times 2³² plus its id, so that the messages of a session lie together
and in order without an index. Each row carries a checksum as a seal: SQLite has none of its own, and a flipped bit
would be sent to a client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast
from zlib import crc32

from muxkit.protocols.restream.store.rules import Data, Rules, Session, State, Wanted
from muxkit.protocols.restream.store.store import SessionStore
from muxkit.protocols.restream.wire import StoredMessage
from muxkit.runtime import protect_package, protected_manager
from muxkit.storage import Schema, StoreCorrupt, Waiters, sqlite

COLUMNS = "uuid, params, state, head, acknowledged, final, fed, epoch, keep, due, incarnation, readers, written, marks"
MIN_UNUSED_PAGES = 8  # fewer are not given back
DETACHED_AT_ONCE = 256  # sessions of one transaction, whose journal has to fit into the reserve of a full disk

MIGRATIONS = (
    (
        "CREATE TABLE sessions (sid INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, params BLOB NOT NULL, "
        "state BLOB NOT NULL, head INTEGER NOT NULL, acknowledged INTEGER NOT NULL, final INTEGER NOT NULL, "
        "fed INTEGER NOT NULL, epoch INTEGER NOT NULL, keep REAL, due REAL, incarnation TEXT NOT NULL, "
        "readers BLOB NOT NULL, written INTEGER NOT NULL, marks BLOB NOT NULL, seal INTEGER NOT NULL)",
        "CREATE INDEX sessions_due ON sessions (due) WHERE due IS NOT NULL",
        "CREATE TABLE messages (key INTEGER PRIMARY KEY, time REAL, data BLOB NOT NULL, seal INTEGER NOT NULL)",
    ),
)
SCHEMA = Schema(0x6D787273, "a store", MIGRATIONS)  # "mxrs"


@protected_manager
async def open_sqlite(
    path: Path,
    rules: Rules[State, Data],
    *,
    connect: sqlite.Connect = sqlite.StandardConnection,
    journal: sqlite.Journal = "auto",
) -> AsyncIterator[SessionStore[State, Data]]:
    """Open a store in this file, which is made if there is none.

    The absence of sessions whose clients were connected when the last process ended begins now.
    """
    waiters = Waiters()
    file = sqlite.SqliteFile(
        path, SCHEMA, connect, journal=journal, most_bytes=rules.limits.bytes, limit_name="StoreLimits"
    )
    backend = sqlite.SqliteBackend(file, _Rows, waiters, thread_name=f"muxkit store {path.name}")

    def detach_all(rows: _Rows, position: int) -> int | None:
        attached, following = rows.attached(position, DETACHED_AT_ONCE)
        for session in attached:
            rules.detach(rows, session)
        return following

    try:
        await backend.open(detach_all)
        yield SessionStore(backend, rules, waiters)
    finally:
        await backend.close()


class _Rows:
    """The rows behind one connection. Reading a row checks its seal."""

    def __init__(self, connection: sqlite.Connection) -> None:
        self._connection = connection
        self._run = connection.run
        self._run_many = connection.run_many
        self._sids: dict[str, int] = {}  # the numbers of the sessions that this unit of work has read
        self._changed: dict[str, None] = {}
        self._count: int | None = None  # of the sessions, after the first count: SQLite walks over all of them

    def begin(self) -> None:
        """Start another unit of work."""
        self._sids.clear()

    def session(self, uuid: str) -> Session | None:
        found = self._run(f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE uuid = ?", (uuid,))
        return self._session(found[0]) if found else None

    def save(self, session: Session) -> None:
        columns = _columns(session)
        seal = crc32(repr(columns).encode())
        sid = self._sids.get(session.uuid)
        if sid is None:
            self._run(
                f"INSERT INTO sessions ({COLUMNS}, seal) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", (*columns, seal)
            )
            self._count = None if self._count is None else self._count + 1
        else:
            self._run(
                "UPDATE sessions SET state=?, head=?, acknowledged=?, final=?, fed=?, epoch=?, keep=?, due=?, "
                "incarnation=?, readers=?, written=?, marks=?, seal=? WHERE sid=?",
                (*columns[2:], seal, sid),
            )

    def remove(self, uuid: str) -> None:
        sid = self._sids.pop(uuid, None)
        if sid is None:
            sid = cast("int", self._run("SELECT sid FROM sessions WHERE uuid = ?", (uuid,))[0][0])
        self._run("DELETE FROM messages WHERE key BETWEEN ? AND ?", (sid << 32, (sid + 1 << 32) - 1))
        self._run("DELETE FROM sessions WHERE sid = ?", (sid,))
        self._count = None if self._count is None else self._count - 1

    def add(self, uuid: str, messages: Sequence[StoredMessage]) -> None:
        base = self._sids[uuid] << 32
        self._run_many(
            "INSERT INTO messages (key, time, data, seal) VALUES (?,?,?,?)",
            [(base + row.id, row.time, row.data, _seal(base + row.id, row.time, row.data)) for row in messages],
        )

    def messages(self, wanted: Wanted) -> list[StoredMessage]:
        base = self._sids[wanted.uuid] << 32
        after, most = wanted.after, wanted.most
        found: list[StoredMessage] = []
        size = 0
        while len(found) < most and (not found or size < wanted.most_bytes):
            # In steps, as the size of a message is not known before it is read.
            step = min(most - len(found), 32)
            rows = self._run(
                "SELECT key, time, data, seal FROM messages WHERE key > ? AND key < ? ORDER BY key LIMIT ?",
                (base + after, base + (1 << 32), step),
            )
            for key, time, data, seal in rows:
                if type(key) is not int or type(data) is not bytes or seal != _seal(key, time, data):
                    raise StoreCorrupt(f"session {wanted.uuid}: a message is not what was written")
                size += len(data)
                if found and size > wanted.most_bytes:
                    return found
                after = key - base
                found.append(StoredMessage(after, cast("float | None", time), data))
            if len(rows) < step:
                break
        return found

    def trim(self, uuid: str, above: int, upto: int) -> None:
        base = self._sids[uuid] << 32
        self._run("DELETE FROM messages WHERE key > ? AND key <= ?", (base + above, base + upto))

    def count(self) -> int:
        if self._count is None:
            self._count = cast("int", self._run("SELECT count(*) FROM sessions")[0][0])
        return self._count

    def page(self, after: str, most: int, now: float) -> list[Session]:
        found = self._run(
            f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE uuid > ? AND (due IS NULL OR due > ?) "
            "ORDER BY uuid LIMIT ?",
            (after, now, most),
        )
        return [self._session(row) for row in found]

    def several(self, uuids: Sequence[str]) -> list[Session]:
        return [session for uuid in uuids if (session := self.session(uuid)) is not None]

    def overdue(self, now: float, most: int) -> list[Session]:
        found = self._run(
            f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE due IS NOT NULL AND due <= ? LIMIT ?", (now, most)
        )
        return [self._session(row) for row in found]

    def attached(self, position: int, most: int) -> tuple[list[Session], int | None]:
        """Return some of the attached sessions, and the position to continue from; None if these are the last."""
        found = self._run(
            f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE due IS NULL AND sid > ? ORDER BY sid LIMIT ?",
            (position, most),
        )
        return [self._session(row) for row in found], cast("int", found[-1][0]) if len(found) == most else None

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self._changed[uuid] = None

    def take_changed(self) -> list[str]:
        """Return the sessions whose waiters are to be woken, and forget them."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def shrink(self) -> bool:
        return sqlite.give_back_pages(self._connection, least=MIN_UNUSED_PAGES)

    def _session(self, row: tuple[sqlite.Value, ...]) -> Session:
        sid, seal, *columns = row
        if seal != crc32(repr(tuple(columns)).encode()) or type(sid) is not int:
            raise StoreCorrupt("a session is not what was written")
        # The seal fits, so these are the types that were written.
        session = Session(*columns)  # type: ignore[arg-type]
        session.final, session.fed = bool(session.final), bool(session.fed)
        self._sids[session.uuid] = sid
        return session


def _columns(session: Session) -> tuple[sqlite.Value, ...]:
    return (
        session.uuid,
        session.params,
        session.state,
        session.head,
        session.acknowledged,
        int(session.final),
        int(session.fed),
        session.epoch,
        None if session.keep is None else float(session.keep),
        None if session.due is None else float(session.due),
        session.incarnation,
        session.readers,
        session.written,
        session.marks,
    )


def _seal(key: int, time: sqlite.Value, data: bytes) -> int:
    return crc32(data, crc32(repr((key, time)).encode()))


protect_package("muxkit.protocols.restream")
