"""Queues of what is to be sent: fair order, the count of queued bytes, and a queue that is free while it is empty."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol, TypeVar, cast

from muxkit.core._engine import Buffer

QUANTUM = 64 * 1024  # bytes a turn
FEW_SOURCES = 4  # up to so many, none should wait for more than a turn of the others


class Source(Protocol):
    """Something with frames to write. The scheduler alone sets `deficit` and `scheduled`."""

    deficit: int
    scheduled: bool

    def write(self, budget: int, piece: int, out: list[Buffer]) -> int:
        """Append frames up to `budget` bytes, none with more than `piece` bytes of payload; return their size.

        0 means that nothing can be written now.
        """

    def is_ready(self) -> bool:
        """Return True if there is more to write."""


class Scheduler:
    """Deficit round robin over the sources that have something to write.

    A source's turn is `quantum` bytes; it goes to the back of the line only after it really wrote. One that must
    write a frame larger than its turn pays for it in later turns, also if it left the line in between. A source alone
    writes as much as the caller takes, and owes nothing for it.
    """

    __slots__ = ("line", "quantum")

    def __init__(self, quantum: int = QUANTUM) -> None:
        self.quantum: int = quantum
        self.line: deque[Source] = deque()

    def __len__(self) -> int:
        return len(self.line)

    def add(self, source: Source) -> None:
        """Put a source in line that has something to write; harmless when it is in line already.

        One that is gone by its turn writes nothing and drops out of the line.
        """
        if not source.scheduled:
            source.scheduled = True
            if source.deficit > 0:
                source.deficit = 0
            self.line.append(source)

    def pull(self, limit: int, out: list[Buffer]) -> int:
        """Append about `limit` bytes in fair order; return their number.

        Up to four ready sources share one quantum, so that a newcomer waits for little. With more of them it waits
        longer anyway, so more is taken at once.
        """
        # A turn is no function of its own, since a hundred busy channels take a turn for each short message.
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
                if source.deficit <= 0:  # still paying for a large frame
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
    """Something that knows how many bytes are queued for the transport."""

    @property
    def used(self) -> int: ...


class Outbox:
    """How much is queued and waits for nothing but the transport; the engine counts it, and senders read it.

    It is an object, so that reading costs no call.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used: int = 0


ItemT = TypeVar("ItemT")

NO_QUEUE: Final = cast("deque[Any]", ())
"""Stands for an empty deque, which would take 760 bytes: it is false and empty, and refuses to be appended to."""


def queue_of(queue: deque[ItemT]) -> deque[ItemT]:
    """Return the queue, a new one for `NO_QUEUE`: `self.queue = queue = queue_of(self.queue)` before an append."""
    return queue if queue is not NO_QUEUE else deque()
