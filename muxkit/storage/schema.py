"""The tables of a store, and how an older version of them becomes a newer one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from muxkit.storage.errors import StoreVersion

if TYPE_CHECKING:
    from psycopg import Connection


@attrs.frozen(eq=False)
class Schema:
    """The tables of one kind of store.

    The n-th entry of `migrations` makes version n of version n - 1. Entries are never changed, only added.
    """

    number: int
    """The application id of a SQLite file, and the advisory lock of a migration in PostgreSQL."""
    noun: str
    """For errors: `a store`."""
    migrations: tuple[tuple[str, ...], ...]
    version_table: str = ""
    """PostgreSQL: the table that holds the version."""

    @property
    def version(self) -> int:
        return len(self.migrations)

    @property
    def statements(self) -> set[str]:
        """Every statement that a table or index was made with."""
        return {statement for version in self.migrations for statement in version}

    def refuse_newer(self, version: int, what: str) -> None:
        """Raise `StoreVersion` for tables of a version that does not exist yet."""
        if version > self.version:
            raise StoreVersion(
                f"{what} of version {version}, and this muxkit knows up to {self.version}; use a newer muxkit"
            )


def migrate_postgres(connection: Connection, schema: Schema) -> None:
    """Make or update the tables in the first schema of the search path; servers that start at once take turns."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema.number,))
        connection.execute(f"CREATE TABLE IF NOT EXISTS {schema.version_table} (version integer NOT NULL)")
        found = connection.execute(f"SELECT version FROM {schema.version_table}").fetchone()
        version: int = 0 if found is None else found[0]
        schema.refuse_newer(version, "the database's tables are")
        for statements in schema.migrations[version:]:
            for statement in statements:
                connection.execute(statement)
        if found is None:
            connection.execute(f"INSERT INTO {schema.version_table} VALUES (%s)", (schema.version,))
        elif version < schema.version:
            connection.execute(f"UPDATE {schema.version_table} SET version = %s", (schema.version,))
