"""The rows that messages become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pytest
import trio

from muxkit.pipeline import OptionError, StreamBroken
from muxkit.pipeline.source.offsets import Span
from muxkit.pipeline.source.rows import HEADERS, Rows, read
from muxkit.protocols.restream import Record
from muxkit.protocols.restream.wire import Block, StoredMessage
from muxkit.protocols.restream.wire.blocks import block_of
from tests.pipeline._source_servers import ONE, TWO, hall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit.protocols.restream import Json

TIME = pa.timestamp("us", tz="UTC")
PLAIN = pa.schema([
    pa.field("stream", pa.string(), nullable=False),
    pa.field("id", pa.int64(), nullable=False),
    pa.field("time", TIME),
    pa.field("value", pa.binary(), nullable=False),
])  # fmt: skip


def message(id: int, data: Json, time: float | None = None) -> StoredMessage:
    return StoredMessage(id, time, msgspec.json.encode(data))


def batch(schema: pa.Schema, *messages: StoredMessage) -> pa.RecordBatch:
    return Rows(schema).batch(ONE, [block_of(messages)])


def test_a_row_has_the_stream_the_id_the_time_and_the_data_as_json() -> None:
    made = batch(PLAIN, message(7, {"a": [1, "ü"]}, 1_700_000_000.25), message(8, None))
    assert made.schema == PLAIN
    first, second = made.to_pylist()
    assert first["stream"] == second["stream"] == ONE
    assert (first["id"], second["id"]) == (7, 8)
    assert first["time"].isoformat() == "2023-11-14T22:13:20.250000+00:00"
    assert second["time"] is None
    assert (first["value"], second["value"]) == ('{"a":[1,"ü"]}'.encode(), b"null")


RECORDS = pa.schema([("value", pa.binary()), ("key", pa.binary()), ("headers", HEADERS), ("id", pa.int64())])


def test_the_value_the_key_and_the_headers_of_records_are_columns() -> None:
    made = batch(
        RECORDS,
        StoredMessage(7, None, Record(b"a\n", b"", [("h", b"1"), ("h", None)]).encode()),
        StoredMessage(8, None, b'{"json":1}'),
        StoredMessage(9, None, Record(None, b"key").encode()),
        StoredMessage(10, None, Record(b"").encode()),
    )
    assert made.to_pylist() == [
        {"value": b"a\n", "key": b"", "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}], "id": 7},
        {"value": b'{"json":1}', "key": None, "headers": None, "id": 8},
        {"value": None, "key": b"key", "headers": None, "id": 9},
        {"value": b"", "key": None, "headers": None, "id": 10},
    ]
    made.validate(full=True)


def test_data_without_records_has_neither_keys_nor_headers() -> None:
    made = batch(RECORDS, message(1, "a"))
    assert made.to_pylist() == [{"value": b'"a"', "key": None, "headers": None, "id": 1}]
    made.validate(full=True)


@pytest.mark.parametrize(
    "encoded", [b"\x00\0\0", b"\x00\5\0\0\0\0\0\0\0k", b"\x00\0\0\0\0\xff\xff\xff\xffk", b"\x00\0\0\0\0\1\0\0\0{"]
)
def test_a_damaged_record_ends_the_query(encoded: bytes) -> None:
    with pytest.raises(StreamBroken, match=f"stream {ONE}: "):
        batch(RECORDS, message(1, "a"), StoredMessage(2, None, encoded), message(3, "b"))


@pytest.mark.parametrize("time", [-1.0, 1e300, 253402300800.0])
def test_a_time_that_spark_does_not_know_is_none(time: float) -> None:
    assert batch(PLAIN, message(1, 0, time)).to_pylist()[0]["time"] is None


def test_only_the_columns_that_were_asked_for_are_made() -> None:
    schema = pa.schema([PLAIN.field("id"), PLAIN.field("stream")])
    assert batch(schema, message(1, 0)).to_pylist() == [{"id": 1, "stream": ONE}]


def test_a_column_that_there_is_not_is_an_error_that_names_those_that_there_are() -> None:
    with pytest.raises(OptionError, match="no column 'offset'; there are stream, id, time, value, key, headers"):
        Rows(pa.schema([pa.field("offset", pa.int64())]))


class Served:
    """A client of ranges that are made up."""

    async def fetch(self, span: Span, take: Callable[[Block], Awaitable[None]]) -> None:
        for first in range(span.begin + 1, span.end + 1, 7):
            await trio.lowlevel.checkpoint()
            await take(block_of([message(id, {"n": id}) for id in range(first, min(first + 7, span.end + 1))]))


def sizes(spans: Sequence[Span], size: int) -> list[tuple[str, int]]:
    batches = read(Served(), Rows(PLAIN), spans, size)  # type: ignore[arg-type] # it does what is asked of it
    return [(batch.column(0)[0].as_py(), batch.num_rows) for batch in batches]


def test_batches_have_the_size_that_was_asked_for_and_none_has_two_streams() -> None:
    spans = [Span(ONE, "x", 0, 100), Span(TWO, "x", 50, 75)]
    got = sizes(spans, 40)
    assert [each for each in got if each[0] == ONE] == [(ONE, 40), (ONE, 40), (ONE, 20)]
    assert [each for each in got if each[0] == TWO] == [(TWO, 25)]


def test_large_messages_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxkit.pipeline.source.rows.BATCH_BYTES", 1)
    assert sizes([Span(ONE, "x", 0, 700)], 10_000)[0] == (ONE, 7)


def test_rows_of_a_real_server_are_all_there() -> None:
    from muxkit.pipeline.options import SourceOptions
    from muxkit.pipeline.source.client import Client

    with hall() as there:
        there.feed(ONE, [{"n": n} for n in range(2500)])
        options = SourceOptions.parse({"servers": there.url, "streams": ONE})
        batches = [*read(Client(options), Rows(PLAIN), [Span(ONE, there.url, 0, 2500)], 1000)]
    assert [id for batch in batches for id in batch.column(1).to_pylist()] == list(range(1, 2501))
