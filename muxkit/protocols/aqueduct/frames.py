"""The wire format of Aqueduct: channel ids, varints, header data and the twelve frames, parsed and encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Final

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, Ids, NeedMore, encode_varint

Pairs = Sequence[tuple[bytes, bytes]]
Headers = tuple[tuple[bytes, bytes], ...]

REASON_HEADER = b"muxkit.reason"  # of the empty message before CANCEL_SENDER that says why


# --- channel ids

ENTRYPOINT: Final = 0
MOST_INDEX: Final = 2**61 - 1


class Role(IntEnum):
    """The two ends of a connection; the value is the bit for that end in a channel id."""

    CLIENT = 0
    SERVER = 1

    @property
    def peer(self) -> Role:
        return Role(1 - self)


def channel_id(*, creator: Role, sender: Role, oneshot: bool, index: int) -> int:
    if not 0 <= index <= MOST_INDEX:
        raise LocalProtocolError(f"index {index:#x} is outside 0 … {MOST_INDEX:#x}")
    return index << 3 | oneshot << 2 | sender << 1 | creator


def creator_of(channel: int) -> int:
    return channel & 1


def sender_of(channel: int) -> int:
    return channel >> 1 & 1


def is_oneshot(channel: int) -> bool:
    return bool(channel & 4)


def index_of(channel: int) -> int:
    return channel >> 3


def label(channel: int) -> str:
    """Describe a channel id for logs and errors: `client-made server-sends 7`."""
    if channel == ENTRYPOINT:
        return "entrypoint"
    creator, sender = Role(creator_of(channel)).name.lower(), Role(sender_of(channel)).name.lower()
    return f"{creator}-made {sender}-sends{' oneshot' if is_oneshot(channel) else ''} {index_of(channel)}"


def id_counters(creator: Role) -> dict[int, Ids]:
    """Give the id counters of one creator by the low three bits; index 0 of one of them is the entrypoint."""
    counters = {}
    for bits in range(creator, 8, 2):
        first = 8 if bits == ENTRYPOINT else bits
        counters[bits] = Ids(first, MOST_INDEX << 3 | bits, step=8)
    return counters


# --- primitives

VARINT_RULE: Final = "aqueduct-E03"
VARINT_BYTES: Final = 10  # the longest varint: 64 bits, 7 in each byte


def read_varint(cursor: Cursor) -> int:
    """Read at most 64 bits in at most 10 bytes; longer forms of a number are accepted (E04)."""
    return cursor.varint(VARINT_BYTES, VARINT_RULE)


def encode_varbytes(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


def encode_varints(numbers: Iterable[int]) -> bytes:
    """Encode varints as the content of one varbytes."""
    return encode_varbytes(b"".join(map(encode_varint, numbers)))


def decode_varints(content: bytes) -> list[int]:
    """Decode the varints that fill a container."""
    cursor, numbers = Cursor(content), []
    try:
        while cursor.position < len(content):
            numbers.append(cursor.varint(VARINT_BYTES, VARINT_RULE))
    except NeedMore:
        raise _cut_off(content) from None
    return numbers


def inner_varint(cursor: Cursor) -> int:
    """Read a varint that must end within its container."""
    try:
        return read_varint(cursor)
    except NeedMore:
        raise _cut_off(cursor.data) from None


def _cut_off(container: bytes) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"a varint is cut off by the end of its container of {len(container)} bytes", rule="aqueduct-E05"
    )


def inner_varbytes(cursor: Cursor) -> bytes:
    """Read a varbytes that must end within its container."""
    size = inner_varint(cursor)
    if size > cursor.remaining:
        raise RemoteProtocolError(
            f"varbytes of {size} bytes in a container with {cursor.remaining} left", rule="aqueduct-E07"
        )
    return cursor.exact(size)


def encode_headers(headers: Pairs) -> bytes:
    """Encode header data with its length in front."""
    return encode_varbytes(b"".join(encode_varbytes(key) + encode_varbytes(value) for key, value in headers))


def reason_in(headers: Headers) -> bytes | None:
    """Return the reason in the headers of a message that stands before CANCEL_SENDER; None for any other message."""
    return headers[0][1] if headers and headers[0][0] == REASON_HEADER else None


def brings_reason(frame: object) -> bool:
    """Return True for the message before CANCEL_SENDER that says why."""
    return isinstance(frame, MessageFrame) and bool(frame.headers) and reason_in(frame.headers) is not None


def decode_headers(content: bytes, most: int) -> Headers:
    """Decode header data without its length; order and repeated keys are kept (E14)."""
    cursor, items = Cursor(content), []
    while cursor.remaining:
        items.append(inner_varbytes(cursor))
        if len(items) > 2 * most:
            raise RemoteProtocolError(f"more than {most} headers; raise Config(header_pairs=…) if this peer is right")
    if len(items) % 2:
        raise RemoteProtocolError(f"header data of {len(items)} varbytes, an odd number", rule="aqueduct-E15")
    return tuple(zip(items[::2], items[1::2], strict=True))


# --- frames

MAGIC: Final = bytes([239, 80, 95, 166, 96, 15, 64, 142])
HUMAN_TEXT: Final = b"AQUEDUCT"
VERSION_TEXT: Final = b"0.0.0-AFTER"
VERSION: Final = MAGIC + HUMAN_TEXT + encode_varbytes(VERSION_TEXT)

# No other frame begins with the first byte of VERSION, so it serves as a tag.
TAG_VERSION: Final = MAGIC[0]
TAG_ACK_VERSION: Final = 1
TAG_CONNECTION_HEADERS: Final = 2
TAG_ROUTE_TO: Final = 3
TAG_MESSAGE: Final = 4
TAG_SENT_UNRELIABLE: Final = 5
TAG_FINISH_SENDER: Final = 6
TAG_CANCEL_SENDER: Final = 7
TAG_ACK_RELIABLE: Final = 8
TAG_ACK_NACK_UNRELIABLE: Final = 9
TAG_CLOSE_RECEIVER: Final = 10
TAG_FORGET_CHANNEL: Final = 11

CONNECTION_TAGS: Final = frozenset({TAG_VERSION, TAG_ACK_VERSION, TAG_CONNECTION_HEADERS})


@attrs.define
class Version:
    """Announces the only version of the protocol."""


@attrs.define
class AckVersion:
    """Confirms that VERSION was received."""


@attrs.define
class ConnectionHeaders:
    headers: Headers


@attrs.define
class RouteTo:
    channel: int


@attrs.define
class MessageFrame:
    number: int
    headers: Headers = ()
    attachments: tuple[tuple[int, Headers], ...] = ()
    payload: bytes = b""


@attrs.define
class SentUnreliable:
    count: int


@attrs.define
class FinishSender:
    sent_reliable: int


@attrs.define
class CancelSender:
    """The sender gives up; messages may be missing."""


@attrs.define
class AckReliable:
    """Acknowledges stream messages: alternating gap and range lengths, from number 0."""

    ranges: list[int]


@attrs.define
class AckNackUnreliable:
    """Alternating ack and nack lengths, from where the last report ended; `channel` is None without a CHANNEL field."""

    ranges: list[int]
    channel: int | None = None


@attrs.define
class CloseReceiver:
    """The receiver accepts no more messages, or has all of them."""


@attrs.define
class ForgetChannel:
    """The creator of the channel has discarded its state."""


Frame = (
    Version
    | AckVersion
    | ConnectionHeaders
    | RouteTo
    | MessageFrame
    | SentUnreliable
    | FinishSender
    | CancelSender
    | AckReliable
    | AckNackUnreliable
    | CloseReceiver
    | ForgetChannel
)


NAMES: Final[dict[type[object], str]] = {
    Version: "VERSION",
    AckVersion: "ACK_VERSION",
    ConnectionHeaders: "CONNECTION_HEADERS",
    RouteTo: "ROUTE_TO",
    MessageFrame: "MESSAGE",
    SentUnreliable: "SENT_UNRELIABLE",
    FinishSender: "FINISH_SENDER",
    CancelSender: "CANCEL_SENDER",
    AckReliable: "ACK_RELIABLE",
    AckNackUnreliable: "ACK_NACK_UNRELIABLE",
    CloseReceiver: "CLOSE_RECEIVER",
    ForgetChannel: "FORGET_CHANNEL",
}


def name_of(frame: object) -> str:
    """Return the name of a frame in the document, which observers are told in both directions."""
    return NAMES[type(frame)]


@attrs.frozen(kw_only=True)
class Bounds:
    """The largest sizes and counts that a frame may announce, checked before anything of that size is kept."""

    message: int = 2**64 - 1
    connection_headers: int = 2**64 - 1
    headers: int = 2**64 - 1
    header_pairs: int = 2**64 - 1
    attachments: int = 2**64 - 1
    ranges: int = 2**64 - 1
    channel_field: bool = True


UNBOUNDED: Final = Bounds()


class Unfinished(NeedMore):
    """The frame is incomplete. Unless `whole`, even its total size is not known yet."""

    def __init__(self, missing: int, *, whole: bool) -> None:
        super().__init__(missing)
        self.whole = whole


def parse_frame(cursor: Cursor, bounds: Bounds = UNBOUNDED) -> Frame:
    """Parse the next frame.

    Raises `Unfinished` or `NeedMore` for an incomplete frame, `RemoteProtocolError` for a malformed one.
    """
    start = cursor.position
    tag = cursor.byte()
    if tag == TAG_MESSAGE:
        return _parse_message(cursor, bounds)
    if tag == TAG_ROUTE_TO:
        return RouteTo(read_varint(cursor))
    if tag == TAG_ACK_RELIABLE:
        return AckReliable(_check_acks(_read_ranges(cursor, bounds)))
    if tag == TAG_ACK_NACK_UNRELIABLE:
        channel = read_varint(cursor) if bounds.channel_field else None
        return AckNackUnreliable(_check_report(_read_ranges(cursor, bounds)), channel)
    if tag == TAG_SENT_UNRELIABLE:
        return SentUnreliable(read_varint(cursor))
    if tag == TAG_FINISH_SENDER:
        return FinishSender(read_varint(cursor))
    if tag == TAG_VERSION:
        return _parse_version(cursor, start)
    if tag == TAG_CONNECTION_HEADERS:
        size = read_varint(cursor)
        if size > bounds.connection_headers:
            raise _too_much("connection headers", size, bounds.connection_headers, "connection_headers")
        return ConnectionHeaders(decode_headers(cursor.exact(size), bounds.header_pairs))
    kind = BARE_FRAMES.get(tag)
    if kind is None:
        raise RemoteProtocolError(f"no frame begins with {tag:#04x}", rule="aqueduct-F10")
    return kind()


BARE_FRAMES: Final[dict[int, type[AckVersion | CancelSender | CloseReceiver | ForgetChannel]]] = {
    TAG_ACK_VERSION: AckVersion,
    TAG_CANCEL_SENDER: CancelSender,
    TAG_CLOSE_RECEIVER: CloseReceiver,
    TAG_FORGET_CHANNEL: ForgetChannel,
}


def _parse_version(cursor: Cursor, start: int) -> Version:
    cursor.position = start
    magic = cursor.exact(len(MAGIC))
    if magic != MAGIC:
        raise RemoteProtocolError(f"magic bytes {magic.hex()} are not {MAGIC.hex()}", rule="aqueduct-T02")
    text = cursor.exact(len(HUMAN_TEXT))
    if text != HUMAN_TEXT:
        raise RemoteProtocolError(f"text {text!r} is not {HUMAN_TEXT!r}", rule="aqueduct-T03")
    size = read_varint(cursor)
    if size != len(VERSION_TEXT):
        raise RemoteProtocolError(f"a version of {size} bytes is not {VERSION_TEXT!r}", rule="aqueduct-T04")
    version = cursor.exact(size)
    if version != VERSION_TEXT:
        raise RemoteProtocolError(f"version {version!r} is not {VERSION_TEXT!r}", rule="aqueduct-T04")
    return Version()


def _parse_message(cursor: Cursor, bounds: Bounds) -> MessageFrame:
    varint = cursor.varint  # `read_varint` would be one more call for each number
    try:
        number = varint(VARINT_BYTES, VARINT_RULE)
        headers_size = varint(VARINT_BYTES, VARINT_RULE)
        if headers_size > bounds.headers:
            raise _too_much("message headers", headers_size, bounds.headers, "headers")
        headers_at = cursor.position
        if headers_size:
            _skip(cursor, headers_size)
        attachments_size = varint(VARINT_BYTES, VARINT_RULE)
        _check_size(headers_size + attachments_size, bounds)
        attachments_at = cursor.position
        if attachments_size:
            _skip(cursor, attachments_size)
        size = varint(VARINT_BYTES, VARINT_RULE)
    except NeedMore as need:
        raise Unfinished(need.missing, whole=False) from None
    _check_size(headers_size + attachments_size + size, bounds)
    payload_at = cursor.position
    payload = cursor.exact(size)
    data = cursor.data
    headers: Headers = ()
    if headers_size:
        headers = decode_headers(data[headers_at : headers_at + headers_size], bounds.header_pairs)
    attachments: tuple[tuple[int, Headers], ...] = ()
    if attachments_size:
        attachments = _parse_attachments(data[attachments_at : attachments_at + attachments_size], bounds)
    cursor.position = payload_at + size
    return MessageFrame(number, headers, attachments, payload)


def _parse_attachments(content: bytes, bounds: Bounds) -> tuple[tuple[int, Headers], ...]:
    cursor = Cursor(content)
    attachments: list[tuple[int, Headers]] = []
    while cursor.remaining:
        if len(attachments) >= bounds.attachments:
            raise _too_much("attachments", len(attachments) + 1, bounds.attachments, "attachments")
        channel = inner_varint(cursor)
        if not cursor.remaining:
            raise RemoteProtocolError(f"attached channel {channel} has no headers field", rule="aqueduct-T14")
        block = inner_varbytes(cursor)
        if len(block) > bounds.headers:
            raise _too_much("channel headers", len(block), bounds.headers, "headers")
        attachments.append((channel, decode_headers(block, bounds.header_pairs)))
    return tuple(attachments)


def _skip(cursor: Cursor, size: int) -> None:
    if size > cursor.remaining:
        raise NeedMore(size - cursor.remaining)
    cursor.position += size


def _check_size(size: int, bounds: Bounds) -> None:
    if size > bounds.message:
        raise RemoteProtocolError(f"a message of {size} bytes against {bounds.message}", limit="message")


def _too_much(what: str, came: int, allowed: int, setting: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{what}: {came} against {allowed}; raise Config({setting}=…) if this peer is right")


def _read_ranges(cursor: Cursor, bounds: Bounds) -> list[int]:
    size = read_varint(cursor)
    if size > bounds.ranges * VARINT_BYTES:
        raise _too_much("bytes of ranges", size, bounds.ranges * VARINT_BYTES, "gaps")
    return decode_varints(cursor.exact(size))


def _check_acks(ranges: list[int]) -> list[int]:
    if not ranges or len(ranges) % 2:
        raise RemoteProtocolError(f"ACK_RELIABLE with {len(ranges)} varints", rule="aqueduct-T26")
    if 0 in ranges[1:]:
        raise RemoteProtocolError("ACK_RELIABLE with a zero that is not the first varint", rule="aqueduct-T27")
    return ranges


def _check_report(ranges: list[int]) -> list[int]:
    if not ranges:
        raise RemoteProtocolError("ACK_NACK_UNRELIABLE with 0 varints", rule="aqueduct-T31")
    if 0 in ranges[1:] or ranges == [0]:
        raise RemoteProtocolError(f"ACK_NACK_UNRELIABLE with a zero among {len(ranges)} varints", rule="aqueduct-T32")
    return ranges


def encode_frame(frame: Frame) -> bytes:
    """Encode any frame; the engine writes messages in pieces with `message_head` instead."""
    match frame:
        case Version():
            return VERSION
        case ConnectionHeaders(headers):
            return bytes([TAG_CONNECTION_HEADERS]) + encode_headers(headers)
        case RouteTo(channel):
            return bytes([TAG_ROUTE_TO]) + encode_varint(channel)
        case MessageFrame(number, headers, attachments, payload):
            block = encode_attachments(attachments)
            return message_head(number, encode_headers(headers), block, len(payload)) + payload
        case SentUnreliable(count):
            return bytes([TAG_SENT_UNRELIABLE]) + encode_varint(count)
        case FinishSender(sent_reliable):
            return bytes([TAG_FINISH_SENDER]) + encode_varint(sent_reliable)
        case AckReliable(ranges):
            return bytes([TAG_ACK_RELIABLE]) + encode_varints(_check_sendable(_check_acks, ranges))
        case AckNackUnreliable(ranges, field):
            carried = b"" if field is None else encode_varint(field)
            return bytes([TAG_ACK_NACK_UNRELIABLE]) + carried + encode_varints(_check_sendable(_check_report, ranges))
        case AckVersion() | CancelSender() | CloseReceiver() | ForgetChannel():
            return _BARE_BYTES[type(frame)]


_BARE_BYTES: Final[dict[type[Frame], bytes]] = {kind: bytes([tag]) for tag, kind in BARE_FRAMES.items()}


def _check_sendable(check: Callable[[list[int]], list[int]], ranges: list[int]) -> list[int]:
    try:
        return check(ranges)
    except RemoteProtocolError as error:
        raise LocalProtocolError(str(error)) from None


def encode_acks(ranges: list[int]) -> bytes:
    """Encode an ACK_RELIABLE, whose ranges must be valid."""
    return bytes([TAG_ACK_RELIABLE]) + encode_varints(ranges)


def encode_attachments(attachments: Sequence[tuple[int, Pairs]]) -> bytes:
    """Encode the ATTACHMENTS field with its length in front."""
    return encode_varbytes(b"".join(encode_varint(id) + encode_headers(headers) for id, headers in attachments))


def message_head(number: int, headers: bytes, attachments: bytes, size: int) -> bytes:
    """Encode a MESSAGE up to its payload; `headers` and `attachments` are encoded fields."""
    return b"\x04" + encode_varint(number) + headers + attachments + encode_varint(size)


def plain_start(number: int) -> bytes:
    """Encode a MESSAGE without headers and attachments up to its size, which follows."""
    return b"\x04" + encode_varint(number) + b"\0\0"


# --- varranges, which the document defines and no frame uses (E12)


def encode_varranges(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Encode rising, disjoint (first, last) ranges as alternating lengths and gaps, beginning with a length."""
    numbers: list[int] = []
    end = 0
    for first, last in ranges:
        if not end <= first <= last or (numbers and first == end):
            raise LocalProtocolError(f"{first} … {last} does not come behind {end}, with a gap")
        if first > end or numbers:
            numbers += [first - end] if numbers else [0, first]
        numbers.append(last - first + 1)
        end = last + 1
    return encode_varints(numbers)


def decode_varranges(content: bytes) -> list[tuple[int, int]]:
    numbers = decode_varints(content)
    if 0 in numbers[1:-1]:
        raise RemoteProtocolError("varranges with a zero that is neither first nor last", rule="aqueduct-E11")
    ranges, at = [], 0
    for index, number in enumerate(numbers):
        if index % 2 == 0 and number:
            ranges.append((at, at + number - 1))
        at += number
    return ranges
