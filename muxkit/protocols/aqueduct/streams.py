"""The streams that we write, and the order in which they write.

A frame is encoded when the link pulls it, so that what to write is decided as late as possible: a message that the
application cancels in time is never encoded. An `OutStream` holds the bytes of one frame at most, and its source
makes the next one. `StreamScheduler` lets the streams take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import attrs

from muxkit.core import Buffer, StreamId


class FrameSource(Protocol):
    """Makes the frames of one stream: a half of a channel, or a message that has a stream of its own."""

    def has_frames(self) -> bool:
        """Return True if `fill` would append a frame."""

    def fill(self, stream: OutStream) -> None:
        """Append one frame to `stream.pending`, if there is one. Set `stream.fin` together with the last frame."""

    def pulled(self, stream: OutStream) -> None:
        """Note that some of `stream.pending` was taken."""


@attrs.define(eq=False)
class OutStream:
    """A stream that we write. Without a source it ends after the pending bytes."""

    pending: list[Buffer]  # short, because the source makes more when these were taken
    source: FrameSource | None = None
    urgent: bool = False  # opened before streams that bring messages
    id: StreamId | None = None  # once it has begun to write
    fin: bool = attrs.Factory(lambda self: self.source is None, takes_self=True)
    """The stream ends after the pending bytes."""
    ended: bool = False  # nothing more may be written
    parked: bool = False  # blocked until the link has room
    was_reset: bool = False
    listed_in: dict[int, OutStream] | None = None
    """A table of the streams that bring the last frame of a channel; this one leaves it when it ends."""
    channel: int = 0
    """The key of the stream in that table."""

    def list_in(self, table: dict[int, OutStream], channel: int) -> None:
        """Stand in a table under the id of a channel until the stream has ended."""
        table[channel] = self
        self.listed_in, self.channel = table, channel

    @property
    def is_ready(self) -> bool:
        """True if the stream has something to write."""
        if self.ended:
            return False
        if self.fin or (self.source is not None and self.source.has_frames()):
            return True
        return self.id is not None and bool(self.pending)


class StreamScheduler:
    """Decides which stream writes next: open streams and streams that wait to be opened take turns."""

    def __init__(self, first: StreamId, prefix: bytes) -> None:
        self.prefix = prefix  # written first on every new stream
        self.streams: dict[StreamId, OutStream] = {}  # open
        self.resets: dict[StreamId, None] = {}  # to be reset by the link
        self._next_id = first
        self._ready: OrderedDict[OutStream, None] = OrderedDict()
        self._urgent: OrderedDict[OutStream, None] = OrderedDict()
        self._opening: OrderedDict[OutStream, None] = OrderedDict()
        self._open_next = False  # the last turn went to an open stream

    def has_output(self, may_open: bool) -> bool:
        return bool(self._ready or self.resets or (may_open and (self._urgent or self._opening)))

    def add(self, stream: OutStream) -> None:
        """Queue a stream that may have something to write; does nothing if it is queued, parked or empty."""
        if stream.parked or not stream.is_ready:
            return
        if stream.id is not None:
            self._ready.setdefault(stream)
        elif stream.urgent:
            self._urgent.setdefault(stream)
        else:
            self._opening.setdefault(stream)

    def next(self, may_open: bool) -> StreamId | None:
        """Return the stream whose turn it is. Open and new streams alternate; urgent ones don't wait."""
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
        stream.id = self._next_id
        self._next_id += 4
        self.streams[stream.id] = stream
        if self.prefix:
            stream.pending.insert(0, self.prefix)
        self._ready[stream] = None
        self._ready.move_to_end(stream, last=False)
        self._open_next = False
        return stream.id

    def pull(self, id: StreamId, limit: int) -> tuple[bytes, bool]:
        """Give at most `limit` bytes of a stream, and whether they are its last; 0 parks it until `writable`."""
        stream = self.streams.get(id)
        if stream is None:
            return b"", False
        if limit <= 0:
            stream.parked = True
            self._ready.pop(stream, None)
            return b"", False
        pieces: list[Buffer] = []
        pending = stream.pending
        while limit > 0:
            if not pending and not stream.fin and stream.source is not None:
                stream.source.fill(stream)
            if not pending:
                break
            piece = pending.pop(0)
            if len(piece) > limit:
                view = memoryview(piece)
                pending.insert(0, view[limit:])
                piece = view[:limit]
            pieces.append(piece)
            limit -= len(piece)
        if stream.source is not None:
            stream.source.pulled(stream)
        if stream.fin and not pending:
            self._end(stream)
        elif not stream.is_ready:
            self._ready.pop(stream, None)
        elif stream in self._ready:
            self._ready.move_to_end(stream)
        return b"".join(pieces), stream.ended

    def writable(self, id: StreamId) -> None:
        """Unpark a stream: the link has room for it."""
        stream = self.streams.get(id)
        if stream is not None and stream.parked:
            stream.parked = False
            self.add(stream)

    def drop(self, stream: OutStream) -> None:
        """Give up what is not written: reset an open stream, and never open another one."""
        if not stream.ended:
            self.reset(stream)

    def reset(self, stream: OutStream) -> None:
        """Do the same as `drop`, also for a stream that has ended: the link may still hold its bytes."""
        self._urgent.pop(stream, None)
        self._opening.pop(stream, None)
        if stream.id is not None and not stream.was_reset:
            stream.was_reset = True
            self.resets[stream.id] = None
        self._end(stream)

    def clear(self) -> None:
        """Write nothing any more."""
        for queue in (self._ready, self._urgent, self._opening):
            queue.clear()
        self.streams.clear()
        self.resets.clear()

    def _end(self, stream: OutStream) -> None:
        stream.ended = True
        stream.pending.clear()
        stream.source = None
        self._ready.pop(stream, None)
        if stream.id is not None:
            self.streams.pop(stream.id, None)
        table, stream.listed_in = stream.listed_in, None
        if table is not None and table.get(stream.channel) is stream:
            del table[stream.channel]
