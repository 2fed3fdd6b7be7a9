"""muxkit on Spark: streams of restream as a source, muxed channels as a sink, captures and simulations at any size.

`spark.readStream.format("muxkit")` works once the extra is installed (`pip install 'muxkit[spark]'`); nothing has to be
registered. What does not need a JVM works without one: the planner, the client and the bridge know no Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._lazy import lazily
from muxkit.pipeline._errors import DataLoss as DataLoss
from muxkit.pipeline._errors import OffsetError as OffsetError
from muxkit.pipeline._errors import OptionError as OptionError
from muxkit.pipeline._errors import PipelineError as PipelineError
from muxkit.pipeline._errors import StreamBroken as StreamBroken
from muxkit.pipeline._errors import StreamUnavailable as StreamUnavailable

if TYPE_CHECKING:
    from muxkit.pipeline._analytics import Answers as Answers
    from muxkit.pipeline._analytics import Raw as Raw
    from muxkit.pipeline._analytics import analyse as analyse
    from muxkit.pipeline._capture import Capture as Capture
    from muxkit.pipeline._capture import CaptureError as CaptureError
    from muxkit.pipeline._capture_files import Rotation as Rotation
    from muxkit.pipeline._decode import decoder as decoder
    from muxkit.pipeline._decode_arrow import decode_batches as decode_batches
    from muxkit.pipeline._decode_spark import decode as decode
    from muxkit.pipeline._decode_spark import decode_stream as decode_stream
    from muxkit.pipeline._fleet import Outcome as Outcome
    from muxkit.pipeline._fleet import run_fleet as run_fleet
    from muxkit.pipeline._fleet import simulate as simulate
    from muxkit.pipeline._fleet import simulate_all as simulate_all
    from muxkit.pipeline._lag import lag as lag
    from muxkit.pipeline._options import SourceOptions as SourceOptions
    from muxkit.pipeline._report import report as report
    from muxkit.pipeline._session import java_home as java_home
    from muxkit.pipeline._session import spark_session as spark_session
    from muxkit.pipeline._sink_options import SinkOptions as SinkOptions
    from muxkit.pipeline._staging_client import StagingClient as StagingClient
    from muxkit.pipeline._staging_forward import forward as forward
    from muxkit.pipeline._staging_messages import make_block as make_block
    from muxkit.pipeline._staging_server import Claim as Claim
    from muxkit.pipeline._staging_server import StagingService as StagingService
    from muxkit.pipeline._staging_server import serve_staging as serve_staging
    from muxkit.pipeline._staging_server import tokens as tokens
    from muxkit.pipeline.staging.store import Encoding as Encoding
    from muxkit.pipeline.staging.store import Key as Key
    from muxkit.pipeline.staging.store import Staging as Staging
    from muxkit.pipeline.staging.store import StagingLimits as StagingLimits
    from muxkit.pipeline.staging.store import open_staging as open_staging
    from muxkit.pipeline.staging.store.errors import StagingError as StagingError

# Importing this must be cheap: Spark does so whenever it looks for data sources. name -> module here.
_LAZY: dict[str, str] = {
    # --- the source, and sessions of Spark
    "SourceOptions": "_options",
    "java_home": "_session",
    "lag": "_lag",
    "spark_session": "_session",
    # --- the sink and its server
    "Claim": "_staging_server",
    "Encoding": "staging.store",
    "Key": "staging.store",
    "SinkOptions": "_sink_options",
    "Staging": "staging.store",
    "StagingClient": "_staging_client",
    "StagingError": "staging.store.errors",
    "StagingLimits": "staging.store",
    "StagingService": "_staging_server",
    "forward": "_staging_forward",
    "make_block": "_staging_messages",
    "open_staging": "staging.store",
    "serve_staging": "_staging_server",
    "tokens": "_staging_server",
    # --- captures, analysis, the report
    "Answers": "_analytics",
    "Capture": "_capture",
    "CaptureError": "_capture",
    "Raw": "_analytics",
    "Rotation": "_capture_files",
    "analyse": "_analytics",
    "decode": "_decode_spark",
    "decode_batches": "_decode_arrow",
    "decode_stream": "_decode_spark",
    "decoder": "_decode",
    "report": "_report",
    # --- the fleet
    "Outcome": "_fleet",
    "run_fleet": "_fleet",
    "simulate": "_fleet",
    "simulate_all": "_fleet",
}

__getattr__, __dir__ = lazily(globals(), _LAZY)
