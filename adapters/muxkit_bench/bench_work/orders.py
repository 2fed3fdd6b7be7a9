"""Orders to a server and their receipts, messages of 64 bytes; every other message is echoed."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MESSAGE = 64  # bytes: an order, a receipt, and every message that is echoed
MAGIC = b"\x00bench\x00\xff"  # how an order begins, and no payload

_ORDER = struct.Struct("!8sBBxxIQ")
_RECEIPT = struct.Struct("!QQQ")


class Wrong(Exception):
    """What was received is not what was sent."""


class Way(IntEnum):
    """The kinds of orders."""

    BULK = 1  # take large messages; a byte stream needs no frames for that
    MANY = 2  # take small messages, all that have arrived at once
    EACH = 3  # take small messages, one by one
    REPORT = 4  # report what this process has used
    REPORT_COLLECTED = 5  # the same, after a collection of garbage


class Order(NamedTuple):
    way: Way
    messages: int = 0
    size: int = 0
    """Bytes of each message."""
    verify: bool = False
    """Put the CRC-32 of all payload into the receipt."""


class Receipt(NamedTuple):
    """What was received."""

    messages: int
    bytes: int
    crc: int


class Usage(NamedTuple):
    """What a server process has used."""

    cpu: int
    """ns"""
    memory: int
    """Resident bytes; 0 where the system does not report it."""
    held: int
    """Channels that are kept without a task."""


def pack_order(order: Order) -> bytes:
    return _ORDER.pack(MAGIC, order.way, order.verify, order.size, order.messages).ljust(MESSAGE, b"\0")


def unpack_order(message: bytes) -> Order:
    _, way, verify, size, messages = _ORDER.unpack_from(message)
    return Order(Way(way), messages, size, bool(verify))


def pack_answer(answer: Receipt | Usage) -> bytes:
    return _RECEIPT.pack(*answer).ljust(MESSAGE, b"\0")


def unpack_receipt(message: bytes) -> Receipt:
    return Receipt(*_RECEIPT.unpack_from(message))


def unpack_usage(message: bytes) -> Usage:
    return Usage(*_RECEIPT.unpack_from(message))
