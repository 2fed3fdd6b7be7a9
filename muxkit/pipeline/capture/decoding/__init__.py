"""Decoding of raw captures: directly with a decoder, as Arrow batches without Spark, or on Spark.

A decoder gets the bytes that one connection sent and received, in that order. It returns the rows that an observer
would have recorded, with more information: the numbers of messages, and those that acknowledgements name.
"""

from muxkit.pipeline.capture.decoding.aqueduct import AqueductDecoder
from muxkit.pipeline.capture.decoding.bpmux import BpmuxDecoder, EngineDecoder
from muxkit.pipeline.capture.decoding.captures import (
    KEYS,
    decode,
    decode_batches,
    decode_stream,
    decoder,
    read_raw,
    restore,
)
from muxkit.pipeline.capture.decoding.decoder import Decoder
from muxkit.pipeline.capture.decoding.e3x import E3xDecoder
from muxkit.pipeline.capture.decoding.relink import RelinkDecoder, RelinkEnd
from muxkit.pipeline.capture.decoding.yamux import YamuxDecoder

__all__ = [
    "KEYS",
    "AqueductDecoder",
    "BpmuxDecoder",
    "Decoder",
    "E3xDecoder",
    "EngineDecoder",
    "RelinkDecoder",
    "RelinkEnd",
    "YamuxDecoder",
    "decode",
    "decode_batches",
    "decode_stream",
    "decoder",
    "read_raw",
    "restore",
]
