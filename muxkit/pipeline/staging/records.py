"""What a staging store holds (applications, transactions, blocks, streams), its limits, and the messages about it.

A commit moves no rows: the transaction gets its position in the stream, and its blocks stay where they are. Row `n` of
it, counted from 0, has the id `base + n + 1`.

A message between a client and a server is JSON, or a block of rows. A client opens a channel and asks. `Begin` makes
the channel one for rows: blocks go to the server, and `Stored` comes back with how many of them are durable. Every
other question has one answer; a channel may carry any number of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, NamedTuple
from zlib import crc32

import attrs
import msgspec
from msgspec import Meta

from muxkit._settings import ABOVE_ZERO
from muxkit.pipeline.errors import STAGING_ERRORS, StagingError, StagingRequestInvalid

NO_BATCH = -1  # the last committed batch of an application that has committed nothing
LONGEST_NAME = 255  # characters of the name of a stream, an application, a transaction
LAST_BATCH = 2**63 - 1

JSON = b"J"
ROWS = b"B"
HEAD = struct.Struct("<QII")  # number of the first row, rows, CRC-32 of the body
START = 1 + HEAD.size
MOST_JSON = 1 << 20  # bytes of a request; the parts of a commit are the longest
LONGEST_TTL = 10.0 * 366 * 86_400  # s

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Batch = Annotated[int, Meta(ge=0, le=LAST_BATCH)]
Count = Annotated[int, Meta(ge=0, le=LAST_BATCH)]


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


# ---------------------------------------------------------------------------- questions


class Question(msgspec.Struct, frozen=True, kw_only=True, tag_field="ask"):
    """What all questions have."""

    stream: Name
    app: Name
    token: str = ""

    @property
    def key(self) -> Key:
        return Key(self.stream, self.app)


class Begin(Question, frozen=True, kw_only=True, tag="begin"):
    """Blocks of this transaction follow on this channel."""

    txn: Name
    batch: Batch
    encoding: Encoding
    ttl: Annotated[float, Meta(gt=0, le=LONGEST_TTL)]
    once: bool = False


class Prepare(Question, frozen=True, kw_only=True, tag="prepare"):
    """No more rows follow; check that all are there."""

    txn: Name
    batch: Batch
    rows: Count


class Committing(Question, frozen=True, kw_only=True, tag="commit"):
    """Make these transactions part of the stream, in this order."""

    batch: Batch
    parts: list[tuple[Name, Count]]


class Abort(Question, frozen=True, kw_only=True, tag="abort"):
    """Forget these transactions."""

    batch: Batch
    txns: list[Name]


class Ask(Question, frozen=True, kw_only=True, tag="standing"):
    """Ask how far the application is."""


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


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="begun"):
    """The answer to `Begin` and `Prepare`, and instead of `Stored`: `wanted` is False for a batch that is committed."""

    wanted: bool


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="stored"):
    """The number of further blocks of this channel that are durable."""

    blocks: int


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="aborted"):
    dropped: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="failed"):
    """The question is refused, with the reason; the channel ends."""

    kind: str
    text: str


# ---------------------------------------------------------------------------- messages

AnyQuestion = Begin | Prepare | Committing | Abort | Ask
Answer = Begun | Stored | Committed | Aborted | BatchProgress | Failed

_encoder = msgspec.json.Encoder()
_questions: msgspec.json.Decoder[AnyQuestion] = msgspec.json.Decoder(AnyQuestion)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: AnyQuestion | Answer) -> bytes:
    return JSON + _encoder.encode(message)


def question(message: bytes) -> AnyQuestion:
    """Decode a question; raises `StagingRequestInvalid`."""
    if message[:1] != JSON or len(message) > MOST_JSON:
        raise StagingRequestInvalid(f"a message of {len(message):,} bytes is no question (of at most {MOST_JSON:,})")
    try:
        return _questions.decode(message[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StagingRequestInvalid(f"this is no question: {error}") from error


def answer(message: bytes) -> Answer:
    """Decode an answer; raises `StagingRequestInvalid`, and for `Failed` the error that it carries."""
    try:
        if message[:1] != JSON:
            raise StagingRequestInvalid(f"the server sent {len(message):,} bytes that are no answer")
        got = _answers.decode(message[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StagingRequestInvalid(f"the server sent no answer: {error}") from error
    if isinstance(got, Failed):
        raise STAGING_ERRORS.get(got.kind, StagingError)(got.text)
    return got


def encode_block(block: Block) -> bytes:
    return b"".join((ROWS, HEAD.pack(block.first, block.rows, block.crc), block.body))


def is_block(message: bytes) -> bool:
    return message[:1] == ROWS


def decode_block(message: bytes, limits: StagingLimits) -> Block:
    """Decode and check a block; raises `StagingRequestInvalid`."""
    if len(message) < START:
        raise StagingRequestInvalid(f"{len(message)} bytes are no block of rows")
    first, rows, crc = HEAD.unpack_from(message, 1)
    body = message[START:]
    if len(body) > limits.block:
        raise StagingRequestInvalid(
            f"the block from row {first} has {len(body):,} bytes, more than StagingLimits(block={limits.block}) allows"
        )
    if not rows or 4 * rows > len(body) or first > LAST_BATCH - rows:
        raise StagingRequestInvalid(f"the block from row {first} says that it has {rows:,} rows in {len(body):,} bytes")
    if crc32(body) != crc:
        raise StagingRequestInvalid(f"the block from row {first} was changed on its way: its CRC is wrong")
    block = Block(first, rows, crc, body)
    lengths = lengths_of(block)
    if 4 * rows + sum(lengths) != len(body):
        raise StagingRequestInvalid(
            f"the rows of the block from row {first} have {sum(lengths):,} bytes, and {len(body) - 4 * rows:,} came"
        )
    if max(lengths) > limits.row:
        row = first + lengths.index(max(lengths))
        raise StagingRequestInvalid(
            f"row {row} has {max(lengths):,} bytes, more than StagingLimits(row={limits.row}) allows; write smaller "
            "rows, or raise it on the server"
        )
    return block
