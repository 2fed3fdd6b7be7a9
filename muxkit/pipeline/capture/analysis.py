"""Answers questions about captures, with DuckDB in this process, or on Spark, whose tasks use DuckDB as well.

The rows are read once. On Spark, each task loads the rows of some connections into its own DuckDB, and the driver
merges the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import pyarrow as pa

from muxkit.pipeline.capture.database import database
from muxkit.pipeline.capture.decoding import KEYS, decode, decode_batches, read_raw
from muxkit.pipeline.capture.files import DDL, FRAMES, SCHEMAS, Kind, Selection
from muxkit.pipeline.capture.questions import MERGES, QUESTIONS, TOTALS

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession


Value = str | int | float | None
Row = Mapping[str, Value]
Rows = Sequence[Row]
Ask = Callable[[str], Rows]
"""Answers an SQL query over the table `frames`."""

MOST: Final = 200  # rows of an answer
SLICES: Final = 120  # the time of a capture is divided into up to this many slices
WIDTHS: Final = tuple(step * 10**power for power in range(3, 12) for step in (1, 2, 5))  # µs
SHOWN: Final = 20  # connections whose activity is included
MOST_KINDS: Final = 10_000  # kinds of violations in the answers of a task
TASK_MEMORY: Final = "1GiB"  # memory for a task's DuckDB, which keeps further rows on the disk
COLUMNS: Final = ("capture || '/' || connection AS connection", "capture", "number", "epoch_us(time) AS us")


@attrs.frozen(kw_only=True)
class Answers:
    """The answers about captures, by question. Each row is a mapping, and its times are in microseconds."""

    first_us: int
    last_us: int
    width_us: int
    """Width of the time slices in `activity`, `rates`, `latency` and `fairness`."""
    count: int
    """Number of rows in the captures."""
    totals: Row
    """Of all connections: rows `dropped` by the recorder, `gaps` with `missing` bytes, and violations (`broken`)."""
    captures: Rows
    """By capture, which is one process on one host."""
    connections: Rows
    activity: Rows
    """Bytes by time slice and direction, of the busiest connections."""
    volumes: Rows
    """By connection, direction and channel."""
    rates: Rows
    """By time slice and direction."""
    credit: Rows
    """By channel on which the recorder sends (bpmux only). `stopped_us` is the time without credit until a grant."""
    round_trips: Rows
    """Percentiles of round trips: of pings, requests, and (in raw captures of Relink) acknowledgements."""
    latency: Rows
    """The number of these round trips, by time slice and duration: from `low_us` to 1.41 times as long."""
    resends: Rows
    """Messages that were sent over more than one transport (in raw captures of Relink)."""
    fairness: Rows
    """Jain's index of the bytes of a connection's channels."""
    violations: Rows
    """Rules that peers broke, and losses of links."""


@attrs.frozen(kw_only=True)
class Raw:
    """How to decode raw captures: the protocol, and the other arguments of `muxkit.pipeline.decode`."""

    protocol: str
    engine: bool = False
    side: Literal["connector", "listener"] = "connector"
    connector_id_size: int = 2
    listener_id_size: int = 2


def answers(ask: Ask, *, most: int = MOST) -> Answers:
    """Ask all questions. Each answer has at most `most` rows."""
    (totals,) = ask(TOTALS)
    first, last = (int(totals[name] or 0) for name in ("first_us", "last_us"))
    width = _width(first, last)
    asked = {name: ask(question.format(most=most, width=width, shown=SHOWN)) for name, question in QUESTIONS.items()}
    return _made(totals, width, asked)


def _width(first: int, last: int) -> int:
    width: int = next((width for width in WIDTHS if width * SLICES >= last - first), WIDTHS[-1])
    return width


def _made(totals: Row, width: int, rows: Mapping[str, Rows]) -> Answers:
    first, last, count = (int(totals[name] or 0) for name in ("first_us", "last_us", "n"))
    return Answers(first_us=first, last_us=last, width_us=width, count=count, totals=totals, **rows)


def analyse(
    folder: str | Path, *, raw: Raw | None = None, only: Selection | None = None, spark: SparkSession | None = None
) -> Answers:
    """Analyze the captures below a directory or URL.

    Without `spark`, DuckDB does the work in this process. Rows that don't fit into memory are kept on the disk.

    Args:
        folder: the directory or URL of the captures.
        raw: decode the raw bytes in this way. By default the recorded frames are used.
        only: the rows to read. By default all rows.
        spark: a Spark session that does the work.

    Returns:
        The answers to all questions.

    Raises:
        CaptureError: if a file is damaged or isn't part of a capture. On Spark, errors are raised by Spark.
    """
    wanted = only or Selection()
    if spark is not None:
        return _answers_of_spark(spark, folder, raw, wanted)
    batches: Iterable[pa.RecordBatch]
    if raw is None:
        batches = wanted.open(folder).rows("frames", wanted)
    else:
        batches = decode_batches(read_raw(folder, wanted), **attrs.asdict(raw))
    with database() as connection:
        load(connection, batches)
        return answers(ask(connection))


def load(connection: duckdb.DuckDBPyConnection, batches: Iterable[pa.RecordBatch]) -> None:
    """Create the table `frames` with these rows of frames. The rows are read once."""
    connection.register("found", pa.RecordBatchReader.from_batches(FRAMES, batches))
    connection.execute(f"CREATE TABLE frames AS SELECT {', '.join((*COLUMNS, *FRAMES.names[4:]))} FROM found")
    connection.unregister("found")


def ask(connection: duckdb.DuckDBPyConnection) -> Ask:
    """Return a function that queries a database filled by `load`."""

    def answer(question: str) -> Rows:
        found = connection.execute(question)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    return answer


# --- Spark


def _answers_of_spark(spark: SparkSession, folder: str | Path, raw: Raw | None, wanted: Selection) -> Answers:
    found = read_captures(spark, folder, "frames" if raw is None else "raw", wanted)
    (ends,) = found.selectExpr("unix_micros(min(time)) AS first_us", "unix_micros(max(time)) AS last_us").collect()
    width = _width(ends.first_us or 0, ends.last_us or 0)
    frames = found.repartition(*KEYS) if raw is None else decode(found, **attrs.asdict(raw))
    told = frames.mapInArrow(partial(_answer_some, width=width), "question string, answer string").collect()
    parts: dict[str, list[Row]] = {}
    for each in told:
        parts.setdefault(each.question, []).append(json.loads(each.answer))
    with database() as connection:
        merged = {name: _merged(connection, name, parts.get(name, [])) for name in MERGES}
    if not merged["totals"]:
        return _nothing()
    (totals,) = merged.pop("totals")
    return _made(totals, width, merged)


def _nothing() -> Answers:
    with database() as connection:
        load(connection, [])
        return answers(ask(connection))


def read_captures(spark: SparkSession, folder: str | Path, kind: Kind, only: Selection | None = None) -> DataFrame:
    """Read captures with Spark. Directories that can't contain wanted rows are skipped.

    Spark uses its own file system for a URL, so the selection must not have a `filesystem`.

    Args:
        spark: the Spark session.
        folder: the directory or URL of the captures.
        kind: `frames` or `raw`.
        only: the rows to read. By default all rows.

    Raises:
        ValueError: if the selection has a `filesystem`.
    """
    wanted = only or Selection()
    if wanted.filesystem is not None:
        raise ValueError("Selection(filesystem=...) is for this process: Spark takes a URL and its own settings")
    if "://" in str(folder):
        frames = spark.read.parquet(f"{folder}/{kind}")
        if "date" in frames.columns:
            frames = frames.where(wanted.dates)
    elif files := wanted.open(folder).files(kind, wanted):
        frames = spark.read.parquet(*(f"file://{path}" for path in files))
    else:
        return spark.createDataFrame([], DDL[kind])
    return frames.where(wanted.condition).select(*SCHEMAS[kind].names)


def _answer_some(batches: Iterator[pa.RecordBatch], width: int) -> Iterator[pa.RecordBatch]:
    """Answer all questions about the connections of one task."""
    first = next(batches, None)
    if first is None:
        return
    told: list[tuple[str, str]] = []
    with database(threads=1, memory=TASK_MEMORY) as connection:
        load(connection, _with_schema(first, batches))
        answer = ask(connection)
        for name, question in {"totals": TOTALS, **QUESTIONS}.items():
            most = MOST_KINDS if name == "violations" else MOST
            told += [(name, json.dumps(row)) for row in answer(question.format(most=most, width=width, shown=SHOWN))]
    names, rows = zip(*told, strict=True)
    yield pa.RecordBatch.from_arrays([pa.array(names), pa.array(rows)], names=["question", "answer"])


def _with_schema(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cast Spark's batches to the types of a capture."""
    yield first.cast(FRAMES)
    for batch in others:
        yield batch.cast(FRAMES)


def _merged(connection: duckdb.DuckDBPyConnection, name: str, parts: list[Row]) -> Rows:
    if not parts:
        return []
    connection.register("parts", pa.Table.from_pylist([dict(row) for row in parts]))
    return ask(connection)(MERGES[name].format(most=MOST, shown=SHOWN))
