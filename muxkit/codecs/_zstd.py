"""Compression by zstd: a codec around another one."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final, Generic, TypeVar

from muxkit._errors import ExtraNeeded
from muxkit.codecs._codec import Codec, InvalidMessage

ValueT = TypeVar("ValueT")

LEVEL: Final = 3
"""zstd's own default. Higher levels cost several times the processor time for a few per cent."""


class Zstd(Generic[ValueT]):
    """Compresses each message of another codec: `Zstd(Json(Price))`, whose name is "json+zstd".

    A message never expands to more than `max_size` bytes: decompression stops there, so a small message that would
    expand to gigabytes costs no more than a large one.

    Args:
        codec: The codec whose messages are compressed.
        level: zstd's level, from 1 (fast) to 22 (small).

    Raises:
        ExtraNeeded: Python has no `compression.zstd` (it is new in 3.14), and backports.zstd isn't installed.
    """

    def __init__(self, codec: Codec[ValueT], *, level: int = LEVEL) -> None:
        self._zstd = _zstd_module()
        self._codec = codec
        self._level = level
        self.name: str = f"{codec.name}+zstd"
        self.max_size: int = codec.max_size

    def encode(self, value: ValueT, /) -> bytes:
        compressed: bytes = self._zstd.compress(self._codec.encode(value), level=self._level)
        return compressed

    def decode(self, message: bytes, /) -> ValueT:
        decompressor = self._zstd.ZstdDecompressor()
        try:
            expanded: bytes = decompressor.decompress(message, max_length=self.max_size + 1)
        except self._zstd.ZstdError as error:
            raise InvalidMessage("it isn't compressed by zstd, or it is damaged") from error
        if len(expanded) > self.max_size:
            del expanded  # the frames of an error may live longer than the error is needed
            raise InvalidMessage(
                f"it expands to more than the {self.max_size:,} bytes that the codec {self.name!r} takes; "
                "raise max_size= of the codec on the receiving side if the peer is right"
            )
        if not decompressor.eof or decompressor.unused_data:
            raise InvalidMessage("the compressed message is cut short, or something follows it")
        return self._codec.decode(expanded)


def _zstd_module() -> Any:  # noqa: ANN401 - one of two modules with the same content
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    try:
        from backports import zstd
    except ImportError as error:
        raise ExtraNeeded("backports.zstd", "zstd") from error
    return zstd
