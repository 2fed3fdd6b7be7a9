"""The Spark sink: its writers, and the functions that stage the rows of a task, and commit or abort a batch.

With several servers, either each gets every row, or each partition goes to one of them. Each server commits separately.
A server that missed a commit gets it when Spark writes the batch again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import attrs
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import trio
from pyspark import TaskContext
from pyspark import __version__ as SPARK_VERSION
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from muxkit.pipeline.concurrency import run_bare
from muxkit.pipeline.errors import OptionError, PipelineError, StagingError
from muxkit.pipeline.options import RowEncoding, SinkOptions, Spread, link_options
from muxkit.pipeline.spark import ARROW_SINK_SPARK, version_numbers
from muxkit.pipeline.staging.client import StagingClient
from muxkit.pipeline.staging.records import Block, Encoding, Key, make_block
from muxkit.protocols.restream.wire.records import NULL_TAG, PREFIX, VALUE_TAG, encode_headers

BATCH: Final = "streaming.sql.batchId"  # local properties with which Spark informs its tasks
QUERY: Final = "sql.streaming.queryId"
ROWS_OF_A_BATCH: Final = 10_000  # the size of the record batches of later versions of Spark
LARGEST_BLOCK: Final = 256 << 10  # bytes
ABORT_TIMEOUT: Final = 10.0  # s that an abort may take; the server sweeps transactions that it doesn't reach

if TYPE_CHECKING:
    from pyspark.sql import Row

Messages = Sequence[WriterCommitMessage | None]
"""The results of a batch's tasks: `Staged`, an empty message if there were no rows, or None from a failed task."""

_log = logging.getLogger("muxkit")


# ---------------------------------------------------------------------------- the writers of Spark


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """Return the writer of a streaming query. `options` are those that Spark was given.

    Raises:
        OptionError: if an option or the output mode is invalid.
    """
    if overwrite:
        raise OptionError("outputMode", "only append: what was committed to a stream is not taken back")
    parsed, encoding = _parsed(options, schema, streaming=True)
    if version_numbers(SPARK_VERSION) >= ARROW_SINK_SPARK:
        return _StreamWriter(parsed, encoding)
    return _RowStreamWriter(parsed, encoding, schema)


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer of a batch query. `options` are those that Spark was given.

    Raises:
        OptionError: if an option or the mode is invalid.
    """
    if overwrite:
        raise OptionError("mode", "only append: what was committed to a stream is not taken back")
    return _BatchWriter(*_parsed(options, schema, streaming=False))


def _parsed(options: Mapping[str, str], schema: StructType, *, streaming: bool) -> tuple[SinkOptions, Encoding]:
    parsed = SinkOptions.parse(options, streaming=streaming)
    return parsed, encoding_of({field.name: field.dataType.simpleString() for field in schema.fields}, parsed.encoding)


if TYPE_CHECKING or version_numbers(SPARK_VERSION) >= ARROW_SINK_SPARK:
    _ArrowWriter = datasource.DataSourceStreamArrowWriter
else:
    _ArrowWriter = DataSourceStreamWriter


class _StreamWriter(_ArrowWriter):
    """The writer of a streaming query. Each process makes its own, so they share only the messages of the tasks."""

    def __init__(self, options: SinkOptions, encoding: Encoding) -> None:
        self._options = options
        self._encoding = encoding

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        batch, query = context.getLocalProperty(BATCH), context.getLocalProperty(QUERY)
        app = self._options.app or query
        if batch is None or app is None:
            raise PipelineError(f"Spark did not tell this task its {BATCH} and {QUERY}: is it a streaming query?")
        target = Target(app=app, batch=int(batch))
        place = Place(context.partitionId(), context.attemptNumber())
        return write_partition(self._options, target, place, self._encoding, iterator) or WriterCommitMessage()

    def commit(self, messages: Messages, batchId: int) -> None:
        commit_batch(self._options, messages, batchId)

    def abort(self, messages: Messages, batchId: int) -> None:
        abort_batch(self._options, messages, batchId)


class _RowStreamWriter(_StreamWriter):
    """The writer on Spark 4.0, whose streaming sinks get rows instead of record batches."""

    def __init__(self, options: SinkOptions, encoding: Encoding, schema: StructType) -> None:
        super().__init__(options, encoding)
        self._schema = schema

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        return super().write(self._batches(iterator))

    def _batches(self, rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.conversion import LocalDataToArrowConversion

        while some := list(islice(rows, ROWS_OF_A_BATCH)):
            yield from LocalDataToArrowConversion.convert(some, self._schema, False).to_batches()


class _BatchWriter(DataSourceArrowWriter):
    """The writer of a batch query. It is made once, and pickled for the tasks and for the process that commits."""

    def __init__(self, options: SinkOptions, encoding: Encoding) -> None:
        self._options = options
        self._encoding = encoding
        # An application with only this batch. Without the option txnId, its name is random.
        self._target = Target(app=options.txn or f"run-{uuid.uuid4()}", batch=0, once=options.txn is None)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        place = Place(context.partitionId(), context.attemptNumber())
        return write_partition(self._options, self._target, place, self._encoding, iterator) or WriterCommitMessage()

    def commit(self, messages: Messages) -> None:
        commit_batch(self._options, messages, self._target.batch)

    def abort(self, messages: Messages) -> None:
        abort_batch(self._options, messages, self._target.batch)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise PipelineError("this code does not run in a Spark task")
    return context


# ---------------------------------------------------------------------------- the work of tasks and driver


@attrs.frozen(kw_only=True)
class Staged(WriterCommitMessage):
    """The result of a task: the transaction that it has staged. The driver commits it."""

    key: Key
    batch: int
    rows: int
    txn: str
    urls: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Target:
    """The application and the batch to write."""

    app: str
    batch: int
    once: bool = False


class Place(NamedTuple):
    """Identifies a task by its partition and the number of earlier attempts."""

    partition: int
    attempt: int = 0


def write_partition(
    options: SinkOptions, target: Target, place: Place, encoding: Encoding, batches: Iterator[pa.RecordBatch]
) -> Staged | None:
    """Stage and prepare the rows of a task on its servers. If there are no rows, do nothing and return None."""
    key = Key(options.stream, target.app)
    maker = Blocks(encoding, min(LARGEST_BLOCK, max(1, options.window // 4)))
    made = (blocks for blocks in map(maker.of, batches) if blocks)
    first = next(made, None)
    if first is None:
        return None
    txn = f"{target.batch}-{place.partition}-{place.attempt}-{uuid.uuid4().hex}"
    urls = options.urls_of(place.partition, target.batch)

    async def write(client: StagingClient, blocks: AsyncIterator[Block]) -> None:
        await client.write(txn, key, target.batch, blocks, encoding=encoding, ttl=options.ttl, once=target.once)

    async def main() -> None:
        clients = [_client(options, url) for url in urls]
        async with aclosing(_in_threads(chain([first], made))) as given:
            if len(clients) == 1:
                await write(clients[0], given)
                return
            async with trio.open_nursery() as nursery:
                ends: list[trio.MemorySendChannel[Block]] = []
                for client in clients:
                    send, receive = trio.open_memory_channel[Block](0)
                    ends.append(send)
                    nursery.start_soon(write, client, receive)
                # An error here cancels the writers. None of them must mistake it for the end of the rows.
                async for block in given:
                    for send in ends:
                        await send.send(block)
                for send in ends:
                    send.close()

    _run(main)
    return Staged(key=key, batch=target.batch, rows=maker.rows, txn=txn, urls=urls)


def commit_batch(options: SinkOptions, messages: Messages, batch: int) -> None:
    """Commit the transactions of a batch's tasks on all servers. Does nothing on a server that has committed the batch.

    Raises:
        PipelineError: if the transactions don't belong to this batch, or if a server has already committed other rows
            or a later batch.
        StagingError: if a server can't be reached or refuses the commit.
    """
    staged = [each for each in messages if isinstance(each, Staged)]
    if not staged:
        return
    key = staged[0].key
    strange = [each for each in staged if (each.key, each.batch) != (key, batch) or not {*each.urls} <= {*options.urls}]
    if strange:
        raise PipelineError(
            f"{key}, batch {batch}: a task has staged for {strange[0].key}, batch {strange[0].batch}; "
            "nothing was committed"
        )

    def rows_for(client: StagingClient) -> dict[str, int]:
        return {each.txn: each.rows for each in staged if client.url in each.urls}

    async def compare(client: StagingClient) -> None:
        known, given = await client.standing(key), sum(rows_for(client).values())
        if known.batch == batch and known.rows != given:
            raise PipelineError(
                f"{key}, batch {batch}: {client.shown} has committed {known.rows} rows of it, and now it would be "
                f"{given}: the query has other partitions or other urls than before; with spread=partitions a batch "
                "must be finished with those that it was begun with"
            )

    async def commit(client: StagingClient) -> None:
        rows = rows_for(client)
        done = await client.commit(key, batch, rows)
        if done.duplicate:
            last = (await client.standing(key)).batch
            if last is not None and last > batch:
                raise PipelineError(
                    f"{key}: batch {batch} comes after batch {last} was committed on {client.shown}, and its rows "
                    "would be left out: the checkpoint was lost or is another one; set option txnAppId to a new name"
                )
            # log: Spark repeated a batch that the server has already. Nothing is written twice.
            _log.warning("%s, batch %d had been committed before on %s: it was left as it is", key, batch, client.shown)

    if options.spread is Spread.PARTITIONS:
        _on_all(options, compare)
    # Commit on all servers, even without a partition, so that each server knows the last batch.
    _on_all(options, commit)


def abort_batch(options: SinkOptions, messages: Messages, batch: int) -> None:
    """Drop the transactions of a batch's tasks. Committed rows stay.

    Errors are only logged, because the servers sweep such transactions later.
    """
    staged = [each for each in messages if isinstance(each, Staged)]
    if not staged:
        return
    key = staged[0].key
    hasty = attrs.evolve(options, patience=min(ABORT_TIMEOUT, options.patience))

    async def abort(client: StagingClient) -> None:
        txns = [each.txn for each in staged if client.url in each.urls]
        if txns:
            await client.abort(key, batch, txns)

    try:
        _on_all(hasty, abort)
    except Exception as error:
        # Spark reports why the batch failed; this error only goes to the log.
        # log: A batch failed, and so did removing its staged rows. The server deletes them later.
        _log.warning("%s, batch %d: what was staged could not be dropped, it will be swept: %s", key, batch, error)


def _on_all(options: SinkOptions, act: Callable[[StagingClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for url in options.urls:
                nursery.start_soon(act, _client(options, url))

    _run(main)


def _run(main: Callable[[], Awaitable[None]]) -> None:
    """Run the work of a task or of the driver. An invalid address is reported as an error of the option `url`."""
    try:
        run_bare(main)
    except StagingError as error:
        if isinstance(error.__cause__, ValueError):  # the transport rejected the address
            raise OptionError("url", f"{error}; for plaintext beyond loopback set option insecure=true") from error
        raise


def _client(options: SinkOptions, url: str) -> StagingClient:
    return StagingClient(
        url,
        token=options.token,
        patience=options.patience,
        channels=options.channels,
        window=options.window,
        **link_options(url, options.tls),
    )


async def _in_threads(made: Iterator[list[Block]]) -> AsyncGenerator[Block, None]:
    """Iterate over lists of blocks in threads, and yield the blocks."""
    while (blocks := await trio.to_thread.run_sync(next, made, None)) is not None:
        for block in blocks:
            yield block


# ---------------------------------------------------------------------------- blocks

VALUE: Final = "value"
KEY: Final = "key"
HEADERS: Final = "headers"
BYTES: Final = ("string", "binary")
HEADERS_KIND: Final = "array<struct<key:string,value:binary>>"
LENGTH: Final = np.dtype("<u4")


def encoding_of(columns: dict[str, str], wanted: RowEncoding) -> Encoding:
    """Choose the encoding of rows. `columns` maps names to the simple names of Spark's types.

    Raises:
        OptionError: if the wanted encoding doesn't fit the columns.
    """
    alone = len(columns) == 1 and columns.get(VALUE) in BYTES
    is_record = (
        columns.get(VALUE) in BYTES
        and columns.get(KEY, "binary") in BYTES
        and columns.get(HEADERS, HEADERS_KIND) == HEADERS_KIND
        and columns.keys() <= {VALUE, KEY, HEADERS}
    )
    if wanted is RowEncoding.RECORD or (wanted is RowEncoding.AUTO and is_record and not alone):
        if not is_record:
            told = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            raise OptionError(
                "encoding",
                f"record needs value and may have key, both strings or bytes, and headers {HEADERS_KIND}, and there "
                f"are: {told}; use json, or select",
            )
        return Encoding.RECORD
    if wanted is RowEncoding.JSON or (wanted is RowEncoding.AUTO and not alone):
        return Encoding.JSON
    if not alone:
        told = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        raise OptionError(
            "encoding",
            f"value needs one column, value, of strings or bytes, and there are: {told}; use json, or select",
        )
    return Encoding.TEXT if columns[VALUE] == "string" else Encoding.BINARY


class Blocks:
    """Makes blocks of about `size` bytes from the rows of a transaction."""

    def __init__(self, encoding: Encoding, size: int) -> None:
        self.rows: int = 0
        self._size = size
        self._encode = msgspec.json.Encoder().encode
        self._make = {Encoding.JSON: self._json, Encoding.RECORD: self._records}.get(encoding, self._values)

    def of(self, batch: pa.RecordBatch) -> list[Block]:
        """Return the blocks for the next rows. Raises `PipelineError` if a row can't be encoded."""
        return list(self._make(batch))

    def _json(self, batch: pa.RecordBatch) -> Iterator[Block]:
        rows: list[bytes] = []
        encode, size = self._encode, 0
        for row in batch.to_pylist():
            try:
                encoded = encode(row)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise PipelineError(
                    f"row {self.rows + len(rows)} of this partition cannot be written as JSON (option encoding): "
                    f"{error}"
                ) from error
            rows.append(encoded)
            size += len(encoded)
            if size >= self._size:
                yield self._counted(make_block(self.rows, rows))
                rows, size = [], 0
        if rows:
            yield self._counted(make_block(self.rows, rows))

    def _records(self, batch: pa.RecordBatch) -> Iterator[Block]:
        """Encode records as `Record.encode` does, with a few calls for all rows of a batch."""
        value, key, headers = (
            batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)
            for name in (VALUE, KEY, HEADERS)
        )
        encoded = pa.array([encode_headers(_pairs(each)) if each else b"" for each in headers.to_pylist()], pa.binary())
        value, key = value.cast(pa.binary()), key.cast(pa.binary())
        prefixes = np.zeros(batch.num_rows, [("tag", "u1"), ("key", "<u4"), ("headers", "<u4")])
        prefixes["tag"] = np.where(value.is_null(), NULL_TAG, VALUE_TAG)
        prefixes["key"] = pc.fill_null(pc.add(pc.binary_length(key), 1), 0)
        prefixes["headers"] = pc.binary_length(encoded)
        prefix = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(PREFIX.size), batch.num_rows, [None, pa.py_buffer(prefixes.tobytes())]
        )
        parts = (prefix.cast(pa.binary()), key, encoded, value, pa.scalar(b"", pa.binary()))
        yield from self._cut(pc.binary_join_element_wise(*parts, null_handling="replace", null_replacement=""))

    def _values(self, batch: pa.RecordBatch) -> Iterator[Block]:
        column: Any = batch.column(VALUE)
        if column.null_count:
            row = self.rows + column.is_null().to_pylist().index(True)
            raise PipelineError(f"row {row} of this partition is null in the column value; filter such rows out")
        yield from self._cut(column)

    def _cut(self, column: Any) -> Iterator[Block]:  # noqa: ANN401 - pyarrow's stubs have no name for it
        """Yield blocks of the elements of a column, whose bytes are copied once."""
        if not len(column):
            return
        # This gives 64-bit offsets in every case. The cast doesn't copy the bytes.
        column = column.cast(pa.large_binary())
        _, starts, data = column.buffers()
        offsets = np.frombuffer(starts, np.int64)[column.offset : column.offset + len(column) + 1]
        content = memoryview(data) if data is not None else memoryview(b"")
        lengths = np.diff(offsets).astype(LENGTH)
        first = 0
        while first < len(lengths):
            end = int(np.searchsorted(offsets, offsets[first] + self._size, "right")) - 1
            end = max(end, first + 1)
            body = lengths[first:end].tobytes() + bytes(content[offsets[first] : offsets[end]])
            yield self._counted(Block(self.rows, end - first, crc32(body), body))
            first = end

    def _counted(self, block: Block) -> Block:
        self.rows += block.rows
        return block


def _pairs(headers: Sequence[Mapping[str, Any]]) -> list[tuple[str, bytes | None]]:
    """Return the headers of a row. A name that is null becomes an empty one."""
    return [(each["key"] or "", each["value"]) for each in headers]
