"""How do raw captures go through Arrow? Batches of bytes come in, batches of frames go out; no Spark is needed."""

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
    """A decoder for `bpmux` or `relink`; the last three arguments are those of the Relink endpoint.

    With `engine` (bpmux only) what came is given to a real engine, which was told to do what the recording end did:
    what the peer must not do is found with its clause, and states are told. Such a decoder cannot be dumped.
    """

    if protocol == "bpmux":
        return EngineDecoder() if engine else BpmuxDecoder()
    if protocol == "relink":
        return RelinkDecoder(side, connector_id_size, listener_id_size)
    raise ValueError(f"no bytes of {protocol!r} can be decoded; those of bpmux and relink can")


def restore(protocol: str, dumped: bytes) -> Decoder:
    """A decoder that goes on where the one that was dumped had come to."""

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
    """Raw rows, all of a connection one after the other and in order, as rows of frames.

    Memory is one decoder, and what goes out at once: a connection may be as long as it likes.
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
    """The raw rows below a capture's folder, in the order that `decode_batches` wants. All of them are in memory."""
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
    """The frames in raw captures, read from their `raw` folders with `spark.read.parquet`.

    With `engine` (bpmux only) real engines look for what the peers must not do. `partitions` is how many tasks share
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
    """The same for a stream of raw captures (`spark.readStream.schema(…).parquet(…)`), without real engines.

    A frame that is cut by the end of a micro-batch waits in Spark's state for the rest of it. A file must not come
    before those that its capture closed earlier: a `gap` is told, and its connection is decoded no further.
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
