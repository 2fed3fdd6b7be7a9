"""The sending half of a channel, for protocols in which the peer grants credit in bytes.

A protocol's sender derives from `CreditSender`. It queues bytes with `push`, and its `write` method takes them from the
queue with `take`, as far as the peer's credit allows.

The connection's outbox counts the queued bytes that only wait for the transport. Bytes that wait for credit don't
count. A channel whose peer doesn't read therefore takes hardly any room in the outbox from the other channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Final

from muxkit.core._engine import Buffer
from muxkit.core._queues import NO_QUEUE, queue_of
from muxkit.core._windows import U64_MAX, Credit
from muxkit.core.events import Writable
from muxkit.core.halves import Sender
from muxkit.core.mux_state import MuxState

OVERHEAD: Final = 16
"""Bytes that each queued item counts in the outbox in addition to its own, for the Python objects around it."""


class CreditSender(Sender):
    """A queue of bytes that are written as far as the peer's credit allows. The connection's `Scheduler` calls it."""

    __slots__ = (
        "_begun",
        "_counted",
        "_credit",
        "_shared",
        "_wanted",
        "deficit",
        "items",
        "owner",
        "queued",
        "scheduled",
    )

    def __init__(self, shared: MuxState, credit: int) -> None:
        self.owner: object | None = None
        self.queued: int = 0
        self.items: deque[bytes] = NO_QUEUE
        self.deficit: int = 0
        self.scheduled: bool = False
        self._shared = shared
        self._credit = Credit(credit)
        self._begun = 0  # bytes of the first item that were taken
        self._counted = 0  # bytes that this half counts in the outbox
        self._wanted: int | None = None  # size of the message for which a task waits for room

    @property
    def credit_out(self) -> int:
        return self._credit.available

    def has_room(self, size: int) -> bool:
        # If nothing is queued, a message may be larger than the credit. It is then written in pieces.
        room = self._credit.available - self.queued
        return room >= size or (not self.queued and room > 0)

    def notify_when_room(self, size: int) -> None:
        self._wanted = size

    def try_send(self, message: bytes) -> bool | None:
        if not self.has_room(len(message)):
            return None
        is_first = not self.scheduled
        self.send(message)
        return is_first

    def granted(self, amount: int, *, cap: int = U64_MAX) -> None:
        """Add credit that the peer has granted. Raises `RemoteProtocolError` if the sum is larger than `cap`."""
        self._credit.grant(amount, cap=cap)
        self._count()
        if self.items:
            self._shared.scheduler.add(self)
        self._notify()

    # --- for the protocol's sender

    @abstractmethod
    def is_ready(self) -> bool:
        """Return True if `write` would write anything."""

    @abstractmethod
    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Append about `budget` bytes of frames and return their size. Call `written` at the end."""

    def push(self, item: bytes) -> None:
        """Queue the bytes of an item, and schedule this half for writing if there is any credit."""
        self.items = queue_of(self.items)
        self.items.append(item)
        self.queued += len(item)
        self._count()
        if self._credit.available:
            self._shared.scheduler.add(self)

    def take(self, most: int, out: list[Buffer]) -> int:
        """Move up to `most` queued bytes that credit covers to `out`. Return their number."""
        items, size = self.items, 0
        most = min(most, self._credit.available)
        while items and size < most:
            item = items[0]
            left = len(item) - self._begun
            if left <= most - size:
                out.append(memoryview(item)[self._begun :] if self._begun else item)
                items.popleft()
                self._begun = 0
            else:
                left = most - size
                out.append(memoryview(item)[self._begun : self._begun + left])
                self._begun += left
            size += left
        self._credit.available -= size
        self.queued -= size
        return size

    def written(self) -> None:
        """Update the state at the end of `write`, and report `Writable` if a task waits for room and there is some."""
        if not self.items:
            self.items = NO_QUEUE
        self._count()
        if self._wanted is not None:
            self._notify()

    def drop_all(self) -> None:
        """Drop everything that is queued."""
        self.items = NO_QUEUE
        self.queued = self._begun = 0
        self._count()

    def _count(self) -> None:
        """Update the outbox, which counts the queued bytes that credit covers."""
        counted = min(self.queued, self._credit.available) + OVERHEAD * len(self.items)
        self._shared.outbox.used += counted - self._counted
        self._counted = counted

    def _notify(self) -> None:
        if self._wanted is not None and self.has_room(self._wanted):
            self._wanted = None
            self._shared.events.append(Writable(self))
