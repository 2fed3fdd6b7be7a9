"""How channels put messages on a stream of bytes, for protocols whose streams know nothing of messages, such as yamux.

Each side writes records. A record is four bytes, big endian, and a body: the upper bit of the four bytes is the mark,
the other 31 bits are the size of the body.

    first record     marked: `muxkit/1`, then what the channel was opened with; the side that accepts adds nothing
    further records  not marked: one message each

The side that opens a stream writes its first record together with the opening, and the side that accepts writes its
own as soon as it takes the channel. So each side can tell a channel from a stream of a program that knows nothing of
channels: no usual protocol begins with the byte 0x80.

How a side gives a channel up, and whether it can say why, is up to the protocol.
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
    """Return the first record of a side."""
    return PREFIX.pack(MARK | (len(GREETING) + len(opening))) + GREETING + opening


def may_be_opening(head: bytes) -> bool:
    """Return True if a stream that begins with these bytes, which may be few, can be that of a channel."""
    return head[:1] >= b"\x80" and GREETING.startswith(head[PREFIX_SIZE:HEAD_SIZE]) if head else True


class MessageReader:
    """Puts the messages of one stream together from the bytes that arrive.

    `opening` is None until the first record is complete. `missing` is how many bytes the message that was begun still
    needs, and `partial` is how many bytes of it are here.
    """

    __slots__ = ("_head", "_largest", "_pieces", "missing", "opening", "partial")

    def __init__(self, largest: int) -> None:
        self.opening: bytes | None = None
        self.missing: int = 0
        self.partial: int = 0
        self._largest = largest
        self._head = b""  # the beginning of the four bytes in front of a record
        self._pieces: Pieces | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes and return the messages that are complete.

        Raises `RemoteProtocolError` if the bytes aren't records, or if a message is too large. The messages in front
        of the fault are lost then, as the stream is reset anyway.
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
        """True if the stream may end here: the last message is complete."""
        return not self._head and self._pieces is None and self.opening is not None

    def _check_marked(self, length: int, head: bytes) -> int:
        """Return the size of a record that has to be an opening, or raise if it isn't one."""
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
