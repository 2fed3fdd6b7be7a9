"""Queues for sending: a fair scheduler, a counter of queued bytes, and `NO_QUEUE`, which saves memory."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol, TypeVar, cast

from muxkit.core._engine import Buffer

QUANTUM = 64 * 1024  # bytes that a source may write in one turn
FEW_SOURCES = 4  # see `Scheduler.pull`


class Source(Protocol):
    """A queue of frames to write, such as the sending half of a channel."""

    deficit: int
    """How many bytes the source may still write in its turn. Only the scheduler changes this."""
    scheduled: bool
    """True while the source waits for its turn. Only the scheduler changes this."""

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Append about `budget` bytes of frames to `out`, and return their size. 0 means that nothing can be written.

        No frame may have more than `piece` bytes of payload.
        """

    def is_ready(self) -> bool:
        """Return True if there is more to write."""


class Scheduler:
    """Lets the sources that have something to write take turns (deficit round robin).

    In each turn, a source may write `quantum` bytes. If it has to write a frame that is larger than that, the excess is
    subtracted from its later turns, even if it has had nothing to write in the meantime. A source that is alone may
    write as much as the caller wants, and nothing is subtracted later.
    """

    __slots__ = ("line", "quantum")

    def __init__(self, quantum: int = QUANTUM) -> None:
        self.quantum: int = quantum
        self.line: deque[Source] = deque()

    def __len__(self) -> int:
        return len(self.line)

    def add(self, source: Source) -> None:
        """Add a source that has something to write. Does nothing if the source was added before.

        A source that has nothing more to write when its turn comes is removed automatically.
        """
        if not source.scheduled:
            source.scheduled = True
            if source.deficit > 0:
                source.deficit = 0
            self.line.append(source)

    def pull(self, limit: int, out: list[Buffer]) -> int:
        """Append about `limit` bytes of frames to `out` in fair order, and return their number.

        With two to four sources, this returns after one quantum, so that a source that is added next has its turn soon.
        With more sources, a new one has to wait longer in any case.
        """
        # We don't call a function for each turn, because a hundred busy channels have a turn for each short message.
        line, quantum = self.line, self.quantum
        taken = 0
        while line and taken < limit:
            source, count = line[0], len(line)
            if 1 < count <= FEW_SOURCES and limit > quantum:
                limit = quantum
                if taken >= limit:
                    break
            if count == 1:
                written = source.write(limit - taken, limit, out)
                source.deficit = 0
            else:
                if source.deficit <= 0:
                    source.deficit += quantum
                if source.deficit <= 0:  # the source has written a large frame before
                    line.rotate(-1)
                    continue
                written = source.write(min(source.deficit, limit - taken), limit, out)
                source.deficit -= written
            taken += written
            if written == 0 or not source.is_ready():
                source.scheduled = False
                line.popleft()
            elif source.deficit <= 0:
                line.rotate(-1)
        return taken


class Queued(Protocol):
    """An object with the number of bytes that are queued for the link."""

    @property
    def used(self) -> int: ...


class Outbox:
    """The number of queued bytes that only wait for the link. The engine changes it, and the runtime's senders read it.

    Sharing this object is faster than a method of the engine, because reading an attribute needs no call.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used: int = 0


ItemT = TypeVar("ItemT")

NO_QUEUE: Final = cast("deque[Any]", ())
"""A placeholder for an empty deque, which would take 760 bytes. Appending to it raises an error; see `queue_of`."""


def queue_of(queue: deque[ItemT]) -> deque[ItemT]:
    """Return the queue itself, or a new deque if it is `NO_QUEUE`.

    Before you append, write `self.queue = queue_of(self.queue)`.
    """
    return queue if queue is not NO_QUEUE else deque()
