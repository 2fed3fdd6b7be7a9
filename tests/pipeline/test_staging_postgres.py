"""Several servers on one database agree about each batch, and a broken connection changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from muxkit.pipeline import Encoding, Key, make_block
from tests.pipeline._staging_world import DAY, KEY, Place, everything, rows, stage
from tests.protocols.restream.stores import Clock

if TYPE_CHECKING:
    from muxkit.pipeline import Staging
    from muxkit.pipeline.staging.records import Committed

pytest_plugins = ["tests.protocols.restream._postgres"]


@pytest.fixture
def database(schema: str) -> Place:
    return Place(schema, Clock())


def ask(where: str, sql: str) -> list[tuple[object, ...]]:
    with psycopg.connect(where, autocommit=True) as connection:
        cursor = connection.execute(sql)
        return cursor.fetchall() if cursor.description else []


def break_connections(where: str) -> set[object]:
    """Which ones: those that end just now may be among them."""
    told = ask(
        where, "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'muxkit staging'"
    )
    return {pid for pid, _ in told}


async def test_what_one_server_staged_another_commits(database: Place) -> None:
    async with database.open() as one, database.open() as other:
        parts = {**await stage(one, "a", 0, rows(0, 5)), **await stage(other, "b", 0, rows(5, 5))}
        await other.commit(KEY, 0, parts)
        assert (await one.commit(KEY, 0, parts)).duplicate
        assert await everything(one) == rows(0, 10)


@pytest.mark.seeds(5, soak=200)
async def test_a_batch_that_two_servers_commit_at_once_is_committed_by_one(database: Place, seed: int) -> None:
    async with database.open() as one, database.open() as other:
        for batch in range(5):
            attempts = [await stage(one, f"{batch} a", batch, rows(batch, 1))]
            attempts.append(await stage(other, f"{batch} b", batch, rows(batch, 1)))
            done: list[Committed] = []

            async def commit(
                server: Staging, parts: dict[str, int], batch: int = batch, done: list[Committed] = done
            ) -> None:
                done.append(await server.commit(KEY, batch, parts))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(commit, one, attempts[0])
                nursery.start_soon(commit, other, attempts[1])
            assert sorted(each.duplicate for each in done) == [False, True]
        assert await everything(one) == rows(0, 5)
        assert (await one.progress(KEY)).transactions == 0


@pytest.mark.seeds(5, soak=200)
async def test_an_application_that_begins_on_two_servers_at_once_begins_once(database: Place, seed: int) -> None:
    async with database.open() as one, database.open() as other:

        async def write(server: Staging, txn: str, key: Key) -> None:
            await stage(server, txn, 0, rows(0, 3), key=key)

        for number in range(5):
            key = Key(f"stream {number}", "query")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, one, f"{number} a", key)
                nursery.start_soon(write, other, f"{number} b", key)
            standing = await one.progress(key)
            assert (standing.transactions, standing.staged) == (2, 2 * 3 * (8 + 4))


async def test_two_applications_that_begin_a_stream_at_once_both_get_in(database: Place) -> None:
    async with database.open() as one, database.open() as other:
        for number in range(5):
            keys = [Key(f"stream {number}", app) for app in ("x", "y")]
            parts = [await stage(one, f"{number} {key.app}", 0, rows(0, 3), key=key) for key in keys]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.commit, keys[0], 0, parts[0])
                nursery.start_soon(other.commit, keys[1], 0, parts[1])
            assert await everything(one, f"stream {number}") == rows(0, 3) * 2


@pytest.mark.requirement("R-57")
async def test_a_connection_that_breaks_is_replaced_and_nothing_is_done_twice(database: Place) -> None:
    async with database.open() as store:
        assert await store.begin("a", KEY, 0, Encoding.BINARY, DAY)
        broken: set[object] = set()
        for number in range(3):
            found = break_connections(database.where)
            assert found - broken
            broken |= found
            await store.put("a", KEY, 0, [make_block(number, rows(number, 1))])
        await store.prepare("a", KEY, 0, 3)
        break_connections(database.where)
        assert (await store.commit(KEY, 0, {"a": 3})).head == 3
        break_connections(database.where)
        assert await everything(store) == rows(0, 3)


async def test_a_commit_of_another_server_is_noticed(database: Place) -> None:
    async with database.open() as one, database.open() as other, trio.open_nursery() as nursery:
        nursery.start_soon(one.wait, KEY.stream, 0)
        await other.commit(KEY, 0, await stage(other, "a", 0, rows(0, 5)))
