"""Names of codecs: they travel in a header of a channel, and the other end looks them up."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

from muxkit._errors import MuxError
from muxkit.codecs._codec import Codec
from muxkit.codecs._msgspec import Json, MessagePack
from muxkit.codecs._protobuf import Protobuf
from muxkit.codecs._zstd import Zstd
from muxkit.core import NO_HEADERS, Headers, printable

ValueT = TypeVar("ValueT")
CodecMaker = Callable[[Any], Codec[Any]]

GROUP: Final = "muxkit.codecs"
CODEC_HEADER: Final = "codec"
DEFAULT_CODEC: Final = "json"

_OWN: Final[dict[str, CodecMaker]] = {"json": Json, "msgpack": MessagePack, "protobuf": Protobuf}
_COMPRESSED: Final = "+zstd"


class UnknownCodec(MuxError):
    """The peer uses a codec that this side doesn't have, or doesn't have for this type."""


def announced(headers: Headers | None, codec: Codec[Any]) -> Headers:
    """Return the headers with the name of the codec."""
    return {**(headers or NO_HEADERS), CODEC_HEADER: codec.name}


def available() -> list[str]:
    """Return the names of all codecs: those of muxkit, and those that other packages add."""
    return sorted({*_OWN, *_added()})


def codec_for(name: str, type: type[ValueT]) -> Codec[ValueT]:
    """Return the codec of a name, for a type. "" stands for JSON.

    Raises:
        UnknownCodec: No codec has this name, or the one that has it can't handle the type.
    """
    base, is_compressed = (name.removesuffix(_COMPRESSED), True) if name.endswith(_COMPRESSED) else (name, False)
    make = _OWN.get(base or DEFAULT_CODEC) or _added().get(base)
    if make is None:
        raise UnknownCodec(f"unknown codec {printable(name, 64)!r}: expected one of {', '.join(available())}")
    try:
        codec: Codec[ValueT] = make(type)
        return Zstd(codec) if is_compressed else codec
    except (TypeError, ImportError) as error:
        raise UnknownCodec(f"the codec {printable(name, 64)!r} can't be used here: {error}") from error


@lru_cache(maxsize=1)
def _added() -> dict[str, CodecMaker]:
    """Load the codecs of other packages, once."""
    return {entry.name: entry.load() for entry in entry_points(group=GROUP)}
