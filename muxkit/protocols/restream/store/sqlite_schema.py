"""Which tables does a file have, and how does an older one become a newer one?

A message's key is the number of its session times 2³² plus its id, so that the messages of a session lie together and
in order without an index. Each row carries a checksum: SQLite has none of its own, and a flipped bit would be sent.
"""

from __future__ import annotations

APPLICATION = 0x6D787273  # "mxrs"

# The n-th entry makes version n of version n - 1. Entries are never changed, only added.
MIGRATIONS = (
    (
        "CREATE TABLE sessions (sid INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, params BLOB NOT NULL, "
        "state BLOB NOT NULL, head INTEGER NOT NULL, acknowledged INTEGER NOT NULL, final INTEGER NOT NULL, "
        "fed INTEGER NOT NULL, epoch INTEGER NOT NULL, keep REAL, due REAL, seal INTEGER NOT NULL)",
        "CREATE INDEX sessions_due ON sessions (due) WHERE due IS NOT NULL",
        "CREATE TABLE messages (key INTEGER PRIMARY KEY, time REAL, data BLOB NOT NULL, seal INTEGER NOT NULL)",
    ),
)

VERSION = len(MIGRATIONS)
STATEMENTS = {statement for version in MIGRATIONS for statement in version}
