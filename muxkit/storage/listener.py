"""How does a waiter hear of what another process did? A thread with a connection of its own, that only listens.

Its connection may break and come back: then everybody is woken and looks for himself. It also says now and then that
this server lives, so that the sessions of one that does not are not kept for ever.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from muxkit.protocols.restream.store.errors import StoreError
from muxkit.protocols.restream.store.postgres_rows import CHANNEL

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from muxkit.protocols.restream.store.protocol import Now
    from muxkit.storage.postgres import Database
    from muxkit.storage.waiters import Waiters

HEARTBEAT = 5.0  # s
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # s before the connection is tried again


def beat(connection: psycopg.Connection, server: str, now: float) -> None:
    """Say that this server lives."""
    connection.execute(
        "INSERT INTO restream_servers VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
        (server, now),
    )


class Listener:
    """The thread."""

    def __init__(self, database: Database, server: str, waiters: Waiters, now: Now) -> None:
        self._database = database
        self._server = server
        self._waiters = waiters
        self._now = now
        self._token = trio.lowlevel.current_trio_token()
        self._bell, self._handle = socket.socketpair()
        self._is_stopping = False
        self.listening = trio.Event()
        self._thread = threading.Thread(target=self._main, name="muxkit store listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it closes what it has by itself."""
        self._is_stopping = True
        with suppress(OSError):
            self._handle.send(b".")

    # ------------------------------------------------------------------------ in the thread

    def _main(self) -> None:
        pause = FIRST_PAUSE
        with self._bell, self._handle:
            while not self._is_stopping:
                try:
                    self._listen()
                except (StoreError, OSError, self._database.errors):
                    self._database.close()
                    if not self._is_stopping:
                        self._bell.settimeout(pause)
                        with suppress(TimeoutError):
                            self._bell.recv(1)
                    pause = min(pause * 2, LONGEST_PAUSE)
                else:
                    pause = FIRST_PAUSE
        self._database.close()

    def _listen(self) -> None:
        connection = self._database.connection()
        connection.add_notify_handler(lambda notify: self._heard(notify.payload))
        connection.execute(f"LISTEN {CHANNEL}")
        self._tell(self._begin)
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            due = 0.0
            while not self._is_stopping:
                if time.monotonic() >= due:
                    beat(connection, self._server, self._now())
                    due = time.monotonic() + HEARTBEAT
                # Some come while the statements above are answered; they are in no socket any more.
                while notify := connection.pgconn.notifies():
                    self._heard(notify.extra.decode("ascii", "replace"))
                if selector.select(max(0.0, due - time.monotonic())):
                    connection.pgconn.consume_input()

    def _heard(self, payload: str) -> None:
        server, _, uuid = payload.partition(" ")
        if server != self._server:  # who did it here has been told already
            self._tell(lambda: self._waiters.wake(uuid))

    def _begin(self) -> None:
        self.listening.set()
        self._waiters.wake_all()

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(what)
