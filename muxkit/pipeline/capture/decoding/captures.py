"""Decoding of whole captures, as Arrow batches without Spark, or on Spark, where each connection stays in one task.

The result has the same columns as the `frames` of a capture, so the analysis and the report accept both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack

import msgspec
import pyarrow as pa

from muxkit.pipeline.capture.database import database
from muxkit.pipeline.capture.decoding.aqueduct import AqueductDecoder
from muxkit.pipeline.capture.decoding.bpmux import BpmuxDecoder, EngineDecoder
from muxkit.pipeline.capture.decoding.decoder import Decoder
from muxkit.pipeline.capture.decoding.e3x import E3xDecoder
from muxkit.pipeline.capture.decoding.relink import RelinkDecoder, RelinkEnd
from muxkit.pipeline.capture.decoding.yamux import YamuxDecoder
from muxkit.pipeline.capture.files import FRAMES, FRAMES_DDL, FramesRow, Selection, to_batch

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

KEYS: Final = ("capture", "connection")
ROWS: Final = 10_000  # of a batch that goes out
DECODERS: Final[dict[str, type[Decoder]]] = {
    "aqueduct": AqueductDecoder,
    "bpmux": BpmuxDecoder,
    "e3x": E3xDecoder,
    "relink": RelinkDecoder,
    "yamux": YamuxDecoder,
}


def decoder(protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]) -> Decoder:
    """Return a decoder for a protocol.

    Args:
        protocol: `aqueduct`, `bpmux`, `e3x`, `relink` or `yamux`.
        engine: decode with a real engine (bpmux only). It repeats the actions of the recording side and reads the
            received bytes. The rows then include states, and violations of the peer with their clause. Such a decoder
            can't be dumped.
        end: for Relink, which end of the link recorded, as in `RelinkEnd`.

    Raises:
        ValueError: if the protocol can't be decoded, or not with an engine.
    """
    if engine and protocol != "bpmux":
        raise ValueError(f"engine=True goes with 'bpmux', not with {protocol!r}")
    if engine:
        return EngineDecoder()
    if protocol == "relink":
        return RelinkDecoder(**end)
    if protocol in DECODERS:
        return DECODERS[protocol]()
    raise ValueError(f"no bytes of {protocol!r} can be decoded; those of {', '.join(sorted(DECODERS))} can")


def restore(protocol: str, dumped: bytes) -> Decoder:
    """Return a decoder that continues from a dump."""
    return msgspec.msgpack.decode(dumped, type=DECODERS[protocol])


def decode_batches(
    batches: Iterable[pa.RecordBatch], protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]
) -> Iterator[pa.RecordBatch]:
    """Decode raw rows into rows of frames.

    Memory holds one decoder and one batch of output, no matter how long the connections are.

    Args:
        batches: the raw rows. The rows of a connection must be adjacent and in order, as `read_raw` returns them.
        protocol: as in `decoder`.
        engine: as in `decoder`.
        end: as in `decoder`.
    """
    rows: list[FramesRow] = []
    current: tuple[str, str] | None = None
    one: Decoder | None = None
    number = 0
    for batch in batches:
        names = ("capture", "connection", "direction", "segment", "offset", "data")
        columns = [batch.column(name).to_pylist() for name in names]
        times = batch.column("time").cast("int64").to_pylist()
        for micros, capture, connection, direction, segment, offset, data in zip(times, *columns, strict=True):
            if one is None or (capture, connection) != current:
                current, number = (capture, connection), 0
                one = decoder(protocol, engine=engine, **end)
            for found in one.feed(direction, data, segment=segment, offset=offset):
                rows.append((micros / 1e6, capture, connection, number, *found))
                number += 1
            if len(rows) >= ROWS:
                yield to_batch("frames", rows)
                rows = []
    if rows:
        yield to_batch("frames", rows)


def read_raw(folder: str | Path, selection: Selection | None = None) -> Iterator[pa.RecordBatch]:
    """Read the raw rows below the directory of a capture, in the order that `decode_batches` needs.

    DuckDB sorts them, on the disk if they don't fit into memory.
    """
    wanted = selection or Selection()
    with database() as connection:
        connection.register("found", wanted.open(folder).rows("raw", wanted))
        ordered = connection.sql("SELECT * FROM found ORDER BY capture, connection, number")
        yield from ordered.to_arrow_reader(ROWS)


def decode(
    raw: DataFrame, protocol: str, *, engine: bool = False, partitions: int | None = None, **end: Unpack[RelinkEnd]
) -> DataFrame:
    """Decode raw captures on Spark.

    Args:
        raw: the raw rows, read from the `raw` directories with `read_captures` or `spark.read.parquet`.
        protocol: as in `decoder`.
        engine: as in `decoder`.
        partitions: how many tasks share the connections. A connection is never split.
        end: as in `decoder`.
    """
    by_connection = raw.repartition(partitions, *KEYS) if partitions is not None else raw.repartition(*KEYS)
    function = partial(decode_batches, protocol=protocol, engine=engine, **end)
    return by_connection.sortWithinPartitions(*KEYS, "number").mapInArrow(function, FRAMES_DDL)


def decode_stream(raw: DataFrame, protocol: str, **end: Unpack[RelinkEnd]) -> DataFrame:
    """Decode a stream of raw captures (`spark.readStream.schema(…).parquet(…)`). This doesn't support engines.

    If a micro-batch ends inside a frame, the beginning of the frame waits in Spark's state. Files must arrive in the
    order in which their capture closed them. Otherwise a `gap` is reported, and the connection isn't decoded any
    further.
    """
    function = partial(_go_on, protocol=protocol, **end)
    return raw.groupBy(*KEYS).applyInPandasWithState(
        function, FRAMES_DDL, "decoder binary, number bigint", "append", "NoTimeout"
    )


def _go_on(
    key: tuple[str, str], frames: Iterator[pd.DataFrame], state: GroupState, *, protocol: str, **end: Unpack[RelinkEnd]
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    one = decoder(protocol, **end)
    number = 0
    if state.exists:
        dumped, number = state.get
        one = restore(protocol, bytes(dumped))
    came = pd.concat(list(frames)).sort_values("number")
    rows: list[tuple[object, ...]] = []
    columns = (came[name] for name in ("time", "direction", "segment", "offset", "data"))
    for moment, direction, segment, offset, data in zip(*columns, strict=True):
        for found in one.feed(direction, bytes(data), segment=int(segment), offset=int(offset)):
            rows.append((moment, *key, number, *found))
            number += 1
    state.update((one.dump(), number))
    told = pd.DataFrame(rows, columns=FRAMES.names)
    for name in ("size", "credit", "id"):
        told[name] = told[name].astype("Int64")
    yield told
