"""Where does one chunk stop and the next begin? Splits what comes into chunks, whatever the pieces it comes in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, Pieces
from muxkit.protocols.bpmux._engine.entities import Entity, Kind
from muxkit.protocols.bpmux._engine.events import Message
from muxkit.protocols.bpmux._engine.receiving import Receiving
from muxkit.protocols.bpmux._frames import PAYLOAD, Chunk, Type, parse_chunk

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._engine.state import State

EVENT_FRAMES = 4  # chunks that take as long as what is done about an opening or an end
ROOM = 16  # bytes in which the head of a usual payload chunk ends
OWN_SINK = Type.OUT_SINK << 5 | PAYLOAD
PEERS_SINK = Type.IN_SINK << 5 | PAYLOAD


class Reader:
    """Holds the beginning of a chunk whose rest has not come, never more than the credit that pays for it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._receiving = Receiving(state)
        self._held = Pieces()
        self._wanted = 0  # size of the held bytes with which parsing may get on
        self._owner: Entity | None = None  # whose payload is coming, the head of its chunk being parsed
        self._missing = 0  # bytes of that payload
        self._pieces = Pieces()  # what has come of it
        self._rest = b""  # what came and was not looked at from `_at` on, because `frames_at_once` chunks were parsed
        self._at = 0
        self._left = 0  # frames that this call may still parse
        self.frames_at_once = sys.maxsize
        self.offset = 0  # bytes taken in, in all

    @property
    def unparsed(self) -> int:
        """Bytes that came and were not looked at, because `frames_at_once` chunks were parsed."""
        return len(self._rest) - self._at

    @property
    def is_mid_chunk(self) -> bool:
        return self._held.size > 0 or self._owner is not None or self._receiving.announced > 0

    def feed(self, data: bytes) -> RemoteProtocolError | None:
        """Take in more; gives the violation, after which nothing may be fed."""
        if self._state.observer is not None and data:
            self._state.observer.transport("in", data)
        start = 0
        if self._rest:
            if data:
                data = self._rest[self._at :] + data
            else:  # a position is kept, or each step of a turn would copy what is left
                data, start = self._rest, self._at
            self._rest, self._at = b"", 0
        self._left = self.frames_at_once
        base = self.offset - start
        try:
            position = self._go_on(data, start, base) if self._owner is not None or self._held.size else start
            position = self._parse(data, position, base)
        except RemoteProtocolError as error:
            return error
        self.offset = base + position
        if position < len(data):
            self._rest, self._at = data, position
        return None

    def _go_on(self, data: bytes, position: int, base: int) -> int:
        """With the chunk that was begun; gives the position in `data` behind it. `base` is the offset of its start."""
        while self._held.size:
            missing = self._wanted - self._held.size
            self._held.append(data[position : position + missing])
            position += missing
            if self._held.size < self._wanted:
                return len(data)
            held = self._held.join()  # one chunk; it stays held while it is incomplete
            self._parse(held, 0, base + position - len(held))
        if self._owner is not None and position < len(data):
            position = self._go_on_with_payload(self._owner, data, position)
        return position

    def _go_on_with_payload(self, owner: Entity, data: bytes, position: int) -> int:
        pieces, missing = self._pieces, self._missing
        if len(data) - position < missing:
            pieces.append(data[position:])
            self._missing = missing - (len(data) - position)
            return len(data)
        pieces.append(memoryview(data)[position : position + missing])
        payload = pieces.join()
        self._owner = None
        if owner.direct and len(payload) <= owner.window.credit:
            self._deliver(owner, payload)
        else:  # meanwhile something about it has changed
            type = Type.OUT_SINK if owner.kind is Kind.STREAM_IN else Type.IN_SINK
            self._receiving.header(type, owner.id, PAYLOAD)
            self._receiving.payload(len(payload))
            self._receiving.apply(Chunk(type, owner.id, payload))
        self._left -= 1
        return position + missing

    def _parse(self, data: bytes, position: int, base: int) -> int:
        """Chunks in `data` from `position` on; keeps an incomplete one. `base` is the offset of its start.

        Gives how far it came: to the end, unless so many frames are not for one call.
        """
        size = len(data)
        while position < size and self._left > 0:
            if not self._receiving.announced and size - position > ROOM:
                position = self._parse_payloads(data, position)
                if position >= size or self._left <= 0:
                    break
            cursor = Cursor(data, position)
            try:
                chunk = parse_chunk(cursor, self._receiving)
            except NeedMore as need:
                self._held.append(data[position:])
                self._wanted = size - position + need.missing
                return size
            except RemoteProtocolError as error:
                error.offset = base + position
                raise
            events = self._state.events
            told = len(events)
            self._receiving.apply(chunk)
            self._left -= 1 + EVENT_FRAMES * (len(events) - told)
            position = cursor.position
        return position

    def _parse_payloads(self, data: bytes, position: int) -> int:
        """The fast way for what most chunks are: a message on a known entity, small numbers, credit enough.

        Stops before the first chunk that is anything else; the general way decides about that one.
        """
        size = len(data)
        last = size - ROOM
        maps, events = self._state.maps, self._state.events
        append, observer = events.append, self._state.observer
        largest = self._state.limits.message
        sinks, streams = maps[Kind.STREAM_IN], maps[Kind.STREAM_OUT]
        before = len(events)
        for _ in range(self._left):
            if position >= last:
                break
            tag = data[position]
            if tag == OWN_SINK:
                entities = sinks
            elif tag == PEERS_SINK:
                entities = streams
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
            if entity is None or not entity.direct:
                break
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
            window = entity.window
            if length > window.credit or length > largest:
                break
            if end > size:  # the rest comes later, and is joined with this once
                self._owner, self._missing = entity, end - size
                self._pieces.append(memoryview(data)[start:])
                position = size
                break
            window.credit -= length
            window.held += length
            append(Message(entity, data[start:end]))
            if observer is not None:
                observer.frame("in", entity.label, "payload", length)
            position = end
        self._left -= len(events) - before
        return position

    def _deliver(self, entity: Entity, payload: bytes) -> None:
        entity.window.credit -= len(payload)
        entity.window.held += len(payload)
        self._state.events.append(Message(entity, payload))
        if self._state.observer is not None:
            self._state.observer.frame("in", entity.label, "payload", len(payload))


LEAST = (0, 248, 1 << 8, 1 << 16, 1 << 24)  # the least number whose VarU64 has so many bytes behind the first
