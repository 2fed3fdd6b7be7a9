"""A batch is committed once, whole and in order, after any repetition, abort or delay; the same for every store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit.pipeline import Encoding, Key, make_block
from muxkit.pipeline.errors import NotCommitted, RowsGone, TransactionConflict, TransactionGone
from tests.pipeline._staging_world import DAY, KEY, everything, rows, stage

if TYPE_CHECKING:
    from muxkit.pipeline import Staging
    from tests.pipeline._staging_world import Place
    from tests.protocols.restream.stores import Clock

pytest_plugins = ["tests.pipeline._staging_fixtures", "tests.protocols.restream._postgres"]


# ---------------------------------------------------------------------------- two phases


async def test_a_committed_batch_is_in_the_stream_in_the_order_of_its_parts(staging: Staging) -> None:
    parts = {**await stage(staging, "b", 0, rows(0, 5)), **await stage(staging, "a", 0, rows(5, 3))}
    done = await staging.commit(KEY, 0, parts)
    assert (done.duplicate, done.rows, done.head) == (False, 8, 8)
    assert await everything(staging) == rows(0, 8)


async def test_what_is_staged_is_not_in_the_stream(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5))
    assert await staging.head(KEY.stream) == 0
    assert await staging.read(KEY.stream, 0) is None


@pytest.mark.requirement("R-53")
async def test_a_batch_that_is_committed_twice_is_there_once(staging: Staging) -> None:
    parts = await stage(staging, "a", 0, rows(0, 5))
    await staging.commit(KEY, 0, parts)
    again = await staging.commit(KEY, 0, parts)
    assert (again.duplicate, again.rows, again.head) == (True, 5, 5)
    assert await everything(staging) == rows(0, 5)


async def test_a_replay_with_other_partitions_is_committed_without_what_the_first_attempt_left(
    staging: Staging,
) -> None:
    for number in range(3):
        await stage(staging, f"first {number}", 0, rows(2 * number, 2))
    parts = {**await stage(staging, "a", 0, rows(0, 4)), **await stage(staging, "b", 0, rows(4, 2))}
    await staging.commit(KEY, 0, parts)
    assert await everything(staging) == rows(0, 6)
    standing = await staging.progress(KEY)
    assert (standing.batch, standing.staged, standing.transactions) == (0, 0, 0)


async def test_a_replay_of_a_committed_batch_is_told_that_nothing_is_wanted(staging: Staging) -> None:
    await staging.commit(KEY, 7, await stage(staging, "a", 7, rows(0, 5)))
    for batch in (6, 7):
        assert not await staging.begin("b", KEY, batch, Encoding.BINARY, DAY)
    assert await staging.begin("c", KEY, 8, Encoding.BINARY, DAY)


async def test_a_zombie_that_goes_on_behind_the_commit_changes_nothing(staging: Staging) -> None:
    await stage(staging, "zombie", 0, rows(0, 5), prepared=False)
    await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(0, 5)))
    assert not await staging.put("zombie", KEY, 0, [make_block(5, rows(5, 5))])
    assert not await staging.prepare("zombie", KEY, 0, 10)
    assert (await staging.commit(KEY, 0, {"zombie": 10})).duplicate
    assert await everything(staging) == rows(0, 5)
    assert (await staging.progress(KEY)).staged == 0


async def test_an_older_batch_of_a_driver_that_was_replaced_is_a_duplicate(staging: Staging) -> None:
    old = await stage(staging, "old", 3, rows(0, 5))
    await staging.commit(KEY, 4, await stage(staging, "new", 4, rows(5, 5)))
    assert (await staging.commit(KEY, 3, old)).duplicate
    assert await everything(staging) == rows(5, 5)


async def test_an_abort_drops_what_it_names(staging: Staging) -> None:
    parts = {**await stage(staging, "a", 0, rows(0, 5)), **await stage(staging, "b", 0, rows(5, 5))}
    assert await staging.abort(KEY, 0, ["a", "unknown"]) == 1
    with pytest.raises(NotCommitted, match=r"batch 0: transaction a is not staged any more"):
        await staging.commit(KEY, 0, parts)
    assert (await staging.progress(KEY)).transactions == 1


async def test_an_abort_after_the_commit_is_nothing(staging: Staging) -> None:
    parts = await stage(staging, "a", 0, rows(0, 5))
    await staging.commit(KEY, 0, parts)
    assert await staging.abort(KEY, 0, ["a"]) == 0
    assert await everything(staging) == rows(0, 5)


async def test_an_abort_does_not_reach_into_another_batch_or_another_stream(staging: Staging) -> None:
    await stage(staging, "a", 1, rows(0, 5))
    assert await staging.abort(KEY, 0, ["a"]) == 0
    assert await staging.abort(Key("others", KEY.app), 1, ["a"]) == 0
    assert (await staging.progress(KEY)).transactions == 1


async def test_an_aborted_transaction_can_be_written_anew(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5))
    await staging.abort(KEY, 0, ["a"])
    with pytest.raises(TransactionGone, match=r"application 'query', batch 0: transaction a is not staged any more"):
        await staging.put("a", KEY, 0, [make_block(0, rows(0, 1))])
    await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(50, 5)))
    assert await everything(staging) == rows(50, 5)


async def test_batches_of_two_applications_and_two_streams_are_told_apart(staging: Staging) -> None:
    other, elsewhere = Key(KEY.stream, "other"), Key("elsewhere", KEY.app)
    for number, key in enumerate((KEY, other, elsewhere)):
        await staging.commit(key, 0, await stage(staging, f"t{number}", 0, rows(10 * number, 2), key=key))
    assert await everything(staging) == [*rows(0, 2), *rows(10, 2)]
    assert await everything(staging, "elsewhere") == rows(20, 2)


# ---------------------------------------------------------------------------- commits that do not fit


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"a": 4}, "transaction a is prepared with 5 rows, and 4 are to be committed"),
        ({"a": 5, "b": 5}, "transaction b is not prepared with 5 rows, and 5 are to be committed"),
        ({"a": 5, "c": 1}, "transaction c is not staged any more"),
        ({"a": 5, "d": 2}, "transaction d was begun for stream 'orders', application 'query', batch 1"),
        ({"a": 5, "e": 2}, "transaction e was begun for stream 'others', application 'query', batch 0"),
    ],
)
async def test_a_commit_that_does_not_fit_commits_nothing_of_it(
    staging: Staging, parts: dict[str, int], told: str
) -> None:
    await stage(staging, "a", 0, rows(0, 5))
    await stage(staging, "b", 0, rows(5, 5), prepared=False)
    await stage(staging, "d", 1, rows(5, 2))
    await stage(staging, "e", 0, rows(5, 2), key=Key("others", KEY.app))
    with pytest.raises(NotCommitted, match=told):
        await staging.commit(KEY, 0, parts)
    assert await staging.head(KEY.stream) == 0
    await staging.commit(KEY, 0, {"a": 5})
    assert await everything(staging) == rows(0, 5)


async def test_a_transaction_with_a_gap_cannot_be_prepared(staging: Staging) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    await staging.put("a", KEY, 0, [make_block(0, rows(0, 2)), make_block(4, rows(4, 2))])
    with pytest.raises(NotCommitted, match=r"4 rows are staged, 2 of them without a gap, and 6 were announced"):
        await staging.prepare("a", KEY, 0, 6)
    await staging.put("a", KEY, 0, [make_block(2, rows(2, 2))])
    assert await staging.prepare("a", KEY, 0, 6)


@pytest.mark.parametrize("second", [2, 3])
async def test_blocks_that_overlap_or_leave_a_gap_cannot_be_prepared_though_their_number_is_right(
    staging: Staging, second: int
) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    first = [make_block(0, rows(0, 5 - second))]
    await staging.put("a", KEY, 0, [*first, make_block(second, rows(0, 1 + second))])
    with pytest.raises(NotCommitted, match=r"6 rows are staged, .* of them without a gap, and 6 were announced"):
        await staging.prepare("a", KEY, 0, 6)


async def test_a_transaction_with_more_rows_than_were_announced_cannot_be_prepared(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5), prepared=False)
    with pytest.raises(NotCommitted, match=r"5 rows are staged, .* and 3 were announced"):
        await staging.prepare("a", KEY, 0, 3)


async def test_nothing_can_be_added_to_what_is_prepared(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5))
    with pytest.raises(TransactionConflict, match=r"rows came after it was prepared with 5 rows"):
        await staging.put("a", KEY, 0, [make_block(5, rows(5, 1))])


async def test_a_name_that_another_transaction_has_is_refused(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5), prepared=False)
    with pytest.raises(TransactionConflict, match=r"batch 1: transaction a was begun for .*, batch 0"):
        await staging.begin("a", KEY, 1, Encoding.BINARY, DAY)
    with pytest.raises(TransactionConflict, match=r"with rows of binary"):
        await staging.begin("a", KEY, 0, Encoding.JSON, DAY)
    with pytest.raises(TransactionConflict, match=r"batch 1: transaction a was begun"):
        await staging.put("a", KEY, 1, [make_block(0, rows(0, 1))])


# ---------------------------------------------------------------------------- blocks


async def test_a_name_that_is_used_again_gets_nothing_of_the_first_one(staging: Staging) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    await staging.put("a", KEY, 0, [make_block(at, rows(at, 1)) for at in range(200)])
    await staging.abort(KEY, 0, ["a"])
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    await staging.put("a", KEY, 0, [make_block(at, rows(at + 500, 1)) for at in range(100)])
    await staging.sweep()
    await staging.prepare("a", KEY, 0, 100)
    await staging.commit(KEY, 0, {"a": 100})
    assert await everything(staging) == rows(500, 100)


async def test_a_block_that_is_sent_again_counts_once(staging: Staging) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    blocks = [make_block(0, rows(0, 2)), make_block(2, rows(2, 3))]
    await staging.put("a", KEY, 0, blocks[:1])
    await staging.put("a", KEY, 0, [*blocks, *blocks])
    assert await staging.prepare("a", KEY, 0, 5)
    assert await staging.put("a", KEY, 0, blocks)  # also when it is prepared
    await staging.commit(KEY, 0, {"a": 5})
    assert await everything(staging) == rows(0, 5)


async def test_other_rows_in_the_place_of_known_ones_are_refused(staging: Staging) -> None:
    await stage(staging, "a", 0, rows(0, 5), prepared=False)
    for strange in (make_block(0, rows(1, 5)), make_block(0, rows(0, 4))):
        with pytest.raises(TransactionConflict, match=r"other rows came for row 0 than before"):
            await staging.put("a", KEY, 0, [strange])


async def test_blocks_may_come_in_any_order(staging: Staging) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    for first in (6, 0, 3):
        await staging.put("a", KEY, 0, [make_block(first, rows(first, 3))])
    await staging.prepare("a", KEY, 0, 9)
    await staging.commit(KEY, 0, {"a": 9})
    assert await everything(staging) == rows(0, 9)


async def test_rows_may_be_empty_and_so_may_a_transaction(staging: Staging) -> None:
    content = [b"", b"x", b""]
    parts = {**await stage(staging, "none", 0, []), **await stage(staging, "a", 0, content)}
    await staging.commit(KEY, 0, {**parts, **await stage(staging, "also none", 0, [])})
    assert await everything(staging) == content
    await staging.trim(KEY.stream, 3)
    assert await everything(staging) == []


# ---------------------------------------------------------------------------- the stream


async def test_a_stream_can_be_read_in_pieces_from_anywhere(staging: Staging) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    await staging.put("a", KEY, 0, [make_block(at, rows(at, 10)) for at in range(0, 300, 10)])
    await staging.prepare("a", KEY, 0, 300)
    await staging.commit(KEY, 0, {"a": 300, **await stage(staging, "b", 0, rows(300, 7))})
    assert await everything(staging, most_bytes=1) == rows(0, 307)
    for after in (0, 1, 9, 10, 155, 299, 300, 306):
        published = await staging.read(KEY.stream, after, most_bytes=200)
        assert published is not None
        assert published.rows == rows(after, len(published.rows))
        assert len(published.rows) >= 1


async def test_rows_that_are_not_there_are_asked_for_in_vain(staging: Staging) -> None:
    await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(0, 5)))
    with pytest.raises(RowsGone, match=r"rows behind 6 were asked for; .* begin behind 0, and end with 5"):
        await staging.read(KEY.stream, 6)
    with pytest.raises(RowsGone, match=r"rows up to 6 were to go, and it ends with 5"):
        await staging.trim(KEY.stream, 6)


@pytest.mark.requirement("R-59")
async def test_what_was_trimmed_is_gone_and_the_rest_is_there(staging: Staging) -> None:
    for batch in range(3):
        await staging.commit(KEY, batch, await stage(staging, f"t{batch}", batch, rows(5 * batch, 5)))
    await staging.trim(KEY.stream, 7)
    with pytest.raises(RowsGone, match=r"begin behind 7"):
        await staging.read(KEY.stream, 6)
    assert await everything(staging) == rows(7, 8)
    await staging.trim(KEY.stream, 3)  # never goes back
    await staging.trim(KEY.stream, 15)
    assert await everything(staging) == []
    await staging.commit(KEY, 3, await stage(staging, "t3", 3, rows(15, 5)))
    assert await everything(staging) == rows(15, 5)


async def test_a_duplicate_is_known_when_its_rows_are_trimmed(staging: Staging) -> None:
    parts = await stage(staging, "a", 0, rows(0, 5))
    await staging.commit(KEY, 0, parts)
    await staging.trim(KEY.stream, 5)
    assert (await staging.commit(KEY, 0, parts)).duplicate


async def test_who_waits_for_a_stream_is_woken_by_a_commit(staging: Staging) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(staging.wait, KEY.stream, 0)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(0, 5)))
    await staging.wait(KEY.stream, 4)


# ---------------------------------------------------------------------------- time


@pytest.mark.requirement("R-59")
async def test_what_nobody_touches_for_its_time_is_swept(staging: Staging, staging_clock: Clock) -> None:
    await stage(staging, "a", 0, rows(0, 5))
    staging_clock.now += DAY / 2
    await stage(staging, "b", 0, rows(5, 5))
    staging_clock.now += DAY / 2
    assert await staging.sweep() == 1
    standing = await staging.progress(KEY)
    assert (standing.transactions, standing.staged) == (1, 5 * (8 + 4))
    staging_clock.now += DAY
    assert await staging.sweep() == 1
    assert (await staging.progress(KEY)).staged == 0


async def test_whoever_goes_on_writing_is_not_swept(staging: Staging, staging_clock: Clock) -> None:
    await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
    for number in range(5):
        staging_clock.now += 0.9 * DAY
        await staging.put("a", KEY, 0, [make_block(number, rows(number, 1))])
        assert await staging.sweep() == 0
    await staging.prepare("a", KEY, 0, 5)
    await staging.commit(KEY, 0, {"a": 5})
    staging_clock.now += 100 * DAY
    assert await staging.sweep() == 0
    assert await everything(staging) == rows(0, 5)


async def test_whoever_comes_back_to_a_transaction_is_not_swept(staging: Staging, staging_clock: Clock) -> None:
    for _ in range(3):
        await staging.begin("a", KEY, 0, Encoding.BINARY, DAY)
        staging_clock.now += 0.9 * DAY
        assert await staging.sweep() == 0


async def test_what_is_over_cannot_be_committed_though_nobody_has_swept_it(
    staging: Staging, staging_clock: Clock
) -> None:
    parts = await stage(staging, "a", 0, rows(0, 5))
    staging_clock.now += DAY
    with pytest.raises(
        NotCommitted, match=r"untouched for its txnTtl, and has to be written again; nothing was committed"
    ):
        await staging.commit(KEY, 0, parts)
    await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(5, 5)))
    assert await everything(staging) == rows(5, 5)


async def test_an_application_for_one_batch_is_forgotten_in_time(staging: Staging, staging_clock: Clock) -> None:
    key = Key(KEY.stream, "run 1")
    await staging.begin("a", key, 0, Encoding.BINARY, DAY, once=True)
    await staging.put("a", key, 0, [make_block(0, rows(0, 5))])
    await staging.prepare("a", key, 0, 5)
    staging_clock.now += 0.9 * DAY
    await staging.commit(key, 0, {"a": 5})
    staging_clock.now += 0.9 * DAY
    await staging.sweep()
    assert (await staging.commit(key, 0, {"a": 5})).duplicate
    staging_clock.now += DAY
    await staging.sweep()
    assert (await staging.progress(key)).batch is None
    assert await everything(staging) == rows(0, 5)


async def test_an_application_with_a_name_is_never_forgotten(staging: Staging, staging_clock: Clock) -> None:
    await staging.commit(KEY, 0, await stage(staging, "a", 0, rows(0, 5)))
    staging_clock.now += 1000 * DAY
    await staging.sweep()
    assert (await staging.progress(KEY)).batch == 0


# ---------------------------------------------------------------------------- what lasts


@pytest.mark.requirement("R-54")
async def test_a_store_that_is_opened_again_knows_everything(lasting_place: Place) -> None:
    async with lasting_place.open() as store:
        await store.commit(KEY, 0, await stage(store, "a", 0, rows(0, 5)))
        parts = await stage(store, "b", 1, rows(5, 5))
        await stage(store, "c", 1, rows(5, 5), prepared=False)
    async with lasting_place.open() as store:
        assert (await store.commit(KEY, 0, {"a": 5})).duplicate
        assert await store.put("c", KEY, 1, [make_block(5, rows(10, 5))])
        await store.commit(KEY, 1, parts)
        assert await everything(store) == rows(0, 10)
