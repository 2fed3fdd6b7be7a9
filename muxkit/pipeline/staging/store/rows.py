"""The rows of a staging store (applications, transactions, blocks, streams), and the interface to read and write them.

A commit moves no rows: the transaction gets its position in the stream, and its blocks stay where they are. Row `n` of
it, counted from 0, has the id `base + n + 1`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_BATCH = -1  # the last committed batch of an application that has committed nothing
LONGEST_NAME = 255  # characters of the name of a stream, an application, a transaction
LAST_BATCH = 2**63 - 1
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Encoding(Enum):
    """The format of the bytes of a row."""

    JSON = "json"
    TEXT = "text"  # UTF-8
    BINARY = "binary"


class Key(NamedTuple):
    """An application in one stream. The numbers of its batches are unique."""

    stream: str
    app: str

    def __str__(self) -> str:
        return f"stream {self.stream!a}, application {self.app!a}"


@attrs.define
class Application:
    """The progress of an application in a stream."""

    key: Key
    batch: int = NO_BATCH  # the last committed one
    rows: int = 0  # of that batch
    staged: int = 0  # bytes of its transactions that are not committed
    transactions: int = 0  # the number of those
    due: float | None = None  # when it is deleted, if nothing of it is staged; None: never


@attrs.define
class Transaction:
    """The rows of one partition of a batch."""

    id: str
    key: Key
    batch: int
    encoding: Encoding
    ttl: float  # s without a change after which it is deleted
    due: float | None  # when it is deleted; None once it is committed
    rows: int = 0
    size: int = 0  # bytes
    prepared: bool = False
    base: int | None = None  # the number of rows of the stream before it; None: not committed


@attrs.define
class Stream:
    """The committed rows in order. Ids go from 1 to `head`; those up to `trimmed` are deleted."""

    name: str
    head: int = 0
    trimmed: int = 0


class Block(NamedTuple):
    """Consecutive rows of a transaction: the length of each (32 bits, little-endian), then their bytes."""

    first: int  # the index of its first row in the transaction
    rows: int
    crc: int  # of the body
    body: bytes


class Span(NamedTuple):
    """A block without its body."""

    first: int
    rows: int
    crc: int


def _above_zero(instance: StagingLimits, field: attrs.Attribute[int], value: int) -> None:
    if not value > 0 or math.isinf(value):
        raise ValueError(f"StagingLimits({field.name}={value!r}): must be finite and above 0")


def _limit(default: int) -> int:
    number: int = attrs.field(default=default, validator=_above_zero)
    return number


@attrs.frozen(kw_only=True)
class StagingLimits:
    """The limits of a staging store; sizes in bytes, times in seconds."""

    staged: int = _limit(4 * GIB)
    """Staged and not committed bytes of one application in one stream."""
    transactions: int = _limit(10_000)
    """Staged and not committed transactions of one application in one stream."""
    applications: int = _limit(100_000)
    """Applications in all streams together."""
    row: int = _limit(512 * KIB)
    """One row."""
    block: int = _limit(4 * MIB)
    """One block of rows."""
    bytes: int = _limit(1 << 40)
    """In memory: of all rows; in SQLite: of the file."""
    ttl: int = _limit(7 * 86_400)
    """The longest lifetime of an unchanged transaction that a client may request."""


class Rows(Protocol):
    """The rows during one unit of work. The rules write only after all their checks."""

    def application(self, key: Key) -> Application | None:
        """Return the application, locked until the unit of work is over."""

    def save_application(self, application: Application) -> None: ...

    def applications(self) -> int:
        """Return the number of applications."""

    def remove_application(self, key: Key) -> None: ...

    def overdue_applications(self, now: float, most: int) -> list[Key]:
        """Return some expired applications with nothing staged."""

    def transaction(self, id: str) -> Transaction | None: ...

    def save_transaction(self, transaction: Transaction) -> None: ...

    def remove_transaction(self, id: str) -> None:
        """Delete the transaction; its blocks may be deleted later, in small portions."""

    def reclaim(self, id: str) -> None:
        """Delete what is left of a transaction of this name, before another one gets the name."""

    def purge(self) -> bool:
        """Delete a portion of the blocks of deleted transactions; True if there may be more."""

    def staged(self, key: Key, upto: int) -> list[Transaction]:
        """Return the transactions of this application that are not committed, of batches up to this one."""

    def overdue(self, now: float, most: int) -> list[Transaction]:
        """Return some expired transactions."""

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        """Add new blocks of a transaction."""

    def spans(self, id: str, first: int, last: int) -> list[Span]:
        """Return the blocks of a transaction that begin at one of these rows, in order."""

    def blocks(self, id: str, row: int, most_bytes: int) -> list[Block]:
        """Return the block that holds this row and as many of the next ones as fit; at least one."""

    def stream(self, name: str) -> Stream | None:
        """Return the stream, locked until the unit of work is over."""

    def look_at_stream(self, name: str) -> Stream | None:
        """Return the stream without locking it."""

    def save_stream(self, stream: Stream) -> None: ...

    def published(self, stream: str, id: int) -> Transaction | None:
        """Return the committed transaction that holds this row of the stream."""

    def passed(self, stream: str, upto: int, most: int) -> list[str]:
        """Return some committed transactions of the stream whose rows all have ids up to this one."""

    def changed(self, stream: str) -> None:
        """Wake the tasks that wait for this stream when the work is durable."""

    def shrink(self) -> bool:
        """Return some unused space to the disk; True if there is more."""
