"""What has the peer opened that nobody has taken yet? A bounded queue to iterate over."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from muxkit.runtime._gate import ErrorMaker

ItemT = TypeVar("ItemT")


class Backlog(AsyncIterator[ItemT], Generic[ItemT]):
    """An async iterator; `taken` is told of each item that the application gets.

    Iterating ends when the backlog has been ended and is empty, or raises what `ended` was given.
    """

    __slots__ = ("_error", "_is_over", "_items", "_lot", "_taken")

    def __init__(self, taken: Callable[[ItemT], None]) -> None:
        self._taken = taken
        self._items: deque[ItemT] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._is_over = False
        self._error: ErrorMaker | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        self._lot.unpark()

    def ended(self, error: ErrorMaker | None = None) -> None:
        """No more will come; `error` says why if that is not as it should be."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._lot.unpark_all()

    async def __anext__(self) -> ItemT:
        if self._items or self._is_over:
            await trio.lowlevel.checkpoint()
        while not self._items:
            if self._error is not None:
                raise self._error()
            if self._is_over:
                raise StopAsyncIteration
            await self._lot.park()
        item = self._items.popleft()
        self._taken(item)
        return item
