"""Decoding of raw captures: by hand, as Arrow batches without Spark, or on Spark.

On Spark the rows of a connection go to one task, in order, through the same decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack

import msgspec
import pyarrow.dataset as ds

from muxkit.pipeline.capture.decoders import BpmuxDecoder, Decoder, EngineDecoder, RelinkDecoder, RelinkEnd
from muxkit.pipeline.capture.files import FRAMES, FRAMES_DDL, FramesRow, to_batch

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

KEYS: Final = ("capture", "connection")
ROWS: Final = 10_000  # of a batch that goes out


def decoder(protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]) -> Decoder:
    """Make a decoder for `bpmux` or `relink`; `end` is the recording end of a Relink link.

    With `engine` (bpmux only) a real engine repeats what the recording end did and reads what it received: violations
    of the peer come with their clause, and states are reported. Such a decoder cannot be dumped.
    """
    if protocol == "bpmux":
        return EngineDecoder() if engine else BpmuxDecoder()
    if protocol == "relink":
        return RelinkDecoder(**end)
    raise ValueError(f"no bytes of {protocol!r} can be decoded; those of bpmux and relink can")


def restore(protocol: str, dumped: bytes) -> Decoder:
    """Make a decoder that continues from a dump."""
    kinds: dict[str, type[Decoder]] = {"bpmux": BpmuxDecoder, "relink": RelinkDecoder}
    return msgspec.msgpack.decode(dumped, type=kinds[protocol])


def decode_batches(
    batches: Iterable[pa.RecordBatch], protocol: str, *, engine: bool = False, **end: Unpack[RelinkEnd]
) -> Iterator[pa.RecordBatch]:
    """Decode raw rows into rows of frames; all rows of a connection must be adjacent and in order.

    Memory holds one decoder and one batch of output, however long the connections are.
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


def read_raw(folder: str | Path) -> Iterator[pa.RecordBatch]:
    """Read the raw rows below a capture's folder, in the order that `decode_batches` needs; all are held in memory."""
    table = ds.dataset(f"{folder}/raw", format="parquet").to_table()
    yield from table.sort_by([(name, "ascending") for name in (*KEYS, "number")]).to_batches()


def decode(
    raw: DataFrame,
    protocol: str,
    *,
    engine: bool = False,
    partitions: int | None = None,
    **end: Unpack[RelinkEnd],
) -> DataFrame:
    """Decode raw captures, read from their `raw` folders with `spark.read.parquet`.

    With `engine` (bpmux only) real engines find the rules that peers broke. `partitions` is how many tasks share
    the connections; one connection is never split.
    """
    by_connection = raw.repartition(partitions, *KEYS) if partitions is not None else raw.repartition(*KEYS)
    function = partial(decode_batches, protocol=protocol, engine=engine, **end)
    return by_connection.sortWithinPartitions(*KEYS, "number").mapInArrow(function, FRAMES_DDL)


def decode_stream(raw: DataFrame, protocol: str, **end: Unpack[RelinkEnd]) -> DataFrame:
    """Decode a stream of raw captures (`spark.readStream.schema(…).parquet(…)`), without real engines.

    A frame that a micro-batch ends within waits in Spark's state for the rest. Files must arrive in the order in which
    their capture closed them; otherwise a `gap` is reported and the connection is decoded no further.
    """
    function = partial(_go_on, protocol=protocol, **end)
    return raw.groupBy(*KEYS).applyInPandasWithState(
        function, FRAMES_DDL, "decoder binary, number bigint", "append", "NoTimeout"
    )


def _go_on(
    key: tuple[str, str],
    frames: Iterator[pd.DataFrame],
    state: GroupState,
    *,
    protocol: str,
    **end: Unpack[RelinkEnd],
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
