"""The receiving half of a channel, `ChannelReceiver`: it stores messages until they are consumed, and confirms them.

When a message arrives, an `Arrived` event delivers it to the application. The message also stays in the receiver until
the application has consumed it. If the application closes its receiver and opens another one for the same channel,
`rewind` delivers the unconsumed messages again.

With transactions a message is held back until the peer has decided about it. A commit delivers the message, and the
application has to answer with `committed` or `uncommitted`. A rollback drops the message. The receiver keeps each
answer until the peer is known to have read it, because the answer may have to be repeated on another connection.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.core import NO_QUEUE, Buffer, Ranges, Reason, counted
from muxkit.core.halves import Receiver
from muxkit.protocols.relink import events, frames
from muxkit.protocols.relink.numbers import Run, advance, extend, resolve
from muxkit.protocols.relink.state import ReceiveTable, State

# Shared placeholder for `ChannelReceiver.spans` of channels without transactions. Nothing is ever added to it.
NO_SPANS: Final = Ranges(0)


class ChannelReceiver(Receiver[Any]):
    """One channel that the peer sends on, from its first message until we have confirmed its close with `closed`.

    The first message enters the receiver in `ReceiveTable.live`. If the application wants to receive from a channel
    before the peer has opened it, the receiver is in `ReceiveTable.expected` until then.
    """

    __slots__ = (
        "_again",
        "_told_last",
        "answers",
        "arrived",
        "bytes",
        "channel",
        "close_came",
        "consumed_through",
        "decided",
        "direct",
        "dirty",
        "done",
        "due",
        "ended",
        "kept",
        "known",
        "outcomes",
        "owing",
        "owner",
        "replaying",
        "room",
        "spans",
        "state",
        "table",
        "told_answer",
        "told_consumed",
        "told_received",
        "unacked",
        "undecided",
    )

    def __init__(self, channel: int, state: State) -> None:
        self.owner: object | None = None
        self.state: State = state
        self.table: ReceiveTable = state.theirs
        self.channel: int = channel
        none = state.config.first_sequence - 1
        # Messages pass through stages in the order of their numbers, so one number describes a stage: the last message
        # that has reached the stage. It is `first_sequence - 1` while no message has.
        self.arrived: int = none
        """The last message that has arrived."""
        self.decided: int = none
        """The last message that the peer has committed or rolled back."""
        self.consumed_through: int = none
        """The last message that the application has consumed, or that was dropped after a rollback."""
        self.told_received: int = none
        """The last message for which we have written `received`."""
        self.told_consumed: int = none
        """The last message for which we have written `consumed`."""
        self.told_answer: int = none
        """The last message for which we have written `committed` or `uncommitted`."""
        # The kind of our last answer.
        self._told_last: frames.Operation | frames.Ack | None = None
        # True if the next answer must be written with its number, because it follows a resume.
        self._again = False
        self.kept: deque[frames.Parts | int] = deque()
        """Delivered messages from number `consumed_through + 1` on.

        For a message that was rolled back the entry is an integer: the bytes of the window that the message takes.
        """
        self.undecided: deque[frames.Parts] = deque() if state.in_transactions else NO_QUEUE
        """Messages that the peer has neither committed nor rolled back. They follow those in `kept`."""
        self.room: int = state.config.window
        """How many more messages the peer may send."""
        self.bytes: int = 0
        """Bytes of the window that `kept` and `undecided` take."""
        self.unacked: int = 0
        """Bytes that were consumed since our last `consumed`."""
        self.spans: Ranges = Ranges(sys.maxsize) if state.in_transactions else NO_SPANS
        """Numbers of the committed messages that the application hasn't answered. The window limits how many."""
        self.answers: deque[Run] = deque() if state.in_transactions else NO_QUEUE
        """Answers that are still to be written on this connection."""
        self.outcomes: deque[Run] = deque() if state.in_transactions else NO_QUEUE
        """All answers, written or not, that the peer isn't known to have read."""
        self.direct: bool = True
        """True if the fast paths of `Reader` may store messages here, as far as `room` allows."""
        self.known: bool = True
        """True if the peer may send on this channel and we may acknowledge. On a resumed link, our resume sets it."""
        self.replaying: bool = False
        """True if the peer may repeat decisions, because the link was resumed and no new decision has come since."""
        self.ended: bool = False
        """True once the peer has closed the channel, on any connection."""
        self.close_came: bool = False
        """True once the peer's close has arrived on this connection."""
        self.done: bool = False
        """True once the channel has ended, so that `closed` is to be written."""
        self.due: bool = False
        """True if `received` and `consumed` are to be written now. Otherwise they wait for more of them."""
        self.dirty: bool = False
        """True while the receiver is in `ReceiveTable.dirty`, the queue of receivers with something to write."""
        self.owing: bool = False
        """True while the receiver is in `ReceiveTable.owing`, the list of receivers whose acks wait for the timer."""

    @property
    def label(self) -> str:
        return f"channel {self.channel}"

    @property
    def held(self) -> int:
        return self.bytes

    @property
    def is_open(self) -> bool:
        """True from the channel's first message until its end."""
        return self.table.live.get(self.channel) is self

    def consumed(self, items: Sequence[Any], size: int) -> bool:
        """Do nothing. Applications that use Relink's own channels call `consume`, `committed` or `uncommitted`."""
        return False

    def stop(self, reason: Reason) -> None:
        """Do nothing. Relink has no packet that asks the peer to stop, and another receiver may take the messages."""

    # --- arriving

    def enter(self) -> None:
        """Open the channel when its first message arrives."""
        self.table.expected.pop(self.channel, None)
        self.table.live[self.channel] = self
        self.state.observe_state(f"in {self.channel}", "open")
        self.state.report(events.ChannelOpened(self))

    def came(self, messages: list[frames.Parts], weight: int) -> None:
        """Store complete messages and schedule an acknowledgement.

        `weight` is how many bytes of the window the messages take together.
        """
        table, state, count = self.table, self.state, len(messages)
        over = self.bytes + weight - table.floor
        if over > 0:
            table.held_over += min(over, weight)
        self.bytes += weight
        table.bytes += weight
        state.progress += count
        self.room -= count
        self.arrived += count
        if state.in_transactions:
            self.undecided.extend(messages)
        else:
            self.kept.extend(messages)
            self.give(self.arrived - count + 1, messages)
        if self.arrived - max(self.told_received, self.told_consumed) >= table.ack_count:
            table.make_due(self)
        elif not self.owing:
            table.owe(self)

    def give(self, first: int, messages: list[frames.Parts]) -> None:
        """Report messages, starting with number `first`.

        If the last event reports the messages directly before `first`, these messages are added to that event.
        """
        happened = self.state.events
        last = happened[-1] if happened else None
        if isinstance(last, events.Arrived) and last.receiver is self and last.first + len(last.messages) == first:
            last.messages += messages
        else:
            happened.append(events.Arrived(self, first, messages))

    def rewind(self) -> None:
        """Report all unconsumed messages again, for a new receiver of the application."""
        happened = self.state.events
        happened[:] = [one for one in happened if not (isinstance(one, events.Arrived) and one.receiver is self)]
        for number, parts in enumerate(self.kept, self.consumed_through + 1):
            if not isinstance(parts, int):
                self.give(number, [parts])

    # --- decisions and the close of the sender
    #
    # A packet is checked as a whole before any of it is applied. So `meant` and `check_close` check, and may raise, and
    # `decide` and `close` apply the packet after its other channels were checked, too.

    def meant(self, operation: frames.Operation, sequence: int | None, count: int) -> int | None:
        """Return the message number up to which a decision applies, or None if it repeats the last decision.

        Args:
            operation: The commit or the rollback.
            sequence: The number on the wire. None means that the decision applies to the next message.
            count: How often the packet names this channel.

        Raises:
            RemoteProtocolError: The decision breaks a rule.
        """
        what = f"{operation.name.lower()} on channel {self.channel}"
        if not self.state.in_transactions:
            raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed", rule="relink-K04")
        if sequence is None:
            return advance(what, count, done=self.decided, last=self.arrived)
        behind = self.state.config.window if self.replaying else 0
        number = resolve(what, sequence, done=self.decided, last=self.arrived, behind=behind)
        if number == self.decided:
            if not self.replaying:
                raise RemoteProtocolError(f"{what}: {sequence} was decided before", rule="relink-Q11")
            return None
        return number

    def decide(self, operation: frames.Operation, through: int) -> None:
        """Commit or roll back the undecided messages up to `through`, the number that `meant` returned."""
        first = self.decided + 1
        self.decided = through
        self.replaying = False
        messages = [self.undecided.popleft() for _ in range(through + 1 - first)]
        if operation is frames.Operation.ROLLBACK:
            self.kept.extend(map(self.weigh, messages))
            self.state.report(events.RolledBack(self, through))
            self._pass_rolled_back()
            return
        self.kept.extend(messages)
        self.table.unanswered += not self.spans
        self.spans.add_range(first, through)
        self.give(first, messages)

    def check_close(self, count: int) -> None:
        what = f"close on channel {self.channel}"
        if self.close_came:
            raise RemoteProtocolError(f"{what}, which was closed before", rule="relink-K04")
        if self.undecided:
            left = self.arrived - self.decided
            raise RemoteProtocolError(
                f"{what}: {counted(left, 'message')} neither committed nor rolled back", rule="relink-K02"
            )
        if count > 1:
            raise RemoteProtocolError(f"{what} {count} times", rule="relink-K04")

    def close(self) -> None:
        self.close_came = True
        if not self.ended:  # a peer may repeat on this connection a close that arrived on an earlier one
            self.ended = True
            self.direct = False
            self.state.report(events.Ended(self))
        self.confirm_end()

    # --- what the application does

    def weigh(self, parts: frames.Parts) -> int:
        """Return how many bytes of the window a message takes. Its sender calculates the same number."""
        if len(parts) == 1:
            size = len(parts[0])
            return (self.table.small if size <= frames.SMALL_MOST else self.table.large) + (size + 7 & -8)
        return frames.message_cost(tuple(map(len, parts)), self.state.in_id_size)

    def _check_given(self, through: int) -> None:
        last = self.consumed_through + len(self.kept)
        if through > last:
            raise LocalProtocolError(f"channel {self.channel}: message {through}; {last} is the last that was given")

    def consume(self, through: int, now: float) -> None:
        """Acknowledge the messages up to number `through` as consumed. Does nothing if they were consumed before."""
        self._check_live()
        self.state.now = now
        self._consume(through)

    def committed(self, through: int, now: float) -> None:
        """Answer the messages up to number `through` with `committed`, and consume them."""
        self._answer(frames.Ack.COMMITTED, through, now)

    def uncommitted(self, through: int, now: float) -> None:
        """Answer the messages up to number `through` with `uncommitted`, and consume them."""
        self._answer(frames.Ack.UNCOMMITTED, through, now)

    def _consume(self, through: int) -> None:
        """Remove the delivered messages up to number `through` from the window."""
        count = through - self.consumed_through
        if count <= 0:
            return
        kept, table = self.kept, self.table
        if count > len(kept):
            self._check_given(through)
        weight = 0
        if count == len(kept) and not self.undecided:
            weight = self.bytes
            kept.clear()
        else:
            for _ in repeat(None, count):
                parts = kept.popleft()
                weight += parts if isinstance(parts, int) else self.weigh(parts)
        self.consumed_through = through
        self.room += count
        over = self.bytes - table.floor
        if over > 0:
            table.held_over -= min(over, weight)
        self.bytes -= weight
        self.unacked += weight
        table.bytes -= weight
        if kept and isinstance(kept[0], int):
            self._pass_rolled_back()
        if self.unacked >= table.ack_bytes or self.consumed_through - self.told_consumed >= table.ack_count:
            table.make_due(self)
        elif not self.owing:
            table.owe(self)
            self.state.has_new_deadline = True
        if self.ended:
            self.confirm_end()

    def _pass_rolled_back(self) -> None:
        """Consume the rolled-back messages that directly follow the last consumed message."""
        count = next((index for index, parts in enumerate(self.kept) if not isinstance(parts, int)), len(self.kept))
        self._consume(self.consumed_through + count)

    def _answer(self, ack: frames.Ack, through: int, now: float) -> None:
        """Answer the messages up to number `through`, and consume them."""
        state = self.state
        self._check_live()
        if not state.in_transactions:
            raise LocalProtocolError(f"channel {self.channel} has no transactions")
        self._check_given(through)
        if through not in self.spans:
            raise LocalProtocolError(f"channel {self.channel}: no message {through} waits for an answer")
        state.now = now
        self.spans.discard_below(through + 1)
        self.table.unanswered -= not self.spans
        # The peer has read all answers up to `oldest`. Without these answers its window would have been too full for
        # the messages that have arrived since.
        oldest = self.arrived - state.config.window
        self._forget_outcomes(oldest)
        extend(self.answers, ack, through)
        state.probes.outcomes += extend(self.outcomes, ack, through)
        self.table.touch(self)
        self._consume(through)
        self.confirm_end()

    def _check_live(self) -> None:
        if self.table.live.get(self.channel) is not self:
            raise LocalProtocolError(f"the peer has no channel {self.channel}")

    def _forget_outcomes(self, through: int) -> None:
        """Drop the answers up to number `through`, because the peer has read them."""
        while self.outcomes and self.outcomes[0].through <= through:
            self.outcomes.popleft()
            self.state.probes.outcomes -= 1

    def confirm_end(self) -> None:
        """End the channel if the peer has closed it, all messages are consumed, and the peer has read all answers.

        The answers matter because our resume leaves out a channel that has ended. So the channel must not end while an
        answer may have to be repeated. The close must have arrived on this connection, because a peer that reconnects
        repeats its decisions and its close.
        """
        if self.close_came and not self.done and self.consumed_through == self.arrived and not self.spans:
            self.done = not self.outcomes
            if not self.state.is_connected:
                if self.done:
                    self.table.forget(self)
            elif self.done:
                self.table.touch(self)
            else:
                self.state.probes.end_when_proven(self)

    # --- writing

    def write_acks(self, out: list[Buffer]) -> int:
        """Write the answers, the acknowledgements that are due, and `closed` if the channel has ended."""
        if not self.known:
            return 0
        written = 0
        if self.answers:
            written += self._write_answers(out)
            self.state.probes.prove(self)
        if self.due or self.done:
            self.due = False
            self.unacked = 0
            if self.arrived > max(self.told_received, self.consumed_through):
                written += self._write(
                    frames.Ack.RECEIVED, self.arrived, out, is_next=self.arrived == self.told_received + 1
                )
                self.told_received = self.arrived
            if self.consumed_through > self.told_consumed:
                is_next = self.consumed_through == self.told_consumed + 1
                written += self._write(frames.Ack.CONSUMED, self.consumed_through, out, is_next=is_next)
                self.told_consumed = self.consumed_through
        if self.done:
            self.known = False
            self.table.forget(self)
            written += self._write(frames.Ack.CLOSED, 0, out, is_next=True)
        return written

    def _write_answers(self, out: list[Buffer]) -> int:
        written = 0
        while self.answers:
            run = self.answers.popleft()
            is_next = not self._again and run.through == self.told_answer + 1 and self._told_last in (None, run.kind)
            written += self._write(run.kind, run.through, out, is_next=is_next)
            self.told_answer, self._told_last, self._again = run.through, run.kind, False
        return written

    def _write(self, ack: frames.Operation | frames.Ack, number: int, out: list[Buffer], *, is_next: bool) -> int:
        packet = frames.encode_notice(ack, (self.channel,), self.state.in_id_size, None if is_next else number)
        out.append(packet)
        return len(packet)

    def write_resumption(self, out: list[Buffer]) -> int:
        """Write this channel's part of our resume: `received`, `consumed` and the kept answers, all with numbers."""
        written = self._write(frames.Ack.RECEIVED, self.arrived, out, is_next=False)
        written += self._write(frames.Ack.CONSUMED, self.consumed_through, out, is_next=False)
        self.told_received, self.told_consumed = self.arrived, self.consumed_through
        self.due, self.unacked = False, 0
        self._again = True
        if self.answers:
            self.answers.clear()
        for run in self.outcomes:
            written += self._write(run.kind, run.through, out, is_next=False)
            self.told_answer, self._told_last = run.through, run.kind
        if self.outcomes:
            # If the peer has closed the channel, ping immediately: the pong can then arrive together with the repeated
            # close. Otherwise the channel would end a round trip later.
            (self.state.probes.end_when_proven if self.ended else self.state.probes.prove)(self)
        self.known = True
        self.direct = not self.ended
        return written

    def connect(self) -> None:
        self.known = not self.state.resumes
        self.direct = self.known and not self.ended
        self.replaying = self.state.resumes and self.state.in_transactions
        self.close_came = self.due = self.dirty = self.owing = False

    @property
    def proof(self) -> int:
        """The number up to which the peer must have read all answers when it answers a ping that is written now."""
        return self.told_answer

    def proven(self, through: int) -> None:
        """Record that the peer has read all answers up to number `through`."""
        self.state.probes.ending.pop(self, None)
        self._forget_outcomes(through)
        if self.outcomes:
            self.state.probes.prove(self)
        self.confirm_end()
