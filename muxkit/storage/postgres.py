"""How is the database reached, and what do its errors mean to the user?"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from muxkit.protocols.restream.store.errors import (
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreReadOnly,
)

if TYPE_CHECKING:
    import psycopg

DEFAULTS = {
    "application_name": "muxkit restream",
    "connect_timeout": "5",  # s
    "tcp_user_timeout": "15000",  # ms without an answer before the connection is given up
}


class Database:
    """An address, and at most one connection to it; used in one thread."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise StoreFailed(
                f"a store in PostgreSQL needs psycopg ({error}): pip install 'muxkit[postgres]'"
            ) from error
        self._psycopg = psycopg
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise ValueError(f"this is no address of a database: {_first_line(error)}") from error
        self._options = {**DEFAULTS, **{name: str(value) for name, value in given.items() if value is not None}}
        self._connection: psycopg.Connection | None = None

    def connection(self) -> psycopg.Connection:
        """The connection; a new one if it was lost. Transactions are begun by hand."""
        if self._connection is None or self._connection.closed:
            self._connection = None
            try:
                self._connection = self._psycopg.connect("", autocommit=True, **self._options)  # type: ignore[arg-type]
            except self._psycopg.Error as error:
                raise StoreFailed(
                    f"the database cannot be reached: {_first_line(error)}; is it running, and is the address right?"
                ) from error
        return self._connection

    @property
    def errors(self) -> type[psycopg.Error]:
        """What its statements raise."""
        return self._psycopg.Error

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that is not known to be broken."""
        return self._connection is not None and not self._connection.closed

    def close(self) -> None:
        """Harmless at any time."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._psycopg.Error):
                connection.close()

    def recover(self) -> bool:
        """Leave a transaction that failed. Whether the connection turned out to be lost."""
        if self._connection is not None and not self._connection.closed:
            with suppress(self._psycopg.Error):
                self._connection.execute("ROLLBACK")
                return False
        self.close()
        return True

    def is_worth_another_try(self, error: psycopg.Error) -> bool:
        """Whether the database undid everything because of somebody else who did the same at the same time."""
        errors = self._psycopg.errors
        return isinstance(error, errors.DeadlockDetected | errors.SerializationFailure | errors.UniqueViolation)

    def judge(self, error: psycopg.Error) -> StoreError:
        """What the error means to the user."""
        errors = self._psycopg.errors
        text = _first_line(error)
        if isinstance(error, errors.DiskFull | errors.OutOfMemory):
            return StoreFull(f"the database has no room: {text}; make some on its disk")
        if isinstance(error, errors.ReadOnlySqlTransaction | errors.InsufficientPrivilege):
            return StoreReadOnly(f"the database cannot be written: {text}; is this a standby, or another user's?")
        if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
            return StoreCorrupt(f"the database is not in order: {text}; restore it from a copy")
        return StoreFailed(f"the database failed: {text}; what was under way may have been stored or not")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
