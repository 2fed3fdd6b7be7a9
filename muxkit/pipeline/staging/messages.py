"""The messages between a staging client and its server: JSON, or a block of rows.

A client opens a channel and asks. `Begin` makes the channel one for rows: blocks go to the server, and `Stored` comes
back with how many of them are durable. Every other question has one answer; a channel may carry any number of them.
"""

from __future__ import annotations

import struct
from typing import Annotated
from zlib import crc32

import msgspec
from msgspec import Meta

from muxkit.pipeline.errors import STAGING_ERRORS, StagingError, StagingRequestInvalid
from muxkit.pipeline.staging.records import (
    LAST_BATCH,
    LONGEST_NAME,
    BatchProgress,
    Block,
    Committed,
    Encoding,
    Key,
    StagingLimits,
    lengths_of,
)

JSON = b"J"
ROWS = b"B"
HEAD = struct.Struct("<QII")  # number of the first row, rows, CRC-32 of the body
START = 1 + HEAD.size
MOST_JSON = 1 << 20  # bytes of a request; the parts of a commit are the longest
LONGEST_TTL = 10.0 * 366 * 86_400  # s

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Batch = Annotated[int, Meta(ge=0, le=LAST_BATCH)]
Count = Annotated[int, Meta(ge=0, le=LAST_BATCH)]


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


# ---------------------------------------------------------------------------- blocks


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
