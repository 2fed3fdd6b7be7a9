"""The streams on which this side sends, and the scheduler that lets them take turns.

A frame is encoded only when the link is ready to send it. So a message that the application cancels before that is
never encoded. An `OutStream` gets its frames from its `FrameSource`, and keeps at most the rest of one frame.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import attrs

from muxkit.core import Buffer, StreamId


class FrameSource(Protocol):
    """The interface of objects that write frames: a half of a channel, or a message with a stream of its own."""

    def has_frames(self) -> bool:
        """Return True if `fill` would append a frame."""

    def fill(self, stream: OutStream, room: int) -> None:
        """Append a frame to `stream.pending`, if there is one. Set `stream.fin` if it is the last frame.

        The link takes `room` bytes now. As long as the frames are shorter than that, `fill` may append further frames.
        """

    def pulled(self, stream: OutStream) -> None:
        """Called when the link has taken bytes from `stream.pending`."""


@attrs.define(eq=False)
class OutStream:
    """A stream on which this side sends. Without a source, it ends after the pending bytes."""

    pending: list[Buffer]  # the rest of the current frame, which the link hasn't taken
    source: FrameSource | None = None
    urgent: bool = False  # True if the stream is opened before streams with messages
    id: StreamId | None = None  # None before the stream is opened
    fin: bool = attrs.Factory(lambda self: self.source is None, takes_self=True)
    """True if the stream ends after the pending bytes."""
    ended: bool = False  # True if nothing more may be written
    parked: bool = False  # True while the link accepts no bytes on this stream
    was_reset: bool = False
    listed_in: dict[int, OutStream] | None = None
    """A table of streams that write the last frame of a channel, or None. The stream is removed when it ends."""
    channel: int = 0
    """The key of the stream in that table."""

    def list_in(self, table: dict[int, OutStream], channel: int) -> None:
        """Add the stream to a table, until the stream has ended. The key is the id of a channel."""
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
    """Decides which stream writes next. Open streams, and streams that aren't open yet, take turns.

    Args:
        first: The id of the first stream.
        prefix: Bytes that are written at the start of every stream.
    """

    def __init__(self, first: StreamId, prefix: bytes) -> None:
        self.prefix = prefix
        self.streams: dict[StreamId, OutStream] = {}  # the open streams
        self.resets: dict[StreamId, None] = {}  # the streams that the link has to reset
        self._next_id = first
        self._ready: OrderedDict[OutStream, None] = OrderedDict()  # open streams with something to write
        self._urgent: OrderedDict[OutStream, None] = OrderedDict()  # urgent streams to open
        self._opening: OrderedDict[OutStream, None] = OrderedDict()  # other streams to open
        self._open_next = False  # True if the last turn went to an open stream

    def has_output(self, may_open: bool) -> bool:
        return bool(self._ready or (may_open and (self._urgent or self._opening)))

    def add(self, stream: OutStream) -> bool:
        """Queue a stream if it has something to write, unless it is parked. Return False if it was queued before."""
        if stream.parked:
            return False
        queue = self._ready if stream.id is not None else self._urgent if stream.urgent else self._opening
        if stream in queue or not stream.is_ready:
            return False
        queue[stream] = None
        return True

    def next(self, may_open: bool) -> StreamId | None:
        """Return the stream whose turn it is, or None. Open and new streams alternate, but urgent ones come first.

        `may_open` is True if the peer allows another stream.
        """
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

    def pull(self, id: StreamId, limit: int) -> tuple[list[Buffer], int, bool]:
        """Remove up to `limit` bytes of a stream's output. With a limit of 0, park the stream until `writable`.

        Returns:
            The buffers, their size, and True if they are the last ones of the stream.
        """
        out: list[Buffer] = []
        stream = self.streams.get(id)
        if stream is None:
            return out, 0, False
        if limit <= 0:
            stream.parked = True
            self._ready.pop(stream, None)
            return out, 0, False
        left, pending, source = limit, stream.pending, stream.source
        while left > 0:
            if not pending and not stream.fin and source is not None:
                source.fill(stream, left)
            if not pending:
                break
            left -= _move(pending, left, out)
        if source is not None:
            source.pulled(stream)
        if stream.fin and not pending:
            self._end(stream)
        elif not stream.is_ready:
            self._ready.pop(stream, None)
        elif stream in self._ready:
            self._ready.move_to_end(stream)
        return out, limit - left, stream.ended

    def writable(self, id: StreamId) -> None:
        """Unpark a stream, because the link accepts bytes on it again."""
        stream = self.streams.get(id)
        if stream is not None and stream.parked:
            stream.parked = False
            self.add(stream)

    def drop(self, stream: OutStream) -> None:
        """Drop the output of a stream that hasn't ended. An open stream is reset, and any other is never opened."""
        if not stream.ended:
            self.reset(stream)

    def reset(self, stream: OutStream) -> None:
        """Do the same as `drop`, even if the stream has ended, because the link may not have sent all its bytes."""
        self._urgent.pop(stream, None)
        self._opening.pop(stream, None)
        if stream.id is not None and not stream.was_reset:
            stream.was_reset = True
            self.resets[stream.id] = None
        self._end(stream)

    def clear(self) -> None:
        """Drop everything, because the connection has ended."""
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


def _move(pending: list[Buffer], limit: int, out: list[Buffer]) -> int:
    """Move up to `limit` bytes from `pending` to `out`, and return their number."""
    size = sum(map(len, pending))
    if size <= limit:
        out += pending
        pending.clear()
        return size
    left = limit
    while len(pending[0]) <= left:
        left -= len(pending[0])
        out.append(pending.pop(0))
    if left:
        view = memoryview(pending[0])
        out.append(view[:left])
        pending[0] = view[left:]
    return limit
