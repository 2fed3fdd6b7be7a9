"""The readers that Spark uses, thin classes over the planner and the client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import cast

import attrs
import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from muxkit.pipeline.concurrency import run_bare
from muxkit.pipeline.options import MOST_ID, SourceOptions
from muxkit.pipeline.source.client import Client
from muxkit.pipeline.source.offsets import Span, group
from muxkit.pipeline.source.planner import Planner
from muxkit.pipeline.source.rows import Rows, read, schema_of


def schema(options: Mapping[str, str]) -> str:
    """Return the columns as DDL. It checks the options, before anything runs."""
    return schema_of(SourceOptions.parse(options).json_schema)


def stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    return StreamReader(SourceOptions.parse(options), schema)


def batch_reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    parsed = SourceOptions.parse(options)
    # Spark takes no reader that could be given filters while its own setting for that is off.
    return FilteredReader(parsed, schema) if parsed.filter_pushdown else BatchReader(parsed, schema)


class Spans(datasource.InputPartition):
    """What one task reads; no two tasks share a stream."""

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
        return [Spans(each) for each in group(spans, self._options.most_partitions)]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        spans = cast("Spans", partition).spans  # this reader has made it
        rows = Rows(to_arrow_schema(self._schema, timezone="UTC"))
        return read(Client(self._options), rows, spans, self._options.batch_rows)


class StreamReader(_Reading, datasource.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("muxkit")`."""

    def initialOffset(self) -> dict[str, object]:
        return dict(self._planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark has one kind of limit at a time, so the planner applies all options; this only says that they apply.
        return ReadMaxRows(self._options.most_messages or MOST_ID)

    def prepareForTriggerAvailableNow(self) -> None:
        run_bare(self._planner.prepare_available_now)

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:
        return dict(run_bare(partial(self._planner.latest, start, limited=not isinstance(limit, ReadAllAvailable))))

    def reportLatestOffset(self) -> dict[str, object] | None:
        return self._planner.report()

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[datasource.InputPartition]:
        return self._partitions(run_bare(partial(self._planner.spans, start, end)))

    def commit(self, end: dict[str, object]) -> None:
        run_bare(partial(self._planner.commit, end))


class BatchReader(_Reading, datasource.DataSourceReader):
    """`spark.read.format("muxkit")`: the messages that servers hold now; nothing is acknowledged."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._bounds = Bounds()

    def partitions(self) -> Sequence[datasource.InputPartition]:
        spans = run_bare(partial(self._planner.everything, self._bounds.streams))
        # At least one partition: without any, Spark would call `read` once with none.
        return self._partitions(self._bounds.narrow(spans)) or [Spans(())]


class FilteredReader(BatchReader):
    """A batch reader that takes filters, for option `filterPushdown`."""

    def pushFilters(self, filters: list[datasource.Filter]) -> Iterable[datasource.Filter]:
        self._bounds = Bounds()  # a data frame may be used again with other filters
        return [each for each in filters if not self._bounds.cover(each)]


@attrs.define
class Bounds:
    """What filters allow: these streams (None: all), and ids above `above` up to `upto`."""

    streams: set[str] | None = None
    above: int = 0
    upto: int = MOST_ID

    def narrow(self, spans: Iterable[Span]) -> list[Span]:
        """Cut ranges to these bounds."""
        narrowed = []
        for span in spans:
            begin, end = max(span.begin, self.above), min(span.end, self.upto)
            if begin < end and (self.streams is None or span.uuid in self.streams):
                narrowed.append(Span(span.uuid, span.server, begin, end))
        return narrowed

    def cover(self, each: datasource.Filter) -> bool:
        """Narrow the bounds by a filter on `stream` or `id`; return False for one that is left to Spark."""
        match each:
            case datasource.EqualTo(("stream",), str() as value):
                self._only({value})
            case datasource.In(("stream",), values):
                self._only({value for value in values if isinstance(value, str)})
            case datasource.EqualTo(("id",), int() as value):
                self._between(value - 1, value)
            case datasource.GreaterThan(("id",), int() as value):
                self._between(value, MOST_ID)
            case datasource.GreaterThanOrEqual(("id",), int() as value):
                self._between(value - 1, MOST_ID)
            case datasource.LessThan(("id",), int() as value):
                self._between(0, value - 1)
            case datasource.LessThanOrEqual(("id",), int() as value):
                self._between(0, value)
            case datasource.IsNotNull(("stream",) | ("id",) | ("value",)):
                pass
            case _:
                return False
        return True

    def _only(self, streams: set[str]) -> None:
        self.streams = streams if self.streams is None else self.streams & streams

    def _between(self, above: int, upto: int) -> None:
        self.above, self.upto = max(self.above, above), min(self.upto, upto)
