"""Stores of version 1, as earlier versions made them, are opened and brought up to date."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING
from zlib import crc32

from muxkit.protocols.restream.store import open_store, postgres, sqlite
from tests.protocols.restream.stores import U1, U2
from tests.protocols.restream.stores_servers import ask

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["tests.protocols.restream._postgres"]

FAR = 1e12  # s since 1970
ROWS = [(U1, b'{"a":1}', b"{}", 3, 1, 0, 1, 4, None, FAR), (U2, b"{}", b"{}", 0, 0, 0, 0, 0, 60.0, FAR)]


def make_sqlite(path: Path) -> None:
    """Write a file as version 1 did."""
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for statement in sqlite.MIGRATIONS[0]:
            file.execute(statement)
        for sid, row in enumerate(ROWS, 1):
            file.execute(f"INSERT INTO sessions VALUES ({sid}{',?' * 11})", (*row, crc32(repr(row).encode())))
        for id in (2, 3):
            key, data = (1 << 32) + id, f'"{id}"'.encode()
            seal = crc32(data, crc32(repr((key, None)).encode()))
            file.execute("INSERT INTO messages VALUES (?, NULL, ?, ?)", (key, data, seal))
        file.execute(f"PRAGMA application_id = {sqlite.SCHEMA.number}")
        file.execute("PRAGMA user_version = 1")
    file.close()


async def check(where: str) -> None:
    """Open it twice: what was there is there, and each session has an incarnation of its own that stays."""
    seen = []
    for _ in range(2):
        async with open_store(where) as store:
            one, two = await store.status(U1), await store.status(U2)
            assert (one.head, one.acknowledged, one.epoch, one.params) == (3, 1, 4, {"a": 1})
            assert [message.data for message in await store.replay(U1, 1)] == ["2", "3"]
            assert one.readers == {}
            assert (one.written, two.written) == (6, 0)  # of the two messages that are left
            seen.append((one.incarnation, two.incarnation))
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2
    assert all(seen[0])
    async with open_store(where) as store:
        await store.append(U1, "four")
        await store.ack(U1, 4)
        await store.attach(U2)
        assert (await store.status(U1)).acknowledged == 4


async def test_a_file_of_version_1_keeps_its_sessions(tmp_path: Path) -> None:
    make_sqlite(tmp_path / "old.db")
    await check(f"sqlite:{tmp_path / 'old.db'}")


async def test_a_database_of_version_1_keeps_its_sessions(schema: str) -> None:
    for statement in postgres.MIGRATIONS[0]:
        ask(schema, statement)
    ask(schema, "CREATE TABLE restream_store (version integer NOT NULL)")
    ask(schema, "INSERT INTO restream_store VALUES (1)")
    for uuid, params, state, head, acknowledged, final, fed, epoch, keep, due in ROWS:
        values = f"'{uuid}', '{params.decode()}', '{state.decode()}', {head}, {acknowledged}, {bool(final)}"
        ask(
            schema,
            f"INSERT INTO restream_sessions VALUES ({values}, {bool(fed)}, {epoch}, {keep or 'NULL'}, {due}, NULL)",
        )
    for id in (2, 3):
        ask(schema, f"INSERT INTO restream_messages VALUES ('{U1}', {id}, NULL, '\"{id}\"')")
    await check(schema)
