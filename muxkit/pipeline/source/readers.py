"""The readers that Spark uses: thin classes over the planner and the client.

They are the same on all versions of Spark, except for the information that a streaming reader gets about its batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import cast

import attrs
import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from muxkit.pipeline.concurrency import run_bare
from muxkit.pipeline.options import SourceOptions, Verify
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.filters import narrow
from muxkit.pipeline.source.offsets import EVERYTHING, Span, cut, group
from muxkit.pipeline.source.planner import Planner
from muxkit.pipeline.source.rows import COLUMNS, Rows, read


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow types of these columns, which are the same on all versions of Spark."""
    return pa.schema([pa.field(field.name, COLUMNS[field.name], field.nullable) for field in schema.fields])


class Spans(datasource.InputPartition):
    """The ranges that one task reads. No two tasks of a batch share a message."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__(None)
        self.spans = spans

    def __repr__(self) -> str:
        return f"Spans({', '.join(f'{span.uuid}: {span.begin + 1}-{span.end}' for span in self.spans)})"


class _Reading:
    """Base class of the readers. It is pickled for each task, without the planner and the list of streams."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._options)

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__ | {"_options": attrs.evolve(self._options, streams=())}
        state.pop("_planner", None)
        return state

    def _partitions(self, spans: Sequence[Span]) -> Sequence[Spans]:
        options = self._options
        # The CRC of `verify` covers a stream from its first message on, so streams aren't cut.
        if options.verify is Verify.NONE:
            spans = cut(spans, options.partition_messages, least=options.least_partitions, most=options.most_partitions)
        return [Spans(each) for each in group(spans, options.most_partitions)]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        spans = cast("Spans", partition).spans  # made by `_partitions`
        return read(Client(self._options), Rows(arrow_schema(self._schema)), spans, self._options.batch_rows)


class StreamReader(_Reading, datasource.DataSourceStreamReader):
    """`spark.readStream.format("muxkit")`: the part that is the same on all versions of Spark."""

    def initialOffset(self) -> dict[str, object]:
        return dict(self._planner.initial())

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[datasource.InputPartition]:
        if start == end:
            return []  # Spark 4.0 and 4.1 request this when a query is restarted
        return self._partitions(run_bare(partial(self._planner.spans, start, end)))

    def commit(self, end: dict[str, object]) -> None:
        run_bare(partial(self._planner.commit, end))

    def stop(self) -> None:
        """End the planner. If Spark stops the query because its own socket was closed, silence the errors that follow.

        Spark's runner then reports the closed socket to the JVM over that socket. The report fails, and Python would
        print all tracebacks to the log of the driver.
        """
        if isinstance(sys.exc_info()[1], (EOFError, ConnectionError)):
            sys.excepthook = _without_traceback


class UnadmittedStreamReader(StreamReader):
    """The reader on Spark 4.0 and 4.1, which tell a source neither the start of a batch nor the query's trigger.

    The start is known nevertheless, because it is the offset that this reader returned last. When a query is restarted,
    Spark first requests the partitions of an empty batch at the last offset of the checkpoint. From that call,
    `partitions` learns the start in a new process.
    """

    _start: Mapping[str, object] | None = None

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state.pop("_start", None)
        return state

    def latestOffset(self) -> dict[str, object]:  # type: ignore[override]
        start = self._planner.initial() if self._start is None else self._start
        self._start = run_bare(partial(self._planner.latest, start))
        return dict(self._start)

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[datasource.InputPartition]:
        self._start = end
        return super().partitions(start, end)


def _without_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:  # pragma: no cover - called by Spark's process at its end
    if issubclass(kind, ConnectionError):
        print("muxkit: the query was stopped, and its planner ends", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


class BatchReader(_Reading, datasource.DataSourceReader):
    """`spark.read.format("muxkit")`: reads the messages that servers hold now. Nothing is acknowledged."""

    _wanted = EVERYTHING

    def partitions(self) -> Sequence[datasource.InputPartition]:
        spans = run_bare(partial(self._planner.everything, self._wanted))
        # Return at least one partition, because without any, Spark would call `read` with None.
        return self._partitions(spans) or [Spans(())]


class FilteringBatchReader(BatchReader):
    """A `BatchReader` that reads only the streams and ids that Spark's filters let pass.

    It is a class of its own, because Spark rejects a reader with `pushFilters` unless
    `spark.sql.python.filterPushdown.enabled` is set. Its error names that setting.
    """

    def pushFilters(self, filters: list[datasource.Filter]) -> Iterable[datasource.Filter]:
        """Note which streams and ids are needed, and return the filters that Spark has to evaluate itself."""
        self._wanted, left = narrow(filters)
        return left
