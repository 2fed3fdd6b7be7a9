"""The data source for `format("muxkit")`. Spark finds it because it searches packages `pyspark_*` for `DefaultSource`.

Spark imports this package whenever it looks for any data source, so it imports muxkit only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import DataSource
except ModuleNotFoundError:
    import pyspark

    from muxkit.pipeline.spark import check_version

    check_version(pyspark.__version__)
    raise

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The data source `format("muxkit")`: it reads sessions of restream, and writes to channels of muxkit."""

    @classmethod
    def name(cls) -> str:
        return "muxkit"

    def schema(self) -> str:
        from muxkit.pipeline.source.spark import schema

        return schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from muxkit.pipeline.source.spark import batch_reader

        return batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from muxkit.pipeline.source.spark import stream_reader

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from muxkit.pipeline.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from muxkit.pipeline.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
