"""A store whose disk, or whose file, is full: readers can always empty it, and then the producer goes on."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from muxkit.protocols.restream.store import SessionExists, SessionStore, StoreLimits
from muxkit.protocols.restream.store.rules import KEEP, Codec, Rules
from muxkit.protocols.restream.store.sqlite import open_sqlite
from muxkit.storage import StoreFull, sqlite
from tests.protocols.restream._small_disk import fill, small_disk
from tests.protocols.restream.stores import U1, U2, Clock, quick_directory
from tests.protocols.restream.stores_disk import ApswConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytest_plugins = ["tests.protocols.restream.stores_fixtures"]

MIB = 1 << 20
TextStore = SessionStore[int, str]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of 8 MiB."""
    with small_disk(8 * MIB) as directory:
        yield directory


@pytest.fixture(params=["disk", "limit"])
def full_place(request: pytest.FixtureRequest) -> Iterator[tuple[Path, StoreLimits]]:
    """A file on a disk of 8 MiB, and a file that a limit bounds to as much."""
    if request.param == "disk":
        yield request.getfixturevalue("disk") / "sessions.db", StoreLimits()
    else:
        with quick_directory() as directory:
            yield directory / "sessions.db", StoreLimits(bytes=8 * MIB)


def wal(path: Path) -> ApswConnection:
    return ApswConnection(str(path))


CONNECTS: dict[str, sqlite.Connect] = {"delete": sqlite.StandardConnection, "wal": wal}


@asynccontextmanager
async def opened(
    path: Path, *, journal: sqlite.Journal = "delete", limits: StoreLimits | None = None, clock: Clock | None = None
) -> AsyncIterator[TextStore]:
    rules = Rules(Codec(int, str), limits or StoreLimits(), KEEP, clock or Clock())
    async with open_sqlite(path, rules, connect=CONNECTS[journal], journal=journal) as store:
        yield store


async def produce(store: TextStore, uuid: str, size: int, most: int = 1_000_000) -> int:
    """Append numbered messages until the store is full, and return the number of the last one."""
    head = (await store.status(uuid)).head
    count = max(1, 64_000 // size)
    while head < most:
        texts = [f"{number} ".ljust(size, ".") for number in range(head + 1, min(most, head + count) + 1)]
        try:
            head = (await store.append_many(uuid, texts))[-1].id
        except StoreFull:
            if count == 1:
                break
            count = max(1, count // 8)
    assert (await store.status(uuid)).head == head
    return head


async def consume(store: TextStore, uuid: str, most: int = 100) -> list[int]:
    """Read and acknowledge everything in small batches, and return the numbers in the messages."""
    got: list[int] = []
    while batch := await store.replay(uuid, got[-1] if got else (await store.status(uuid)).acknowledged, most):
        got += [int(message.data.split()[0]) for message in batch]
        await store.ack(uuid, batch[-1].id)
    return got


@pytest.mark.requirement("R-57")
@pytest.mark.parametrize("size", [1000, 4000, 300_000])
@pytest.mark.parametrize("journal", ["delete", "wal"])
async def test_everything_in_a_full_store_is_read_and_then_the_producer_goes_on(
    full_place: tuple[Path, StoreLimits], journal: sqlite.Journal, size: int
) -> None:
    path, limits = full_place
    got: list[int] = []
    async with opened(path, journal=journal, limits=limits) as store:
        await store.register(U1, 0)
        head = 0
        for _ in range(4):
            following = await produce(store, U1, size)
            assert following > head
            head = following
            got += await consume(store, U1)
    assert head > 4 * 4 * MIB // size // 2  # each time the store took at least half of what the disk has room for
    assert got == list(range(1, head + 1))


@pytest.mark.parametrize("journal", ["delete", "wal"])
async def test_one_acknowledgement_of_everything_works_on_a_full_disk(disk: Path, journal: sqlite.Journal) -> None:
    async with opened(disk / "sessions.db", journal=journal) as store:
        await store.register(U1, 0)
        head = await produce(store, U1, 900)
        await store.advance(U1, "one")
        await store.advance(U1, "one", head)
        assert (await store.status(U1)).acknowledged == head
        assert await produce(store, U1, 900) > head


@pytest.mark.parametrize("journal", ["delete", "wal"])
async def test_a_reader_works_while_another_program_has_taken_all_space(disk: Path, journal: sqlite.Journal) -> None:
    async with opened(disk / "sessions.db", journal=journal) as store:
        await store.register(U1, 0)
        head = await produce(store, U1, 900, most=2000)
        ballast = fill(disk)
        await store.attach(U1)
        assert await consume(store, U1) == list(range(1, head + 1))
        ballast.unlink()
        assert await produce(store, U1, 900, most=head + 10) == head + 10


@pytest.mark.parametrize("journal", ["delete", "wal"])
async def test_a_store_opens_on_a_full_disk_and_is_emptied(disk: Path, journal: sqlite.Journal) -> None:
    async with opened(disk / "sessions.db", journal=journal) as store:
        await store.register(U1, 0)
        for number in range(1000):
            await store.register(f"{number:08}{U2[8:]}", 0)  # attached, so the next opening writes all of them
        head = await produce(store, U1, 900)
    fill(disk)  # a store that is closed needs no journal, and another program takes that space
    async with opened(disk / "sessions.db", journal=journal) as store:
        head = await produce(store, U1, 900)
        assert await consume(store, U1) == list(range(1, head + 1))
        assert await produce(store, U1, 900) > head


async def test_a_program_that_is_started_again_learns_on_a_full_disk_that_its_session_is_there(disk: Path) -> None:
    async with opened(disk / "sessions.db") as store:
        await store.register(U1, 0)
        head = await produce(store, U1, 900)
        store._backend._file.reserve.release()  # type: ignore[attr-defined]
        fill(disk)
        with pytest.raises(SessionExists) as exists:
            await store.register(U1, 0)
        assert exists.value.status.head == head
        with pytest.raises(StoreFull):
            await store.register(U2, 0)


async def test_an_expired_session_leaves_a_full_disk_in_portions(disk: Path) -> None:
    clock = Clock()
    async with opened(disk / "sessions.db", clock=clock) as store:
        await store.register(U1, 0)
        await produce(store, U1, 900)
        await store.disconnect(U1)
        clock.now += 2 * KEEP
        assert await store.expire() == 1
        assert await store.sessions() == []
        await store.register(U2, 0)
        assert await produce(store, U2, 900, most=1000) == 1000


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
async def test_a_file_that_has_the_name_of_the_reserve_by_chance_is_left_as_it_is(quick_path: Path, kind: str) -> None:
    reserve = quick_path.with_name(quick_path.name + ".reserve")
    victim = quick_path.with_name("victim")
    victim.write_bytes(bytes(10) if kind == "link" else b"precious")
    if kind == "file":
        victim.rename(reserve)
        victim = reserve
    elif kind == "link":
        reserve.symlink_to(victim)
    else:
        reserve.mkdir()
    before = victim.read_bytes()
    async with opened(quick_path, limits=StoreLimits(bytes=100_000)) as store:
        await store.register(U1, 0)
        head = await produce(store, U1, 1000)
        assert await consume(store, U1) == list(range(1, head + 1))
        assert await produce(store, U1, 1000) > head
    assert victim.read_bytes() == before


@pytest.mark.parametrize(("data", "passes"), [(["x" * 2000], False), (["x"] * 6, False), (["x"] * 5, True)])
async def test_only_a_refusal_that_room_would_change_is_one_that_passes(
    quick_path: Path, data: list[str], passes: bool
) -> None:
    async with opened(quick_path, limits=StoreLimits(message_bytes=1000, messages=5)) as store:
        await store.register(U1, 0)
        await store.append(U1, "x")
        with pytest.raises(StoreFull) as refused:
            await store.append_many(U1, data)
        assert refused.value.passes is passes
