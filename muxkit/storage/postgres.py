"""PostgreSQL as a store: the connection, its errors, and a thread that listens for changes by other servers.

The session store of restream and the staging store use this module. Several servers may share one database. A
`Database` belongs to one thread and reconnects when it is used after a loss. A `Listener` has its own connection and
its own thread, and notifies Trio tasks. It may miss changes while it is disconnected, so it reports every reconnection.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio

from muxkit.runtime import protect_package
from muxkit.storage.errors import StoreCorrupt, StoreError, StoreFailed, StoreFull, StoreReadOnly
from muxkit.storage.schema import Schema

if TYPE_CHECKING:
    import psycopg

DEFAULTS = {
    "connect_timeout": "5",  # s
    "tcp_user_timeout": "15000",  # ms; the kernel fails a connection whose data isn't acknowledged for this long
}


class Database:
    """The address of a database and at most one connection to it. Use an object of this class from one thread only.

    `application` is the name under which PostgreSQL lists the connection, unless the URL sets `application_name`.
    """

    def __init__(self, url: str, application: str) -> None:
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
            raise ValueError(f"invalid address of a database: {_first_line(error)}") from error
        self._options = {
            "application_name": application,
            **DEFAULTS,
            **{name: str(value) for name, value in given.items() if value is not None},
        }
        self._connection: psycopg.Connection | None = None

    def connection(self) -> psycopg.Connection:
        """Return the connection in autocommit mode, and connect first if there is none or if it was closed.

        Raises:
            StoreFailed: if the database can't be reached.
        """
        if self._connection is None or self._connection.closed:
            self._connection = None
            try:
                self._connection = self._psycopg.connect("", autocommit=True, **self._options)  # type: ignore[arg-type]
            except self._psycopg.Error as error:
                raise StoreFailed(
                    f"can't reach the database: {_first_line(error)}; check that it is running, and its address"
                ) from error
        return self._connection

    @property
    def errors(self) -> type[psycopg.Error]:
        """The base class of the errors that statements raise, `psycopg.Error`."""
        return self._psycopg.Error

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that isn't known to be broken."""
        return self._connection is not None and not self._connection.closed

    def close(self) -> None:
        """Close the connection. Calling this again does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._psycopg.Error):
                connection.close()

    def recover(self) -> bool:
        """Roll back a failed transaction. Return True if that failed too, so that the connection was closed."""
        if self._connection is not None and not self._connection.closed:
            with suppress(self._psycopg.Error):
                self._connection.execute("ROLLBACK")
                return False
        self.close()
        return True

    def is_worth_another_try(self, error: psycopg.Error) -> bool:
        """Return True if the transaction failed because of a concurrent one, so that running it again may succeed."""
        errors = self._psycopg.errors
        return isinstance(error, errors.DeadlockDetected | errors.SerializationFailure | errors.UniqueViolation)

    def judge(self, error: psycopg.Error) -> StoreError:
        """Translate an error of psycopg into a `StoreError` that says what to do."""
        errors = self._psycopg.errors
        text = _first_line(error)
        if isinstance(error, errors.DiskFull | errors.OutOfMemory):
            return StoreFull(f"the database is full: {text}; free space on its disk")
        if isinstance(error, errors.ReadOnlySqlTransaction | errors.InsufficientPrivilege):
            return StoreReadOnly(
                f"the database isn't writable: {text}; check that it isn't a standby, and the rights of this user"
            )
        if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
            return StoreCorrupt(f"the database is damaged: {text}; restore it from a backup")
        return StoreFailed(f"the database failed: {text}; the last changes may have been stored or not")


@contextmanager
def pipeline_of(connection: psycopg.Connection) -> Iterator[None]:
    """Send the statements of the block without waiting for each answer, and raise the first error.

    psycopg logs a warning if its pipeline fails while an exception leaves the block. So this function catches the
    exception, leaves the pipeline, and raises the exception afterwards.
    """
    import psycopg

    first: psycopg.Error | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except psycopg.Error as error:
                first = error
    except psycopg.Error as error:
        first = first or error
    if first is not None:
        raise first


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def migrate_postgres(connection: psycopg.Connection, schema: Schema) -> None:
    """Create or upgrade the tables in the first schema of the search path.

    An advisory lock serializes servers that start at the same time.

    Raises:
        StoreVersion: if the tables were created by a newer version.
    """
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema.number,))
        connection.execute(f"CREATE TABLE IF NOT EXISTS {schema.version_table} (version integer NOT NULL)")
        found = connection.execute(f"SELECT version FROM {schema.version_table}").fetchone()
        version: int = 0 if found is None else found[0]
        schema.refuse_newer(version, "the database's tables are")
        for statements in schema.migrations[version:]:
            for statement in statements:
                connection.execute(statement)
        if found is None:
            connection.execute(f"INSERT INTO {schema.version_table} VALUES (%s)", (schema.version,))
        elif version < schema.version:
            connection.execute(f"UPDATE {schema.version_table} SET version = %s", (schema.version,))


# ---------------------------------------------------------------------------- notifications

HEARTBEAT = 5.0  # s
MIN_PAUSE, MAX_PAUSE = 0.1, 5.0  # s between attempts to reconnect; the pause doubles after each failure


class Listener:
    """A thread with its own connection that listens to a `NOTIFY` channel.

    A payload consists of the id of the sending server, a space, and the key that changed. The listener calls
    `on_changed` with each key that a server other than `server` sent. It calls `on_connected` each time it starts to
    listen, since earlier notifications may have been missed. Both run in Trio's thread. `beat` runs in the listener's
    thread, every `HEARTBEAT` seconds.
    """

    def __init__(
        self,
        database: Database,
        channel: str,
        server: str,
        *,
        on_connected: Callable[[], None],
        on_changed: Callable[[str], None],
        beat: Callable[[psycopg.Connection], None],
    ) -> None:
        self._database = database
        self._channel = channel
        self._server = server
        self._on_connected = on_connected
        self._on_changed = on_changed
        self._beat = beat
        self._token = trio.lowlevel.current_trio_token()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name="muxkit store listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end. The thread closes its connection."""
        self._is_stopping = True
        with suppress(OSError):
            self._stop_writer.send(b".")

    # ------------------------------------------------------------------------ in the thread

    def _main(self) -> None:
        pause = MIN_PAUSE
        with self._stop_reader, self._stop_writer:
            while not self._is_stopping:
                try:
                    self._listen()
                except (StoreError, OSError, self._database.errors):
                    self._database.close()
                    if not self._is_stopping:
                        self._stop_reader.settimeout(pause)
                        with suppress(TimeoutError):
                            self._stop_reader.recv(1)
                    pause = min(pause * 2, MAX_PAUSE)
                else:
                    pause = MIN_PAUSE
        self._database.close()

    def _listen(self) -> None:
        connection = self._database.connection()
        connection.add_notify_handler(lambda notify: self._notice(notify.payload))
        connection.execute(f"LISTEN {self._channel}")
        self._run_in_trio(self._on_connected)
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            due = 0.0
            while not self._is_stopping:
                if time.monotonic() >= due:
                    self._beat(connection)
                    due = time.monotonic() + HEARTBEAT
                # libpq may have read notifications together with the answers to the statements above.
                while notify := connection.pgconn.notifies():
                    self._notice(notify.extra.decode("ascii", "replace"))
                if selector.select(max(0.0, due - time.monotonic())):
                    connection.pgconn.consume_input()

    def _notice(self, payload: str) -> None:
        server, _, key = payload.partition(" ")
        if server != self._server:  # this server woke its own tasks when the change became durable
            self._run_in_trio(self._on_changed, key)

    def _run_in_trio(self, act: Callable[..., None], *values: str) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(act, *values)


protect_package("muxkit.storage")
