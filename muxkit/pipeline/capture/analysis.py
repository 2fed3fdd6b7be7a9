"""Who answers questions about captures? Spark, at any size; SQLite in this process, where one machine is enough."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow.dataset as ds

from muxkit.pipeline.capture.decoding import decode_batches, read_raw
from muxkit.pipeline.capture.questions import QUESTIONS, TOTALS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from muxkit.pipeline.capture.decoder import Side

Value = str | int | float | None
Row = Mapping[str, Value]
Rows = Sequence[Row]
Ask = Callable[[str], Rows]
"""Answers a question in SQL over the table `frames`."""

MOST: Final = 200  # rows of an answer
SLICES: Final = 120  # into which the time of a capture is cut
VIEW: Final = "frames"  # as the questions call it
WIDTHS: Final = tuple(step * 10**power for power in range(3, 12) for step in (1, 2, 5))  # µs
COLUMNS: Final = (
    "connection", "number", "us", "event", "direction", "channel", "kind", "size", "credit", "id", "rule", "text",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Answers:
    """What stands in captures; each row is a mapping, its times are microseconds."""

    first_us: int
    last_us: int
    width_us: int
    """Of the slices of time in `rates` and `fairness`."""
    count: int
    """Rows of the captures."""
    totals: Row
    """Over all connections: rows `dropped` by the recorder, `gaps` with `missing` bytes, rules `broken` by peers."""
    connections: Rows
    volumes: Rows
    """By connection, direction and channel."""
    rates: Rows
    """By slice of time and direction."""
    credit: Rows
    """By channel that we send on (bpmux): `stopped_us` is how long it had none left, which a grant then ended."""
    round_trips: Rows
    """Percentiles: of pings, requests, and (from raw captures of Relink) acknowledgements."""
    resends: Rows
    """From raw captures of Relink: messages that went over more than one transport."""
    fairness: Rows
    """Jain's index of what the channels of a connection had."""
    violations: Rows
    """And what else ended connections."""


@attrs.frozen(kw_only=True)
class Raw:
    """That raw captures are to be decoded, as which protocol, and how (`muxkit.pipeline.decode`)."""

    protocol: str
    engine: bool = False
    side: Side = "connector"
    connector_id_size: int = 2
    listener_id_size: int = 2


def answers(ask: Ask, *, most: int = MOST) -> Answers:
    """All questions, each with at most `most` rows for an answer."""
    (totals,) = ask(TOTALS)
    first, last, count = (_whole(totals[name]) for name in ("first_us", "last_us", "n"))
    width = next((width for width in WIDTHS if width * SLICES >= last - first), WIDTHS[-1])
    rows = {name: ask(question.format(most=most, width=width)) for name, question in QUESTIONS.items()}
    return Answers(first_us=first, last_us=last, width_us=width, count=count, totals=totals, **rows)


def analyse(folder: str | Path, *, raw: Raw | None = None, spark: SparkSession | None = None) -> Answers:
    """What stands in the captures below a folder: in their frames, or with `raw` in their raw bytes.

    Without `spark` SQLite answers within this process, which keeps all rows in memory.
    """
    if spark is not None:
        return _answers_of_spark(spark, folder, raw)
    batches = _frames(folder) if raw is None else decode_batches(read_raw(folder), **attrs.asdict(raw))
    database = load(batches)
    try:
        return answers(sqlite_ask(database))
    finally:
        database.close()


# --- Spark


def _answers_of_spark(spark: SparkSession, folder: str | Path, raw: Raw | None) -> Answers:
    from muxkit.pipeline.capture.decoding_spark import decode

    if raw is None:
        return answers(spark_ask(spark, spark.read.parquet(f"{folder}/frames")))
    # Each question would decode them anew.
    frames = decode(spark.read.parquet(f"{folder}/raw"), **attrs.asdict(raw)).cache()
    try:
        return answers(spark_ask(spark, frames))
    finally:
        frames.unpersist()
        spark.catalog.dropTempView(VIEW)


def spark_ask(spark: SparkSession, frames: DataFrame) -> Ask:
    """Questions to Spark about rows of frames, which become the temporary view `frames`."""
    told = ["concat(capture, '/', connection) AS connection", "number", "unix_micros(time) AS us", *COLUMNS[3:]]
    frames.selectExpr(*told).createOrReplaceTempView(VIEW)

    def ask(question: str) -> Rows:
        return [row.asDict() for row in spark.sql(question).collect()]

    return ask


# --- SQLite


def load(batches: Iterable[pa.RecordBatch]) -> sqlite3.Connection:
    """Rows of frames in a database in memory."""
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    kinds = dict.fromkeys(("number", "us", "size", "credit", "id"), "INTEGER")
    columns = ", ".join(f"{name} {kinds.get(name, 'TEXT')}" for name in COLUMNS)
    database.execute(f"CREATE TABLE frames ({columns})")
    insert = f"INSERT INTO frames VALUES ({', '.join('?' * len(COLUMNS))})"
    database.execute("BEGIN")
    for batch in batches:
        capture, connection, *others = (
            batch.column(name).to_pylist() for name in ("capture", "connection", "number", *COLUMNS[3:])
        )
        names = [f"{of}/{name}" for of, name in zip(capture, connection, strict=True)]
        number, *others = others
        times = batch.column("time").cast("int64").to_pylist()
        database.executemany(insert, zip(names, number, times, *others, strict=True))
    database.execute("COMMIT")
    return database


def sqlite_ask(database: sqlite3.Connection) -> Ask:
    """Questions to a database that `load` made."""

    def ask(question: str) -> Rows:
        cursor = database.execute(question)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    return ask


def _frames(folder: str | Path) -> Iterable[pa.RecordBatch]:
    dataset = ds.dataset(f"{folder}/frames", format="parquet")
    batches: Iterable[pa.RecordBatch] = dataset.to_batches()
    return batches


def _whole(value: Value) -> int:
    return int(value or 0)
