"""A stream is read by several tasks, each a range of its ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from pyspark.sql.types import StructType

from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Offset, Span
from muxkit.pipeline.source.readers import BatchReader, Spans, UnadmittedStreamReader, arrow_schema
from muxkit.pipeline.source.rows import Rows, read
from muxkit.pipeline.source.spark import checked
from muxkit_adapters import memory
from tests.pipeline._source_place import ids, lines, place, scripted
from tests.pipeline._source_servers import ONE, TWO, Hall, hall

if TYPE_CHECKING:
    from typing import Any

    from trio.testing import MockClock


COLUMNS = checked(StructType().add("stream", "string", False).add("id", "long", False))


def ranges_of(url: str, **options: object) -> list[tuple[Span, ...]]:
    given = {"servers": url, "streams": f"{ONE} {TWO}"} | {name: str(value) for name, value in options.items()}
    partitions = BatchReader(SourceOptions.parse(given), COLUMNS).partitions()
    return [each.spans for each in partitions if isinstance(each, Spans)]


def test_a_hot_stream_is_cut_by_ids_and_every_range_is_read_by_a_task_of_its_own() -> None:
    with hall() as there:
        there.feed(ONE, list(range(1000)))
        there.feed(TWO, list(range(10)))
        groups = ranges_of(there.url, maxMessagesPerPartition=250)
        assert sorted(sum(span.count for span in each) for each in groups) == [10, 250, 250, 250, 250]
        reader = BatchReader(SourceOptions.parse({"servers": there.url, "streams": ONE}), COLUMNS)
        found = [
            (batch.column("stream")[index].as_py(), id)
            for each in groups
            for batch in reader.read(Spans(each))
            for index, id in enumerate(batch.column("id").to_pylist())
        ]
    assert sorted(found) == [*((ONE, id) for id in range(1, 1001)), *((TWO, id) for id in range(1, 11))]


def test_there_are_at_least_and_at_most_so_many_partitions() -> None:
    with hall() as there:
        there.feed(ONE, list(range(1000)))
        there.feed(TWO, list(range(10)))
        assert len(ranges_of(there.url)) == 2
        assert len(ranges_of(there.url, minPartitions=8)) >= 8
        assert len(ranges_of(there.url, maxMessagesPerPartition=10, maxPartitions=3)) == 3


def test_a_stream_whose_sum_is_verified_stays_whole() -> None:
    with hall() as there:
        there.feed(ONE, list(range(1000)))
        there.feed(TWO, list(range(10)))
        assert len(ranges_of(there.url, verify="numbers", maxMessagesPerPartition=10)) == 2


async def test_a_server_sends_nothing_beyond_a_range(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 1000)
        async with memory.connect(there.url.partition("://")[2]) as stream:
            await stream.send_all(lines({"uuid": ONE, "state": 5, "reader": "", "until": 8}))
            told = b""
            with trio.move_on_after(3600):
                while data := await stream.receive_some(65_536):
                    told += data
    assert [line for line in told.splitlines() if b'"id"' in line][-1].startswith(b'{"id":8,')
    assert told.count(b'"id"') == 3


async def test_a_server_that_sends_more_than_a_range_gives_the_range_all_the_same(autojump_clock: MockClock) -> None:
    async def more(requests: list[dict[str, Any]], stream: trio.abc.Stream) -> None:
        assert requests[-1]["until"] == 4
        await stream.send_all(lines(*({"id": id, "data": id} for id in range(3, 20))))
        await trio.sleep_forever()

    async with scripted("more", more) as url, place() as there:
        assert await ids(there.client(), Span(ONE, url, 2, 4, "incarnation")) == [3, 4]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranges_of_one_stream_in_one_task_come_in_order(order: tuple[int, ...]) -> None:
    with hall() as there:
        there.feed(ONE, list(range(300)))
        spans = [Span(ONE, there.url, 100 * number, 100 * (number + 1)) for number in order]
        rows = Rows(arrow_schema(COLUMNS))
        client = Client(SourceOptions.parse({"servers": there.url, "streams": ONE}))
        found = [id for batch in read(client, rows, spans, 40) for id in batch.column("id").to_pylist()]
    assert found == [*range(1, 301)]


def unadmitted(there: Hall, **options: object) -> UnadmittedStreamReader:
    given = {"servers": there.url, "streams": ONE} | {name: str(value) for name, value in options.items()}
    return UnadmittedStreamReader(SourceOptions.parse(given), COLUMNS)


def ends(offset: dict[str, object]) -> int:
    return Offset.from_json(offset).streams[ONE].id


def test_a_reader_that_spark_does_not_tell_the_start_of_a_batch_goes_on_after_the_last_one() -> None:
    with hall() as there:
        there.feed(ONE, list(range(10)))
        reader = unadmitted(there, maxMessagesPerTrigger=4)
        assert [ends(reader.latestOffset()) for _ in range(4)] == [4, 8, 10, 10]


def test_such_a_reader_goes_on_after_the_offset_that_a_query_asks_for_when_it_is_started_again() -> None:
    with hall() as there:
        there.feed(ONE, list(range(10)))
        before = unadmitted(there, maxMessagesPerTrigger=4)
        before.latestOffset()
        last = before.latestOffset()
        again = unadmitted(there, maxMessagesPerTrigger=1)
        assert again.partitions(last, last) == []
        assert ends(again.latestOffset()) == 9
        [span] = again.partitions(last, again.latestOffset())
        assert isinstance(span, Spans)
        assert [(each.begin, each.end) for each in span.spans] == [(8, 10)]
