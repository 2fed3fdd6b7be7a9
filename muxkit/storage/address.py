"""The addresses of stores: `memory:`, `sqlite:PATH` and `postgresql://…`."""

from __future__ import annotations

from enum import Enum
from typing import Final

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
