"""A SQLite file as a store: its connection, its lock, its checks, and the backend that runs jobs on it.

`SqliteFile` opens, checks and recovers the file, and `SqliteBackend` runs jobs on it in a thread. Two files next to the
database support them. `LockFile` (`PATH.lock`) keeps other processes out and remembers that a store existed. `Reserve`
(`PATH.reserve`) holds disk space, so that a store on a full disk can still delete rows.

A damaged file is never overwritten or silently replaced by an empty one. It is moved aside, and every further call
fails until the operator has acted.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

from muxkit.runtime import protect_package
from muxkit.storage import errors
from muxkit.storage.schema import Schema
from muxkit.storage.worker import Job, Waiters, Worker, fail_jobs

T = TypeVar("T")

# ---------------------------------------------------------------------------- the connection

Value = int | float | str | bytes | None
Version = tuple[int, int, int]

# Primary result codes, https://sqlite.org/rescode.html
ERROR, PERM, BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB = 1, 3, 5, 6, 8, 10, 11, 13, 14, 26


class SqliteFault(Exception):
    """Raised when a statement fails. `code` is SQLite's primary result code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code: int = code & 0xFF
        self.text = text


class Connection(Protocol):
    """One connection in autocommit mode, used from one thread. Only explicit statements begin transactions."""

    @property
    def version(self) -> Version:
        """The version of the SQLite library."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open. Some errors make SQLite roll it back."""

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        """Run one statement and return all its rows. Raises only `SqliteFault`."""

    def run_many(self, sql: str, values: Sequence[Sequence[Value]], /) -> None:
        """Run one statement that returns no rows, once per sequence in `values`. Raises only `SqliteFault`."""

    def sync_names(self) -> None:
        """Sync the directory, so that a deleted journal doesn't reappear after a power failure."""

    def close(self) -> None:
        """Close the connection. Raises only `SqliteFault`."""


Connect = Callable[[Path], Connection]


class StandardConnection:
    """A connection of the standard library's `sqlite3`."""

    def __init__(self, path: Path) -> None:
        self.version: Version = sqlite3.sqlite_version_info[:3]
        self._directory = path.parent
        try:
            # SQLite would create the file with the default mode, and other users could read the messages.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
        except PermissionError:
            pass  # SQLite may still be able to read the file, and reports why it can't write
        except OSError as error:
            raise SqliteFault(CANTOPEN, str(error)) from error
        try:
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, cached_statements=64)
        except sqlite3.Error as error:
            raise _fault(error) from error

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _fault(error) from error
        except UnicodeDecodeError as error:  # invalid UTF-8 in a column or in an error message
            raise SqliteFault(CORRUPT, str(error)) from error

    def run_many(self, sql: str, values: Sequence[Sequence[Value]], /) -> None:
        try:
            self._connection.executemany(sql, values)
        except sqlite3.Error as error:
            raise _fault(error) from error

    def sync_names(self) -> None:
        with suppress(OSError):  # some systems can't sync a directory, and don't have to
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def close(self) -> None:
        try:
            self._connection.close()
        except sqlite3.Error as error:
            raise _fault(error) from error


def _fault(error: sqlite3.Error) -> SqliteFault:
    # `sqlite3` raises an error without a code for a text column that isn't valid UTF-8. We only write valid text, so
    # the file was damaged or another program wrote it.
    code = getattr(error, "sqlite_errorcode", None)
    return SqliteFault(CORRUPT if code is None else code, str(error))


# ---------------------------------------------------------------------------- the lock

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 1 << 20, os.SEEK_SET)  # a locked range can't be read on Windows, so lock a byte after the text
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


MADE = "a store was made"


class LockFile:
    """`PATH.lock` next to a SQLite file, which locks the store and records that one was created.

    The operating system holds the lock, so it is released when the process ends for any reason. Because of the record,
    a lost or emptied database isn't mistaken for a new one. The file remains when the store is closed.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self.path: Path = store.with_name(store.name + ".lock")
        self._file: int | None = None
        self.was_made: bool = False

    def acquire(self) -> None:
        """Lock the file without waiting.

        Raises:
            StoreLocked: if this or another process holds the lock.
            StoreError: if the lock file can't be opened or written.
        """
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            _lock(file)
        except OSError as error:
            pid = _pid(_read(file))
            os.close(file)
            raise errors.StoreLocked(str(self._store), pid) from error
        self._file = file
        self.was_made = MADE in _read(file)
        try:
            self._write()
        except OSError as error:
            if self.was_made and error.errno in NO_ROOM:
                return  # only the pid is missing from the file, and a store on a full disk must be able to open
            self.release()
            raise _unwritable(self.path, error) from error

    def mark_made(self) -> None:
        """Record that the store exists. From now on, an empty database means that data was lost."""
        if not self.was_made:
            self.was_made = True
            self._write()

    def release(self) -> None:
        """Unlock the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            return
        text = f"pid {os.getpid()}\n" + (f"{MADE}\n" if self.was_made else "")
        # Overwrite first and truncate afterwards, so that the record is in the file at every moment.
        os.pwrite(self._file, text.encode(), 0) if hasattr(os, "pwrite") else _overwrite(self._file, text.encode())
        os.ftruncate(self._file, len(text))
        os.fsync(self._file)


def _overwrite(file: int, text: bytes) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text)


def _read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, 200).decode("ascii", "replace")


def _pid(text: str) -> int | None:
    words = text.split()
    return int(words[1]) if words[:1] == ["pid"] and len(words) > 1 and words[1].isdecimal() else None


# ---------------------------------------------------------------------------- the reserve

RESERVE_BYTES = 2 << 20  # deleting a row journals at most the pages of that row, which has up to 1 MiB by default
RESERVE_SHARE = 8  # the reserve takes at most 1/8 of a small disk or of a small limit
NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Reserve:
    """`PATH.reserve`: disk space that a store allocates when it opens, and releases when its disk is full.

    SQLite needs space even to delete a row, because the journal keeps the pages that change. On a full disk it couldn't
    delete acknowledged messages, so space would never become available. The reserve provides the space for such
    deletions. Jobs that add rows must not use it.

    A released reserve keeps its file with a size of 0, because a full disk may refuse to create a new one.
    """

    def __init__(self, store: Path, most_bytes: int) -> None:
        self.path: Path = store.with_name(store.name + ".reserve")
        self._most_bytes = most_bytes
        self._is_possible = True
        self.is_held: bool = False

    @cached_property
    def size(self) -> int:
        """The size of the reserve in bytes: `RESERVE_BYTES`, or less on a small disk or with a small limit."""
        size = min(RESERVE_BYTES, self._most_bytes // RESERVE_SHARE)
        if hasattr(os, "statvfs"):
            with suppress(OSError):
                disk = os.statvfs(self.path.parent)
                size = min(size, disk.f_blocks * disk.f_frsize // RESERVE_SHARE)
        return max(size, 1)

    @property
    def is_missing(self) -> bool:
        """True while the disk has no room for the reserve. Jobs that add rows must then be refused."""
        return self._is_possible and not self.is_held

    def hold(self) -> bool:
        """Allocate the reserve. Return False if the disk has no room for it."""
        if self.is_held or not self._is_possible:
            return True
        try:
            self.is_held = self._allocate()
        except OSError as error:
            # If the directory allows no new file for another reason, the store works without a reserve.
            self._is_possible = error.errno in NO_ROOM
            self.release()
        return self.is_held or not self._is_possible

    def release(self) -> None:
        """Return the space to the disk. Does nothing if the reserve isn't held."""
        self.is_held = False
        with suppress(OSError):
            file = self._open()
            try:
                os.ftruncate(file, 0)
            finally:
                os.close(file)

    def _open(self) -> int:
        """Open the file. Raises `OSError` if it has other content, since truncating it would destroy that content."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(self.path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode) or any(os.read(file, 4096)):
                raise FileExistsError(
                    errno.EEXIST, "expected the reserve of a store, got a file with other content", str(self.path)
                )
            os.lseek(file, 0, os.SEEK_SET)
        except BaseException:
            os.close(file)
            raise
        return file

    def _allocate(self) -> bool:
        file = self._open()
        try:
            missing = self.size - os.fstat(file).st_size
            if missing <= 0:
                return True  # a previous process left it allocated
            if hasattr(os, "fstatvfs"):
                disk = os.fstatvfs(file)
                if disk.f_bavail * disk.f_frsize < missing:
                    return False
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, self.size)
            else:
                os.write(file, bytes(self.size))
            return True
        finally:
            os.close(file)


def _unwritable(path: Path, error: OSError) -> errors.StoreError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return errors.StoreReadOnly(f"can't write {path}: {error.strerror}; allow this user to write in {path.parent}")
    if error.errno == errno.ENOSPC:
        return errors.StoreFull(f"can't write {path}: {error.strerror}; free space on its disk")
    if not path.parent.is_dir():
        return errors.StoreFailed(f"can't create {path}: expected {path.parent} to be a directory; create it first")
    return errors.StoreFailed(f"can't use {path}: {error.strerror}")


# ---------------------------------------------------------------------------- the file

_log = logging.getLogger("muxkit")

Journal = Literal["auto", "wal", "delete"]

FULL_SYNC = 2  # the value of `PRAGMA synchronous` for FULL
INCREMENTAL = 2  # the value of `PRAGMA auto_vacuum` for INCREMENTAL
LAST_FORMAT = 2  # the highest format number in a file's header, https://sqlite.org/fileformat.html
JOURNAL_BYTES = 16 << 20  # SQLite truncates an unused journal or log to this size

UNUSED_SHARE = 0.2  # pages are returned to the disk when at least this share of the file is unused
PAGES_AT_ONCE = 256  # pages that one unit of work returns to the disk
PAGES_IN_NEED = 64  # the same on a full disk, where the journal of this work has to fit into the reserve
FRAME_BYTES = 4096 + 24  # size of one page in the write-ahead log: the page and its frame header
RESERVE_PAGES = 64  # pages by which the file may exceed its limit while the reserve is lent

_warned: set[Version] = set()


def has_wal_reset_bug(version: Version) -> bool:
    """Return True if this SQLite can lose commits of two connections in WAL mode (sqlite.org/wal.html#walresetbug)."""
    return not (version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51, 0) or (3, 44, 6) <= version < (3, 45, 0))


class SqliteFile:
    """A database file, its lock, its reserve and its only connection. Use an object of this class from one thread only.

    Each setting is read back after it was made, because SQLite ignores some settings silently. `limit_name` is the name
    of the option that sets `most_bytes`, for error texts.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        connect: Connect,
        *,
        journal: Journal = "auto",
        most_bytes: int,
        limit_name: str,
    ) -> None:
        self.path = path
        self._schema = schema
        self._limit_name = limit_name
        self._connect = connect
        self._journal = journal
        self._most_bytes = most_bytes
        self._lock = LockFile(path)
        self.reserve: Reserve = Reserve(path, most_bytes)
        self._most_pages = 2**32 - 2
        self._connection: Connection | None = None
        self._corrupt: tuple[str, str | None] | None = None

    def open(self) -> Connection:
        """Lock the file, check its integrity, and upgrade its tables.

        Returns:
            The connection.

        Raises:
            StoreError: if the file is locked, damaged, too new, not writable, or if the disk is full.
        """
        self._lock.acquire()
        try:
            return self._reconnect_with_reserve(thoroughly=True)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------ a full disk

    def lend_reserve(self, connection: Connection) -> None:
        """Make the reserve available, both on the disk and within the size limit, until `regain_reserve` is called.

        Meanwhile each transaction truncates its journal, so that the next one can use the same space.
        """
        self.reserve.release()
        connection.run("PRAGMA journal_size_limit = 0")
        connection.run(f"PRAGMA max_page_count = {min(self._most_pages + RESERVE_PAGES, 2**32 - 2)}")
        _shorten_log(connection)

    def regain_reserve(self, connection: Connection) -> bool:
        """Allocate the reserve again. Return False if the disk has no room for it."""
        _shorten_log(connection)
        connection.run(f"PRAGMA max_page_count = {self._most_pages}")
        connection.run(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
        return self.reserve.hold()

    def give_back_unused(self, connection: Connection) -> bool:
        """Return about half of the unused pages to a full disk, in steps of up to `PAGES_IN_NEED`.

        This makes space for a journal. The remaining unused pages are for the rows that follow. Return False if the
        file has no unused pages.
        """
        unused = cast("int", _answer(connection, "freelist_count"))
        if not unused:
            return False
        self.lend_reserve(connection)
        try:
            for _ in range(0, (unused + 1) // 2, PAGES_IN_NEED):
                connection.run(f"PRAGMA incremental_vacuum({min(unused, PAGES_IN_NEED)})")
        finally:
            self.regain_reserve(connection)
        return True

    # ------------------------------------------------------------------------ the connection

    def connection(self) -> Connection:
        """Return the connection, and reconnect if `lose` has dropped it.

        Raises:
            StoreCorrupt: if the file was found to be damaged earlier.
            StoreError: if reconnecting fails.
        """
        if self._corrupt is not None:
            raise errors.StoreCorrupt(self._corrupt[0], aside=self._corrupt[1])
        return self._reconnect_with_reserve(thoroughly=False) if self._connection is None else self._connection

    def lose(self) -> None:
        """Drop the connection. After an I/O error, only reopening the file shows what was committed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SqliteFault):
                connection.close()

    def close(self) -> None:
        """Close the connection and release the lock."""
        self.lose()
        self._lock.release()

    def quarantine(self, what: str) -> errors.StoreCorrupt:
        """Move a damaged file aside and return the error. From now on, `connection` raises that error.

        A file that never was a store is left in place. `what` describes the damage.
        """
        self.lose()
        if self._corrupt is not None:
            return errors.StoreCorrupt(self._corrupt[0], aside=self._corrupt[1])
        aside = self._move_aside() if self._lock.was_made else None
        where = f"it was moved to {aside}" if aside else "it wasn't changed"
        self._corrupt = (
            f"{self.path} is damaged: {what}; {where}. Restore it from a backup, or remove {self._lock.path} "
            "to begin with an empty store",
            aside,
        )
        # log "PATH is damaged: WHAT": A store file is damaged. The text says where it was moved and what to do.
        _log.error("%s", self._corrupt[0])
        return errors.StoreCorrupt(self._corrupt[0], aside=aside)

    def judge(self, fault: SqliteFault) -> errors.StoreError:
        """Translate a fault into a `StoreError` that says what to do. Damage also quarantines the file."""
        if fault.code in (CORRUPT, NOTADB):
            return self.quarantine(fault.text)
        if fault.code == FULL:
            return errors.StoreFull(
                f"{self.path}: {fault.text}; free space on its disk, or raise "
                f"{self._limit_name}(bytes={self._most_bytes})"
            )
        if fault.code in (READONLY, PERM):
            return errors.StoreReadOnly(
                f"{self.path}: {fault.text}; allow this user to write it and in {self.path.parent}"
            )
        if fault.code in (BUSY, LOCKED):
            return errors.StoreLocked(str(self.path), None)
        return errors.StoreFailed(
            f"{self.path}: {fault.text} (SQLite code {fault.code}); the last changes may have been stored or not"
        )

    # ------------------------------------------------------------------------ opening

    def _reconnect_with_reserve(self, *, thoroughly: bool) -> Connection:
        """Connect. If the disk is full, release the reserve first, because opening writes to the file."""
        try:
            connection = self._reconnect(thoroughly=thoroughly)
        except errors.StoreFull:
            self.reserve.release()
            connection = self._reconnect(thoroughly=thoroughly)
        self.reserve.hold()
        return connection

    def _reconnect(self, *, thoroughly: bool) -> Connection:
        try:
            self._connection = connection = self._connect(self.path)
            self._prepare(connection, thoroughly=thoroughly)
        except SqliteFault as fault:
            # These statements are valid, so ERROR means that the content of the file is invalid. SQLite reports
            # READONLY for a file whose header names a newer format.
            is_damaged = thoroughly and (
                fault.code == ERROR or (fault.code == READONLY and _has_newer_format(self.path))
            )
            error = self.quarantine(fault.text) if is_damaged else self.judge(fault)
            self.lose()
            raise error from fault
        except errors.StoreError:
            self.lose()
            raise
        return connection

    def _prepare(self, connection: Connection, *, thoroughly: bool) -> None:
        # This has to precede the first read. Then WAL mode needs no shared memory, and other processes are locked out.
        _set(connection, "locking_mode", "EXCLUSIVE", "exclusive")
        _set(connection, "trusted_schema", "OFF", 0)
        _set(connection, "cell_size_check", "ON", 1)
        _set(connection, "fullfsync", "ON", 1)  # for macOS, where fsync alone doesn't reach the disk
        _set(connection, "checkpoint_fullfsync", "ON", 1)
        version = self._identify(connection)
        if not version:
            connection.run("PRAGMA auto_vacuum = INCREMENTAL")
        journal = self._journal_mode(connection.version)
        _set(connection, "journal_mode", journal.upper(), journal)
        _set(connection, "synchronous", "FULL", FULL_SYNC)
        _set(connection, "journal_size_limit", str(JOURNAL_BYTES), JOURNAL_BYTES)
        if journal == "wal":
            # A checkpoint extends the database before the log shrinks. On a full disk, the reserve has to suffice for
            # that.
            connection.run(f"PRAGMA wal_autocheckpoint = {max(1, self.reserve.size // 2 // FRAME_BYTES)}")
        if thoroughly and version:
            self._check_integrity(connection)
        self._migrate(connection, version)
        if _answer(connection, "auto_vacuum") != INCREMENTAL:
            raise SqliteFault(CORRUPT, "its head says another auto_vacuum than it was made with")
        page_bytes = _answer(connection, "page_size")
        most = max(1, self._most_bytes // page_bytes) if type(page_bytes) is int else 1
        self._most_pages = min(most, 2**32 - 2)
        connection.run(f"PRAGMA max_page_count = {self._most_pages}")
        connection.sync_names()
        self._lock.mark_made()

    def _identify(self, connection: Connection) -> int:
        """Return the version of the tables, or 0 if the file is still empty."""
        tables = connection.run("SELECT count(*) FROM sqlite_master")[0][0]
        application, version = _answer(connection, "application_id"), _answer(connection, "user_version")
        if tables == 0 and application == 0 and version == 0:
            if self._lock.was_made:
                raise SqliteFault(CORRUPT, "it is missing or empty, though a store was made here")
            return 0
        if application != self._schema.number or type(version) is not int or version < 1:
            raise errors.StoreVersion(f"{self.path} is a database of something else; choose another file")
        self._schema.refuse_newer(version, f"{self.path} is")
        return version

    def _journal_mode(self, version: Version) -> str:
        if self._journal != "auto":
            return self._journal
        if not has_wal_reset_bug(version):
            return "wal"
        if version not in _warned:
            _warned.add(version)
            # log: Once for each version of SQLite in a process.
            _log.warning(
                "SQLite %s can lose commits in WAL mode: using a rollback journal, which is slower; "
                "upgrade to SQLite 3.51.3, which doesn't have this bug",
                ".".join(map(str, version)),
            )
        return "delete"

    def _check_integrity(self, connection: Connection) -> None:
        found = connection.run("PRAGMA integrity_check(1)")
        if found != [("ok",)]:
            raise SqliteFault(CORRUPT, "; ".join(str(row[0]) for row in found))
        statements = {row[0] for row in connection.run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if not statements <= self._schema.statements:
            raise SqliteFault(CORRUPT, f"expected the tables of {self._schema.noun}, found other ones")

    def _migrate(self, connection: Connection, version: int) -> None:
        connection.run("BEGIN IMMEDIATE")
        for statements in self._schema.migrations[version:]:
            for statement in statements:
                connection.run(statement)
        connection.run(f"PRAGMA application_id = {self._schema.number}")
        # Write the version even if it is unchanged, because only a write shows that the file is writable.
        connection.run(f"PRAGMA user_version = {self._schema.version}")
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
        raise errors.StoreFailed(f"SQLite answered {got!r} to PRAGMA {name} = {value}; the store would not be safe")


def _answer(connection: Connection, name: str) -> Value:
    found = connection.run(f"PRAGMA {name}")
    return found[0][0] if found else None


def _shorten_log(connection: Connection) -> None:
    """Copy the write-ahead log into the database and truncate it, as far as the disk has room.

    Does nothing in other journal modes.
    """
    try:
        connection.run("PRAGMA wal_checkpoint(TRUNCATE)")
    except SqliteFault as fault:
        if fault.code != FULL:
            raise


def _has_newer_format(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        head = file.read(20)
        return len(head) == 20 and max(head[18], head[19]) > LAST_FORMAT
    return False


# ---------------------------------------------------------------------------- jobs


class SqliteRows(Protocol):
    """The rows behind one connection, as far as a backend needs to know them."""

    def begin(self) -> None:
        """Prepare for another unit of work."""

    def take_changed(self) -> list[str]:
        """Return the keys whose waiters must be woken, and forget them."""


RowsT = TypeVar("RowsT", bound=SqliteRows)


class SqliteBackend(Worker[RowsT]):
    """A worker thread for a SQLite file. Each group of jobs is one transaction, and each writing job a savepoint in it.

    When the disk is full, the backend retries the jobs of a group one by one. A job that adds rows may then use the
    unused pages of the file. Any other job may use the reserve.
    """

    def __init__(
        self, file: SqliteFile, make_rows: Callable[[Connection], RowsT], waiters: Waiters, *, thread_name: str
    ) -> None:
        self._file = file
        self._make_rows = make_rows
        self._rows: RowsT | None = None
        super().__init__(thread_name, self._run_jobs, waiters)

    async def open(self, first: Callable[[RowsT, int], int | None] | None = None) -> None:
        """Open the file, and run `first` before any job.

        `first` takes the rows and a position, which starts at 0. It returns the next position, or None when it is
        done. Each call is its own transaction. On a full disk, a call is rolled back and repeated with the reserve.

        Raises:
            StoreError: if the file can't be opened.
        """
        await self.call(lambda: self._open(first))

    async def close(self) -> None:
        """Finish the queued jobs and close the file, even if the caller is cancelled."""
        await self.stop(self._file.close)

    # ------------------------------------------------------------------------ in the thread

    def _open(self, first: Callable[[RowsT, int], int | None] | None) -> None:
        try:
            connection = self._file.open()
            rows = self._make_rows(connection)
            position: int | None = 0
            while first is not None and position is not None:
                position = self._run_first(first, position, connection, rows)
        except (SqliteFault, errors.StoreCorrupt) as error:
            judged = self._file.judge(error) if isinstance(error, SqliteFault) else self._file.quarantine(str(error))
            self._file.close()
            raise judged from (error if isinstance(error, SqliteFault) else None)
        self._rows = rows

    def _run_first(
        self, first: Callable[[RowsT, int], int | None], position: int, connection: Connection, rows: RowsT
    ) -> int | None:
        def run() -> int | None:
            connection.run("BEGIN IMMEDIATE")
            following = first(rows, position)
            connection.run("COMMIT")
            return following

        try:
            return run()
        except SqliteFault as fault:
            if fault.code != FULL:
                raise
            if connection.in_transaction:
                connection.run("ROLLBACK")
        self._file.lend_reserve(connection)
        try:
            return run()
        finally:
            self._file.regain_reserve(connection)

    def _run_jobs(self, jobs: list[Job[RowsT]]) -> None:
        if self._file.reserve.is_missing and any(job.grows for job in jobs) and not self._make_room():
            growing = [job for job in jobs if job.grows]
            fail_jobs(
                growing,
                errors.StoreFull(
                    f"{self._file.path}: the disk has no room for {self._file.reserve.path.name}, with which a full "
                    "store can be emptied; make room on its disk"
                ),
            )
            jobs = [job for job in jobs if not job.grows]
        if jobs:
            self._run_group_of_jobs(jobs)

    def _run_group_of_jobs(self, jobs: list[Job[RowsT]], *, is_last_try: bool = False) -> None:
        writes = not all(job.reads for job in jobs)
        try:
            connection = self._file.connection()
            if self._rows is None:
                self._rows = self._make_rows(connection)
            rows = self._rows
            if writes:
                connection.run("BEGIN IMMEDIATE")
            for job in jobs:
                _run_job(job, connection, rows)
            if writes:
                connection.run("COMMIT")
            self.changed.extend(rows.take_changed())
        except SqliteFault as fault:
            self._undo()
            error = self._file.judge(fault)
            if not isinstance(error, errors.StoreFull):
                self._lose()
            elif len(jobs) > 1:
                # The whole group was rolled back, but some of its jobs may fit on the full disk. Try each one alone.
                for job in jobs:
                    self._run_group_of_jobs([job])
                return
            elif not is_last_try and self._run_in_need(jobs):
                return
            self.is_failed: bool = isinstance(error, errors.StoreCorrupt)
            fail_jobs(jobs, error)
        except errors.StoreCorrupt as corrupt:
            self._undo()
            self.is_failed = True
            fail_jobs(jobs, self._file.quarantine(str(corrupt)))
        except errors.StoreError as error:  # connecting failed
            fail_jobs(jobs, error)

    def _run_in_need(self, jobs: list[Job[RowsT]]) -> bool:
        """Retry a job for which the disk had no room. Return False if no room could be made.

        A job that adds rows gets the unused pages of the file. Any other job gets the reserve.
        """
        try:
            connection = self._file.connection()
            if jobs[0].grows:
                if not self._file.give_back_unused(connection):
                    return False
                self._run_group_of_jobs(jobs, is_last_try=True)
                return True
            self._file.lend_reserve(connection)
        except (SqliteFault, errors.StoreError):
            self._lose()
            return False
        self._run_group_of_jobs(jobs, is_last_try=True)
        self._regain_reserve()
        return True

    def _make_room(self) -> bool:
        """Allocate the reserve again, if necessary with unused pages of the file. Return False if that failed."""
        if self._regain_reserve():
            return True
        try:
            self._file.give_back_unused(self._file.connection())
        except (SqliteFault, errors.StoreError):
            self._lose()
        return not self._file.reserve.is_missing

    def _regain_reserve(self) -> bool:
        try:
            return self._file.regain_reserve(self._file.connection())
        except (SqliteFault, errors.StoreError):
            self._lose()
            return False

    def _undo(self) -> None:
        self._rows = None  # it may have recorded changes that are rolled back now
        try:
            connection = self._file.connection()
            if connection.in_transaction:
                connection.run("ROLLBACK")
        except (SqliteFault, errors.StoreError):
            self._lose()

    def _lose(self) -> None:
        self._rows = None
        self._file.lose()


def _run_job(job: Job[RowsT], connection: Connection, rows: RowsT) -> None:
    job.error = None
    rows.begin()
    if not job.reads:
        connection.run("SAVEPOINT job")
    try:
        job.result = job.act(rows)
    except (SqliteFault, errors.StoreCorrupt):
        raise  # these concern the file, so all jobs of the group fail
    except BaseException as error:  # raised by a rule of the store or by the application
        job.error = error
        if not job.reads:
            connection.run("ROLLBACK TO job")
    if not job.reads:
        connection.run("RELEASE job")


def give_back_pages(connection: Connection, *, least: int) -> bool:
    """Return up to `PAGES_AT_ONCE` unused pages to the disk, so that the file shrinks.

    Does nothing if fewer than `least` pages, or less than `UNUSED_SHARE` of the file, are unused. Return True if there
    may be more pages to return.
    """
    pages = cast("int", connection.run("PRAGMA page_count")[0][0])
    unused = cast("int", connection.run("PRAGMA freelist_count")[0][0])
    if unused < least or unused < pages * UNUSED_SHARE:
        return False
    connection.run(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
    return True


protect_package("muxkit.storage")
