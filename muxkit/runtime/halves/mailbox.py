"""Storage for the messages of a channel that the application hasn't taken yet.

The credit that this side has granted limits the bytes of the stored messages. But credit doesn't limit the memory,
because the Python object of a short message needs more memory than the message itself. So once a few messages are
waiting, `Mailbox` packs further short messages into one object, and stores a run of empty messages as a counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar, cast

ItemT = TypeVar("ItemT")

PACK_BEHIND = 16  # number of waiting messages before packing begins
# Only messages shorter than this many bytes are packed. The overhead of a larger message is at most about its size.
PACK_BELOW = 32
# In a pack, the code RUN stands for one empty message, RUN + 1 for two empty messages, and so on.
RUN = PACK_BELOW
LONG_RUN = 0  # in a pack, the eight bytes after this code contain the number of empty messages
COMPACT = 256  # the list is compacted if at least this many entries, and half of all entries, have been taken
PACK_SIZE = 32 * 1024  # maximum size of a pack in bytes, so that memory is freed while packs are read


class _Empties:
    """A run of empty messages."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def put(self, message: bytes) -> None:
        self.count += 1

    def take(self) -> bytes:
        self.count -= 1
        return b""

    def size(self) -> int:
        return 0


class _Pack:
    """A sequence of short messages in one buffer.

    Each message has a byte with its length before it. A run of empty messages is one byte, and a long run is nine
    bytes.
    """

    __slots__ = ("count", "data", "position", "run")

    def __init__(self) -> None:
        self.data = bytearray()
        self.position = 0
        self.count = 0
        self.run = -1  # position of the run of empty messages at the end, or below `position` if there is none

    def put(self, message: bytes) -> None:
        self.count += 1
        if message:
            self.run = -1
            self.data.append(len(message))
            self.data += message
        elif self.run < self.position:
            self.run = len(self.data)
            self.data.append(RUN)
        else:
            self._lengthen()

    def _lengthen(self) -> None:
        code = self.data[self.run]
        if code == LONG_RUN:
            self._set_long(self.run, self._get_long(self.run) + 1)
        elif code < 255:
            self.data[self.run] = code + 1
        else:
            self.data[self.run :] = bytes((LONG_RUN, *bytes(8)))
            self._set_long(self.run, 255 - RUN + 2)

    def take(self) -> bytes:
        position, code = self.position, self.data[self.position]
        self.count -= 1
        if code == LONG_RUN:
            left = self._get_long(position) - 1
            self._set_long(position, left)
            self.position += 0 if left else 9
        elif code > RUN:
            self.data[position] = code - 1
        elif code == RUN:
            self.position += 1
        else:
            self.position += 1 + code
            return bytes(self.data[position + 1 : self.position])
        return b""

    def size(self) -> int:
        """Return the total size of the messages that are left, in bytes."""
        size, position = 0, self.position
        while position < len(self.data):
            code = self.data[position]
            short = LONG_RUN < code < RUN
            size += code if short else 0
            position += 1 + code if short else 9 if code == LONG_RUN else 1
        return size

    def _get_long(self, position: int) -> int:
        return int.from_bytes(self.data[position + 1 : position + 9], "big")

    def _set_long(self, position: int, count: int) -> None:
        self.data[position + 1 : position + 9] = count.to_bytes(8, "big")


class Storage(Protocol[ItemT]):
    """A queue in which a `ReceiveHalf` stores its items."""

    count: int
    """Number of stored items. This is a plain attribute and not a method, because it is read for each item."""

    def put(self, item: ItemT, /) -> None:
        """Append an item."""

    def put_all(self, items: list[ItemT], /) -> None:
        """Append items. The storage owns the list from now on, and may change it."""

    def take(self) -> ItemT:
        """Remove and return the oldest item. The storage must not be empty."""

    def take_all(self, limit: int | None = None) -> list[ItemT]:
        """Remove and return the oldest items, at most `limit` of them."""

    def put_back(self, items: list[ItemT], /) -> None:
        """Insert items that `take_all` has returned at the front of the queue."""

    def clear(self) -> int:
        """Drop all items, and return their size in bytes, or 0 if the storage doesn't count bytes."""


class ItemQueue(Generic[ItemT]):
    """A storage for items of any type."""

    __slots__ = ("_items", "count")

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self.count: int = 0

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        self.count += 1

    def put_all(self, items: list[ItemT]) -> None:
        self._items += items
        self.count += len(items)

    def take(self) -> ItemT:
        self.count -= 1
        return self._items.popleft()

    def take_all(self, limit: int | None = None) -> list[ItemT]:
        count = self.count if limit is None else min(limit, self.count)
        self.count -= count
        return [self._items.popleft() for _ in range(count)]

    def put_back(self, items: list[ItemT]) -> None:
        self._items.extendleft(reversed(items))
        self.count += len(items)

    def clear(self) -> int:
        self._items.clear()
        self.count = 0
        return 0


class Mailbox:
    """A storage for messages that packs short messages.

    New messages are appended to `_items`. `take` pops messages from the end of `_next`. When `_next` is empty, `_items`
    is reversed and becomes `_next`. If `_items` contains packs, it can't become `_next`, so `take` removes its entries
    from the beginning instead.
    """

    # The queue consists of lists, because even an empty deque needs 760 bytes.
    __slots__ = ("_items", "_next", "_oldest", "_packed", "count")

    def __init__(self) -> None:
        self._next: list[bytes] = []  # messages that are older than those in `_items`, the oldest at the end
        self._items: list[bytes | _Empties | _Pack] = []
        self._oldest = 0  # index of the oldest entry in `_items`
        self.count: int = 0
        self._packed = 0  # number of entries in `_items` that are packs or runs of empty messages

    def put(self, message: bytes) -> None:
        self.count += 1
        if message and (self.count <= PACK_BEHIND or len(message) >= PACK_BELOW):
            self._items.append(message)
        else:
            self._put_small(message)

    def put_all(self, messages: list[bytes]) -> None:
        if min(map(len, messages), default=0) < PACK_BELOW:
            for message in messages:
                self.put(message)
        elif self.count:
            self._items += messages
            self.count += len(messages)
        else:
            messages.reverse()
            self._next = messages
            self.count = len(messages)

    def take(self) -> bytes:
        self.count -= 1
        return self._next.pop() if self._next else self._take_behind()

    def take_all(self, limit: int | None = None) -> list[bytes]:
        count = self.count if limit is None else min(limit, self.count)
        if count == self.count and not self._packed and not self._oldest:
            messages, self._next = self._next, []
            messages.reverse()
            messages += cast("list[bytes]", self._items)  # `_packed` is 0, so all entries are messages
            self._items, self.count = [], 0
            return messages
        if 0 < count <= len(self._next):
            messages = self._next[-count:]
            messages.reverse()
            del self._next[-count:]
            self.count -= count
            return messages
        take = self.take
        return [take() for _ in range(count)]

    def put_back(self, messages: list[bytes]) -> None:
        self._next += reversed(messages)
        self.count += len(messages)

    def clear(self) -> int:
        items = [*self._next, *self._items[self._oldest :]]
        self._next, self._items = [], []
        self._oldest = self.count = self._packed = 0
        return sum(len(item) if isinstance(item, bytes) else item.size() for item in items)

    def _take_behind(self) -> bytes:
        """Remove and return the oldest message of `_items`."""
        item = self._items[self._oldest]
        if not isinstance(item, bytes):
            return self._take_small(item)
        if self._packed:
            self._advance()
            return item
        messages = cast("list[bytes]", self._items)  # `_packed` is 0, so all entries are messages
        if self._oldest:
            del messages[: self._oldest]
            self._oldest = 0
        messages.reverse()
        self._next, self._items = messages, []
        return messages.pop()

    def _advance(self) -> None:
        """Drop the oldest entry of `_items`, whose messages have all been taken."""
        items = self._items
        items[self._oldest] = b""  # free the entry
        self._oldest += 1
        if self._oldest == len(items):
            items.clear()
            self._oldest = 0
        elif self._oldest >= COMPACT and self._oldest * 2 >= len(items):
            del items[: self._oldest]
            self._oldest = 0

    def _put_small(self, message: bytes) -> None:
        last = self._items[-1] if self._items else None
        if isinstance(last, bytes | None) or (message and (isinstance(last, _Empties) or len(last.data) > PACK_SIZE)):
            last = _Pack() if message else _Empties()
            self._items.append(last)
            self._packed += 1
        last.put(message)

    def _take_small(self, item: _Empties | _Pack) -> bytes:
        message = item.take()
        if not item.count:
            self._packed -= 1
            self._advance()
        return message
