"""How is a file opened, so that it is ours alone, durable, and what it was when it was closed?

Settings are made one by one and read back. A file that is not in order is moved aside, and never begun anew in silence.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from muxkit.protocols.restream.store.errors import (
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
    StoreVersion,
)
from muxkit.protocols.restream.store.sqlite_schema import APPLICATION, MIGRATIONS, STATEMENTS, VERSION
from muxkit.storage.lock_file import SideFile
from muxkit.storage.sqlite_connection import (
    BUSY,
    CORRUPT,
    ERROR,
    FULL,
    LOCKED,
    NOTADB,
    PERM,
    READONLY,
    Connect,
    Connection,
    SqliteFault,
    Value,
    Version,
)

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("muxkit")

Journal = Literal["auto", "wal", "delete"]

FULL_SYNC = 2  # what `PRAGMA synchronous` answers for FULL
INCREMENTAL = 2  # what `PRAGMA auto_vacuum` answers for INCREMENTAL
LAST_FORMAT = 2  # of a file's head, https://sqlite.org/fileformat.html
JOURNAL_BYTES = 16 << 20  # what a journal or log may keep of the disk while it is not needed

_warned: set[Version] = set()


def has_wal_reset_bug(version: Version) -> bool:
    """Whether this SQLite can lose commits in WAL mode when two connections meet (sqlite.org/wal.html#walresetbug)."""
    return not (version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51, 0) or (3, 44, 6) <= version < (3, 45, 0))


class SqliteFile:
    """The file, its lock, and the one connection to it. Everything is called in one thread."""

    def __init__(self, path: Path, connect: Connect, *, journal: Journal, most_bytes: int) -> None:
        self.path = path
        self._connect = connect
        self._journal = journal
        self._most_bytes = most_bytes
        self._side = SideFile(path)
        self._connection: Connection | None = None
        self._corrupt: tuple[str, str | None] | None = None

    def open(self) -> Connection:
        """Lock the file, look through it, and bring its tables up to date."""
        self._side.acquire()
        try:
            return self._reconnect(thoroughly=True)
        except BaseException:
            self.close()
            raise

    def connection(self) -> Connection:
        """The connection; a new one after `lose`."""
        if self._corrupt is not None:
            raise StoreCorrupt(self._corrupt[0], aside=self._corrupt[1])
        return self._reconnect(thoroughly=False) if self._connection is None else self._connection

    def lose(self) -> None:
        """Trust the connection no more: after an I/O error only the file knows what was stored."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SqliteFault):
                connection.close()

    def close(self) -> None:
        """Let others have the file."""
        self.lose()
        self._side.release()

    def quarantine(self, what: str) -> StoreCorrupt:
        """Move the file aside, if it ever was a store; from now on there is no connection."""
        self.lose()
        if self._corrupt is not None:
            return StoreCorrupt(self._corrupt[0], aside=self._corrupt[1])
        aside = self._move_aside() if self._side.was_made else None
        where = f"it was moved to {aside}" if aside else "it was left as it is"
        self._corrupt = (
            f"{self.path} is not in order: {what}; {where}. Restore it from a copy, or, to begin with an empty store, "
            f"remove {self._side.path}",
            aside,
        )
        _log.error("%s", self._corrupt[0])
        return StoreCorrupt(self._corrupt[0], aside=aside)

    def judge(self, fault: SqliteFault) -> StoreError:
        """What the fault means to the user."""
        if fault.code in (CORRUPT, NOTADB):
            return self.quarantine(fault.text)
        if fault.code == FULL:
            return StoreFull(
                f"{self.path}: {fault.text}; make room on its disk, or raise StoreLimits(bytes={self._most_bytes})"
            )
        if fault.code in (READONLY, PERM):
            return StoreReadOnly(f"{self.path}: {fault.text}; the store needs to write it and in {self.path.parent}")
        if fault.code in (BUSY, LOCKED):
            return StoreLocked(str(self.path), None)
        return StoreFailed(
            f"{self.path}: {fault.text} (SQLite code {fault.code}); what was under way may have been stored or not"
        )

    # ------------------------------------------------------------------------ opening

    def _reconnect(self, *, thoroughly: bool) -> Connection:
        try:
            self._connection = connection = self._connect(self.path)
            self._prepare(connection, thoroughly=thoroughly)
        except SqliteFault as fault:
            # These statements are right: if SQLite cannot make sense of one, it is for what the file says. And it
            # will not write a file whose head says that it is of a format to come.
            is_senseless = thoroughly and (
                fault.code == ERROR or (fault.code == READONLY and _is_of_a_format_to_come(self.path))
            )
            error = self.quarantine(fault.text) if is_senseless else self.judge(fault)
            self.lose()
            raise error from fault
        except StoreError:
            self.lose()
            raise
        return connection

    def _prepare(self, connection: Connection, *, thoroughly: bool) -> None:
        # Before the first page is read: then the log needs no shared memory, and nobody else gets in.
        _set(connection, "locking_mode", "EXCLUSIVE", "exclusive")
        _set(connection, "trusted_schema", "OFF", 0)
        _set(connection, "cell_size_check", "ON", 1)
        _set(connection, "fullfsync", "ON", 1)  # where fsync alone does not reach the disk
        _set(connection, "checkpoint_fullfsync", "ON", 1)
        version = self._identify(connection)
        if not version:
            connection.run("PRAGMA auto_vacuum = INCREMENTAL")
        journal = self._journal_mode(connection.version)
        _set(connection, "journal_mode", journal.upper(), journal)
        _set(connection, "synchronous", "FULL", FULL_SYNC)
        _set(connection, "journal_size_limit", str(JOURNAL_BYTES), JOURNAL_BYTES)
        if thoroughly and version:
            self._look_through(connection)
        self._migrate(connection, version)
        if _answer(connection, "auto_vacuum") != INCREMENTAL:
            raise SqliteFault(CORRUPT, "its head says another auto_vacuum than it was made with")
        page_bytes = _answer(connection, "page_size")
        most = max(1, self._most_bytes // page_bytes) if type(page_bytes) is int else 1
        connection.run(f"PRAGMA max_page_count = {min(most, 2**32 - 2)}")
        connection.sync_names()
        self._side.mark_made()

    def _identify(self, connection: Connection) -> int:
        """The version of its tables; 0 for a file that is still empty."""
        tables = connection.run("SELECT count(*) FROM sqlite_master")[0][0]
        application, version = _answer(connection, "application_id"), _answer(connection, "user_version")
        if tables == 0 and application == 0 and version == 0:
            if self._side.was_made:
                raise SqliteFault(CORRUPT, "it is missing or empty, though a store was made here")
            return 0
        if application != APPLICATION or type(version) is not int or version < 1:
            raise StoreVersion(f"{self.path} is a database of something else; choose another file")
        if version > VERSION:
            raise StoreVersion(
                f"{self.path} is of version {version}, and this muxkit knows up to {VERSION}; use a newer muxkit"
            )
        return version

    def _journal_mode(self, version: Version) -> str:
        if self._journal != "auto":
            return self._journal
        if not has_wal_reset_bug(version):
            return "wal"
        if version not in _warned:
            _warned.add(version)
            _log.warning(
                "SQLite %s can lose commits in WAL mode: session stores use a rollback journal, which is slower; "
                "SQLite 3.51.3 is mended",
                ".".join(map(str, version)),
            )
        return "delete"

    def _look_through(self, connection: Connection) -> None:
        found = connection.run("PRAGMA integrity_check(1)")
        if found != [("ok",)]:
            raise SqliteFault(CORRUPT, "; ".join(str(row[0]) for row in found))
        statements = {row[0] for row in connection.run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if not statements <= STATEMENTS:
            raise SqliteFault(CORRUPT, "its tables are not the ones that a store has")

    def _migrate(self, connection: Connection, version: int) -> None:
        connection.run("BEGIN IMMEDIATE")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.run(statement)
        connection.run(f"PRAGMA application_id = {APPLICATION}")
        # Also when it says so already: writing is the only way to learn whether the file can be written.
        connection.run(f"PRAGMA user_version = {VERSION}")
        connection.run("COMMIT")

    def _move_aside(self) -> str | None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        moved = None
        for suffix in ("", "-wal", "-journal"):
            with suppress(OSError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
                moved = str(aside)
        return moved


def _set(connection: Connection, name: str, value: str, answer: Value) -> None:
    connection.run(f"PRAGMA {name} = {value}")
    if (got := _answer(connection, name)) != answer:
        raise StoreFailed(f"SQLite answered {got!r} to PRAGMA {name} = {value}; the store would not be safe")


def _answer(connection: Connection, name: str) -> Value:
    found = connection.run(f"PRAGMA {name}")
    return found[0][0] if found else None


def _is_of_a_format_to_come(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        head = file.read(20)
        return len(head) == 20 and max(head[18], head[19]) > LAST_FORMAT
    return False
