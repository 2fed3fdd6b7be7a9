"""A sink's tasks and its driver write each row once, in the order of calls that Spark makes."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import pyarrow as pa
import pytest
import trio

from muxkit.pipeline import Encoding, Key, SinkOptions, StagingClient
from muxkit.pipeline.errors import NotCommitted, OptionError, PipelineError, StagingError, StagingUnavailable
from muxkit.pipeline.options import Spread
from muxkit.pipeline.sink import Place, Staged, Target, abort_batch, commit_batch, write_partition
from tests.pipeline._staging_thread import StagingThread, staging_thread
from tests.pipeline._staging_world import everything, rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from muxkit.pipeline import Staging


APP = "query"
KEY = Key("main", APP)


@pytest.fixture
def server() -> Iterator[StagingThread]:
    with staging_thread() as thread:
        yield thread


@pytest.fixture
def options(server: StagingThread) -> SinkOptions:
    return SinkOptions(urls=(server.url,), patience=20.0)


def batches(content: list[bytes], at_once: int = 10) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(content), at_once):
        yield pa.RecordBatch.from_arrays([pa.array(content[first : first + at_once], pa.binary())], names=["value"])


def write(
    options: SinkOptions, batch: int, content: list[bytes], partition: int = 0, attempt: int = 0
) -> Staged | None:
    """As a task does, whose message then travels to the driver."""
    place = Place(partition, attempt)
    staged = write_partition(options, Target(app=APP, batch=batch), place, Encoding.BINARY, batches(content))
    travelled: Staged | None = pickle.loads(pickle.dumps(staged))
    return travelled


@pytest.mark.requirement("R-71")
def test_a_batch_before_the_last_committed_one_is_an_error_and_not_left_out(
    server: StagingThread, options: SinkOptions
) -> None:
    """Was: A sink whose checkpoint was lost left rows out while its progress counted them."""
    for batch in (0, 1, 2):
        commit_batch(options, [write(options, batch, [b"row"])], batch)
    commit_batch(options, [write(options, 2, [b"row"])], 2)  # the last one again: Spark was killed before it noted it
    with pytest.raises(PipelineError, match=r"batch 0 comes after batch 2 was committed .* set option txnAppId"):
        commit_batch(options, [write(options, 0, [b"another"])], 0)


def found_in(server: StagingThread) -> list[bytes]:
    """All rows of the store, in which nothing is staged any more."""

    async def read(store: Staging) -> list[bytes]:
        assert (await store.progress(KEY)).transactions == 0
        return await everything(store, "main")

    return server.ask(read)


def test_a_batch_is_written_by_tasks_and_committed_by_the_driver(server: StagingThread, options: SinkOptions) -> None:
    parts = [write(options, 0, rows(0, 100)), write(options, 0, rows(100, 100), 1)]
    commit_batch(options, parts, 0)
    assert found_in(server) == rows(0, 200)


def test_a_replay_behind_the_commit_changes_nothing(
    server: StagingThread, options: SinkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [write(options, 0, rows(0, 100))]
    commit_batch(options, parts, 0)
    abort_batch(options, parts, 0)  # the driver did not hear of its own commit
    replayed = [write(options, 0, rows(0, 50)), write(options, 0, rows(50, 50), 1)]
    assert "batch 0 had been committed before" not in caplog.text
    commit_batch(options, replayed, 0)
    assert "application 'query', batch 0 had been committed before on bpmux+tcp://127.0.0.1" in caplog.text
    assert found_in(server) == rows(0, 100)


def test_what_failed_tasks_and_zombies_left_goes_with_the_commit(server: StagingThread, options: SinkOptions) -> None:
    first = write(options, 0, rows(0, 100))
    write(options, 0, rows(100, 70), 1)  # its message was lost
    abort_batch(options, [first, None], 0)
    zombie = write(options, 0, rows(100, 100), 1, attempt=1)
    commit_batch(options, [write(options, 0, rows(0, 200)), write(options, 0, [], 1)], 0)
    abort_batch(options, [zombie], 0)
    assert found_in(server) == rows(0, 200)


def test_a_batch_without_rows_needs_no_server() -> None:
    options = SinkOptions(urls=("bpmux+tcp://127.0.0.1:1",), patience=0.1)
    parts = [write(options, 0, []), None]
    assert parts[0] is None
    commit_batch(options, parts, 0)
    abort_batch(options, parts, 0)


def test_a_commit_that_fails_says_which_batch_it_was(options: SinkOptions) -> None:
    staged = write(options, 4, rows(0, 10))
    abort_batch(options, [staged], 4)
    with pytest.raises(NotCommitted, match=r"stream 'main', application 'query', batch 4: transaction 4-0-0-"):
        commit_batch(options, [staged], 4)


def test_plaintext_beyond_loopback_is_told_with_its_option() -> None:
    far = SinkOptions.parse({"url": "bpmux+tcp://192.0.2.1:7000", "txnId": "one"}, streaming=False)
    with pytest.raises(OptionError, match=r"option url: .* is plaintext .*set option insecure=true"):
        write(far, 0, [b"row"])


def test_a_message_of_another_batch_is_refused(options: SinkOptions) -> None:
    staged = write(options, 4, rows(0, 10))
    with pytest.raises(PipelineError, match=r"batch 5: a task has staged for .*, batch 4; nothing was committed"):
        commit_batch(options, [staged], 5)


def test_rows_that_cannot_be_had_are_the_error_of_the_task(options: SinkOptions) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(rows(0, 100))
        raise ArithmeticError("upstream")

    with pytest.raises(ArithmeticError, match="upstream"):
        write_partition(options, Target(app=APP, batch=0), Place(0), Encoding.BINARY, failing())


def test_an_abort_that_reaches_nobody_is_no_error(
    server: StagingThread, options: SinkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    staged = write(options, 0, rows(0, 10))
    server.stop()
    hasty = SinkOptions(urls=options.urls, patience=0.1)
    abort_batch(hasty, [staged], 0)
    assert "batch 0: what was staged could not be dropped, it will be swept" in caplog.text
    with pytest.raises(StagingUnavailable, match=r"batch 0: bpmux\+tcp://127.0.0.1:\d+ could not be used"):
        commit_batch(hasty, [staged], 0)


# ---------------------------------------------------------------------------- several servers


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[StagingThread]]:
    with ExitStack() as stack:
        yield [stack.enter_context(staging_thread(f"sqlite:{tmp_path / name}.db")) for name in ("a", "b")]


def both(two: list[StagingThread], patience: float = 20.0) -> SinkOptions:
    return SinkOptions(urls=tuple(server.url for server in two), patience=patience)


def test_each_of_several_servers_gets_every_row(two: list[StagingThread]) -> None:
    options = both(two)
    commit_batch(options, [write(options, 0, rows(0, 1000)), write(options, 0, rows(1000, 5), 1)], 0)
    for server in two:
        assert found_in(server) == rows(0, 1005)


def test_a_server_that_was_away_catches_up_and_the_other_keeps_what_it_has(two: list[StagingThread]) -> None:
    staged = [write(both(two), 0, rows(0, 100))]
    two[1].stop()
    with pytest.raises(StagingError, match="could not be used"):
        commit_batch(both(two, patience=0.1), staged, 0)
    two[1].start()
    options = both(two)
    replayed = [write(options, 0, rows(0, 60)), write(options, 0, rows(60, 40), 1)]
    commit_batch(options, replayed, 0)
    for server in two:
        assert found_in(server) == rows(0, 100)


def test_rows_that_cannot_be_had_leave_nothing_prepared_anywhere(two: list[StagingThread]) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(rows(0, 100))
        raise ArithmeticError("upstream")

    options = both(two)
    with pytest.raises(ArithmeticError, match="upstream"):
        write_partition(options, Target(app=APP, batch=0), Place(0), Encoding.BINARY, failing())


# ---------------------------------------------------------------------------- partitions over servers


def spread(two: list[StagingThread], patience: float = 20.0) -> SinkOptions:
    urls = tuple(server.url for server in two)
    return SinkOptions(urls=urls, spread=Spread.PARTITIONS, patience=patience)


def parts(options: SinkOptions, batch: int, partitions: int) -> list[Staged | None]:
    """Each partition has ten rows that follow from batch and partition."""
    return [write(options, batch, rows(1000 * batch + 10 * each, 10), each) for each in range(partitions)]


def commit_half(server: StagingThread, staged: list[Staged | None]) -> None:
    """As a driver that dies when one server has committed a batch, and the other has not."""
    rows = {each.txn: each.rows for each in staged if each is not None and server.url in each.urls}
    trio.run(StagingClient(server.url).commit, KEY, 0, rows)


def test_a_server_that_is_away_is_noticed_before_the_others_commit(two: list[StagingThread]) -> None:
    staged = parts(spread(two), 0, 4)
    two[1].stop()
    with pytest.raises(StagingError, match="could not be used"):
        commit_batch(spread(two, patience=0.1), staged, 0)
    assert two[0].ask(lambda store: everything(store, "main")) == []


def test_each_partition_goes_to_one_of_several_servers_and_a_single_one_takes_turns(two: list[StagingThread]) -> None:
    options = spread(two)
    for batch in (0, 1):
        commit_batch(options, parts(options, batch, 3), batch)
    for batch in (2, 3):
        commit_batch(options, parts(options, batch, 1), batch)
    each = [found_in(server) for server in two]
    assert sorted(len(found) for found in each) == [40, 40]
    every = [row for batch in (0, 1) for row in rows(1000 * batch, 30)] + rows(2000, 10) + rows(3000, 10)
    assert sorted(row for found in each for row in found) == sorted(every)


def test_the_order_of_the_urls_does_not_move_partitions(two: list[StagingThread]) -> None:
    options = spread(two)
    turned = attrs.evolve(options, urls=options.urls[::-1])
    assert [options.urls_of(each, 7) for each in range(4)] == [turned.urls_of(each, 7) for each in range(4)]


def test_a_server_that_missed_its_partitions_gets_them_when_the_batch_is_repeated(two: list[StagingThread]) -> None:
    options = spread(two)
    commit_half(two[0], parts(options, 0, 4))
    commit_batch(options, parts(options, 0, 4), 0)
    assert sorted(row for server in two for row in found_in(server)) == sorted(rows(0, 40))


def test_a_repeated_batch_with_other_partitions_is_an_error_and_nothing_is_lost_silently(
    two: list[StagingThread],
) -> None:
    options = spread(two)
    commit_half(two[0], parts(options, 0, 4))
    with pytest.raises(
        PipelineError, match=r"has committed 20 rows of it, and now it would be (0|40): the query has other"
    ):
        commit_batch(options, [write(options, 0, rows(0, 40), each) if each == 2 else None for each in range(4)], 0)
    assert len([row for server in two for row in server.ask(lambda store: everything(store, "main"))]) == 20


def test_an_abort_reaches_the_server_of_each_partition(two: list[StagingThread]) -> None:
    options = spread(two)
    abort_batch(options, parts(options, 0, 4), 0)
    assert [found_in(server) for server in two] == [[], []]
