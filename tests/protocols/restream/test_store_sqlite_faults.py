"""The store on a disk that is full, fails, or cannot be written."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import attrs
import pytest
import trio

from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.storage import StoreError, StoreFailed, StoreFull
from tests.protocols.restream.stores import U1, Clock, Numbers, NumberStore, next_number, numbers, rules
from tests.protocols.restream.stores_disk import ApswConnection, Disk

if TYPE_CHECKING:
    from muxkit.storage.sqlite import Journal


pytest_plugins = ["tests.protocols.restream.stores_fixtures"]


@pytest.fixture
def path(quick_path: Path) -> Path:
    return quick_path


@attrs.define
class Spell:
    """An interval of failures, counted in operations of the disk."""

    error: type[apsw.Error]
    start: int = 0
    end: int = 0
    done: int = 0
    met: int = 0

    def come(self, after: int, length: int) -> None:
        self.start = self.done + after + 1
        self.end = self.start + length

    def __call__(self, operation: str) -> None:
        self.done += 1
        if self.start <= self.done < self.end:
            self.met += 1
            raise self.error(f"{operation} {self.done}")


@pytest.mark.requirement("R-57")
@pytest.mark.seeds(20, soak=2000)
async def test_the_store_is_consistent_after_trouble_and_recovers_by_itself(seed: int, path: Path) -> None:
    luck = random.Random(seed)
    spell = Spell(apsw.FullError if seed % 3 else apsw.IOError)
    disk = Disk(spell)
    journal: Journal = "wal" if seed % 2 else "delete"
    async with open_sqlite(path, rules(Clock()), connect=disk.connect, journal=journal) as store:
        spell.come(luck.randrange(300), luck.choice([1, 1, 2, 10, 60]))
        told, acked = await work_through(store, luck)
        assert spell.met
        # After any failure this store is usable, and agrees with the file.
        await check(store, told, acked)
    async with open_sqlite(path, rules(Clock()), connect=disk.connect, journal=journal) as store:
        await check(store, told, acked)
    disk.unplug()


async def work_through(store: NumberStore, luck: random.Random) -> tuple[int, int]:
    told = acked = 0
    is_registered = False
    for _ in range(200):
        try:
            if not is_registered:
                await store.register(U1, Numbers(10**9))
                is_registered = True
            elif luck.random() < 0.2 and told > acked:
                await store.ack(U1, told)
                acked = told
            else:
                told = (await store.put_many(U1, next_number, luck.randint(1, 5)))[-1].id
        except (StoreFull, StoreFailed):
            if not is_registered:  # it may have been stored or not; a repetition shows which
                is_registered = bool(await store_tries(store))
    assert is_registered
    return told, acked


async def store_tries(store: NumberStore) -> list[str]:
    for _ in range(100):
        try:
            return [status.uuid for status in await store.sessions()]
        except StoreError:
            pass
    raise AssertionError("the trouble is over, and the store still fails")


async def check(store: NumberStore, told: int, acked: int) -> None:
    status = await store.status(U1)
    assert status.head >= told
    assert status.acknowledged >= acked
    assert await store.replay(U1, status.acknowledged, 2000) == numbers(
        *range(status.acknowledged + 1, status.head + 1)
    )


@pytest.mark.requirement("R-57")
async def test_after_an_io_error_the_file_is_asked_what_was_stored(path: Path) -> None:
    spell = Spell(apsw.IOError)
    disk = Disk(spell)
    connections: list[object] = []

    def connect(path: Path) -> ApswConnection:
        connections.append(path)
        return disk.connect(path)

    async with open_sqlite(path, rules(Clock()), connect=connect) as store:
        await store.register(U1, Numbers(9))
        spell.come(0, 1)
        with pytest.raises(StoreFailed, match="may have been stored or not"):
            await store.put(U1, next_number)
        assert len(connections) == 1
        assert (await store.status(U1)).head == 0
        assert len(connections) == 2
        assert await store.put(U1, next_number) == numbers(1)[0]
    disk.unplug()


FILE_SIZE = """
import resource, sys, trio
from muxkit.storage import StoreError
from muxkit.protocols.restream.store import open_store

async def main():
    async with open_store("sqlite:" + sys.argv[1]) as store:
        await store.register("u", 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        told = 0
        refusals = 0
        while refusals < 5:
            try:
                told = (await store.put("u", lambda state: ("x" * 4000 + str(state + 1), state + 1))).id
            except StoreError as error:
                refusals += 1
                print(type(error).__name__)
        assert told > 10, told
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        head = (await store.status("u")).head
        assert told <= head
        for _ in range(100):
            head += 1
            assert (await store.put("u", lambda state: ("x" * 4000 + str(state + 1), state + 1))).id == head
        kept = await store.replay("u", 0, 1000, most_bytes=10**9)
        assert [message.data for message in kept] == ["x" * 4000 + str(id) for id in range(1, head + 1)]
    print("well")

trio.run(main)
"""


@pytest.mark.requirement("R-57")
def test_a_file_that_may_not_grow_is_an_error_until_it_may_again(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILE_SIZE, str(path)], capture_output=True, text=True, timeout=110)
    *errors, last = done.stdout.split()
    assert last == "well", done.stderr
    assert len(errors) == 5
    assert set(errors) <= {"StoreFull", "StoreFailed"}


async def make(path: Path) -> None:
    async with open_sqlite(path, rules(Clock())) as store:
        await store.register(U1, Numbers(9), attached=False)


READ_ONLY = """
import os, sys, trio
import muxkit.protocols.restream.store.sqlite
from muxkit.storage import StoreError
from muxkit.protocols.restream.store import open_store

if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

async def main():
    try:
        async with open_store("sqlite:" + sys.argv[1]):
            print("opened")
    except StoreError as error:
        print(type(error).__name__, error)

trio.run(main)
"""


@pytest.mark.requirement("R-57")
@pytest.mark.skipif(sys.platform == "win32", reason="mode bits")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_store_that_may_not_be_written_says_so(path: Path, what: str) -> None:
    trio.run(make, path)
    for directory in [path.parent, *path.parent.parents]:
        if directory.owner() == path.owner() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    path.chmod(0o444)
    if what == "file":
        path.with_name(path.name + ".lock").chmod(0o666)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, timeout=110)
    assert done.stdout.startswith("StoreReadOnly "), done.stdout + done.stderr
    assert "allow this user to write" in done.stdout
    assert path.read_bytes() == before
