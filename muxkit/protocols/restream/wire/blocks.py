r"""Blocks: consecutive messages in one piece, for readers that copy many messages elsewhere.

A line per message makes the server wrap the data of each message and the reader parse each line. A block has one header
line for many messages, with the size of each message, and then their data as the store has it, without separators:

    {"block":{"id":101,"sizes":[7,12],"time":1700000000.25}}\n
    {"n":1}\x00\x03\x00\x00\x00\x00\x00\x00\x00hi!

The data of a message is JSON, or a record as `wire/records.py` defines it. So bytes are sent without base64, and a
reader finds all values by adding up sizes. A server sends blocks only to a client whose request has `"blocks":true`.
Other servers ignore that field and send lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import msgspec

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.wire.messages import U32_MAX, StoredMessage

BEGIN: Final = b'{"block":'
"""The first bytes of a header line, exactly. No other line of a server begins with them."""

MAX_BODY: Final = 1 << 20  # bytes of a block with several messages
Times = Sequence[float | None]


class _Header(msgspec.Struct, omit_defaults=True, gc=False):
    id: int
    sizes: list[int]
    time: float | None = None
    times: list[float | None] | None = None


class _Line(msgspec.Struct, gc=False):
    block: _Header


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


@attrs.frozen
class Block:
    """Consecutive messages of a session, at least one.

    Attributes:
        first: the id of the first message.
        sizes: the size of the data of each message, in bytes.
        times: the time of each message in seconds since 1970, or None for a message without one.
        body: the data of all messages. Each is JSON, or an encoded record.
    """

    first: int
    sizes: Sequence[int]
    times: Times
    body: bytes | memoryview

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def last(self) -> int:
        """The id of the last message."""
        return self.first + len(self.sizes) - 1

    def messages(self) -> Iterator[StoredMessage]:
        """Return the messages one by one."""
        start = 0
        for id, size, time in zip(range(self.first, self.last + 1), self.sizes, self.times, strict=True):
            yield StoredMessage(id, time, bytes(self.body[start : start + size]))
            start += size

    def split(self, count: int) -> tuple[Block, Block | None]:
        """Return the first `count` messages, at least one, and the others, or None if there are no others."""
        if count >= len(self.sizes):
            return self, None
        sizes, times = self.sizes, self.times
        middle = sum(sizes[:count])
        return (
            Block(self.first, sizes[:count], times[:count], self.body[:middle]),
            Block(self.first + count, sizes[count:], times[count:], self.body[middle:]),
        )


def block_of(messages: Sequence[StoredMessage]) -> Block:
    """Return a block of consecutive messages."""
    bodies = [message.data for message in messages]
    return Block(messages[0].id, [*map(len, bodies)], [message.time for message in messages], b"".join(bodies))


def encode_block(messages: Sequence[StoredMessage]) -> bytes:
    """Return consecutive messages as a block."""
    bodies = [data for _, _, data in messages]
    header = _Header(messages[0].id, [*map(len, bodies)])
    time = messages[0].time
    if messages[-1].time == time and all(message.time == time for message in messages):
        header.time = time
    else:
        header.times = [message.time for message in messages]
    return b"".join([BEGIN, _encode(header), b"}\n", *bodies])


def parse_header(line: bytes, most: int) -> Block:
    """Parse a header line, and return its block without a body.

    Args:
        line: the line.
        most: the longest data of a message that is allowed.

    Raises:
        RemoteProtocolError: if the header is invalid, or if a message is too long.
    """
    try:
        header = _decode(line).block
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"invalid header of a block: {error}", rule="restream-F05") from None
    count = len(header.sizes)
    if not count or not 1 <= header.id <= U32_MAX + 1 - count:
        raise RemoteProtocolError(
            f"invalid block of {count} messages from {header.id}: expected at least one, with ids from 1 to {U32_MAX}",
            rule="restream-S08",
        )
    if header.times is not None and len(header.times) != count:
        raise RemoteProtocolError(f"invalid block: expected {count} times, got {len(header.times)}")
    if min(header.sizes) < 1:
        raise RemoteProtocolError(f"message without data in the block from {header.id}", rule="restream-S07")
    if max(header.sizes) > most:
        raise RemoteProtocolError(
            f"a message of {max(header.sizes)} bytes; ClientConfig(line={most}) allows no more", rule="restream-F12"
        )
    if count > 1 and sum(header.sizes) > MAX_BODY:
        raise RemoteProtocolError(f"a block of {sum(header.sizes)} bytes: expected at most {MAX_BODY}")
    times: Times = [header.time] * count if header.times is None else header.times
    return Block(header.id, header.sizes, times, b"")
