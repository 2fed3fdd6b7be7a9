"""Running Trio work from threads without Trio, and for several items at a time."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio

from muxkit.pipeline.errors import first_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

AHEAD: Final = 4  # items that wait to be taken
ENDING: Final = 10.0  # s that the thread may take to end after a cancellation

ItemT = TypeVar("ItemT")


async def for_each_limited(items: Iterable[ItemT], act: Callable[[ItemT], Awaitable[None]], *, at_once: int) -> None:
    """Await `act(item)` for each item, `at_once` at a time. The first error cancels the others and is raised bare."""
    room = trio.Semaphore(at_once)
    failed: list[Exception] = []

    async def one(item: ItemT) -> None:
        try:
            if not failed:
                await act(item)
        except Exception as error:
            failed.append(error)
            nursery.cancel_scope.cancel()
        finally:
            room.release()

    async with trio.open_nursery() as nursery:
        for item in items:
            await room.acquire()
            nursery.start_soon(one, item)
    if failed:
        raise failed[0]


def run_bare(act: Callable[[], Awaitable[ItemT]]) -> ItemT:
    """Run Trio in this thread. Of a group of exceptions the first leaf is raised, without the group."""
    try:
        return trio.run(act)
    except BaseExceptionGroup as group:
        told = first_error(group)
    raise told.with_traceback(None) from None


def bridged(work: Callable[[Callable[[ItemT], Awaitable[None]]], Awaitable[None]]) -> Iterator[ItemT]:
    """Run `work(emit)` in a Trio thread and yield what it emits, at most `AHEAD` items ahead.

    Closing the generator cancels it. What `work` raises is raised after the items that it emitted, as one exception.
    """
    bridge: _Bridge[ItemT] = _Bridge(work)
    try:
        yield from bridge.items()
    finally:
        bridge.close()


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Bridge(Generic[ItemT]):
    def __init__(self, work: Callable[[Callable[[ItemT], Awaitable[None]]], Awaitable[None]]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[ItemT | _End] = queue.SimpleQueue()
        self._room = trio.Semaphore(AHEAD)
        self._scope = trio.CancelScope()
        self._started = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="muxkit reader", daemon=True)

    def items(self) -> Iterator[ItemT]:
        self._thread.start()
        while True:
            item = self._items.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            self._soon(self._room.release)
            yield item

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._started.wait(ENDING)
        self._soon(self._scope.cancel)
        self._thread.join(ENDING)

    def _soon(self, act: Callable[[], None]) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(act)

    # --- in the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as raised:
            error = first_error(raised)
        finally:
            self._started.set()
            self._items.put(_End(error))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._started.set()
        with self._scope:
            await self._work(self._emit)

    async def _emit(self, item: ItemT) -> None:
        await self._room.acquire()
        self._items.put(item)
