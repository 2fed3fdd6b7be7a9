"""A staging server in a thread, for tests of what has no Trio around it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from muxkit.pipeline import Staging, open_staging, serve_staging

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


class StagingThread:
    """The server, and the address that it keeps when it is started again."""

    def __init__(self, where: str) -> None:
        self.url = "bpmux+tcp://127.0.0.1:0"
        self._where = where
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._store: Staging | None = None
        self._scope = trio.CancelScope()

    def start(self) -> None:
        """Returns when it listens."""
        started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, started.set), name="staging", daemon=True)
        self._thread.start()
        assert started.wait(20)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            assert self._token is not None
            self._token.run_sync_soon(self._scope.cancel)
            thread.join(20)

    def ask(self, act: Callable[[Staging], Awaitable[T]]) -> T:
        """Something of its store, in its thread."""

        async def do() -> T:
            assert self._store is not None
            return await act(self._store)

        return trio.from_thread.run(do, trio_token=self._token)

    async def _main(self, started: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with open_staging(self._where) as self._store, trio.open_nursery() as nursery:
                served = await nursery.start(partial(serve_staging, self.url, self._store))
                self.url = served.url
                started()


@contextmanager
def staging_thread(where: str = "memory:") -> Iterator[StagingThread]:
    server = StagingThread(where)
    server.start()
    try:
        yield server
    finally:
        server.stop()
