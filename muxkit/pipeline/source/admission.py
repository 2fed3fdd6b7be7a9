"""The streaming reader for Spark 4.2 and later, which tells a source the start and the limit of a batch.

`muxkit.pipeline.source.spark` imports this module only with such a Spark, because older versions lack its base classes.
"""

from __future__ import annotations

from functools import partial

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from muxkit.pipeline.concurrency import run_bare
from muxkit.pipeline.options import MOST_ID
from muxkit.pipeline.source.readers import StreamReader


class AdmittedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("muxkit")` with admission control."""

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark supports one kind of limit at a time. So the planner applies all options, and this limit enables them.
        return ReadMaxRows(self._options.most_messages or MOST_ID)

    def prepareForTriggerAvailableNow(self) -> None:
        run_bare(self._planner.prepare_available_now)

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:
        return dict(run_bare(partial(self._planner.latest, start, limited=not isinstance(limit, ReadAllAvailable))))

    def reportLatestOffset(self) -> dict[str, object] | None:
        return self._planner.report()
