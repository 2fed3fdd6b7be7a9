"""Where does one chunk stop and the next begin? Splits what comes into chunks, whatever the pieces it comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, Pieces
from muxkit.protocols.bpmux._entities import Kind
from muxkit.protocols.bpmux._events import Message
from muxkit.protocols.bpmux._frames import PAYLOAD, Type, parse_chunk
from muxkit.protocols.bpmux._receiving import Receiving

if TYPE_CHECKING:
    from muxkit.protocols.bpmux._state import State

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
        self.offset = 0  # bytes received in all
        self.frames = 0  # chunks parsed in all

    @property
    def is_mid_chunk(self) -> bool:
        return self._held.size > 0 or self._receiving.announced > 0

    def feed(self, data: bytes) -> RemoteProtocolError | None:
        """Take in more; gives the violation, after which nothing may be fed."""
        if self._state.observer is not None:
            self._state.observer.transport("in", data)
        position = 0
        try:
            while self._held.size:
                missing = self._wanted - self._held.size
                self._held.append(data[position : position + missing])
                position += missing
                if self._held.size < self._wanted:
                    self.offset += len(data)
                    return None
                self._parse_held(position)
            self._parse(data, position, self.offset)
        except RemoteProtocolError as error:
            return error
        self.offset += len(data)
        return None

    def _parse_held(self, taken: int) -> None:
        """One chunk out of what is held; it stays held while it is incomplete."""
        data = self._held.join()
        self._parse(data, 0, self.offset + taken - len(data))

    def _parse(self, data: bytes, position: int, base: int) -> None:
        """All chunks in `data` from `position` on; keeps an incomplete rest. `base` is the offset of its start."""
        size = len(data)
        while position < size:
            if not self._receiving.announced and size - position > ROOM:
                events = len(self._state.events)
                position = self._parse_payloads(data, position, size - ROOM)
                self.frames += len(self._state.events) - events
            cursor = Cursor(data, position)
            try:
                chunk = parse_chunk(cursor, self._receiving)
            except NeedMore as need:
                self._held.append(data[position:])
                self._wanted = size - position + need.missing
                return
            except RemoteProtocolError as error:
                error.offset = base + position
                raise
            self.frames += 1
            self._receiving.apply(chunk)
            position = cursor.position

    def _parse_payloads(self, data: bytes, position: int, last: int) -> int:
        """The fast way for what most chunks are: a message on a known entity, small numbers, credit enough.

        Stops before the first chunk that is anything else; the general way decides about that one.
        """
        size = len(data)
        maps, events = self._state.maps, self._state.events
        append, observer = events.append, self._state.observer
        largest = self._state.limits.message
        sinks, streams = maps[Kind.STREAM_IN], maps[Kind.STREAM_OUT]
        while position < last:
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
            if end > size or length > window.credit or length > largest:
                break
            window.credit -= length
            window.held += length
            append(Message(entity, data[start:end]))
            if observer is not None:
                observer.frame("in", entity.label, "payload", length)
            position = end
        return position


LEAST = (0, 248, 1 << 8, 1 << 16, 1 << 24)  # the least number whose VarU64 has so many bytes behind the first
