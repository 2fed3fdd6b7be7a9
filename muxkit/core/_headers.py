"""Headers: the key/value pairs that travel with the opening of a channel, next to its name and its payload.

Applications and the layers above the runtime use them for facts about a channel that aren't messages: the codec, the
deadline of a call, the trace that it belongs to. Keys and values are text. On the wire, a block of headers is one
MessagePack map, which has at most 65,535 bytes because its length is a 16-bit number. `Limits.headers` is the bound
that each side sets: a side that opens a channel checks its own headers against it, and a side that gets larger ones
refuses the channel.

An empty set of headers takes no bytes. Peers that know no headers see the block as part of the payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from muxkit._errors import LocalProtocolError
from muxkit.core._channels import Reason, without_name

Headers: TypeAlias = Mapping[str, str]

NO_HEADERS: Final[Headers] = MappingProxyType({})
HEADERS_TOO_LARGE: Final = 431  # the code of a channel that is refused for its headers, as in HTTP

_decoder = msgspec.msgpack.Decoder(dict[str, str])


def encode_headers(headers: Headers | None, most: int) -> bytes:
    """Encode headers for an opening; no headers are no bytes.

    Raises:
        TypeError: A key or a value isn't text.
        LocalProtocolError: The headers are larger than `most` bytes, which is `Limits.headers`.
    """
    if not headers:
        return b""
    pairs: Iterable[tuple[object, object]] = headers.items()  # programs without a type checker may pass anything
    for key, value in pairs:
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"invalid header {key!r}: expected a text for key and value, got {value!r}")
    block = msgspec.msgpack.encode(headers if type(headers) is dict else dict(headers))
    if len(block) > most:
        raise LocalProtocolError(f"headers too large: expected at most {most:,} bytes, got {len(block):,}")
    return block


def decode_headers(block: bytes) -> Headers:
    """Decode what `encode_headers` wrote. A block that isn't a map of texts has no headers."""
    if not block:
        return NO_HEADERS
    try:
        return _decoder.decode(block)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return NO_HEADERS


def headers_refusal(block: bytes, most: int) -> Reason | None:
    """Return the reason to refuse a channel with this block of headers, None if it may be opened."""
    if len(block) <= most:
        return None
    return Reason(f"headers too large: expected at most {most:,} bytes, got {len(block):,}", HEADERS_TOO_LARGE)


def opening_refusal(opening: bytes, most: int) -> Reason | None:
    """Return the reason to refuse a channel with this opening for its headers, None if it may be opened."""
    return None if len(opening) <= most else headers_refusal(without_name(opening).headers, most)
