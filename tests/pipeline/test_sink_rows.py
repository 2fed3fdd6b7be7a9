"""Record batches become blocks with exactly their rows, for all types, slices and sizes."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxkit.pipeline import Encoding, StagingLimits
from muxkit.pipeline.errors import OptionError, PipelineError
from muxkit.pipeline.options import RowEncoding
from muxkit.pipeline.sink import HEADERS_KIND, Blocks, encoding_of
from muxkit.pipeline.staging.records import decode_block, encode_block, rows_of
from muxkit.protocols.restream import Record

LIMITS = StagingLimits()


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def rows(maker: Blocks, *batches: pa.RecordBatch) -> list[bytes]:
    """The rows of all blocks, each looked at as a server does."""
    found: list[bytes] = []
    for each in batches:
        for block in maker.of(each):
            assert block.first == len(found)
            found += rows_of(decode_block(encode_block(block), LIMITS))
    assert maker.rows == len(found)
    return found


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 100), st.integers(0, 5), st.integers(0, 5))
def test_bytes_are_written_as_they_are(
    kind: pa.DataType, content: list[bytes], size: int, left: int, right: int
) -> None:
    whole = batch(value=pa.array(content, kind))
    part = whole.slice(left, max(0, len(content) - left - right))
    expected = content[left : left + part.num_rows]
    assert rows(Blocks(Encoding.BINARY, size), part, whole) == [*expected, *content]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_strings_are_written_as_utf_8(kind: pa.DataType) -> None:
    content = ["", "ü", "x" * 1000, "\x00"]
    assert rows(Blocks(Encoding.TEXT, 64), batch(value=pa.array(content, kind))) == [text.encode() for text in content]


def test_blocks_have_about_the_size_that_was_asked_for() -> None:
    blocks = Blocks(Encoding.BINARY, 100).of(batch(value=pa.array([b"x" * 30] * 10 + [b"y" * 500] + [b"z"])))
    assert [block.rows for block in blocks] == [3, 3, 3, 1, 1, 1]


def test_a_value_that_is_null_is_an_error_that_names_the_row() -> None:
    maker = Blocks(Encoding.TEXT, 100)
    maker.of(batch(value=pa.array(["a", "b"])))
    with pytest.raises(PipelineError, match=r"row 3 of this partition is null in the column value"):
        maker.of(batch(value=pa.array(["c", None])))


def test_rows_of_several_columns_are_json() -> None:
    table = batch(
        id=pa.array([1, None]),
        text=pa.array(["ü\n", ""]),
        raw=pa.array([b"\x00\xff", None]),
        at=pa.array([datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None], pa.timestamp("us", tz="UTC")),
        day=pa.array([date(2026, 1, 2), None]),
        price=pa.array([Decimal("1.50"), None]),
        inner=pa.array([{"x": [1, 2]}, None]),
    )
    first, second = (json.loads(row) for row in rows(Blocks(Encoding.JSON, 1000), table))
    assert first == {
        "id": 1,
        "text": "ü\n",
        "raw": "AP8=",
        "at": "2026-01-02T03:04:05Z",
        "day": "2026-01-02",
        "price": "1.50",
        "inner": {"x": [1, 2]},
    }
    assert set(second.values()) == {None, ""}


def test_json_is_cut_into_blocks_as_well() -> None:
    blocks = Blocks(Encoding.JSON, 50).of(batch(id=pa.array(range(100))))
    assert len(blocks) > 10
    assert sum(block.rows for block in blocks) == 100


@pytest.mark.parametrize(
    ("columns", "wanted", "found"),
    [
        ({"value": "string"}, RowEncoding.AUTO, Encoding.TEXT),
        ({"value": "binary"}, RowEncoding.AUTO, Encoding.BINARY),
        ({"value": "binary"}, RowEncoding.VALUE, Encoding.BINARY),
        ({"value": "string"}, RowEncoding.JSON, Encoding.JSON),
        ({"value": "bigint"}, RowEncoding.AUTO, Encoding.JSON),
        ({"text": "string"}, RowEncoding.AUTO, Encoding.JSON),
        ({"key": "string", "value": "string"}, RowEncoding.AUTO, Encoding.RECORD),
    ],
)
def test_the_columns_say_what_becomes_of_a_row(columns: dict[str, str], wanted: RowEncoding, found: Encoding) -> None:
    assert encoding_of(columns, wanted) is found


@pytest.mark.parametrize("columns", [{"value": "bigint"}, {"key": "string", "value": "string"}, {"text": "string"}])
def test_values_that_are_not_there_cannot_be_asked_for(columns: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"option encoding: value needs one column, value, of strings or bytes"):
        encoding_of(columns, RowEncoding.VALUE)


# ---------------------------------------------------------------------------- records

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
headers = st.none() | st.lists(st.fixed_dictionaries({"key": st.text(max_size=4), "value": st.binary(max_size=4)}))


@given(
    st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=9), headers), max_size=9),
    st.integers(0, 3),
)
def test_records_are_encoded_as_restream_stores_them(content: list[tuple[Any, Any, Any]], left: int) -> None:
    values, keys, pairs = zip(*content, strict=True) if content else ((), (), ())
    whole = batch(
        value=pa.array(values, pa.binary()), key=pa.array(keys, pa.binary()), headers=pa.array(pairs, HEADERS)
    )
    expected = [
        Record(value, key, [(each["key"], each["value"]) for each in pairs or ()]).encode()
        for value, key, pairs in content
    ]
    assert rows(Blocks(Encoding.RECORD, 64), whole.slice(left)) == expected[left:]


def test_a_record_of_strings_needs_no_key_and_no_headers() -> None:
    strings = batch(value=pa.array(["ü", None]))
    assert rows(Blocks(Encoding.RECORD, 64), strings) == [Record("ü".encode()).encode(), Record(None).encode()]


@pytest.mark.parametrize(
    ("columns", "wanted", "expected"),
    [
        ({"value": "binary", "key": "binary"}, RowEncoding.AUTO, Encoding.RECORD),
        ({"value": "string", "headers": HEADERS_KIND}, RowEncoding.AUTO, Encoding.RECORD),
        ({"value": "binary"}, RowEncoding.RECORD, Encoding.RECORD),
        ({"value": "binary", "key": "int"}, RowEncoding.AUTO, Encoding.JSON),
        ({"value": "binary", "key": "binary", "id": "bigint"}, RowEncoding.AUTO, Encoding.JSON),
    ],
)
def test_key_and_headers_make_records(columns: dict[str, str], wanted: RowEncoding, expected: Encoding) -> None:
    assert encoding_of(columns, wanted) is expected


def test_columns_that_are_no_record_are_an_error_of_the_option() -> None:
    with pytest.raises(OptionError, match=r"option encoding: record needs value .* there are: key binary"):
        encoding_of({"key": "binary"}, RowEncoding.RECORD)
