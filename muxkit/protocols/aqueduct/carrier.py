"""The carrier, which runs Aqueduct over one byte stream.

Aqueduct is designed for QUIC. Over a byte stream, such as TCP, the carrier does what QUIC would do: it multiplexes
numbered streams and datagrams, limits the number of streams, grants credit for each stream, and transmits resets and
the reason for the end of the connection. A `Carrier` is a `StreamEngine` that contains an Aqueduct `Engine`.
docs/reference/aqueduct-carrier.md describes the framing.

The sizes of the streams' windows depend on the round-trip time (`muxkit.core.receive_windows`), but the framing has no
pings. We measure the round-trip time with grants instead. When a peer that has used up its credit gets a grant, it can
send again, and its next bytes arrive one round trip later. A new stream with more than `FIRST_CREDIT` bytes gives such
a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from muxkit._errors import RemoteProtocolError
from muxkit.core import (
    U64_MAX,
    Buffer,
    Consumed,
    Credit,
    Cursor,
    Lent,
    NeedMore,
    Reason,
    ReceiveBudget,
    ReceiveWindow,
    Reset,
    Stop,
    StreamId,
    encode_varint,
)
from muxkit.protocols.aqueduct.engine import Engine
from muxkit.protocols.aqueduct.events import Event

HELLO: Final = b"AQUEDUX1"
DATA: Final = 0
LAST: Final = 1
RESET: Final = 2
STOP: Final = 3
CREDIT: Final = 4
STREAMS: Final = 5
DATAGRAM: Final = 6
GOODBYE: Final = 7
EARLY: Final = 8
EARLY_DATA: Final = 9
EARLY_LAST: Final = 10
CHUNKS: Final = frozenset({DATA, LAST, EARLY_DATA, EARLY_LAST})
TAG_DATA, TAG_LAST, TAG_EARLY_DATA, TAG_EARLY_LAST = (bytes([tag]) for tag in (DATA, LAST, EARLY_DATA, EARLY_LAST))

FIRST_CREDIT: Final = 4096  # bytes that may be sent on each stream before any CREDIT
EARLY_SHARE: Final = 64  # of `Limits.connection_bytes`, one part may be sent early, on all streams together
FIRST_STREAMS: Final = 16  # streams that may be opened before any STREAMS
LARGEST_DATAGRAM: Final = 65_536  # bytes
LARGEST_GOODBYE: Final = 4096  # bytes
# Bytes of one stream at a time. A message of 64 KiB fits into one chunk, with its head.
LARGEST_CHUNK: Final = 64 * 1024 + 64
PIECES_A_FRAME: Final = 4  # carrier frames that may come with each frame of the engine
MOST_STREAMS: Final = 2**60


@attrs.define
class _IncomingStream:
    """A stream that the peer writes."""

    window: ReceiveWindow
    over: bool = False  # its last byte has come
    granted_at: float | None = None  # when the peer got credit after it had used up all; None once it has sent more

    def early_bytes(self) -> int:
        """Return how many bytes are here beyond the credit of the stream, which nothing else grants by hand."""
        return self.window.by_hand


@attrs.define
class _OutgoingStream:
    """A stream that we write."""

    credit: Credit
    index: bytes
    """The encoded index, with which chunks of the stream begin after their tag."""


class Carrier:
    """One end of a connection over a byte stream; a `StreamEngine` around a `MultistreamEngine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._state = engine.state
        self._reader = engine.reader
        engine.keeps_order()
        self.frames_at_once: int = sys.maxsize
        self.offset: int = 0  # bytes received and understood
        limits = engine.limits
        # Bytes that the peer may send on new streams before they were granted any, so that a message which is larger
        # than FIRST_CREDIT needs no round trip of its own. They are a part of `connection_bytes`.
        share = limits.connection_bytes // EARLY_SHARE
        self._early_most = min(limits.channel_first, share) if share > FIRST_CREDIT else 0
        self._early_granted = 0  # what the peer may still send early
        self._early_due = self._early_most  # what it is to be told
        self._early = 0  # what we may still send early
        self._ungranted: set[StreamId] = set()  # our streams that got no CREDIT, which may use it
        self._budget = ReceiveBudget(
            limits.connection_bytes - self._early_most, limits.channel_floor, limits.channel_first
        )
        self._now = 0.0
        # Our streams
        self._hello_sent = False
        self._opened = 0
        self._may_open = FIRST_STREAMS  # in all
        self._outgoing: dict[StreamId, _OutgoingStream] = {}
        # Control frames to write
        self._grants: dict[StreamId, int] = {}
        self._resets: dict[StreamId, None] = {}
        self._stops: dict[StreamId, None] = {}
        # The peer's streams
        self._hello_received = False
        self._incoming: dict[StreamId, _IncomingStream] = {}
        self._peer_opened = 0
        self._peer_done = 0  # over and consumed
        self._peer_may_open = FIRST_STREAMS  # in all, as it was told
        self._most = max(FIRST_STREAMS, engine.most_streams)
        self._worth_renewing = max(1, self._most // 4)  # fewer streams aren't worth a STREAMS frame
        self._our_bits: int = 2 | engine.role
        self._their_bits: int = 2 | engine.role.peer
        self._held = b""  # received and not parsed, from `_held_from` on
        self._held_from = 0
        self._is_bounded = False  # parsing stopped because of `frames_at_once`
        self._chunk_left = 0  # bytes of the chunk that is being received
        self._chunk_stream: StreamId = 0
        self._chunk_is_last = False

    # --- the stream

    @property
    def unparsed(self) -> int:
        """Bytes that were kept because of `frames_at_once`; they may hold more frames."""
        return len(self._held) - self._held_from if self._is_bounded else 0

    def events(self) -> Sequence[Event]:
        """Take the events that commands and writing have caused, oldest first."""
        return self.engine.events() if self._state.events else ()

    def receive_bytes(self, data: bytes, now: float) -> Sequence[Event]:
        """Parse and apply received bytes, and return what happened; never raises."""
        if self.engine.observer is not None and data:
            self.engine.observer.transport("in", data)
        state = self._state
        if state.over:
            return ()
        self._now = state.now = now
        start = 0
        if self._held:
            if data:
                data = self._held[self._held_from :] + data
            else:  # keep the position: each step of a turn would copy the rest otherwise
                data, start = self._held, self._held_from
        cursor = Cursor(data, start)
        self._is_bounded = False
        reader, end, first = self._reader, len(data), start
        frames_most, pieces = reader.frames + self.frames_at_once, PIECES_A_FRAME * self.frames_at_once
        try:
            while cursor.position < end and not state.over:
                if reader.frames >= frames_most or not pieces:
                    self._is_bounded = True
                    break
                start = cursor.position
                if not self._chunk_left:
                    self._take_frame(cursor)
                if self._chunk_left:
                    self._take_chunk(cursor, end, frames_most)
                pieces -= 1
        except NeedMore:
            cursor.position = start
        except RemoteProtocolError as error:
            error.offset = self.offset + start - first
            self.engine.fail(error)
        self.offset += cursor.position - first
        self.engine.bytes_received = reader.bytes_received
        if cursor.position < end:
            self._held, self._held_from = data, cursor.position
        else:
            self._held, self._held_from = b"", 0
        return self.engine.events()

    def receive_eof(self, now: float) -> Sequence[Event]:
        """The peer ended its direction of the byte stream, and with it the connection."""
        return self.engine.receive_closed(now, clean=not self._held and not self._chunk_left)

    def next_deadline(self) -> float | None:
        """Return when to call `handle_deadline`."""
        return None if self._state.over else self._state.deadlines.next

    def handle_deadline(self, now: float) -> Sequence[Event]:
        """Act on the timers that are due, and return what happened."""
        self._now = now
        return self.engine.handle_deadline(now)

    def has_output(self) -> bool:
        state = self._state
        if state.over:
            return False
        has_bytes = state.streams.has_output(self._opened < self._may_open) or bool(state.datagram_senders)
        return has_bytes or self._owes_control()

    def buffers_to_send(self, limit: int) -> list[Buffer]:
        """Return control frames first, then datagrams up to half of the limit, then the streams in turn."""
        out: list[Buffer] = []
        state, size = self._state, 0
        if state.over:
            return out
        if self._reader.has_first_grant:
            self._run_control()
        if self._owes_control():
            for frame in self._control():
                out.append(frame)
                size += len(frame)
                if size >= limit:
                    return out
        half = size + max(1, (limit - size) // 2)
        while state.datagram_senders and size < half:
            datagram = self.engine.datagram_to_send(self.engine.config.datagram)
            if datagram is None:
                break
            out += [_frame(DATAGRAM, len(datagram)), datagram]
            size += len(datagram) + 4
        while size < limit and (stream := state.streams.next(self._opened < self._may_open)) is not None:
            size += self._write(stream, min(LARGEST_CHUNK, limit - size), out)
        return out

    def farewell(self, reason: Reason) -> bytes:
        """Return the last bytes to write on a connection that ends early, which say why."""
        told = reason.encode()
        goodbye = _frame(GOODBYE, len(told)) + told
        return goodbye if self._hello_sent else HELLO + goodbye

    # --- writing

    def _write(self, stream: StreamId, room: int, out: list[Buffer]) -> int:
        outgoing = self._outgoing.get(stream)
        if outgoing is None:
            outgoing = self._outgoing[stream] = _OutgoingStream(Credit(FIRST_CREDIT), encode_varint(stream >> 2))
            self._ungranted.add(stream)
            self._opened += 1
        credit, index = outgoing.credit, outgoing.index
        early = self._early if stream in self._ungranted else 0
        buffers, size, last = self._state.streams.pull(stream, min(room, credit.available + early))
        if not size and not last:
            return 0
        spent = min(size, credit.available)
        credit.spend(spent)
        self._early -= size - spent
        if last:
            self._forget(stream)
        elif size - spent == early and not credit.available:
            self._state.streams.pull(stream, 0)  # parked until CREDIT comes
        if spent == size:
            return _write_chunk(TAG_LAST if last else TAG_DATA, index, buffers, size, out)
        data = b"".join(buffers)
        written = _write_chunk(TAG_DATA, index, [data[:spent]], spent, out) if spent else 0
        tag = TAG_EARLY_LAST if last else TAG_EARLY_DATA
        return written + _write_chunk(tag, index, [data[spent:]], size - spent, out)

    def _control(self) -> Iterator[bytes]:
        if not self._hello_sent:
            self._hello_sent = True
            yield HELLO
        renewable = self._peer_done + self._most - self._peer_may_open
        if renewable >= self._worth_renewing:
            self._peer_may_open += renewable
            yield _frame(STREAMS, renewable)
        if 2 * self._early_due >= self._early_most > 0:
            due, self._early_due = self._early_due, 0
            self._early_granted += due
            yield _frame(EARLY, due)
        for tag, owed in ((RESET, self._resets), (STOP, self._stops)):
            while owed:
                stream, _ = owed.popitem()
                yield _frame(tag, stream >> 2)
        while self._grants:
            stream, amount = self._grants.popitem()
            yield _frame(CREDIT, stream >> 2, amount)

    def _owes_control(self) -> bool:
        """Do what the engine asks of its link, and return True if there are control frames to write."""
        if self._reader.has_control or self._state.streams.resets:
            self._run_control()
        return (
            bool(self._grants or self._resets or self._stops)
            or not self._hello_sent
            or self._peer_done + self._most - self._peer_may_open >= self._worth_renewing
            or 2 * self._early_due >= self._early_most > 0
        )

    def _forget(self, stream: StreamId) -> _OutgoingStream | None:
        self._ungranted.discard(stream)
        return self._outgoing.pop(stream, None)

    def _run_control(self) -> None:
        for control in self.engine.control_to_run():
            match control:
                case Reset(stream):
                    # A stream that was written to its end cannot be taken back on an ordered link.
                    if self._forget(stream) is not None:
                        self._resets[stream] = None
                case Stop(stream):
                    incoming = self._incoming.get(stream)
                    if incoming is not None and not incoming.over:
                        self._stops[stream] = None
                case Lent(stream, amount):
                    incoming = self._incoming.get(stream)
                    if incoming is not None and not incoming.over:
                        self._lend(stream, incoming, amount)
                case Consumed(stream, amount):
                    incoming = self._incoming.get(stream)
                    if incoming is not None:
                        early = incoming.early_bytes()
                        grant, _ = incoming.window.consumed(amount, self._update_time())
                        self._early_due += early - incoming.early_bytes()
                        self._grant(stream, incoming, grant)
                        self._release(stream, incoming)

    def _lend(self, stream: StreamId, incoming: _IncomingStream, amount: int) -> None:
        """Lend what the frame lacks beyond the credit that is out, at most `amount`.

        A loan that was not needed would be repaid with bytes that should have renewed the window, and the window would
        never be used up and never grow.
        """
        coming = self._chunk_left if stream == self._chunk_stream else 0
        lacking = min(amount, self.engine.missing(stream) - coming - incoming.window.credit)
        if lacking > 0:
            incoming.window.lend(lacking)
            self._grant(stream, incoming, lacking)

    def _grant(self, stream: StreamId, incoming: _IncomingStream, amount: int) -> None:
        if amount:
            self._grants[stream] = self._grants.get(stream, 0) + amount
            if incoming.window.credit == amount:
                incoming.granted_at = self._update_time()

    def _update_time(self) -> float:
        """Return the time; a command may follow a long silence."""
        self._state.update_time()
        self._now = max(self._now, self._state.now)
        return self._now

    def _release(self, stream: StreamId, incoming: _IncomingStream) -> None:
        if incoming.over and not incoming.window.held:
            del self._incoming[stream]
            self._peer_done += 1

    # --- reading

    def _take_chunk(self, cursor: Cursor, end: int, frames_most: int) -> None:
        """Pass the bytes of the chunk that have arrived to the engine, which stops at `frames_most` frames."""
        start = cursor.position
        stop = min(end, start + self._chunk_left)
        is_last = self._chunk_is_last and stop - start == self._chunk_left
        stream = self._chunk_stream
        try:
            stopped = self._reader.receive_stream(
                stream, cursor.data, start, stop, fin=is_last, frames_most=frames_most
            )
        except RemoteProtocolError as error:
            self._state.fail_at(f"stream {stream}", error)
            return
        cursor.position = stopped
        self._chunk_left -= stopped - start
        if is_last and not self._chunk_left:
            self._end_stream(stream)

    def _take_frame(self, cursor: Cursor) -> None:
        """Parse one frame, or the head of a chunk."""
        engine = self.engine
        if not self._hello_received:
            hello = cursor.data[cursor.position : cursor.position + len(HELLO)]
            if not HELLO.startswith(hello):  # checked early: a peer of another protocol may send fewer bytes
                raise RemoteProtocolError(f"the stream begins with {hello!r}, not with {HELLO!r}")
            cursor.exact(len(HELLO))
            self._hello_received = True
            return
        tag = cursor.data[cursor.position]
        cursor.position += 1
        if tag in CHUNKS:
            index, size = cursor.varint(), cursor.varint()
            self._begin_chunk(index, size, last=tag in (LAST, EARLY_LAST), is_early=tag in (EARLY_DATA, EARLY_LAST))
        elif tag == DATAGRAM:
            size = cursor.varint()
            if size > LARGEST_DATAGRAM:
                raise RemoteProtocolError(f"a datagram of {size} bytes against {LARGEST_DATAGRAM}")
            engine.take_datagram(cursor.exact(size))
        elif tag == GOODBYE:
            size = cursor.varint()
            if size > LARGEST_GOODBYE:
                raise RemoteProtocolError(f"a goodbye of {size} bytes against {LARGEST_GOODBYE}")
            engine.take_reason(Reason.decode(bytes(cursor.exact(size))))
        elif tag == RESET:
            stream = self._theirs(cursor.varint())
            self._end_stream(stream)
            engine.take_reset(stream)
        elif tag == STOP:
            engine.take_stopped(self._ours(cursor.varint()))
        elif tag == STREAMS:
            more = cursor.varint()
            if self._may_open + more > MOST_STREAMS:
                raise RemoteProtocolError(f"{more} streams on top of {self._may_open}, more than {MOST_STREAMS}")
            self._may_open += more
        elif tag == CREDIT:
            stream, amount = self._ours(cursor.varint()), cursor.varint()
            outgoing = self._outgoing.get(stream)
            if outgoing is not None:
                self._ungranted.discard(stream)
                outgoing.credit.grant(amount)
                engine.stream_writable(stream)
        elif tag == EARLY:
            more = cursor.varint()
            if self._early + more > U64_MAX:
                raise RemoteProtocolError(f"{more} early bytes on top of {self._early}, more than {U64_MAX}")
            self._early += more
        else:
            raise RemoteProtocolError(f"no frame of the carrier begins with {tag:#04x}")

    def _ours(self, index: int) -> StreamId:
        if index >= self._opened:
            raise RemoteProtocolError(f"stream {index} of ours, {self._opened} were opened")
        return index << 2 | self._our_bits

    def _theirs(self, index: int) -> StreamId:
        """Return the id of a stream that the peer has opened and not ended."""
        stream = index << 2 | self._their_bits
        if index >= self._peer_opened:
            raise RemoteProtocolError(f"stream {index} of the peer, {self._peer_opened} were opened")
        incoming = self._incoming.get(stream)
        if incoming is None or incoming.over:
            raise RemoteProtocolError(f"stream {index} has ended")
        return stream

    def _begin_chunk(self, index: int, size: int, *, last: bool, is_early: bool) -> None:
        if not size and (is_early or not last):
            raise RemoteProtocolError(f"an empty chunk on stream {index}")
        if index == self._peer_opened:
            if self._peer_opened >= self._peer_may_open:
                raise RemoteProtocolError(
                    f"stream {index} opened, {self._peer_may_open} are allowed; "
                    "raise Config(streams=…) if this peer is right"
                )
            window = ReceiveWindow(self.engine.limits.channel_bytes, self._budget)
            window.start(self._now, FIRST_CREDIT)
            self._incoming[index << 2 | self._their_bits] = _IncomingStream(window)
            self._peer_opened += 1
        stream = self._theirs(index)
        incoming = self._incoming[stream]
        if is_early:
            if size > self._early_granted:
                raise RemoteProtocolError(f"{size} bytes sent early against {self._early_granted}")
            self._early_granted -= size
            incoming.window.grant(size)
        elif incoming.granted_at is not None:
            self._budget.round_trip.measured(self._now - incoming.granted_at)
            incoming.granted_at = None
        incoming.window.arrived(size)
        self._chunk_stream, self._chunk_left, self._chunk_is_last = stream, size, last
        if not size:
            self._end_stream(stream)
            self.engine.take_stream(stream, b"", fin=True)

    def _end_stream(self, stream: StreamId) -> None:
        """End a stream; what came of it counts until it is consumed."""
        incoming = self._incoming[stream]
        incoming.over = True
        early = incoming.early_bytes()
        incoming.window.retire()
        self._early_due += early - incoming.early_bytes()
        self._grants.pop(stream, None)
        self._stops.pop(stream, None)
        self._release(stream, incoming)


def _write_chunk(tag: bytes, index: bytes, buffers: list[Buffer], size: int, out: list[Buffer]) -> int:
    """Append the frame of a chunk to `out`, and return its size."""
    head = tag + index + encode_varint(size)
    out.append(head)
    out += buffers
    return len(head) + size


def _frame(tag: int, *numbers: int) -> bytes:
    return bytes([tag]) + b"".join(map(encode_varint, numbers))
