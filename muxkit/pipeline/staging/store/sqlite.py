"""A staging store in one SQLite file."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from muxkit.pipeline.staging.store.sql import SQLITE, SqlRows, migrations
from muxkit.pipeline.staging.store.store import Staging
from muxkit.storage import Schema, Waiters
from muxkit.storage.sqlite import SqliteBackend, SqliteFile, StandardConnection, give_back_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from muxkit.pipeline.staging.store.rules import Rules
    from muxkit.storage.sqlite import Connection

SCHEMA = Schema(0x6D787374, "a staging store", migrations(SQLITE))  # "mxst"
MIN_UNUSED_PAGES = 64  # fewer are not given back


@asynccontextmanager
async def open_sqlite(path: Path, rules: Rules) -> AsyncIterator[Staging]:
    """Open a store in this file, which is made if there is none."""
    waiters = Waiters()
    file = SqliteFile(path, SCHEMA, StandardConnection, most_bytes=rules.limits.bytes, limit_name="StagingLimits")
    backend = SqliteBackend(file, _rows_of, waiters, thread_name=f"muxkit staging {path.name}")
    try:
        await backend.open()
        yield Staging(backend, rules, waiters)
    finally:
        await backend.close()


def _rows_of(connection: Connection) -> SqlRows:
    return SqlRows(
        connection.run, connection.run_many, SQLITE, lambda: give_back_pages(connection, least=MIN_UNUSED_PAGES)
    )
