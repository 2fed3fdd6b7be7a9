"""What a staging store holds (applications, transactions, blocks, streams), what it answers, and its limits.

A commit moves no rows: the transaction gets its position in the stream, and its blocks stay where they are. Row `n` of
it, counted from 0, has the id `base + n + 1`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple
from zlib import crc32

import attrs
import msgspec

from muxkit._limits import ABOVE_ZERO

NO_BATCH = -1  # the last committed batch of an application that has committed nothing
LONGEST_NAME = 255  # characters of the name of a stream, an application, a transaction
LAST_BATCH = 2**63 - 1


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

    stream: str
    app: str
    batch: int = NO_BATCH  # the last committed one
    rows: int = 0  # of that batch
    staged: int = 0  # bytes of its transactions that are not committed
    transactions: int = 0  # the number of those
    due: float | None = attrs.field(default=None, converter=attrs.converters.optional(float))
    """When it is deleted, if nothing of it is staged; None: never."""

    @property
    def key(self) -> Key:
        return Key(self.stream, self.app)


@attrs.define
class Transaction:
    """The rows of one partition of a batch."""

    id: str
    stream: str
    app: str
    batch: int
    encoding: Encoding = attrs.field(converter=Encoding)
    ttl: float = attrs.field(converter=float)  # s without a change after which it is deleted
    due: float | None = attrs.field(
        converter=attrs.converters.optional(float)
    )  # when it is deleted; None once it is committed
    rows: int = 0
    size: int = 0  # bytes
    prepared: bool = attrs.field(default=False, converter=bool)
    base: int | None = None  # the number of rows of the stream before it; None: not committed

    @property
    def key(self) -> Key:
        return Key(self.stream, self.app)

    def __str__(self) -> str:
        return f"{self.key}, batch {self.batch}: transaction {self.id}"


@attrs.define
class Stream:
    """The committed rows in order. Ids go from 1 to `head`; those up to `trimmed` are deleted."""

    name: str
    head: int = 0
    trimmed: int = 0


# ---------------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """Consecutive rows of a transaction: the length of each (32 bits, little-endian), then their bytes."""

    first: int  # the index of its first row in the transaction
    rows: int
    crc: int  # of the body
    body: bytes


def make_block(first: int, rows: Sequence[bytes]) -> Block:
    """Make a block of rows; `first` is the number of its first row in the transaction."""
    body = struct.pack(f"<{len(rows)}I", *map(len, rows)) + b"".join(rows)
    return Block(first, len(rows), crc32(body), body)


def lengths_of(block: Block) -> tuple[int, ...]:
    """Return the lengths of the rows of a block, as its body gives them."""
    return struct.unpack_from(f"<{block.rows}I", block.body)


def rows_of(block: Block) -> list[bytes]:
    """Return the rows of a valid block."""
    got: list[bytes] = []
    at = 4 * block.rows
    for length in lengths_of(block):
        got.append(block.body[at : at + length])
        at += length
    return got


# ---------------------------------------------------------------------------- answers


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="committed"):
    """The result of a commit."""

    duplicate: bool
    """The batch, or a later one, was committed before: this call did nothing."""
    rows: int
    head: int
    """The last id of the stream."""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="standing"):
    """The progress of an application in a stream."""

    batch: int | None
    """The last committed one."""
    rows: int
    """The number of rows of that batch."""
    staged: int
    """Bytes that are staged and not committed."""
    transactions: int
    head: int
    """The last id of the stream."""
    trimmed: int
    """The last id that may be deleted."""


@attrs.frozen
class Published:
    """Consecutive rows of a stream; the first of them has the id `first`."""

    first: int
    encoding: Encoding
    rows: list[bytes]


# ---------------------------------------------------------------------------- limits


def _limit(default: int) -> int:
    number: int = attrs.field(default=default, validator=ABOVE_ZERO)
    return number


@attrs.frozen(kw_only=True)
class StagingLimits:
    """The limits of a staging store; sizes in bytes, times in seconds."""

    staged: int = _limit(4 << 30)
    """Staged and not committed bytes of one application in one stream."""
    transactions: int = _limit(10_000)
    """Staged and not committed transactions of one application in one stream."""
    applications: int = _limit(100_000)
    """Applications in all streams together."""
    row: int = _limit(512 << 10)
    """One row."""
    block: int = _limit(4 << 20)
    """One block of rows."""
    bytes: int = _limit(1 << 40)
    """In memory: of all rows; in SQLite: of the file."""
    ttl: int = _limit(7 * 86_400)
    """The longest lifetime of an unchanged transaction that a client may request."""
