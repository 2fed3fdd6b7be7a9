"""The columns of captures, and their Parquet files, in any file system of pyarrow or fsspec.

    captures/frames/date=2026-11-25/HOST-PID-MS-000000.parquet
    captures/raw/date=2026-11-25/connection=to the bank/HOST-PID-MS-000000.parquet

A thread writes files, closes them in time, and deletes old ones; a reader passes over those of other dates and
connections by the names of their folders.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, reduce
from operator import and_
from pathlib import Path
from typing import Any, Final, Literal, get_args
from urllib.parse import quote, unquote

import attrs
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from muxkit._observer import Direction
from muxkit._settings import ABOVE_ZERO, ABOVE_ZERO_OR_NONE
from muxkit.pipeline.errors import CaptureError

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

_SPARK_TYPES: Final = {MOMENT: "timestamp", pa.string(): "string", pa.int64(): "bigint", pa.binary(): "binary"}
DDL: Final = {
    kind: ", ".join(f"{column.name} {_SPARK_TYPES[column.type]}" for column in schema)
    for kind, schema in SCHEMAS.items()
}
"""The columns in Spark's words."""
FRAMES_DDL: Final = DDL["frames"]


def to_batch(kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> pa.RecordBatch:
    """Turn rows into a record batch."""
    schema = SCHEMAS[kind]
    columns: list[Sequence[object]] = [*zip(*rows, strict=True)] or [[] for _ in schema]
    columns[0] = [round(row[0] * 1e6) for row in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


# ---------------------------------------------------------------------------- places


def _utc(moment: datetime) -> datetime:
    """Convert to UTC; a time without a zone is UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")


ATOMIC_ON_CLOSE: Final = ("s3", "gcs", "abfs")  # stores whose objects are seen when they are complete, and not before


@attrs.frozen(kw_only=True)
class Selection:
    """Which rows of captures are read, and from which file system.

    Folders that cannot have any are passed over.
    """

    since: datetime | None = attrs.field(default=None, converter=attrs.converters.optional(_utc))
    """The first moment; without a time zone it is UTC."""
    until: datetime | None = attrs.field(default=None, converter=attrs.converters.optional(_utc))
    """The moment after the last."""
    connection: str | None = None
    """One connection, by the name that `Capture.connection` was given."""
    filesystem: object = None
    """One of pyarrow or fsspec in which the folder lies; None: the one of its URL, or this machine's."""

    def open(self, folder: str | Path) -> Place:
        return open_place(folder, self.filesystem)

    @property
    def condition(self) -> str:
        """The same in Spark's SQL."""
        parts = ["TRUE"]
        if self.since is not None:
            parts.append(f"time >= TIMESTAMP '{self.since.isoformat(' ')}'")
        if self.until is not None:
            parts.append(f"time < TIMESTAMP '{self.until.isoformat(' ')}'")
        if self.connection is not None:
            parts.append("connection = '" + self.connection.replace("'", "''") + "'")
        return " AND ".join(parts)

    @property
    def dates(self) -> str:
        """The dates of the folders that may have such rows, in Spark's SQL."""
        parts = ["TRUE"]
        if self.since is not None:
            parts.append(f"date >= '{_date(self.since)}'")
        if self.until is not None:
            parts.append(f"date <= '{_date(self.until)}'")
        return " AND ".join(parts)

    def may_hold(self, path: str) -> bool:
        """Return True if a file may have such rows, by the names of its folders."""
        *folders, name = path.split("/")
        if name.startswith((".", "_")) or not name.endswith(".parquet"):
            return False
        for folder in folders:
            key, _, value = folder.partition("=")
            if key == "date" and self.since is not None and value < _date(self.since):
                return False
            if key == "date" and self.until is not None and value > _date(self.until):
                return False
            if key == "connection" and self.connection is not None and unquote(value) != self.connection:
                return False
        return True


@attrs.frozen
class Place:
    """A folder of captures in a file system."""

    system: pafs.FileSystem
    path: str

    def files(self, kind: Kind, wanted: Selection) -> list[str]:
        """Return the complete files of a kind that may have wanted rows, in order."""
        folder = f"{self.path}/{kind}"
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        found = sorted(info.path for info in self.system.get_file_info(selector) if info.is_file)
        return [path for path in found if wanted.may_hold(path)]

    def rows(self, kind: Kind, wanted: Selection, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        """Read the wanted rows; groups of rows whose statistics exclude them are passed over.

        Raises:
            CaptureError: A file is damaged, or has other columns. Without this check the rows of another table would
                count as rows of the capture without values.
        """
        files = self.files(kind, wanted)
        for path in files:
            self._check(path, kind)
        known = ds.dataset(files, schema=SCHEMAS[kind], filesystem=self.system, format="parquet")
        parts = []
        if wanted.since is not None:
            parts.append(ds.field("time") >= pa.scalar(wanted.since, MOMENT))
        if wanted.until is not None:
            parts.append(ds.field("time") < pa.scalar(wanted.until, MOMENT))
        if wanted.connection is not None:
            parts.append(ds.field("connection") == wanted.connection)
        condition = reduce(and_, parts) if parts else None
        return known.scanner(columns=columns, filter=condition).to_reader()

    def _check(self, path: str, kind: Kind) -> None:
        try:
            found = pq.read_schema(path, filesystem=self.system)
        except (pa.ArrowException, OSError) as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise CaptureError(
                f"{path}: expected a complete Parquet file, got a damaged one: {what}; move it away"
            ) from error
        missing = [name for name in SCHEMAS[kind].names[: len(_PLACE)] if name not in found.names]
        if missing:
            raise CaptureError(
                f"{path}: expected rows of a capture, got a table without the column {missing[0]}; move it away"
            )


def open_place(folder: str | Path, filesystem: object = None) -> Place:
    """Find the file system of a folder: of a path this machine's, of a URL one of pyarrow or fsspec.

    `filesystem` is one of pyarrow or fsspec to use instead; `folder` is then a path in it.
    """
    if filesystem is not None:
        if isinstance(filesystem, pafs.FileSystem):
            return Place(filesystem, str(folder))
        return Place(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(folder))
    if "://" not in str(folder):
        return Place(pafs.LocalFileSystem(), str(Path(folder).absolute()))
    try:
        return Place(*pafs.FileSystem.from_uri(str(folder)))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # no scheme that pyarrow knows
        import fsspec

        system, path = fsspec.core.url_to_fs(str(folder))
        return Place(pafs.PyFileSystem(pafs.FSSpecHandler(system)), path)


# ---------------------------------------------------------------------------- files

MIB = 1024 * 1024
_log = logging.getLogger("muxkit")

MOST_OPEN: Final = 64  # files that are open at once
DAY: Final = 86_400


@attrs.frozen(kw_only=True)
class Rotation:
    """When a file is closed and the next one begins, and how many are kept. A file has rows of one day in UTC."""

    bytes: int = attrs.field(default=64 * MIB, validator=ABOVE_ZERO)
    """Size as it is stored."""
    seconds: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """Age since its first row was written; checked when rows are written."""
    keep: int | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    """How many closed files of each kind are kept, the newest; None deletes nothing."""
    by_connection: bool = False
    """Each connection has files of its own, in a folder with its name, for captures of which one connection is read at
    a time. At most 64 files are open at once, so thousands of connections make small files."""


class FileWriter:
    """Writes batches of rows in a thread; at most `waiting` batches wait, and further ones are refused.

    The name of a file begins with a dot until it is complete, so readers of the folder never see half a file.
    """

    def __init__(self, place: Callable[[], Place], name: str, rotation: Rotation, waiting: int) -> None:
        self._find_place = place
        self._name = name
        self._place: Place | None = None
        self._files = {kind: _Files(name, rotation, kind) for kind in get_args(Kind)}
        self._queue: queue.Queue[tuple[Kind, Sequence[FramesRow] | Sequence[RawRow]] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._write, name=f"muxkit capture {name}", daemon=True)
        self._thread.start()
        self.error: Exception | None = None
        """Why nothing is written any more."""
        self._refused = 0  # rows that were queued before writing failed, and came after it

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
    def lost(self) -> int:
        """How many rows were taken and are in no complete file, because writing failed."""
        return self._refused + sum(files.lost for files in self._files.values())

    @property
    def closed_files(self) -> dict[Kind, list[str]]:
        """The complete files that are kept, oldest first."""
        return {kind: [*files.closed] for kind, files in self._files.items()}

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, rows = item
            try:
                if self.error is None:
                    if self._place is None:  # here, since a store in a network takes its time
                        self._place = self._find_place()
                    self._files[kind].write(self._place, rows)
                else:
                    self._refused += len(rows)
            except Exception as error:  # a full disk must not end the recorded program
                if self._place is None:
                    self._refused += len(rows)
                self._fail(error)
            finally:
                self._queue.task_done()
        for files in self._files.values():
            for folder in files.folders:
                try:
                    files.close(folder)
                except Exception as error:
                    files.give_up(folder)
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            # log: A capture couldn't be written any more. The program continues, and `close` raises an error with the
            # number of missing rows.
            _log.warning("the capture %s ends, and what follows is not recorded: %s", self._name, error)


@attrs.define
class _Open:
    """A file that is being written."""

    place: Place
    path: str
    """Where it is when it is complete."""
    begun: str
    """Where it is until then."""
    sink: pa.NativeFile
    writer: pq.ParquetWriter
    began: float
    rows: int = 0
    """Rows that were written to it, which nobody can read before it is complete."""


class _Files:
    """The files of one kind."""

    def __init__(self, name: str, rotation: Rotation, kind: Kind) -> None:
        self._name = name
        self._rotation = rotation
        self._kind: Kind = kind
        self._serial = 0
        self._open: dict[str, _Open] = {}  # by folder, the one written longest ago first
        self._made: set[str] = set()
        self.lost = 0  # rows that were written and are in no complete file
        self.closed: list[str] = []

    def write(self, place: Place, rows: Sequence[FramesRow] | Sequence[RawRow]) -> None:
        missing = len(rows)
        for folder, some in self._by_folder(rows).items():
            try:
                current = self._open.pop(folder, None) or self._begin(place, f"{place.path}/{self._kind}/{folder}")
                self._open[folder] = current
                current.writer.write_batch(to_batch(self._kind, some))
            except Exception:
                self.lost += missing
                self.give_up(folder)
                raise
            current.rows += len(some)
            missing -= len(some)
            is_old = time.monotonic() - current.began >= self._rotation.seconds
            if is_old or current.sink.tell() >= self._rotation.bytes:
                self.close(folder)
        now = time.monotonic()
        for folder, other in [*self._open.items()]:
            if len(self._open) > MOST_OPEN or now - other.began >= self._rotation.seconds:
                self.close(folder)

    def _by_folder(self, rows: Sequence[FramesRow] | Sequence[RawRow]) -> dict[str, list[Any]]:
        """Group rows by the folder of their date, and of their connection."""
        groups: dict[str, list[Any]] = {}
        if self._rotation.by_connection:
            for row in rows:
                groups.setdefault(f"{_day(row[0])}/connection={quote(row[2], safe=' ')}", []).append(row)
        elif rows and int(rows[0][0] // DAY) == int(rows[-1][0] // DAY):
            groups[_day(rows[0][0])] = [*rows]
        else:
            for row in rows:
                groups.setdefault(_day(row[0]), []).append(row)
        return groups

    def _begin(self, place: Place, folder: str) -> _Open:
        if folder not in self._made:
            place.system.create_dir(folder, recursive=True)
            self._made.add(folder)
        path = f"{folder}/{self._name}-{self._serial:06}.parquet"
        is_whole_or_nothing = place.system.type_name in ATOMIC_ON_CLOSE
        begun = path if is_whole_or_nothing else f"{folder}/.{self._name}-{self._serial:06}.parquet"
        self._serial += 1
        sink = place.system.open_output_stream(begun)
        writer = pq.ParquetWriter(sink, SCHEMAS[self._kind], compression="zstd")
        return _Open(place, path, begun, sink, writer, time.monotonic())

    @property
    def folders(self) -> list[str]:
        """The folders in which a file is open."""
        return [*self._open]

    def give_up(self, folder: str) -> None:
        """Delete a file that cannot be completed, to give its space back. Its rows are lost."""
        file = self._open.pop(folder, None)
        if file is None:
            return
        self.lost += file.rows
        with suppress(Exception):
            file.sink.close()
        with suppress(Exception):
            file.place.system.delete_file(file.begun)

    def close(self, folder: str) -> None:
        """Complete the file that is open in this folder."""
        file = self._open[folder]
        file.writer.close()
        file.sink.close()
        if file.begun != file.path:
            file.place.system.move(file.begun, file.path)
        del self._open[folder]
        self.closed.append(file.path)
        keep = self._rotation.keep
        while keep is not None and len(self.closed) > keep:
            with suppress(FileNotFoundError):
                file.place.system.delete_file(self.closed.pop(0))


@lru_cache(maxsize=16)
def _date_of_day(day: int) -> str:
    return f"date={_date(datetime.fromtimestamp(day * DAY, UTC))}"


def _day(moment: float) -> str:
    return _date_of_day(int(moment // DAY))
