"""The receiving half of a channel: which messages have arrived, and the acks for them.

A message from a stream is acked `Config.flush_delay` seconds after it has arrived, or earlier, together with a message
of this side (`State.flush_early`). For datagrams, the peer announces how many it has sent (SENT_UNRELIABLE), and after
`State.report_delay` this side reports which of them have arrived. The half ends with CLOSE_RECEIVER, when the sender
has finished and all messages have arrived or were reported as missing, or when the application doesn't want more
messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import NO_QUEUE, Reason, StreamId, queue_of
from muxkit.core.events import Received
from muxkit.core.halves import Receiver
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.numbers import ReliableNumbers, UnreliableNumbers
from muxkit.protocols.aqueduct.streams import OutStream
from muxkit.protocols.aqueduct.transit import Transit

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.events import Arrived
    from muxkit.protocols.aqueduct.state import State

DATAGRAM_COST: Final = 256  # bytes that a message from a datagram counts in addition to its payload


class EngineReceiver(EngineHalf, Receiver["Arrived"]):
    """The receiving half of a channel."""

    __slots__ = ("_counts_on", "_reports", "held", "reliable", "unread", "unread_messages", "unreliable")

    def __init__(self, state: State, id: int | None, transit: Transit, *, oneshot: bool) -> None:
        super().__init__(state, id, transit, oneshot=oneshot)
        self.held: int = 0
        self.reliable: ReliableNumbers = ReliableNumbers(state.config.gaps)
        self.unreliable: UnreliableNumbers = UnreliableNumbers(state.config.gaps)
        self.unread: int = 0
        """The bytes that unconsumed messages from datagrams count, including `DATAGRAM_COST` for each."""
        self.unread_messages: int = 0
        """The number of unconsumed messages from streams."""
        self._counts_on: StreamId | None = None  # the stream on which the peer sends SENT_UNRELIABLE
        # The reports about datagrams that aren't due yet: when we began to collect them, when they are due, and the
        # message number up to which they report.
        self._reports: deque[tuple[float, float, int]] = NO_QUEUE

    # --- commands

    def consumed(self, items: Sequence[Arrived], size: int) -> bool:
        is_due = False
        for message in items:
            is_due |= self._consume(message)
        return is_due

    def _consume(self, message: Arrived) -> bool:
        """Count a message as consumed, unless it was counted before. Return True if there is something to do now."""
        cost, loan = message.cost, message.loan
        if not cost:
            return False
        message.cost = message.loan = 0
        self.held -= len(message.payload)
        state = self.state
        if state.over:
            return False
        if message.stream is None:
            self.unread -= cost
            state.unread_datagrams -= cost
            return False
        is_due = state.incoming[message.stream].message_consumed(cost, loan)
        if not state.unread_limit.remove(self):
            return is_due
        state.update_time()
        try:
            state.unread_limit.resume(self)
        except RemoteProtocolError as error:
            state.fail_at("what was held back", error)
        return True

    def stop(self, reason: Reason) -> None:
        """Accept no more messages. The half ends immediately. Aqueduct can't transmit the reason."""
        if self.id is None:
            self.is_spent = True
        elif self.is_live:
            self.state.update_time()
            self.state.close(self, Outcome.NO_RECEIVER)

    # --- messages

    def check_message(self, number: int, *, unreliable: bool) -> None:
        """Raise `RemoteProtocolError` if the peer may not send a message with this number. This changes nothing."""
        if self.oneshot:
            another = self.reliable.got.highest is not None if unreliable else self.unreliable.any
            if number or another:
                raise RemoteProtocolError(
                    f"message {number} on a oneshot channel, which carries one", rule="aqueduct-E26"
                )
        if not unreliable:
            self.reliable.check(number)

    def has_room(self, cost: int) -> bool:
        """Return True if there is room to keep the message of a datagram for the application.

        The peer needs no credit for datagrams, so one for which there is no room is treated as lost.
        """
        limits = self.state.limits
        return (
            self.unread + cost <= self.state.short_window
            and self.state.unread_datagrams + cost <= limits.connection_bytes
        )

    def deliver(self, messages: list[Arrived], size: int) -> None:
        """Report messages with `size` bytes. If the newest event is also for this half, they are added to that event.

        The list belongs to the event from now on.
        """
        self.held += size
        events = self.state.events
        last = events[-1] if events else None
        if type(last) is Received and last.receiver is self:
            last.items += messages
        else:
            events.append(Received(self, messages))

    # --- counts, reports and the end

    def check_counts(self, count: int, stream: StreamId) -> None:
        """Raise `RemoteProtocolError` if the peer may not send SENT_UNRELIABLE with this count in this stream."""
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"SENT_UNRELIABLE on stream {stream} after stream {self._counts_on}", rule="aqueduct-A12"
            )
        known = self.unreliable.known + count
        if self.oneshot and known + (self.reliable.got.highest is not None) > 1:
            raise RemoteProtocolError(f"{known} datagrams sent on a oneshot channel", rule="aqueduct-E26")

    def count_sent(self, count: int, stream: StreamId) -> float | None:
        """Record that the peer has sent `count` more datagrams.

        Returns the time when the report is due, or None if the time of the next report hasn't changed.
        """
        self._counts_on = stream
        if not count:
            return None
        known = self.unreliable.known = self.unreliable.known + count
        now = self.state.now
        due = now + self.state.report_delay
        was_idle = not self._reports
        if self._reports and now - self._reports[-1][0] < self.state.config.flush_delay:
            # Combine this report with one that has begun shortly before.
            begun, _, _ = self._reports.pop()
            self._reports.append((begun, due, known))
        else:
            self._reports = queue_of(self._reports)
            self._reports.append((now, due, known))
        return due if was_idle else None

    def check_finish(self, total: int, stream: StreamId) -> None:
        """Raise `RemoteProtocolError` if the peer may not send FINISH_SENDER with this total in this stream."""
        if self.reliable.total is not None:
            raise RemoteProtocolError("FINISH_SENDER a second time", rule="aqueduct-S12")
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"FINISH_SENDER on stream {stream}, SENT_UNRELIABLE on stream {self._counts_on}", rule="aqueduct-S11"
            )
        if self.oneshot and total > 1:
            raise RemoteProtocolError(f"finished with {total} messages on a oneshot channel", rule="aqueduct-E26")
        highest = self.reliable.got.highest
        if highest is not None and highest >= total:
            raise RemoteProtocolError(
                f"finished with {total} messages, but message {highest} came", rule="aqueduct-S08"
            )

    def report_due(self, now: float) -> bool:
        """Return True if a report is due."""
        while self._reports and self._reports[0][1] <= now:
            self.unreliable.due = self._reports.popleft()[2]
        return self._has_report

    @property
    def next_report(self) -> float | None:
        """The time when the next report is due, or None if none is waiting."""
        return self._reports[0][1] if self._reports else None

    @property
    def waiting_reports(self) -> int:
        """The number of reports that aren't due yet."""
        return len(self._reports)

    @property
    def is_complete(self) -> bool:
        """True once the sender has finished, and every message has arrived or may be reported as missing now."""
        return self.reliable.is_complete and self.unreliable.due == self.unreliable.known

    # --- the stream

    @property
    def _has_report(self) -> bool:
        return self.unreliable.due > self.unreliable.reported

    def stream(self) -> OutStream:
        """Return the stream for acks, reports and CLOSE_RECEIVER, and create it if necessary."""
        if self.main is None:
            main = OutStream([self.route()], source=self, urgent=True)
            self.main: OutStream | None = main
            return main
        return self.main

    def has_frames(self) -> bool:
        return (self.flush and len(self.reliable.owed) > 0) or self.unreliable.due > self.unreliable.reported

    def fill(self, stream: OutStream, room: int) -> None:
        if len(self.reliable.owed):
            self.flush: bool = False
            stream.pending.append(frames.encode_acks(self.reliable.take_acks()))
            self.state.frame_written("ACK_RELIABLE", self.id)
        elif self._has_report:
            field = self.id if self.state.config.channel_field else None
            stream.pending.append(frames.encode_frame(frames.AckNackUnreliable(self.unreliable.take_report(), field)))
            self.state.frame_written("ACK_NACK_UNRELIABLE", self.id)

    def pulled(self, stream: OutStream) -> None:
        """Do nothing, because no task waits until acks are written."""

    def write_close(self) -> OutStream | None:
        """Append the remaining acks and reports, and CLOSE_RECEIVER, to the stream, which outlives this half.

        Returns the stream, or None if the peer has stopped it.
        """
        stream = self.stream()
        if stream.ended:
            return None
        while len(self.reliable.owed) or self._has_report:
            self.fill(stream, 1)
        stream.pending.append(frames.encode_frame(frames.CloseReceiver()))
        stream.source, stream.fin = None, True
        self.state.frame_written("CLOSE_RECEIVER", self.id)
        return stream
