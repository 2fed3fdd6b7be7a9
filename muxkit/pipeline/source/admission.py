"""The reader of a streaming query on Spark 4.2 and later, which gives a source the start of a batch and a limit for it.

`muxkit.pipeline.source.spark` imports this module only on such a Spark, because older ones lack the classes.
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
        # Spark has one kind of limit at a time, so the planner applies all options; this only says that they apply.
        return ReadMaxRows(self._options.most_messages or MOST_ID)

    def prepareForTriggerAvailableNow(self) -> None:
        run_bare(self._planner.prepare_available_now)

    def latestOffset(self, start: dict[str, object], limit: ReadLimit) -> dict[str, object]:
        return dict(run_bare(partial(self._planner.latest, start, limited=not isinstance(limit, ReadAllAvailable))))

    def reportLatestOffset(self) -> dict[str, object] | None:
        return self._planner.report()
