"""How muxkit's two-way channels are opened with Aqueduct's channels.

A muxkit channel consists of two Aqueduct channels, one in each direction. Each side has an Aqueduct channel on which it
opens others: the client its entrypoint, the server one that the client's first message carries. So the client's first
message is `CLIENT_MARKER`, with a sender attached. Every further message on either of the two opens a channel: its
attachments are a receiver and a sender, in this order, its payload is that of the opening, and the name and the headers
of the channel are headers of the message.

Aqueduct has a place for names, so an opening travels in parts. Within muxkit it is the bytes that `with_name` makes.
"""

from __future__ import annotations

from typing import Final

from muxkit.core import join_opening, split_opening
from muxkit.protocols.aqueduct.frames import Headers, Pairs

CLIENT_MARKER: Final = b"muxkit channels"  # the payload of the client's first message
OPENING_SIZE: Final = 64  # bytes that a message which opens a channel counts in addition to its name and payload
NAME: Final = b"name"
HEADERS: Final = b"muxkit.headers"
HEADERS_MOST: Final = 2**16 - 1  # bytes; there is no place for more in an opening, and `Limits.headers` allows less


def encode_opening(opening: bytes) -> tuple[bytes, Pairs]:
    """Return the payload and the headers of the message that opens a channel."""
    name, payload, block = split_opening(opening)
    pairs: Pairs = ((NAME, name),) if name else ()
    return payload, (*pairs, (HEADERS, block)) if block else pairs


def decode_opening(payload: bytes, headers: Headers) -> bytes:
    """Return the opening that a message brings, whatever the peer has put into it."""
    if not headers:
        return join_opening(b"", payload)
    pairs = dict(reversed(headers))  # the first of each name counts
    name = pairs.get(NAME, b"").replace(b"\0", rb"\x00")
    return join_opening(name, payload, pairs.get(HEADERS, b"")[:HEADERS_MOST])
