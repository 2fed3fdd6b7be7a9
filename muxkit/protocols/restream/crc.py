"""What is the checksum of all numbers up to this one?"""

from __future__ import annotations

import zlib


def roll(crc: int, value: int) -> int:
    """The CRC-32 after one number more, which counts as four bytes, the highest first; it begins with 0."""
    return zlib.crc32(value.to_bytes(4, "big"), crc)
