"""What does this packet say? Parses heads out of received bytes; nothing is waited for before its size is checked."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.relink._packets import (
    CHANNEL,
    LARGE,
    LONG,
    MULTICAST,
    Ack,
    AckPacket,
    Format,
    General,
    MessagePacket,
    Operation,
    OperationPacket,
    Packet,
)

if TYPE_CHECKING:
    from muxkit.protocols.relink._config import Config

PADDING_BEHIND: Final = bytes(-low & 7 for low in range(256))  # a part, by the lowest byte of its size
ID_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}

# How many values each format's detail has, and the clause about the unused ones.
DETAILS: Final = {
    Format.CHANNEL_OPERATION: (3, "relink-O04", "channel operation"),
    Format.CHANNEL_ACK: (5, "relink-O10", "channel acknowledgement"),
    Format.SEQUENCE_OPERATION: (2, "relink-Q04", "sequence operation"),
    Format.SEQUENCE_ACK: (4, "relink-Q09", "sequence acknowledgement"),
}


@attrs.define
class MessageHead:
    """A message up to its payloads."""

    channels: tuple[int, ...]
    multicast: bool
    sizes: tuple[int, ...]
    padding: int
    """Bytes behind all parts together."""


@attrs.define
class Bounds:
    """What the parser must know: the id sizes, and how much a packet may claim."""

    id_size: int
    """Of the channels of the side that sent the packets."""
    ack_id_size: int
    """Of the channels of the side that receives them."""
    targets: int
    parts: int
    message: int
    """Bytes of all payloads of a message."""


def bounds_of(config: Config, *, is_connector: bool, message: int) -> Bounds:
    """For packets that come to this side."""
    sizes = (config.listener_id_size, config.connector_id_size)
    theirs, ours = sizes if is_connector else (sizes[1], sizes[0])
    return Bounds(theirs, ours, config.targets, config.parts, message)


def parse_packet(cursor: Cursor, bounds: Bounds) -> Packet:
    """A whole packet; raises NeedMore or RemoteProtocolError and leaves the cursor where it was."""
    start = cursor.position
    try:
        head = parse_head(cursor, bounds)
        if not isinstance(head, MessageHead):
            return head
        parts = []
        for size in head.sizes:
            parts.append(cursor.exact(size))
            cursor.align(8, start)
    except NeedMore:
        cursor.position = start
        raise
    return MessagePacket(head.channels, tuple(parts), head.multicast)


def parse_head(cursor: Cursor, bounds: Bounds) -> General | OperationPacket | AckPacket | MessageHead:
    """A packet without payloads, or the head of a message; the cursor then stands on an 8-byte boundary behind it."""
    start, data = cursor.position, cursor.data
    if len(data) - start < 8:
        raise NeedMore(8 - (len(data) - start))
    first = data[start]
    if not first & CHANNEL:
        if first >> 5 > General.SHUTDOWN:
            raise RemoteProtocolError(f"general packet type {first >> 5}; 0 to 4 are in use", rule="relink-G06")
        cursor.position = start + 8
        return General(first >> 5)
    number = first >> 2 & 7
    if number > Format.MESSAGE:
        raise RemoteProtocolError(f"channel packet format {number}; 0 to 4 are in use", rule="relink-P14")
    format = Format(number)
    detail = first >> 5
    if format is not Format.MESSAGE:
        count, rule, what = DETAILS[format]
        if detail >= count:
            raise RemoteProtocolError(f"{what} {detail}; 0 to {count - 1} are in use", rule=rule)
    id_size = bounds.ack_id_size if format & 1 else bounds.id_size
    try:
        cursor.position = start + 2
        multicast = bool(first & MULTICAST)
        channels = _parse_ids(cursor, id_size, bounds) if multicast else (cursor.uint(id_size, "little"),)
        if format is Format.MESSAGE:
            return MessageHead(channels, multicast, *_parse_sizes(cursor, start, bounds))
        sequence = None
        if format in (Format.SEQUENCE_OPERATION, Format.SEQUENCE_ACK):
            cursor.align(4, start)
            sequence = cursor.uint(4, "little")
        cursor.align(8, start)
    except NeedMore:
        cursor.position = start
        raise
    if format & 1:
        return AckPacket(Ack(detail), channels, sequence, multicast)
    return OperationPacket(Operation(detail), channels, sequence, multicast)


def _parse_ids(cursor: Cursor, id_size: int, bounds: Bounds) -> tuple[int, ...]:
    cursor.exact(2)
    count = cursor.uint(4, "little")
    if count > bounds.targets:
        what = f"a packet to {count} channels, Config(targets={bounds.targets}) are allowed"
        raise RemoteProtocolError(what, rule="relink-C06")
    if not id_size:
        return (0,) * count
    encoded = cursor.exact(count * id_size)
    code = ID_CODES.get(id_size)
    if code is not None:
        return struct.unpack(f"<{count}{code}", encoded)
    return tuple(int.from_bytes(encoded[at : at + id_size], "little") for at in range(0, len(encoded), id_size))


def _parse_sizes(cursor: Cursor, start: int, bounds: Bounds) -> tuple[tuple[int, ...], int]:
    """The sizes, and the padding behind all parts; without a loop of our own, since there may be very many."""
    first = cursor.data[start]
    cursor.align(2, start)
    count = cursor.uint(4, "little") if first & LONG else cursor.data[start + 1]
    if count > bounds.parts:
        what = f"a message of {count} parts, Config(parts={bounds.parts}) are allowed"
        raise RemoteProtocolError(what, rule="relink-M08")
    if first & LARGE:
        cursor.align(8, start)
        encoded, width, code = cursor.exact(8 * count), 8, "Q"
    else:
        encoded, width, code = cursor.exact(2 * count), 2, "H"
    sizes = struct.unpack(f"<{count}{code}", encoded)
    total = sum(sizes)
    if total > bounds.message:
        rule = "relink-M11" if max(sizes) > bounds.message else "relink-M12"
        what = f"a message of {total} bytes in {count} parts, {bounds.message} are allowed"
        raise RemoteProtocolError(what, rule=rule, limit="message")
    cursor.align(8, start)
    return sizes, sum(encoded[::width].translate(PADDING_BEHIND))
