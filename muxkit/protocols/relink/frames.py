"""Encoding and parsing of Relink's packets. These functions know nothing about the state of a link.

The first byte of a packet says which kind of packet it is. A packet is either general (`General`), or it concerns one
channel, or with `MULTICAST` several channels. Bit 0 of a byte is the least significant bit, and all numbers are
little-endian. Fields are aligned relative to the first byte of the packet, and each packet is padded to a multiple of 8
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, assert_never

import attrs

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._observer import Observer
from muxkit.core import Buffer, Cursor, NeedMore, counted
from muxkit.protocols.relink.config import U32_MAX, Config

Parts = tuple[bytes, ...]

# Flags in the first byte of a packet.
CHANNEL: Final = 0x01
"""The packet concerns channels."""
MULTICAST: Final = 0x02
"""The packet names several channels."""
LONG: Final = 0x20
"""The packet is a message whose number of parts takes 4 bytes instead of 1."""
LARGE: Final = 0x40
"""The packet is a message whose part sizes take 8 bytes each instead of 2."""
SHORT_MOST: Final = 255
"""The highest number of parts that a message without `LONG` can have."""
SMALL_MOST: Final = 65_535
"""The largest part in bytes that a message without `LARGE` can have."""

# A window counts the memory that a stored message takes, so it adds these bytes to the size of the packet.
OVERHEAD: Final = 56
"""Overhead in bytes of a message with at most one part."""
PART_OVERHEAD: Final = 40
"""Additional overhead in bytes of each part after the first."""

# `PADDING[size & 7]` is the padding after `size` bytes.
PADDING: Final = tuple(bytes(-size % 8) for size in range(8))


class Format(IntEnum):
    """The channel packet formats."""

    CHANNEL_OPERATION = 0
    CHANNEL_ACK = 1
    SEQUENCE_OPERATION = 2
    SEQUENCE_ACK = 3
    MESSAGE = 4


class General(IntEnum):
    """The types of general packets, which don't concern a channel."""

    NOP = 0
    PING = 1
    PONG = 2
    RESUME = 3
    SHUTDOWN = 4


class Operation(IntEnum):
    """Operations of a channel's sender. `COMMIT` and `ROLLBACK` apply to messages, `CLOSE` to the channel."""

    COMMIT = 0
    ROLLBACK = 1
    CLOSE = 2


class Ack(IntEnum):
    """Acknowledgements of a channel's receiver. `CLOSED` applies to the channel, and all others apply to messages."""

    RECEIVED = 0
    CONSUMED = 1
    COMMITTED = 2
    UNCOMMITTED = 3
    CLOSED = 4


@attrs.define
class OperationPacket:
    """An operation on channels of the side that sends the packet."""

    operation: Operation
    channels: tuple[int, ...]
    sequence: int | None = None
    """The operation applies to all messages up to this number. None means the next message of each channel."""
    multicast: bool = False


@attrs.define
class AckPacket:
    """An acknowledgement for channels of the side that receives the packet."""

    ack: Ack
    channels: tuple[int, ...]
    sequence: int | None = None
    """The acknowledgement applies to all messages up to this number. None means the next message of each channel."""
    multicast: bool = False


@attrs.define
class MessagePacket:
    """A message on channels of the side that sends the packet."""

    channels: tuple[int, ...]
    parts: Parts
    multicast: bool = False


Packet = General | OperationPacket | AckPacket | MessagePacket


def encode_packet(packet: Packet, id_size: int) -> bytes:
    """Encode any packet in its shortest form.

    `id_size` is the size of channel ids in bytes, for channels of the side that the packet's channels belong to.
    """
    match packet:
        case General():
            return encode_general(packet)
        case OperationPacket():
            return encode_notice(packet.operation, packet.channels, id_size, packet.sequence, packet.multicast)
        case AckPacket():
            return encode_notice(packet.ack, packet.channels, id_size, packet.sequence, packet.multicast)
        case MessagePacket():
            return b"".join(message_buffers(packet.channels, packet.parts, id_size, multicast=packet.multicast))
        case _:
            assert_never(packet)


def encode_general(type: General) -> bytes:
    return bytes((General(type) << 5, 0, 0, 0, 0, 0, 0, 0))


def encode_notice(
    kind: Operation | Ack, channels: Sequence[int], id_size: int, sequence: int | None = None, multicast: bool = False
) -> bytes:
    """Encode an operation or an acknowledgement.

    Raises:
        LocalProtocolError: `sequence` is given for a close or a closed, or a channel doesn't fit in `id_size` bytes.
    """
    is_ack = isinstance(kind, Ack)
    if sequence is not None and kind is (Ack.CLOSED if is_ack else Operation.CLOSE):
        raise LocalProtocolError(f"{kind.name.lower()} names no message, and {sequence} is one")
    format = (Format.CHANNEL_OPERATION if sequence is None else Format.SEQUENCE_OPERATION) + is_ack
    detail = kind if is_ack else Operation(kind)
    first = CHANNEL | MULTICAST * multicast | format << 2 | detail << 5
    encoded = bytes((first, 0)) + encode_ids(channels, id_size, multicast=multicast)
    if sequence is not None:
        encoded += bytes(-len(encoded) % 4) + (sequence & U32_MAX).to_bytes(4, "little")
    return encoded + PADDING[len(encoded) & 7]


def encode_ids(channels: Sequence[int], id_size: int, *, multicast: bool) -> bytes:
    """Encode the field after the header: one id, or for a multicast two bytes of padding, a count and the ids."""
    if not multicast:
        (channel,) = channels
        return encode_id(channel, id_size)
    count = len(channels)
    return bytes(2) + count.to_bytes(4, "little") + b"".join(encode_id(channel, id_size) for channel in channels)


def encode_id(channel: int, id_size: int) -> bytes:
    if not 0 <= channel < 1 << 8 * id_size:
        raise LocalProtocolError(f"channel {channel} does not fit an id of {id_size} bytes")
    return channel.to_bytes(id_size, "little")


# --- messages


def message_head(channels: Sequence[int], sizes: Sequence[int], id_size: int, *, multicast: bool = False) -> bytes:
    """Encode the head of a message, which is everything before the payloads, in the shortest form for these sizes."""
    count = len(sizes)
    is_long = count > SHORT_MOST
    is_large = any(size > SMALL_MOST for size in sizes)
    first = CHANNEL | MULTICAST * multicast | Format.MESSAGE << 2 | LONG * is_long | LARGE * is_large
    head = bytes((first, 0 if is_long else count)) + encode_ids(channels, id_size, multicast=multicast)
    head += bytes(len(head) & 1)
    if is_long:
        head += count.to_bytes(4, "little")
    if is_large:
        head += PADDING[len(head) & 7] + struct.pack(f"<{count}Q", *sizes)
    else:
        head += struct.pack(f"<{count}H", *sizes)
    return head + PADDING[len(head) & 7]


def message_buffers(
    channels: Sequence[int], parts: Sequence[bytes], id_size: int, *, multicast: bool = False
) -> list[Buffer]:
    """Encode a message as buffers, without copying payloads."""
    out: list[Buffer] = [message_head(channels, [len(part) for part in parts], id_size, multicast=multicast)]
    for part in parts:
        if part:
            out.append(part)
            if len(part) & 7:
                out.append(PADDING[len(part) & 7])
    return out


def message_size(sizes: Sequence[int], id_size: int, padding: int | None = None) -> int:
    """Return the size of the shortest packet that carries a message with parts of these sizes to one channel.

    `padding` is the padding after all parts together, if the caller knows it.
    """
    count, payload = len(sizes), sum(sizes)
    if padding is None:
        padding = sum(-part & 7 for part in sizes)
    size = 2 + id_size
    size += size & 1
    if count > SHORT_MOST:
        size += 4
    if payload > SMALL_MOST and max(sizes) > SMALL_MOST:
        size += -size % 8 + 8 * count
    else:
        size += 2 * count
    return size + -size % 8 + payload + padding


def message_cost(sizes: Sequence[int], id_size: int, padding: int | None = None) -> int:
    """Return how many bytes of a window a message takes: the size of its packet, and the overhead of storing it."""
    return message_size(sizes, id_size, padding) + OVERHEAD + PART_OVERHEAD * max(0, len(sizes) - 1)


# The number of padding bytes after a part, indexed by the lowest byte of the part's size.
PADDING_BEHIND: Final = bytes(-low & 7 for low in range(256))
# Format characters of `struct` for the channel ids of each size.
ID_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}

# For each format: how many values of its detail bits are in use, the rule about the unused values, and a name for
# errors.
DETAILS: Final = {
    Format.CHANNEL_OPERATION: (3, "relink-O04", "channel operation"),
    Format.CHANNEL_ACK: (5, "relink-O10", "channel acknowledgement"),
    Format.SEQUENCE_OPERATION: (2, "relink-Q04", "sequence operation"),
    Format.SEQUENCE_ACK: (4, "relink-Q09", "sequence acknowledgement"),
}


@attrs.define
class MessageHead:
    """The parsed head of a message: everything before the payloads."""

    channels: tuple[int, ...]
    multicast: bool
    sizes: tuple[int, ...]
    padding: int
    """Bytes of padding after all parts together."""


@attrs.define
class Bounds:
    """Settings of the parser: the sizes of channel ids, and limits for each packet."""

    id_size: int
    """Bytes of a channel id of the side that sent the packets. Messages and operations have such ids."""
    ack_id_size: int
    """Bytes of a channel id of the side that receives the packets. Acknowledgements have such ids."""
    targets: int
    """The highest number of channels that a packet may name."""
    parts: int
    """The highest number of parts in a message."""
    message: int
    """The highest number of bytes in all payloads of a message together."""


def bounds_of(config: Config, *, is_connector: bool, message: int) -> Bounds:
    """Return the parser settings for packets received by this side."""
    sizes = (config.listener_id_size, config.connector_id_size)
    theirs, ours = sizes if is_connector else (sizes[1], sizes[0])
    return Bounds(theirs, ours, config.targets, config.parts, message)


def parse_packet(cursor: Cursor, bounds: Bounds) -> Packet:
    """Parse a packet including its payloads, and move the cursor to the end of the packet.

    Raises:
        NeedMore: The packet is incomplete. The cursor has not moved.
        RemoteProtocolError: The packet is malformed or exceeds a limit.
    """
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
    """Parse a packet without payloads, or the head of a message. The cursor moves to the next 8-byte boundary.

    Raises:
        NeedMore: The packet or head is incomplete. The cursor has not moved.
        RemoteProtocolError: The packet is malformed or exceeds a limit.
    """
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
    """Return the sizes of a message's parts, and how many bytes of padding follow the parts together.

    A message may have very many parts, so this function uses built-in functions instead of a Python loop.
    """
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
        what = f"a message of {total} bytes in {counted(count, 'part')}, {bounds.message} are allowed"
        raise RemoteProtocolError(what, rule=rule, limit="message")
    cursor.align(8, start)
    return sizes, sum(encoded[::width].translate(PADDING_BEHIND))


def observe_written(observer: Observer, buffers: Sequence[Buffer], bounds: Bounds, repeats: dict[int, int]) -> None:
    """Report packets that are about to be written to an observer.

    The packets are parsed again for that, so that writing costs nothing extra without an observer.

    Args:
        observer: The observer.
        buffers: Whole packets.
        bounds: The parser settings for received packets. The id sizes are swapped here.
        repeats: For each channel, how many of its next messages were already written on an earlier connection. The
            function updates the counts.
    """
    turned = Bounds(bounds.ack_id_size, bounds.id_size, 2**32, 2**32, 2**64)
    cursor = Cursor(b"".join(buffers))
    while cursor.remaining:
        packet = parse_packet(cursor, turned)
        match packet:
            case General():
                observer.frame("out", "link", packet.name.lower(), 0)
            case OperationPacket():
                for channel in packet.channels:
                    observer.frame("out", f"out {channel}", packet.operation.name.lower(), 0)
            case AckPacket():
                for channel in packet.channels:
                    observer.frame("out", f"in {channel}", packet.ack.name.lower(), 0)
            case MessagePacket():
                size = sum(map(len, packet.parts))
                for channel in packet.channels:
                    is_again = repeats.get(channel, 0) > 0
                    if is_again:
                        repeats[channel] -= 1
                    observer.frame("out", f"out {channel}", "message again" if is_again else "message", size)
            case _:
                assert_never(packet)
