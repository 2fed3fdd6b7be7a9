"""muxkit on Spark: restream sessions as a source, channels as a sink, and traffic captures.

`spark.readStream.format("muxkit")` works once the extra is installed (`pip install 'muxkit[spark]'`). Nothing has to be
registered. Staging and captures also work without a JVM.
"""

from __future__ import annotations

from muxkit._lazy import lazily

_EXTRAS = dict.fromkeys(("google", "numpy", "pandas", "pyarrow", "pyspark"), "spark")

# Spark imports this package when it looks for data sources, so that must be cheap.
with lazily(globals(), extras=_EXTRAS):
    from muxkit.pipeline.capture.analysis import Answers as Answers
    from muxkit.pipeline.capture.analysis import Raw as Raw
    from muxkit.pipeline.capture.analysis import analyse as analyse
    from muxkit.pipeline.capture.analysis import read_captures as read_captures
    from muxkit.pipeline.capture.decoding import decode as decode
    from muxkit.pipeline.capture.decoding import decode_batches as decode_batches
    from muxkit.pipeline.capture.decoding import decode_stream as decode_stream
    from muxkit.pipeline.capture.decoding import decoder as decoder
    from muxkit.pipeline.capture.files import Rotation as Rotation
    from muxkit.pipeline.capture.files import Selection as Selection
    from muxkit.pipeline.capture.recorder import Capture as Capture
    from muxkit.pipeline.capture.report import report as report
    from muxkit.pipeline.errors import CaptureError as CaptureError
    from muxkit.pipeline.errors import DataLoss as DataLoss
    from muxkit.pipeline.errors import OffsetError as OffsetError
    from muxkit.pipeline.errors import OptionError as OptionError
    from muxkit.pipeline.errors import PipelineError as PipelineError
    from muxkit.pipeline.errors import StagingError as StagingError
    from muxkit.pipeline.errors import StreamBroken as StreamBroken
    from muxkit.pipeline.errors import StreamUnavailable as StreamUnavailable
    from muxkit.pipeline.monitor import QueryLog as QueryLog
    from muxkit.pipeline.monitor import QueryMetrics as QueryMetrics
    from muxkit.pipeline.monitor import lag_table as lag_table
    from muxkit.pipeline.monitor import observed as observed
    from muxkit.pipeline.monitor import query_name as query_name
    from muxkit.pipeline.monitor import stop_query as stop_query
    from muxkit.pipeline.options import SinkOptions as SinkOptions
    from muxkit.pipeline.options import SourceOptions as SourceOptions
    from muxkit.pipeline.source.offsets import lag as lag
    from muxkit.pipeline.spark import java_home as java_home
    from muxkit.pipeline.spark import spark_session as spark_session
    from muxkit.pipeline.staging.backends import open_staging as open_staging
    from muxkit.pipeline.staging.client import StagingClient as StagingClient
    from muxkit.pipeline.staging.forward import forward as forward
    from muxkit.pipeline.staging.records import Encoding as Encoding
    from muxkit.pipeline.staging.records import Key as Key
    from muxkit.pipeline.staging.records import StagingLimits as StagingLimits
    from muxkit.pipeline.staging.records import make_block as make_block
    from muxkit.pipeline.staging.server import Claim as Claim
    from muxkit.pipeline.staging.server import StagingService as StagingService
    from muxkit.pipeline.staging.server import serve_staging as serve_staging
    from muxkit.pipeline.staging.server import tokens as tokens
    from muxkit.pipeline.staging.store import Staging as Staging
