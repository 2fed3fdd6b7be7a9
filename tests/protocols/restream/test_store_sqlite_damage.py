"""A damaged file is an error, and never other data."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.storage import StoreCorrupt, StoreError, StoreVersion
from tests.protocols.restream.stores import U1, U2, Clock, Number, Numbers, NumberStore, next_number, rules

pytest_plugins = ["tests.protocols.restream.stores_fixtures"]


@pytest.fixture
def path(quick_path: Path) -> Path:
    return quick_path


async def fill(path: Path) -> None:
    async with open_sqlite(path, rules(Clock())) as store:
        for n, uuid in enumerate((U1, U2)):
            await store.register(uuid, Numbers(10**9), params={"n": n}, keep=3600)
            await store.put_many(uuid, next_number, 60)
            await store.append_many(uuid, [Number(10**1500)] * 4, time=5.0)  # some need pages of their own
            await store.append_many(uuid, [Number(10**4200)] * 2)
            await store.disconnect(uuid)
        await store.ack(U1, 50)


async def read_all(store: NumberStore) -> list[object]:
    seen: list[object] = []
    for status in await store.sessions():
        seen.append(attrs.evolve(status, expires=0))
        seen.append(await store.replay(status.uuid, status.acknowledged, 1000))
    return seen


@pytest.mark.requirement("R-58")
@pytest.mark.seeds(10, soak=500)
async def test_a_flipped_byte_is_harmless_or_an_error_and_never_something_else(seed: int, path: Path) -> None:
    root = path.parent
    whole = root / "whole" / "sessions.db"
    whole.parent.mkdir()
    await fill(whole)
    async with open_sqlite(whole, rules(Clock())) as store:
        expected = await read_all(store)
    luck = random.Random(seed)
    content = read(whole)
    noticed = 0
    for n in range(20):
        path = root / f"{n}" / "sessions.db"
        shutil.copytree(whole.parent, path.parent)
        # Half of them in SQLite's own data, at the beginnings of pages.
        place = luck.randrange(len(content))
        if n % 2:
            place = place // 4096 * 4096 + luck.randrange(120)
        damaged = bytearray(content)
        damaged[place] ^= 1 << luck.randrange(8)
        write(path, damaged)
        error = await open_and_compare(path, expected)
        if error is not None:
            noticed += 1
            check_what_is_left(path, error)
            with pytest.raises((StoreCorrupt, StoreVersion)):
                async with open_sqlite(path, rules(Clock())):
                    pytest.fail(f"byte {place}: it was begun anew in silence")
        shutil.rmtree(path.parent)
    assert noticed


async def open_and_compare(path: Path, expected: list[object]) -> StoreError | None:
    try:
        async with open_sqlite(path, rules(Clock())) as store:
            assert await read_all(store) == expected
    except (StoreCorrupt, StoreVersion) as error:
        return error
    return None


def check_what_is_left(path: Path, error: StoreError) -> None:
    if isinstance(error, StoreVersion):  # the flipped byte is in the application id
        assert path.stat().st_size
    else:
        assert isinstance(error, StoreCorrupt)
        assert error.aside
        assert Path(error.aside).stat().st_size
        assert not path.exists()


@pytest.mark.requirement("R-58")
@pytest.mark.parametrize("left", [None, 0, 100, 4096, 9000])
async def test_a_file_that_was_cut_short_or_lost_is_not_begun_anew(path: Path, left: int | None) -> None:
    await fill(path)
    if left is None:
        os.unlink(path)
    else:
        os.truncate(path, left)
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=r"Restore it from a backup, or remove .*sessions\.db\.lock"):
            async with open_sqlite(path, rules(Clock())):
                pytest.fail("it was opened")
    path.with_name(path.name + ".lock").unlink()
    async with open_sqlite(path, rules(Clock())) as store:
        assert await store.sessions() == []


@pytest.mark.requirement("R-58")
async def test_a_file_that_never_was_a_store_is_left_where_it_is(path: Path) -> None:
    write(path, b"Not a database, but somebody's notes.\n" * 50)
    with pytest.raises(StoreCorrupt, match="it wasn't changed"):
        async with open_sqlite(path, rules(Clock())):
            pytest.fail("it was opened")
    assert read(path).startswith(b"Not a database")


@pytest.mark.requirement("R-58")
@pytest.mark.parametrize("which", [0, 1])
async def test_an_index_that_leads_nowhere_is_damage_and_no_unknown_session(path: Path, which: int) -> None:
    await fill(path)
    content = bytearray(read(path))
    places = [found.start() for found in re.finditer(U1.encode(), content)]
    assert len(places) == 2  # in the table and in its index
    content[places[which]] ^= 1
    write(path, content)
    error = await open_and_compare(path, [])
    assert error is not None
    check_what_is_left(path, error)


@pytest.mark.requirement("R-58")
async def test_a_head_that_makes_sqlite_refuse_to_write_is_damage_too(path: Path) -> None:
    await fill(path)
    content = bytearray(read(path))
    content[18] = 3
    write(path, content)
    error = await open_and_compare(path, [])
    assert error is not None
    check_what_is_left(path, error)


@pytest.mark.requirement("R-58")
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE messages SET data = replace(data, '3', '4') WHERE key % 4294967296 = 55",
        "UPDATE messages SET time = 1",
        "DELETE FROM messages WHERE key % 4294967296 = 55",
        "UPDATE messages SET key = key + 1000 WHERE key % 4294967296 = 55",
        "UPDATE sessions SET head = 55",
        "UPDATE sessions SET state = '{}'",
    ],
)
async def test_what_sqlite_takes_for_whole_but_was_not_written_so_is_noticed(path: Path, damage: str) -> None:
    await fill(path)
    change(path, damage)
    error = await open_and_compare(path, [])
    assert error is not None
    check_what_is_left(path, error)


async def test_damage_met_in_use_fails_everything_that_follows(path: Path) -> None:
    await fill(path)
    change(path, "DELETE FROM messages WHERE key % 4294967296 = 55")
    async with open_sqlite(path, rules(Clock())) as store:
        assert (await store.put(U2, next_number)).id == 67
        with pytest.raises(StoreCorrupt, match="messages are missing"):
            await store.replay(U1, 50)
        for attempt in (store.status(U2), store.put(U2, next_number), store.register("new", Numbers(1))):
            with pytest.raises(StoreCorrupt, match="messages are missing") as refused:
                await attempt
            assert str(path.parent) not in refused.value.for_client
            check_what_is_left(path, refused.value)


async def test_who_sleeps_hears_of_damage(path: Path) -> None:
    await fill(path)
    change(path, "DELETE FROM messages WHERE key % 4294967296 = 55")
    async with open_sqlite(path, rules(Clock())) as store:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def sleep() -> None:
                    with pytest.raises(StoreCorrupt):
                        await store.wait(U2, 66)

                await wait_all_tasks_blocked(0.01)
                with pytest.raises(StoreCorrupt):
                    await store.replay(U1, 50)


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql)
    connection.close()


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, content: bytes | bytearray) -> None:
    path.write_bytes(content)
