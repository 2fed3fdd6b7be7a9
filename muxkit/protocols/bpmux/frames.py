"""Parses, encodes and traces the chunks of bpmux.

A chunk consists of a tag, the id of an entity, and the fields that the flags in the tag announce. The tag has the type
of the entity in its three high bits and the flags in the others. Numbers are encoded as VarU64: one byte for numbers
below 248, and otherwise one byte for the length followed by the number, which must not be longer than necessary.

This module only knows the form of a chunk. Whether a chunk is allowed in the current state is checked by a subclass of
`Checks`, which `parse_chunk` calls for each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._observer import Direction, Observer
from muxkit.core import Buffer, Cursor, NeedMore, encode_varu64

PAYLOAD = 0x10
CREDIT = 0x08
PING = 0x04
END = 0x02
ACK_END = 0x01

CANONICAL = "bpmux-G12"  # the rule against encodings that are longer than necessary


class Type(IntEnum):
    """The type of a chunk: the kind of entity that it is about, from the point of view of the chunk's sender."""

    OUT_REQUEST = 0
    IN_REQUEST = 1
    OUT_SINK = 2
    IN_SINK = 3
    OUT_STREAM = 4
    IN_STREAM = 5
    DUPLEX = 6
    PARTIAL = 7

    @property
    def label(self) -> str:
        return LABELS[self]


TYPES = tuple(Type)
LABELS = tuple(type.name.replace("_", "-").lower() for type in Type)
TAGS = tuple(bytes((tag,)) for tag in range(256))
NO_GRANT = bytes((Type.IN_STREAM << 5 | CREDIT, 0, 0))  # a chunk that grants 0 bytes of top-level credit
ANNOUNCEMENT_MOST = 2 * len(NO_GRANT) + 2 + 9  # size of the longest announcement of a first credit, in bytes


@attrs.define
class Chunk:
    """A chunk of any type except Partial. `payload`, `credit` and `end` are None if the chunk doesn't have the flag."""

    type: Type
    id: int
    payload: bytes | None = None
    credit: int | None = None
    ping: bool = False
    end: bytes | None = None
    ack_end: bool = False

    @property
    def is_pong(self) -> bool:
        """True if the chunk has no flags. The specification uses such chunks as pongs."""
        return not (self.ping or self.ack_end) and (self.payload, self.credit, self.end) == (None, None, None)


@attrs.define
class Partial:
    """A Partial chunk. It announces that the payload of the next chunk is the first part of a larger message."""

    total_size: int


class Checks:
    """The checks that `parse_chunk` makes for each field. This class accepts everything; `ChunkRules` is stricter.

    A subclass raises `RemoteProtocolError` in the method for a field that isn't allowed. The size of a payload is
    checked before its bytes are read, so a peer can't make us keep a payload that is too large. The methods must not
    change the state of the connection, because an incomplete chunk is parsed again from its start.
    """

    def partial(self, total_size: int) -> None: ...
    def header(self, type: Type, id: int, flags: int) -> None: ...
    def payload(self, size: int) -> None: ...
    def credit(self, amount: int) -> None: ...
    def end(self, size: int) -> None: ...


NO_CHECKS = Checks()


def parse_chunk(cursor: Cursor, checks: Checks = NO_CHECKS) -> Chunk | Partial:
    """Parse the next chunk.

    Raises:
        NeedMore: If the chunk is incomplete.
        RemoteProtocolError: If the chunk is malformed, or if `checks` doesn't allow it.
    """
    tag = cursor.byte()
    if tag >= Type.PARTIAL << 5:
        total_size = _parse_total_size(cursor, (tag & 7) + 1)
        checks.partial(total_size)
        return Partial(total_size)
    type, flags = TYPES[tag >> 5], tag & 0x1F
    chunk = Chunk(type, cursor.varu64(CANONICAL))
    checks.header(type, chunk.id, flags)
    if flags & PAYLOAD:
        size = cursor.varu64(CANONICAL)
        checks.payload(size)
        chunk.payload = cursor.exact(size)
    if flags & CREDIT:
        chunk.credit = cursor.varu64(CANONICAL)
        checks.credit(chunk.credit)
    chunk.ping = bool(flags & PING)
    if flags & END:
        size = cursor.varu64(CANONICAL)
        checks.end(size)
        chunk.end = cursor.exact(size)
    chunk.ack_end = bool(flags & ACK_END)
    return chunk


def _parse_total_size(cursor: Cursor, length: int) -> int:
    encoded = cursor.exact(length)
    if encoded == b"\x00":
        raise RemoteProtocolError("invalid total size 0 of a message in parts: expected at least 1", rule="bpmux-P04")
    if encoded[0] == 0:
        raise RemoteProtocolError(
            f"total size {int.from_bytes(encoded)} has leading zeros: expected fewer than {length} bytes",
            rule="bpmux-P05",
        )
    return int.from_bytes(encoded)


def encode_chunk(chunk: Chunk) -> bytes:
    """Return the chunk as bytes."""
    if chunk.type is Type.PARTIAL:
        raise LocalProtocolError("a Partial chunk has no id and no flags; use encode_partial")
    flags = (
        (PAYLOAD if chunk.payload is not None else 0)
        | (CREDIT if chunk.credit is not None else 0)
        | (PING if chunk.ping else 0)
        | (END if chunk.end is not None else 0)
        | (ACK_END if chunk.ack_end else 0)
    )
    parts = [head(chunk.type, chunk.id, flags)]
    if chunk.payload is not None:
        parts += [encode_varu64(len(chunk.payload)), chunk.payload]
    if chunk.credit is not None:
        parts.append(encode_varu64(chunk.credit))
    if chunk.end is not None:
        parts += [encode_varu64(len(chunk.end)), chunk.end]
    return b"".join(parts)


def encode_partial(total_size: int) -> bytes:
    """Return a Partial chunk, which announces a message of `total_size` bytes in parts."""
    if not 0 < total_size < 2**64:
        raise LocalProtocolError(f"invalid total size {total_size}: expected 1 to 2^64-1")
    length = (total_size.bit_length() + 7) // 8
    return bytes([Type.PARTIAL << 5 | length - 1]) + total_size.to_bytes(length)


def head(type: Type, id: int, flags: int) -> bytes:
    """Return the tag and the id of a chunk as bytes."""
    return TAGS[type << 5 | flags] + encode_varu64(id)


def encode_announcement(credit: int) -> bytes:
    """Return the chunks that announce a first credit: a grant of `credit` for the top level between two grants of 0.

    Another implementation takes these chunks for three ordinary grants of top-level credit. muxkit doesn't write grants
    of 0 for any other purpose, so it recognizes the announcement.
    """
    return b"".join((NO_GRANT, head(Type.IN_STREAM, 0, CREDIT), encode_varu64(credit), NO_GRANT))


def find_announcement(data: bytes) -> int | None:
    """Return the first credit that the first bytes of a connection announce.

    The result is 0 if the bytes aren't an announcement, and None if more bytes are needed to decide that.
    """
    if not NO_GRANT.startswith(data[: len(NO_GRANT)]):
        return 0
    cursor = Cursor(data, len(NO_GRANT))
    try:
        if cursor.exact(2) != NO_GRANT[:2]:
            return 0
        credit = cursor.varu64(CANONICAL)
        return credit if cursor.exact(len(NO_GRANT)) == NO_GRANT else 0
    except NeedMore:
        return None
    except RemoteProtocolError:  # `parse_chunk` raises the same error later
        return 0


def label(type: Type, id: int) -> str:
    """Return a name for the entity of a chunk, such as `out-sink 7`.

    The specification reserves In-Sink and In-Stream chunks with id 0 for the top level.
    """
    is_top = id == 0 and type in (Type.IN_SINK, Type.IN_STREAM)
    return f"top-level {type.label}" if is_top else f"{type.label} {id}"


# --- tracing


def observe_chunk(observer: Observer, direction: Direction, channel: str, chunk: Chunk, *, in_parts: bool) -> None:
    """Report each field of a chunk to the observer. `in_parts` is True if a Partial chunk preceded it."""
    fields = (
        ("partial", 0 if in_parts else None),
        ("payload", None if chunk.payload is None else len(chunk.payload)),
        ("credit", None if chunk.credit is None else 0),
        ("ping", 0 if chunk.ping else None),
        ("end", None if chunk.end is None else len(chunk.end)),
        ("ack-end", 0 if chunk.ack_end else None),
        ("pong", 0 if chunk.is_pong else None),
    )
    for name, size in fields:
        if size is not None:
            observer.frame(direction, channel, name, size)


def observe_written(observer: Observer, buffers: Sequence[Buffer]) -> None:
    """Report chunks that the engine has written.

    This parses the bytes again. Writing therefore needs no code for observers, and costs nothing without one.
    """
    cursor = Cursor(b"".join(buffers))
    in_parts = False
    while cursor.remaining:
        chunk = parse_chunk(cursor)
        if isinstance(chunk, Partial):
            in_parts = True
            continue
        observe_chunk(observer, "out", label(chunk.type, chunk.id), chunk, in_parts=in_parts)
        in_parts = False
