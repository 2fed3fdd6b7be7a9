"""What does a client ask of a server? An order is a message of 64 bytes, and so is its receipt; others are echoed."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MESSAGE = 64  # bytes: an order, a receipt, and every message that is echoed
MAGIC = b"\x00bench\x00\xff"  # how an order begins, and no payload

_ORDER = struct.Struct("!8sBBxxIQ")
_RECEIPT = struct.Struct("!QQQ")


class Wrong(Exception):
    """Something else came than was sent."""


class Way(IntEnum):
    """What is to be done, and how."""

    BULK = 1  # take large messages; a byte stream needs no frames for that
    MANY = 2  # take small messages, all that are there at once
    EACH = 3  # take small messages, one by one
    REPORT = 4  # tell what this process has used
    REPORT_COLLECTED = 5  # the same, after a collection of garbage


class Order(NamedTuple):
    way: Way
    messages: int = 0
    size: int = 0
    """Of each message."""
    verify: bool = False
    """With the CRC-32 of all payload in the receipt."""


class Receipt(NamedTuple):
    """What had come."""

    messages: int
    bytes: int
    crc: int


class Usage(NamedTuple):
    """What a server process has used."""

    cpu: int
    """ns"""
    memory: int
    """Resident bytes; 0 where the system does not say."""
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
