"""What does a datagram bring? A whole sequence, with messages in their own space of numbers and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.aqueduct._frames import (
    CONNECTION_TAGS,
    TAG_VERSION,
    AckNackUnreliable,
    AckReliable,
    CancelSender,
    CloseReceiver,
    FinishSender,
    ForgetChannel,
    MessageFrame,
    RouteTo,
    SentUnreliable,
    parse_frame,
)
from muxkit.protocols.aqueduct._receiving import DATAGRAM_COST, ReceiverMachine

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct._channels import Channels
    from muxkit.protocols.aqueduct._dispatch import Dispatch

# These belong in a stream, by these rules.
IN_STREAMS: Final[dict[type[object], str]] = {
    SentUnreliable: "aqueduct-S09",
    FinishSender: "aqueduct-S10",
    CancelSender: "aqueduct-S13",
    AckReliable: "aqueduct-A01",
    AckNackUnreliable: "aqueduct-A08",
    CloseReceiver: "aqueduct-L11",
    ForgetChannel: "aqueduct-L02",
}


class Datagrams:
    """Obeys the datagrams of one peer."""

    def __init__(self, channels: Channels, dispatch: Dispatch) -> None:
        self.dropped = 0  # repeated, too early, or without room
        self._channels = channels
        self._dispatch = dispatch
        self._early: list[bytes] = []
        self._early_size = 0

    def feed(self, data: bytes) -> None:
        """A whole sequence; kept for later until the connection headers have come."""
        if data and data[0] != TAG_VERSION and not self._dispatch.sent_ack_version:
            raise RemoteProtocolError(
                f"a datagram begins with {data[0]:#04x} before any VERSION came", rule="aqueduct-V06", offset=0
            )
        cursor = Cursor(data)
        channel: int | None = None
        self._head(cursor)
        while cursor.remaining:
            if not self._dispatch.is_open:
                self._keep_early(data)
                return
            start = cursor.position
            frame = self._next(cursor)
            try:
                if channel is None:
                    channel = self._route(frame)
                    if channel is None:
                        return
                elif not self._channel_frame(frame, channel, cursor.position - start):
                    return
            except RemoteProtocolError as error:
                error.offset = start
                raise

    def _head(self, cursor: Cursor) -> None:
        """The frames of the connection, which do not wait."""
        while cursor.remaining and cursor.data[cursor.position] in CONNECTION_TAGS:
            start = cursor.position
            frame = self._next(cursor)
            try:
                self._dispatch.connection_frame(frame, on_stream=False)
            except RemoteProtocolError as error:
                error.offset = start
                raise

    def _next(self, cursor: Cursor) -> object:
        start = cursor.position
        try:
            frame = parse_frame(cursor, self._dispatch.bounds)
        except NeedMore as need:
            raise RemoteProtocolError(
                f"a datagram ends at least {need.missing} bytes before its frame", rule="aqueduct-F09", offset=start
            ) from None
        except RemoteProtocolError as error:
            error.offset = start
            raise
        self._dispatch.frames += 1
        return frame

    def _route(self, frame: object) -> int | None:
        self._dispatch.check_place(frame)
        assert isinstance(frame, RouteTo)  # nothing else is left
        known, _ = self._dispatch.route(frame.channel)
        return frame.channel if known else None

    def _channel_frame(self, frame: object, channel: int, size: int) -> bool:
        """A frame after ROUTE_TO; False if the rest is to be ignored."""
        self._dispatch.check_direction(channel, frame)
        rule = IN_STREAMS.get(type(frame))
        if rule is not None:
            raise RemoteProtocolError(f"{type(frame).__name__} in a datagram", rule=rule)
        assert isinstance(frame, MessageFrame)  # nothing else is left
        receiver = self._dispatch.half(channel)
        if not isinstance(receiver, ReceiverMachine):
            return False
        self._dispatch.check_message(receiver, frame, unreliable=True)
        if channel not in self._channels.table:
            self._dispatch.adopt(receiver)
            self._channels.timers.stray(receiver)
        cost = size + DATAGRAM_COST
        finished = receiver.reliable.total is not None
        is_beyond = finished and frame.number >= receiver.unreliable.known
        # A repeated datagram may bring back a channel that is long over. What it carries must not come back as well.
        is_doubtful = bool(frame.attachments) and not receiver.attached
        if is_beyond or is_doubtful or not receiver.has_room(cost) or not receiver.unreliable.arrived(frame.number):
            self.dropped += 1
            return True
        receiver.unread += cost
        self._channels.unread_datagrams += cost
        self._dispatch.deliver(receiver, frame, cost, 0, None)
        return True

    def _keep_early(self, data: bytes) -> None:
        cost = len(data) + DATAGRAM_COST
        if self._early_size + cost > self._channels.config.early_bytes:
            self.dropped += 1
            return
        self._early_size += cost
        self._early.append(data)

    def take_early(self) -> list[bytes]:
        """Those that were kept; they may be fed now."""
        early, self._early = self._early, []
        self._early_size = 0
        return early
