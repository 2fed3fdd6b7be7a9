"""The rows of a staging store: its tables and statements, which are the same for SQLite and PostgreSQL.

Each row has a checksum, its seal, which is verified when the row is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import attrs

from muxkit.pipeline.staging.records import Application, Block, Encoding, Stream, Transaction
from muxkit.storage import StoreCorrupt
from muxkit.storage.sqlite import Value

Run = Callable[[str, Sequence[Value]], list[tuple[Value, ...]]]
RunMany = Callable[[str, Sequence[Sequence[Value]]], object]

RecordT = TypeVar("RecordT", Application, Transaction, Stream)

PURGED_AT_ONCE = 64  # blocks to delete per unit of work
STEP = 16  # blocks to fetch per query, because the size of a block isn't known before it is read


# Entry n, counted from 1, upgrades the tables from version n - 1 to version n. The type names are SQLite's.
MIGRATIONS = (
    (
        "CREATE TABLE staging_applications (stream TEXT NOT NULL, app TEXT NOT NULL, "
        "batch INTEGER NOT NULL, row_count INTEGER NOT NULL, staged INTEGER NOT NULL, "
        "transactions INTEGER NOT NULL, due REAL, "
        "seal INTEGER NOT NULL, PRIMARY KEY (stream, app))",
        "CREATE INDEX staging_applications_due ON staging_applications (due) WHERE due IS NOT NULL",
        "CREATE TABLE staging_transactions (id TEXT NOT NULL PRIMARY KEY, stream TEXT NOT NULL, "
        "app TEXT NOT NULL, batch INTEGER NOT NULL, encoding TEXT NOT NULL, ttl REAL NOT NULL, "
        "due REAL, row_count INTEGER NOT NULL, size INTEGER NOT NULL, prepared INTEGER NOT NULL, "
        "base INTEGER, seal INTEGER NOT NULL)",
        "CREATE INDEX staging_transactions_staged ON staging_transactions (stream, app, batch) WHERE base IS NULL",
        "CREATE INDEX staging_transactions_base ON staging_transactions (stream, base) WHERE base IS NOT NULL",
        "CREATE INDEX staging_transactions_due ON staging_transactions (due) WHERE due IS NOT NULL",
        "CREATE TABLE staging_blocks (id TEXT NOT NULL, first_row INTEGER NOT NULL, "
        "row_count INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL, "
        "PRIMARY KEY (id, first_row))",
        "CREATE TABLE staging_garbage (id TEXT NOT NULL PRIMARY KEY)",
        "CREATE TABLE staging_streams (name TEXT NOT NULL PRIMARY KEY, head INTEGER NOT NULL, "
        "trimmed INTEGER NOT NULL, seal INTEGER NOT NULL)",
    ),
)
POSTGRES_TYPES = {" TEXT": ' TEXT COLLATE "C"', " INTEGER": " BIGINT", " REAL": " DOUBLE PRECISION", " BLOB": " BYTEA"}


def postgres_migrations() -> tuple[tuple[str, ...], ...]:
    """Return the migrations with PostgreSQL's type names."""
    kinds = re.compile("|".join(POSTGRES_TYPES))
    return tuple(
        tuple(kinds.sub(lambda found: POSTGRES_TYPES[found[0]], statement) for statement in statements)
        for statements in MIGRATIONS
    )


@attrs.frozen
class Table:
    """A table whose rows are records of one kind. Its columns are the fields of the record, starting with the key."""

    name: str
    noun: str
    """The name of a record in error texts, such as `an application`."""
    kind: type[attrs.AttrsInstance]
    key_size: int
    columns: tuple[str, ...] = attrs.field(init=False)

    @columns.default
    def _columns_of_kind(self) -> tuple[str, ...]:
        names = (field.name for field in attrs.fields(self.kind))
        return tuple("row_count" if name == "rows" else name for name in names)  # ROWS is a keyword of SQL

    @property
    def is_key(self) -> str:
        """The SQL condition for a row with a given key."""
        return " AND ".join(f"{name} = ?" for name in self.columns[: self.key_size])


TABLES: dict[type, Table] = {
    Application: Table("staging_applications", "an application", Application, key_size=2),
    Transaction: Table("staging_transactions", "a transaction", Transaction, key_size=1),
    Stream: Table("staging_streams", "a stream", Stream, key_size=1),
}


@attrs.define(eq=False, slots=False)
class Rows:
    """The rows behind one connection, during one unit of work. The store makes all its checks before it writes.

    `lock` is appended to a SELECT whose rows must stay locked until the end of the transaction.
    """

    _run: Run
    _run_many: RunMany
    _lock: str = attrs.field(default="", kw_only=True)
    shrink: Callable[[], bool] = attrs.field(default=lambda: False, kw_only=True)
    """Returns some unused space to the disk. The result is True if there may be more."""
    _known: set[tuple[Value, ...]] = attrs.field(factory=set, init=False)  # tables and keys that this unit has read
    _changed: dict[str, None] = attrs.field(factory=dict, init=False)

    def begin(self) -> None:
        """Prepare for another unit of work."""
        self._known.clear()

    def changed(self, stream: str) -> None:
        """Wake the tasks that wait for this stream once the work is durable."""
        self._changed[stream] = None

    def take_changed(self) -> list[str]:
        """Return the streams whose waiters must be woken, and forget them."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    # ------------------------------------------------------------------------ records

    def find(self, kind: type[RecordT], condition: str, *values: Value) -> list[RecordT]:
        """Return the records of this kind for which an SQL condition holds. Raises `StoreCorrupt` for a damaged row."""
        table: Table = TABLES[kind]
        records = []
        columns = ", ".join(table.columns)
        for *row, seal in self._run(f"SELECT {columns}, seal FROM {table.name} WHERE {condition}", values):
            if seal != _seal(row):
                raise StoreCorrupt(f"{table.noun} is not what was written")
            self._known.add((table.name, *row[: table.key_size]))
            of_its_types: list[Any] = row  # the seal is right, so the types are
            records.append(kind(*of_its_types))
        return records

    def get(self, kind: type[RecordT], *key: Value, locked: bool = False) -> RecordT | None:
        """Return the record with this key. With `locked`, no other server can change it during this unit of work."""
        return next(iter(self.find(kind, TABLES[kind].is_key + self._lock * locked, *key)), None)

    def save(self, record: Application | Transaction | Stream) -> None:
        """Insert or update a record."""
        table = TABLES[type(record)]
        row = [_plain(getattr(record, field.name)) for field in attrs.fields(type(record))]
        key, values = row[: table.key_size], row[table.key_size :]
        if (table.name, *key) in self._known:
            changes = ", ".join(f"{name} = ?" for name in (*table.columns[table.key_size :], "seal"))
            self._run(f"UPDATE {table.name} SET {changes} WHERE {table.is_key}", (*values, _seal(row), *key))
        else:
            # If another server has inserted it in the meantime, this fails, and the unit of work is repeated.
            marks = ", ".join("?" * (len(row) + 1))
            self._run(f"INSERT INTO {table.name} VALUES ({marks})", (*row, _seal(row)))
            self._known.add((table.name, *key))

    def remove(self, kind: type[RecordT], *key: Value) -> None:
        """Delete the record with this key."""
        table = TABLES[kind]
        self._run(f"DELETE FROM {table.name} WHERE {table.is_key}", key)
        self._known.discard((table.name, *key))

    def applications(self) -> int:
        """Return the number of applications."""
        return _int(self._run("SELECT count(*) FROM staging_applications", ())[0][0])

    def remove_transaction(self, id: str) -> None:
        """Delete a transaction. `purge` deletes its blocks later, since there may be many and a commit mustn't wait."""
        self.remove(Transaction, id)
        self._run("INSERT INTO staging_garbage (id) VALUES (?) ON CONFLICT DO NOTHING", (id,))

    def reclaim(self, id: str) -> None:
        """Delete the remaining blocks of a transaction with this name, before another one gets the name."""
        # Locked as in `purge`, which must not delete the blocks of the next transaction.
        if self._run(f"SELECT id FROM staging_garbage WHERE id = ?{self._lock}", (id,)):
            self._run("DELETE FROM staging_blocks WHERE id = ?", (id,))
            self._run("DELETE FROM staging_garbage WHERE id = ?", (id,))

    def purge(self) -> bool:
        """Delete some blocks of deleted transactions. Return True if there may be more."""
        found = self._run(f"SELECT id FROM staging_garbage LIMIT 1{self._lock}", ())
        if not found:
            return False
        id = found[0][0]
        firsts = self._run(
            "SELECT first_row FROM staging_blocks WHERE id = ? ORDER BY first_row LIMIT ?", (id, PURGED_AT_ONCE)
        )
        if firsts:
            self._run("DELETE FROM staging_blocks WHERE id = ? AND first_row <= ?", (id, firsts[-1][0]))
        if len(firsts) < PURGED_AT_ONCE:
            self._run("DELETE FROM staging_garbage WHERE id = ?", (id,))
        return True

    # ------------------------------------------------------------------------ blocks

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        """Add new blocks to a transaction."""
        self._run_many(
            "INSERT INTO staging_blocks (id, first_row, row_count, crc, body) VALUES (?, ?, ?, ?, ?)",
            [(id, *block) for block in blocks],
        )

    def spans(self, id: str, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return the blocks of a transaction that start in this range of rows, in order and without their bodies."""
        found = self._run(
            "SELECT first_row, row_count, crc FROM staging_blocks WHERE id = ? AND first_row BETWEEN ? AND ? "
            "ORDER BY first_row",
            (id, first, last),
        )
        return [(_int(at), _int(rows), _int(crc)) for at, rows, crc in found]

    def blocks(self, id: str, row: int, most_bytes: int) -> list[Block]:
        """Return the block with this row, and as many of the following ones as fit into `most_bytes`; at least one."""
        at = self._run("SELECT max(first_row) FROM staging_blocks WHERE id = ? AND first_row <= ?", (id, row))[0][0]
        after = -1 if at is None else _int(at) - 1
        found: list[Block] = []
        size = 0
        while True:
            rows = self._run(
                "SELECT first_row, row_count, crc, body FROM staging_blocks WHERE id = ? AND first_row > ? "
                "ORDER BY first_row LIMIT ?",
                (id, after, STEP),
            )
            for first, count, crc, body in rows:
                if type(body) is not bytes or crc32(body) != crc:
                    raise StoreCorrupt(f"transaction {id}: the rows from {_int(first)} are not what was written")
                size += len(body)
                if found and size > most_bytes:
                    return found
                block = Block(_int(first), _int(count), _int(crc), body)
                found.append(block)
                after = block.first
            if len(rows) < STEP:
                return found


def _plain(value: object) -> Value:
    """Return the value of a field in the form in which the database stores it."""
    match value:
        case bool():
            return int(value)
        case Encoding():
            return value.value
        case None | int() | float() | str():
            return value
    raise TypeError(f"{type(value).__name__} has no column")


def _seal(row: Sequence[Value]) -> int:
    return crc32(repr(tuple(row)).encode())


def _int(value: Value) -> int:
    if type(value) is not int:
        raise StoreCorrupt(f"a number is a {type(value).__name__}")
    return value
