"""How do the rows lie in SQLite? Reading checks the seal of what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from zlib import crc32

from muxkit.protocols.restream.store.errors import StoreCorrupt
from muxkit.protocols.restream.store.rows import Row, Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit.storage.sqlite_connection import Connection, Value

COLUMNS = "uuid, params, state, head, acknowledged, final, fed, epoch, keep, due"
SPARE = 0.2  # part of the file that may be unused before it is given back
LEAST_SPARE = 8  # pages: less is not worth a write
GIVEN_BACK_AT_ONCE = 256  # pages of one unit of work


class SqliteRows:
    """The rows behind one connection."""

    def __init__(self, connection: Connection) -> None:
        self._run = connection.run
        self._run_many = connection.run_many
        self._sids: dict[str, int] = {}  # of the sessions read in this unit of work
        self._changed: dict[str, None] = {}

    def begin(self) -> None:
        """Another unit of work."""
        self._sids.clear()

    def session(self, uuid: str) -> Session | None:
        found = self._run(f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE uuid = ?", (uuid,))
        return self._session(found[0]) if found else None

    def save(self, session: Session) -> None:
        columns = _columns(session)
        seal = crc32(repr(columns).encode())
        sid = self._sids.get(session.uuid)
        if sid is None:
            self._run(f"INSERT INTO sessions ({COLUMNS}, seal) VALUES (?,?,?,?,?,?,?,?,?,?,?)", (*columns, seal))
        else:
            self._run(
                "UPDATE sessions SET state=?, head=?, acknowledged=?, final=?, fed=?, epoch=?, keep=?, due=?, seal=? "
                "WHERE sid=?",
                (*columns[2:], seal, sid),
            )

    def remove(self, uuid: str) -> None:
        sid = self._sids.pop(uuid, None)
        if sid is None:
            sid = cast("int", self._run("SELECT sid FROM sessions WHERE uuid = ?", (uuid,))[0][0])
        self._run("DELETE FROM messages WHERE key BETWEEN ? AND ?", (sid << 32, (sid + 1 << 32) - 1))
        self._run("DELETE FROM sessions WHERE sid = ?", (sid,))

    def add(self, uuid: str, messages: Sequence[Row]) -> None:
        base = self._sids[uuid] << 32
        self._run_many(
            "INSERT INTO messages (key, time, data, seal) VALUES (?,?,?,?)",
            [(base + row.id, row.time, row.data, _seal(base + row.id, row.time, row.data)) for row in messages],
        )

    def messages(self, uuid: str, after: int, most: int, most_bytes: int) -> list[Row]:
        base = self._sids[uuid] << 32
        found: list[Row] = []
        size = 0
        while len(found) < most and (not found or size < most_bytes):
            # In steps: the size of the next message is not known before it is read.
            step = min(most - len(found), 32)
            rows = self._run(
                "SELECT key, time, data, seal FROM messages WHERE key > ? AND key < ? ORDER BY key LIMIT ?",
                (base + after, base + (1 << 32), step),
            )
            for key, time, data, seal in rows:
                if type(key) is not int or type(data) is not bytes or seal != _seal(key, time, data):
                    raise StoreCorrupt(f"session {uuid}: a message is not what was written")
                size += len(data)
                if found and size > most_bytes:
                    return found
                after = key - base
                found.append(Row(after, cast("float | None", time), data))
            if len(rows) < step:
                break
        return found

    def trim(self, uuid: str, above: int, upto: int) -> None:
        base = self._sids[uuid] << 32
        self._run("DELETE FROM messages WHERE key > ? AND key <= ?", (base + above, base + upto))

    def count(self) -> int:
        return cast("int", self._run("SELECT count(*) FROM sessions")[0][0])

    def page(self, after: str, most: int, now: float) -> list[Session]:
        found = self._run(
            f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE uuid > ? AND (due IS NULL OR due > ?) "
            "ORDER BY uuid LIMIT ?",
            (after, now, most),
        )
        return [self._session(row) for row in found]

    def overdue(self, now: float, most: int) -> list[str]:
        found = self._run("SELECT uuid FROM sessions WHERE due IS NOT NULL AND due <= ? LIMIT ?", (now, most))
        return [cast("str", uuid) for (uuid,) in found]

    def attached(self) -> list[Session]:
        """Those that somebody was attached to."""
        return [self._session(row) for row in self._run(f"SELECT sid, seal, {COLUMNS} FROM sessions WHERE due IS NULL")]

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self._changed[uuid] = None

    def take_changed(self) -> list[str]:
        """Whose waiters are to be woken."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def shrink(self) -> bool:
        pages = cast("int", self._run("PRAGMA page_count")[0][0])
        spare = cast("int", self._run("PRAGMA freelist_count")[0][0])
        if spare < LEAST_SPARE or spare < pages * SPARE:
            return False
        self._run(f"PRAGMA incremental_vacuum({GIVEN_BACK_AT_ONCE})")
        return True

    def _session(self, row: tuple[Value, ...]) -> Session:
        sid, seal, *columns = row
        if seal != crc32(repr(tuple(columns)).encode()) or type(sid) is not int:
            raise StoreCorrupt("a session is not what was written")
        # The seal fits, so these are the types that were written.
        session = Session(*columns)  # type: ignore[arg-type]
        session.final, session.fed = bool(session.final), bool(session.fed)
        self._sids[session.uuid] = sid
        return session


def _columns(session: Session) -> tuple[Value, ...]:
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
    )


def _seal(key: int, time: Value, data: bytes) -> int:
    return crc32(data, crc32(repr((key, time)).encode()))
