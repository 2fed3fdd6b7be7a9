"""Parses the streams and datagrams of the peer.

The bytes of a stream may arrive in any pieces. An `IncomingStream` parses the complete frames, and keeps the bytes of
the last, incomplete frame. A frame may have to wait: until the peer's connection headers have arrived, or until the
application has read other messages (see the module `unread`). The stream is then *held back*, and `resume` continues
with that frame.

A frame that is larger than the window of its stream needs more credit than the window grants. The stream borrows the
missing credit from `Reassembly`. It always borrows as much as the whole frame may need. Otherwise, two frames could
each have half of the credit, and wait for each other forever. The loan is repaid when the application has consumed the
message.

A datagram contains complete frames. Its messages are numbered separately from those in streams.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Consumed, Cursor, Lent, NeedMore, Pieces, Reassembly, StallWatch, Stop, StreamControl, StreamId
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.half import EngineHalf
from muxkit.protocols.aqueduct.handshake import Handshake
from muxkit.protocols.aqueduct.receive import DATAGRAM_COST, EngineReceiver
from muxkit.protocols.aqueduct.rules import Rules
from muxkit.protocols.aqueduct.send import EngineSender, SingleMessage
from muxkit.protocols.aqueduct.state import State, Timer

NOTHING: Final = Pieces()  # a shared placeholder, which must stay empty
HEAD_MOST: Final = 64  # maximum size of the tag, the number and the lengths in a message frame
SLICE: Final = (
    1024  # bytes that are appended to a frame whose total size isn't known yet, in addition to those it needs
)


class Phase(Enum):
    """The position of a sequence of frames in the pattern of section 2.1."""

    START = "start"
    CONNECTION = "connection"
    """VERSION, ACK_VERSION and CONNECTION_HEADERS."""
    ROUTED = "routed"
    """After ROUTE_TO."""
    IGNORED = "ignored"


class IncomingStream:
    """One stream that the peer writes: the bytes of its unfinished frame, and the credit lent for the rest.

    `unconsumed` counts the bytes for which the link may not renew credit yet.
    """

    def __init__(self, id: StreamId, reader: Reader) -> None:
        self.id = id
        self.channel: int = 0
        self.half: EngineHalf | None = None  # our half of the channel, once a frame has needed it
        self.last_word: type[object] | None = None  # FINISH_SENDER or CANCEL_SENDER, once it came in this stream
        self.phase: Phase = Phase.START
        self.frames: int = 0  # of channels
        self.needs_loan: bool = False  # the unfinished frame may not fit the window, so it may have a loan
        self.fin: bool = False
        self.is_consumed: bool = False  # a part of it was consumed
        self.unconsumed: int = 0
        self.offset: int = 0  # bytes parsed
        self._partial = Pieces()  # of the unfinished frame
        self._wanted = 0  # size of the held bytes from which parsing can go on
        # While held back: bytes with the position at which parsing goes on, and the bytes that came after them.
        self._held_back: tuple[bytes, int] | None = None
        self._later = NOTHING
        self._missing = 0
        self._whole = True
        self._borrows_later = False  # it will borrow when less is unread in this stream
        self._reserved = 0  # borrowed from the budget for the held frame
        self._lent = 0  # of this the peer was told
        self._lent_at = 0
        self._reader = reader

    @property
    def is_held_back(self) -> bool:
        """True if the stream waits for the connection headers, or for messages to be read."""
        return self._held_back is not None

    @property
    def is_unfinished(self) -> bool:
        """True if bytes wait in the stream: those of an unfinished frame, or those that are held back."""
        return self._partial.size > 0 or self._held_back is not None

    @property
    def missing(self) -> int:
        """Bytes until parsing can go on, if a frame has begun; 0 otherwise."""
        return max(0, self._wanted - self._partial.size) if self._partial.size else 0

    @property
    def waits_for_peer(self) -> bool:
        """True if a frame is unfinished and the peer has the credit to go on with it."""
        if not self._partial.size or self._held_back is not None or self.fin:
            return False
        is_small = self._wanted <= self._reader.state.largest_unlent and self.unconsumed == self._partial.size
        return is_small or self._reserved > 0

    def receive(self, data: bytes, start: int, end: int, frames_most: int) -> int:
        """Parse the bytes from `start` to `end`, by whose number `unconsumed` was raised.

        Returns:
            The position at which parsing stopped, which is before `end` if the reader has parsed `frames_most` frames.
        """
        while start < end and self._partial.size:  # complete the unfinished frame, and copy little more than that
            stop = min(end, start + self._wanted - self._partial.size + (0 if self._whole else SLICE))
            self._partial.append(data[start:stop])
            start = stop
            if self._partial.size < self._wanted:
                return end
            joined = self._partial.join()
            self._parse(joined, 0, len(joined), sys.maxsize)
        if start == end:
            return end
        if self.phase is Phase.IGNORED:
            self.consume(end - start)
            return end
        if self._held_back is not None:
            if self._later is NOTHING:
                self._later = Pieces()
            self._later.append(data[start:end])
            return end
        return self._parse(data, start, end, frames_most)

    def resume(self) -> None:
        """Go on with the bytes that were held back. It takes time for those that it parses, however many there are."""
        if self._held_back is not None:
            (data, position), self._held_back = self._held_back, None
            self._parse(data, position, len(data), sys.maxsize)
            if not self.is_held_back and self._later.size:
                pieces, self._later = self._later, NOTHING
                later = pieces.join()
                self.receive(later, 0, len(later), sys.maxsize)
            if self.fin:
                self.check_end()
        self._reader.release(self)

    def check_end(self) -> None:
        """Raise `RemoteProtocolError` if the stream ends inside a frame."""
        if self.is_held_back or self.phase is Phase.IGNORED:
            return
        if self._partial.size:
            error = RemoteProtocolError(
                f"the stream ends {self._partial.size} bytes into a frame that needs {self._missing} more at least",
                rule="aqueduct-F09",
            )
            error.offset = self.offset
            raise error
        if self.frames == 0 and self.phase in (Phase.START, Phase.ROUTED):
            self._reader.state.check_empty_stream()

    def reset(self) -> None:
        """End the stream, because the peer reset it, and drop its unfinished frame."""
        if self.frames == 0:
            self._reader.state.count_reset()
        self.ignore()
        self.fin = True

    def ignore(self) -> None:
        """Drop the bytes that are held, and all that follow."""
        self.phase = Phase.IGNORED
        self._wanted = 0
        held = self._partial.size + self._later.size
        if self._held_back is not None:
            data, position = self._held_back
            held += len(data) - position
        self._partial, self._later, self._held_back = Pieces(), NOTHING, None
        if self.needs_loan:
            self._reader.repay(self._keep_loan())
        self.consume(held)

    def consume(self, amount: int) -> None:
        """Let the link renew credit for these bytes."""
        if amount:
            self.unconsumed -= amount
            if self._borrows_later:
                self._borrow()
            self._reader.count_consumed(self.id, amount)
            if not self.is_consumed:
                self.is_consumed = self._reader.has_first_grant = True

    def message_consumed(self, cost: int, loan: int) -> bool:
        """The application has taken a message that came in this stream. Return True if the link has something to do."""
        self.consume(cost)
        if loan:
            self._reader.repay(loan)
        if self.fin:
            self._reader.release(self)
        return self._reader.has_control

    # --- frames

    def _parse(self, data: bytes, position: int, end: int, frames_most: int) -> int:
        reader = self._reader
        while position < end:
            # After the last word of a channel only a violation or FORGET_CHANNEL can come.
            if self.phase is Phase.IGNORED or (self.half is not None and self.half.gone and self.last_word is None):
                self.ignore()
                self.consume(end - position)
                return end
            if reader.frames >= frames_most:
                return position
            if type(self.half) is EngineReceiver and not self.needs_loan:
                before = self.frames
                most = frames_most - reader.frames
                after = reader.rules.take_plain_messages(self.half, self, data, position, end, most)
                reader.frames += self.frames - before
                self.offset += after - position
                if after > position:
                    position = after
                    continue
            if self.phase is not Phase.ROUTED and self._must_wait(data[position]):
                self._hold_back(data, position, end)
                return end
            cursor = Cursor(data, position, end)
            try:
                frame = frames.parse_frame(cursor, reader.bounds)
                half = self.half if isinstance(frame, frames.MessageFrame) and self.last_word is None else None
                if half is not None and frames.brings_reason(frame):
                    half = None  # it is not kept, and a cancellation follows
                if type(half) is EngineReceiver and not reader.state.unread_limit.room(half):
                    reader.state.unread_limit.hold_back(half, self)
                    self._hold_back(data, position, end)
                    return end
                length = cursor.position - position
                loan = self._keep_loan() if self.needs_loan else 0
                reader.frames += 1
                if isinstance(frame, frames.MessageFrame) and self.phase is Phase.ROUTED:
                    self.frames += 1
                    is_delivered = reader.rules.take_message(frame, self, length, loan)
                else:
                    is_delivered = False
                    self._apply(frame)
            except NeedMore as need:
                self._partial.append(data[position:end])
                self._want(need)
                return end
            except RemoteProtocolError as error:
                if error.offset is None:
                    error.offset = self.offset
                raise
            if not is_delivered:  # else the application consumes it
                self.consume(length)
                if loan:
                    reader.repay(loan)
            self.offset += length
            position = cursor.position
        return end

    def _hold_back(self, data: bytes, position: int, end: int) -> None:
        """Keep the bytes from `position` to `end` until `resume`.

        They are only copied if that frees at least half of `data`. So the bytes that wait are copied a few times in
        all, however often parsing stops again, and `data` doesn't keep much more memory than the peer has credit for.
        """
        if end == len(data) and 2 * position <= end:
            self._held_back = data, position
        else:
            self._held_back = data[position:end], 0

    def _must_wait(self, tag: int) -> bool:
        """Return True for a frame that has to wait until the peer's connection headers have come (H04)."""
        handshake = self._reader.handshake
        if self.phase is Phase.START and tag != frames.TAG_VERSION and not handshake.sent_ack_version:
            raise RemoteProtocolError(
                f"a sequence begins with {tag:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        return tag not in frames.CONNECTION_TAGS and not handshake.is_connected

    def _apply(self, frame: object) -> None:
        """Apply a frame that is not a message of the channel."""
        reader = self._reader
        if self.phase is Phase.ROUTED:
            self.frames += 1
            reader.rules.take_frame(frame, self)
            if isinstance(frame, frames.ForgetChannel):
                self.ignore()
            return
        reader.rules.check_unrouted(frame)
        if not isinstance(frame, frames.RouteTo):
            self.phase = Phase.CONNECTION
            reader.handshake.apply(frame, on_stream=True)
            return
        self.channel = frame.channel
        is_heard, self.half = reader.rules.route(self.channel)
        if is_heard:
            self.phase = Phase.ROUTED
            return
        self.ignore()
        if not self.fin:
            reader.stops[self.id] = Stop(self.id)
            reader.has_control = True

    # --- loans

    def _want(self, need: NeedMore) -> None:
        """Note how much of the frame is missing, and borrow credit for it if it may not fit the window."""
        self._missing = need.missing
        self._wanted = self._partial.size + need.missing
        self._whole = not isinstance(need, frames.Unfinished) or need.whole
        if self._wanted <= self._reader.state.largest_unlent:
            return
        self.needs_loan = True
        if self._reserved:
            if self._whole:
                self._trim(self._lent + self._shortfall())
            self._lend()
        elif self._reader.reassembly.waits(self):
            self._reader.serve_loans()
        else:
            self._borrow()

    def _borrow(self) -> None:
        """Borrow for the frame, unless too much is unread: an unread stream must not grow loan by loan."""
        self._borrows_later = self.unconsumed - self._partial.size >= self._reader.most_unread_to_lend
        if not self._borrows_later and self._reader.reassembly.borrow(self, self.loan_size()):
            self.borrowed(self.loan_size())

    def loan_size(self) -> int:
        """Return how much the frame may still need. A message with an incomplete head may be of any legal size."""
        rest = self._missing if self._whole else self._reader.largest_frame - self._partial.size
        return min(max(rest, self._missing), self._reader.reassembly.total)

    def borrowed(self, amount: int) -> None:
        """The loan was granted."""
        self._reserved, self._lent, self._lent_at = amount, 0, self._partial.size
        self._lend()

    def _shortfall(self) -> int:
        """Return how much the frame needs beyond the credit that was lent, as far as is known."""
        return max(0, self._partial.size + self._missing - self._lent_at - self._lent)

    def _lend(self) -> None:
        amount = min(self._shortfall(), self._reserved - self._lent)
        if amount > 0:
            self._lent += amount
            self._reader.lent.append(Lent(self.id, amount))
            self._reader.has_control = True

    def _trim(self, needed: int) -> None:
        """Give back what is reserved beyond `needed`."""
        if needed < self._reserved:
            surplus, self._reserved = self._reserved - needed, needed
            self._reader.repay(surplus)

    def _keep_loan(self) -> int:
        """End borrowing for the frame; return the amount to be repaid when it is consumed."""
        self.needs_loan = False
        if self._reader.reassembly.waits(self):
            self._reader.reassembly.leave(self)
            self._reader.serve_loans()
        self._borrows_later = False
        self._trim(self._lent)
        loan, self._reserved, self._lent = self._reserved, 0, 0
        return loan


class Reader:
    """Parses the streams and datagrams of the peer."""

    def __init__(self, state: State, handshake: Handshake, most_streams: int) -> None:
        config, limits = state.config, state.limits
        self.state: Final = state
        self.handshake: Final = handshake
        self.rules: Final = Rules(state)
        self.bounds: frames.Bounds = frames.Bounds(
            message=limits.message,
            connection_headers=config.connection_headers,
            headers=config.headers,
            header_pairs=config.header_pairs,
            attachments=config.attachments,
            ranges=config.gaps,
            channel_field=config.channel_field,
        )
        self.frames: int = 0
        self.bytes_received: int = 0  # of streams and datagrams
        # Streams
        self.reassembly: Reassembly[IncomingStream] = Reassembly(limits.reassembly)
        self.most_unread_to_lend: int = max(1, limits.short_window // 2)  # unread bytes of the same stream
        self.largest_frame: int = limits.message + HEAD_MOST
        self._most = most_streams
        self._early_stream_bytes = 0  # in streams that wait for the connection headers
        self._has_resumed = False
        self._stall = StallWatch(state.deadlines, Timer.STALL, seconds=limits.stall, least=limits.stall_bytes)
        # For the link
        self.has_control: bool = False
        """True if the link has to do something about these streams. A few consumed bytes alone aren't worth it."""
        self.has_first_grant: bool = False
        """True if bytes of a new stream were consumed, so that the next write may grant the whole window."""
        self.consumed: dict[StreamId, int] = {}
        self._consumed_bytes = 0
        self.lent: list[Lent] = []
        self.stops: dict[StreamId, Stop] = {}
        # Datagrams
        self._early: list[bytes] = []
        self.early_bytes: int = 0
        """What datagrams that wait for the connection headers cost."""

    # --- streams

    def receive_stream(
        self, stream: StreamId, data: bytes, start: int, end: int, *, fin: bool, frames_most: int = sys.maxsize
    ) -> int:
        """Take in the bytes of a stream from `start` to `end`.

        Returns:
            The position at which parsing stopped, because `frames` has reached `frames_most`. The caller passes the
            bytes from there on again. Otherwise it is `end`.
        """
        incoming = self.state.incoming.get(stream) or self._open(stream)
        if incoming.fin:
            return end  # a link should bring nothing after the end
        incoming.unconsumed += end - start
        incoming.fin = fin
        stopped = incoming.receive(data, start, end, frames_most) if start < end else end
        self.bytes_received += stopped - start
        if stopped < end:
            incoming.unconsumed -= end - stopped
            incoming.fin = fin = False
        if incoming.is_unfinished:
            if incoming.waits_for_peer:
                self._watch_for_stall()
            if incoming.is_held_back and not self.handshake.is_connected:
                self._count_early(stopped - start)
        if fin:
            if not incoming.is_held_back:
                incoming.check_end()
            self.release(incoming)
        if not self._has_resumed and self.handshake.is_connected:
            self._has_resumed = True
            self._resume_early()
        return stopped

    def missing(self, stream: StreamId) -> int:
        """Return how many bytes are missing until the frame that has begun may end; fewer are only collected."""
        incoming = self.state.incoming.get(stream)
        return incoming.missing if incoming is not None else 0

    def reset(self, stream: StreamId) -> None:
        """The peer reset a stream that it wrote."""
        incoming = self.state.incoming.get(stream)
        if incoming is not None and not incoming.fin:
            incoming.reset()
            self.release(incoming)

    def stopped(self, stream: StreamId) -> None:
        """Reset a stream of ours that the peer has stopped, and end the sender that depends on it."""
        state = self.state
        out = state.streams.streams.get(stream)
        if out is None:
            return
        state.count_reset()
        source = out.source
        state.streams.drop(out)
        if isinstance(source, SingleMessage):
            source = source.sender
        if type(source) is EngineSender:
            state.sender_stopped(source)

    def release(self, incoming: IncomingStream) -> None:
        """Remove a stream if it has ended and is consumed."""
        if incoming.fin and incoming.unconsumed == 0:
            self.state.incoming.pop(incoming.id, None)
            self.has_control = self.has_control or incoming.id in self.consumed

    def count_consumed(self, stream: StreamId, amount: int) -> None:
        """Let the link renew credit for these bytes of a stream, when they are enough for a grant."""
        self.consumed[stream] = self.consumed.get(stream, 0) + amount
        self._consumed_bytes += amount
        if self._consumed_bytes >= self.state.worth_a_grant:
            self.has_control = True

    def take_control(self) -> list[StreamControl]:
        """Return what the link has to do about these streams: stop, renew credit, lend what is lacking then."""
        control: list[StreamControl] = [*self.stops.values()]
        control += [Consumed(stream, amount) for stream, amount in self.consumed.items()]
        control += self.lent
        self.stops.clear()
        self.lent.clear()
        self.consumed.clear()
        self._consumed_bytes = 0
        self.has_control = self.has_first_grant = False
        return control

    def _open(self, stream: StreamId) -> IncomingStream:
        streams = self.state.incoming
        if len(streams) >= self._most:
            raise RemoteProtocolError(
                f"{len(streams) + 1} streams at once against {self._most}; "
                "raise Config(streams=…) if this peer is right"
            )
        incoming = streams[stream] = IncomingStream(stream, self)
        return incoming

    def _count_early(self, size: int) -> None:
        most = self.state.limits.connection_bytes
        self._early_stream_bytes += size
        if self._early_stream_bytes > most:
            raise RemoteProtocolError(
                f"{self._early_stream_bytes} bytes before the connection headers against {most}",
                limit="connection_bytes",
                rule="aqueduct-H05",
            )

    # --- loans for frames larger than a window

    def repay(self, loan: int) -> None:
        """Give back credit that was lent, and serve the streams that wait for it."""
        if loan:
            self.reassembly.repay(loan)
            self.serve_loans()

    def serve_loans(self) -> None:
        """Lend to the waiting streams, in order, as far as the budget reaches."""
        while (borrower := self.reassembly.next_waiting()) is not None:
            amount = borrower.loan_size()
            if not self.reassembly.serve(borrower, amount):
                return
            borrower.borrowed(amount)

    # --- stalls

    def _watch_for_stall(self) -> None:
        self._stall.watch(self.state.now, self.bytes_received, self.reassembly.served)

    def check_stall(self) -> bool:
        """End a stall interval: True if nothing came, as over a broken link; `RemoteProtocolError` if too little came.

        The peer is not blamed while a stream waits for a loan or much is unread: then it may lack credit.
        """
        came = self._stall.shortfall(self.bytes_received, self.reassembly.served)
        streams = self.state.incoming.values()
        if not any(incoming.waits_for_peer for incoming in streams):
            return False
        unread = sum(incoming.unconsumed for incoming in streams)
        if came is None or 2 * unread > self.state.limits.connection_bytes:
            self._watch_for_stall()
            return False
        if came:
            raise self._stall.error(came, "frame")
        return True

    # --- datagrams

    def receive_datagram(self, data: bytes) -> None:
        """Parse a datagram, or keep it until the connection headers have come."""
        if data and data[0] != frames.TAG_VERSION and not self.handshake.sent_ack_version:
            raise RemoteProtocolError(
                f"a datagram begins with {data[0]:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        cursor = Cursor(data)
        channel: int | None = None
        start = 0
        try:
            while cursor.remaining and data[cursor.position] in frames.CONNECTION_TAGS:
                start = cursor.position
                self.handshake.apply(self._next(cursor), on_stream=False)
            while cursor.remaining:
                if not self.handshake.is_connected:
                    self._keep_early(data)
                    return
                start = cursor.position
                frame = self._next(cursor)
                if channel is None:
                    self.rules.check_unrouted(frame)
                    assert isinstance(frame, frames.RouteTo)  # nothing else is left
                    is_heard, _ = self.rules.route(frame.channel)
                    if not is_heard:
                        return
                    channel = frame.channel
                elif not self.rules.take_datagram_frame(frame, channel, cursor.position - start):
                    return
        except RemoteProtocolError as error:
            error.offset = start
            raise

    def _resume_early(self) -> None:
        """Parse the bytes that came before the connection headers."""
        for waiting in [*self.state.incoming.values()]:
            if waiting.is_held_back:
                waiting.resume()
        early, self._early = self._early, []
        self.early_bytes = 0
        for data in early:
            self.receive_datagram(data)

    def _next(self, cursor: Cursor) -> object:
        try:
            frame = frames.parse_frame(cursor, self.bounds)
        except NeedMore as need:
            raise RemoteProtocolError(
                f"a datagram ends at least {need.missing} bytes before its frame", rule="aqueduct-F09"
            ) from None
        self.frames += 1
        return frame

    def _keep_early(self, data: bytes) -> None:
        cost = len(data) + DATAGRAM_COST
        if self.early_bytes + cost > self.state.config.early_bytes:
            self.state.dropped_datagrams += 1
            return
        self.early_bytes += cost
        self._early.append(data)
