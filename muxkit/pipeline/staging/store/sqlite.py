"""A staging store in one SQLite file."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from muxkit.pipeline.staging.store.sql import SQLITE, SqlRows, migrations
from muxkit.pipeline.staging.store.store import Staging
from muxkit.storage import Schema, Waiters
from muxkit.storage.sqlite import SqliteBackend, SqliteFile, StandardConnection, give_back_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from muxkit.pipeline.staging.store.rows import Rows
    from muxkit.pipeline.staging.store.rules import Rules
    from muxkit.storage.sqlite import Connection

T = TypeVar("T")

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
        yield Staging(_Backend(backend), rules, waiters)
    finally:
        await backend.close()


class _Backend:
    def __init__(self, backend: SqliteBackend[SqlRows]) -> None:
        self._backend = backend

    async def work(self, act: Callable[[Rows], T]) -> T:
        return await self._backend.work("", act)

    @property
    def poll_interval(self) -> float | None:
        return None


def _rows_of(connection: Connection) -> SqlRows:
    return SqlRows(
        connection.run, connection.run_many, SQLITE, lambda: give_back_pages(connection, least=MIN_UNUSED_PAGES)
    )
