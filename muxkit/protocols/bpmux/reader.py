"""The reader: splits received bytes into chunks, and applies the usual ones the quick way.

A chunk that is not one of the two usual kinds, or comes in pieces, goes through `ChunkRules`, which knows all of them.
The quick ways make no check twice and no object for a chunk; they leave everything else alone, so that there is one
place for each rule.

    parse_payloads     messages on known entities, with small numbers and enough credit
    _apply_control     credit, an empty end or its confirmation, about known entities
    parse_chunk        anything, with `ChunkRules` as its checks; then `ChunkRules.apply`
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

EVENT_FRAMES = 4  # frames that an event counts as, because acting on an opening or an end takes that much longer
HEAD_MOST = 16  # bytes; the head of a usual payload chunk is shorter
ON_PEERS_SINK = Type.OUT_SINK << 5 | PAYLOAD  # a message on a sink that the peer opened: our STREAM_IN
ON_OUR_STREAM = Type.IN_SINK << 5 | PAYLOAD  # a message on a stream that we opened: our STREAM_OUT
DUPLEX = Type.DUPLEX << 5  # such chunks open entities, and those with a higher tag announce parts
SHORT_CONTROL = frozenset({CREDIT, END, ACK_END})  # flags
LEAST = (0, 248, 1 << 8, 1 << 16, 1 << 24)  # the least number whose VarU64 has so many bytes behind the first


class ChunkReader:
    """Splits received bytes into chunks, checks them and applies them.

    It holds the beginning of an incomplete chunk, never more than the credit that covers it.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.rules: ChunkRules = ChunkRules(state)
        self.held: Pieces = Pieces()  # the beginning of a chunk
        self._wanted = 0  # bytes to hold before parsing is tried again
        self.receiver: Receiver | None = None  # the entity of an incomplete payload whose chunk head was parsed
        self._missing = 0  # bytes missing of that payload
        self._pieces = Pieces()  # the beginning of that payload
        self.left: int = 0  # frames that may still be parsed; events count as several

    def resume(self, data: bytes, position: int, base: int) -> int:
        """Add to the incomplete chunk; return the position in `data` behind it. `base` is the offset of `data`."""
        while self.held.size:
            missing = self._wanted - self.held.size
            self.held.append(data[position : position + missing])
            position += missing
            if self.held.size < self._wanted:
                return len(data)
            held = self.held.join()  # one chunk; it stays held while it is incomplete
            self.parse(held, 0, base + position - len(held))
        if self.receiver is not None and position < len(data):
            position = self._continue_payload(self.receiver, data, position)
        return position

    def _continue_payload(self, receiver: Receiver, data: bytes, position: int) -> int:
        """Add to the incomplete payload of an entity; return the position in `data` behind it."""
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
        else:  # the entity has changed since the head was parsed
            type = Type.OUT_SINK if receiver.kind is Kind.STREAM_IN else Type.IN_SINK
            self.rules.header(type, receiver.id, PAYLOAD)
            self.rules.payload(len(payload))
            self.rules.apply(Chunk(type, receiver.id, payload))
        self.left -= 1
        return position + missing

    def parse(self, data: bytes, position: int, base: int) -> int:
        """Parse and apply chunks in `data` from `position` on; hold an incomplete one. `base` is the offset of `data`.

        Returns the position behind the last: the end, unless this call may parse no more frames.
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
        """Apply one usual chunk without payload fast: credit, an empty end or its confirmation, about a known entity.

        Returns the position behind it, or 0 without having done anything if it is anything else, or incomplete.
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
        """Parse the usual chunks fast: a message on a known entity, with small numbers and enough credit.

        Returns the position of the first chunk that is anything else; `parse` handles that one with all checks.
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
            while True:  # the chunks about this entity that come one behind the other
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
                if end > size:  # the rest is not here yet
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
