"""What do bytes on the wire mean? The twelve frames of Aqueduct, parsed and serialised; no state, no rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import Cursor, NeedMore, encode_varint
from muxkit.protocols.aqueduct._varint import (
    VARINT_BYTES,
    Headers,
    decode_headers,
    decode_varints,
    encode_headers,
    encode_varbytes,
    encode_varints,
    inner_varbytes,
    inner_varint,
    read_varint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAGIC: Final = bytes([239, 80, 95, 166, 96, 15, 64, 142])
HUMAN_TEXT: Final = b"AQUEDUCT"
VERSION_TEXT: Final = b"0.0.0-AFTER"
VERSION: Final = MAGIC + HUMAN_TEXT + encode_varbytes(VERSION_TEXT)

# The first byte of VERSION does for a tag: no other frame begins with it.
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
    """The peer speaks the one version that there is."""


@attrs.define
class AckVersion:
    """The peer has heard our VERSION."""


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
    """The sender gives up."""


@attrs.define
class AckReliable:
    """Gap and range lengths in turn, from number 0 on."""

    ranges: list[int]


@attrs.define
class AckNackUnreliable:
    """Ack and nack lengths in turn, from where the last one left off; `channel` is None if it is left out."""

    ranges: list[int]
    channel: int | None = None


@attrs.define
class CloseReceiver:
    """The receiver wants no more, or has everything."""


@attrs.define
class ForgetChannel:
    """The creator has no state for the channel any more."""


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


@attrs.frozen(kw_only=True)
class Bounds:
    """What a frame may announce; read before anything of that size is kept."""

    message: int = 2**64 - 1
    connection_headers: int = 2**64 - 1
    headers: int = 2**64 - 1
    header_pairs: int = 2**64 - 1
    attachments: int = 2**64 - 1
    ranges: int = 2**64 - 1
    channel_field: bool = True


UNBOUNDED: Final = Bounds()


class Unfinished(NeedMore):
    """The frame goes on. Unless `whole`, more may be missing than is known yet."""

    def __init__(self, missing: int, *, whole: bool) -> None:
        super().__init__(missing)
        self.whole = whole


def parse_frame(cursor: Cursor, bounds: Bounds = UNBOUNDED) -> Frame:
    """The next frame; `Unfinished` or `NeedMore` while it is incomplete, `RemoteProtocolError` if it cannot be one."""
    start = cursor.position
    tag = cursor.byte()
    if tag == TAG_MESSAGE:
        return _parse_message(cursor, bounds)
    if tag == TAG_ROUTE_TO:
        return RouteTo(read_varint(cursor))
    if tag == TAG_ACK_RELIABLE:
        return AckReliable(_acks(_ranges(cursor, bounds)))
    if tag == TAG_ACK_NACK_UNRELIABLE:
        channel = read_varint(cursor) if bounds.channel_field else None
        return AckNackUnreliable(_acks_and_nacks(_ranges(cursor, bounds)), channel)
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
    lone = LONE.get(tag)
    if lone is None:
        raise RemoteProtocolError(f"no frame begins with {tag:#04x}", rule="aqueduct-F10")
    return lone()


LONE: Final[dict[int, type[AckVersion | CancelSender | CloseReceiver | ForgetChannel]]] = {
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
    try:
        number = read_varint(cursor)
        headers_size = read_varint(cursor)
        if headers_size > bounds.headers:
            raise _too_much("message headers", headers_size, bounds.headers, "headers")
        headers_at = _skip(cursor, headers_size)
        attachments_size = read_varint(cursor)
        _check_size(headers_size + attachments_size, bounds)
        attachments_at = _skip(cursor, attachments_size)
        size = read_varint(cursor)
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


def _skip(cursor: Cursor, size: int) -> int:
    start = cursor.position
    if size > cursor.remaining:
        raise NeedMore(size - cursor.remaining)
    cursor.position += size
    return start


def _check_size(size: int, bounds: Bounds) -> None:
    if size > bounds.message:
        raise RemoteProtocolError(f"a message of {size} bytes against {bounds.message}", limit="message")


def _too_much(what: str, came: int, allowed: int, setting: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{what}: {came} against {allowed}; raise Config({setting}=…) if this peer is right")


def _ranges(cursor: Cursor, bounds: Bounds) -> list[int]:
    size = read_varint(cursor)
    if size > bounds.ranges * VARINT_BYTES:
        raise _too_much("bytes of ranges", size, bounds.ranges * VARINT_BYTES, "gaps")
    return decode_varints(cursor.exact(size))


def _acks(ranges: list[int]) -> list[int]:
    if not ranges or len(ranges) % 2:
        raise RemoteProtocolError(f"ACK_RELIABLE with {len(ranges)} varints", rule="aqueduct-T26")
    if 0 in ranges[1:]:
        raise RemoteProtocolError("ACK_RELIABLE with a zero that is not the first varint", rule="aqueduct-T27")
    return ranges


def _acks_and_nacks(ranges: list[int]) -> list[int]:
    if not ranges:
        raise RemoteProtocolError("ACK_NACK_UNRELIABLE with 0 varints", rule="aqueduct-T31")
    if 0 in ranges[1:] or ranges == [0]:
        raise RemoteProtocolError(f"ACK_NACK_UNRELIABLE with a zero among {len(ranges)} varints", rule="aqueduct-T32")
    return ranges


# ---------------------------------------------------------------------------- writing


def encode_frame(frame: Frame) -> bytes:
    """Any frame as bytes; the engine writes the large ones in pieces instead."""
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
            return bytes([TAG_ACK_RELIABLE]) + encode_varints(_sendable(_acks, ranges))
        case AckNackUnreliable(ranges, field):
            carried = b"" if field is None else encode_varint(field)
            return bytes([TAG_ACK_NACK_UNRELIABLE]) + carried + encode_varints(_sendable(_acks_and_nacks, ranges))
        case AckVersion() | CancelSender() | CloseReceiver() | ForgetChannel():
            return _LONE_BYTES[type(frame)]


_LONE_BYTES: Final[dict[type[Frame], bytes]] = {kind: bytes([tag]) for tag, kind in LONE.items()}


def _sendable(check: Callable[[list[int]], list[int]], ranges: list[int]) -> list[int]:
    try:
        return check(ranges)
    except RemoteProtocolError as error:
        raise LocalProtocolError(str(error)) from None


def encode_attachments(attachments: Sequence[tuple[int, Sequence[tuple[bytes, bytes]]]]) -> bytes:
    """The ATTACHMENTS field, with its length in front."""
    return encode_varbytes(b"".join(encode_varint(id) + encode_headers(headers) for id, headers in attachments))


def message_head(number: int, headers: bytes, attachments: bytes, size: int) -> bytes:
    """A MESSAGE up to its payload; `headers` and `attachments` are encoded fields."""
    return b"\x04" + encode_varint(number) + headers + attachments + encode_varint(size)
