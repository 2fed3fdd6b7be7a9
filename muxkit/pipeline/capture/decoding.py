"""How do raw captures go through Arrow? Batches of bytes come in, batches of frames go out; no Spark is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow.dataset as ds

from muxkit.pipeline.capture.decoder import decoder
from muxkit.pipeline.capture.schema import to_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from muxkit.pipeline.capture.decoder import Decoder, Side
    from muxkit.pipeline.capture.schema import FramesRow

ROWS: Final = 10_000  # of a batch that goes out


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
