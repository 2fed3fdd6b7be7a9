"""Which tables does a database have, and how are they made when several servers start at once?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit.protocols.restream.store.errors import StoreVersion

if TYPE_CHECKING:
    from psycopg import Connection

LOCK = 0x6D787273  # of the advisory lock that whoever looks at the version holds

# The n-th entry makes version n of version n - 1. Entries are never changed, only added.
# Uuids are ordered as Python orders them. Rows of sessions change often, so their pages keep room for that.
MIGRATIONS = (
    (
        "CREATE TABLE restream_servers (id text PRIMARY KEY, seen double precision NOT NULL)",
        'CREATE TABLE restream_sessions (uuid text COLLATE "C" PRIMARY KEY, params bytea NOT NULL, '
        "state bytea NOT NULL, head bigint NOT NULL, acknowledged bigint NOT NULL, final boolean NOT NULL, "
        "fed boolean NOT NULL, epoch bigint NOT NULL, keep double precision, due double precision, server text) "
        "WITH (fillfactor = 50)",
        "CREATE INDEX restream_sessions_due ON restream_sessions (due) WHERE due IS NOT NULL",
        "CREATE INDEX restream_sessions_server ON restream_sessions (server) WHERE due IS NULL",
        'CREATE TABLE restream_messages (uuid text COLLATE "C", id bigint, time double precision, '
        "data bytea NOT NULL, PRIMARY KEY (uuid, id))",
    ),
)

VERSION = len(MIGRATIONS)


def migrate(connection: Connection) -> None:
    """Make or update the tables, in the first schema of the connection's search path."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        connection.execute("CREATE TABLE IF NOT EXISTS restream_store (version integer NOT NULL)")
        found = connection.execute("SELECT version FROM restream_store").fetchone()
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
            connection.execute("INSERT INTO restream_store VALUES (%s)", (VERSION,))
        elif version < VERSION:
            connection.execute("UPDATE restream_store SET version = %s", (VERSION,))
