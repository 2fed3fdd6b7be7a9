"""The questions about captures, in DuckDB's SQL over one table of frames, and the queries that merge partial answers.

The table `frames` has `connection` (prefixed with its capture), `capture`, `number`, `us` (microseconds since 1970) and
the columns of a capture from `event` on. It contains either all rows of a connection or none, and possibly only some of
the connections. So except for sums, every question is asked for each connection separately. Percentiles are exact: the
p-th percentile is the smallest value that at least p percent of all values don't exceed.
"""

from __future__ import annotations

from typing import Final

# A ping is answered in order, but never on another transport (Relink resumes on a new one). A request ends with the
# last byte of its response. An acknowledgement is compared with the message that it names.
TRIPS: Final = """
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
  SELECT ping.connection AS connection, 'ping' AS what, ping.us AS us, pong.us - ping.us AS trip
  FROM counted AS ping JOIN counted AS pong
    ON ping.connection = pong.connection AND ping.channel = pong.channel AND ping.transport = pong.transport
    AND ping.turn = pong.turn AND ping.sign = 'ping' AND pong.sign = 'pong'
  UNION ALL
  SELECT connection, 'request' AS what, began AS us, ended - began AS trip
  FROM requests WHERE began IS NOT NULL AND ended IS NOT NULL
  UNION ALL
  SELECT sent.connection AS connection, acknowledged.kind AS what, sent.us AS us, acknowledged.us - sent.us AS trip
  FROM sent JOIN acknowledged
    ON sent.connection = acknowledged.connection AND sent.channel = acknowledged.channel AND sent.id = acknowledged.id
"""

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
    "captures": """
SELECT capture, MIN(us) AS first_us, MAX(us) AS last_us, COUNT(DISTINCT connection) AS connections,
  SUM(CASE WHEN event = 'frame' THEN 1 ELSE 0 END) AS frames,
  SUM(CASE WHEN event = 'frame' AND direction = 'in' THEN size ELSE 0 END) AS bytes_in,
  SUM(CASE WHEN event = 'frame' AND direction = 'out' THEN size ELSE 0 END) AS bytes_out,
  SUM(CASE WHEN event = 'dropped' THEN size ELSE 0 END) AS dropped,
  SUM(CASE WHEN event = 'gap' THEN size ELSE 0 END) AS missing
FROM frames GROUP BY capture ORDER BY first_us, capture LIMIT {most}
""",
    # Each step is larger than the one before by a factor of the square root of 2.
    "latency": TRIPS
    + """)
SELECT what, us - us % {width} AS bucket_us,
  CAST(FLOOR(POW(2, FLOOR(2 * LOG2(GREATEST(trip, 1))) / 2)) AS BIGINT) AS low_us, COUNT(*) AS trips
FROM trips WHERE trip >= 0 GROUP BY what, us - us % {width}, low_us ORDER BY what, bucket_us, low_us
""",
    "activity": """
WITH busiest AS (
  SELECT connection FROM frames WHERE event = 'frame'
  GROUP BY connection ORDER BY SUM(size) DESC, connection LIMIT {shown}
)
SELECT connection, us - us % {width} AS bucket_us, direction, SUM(size) AS bytes
FROM frames WHERE event = 'frame' AND connection IN (SELECT connection FROM busiest)
GROUP BY connection, us - us % {width}, direction ORDER BY connection, bucket_us, direction
""",
    "connections": """
SELECT connection, MIN(capture) AS capture, MIN(us) AS first_us, MAX(us) AS last_us,
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
    # A channel spends its own credit from the first grant on. What is sent on it before is its opening, which uses the
    # credit of the top level. After `gone`, the same id means another channel.
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
    "round_trips": TRIPS
    + """), ranked AS (
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
    # Jain's index is 1 if all values are equal, and 1 / n if one of n has everything.
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

MERGES: Final = {
    "totals": """
SELECT MIN(first_us) AS first_us, MAX(last_us) AS last_us, CAST(SUM(n) AS BIGINT) AS n,
  CAST(SUM(dropped) AS BIGINT) AS dropped, CAST(SUM(gaps) AS BIGINT) AS gaps, CAST(SUM(missing) AS BIGINT) AS missing,
  CAST(SUM(unverified) AS BIGINT) AS unverified, CAST(SUM(broken) AS BIGINT) AS broken
FROM parts
""",
    "captures": """
SELECT capture, MIN(first_us) AS first_us, MAX(last_us) AS last_us, CAST(SUM(connections) AS BIGINT) AS connections,
  CAST(SUM(frames) AS BIGINT) AS frames, CAST(SUM(bytes_in) AS BIGINT) AS bytes_in,
  CAST(SUM(bytes_out) AS BIGINT) AS bytes_out, CAST(SUM(dropped) AS BIGINT) AS dropped,
  CAST(SUM(missing) AS BIGINT) AS missing
FROM parts GROUP BY capture ORDER BY first_us, capture LIMIT {most}
""",
    "latency": """
SELECT what, bucket_us, low_us, CAST(SUM(trips) AS BIGINT) AS trips
FROM parts GROUP BY what, bucket_us, low_us ORDER BY what, bucket_us, low_us
""",
    "activity": """
SELECT * FROM parts WHERE connection IN (
  SELECT connection FROM parts GROUP BY connection ORDER BY SUM(bytes) DESC, connection LIMIT {shown}
) ORDER BY connection, bucket_us, direction
""",
    "connections": "SELECT * FROM parts ORDER BY bytes_in + bytes_out DESC, connection LIMIT {most}",
    "volumes": "SELECT * FROM parts ORDER BY bytes DESC, frames DESC, connection, channel, direction LIMIT {most}",
    "rates": """
SELECT bucket_us, direction, CAST(SUM(frames) AS BIGINT) AS frames, CAST(SUM(bytes) AS BIGINT) AS bytes
FROM parts GROUP BY bucket_us, direction ORDER BY bucket_us, direction
""",
    "credit": "SELECT * FROM parts ORDER BY stopped_us DESC, stops DESC, connection, channel LIMIT {most}",
    "round_trips": "SELECT * FROM parts ORDER BY what, connection LIMIT {most}",
    "resends": "SELECT * FROM parts ORDER BY resent DESC, connection, channel LIMIT {most}",
    "fairness": "SELECT * FROM parts ORDER BY jain, connection, direction LIMIT {most}",
    "violations": """
SELECT event, kind, rule, text, CAST(SUM(times) AS BIGINT) AS times, CAST(SUM(connections) AS BIGINT) AS connections,
  MIN(connection) AS connection, MIN(first_us) AS first_us, MIN(at_byte) AS at_byte
FROM parts GROUP BY event, kind, rule, text ORDER BY event, times DESC, rule, text LIMIT {most}
""",
}
"""By question, the query that merges partial answers, each about some of the connections, in the table `parts`."""
