"""The rows of a staging store: its tables and statements, the same for SQLite and PostgreSQL.

Each row carries a checksum as a seal, which is compared when the row is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from zlib import crc32

import attrs

from muxkit.pipeline.staging.records import Application, Block, Encoding, Key, Span, Stream, Transaction
from muxkit.storage import StoreCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit.storage.sqlite import Value

    Run = Callable[[str, Sequence[Value]], list[tuple[Value, ...]]]
    RunMany = Callable[[str, Sequence[Sequence[Value]]], None]

PURGED_AT_ONCE = 64  # blocks
STEP = 16  # blocks that are fetched at once, as the size of a block is not known before it is read


@attrs.frozen
class Dialect:
    """The types and the locking clause of one database."""

    text: str
    integer: str
    number: str
    binary: str
    lock: str  # after a SELECT: locks the rows until the end of the transaction


SQLITE = Dialect(text="TEXT", integer="INTEGER", number="REAL", binary="BLOB", lock="")
POSTGRES = Dialect(
    text='TEXT COLLATE "C"', integer="BIGINT", number="DOUBLE PRECISION", binary="BYTEA", lock=" FOR UPDATE"
)


def migrations(dialect: Dialect) -> tuple[tuple[str, ...], ...]:
    """Return the statements that make each version of the tables from the one before."""
    text, integer, number, binary = dialect.text, dialect.integer, dialect.number, dialect.binary
    return (
        (
            f"CREATE TABLE staging_applications (stream {text} NOT NULL, app {text} NOT NULL, "
            f"batch {integer} NOT NULL, row_count {integer} NOT NULL, staged {integer} NOT NULL, "
            f"transactions {integer} NOT NULL, due {number}, "
            f"seal {integer} NOT NULL, PRIMARY KEY (stream, app))",
            "CREATE INDEX staging_applications_due ON staging_applications (due) WHERE due IS NOT NULL",
            f"CREATE TABLE staging_transactions (id {text} NOT NULL PRIMARY KEY, stream {text} NOT NULL, "
            f"app {text} NOT NULL, batch {integer} NOT NULL, encoding {text} NOT NULL, ttl {number} NOT NULL, "
            f"due {number}, row_count {integer} NOT NULL, size {integer} NOT NULL, prepared {integer} NOT NULL, "
            f"base {integer}, seal {integer} NOT NULL)",
            "CREATE INDEX staging_transactions_staged ON staging_transactions (stream, app, batch) WHERE base IS NULL",
            "CREATE INDEX staging_transactions_base ON staging_transactions (stream, base) WHERE base IS NOT NULL",
            "CREATE INDEX staging_transactions_due ON staging_transactions (due) WHERE due IS NOT NULL",
            f"CREATE TABLE staging_blocks (id {text} NOT NULL, first_row {integer} NOT NULL, "
            f"row_count {integer} NOT NULL, crc {integer} NOT NULL, body {binary} NOT NULL, "
            "PRIMARY KEY (id, first_row))",
            f"CREATE TABLE staging_garbage (id {text} NOT NULL PRIMARY KEY)",
            f"CREATE TABLE staging_streams (name {text} NOT NULL PRIMARY KEY, head {integer} NOT NULL, "
            f"trimmed {integer} NOT NULL, seal {integer} NOT NULL)",
        ),
    )


TRANSACTION = "id, stream, app, batch, encoding, ttl, due, row_count, size, prepared, base"


class Rows:
    """The rows behind one connection, during one unit of work. The store writes only after all its checks."""

    def __init__(
        self, run: Run, run_many: RunMany, dialect: Dialect, shrink: Callable[[], bool] = lambda: False
    ) -> None:
        self._run = run
        self._run_many = run_many
        self._lock = dialect.lock
        self._shrink = shrink
        self._known: set[Key | str] = set()  # the applications and streams that this unit of work found
        self._changed: dict[str, None] = {}

    def begin(self) -> None:
        """Start another unit of work."""
        self._known.clear()

    def take_changed(self) -> list[str]:
        """Return the streams whose waiters are to be woken, and forget them."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    # ------------------------------------------------------------------------ applications

    def application(self, key: Key) -> Application | None:
        """Return the application, locked until the unit of work is over."""
        found = self._run(
            "SELECT stream, app, batch, row_count, staged, transactions, due, seal FROM staging_applications "
            f"WHERE stream = ? AND app = ?{self._lock}",
            key,
        )
        if not found:
            return None
        _, _, batch, rows, staged, transactions, due = _checked(found[0], "an application")
        self._known.add(key)
        # The seal fits, so it is of the type that was written.
        return Application(key, _int(batch), _int(rows), _int(staged), _int(transactions), cast("float | None", due))

    def save_application(self, application: Application) -> None:
        key = application.key
        due = None if application.due is None else float(application.due)
        columns = (*key, application.batch, application.rows, application.staged, application.transactions, due)
        seal = _seal(columns)
        if key in self._known:
            self._run(
                "UPDATE staging_applications SET batch = ?, row_count = ?, staged = ?, transactions = ?, due = ?, "
                "seal = ? WHERE stream = ? AND app = ?",
                (*columns[2:], seal, *key),
            )
        else:
            # If another server has made it meanwhile, this fails and the unit of work is repeated.
            self._run("INSERT INTO staging_applications VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*columns, seal))
            self._known.add(key)

    def applications(self) -> int:
        """Return the number of applications."""
        return _int(self._run("SELECT count(*) FROM staging_applications", ())[0][0])

    def remove_application(self, key: Key) -> None:
        self._run("DELETE FROM staging_applications WHERE stream = ? AND app = ?", key)
        self._known.discard(key)

    def overdue_applications(self, now: float, most: int) -> list[Key]:
        """Return some expired applications with nothing staged."""
        found = self._run(
            "SELECT stream, app FROM staging_applications WHERE due IS NOT NULL AND due <= ? AND transactions = 0 "
            "LIMIT ?",
            (now, most),
        )
        return [Key(cast("str", stream), cast("str", app)) for stream, app in found]

    # ------------------------------------------------------------------------ transactions

    def _transactions(self, condition: str, *values: Value) -> list[Transaction]:
        found = self._run(f"SELECT {TRANSACTION}, seal FROM staging_transactions WHERE {condition}", values)
        return [_transaction(row) for row in found]

    def transaction(self, id: str) -> Transaction | None:
        return next(iter(self._transactions("id = ?", id)), None)

    def staged(self, key: Key, upto: int) -> list[Transaction]:
        """Return the transactions of this application that are not committed, of batches up to this one."""
        return self._transactions("base IS NULL AND stream = ? AND app = ? AND batch <= ?", *key, upto)

    def overdue(self, now: float, most: int) -> list[Transaction]:
        """Return some expired transactions."""
        return self._transactions("due IS NOT NULL AND due <= ? LIMIT ?", now, most)

    def published(self, stream: str, id: int) -> Transaction | None:
        """Return the committed transaction that holds this row of the stream."""
        condition = "base IS NOT NULL AND stream = ? AND base < ? AND row_count > 0 ORDER BY base DESC LIMIT 1"
        return next(iter(self._transactions(condition, stream, id)), None)

    def passed(self, stream: str, upto: int, most: int) -> list[str]:
        """Return some committed transactions of the stream whose rows all have ids up to this one."""
        found = self._run(
            "SELECT id FROM staging_transactions WHERE base IS NOT NULL AND stream = ? AND base + row_count <= ? "
            "ORDER BY base LIMIT ?",
            (stream, upto, most),
        )
        return [cast("str", id) for (id,) in found]

    def save_transaction(self, transaction: Transaction) -> None:
        columns = _columns(transaction)
        self._run(
            f"INSERT INTO staging_transactions ({TRANSACTION}, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET due = excluded.due, row_count = excluded.row_count, size = excluded.size, "
            "prepared = excluded.prepared, base = excluded.base, seal = excluded.seal",
            (*columns, _seal(columns)),
        )

    def remove_transaction(self, id: str) -> None:
        """Delete the transaction. There may be many blocks: `purge` deletes them, so that a commit does not wait."""
        self._run("DELETE FROM staging_transactions WHERE id = ?", (id,))
        self._run("INSERT INTO staging_garbage (id) VALUES (?) ON CONFLICT DO NOTHING", (id,))

    def reclaim(self, id: str) -> None:
        """Delete what is left of a transaction of this name, before another one gets the name."""
        # Locked, as in `purge`, which must not delete the blocks of the next transaction.
        if self._run(f"SELECT id FROM staging_garbage WHERE id = ?{self._lock}", (id,)):
            self._run("DELETE FROM staging_blocks WHERE id = ?", (id,))
            self._run("DELETE FROM staging_garbage WHERE id = ?", (id,))

    def purge(self) -> bool:
        """Delete a portion of the blocks of deleted transactions; True if there may be more."""
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

    def shrink(self) -> bool:
        """Return some unused space to the disk; True if there is more."""
        return self._shrink()

    # ------------------------------------------------------------------------ blocks

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        """Add new blocks of a transaction."""
        self._run_many(
            "INSERT INTO staging_blocks (id, first_row, row_count, crc, body) VALUES (?, ?, ?, ?, ?)",
            [(id, *block) for block in blocks],
        )

    def spans(self, id: str, first: int, last: int) -> list[Span]:
        """Return the blocks of a transaction that begin at one of these rows, in order."""
        found = self._run(
            "SELECT first_row, row_count, crc FROM staging_blocks WHERE id = ? AND first_row BETWEEN ? AND ? "
            "ORDER BY first_row",
            (id, first, last),
        )
        return [Span(_int(at), _int(rows), _int(crc)) for at, rows, crc in found]

    def blocks(self, id: str, row: int, most_bytes: int) -> list[Block]:
        """Return the block that holds this row and as many of the next ones as fit; at least one."""
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

    # ------------------------------------------------------------------------ streams

    def stream(self, name: str) -> Stream | None:
        """Return the stream, locked until the unit of work is over."""
        found = self.look_at_stream(name, self._lock)
        if found is not None:
            self._known.add(name)
        return found

    def look_at_stream(self, name: str, lock: str = "") -> Stream | None:
        """Return the stream without locking it."""
        found = self._run(f"SELECT name, head, trimmed, seal FROM staging_streams WHERE name = ?{lock}", (name,))
        if not found:
            return None
        _, head, trimmed = _checked(found[0], "a stream")
        return Stream(name, _int(head), _int(trimmed))

    def save_stream(self, stream: Stream) -> None:
        columns = (stream.name, stream.head, stream.trimmed)
        seal = _seal(columns)
        if stream.name in self._known:
            self._run(
                "UPDATE staging_streams SET head = ?, trimmed = ?, seal = ? WHERE name = ?",
                (*columns[1:], seal, stream.name),
            )
        else:
            self._run("INSERT INTO staging_streams VALUES (?, ?, ?, ?)", (*columns, seal))
            self._known.add(stream.name)

    def changed(self, stream: str) -> None:
        """Wake the tasks that wait for this stream when the work is durable."""
        self._changed[stream] = None


def _columns(transaction: Transaction) -> tuple[Value, ...]:
    return (
        transaction.id,
        *transaction.key,
        transaction.batch,
        transaction.encoding.value,
        float(transaction.ttl),
        None if transaction.due is None else float(transaction.due),
        transaction.rows,
        transaction.size,
        int(transaction.prepared),
        transaction.base,
    )


def _transaction(row: tuple[Value, ...]) -> Transaction:
    # The seal fits, so these are the types that were written.
    id, stream, app, batch, encoding, ttl, due, rows, size, prepared, base = _checked(row, "a transaction")
    return Transaction(
        cast("str", id),
        Key(cast("str", stream), cast("str", app)),
        cast("int", batch),
        Encoding(encoding),
        cast("float", ttl),
        cast("float | None", due),
        cast("int", rows),
        cast("int", size),
        bool(prepared),
        cast("int | None", base),
    )


def _checked(row: tuple[Value, ...], what: str) -> tuple[Value, ...]:
    *columns, seal = row
    if seal != _seal(tuple(columns)):
        raise StoreCorrupt(f"{what} is not what was written")
    return tuple(columns)


def _seal(columns: tuple[Value, ...]) -> int:
    return crc32(repr(columns).encode())


def _int(value: Value) -> int:
    if type(value) is not int:
        raise StoreCorrupt(f"a number is a {type(value).__name__}")
    return value
