"""The columns of captures, and their Parquet files: a thread writes them, closes them in time, and deletes old ones."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from muxkit._limits import must_be
from muxkit._observer import Direction

Kind = Literal["frames", "raw"]
"""The kind of a file's rows, and the name of its folder."""

Found = tuple[str, Direction | None, str | None, str | None, int | None, int | None, int | None, str | None, str | None]
"""A row of frames from `event` on; `row` makes it and names its values."""


def row(
    event: str,
    direction: Direction | None,
    channel: str | None = None,
    kind: str | None = None,
    size: int | None = None,
    *,
    credit: int | None = None,
    id: int | None = None,
    rule: str | None = None,
    text: str | None = None,
) -> Found:
    """Make a row of frames from `event` on."""
    return (event, direction, channel, kind, size, credit, id, rule, text)


FramesRow = tuple[float, str, str, int, *Found]
"""Time in s since 1970, capture, connection, number, and the rest."""

RawRow = tuple[float, str, str, int, Direction, int, int, bytes]

MOMENT: Final = pa.timestamp("us", tz="UTC")

_PLACE: Final = [
    ("time", MOMENT),
    ("capture", pa.string()),  # which process recorded it
    ("connection", pa.string()),
    ("number", pa.int64()),  # of the row among all of its connection, raw ones included
]

FRAMES: Final = pa.schema(
    [
        *_PLACE,
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
        *_PLACE,
        ("direction", pa.string()),
        ("segment", pa.int64()),  # counts the transports that a link had, from 0
        ("offset", pa.int64()),  # of the first byte, in this direction of this segment
        ("data", pa.binary()),
    ]
)

SCHEMAS: Final = {"frames": FRAMES, "raw": RAW}

_SPARK_TYPES: Final = {MOMENT: "timestamp", pa.string(): "string", pa.int64(): "bigint"}
FRAMES_DDL: Final = ", ".join(f"{column.name} {_SPARK_TYPES[column.type]}" for column in FRAMES)


def to_batch(kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> pa.RecordBatch:
    """Turn rows into a record batch."""
    schema = SCHEMAS[kind]
    columns: list[Sequence[object]] = [*zip(*rows, strict=True)] or [[] for _ in schema]
    columns[0] = [round(row[0] * 1e6) for row in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


# ---------------------------------------------------------------------------- files

MIB = 1024 * 1024
_ABOVE_ZERO = must_be("above 0", lambda value: value > 0)


@attrs.frozen(kw_only=True)
class Rotation:
    """When a file is closed and the next one begins, and how many are kept."""

    bytes: int = attrs.field(default=64 * MIB, validator=_ABOVE_ZERO)
    """Size on the disk."""
    seconds: float = attrs.field(default=300.0, validator=_ABOVE_ZERO)
    """Age since its first row was written; checked when rows are written."""
    keep: int | None = attrs.field(default=None, validator=attrs.validators.optional(_ABOVE_ZERO))
    """How many closed files of each kind are kept, the newest; None deletes nothing."""


class FileWriter:
    """Writes batches of rows in a thread; at most `waiting` batches wait, and further ones are refused.

    The name of a file begins with a dot until it is complete, so readers of the folder never see half a file.
    """

    def __init__(self, folder: Path, name: str, rotation: Rotation, waiting: int) -> None:
        self._files = {kind: _Files(folder / kind, name, rotation, kind) for kind in get_args(Kind)}
        self._queue: queue.Queue[tuple[Kind, Sequence[FramesRow] | Sequence[RawRow]] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._write, name=f"muxkit capture {name}", daemon=True)
        self._thread.start()
        self.error: Exception | None = None
        """Why nothing is written any more."""

    def offer(self, kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> bool:
        """Queue rows, which must not change any more; return False, and do nothing, if the queue is full."""
        if self.error is not None:
            return False
        try:
            self._queue.put_nowait((kind, rows))
        except queue.Full:
            return False
        return True

    def wait_until_written(self) -> None:
        """Block until the queue is empty; the files stay open."""
        self._queue.join()

    def close(self) -> None:
        """Write what is queued and close the files. Blocks."""
        self._queue.put(None)
        self._thread.join()

    @property
    def closed_files(self) -> dict[Kind, list[Path]]:
        """The complete files that are kept, oldest first."""
        return {kind: [*files.closed] for kind, files in self._files.items()}

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, rows = item
            try:
                if self.error is None:
                    self._files[kind].write(rows)
            except Exception as error:  # a full disk must not end the recorded program
                self.error = error
            finally:
                self._queue.task_done()
        for files in self._files.values():
            try:
                files.close()
            except Exception as error:
                self.error = self.error or error


class _Files:
    """The files of one kind, one after the other."""

    def __init__(self, folder: Path, name: str, rotation: Rotation, kind: Kind) -> None:
        self._folder = folder
        self._name = name
        self._rotation = rotation
        self._kind: Kind = kind
        self._serial = 0
        self._writer: pq.ParquetWriter | None = None
        self._began = 0.0
        self._path = folder
        self.closed: list[Path] = []

    def write(self, rows: Sequence[FramesRow] | Sequence[RawRow]) -> None:
        writer = self._writer or self._open()
        writer.write_batch(to_batch(self._kind, rows))
        is_old = time.monotonic() - self._began >= self._rotation.seconds
        if is_old or self._path.stat().st_size >= self._rotation.bytes:
            self.close()

    def _open(self) -> pq.ParquetWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f".{self._name}-{self._serial:06}.parquet"
        self._writer = pq.ParquetWriter(self._path, SCHEMAS[self._kind], compression="zstd")
        self._began = time.monotonic()
        return self._writer

    def close(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close()
        done = self._path.with_name(self._path.name.removeprefix("."))
        self._path.rename(done)
        self._serial += 1
        self.closed.append(done)
        keep = self._rotation.keep
        while keep is not None and len(self.closed) > keep:
            self.closed.pop(0).unlink(missing_ok=True)
