"""What does a frame do? The handshake, whom a sequence is for, each frame of a channel: first judged, then obeyed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.aqueduct import _events as events
from muxkit.protocols.aqueduct._frames import (
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
    RouteTo,
    SentUnreliable,
    Version,
    encode_frame,
)
from muxkit.protocols.aqueduct._ids import ENTRYPOINT, Role, creator_of, label, sender_of
from muxkit.protocols.aqueduct._line import OutStream
from muxkit.protocols.aqueduct._receiving import ReceiverMachine
from muxkit.protocols.aqueduct._sending import SenderMachine
from muxkit.protocols.aqueduct._timers import Timer

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._channels import Channels, Half
    from muxkit.protocols.aqueduct._incoming import Incoming

# Who may send which frame of a channel, and the rule that says so.
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


class Dispatch:
    """Obeys the frames of one peer."""

    def __init__(self, channels: Channels, headers: bytes) -> None:
        self._channels = channels
        config, limits = channels.config, channels.limits
        self.bounds = Bounds(
            message=limits.message,
            connection_headers=config.connection_headers,
            headers=config.headers,
            header_pairs=config.header_pairs,
            attachments=config.attachments,
            ranges=config.gaps,
            channel_field=config.channel_field,
        )
        # Half of the smallest window takes any frame that is no larger.
        self.lend_from = min(limits.channel_floor, limits.channel_first) // 2
        self.lend_below = max(1, limits.channel_bytes // 2)  # bytes that wait to be read on the same stream
        self.largest_frame = limits.message + 64  # tag, number and lengths
        self.frames = 0
        self.is_open = False  # the peer's connection headers have come
        self.sent_ack_version = False
        self._headers = headers
        self._ack_waits = False
        self._greeting: OutStream | None = None
        if channels.role is Role.CLIENT:
            self._greet(headers)

    # --- connection

    def _greet(self, frame: bytes, *, first: bool = False) -> None:
        """Send it in a stream, behind what waits there, or `first`."""
        greeting = self._greeting
        if greeting is not None and greeting.id is None and not greeting.ended:
            greeting.pending.insert(0 if first else len(greeting.pending), frame)
            return
        self._greeting = OutStream(frame, urgent=True)
        self._channels.line.add(self._greeting)

    def check_place(self, frame: object) -> None:
        if type(frame) in FROM_SENDER or type(frame) in FROM_RECEIVER or isinstance(frame, ForgetChannel):
            raise RemoteProtocolError(f"{type(frame).__name__} without a ROUTE_TO before it", rule="aqueduct-F05")

    def connection_frame(self, frame: object, *, on_stream: bool) -> None:
        self._observe("connection", frame)
        match frame:
            case Version():
                if not self.sent_ack_version:
                    self.sent_ack_version = True
                    self._greet(encode_frame(AckVersion()))
            case AckVersion():
                self._ack_waits = True
            case ConnectionHeaders(headers):
                if not on_stream:
                    raise RemoteProtocolError("CONNECTION_HEADERS in a datagram", rule="aqueduct-H07")
                if self.is_open:
                    raise RemoteProtocolError("CONNECTION_HEADERS a second time", rule="aqueduct-H06")
                self.is_open = True
                self._channels.timers.deadlines.stop(Timer.HANDSHAKE)
                if self._channels.role is Role.SERVER:
                    # A peer that takes each sequence in order holds ACK_VERSION back until it has our headers.
                    self._greet(self._headers, first=True)
                self._channels.tell(events.Connected(headers))
        if self._ack_waits and self.is_open:
            self._channels.line.prefix = b""

    # --- routing

    def route(self, channel: int) -> tuple[bool, Half | None]:
        """Whom a sequence is for: (is it to be heard, the half if there is one)."""
        channels = self._channels
        half = channels.table.get(channel)
        if half is not None:
            return True, half
        if channel in channels.closing:
            return True, None  # it might be forgotten
        if channels.table.is_buried(channel, channels.now):
            return False, None
        if creator_of(channel) == channels.role:
            channels.owe_forget(channel)
            return False, None
        return True, None

    def half(self, channel: int) -> Half | None:
        """For each frame anew: the channel may have come or gone since. None if it ended.

        One that is new is not in the table: it comes there when its first frame is found good.
        """
        channels = self._channels
        half = channels.table.get(channel)
        if half is None and not (channel in channels.closing or channels.table.is_buried(channel, channels.now)):
            channels.check_room(1)
            half = channels.make_theirs(channel)
        return half

    def adopt(self, half: Half) -> None:
        """Its first frame is good."""
        if half.id is not None and half.id not in self._channels.table:
            self._channels.add_theirs(half.id, half)

    def check_direction(self, channel: int, frame: object) -> None:
        """The contextual rules of section 2.2, which need no state."""
        kind, role = type(frame), self._channels.role
        from_peer = sender_of(channel) != role
        rule = FROM_SENDER.get(kind) if not from_peer else FROM_RECEIVER.get(kind)
        if rule is not None:
            side = "receiver" if kind in FROM_SENDER else "sender"
            raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} from the {side}", rule=rule)
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

    def stream_message(self, frame: MessageFrame, incoming: Incoming, cost: int, loan: int) -> bool:
        """A MESSAGE in a stream; False if nobody hears it."""
        self._check_sequence(incoming, frame)
        half = self._known(incoming)
        if not isinstance(half, ReceiverMachine):
            return False
        self.check_message(half, frame, unreliable=False)
        self.adopt(half)
        half.reliable.arrived(frame.number)
        self._channels.timers.flush_soon(half)
        self.deliver(half, frame, cost, loan, incoming)
        self._finish_if_complete(half)
        return True

    def channel_frame(self, frame: object, incoming: Incoming) -> None:
        """Any other frame of a channel, in a stream."""
        self._check_sequence(incoming, frame)
        self._observe(label(incoming.channel), frame)
        if isinstance(frame, ForgetChannel):
            if self._channels.table.get(incoming.channel) is not None:
                self._channels.check_churn("a channel was forgotten")
            self._channels.forgotten(incoming.channel)
            return
        half = self._known(incoming)
        if isinstance(half, ReceiverMachine):
            self._to_receiver(half, frame, incoming)
        elif isinstance(half, SenderMachine):
            self._to_sender(half, frame)

    def _known(self, incoming: Incoming) -> Half | None:
        if incoming.half is None:
            incoming.half = self.half(incoming.channel)
        if incoming.half is not None:
            self._channels.timers.confirm(incoming.half)
        return incoming.half

    def _check_sequence(self, incoming: Incoming, frame: object) -> None:
        self.check_direction(incoming.channel, frame)
        if incoming.last_word is not None and not isinstance(frame, ForgetChannel):
            rule = "aqueduct-S12" if incoming.last_word is FinishSender else "aqueduct-S14"
            said = incoming.last_word.__name__
            raise RemoteProtocolError(f"{label(incoming.channel)}: {type(frame).__name__} after {said}", rule=rule)

    def _to_receiver(self, receiver: ReceiverMachine, frame: object, incoming: Incoming) -> None:
        channels = self._channels
        finished = receiver.reliable.total is not None
        match frame:
            case SentUnreliable(count):
                if finished:
                    raise RemoteProtocolError("SENT_UNRELIABLE after FINISH_SENDER", rule="aqueduct-S12")
                receiver.check_counts(count, incoming.id)
                self.adopt(receiver)
                receiver.sent_unreliable(count, incoming.id)
            case FinishSender(sent_reliable):
                receiver.check_finish(sent_reliable, incoming.id)
                self.adopt(receiver)
                incoming.last_word = FinishSender
                receiver.reliable.total = sent_reliable
                self._finish_if_complete(receiver)
            case CancelSender():
                if finished:
                    raise RemoteProtocolError("CANCEL_SENDER after FINISH_SENDER", rule="aqueduct-S12")
                channels.check_churn("a channel was cancelled")
                self.adopt(receiver)
                incoming.last_word = CancelSender
                channels.close(receiver, events.Outcome.CANCELLED)

    def _to_sender(self, sender: SenderMachine, frame: object) -> None:
        channels = self._channels
        match frame:
            case AckReliable(ranges):
                channels.settle(sender.acked(ranges), sender.transit)
                sender.wake()
            case AckNackUnreliable(ranges):
                acked, nacked = sender.reported_on(ranges)
                channels.settle(acked, sender.transit)
                channels.nack(nacked)
                channels.ring_up(sender)
                sender.wake()
            case CloseReceiver():
                self.adopt(sender)
                channels.end(sender, sender.outcome_of_close())

    def _finish_if_complete(self, receiver: ReceiverMachine) -> None:
        if receiver.is_complete:
            self._channels.close(receiver, events.Outcome.FINISHED)

    def check_message(self, receiver: ReceiverMachine, frame: MessageFrame, *, unreliable: bool) -> None:
        receiver.check_message(frame.number, unreliable=unreliable)
        if not frame.attachments:
            return
        ids = [id for id, _ in frame.attachments]
        for id in ids:
            if id == ENTRYPOINT:
                raise RemoteProtocolError("the entrypoint is attached", rule="aqueduct-T15")
            if creator_of(id) == self._channels.role:
                raise RemoteProtocolError(f"{label(id)} is attached by the other side", rule="aqueduct-T13")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError(f"a channel twice among {len(ids)} attachments", rule="aqueduct-T15")
        self._channels.check_room(sum(map(self._channels.is_new, [*ids, receiver.id or ENTRYPOINT])))

    def deliver(
        self, receiver: ReceiverMachine, frame: MessageFrame, cost: int, loan: int, incoming: Incoming | None
    ) -> None:
        attached = []
        for id, headers in frame.attachments:
            half = self._channels.attach(id, receiver.transit)
            if half is not None:
                attached.append(events.Attachment(half, headers))
        message = events.Arrived(
            receiver, frame.number, frame.payload, frame.headers, tuple(attached), incoming is None, cost
        )
        message.loan, message.incoming = loan, incoming
        if incoming is not None:
            self._channels.crowd.came(receiver)
        self._channels.tell(message)
        if self._channels.observer is not None:
            self._channels.observer.frame("in", label(receiver.id or ENTRYPOINT), "MESSAGE", len(frame.payload))

    def _observe(self, channel: str, frame: object) -> None:
        if self._channels.observer is not None:
            self._channels.observer.frame("in", channel, type(frame).__name__, 0)

    # --- loans for frames larger than a window

    def repay(self, amount: int) -> None:
        self._channels.reassembly.repay(amount)
        self.serve()

    def serve(self) -> None:
        reassembly = self._channels.reassembly
        while (borrower := reassembly.next_waiting()) is not None:
            amount = borrower.to_borrow()
            if not reassembly.serve(borrower, amount):
                return
            borrower.borrowed(amount)
