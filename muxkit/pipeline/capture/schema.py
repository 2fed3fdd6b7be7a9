"""The columns of captures, for Arrow and for Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muxkit._observer import Direction

Kind = Literal["frames", "raw"]
"""The kind of a file's rows, and the name of its folder."""

FramesRow = tuple[
    float,  # time, s since 1970
    str,  # capture
    str,  # connection
    int,  # number
    str,  # event
    "Direction | None",
    str | None,  # channel
    str | None,  # kind
    int | None,  # size
    int | None,  # credit
    int | None,  # id
    str | None,  # rule
    str | None,  # text
]
RawRow = tuple[float, str, str, int, "Direction", int, int, bytes]

MOMENT: Final = pa.timestamp("us", tz="UTC")

FRAMES: Final = pa.schema(
    [
        ("time", MOMENT),
        ("capture", pa.string()),  # which process recorded it
        ("connection", pa.string()),
        ("number", pa.int64()),  # of the row among all of its connection, raw ones included
        ("event", pa.string()),  # frame, credit, state, timer, error, lost, dropped; decoded: gap, unverified
        ("direction", pa.string()),
        ("channel", pa.string()),  # as the protocol names it
        ("kind", pa.string()),  # of the frame; the state, the timer, the class of the error
        ("size", pa.int64()),  # bytes of payload; of `dropped`, rows; of `gap`, bytes that are missing
        ("credit", pa.int64()),  # bytes that were granted
        ("id", pa.int64()),  # a message's number, or the one an acknowledgement names; where a violation begins
        ("rule", pa.string()),  # the clause that was broken
        ("text", pa.string()),
    ]
)

RAW: Final = pa.schema(
    [
        ("time", MOMENT),
        ("capture", pa.string()),
        ("connection", pa.string()),
        ("number", pa.int64()),
        ("direction", pa.string()),
        ("segment", pa.int64()),  # counts the transports that a link had, from 0
        ("offset", pa.int64()),  # of the first byte, in this direction of this segment
        ("data", pa.binary()),
    ]
)

SCHEMAS: Final = {"frames": FRAMES, "raw": RAW}

FRAMES_DDL: Final = (
    "time timestamp, capture string, connection string, number bigint, event string, direction string, "
    "channel string, kind string, size bigint, credit bigint, id bigint, rule string, text string"
)


def to_batch(kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> pa.RecordBatch:
    """Turn rows into a record batch."""
    schema = SCHEMAS[kind]
    columns: list[Sequence[object]] = [*zip(*rows, strict=True)] or [[] for _ in schema]
    columns[0] = [round(row[0] * 1e6) for row in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
