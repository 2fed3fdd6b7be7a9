"""Slips in options and schemas are told before anything is read, with the name of the option."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from muxkit.pipeline import OptionError, PipelineError
from muxkit.pipeline.source.offsets import Span
from muxkit.pipeline.source.spark import batch_reader, stream_reader
from muxkit.pipeline.spark import check_version
from tests.pipeline._source_place import ids, place, step
from tests.pipeline._source_servers import ONE, TWO, feed

if TYPE_CHECKING:
    from trio.testing import MockClock

GIVEN = {"servers": "restream+tcp://127.0.0.1:1", "streams": ONE}


def columns(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


FULL = columns(stream=StringType(), id=LongType(), time=TimestampType(), value=BinaryType())


@pytest.mark.requirement("R-71")
async def test_offsets_of_streams_that_the_query_does_not_have_are_refused(autojump_clock: MockClock) -> None:
    """Was: A Spark query ignored `endingOffsets` on a stream, and offsets of streams that it does not have: a slip in a
    uuid read from the beginning.
    """
    async with place() as there:
        await there.feed(ONE, 3)
        slip = json.dumps({ONE: 1, TWO: 2})
        starting = there.planner(startingOffsets=slip)
        with pytest.raises(OptionError, match=f"option startingOffsets: stream {TWO} is none of the 1 streams"):
            await step(starting, starting.initial())
        with pytest.raises(OptionError, match=f"option endingOffsets: stream {TWO} is none of the 1 streams"):
            await there.planner(endingOffsets=slip).everything()


def test_a_streaming_query_takes_no_end() -> None:
    with pytest.raises(OptionError, match="option endingOffsets: it is for batch queries"):
        stream_reader(GIVEN | {"endingOffsets": json.dumps({ONE: 3})}, FULL)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (columns(foo=IntegerType()), "there is no column 'foo'; there are stream, id, time, value"),
        (columns(id=StringType()), "column id is a bigint, not a string"),
        (columns(value=StringType()), "column value is a binary, not a string"),
    ],
)
def test_a_schema_that_cannot_be_filled_is_refused_before_there_are_rows(schema: StructType, told: str) -> None:
    """Was: A schema with another column or type failed in a task, or was cast, or not noticed at all."""
    for make in (stream_reader, batch_reader):
        with pytest.raises(OptionError, match=f"option schema: {told}"):
            make(GIVEN, schema)


def test_a_schema_may_have_some_of_the_columns() -> None:
    batch_reader(GIVEN, columns(value=BinaryType(), id=LongType()))


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("version", ["3.5.1", "3.5.9"])
def test_an_older_spark_is_told_which_one_is_needed(version: str) -> None:
    """Was: On a Spark before 4.2 everything ended in a ModuleNotFoundError that named nothing."""
    with pytest.raises(PipelineError, match=rf"expected 4\.0 or later, got {version}; upgrade it"):
        check_version(version)


@pytest.mark.parametrize("version", ["4.0.0", "4.1.0.dev3", "4.3.0", "4.10", "5.0.0-preview1"])
def test_a_newer_spark_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.requirement("R-71")
async def test_plaintext_beyond_loopback_is_told_with_its_option() -> None:
    """Was: Plaintext beyond loopback was a bare ValueError in a Spark query, without the option."""
    async with place() as there:
        client = there.client(servers="restream+tcp://192.0.2.1:7000")
        with pytest.raises(OptionError, match=r"option servers: .* is plaintext .*set option insecure=true"):
            await client.status("restream+tcp://192.0.2.1:7000", ONE)


async def test_a_message_above_the_limit_is_no_fault_of_the_server(autojump_clock: MockClock) -> None:
    async with place() as there:
        await feed(there.store, ONE, ["x" * 5000])
        with pytest.raises(OptionError, match=f"option maxMessageBytes: stream {ONE} has a longer message"):
            await ids(there.client(maxMessageBytes="1k"), Span(ONE, there.url, 0, 1))
