"""The address of a store, and the versioned tables of a store.

`kind_of` parses addresses such as `sqlite:PATH`. A `Schema` has the migrations that the backends apply when they open a
store. They refuse a store of a newer version and leave it unchanged.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import attrs

from muxkit.storage.errors import StoreVersion

KINDS: Final = "memory:, sqlite:PATH or postgresql://…"


class Kind(Enum):
    """The kinds of storage: the process's memory, a SQLite file, or a PostgreSQL database."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgresql"


def kind_of(address: str) -> tuple[Kind, str]:
    """Parse the address of a store.

    Returns:
        The kind, and the location: empty for memory, the path of a SQLite file, or the URL of a PostgreSQL database.

    Raises:
        ValueError: if the address has none of the forms in `KINDS`.
    """
    scheme, colon, rest = address.partition(":")
    if scheme == "memory" and colon and not rest:
        return Kind.MEMORY, ""
    if scheme == "sqlite" and rest:
        return Kind.SQLITE, rest
    if scheme in ("postgresql", "postgres") and rest:
        return Kind.POSTGRES, address
    raise ValueError(f"{address!r} names no store: {KINDS}")


@attrs.frozen(eq=False)
class Schema:
    """The tables of one kind of store, as a list of migrations.

    Entry n of `migrations`, counted from 1, upgrades the tables from version n - 1 to version n. Released entries never
    change, since existing stores were built with them. A new version appends an entry.
    """

    number: int
    """Identifies the kind: the application id of a SQLite file, and PostgreSQL's advisory lock during a migration."""
    noun: str
    """The name of the kind in error texts, such as `a store`."""
    migrations: tuple[tuple[str, ...], ...]
    version_table: str = ""
    """The table that holds the version number in PostgreSQL."""

    @property
    def version(self) -> int:
        """The newest version of the tables."""
        return len(self.migrations)

    @property
    def statements(self) -> set[str]:
        """The SQL of all migrations, which are the only statements a sound file may have been built with."""
        return {statement for version in self.migrations for statement in version}

    def refuse_newer(self, version: int, what: str) -> None:
        """Raise `StoreVersion` if the tables have a newer version than this schema. `what` names the tables."""
        if version > self.version:
            raise StoreVersion(
                f"{what} of version {version}, and this muxkit knows up to {self.version}; use a newer muxkit"
            )
