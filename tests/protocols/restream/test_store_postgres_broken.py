"""The store when connections to PostgreSQL break, or cannot be made."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit.protocols.restream.store.postgres import PostgresRows
from muxkit.storage import StoreFailed
from tests.protocols.restream.stores import U1, Clock, Number, Numbers, NumberStore, Place, next_number, numbers
from tests.protocols.restream.stores_servers import break_connections, two

pytest_plugins = ["tests.protocols.restream._postgres"]


@pytest.fixture
def place(schema: str) -> Place:
    return Place(schema, Clock())


async def test_connections_that_broke_while_nothing_happened_are_replaced(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
        for n in range(1, 4):
            assert break_connections(place.where) >= 2
            assert await store.put(U1, next_number) == numbers(n)[0]
            assert await store.replay(U1, n - 1) == numbers(n)


async def test_a_listener_whose_connection_broke_misses_nothing(place: Place) -> None:
    async with two(place) as (reader, feeder):
        await reader.register(U1, Numbers(0))
        with trio.fail_after(60):
            for n in range(3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reader.wait, U1, n)
                    await wait_all_tasks_blocked(0.01)
                    break_connections(place.where)
                    await feeder.append(U1, Number(n))


@pytest.mark.requirement("R-57")
async def test_a_connection_that_breaks_in_the_middle_is_an_error_and_the_store_goes_on(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(10**9))

        def breaking(state: Numbers) -> tuple[Number, Numbers]:
            break_connections(place.where)
            return next_number(state)

        for _ in range(3):
            with pytest.raises(StoreFailed, match="may have been stored or not") as refused:
                await store.put(U1, breaking)
            assert "muxkit restream" not in refused.value.for_client
            head = (await store.status(U1)).head
            assert await store.put(U1, next_number) == numbers(head + 1)[0]
        assert await store.replay(U1, 0) == numbers(*range(1, (await store.status(U1)).head + 1))


async def test_a_put_whose_answer_was_lost_is_not_done_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
        write = PostgresRows.write

        def write_and_break(rows: PostgresRows) -> None:
            write(rows)
            rows.connection.close()
            raise psycopg.OperationalError("the answer was lost")

        with monkeypatch.context() as patched:
            patched.setattr(PostgresRows, "write", write_and_break)
            with pytest.raises(StoreFailed, match="may have been stored or not"):
                await store.put(U1, next_number)
        assert await store.replay(U1, 0) == numbers(1)


@pytest.mark.seeds(3, soak=100)
async def test_nothing_is_lost_or_repeated_while_connections_break(seed: int, place: Place) -> None:
    async with two(place) as stores:
        told = {f"{n}": 0 for n in range(4)}
        for uuid in told:
            await stores[0].register(uuid, Numbers(10**9))

        async def work(store: NumberStore, uuid: str) -> None:
            for _ in range(40):
                with suppress(StoreFailed):
                    told[uuid] = max(told[uuid], (await store.put(uuid, next_number)).id)

        async def trouble() -> None:
            while True:
                await trio.to_thread.run_sync(break_connections, place.where)
                await trio.sleep(0.003 * (1 + seed % 5))

        async with trio.open_nursery() as troubled:
            troubled.start_soon(trouble)
            async with trio.open_nursery() as nursery:
                for store in stores:
                    for uuid in told:
                        nursery.start_soon(work, store, uuid)
            troubled.cancel_scope.cancel()
        for uuid, head in told.items():
            kept = await stores[seed % 2].replay(uuid, 0, 1000)
            assert len(kept) >= head
            assert kept == numbers(*range(1, len(kept) + 1))
