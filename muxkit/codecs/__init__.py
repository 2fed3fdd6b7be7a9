"""Codecs turn values into the bytes of messages and back, and check what a peer sent against a type.

    async with session.open("prices", codec=muxkit.Json(Price)) as prices:
        await prices.send(Price("tea", 3))

`Json` and `MessagePack` take any type that msgspec knows: structs, dataclasses, attrs classes, unions, and pydantic
models and protobuf messages inside of them. `Pydantic` and `Protobuf` leave the work to these libraries. `Zstd`
compresses the messages of another codec.

Both ends have to use the same codec, so each codec has a name, which travels in the headers of a channel. Other
packages add codecs by entry points of the group `muxkit.codecs`: the name is that of the codec, and the entry point is
a function that takes a type and returns the codec for it.
"""

from muxkit.codecs._codec import MAX_MESSAGE as MAX_MESSAGE
from muxkit.codecs._codec import Codec as Codec
from muxkit.codecs._codec import InvalidMessage as InvalidMessage
from muxkit.codecs._codec import decoded as decoded
from muxkit.codecs._msgspec import Json as Json
from muxkit.codecs._msgspec import MessagePack as MessagePack
from muxkit.codecs._msgspec import from_builtins as from_builtins
from muxkit.codecs._msgspec import to_builtins as to_builtins
from muxkit.codecs._names import CODEC_HEADER as CODEC_HEADER
from muxkit.codecs._names import DEFAULT_CODEC as DEFAULT_CODEC
from muxkit.codecs._names import UnknownCodec as UnknownCodec
from muxkit.codecs._names import announced as announced
from muxkit.codecs._names import available as available
from muxkit.codecs._names import codec_for as codec_for
from muxkit.codecs._protobuf import Protobuf as Protobuf
from muxkit.codecs._pydantic import Pydantic as Pydantic
from muxkit.codecs._zstd import Zstd as Zstd

__all__ = [
    "CODEC_HEADER",
    "DEFAULT_CODEC",
    "MAX_MESSAGE",
    "Codec",
    "InvalidMessage",
    "Json",
    "MessagePack",
    "Protobuf",
    "Pydantic",
    "UnknownCodec",
    "Zstd",
    "announced",
    "available",
    "codec_for",
    "decoded",
    "from_builtins",
    "to_builtins",
]
