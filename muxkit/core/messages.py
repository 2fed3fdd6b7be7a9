"""The framing of messages on a stream of bytes, for protocols whose streams have no messages, such as yamux.

A muxkit channel carries messages. On a stream of bytes, each side writes them as *records*. A record consists of a
big-endian number of four bytes, and a body. The highest bit of the number is the mark, and the other 31 bits are the
size of the body.

- The first record of each side is marked. Its body is `muxkit/1`, followed by the opening of the channel (its name,
  headers and payload) if this side has opened it.
- Each further record contains one message and isn't marked.

The first record shows each side that the peer understands channels, because a stream of another program hardly begins
with the byte 0x80. The opening side writes its first record together with the opening of the stream, and the accepting
side writes its own as soon as it accepts the channel.

This module doesn't define how a channel is cancelled. That depends on the protocol.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from muxkit._errors import RemoteProtocolError
from muxkit.core._numbers import Pieces

PREFIX: Final = Struct(">I")
PREFIX_SIZE: Final = 4
MARK: Final = 0x8000_0000
GREETING: Final = b"muxkit/1"
HEAD_SIZE: Final = PREFIX_SIZE + len(GREETING)


def encode_opening(opening: bytes = b"") -> bytes:
    """Return the first record of a side. The accepting side passes no opening."""
    return PREFIX.pack(MARK | (len(GREETING) + len(opening))) + GREETING + opening


def may_be_opening(head: bytes) -> bool:
    """Return True if a stream that begins with these bytes may be a channel. The bytes may be incomplete."""
    return head[:1] >= b"\x80" and GREETING.startswith(head[PREFIX_SIZE:HEAD_SIZE]) if head else True


class MessageReader:
    """Parses the records of one stream and returns the messages. `largest` is the size of the largest message."""

    __slots__ = ("_head", "_largest", "_pieces", "missing", "opening", "partial")

    def __init__(self, largest: int) -> None:
        self.opening: bytes | None = None
        """The peer's opening, or None until the first record is complete."""
        self.missing: int = 0
        """The number of missing bytes of an incomplete message."""
        self.partial: int = 0
        """The number of bytes of an incomplete message that have arrived."""
        self._largest = largest
        self._head = b""  # the beginning of an incomplete number at the start of a record
        self._pieces: Pieces | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Parse the next bytes, and return the messages that are complete now.

        Raises:
            RemoteProtocolError: If the bytes aren't records, or if a message is too large. Messages before the error
                are lost. The caller should reset the stream.
        """
        messages: list[bytes] = []
        position, size = 0, len(data)
        if self._pieces is not None:
            position = min(size, self.missing)
            self._pieces.append(data if position == size else data[:position])
            self.partial += position
            self.missing -= position
            if self.missing:
                return messages
            self._complete(self._pieces.join(), messages)
            self._pieces = None
            self.partial = 0
        elif self._head:
            data, self._head = self._head + data, b""
            size = len(data)
        while size - position >= PREFIX_SIZE:
            (length,) = PREFIX.unpack_from(data, position)
            if self.opening is None or length >= MARK:
                length = self._check_marked(length, data[position : position + HEAD_SIZE])
            if length > self._largest + (0 if self.opening is not None else len(GREETING)):
                raise RemoteProtocolError(
                    f"the peer began a message of {length} bytes: expected at most {self._largest}", limit="message"
                )
            position += PREFIX_SIZE
            end = position + length
            if end > size:
                self._pieces = Pieces()
                self._pieces.append(data[position:])
                self.partial, self.missing = size - position, end - size
                return messages
            self._complete(data[position:end], messages)
            position = end
        self._head = data[position:]
        return messages

    @property
    def is_between_messages(self) -> bool:
        """True if the stream may end here, because the last message is complete."""
        return not self._head and self._pieces is None and self.opening is not None

    def _check_marked(self, length: int, head: bytes) -> int:
        """Return the size of a record that must be the first one. Raise `RemoteProtocolError` if it isn't."""
        if self.opening is not None:
            raise RemoteProtocolError("the peer sent a second opening record on one channel")
        if length < MARK + len(GREETING) or not may_be_opening(head):
            raise RemoteProtocolError(
                "the peer doesn't send messages on this stream: expected the opening record of a muxkit channel, "
                f"got {head!r}; use session.open_stream() to talk to other programs"
            )
        return length - MARK

    def _complete(self, body: bytes, messages: list[bytes]) -> None:
        if self.opening is not None:
            messages.append(body)
        elif body.startswith(GREETING):
            self.opening = body[len(GREETING) :]
        else:
            self._check_marked(0, body)
