"""The file of a SQLite store: settings, lock, versions, groups of jobs, size."""

from __future__ import annotations

import logging
import sqlite3
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit.protocols.restream.store import StoreLimits
from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.storage import StoreFailed, StoreFull, StoreLocked, sqlite
from muxkit.storage.sqlite import Connection, Journal, StandardConnection, Value, Version, has_wal_reset_bug
from tests.protocols.restream.stores import U1, Clock, Number, Numbers, next_number, numbers, rules
from tests.protocols.restream.stores_disk import ApswConnection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


pytest_plugins = ["tests.protocols.restream.stores_fixtures"]


@pytest.fixture
def path(quick_path: Path) -> Path:
    return quick_path


class Spy:
    """A connection that records its statements, and may report another version and other settings."""

    def __init__(self, path: Path, version: Version | None = None, lies: dict[str, Value] | None = None) -> None:
        self._connection: Connection = StandardConnection(path)
        self.version = version or self._connection.version
        self._lies = lies or {}
        self.statements: list[str] = []
        self.close = self._connection.close
        self.run_many = self._connection.run_many
        self.sync_names = self._connection.sync_names

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        self.statements.append(sql)
        answer = self._connection.run(sql, values)
        name = sql.removeprefix("PRAGMA ")
        return [(self._lies[name],)] if name in self._lies else answer


# ---------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 54, 1), False),
    ],
)
@pytest.mark.requirement("R-56")
def test_versions_with_the_wal_reset_bug_are_known(version: Version, is_affected: bool) -> None:
    assert has_wal_reset_bug(version) is is_affected


@pytest.mark.parametrize(("version", "journal"), [((3, 40, 1), "delete"), ((3, 51, 3), "wal")])
@pytest.mark.requirement("R-56", "R-61")
async def test_an_affected_version_uses_a_rollback_journal_and_says_so_once(
    path: Path, version: Version, journal: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite, "_warned", set())
    spies: list[Spy] = []

    def connect(path: Path) -> Spy:
        spies.append(Spy(path, version))
        return spies[-1]

    with caplog.at_level(logging.WARNING, "muxkit"):
        for _ in range(2):
            async with open_sqlite(path, rules(Clock()), connect=connect):
                pass
    assert f"PRAGMA journal_mode = {journal.upper()}" in spies[0].statements
    assert len([record for record in caplog.records if "can lose commits" in record.message]) == (journal == "delete")


@pytest.mark.parametrize(
    ("name", "lie"),
    [("locking_mode", "normal"), ("journal_mode", "memory"), ("synchronous", 1), ("cell_size_check", 0)],
)
@pytest.mark.requirement("R-61")
async def test_a_setting_that_was_not_made_is_noticed(path: Path, name: str, lie: Value) -> None:
    with pytest.raises(StoreFailed, match=f"SQLite answered {lie!r} to PRAGMA {name}"):
        async with open_sqlite(path, rules(Clock()), connect=lambda path: Spy(path, lies={name: lie})):
            pytest.fail("it was opened")


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("connect", [StandardConnection, lambda path: ApswConnection(str(path))])
async def test_both_libraries_and_both_journals_hold_the_same_sessions(
    path: Path, journal: Journal, connect: type[StandardConnection]
) -> None:
    async with open_sqlite(path, rules(Clock()), connect=connect, journal=journal) as store:
        await store.register(U1, Numbers(9))
        await store.put_many(U1, next_number, 3)
    async with open_sqlite(path, rules(Clock())) as store:
        assert await store.replay(U1, 0) == numbers(1, 2, 3)


async def test_what_clients_are_sent_is_not_for_everybody_to_read(path: Path) -> None:
    async with open_sqlite(path, rules(Clock())) as store:
        await store.register(U1, Numbers(9))
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


# ---------------------------------------------------------------------------- lock

HOLDER = """
import sys, trio
from pathlib import Path
from muxkit.protocols.restream.store import open_store

async def main():
    async with open_store("sqlite:" + sys.argv[1]) as store:
        await store.register("held", None, keep=3600)
        print("open", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""


@pytest.mark.requirement("R-55")
async def test_a_second_process_gets_an_error_at_once_that_names_the_first(path: Path) -> None:
    holder = await trio.lowlevel.open_process(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        said = b""
        while said != b"open\n":
            said += await holder.stdout.receive_some()
        took: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            with pytest.raises(StoreLocked, match=f"in use by process {holder.pid}; stop that one") as refused:
                async with open_sqlite(path, rules(Clock())):
                    pytest.fail("it was opened")
            took.append(time.perf_counter() - began)
            assert refused.value.pid == holder.pid
            assert str(path) not in refused.value.for_client
        assert min(took) < 1  # one of them would wait for the other each time
    finally:
        holder.kill()
        await holder.wait()
        for stream in (holder.stdin, holder.stdout):
            assert stream is not None
            await stream.aclose()
    async with open_sqlite(path, rules(Clock())) as store:
        assert [status.uuid for status in await store.sessions()] == ["held"]


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.requirement("R-55")
async def test_other_programs_neither_write_nor_block(path: Path, journal: Journal) -> None:
    async with open_sqlite(path, rules(Clock()), journal=journal) as store:
        await store.register(U1, Numbers(9))
        other = sqlite3.connect(path, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("DELETE FROM sessions")
        other.close()
        assert await store.put(U1, next_number) == numbers(1)[0]


# ---------------------------------------------------------------------------- groups


@pytest.mark.requirement("R-60")
async def test_what_is_asked_at_once_is_one_transaction(path: Path) -> None:
    spies: list[Spy] = []

    def connect(path: Path) -> Spy:
        spies.append(Spy(path))
        return spies[-1]

    async with open_sqlite(path, rules(Clock()), connect=connect) as store:
        await store.register(U1, Numbers(10**9))
        spies[0].statements.clear()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(store.put, U1, next_number)
        assert 1 <= spies[0].statements.count("COMMIT") <= 10
        assert (await store.status(U1)).head == 100


async def test_one_that_fails_does_not_spoil_its_group(path: Path) -> None:
    async with open_sqlite(path, rules(Clock())) as store:
        await store.register(U1, Numbers(10**9))
        failures: list[Exception] = []

        def failing(state: Numbers) -> tuple[Number, Numbers]:
            raise ZeroDivisionError

        async def fail() -> None:
            try:
                await store.put_many(U1, failing)
            except ZeroDivisionError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(store.put, U1, next_number)
                nursery.start_soon(fail)
        assert len(failures) == 20
        assert await store.replay(U1, 0) == numbers(*range(1, 21))


@pytest.mark.requirement("R-57")
async def test_one_that_is_too_large_for_the_file_does_not_spoil_its_group(path: Path) -> None:
    limits = StoreLimits(bytes=400_000)
    async with open_sqlite(path, rules(Clock(), limits=limits)) as store:
        await store.register(U1, Numbers(10**9))
        refused: list[StoreFull] = []

        async def append() -> None:
            try:
                await store.append_many(U1, [Number(10**18)] * 12_000)
            except StoreFull as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(store.put, U1, next_number)
                nursery.start_soon(append)
        assert len(refused) == 3
        assert "StoreLimits(bytes=400000)" in str(refused[0])
        assert await store.replay(U1, 0) == numbers(1, 2, 3)


async def test_closing_finishes_what_was_asked_before(path: Path) -> None:
    async with trio.open_nursery() as nursery:
        async with open_sqlite(path, rules(Clock())) as store:
            await store.register(U1, Numbers(10**9))
            for _ in range(20):
                nursery.start_soon(store.put, U1, next_number)
            for _ in range(2):  # all of them have begun, in any order
                await trio.lowlevel.checkpoint()
    async with open_sqlite(path, rules(Clock())) as store:
        assert (await store.status(U1)).head == 20


# ---------------------------------------------------------------------------- absence and size


@pytest.mark.requirement("R-59")
async def test_clients_that_were_connected_when_the_process_ended_are_absent_from_now_on(path: Path) -> None:
    clock = Clock()
    async with open_sqlite(path, rules(clock)) as store:
        await store.register(U1, Numbers(9))
    clock.now += 1000
    async with open_sqlite(path, rules(clock)) as store:
        status = await store.status(U1)
        assert (status.attached, status.expires) == (False, clock.now + 30)


@pytest.mark.requirement("R-59")
@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("many", [500, pytest.param(100_000, marks=pytest.mark.soak)])
async def test_the_file_shrinks_when_sessions_expire(path: Path, journal: Journal, many: int) -> None:
    clock = Clock()
    async with open_sqlite(path, rules(clock), journal=journal) as store:

        async def make(first: int) -> None:
            for n in range(first, many, 50):
                await store.register(f"{n}", Numbers(9), params="x" * 500, keep=30 if n < many * 9 // 10 else 3600)
                await store.append_many(f"{n}", [Number(n)] * 20)
                await store.disconnect(f"{n}")

        async with trio.open_nursery() as nursery:
            for first in range(50):
                nursery.start_soon(make, first)
        clock.now += 60
        assert await store.expire() == many * 9 // 10
    after = size(path)
    change(path, "VACUUM")
    assert after <= 1.5 * size(path)
    change(path, "PRAGMA quick_check")


def size(path: Path) -> int:
    return path.stat().st_size


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql).fetchall()
    connection.close()
