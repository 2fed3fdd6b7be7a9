"""What a store is made of: its address, and its tables with their versions."""

from __future__ import annotations

from enum import Enum
from typing import Final

import attrs

from muxkit.storage.errors import StoreVersion

KINDS: Final = "memory:, sqlite:PATH or postgresql://…"


class Kind(Enum):
    """Where a store keeps its rows."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgresql"


def kind_of(address: str) -> tuple[Kind, str]:
    """Return the kind of a store and what the kind needs: the path of the file, or the URL of the database."""
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
