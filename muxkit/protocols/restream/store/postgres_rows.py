"""How do the rows of a group of jobs come from PostgreSQL and go back, in a few statements however many jobs it has?

All sessions of a group are read (and locked, in the order of their uuids) at its beginning, the jobs run on copies in
memory, and what they changed is written at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

from muxkit.protocols.restream.store.protocol import LAST_ID
from muxkit.protocols.restream.store.rows import Row, Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import psycopg

CHANNEL = "muxkit_restream"  # of LISTEN and NOTIFY; a payload is the server that speaks and the uuid
COLUMNS = "uuid, params, state, head, acknowledged, final, fed, epoch, keep, due"

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
OVERDUE = "SELECT uuid FROM restream_sessions WHERE due <= %s ORDER BY uuid LIMIT %s FOR UPDATE SKIP LOCKED"
TRIM = """
DELETE FROM restream_messages AS m USING unnest(%s::text[], %s::bigint[], %s::bigint[]) AS t (uuid, above, upto)
WHERE m.uuid = t.uuid AND m.id > t.above AND m.id <= t.upto
"""
INSERT = f"""
INSERT INTO restream_sessions ({COLUMNS}, server)
SELECT * FROM unnest(%s::text[], %b::bytea[], %b::bytea[], %s::bigint[], %s::bigint[], %s::boolean[], %s::boolean[],
    %s::bigint[], %s::float8[], %s::float8[], %s::text[])
"""
UPDATE = """
UPDATE restream_sessions AS s SET params = n.params, state = n.state, head = n.head, acknowledged = n.acknowledged,
    final = n.final, fed = n.fed, epoch = n.epoch, keep = n.keep, due = n.due, server = coalesce(n.server, s.server)
FROM unnest(%s::text[], %b::bytea[], %b::bytea[], %s::bigint[], %s::bigint[], %s::boolean[], %s::boolean[],
    %s::bigint[], %s::float8[], %s::float8[], %s::text[])
    AS n (uuid, params, state, head, acknowledged, final, fed, epoch, keep, due, server)
WHERE s.uuid = n.uuid
"""
ADD = """
INSERT INTO restream_messages (uuid, id, time, data)
SELECT * FROM unnest(%s::text[], %s::bigint[], %s::float8[], %b::bytea[])
"""


class Want(NamedTuple):
    """Messages that a job will ask for."""

    uuid: str
    after: int
    most: int
    size: int


class PostgresRows:
    """The rows of one group."""

    def __init__(self, connection: psycopg.Connection, server: str) -> None:
        self.connection = connection
        self._server = server
        self._sessions: dict[str, Session] = {}
        self._epochs: dict[str, int] = {}  # of the sessions that the database has, as it has them
        self._found: dict[Want, list[Row]] = {}
        self._dirty: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._new: dict[str, list[Row]] = {}
        self._trimmed: dict[str, tuple[int, int]] = {}  # above and up to these ids
        self._told: dict[str, None] = {}
        self.woken: dict[str, None] = {}

    def load(self, uuids: Iterable[str]) -> None:
        """Begin a transaction, and read and lock these sessions."""
        with self.connection.pipeline():
            self.connection.execute("BEGIN")
            found = self.connection.execute(LOAD + " FOR UPDATE", (sorted(uuids),), binary=True)
        self._keep(found)

    def look(self, uuids: Iterable[str], wants: Sequence[Want]) -> None:
        """Read these sessions and messages, all as of one moment."""
        messages = None
        with self.connection.pipeline():
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
                self._found[wants[n]].append(Row(id, time, data))

    def _keep(self, found: psycopg.Cursor) -> None:
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

    def add(self, uuid: str, messages: Sequence[Row]) -> None:
        self._new.setdefault(uuid, []).extend(messages)

    def messages(self, uuid: str, after: int, most: int, most_bytes: int) -> list[Row]:
        return self._found[Want(uuid, after, most, most_bytes)]

    def trim(self, uuid: str, above: int, upto: int) -> None:
        # From where they begin: what vacuum has not taken away yet is in the way of whoever begins at the first id.
        self._trimmed[uuid] = (self._trimmed.get(uuid, (above, 0))[0], upto)
        if uuid in self._new:  # made and acknowledged within one group
            self._new[uuid] = [row for row in self._new[uuid] if row.id > upto]

    def count(self) -> int:
        return 0  # counting reads the whole table, and other servers add to it meanwhile

    def page(self, after: str, most: int, now: float) -> list[Session]:
        return [Session(*row) for row in self.connection.execute(PAGE, (after, now, most), binary=True)]

    def overdue(self, now: float, most: int) -> list[str]:
        return [uuid for (uuid,) in self.connection.execute(OVERDUE, (now, most))]

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        self.woken[uuid] = None
        if everywhere:
            self._told[uuid] = None

    def shrink(self) -> bool:
        return False  # the database's own vacuum does it

    # ------------------------------------------------------------------------ writing it down

    def write(self) -> None:
        """Write what was changed, and commit."""
        run = self.connection.execute
        removed = list(self._removed)
        gone = [(uuid, -1, LAST_ID) for uuid in removed]
        gone += [(uuid, *ids) for uuid, ids in self._trimmed.items() if uuid not in self._removed]
        added = [uuid for uuid in sorted(self._dirty) if uuid not in self._epochs]
        changed = [uuid for uuid in self._dirty if uuid in self._epochs]
        new = [(uuid, *row) for uuid, rows in self._new.items() for row in rows]
        with self.connection.pipeline():
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
        """This server, if it attached in this group: the epoch says so. A feeder changes nothing about that."""
        return None if self._epochs.get(session.uuid, 0) == session.epoch else self._server


def _transposed(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]
