"""Running Trio work from threads without Trio, and for several items simultaneously.

Spark calls sources and sinks in ordinary threads, and shows only the text of an exception. So these functions run Trio
for one call, and raise single exceptions instead of groups.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

import attrs
import trio

from muxkit.pipeline.errors import first_error

AHEAD: Final = 4  # items that may wait for the consumer
ENDING: Final = 10.0  # s that the thread may take to end after a cancellation

ItemT = TypeVar("ItemT")


async def for_each_limited(items: Iterable[ItemT], act: Callable[[ItemT], Awaitable[None]], *, at_once: int) -> None:
    """Await `act(item)` for each item, with up to `at_once` running simultaneously.

    Raises:
        Exception: the first error of `act`, not in a group. It cancels the other calls.
    """
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
    """Run Trio in this thread and return the result. Of an exception group, only the first leaf is raised.

    Spark shows a single exception better than a group.
    """
    try:
        return trio.run(act)
    except BaseExceptionGroup as group:
        told = first_error(group)
    raise told.with_traceback(None) from None


def bridged(work: Callable[[Callable[[ItemT], Awaitable[None]]], Awaitable[None]]) -> Iterator[ItemT]:
    """Run `work(emit)` in a Trio thread, and yield the items that it emits, at most `AHEAD` items ahead.

    Closing the generator cancels the work. An exception of `work` is raised after its items, as a single exception.
    """
    items: queue.SimpleQueue[ItemT | _End] = queue.SimpleQueue()
    room, scope = trio.Semaphore(AHEAD), trio.CancelScope()
    tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None] = queue.SimpleQueue()

    async def emit(item: ItemT) -> None:
        await room.acquire()
        items.put(item)

    async def main() -> None:
        tokens.put(trio.lowlevel.current_trio_token())
        with scope:
            await work(emit)

    def run() -> None:
        error: BaseException | None = None
        try:
            trio.run(main)
        except BaseException as raised:
            error = first_error(raised)
        finally:
            tokens.put(None)  # in case Trio could not start
            items.put(_End(error))

    thread = threading.Thread(target=run, name="muxkit reader", daemon=True)
    thread.start()
    token = tokens.get()

    def soon(act: Callable[[], None]) -> None:
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(act)

    try:
        while not isinstance(item := items.get(), _End):
            soon(room.release)
            yield item
        if item.error is not None:
            raise item.error
    finally:
        soon(scope.cancel)
        thread.join(ENDING)


@attrs.frozen
class _End:
    """Follows the last item."""

    error: BaseException | None
