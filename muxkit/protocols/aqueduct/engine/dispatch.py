"""What each frame of the peer does: it is checked against the rules first, and applied to the registry then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.aqueduct.engine.events import Arrived, Attachment, Connected
from muxkit.protocols.aqueduct.engine.halves import Outcome, ReceiverMachine, SenderMachine
from muxkit.protocols.aqueduct.engine.registry import Timer
from muxkit.protocols.aqueduct.engine.streams import OutStream
from muxkit.protocols.aqueduct.frames import (
    ENTRYPOINT,
    AckNackUnreliable,
    AckReliable,
    AckVersion,
    Bounds,
    CancelSender,
    CloseReceiver,
    ConnectionHeaders,
    FinishSender,
    ForgetChannel,
    MessageFrame,
    Role,
    RouteTo,
    SentUnreliable,
    Version,
    creator_of,
    encode_frame,
    label,
    sender_of,
)

if TYPE_CHECKING:
    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct.engine.halves import Half
    from muxkit.protocols.aqueduct.engine.registry import Registry

# The side that may send each frame of a channel, with the rule that says so.
FROM_SENDER: Final[dict[type[object], str]] = {
    MessageFrame: "aqueduct-T09",
    SentUnreliable: "aqueduct-T18",
    FinishSender: "aqueduct-T21",
    CancelSender: "aqueduct-T23",
}
FROM_RECEIVER: Final[dict[type[object], str]] = {
    AckReliable: "aqueduct-T25",
    AckNackUnreliable: "aqueduct-T29",
    CloseReceiver: "aqueduct-T35",
}


class RoutedStream:
    """A stream of the peer, as far as its frames depend on it."""

    __slots__ = ("channel", "half", "id", "last_word")

    def __init__(self, id: StreamId) -> None:
        self.id = id
        self.channel = 0
        self.half: Half | None = None  # our half of the channel, once a frame has needed it
        self.last_word: type[object] | None = None  # FINISH_SENDER or CANCEL_SENDER, once it came in this stream


class Dispatcher:
    """Applies the frames of one peer."""

    def __init__(self, registry: Registry, headers: bytes) -> None:
        self._registry = registry
        config, limits = registry.config, registry.limits
        self.bounds = Bounds(
            message=limits.message,
            connection_headers=config.connection_headers,
            headers=config.headers,
            header_pairs=config.header_pairs,
            attachments=config.attachments,
            ranges=config.gaps,
            channel_field=config.channel_field,
        )
        self.frames = 0
        self.is_connected = False  # the peer's connection headers have come
        self.sent_ack_version = False
        self._headers = headers
        self._version_acked = False
        self._handshake: OutStream | None = None
        if registry.role is Role.CLIENT:
            self._send_handshake(headers)

    # --- connection

    def _send_handshake(self, frame: bytes, *, first: bool = False) -> None:
        """Queue a frame of the connection, before or behind those that are not written yet."""
        stream = self._handshake
        if stream is not None and stream.id is None and not stream.ended:
            stream.pending.insert(0 if first else len(stream.pending), frame)
            return
        self._handshake = OutStream(frame, urgent=True)
        self._registry.streams.add(self._handshake)

    def connection_frame(self, frame: object, *, on_stream: bool) -> None:
        self._observe("connection", frame)
        match frame:
            case Version():
                if not self.sent_ack_version:
                    self.sent_ack_version = True
                    self._send_handshake(encode_frame(AckVersion()))
            case AckVersion():
                self._version_acked = True
            case ConnectionHeaders(headers):
                if not on_stream:
                    raise RemoteProtocolError("CONNECTION_HEADERS in a datagram", rule="aqueduct-H07")
                if self.is_connected:
                    raise RemoteProtocolError("CONNECTION_HEADERS a second time", rule="aqueduct-H06")
                self.is_connected = True
                self._registry.deadlines.stop(Timer.HANDSHAKE)
                if self._registry.role is Role.SERVER:
                    # A peer that takes each sequence in order holds ACK_VERSION back until it has our headers.
                    self._send_handshake(self._headers, first=True)
                self._registry.events.append(Connected(headers))
        if self._version_acked and self.is_connected:
            self._registry.streams.prefix = b""

    # --- routing

    def check_unrouted(self, frame: object) -> None:
        """Raise `RemoteProtocolError` for a frame that needs a ROUTE_TO before it."""
        if type(frame) in FROM_SENDER or type(frame) in FROM_RECEIVER or isinstance(frame, ForgetChannel):
            raise RemoteProtocolError(f"{type(frame).__name__} without a ROUTE_TO before it", rule="aqueduct-F05")

    def route(self, channel: int) -> tuple[bool, Half | None]:
        """Tell whether the frames for a channel are to be parsed, and give its half if there is one."""
        registry = self._registry
        half = registry.table.get(channel)
        if half is not None:
            return True, half
        if channel in registry.closing:
            return True, None  # FORGET_CHANNEL may follow
        if registry.table.is_buried(channel, registry.connection.now):
            return False, None
        if creator_of(channel) == registry.role:
            registry.forget_unknown(channel)
            return False, None
        return True, None

    def half_of(self, channel: int) -> Half | None:
        """Give the half that a frame is for, or None if it has ended; to be asked for each frame.

        A new one is not in the table: `adopt` puts it there once its first frame has passed all checks.
        """
        registry = self._registry
        half = registry.table.get(channel)
        if half is None and not (
            channel in registry.closing or registry.table.is_buried(channel, registry.connection.now)
        ):
            registry.check_room(1)
            half = registry.make_theirs(channel)
        return half

    def adopt(self, half: Half) -> None:
        """Put a half of which a frame was accepted into the table, unless it is there."""
        if half.id is not None and half.id not in self._registry.table:
            self._registry.add_theirs(half.id, half)

    def check_direction(self, channel: int, frame: object) -> None:
        """Check the contextual rules of section 2.2, which need no state."""
        kind, role = type(frame), self._registry.role
        from_peer = sender_of(channel) != role
        rule = FROM_SENDER.get(kind) if not from_peer else FROM_RECEIVER.get(kind)
        if rule is not None:
            side = "receiver" if kind in FROM_SENDER else "sender"
            raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} from the {side}", rule=rule)
        if kind is MessageFrame:
            return
        if isinstance(frame, ForgetChannel) and creator_of(channel) == role:
            raise RemoteProtocolError(f"{label(channel)}: ForgetChannel for a channel of ours", rule="aqueduct-T37")
        if isinstance(frame, RouteTo):
            raise RemoteProtocolError(f"ROUTE_TO after ROUTE_TO {channel}", rule="aqueduct-F03")
        if isinstance(frame, Version | AckVersion | ConnectionHeaders):
            raise RemoteProtocolError(f"{kind.__name__} after ROUTE_TO", rule="aqueduct-F04")
        if isinstance(frame, AckNackUnreliable) and frame.channel is not None:
            if sender_of(frame.channel) != role:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel}, of which the peer is the sender", rule="aqueduct-T30"
                )
            if frame.channel != channel:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel} after ROUTE_TO {channel}", rule="aqueduct-T28"
                )

    # --- frames of a channel

    def stream_message(self, frame: MessageFrame, stream: RoutedStream, cost: int, loan: int) -> bool:
        """Deliver a MESSAGE that came in a stream; False if its channel has ended."""
        if stream.last_word is not None or sender_of(stream.channel) == self._registry.role:
            self._check_sequence(stream, frame)
        half = self._half_for(stream)
        if not isinstance(half, ReceiverMachine):
            return False
        half.check_message(frame.number, unreliable=False)
        if frame.attachments:
            self.check_attachments(half, frame)
        self.adopt(half)
        half.reliable.arrived(frame.number)
        self._registry.flush_soon(half)
        self._registry.unread_limit.add(half)
        self.deliver(half, frame, cost, loan, stream.id)
        if half.is_complete:
            self._registry.close(half, Outcome.FINISHED)
        return True

    def channel_frame(self, frame: object, stream: RoutedStream) -> None:
        """Apply any other frame of a channel that came in a stream."""
        self._check_sequence(stream, frame)
        self._observe(label(stream.channel), frame)
        if isinstance(frame, ForgetChannel):
            if self._registry.table.get(stream.channel) is not None:
                self._registry.check_churn("a channel was forgotten")
            self._registry.forgotten(stream.channel)
            return
        half = self._half_for(stream)
        if isinstance(half, ReceiverMachine):
            self._to_receiver(half, frame, stream)
        elif isinstance(half, SenderMachine):
            self._to_sender(half, frame)

    def _half_for(self, stream: RoutedStream) -> Half | None:
        if stream.half is None:
            stream.half = self.half_of(stream.channel)
        if stream.half is not None:
            self._registry.confirm(stream.half)
        return stream.half

    def _check_sequence(self, stream: RoutedStream, frame: object) -> None:
        self.check_direction(stream.channel, frame)
        if stream.last_word is not None and not isinstance(frame, ForgetChannel):
            rule = "aqueduct-S12" if stream.last_word is FinishSender else "aqueduct-S14"
            said = stream.last_word.__name__
            raise RemoteProtocolError(f"{label(stream.channel)}: {type(frame).__name__} after {said}", rule=rule)

    def _to_receiver(self, receiver: ReceiverMachine, frame: object, stream: RoutedStream) -> None:
        finished = receiver.reliable.total is not None
        match frame:
            case SentUnreliable(count):
                if finished:
                    raise RemoteProtocolError("SENT_UNRELIABLE after FINISH_SENDER", rule="aqueduct-S12")
                receiver.check_counts(count, stream.id)
                self.adopt(receiver)
                due = receiver.count_sent(count, stream.id)
                if due is not None:
                    self._registry.report_at(due, receiver)
            case FinishSender(sent_reliable):
                receiver.check_finish(sent_reliable, stream.id)
                self.adopt(receiver)
                stream.last_word = FinishSender
                receiver.reliable.total = sent_reliable
                if receiver.is_complete:
                    self._registry.close(receiver, Outcome.FINISHED)
            case CancelSender():
                if finished:
                    raise RemoteProtocolError("CANCEL_SENDER after FINISH_SENDER", rule="aqueduct-S12")
                self._registry.check_churn("a channel was cancelled")
                self.adopt(receiver)
                stream.last_word = CancelSender
                self._registry.close(receiver, Outcome.CANCELLED)

    def _to_sender(self, sender: SenderMachine, frame: object) -> None:
        registry = self._registry
        match frame:
            case AckReliable(ranges):
                registry.messages_acked(sender.take_acked(ranges), sender.transit)
                sender.wake()
            case AckNackUnreliable(ranges):
                acked, nacked = sender.take_reported(ranges)
                registry.messages_acked(acked, sender.transit)
                registry.nack(nacked)
                registry.schedule_datagrams(sender)
                sender.wake()
            case CloseReceiver():
                self.adopt(sender)
                registry.end(sender, sender.outcome_of_close())

    def check_attachments(self, receiver: ReceiverMachine, frame: MessageFrame) -> None:
        ids = [id for id, _ in frame.attachments]
        for id in ids:
            if id == ENTRYPOINT:
                raise RemoteProtocolError("the entrypoint is attached", rule="aqueduct-T15")
            if creator_of(id) == self._registry.role:
                raise RemoteProtocolError(f"{label(id)} is attached by the other side", rule="aqueduct-T13")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError(f"a channel twice among {len(ids)} attachments", rule="aqueduct-T15")
        self._registry.check_room(sum(map(self._registry.is_new, [*ids, receiver.id or ENTRYPOINT])))

    def deliver(
        self, receiver: ReceiverMachine, frame: MessageFrame, cost: int, loan: int, stream: StreamId | None
    ) -> None:
        """Report a message as arrived, with those of its attachments that are new to the application."""
        registry = self._registry
        attached = []
        for id, headers in frame.attachments:
            half = registry.attach(id, receiver.transit)
            if half is not None:
                attached.append(Attachment(half, headers))
        registry.events.append(
            Arrived(receiver, frame.number, frame.payload, frame.headers, tuple(attached), cost, loan, stream)
        )
        if registry.observer is not None:
            registry.observer.frame("in", label(receiver.id or ENTRYPOINT), "MESSAGE", len(frame.payload))

    def _observe(self, channel: str, frame: object) -> None:
        if self._registry.observer is not None:
            self._registry.observer.frame("in", channel, type(frame).__name__, 0)
