"""Decoding of raw captures: by hand, as Arrow batches without Spark, or on Spark.

On Spark the rows of a connection go to one task, in order, through the same decoder.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow.dataset as ds

from muxkit.pipeline.capture.bpmux import BpmuxDecoder, EngineDecoder
from muxkit.pipeline.capture.relink import RelinkDecoder
from muxkit.pipeline.capture.schema import FRAMES_DDL, to_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

    from muxkit.pipeline.capture.decoder import Decoder, Found, Side
    from muxkit.pipeline.capture.schema import FramesRow

ROWS: Final = 10_000  # of a batch that goes out


def decoder(
    protocol: str,
    *,
    engine: bool = False,
    side: Side = "connector",
    connector_id_size: int = 2,
    listener_id_size: int = 2,
) -> Decoder:
    """Make a decoder for `bpmux` or `relink`; the last three arguments are those of the Relink endpoint.

    With `engine` (bpmux only) a real engine repeats what the recording end did and reads what it received: violations
    of the peer come with their clause, and states are reported. Such a decoder cannot be dumped.
    """

    if protocol == "bpmux":
        return EngineDecoder() if engine else BpmuxDecoder()
    if protocol == "relink":
        return RelinkDecoder(side, connector_id_size, listener_id_size)
    raise ValueError(f"no bytes of {protocol!r} can be decoded; those of bpmux and relink can")


def restore(protocol: str, dumped: bytes) -> Decoder:
    """Make a decoder that continues from a dump."""

    kinds = {"bpmux": BpmuxDecoder, "relink": RelinkDecoder}
    return msgspec.msgpack.decode(dumped, type=kinds[protocol])


def decode_batches(
    batches: Iterable[pa.RecordBatch],
    protocol: str,
    *,
    engine: bool = False,
    side: Side = "connector",
    connector_id_size: int = 2,
    listener_id_size: int = 2,
) -> Iterator[pa.RecordBatch]:
    """Decode raw rows into rows of frames; all rows of a connection must be adjacent and in order.

    Memory holds one decoder and one batch of output, however long the connections are.
    """
    rows: list[FramesRow] = []
    current: tuple[str, str] | None = None
    one: Decoder | None = None
    number = 0
    for batch in batches:
        columns = [
            batch.column(name).to_pylist()
            for name in ("capture", "connection", "direction", "segment", "offset", "data")
        ]
        times = batch.column("time").cast("int64").to_pylist()
        for micros, capture, connection, direction, segment, offset, data in zip(times, *columns, strict=True):
            if one is None or (capture, connection) != current:
                current, number = (capture, connection), 0
                one = decoder(
                    protocol,
                    engine=engine,
                    side=side,
                    connector_id_size=connector_id_size,
                    listener_id_size=listener_id_size,
                )
            for found in one.feed(direction, data, segment=segment, offset=offset):
                rows.append((micros / 1e6, capture, connection, number, *found))
                number += 1
            if len(rows) >= ROWS:
                yield to_batch("frames", rows)
                rows = []
    if rows:
        yield to_batch("frames", rows)


def read_raw(folder: str | Path) -> Iterator[pa.RecordBatch]:
    """Read the raw rows below a capture's folder, in the order that `decode_batches` needs; all are held in memory."""
    table = ds.dataset(f"{folder}/raw", format="parquet").to_table()
    yield from table.sort_by(
        [("capture", "ascending"), ("connection", "ascending"), ("number", "ascending")]
    ).to_batches()


KEYS: Final = ("capture", "connection")
COLUMNS: Final = [part.split()[0] for part in FRAMES_DDL.split(", ")]


def decode(
    raw: DataFrame,
    protocol: str,
    *,
    engine: bool = False,
    partitions: int | None = None,
    side: Side = "connector",
    connector_id_size: int = 2,
    listener_id_size: int = 2,
) -> DataFrame:
    """Decode raw captures, read from their `raw` folders with `spark.read.parquet`.

    With `engine` (bpmux only) real engines find the rules that peers broke. `partitions` is how many tasks share
    the connections; one connection is never split.
    """
    by_connection = raw.repartition(partitions, *KEYS) if partitions is not None else raw.repartition(*KEYS)
    function = partial(
        decode_batches,
        protocol=protocol,
        engine=engine,
        side=side,
        connector_id_size=connector_id_size,
        listener_id_size=listener_id_size,
    )
    return by_connection.sortWithinPartitions(*KEYS, "number").mapInArrow(function, FRAMES_DDL)


def decode_stream(
    raw: DataFrame,
    protocol: str,
    *,
    side: Side = "connector",
    connector_id_size: int = 2,
    listener_id_size: int = 2,
) -> DataFrame:
    """Decode a stream of raw captures (`spark.readStream.schema(…).parquet(…)`), without real engines.

    A frame that a micro-batch ends within waits in Spark's state for the rest. Files must arrive in the order in which
    their capture closed them; otherwise a `gap` is reported and the connection is decoded no further.
    """
    function = partial(
        _go_on,
        protocol=protocol,
        side=side,
        connector_id_size=connector_id_size,
        listener_id_size=listener_id_size,
    )
    return raw.groupBy(*KEYS).applyInPandasWithState(
        function, FRAMES_DDL, "decoder binary, number bigint", "append", "NoTimeout"
    )


def _go_on(
    key: tuple[str, str],
    frames: Iterator[pd.DataFrame],
    state: GroupState,
    *,
    protocol: str,
    side: Side,
    connector_id_size: int,
    listener_id_size: int,
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    one = decoder(protocol, side=side, connector_id_size=connector_id_size, listener_id_size=listener_id_size)
    number = 0
    if state.exists:
        dumped, number = state.get
        one = restore(protocol, bytes(dumped))
    came = pd.concat(list(frames)).sort_values("number")
    rows: list[tuple[object, ...]] = []
    for moment, direction, segment, offset, data in zip(
        came["time"], came["direction"], came["segment"], came["offset"], came["data"], strict=True
    ):
        found: Found
        for found in one.feed(direction, bytes(data), segment=int(segment), offset=int(offset)):
            rows.append((moment, *key, number, *found))
            number += 1
    state.update((one.dump(), number))
    told = pd.DataFrame(rows, columns=COLUMNS)
    for name in ("size", "credit", "id"):
        told[name] = told[name].astype("Int64")
    yield told
