"""Which stream writes next, and what? Our streams, their frames made when they are pulled, in fair order."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.core import Buffer, StreamId


class Source(Protocol):
    """Who has frames for a stream."""

    def has_frames(self) -> bool: ...

    def fill(self, stream: OutStream) -> None:
        """Append one frame to `stream.pending`, if there is one; set `stream.fin` with the last."""

    def pulled(self, stream: OutStream) -> None:
        """Some of what is pending has gone."""


class OutStream:
    """A stream that we write: it gets its number when it first writes."""

    __slots__ = ("ended", "fin", "id", "on_end", "parked", "pending", "source", "urgent", "was_reset")

    def __init__(
        self,
        *frames: Buffer,
        source: Source | None = None,
        urgent: bool = False,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.id: StreamId | None = None
        self.pending: list[Buffer] = [*frames]  # a few: more are made when these are gone
        self.source = source
        self.urgent = urgent  # to be opened before those that bring messages
        self.fin = source is None  # the end comes after what is pending
        self.ended = False  # nothing more may be written
        self.parked = False  # waits for `writable`
        self.was_reset = False
        self.on_end = on_end

    @property
    def is_ready(self) -> bool:
        if self.ended:
            return False
        return self.fin or (self.source is not None and self.source.has_frames()) or self._has_begun

    @property
    def _has_begun(self) -> bool:
        return self.id is not None and bool(self.pending)

    def pull(self, limit: int) -> bytes:
        pieces: list[Buffer] = []
        room = limit
        while room > 0:
            if not self.pending:
                if not self.fin and self.source is not None:
                    self.source.fill(self)
                if not self.pending:
                    break
            piece = self.pending.pop(0)
            if len(piece) > room:
                view = memoryview(piece)
                self.pending.insert(0, view[room:])
                piece = view[:room]
            pieces.append(piece)
            room -= len(piece)
        if self.source is not None:
            self.source.pulled(self)
        return b"".join(pieces)


class Line:
    """The streams that have something to write: those that are open, and those that wait to be opened."""

    def __init__(self, first: StreamId, prefix: bytes) -> None:
        self.prefix = prefix  # what every sequence begins with
        self.streams: dict[StreamId, OutStream] = {}  # open
        self.resets: dict[StreamId, None] = {}
        self._next = first
        self._ready: OrderedDict[OutStream, None] = OrderedDict()
        self._urgent: OrderedDict[OutStream, None] = OrderedDict()
        self._opening: OrderedDict[OutStream, None] = OrderedDict()
        self._open_next = False  # an open one had its turn last

    @property
    def waits_to_open(self) -> bool:
        return bool(self._urgent or self._opening)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def add(self, stream: OutStream) -> None:
        """It may have something to write; harmless if it stands in line, or if it has not."""
        if stream.parked or not stream.is_ready:
            return
        if stream.id is not None:
            self._ready.setdefault(stream)
        elif stream.urgent:
            self._urgent.setdefault(stream)
        else:
            self._opening.setdefault(stream)

    def next(self, may_open: bool) -> StreamId | None:
        """Whose turn it is. An open stream and a new one take turns; urgent ones do not wait."""
        while may_open and (self._urgent or (self._opening and (self._open_next or not self._ready))):
            stream, _ = (self._urgent or self._opening).popitem(last=False)
            if stream.is_ready:
                return self._open(stream)
        while self._ready:
            stream = next(iter(self._ready))
            if stream.is_ready:
                self._open_next = True
                return stream.id
            del self._ready[stream]
        if may_open and self._opening:
            self._open_next = True
            return self.next(may_open)
        return None

    def _open(self, stream: OutStream) -> StreamId:
        stream.id = self._next
        self._next += 4
        self.streams[stream.id] = stream
        if self.prefix:
            stream.pending.insert(0, self.prefix)
        self._ready[stream] = None
        self._ready.move_to_end(stream, last=False)
        self._open_next = False
        return stream.id

    def pull(self, id: StreamId, limit: int) -> tuple[bytes, bool]:
        stream = self.streams.get(id)
        if stream is None:
            return b"", False
        if limit <= 0:
            stream.parked = True
            self._ready.pop(stream, None)
            return b"", False
        data = stream.pull(limit)
        if stream.fin and not stream.pending:
            self._end(stream)
        elif not stream.is_ready:
            self._ready.pop(stream, None)
        elif stream in self._ready:
            self._ready.move_to_end(stream)
        return data, stream.ended

    def writable(self, id: StreamId) -> None:
        stream = self.streams.get(id)
        if stream is not None and stream.parked:
            stream.parked = False
            self.add(stream)

    def drop(self, stream: OutStream) -> None:
        """What is not written will not be: an open stream is reset, another one never was."""
        if not stream.ended:
            self.reset(stream)

    def reset(self, stream: OutStream) -> None:
        """The same also if everything has been handed to the link, which may still be holding it."""
        self._urgent.pop(stream, None)
        self._opening.pop(stream, None)
        if stream.id is not None and not stream.was_reset:
            stream.was_reset = True
            self.resets[stream.id] = None
        self._end(stream)

    def clear(self) -> None:
        """Nothing is written any more."""
        for lane in (self._ready, self._urgent, self._opening):
            lane.clear()
        self.streams.clear()
        self.resets.clear()

    def _end(self, stream: OutStream) -> None:
        stream.ended = True
        stream.pending.clear()
        stream.source = None
        self._ready.pop(stream, None)
        if stream.id is not None:
            self.streams.pop(stream.id, None)
        if stream.on_end is not None:
            stream.on_end()
