"""How does Aqueduct travel over one byte stream? Streams with their own credit, resets, stops and datagrams, as frames.

docs/reference/aqueduct-carrier.md describes the framing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import (
    Buffer,
    Consumed,
    Credit,
    Cursor,
    Lent,
    NeedMore,
    ReceiveBudget,
    ReceiveWindow,
    Reset,
    Stop,
    encode_varint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._engine import Engine
    from muxkit.protocols.aqueduct._events import Event

HELLO: Final = b"AQUEDUX1"
DATA: Final = 0
LAST: Final = 1
RESET: Final = 2
STOP: Final = 3
CREDIT: Final = 4
STREAMS: Final = 5
DATAGRAM: Final = 6

FIRST_CREDIT: Final = 4096  # bytes that may be sent on each stream before any CREDIT
FIRST_STREAMS: Final = 16  # that may be opened before any STREAMS
LARGEST_DATAGRAM: Final = 65_536  # bytes
CHUNK: Final = 64 * 1024  # bytes of one stream at a time
SLICE: Final = (
    1024  # bytes handed to the engine at once while its pace is bounded, unless a frame is known to be longer
)
PIECES_A_FRAME: Final = 4  # frames of the carrier and slices that may come with each frame of the engine
MOST_STREAMS: Final = 2**60


@attrs.define
class _Arriving:
    """A stream that the peer writes."""

    window: ReceiveWindow
    over: bool = False  # its last byte has come


class Carrier:
    """One end of a connection over a byte stream; a `StreamEngine` around a `MultistreamEngine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.keeps_order()
        self.frames_at_once = sys.maxsize
        self.offset = 0  # bytes received and understood
        limits = engine.limits
        self._budget = ReceiveBudget(limits.connection_bytes, limits.channel_floor, limits.channel_first)
        self._now = 0.0
        # what we write
        self._greeted = False
        self._opened = 0
        self._may_open = FIRST_STREAMS
        self._credit: dict[StreamId, Credit] = {}
        # what we owe
        self._grants: dict[StreamId, int] = {}
        self._resets: dict[StreamId, None] = {}
        self._stops: dict[StreamId, None] = {}
        # what the peer writes
        self._was_greeted = False
        self._arriving: dict[StreamId, _Arriving] = {}
        self._arrived = 0  # streams that the peer has opened
        self._done = 0  # and of these are over and consumed
        self._told = FIRST_STREAMS  # how many he may open in all
        self._most = max(FIRST_STREAMS, engine.most_streams)
        self._held = b""  # what came and was not looked at, from `_at` on
        self._at = 0
        self._is_pacing = False
        self._left = 0  # bytes of the chunk that is arriving
        self._into: StreamId = 0
        self._is_last = False

    # --- the stream

    @property
    def unparsed(self) -> int:
        """Bytes kept because of `frames_at_once`; there may be more frames in them."""
        return len(self._held) - self._at if self._is_pacing else 0

    def receive_bytes(self, data: bytes, now: float) -> None:
        if self.engine.over:
            return
        self._now = now
        start = 0
        if self._held:
            if data:
                data = self._held[self._at :] + data
            else:  # a position is kept, or each step of a turn would copy what is left
                data, start = self._held, self._at
        cursor = Cursor(data, start)
        self._is_pacing = False
        most, pieces = self.frames_at_once + self.engine.frames, PIECES_A_FRAME * self.frames_at_once
        try:
            while cursor.remaining and not self.engine.over:
                if self.engine.frames >= most or not pieces:
                    self._is_pacing = True
                    break
                start = cursor.position
                self._take(cursor)
                pieces -= 1
                self.offset += cursor.position - start
        except NeedMore:
            cursor.position = start
        except RemoteProtocolError as error:
            error.offset = self.offset
            self.engine.fail(error)
        if cursor.position < len(data):
            self._held, self._at = data, cursor.position
        else:
            self._held, self._at = b"", 0

    def receive_eof(self, now: float) -> None:
        self.engine.receive_closed(now, clean=not self._held and not self._left)

    def events(self) -> Sequence[Event]:
        return self.engine.events()

    def next_deadline(self) -> float | None:
        return self.engine.next_deadline()

    def handle_deadline(self, now: float) -> None:
        self._now = now
        self.engine.handle_deadline(now)

    def has_output(self) -> bool:
        if self.engine.over:
            return False
        self._run_control()
        return (
            not self._greeted
            or bool(self._grants or self._resets or self._stops)
            or self._renewable > 0
            or self.engine.has_output(self._opened < self._may_open)
        )

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        """Control first, then datagrams up to half the limit, then the streams in turn."""
        out: list[Buffer] = []
        if self.engine.over:
            return out
        self._run_control()
        size = 0
        for frame in self._control():
            out.append(frame)
            size += len(frame)
            if size >= limit:
                return out
        half = size + max(1, (limit - size) // 2)
        while size < half and (datagram := self.engine.datagram_to_send(self.engine.config.datagram)) is not None:
            out += [_frame(DATAGRAM, len(datagram)), datagram]
            size += len(datagram) + 4
        while size < limit and (stream := self.engine.next_stream(self._opened < self._may_open)) is not None:
            size += self._write(stream, min(CHUNK, limit - size), out)
        return out

    # --- writing

    def _write(self, stream: StreamId, room: int, out: list[Buffer]) -> int:
        credit = self._credit.get(stream)
        if credit is None:
            credit = self._credit[stream] = Credit(FIRST_CREDIT)
            self._opened += 1
        data, last = self.engine.stream_to_send(stream, min(room, credit.available))
        if not data and not last:
            return 0
        credit.spend(len(data))
        if last:
            del self._credit[stream]
        elif not credit.available:
            self.engine.stream_to_send(stream, 0)  # it waits for credit, out of the line
        head = _frame(LAST if last else DATA, stream >> 2, len(data))
        out += [head, data] if data else [head]
        return len(head) + len(data)

    def _control(self) -> Iterator[bytes]:
        if not self._greeted:
            self._greeted = True
            yield HELLO
        if self._renewable:
            renewed = self._renewable
            self._told += renewed
            yield _frame(STREAMS, renewed)
        for tag, owed in ((RESET, self._resets), (STOP, self._stops)):
            while owed:
                stream, _ = owed.popitem()
                yield _frame(tag, stream >> 2)
        while self._grants:
            stream, amount = self._grants.popitem()
            yield _frame(CREDIT, stream >> 2, amount)

    @property
    def _renewable(self) -> int:
        """Streams that the peer may open on top of what he was told; not told one at a time."""
        renewable = self._done + self._most - self._told
        return renewable if renewable >= max(1, self._most // 4) else 0

    def _run_control(self) -> None:
        for control in self.engine.control_to_run():
            match control:
                case Reset(stream):
                    # One that was written to its end is there: on an ordered link nothing can be taken back.
                    if self._credit.pop(stream, None) is not None:
                        self._resets[stream] = None
                case Stop(stream):
                    arriving = self._arriving.get(stream)
                    if arriving is not None and not arriving.over:
                        self._stops[stream] = None
                case Lent(stream, amount):
                    arriving = self._arriving.get(stream)
                    if arriving is not None and not arriving.over:
                        arriving.window.lend(amount)
                        self._grant(stream, amount)
                case Consumed(stream, amount):
                    arriving = self._arriving.get(stream)
                    if arriving is not None:
                        grant, _ = arriving.window.consumed(amount, self._now)
                        self._grant(stream, grant)
                        self._release(stream, arriving)

    def _grant(self, stream: StreamId, amount: int) -> None:
        if amount:
            self._grants[stream] = self._grants.get(stream, 0) + amount

    def _release(self, stream: StreamId, arriving: _Arriving) -> None:
        if arriving.over and not arriving.window.held:
            del self._arriving[stream]
            self._done += 1

    # --- reading

    def _take(self, cursor: Cursor) -> None:
        """One frame, or one piece of a chunk."""
        if self._left:
            self._take_chunk(cursor)
            return
        if not self._was_greeted:
            hello = cursor.exact(len(HELLO))
            if hello != HELLO:
                raise RemoteProtocolError(f"the stream begins with {hello!r}, not with {HELLO!r}")
            self._was_greeted = True
            return
        tag = cursor.byte()
        if tag == DATAGRAM:
            size = cursor.varint()
            if size > LARGEST_DATAGRAM:
                raise RemoteProtocolError(f"a datagram of {size} bytes against {LARGEST_DATAGRAM}")
            self.engine.receive_datagram(cursor.exact(size), self._now)
        elif tag == STREAMS:
            more = cursor.varint()
            if self._may_open + more > MOST_STREAMS:
                raise RemoteProtocolError(f"{more} streams on top of {self._may_open}, more than {MOST_STREAMS}")
            self._may_open += more
        elif tag in (DATA, LAST):
            index, size = cursor.varint(), cursor.varint()
            self._begin_chunk(index, size, last=tag == LAST)
        elif tag == RESET:
            stream = self._theirs(cursor.varint())
            self._is_over(stream)
            self.engine.receive_reset(stream, self._now)
        elif tag == STOP:
            self.engine.receive_stopped(self._ours(cursor.varint()), self._now)
        elif tag == CREDIT:
            stream, amount = self._ours(cursor.varint()), cursor.varint()
            credit = self._credit.get(stream)
            if credit is not None:
                credit.grant(amount)
                self.engine.stream_writable(stream)
        else:
            raise RemoteProtocolError(f"no frame of the carrier begins with {tag:#04x}")

    def _ours(self, index: int) -> StreamId:
        if index >= self._opened:
            raise RemoteProtocolError(f"stream {index} of ours, {self._opened} were opened")
        return index << 2 | 2 | self.engine.role

    def _theirs(self, index: int) -> StreamId:
        """A stream that the peer has opened, and not ended."""
        stream = index << 2 | 2 | self.engine.role.peer
        if index >= self._arrived:
            raise RemoteProtocolError(f"stream {index} of the peer, {self._arrived} were opened")
        arriving = self._arriving.get(stream)
        if arriving is None or arriving.over:
            raise RemoteProtocolError(f"stream {index} has ended")
        return stream

    def _begin_chunk(self, index: int, size: int, *, last: bool) -> None:
        if not size and not last:
            raise RemoteProtocolError(f"an empty chunk on stream {index}")
        if index == self._arrived:
            if self._arrived >= self._told:
                raise RemoteProtocolError(
                    f"stream {index} opened, {self._told} are allowed; raise Config(streams=…) if this peer is right"
                )
            window = ReceiveWindow(self.engine.limits.channel_bytes, self._budget)
            window.start(self._now, FIRST_CREDIT)
            stream = index << 2 | 2 | self.engine.role.peer
            arriving = _Arriving(window)
        else:
            stream = self._theirs(index)
            arriving = self._arriving[stream]
        arriving.window.arrived(size)
        if index == self._arrived:
            self._arriving[stream] = arriving
            self._arrived += 1
        self._into, self._left, self._is_last = stream, size, last
        if not size:
            self._is_over(stream)
            self.engine.receive_stream(stream, b"", True, self._now)

    def _take_chunk(self, cursor: Cursor) -> None:
        most = self._left
        if self.frames_at_once < sys.maxsize:
            most = min(most, max(SLICE, self.engine.missing(self._into)))
        data = cursor.exact(min(most, cursor.remaining))
        self._left -= len(data)
        fin = self._is_last and not self._left
        if fin:
            self._is_over(self._into)
        self.engine.receive_stream(self._into, data, fin, self._now)

    def _is_over(self, stream: StreamId) -> None:
        """Nothing more will come of it; what came counts until it is consumed."""
        arriving = self._arriving[stream]
        arriving.over = True
        arriving.window.retire()
        self._grants.pop(stream, None)
        self._stops.pop(stream, None)
        self._release(stream, arriving)


def _frame(tag: int, *numbers: int) -> bytes:
    return bytes([tag]) + b"".join(map(encode_varint, numbers))
