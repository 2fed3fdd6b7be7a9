"""The two writers that Spark uses for `format("muxkit")`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from muxkit.pipeline.errors import OptionError, PipelineError
from muxkit.pipeline.options import SinkOptions
from muxkit.pipeline.sink.work import Staged, Target, abort_batch, commit_batch, encoding_of, write_partition
from muxkit.pipeline.staging.records import Encoding

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

BATCH = "streaming.sql.batchId"  # the local properties in which Spark tells its tasks
QUERY = "sql.streaming.queryId"


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task tells the driver."""

    staged: Staged | None


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """For a streaming query; `options` are those that Spark was given."""
    if overwrite:
        raise OptionError("outputMode", "only append: what was committed to a stream is not taken back")
    parsed = SinkOptions.parse(options, streaming=True)
    return _StreamWriter(parsed, encoding_of(_columns(schema), parsed.encoding))


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """For a batch write; `options` are those that Spark was given."""
    if overwrite:
        raise OptionError("mode", "only append: what was committed to a stream is not taken back")
    parsed = SinkOptions.parse(options, streaming=False)
    return _BatchWriter(parsed, encoding_of(_columns(schema), parsed.encoding))


class _StreamWriter(DataSourceStreamArrowWriter):
    """Made anew in each process: only messages get from one to the other."""

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
        return StagedMessage(write_partition(self._options, target, _task(context), self._encoding, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        commit_batch(self._options, _staged(messages), batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        abort_batch(self._options, _staged(messages), batchId)


class _BatchWriter(DataSourceArrowWriter):
    """Made once, and pickled for the tasks and the process that commits."""

    def __init__(self, options: SinkOptions, encoding: Encoding) -> None:
        self._options = options
        self._encoding = encoding
        # An application with this batch only. Without option txnId its name is random, so it cannot be written again.
        self._target = Target(app=options.txn or f"run-{uuid.uuid4()}", batch=0, once=options.txn is None)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return StagedMessage(write_partition(self._options, self._target, _task(_context()), self._encoding, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        commit_batch(self._options, _staged(messages), self._target.batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abort_batch(self._options, _staged(messages), self._target.batch)


def _columns(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise PipelineError("this code does not run in a Spark task")
    return context


def _task(context: TaskContext) -> str:
    return f"{context.partitionId()}-{context.attemptNumber()}"


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged | None]:
    # They are those that `write` gave; None for a task that failed, as for one without rows.
    return [None if message is None else cast("StagedMessage", message).staged for message in messages]
