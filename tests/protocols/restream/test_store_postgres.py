"""The store in PostgreSQL: several servers, notifications, tables made at the same time."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from muxkit.protocols.restream.store import Message, SessionExists, Status, StoreLimits, Superseded
from muxkit.protocols.restream.store.postgres import SCHEMA
from muxkit.storage import StoreError, StoreReadOnly
from tests.protocols.restream.stores import U1, U2, Clock, Number, Numbers, NumberStore, Place, next_number, numbers
from tests.protocols.restream.stores_servers import ask, two

pytest_plugins = ["tests.protocols.restream._postgres"]


@pytest.fixture
def place(schema: str) -> Place:
    return Place(schema, Clock())


# ---------------------------------------------------------------------------- several servers


@pytest.mark.clause("restream-T02", "restream-G06")
async def test_a_session_hops_between_two_servers_without_gap_or_repeat(place: Place) -> None:
    async with two(place) as stores:
        await stores[0].register(U1, Numbers(10**9))
        for n in range(20):
            store = stores[n % 2]
            epoch = (await store.attach(U1)).epoch
            await store.put_many(U1, next_number, 3, epoch=epoch)
            assert await store.put(U1, next_number, epoch=epoch) == numbers(4 * n + 4)[0]
        assert await stores[0].replay(U1, 0) == numbers(*range(1, 81))


async def test_a_stale_owner_on_another_server_fails(place: Place) -> None:
    async with two(place) as (old, new):
        held = (await old.register(U1, Numbers(9))).epoch
        await old.put(U1, next_number, epoch=held)
        current = (await new.attach(U1)).epoch
        for attempt in (old.put(U1, next_number, epoch=held), old.ack(U1, 1, epoch=held)):
            with pytest.raises(Superseded):
                await attempt
        await old.disconnect(U1, epoch=held)
        assert (await new.status(U1)).attached
        assert await new.put(U1, next_number, epoch=current) == numbers(2)[0]


async def test_puts_on_two_servers_at_once_follow_each_other(place: Place) -> None:
    async with two(place) as stores:
        for uuid in (U1, U2):
            await stores[0].register(uuid, Numbers(10**9))
        made: dict[str, list[Message[Number]]] = {U1: [], U2: []}

        async def put(store: NumberStore, uuid: str) -> None:
            for _ in range(40):
                made[uuid].append(await store.put(uuid, next_number))

        async with trio.open_nursery() as nursery:
            for store in stores:
                for uuid in (U1, U2):
                    nursery.start_soon(put, store, uuid)
        for uuid in (U1, U2):
            assert sorted(made[uuid], key=lambda message: message.id) == numbers(*range(1, 81))


async def test_owners_on_two_servers_never_share_an_epoch(place: Place) -> None:
    async with two(place) as stores:
        await stores[0].register(U1, Numbers(9))
        epochs: list[int] = []

        async def attach(store: NumberStore) -> None:
            epochs.extend([(await store.attach(U1)).epoch for _ in range(30)])

        async with trio.open_nursery() as nursery:
            for store in stores:
                nursery.start_soon(attach, store)
        assert sorted(epochs) == list(range(2, 62))


async def test_of_two_servers_one_registers_a_uuid(place: Place) -> None:
    async with two(place) as stores:
        outcomes: list[bool] = []

        async def register(store: NumberStore, uuid: str) -> None:
            try:
                await store.register(uuid, Numbers(9))
            except SessionExists:
                outcomes.append(False)
            else:
                outcomes.append(True)

        async with trio.open_nursery() as nursery:
            for n in range(60):
                for store in stores if n % 2 else reversed(stores):
                    nursery.start_soon(register, store, f"session-{n}")
        assert sorted(outcomes) == [False] * 60 + [True] * 60


async def test_the_sessions_of_a_server_that_died_expire(place: Place) -> None:
    clock = place.clock
    async with place.open() as store:
        await store.register(U1, Numbers(9))
        await store.register(U2, Numbers(9))
        ask(place.where, f"INSERT INTO restream_servers VALUES ('dead', {clock.now - 31})")
        ask(place.where, f"UPDATE restream_sessions SET server = 'dead' WHERE uuid = '{U1}'")
        assert await store.expire() == 1
        assert [status.uuid for status in await store.sessions()] == [U2]
        assert await store.expire() == 0
        assert ask(place.where, "SELECT id FROM restream_servers WHERE id = 'dead'") == []


async def test_who_attaches_elsewhere_is_not_buried_with_a_dead_server(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
        ask(place.where, f"INSERT INTO restream_servers VALUES ('dead', {place.clock.now - 1000})")
        ask(place.where, "UPDATE restream_sessions SET server = 'dead'")
        await store.attach(U1)
        assert await store.expire() == 0
        assert (await store.status(U1)).attached


async def test_a_feeder_in_another_process_does_not_take_the_session_with_it(place: Place) -> None:
    async with place.open() as server:
        await server.register(U1, Numbers(0))
        async with place.open() as feeder:
            await feeder.append(U1, Number(1))
        assert (await server.status(U1)).attached


async def test_a_server_that_closes_leaves_its_sessions_to_their_time(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
    async with place.open() as store:
        assert (await store.status(U1)).expires == place.clock.now + 30


# ---------------------------------------------------------------------------- notifications


async def test_a_reader_wakes_when_another_process_appends(place: Place) -> None:
    async with two(place) as (reader, feeder):
        await reader.register(U1, Numbers(0))
        heads: list[int] = []

        async def read() -> None:
            heads.append((await reader.wait(U1, 0)).head)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await wait_all_tasks_blocked(0.05)
                await feeder.append(U1, Number(1))
        assert heads == [1]


async def test_a_feeder_wakes_when_another_process_acknowledges(place: Place) -> None:
    async with two(place, StoreLimits(messages=1)) as (server, feeder):
        await server.register(U1, Numbers(0))
        await feeder.append(U1, Number(1))
        room: list[Status] = []

        async def wait() -> None:
            room.append(await feeder.wait_room(U1))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await wait_all_tasks_blocked(0.05)
                assert not room
                await server.ack(U1, 1)


async def test_a_sleeping_owner_hears_of_a_takeover_by_another_server(place: Place) -> None:
    async with two(place) as (old, new):
        await old.register(U1, Numbers(0))
        superseded = trio.Event()

        async def read() -> None:
            try:
                await old.wait(U1, 0, epoch=1)
            except Superseded:
                superseded.set()

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await wait_all_tasks_blocked(0.05)
                await new.attach(U1)
                await superseded.wait()


# ---------------------------------------------------------------------------- tables


async def test_servers_that_start_at_once_make_the_tables_once(place: Place) -> None:
    async with AsyncExitStack() as stack:

        async def start() -> None:
            opened.append(await stack.enter_async_context(place.open()))

        opened: list[NumberStore] = []
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(start)
        await opened[0].register(U1, Numbers(9))
        for store in opened:
            await store.put(U1, next_number)
        assert ask(place.where, "SELECT version FROM restream_store") == [(SCHEMA.version,)]


@pytest.mark.requirement("R-57")
async def test_a_database_that_may_not_be_written_says_so(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
    read_only = Place(place.where + "%20-cdefault_transaction_read_only%3Don", place.clock)
    with pytest.raises(StoreReadOnly, match="isn't writable"):
        async with read_only.open():
            pytest.fail("it was opened")


async def test_a_table_that_is_gone_is_an_error_and_not_the_end(place: Place) -> None:
    async with place.open() as store:
        await store.register(U1, Numbers(9))
        ask(place.where, "ALTER TABLE restream_messages RENAME TO elsewhere")
        with pytest.raises(StoreError, match="restream_messages"):
            await store.put(U1, next_number)
        ask(place.where, "ALTER TABLE elsewhere RENAME TO restream_messages")
        assert await store.put(U1, next_number) == numbers(1)[0]
