"""The receiving half of a channel: which messages have come, and the acks and reports that are owed for them.

A message from a stream is acked `Config.flush_delay` after it came. About datagrams the peer says how many it has sent,
and after `report_delay` this side reports which of them came. The half ends with CLOSE_RECEIVER, once the sender has
finished and every message has come or is reported missing, or when the application wants no more.
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

DATAGRAM_COST: Final = 256  # bytes that a message from a datagram counts in addition to its own
# Consumed bytes that are worth a write of their own. The link sends a grant for half of the smallest window at the
# earliest, so a write for fewer bytes would find nothing to send.
WORTH_A_GRANT: Final = 1024


class EngineReceiver(EngineHalf, Receiver["Arrived"]):
    """The half that receives."""

    __slots__ = ("_consumed", "_counts_on", "_reports", "held", "reliable", "unread", "unread_messages", "unreliable")

    def __init__(self, state: State, id: int | None, transit: Transit, *, oneshot: bool) -> None:
        super().__init__(state, id, transit, oneshot=oneshot)
        self.held: int = 0
        self.reliable: ReliableNumbers = ReliableNumbers(state.config.gaps)
        self.unreliable: UnreliableNumbers = UnreliableNumbers(state.config.gaps)
        self.unread: int = 0
        """What messages from datagrams that weren't consumed cost together."""
        self.unread_messages: int = 0
        """Messages from streams that weren't consumed."""
        self._consumed = 0  # bytes since `consumed` returned True
        self._counts_on: StreamId | None = None  # the stream that brings SENT_UNRELIABLE
        self._reports: deque[tuple[float, float, int]] = NO_QUEUE  # (begun, due, numbers below)

    # --- commands

    def consumed(self, items: Sequence[Arrived], size: int) -> bool:
        may_free_others = False
        for message in items:
            may_free_others |= self._consume(message)
        if may_free_others or not self.unread_messages or self._consumed >= WORTH_A_GRANT:
            self._consumed = 0
            return True
        return False

    def _consume(self, message: Arrived) -> bool:
        """Count a message as taken, harmless the second time; return True if other messages may come because of it."""
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
        self._consumed += cost
        incoming = state.incoming[message.stream]
        incoming.message_consumed(cost, loan)
        if not state.unread_limit.remove(self):
            return incoming.fin
        state.update_time()
        try:
            state.unread_limit.resume(self)
        except RemoteProtocolError as error:
            state.fail_at("what was held back", error)
        return True

    def stop(self, reason: Reason) -> None:
        """Accept no more messages; the half ends immediately. Aqueduct can't say why."""
        if self.id is None:
            self.is_spent = True
        elif self.is_live:
            self.state.update_time()
            self.state.close(self, Outcome.NO_RECEIVER)

    # --- messages

    def check_message(self, number: int, *, unreliable: bool) -> None:
        """Raise `RemoteProtocolError` if no message of this number may come; changes nothing."""
        if self.oneshot:
            another = self.reliable.got.highest is not None if unreliable else self.unreliable.any
            if number or another:
                raise RemoteProtocolError(
                    f"message {number} on a oneshot channel, which carries one", rule="aqueduct-E26"
                )
        if not unreliable:
            self.reliable.check(number)

    def has_room(self, cost: int) -> bool:
        """Return True if a datagram may wait here. Datagrams have no credit, so others count as not received."""
        limits = self.state.limits
        return (
            self.unread + cost <= self.state.short_window
            and self.state.unread_datagrams + cost <= limits.connection_bytes
        )

    def deliver(self, message: Arrived) -> None:
        """Report a message, together with the one before it if that is the newest event and for this half, too."""
        self.held += len(message.payload)
        events = self.state.events
        last = events[-1] if events else None
        if type(last) is Received and last.receiver is self:
            last.items.append(message)
        else:
            events.append(Received(self, [message]))

    # --- counts, reports and the end

    def check_counts(self, count: int, stream: StreamId) -> None:
        """Raise `RemoteProtocolError` if a SENT_UNRELIABLE with this count may not come in this stream."""
        if self._counts_on not in (None, stream):
            raise RemoteProtocolError(
                f"SENT_UNRELIABLE on stream {stream} after stream {self._counts_on}", rule="aqueduct-A12"
            )
        known = self.unreliable.known + count
        if self.oneshot and known + (self.reliable.got.highest is not None) > 1:
            raise RemoteProtocolError(f"{known} datagrams sent on a oneshot channel", rule="aqueduct-E26")

    def count_sent(self, count: int, stream: StreamId) -> float | None:
        """Record that the peer has sent `count` more datagrams; return the time of the first report, if it is new."""
        self._counts_on = stream
        if not count:
            return None
        known = self.unreliable.known = self.unreliable.known + count
        now = self.state.now
        due = now + self.state.report_delay
        was_idle = not self._reports
        if self._reports and now - self._reports[-1][0] < self.state.config.flush_delay:
            # Counts that come shortly after one another are reported together, when the last of them are due.
            begun, _, _ = self._reports.pop()
            self._reports.append((begun, due, known))
        else:
            self._reports = queue_of(self._reports)
            self._reports.append((now, due, known))
        return due if was_idle else None

    def check_finish(self, total: int, stream: StreamId) -> None:
        """Raise `RemoteProtocolError` if a FINISH_SENDER with this total may not come in this stream."""
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
        """Return True if there is something to report by now."""
        while self._reports and self._reports[0][1] <= now:
            self.unreliable.due = self._reports.popleft()[2]
        return self._owes_report

    @property
    def next_report(self) -> float | None:
        """When the next report is due."""
        return self._reports[0][1] if self._reports else None

    @property
    def waiting_reports(self) -> int:
        """How many reports wait until they are due."""
        return len(self._reports)

    @property
    def is_complete(self) -> bool:
        """True once the sender has finished, and every message has come or may be reported now."""
        return self.reliable.is_complete and self.unreliable.due == self.unreliable.known

    # --- the stream

    @property
    def _owes_report(self) -> bool:
        return self.unreliable.due > self.unreliable.reported

    def stream(self) -> OutStream:
        """Return the stream of acks, reports and CLOSE_RECEIVER."""
        if self.main is None:
            main = OutStream([self.route()], source=self, urgent=True)
            self.main: OutStream | None = main
            return main
        return self.main

    def has_frames(self) -> bool:
        return (self.flush and len(self.reliable.owed) > 0) or self._owes_report

    def fill(self, stream: OutStream) -> None:
        if len(self.reliable.owed):
            self.flush: bool = False
            stream.pending.append(frames.encode_frame(frames.AckReliable(self.reliable.take_acks())))
            self.state.frame_written("ACK_RELIABLE", self.id)
        elif self._owes_report:
            field = self.id if self.state.config.channel_field else None
            stream.pending.append(frames.encode_frame(frames.AckNackUnreliable(self.unreliable.take_report(), field)))
            self.state.frame_written("ACK_NACK_UNRELIABLE", self.id)

    def pulled(self, stream: OutStream) -> None:
        """Do nothing: no task waits until acks are written."""

    def write_close(self) -> OutStream | None:
        """Append what is owed and CLOSE_RECEIVER to the stream of the acks, which outlives this half."""
        stream = self.stream()
        if stream.ended:  # the peer stopped it
            return None
        while len(self.reliable.owed) or self._owes_report:
            self.fill(stream)
        stream.pending.append(frames.encode_frame(frames.CloseReceiver()))
        stream.source, stream.fin = None, True
        self.state.frame_written("CLOSE_RECEIVER", self.id)
        return stream
