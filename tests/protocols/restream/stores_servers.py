"""Two servers on one database, and statements of the tests beside them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muxkit.protocols.restream.store import StoreLimits
    from tests.protocols.restream.stores import NumberStore, Place


@asynccontextmanager
async def two(place: Place, limits: StoreLimits | None = None) -> AsyncIterator[tuple[NumberStore, NumberStore]]:
    async with place.open(limits=limits) as first, place.open(limits=limits) as second:
        yield first, second


def ask(where: str, sql: str) -> list[tuple[object, ...]]:
    with psycopg.connect(where, autocommit=True) as connection:
        cursor = connection.execute(sql)
        return cursor.fetchall() if cursor.description else []


def break_connections(where: str) -> int:
    """Close all connections of this library, and return how many there were."""
    return len(
        ask(where, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'muxkit restream'")
    )
