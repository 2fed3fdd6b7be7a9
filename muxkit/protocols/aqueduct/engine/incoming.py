"""The streams and datagrams of the peer: cut into frames, held back where they must wait, lent credit, and applied.

Each frame is checked against the rules first, and applied to the registry then.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Consumed, Cursor, Lent, NeedMore, Pieces, Reassembly, StallWatch, Stop, StreamControl, StreamId
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.engine import halves
from muxkit.protocols.aqueduct.engine.events import Arrived, Attachment, Connected
from muxkit.protocols.aqueduct.engine.registry import Registry, Timer
from muxkit.protocols.aqueduct.engine.streams import OutStream
from muxkit.protocols.aqueduct.frames import label

NOTHING: Final = Pieces()  # shared; nothing is ever put into it

# The frames of a channel: the side that may send each, the rule that says so, and the one that wants it in a stream.
CHANNEL_FRAMES: Final[dict[type[object], tuple[str, str, str]]] = {
    frames.MessageFrame: ("sender", "aqueduct-T09", ""),
    frames.SentUnreliable: ("sender", "aqueduct-T18", "aqueduct-S09"),
    frames.FinishSender: ("sender", "aqueduct-T21", "aqueduct-S10"),
    frames.CancelSender: ("sender", "aqueduct-T23", "aqueduct-S13"),
    frames.AckReliable: ("receiver", "aqueduct-T25", "aqueduct-A01"),
    frames.AckNackUnreliable: ("receiver", "aqueduct-T29", "aqueduct-A08"),
    frames.CloseReceiver: ("receiver", "aqueduct-T35", "aqueduct-L11"),
    frames.ForgetChannel: ("creator", "aqueduct-T37", "aqueduct-L02"),
}


class Phase(Enum):
    """The position of a sequence in the pattern of section 2.1."""

    START = "start"
    CONNECTION = "connection"
    """VERSION, ACK_VERSION and CONNECTION_HEADERS."""
    ROUTED = "routed"
    """After ROUTE_TO."""
    IGNORED = "ignored"


class IncomingStream:
    """One stream that the peer writes: the bytes of its unfinished frame, and the credit lent for the rest.

    `unconsumed` counts the bytes that the link may not renew yet. A frame that does not fit a window borrows the
    rest of it as a whole, so that no two half-lent frames wait for each other.
    """

    def __init__(self, id: StreamId, incoming: Incoming) -> None:
        self.id = id
        self.channel: int = 0
        self.half: halves.Half | None = None  # our half of the channel, once a frame has needed it
        self.last_word: type[object] | None = None  # FINISH_SENDER or CANCEL_SENDER, once it came in this stream
        self.phase: Phase = Phase.START
        self.frames: int = 0  # of channels
        self.fin: bool = False
        self.unconsumed: int = 0
        self.offset: int = 0  # bytes parsed
        self._partial = Pieces()  # of the unfinished frame
        self._wanted = 0  # size of the held bytes from which parsing can go on
        # While held back: the bytes in which parsing stopped, with the position, and what came after them.
        self._held_back: tuple[bytes, int] | None = None
        self._later = NOTHING
        self._missing = 0
        self._whole = True
        self._borrows_later = False  # it will borrow when less is unread in this stream
        self._reserved = 0  # borrowed from the budget for the held frame
        self._lent = 0  # of this the peer was told
        self._lent_at = 0
        self._incoming = incoming

    @property
    def is_held_back(self) -> bool:
        """Whether it waits for the connection headers or for messages to be read."""
        return self._held_back is not None

    @property
    def missing(self) -> int:
        """Bytes until parsing can go on, if a frame has begun; 0 otherwise."""
        return max(0, self._wanted - self._partial.size) if self._partial.size else 0

    @property
    def waits_for_peer(self) -> bool:
        """Whether a frame is unfinished and the peer has the credit to go on with it."""
        if not self._partial.size or self._held_back is not None or self.fin:
            return False
        is_small = self._wanted <= self._incoming.largest_unlent and self.unconsumed == self._partial.size
        return is_small or self._reserved > 0

    def receive(self, data: bytes) -> None:
        """Parse more bytes, by whose size `unconsumed` was raised."""
        if self.phase is Phase.IGNORED:
            self.consume(len(data))
            return
        if self._held_back is not None:
            if self._later is NOTHING:
                self._later = Pieces()
            self._later.append(data)
            return
        if self._partial.size:
            self._partial.append(data)
            if self._partial.size < self._wanted:
                return
            data = self._partial.join()
        self._parse(data, 0)

    def resume(self) -> None:
        """Parse what was held back. It may be held back again; costs what it parses, however much there is."""
        if self._held_back is not None:
            (data, position), self._held_back = self._held_back, None
            self._parse(data, position)
            if not self.is_held_back and self._later.size:
                later, self._later = self._later, NOTHING
                self.receive(later.join())
            if self.fin:
                self.check_end()
        self._incoming.release(self)

    def check_end(self) -> None:
        """Check that the stream does not end inside a frame."""
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
            self._incoming.registry.check_empty_stream()

    def reset(self) -> None:
        """End the stream and drop its unfinished frame."""
        if self.frames == 0:
            self._incoming.registry.count_reset()
        self.ignore()
        self.fin = True

    def ignore(self) -> None:
        """Drop what is held and whatever follows."""
        self.phase = Phase.IGNORED
        self._wanted = 0
        held = self._partial.size + self._later.size
        if self._held_back is not None:
            data, position = self._held_back
            held += len(data) - position
        self._partial, self._later, self._held_back = Pieces(), NOTHING, None
        self._incoming.repay(self._keep_loan())
        self.consume(held)

    def consume(self, amount: int) -> None:
        """Let the link renew credit for these bytes."""
        if amount:
            self.unconsumed -= amount
            if self._borrows_later:
                self._borrow()
            consumed = self._incoming.consumed
            consumed[self.id] = consumed.get(self.id, 0) + amount

    # --- frames

    def _parse(self, data: bytes, position: int) -> None:
        size = len(data)
        while position < size:
            # After the last word of a channel only a violation or FORGET_CHANNEL can come.
            if self.phase is Phase.IGNORED or (self.half is not None and self.half.gone and self.last_word is None):
                self.ignore()
                self.consume(size - position)
                return
            if self.phase is not Phase.ROUTED and self._must_wait(data[position]):
                self._held_back = data, position
                return
            cursor = Cursor(data, position)
            try:
                frame = frames.parse_frame(cursor, self._incoming.bounds)
                half = self.half if isinstance(frame, frames.MessageFrame) and self.last_word is None else None
                if half is not None and frames.brings_reason(frame):
                    half = None  # it is not kept, and a cancellation follows
                if isinstance(half, halves.ReceiverMachine) and self._incoming.unread_limit.is_full(half):
                    self._incoming.unread_limit.hold_back(half, self.id, self.resume)
                    self._held_back = data, position
                    return
                length = cursor.position - position
                loan = self._keep_loan()
                self._incoming.frames += 1
                if isinstance(frame, frames.MessageFrame) and self.phase is Phase.ROUTED:
                    self.frames += 1
                    is_delivered = self._incoming.stream_message(frame, self, length, loan)
                else:
                    is_delivered = False
                    self._apply(frame)
            except NeedMore as need:
                self._partial.append(data[position:])
                self._want(need)
                return
            except RemoteProtocolError as error:
                if error.offset is None:
                    error.offset = self.offset
                raise
            if not is_delivered:  # else the application consumes it
                self.consume(length)
                self._incoming.repay(loan)
            self.offset += length
            position = cursor.position

    def _must_wait(self, tag: int) -> bool:
        """Until the peer's connection headers have come, everything after the first part waits (H04)."""
        if self.phase is Phase.START and tag != frames.TAG_VERSION and not self._incoming.sent_ack_version:
            raise RemoteProtocolError(
                f"a sequence begins with {tag:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        return tag not in frames.CONNECTION_TAGS and not self._incoming.is_connected

    def _apply(self, frame: object) -> None:
        """Apply a frame that is not a message of the channel."""
        incoming = self._incoming
        if self.phase is Phase.ROUTED:
            self.frames += 1
            incoming.channel_frame(frame, self)
            if isinstance(frame, frames.ForgetChannel):
                self.ignore()
            return
        incoming.check_unrouted(frame)
        if not isinstance(frame, frames.RouteTo):
            self.phase = Phase.CONNECTION
            incoming.connection_frame(frame, on_stream=True)
            return
        self.channel = frame.channel
        is_heard, self.half = incoming.route(self.channel)
        if is_heard:
            self.phase = Phase.ROUTED
            return
        self.ignore()
        if not self.fin:
            self._incoming.stops[self.id] = Stop(self.id)

    # --- loans

    def _want(self, need: NeedMore) -> None:
        """Note how much of the frame is missing, and borrow credit for it if it may not fit the window."""
        self._missing = need.missing
        self._wanted = self._partial.size + need.missing
        self._whole = not isinstance(need, frames.Unfinished) or need.whole
        if self._wanted <= self._incoming.largest_unlent:
            return
        if self._reserved:
            if self._whole:
                self._trim(self._lent + self._shortfall())
            self._lend()
        elif self._incoming.reassembly.waits(self):
            self._incoming.serve_loans()
        else:
            self._borrow()

    def _borrow(self) -> None:
        """Borrow for the frame, unless too much is unread: an unread stream must not grow loan by loan."""
        self._borrows_later = self.unconsumed - self._partial.size >= self._incoming.most_unread_to_lend
        if not self._borrows_later and self._incoming.reassembly.borrow(self, self.loan_size()):
            self.borrowed(self.loan_size())

    def loan_size(self) -> int:
        """What the frame may still need; of a message with an incomplete head, as much as any message may."""
        rest = self._missing if self._whole else self._incoming.largest_frame - self._partial.size
        return min(max(rest, self._missing), self._incoming.reassembly.total)

    def borrowed(self, amount: int) -> None:
        self._reserved, self._lent, self._lent_at = amount, 0, self._partial.size
        self._lend()

    def _shortfall(self) -> int:
        """What the frame needs beyond what was lent already, as far as is known."""
        return max(0, self._partial.size + self._missing - self._lent_at - self._lent)

    def _lend(self) -> None:
        amount = min(self._shortfall(), self._reserved - self._lent)
        if amount > 0:
            self._lent += amount
            self._incoming.lent.append(Lent(self.id, amount))

    def _trim(self, needed: int) -> None:
        """Give back what is reserved beyond `needed`."""
        if needed < self._reserved:
            surplus, self._reserved = self._reserved - needed, needed
            self._incoming.repay(surplus)

    def _keep_loan(self) -> int:
        """End borrowing for the frame; give the amount to be repaid when it is consumed."""
        if self._incoming.reassembly.waits(self):
            self._incoming.reassembly.leave(self)
            self._incoming.serve_loans()
        self._borrows_later = False
        self._trim(self._lent)
        loan, self._reserved, self._lent = self._reserved, 0, 0
        return loan


class Incoming:
    """What one peer sends: its streams that are open or not consumed, its datagrams, and what each frame does.

    A datagram is a whole sequence, with messages in number spaces of their own.
    """

    def __init__(self, registry: Registry, headers: bytes, most_streams: int) -> None:
        config, limits = registry.config, registry.limits
        self.registry = registry
        self.unread_limit: Final = registry.unread_limit
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
        # The handshake
        self.is_connected: bool = False  # the peer's connection headers have come
        self.sent_ack_version: bool = False
        self._headers = headers
        self._version_acked = False
        self._handshake: OutStream | None = None
        # Streams
        self.open: dict[StreamId, IncomingStream] = {}
        self.reassembly: Reassembly[IncomingStream] = Reassembly(limits.reassembly)
        # A frame of up to half of the smallest window needs no loan.
        self.largest_unlent: int = min(limits.channel_floor, limits.channel_first) // 2
        self.most_unread_to_lend: int = max(1, limits.short_window // 2)  # unread bytes of the same stream
        self.largest_frame: int = limits.message + 64  # tag, number and lengths
        self._most = most_streams
        self._early_stream_bytes = 0  # in streams that wait for the connection headers
        self._has_resumed = False
        self._stall = StallWatch(registry.deadlines, Timer.STALL, seconds=limits.stall, least=limits.stall_bytes)
        # For the link
        self.consumed: dict[StreamId, int] = {}
        self.lent: list[Lent] = []
        self.stops: dict[StreamId, Stop] = {}
        # Datagrams
        self.dropped_datagrams: int = 0  # repeated, too early, or without room
        self._early: list[bytes] = []
        self._early_bytes = 0
        if registry.role is frames.Role.CLIENT:
            self._send_handshake(headers)

    # --- streams

    def receive_stream(self, stream: StreamId, data: bytes, fin: bool) -> None:
        """Take in bytes of a stream."""
        self.bytes_received += len(data)
        incoming = self.open.get(stream) or self._open(stream)
        if incoming.fin:
            return  # a link should bring nothing after the end
        incoming.unconsumed += len(data)
        incoming.fin = fin
        if data:
            incoming.receive(data)
        if incoming.waits_for_peer:
            self._watch_for_stall()
        if incoming.is_held_back:
            if not self.is_connected:
                self._count_early(len(data))
        elif fin:
            incoming.check_end()
        if fin:
            self.release(incoming)
        if self.is_connected and not self._has_resumed:
            self._has_resumed = True
            self._resume_early()

    def missing(self, stream: StreamId) -> int:
        """Bytes until the frame that has begun may end; fewer are only collected."""
        incoming = self.open.get(stream)
        return incoming.missing if incoming is not None else 0

    def reset(self, stream: StreamId) -> None:
        incoming = self.open.get(stream)
        if incoming is not None and not incoming.fin:
            incoming.reset()
            self.release(incoming)

    def stopped(self, stream: StreamId) -> None:
        """Reset a stream of ours that the peer has stopped, and end the sender that depends on it."""
        streams = self.registry.streams
        out = streams.streams.get(stream)
        if out is None:
            return
        self.registry.count_reset()
        source = out.source
        streams.drop(out)
        if isinstance(source, halves.SingleMessage):
            source = source.sender
        if isinstance(source, halves.SenderMachine):
            self.registry.sender_stopped(source)

    def release(self, incoming: IncomingStream) -> None:
        """Remove a stream if it has ended and is consumed."""
        if incoming.fin and incoming.unconsumed == 0:
            self.open.pop(incoming.id, None)

    def has_control(self) -> bool:
        return bool(self.consumed or self.lent or self.stops)

    def take_control(self) -> list[StreamControl]:
        """Give what the link is to do about these streams: stop, lend, renew credit."""
        control: list[StreamControl] = [*self.stops.values(), *self.lent]
        control += [Consumed(stream, amount) for stream, amount in self.consumed.items()]
        self.stops.clear()
        self.lent.clear()
        self.consumed.clear()
        return control

    def _open(self, stream: StreamId) -> IncomingStream:
        if len(self.open) >= self._most:
            raise RemoteProtocolError(
                f"{len(self.open) + 1} streams at once against {self._most}; "
                "raise Config(streams=…) if this peer is right"
            )
        incoming = self.open[stream] = IncomingStream(stream, self)
        return incoming

    def _count_early(self, size: int) -> None:
        most = self.registry.limits.connection_bytes
        self._early_stream_bytes += size
        if self._early_stream_bytes > most:
            raise RemoteProtocolError(
                f"{self._early_stream_bytes} bytes before the connection headers against {most}",
                limit="connection_bytes",
                rule="aqueduct-H05",
            )

    # --- loans for frames larger than a window

    def repay(self, loan: int) -> None:
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
        self._stall.watch(self.registry.connection.now, self.bytes_received, self.reassembly.served)

    def check_stall(self) -> bool:
        """End a stall interval: True if nothing came, as over a broken link; `RemoteProtocolError` if too little came.

        The peer is not blamed while a stream waits for a loan or much is unread: then it may lack credit.
        """
        came = self._stall.shortfall(self.bytes_received, self.reassembly.served)
        if not any(incoming.waits_for_peer for incoming in self.open.values()):
            return False
        unread = sum(incoming.unconsumed for incoming in self.open.values())
        if came is None or 2 * unread > self.registry.limits.connection_bytes:
            self._watch_for_stall()
            return False
        if came:
            raise self._stall.error(came, "frame")
        return True

    # --- datagrams

    def receive_datagram(self, data: bytes) -> None:
        """Parse a datagram, or keep it until the connection headers have come."""
        if data and data[0] != frames.TAG_VERSION and not self.sent_ack_version:
            raise RemoteProtocolError(
                f"a datagram begins with {data[0]:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        cursor = Cursor(data)
        channel: int | None = None
        start = 0
        try:
            while cursor.remaining and data[cursor.position] in frames.CONNECTION_TAGS:
                start = cursor.position
                self.connection_frame(self._next(cursor), on_stream=False)
            while cursor.remaining:
                if not self.is_connected:
                    self._keep_early(data)
                    return
                start = cursor.position
                frame = self._next(cursor)
                if channel is None:
                    self.check_unrouted(frame)
                    assert isinstance(frame, frames.RouteTo)  # nothing else is left
                    is_heard, _ = self.route(frame.channel)
                    if not is_heard:
                        return
                    channel = frame.channel
                elif not self._datagram_frame(frame, channel, cursor.position - start):
                    return
        except RemoteProtocolError as error:
            error.offset = start
            raise

    def _resume_early(self) -> None:
        """Parse what came before the connection headers."""
        for waiting in [*self.open.values()]:
            if waiting.is_held_back:
                waiting.resume()
        early, self._early = self._early, []
        self._early_bytes = 0
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

    def _datagram_frame(self, frame: object, channel: int, size: int) -> bool:
        """Apply a frame after ROUTE_TO; False if the rest is to be ignored."""
        self.check_direction(channel, frame)
        _, _, rule = CHANNEL_FRAMES[type(frame)]
        if rule:
            raise RemoteProtocolError(f"{type(frame).__name__} in a datagram", rule=rule)
        assert isinstance(frame, frames.MessageFrame)  # nothing else is left
        receiver = self.half_of(channel)
        if not isinstance(receiver, halves.ReceiverMachine):
            return False
        receiver.check_message(frame.number, unreliable=True)
        if frame.attachments:
            self.check_attachments(receiver, frame)
            if receiver.attached and receiver.unreliable.is_new(frame.number):  # not a copy of an earlier datagram
                self._check_attached_once(frame)
        if channel not in self.registry.table:
            self.adopt(receiver)
            self.registry.add_stray(receiver)
        cost = size + halves.DATAGRAM_COST
        is_beyond = receiver.reliable.total is not None and frame.number >= receiver.unreliable.known
        # A repeated datagram may bring back a channel that has long ended; its attachments must not come back as well.
        is_doubtful = bool(frame.attachments) and not receiver.attached
        if is_beyond or is_doubtful or not receiver.has_room(cost) or not receiver.unreliable.arrived(frame.number):
            self.dropped_datagrams += 1
            return True
        receiver.unread += cost
        self.registry.connection.unread_datagrams += cost
        self.deliver(receiver, frame, cost, 0, None)
        return True

    def _keep_early(self, data: bytes) -> None:
        cost = len(data) + halves.DATAGRAM_COST
        if self._early_bytes + cost > self.registry.config.early_bytes:
            self.dropped_datagrams += 1
            return
        self._early_bytes += cost
        self._early.append(data)

    # --- connection

    def _send_handshake(self, frame: bytes, *, first: bool = False) -> None:
        """Queue a frame of the connection, before or behind those that are not written yet."""
        stream = self._handshake
        if stream is not None and stream.id is None and not stream.ended:
            stream.pending.insert(0 if first else len(stream.pending), frame)
            return
        self._handshake = OutStream([frame], urgent=True)
        self.registry.streams.add(self._handshake)

    def connection_frame(self, frame: object, *, on_stream: bool) -> None:
        self._observe("connection", frame)
        match frame:
            case frames.Version():
                if not self.sent_ack_version:
                    self.sent_ack_version = True
                    self._send_handshake(frames.encode_frame(frames.AckVersion()))
            case frames.AckVersion():
                self._version_acked = True
            case frames.ConnectionHeaders(headers):
                if not on_stream:
                    raise RemoteProtocolError("CONNECTION_HEADERS in a datagram", rule="aqueduct-H07")
                if self.is_connected:
                    raise RemoteProtocolError("CONNECTION_HEADERS a second time", rule="aqueduct-H06")
                self.is_connected = True
                self.registry.deadlines.stop(Timer.HANDSHAKE)
                if self.registry.role is frames.Role.SERVER:
                    # A peer that takes each sequence in order holds ACK_VERSION back until it has our headers.
                    self._send_handshake(self._headers, first=True)
                self.registry.events.append(Connected(headers))
        if self._version_acked and self.is_connected:
            self.registry.streams.prefix = b""

    # --- routing

    def check_unrouted(self, frame: object) -> None:
        """Raise `RemoteProtocolError` for a frame that needs a ROUTE_TO before it."""
        if type(frame) in CHANNEL_FRAMES:
            raise RemoteProtocolError(f"{type(frame).__name__} without a ROUTE_TO before it", rule="aqueduct-F05")

    def route(self, channel: int) -> tuple[bool, halves.Half | None]:
        """Tell whether the frames for a channel are to be parsed, and give its half if there is one."""
        registry = self.registry
        half = registry.table.get(channel)
        if half is not None:
            return True, half
        if channel in registry.closing:
            return True, None  # FORGET_CHANNEL may follow
        if registry.table.is_buried(channel, registry.connection.now):
            return False, None
        if frames.creator_of(channel) == registry.role:
            registry.forget_unknown(channel)
            return False, None
        return True, None

    def half_of(self, channel: int) -> halves.Half | None:
        """Give the half that a frame is for, or None if it has ended; to be asked for each frame.

        A new one is not in the table: `adopt` puts it there once its first frame has passed all checks.
        """
        registry = self.registry
        half = registry.table.get(channel)
        if half is None and not (
            channel in registry.closing or registry.table.is_buried(channel, registry.connection.now)
        ):
            registry.check_room(1)
            half = registry.make_theirs(channel)
        return half

    def adopt(self, half: halves.Half) -> None:
        """Put a half of which a frame was accepted into the table, unless it is there."""
        if half.id is not None and half.id not in self.registry.table:
            self.registry.add_theirs(half.id, half)

    def check_direction(self, channel: int, frame: object) -> None:
        """Check the contextual rules of section 2.2, which need no state."""
        kind, role = type(frame), self.registry.role
        if isinstance(frame, frames.RouteTo):
            raise RemoteProtocolError(f"ROUTE_TO after ROUTE_TO {channel}", rule="aqueduct-F03")
        if kind not in CHANNEL_FRAMES:
            raise RemoteProtocolError(f"{kind.__name__} after ROUTE_TO", rule="aqueduct-F04")
        allowed, rule, _ = CHANNEL_FRAMES[kind]
        if allowed == "creator":
            if frames.creator_of(channel) == role:
                raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} for a channel of ours", rule=rule)
            return
        side = "receiver" if frames.sender_of(channel) == role else "sender"
        if side != allowed:
            raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} from the {side}", rule=rule)
        if isinstance(frame, frames.AckNackUnreliable) and frame.channel is not None:
            if frames.sender_of(frame.channel) != role:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel}, of which the peer is the sender", rule="aqueduct-T30"
                )
            if frame.channel != channel:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel} after ROUTE_TO {channel}", rule="aqueduct-T28"
                )

    # --- frames of a channel

    def stream_message(self, frame: frames.MessageFrame, stream: IncomingStream, cost: int, loan: int) -> bool:
        """Deliver a MESSAGE that came in a stream; False if its channel has ended."""
        if stream.last_word is not None or frames.sender_of(stream.channel) == self.registry.role:
            self._check_sequence(stream, frame)
        half = self._half_for(stream)
        if not isinstance(half, halves.ReceiverMachine):
            return False
        half.check_message(frame.number, unreliable=False)
        if frame.attachments:
            self.check_attachments(half, frame)
            self._check_attached_once(frame)
        self.adopt(half)
        half.reliable.arrived(frame.number)
        self.registry.flush_soon(half)
        self.registry.unread_limit.add(half)
        self.deliver(half, frame, cost, loan, stream.id)
        if half.is_complete:
            self.registry.close(half, halves.Outcome.FINISHED)
        return True

    def channel_frame(self, frame: object, stream: IncomingStream) -> None:
        """Apply any other frame of a channel that came in a stream."""
        self._check_sequence(stream, frame)
        self._observe(label(stream.channel), frame)
        if isinstance(frame, frames.ForgetChannel):
            if self.registry.table.get(stream.channel) is not None:
                self.registry.count_reset()
            self.registry.forgotten(stream.channel)
            return
        half = self._half_for(stream)
        if isinstance(half, halves.ReceiverMachine):
            self._to_receiver(half, frame, stream)
        elif isinstance(half, halves.SenderMachine):
            self._to_sender(half, frame)

    def _half_for(self, stream: IncomingStream) -> halves.Half | None:
        if stream.half is None:
            stream.half = self.half_of(stream.channel)
        if stream.half is not None:
            self.registry.confirm(stream.half)
        return stream.half

    def _check_sequence(self, stream: IncomingStream, frame: object) -> None:
        self.check_direction(stream.channel, frame)
        if stream.last_word is not None and not isinstance(frame, frames.ForgetChannel):
            rule = "aqueduct-S12" if stream.last_word is frames.FinishSender else "aqueduct-S14"
            said = stream.last_word.__name__
            raise RemoteProtocolError(f"{label(stream.channel)}: {type(frame).__name__} after {said}", rule=rule)

    def _to_receiver(self, receiver: halves.ReceiverMachine, frame: object, stream: IncomingStream) -> None:
        finished = receiver.reliable.total is not None
        match frame:
            case frames.SentUnreliable(count):
                if finished:
                    raise RemoteProtocolError("SENT_UNRELIABLE after FINISH_SENDER", rule="aqueduct-S12")
                receiver.check_counts(count, stream.id)
                self.adopt(receiver)
                due = receiver.count_sent(count, stream.id)
                if due is not None:
                    self.registry.report_at(due, receiver)
            case frames.FinishSender(sent_reliable):
                receiver.check_finish(sent_reliable, stream.id)
                self.adopt(receiver)
                stream.last_word = frames.FinishSender
                receiver.reliable.total = sent_reliable
                if receiver.is_complete:
                    self.registry.close(receiver, halves.Outcome.FINISHED)
            case frames.CancelSender():
                if finished:
                    raise RemoteProtocolError("CANCEL_SENDER after FINISH_SENDER", rule="aqueduct-S12")
                self.registry.count_reset()
                self.adopt(receiver)
                stream.last_word = frames.CancelSender
                self.registry.close(receiver, halves.Outcome.CANCELLED)

    def _to_sender(self, sender: halves.SenderMachine, frame: object) -> None:
        registry = self.registry
        match frame:
            case frames.AckReliable(ranges):
                registry.messages_acked(sender.take_acked(ranges), sender.transit)
                sender.wake()
            case frames.AckNackUnreliable(ranges):
                acked, nacked = sender.take_reported(ranges)
                registry.messages_acked(acked, sender.transit)
                registry.nack(nacked)
                registry.schedule_datagrams(sender)
                sender.wake()
            case frames.CloseReceiver():
                self.adopt(sender)
                registry.end(sender, sender.outcome_of_close())

    def check_attachments(self, receiver: halves.ReceiverMachine, frame: frames.MessageFrame) -> None:
        ids = [id for id, _ in frame.attachments]
        for id in ids:
            if id == frames.ENTRYPOINT:
                raise RemoteProtocolError("the entrypoint is attached", rule="aqueduct-T15")
            if frames.creator_of(id) == self.registry.role:
                raise RemoteProtocolError(f"{label(id)} is attached by the other side", rule="aqueduct-T13")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError(f"a channel twice among {len(ids)} attachments", rule="aqueduct-T15")
        self.registry.check_room(sum(map(self.registry.is_new, [*ids, receiver.id or frames.ENTRYPOINT])))

    def _check_attached_once(self, frame: frames.MessageFrame) -> None:
        """Refuse a live channel that an earlier message has brought, as the original implementation does.

        The application has its half already, and a message without the channel would not be the one that was sent.
        """
        for id, _ in frame.attachments:
            if self.registry.was_attached(id):
                raise RemoteProtocolError(
                    f"{label(id)} is attached to message {frame.number}, and an earlier message brought it: "
                    "a channel is attached to one message only",
                    rule="aqueduct-T15",
                )

    def deliver(
        self,
        receiver: halves.ReceiverMachine,
        frame: frames.MessageFrame,
        cost: int,
        loan: int,
        stream: StreamId | None,
    ) -> None:
        """Report a message as arrived, with those of its attachments that are new to the application."""
        registry = self.registry
        attached = []
        for id, headers in frame.attachments:
            half = registry.attach(id, receiver.transit)
            if half is not None:
                attached.append(Attachment(half, headers))
        registry.events.append(
            Arrived(receiver, frame.number, frame.payload, frame.headers, tuple(attached), cost, loan, stream)
        )
        if registry.observer is not None:
            registry.observer.frame("in", label(receiver.id or frames.ENTRYPOINT), "MESSAGE", len(frame.payload))

    def _observe(self, channel: str, frame: object) -> None:
        if self.registry.observer is not None:
            self.registry.observer.frame("in", channel, frames.name_of(frame), 0)
