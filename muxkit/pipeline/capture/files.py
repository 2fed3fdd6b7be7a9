"""The columns of captures, and their Parquet files in any file system of pyarrow or fsspec.

    captures/frames/date=2026-11-25/HOST-PID-MS-000000.parquet
    captures/raw/date=2026-11-25/connection=to the bank/HOST-PID-MS-000000.parquet

A thread writes the files, closes them in time, and deletes old ones. Readers skip files of other dates and connections
by the names of their directories.
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
"""The kind of a file's rows, and the name of its directory."""

Found = tuple[str, Direction | None, str | None, str | None, int | None, int | None, int | None, str | None, str | None]
"""The columns of a row of `frames` from `event` on. The function `row` makes it."""


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
    """Return the columns of a row of `frames` from `event` on."""
    return (event, direction, channel, kind, size, credit, id, rule, text)


FramesRow = tuple[float, str, str, int, *Found]
"""Time in seconds since 1970, capture, connection, number, and the other columns."""

RawRow = tuple[float, str, str, int, Direction, int, int, bytes]

MOMENT: Final = pa.timestamp("us", tz="UTC")

_PLACE: Final = [
    ("time", MOMENT),
    ("capture", pa.string()),  # the process that recorded it
    ("connection", pa.string()),
    ("number", pa.int64()),  # of the row, among all rows of its connection including raw ones
]

FRAMES: Final = pa.schema(
    [
        *_PLACE,
        ("event", pa.string()),  # frame, credit, state, timer, error, lost, dropped; decoded: gap, unverified
        ("direction", pa.string()),
        ("channel", pa.string()),  # the protocol's name of the channel
        ("kind", pa.string()),  # of the frame; or the state, the timer, the class of the error
        ("size", pa.int64()),  # bytes of payload; for `dropped`, rows; for `gap`, missing bytes
        ("credit", pa.int64()),  # granted bytes
        ("id", pa.int64()),  # number of a message, or of an acknowledged message; or position of a violation
        ("rule", pa.string()),  # the violated clause
        ("text", pa.string()),
    ]
)

RAW: Final = pa.schema(
    [
        *_PLACE,
        ("direction", pa.string()),
        ("segment", pa.int64()),  # number of the link's transport, from 0
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
"""The columns as Spark's DDL."""
FRAMES_DDL: Final = DDL["frames"]


def to_batch(kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> pa.RecordBatch:
    """Convert rows to a record batch."""
    schema = SCHEMAS[kind]
    columns: list[Sequence[object]] = [*zip(*rows, strict=True)] or [[] for _ in schema]
    columns[0] = [round(row[0] * 1e6) for row in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


# ---------------------------------------------------------------------------- places


def _utc(moment: datetime) -> datetime:
    """Convert to UTC. A time without a time zone is in UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")


ATOMIC_ON_CLOSE: Final = ("s3", "gcs", "abfs")  # stores in which an object becomes visible only when it is complete


@attrs.frozen(kw_only=True)
class Selection:
    """The rows of captures to read, and their file system.

    Directories that can't contain such rows are skipped.
    """

    since: datetime | None = attrs.field(default=None, converter=attrs.converters.optional(_utc))
    """The earliest time. Without a time zone it is in UTC."""
    until: datetime | None = attrs.field(default=None, converter=attrs.converters.optional(_utc))
    """The end, which is excluded. Without a time zone it is in UTC."""
    connection: str | None = None
    """The name of one connection, as given to `Capture.connection`."""
    filesystem: object = None
    """A file system of pyarrow or fsspec. By default the URL decides, or the local file system is used."""

    def open(self, folder: str | Path) -> Place:
        """Return the directory of captures, in the file system of this selection."""
        return open_place(folder, self.filesystem)

    @property
    def condition(self) -> str:
        """The same condition in Spark's SQL."""
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
        """The condition, in Spark's SQL, for the dates of directories that may contain such rows."""
        parts = ["TRUE"]
        if self.since is not None:
            parts.append(f"date >= '{_date(self.since)}'")
        if self.until is not None:
            parts.append(f"date <= '{_date(self.until)}'")
        return " AND ".join(parts)

    def may_hold(self, path: str) -> bool:
        """Return True if a file may contain such rows, judging by the names of its directories."""
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
    """A directory of captures in a file system."""

    system: pafs.FileSystem
    path: str

    def files(self, kind: Kind, wanted: Selection) -> list[str]:
        """Return the complete files of a kind that may contain wanted rows, in order."""
        folder = f"{self.path}/{kind}"
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        found = sorted(info.path for info in self.system.get_file_info(selector) if info.is_file)
        return [path for path in found if wanted.may_hold(path)]

    def rows(self, kind: Kind, wanted: Selection, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        """Read the wanted rows. Row groups are skipped if their statistics exclude them.

        Raises:
            CaptureError: if a file is damaged or has other columns. Without this check, the rows of an unrelated table
                would appear as rows of the capture without values.
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
    """Find the file system of a directory: the local one for a path, and one of pyarrow or fsspec for a URL.

    `filesystem` is one of pyarrow or fsspec to use instead. `folder` is then a path in it.
    """
    if filesystem is not None:
        if isinstance(filesystem, pafs.FileSystem):
            return Place(filesystem, str(folder))
        return Place(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(folder))
    if "://" not in str(folder):
        return Place(pafs.LocalFileSystem(), str(Path(folder).absolute()))
    try:
        return Place(*pafs.FileSystem.from_uri(str(folder)))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # pyarrow doesn't support the scheme
        import fsspec

        system, path = fsspec.core.url_to_fs(str(folder))
        return Place(pafs.PyFileSystem(pafs.FSSpecHandler(system)), path)


# ---------------------------------------------------------------------------- files

MIB = 1024 * 1024
_log = logging.getLogger("muxkit")

MOST_OPEN: Final = 64  # files that may be open simultaneously
DAY: Final = 86_400


@attrs.frozen(kw_only=True)
class Rotation:
    """When a file is closed and a new one begins, and how many files are kept. A file has rows of one day in UTC."""

    bytes: int = attrs.field(default=64 * MIB, validator=ABOVE_ZERO)
    """The size at which a file is closed, as stored."""
    seconds: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """The age at which a file is closed, counted from its first row, and checked when rows are written."""
    keep: int | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    """The number of closed files of each kind to keep, the newest ones. None keeps all."""
    by_connection: bool = False
    """Write separate files for each connection, in a directory with its name. Use this for captures of which a single
    connection is read at a time. At most 64 files are open simultaneously, so many connections lead to small files."""


class FileWriter:
    """Writes batches of rows in a thread. At most `waiting` batches may wait, and further ones are refused.

    The name of a file starts with a dot until the file is complete, so readers never see incomplete files.
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
        """The error after which nothing is written any more."""
        self._refused = 0  # rows that were queued before writing failed, but not written

    def offer(self, kind: Kind, rows: Sequence[FramesRow] | Sequence[RawRow]) -> bool:
        """Queue rows, which must not be changed afterwards. Return False, without any effect, if the queue is full."""
        if self.error is not None:
            return False
        try:
            self._queue.put_nowait((kind, rows))
        except queue.Full:
            return False
        return True

    def wait_until_written(self) -> None:
        """Block until all queued rows are written. The files stay open."""
        self._queue.join()

    def close(self) -> None:
        """Write all queued rows and close the files. Blocks."""
        self._queue.put(None)
        self._thread.join()

    @property
    def lost(self) -> int:
        """The number of accepted rows that aren't in a complete file because writing failed."""
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
                    if self._place is None:  # opened in this thread, because a network store takes time
                        self._place = self._find_place()
                    self._files[kind].write(self._place, rows)
                else:
                    self._refused += len(rows)
            except Exception as error:  # a full disk must not end the program that is recorded
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
    """The path of the complete file."""
    begun: str
    """The path until the file is complete."""
    sink: pa.NativeFile
    writer: pq.ParquetWriter
    began: float
    rows: int = 0
    """Rows written to it. They can't be read before the file is complete."""


class _Files:
    """The files of one kind."""

    def __init__(self, name: str, rotation: Rotation, kind: Kind) -> None:
        self._name = name
        self._rotation = rotation
        self._kind: Kind = kind
        self._serial = 0
        self._open: dict[str, _Open] = {}  # by directory, starting with the least recently written
        self._made: set[str] = set()
        self.lost = 0  # rows that were written but aren't in a complete file
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
        """Group rows by the directory of their date, and of their connection."""
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
        """The directories in which a file is open."""
        return [*self._open]

    def give_up(self, folder: str) -> None:
        """Delete a file that can't be completed, to free its space. Its rows are lost."""
        file = self._open.pop(folder, None)
        if file is None:
            return
        self.lost += file.rows
        with suppress(Exception):
            file.sink.close()
        with suppress(Exception):
            file.place.system.delete_file(file.begun)

    def close(self, folder: str) -> None:
        """Complete the open file in this directory."""
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
