"""Turns messages into record batches with the requested columns.

The tasks of a query use `read`. The rows of a stream stay in order, and memory holds only a few batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from muxkit.pipeline.concurrency import bridged, for_each_limited
from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Span
from muxkit.protocols.restream.engine import EncodedMessage

Emit = Callable[[pa.RecordBatch], Awaitable[None]]


SCHEMA: Final = "stream string not null, id bigint not null, time timestamp, value binary not null"
"""The columns as Spark's DDL: the stream, the message's number, the server's time, and the data."""

TIME: Final = pa.timestamp("us", tz="UTC")
MICROSECONDS: Final = 1_000_000
COLUMNS: Final = {"stream": pa.string(), "id": pa.int64(), "time": TIME, "value": pa.binary()}
AT_ONCE: Final = 4  # streams per partition that are read simultaneously, since small ones mostly wait for the network
READS: Final = 32  # network reads per batch at most, so that large messages make small batches
LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class Rows:
    """Makes record batches of messages. `schema` has some of the columns stream, id, time and value."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._makers = [self._maker(field) for field in schema]

    def batch(self, stream: str, messages: Sequence[EncodedMessage]) -> pa.RecordBatch:
        """Return a record batch of these messages of one stream."""
        return pa.RecordBatch.from_arrays([make(stream, messages) for make in self._makers], schema=self._schema)

    def _maker(self, field: pa.Field) -> Callable[[str, Sequence[EncodedMessage]], pa.Array]:
        match field.name:
            case "stream":
                return lambda stream, messages: pa.repeat(pa.scalar(stream, pa.string()), len(messages))
            case "id":
                return lambda _, messages: pa.array([message.id for message in messages], pa.int64())
            case "time":
                return lambda _, messages: _times([message.time for message in messages])
            case "value":
                return lambda _, messages: _values([message.data for message in messages])
            case name:
                raise OptionError("schema", f"there is no column {name!r}; there are stream, id, time and value")


def _values(values: Sequence[msgspec.Raw]) -> pa.Array:
    """Return a column of JSON. The bytes are copied once, and no Python object is created for a value."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=offsets[1:])
    joined = b"".join(values)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])


def _times(times: Sequence[float | None]) -> pa.Array:
    """Return a column of times in microseconds, with null for a time that Spark can't represent."""
    seconds = np.array(times, np.float64)  # None becomes NaN
    is_known = (seconds >= 0) & (seconds <= LATEST)
    micros = np.rint(np.where(is_known, seconds, 0.0) * MICROSECONDS).astype("datetime64[us]")
    return pa.array(micros, TIME, mask=~is_known)


def read(client: Client, rows: Rows, spans: Sequence[Span], size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these ranges, in batches of about `size` rows of one stream.

    The rows of a stream are in order. Up to `AT_ONCE` streams are read simultaneously.
    """
    by_stream: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: each.begin):
        by_stream.setdefault(span.uuid, []).append(span)

    async def work(emit: Emit) -> None:
        async def read_in_order(ranges: list[Span]) -> None:
            for span in ranges:
                await _read_span(client, rows, span, size, emit)

        await for_each_limited(by_stream.values(), read_in_order, at_once=AT_ONCE)

    return bridged(work)


async def _read_span(client: Client, rows: Rows, span: Span, size: int, emit: Emit) -> None:
    pending: list[EncodedMessage] = []
    reads = 0

    async def take(messages: list[EncodedMessage]) -> None:
        nonlocal reads
        pending.extend(messages)
        reads += 1
        while len(pending) >= size or (pending and reads >= READS):
            await emit(rows.batch(span.uuid, pending[:size]))
            del pending[:size]
            reads = 0

    await client.fetch(span, take)
    if pending:
        await emit(rows.batch(span.uuid, pending))
