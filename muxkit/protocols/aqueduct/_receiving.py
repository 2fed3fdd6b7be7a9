"""What came on a channel, and what is owed for it? The receiver's state machine: numbers, acks, reports, the close."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.core import NO_QUEUE, queue_of
from muxkit.protocols.aqueduct._frames import (
    AckNackUnreliable,
    AckReliable,
    CloseReceiver,
    RouteTo,
    encode_frame,
)
from muxkit.protocols.aqueduct._line import OutStream
from muxkit.protocols.aqueduct._numbers import ReliableNumbers, UnreliableNumbers

if TYPE_CHECKING:
    from collections import deque

    from muxkit.core import StreamId
    from muxkit.protocols.aqueduct._channels import Channels
    from muxkit.protocols.aqueduct._events import Outcome
    from muxkit.protocols.aqueduct._incoming import Incoming
    from muxkit.protocols.aqueduct._transit import Transit

DATAGRAM_COST = 256  # bytes that a message from a datagram counts beside its own


class ReceiverMachine:
    """The half that receives. `id` is None until the other half was handed over."""

    def __init__(self, channels: Channels, *, oneshot: bool, id: int | None, transit: Transit) -> None:
        self.id = id
        self.oneshot = oneshot
        self.transit = transit
        self.outcome: Outcome | None = None
        self.attached = False  # the application has it
        self.flush = False  # acks may go
        self.unread = 0  # cost of messages from datagrams that were not consumed
        self.main: OutStream | None = None  # of acks, reports and the close
        self.reliable = ReliableNumbers(channels.config.gaps)
        self.unreliable = UnreliableNumbers(channels.config.gaps)
        self._counts_on: StreamId | None = None  # where SENT_UNRELIABLE comes
        self._reports: deque[tuple[float, float, int]] = NO_QUEUE  # (begun, due, numbers below)
        self.channels = channels
        self.owner: object = None  # what the application has of it
        self.is_told = False  # there was an event about its end
        self.unread_messages = 0  # from streams
        self.held: OrderedDict[Incoming, None] = OrderedDict()  # streams that are not read on

    @property
    def gone(self) -> bool:
        return self.outcome is not None

    # --- messages

    def check_message(self, number: int, *, unreliable: bool) -> None:
        """Raises what is wrong with a message of this number; changes nothing."""
        if self.oneshot:
            another = self.reliable.got.highest is not None if unreliable else self.unreliable.any
            if number or another:
                raise RemoteProtocolError(
                    f"message {number} on a oneshot channel, which carries one", rule="aqueduct-E26"
                )
        if not unreliable:
            self.reliable.check(number)

    def has_room(self, cost: int) -> bool:
        """Datagrams know no credit: one that finds the mailbox full counts as not received."""
        limits = self.channels.limits
        return (
            self.unread + cost <= limits.channel_bytes
            and self.channels.unread_datagrams + cost <= limits.connection_bytes
        )

    # --- counts, reports and the end

    def check_counts(self, count: int, stream: StreamId) -> None:
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"SENT_UNRELIABLE on stream {stream} after stream {self._counts_on}", rule="aqueduct-A12"
            )
        known = self.unreliable.known + count
        if self.oneshot and known + (self.reliable.got.highest is not None) > 1:
            raise RemoteProtocolError(f"{known} datagrams sent on a oneshot channel", rule="aqueduct-E26")

    def sent_unreliable(self, count: int, stream: StreamId) -> None:
        """The peer has sent so many more datagrams."""
        self._counts_on = stream
        if not count:
            return
        known = self.unreliable.known = self.unreliable.known + count
        channels = self.channels
        now, due = channels.now, channels.now + channels.report_delay
        if not self._reports:
            channels.timers.report_at(due, self)
        if self._reports and now - self._reports[-1][0] < channels.config.flush_delay:
            # Those that are learned of shortly after one another are reported together, when the last are due.
            begun, _, _ = self._reports.pop()
            self._reports.append((begun, due, known))
        else:
            self._reports = queue_of(self._reports)
            self._reports.append((now, due, known))

    def check_finish(self, total: int, stream: StreamId) -> None:
        if self.reliable.total is not None:
            raise RemoteProtocolError("FINISH_SENDER a second time", rule="aqueduct-S12")
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"FINISH_SENDER on stream {stream}, SENT_UNRELIABLE on stream {self._counts_on}", rule="aqueduct-S11"
            )
        if self.oneshot and total > 1:
            raise RemoteProtocolError(f"finished with {total} messages on a oneshot channel", rule="aqueduct-E26")
        self.reliable.check_total(total)

    def report_due(self, now: float) -> bool:
        """Is there something to report by now?"""
        while self._reports and self._reports[0][1] <= now:
            self.unreliable.due = self._reports.popleft()[2]
        return self.unreliable.due > self.unreliable.reported

    @property
    def next_report(self) -> float | None:
        return self._reports[0][1] if self._reports else None

    @property
    def is_complete(self) -> bool:
        """Has the sender finished, and has everything come or been reported, or may be now?"""
        return self.reliable.is_complete and self.unreliable.due == self.unreliable.known

    # --- the stream

    def stream(self) -> OutStream:
        if self.main is None:
            assert self.id is not None  # nothing is owed before the hand-over
            self.main = OutStream(encode_frame(RouteTo(self.id)), source=self, urgent=True)
        return self.main

    def has_frames(self) -> bool:
        return (self.flush and len(self.reliable.owed) > 0) or self.unreliable.due > self.unreliable.reported

    def fill(self, stream: OutStream) -> None:
        if len(self.reliable.owed):
            self.flush = False
            stream.pending.append(encode_frame(AckReliable(self.reliable.take_acks())))
            self.channels.wrote("ACK_RELIABLE", self.id)
        elif self.unreliable.due > self.unreliable.reported:
            field = self.id if self.channels.config.channel_field else None
            stream.pending.append(encode_frame(AckNackUnreliable(self.unreliable.take_report(), field)))
            self.channels.wrote("ACK_NACK_UNRELIABLE", self.id)

    def pulled(self, stream: OutStream) -> None: ...

    def close(self) -> OutStream | None:
        """What is owed and then the close, on the stream of the acks; it goes on when this half is gone."""
        stream = self.stream()
        if stream.ended:  # the peer did not want to hear of it
            return None
        while len(self.reliable.owed) or self.unreliable.due > self.unreliable.reported:
            self.fill(stream)
        stream.pending.append(encode_frame(CloseReceiver()))
        stream.source, stream.fin = None, True
        self.channels.wrote("CLOSE_RECEIVER", self.id)
        return stream
