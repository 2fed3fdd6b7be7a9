"""What does the store need of a connection to SQLite, and how does the one of the standard library give it?"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

Value = int | float | str | bytes | None
Version = tuple[int, int, int]

# Primary result codes, https://sqlite.org/rescode.html
ERROR, PERM, BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB = 1, 3, 5, 6, 8, 10, 11, 13, 14, 26


class SqliteFault(Exception):
    """A statement failed; `code` is SQLite's primary result code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code & 0xFF
        self.text = text


class Connection(Protocol):
    """One connection, used from one thread, that begins no transactions by itself."""

    @property
    def version(self) -> Version:
        """Of the SQLite library."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open: some errors end it."""

    def run(self, sql: str, values: Sequence[Value] = (), /) -> list[tuple[Value, ...]]:
        """One statement, and all its rows. Raises `SqliteFault` and nothing else."""

    def run_many(self, sql: str, values: Sequence[Sequence[Value]], /) -> None:
        """One statement without rows, for each of these. Raises `SqliteFault` and nothing else."""

    def sync_names(self) -> None:
        """Make durable which files there are: a journal that was deleted must not come back with the power."""

    def close(self) -> None:
        """Raises `SqliteFault` and nothing else."""


Connect = Callable[[Path], Connection]


class StandardConnection:
    """The `sqlite3` of the standard library."""

    def __init__(self, path: Path) -> None:
        self.version: Version = sqlite3.sqlite_version_info[:3]
        self._directory = path.parent
        try:
            # Made here, so that what clients are sent is not for everybody on the machine to read.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
        except PermissionError:
            pass  # it may still be read, and SQLite says what is wrong with writing
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
        except UnicodeDecodeError as error:  # in a text, or in SQLite's own words about it
            raise SqliteFault(CORRUPT, str(error)) from error

    def run_many(self, sql: str, values: Sequence[Sequence[Value]], /) -> None:
        try:
            self._connection.executemany(sql, values)
        except sqlite3.Error as error:
            raise _fault(error) from error

    def sync_names(self) -> None:
        with suppress(OSError):  # some systems cannot, and need not
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
    # A text column that is not UTF-8 any more raises without a code: somebody else wrote it, or the disk did.
    code = getattr(error, "sqlite_errorcode", None)
    return SqliteFault(CORRUPT if code is None else code, str(error))
