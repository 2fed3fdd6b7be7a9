"""A client's engine for readers of many messages, which reports all messages of one read together.

`ClientEngine` parses each line into a value and raises an event for it. A program that copies messages elsewhere, such
as the source of the data pipeline, has no use for the values: it needs the JSON of the data. `BlockEngine` decodes all
whole lines of a read with one call and leaves the data as the bytes that the server sent, which takes a quarter of the
processor time. It keeps the rules about ids, sizes, UTF-8 and JSON. From a server that can send blocks of messages (see
`wire/blocks.py`), it requests them, and then there is no JSON to decode but one header per block.

A block that the quick decoder does not take, such as one with an unknown field in a line, is parsed again line by line,
as `ClientEngine` does it. Therefore an error of the server and a violation have the same texts, and anything that is
valid but unusual is read all the same. Of the data itself the quick decoder checks the syntax only: not that an object
has no key twice, and not how deeply it is nested within the limit of the decoder. Such data can only surprise the
program that parses it, which reads the copy.
"""

from __future__ import annotations

from typing import Final

import msgspec

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.engine.client import ClientEngine, EncodedMessage, Received, ReceivedBlock, ReceivedValue
from muxkit.protocols.restream.wire import messages
from muxkit.protocols.restream.wire.blocks import Block
from muxkit.protocols.restream.wire.json import encode_line
from muxkit.protocols.restream.wire.records import JSON_PREFIX, encoded_of

LONG_LINE: Final = 512  # bytes on average above which searching for each line feed is faster than counting all bytes


_decode_lines: Final = msgspec.json.Decoder(EncodedMessage).decode_lines


class BlockEngine(ClientEngine):
    """A `ClientEngine` of a session that is read with `ReceivedBlock` events. It verifies no data.

    The application continues after `last_id` on the next connection, so it has to take each block before it lets the
    engine have more bytes.
    """

    wants_blocks = True

    def taken(self, event: Received | ReceivedValue | ReceivedBlock) -> None:
        if isinstance(event, ReceivedBlock):
            event = Received(event.block.last, None, None, False, None)
        super().taken(event)

    def rewind(self) -> None:
        super().rewind()
        self._events = [event for event in self._events if not isinstance(event, ReceivedBlock)]

    def _feed(self, data: bytes) -> RemoteProtocolError | None:
        return self._lines.feed_mixed(data, self._take_together, self._take_block)

    def _take_block(self, block: Block) -> None:
        if block.first != self.last_id + 1:
            self._check_id(block.first)
        self.last_id = block.last
        self.messages_received += len(block)
        self._events.append(ReceivedBlock(block))
        if self._observer is not None:
            self._observer.frame("in", "restream", "message", len(block.body))

    def _take_together(self, block: bytes) -> None:
        received = _decode(block)
        last = self.last_id
        if received is None or not _are_consecutive(received, last):
            self._take_lines(block)
            return
        self.last_id += len(received)
        self.messages_received += len(received)
        self._events.append(ReceivedBlock(_block_of(received)))
        if self._observer is not None:
            for line in block.splitlines():
                self._observer.frame("in", "restream", "message", len(line))

    def _take_lines(self, block: bytes) -> None:
        """Parse lines one by one, with all checks. Those before a violation are reported before it."""
        received: list[EncodedMessage] = []
        try:
            for line in block[:-1].split(b"\n"):
                message = messages.parse_message(line)
                if isinstance(message, messages.Refused):
                    self._report(received)
                    self._refuse(message)
                    return
                self._check_id(message.id)
                received.append(EncodedMessage(message.id, msgspec.Raw(encode_line(message.data)[:-1]), message.time))
                self.last_id: int = message.id
                self.messages_received: int = self.messages_received + 1
                self._lines.offset += len(line) + 1
                if self._observer is not None:
                    self._observer.frame("in", "restream", "message", len(line))
        finally:
            self._report(received)

    def _report(self, received: list[EncodedMessage]) -> None:
        if received:
            self._events.append(ReceivedBlock(_block_of(received)))
            received.clear()


def _block_of(received: list[EncodedMessage]) -> Block:
    """Return messages that came as lines as a block, with their records encoded as in a block."""
    bodies: list[bytes] = [bytes(message.data) for message in received]
    body = b"".join(bodies)
    if JSON_PREFIX in body:
        bodies = [encoded_of(data) if data.startswith(JSON_PREFIX) else data for data in bodies]
        body = b"".join(bodies)
    return Block(received[0].id, [*map(len, bodies)], [message.time for message in received], body)


def _decode(block: bytes) -> list[EncodedMessage] | None:
    """Decode lines together; None if they have to be looked at one by one."""
    if not block.isascii():
        try:
            block.decode("utf-8")  # the decoder does not look into strings that it skips
        except UnicodeDecodeError:
            return None
    try:
        received = _decode_lines(block)
    except (msgspec.MsgspecError, RecursionError):
        return None
    # The decoder takes any white space between two values, and a message has a line to itself.
    return received if received and _count_lines(block, len(received)) == len(received) else None


def _count_lines(block: bytes, expected: int) -> int:
    if len(block) < LONG_LINE * expected:
        return block.count(b"\n")
    count = position = 0
    while position := block.find(b"\n", position) + 1:
        count += 1
    return count


def _are_consecutive(received: list[EncodedMessage], last: int) -> bool:
    first = last + 1
    if first + len(received) > messages.U32_MAX + 1:
        return False
    return [message.id for message in received] == list(range(first, first + len(received)))
