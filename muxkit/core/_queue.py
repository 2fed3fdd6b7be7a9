"""A queue that takes no memory until something is put into it, since an empty deque takes 760 bytes."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeVar, cast

ItemT = TypeVar("ItemT")

NO_QUEUE: Final = cast("deque[Any]", ())
"""Stands for an empty deque: it is false, has no length and no items, and nothing can be put into it by mistake."""


def queue_of(queue: deque[ItemT]) -> deque[ItemT]:
    """The same queue, or a new one for `NO_QUEUE`: `self.queue = queue = queue_of(self.queue)` before an append."""
    return queue if queue is not NO_QUEUE else deque()
