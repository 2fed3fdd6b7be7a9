"""Answers to questions about captures: by Spark at any size, or by SQLite in this process.

The questions are SQL that both understand, over one table of frames. It has `connection` (with its capture in front),
`number`, `us` (microseconds since 1970) and the columns of a capture from `event` on. Percentiles are exact: the least
value that so many percent of all values do not exceed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import pyarrow as pa
import pyarrow.dataset as ds

from muxkit.pipeline.capture.decoding import decode, decode_batches, read_raw
from muxkit.pipeline.capture.files import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Value = str | int | float | None
Row = Mapping[str, Value]
Rows = Sequence[Row]
Ask = Callable[[str], Rows]
"""Answers a question in SQL over the table `frames`."""

MOST: Final = 200  # rows of an answer
SLICES: Final = 120  # into which the time of a capture is cut
VIEW: Final = "frames"  # as the questions call it
WIDTHS: Final = tuple(step * 10**power for power in range(3, 12) for step in (1, 2, 5))  # µs
COLUMNS: Final = ("connection", "number", "us", *FRAMES.names[4:])  # of the table `frames`


@attrs.frozen(kw_only=True)
class Answers:
    """What captures hold, by question; each row is a mapping, its times are microseconds."""

    first_us: int
    last_us: int
    width_us: int
    """Width of the time slices in `rates` and `fairness`."""
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
    """By channel that the recorder sends on (bpmux): `stopped_us` is the time without credit that a grant ended."""
    round_trips: Rows
    """Percentiles: of pings, requests, and (from raw captures of Relink) acknowledgements."""
    resends: Rows
    """From raw captures of Relink: messages that went over more than one transport."""
    fairness: Rows
    """Jain's index over the bytes of a connection's channels."""
    violations: Rows
    """Rules that peers broke, and links that were lost."""


@attrs.frozen(kw_only=True)
class Raw:
    """How raw captures are decoded: the protocol, and the other arguments of `muxkit.pipeline.decode`."""

    protocol: str
    engine: bool = False
    side: Literal["connector", "listener"] = "connector"
    connector_id_size: int = 2
    listener_id_size: int = 2


def answers(ask: Ask, *, most: int = MOST) -> Answers:
    """Ask all questions; each answer has at most `most` rows."""
    (totals,) = ask(TOTALS)
    first, last, count = (int(totals[name] or 0) for name in ("first_us", "last_us", "n"))
    width = next((width for width in WIDTHS if width * SLICES >= last - first), WIDTHS[-1])
    rows = {name: ask(question.format(most=most, width=width)) for name, question in QUESTIONS.items()}
    return Answers(first_us=first, last_us=last, width_us=width, count=count, totals=totals, **rows)


def analyse(folder: str | Path, *, raw: Raw | None = None, spark: SparkSession | None = None) -> Answers:
    """Analyse the captures below a folder: their frames, or with `raw` their raw bytes.

    Without `spark` SQLite answers within this process, which keeps all rows in memory.
    """
    if spark is not None:
        return _answers_of_spark(spark, folder, raw)
    if raw is None:
        database = load(ds.dataset(f"{folder}/frames", format="parquet").to_batches())
    else:
        database = load(decode_batches(read_raw(folder), **attrs.asdict(raw)))
    try:
        return answers(sqlite_ask(database))
    finally:
        database.close()


# --- Spark


def _answers_of_spark(spark: SparkSession, folder: str | Path, raw: Raw | None) -> Answers:
    if raw is None:
        return answers(spark_ask(spark, spark.read.parquet(f"{folder}/frames")))
    # Without the cache each question would decode them again.
    frames = decode(spark.read.parquet(f"{folder}/raw"), **attrs.asdict(raw)).cache()
    try:
        return answers(spark_ask(spark, frames))
    finally:
        frames.unpersist()
        spark.catalog.dropTempView(VIEW)


def spark_ask(spark: SparkSession, frames: DataFrame) -> Ask:
    """Ask Spark about rows of frames, which become the temporary view `frames`."""
    told = ["concat(capture, '/', connection) AS connection", "number", "unix_micros(time) AS us", *COLUMNS[3:]]
    frames.selectExpr(*told).createOrReplaceTempView(VIEW)

    def ask(question: str) -> Rows:
        return [row.asDict() for row in spark.sql(question).collect()]

    return ask


# --- SQLite


def load(batches: Iterable[pa.RecordBatch]) -> sqlite3.Connection:
    """Load rows of frames into a database in memory."""
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    kinds = dict.fromkeys(("number", "us", "size", "credit", "id"), "INTEGER")
    columns = ", ".join(f"{name} {kinds.get(name, 'TEXT')}" for name in COLUMNS)
    database.execute(f"CREATE TABLE frames ({columns})")
    insert = f"INSERT INTO frames VALUES ({', '.join('?' * len(COLUMNS))})"
    database.execute("BEGIN")
    for batch in batches:
        capture, connection, number, *others = (
            batch.column(name).to_pylist() for name in ("capture", "connection", "number", *COLUMNS[3:])
        )
        names = [f"{of}/{name}" for of, name in zip(capture, connection, strict=True)]
        times = batch.column("time").cast("int64").to_pylist()
        database.executemany(insert, zip(names, number, times, *others, strict=True))
    database.execute("COMMIT")
    return database


def sqlite_ask(database: sqlite3.Connection) -> Ask:
    """Ask a database that `load` made."""

    def ask(question: str) -> Rows:
        cursor = database.execute(question)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    return ask


TOTALS: Final = """
SELECT MIN(us) AS first_us, MAX(us) AS last_us, COUNT(*) AS n,
  SUM(CASE WHEN event = 'dropped' THEN size ELSE 0 END) AS dropped,
  SUM(CASE WHEN event = 'gap' THEN 1 ELSE 0 END) AS gaps,
  SUM(CASE WHEN event = 'gap' THEN size ELSE 0 END) AS missing,
  SUM(CASE WHEN event = 'unverified' THEN 1 ELSE 0 END) AS unverified,
  SUM(CASE WHEN event = 'error' THEN 1 ELSE 0 END) AS broken
FROM frames
"""

QUESTIONS: Final = {
    "connections": """
SELECT connection, MIN(us) AS first_us, MAX(us) AS last_us,
  SUM(CASE WHEN event = 'frame' THEN 1 ELSE 0 END) AS frames,
  SUM(CASE WHEN event = 'frame' AND direction = 'in' THEN size ELSE 0 END) AS bytes_in,
  SUM(CASE WHEN event = 'frame' AND direction = 'out' THEN size ELSE 0 END) AS bytes_out,
  COUNT(DISTINCT CASE WHEN event = 'frame' THEN channel END) AS channels,
  SUM(CASE WHEN event IN ('error', 'lost') THEN 1 ELSE 0 END) AS errors,
  SUM(CASE WHEN event = 'dropped' THEN size ELSE 0 END) AS dropped,
  SUM(CASE WHEN event = 'gap' THEN size ELSE 0 END) AS missing
FROM frames GROUP BY connection ORDER BY SUM(CASE WHEN event = 'frame' THEN size ELSE 0 END) DESC, connection
LIMIT {most}
""",
    "volumes": """
SELECT connection, direction, channel, COUNT(*) AS frames, SUM(size) AS bytes,
  1.0E0 * SUM(size) * 1000000 / (CASE WHEN MAX(us) > MIN(us) THEN MAX(us) - MIN(us) ELSE 1000000 END)
    AS bytes_per_second,
  MIN(us) AS first_us, MAX(us) AS last_us
FROM frames WHERE event = 'frame'
GROUP BY connection, direction, channel ORDER BY SUM(size) DESC, COUNT(*) DESC, connection, channel, direction
LIMIT {most}
""",
    "rates": """
SELECT us - us % {width} AS bucket_us, direction, COUNT(*) AS frames, SUM(size) AS bytes
FROM frames WHERE event = 'frame'
GROUP BY us - us % {width}, direction ORDER BY bucket_us, direction
""",
    # A channel spends its own credit from the first grant on: what is sent on it before is the opening, which the top
    # level pays. What follows `gone` is another channel with the same id.
    "credit": """
WITH steps AS (
  SELECT connection, channel, number, us, event, size, credit,
    SUM(CASE WHEN event = 'state' THEN 1 ELSE 0 END)
      OVER (PARTITION BY connection, channel ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS life
  FROM frames
  WHERE (event = 'credit' AND direction = 'in') OR (event = 'state' AND kind = 'gone')
    OR (event = 'frame' AND direction = 'out' AND kind IN ('payload', 'end') AND size > 0)
), granted AS (
  SELECT connection, channel, number, us, event, size, credit, life,
    SUM(CASE WHEN event = 'credit' THEN 1 ELSE 0 END) OVER
      (PARTITION BY connection, channel, life ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
      AS grants
  FROM steps
), balances AS (
  SELECT connection, channel, event, us, credit,
    SUM(CASE WHEN event = 'credit' THEN credit ELSE -size END) OVER
      (PARTITION BY connection, channel, life ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
      AS balance,
    LEAD(event) OVER (PARTITION BY connection, channel, life ORDER BY number) AS next_event,
    LEAD(us) OVER (PARTITION BY connection, channel, life ORDER BY number) AS next_us
  FROM granted WHERE grants > 0 AND event <> 'state'
)
SELECT connection, channel,
  SUM(CASE WHEN event = 'credit' THEN 1 ELSE 0 END) AS grants,
  SUM(CASE WHEN event = 'credit' THEN credit ELSE 0 END) AS granted,
  SUM(CASE WHEN event = 'frame' AND balance <= 0 AND next_event = 'credit' THEN 1 ELSE 0 END) AS stops,
  SUM(CASE WHEN event = 'frame' AND balance <= 0 AND next_event = 'credit' THEN next_us - us ELSE 0 END) AS stopped_us,
  MIN(balance) AS least
FROM balances GROUP BY connection, channel
ORDER BY stopped_us DESC, stops DESC, connection, channel LIMIT {most}
""",
    # A ping is answered in order, and on another transport (Relink resumes there) not at all. A request is over when
    # the last of its answer came. An acknowledgement is measured against the message that it names.
    "round_trips": """
WITH signs AS (
  SELECT connection, channel, number, us, direction, LOWER(kind) AS sign,
    SUM(CASE WHEN LOWER(kind) = 'resume' AND direction = 'out' THEN 1 ELSE 0 END)
      OVER (PARTITION BY connection ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS transport
  FROM frames WHERE event = 'frame' AND LOWER(kind) IN ('ping', 'pong', 'resume')
), counted AS (
  SELECT connection, channel, transport, us, sign,
    ROW_NUMBER() OVER (PARTITION BY connection, channel, transport, sign ORDER BY number) AS turn
  FROM signs WHERE (sign = 'ping' AND direction = 'out') OR (sign = 'pong' AND direction = 'in')
), lives AS (
  SELECT connection, channel, us, event, direction,
    SUM(CASE WHEN event = 'state' THEN 1 ELSE 0 END)
      OVER (PARTITION BY connection, channel ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS life
  FROM frames
  WHERE channel LIKE 'out-request %'
    AND ((event = 'state' AND kind = 'open') OR (event = 'frame' AND kind = 'payload'))
), requests AS (
  SELECT connection, channel, life, MIN(CASE WHEN direction = 'out' THEN us END) AS began,
    MAX(CASE WHEN direction = 'in' THEN us END) AS ended
  FROM lives WHERE event = 'frame' GROUP BY connection, channel, life
), sent AS (
  SELECT connection, channel, id, MIN(us) AS us
  FROM frames WHERE event = 'frame' AND direction = 'out' AND kind = 'message' AND id IS NOT NULL
  GROUP BY connection, channel, id
), acknowledged AS (
  SELECT connection, channel, id, kind, MIN(us) AS us
  FROM frames
  WHERE event = 'frame' AND direction = 'in' AND id IS NOT NULL
    AND kind IN ('received', 'consumed', 'committed', 'uncommitted')
  GROUP BY connection, channel, id, kind
), trips AS (
  SELECT ping.connection AS connection, 'ping' AS what, pong.us - ping.us AS trip
  FROM counted AS ping JOIN counted AS pong
    ON ping.connection = pong.connection AND ping.channel = pong.channel AND ping.transport = pong.transport
    AND ping.turn = pong.turn AND ping.sign = 'ping' AND pong.sign = 'pong'
  UNION ALL
  SELECT connection, 'request' AS what, ended - began AS trip
  FROM requests WHERE began IS NOT NULL AND ended IS NOT NULL
  UNION ALL
  SELECT sent.connection AS connection, acknowledged.kind AS what, acknowledged.us - sent.us AS trip
  FROM sent JOIN acknowledged
    ON sent.connection = acknowledged.connection AND sent.channel = acknowledged.channel AND sent.id = acknowledged.id
), ranked AS (
  SELECT connection, what, trip,
    ROW_NUMBER() OVER (PARTITION BY connection, what ORDER BY trip) AS place,
    COUNT(*) OVER (PARTITION BY connection, what) AS trips
  FROM trips WHERE trip >= 0
)
SELECT connection, what, MAX(trips) AS trips,
  MIN(CASE WHEN 100 * place >= 50 * trips THEN trip END) AS p50_us,
  MIN(CASE WHEN 100 * place >= 90 * trips THEN trip END) AS p90_us,
  MIN(CASE WHEN 100 * place >= 99 * trips THEN trip END) AS p99_us,
  MAX(trip) AS most_us
FROM ranked GROUP BY connection, what ORDER BY what, connection LIMIT {most}
""",
    "resends": """
SELECT connection, direction, channel, COUNT(*) AS messages, COUNT(*) - COUNT(DISTINCT id) AS resent
FROM (
  SELECT connection, direction, channel, id,
    SUM(CASE WHEN kind = 'closed' THEN 1 ELSE 0 END)
      OVER (PARTITION BY connection, channel ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS life,
    kind
  FROM frames WHERE event = 'frame' AND (kind = 'closed' OR (kind = 'message' AND id IS NOT NULL))
) AS numbered
WHERE kind = 'message'
GROUP BY connection, direction, channel, life
HAVING COUNT(*) > COUNT(DISTINCT id)
ORDER BY resent DESC, connection, channel LIMIT {most}
""",
    # Jain's index: 1 if all have the same, 1 / n if one has everything.
    "fairness": """
WITH whole AS (
  SELECT connection, direction, channel, 1.0E0 * SUM(size) AS had
  FROM frames WHERE event = 'frame' AND size > 0 GROUP BY connection, direction, channel
), slices AS (
  SELECT connection, direction, channel, us - us % {width} AS bucket_us, 1.0E0 * SUM(size) AS had
  FROM frames WHERE event = 'frame' AND size > 0 GROUP BY connection, direction, channel, us - us % {width}
), shared AS (
  SELECT connection, direction, bucket_us, SUM(had) * SUM(had) / (COUNT(*) * SUM(had * had)) AS jain
  FROM slices GROUP BY connection, direction, bucket_us HAVING COUNT(*) > 1
), over_time AS (
  SELECT connection, direction, COUNT(*) AS slices, AVG(jain) AS mean, MIN(jain) AS least
  FROM shared GROUP BY connection, direction
)
SELECT whole.connection AS connection, whole.direction AS direction, COUNT(*) AS channels,
  SUM(had) * SUM(had) / (COUNT(*) * SUM(had * had)) AS jain,
  MAX(over_time.slices) AS slices, MAX(over_time.mean) AS mean, MAX(over_time.least) AS least
FROM whole LEFT JOIN over_time
  ON whole.connection = over_time.connection AND whole.direction = over_time.direction
GROUP BY whole.connection, whole.direction
HAVING COUNT(*) > 1
ORDER BY jain, connection, direction LIMIT {most}
""",
    "violations": """
SELECT event, kind, rule, text, COUNT(*) AS times, COUNT(DISTINCT connection) AS connections,
  MIN(connection) AS connection, MIN(us) AS first_us, MIN(id) AS at_byte
FROM frames WHERE event IN ('error', 'lost')
GROUP BY event, kind, rule, text ORDER BY event, times DESC, rule, text LIMIT {most}
""",
}
