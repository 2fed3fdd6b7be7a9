"""What one client can store is limited, and each refusal names the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline import Encoding, Key, StagingLimits, make_block, open_staging
from muxkit.pipeline.errors import StagingFull
from muxkit.storage import StoreCorrupt, StoreFull
from tests.pipeline._staging_world import DAY, KEY, everything, rows, stage
from tests.protocols.restream._small_disk import small_disk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.pipeline._staging_world import Place

pytest_plugins = ["tests.pipeline._staging_fixtures", "tests.protocols.restream._postgres"]

SIZE = 10 * (8 + 4)  # bytes of ten rows and their lengths


def size_of(path: Path) -> int:
    return path.stat().st_size


def damage(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


@pytest.mark.requirement("R-01")
async def test_an_application_may_stage_so_many_bytes(place: Place) -> None:
    async with place.open(StagingLimits(staged=2 * SIZE)) as store:
        await stage(store, "a", 0, rows(0, 10))
        await stage(store, "b", 0, rows(10, 10))
        with pytest.raises(
            StagingFull, match=r"query', batch 0: transaction c: 240 bytes .* StagingLimits\(staged=240\)"
        ):
            await stage(store, "c", 0, rows(20, 1))
        await stage(store, "other", 0, rows(0, 10), key=Key(KEY.stream, "other"))  # has room of its own
        await store.abort(KEY, 0, ["b"])
        await store.put("c", KEY, 0, [make_block(0, rows(10, 10))])
        await store.prepare("c", KEY, 0, 10)
        await store.commit(KEY, 0, {"a": 10, "c": 10})
        await stage(store, "d", 1, rows(20, 20))  # committed rows are not staged any more
        assert await everything(store) == rows(0, 20)


@pytest.mark.requirement("R-01")
async def test_an_application_may_have_so_many_transactions(place: Place) -> None:
    async with place.open(StagingLimits(transactions=2)) as store:
        parts = {**await stage(store, "a", 0, rows(0, 1)), **await stage(store, "b", 0, rows(1, 1))}
        with pytest.raises(StagingFull, match=r"2 transactions are staged .* StagingLimits\(transactions=2\)"):
            await store.begin("c", KEY, 0, Encoding.BINARY, DAY)
        assert await store.begin("a", KEY, 0, Encoding.BINARY, DAY)  # it is one of the two
        await store.commit(KEY, 0, parts)
        assert await store.begin("c", KEY, 1, Encoding.BINARY, DAY)


@pytest.mark.requirement("R-01")
async def test_a_store_remembers_so_many_applications(place: Place) -> None:
    async with place.open(StagingLimits(applications=1)) as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, rows(0, 1)))
        with pytest.raises(StagingFull, match=r"'other': 1 applications are all .*applications=1\)"):
            await store.begin("b", Key(KEY.stream, "other"), 0, Encoding.BINARY, DAY)
        await store.commit(KEY, 1, await stage(store, "b", 1, rows(1, 1)))


async def test_nobody_is_kept_for_longer_than_the_store_allows(place: Place) -> None:
    async with place.open(StagingLimits(ttl=60)) as store:
        await store.begin("a", KEY, 0, Encoding.BINARY, DAY)
        place.clock.now += 60
        assert await store.sweep() == 1


@pytest.mark.requirement("R-01", "R-03")
async def test_memory_holds_so_much_and_has_room_when_it_is_trimmed() -> None:
    async with open_staging("memory:", limits=StagingLimits(bytes=SIZE)) as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, rows(0, 10)))
        with pytest.raises(StagingFull, match=r"120 bytes are used .* StagingLimits\(bytes=120\); trim streams"):
            await stage(store, "b", 1, rows(10, 1))
        await store.trim(KEY.stream, 10)
        await store.abort(KEY, 1, ["b"])
        await store.commit(KEY, 1, await stage(store, "b", 1, rows(10, 10)))
        assert await everything(store) == rows(10, 10)


@pytest.mark.requirement("R-57")
async def test_a_file_that_is_full_is_an_error_and_what_was_there_stays(staging_path: Path) -> None:
    async with open_staging(f"sqlite:{staging_path}", limits=StagingLimits(bytes=1 << 17)) as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, rows(0, 10)))
        with pytest.raises(StoreFull, match=r"full"):
            await stage(store, "b", 1, rows(0, 20, size=10_000))
        await store.abort(KEY, 1, ["b"])
        await store.commit(KEY, 1, await stage(store, "c", 1, rows(10, 10)))
        assert await everything(store) == rows(0, 20)


@pytest.mark.requirement("R-59")
async def test_a_file_gives_back_what_was_trimmed(staging_path: Path) -> None:
    async with open_staging(f"sqlite:{staging_path}") as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, rows(0, 300, size=10_000)))
        large = size_of(staging_path)
        await store.trim(KEY.stream, 300)
        await store.sweep()
    assert size_of(staging_path) < large / 4


@pytest.mark.requirement("R-58")
async def test_rows_that_are_not_what_was_written_are_an_error_and_the_file_is_put_aside(staging_path: Path) -> None:
    where = f"sqlite:{staging_path}"
    async with open_staging(where) as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, [b"the one and only row"]))
    damage(staging_path, b"only row", b"only now")
    async with open_staging(where) as store:
        with pytest.raises(StoreCorrupt, match=r"the rows from 0 are not what was written") as caught:
            await store.read(KEY.stream, 0)
        assert caught.value.aside is not None
        with pytest.raises(StoreCorrupt):
            await store.head(KEY.stream)


@pytest.mark.parametrize("field", ["staged", "transactions", "applications", "row", "block", "bytes", "ttl"])
def test_every_limit_has_to_be_above_0(field: str) -> None:
    with pytest.raises(ValueError, match=rf"StagingLimits\({field}=0\): expected a finite number above 0"):
        StagingLimits(**{field: 0})


@pytest.mark.requirement("R-57")
async def test_a_staging_store_on_a_full_disk_commits_is_read_and_trimmed_and_goes_on() -> None:
    with small_disk(4 << 20) as disk:
        async with open_staging(f"sqlite:{disk}/staging.db") as store:
            committed: list[bytes] = []
            got: list[bytes] = []
            for batch in range(60):
                given = rows(batch * 10, 10, size=20_000)
                try:
                    parts = await stage(store, f"part {batch}", batch, given)
                except StoreFull:
                    await store.abort(KEY, batch, [f"part {batch}"])
                    got += await everything(store)
                    await store.trim(KEY.stream, len(got))
                    await store.sweep()
                    parts = await stage(store, f"part {batch}", batch, given)
                await store.commit(KEY, batch, parts)
                committed += given
            got += await everything(store)
            assert got == committed
            assert len(committed) * 20_000 > 8 << 20  # so the disk was full several times
