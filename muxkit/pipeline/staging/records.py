"""The records of a staging store (applications, transactions, blocks, streams), its limits, and its messages.

A commit moves no rows. It gives the transaction its position in the stream, and the blocks of the transaction stay
where they are. Row `n` of a transaction, counted from 0, has the id `base + n + 1`.

A message between a client and a server is either JSON or a block of rows. A client opens a channel and sends a request.
`Begin` turns the channel into one for rows: the client sends blocks, and the server answers with `Stored` and the
number of blocks that are durable. Every other request has one answer, and a channel can carry many such requests.
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

NO_BATCH = -1  # the last batch of an application that hasn't committed anything
LONGEST_NAME = 255  # characters in the name of a stream, an application or a transaction
LAST_BATCH = 2**63 - 1

JSON = b"J"
ROWS = b"B"
HEAD = struct.Struct("<QII")  # number of the first row, rows, CRC-32 of the body
START = 1 + HEAD.size
MOST_JSON = 1 << 20  # bytes of a request; the transactions of a commit take the most space
LONGEST_TTL = 10.0 * 366 * 86_400  # s

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Batch = Annotated[int, Meta(ge=0, le=LAST_BATCH)]
Count = Annotated[int, Meta(ge=0, le=LAST_BATCH)]


class Encoding(Enum):
    """The encoding of rows."""

    JSON = "json"
    TEXT = "text"  # UTF-8
    BINARY = "binary"
    RECORD = "record"  # key, headers and value, as restream stores them


class Key(NamedTuple):
    """An application in one stream. Its batch numbers are unique."""

    stream: str
    app: str

    def __str__(self) -> str:
        return f"stream {self.stream!a}, application {self.app!a}"


@attrs.define
class Application:
    """The progress of an application in a stream."""

    stream: str
    app: str
    batch: int = NO_BATCH  # the last committed batch
    rows: int = 0  # of that batch
    staged: int = 0  # bytes of its uncommitted transactions
    transactions: int = 0  # number of its uncommitted transactions
    due: float | None = attrs.field(default=None, converter=attrs.converters.optional(float))
    """When it is deleted if it has no uncommitted transaction. None means never."""

    @property
    def key(self) -> Key:
        """The stream and the application."""
        return Key(self.stream, self.app)


@attrs.define
class Transaction:
    """The rows of one partition of a batch."""

    id: str
    stream: str
    app: str
    batch: int
    encoding: Encoding = attrs.field(converter=Encoding)
    ttl: float = attrs.field(converter=float)  # s without a change after which the transaction is deleted
    due: float | None = attrs.field(
        converter=attrs.converters.optional(float)
    )  # when it is deleted; None once it is committed
    rows: int = 0
    size: int = 0  # bytes
    prepared: bool = attrs.field(default=False, converter=bool)
    base: int | None = None  # number of rows in the stream before it, or None if it isn't committed

    @property
    def key(self) -> Key:
        """The stream and the application."""
        return Key(self.stream, self.app)

    def __str__(self) -> str:
        return f"{self.key}, batch {self.batch}: transaction {self.id}"


@attrs.define
class Stream:
    """The committed rows in order. Their ids run from 1 to `head`. Rows up to `trimmed` are deleted."""

    name: str
    head: int = 0
    trimmed: int = 0


# ---------------------------------------------------------------------------- blocks


class Block(NamedTuple):
    """Consecutive rows of a transaction. The body has their lengths (32 bits, little-endian), followed by the rows."""

    first: int  # index of its first row in the transaction
    rows: int
    crc: int  # of the body
    body: bytes


def make_block(first: int, rows: Sequence[bytes]) -> Block:
    """Return a block of rows. `first` is the index of its first row in the transaction."""
    body = struct.pack(f"<{len(rows)}I", *map(len, rows)) + b"".join(rows)
    return Block(first, len(rows), crc32(body), body)


def lengths_of(block: Block) -> tuple[int, ...]:
    """Return the lengths of the rows of a block, from its body."""
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
    """Consecutive rows of a stream. The first row has the id `first`."""

    first: int
    encoding: Encoding
    rows: list[bytes]


# ---------------------------------------------------------------------------- limits


def _limit(default: int) -> int:
    number: int = attrs.field(default=default, validator=ABOVE_ZERO)
    return number


@attrs.frozen(kw_only=True)
class StagingLimits:
    """The limits of a staging store. Sizes are in bytes, and times are in seconds."""

    staged: int = _limit(4 << 30)
    """Uncommitted bytes of one application in one stream."""
    transactions: int = _limit(10_000)
    """Uncommitted transactions of one application in one stream."""
    applications: int = _limit(100_000)
    """Applications in all streams."""
    row: int = _limit(512 << 10)
    """The size of a row."""
    block: int = _limit(4 << 20)
    """The size of a block of rows."""
    bytes: int = _limit(1 << 40)
    """The size of the store: of all rows in memory, or of the SQLite file."""
    ttl: int = _limit(7 * 86_400)
    """The longest lifetime of an unchanged transaction that a client may request."""


# ---------------------------------------------------------------------------- requests


class Question(msgspec.Struct, frozen=True, kw_only=True, tag_field="ask"):
    """The fields that all requests have."""

    stream: Name
    app: Name
    token: str = ""

    @property
    def key(self) -> Key:
        """The stream and the application."""
        return Key(self.stream, self.app)


class Begin(Question, frozen=True, kw_only=True, tag="begin"):
    """Announces that blocks of this transaction follow on this channel."""

    txn: Name
    batch: Batch
    encoding: Encoding
    ttl: Annotated[float, Meta(gt=0, le=LONGEST_TTL)]
    once: bool = False


class Prepare(Question, frozen=True, kw_only=True, tag="prepare"):
    """Announces that no more rows follow, and requests a check that all rows have arrived."""

    txn: Name
    batch: Batch
    rows: Count


class Committing(Question, frozen=True, kw_only=True, tag="commit"):
    """Requests that these transactions become part of the stream, in this order."""

    batch: Batch
    parts: list[tuple[Name, Count]]


class Abort(Question, frozen=True, kw_only=True, tag="abort"):
    """Requests that these transactions are dropped."""

    batch: Batch
    txns: list[Name]


class Ask(Question, frozen=True, kw_only=True, tag="standing"):
    """Requests the progress of an application."""


# ---------------------------------------------------------------------------- answers


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="committed"):
    """The result of a commit."""

    duplicate: bool
    """True if the batch or a later one was already committed, so that the request changed nothing."""
    rows: int
    head: int
    """The last id of the stream."""


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="standing"):
    """The progress of an application in a stream."""

    batch: int | None
    """The last committed batch, or None."""
    rows: int
    """The number of rows of that batch."""
    staged: int
    """Uncommitted bytes."""
    transactions: int
    head: int
    """The last id of the stream."""
    trimmed: int
    """The id of the last trimmed row."""


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="begun"):
    """The answer to `Begin` and `Prepare`, and instead of `Stored`. `wanted` is False if the batch is committed."""

    wanted: bool


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="stored"):
    """The number of blocks that have become durable since the last such answer on this channel."""

    blocks: int


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="aborted"):
    """The answer to `Abort`, with the number of dropped transactions."""

    dropped: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag="failed"):
    """The request failed, for this reason. The channel ends."""

    kind: str
    text: str


# ---------------------------------------------------------------------------- messages

AnyQuestion = Begin | Prepare | Committing | Abort | Ask
Answer = Begun | Stored | Committed | Aborted | BatchProgress | Failed

_encoder = msgspec.json.Encoder()
_questions: msgspec.json.Decoder[AnyQuestion] = msgspec.json.Decoder(AnyQuestion)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: AnyQuestion | Answer) -> bytes:
    """Encode a request or an answer."""
    return JSON + _encoder.encode(message)


def question(message: bytes) -> AnyQuestion:
    """Decode a request. Raises `StagingRequestInvalid`."""
    if message[:1] != JSON or len(message) > MOST_JSON:
        raise StagingRequestInvalid(f"a message of {len(message):,} bytes is no question (of at most {MOST_JSON:,})")
    try:
        return _questions.decode(message[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StagingRequestInvalid(f"this is no question: {error}") from error


def answer(message: bytes) -> Answer:
    """Decode an answer. Raises `StagingRequestInvalid`, or for `Failed` the error that it describes."""
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
    """Encode a block of rows."""
    return b"".join((ROWS, HEAD.pack(block.first, block.rows, block.crc), block.body))


def is_block(message: bytes) -> bool:
    """Return True if a message is a block of rows."""
    return message[:1] == ROWS


def decode_block(message: bytes, limits: StagingLimits) -> Block:
    """Decode and check a block. Raises `StagingRequestInvalid`."""
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
