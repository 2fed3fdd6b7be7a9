"""Parses the bytes that the peer has sent, and applies the chunks in them.

There are three ways to parse a chunk:

- `ChunkReader.parse_payloads` is the fast path for messages. The entity must exist, numbers must be small, and credit
  must cover the message.
- `ChunkReader._apply_control` is the fast path for grants, ends without payload, and acknowledgements. The entity must
  exist, and there must be no observer.
- `parse_chunk` parses any chunk. `ChunkRules` checks it while it is parsed, and `ChunkRules.apply` applies it.

The fast paths create no object for a chunk. A chunk for which they would have to report an error, or that is unusual in
any other way, is left to the third way. So each error is raised in one place only, in `parse_chunk` or `ChunkRules`.
"""

from __future__ import annotations

from muxkit._errors import RemoteProtocolError
from muxkit.core import U64_MAX, Cursor, NeedMore, Pieces
from muxkit.core.events import Received
from muxkit.protocols.bpmux.entities import ADDRESSED, ENDED, HALF_OPENED, Kind
from muxkit.protocols.bpmux.frames import ACK_END, CREDIT, END, PAYLOAD, Chunk, Type, parse_chunk
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.rules import ChunkRules, confirmation_of
from muxkit.protocols.bpmux.state import State

# A chunk that causes an event, such as an opening, counts as this many additional frames in the limit for frames that
# are parsed at once, because the session needs longer to handle it.
EVENT_FRAMES = 4
HEAD_MOST = 16  # an upper bound for the bytes of a message's chunk before the payload, on the fast path
ON_PEERS_SINK = Type.OUT_SINK << 5 | PAYLOAD  # tag of a message on a sink that the peer opened, which is our STREAM_IN
ON_OUR_STREAM = Type.IN_SINK << 5 | PAYLOAD  # tag of a message on a stream that we opened, which is our STREAM_OUT
DUPLEX = Type.DUPLEX << 5  # the lowest tag of the chunks that open duplexes or announce a message in parts
SHORT_CONTROL = frozenset({CREDIT, END, ACK_END})  # the flags for which `_apply_control` has a fast path
# The smallest number that needs 0, 1, 2, 3 or 4 bytes after the first byte of its encoding (VarU64).
LEAST = (0, 248, 1 << 8, 1 << 16, 1 << 24)


class ChunkReader:
    """Parses and applies chunks. It keeps the beginning of an incomplete chunk until the rest arrives.

    It never keeps more payload than credit covers, because the size of a payload is checked before its bytes.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.rules: ChunkRules = ChunkRules(state)
        # An incomplete chunk is kept in one of two ways: as its bytes, which are parsed again from the start, or as an
        # incomplete payload, of which `parse_payloads` has parsed the head.
        self.held: Pieces = Pieces()  # the bytes
        self._wanted = 0  # how many bytes there must be before we parse them again
        self.receiver: Receiver | None = None  # the entity of the incomplete payload
        self._missing = 0  # number of bytes missing of the payload
        self._pieces = Pieces()  # the beginning of the payload
        self.left: int = 0  # how many frames may still be parsed before other tasks run

    def resume(self, data: bytes, position: int, base: int) -> int:
        """Continue an incomplete chunk with the bytes in `data` from `position` on.

        `base` is the offset of `data` in everything that was received, for error messages. Returns the position after
        the chunk, or `len(data)` if the chunk is still incomplete.
        """
        while self.held.size:
            missing = self._wanted - self.held.size
            self.held.append(data[position : position + missing])
            position += missing
            if self.held.size < self._wanted:
                return len(data)
            held = self.held.join()  # if the chunk is still incomplete, `parse` puts it back into `held`
            self.parse(held, 0, base + position - len(held))
        if self.receiver is not None and position < len(data):
            position = self._continue_payload(self.receiver, data, position)
        return position

    def _continue_payload(self, receiver: Receiver, data: bytes, position: int) -> int:
        """Continue an incomplete payload. Return the position in `data` after it."""
        pieces, missing = self._pieces, self._missing
        if len(data) - position < missing:
            pieces.append(data[position:])
            self._missing = missing - (len(data) - position)
            return len(data)
        pieces.append(memoryview(data)[position : position + missing])
        payload = pieces.join()
        self.receiver = None
        if receiver.direct and len(payload) <= receiver.window.credit:
            receiver.window.credit -= len(payload)
            receiver.window.held += len(payload)
            self._state.events.append(Received(receiver, [payload]))
            if self._state.observer is not None:
                self._state.observer.frame("in", receiver.label, "payload", len(payload))
        else:  # the entity has changed since the head was parsed, for example because this side has ended it
            type = Type.OUT_SINK if receiver.kind is Kind.STREAM_IN else Type.IN_SINK
            self.rules.header(type, receiver.id, PAYLOAD)
            self.rules.payload(len(payload))
            self.rules.apply(Chunk(type, receiver.id, payload))
        self.left -= 1
        return position + missing

    def parse(self, data: bytes, position: int, base: int) -> int:
        """Parse and apply the chunks in `data` from `position` on, and keep the last one if it is incomplete.

        `base` is the offset of `data` in everything that was received, for error messages. Returns `len(data)`, or the
        position of the next chunk if `left` frames have been parsed.
        """
        size = len(data)
        while position < size and self.left > 0:
            events = self._state.events
            before = len(events)
            behind = self._apply_control(data, position)
            if behind:
                position = behind
            else:
                cursor = Cursor(data, position)
                try:
                    chunk = parse_chunk(cursor, self.rules)
                except NeedMore as need:
                    self.held.append(data[position:])
                    self._wanted = size - position + need.missing
                    return size
                except RemoteProtocolError as error:
                    error.offset = base + position
                    raise
                self.rules.apply(chunk)
                position = cursor.position
            self.left -= 1 + EVENT_FRAMES * (len(events) - before)
            if size - position > HEAD_MOST and not self.rules.announced:
                position = self.parse_payloads(data, position)
        return position

    def _apply_control(self, data: bytes, position: int) -> int:
        """Apply a grant, an end without payload or an acknowledgement, if it is complete and needs no other checks.

        Returns the position after the chunk. Returns 0 without having changed anything if `parse_chunk` has to parse
        the chunk.
        """
        tag = data[position]
        flags = tag & 0x1F
        if flags not in SHORT_CONTROL or tag >= DUPLEX or self.rules.announced or self._state.observer is not None:
            return 0
        size = len(data)
        if size - position < 3 - (flags == ACK_END):
            return 0
        id = data[position + 1]
        position += 2
        if id >= 248:
            position += id - 247
            if position >= size + (flags == ACK_END) or id > 0xF9:
                return 0
            least = LEAST[id - 247]
            id = int.from_bytes(data[position - id + 247 : position], "big")
            if id < least:
                return 0
        entity = self._state.maps[ADDRESSED[tag >> 5]].get(id)
        if entity is None or entity.parts is not None or entity.window.unfinished or entity.life is HALF_OPENED:
            return 0
        if entity.twin is not None and entity.twin.life is HALF_OPENED:
            return 0
        if flags == ACK_END:
            if entity.life is not ENDED:
                return 0
            self._state.remove(entity)
            self._state.events.append(confirmation_of(entity))
            return position
        number = data[position]
        position += 1
        if flags == END:
            if number:
                return 0
            self.rules.take_end(entity, b"")
            return position
        if number >= 248:
            bytes_ = number - 247
            position += bytes_
            if bytes_ > 4 or position > size:
                return 0
            number = int.from_bytes(data[position - bytes_ : position], "big")
            if number < LEAST[bytes_]:
                return 0
        if not number or entity.credit.available + number > U64_MAX:
            return 0
        self._state.receive_grant(entity, number)
        return position

    def parse_payloads(self, data: bytes, position: int) -> int:
        """Parse messages, if their entities exist, their numbers are small, and credit covers them.

        Returns the position of the first chunk that is anything else. `parse` continues there.
        """
        size = len(data)
        last = size - HEAD_MOST
        maps, events, observer = self._state.maps, self._state.events, self._state.observer
        peers_sinks, our_streams = maps[Kind.STREAM_IN], maps[Kind.STREAM_OUT]
        largest = self._state.limits.message
        left = self.left
        while left > 0 and position < last:
            first = position
            tag = data[position]
            if tag == ON_PEERS_SINK:
                entities = peers_sinks
            elif tag == ON_OUR_STREAM:
                entities = our_streams
            else:
                break
            id = data[position + 1]
            start = position + 2
            if id >= 248:
                if id == 0xF8:
                    id = data[start]
                    start += 1
                    if id < 248:
                        break
                elif id == 0xF9:
                    id = data[start] << 8 | data[start + 1]
                    start += 2
                    if id < 256:
                        break
                else:
                    break
            entity = entities.get(id)
            if not isinstance(entity, Receiver) or not entity.direct:
                break
            head = start - first
            window = entity.window
            credit = window.credit
            payloads: list[bytes] = []
            while True:  # consecutive chunks about the same entity make one event
                length = data[start]
                start += 1
                if length >= 248:
                    bytes_ = length - 247
                    if bytes_ > 4:
                        break
                    length = int.from_bytes(data[start : start + bytes_], "big")
                    if length < LEAST[bytes_]:
                        break
                    start += bytes_
                end = start + length
                if length > credit or length > largest:
                    break
                if end > size:  # the rest of the payload hasn't arrived
                    self.receiver, self._missing = entity, end - size
                    self._pieces.append(memoryview(data)[start:])
                    position = size
                    break
                credit -= length
                payloads.append(data[start:end])
                position = end
                left -= 1
                start = end + head
                if not left or position >= last or data[position] != tag:
                    break
                if data[position + 1] != data[first + 1] or (
                    head > 2 and data[position:start] != data[first : first + head]
                ):
                    break
            if not payloads:
                break
            window.held += window.credit - credit
            window.credit = credit
            events.append(Received(entity, payloads))
            if observer is not None:
                for payload in payloads:
                    observer.frame("in", entity.label, "payload", len(payload))
        self.left = left
        return position
