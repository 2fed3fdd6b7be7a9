"""How is decoding spread over a cluster? By connection: its rows go to one task, in order, through the same decoder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from muxkit.pipeline.capture.decoder import decoder, restore
from muxkit.pipeline.capture.decoding import decode_batches
from muxkit.pipeline.capture.schema import FRAMES_DDL

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

    from muxkit.pipeline.capture.decoder import Found, Side

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
