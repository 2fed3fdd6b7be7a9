"""Masking of WebSocket payload: `masked(data, key)` (RFC 6455, section 5.3).

A client masks everything that it sends, and a server reverses that, which is the same operation. The package
websockets has it in C, 70 times as fast as the functions here. `FrameReader` and `data_frames` use that one if it is
installed (`pip install "muxkit[speedups]"`), and `masked_in_python` otherwise.

Both are called as `masked(data, key)` with any bytes-like data and a key of 4 bytes, and return new bytes. The first
byte of the data belongs to the first byte of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

# 512 bytes take 1.4 µs with big integers. With translation tables, 515 bytes take 3 µs.
BRIEF: Final = 512  # bytes up to which big integers are faster than translation tables

_XORED: Final = [bytes(byte ^ key for byte in range(256)) for key in range(256)]


def masked_in_python(data: bytes | bytearray | memoryview, key: bytes) -> bytes:
    """Mask or unmask bytes with what Python's own types do in C."""
    size = len(data)
    if size <= BRIEF:
        repeated = (key * (size // 4 + 1))[:size]
        return (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    data = bytes(data)
    out = bytearray(size)
    out[::4] = data[::4].translate(_XORED[key[0]])
    out[1::4] = data[1::4].translate(_XORED[key[1]])
    out[2::4] = data[2::4].translate(_XORED[key[2]])
    out[3::4] = data[3::4].translate(_XORED[key[3]])
    return bytes(out)


masked: Callable[[bytes | bytearray | memoryview, bytes], bytes] = masked_in_python
with suppress(ImportError):  # websockets isn't installed, or it was built without its extension
    from websockets.speedups import apply_mask

    masked = apply_mask
