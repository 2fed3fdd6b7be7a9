"""The readers that Spark uses, thin classes over the planner and the client.

They are the same on all versions of Spark but for one: what a streaming reader learns about the batch that it plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
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
from muxkit.pipeline.source.offsets import Span, cut, group
from muxkit.pipeline.source.planner import Planner
from muxkit.pipeline.source.rows import COLUMNS, Rows, read


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow types of these columns, which is what Spark makes of them on all versions."""
    return pa.schema([pa.field(field.name, COLUMNS[field.name], field.nullable) for field in schema.fields])


class Spans(datasource.InputPartition):
    """What one task reads; no two tasks of a batch share a message."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__(None)
        self.spans = spans

    def __repr__(self) -> str:
        return f"Spans({', '.join(f'{span.uuid}: {span.begin + 1}-{span.end}' for span in self.spans)})"


class _Reading:
    """Base of the readers. It is pickled for each task, without the planner and the names of all streams."""

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
        # The CRC of `verify` covers a stream from its first message on.
        if options.verify is Verify.NONE:
            spans = cut(spans, options.partition_messages, least=options.least_partitions, most=options.most_partitions)
        return [Spans(each) for each in group(spans, options.most_partitions)]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        spans = cast("Spans", partition).spans  # this reader has made it
        return read(Client(self._options), Rows(arrow_schema(self._schema)), spans, self._options.batch_rows)


class StreamReader(_Reading, datasource.DataSourceStreamReader):
    """`spark.readStream.format("muxkit")`: what is the same on all versions of Spark."""

    def initialOffset(self) -> dict[str, object]:
        return dict(self._planner.initial())

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[datasource.InputPartition]:
        if start == end:
            return []  # Spark 4.0 and 4.1 ask for this when a query is started again
        return self._partitions(run_bare(partial(self._planner.spans, start, end)))

    def commit(self, end: dict[str, object]) -> None:
        run_bare(partial(self._planner.commit, end))

    def stop(self) -> None:
        """End the planner. Spark calls this also when a query is stopped, while it handles the end of its own socket.

        After this Spark's runner reports that end to the JVM, which has closed the socket, so the report fails and the
        interpreter would print the errors with all their tracebacks into the log of the driver.
        """
        if isinstance(sys.exc_info()[1], (EOFError, ConnectionError)):
            sys.excepthook = _without_traceback


class UnadmittedStreamReader(StreamReader):
    """The reader on Spark 4.0 and 4.1, which tell a source neither where a batch starts nor the trigger of the query.

    The start is known all the same: it is the offset that this reader returned last. When a query is started again,
    Spark asks for the partitions between the last offset of its checkpoint and the same offset before it asks for the
    next one, so `partitions` notes the start for a new process.
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
) -> None:  # pragma: no cover - the last call of Spark's own process
    if issubclass(kind, ConnectionError):
        print("muxkit: the query was stopped, and its planner ends", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


class BatchReader(_Reading, datasource.DataSourceReader):
    """`spark.read.format("muxkit")`: the messages that servers hold now; nothing is acknowledged."""

    def partitions(self) -> Sequence[datasource.InputPartition]:
        spans = run_bare(self._planner.everything)
        # At least one partition: without any, Spark would call `read` once with none.
        return self._partitions(spans) or [Spans(())]
