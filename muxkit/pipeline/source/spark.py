"""Makes the readers of `format("muxkit")`: checks options and columns, and chooses the class for this Spark."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyspark import __version__ as SPARK_VERSION
from pyspark.sql.types import StructType

from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options import SourceOptions
from muxkit.pipeline.source.readers import BatchReader, FilteringBatchReader, StreamReader, UnadmittedStreamReader
from muxkit.pipeline.source.rows import KINDS, SCHEMA
from muxkit.pipeline.spark import ADMISSION_SPARK, PUSHDOWN_SPARK, version_numbers

_log = logging.getLogger("muxkit")


def schema(options: Mapping[str, str]) -> str:
    """Return the columns as DDL. This also checks the options before anything runs."""
    SourceOptions.parse(options)
    return SCHEMA


def stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    """Return the reader of a streaming query. Raises `OptionError` for an invalid option or column."""
    parsed = SourceOptions.parse(options)
    if parsed.ending is not None:
        raise OptionError("endingOffsets", "it is for batch queries; a streaming query ends with its trigger")
    if version_numbers(SPARK_VERSION) < ADMISSION_SPARK:
        options_of_limits = (parsed.most_messages, parsed.most_bytes, parsed.least_messages)
        if options_of_limits != (None, None, None):
            # log: Spark 4.0 and 4.1 don't ask a source again in a query with `availableNow`. Start such a query again
            # until it finds nothing, or omit `maxMessagesPerTrigger` and similar limits.
            _log.warning(
                "Spark %s has no admission control for sources in Python: with trigger availableNow a limit ends the "
                "query after one batch; use another trigger, or Spark %s",
                SPARK_VERSION,
                ".".join(map(str, ADMISSION_SPARK)),
            )
    return reader_class()(parsed, checked(schema))


def reader_class() -> type[StreamReader]:
    """Return the class of streaming readers for the installed version of Spark."""
    if version_numbers(SPARK_VERSION) < ADMISSION_SPARK:
        return UnadmittedStreamReader
    from muxkit.pipeline.source.admission import AdmittedStreamReader  # its base classes don't exist in older versions

    return AdmittedStreamReader


def batch_reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """Return the reader of a batch query. Raises `OptionError` for an invalid option or column."""
    parsed = SourceOptions.parse(options)
    if not parsed.pushes_filters:
        return BatchReader(parsed, checked(schema))
    if version_numbers(SPARK_VERSION) < PUSHDOWN_SPARK:
        # log: Spark 4.0 doesn't pass filters to a source, so the option `filterPushdown` has no effect.
        _log.warning("Spark %s passes no filters to sources in Python: filterPushdown has no effect", SPARK_VERSION)
    return FilteringBatchReader(parsed, checked(schema))


def checked(schema: StructType) -> StructType:
    """Return the schema if the source can fill it. Raises `OptionError` for an unknown column or another type."""
    for field in schema.fields:
        kind = KINDS.get(field.name)
        if kind is None:
            raise OptionError("schema", f"there is no column {field.name!r}; there are {', '.join(KINDS)}")
        if field.dataType.simpleString() != kind:
            raise OptionError("schema", f"column {field.name} is a {kind}, not a {field.dataType.simpleString()}")
    return schema
