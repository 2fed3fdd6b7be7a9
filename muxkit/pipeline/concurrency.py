"""How are many things done at once, but not all of them? A few at a time, each a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

ItemT = TypeVar("ItemT")


async def each(items: Iterable[ItemT], act: Callable[[ItemT], Awaitable[None]], *, at_once: int) -> None:
    """Do it with each of them, `at_once` at a time. The first error ends the others, and comes out bare."""
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
