"""What does a staging store keep? Applications, transactions, blocks of rows, streams, and what the rules do with them.

Committing moves nothing: a transaction that is committed is given its place in the stream, and its blocks stay where
they lie. Row `n` of it, counted from 0, has the id `base + n + 1`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

NEVER = -1  # the last committed batch of an application that has committed nothing
LONGEST_NAME = 255  # characters of a stream, an application, a transaction
LAST_BATCH = 2**63 - 1
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Encoding(Enum):
    """What the bytes of a row are."""

    JSON = "json"
    TEXT = "text"  # UTF-8
    BINARY = "binary"


class Key(NamedTuple):
    """Whose batches are told apart by their numbers: an application, in one stream."""

    stream: str
    app: str

    def __str__(self) -> str:
        return f"stream {self.stream!a}, application {self.app!a}"


@attrs.define
class Application:
    """How far an application is in a stream."""

    key: Key
    batch: int = NEVER  # the last one that was committed
    rows: int = 0  # of that one
    staged: int = 0  # bytes of its transactions that are not committed
    transactions: int = 0  # how many those are
    due: float | None = None  # when it is forgotten, if nothing of it is staged; None: never


@attrs.define
class Transaction:
    """What one partition of a batch wrote."""

    id: str
    key: Key
    batch: int
    encoding: Encoding
    ttl: float  # s that it survives untouched
    due: float | None  # when it is swept; None once it is committed
    rows: int = 0
    size: int = 0  # bytes
    prepared: bool = False
    base: int | None = None  # rows of the stream before it; None: not committed


@attrs.define
class Stream:
    """What was committed, row after row. Ids go from 1 to `head`; those up to `trimmed` are gone."""

    name: str
    head: int = 0
    trimmed: int = 0


class Block(NamedTuple):
    """Consecutive rows of a transaction: the length of each (32 bits, little-endian), then their bytes."""

    first: int  # the number of its first row in the transaction
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
    """What a staging store may hold for whoever writes to it; sizes in bytes, times in seconds."""

    staged: int = _limit(4 * GIB)
    """Of one application in one stream: staged and not committed."""
    transactions: int = _limit(10_000)
    """Of one application in one stream, as many."""
    applications: int = _limit(100_000)
    """Whose last batch is remembered, in all streams together."""
    row: int = _limit(512 * KIB)
    """One row."""
    block: int = _limit(4 * MIB)
    """One block of rows."""
    bytes: int = _limit(1 << 40)
    """Memory: all that is kept; SQLite: the file."""
    ttl: int = _limit(7 * 86_400)
    """The longest time that a client may ask its transactions to be kept untouched."""


class Rows(Protocol):
    """The rows during one unit of work. Nothing is written unless the rules have been checked to the end."""

    def application(self, key: Key) -> Application | None:
        """The application, which nobody else changes from now on until the unit of work is over."""

    def save_application(self, application: Application) -> None: ...

    def applications(self) -> int:
        """How many there are."""

    def remove_application(self, key: Key) -> None: ...

    def overdue_applications(self, now: float, most: int) -> list[Key]:
        """Some that are to be forgotten, with nothing staged."""

    def transaction(self, id: str) -> Transaction | None: ...

    def save_transaction(self, transaction: Transaction) -> None: ...

    def remove_transaction(self, id: str) -> None:
        """It is gone; its blocks may go later, in small portions."""

    def reclaim(self, id: str) -> None:
        """Another transaction will have this name: nothing of the last one may be left."""

    def purge(self) -> bool:
        """Delete a portion of the blocks of transactions that are gone; whether there may be more."""

    def staged(self, key: Key, upto: int) -> list[Transaction]:
        """Of this application, not committed, of batches up to this one."""

    def overdue(self, now: float, most: int) -> list[Transaction]:
        """Some that are to be swept."""

    def add(self, id: str, blocks: Sequence[Block]) -> None:
        """Blocks of a transaction that are not there yet."""

    def spans(self, id: str, first: int, last: int) -> list[Span]:
        """The blocks of a transaction that begin at one of these rows, in order."""

    def blocks(self, id: str, row: int, most_bytes: int) -> list[Block]:
        """The block that holds this row and those that follow, as many as fit; at least one."""

    def stream(self, name: str) -> Stream | None:
        """The stream, which nobody else changes from now on until the unit of work is over."""

    def look_at_stream(self, name: str) -> Stream | None:
        """The stream as it is now."""

    def save_stream(self, stream: Stream) -> None: ...

    def published(self, stream: str, id: int) -> Transaction | None:
        """The committed transaction that holds this row of the stream."""

    def passed(self, stream: str, upto: int, most: int) -> list[str]:
        """Some committed transactions of the stream whose rows all have ids up to this one."""

    def changed(self, stream: str) -> None:
        """Wake who waits for this stream when the work is durable."""

    def shrink(self) -> bool:
        """Give some unused room back to the disk; whether there is more to give."""
