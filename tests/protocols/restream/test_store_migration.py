"""A store that an older version of muxkit made is brought up to date when it is opened, with what it holds."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import attrs

from muxkit.protocols.restream.store import open_store, postgres, sqlite
from tests.protocols.restream.stores import U1
from tests.protocols.restream.stores_servers import ask

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from muxkit.storage import Schema

pytest_plugins = ["tests.protocols.restream._postgres"]


def next_version(schema: Schema, statement: str) -> Schema:
    """Return the schema of a later muxkit, whose tables differ by this statement."""
    return attrs.evolve(schema, migrations=(*schema.migrations, (statement,)))


async def write(where: str) -> None:
    async with open_store(where) as store:
        await store.register(U1, {})
        await store.append(U1, "one")


async def check(where: str) -> None:
    async with open_store(where) as store:
        assert (await store.status(U1)).head == 1
        assert [message.data for message in await store.replay(U1, 0)] == ["one"]


async def test_a_file_of_the_version_before_keeps_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.db"
    await write(f"sqlite:{path}")
    later = next_version(sqlite.SCHEMA, "CREATE INDEX sessions_head ON sessions (head)")
    monkeypatch.setattr(sqlite, "SCHEMA", later)
    for _ in range(2):
        await check(f"sqlite:{path}")
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (later.version,)
    file.close()


async def test_a_database_of_the_version_before_keeps_its_sessions(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(schema)
    later = next_version(postgres.SCHEMA, "ALTER TABLE restream_sessions ADD COLUMN note text")
    monkeypatch.setattr(postgres, "SCHEMA", later)
    for _ in range(2):
        await check(schema)
    assert ask(schema, "SELECT version FROM restream_store") == [(later.version,)]
