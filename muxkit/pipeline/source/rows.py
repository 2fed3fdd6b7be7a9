"""Turns messages into record batches with the requested columns.

The tasks of a query use `read`. The rows of a stream stay in order, and memory holds only a few batches. No Python
object is created for a row, except for one with headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muxkit import RemoteProtocolError
from muxkit.pipeline.concurrency import bridged, for_each_limited
from muxkit.pipeline.errors import OptionError, StreamBroken
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Span
from muxkit.protocols.restream.wire import Block
from muxkit.protocols.restream.wire.records import MAX_TAG, NULL_TAG, PREFIX, parse_headers

Emit = Callable[[pa.RecordBatch], Awaitable[None]]
Numbers = npt.NDArray[np.int64]

SCHEMA: Final = (
    "stream string not null, id bigint not null, time timestamp, value binary, key binary, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns as Spark's DDL: the stream, the message's number, the server's time, and its data as in Kafka."""

KINDS: Final = {
    "stream": "string",
    "id": "bigint",
    "time": "timestamp",
    "value": "binary",
    "key": "binary",
    "headers": "array<struct<key:string,value:binary>>",
}
"""The simple names of Spark's types."""

TIME: Final = pa.timestamp("us", tz="UTC")
HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
MICROSECONDS: Final = 1_000_000
COLUMNS: Final = {
    "stream": pa.string(),
    "id": pa.int64(),
    "time": TIME,
    "value": pa.binary(),
    "key": pa.binary(),
    "headers": HEADERS,
}
AT_ONCE: Final = 4  # streams per partition that are read simultaneously, since small ones mostly wait for the network
BATCH_BYTES: Final = 8 << 20  # size of the data at which a batch ends, so that large messages make small batches
LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class Rows:
    """Makes record batches of messages. `schema` has some of the columns of `COLUMNS`."""

    def __init__(self, schema: pa.Schema) -> None:
        for name in schema.names:
            if name not in COLUMNS:
                raise OptionError("schema", f"there is no column {name!r}; there are {', '.join(COLUMNS)}")
        self._schema = schema
        self._has_data = not {"value", "key", "headers"}.isdisjoint(schema.names)

    def batch(self, stream: str, blocks: Sequence[Block]) -> pa.RecordBatch:
        """Return a record batch of consecutive messages of one stream. Raises `StreamBroken` for an invalid record."""
        columns = _Columns(stream, blocks, has_data=self._has_data)
        return pa.RecordBatch.from_arrays(
            [getattr(columns, name)() for name in self._schema.names], schema=self._schema
        )


class _Columns:
    """The columns of some messages. Each method makes the column of its name.

    The data of each message has four parts, which are next to each other: the prefix of a record, its key, its headers,
    and the value. Data in JSON has only the last one. So all parts of all messages are one Arrow array over the bytes
    that the server sent, and a column takes every fourth element of it.
    """

    def __init__(self, stream: str, blocks: Sequence[Block], *, has_data: bool) -> None:
        self._stream = stream
        self._blocks = blocks
        self._count = sum(map(len, blocks))
        if has_data:
            self._split()

    def stream(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._stream, pa.string()), self._count)

    def id(self) -> pa.Array:
        first = self._blocks[0].first
        return pa.array(np.arange(first, first + self._count, dtype=np.int64))

    def time(self) -> pa.Array:
        """Return times in microseconds, with null for a time that Spark can't represent."""
        seconds = np.concatenate([np.array(block.times, np.float64) for block in self._blocks])  # None becomes NaN
        is_known = (seconds >= 0) & (seconds <= LATEST)
        micros = np.rint(np.where(is_known, seconds, 0.0) * MICROSECONDS).astype("datetime64[us]")
        return pa.array(micros, TIME, mask=~is_known)

    def value(self) -> pa.Array:
        return self._json if self._is_json else self._part(3, self._is_null)

    def key(self) -> pa.Array:
        return pa.nulls(self._count, pa.binary()) if self._is_json else self._part(1, self._key_sizes == 0)

    def headers(self) -> pa.Array:
        if self._is_json or not self._headers_sizes.any():
            return pa.nulls(self._count, HEADERS)
        encoded = self._part(2, self._headers_sizes == 0).to_pylist()
        try:
            parsed = [None if each is None else [*map(_header, parse_headers(each))] for each in encoded]
        except RemoteProtocolError as error:
            raise StreamBroken(self._stream, str(error)) from error
        return pa.array(parsed, HEADERS)

    def _split(self) -> None:
        sizes = np.concatenate([np.array(block.sizes, np.int64) for block in self._blocks])
        body = b"".join(block.body for block in self._blocks)
        bounds = np.zeros(self._count + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        starts, ends = bounds[:-1], bounds[1:]
        content = np.frombuffer(body, np.uint8)
        tags = content[starts]
        is_record = tags <= MAX_TAG
        self._is_json = not is_record.any()
        if self._is_json:
            self._json = _binary(bounds, body)
            return
        self._is_null = tags == NULL_TAG
        records = np.flatnonzero(is_record)
        if (sizes[records] < PREFIX.size).any():
            raise StreamBroken(self._stream, f"a record is shorter than {PREFIX.size} bytes")
        self._key_sizes, self._headers_sizes = np.zeros((2, self._count), np.int64)
        prefixes = content[starts[records][:, None] + np.arange(1, PREFIX.size)]
        self._key_sizes[records], self._headers_sizes[records] = prefixes.view("<u4").T
        keys = starts + np.where(is_record, PREFIX.size, 0)
        headers = keys + np.maximum(self._key_sizes - 1, 0)
        values = headers + self._headers_sizes
        if (values > ends).any():
            raise StreamBroken(self._stream, "the key and the headers of a record are longer than the record")
        parts = np.append(np.stack([starts, keys, headers, values], axis=1).ravel(), bounds[-1])
        self._parts = _binary(parts, body)

    def _part(self, number: int, is_null: npt.NDArray[np.bool_]) -> pa.Array:
        indices = np.arange(number, 4 * self._count, 4, dtype=np.int64)
        return self._parts.take(pa.array(indices, mask=is_null))


def _binary(bounds: Numbers, body: bytes) -> pa.Array:
    """Return a column of byte strings that are next to each other, without copying them."""
    offsets = pa.py_buffer(bounds.astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, offsets, pa.py_buffer(body)])


def _header(header: tuple[str, bytes | None]) -> dict[str, object]:
    return {"key": header[0], "value": header[1]}


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
    pending: list[Block] = []

    async def flush() -> None:
        await emit(rows.batch(span.uuid, pending))
        pending.clear()

    async def take(block: Block) -> None:
        if pending and block.first != pending[-1].last + 1:  # messages between them are lost, as the options allow
            await flush()
        rest: Block | None = block
        while rest is not None:
            room = size - sum(map(len, pending))
            part, rest = rest.split(room)
            pending.append(part)
            if len(part) == room or sum(len(each.body) for each in pending) >= BATCH_BYTES:
                await flush()

    await client.fetch(span, take)
    if pending:
        await flush()
