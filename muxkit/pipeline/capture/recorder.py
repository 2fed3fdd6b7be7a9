"""Recording of traffic: an observer that writes frames, events and bytes to Parquet files, in bounded memory.

A `Capture` is given to `muxkit.connect` or `muxkit.serve` as an observer. It never delays the program that it records.
If the disk is too slow, it drops rows and records how many.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit._observer import Direction
from muxkit.pipeline.capture.files import MIB, FileWriter, Found, FramesRow, Kind, RawRow, Rotation, open_place, row
from muxkit.pipeline.errors import CaptureError

BATCH_ROWS = 4096
BATCH_BYTES = 1 * MIB  # of a batch of raw bytes
WAITING = 16  # batches that may wait for the disk
FLUSH = 5.0  # s after which a batch is written, when the next row arrives

RowT = TypeVar("RowT", "FramesRow", "RawRow")


class Capture:
    """Records what it observes below a directory, in `frames/date=…/*.parquet`, and with `raw` also in `raw/date=…`.

        with Capture("captures") as capture:
            async with muxkit.connect(url, observer=capture.connection("to the bank")) as session: ...

    A capture is itself an observer of one connection. Recording never blocks: while `waiting` batches wait for the
    disk, new rows are dropped. A row `dropped` then counts the missing rows of `frames`. In `raw`, a row without bytes
    ends each gap.

    Args:
        folder: a directory, a URL of a store that pyarrow or fsspec supports, such as `s3://bucket/captures`, or a path
            in `filesystem`.
        name: the name of the capture. By default host, process and time.
        frames: record frames and events.
        raw: record the bytes of the transport.
        rotation: when to start new files, and how many to keep.
        filesystem: a file system of pyarrow or fsspec that contains `folder`.
        clock: returns seconds since 1970.
        waiting: the number of batches that may wait for the disk.
        batch_rows: the number of rows per batch.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        frames: bool = True,
        raw: bool = False,
        rotation: Rotation | None = None,
        filesystem: object = None,
        clock: Callable[[], float] | None = None,
        waiting: int = WAITING,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self.folder: str = str(folder)
        self.name: str = name or f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        self._clock = clock or _steady_clock()
        find = partial(open_place, self.folder, filesystem)
        self._writer = FileWriter(find, self.name, rotation or Rotation(), waiting)
        self._frames: _RowBuffer[FramesRow] | None = _RowBuffer("frames", self._writer, batch_rows) if frames else None
        self._raw: _RawBuffer | None = _RawBuffer("raw", self._writer, batch_rows) if raw else None
        self._buffers = [buffer for buffer in (self._frames, self._raw) if buffer is not None]
        self._names: dict[str, int] = {}
        self._closed = False

    # --- the connections

    def connection(self, name: str = "") -> ConnectionCapture:
        """Return an observer for one connection. A second connection of the same name becomes `name #2`."""
        name = name or "connection"
        count = self._names[name] = self._names.get(name, 0) + 1
        unique = name if count == 1 else f"{name} #{count}"
        return ConnectionCapture(self.name, unique, self._frames, self._raw, self._clock)

    @cached_property
    def own(self) -> ConnectionCapture:
        """The observer of the capture's own connection, for events that the capture itself receives."""
        return self.connection()

    # --- results

    @property
    def dropped(self) -> int:
        """The number of rows that aren't in any file."""
        return self._writer.lost + sum(buffer.dropped for buffer in self._buffers)

    @property
    def files(self) -> list[str]:
        """The complete files that are kept."""
        return [path for paths in self._writer.closed_files.values() for path in paths]

    def flush(self) -> None:
        """Write all recorded rows. Blocks while the disk is slow. A file can be read only after it was closed."""
        for buffer in self._buffers:
            self._writer.wait_until_written()
            buffer.hand_over()
        self._writer.wait_until_written()

    def close(self) -> None:
        """Write all recorded rows and close the files. Blocks.

        Raises:
            CaptureError: if writing failed, now or earlier.
        """
        if self._closed:
            return
        self._closed = True
        self.flush()
        if self._frames is not None and self._frames.left_out:
            self.own.tell_left_out(self._clock())
            self.flush()
        for buffer in self._buffers:
            buffer.over = True
        self._writer.close()
        if self._writer.error is not None:
            raise CaptureError(f"{self.folder}: {self._writer.error}; {self.dropped} rows are missing") from (
                self._writer.error
            )

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CaptureError:
            if error is None:
                raise

    # --- the observer of a single connection

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self.own.frame(direction, channel, name, size)

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self.own.credit(direction, channel, amount)

    def state(self, channel: str, state: str) -> None:
        self.own.state(channel, state)

    def timer(self, name: str) -> None:
        self.own.timer(name)

    def error(self, error: BaseException) -> None:
        self.own.error(error)

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        self.own.transport(direction, data)


@attrs.define(eq=False)
class ConnectionCapture:
    """The observer of one connection of a capture."""

    _capture: str
    name: str
    _frames: _RowBuffer[FramesRow] | None
    _raw: _RawBuffer | None
    _clock: Callable[[], float]
    _number: itertools.count[int] = attrs.field(factory=itertools.count)
    _segment: int = 0
    _offsets: dict[Direction, int] = attrs.field(factory=lambda: {"in": 0, "out": 0})

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        self._put(row("frame", direction, channel, name, size))

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        self._put(row("credit", direction, channel, credit=amount))

    def state(self, channel: str, state: str) -> None:
        if (channel, state) == ("link", "connected"):
            self._begin_segment()
        self._put(row("state", None, channel, state))

    def timer(self, name: str) -> None:
        self._put(row("timer", None, None, name))

    def error(self, error: BaseException) -> None:
        name, text = type(error).__name__, str(error)
        if isinstance(error, RemoteProtocolError):
            self._put(row("error", None, None, name, id=error.offset, rule=error.rule, text=text))
        else:
            self._put(row("lost", None, None, name, text=text))
        self._begin_segment()

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        buffer = self._raw
        if buffer is None:
            return
        now, offset, size = self._clock(), self._offsets[direction], len(data)
        self._offsets[direction] = offset + size
        row = (now, self._capture, self.name, next(self._number), direction, self._segment, offset, bytes(data))
        buffer.put(row, now, size)

    def _begin_segment(self) -> None:
        """Start the record of a new transport, unless the current one hasn't carried any bytes."""
        if any(self._offsets.values()):
            self._segment += 1
            self._offsets = {"in": 0, "out": 0}

    def _put(self, found: Found) -> None:
        if self._frames is not None:
            now = self._clock()
            self.tell_left_out(now)
            self._frames.put((now, self._capture, self.name, next(self._number), *found), now, 0)

    def tell_left_out(self, now: float) -> None:
        """Add a row with the number of dropped rows, if there are any."""
        if self._frames is not None and (count := self._frames.left_out):
            text = f"the disk was too slow: {count} rows of this capture are missing"
            told = row("dropped", None, size=count, text=text)
            self._frames.tell_left_out((now, self._capture, self.name, next(self._number), *told), now)


class _RowBuffer(Generic[RowT]):
    """Rows of one kind that weren't passed to the writer yet."""

    def __init__(self, kind: Kind, writer: FileWriter, batch_rows: int) -> None:
        self._kind: Kind = kind
        self._writer = writer
        self._batch_rows = batch_rows
        self._rows: list[RowT] = []
        self._bytes = 0
        self._due = 0.0
        self._telling = 0  # dropped rows that a row of this batch reports
        self.over = False
        self.dropped = 0
        self.left_out = 0  # dropped rows that no row has reported

    def put(self, row: RowT, now: float, size: int) -> None:
        if self.over:
            return
        rows = self._rows
        if not rows:
            self._due = now + FLUSH
        rows.append(row)
        self._bytes += size
        if len(rows) >= self._batch_rows or self._bytes >= BATCH_BYTES or now >= self._due:
            self._due = now + FLUSH
            self.hand_over()

    def tell_left_out(self, row: RowT, now: float) -> None:
        """Add the row that reports all rows dropped so far. If it is dropped itself, the next one reports them."""
        if not self.over:
            self._telling, self.left_out = self.left_out, 0
            self.put(row, now, 0)

    def hand_over(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        telling, self._telling = self._telling, 0
        if rows and not self._writer.offer(self._kind, rows):
            self._leave_out(rows, telling)

    def _leave_out(self, rows: list[RowT], telling: int) -> None:
        lost = len(rows) - (telling > 0)
        self.dropped += lost
        self.left_out += lost + telling


class _RawBuffer(_RowBuffer["RawRow"]):
    """Recorded bytes. Where bytes are dropped, an empty row records the end of the gap, so that decoders notice it."""

    def _leave_out(self, rows: list[RawRow], telling: int) -> None:
        if self._writer.error is not None:  # nothing will follow the gap
            self.dropped += sum(bool(row[-1]) for row in rows)
            return
        ends: dict[tuple[str, Direction, int], RawRow] = {}
        for now, capture, connection, number, direction, segment, offset, data in rows:
            self.dropped += bool(data)
            end = (now, capture, connection, number, direction, segment, offset + len(data), b"")
            ends[connection, direction, segment] = end
        self._rows = [*ends.values()]


def _steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that never goes back, even if the system clock is changed."""
    began = time.time() - time.perf_counter()
    return lambda: began + time.perf_counter()
